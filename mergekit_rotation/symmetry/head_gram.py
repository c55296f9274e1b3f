"""Cross-Gram matrices between the heads of two attention layers, and their projection."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from mergekit_rotation.symmetry.axes import Piece
from mergekit_rotation.symmetry.chance import chance_share
from mergekit_rotation.symmetry.errors import SymmetryError
from mergekit_rotation.symmetry.groups import Group, inner
from mergekit_rotation.symmetry.precision import all_finite


@dataclass
class HeadGram:
    """Cross-Gram matrices of one head axis, in the working dtype."""

    group: Group
    shared: torch.Tensor  # (a, b, d, d): legs without query axis (keys, values)
    query: torch.Tensor | None  # (a, b, i, j, d, d): legs of query head i of a and j of b
    norm_ref: torch.Tensor  # (kv,) Frobenius norms over all legs, float64
    norm_other: torch.Tensor
    length: int  # number of products summed into one entry
    entries: int  # number of weights per key/value head
    # what `rotation` returned
    _known: list[tuple[torch.dtype, tuple[torch.Tensor, ...], torch.Tensor]] = field(
        default_factory=list
    )

    def gram(self, a: torch.Tensor, b: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """M of the pairs (a, b), each of shape (k,), with query heads in ``order`` (k, m)."""
        gram = self.shared[a, b]
        if self.query is not None:
            i = torch.arange(order.shape[1], device=a.device)
            gram = gram + self.query[a[:, None], b[:, None], i, order].sum(1)
        return gram.double()

    def project(self, a: torch.Tensor, b: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
        """Best element for the matrices ``gram`` (k, d, d) of the pairs (a, b).

        The errors of sums of n products add up like sqrt(n) eps times the norms of the factors.
        """
        eps = torch.finfo(self.shared.dtype).eps
        return self.group.project(
            gram, self.length**0.5 * eps * self.norm_ref[a] * self.norm_other[b]
        )

    def rotation(
        self, a: torch.Tensor, b: torch.Tensor, order: torch.Tensor, stored: torch.dtype
    ) -> torch.Tensor:
        """Best element for each pair, or the identity where moving does not pay; (k, d, d)."""
        for dtype, asked, known in self._known:
            if dtype == stored and all(map(torch.equal, asked, (a, b, order))):
                return known
        gram = self.gram(a, b, order)
        g = self.project(a, b, gram)
        eye = torch.eye(self.group.n, dtype=g.dtype, device=g.device)
        # Decrease of the squared distance, 2 <g - 1, M>, written without cancellation: at the
        # optimum g^T M is symmetric on the group's algebra and (g - 1)^T (g - 1) = 2 - g - g^T.
        gain = inner((g - eye).mT @ (g - eye), g.mT @ gram)
        # Mean square of a rounding error is at most (eps |x|)^2 / 12 per entry.
        rounding = 0.0 if self.group.exact else torch.finfo(stored).eps ** 2 / 12
        # Rounding errors of M can feign a gain of the first order.
        noise = 4.0 * float(self.group.n) ** 0.5 * torch.finfo(self.shared.dtype).eps
        cost = rounding * self.norm_other[b] ** 2 + noise * self.norm_ref[a] * self.norm_other[b]
        square = self.norm_ref[a] ** 2 + self.norm_other[b] ** 2
        distance = square - 2 * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        chance = chance_share(self.group.freedom, self.entries)
        keep = gain > cost + chance * distance.clamp(min=0)
        result = torch.where(keep[:, None, None], g, eye)
        self._known.append((stored, (a, b, order), result))
        return result


def head_gram(
    legs: Iterable[tuple[Piece, Piece]],
    axis: str,
    group: Group,
    heads: tuple[int, int],
    *,
    all_pairs: bool,
    work: torch.dtype,
    device: torch.device,
) -> HeadGram:
    """Accumulate the cross-Gram matrices of one head axis.

    Parameters
    ----------
    legs : iterable of (Piece, Piece)
        Reference and other; every piece has the axes ``kv`` and ``axis``.
    axis : str
    group : Group
        Acts on ``axis``.
    heads : (int, int)
        Number of key/value heads, and of query heads in a group.
    all_pairs : bool
        Whether heads may be matched with other heads; else only pairs (a, a) are computed.
    work : torch.dtype
    device : torch.device

    Raises
    ------
    SymmetryError
        If the weights are not finite.
    """
    (kv, m), d = heads, group.n
    shared = torch.zeros(kv, kv if all_pairs else 1, d, d, dtype=work, device=device)
    query = None
    square = torch.zeros(2, kv, dtype=torch.float64, device=device)
    length = entries = 0
    for pieces in legs:
        x, y = (_rows(piece, axis).to(work) for piece in pieces)
        norms = [torch.linalg.vector_norm(z, dim=(1, 2, 3)).double() for z in (x, y)]
        square += torch.stack(norms).square()
        length += x.shape[1] * x.shape[3]
        entries += x[0].numel()
        term = _cross(x, y, all_pairs)
        if x.shape[1] == 1:
            shared += term[:, :, 0, 0]
        else:
            query = term if query is None else query.add_(term)
    norm = square.sqrt()
    if not all_finite(norm):
        raise SymmetryError("the weights of a head hold NaN or Inf, or are too large to square")
    if not all_pairs:  # only pairs (a, a) are ever looked up
        shared = shared.expand(kv, kv, d, d)
        query = None if query is None else query.expand(kv, kv, m, m, d, d)
    return HeadGram(group, shared, query, norm[0], norm[1], length, entries)


def _rows(piece: Piece, axis: str) -> torch.Tensor:
    """View a piece as (kv, g, d, rest) with g = 1 where it has no query axis."""
    lead = [piece.dim("kv"), piece.dim("g"), piece.dim(axis)]
    known = [dim for dim in lead if dim is not None]
    rest = [dim for dim in range(piece.tensor.dim()) if dim not in known]
    x = piece.tensor.permute(*known, *rest)
    if lead[1] is None:
        x = x.unsqueeze(1)
    return x.flatten(3) if x.dim() > 3 else x.unsqueeze(3)


def _cross(x: torch.Tensor, y: torch.Tensor, all_pairs: bool) -> torch.Tensor:
    """Cross-Gram matrices of all pairs of heads, (a, b, i, j, d, d); only b = a if not asked.

    Without ``all_pairs`` the result has shape (a, 1, m, m, d, d) and holds i = j alone.
    """
    kv, m, d, _ = x.shape
    if all_pairs:
        gram = x.flatten(0, 2) @ y.flatten(0, 2).mT
        return gram.view(kv, m, d, kv, m, d).permute(0, 3, 1, 4, 2, 5)
    diagonal = torch.diag_embed((x @ y.mT).permute(0, 2, 3, 1))  # (a, d, d, m, m)
    return diagonal.permute(0, 3, 4, 1, 2).unsqueeze(1)
