"""Maps of the whole residual stream, and how to find them.

Axis ``e``: the coordinates of the stream. A leg ``~e`` is a writer or a reader and takes the whole
map; a leg ``e`` (the weight of a norm that cannot be folded) follows a permutation without its
signs. Axis ``t``: the coordinates in which a head that is tied to the embeddings is read.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mergekit_rotation.symmetry.assignment import linear_assignment
from mergekit_rotation.symmetry.axes import Pattern
from mergekit_rotation.symmetry.errors import SymmetryError
from mergekit_rotation.symmetry.groups import Orthogonal, OrthogonalFixingOnes
from mergekit_rotation.symmetry.precision import all_finite, product_dtype

#: the stream itself, and the same coordinates read by a tied head
STREAM_AXES = ("e", "t")


@dataclass(frozen=True, eq=False)
class SignedPermutation:
    """New coordinate i is ``sign[i]`` times what was at ``index[i]``; both of shape (D,)."""

    index: torch.Tensor
    sign: torch.Tensor
    exact = True

    def along(self, x: torch.Tensor, dim: int, signed: bool = True) -> torch.Tensor:
        """Apply the map along one dimension of a tensor, with or without its signs."""
        moved = x.index_select(dim, self.index.to(x.device))
        if not signed or bool((self.sign > 0).all()):
            return moved
        shape = [-1 if k == dim % x.dim() else 1 for k in range(x.dim())]
        return moved * self.sign.to(device=x.device, dtype=x.dtype).view(shape)

    def inverse(self) -> "SignedPermutation":
        index = torch.argsort(self.index)
        return SignedPermutation(index, self.sign[index])

    def matrix(self) -> torch.Tensor:
        """The map as a matrix of shape (D, D), float64."""
        result = torch.zeros(len(self.index), len(self.index), dtype=torch.float64)
        result[torch.arange(len(self.index)), self.index] = self.sign.double()
        return result


@dataclass(frozen=True, eq=False)
class OrthogonalMap:
    """New coordinates are ``q`` times the old ones; orthogonal, shape (D, D)."""

    q: torch.Tensor
    exact = False

    def along(self, x: torch.Tensor, dim: int, signed: bool = True) -> torch.Tensor:
        """Apply the map along one dimension of a tensor."""
        if not signed:
            raise SymmetryError("a leg that only follows permutations cannot be rotated")
        q = self.q.to(device=x.device, dtype=x.dtype)
        last: torch.Tensor = x.movedim(dim, -1) @ q.mT
        return last.movedim(-1, dim)

    def inverse(self) -> "OrthogonalMap":
        return OrthogonalMap(self.q.mT)

    def matrix(self) -> torch.Tensor:
        """The map as a matrix of shape (D, D), float64."""
        return self.q.double().cpu()


StreamMap = SignedPermutation | OrthogonalMap


def composed(first: StreamMap, then: StreamMap) -> StreamMap:
    """Return the map that applies ``first`` and then ``then``."""
    if isinstance(first, SignedPermutation) and isinstance(then, SignedPermutation):
        return SignedPermutation(first.index[then.index], first.sign[then.index] * then.sign)
    return OrthogonalMap(then.matrix() @ first.matrix())


def act_stream(stream: StreamMap, x: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Apply a map of the stream to one tensor, along every dimension that belongs to the stream."""
    for axis in STREAM_AXES:
        dim = pattern.dim_of(axis)
        if dim is not None:
            x = stream.along(x, dim, signed=pattern.signed(axis))
    return x


def cross_gram(
    legs: Iterable[tuple[torch.Tensor, torch.Tensor, int, float]], size: int, rows: int = 1 << 14
) -> tuple[torch.Tensor, float]:
    """Accumulate M = sum weight * mat(reference)^T mat(other) along a dimension of size D.

    Parameters
    ----------
    legs : iterable of (reference, other, dim, weight)
        Tensors of equal shape; ``dim`` is their dimension of the stream.
    size : int
        D.
    rows : int
        How many rows are raised to float32 at a time.

    Returns
    -------
    (Tensor of shape (D, D), float)
        M in float64 on the CPU, and the size of its rounding errors: n products of float32
        numbers err like sqrt(n) eps times the norms of the factors.
    """
    gram = torch.zeros(size, size, dtype=torch.float64)
    noise = 0.0
    for reference, other, dim, weight in legs:
        work = product_dtype(reference, other)
        gram = gram.to(reference.device)
        x, y = (z.movedim(dim, -1).reshape(-1, size) for z in (reference, other))
        square = [0.0, 0.0]
        for start in range(0, len(x), rows):
            a, b = x[start : start + rows].to(work), y[start : start + rows].to(work)
            gram += weight * (a.mT @ b).double()
            square[0] += float(torch.linalg.vector_norm(a, dtype=torch.float64)) ** 2
            square[1] += float(torch.linalg.vector_norm(b, dtype=torch.float64)) ** 2
        eps = torch.finfo(work).eps
        noise += weight * eps * min(len(x), rows) ** 0.5 * (square[0] * square[1]) ** 0.5
    if not all_finite(gram):
        raise SymmetryError("the weights of the stream hold NaN or Inf, or are too large to square")
    return gram.cpu(), noise


def solve_permutation(gram: torch.Tensor, per_coordinate: bool) -> SignedPermutation:
    """Best signed permutation for a cross-Gram matrix of the stream.

    Parameters
    ----------
    gram : Tensor, shape (D, D)
    per_coordinate : bool
        Whether every coordinate has its own sign (RMSNorm); otherwise there is one for all
        (LayerNorm, whose mean mixes the coordinates).

    References
    ----------
    Ainsworth et al., "Git Re-Basin", arXiv 2209.04836.
    """
    rows = torch.arange(len(gram))
    if not per_coordinate:  # the mean is invisible
        gram = gram - gram.mean(0, keepdim=True)
        gram = gram - gram.mean(1, keepdim=True)
    else:
        index = linear_assignment(gram.abs())
        value = gram[rows, index]
        return SignedPermutation(index, torch.where(value < 0, -1.0, 1.0).to(gram.dtype))
    choices = []
    for sign in (1.0, -1.0):
        index = linear_assignment(sign * gram)
        choices.append((float(sign * gram[rows, index].sum()), sign, index))
    _, sign, index = max(choices, key=lambda choice: choice[0])
    return SignedPermutation(index, torch.full((len(gram),), sign, dtype=gram.dtype))


def solve_rotation(gram: torch.Tensor, noise: float, fix_ones: bool) -> OrthogonalMap:
    """Best orthogonal map for a cross-Gram matrix of the stream: its polar factor.

    Under LayerNorm (``fix_ones``) only maps that fix the vector of ones are symmetries.
    Directions that the weights do not determine resolve to what is nearest to the identity.
    """
    group = (OrthogonalFixingOnes if fix_ones else Orthogonal)(len(gram))
    least = torch.tensor(noise, dtype=gram.dtype, device=gram.device)
    return OrthogonalMap(group.project(gram, least))
