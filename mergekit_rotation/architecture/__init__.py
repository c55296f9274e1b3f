"""Architectures as data: which symmetries a family of transformers has, and where they live.

One JSON file per family under ``data/``; `Family` reads it and `Family.layer` turns it into the
layouts of `mergekit_rotation.symmetry` for one model configuration. A user's own files come from
`own_families`. This package imports the symmetry package and pydantic, never mergekit.
"""

from mergekit_rotation.architecture.family import (
    LAYER,
    Conditions,
    Family,
    LayoutError,
    all_families,
    find_family,
    holds,
    supported,
)
from mergekit_rotation.architecture.names import grouped
from mergekit_rotation.architecture.own import (
    VARIABLE,
    DeclarationError,
    own_families,
    read_families,
    read_family,
)
from mergekit_rotation.architecture.parts import Block, Declared, Layer, Stream

__all__ = [
    "LAYER",
    "VARIABLE",
    "Block",
    "Conditions",
    "DeclarationError",
    "Declared",
    "Family",
    "Layer",
    "LayoutError",
    "Stream",
    "all_families",
    "find_family",
    "grouped",
    "holds",
    "own_families",
    "read_families",
    "read_family",
    "supported",
]
