"""What follows from wrong values, the same on all ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import GuardError
from outlast.guard.handle import ATTEMPTS, Remedy, Terms, Verdict, agree, remedy

SIZE = 4
subsets = st.sets(st.integers(0, SIZE - 1)).map(lambda ranks: tuple(sorted(ranks)))


def wrong(*ranks, results=()):
    return Verdict(5, tuple(sorted({*ranks, *results})), results)


def test_a_first_failure_is_redone():
    assert remedy([wrong(1)], "drop", SIZE) == Remedy("redo")
    assert remedy([wrong(1)], "raise", SIZE) == Remedy("redo")


def test_the_same_rank_twice_is_dropped_or_ends_the_run():
    assert remedy([wrong(1), wrong(1, 3)], "drop", SIZE) == Remedy("drop", (1,))
    assert remedy([wrong(1), wrong(1)], "raise", SIZE) == Remedy("raise")


def test_two_transients_on_different_ranks_are_no_persistent_fault():
    assert remedy([wrong(1), wrong(2)], "raise", SIZE) == Remedy("redo")


def test_wrong_results_of_collectives_and_failing_majorities_cannot_be_dropped():
    assert remedy([wrong(1), wrong(1, results=(2,))], "drop", SIZE) == Remedy("raise")
    everyone = wrong(0, 1, 2, 3)
    assert remedy([everyone, everyone], "drop", SIZE) == Remedy("raise")


@given(
    history=st.lists(
        st.builds(lambda own, results: wrong(*own, results=results), subsets, subsets).filter(
            lambda verdict: not verdict.clean
        ),
        min_size=1,
        max_size=ATTEMPTS,
    ),
    persistent=st.sampled_from(["raise", "drop"]),
)
def test_only_ranks_that_failed_again_are_dropped_and_attempts_end(history, persistent):
    follows = remedy(history, persistent, SIZE)
    if len(history) == ATTEMPTS:
        assert follows.action == "raise"
    if follows.action == "drop":
        assert persistent == "drop"
        assert 0 < len(follows.ranks) < SIZE
        assert all(set(follows.ranks) <= set(each.bad_ranks) for each in history[-2:])
    else:
        assert follows.ranks == ()


def test_somebody_remains_or_nothing_is_averaged():
    terms = Terms(dropped=(1, 5))
    assert terms.remaining([0, 1, 2, 3]) == 3
    with pytest.raises(GuardError, match="all dropped"):
        terms.remaining([1, 5])


@pytest.mark.distributed
def test_all_ranks_hear_the_same_verdict(ranks):
    def work():
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        return [
            agree(7, 0),
            agree(7, 3 if rank == 1 else 0),
            agree(7, int(rank == 1), int(rank in (0, 2))),
            agree(7, int(rank == 1), dropped=(1,)),
        ]

    for verdicts in ranks(3)(work):
        assert verdicts == [
            Verdict(7, ()),
            Verdict(7, (1,)),
            Verdict(7, (0, 1, 2), (0, 2)),
            Verdict(7, (), dropped=(1,)),
        ]
