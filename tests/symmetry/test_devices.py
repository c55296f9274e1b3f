"""Solvers on an accelerator that is not there, see `accelerator`."""

import pytest
import torch

from accelerator import Placed, on
from laws import attention, draw_motion, draw_tensors, move
from mergekit_rotation.symmetry import (
    NeuronLayout,
    Orthogonal,
    Pattern,
    PlaneRotations,
    act,
    cross_gram,
    inverse,
    precision,
    rotary_pairs,
    solve_attention,
    solve_neurons,
    solve_rotation,
    squares,
)
from mergekit_rotation.symmetry.assignment import linear_assignment
from mergekit_rotation.symmetry.head_gram import LEAST
from mergekit_rotation.symmetry.vectors import row_sums

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    monkeypatch.setattr(precision, "has_matrix_units", lambda: False)  # they sum in another order
    with on():
        yield


def placed(tensors):
    return {name: Placed(x, CUDA) for name, x in tensors.items()}


def check_solver(solve, a, b, layout):
    """What is found on the accelerator moves the other side there as it is moved on the CPU."""
    expected = solve(a, b, layout)
    found = solve(placed(a), placed(b), layout)
    assert len(found) == len(expected) > 0
    for name, x in b.items():
        moved = act(found, Placed(x, CUDA), layout.patterns[name], layout.sizes)
        assert moved.device == CUDA
        assert torch.equal(moved.cpu(), act(expected, x, layout.patterns[name], layout.sizes))


def test_what_a_real_accelerator_refuses_is_refused():
    x, i = Placed(torch.ones(3), CUDA), Placed(torch.arange(3), CUDA)
    for wrong in (
        lambda: x + torch.ones(3),
        lambda: torch.ones(3)[i],
        lambda: torch.equal(x, torch.ones(3)),
        lambda: x.numpy(),
        lambda: torch.randn(3, generator=torch.Generator(), device=CUDA),
        lambda: x + torch.ones(3, device="cuda:1"),
    ):
        with pytest.raises(RuntimeError):
            wrong()


def test_what_a_real_accelerator_does_is_done():
    x = Placed(torch.arange(3.0), CUDA)
    view = x[1:]
    view.mul_(2)  # of the same numbers
    assert x.tolist() == [0, 2, 4] and float(x.sum()) == 6
    assert (x + torch.tensor(1.0)).device == x[torch.arange(2)].device == CUDA
    assert torch.zeros(2, device="cuda").device == CUDA and x.is_cuda
    assert x.cpu().numpy().tolist() == [0, 2, 4]
    with torch.device("cuda:1"):
        assert torch.tensor([1.0]).device == torch.device("cuda", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise", [0.05, 1.0, None])
def test_neurons(dtype, noise):
    """Few columns decide, or all in bfloat16, or all products are needed."""
    generator = torch.Generator().manual_seed(0)
    n, width = 300, 40
    patterns = {"gate": "f e", "up": "~f e", "down": "e ~f"}
    layout = NeuronLayout({k: Pattern.parse(v) for k, v in patterns.items()}, {"f": n, "e": width})
    shapes = {k: p.shape(layout.sizes) for k, p in layout.patterns.items()}
    a = {k: torch.randn(shape, generator=generator) for k, shape in shapes.items()}
    order = torch.randperm(n, generator=generator)
    b = {k: x.index_select(1 if k == "down" else 0, order) for k, x in a.items()}
    other = {k: torch.randn(shape, generator=generator) for k, shape in shapes.items()}
    b = other if noise is None else {k: x + noise * other[k] for k, x in b.items()}
    a, b = ({k: x.to(dtype) for k, x in side.items()} for side in (a, b))
    check_solver(solve_neurons, a, b, layout)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("related", [False, True])
def test_heads(m, related):
    """Few columns decide, or all are needed."""
    rotary = PlaneRotations(4, rotary_pairs(4, "half"))
    layout = attention(rotary, Orthogonal(4), kv=3, g=m, e=3 * LEAST)
    a, b = (draw_tensors(layout.patterns, layout.sizes, seed) for seed in (0, 1))
    if related:
        turned = move(inverse(draw_motion(layout, 2)), a, layout.patterns, layout.sizes)
        b = {n: x + 0.02 * b[n] for n, x in turned.items()}
    check_solver(solve_attention, a, b, layout)


def test_large_assignments():
    score = torch.randn(1100, 1100, generator=torch.Generator().manual_seed(0))
    found = linear_assignment(Placed(score, CUDA))
    assert found.device == CUDA and torch.equal(found.cpu(), linear_assignment(score))


def test_maps_of_the_stream():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(50, 12, generator=generator) for _ in range(2))
    b[:, 5:] = 0  # so that some directions are not determined
    found = cross_gram([(Placed(a, CUDA), Placed(b, CUDA), 1, 1.0)], 12)
    expected = cross_gram([(a, b, 1, 1.0)], 12)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    for fix_ones in (False, True):
        q = solve_rotation(Placed(found[0], CUDA), found[1], fix_ones).q
        assert q.device == CUDA
        assert torch.equal(q.cpu(), solve_rotation(*expected, fix_ones).q)


def test_sums():
    x, y = torch.randn(2, 30, 40, generator=torch.Generator().manual_seed(0)).unbind()
    far = Placed(x, CUDA), Placed(y, CUDA)
    assert squares(*far) == squares(x, y)
    found = torch.stack(row_sums(*far, torch.float32))
    assert torch.equal(found.cpu(), torch.stack(row_sums(x, y, torch.float32)))
