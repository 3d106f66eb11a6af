"""The guarantees of every driver of the runtime, stated once: a case drives it through an accident.

A case is given the driver, a folder, and `whole`, which gives the undisturbed training of a way.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driving import PER_EPOCH, STEPS, Driver, Way, assert_same, versions

from outlast.records import (
    AttemptEnded,
    CheckpointFailed,
    CheckpointRestored,
    CorruptionDetected,
    StateRecovered,
    StepsDone,
    StopRequested,
)

Whole = Callable[..., Way]

GUARDED = ("guard.policy=linear",)


def outcomes(driver: Driver, way: Way) -> list[str]:
    return [attempt.outcome for attempt in driver.records(way).attempts]


def lines(way: Way) -> int:
    """Steps that were done, those that were done again included."""
    return len((way.folder / "losses").read_text().splitlines())


def killed(driver: Driver, folder: Path, whole: Whole) -> None:
    """Killed before the first save, in an update, in a save, and late: the same bits in the end."""
    way = Way(folder)
    for plan in driver.kills:
        assert driver.start(way, plan) == [None], plan
    driver.finish(way)
    assert_same(way, whole())
    if driver.run:
        assert outcomes(driver, way) == ["died"] * len(driver.kills) + ["completed"]
        run = driver.records(way)
        assert run.steps()[-1][1].step == STEPS
        assert [event.step for _, event in run.of(CheckpointRestored)][-1] == 8


def damaged(driver: Driver, folder: Path, whole: Whole) -> None:
    """A newest version with a wrong bit is passed over for the one before it."""
    way = Way(folder)
    assert driver.start(way, "11 kill_saved") == [None]
    steps = sorted(versions(folder))
    assert steps == [4, 8]
    largest = max(versions(folder)[8].rglob("*"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    driver.finish(way)
    assert_same(way, whole())
    if driver.run:
        assert [event.step for _, event in driver.records(way).of(CheckpointRestored)] == [4]


def stopped(driver: Driver, folder: Path, whole: Whole) -> None:
    """Signals stop it after the step, saved, with exit code 3; nothing is done twice."""
    way = Way(folder)
    for plan in ("2 SIGTERM", "7 SIGINT"):
        assert driver.start(way, plan) == [3], plan
    driver.finish(way)
    assert_same(way, whole())
    assert lines(way) == STEPS
    if not driver.run:
        return
    run = driver.records(way)
    ends = [(event.outcome, event.reason) for _, event in run.of(AttemptEnded)]
    continued = [("to_be_continued", "SIGTERM"), ("to_be_continued", "SIGINT")]
    assert ends == [*continued, ("completed", "")]
    stops = [event.step for _, event in run.of(StopRequested)]
    assert stops == [event.step for _, event in run.of(AttemptEnded)][:2] or not stops
    restored = [event.step for _, event in run.of(CheckpointRestored)]
    assert len(restored) == 2
    assert restored[0] in (2, 3)
    assert restored[1] in (7, 8)


def job_ends(driver: Driver, folder: Path, whole: Whole) -> None:
    """The end of a job's time stops it in the same way."""
    way = Way(folder)
    assert driver.start(way, "5 end") == [3]
    [(_, end)] = driver.records(way).of(AttemptEnded)
    assert (end.outcome, end.step) in [("to_be_continued", 5), ("to_be_continued", 6)]
    driver.finish(way)
    assert_same(way, whole())
    assert lines(way) == STEPS


def broken(driver: Driver, folder: Path, whole: Whole) -> None:
    """A loop that is left by ``break`` is saved, and continues behind its last step."""
    way = Way(folder)
    assert driver.start(way, "5 break") == [0]
    assert driver.saved(way) == [4, 5]
    driver.finish(way)
    assert_same(way, whole())
    assert lines(way) == STEPS
    assert outcomes(driver, way) == ["left", "completed"]


def failed(driver: Driver, folder: Path, whole: Whole) -> None:
    """An error ends it without a save; the next start continues from the last one."""
    way = Way(folder)
    assert driver.start(way, "6 raise") == [1]
    assert "ValueError: it went wrong" in (folder / "error0").read_text()
    driver.finish(way)
    assert_same(way, whole())
    if driver.run:
        first = "failed" if driver.sees_errors else "died"
        assert outcomes(driver, way) == [first, "completed"]
        assert 6 not in driver.saved(way)


def failed_on_one_rank(driver: Driver, folder: Path, whole: Whole) -> None:
    """An error on one rank ends the others too; all continue together, from the last save."""
    way = Way(folder, ranks=2, dropout=0.0)
    codes = driver.start(way, "6 raise 1")
    assert codes[1] == 1
    assert codes[0] not in (0, 3)
    driver.finish(way)
    assert_same(way, whole(ranks=2, dropout=0.0))


def accumulated(driver: Driver, folder: Path, whole: Whole) -> None:
    """A save that is due within an accumulation waits for the update; a restart begins there."""
    way = Way(folder, accumulate=2, every=3)
    kill, last = (9, STEPS) if driver.counts_batches else (5, STEPS // 2)
    assert driver.start(way, f"{kill} SIGKILL") == [None]
    driver.finish(way)
    assert_same(way, whole(accumulate=2, every=3))
    if driver.run:
        saved = driver.saved(way)
        assert saved[-1] == last
        assert not driver.counts_batches or all(step % 2 == 0 for step in saved)


def corrected(driver: Driver, folder: Path, whole: Whole) -> None:
    """One wrong number is corrected, or its step repeated: no bit differs, and it is recorded."""
    way = Way(folder, settings=GUARDED, fault="linear.output:bit=29:step=4")
    driver.finish(way)
    assert_same(way, whole())
    found = [event for _, event in driver.records(way).of(CorruptionDetected)]
    assert {event.step for event in found} == {4}
    assert {event.outcome for event in found} <= {"corrected", "repeated"}


def wrong(driver: Driver, folder: Path, whole: Whole) -> None:
    """Numbers that stay wrong end it before they are used; the next start reads a checkpoint."""
    way = Way(folder, settings=GUARDED, fault="linear.output:bit=29:step=6:permanent")
    assert driver.start(way) not in ([0], [3])
    assert any("wrong" in file.read_text() for file in folder.glob("error0"))
    driver.finish(replace(way, fault=""))
    assert_same(way, whole())
    assert not driver.records(way).of(StateRecovered)


def flipped(driver: Driver, folder: Path, whole: Whole) -> None:
    """Weights that change in memory behind the last update before a stop are not saved."""
    way = Way(folder, settings=("guard.policy=full",))
    codes = driver.start(way, "6 flip")
    if driver.name == "trainer":
        # It goes back to what it has in memory, does the step again, and saves what is right.
        assert codes == [3]
        assert max(versions(folder)) in (6, 7)
    else:
        assert codes not in ([0], [3])
        assert 6 not in versions(folder)
    driver.finish(way)
    assert_same(way, whole())


def resized(driver: Driver, folder: Path, whole: Whole) -> None:
    """Another number of processes continues with the same samples, in another order of sums."""
    way = Way(folder, ranks=2, dropout=0.0)
    codes = driver.start(way, "6 SIGTERM 1")
    # Processes that Lightning has started itself may end with 0 alone, or it calls that a failure.
    assert codes[0] == 3
    assert codes[1] in (0, 3)
    driver.finish(replace(way, ranks=1))
    assert way.losses() == pytest.approx(whole(ranks=2, dropout=0.0).losses(), rel=1e-3)


def kept(driver: Driver, folder: Path, whole: Whole) -> None:
    """A restart by a launcher continues from memory; without that, from the newest checkpoint."""
    way = Way(folder, kept=True, every=5)
    assert driver.start(way, "3 SIGKILL") == [None]
    assert driver.start(replace(way, start=1), "9 kill_saved") == [None]
    shutil.rmtree(folder / "memory")
    driver.finish(replace(way, start=2))
    assert_same(way, whole(kept=True, every=5))
    run = driver.records(way)
    [(_, recovered)] = run.of(StateRecovered)
    # The last step that was done may not have been kept.
    assert (recovered.source, recovered.step) in [("memory", 2), ("memory", 3)]
    assert [event.step for _, event in run.of(CheckpointRestored)] == [5]
    # All is on disk in the end, and nothing is left in memory.
    assert not list((folder / "memory").rglob("rank-*"))


def complete(driver: Driver, folder: Path, whole: Whole) -> None:
    """A run that is complete does nothing when it is started again."""
    way = driver.finish(Way(folder))
    driver.finish(way)
    assert_same(way, whole())
    assert lines(way) == STEPS
    if driver.run:
        assert outcomes(driver, way) == ["completed"] * 2


def extended(driver: Driver, folder: Path, whole: Whole) -> None:
    """A run that was complete can be made longer."""
    way = Way(folder)
    driver.finish(replace(way, steps=PER_EPOCH + 1))
    driver.finish(way)
    assert_same(way, whole())
    assert lines(way) == STEPS


def metrics(driver: Driver, folder: Path, whole: Whole) -> None:
    """Figures of NumPy and torch are recorded beside the loss, also where they are not finite."""
    way = driver.finish(Way(folder, metrics=True))
    steps: list[Any] = [event for _, event in driver.records(way).of(StepsDone)]
    assert {(event.metrics["a"], event.metrics["b"]) for event in steps} == {(2.0, 4.0)}
    assert all(math.isnan(event.metrics["c"]) for event in steps)
    assert [event.loss for event in steps] == pytest.approx([*way.losses().values()])


def full(driver: Driver, folder: Path, whole: Whole) -> None:
    """A disk that is full stops no training, but ends it with an error where its end is lost."""
    way = Way(folder)
    driver.finish_after(way, "4 full")
    assert_same(way, whole())
    assert [event.step for _, event in driver.records(way).of(CheckpointFailed)] == [4]
    assert driver.saved(way) == [8, STEPS]
    lost = Way(folder / "lost")
    assert driver.start(lost, f"{STEPS} full") == [1]
    assert "No space left on device" in (lost.folder / "error0").read_text()
    assert outcomes(driver, lost) in (["failed"], ["died"])


CASES: dict[str, Callable[[Driver, Path, Whole], None]] = {
    case.__name__: case
    for case in (
        *(killed, damaged, stopped, job_ends, broken, failed, failed_on_one_rank, accumulated),
        *(corrected, wrong, flipped, resized, kept, complete, extended, metrics, full),
    )
}
"""By name."""
