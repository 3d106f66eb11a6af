import math
import subprocess
import sys
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import TensorizeError
from outlast.tensorize.shapes import (
    LARGEST_IMBALANCE,
    LARGEST_PADDING,
    balanced_modes,
    block_modes,
    bond_ranks,
    largest_block_rank,
    largest_train_ranks,
    monarch_modes,
    monarch_rank,
    most_even_factorization,
    rounded_rank,
)

sizes = st.integers(1, 20_000)
counts = st.integers(1, 5)


@settings(max_examples=60, deadline=None)
@given(sizes, counts)
def test_modes_hold_the_size_with_little_padding(size: int, count: int) -> None:
    modes = balanced_modes(size, count)
    assert len(modes) == count
    assert list(modes) == sorted(modes)
    assert size <= math.prod(modes) <= size * (1 + LARGEST_PADDING)


@settings(max_examples=60, deadline=None)
@given(sizes, counts)
def test_a_balanced_exact_factorization_is_never_padded(size: int, count: int) -> None:
    exact = most_even_factorization(size, count)
    assert math.prod(exact) == size
    if exact[-1] <= LARGEST_IMBALANCE * exact[0]:
        assert balanced_modes(size, count) == exact


@settings(max_examples=40, deadline=None)
@given(st.integers(256, 300_000), st.integers(1, 3))
def test_sizes_of_layers_are_always_balanced(size: int, count: int) -> None:
    modes = balanced_modes(size, count)
    assert modes[-1] <= LARGEST_IMBALANCE * modes[0]


@given(st.integers(1, 400), st.integers(1, 3))
def test_no_factorization_is_more_even(size: int, count: int) -> None:
    divisors = [one for one in range(1, size + 1) if size % one == 0]
    every = [
        tuple(sorted(modes))
        for modes in product(divisors, repeat=count)
        if math.prod(modes) == size
    ]
    best = min(every, key=lambda modes: (modes[-1] / modes[0], sum(modes)))
    found = most_even_factorization(size, count)
    assert (found[-1] / found[0], sum(found)) == (best[-1] / best[0], sum(best))


@pytest.mark.parametrize(
    ("size", "count", "modes"),
    [
        (768, 3, (8, 8, 12)),
        (1024, 3, (8, 8, 16)),
        (2048, 2, (32, 64)),
        (4096, 3, (16, 16, 16)),
        (11008, 3, (16, 16, 43)),
        (5461, 2, (43, 127)),
        (5461, 3, (16, 18, 19)),
        (1376, 2, (32, 43)),
        (1376, 3, (9, 9, 17)),
        (2736, 3, (12, 12, 19)),
        (7919, 1, (7919,)),
        (1, 3, (1, 1, 1)),
    ],
)
def test_sizes_of_known_models(size: int, count: int, modes: tuple[int, ...]) -> None:
    assert balanced_modes(size, count) == modes


def test_a_size_that_factors_is_not_padded() -> None:
    assert math.prod(balanced_modes(5461, 2)) == 5461


@pytest.mark.parametrize(("size", "count"), [(0, 2), (8, 0), (-3, 1)])
def test_impossible_splits_are_refused(size: int, count: int) -> None:
    with pytest.raises(TensorizeError, match="must be 1 or more"):
        balanced_modes(size, count)


@given(st.integers(16, 12_000), st.integers(16, 12_000))
@settings(max_examples=40, deadline=None)
def test_pairs_of_a_block_train(in_features: int, out_features: int) -> None:
    (m1, m0), (n0, n1) = block_modes(in_features, out_features)
    assert m1 <= m0
    assert n0 <= n1
    assert m1 * m0 >= in_features
    assert n0 * n1 >= out_features
    assert largest_block_rank((m1, m0), (n0, n1)) == min(m0, n1)


@pytest.mark.parametrize("blocks", [2, 4, 8, 16])
def test_monarch_has_the_parameters_of_the_paper(blocks: int) -> None:
    in_modes, out_modes = monarch_modes(1024, 1024, blocks)
    rank = monarch_rank(1024, 1024, blocks)
    parameters = rank * (1024 * out_modes[0] + 1024 * in_modes[0])
    assert parameters == 2 * 1024**2 // blocks


def test_monarch_follows_the_narrow_side_and_pads() -> None:
    assert monarch_rank(4096, 1024, 4) == monarch_rank(1024, 4096, 4) == 64
    assert monarch_modes(10, 7, 4) == ((4, 3), (4, 2))
    assert monarch_rank(10, 7, 4) == 1
    with pytest.raises(TensorizeError, match="blocks = 8"):
        monarch_modes(10, 7, 8)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.integers(1, 40),
)
def test_bond_ranks_are_usable(modes: list[int], rank: int) -> None:
    ranks = bond_ranks(rank, modes)
    assert all(one <= most for one, most in zip(ranks, largest_train_ranks(modes), strict=True))
    assert all(one <= rank for one in ranks)
    padded = (1, *ranks, 1)
    for bond, mode in enumerate(modes):
        assert padded[bond + 1] <= padded[bond] * mode
        assert padded[bond] <= padded[bond + 1] * mode


def test_bond_ranks_by_hand() -> None:
    assert largest_train_ranks((8, 8, 12, 12, 8, 8)) == (8, 64, 768, 64, 8)
    assert bond_ranks(30, (8, 8, 12, 12, 8, 8)) == (8, 30, 30, 30, 8)
    assert bond_ranks((2, 64, 64), (8, 8, 8, 8)) == (2, 16, 8)
    with pytest.raises(TensorizeError, match="one per bond"):
        bond_ranks((2, 2), (8, 8))
    with pytest.raises(TensorizeError, match="1 or more"):
        bond_ranks(0, (8, 8))


@given(st.integers(1, 5000), st.sampled_from([4, 8, 16]), st.none() | st.integers(1, 5000))
def test_rounded_ranks(rank: int, multiple: int, largest: int | None) -> None:
    rounded = rounded_rank(rank, multiple, largest=largest)
    assert rounded % multiple == 0 or rounded == largest
    if largest is None:
        assert rank <= rounded < rank + multiple
    else:
        assert 1 <= rounded <= largest


def test_rounding_refuses_nothing_to_round() -> None:
    assert rounded_rank(170, 16) == 176
    assert rounded_rank(170, 8) == 176
    assert rounded_rank(1, 16, largest=10) == 10
    with pytest.raises(TensorizeError, match="multiple = 0"):
        rounded_rank(4, 0)


def test_no_torch_at_import() -> None:
    code = "import sys, outlast.tensorize.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
