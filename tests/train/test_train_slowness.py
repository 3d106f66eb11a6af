"""Ranks that are slower than the others are told of once, with a remedy."""

from outlast.recover.hang import WINDOW_SECONDS, WINDOWS
from outlast.runtime.watching import SlownessWatch


def test_what_ranks_share_adds_up_to_a_warning() -> None:
    ranks = [SlownessWatch(rank, 3) for rank in range(3)]
    told = []
    for _ in range(WINDOWS + 3):
        for rank, each in enumerate(ranks):
            each.add(WINDOW_SECONDS * (2.0 if rank == 1 else 1.0))
        total = [sum(column) for column in zip(*(each.share() for each in ranks), strict=True)]
        told += [warning.message for each in ranks if (warning := each.observe(total))]
    assert len(told) == len(ranks)
    assert told[0] == (
        "slower than the median rank for 50 s of work: rank 1 (2.00 times); look at that node, or "
        'let the others take work over with coding.scheme = "coverage"'
    )


def test_what_was_shared_is_not_shared_again() -> None:
    watch = SlownessWatch(1, 2)
    watch.add(3.0)
    assert watch.share() == [0.0, 3.0]
    assert watch.share() == [0.0, 0.0]
