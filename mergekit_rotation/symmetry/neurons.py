"""Aligning the hidden units of one feed-forward layer.

Axis ``f``: the neurons. Plain legs ``f`` take their permutation; legs ``~f`` (the up and the down
projection of a gated MLP) may change sign together as well, since the product gate * up is linear
in the up projection.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mergekit_rotation.symmetry.action import Element, Permute, Sign, Transformation
from mergekit_rotation.symmetry.assignment import linear_assignment, paying_cycles
from mergekit_rotation.symmetry.axes import Pattern, Piece
from mergekit_rotation.symmetry.errors import SymmetryError
from mergekit_rotation.symmetry.precision import all_finite, working_dtype

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class NeuronLayout:
    """Where the neurons of a layer are stored: patterns with an axis ``f``, and axis sizes."""

    patterns: Mapping[str, Pattern]
    sizes: Mapping[str, int]


def solve_neurons(reference: Tensors, other: Tensors, layout: NeuronLayout) -> Transformation:
    """Find the (signed) permutation of neurons that brings ``other`` closest to the reference.

    Maximises sum_i [ <plain legs of i, plain legs of p(i)> + | <signed legs of i, of p(i)> | ]
    over permutations p: a linear assignment over the scores of all pairs, biases included. Ties
    (dead or equal neurons) resolve to the identity.

    Parameters
    ----------
    reference, other : mapping of tensor name to Tensor
        The names of ``layout.patterns``; a name that either side lacks does not take part.

    Returns
    -------
    tuple of elements
        Empty if nothing moves.

    Raises
    ------
    SymmetryError
        If the weights are not finite, or a tensor does not have the shape of its pattern.

    References
    ----------
    Ainsworth, Hayase, Srinivasa, "Git Re-Basin: Merging Models modulo Permutation Symmetries",
    arXiv 2209.04836, section 3.2. arXiv 2502.00264, section 3 (feed-forward layers).
    """
    legs = list(_legs(reference, other, layout))
    work = working_dtype(*(piece.tensor.dtype for leg in legs for piece in leg[1:]))
    signed = [(a, b) for is_signed, a, b in legs if is_signed]
    plain = [(a, b) for is_signed, a, b in legs if not is_signed]

    score: torch.Tensor | None = None
    for a, b in signed:
        score = _accumulate(score, a, b, work)
    if score is not None:
        score = score.abs_()
    for a, b in plain:
        score = _accumulate(score, a, b, work)
    if score is None:
        return ()
    noise = _Noise(legs, work)
    index = _assign(score, noise)
    del score

    identity = torch.arange(len(index), device=index.device)
    result: list[Element] = []
    if not torch.equal(index, identity):
        result.append(Permute("f", index))
    if signed:
        overlap = torch.zeros(len(index), dtype=work, device=index.device)
        for a, b in signed:
            overlap += (neuron_rows(a).to(work) * neuron_rows(b)[index].to(work)).sum(1)
        negative = overlap.double() < -noise(identity, index)
        if bool(negative.any()):
            one = torch.ones_like(overlap)
            result.append(Sign("f", torch.where(negative, -one, one)))
    return tuple(result)


def _legs(
    reference: Tensors, other: Tensors, layout: NeuronLayout
) -> list[tuple[bool, Piece, Piece]]:
    result = []
    for name, pattern in layout.patterns.items():
        if name not in reference or name not in other:
            continue
        pieces = zip(
            pattern.split(reference[name], layout.sizes),
            pattern.split(other[name], layout.sizes),
            strict=True,
        )
        result += [("~f" in a.axes, a, b) for a, b in pieces if a.dim("f") is not None]
    return result


def neuron_rows(piece: Piece) -> torch.Tensor:
    """View a piece as (neurons, rest)."""
    dim = piece.dim("f")
    assert dim is not None
    x = piece.tensor.movedim(dim, 0)
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def _accumulate(score: torch.Tensor | None, a: Piece, b: Piece, work: torch.dtype) -> torch.Tensor:
    x, y = neuron_rows(a).to(work), neuron_rows(b).to(work)
    return x @ y.mT if score is None else score.addmm_(x, y.mT)


class _Noise:
    """Rounding error of the score of neuron i of the reference with neuron j of the other."""

    def __init__(self, legs: list[tuple[bool, Piece, Piece]], work: torch.dtype) -> None:
        length = sum(neuron_rows(a).shape[1] for _, a, _ in legs)
        sides = ([neuron_rows(a) for _, a, _ in legs], [neuron_rows(b) for _, _, b in legs])
        self.norms = [_norm(rows, work) for rows in sides]
        self.factor: float = 4 * torch.finfo(work).eps * float(length) ** 0.5

    def __call__(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return self.factor * self.norms[0][i] * self.norms[1][j]


def _norm(rows: list[torch.Tensor], work: torch.dtype) -> torch.Tensor:
    """Norm of every neuron over all legs, float64."""
    parts = [torch.linalg.vector_norm(x.to(work), dim=1).double() for x in rows]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    if not all_finite(norm):
        raise SymmetryError("the weights of a neuron hold NaN or Inf, or are too large to square")
    return norm


def _assign(score: torch.Tensor, noise: _Noise) -> torch.Tensor:
    """Best permutation, with every cycle that gains less than rounding errors undone.

    So equal and dead neurons stay where they are, however much larger other neurons are.
    """
    rows = torch.arange(len(score), device=score.device)
    stay = score.diagonal().clone()
    score.diagonal().add_(noise(rows, rows).to(score.dtype))  # ties go to the identity
    index = linear_assignment(score)
    score.diagonal().copy_(stay)
    if torch.equal(index, rows):
        return index
    gain = score[rows, index].double() - stay.double()
    least = noise(rows, index) + noise(rows, rows)
    return torch.where(paying_cycles(index, gain, least), index, rows)
