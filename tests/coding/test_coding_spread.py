"""Who holds whose chunks: balance, distinctness, and equal tables everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.assignment import spread
from outlast.errors import CodingError

SIZES = st.integers(1, 24).flatmap(
    lambda workers: st.tuples(st.just(workers), st.integers(1, 9), st.integers(1, workers))
)


@settings(max_examples=80, deadline=None)
@given(SIZES, st.integers(0, 5))
def test_all_chunks_have_equally_many_holders_and_all_ranks_equally_many_chunks(
    size: tuple[int, int, int], seed: int
) -> None:
    workers, chunks, copies = size
    held = spread(workers, chunks, copies, seed=seed)
    assert held.backup_table.shape == (workers, chunks * (copies - 1))
    for chunk in range(held.chunks):
        holders = held.holders(chunk)
        assert holders[0] == held.owner(chunk) == chunk // chunks
        assert len(set(holders.tolist())) == copies
        assert all(chunk in held.backups(rank) for rank in holders[1:])


@settings(max_examples=80, deadline=None)
@given(SIZES)
def test_the_backups_of_a_rank_come_from_as_many_owners_as_can_be(
    size: tuple[int, int, int],
) -> None:
    workers, chunks, copies = size
    held = spread(workers, chunks, copies)
    backups = chunks * (copies - 1)
    for rank in range(workers):
        owners = np.bincount(held.backups(rank) // chunks, minlength=workers)
        assert owners[rank] == 0
        assert owners.sum() == backups
        others = np.delete(owners, rank)
        assert others.max(initial=0) - others.min(initial=backups) <= 1 or workers == 1


@settings(max_examples=50, deadline=None)
@given(SIZES)
def test_a_rank_looks_at_the_last_chunks_of_others_first(size: tuple[int, int, int]) -> None:
    workers, chunks, copies = size
    held = spread(workers, chunks, copies)
    for rank in range(workers):
        places = held.backups(rank) % chunks
        assert np.all(np.diff(places) <= 0)
        assert list(held.own(rank)) == [rank * chunks + place for place in range(chunks)]


def test_seeds_make_other_tables_and_the_same_seed_the_same() -> None:
    first, again, other = spread(12, 4, 3, seed=1), spread(12, 4, 3, seed=1), spread(12, 4, 3)
    assert np.array_equal(first.holder_table, again.holder_table)
    assert not np.array_equal(first.holder_table, other.holder_table)


def test_the_tables_are_the_same_on_all_machines() -> None:
    # Ranks with other versions of numpy must not disagree about who holds what.
    table = spread(5, 2, 2, seed=3).holder_table[:, 1].tolist()
    assert table == [3, 4, 0, 3, 1, 0, 4, 2, 2, 1]


def test_ten_thousand_ranks_are_no_matter() -> None:
    held = spread(10_000, 8, 3)
    assert np.all(np.bincount(held.backup_table.ravel(), minlength=held.chunks) == 2)


@pytest.mark.parametrize(
    ("size", "named"),
    [
        ((0, 1, 1), "workers = 0"),
        ((4, 0, 1), "chunks_per_worker = 0"),
        ((4, 2, 5), "from 1 to 4"),
        ((4, 2, 0), "from 1 to 4"),
    ],
)
def test_impossible_sizes_are_refused_by_name(size: tuple[int, int, int], named: str) -> None:
    with pytest.raises(CodingError, match=named):
        spread(*size)
