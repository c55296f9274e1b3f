"""How an element of a symmetry group acts on stored tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mergekit_rotation.symmetry.axes import Pattern, Piece


@dataclass(frozen=True, eq=False)
class Permute:
    """Reorder an axis: new position i holds what was at ``index[..., i]``.

    ``index`` is int64 of shape (n,), or (per, n) when the axis is permuted separately for each
    entry of the axis ``per``. Where the order was chosen as the best one, ``gap`` is the share of
    the best sum of scores that it is certified to miss at most; None where nothing certifies that.
    """

    axis: str
    index: torch.Tensor
    per: str | None = None
    gap: float | None = None

    def inverse(self) -> "Permute":
        return Permute(self.axis, torch.argsort(self.index, dim=-1), self.per, self.gap)

    def __call__(self, piece: Piece) -> Piece:
        dim = piece.dim(self.axis)
        if dim is None:
            return piece
        x = piece.tensor
        index = self.index.to(x.device)
        if self.per is None:
            return replace(piece, tensor=x.index_select(dim, index))
        per = piece.dim(self.per)
        assert per is not None
        front = x.movedim((per, dim), (0, 1))
        rows = torch.arange(front.shape[0], device=x.device)[:, None]
        return replace(piece, tensor=front[rows, index].movedim((0, 1), (per, dim)))


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
        return replace(piece, tensor=_along(piece.tensor, dim, per, self.matrix))


@dataclass(frozen=True, eq=False)
class Linear:
    """Multiply the legs ``axis^1`` by an invertible matrix A, and ``axis^-1`` by A^-T.

    ``matrix`` holds A and ``dual`` its inverse transposed, (per, d, d) each, so that nothing is
    inverted when the element is applied or undone.
    """

    axis: str
    matrix: torch.Tensor
    dual: torch.Tensor
    per: str

    def inverse(self) -> "Linear":
        return Linear(self.axis, self.dual.mT, self.matrix.mT, self.per)

    def __call__(self, piece: Piece) -> Piece:
        power, dim, per = piece.powers.get(self.axis), piece.dim(self.axis), piece.dim(self.per)
        if power is None or dim is None or per is None:
            return piece
        matrix = self.matrix if power > 0 else self.dual
        return replace(piece, tensor=_along(piece.tensor, dim, per, matrix))


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
        return replace(piece, tensor=_entrywise(piece, self.axis, self.per, self.sign))


@dataclass(frozen=True, eq=False)
class Scale:
    """Multiply the legs ``axis^k`` by the k-th power of positive factors.

    ``factor`` has shape (n,), or (per, n) when it differs for each entry of the axis ``per``.
    """

    axis: str
    factor: torch.Tensor
    per: str | None = None

    def inverse(self) -> "Scale":
        return Scale(self.axis, 1 / self.factor, self.per)

    def __call__(self, piece: Piece) -> Piece:
        power = piece.powers.get(self.axis)
        if power is None:
            return piece
        return replace(piece, tensor=_entrywise(piece, self.axis, self.per, self.factor**power))


def _along(x: torch.Tensor, dim: int, per: int, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply one dimension by a matrix for each entry of another."""
    # Letters: p = per, y = dimension in, x = dimension out, the rest by position.
    source = [chr(ord("A") + k) for k in range(x.dim())]
    source[per], source[dim] = "p", "y"
    target = ["x" if letter == "y" else letter for letter in source]
    rule = f"pxy,{''.join(source)}->{''.join(target)}"
    return torch.einsum(rule, matrix.to(device=x.device, dtype=x.dtype), x)


def _entrywise(piece: Piece, axis: str, per: str | None, factor: torch.Tensor) -> torch.Tensor:
    """Multiply an axis entry by entry, differently for each entry of ``per`` if that is given."""
    dim, x = piece.dim(axis), piece.tensor
    assert dim is not None
    if per is None:
        shape = [-1 if k == dim else 1 for k in range(x.dim())]
    else:
        other = piece.dim(per)
        assert other is not None
        factor = factor if other < dim else factor.mT
        shape = [n if k in (other, dim) else 1 for k, n in enumerate(x.shape)]
    return x * factor.to(device=x.device, dtype=x.dtype).reshape(shape)


Element = Permute | Rotate | Linear | Sign | Scale

#: Elements in the order in which they are applied; composition is concatenation.
Transformation = tuple[Element, ...]


def inverse(transformation: Transformation) -> Transformation:
    """Return the transformation that undoes another."""
    return tuple(element.inverse() for element in reversed(transformation))


def moves(transformation: Transformation, pattern: Pattern) -> bool:
    """Tell whether a transformation touches a tensor of this pattern at all."""
    return any(_moves(element, pattern) for element in transformation)


def _moves(element: Element, pattern: Pattern) -> bool:
    if isinstance(element, Sign):
        return pattern.signed(element.axis)
    if isinstance(element, Linear | Scale):
        return any(element.axis in powers for powers in pattern.powers)
    return element.axis in pattern.axes


def act(
    transformation: Transformation,
    tensor: torch.Tensor,
    pattern: Pattern,
    sizes: Mapping[str, int],
) -> torch.Tensor:
    """Apply a transformation to one stored tensor.

    For orthogonal groups the covariant and the contravariant action coincide, so every leg of an
    axis is multiplied by the same matrix; for others the exponent of the leg tells them apart.
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
