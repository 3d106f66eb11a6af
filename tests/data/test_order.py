"""The sample order: a permutation per epoch, fixed by the seed, that looks random."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.data import SampleOrder
from outlast.errors import DataError

FIXED_SMALL = [4, 9, 2, 0, 5, 7, 1, 6, 3, 8, 0, 7, 5, 9, 1, 8, 3, 2, 4, 6]
FIXED_LARGE = [810013, 949471, 822348]


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 5000),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
)
def test_every_epoch_is_a_permutation(samples, seed, epoch):
    positions = epoch * samples + np.arange(samples)
    chosen = SampleOrder(samples, seed).index(positions)
    assert np.array_equal(np.sort(chosen), np.arange(samples))


@settings(max_examples=40)
@given(
    samples=st.integers(1, 2**62),
    seed=st.integers(0, 2**32),
    given_indices=st.lists(st.integers(0, 2**62), min_size=1, max_size=20),
)
def test_an_index_does_not_depend_on_its_neighbours(samples, seed, given_indices):
    order = SampleOrder(samples, seed)
    together = order.index(given_indices)
    assert together.tolist() == [int(order.index(one)) for one in given_indices]
    assert np.all((together >= 0) & (together < samples))


@settings(max_examples=20)
@given(size=st.integers(2, 2**50), seed=st.integers(0, 100))
def test_no_two_positions_collide_in_large_orders(size, seed):
    positions = np.unique(np.linspace(0, size - 1, 2000).astype(np.int64))
    assert np.unique(SampleOrder(size, seed).index(positions)).size == positions.size


def test_the_order_is_fixed_for_ever():
    """A run that resumes under a later version must see the same samples."""
    assert SampleOrder(10, 0).index(np.arange(20)).tolist() == FIXED_SMALL
    assert SampleOrder(1_000_003, 42).index([0, 1, 5_000_000]).tolist() == FIXED_LARGE


def test_epochs_and_seeds_differ():
    positions = np.arange(1000)
    orders = [SampleOrder(1000, seed).index(positions + epoch * 1000)
              for seed, epoch in itertools.product((0, 1, -1), (0, 1, 2))]  # fmt: skip
    for one, other in itertools.combinations(orders, 2):
        assert np.mean(one == other) < 0.01


@pytest.mark.parametrize("samples", [100, 997, 1024, 5000, 100_000])
def test_an_order_looks_random(samples):
    positions = np.arange(samples)
    deviation = 1 / np.sqrt(samples)
    previous = None
    for epoch in range(4):
        chosen = SampleOrder(samples, 3).index(positions + epoch * samples)
        assert abs(np.corrcoef(positions, chosen)[0, 1]) < 4 * deviation
        assert abs(np.corrcoef(chosen[:-1], chosen[1:])[0, 1]) < 4 * deviation
        # |x - y| of independent uniform x and y has mean n/3 and standard deviation n/sqrt(18).
        displacement = np.abs(positions - chosen).mean() / samples
        assert abs(displacement - 1 / 3) < 4 * deviation / np.sqrt(18) + 1 / samples
        # Neighbours that stay neighbours are Poisson with mean 2.
        assert np.sum(np.abs(np.diff(chosen)) == 1) < 12
        if previous is not None:
            assert abs(np.corrcoef(previous, chosen)[0, 1]) < 4 * deviation
        previous = chosen


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_all_orders_of_few_samples_are_equally_likely(samples):
    epochs = 6000
    chosen = SampleOrder(samples, 7).index(np.arange(samples * epochs)).reshape(epochs, samples)
    count = np.unique(chosen, axis=0, return_counts=True)[1]
    orders = int(np.prod(np.arange(1, samples + 1)))
    assert count.size == orders
    chi_square = np.sum((count - epochs / orders) ** 2) / (epochs / orders)
    assert chi_square < orders - 1 + 4 * np.sqrt(2 * (orders - 1))


def test_every_sample_reaches_every_position():
    chosen = SampleOrder(12, 5).index(np.arange(12 * 6000)).reshape(6000, 12)
    for position in range(12):
        count = np.bincount(chosen[:, position], minlength=12)
        assert np.sum((count - 500) ** 2) / 500 < 11 + 4.5 * np.sqrt(22)


def test_epoch_and_shape():
    order = SampleOrder(7, 0)
    assert [order.epoch(g) for g in (0, 6, 7, 700)] == [0, 0, 1, 100]
    assert order.index(3).shape == ()
    assert order.index([]).shape == (0,)
    assert order.index(np.arange(12).reshape(3, 4)).shape == (3, 4)


def test_a_million_indices_are_quick():
    order = SampleOrder(245_000, 1)
    start = time.process_time()
    order.index(np.arange(1_000_000))
    assert time.process_time() - start < 3.0


def test_bad_input_is_refused():
    for samples in (0, -5, 2**62 + 1):
        with pytest.raises(DataError, match=f"an order of {samples} samples"):
            SampleOrder(samples, 0)
    with pytest.raises(DataError, match="index -1 is negative"):
        SampleOrder(5, 0).index([3, -1])


@given(
    samples=st.integers(1, 9000),
    seed=st.integers(0, 2**40),
    start=st.integers(0, 30_000),
    length=st.integers(0, 9000),
)
@settings(max_examples=30, deadline=None)
def test_a_stretch_is_the_same_as_its_indices(samples, seed, start, length):
    order = SampleOrder(samples, seed)
    expected = order.index(np.arange(start, start + length))
    assert np.array_equal(order.consecutive(start, start + length), expected)
