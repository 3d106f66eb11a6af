"""Losses and recoveries in the report, on the terminal and added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from report_runs import run_with
from test_report import page_of, visible

from outlast.records import (
    MemberLost,
    MembershipChanged,
    RecordWriter,
    StateRecovered,
    read_run,
    recovery_totals,
    recovery_words,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from report_runs import RunMaker

LOST = MemberLost(12, "rank 2", "dead", 0.15, "killed in phase reduce")
RECOVERED = StateRecovered(11, "memory", 0.25, 1, 5_000_000, ["parity: <two> are gone"])
CHANGED = MembershipChanged(12, 4, 3, "resized", 2.5)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (LOST, "step 12: rank 2 dead: killed in phase reduce"),
        (MemberLost(3, "group 1", "hung", 9.0), "step 3: group 1 hung"),
        (
            RECOVERED,
            "step 11: state taken from memory in 0.25 s, 1 step again; parity: <two> are gone",
        ),
        (StateRecovered(7, "peer", 1.0, 0, 1), "step 7: state taken from a peer in 1.00 s"),
        (CHANGED, "step 12: 3 in the place of 4 (resized), 2.50 s without a step"),
    ],
)
def test_an_event_is_one_line(
    event: MemberLost | StateRecovered | MembershipChanged, words: str
) -> None:
    assert recovery_words(event) == words


def test_the_report_shows_who_was_lost_and_where_the_state_came_from(
    new_run: Callable[[], RunMaker],
) -> None:
    run = new_run()
    page = page_of(run_with(run, LOST, RECOVERED, CHANGED))
    words = visible(page)
    assert (
        "Losses and recoveries: dead 1 time; state from memory 1 time; steps done again: 1" in words
    )
    assert "rank 2 dead: killed in phase reduce" in words
    assert "<two>" not in page
    # On the timeline: a failure, a restore, a change of members.
    assert "1 membership" in page


def test_a_run_without_losses_says_so(new_run: Callable[[], RunMaker]) -> None:
    run = new_run()
    assert "Nobody was lost." in visible(page_of(run_with(run)))
    assert recovery_totals(read_run(run.path)) is None


def test_losses_that_other_ranks_have_noticed_count(new_run: Callable[[], RunMaker]) -> None:
    run = new_run()
    made = run_with(run, LOST, MemberLost(20, "rank 1", "hung", 60.0))
    other = RecordWriter(made.path, rank=3)
    other.write(MemberLost(30, "rank 0", "dead", 1.0))
    other.close()
    totals = recovery_totals(read_run(made.path))
    assert totals is not None
    assert (totals.causes, totals.lost_steps) == ({"dead": 2, "hung": 1}, 0)
    assert totals.sentence() == "dead 2 times, hung 1 time"
    assert "step 30: rank 0 dead" in visible(page_of(made))
