"""Architectures as data: which symmetries a family of transformers has, and where they live.

One JSON file per family under ``data/``; `Family` reads it and `Family.layer` turns it into the
layouts of `mergekit_rotation.symmetry` for one model configuration. This package imports the
symmetry package and pydantic, never mergekit.
"""

from mergekit_rotation.architecture.family import (
    Block,
    Declared,
    Family,
    Layer,
    LayoutError,
    Stream,
    all_families,
    find_family,
    supported,
)

__all__ = [
    "Block",
    "Declared",
    "Family",
    "Layer",
    "LayoutError",
    "Stream",
    "all_families",
    "find_family",
    "supported",
]
