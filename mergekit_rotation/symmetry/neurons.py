"""Aligning the hidden units of one feed-forward layer.

Axis ``f``: the neurons. Plain legs ``f`` take their permutation; legs ``~f`` (the up and the down
projection of a gated MLP) may change sign together as well, since the product gate * up is linear
in the up projection.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mergekit_rotation.symmetry.action import Element, Permute, Sign, Transformation
from mergekit_rotation.symmetry.assignment import certified_assignment, paying_cycles
from mergekit_rotation.symmetry.axes import Pattern, Piece
from mergekit_rotation.symmetry.nearest import nearest_matching
from mergekit_rotation.symmetry.precision import working_dtype
from mergekit_rotation.symmetry.vectors import Part, Vectors

Tensors = Mapping[str, torch.Tensor]

#: neurons from which on a matching without all products is tried
MANY = 256


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
    arXiv 2209.04836, section 3.2. arXiv 2502.00264 (feed-forward layers).
    """
    parts = _parts(reference, other, layout)
    if not parts:
        return ()
    work = working_dtype(*(x.dtype for part in parts for x in (part.a, part.b)))
    vectors = Vectors(parts, work)
    index, gap = _assign(vectors)
    identity = torch.arange(len(index), device=index.device)
    result: list[Element] = []
    if not torch.equal(index, identity):
        result.append(Permute("f", index, gap=gap))
    if any(part.signed for part in parts):
        _, overlap = vectors.products(index)
        negative = overlap.double() < -vectors.noise(identity, index, signed=True)
        if bool(negative.any()):
            one = torch.ones_like(overlap)
            result.append(Sign("f", torch.where(negative, -one, one)))
    return tuple(result)


def _parts(reference: Tensors, other: Tensors, layout: NeuronLayout) -> list[Part]:
    result = []
    for name, pattern in layout.patterns.items():
        if name not in reference or name not in other:
            continue
        pieces = zip(
            pattern.split(reference[name], layout.sizes),
            pattern.split(other[name], layout.sizes),
            strict=True,
        )
        result += [
            Part("~f" in a.axes, neuron_rows(a), neuron_rows(b))
            for a, b in pieces
            if a.dim("f") is not None
        ]
    return result


def neuron_rows(piece: Piece) -> torch.Tensor:
    """View a piece as (neurons, rest)."""
    dim = piece.dim("f")
    assert dim is not None
    x = piece.tensor.movedim(dim, 0)
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def _assign(vectors: Vectors) -> tuple[torch.Tensor, float]:
    """Best permutation, and its certified gap. Cycles that gain no more than rounding are undone.

    So equal and dead neurons stay where they are, however much larger other neurons are.
    """
    rows = torch.arange(vectors.count, device=vectors.device)
    noise = vectors.noise(rows, rows)
    index, gap = None, 0.0
    if vectors.count >= MANY:
        index = nearest_matching(vectors)
    if index is None:
        score = vectors.gram()
        score.diagonal().add_(noise.to(score.dtype))  # ties go to the identity
        index, gap = certified_assignment(score)
        del score
    if torch.equal(index, rows):
        return index, gap
    gain = vectors.scores(index) - vectors.scores(rows)
    pays = paying_cycles(index, gain, vectors.noise(rows, index) + noise)
    return torch.where(pays, index, rows), gap
