"""What gradient coding did, added up over steps and attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outlast.records import (
    CodingTotals,
    CorruptionDetected,
    Event,
    GradientsCoded,
    RecordWriter,
    RunDirectory,
    TrainingStarted,
    coding_totals,
    read_run,
)

if TYPE_CHECKING:
    from pathlib import Path


def coded(step: int, *stragglers: list[int], **changes: Any) -> GradientsCoded:
    """The steps up to `step`, one for each list of stragglers."""
    count = len(stragglers)
    known: dict[str, Any] = {
        "scheme": "coverage",
        "replicas": 4,
        "claims": [3 * len(each) for each in stragglers],
        "duplicates": [0] * count,
        "lost": [0] * count,
        "errors": [0.0] * count,
        "coded_seconds": [1.0] * count,
        "waiting_seconds": [3.0 if each else 0.9 for each in stragglers],
    }
    return GradientsCoded(step, stragglers=list(stragglers), **{**known, **changes})


@pytest.fixture
def totals_of(tmp_path: Path) -> Any:
    """A function from attempts, each a first step and its events, to the run's totals."""

    def make(*attempts: tuple[int, list[Event]]) -> CodingTotals | None:
        directory = RunDirectory(tmp_path / "run")
        directory.create("")
        for number, (first_step, events) in enumerate(attempts, start=1):
            writer = RecordWriter(directory.path, attempt=number)
            for event in (TrainingStarted(first_step, 1.0, {}), *events):
                writer.write(event)
            writer.close()
        return coding_totals(read_run(directory.path))

    return make


def test_a_run_without_coding_has_no_totals(totals_of: Any) -> None:
    assert totals_of((0, [])) is None


def test_steps_are_added_up(totals_of: Any) -> None:
    events = [coded(2, [], [1]), coded(5, [], [1, 3], [1], duplicates=[2, 0, 1])]
    found = totals_of((0, events))
    assert (found.scheme, found.replicas) == ("coverage", 4)
    assert [each.step for each in found.steps] == [1, 2, 3, 4, 5]
    assert [each.step for each in found.slow_steps] == [2, 4, 5]
    assert (found.claims, found.duplicates, found.lost) == (12, 3, 0)
    assert found.coded_seconds == 5.0
    assert {name: each.slow_steps for name, each in found.by_replica.items()} == {
        0: 0,
        1: 3,
        2: 0,
        3: 1,
    }


def test_time_is_saved_only_where_somebody_was_slow(totals_of: Any) -> None:
    # Waiting takes 3 s with a straggler; without, what its lower bound lacks is no loss of time.
    found = totals_of((0, [coded(4, [], [1], [], [1])]))
    assert found.saved_seconds == pytest.approx(4.0)
    assert found.waiting_seconds == pytest.approx(8.0)


def test_time_saved_is_never_below_nothing(totals_of: Any) -> None:
    found = totals_of((0, [coded(2, [1], [1], waiting_seconds=[1.2, 0.5])]))
    assert found.saved_seconds == 0.0
    assert found.waiting_seconds == pytest.approx(1.7)


@pytest.mark.parametrize(
    ("stragglers", "persistence"),
    [
        ([[1], [1], [1], [1]], 1.0),
        ([[1], [], [1], []], 0.0),
        ([[1], [1], [], []], 0.5),
        ([[0], [0], [0], [1]], None),
        ([[], [], [], []], None),
    ],
)
def test_persistence_is_the_share_of_slow_steps_after_slow_ones(
    stragglers: list[list[int]], persistence: float | None, totals_of: Any
) -> None:
    assert totals_of((0, [coded(4, *stragglers)])).by_replica[1].persistence == persistence


def test_steps_done_again_count_as_they_were_done_last(totals_of: Any) -> None:
    first = [coded(2, [1], [1]), coded(4, [1], [1])]
    found = totals_of((0, first), (2, [coded(4, [], []), coded(5, [2])]))
    assert [each.step for each in found.steps] == [1, 2, 3, 4, 5]
    assert [each.stragglers for each in found.steps] == [(1,), (1,), (), (), (2,)]


def test_steps_that_are_yet_to_be_done_again_do_not_count(totals_of: Any) -> None:
    found = totals_of((0, [coded(4, [1], [1], [1], [1])]), (2, [coded(3, [])]), (3, []))
    assert [each.stragglers for each in found.steps] == [(1,), (1,), ()]


def test_replicas_may_come_and_go(totals_of: Any) -> None:
    small = coded(6, [1], [1], replicas=2)
    found = totals_of((0, [coded(4, [3], [3], [3], [1])]), (4, [small]))
    assert found.replicas == 2
    assert (found.by_replica[1].steps, found.by_replica[1].slow_steps) == (6, 3)
    assert (found.by_replica[3].steps, found.by_replica[3].slow_steps) == (4, 3)
    assert found.by_replica[3].share == 0.75
    # Replica 3 was slow, but is not there any more.
    assert found.advice is None


def test_inexact_steps_are_told_from_exact_ones(totals_of: Any) -> None:
    found = totals_of(
        (0, [coded(4, [1], [], [1], [1], lost=[2, 0, 0, 0], errors=[2.4, 0, 0, 1.2])])
    )
    assert [each.step for each in found.inexact] == [1, 4]
    assert found.worst_error == 2.4
    assert found.mean_error == pytest.approx(0.9)
    assert found.lost == 2
    assert found.advice is not None
    assert "2 steps were made with an inexact gradient" in found.advice
    assert "up to 2.4" in found.advice


def test_a_replica_that_is_slow_most_of_the_time_should_be_replaced(totals_of: Any) -> None:
    slow = totals_of((0, [coded(100, *[[3]] * 94, *[[]] * 6)]))
    assert slow.advice == (
        "replica 3 was slow in 94 % of the steps: give it less work or replace it, coding hides "
        "it but does not remove it."
    )
    assert slow.by_replica[3].share == 0.94
    half = totals_of((0, [coded(100, *[[3], []] * 50)]))
    assert half.advice is None


def test_coding_that_saves_nothing_is_called_so(totals_of: Any) -> None:
    useless = coded(8, *[[1], [], [], []] * 2, waiting_seconds=[0.5] * 8)
    assert "saved no time" in totals_of((0, [useless])).advice
    quiet = totals_of((0, [coded(8, *[[]] * 8)]))
    assert quiet.advice.startswith("no replica was slow: coverage has cost next to nothing")
    fixed = totals_of((0, [coded(8, *[[]] * 8, scheme="cyclic_mds")]))
    assert "cyclic_mds lets every replica compute several shares" in fixed.advice


def test_different_gradients_of_one_chunk_are_told(totals_of: Any) -> None:
    wrong = [
        CorruptionDetected(step, "chunk 3", operation, "ranks 0 and 2", 2, 1, 0.3, "detected")
        for step, operation in ((1, "coding.duplicate"), (2, "linear.dw"), (3, "coding.duplicate"))
    ]
    found = totals_of((0, [*wrong, coded(4, [1], [], [], [])]))
    assert [each.step for each in found.disagreements] == [1, 3]
    assert "2 times two processes have got different gradients of a chunk" in found.advice
    assert "last ranks 0 and 2 in step 4" in found.advice


def test_a_few_steps_are_no_reason_for_advice(totals_of: Any) -> None:
    assert totals_of((0, [coded(3, [1], [1], [1])])).advice is None


def test_useful_coding_needs_no_advice(totals_of: Any) -> None:
    assert totals_of((0, [coded(8, [1], [], [2], [], [], [0], [], [])])).advice is None
