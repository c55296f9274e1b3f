"""How much chance explains: bounds, and that random fits stay below them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws import LAW, inner, norm, normal, rng
from mergekit_rotation.symmetry import (
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    chance_share,
)

NUMBERS = st.integers(0, 10**12)


@LAW
@given(freedom=NUMBERS, entries=NUMBERS)
def test_the_share_is_a_share_and_never_more_than_half(freedom, entries):
    assert 0.0 <= chance_share(freedom, entries) <= 0.5


@LAW
@given(number=NUMBERS)
def test_without_freedom_or_weights_nothing_is_explained(number):
    assert chance_share(0, number) == chance_share(number, 0) == 0.0


@LAW
@given(freedom=st.integers(1, 10**8), entries=NUMBERS, more=st.integers(1, 10**8))
def test_more_freedom_explains_more_and_more_weights_leave_less(freedom, entries, more):
    share = chance_share(freedom, entries)
    assert chance_share(freedom + more, entries) >= share
    if entries:
        assert chance_share(freedom, entries + more) <= share


def test_at_least_twice_the_mean_is_asked_for():
    for freedom, entries in itertools.product([1, 30, 10**4, 10**7], [10, 10**5, 10**9]):
        assert chance_share(freedom, entries) >= min(2 * freedom / entries, 0.5)
    assert chance_share(10**7, 10**10) == pytest.approx(2e-3)


@pytest.mark.parametrize("freedom", [1, 6, 28, 1000])
def test_random_projections_stay_below_the_share(freedom):
    """The lemma itself: the energy of p of N normal numbers, against the energy of all."""
    entries = 20 * freedom + 1000
    share = chance_share(freedom, entries)
    for seed in range(200):
        x = normal(rng(seed), entries).square()
        assert x[:freedom].sum() / x.sum() <= share


def fitted_share(group: Group, rows: int, size: float, seed: int) -> float:
    """Share of a difference of pure noise that the best element of a group removes."""
    generator = rng(seed)
    reference = normal(generator, rows, group.n)
    other = reference + size * normal(generator, rows, group.n)
    before = float((reference - other).square().sum())
    turned = other @ group.project(reference.mT @ other).mT
    return 1 - float((reference - turned).square().sum()) / before


@pytest.mark.parametrize("group", [Orthogonal(4), Orthogonal(8), OrthogonalFixingOnes(6)])
@pytest.mark.parametrize("size", [1e-3, 0.1])
def test_what_a_small_group_fits_of_noise_stays_below_the_share(group, size):
    rows = 100
    share = chance_share(group.freedom, rows * group.n)
    fitted = [fitted_share(group, rows, size, seed) for seed in range(200)]
    assert 0 < min(fitted) and max(fitted) <= share < 0.5
    mean = group.freedom / (rows * group.n)
    assert 0.5 * mean <= sum(fitted) / len(fitted) <= 2 * mean


def test_a_real_rotation_is_far_above_the_share():
    """Negative control: what is planted does not pass for chance."""
    group, rows = Orthogonal(8), 100
    for seed in range(20):
        generator = rng(seed)
        reference = normal(generator, rows, group.n)
        planted = group.sample(1, generator)[0]
        noisy = reference @ planted + 0.1 * normal(generator, rows, group.n)
        before = norm(reference - noisy).square()
        gain = 2 * (group.value(reference.mT @ noisy) - inner(reference, noisy))
        assert gain / before > 2 * chance_share(group.freedom, rows * group.n)
        assert torch.isfinite(gain)
