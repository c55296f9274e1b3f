"""Tensor names for people to read."""

import re
from collections.abc import Iterable

__all__ = ["grouped"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def grouped(names: Iterable[str]) -> list[str]:
    """Write the tensors of all layers as one: ``model.layers.*.bias (32 layers)``."""
    layers: dict[str, set[str]] = {}
    for name in names:
        layers.setdefault(_NUMBER.sub("*", name), set()).update(_NUMBER.findall(name)[:1])
    return [
        f"{group} ({len(found)} layer{'s' * (len(found) > 1)})" if found else group
        for group, found in layers.items()
    ]
