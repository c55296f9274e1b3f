"""Biases of attention that can change without changing the function.

A vector added to all keys of a head adds the same number to all scores of a query, which softmax
does not see, unless position turns the keys. Weights of a softmax add up to one, so the bias of
the values adds one vector to every output, and can be moved to the output's own bias. What moves
only the numbers and not the function must not steer a match: such biases are set to zero before
two models are compared.
"""

from collections.abc import Iterator

import torch

from mergekit_rotation.symmetry.attention import AttentionLayout
from mergekit_rotation.symmetry.groups import DirectSum, Group, Orthogonal

#: exponents of the biases of keys and of values, as `Pattern` writes them
_KEYS, _VALUES = -1, 1


def unturned(group: Group) -> torch.Tensor:
    """Return 1.0 for the dimensions of a head that no position turns, 0.0 for others, (n,)."""
    if isinstance(group, DirectSum):
        return torch.cat([unturned(block) for block in group.blocks])
    return torch.full((group.n,), float(isinstance(group, Orthogonal)))


def free_parts(name: str, layout: AttentionLayout) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield what of a bias can change: the number of the piece, its axis, and a mask, (n,)."""
    for number, powers in enumerate(layout.patterns[name].powers):
        if name in layout.shifted and powers.get("qk") == _KEYS:
            yield number, "qk", unturned(layout.query_key)
        if name in layout.folded and powers.get("vo") == _VALUES:
            yield number, "vo", torch.ones(layout.sizes["vo"])


def without_gauge(tensor: torch.Tensor, name: str, layout: AttentionLayout) -> torch.Tensor:
    """Return a leg with what of it can change set to zero.

    The result commutes with the groups of the layout: a moved leg without its gauge is the leg
    without its gauge, moved.

    Parameters
    ----------
    tensor : Tensor
    name : str
    layout : AttentionLayout

    Returns
    -------
    Tensor
        The given one where nothing of it can change.

    Raises
    ------
    PatternError
        If the tensor does not have the shape of its pattern.
    """
    parts = list(free_parts(name, layout))
    if not parts:
        return tensor
    pattern = layout.patterns[name]
    pieces = pattern.split(tensor, layout.sizes)
    result = [piece.tensor for piece in pieces]
    for number, axis, mask in parts:
        shape = [1] * result[number].ndim
        dim = pieces[number].dim(axis)
        assert dim is not None
        shape[dim] = -1
        fixed = 1 - mask.to(device=tensor.device, dtype=tensor.dtype).view(shape)
        result[number] = result[number] * fixed
    return pattern.join(result, layout.sizes)
