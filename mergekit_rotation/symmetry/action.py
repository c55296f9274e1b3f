"""How an element of a symmetry group acts on stored tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mergekit_rotation.symmetry.axes import Pattern, Piece


@dataclass(frozen=True, eq=False)
class Permute:
    """Reorder an axis: new position i holds what was at ``index[..., i]``.

    ``index`` is int64 of shape (n,), or (per, n) when the axis is permuted separately for each
    entry of the axis ``per``.
    """

    axis: str
    index: torch.Tensor
    per: str | None = None

    def inverse(self) -> "Permute":
        return Permute(self.axis, torch.argsort(self.index, dim=-1), self.per)

    def __call__(self, piece: Piece) -> Piece:
        dim = piece.dim(self.axis)
        if dim is None:
            return piece
        x = piece.tensor
        index = self.index.to(x.device)
        if self.per is None:
            return Piece(piece.axes, x.index_select(dim, index))
        per = piece.dim(self.per)
        assert per is not None
        front = x.movedim((per, dim), (0, 1))
        rows = torch.arange(front.shape[0], device=x.device)[:, None]
        return Piece(piece.axes, front[rows, index].movedim((0, 1), (per, dim)))


@dataclass(frozen=True, eq=False)
class Rotate:
    """Multiply an axis by an orthogonal matrix of shape (per, d, d) for each entry of ``per``."""

    axis: str
    matrix: torch.Tensor
    per: str

    def inverse(self) -> "Rotate":
        return Rotate(self.axis, self.matrix.mT, self.per)

    def __call__(self, piece: Piece) -> Piece:
        dim, per = piece.dim(self.axis), piece.dim(self.per)
        if dim is None or per is None:
            return piece
        matrix = self.matrix.to(device=piece.tensor.device, dtype=piece.tensor.dtype)
        # Letters: p = per, y = rotated axis in, x = rotated axis out, the rest by position.
        source = [chr(ord("A") + k) for k in range(len(piece.axes))]
        source[per], source[dim] = "p", "y"
        target = ["x" if letter == "y" else letter for letter in source]
        rule = f"pxy,{''.join(source)}->{''.join(target)}"
        return Piece(piece.axes, torch.einsum(rule, matrix, piece.tensor))


@dataclass(frozen=True, eq=False)
class Sign:
    """Multiply the signed legs (``~axis``) of an axis by +1 or -1.

    ``sign`` has shape (n,), or (per, n) when it differs for each entry of the axis ``per``.
    """

    axis: str
    sign: torch.Tensor
    per: str | None = None

    def inverse(self) -> "Sign":
        return self

    def __call__(self, piece: Piece) -> Piece:
        if "~" + self.axis not in piece.axes:
            return piece
        dim = piece.axes.index("~" + self.axis)
        sign = self.sign.to(device=piece.tensor.device, dtype=piece.tensor.dtype)
        if self.per is not None:
            per = piece.dim(self.per)
            assert per is not None
            sign = sign if per < dim else sign.mT
            shape = [n if k in (per, dim) else 1 for k, n in enumerate(piece.tensor.shape)]
        else:
            shape = [-1 if k == dim else 1 for k in range(len(piece.axes))]
        return Piece(piece.axes, piece.tensor * sign.reshape(shape))


Element = Permute | Rotate | Sign

#: Elements in the order in which they are applied; composition is concatenation.
Transformation = tuple[Element, ...]


def inverse(transformation: Transformation) -> Transformation:
    """Return the transformation that undoes another."""
    return tuple(element.inverse() for element in reversed(transformation))


def moves(transformation: Transformation, pattern: Pattern) -> bool:
    """Tell whether a transformation touches a tensor of this pattern at all."""
    return any(
        pattern.signed(element.axis) if isinstance(element, Sign) else element.axis in pattern.axes
        for element in transformation
    )


def act(
    transformation: Transformation,
    tensor: torch.Tensor,
    pattern: Pattern,
    sizes: Mapping[str, int],
) -> torch.Tensor:
    """Apply a transformation to one stored tensor.

    For orthogonal groups the covariant and the contravariant action coincide, so every leg of an
    axis is multiplied by the same matrix: there is no distinction of inputs and outputs.
    The function is pure and differentiable in the tensor and in the matrices.

    Parameters
    ----------
    transformation : tuple of elements
    tensor : Tensor
        Shape ``pattern.shape(sizes)``; the result has its dtype and device.
    pattern : Pattern
    sizes : mapping of axis name to int

    Raises
    ------
    PatternError
        If the tensor does not have the shape of its pattern.
    """
    if not moves(transformation, pattern):
        return tensor
    pieces = pattern.split(tensor, sizes)
    for element in transformation:
        pieces = [element(piece) for piece in pieces]
    return pattern.join([piece.tensor for piece in pieces], sizes)
