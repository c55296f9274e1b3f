"""Axis patterns: which named axes a stored tensor is made of.

A pattern names, for each dimension of a tensor, the axes whose product it is (row-major)::

    (kv g qk) e                            separate query projection, [out, in]
    [(kv g qk) | (kv qk) | (kv vo)] e      fused projection, three blocks of rows
    (kv [qk | qk | vo]) e                  fused projection, interleaved per head
    [f | ~f] e                             fused gate and up projection

``[a | b]`` is a concatenation. ``~f`` is the axis ``f`` on a leg that also takes the sign of a
signed permutation of ``f``; plain ``f`` takes the permutation alone. ``qk^1`` and ``qk^-1`` are
legs that an invertible map A of the axis ``qk`` multiplies by A and by its inverse transposed;
``f^1``, ``f^-1`` and ``f^-2`` are legs that a positive factor per neuron multiplies by that power
of itself. A leg without an exponent is left alone by such maps.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod

import torch

from mergekit_rotation.symmetry.errors import PatternError

_TOKEN = re.compile(r"\s*(~?[a-z][a-z0-9_]*(?:\^-?[1-9])?|[()\[\]|])")

Names = tuple[str, ...]


@dataclass(frozen=True)
class Concat:
    """Alternatives laid one after the other along one dimension."""

    parts: tuple[Names, ...]


Factor = str | Concat


@dataclass(frozen=True)
class Piece:
    """A view of (a part of) a tensor with one named axis per dimension, and their exponents."""

    axes: Names
    tensor: torch.Tensor
    powers: Mapping[str, int] = field(default_factory=dict)

    def dim(self, axis: str) -> int | None:
        """Return the dimension that carries ``axis`` (signed or not), or None."""
        for position, name in enumerate(self.axes):
            if base_axis(name) == axis:
                return position
        return None


def base_axis(name: str) -> str:
    """Return the axis name without its sign mark and its exponent."""
    return unscaled(name).removeprefix("~")


def unscaled(name: str) -> str:
    """Return the axis name without its exponent."""
    return name.partition("^")[0]


@dataclass(frozen=True)
class Pattern:
    """The axes of one stored tensor.

    Parameters
    ----------
    text : str
        The pattern as written in a data file.
    dims : tuple of tuple of (str or Concat)
        Factors of every dimension, outermost first. At most one factor is a `Concat`.
    """

    text: str
    dims: tuple[tuple[Factor, ...], ...]

    @staticmethod
    @cache
    def parse(text: str) -> "Pattern":
        """Read a pattern.

        Raises
        ------
        PatternError
            If the text is not a pattern, holds more than one concatenation, or names an axis
            twice in one piece.
        """
        dims = _Parser(text).dims()
        if sum(isinstance(f, Concat) for dim in dims for f in dim) > 1:
            raise PatternError(f"pattern {text!r} has more than one concatenation")
        pattern = Pattern(text, dims)
        for axes in pattern.pieces:
            names = [base_axis(name) for name in axes]
            if len(set(names)) != len(names):
                raise PatternError(f"pattern {text!r} names an axis twice")
        return pattern

    @property
    def pieces(self) -> list[Names]:
        """Names of the axes of each piece, sign marks included, as `split` gives them."""
        return [tuple(map(unscaled, names)) for names in self._marked]

    @property
    def powers(self) -> list[dict[str, int]]:
        """Exponents of the axes of each piece that have one, by axis."""
        return [
            {base_axis(name): int(name.partition("^")[2]) for name in names if "^" in name}
            for names in self._marked
        ]

    @property
    def _marked(self) -> list[Names]:
        """Names of the axes of each piece as they are written."""
        factors = [factor for dim in self.dims for factor in dim]
        lengths = [len(f.parts) for f in factors if isinstance(f, Concat)]
        return [
            tuple(
                name
                for factor in factors
                for name in (factor.parts[k] if isinstance(factor, Concat) else (factor,))
            )
            for k in range(lengths[0] if lengths else 1)
        ]

    @property
    def axes(self) -> frozenset[str]:
        """Names of all axes, without sign marks."""
        return frozenset(base_axis(name) for axes in self.pieces for name in axes)

    def dim_of(self, axis: str) -> int | None:
        """Return the dimension of the tensor that is this axis alone, or None."""
        for position, factors in enumerate(self.dims):
            if len(factors) == 1 and isinstance(factors[0], str) and base_axis(factors[0]) == axis:
                return position
        return None

    def signed(self, axis: str) -> bool:
        """Tell whether the pattern carries the sign of an axis."""
        return any("~" + axis in axes for axes in self.pieces)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape that a tensor of this pattern has for the given axis sizes."""
        return tuple(prod(_extent(factor, sizes) for factor in dim) for dim in self.dims)

    def split(self, tensor: torch.Tensor, sizes: Mapping[str, int]) -> list[Piece]:
        """View a tensor as pieces with one dimension per named axis.

        Raises
        ------
        PatternError
            If the tensor does not have the shape that the sizes demand.
        """
        expected = self.shape(sizes)
        if tuple(tensor.shape) != expected:
            raise PatternError(f"shape {tuple(tensor.shape)} where {expected} is expected")
        factors = [factor for dim in self.dims for factor in dim]
        full = tensor.reshape([_extent(factor, sizes) for factor in factors])
        for position, factor in enumerate(factors):
            if isinstance(factor, Concat):
                views = _split_at(full, position, factor, sizes)
                break
        else:
            views = [full]
        return [Piece(*one) for one in zip(self.pieces, views, self.powers, strict=True)]

    def join(self, pieces: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> torch.Tensor:
        """Undo `split`: put tensors shaped like its pieces together again."""
        factors = [factor for dim in self.dims for factor in dim]
        for position, factor in enumerate(factors):
            if isinstance(factor, Concat):
                flat = [
                    piece.flatten(position, position + len(part) - 1)
                    for piece, part in zip(pieces, factor.parts, strict=True)
                ]
                return torch.cat(flat, dim=position).reshape(self.shape(sizes))
        (piece,) = pieces
        return piece.reshape(self.shape(sizes))


def _extent(factor: Factor, sizes: Mapping[str, int]) -> int:
    if isinstance(factor, Concat):
        return sum(prod(sizes[base_axis(name)] for name in part) for part in factor.parts)
    return sizes[base_axis(factor)]


def _split_at(
    full: torch.Tensor, position: int, concat: Concat, sizes: Mapping[str, int]
) -> list[torch.Tensor]:
    extents = [[sizes[base_axis(name)] for name in part] for part in concat.parts]
    views = full.split([prod(extent) for extent in extents], dim=position)
    return [view.unflatten(position, extent) for view, extent in zip(views, extents, strict=True)]


class _Parser:
    """Recursive descent over ``dims``, ``( factors )`` and ``[ part | part ]``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = _TOKEN.findall(text)
        if "".join(self.tokens) != re.sub(r"\s", "", text) or not self.tokens:
            raise PatternError(f"cannot read axis pattern {text!r}")

    def dims(self) -> tuple[tuple[Factor, ...], ...]:
        result = []
        while self.tokens:
            result.append(self._product() if self.tokens[0] == "(" else (self._factor(),))
        return tuple(result)

    def _take(self, expected: str | None = None) -> str:
        if not self.tokens or (expected is not None and self.tokens[0] != expected):
            raise PatternError(f"cannot read axis pattern {self.text!r}: {expected} missing")
        return self.tokens.pop(0)

    def _product(self) -> tuple[Factor, ...]:
        self._take("(")
        factors: list[Factor] = []
        while self.tokens and self.tokens[0] != ")":
            factors.append(self._factor())
        self._take(")")
        if not factors:
            raise PatternError(f"cannot read axis pattern {self.text!r}: empty brackets")
        return tuple(factors)

    def _factor(self) -> Factor:
        token = self._take()
        if token == "[":
            return self._concat()
        if token in "()]|":
            raise PatternError(f"cannot read axis pattern {self.text!r}: stray {token!r}")
        return token

    def _concat(self) -> Concat:
        parts = [self._part()]
        while self.tokens and self.tokens[0] == "|":
            self._take("|")
            parts.append(self._part())
        self._take("]")
        return Concat(tuple(parts))

    def _part(self) -> Names:
        factors = self._product() if self.tokens[:1] == ["("] else (self._factor(),)
        if not all(isinstance(factor, str) for factor in factors):
            raise PatternError(f"pattern {self.text!r} nests concatenations")
        return tuple(str(factor) for factor in factors)
