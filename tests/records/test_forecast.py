"""What was predicted beside what was measured."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.records import (
    AttemptEnded,
    AttemptStarted,
    EnergyMeasured,
    Event,
    MemoryMeasured,
    Predicted,
    RecordWriter,
    RunDirectory,
    StepsDone,
    TrainingStarted,
    forecast_of,
    measured_figures,
    predicted_words,
    read_run,
    scalars,
)
from outlast.records.forecast import after_warm_up, bytes_words, range_words, seconds_words

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.records import Compared, Run

GIB = 2**30
TOKENS = 64
PREDICTED = Predicted(
    step_seconds=0.31,
    step_seconds_low=0.28,
    step_seconds_high=0.35,
    memory_bytes=1.9 * GIB,
    memory_bytes_low=1.8 * GIB,
    memory_bytes_high=2.0 * GIB,
    tokens_per_s=TOKENS / 0.31,
    joules_per_token=0.5,
    joules_per_token_low=0.4,
    joules_per_token_high=0.6,
    run_seconds=140.0,
    run_seconds_low=130.0,
    run_seconds_high=150.0,
)


def steps(*seconds: float, done: int = 0) -> StepsDone:
    step = done + len(seconds)
    whole = {"compute": sum(seconds)}
    return StepsDone(step, len(seconds), 2.0, 1.0, 1e-3, step * TOKENS, list(seconds), whole)


def memory(**peaks: list[int]) -> MemoryMeasured:
    count = len(next(iter(peaks.values())))
    ranks: list[dict[str, Any]] = [
        {"rank": rank, "host": "node-17", **{f"{name}_bytes": p[rank] for name, p in peaks.items()}}
        for rank in range(count)
    ]
    return MemoryMeasured(20, ranks, "the kernel")


def joules(amount: float | None, count: int, *, carried: bool = False) -> EnergyMeasured:
    device: dict[str, Any] = {"name": "gpu 0", "part": "gpu", "host": "node-17", "rank": 0}
    device |= {"unavailable": "it stood", "carried": carried} if amount is None else {}
    device |= {} if amount is None else {"joules": amount, "kind": "measured"}
    return EnergyMeasured(count, count, count * TOKENS, 4.0, [device], {})


def run_of(path: Path, *attempts: list[Event], first_steps: tuple[int, ...] = (0, 0)) -> Run:
    directory = RunDirectory(path)
    directory.create("")
    for events, first in zip(attempts, first_steps, strict=False):
        writer = RecordWriter(path, attempt=directory.next_attempt())
        writer.write(AttemptStarted("f", 1, "single", {}, {}, {}, 40, 4, TOKENS, 1000, 6e3))
        for event in events:
            if isinstance(event, StepsDone):
                writer.write(TrainingStarted(first, 1.0, {}))
            writer.write(event)
        writer.close()
    return read_run(path)


def rows(run: Run) -> dict[str, Compared]:
    found = forecast_of(run)
    assert found is not None
    return {each.name: each for each in found.compared()}


def test_every_figure_is_compared_with_what_the_attempt_took(tmp_path: Path) -> None:
    events = [
        PREDICTED,
        steps(*[9.0] * 5, *[0.33] * 15),
        memory(resident=[2 * GIB, 3 * GIB]),
        joules(20 * TOKENS * 0.55, 20),
        AttemptEnded(20, "completed", "", {}),
    ]
    found = rows(run_of(tmp_path / "run", events))
    assert [each.inside for each in found.values()] == [True, True, False, True, False]
    assert found["step time"].measured == 0.33
    assert found["step time"].ratio == pytest.approx(0.33 / 0.31)
    assert found["throughput"].measured == pytest.approx(TOKENS / 0.33)
    assert found["throughput"].high == pytest.approx(TOKENS / 0.28)
    assert found["peak memory"].sentence() == (
        "predicted 1.9 GiB, measured 3.0 GiB (above the interval)"
    )
    assert found["energy per token"].measured == pytest.approx(0.55)
    assert found["whole run"].verdict == "below the interval"
    forecast = forecast_of(read_run(tmp_path / "run"))
    assert forecast is not None
    assert forecast.sentence().startswith(
        "time per step: predicted 0.31 s, measured 0.33 s (inside the interval); peak memory: "
    )


def test_a_run_without_a_prediction_has_its_measured_figures(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [steps(*[0.2] * 12), memory(resident=[7])])
    assert forecast_of(run) is None
    found = measured_figures(run)
    assert found is not None
    assert (found.step_seconds, found.steps) == (0.2, 7)
    assert found.memory is not None
    assert found.joules_per_token is None
    assert measured_figures(run, 5) is None


def test_what_is_not_recorded_is_missing_with_a_reason_and_not_zero(tmp_path: Path) -> None:
    found = rows(run_of(tmp_path / "run", [PREDICTED]))
    assert {each.measured for each in found.values()} == {None}
    assert {each.inside for each in found.values()} == {None}
    assert found["step time"].sentence() == (
        "predicted 0.31 s, measured unavailable: no step of the attempt is recorded"
    )


def test_no_row_for_what_was_not_predicted(tmp_path: Path) -> None:
    bare = replace(PREDICTED, joules_per_token=None, run_seconds=None)
    run = run_of(tmp_path / "run", [bare, steps(0.3)])
    assert list(rows(run)) == ["step time", "throughput", "peak memory"]


def test_the_last_prediction_counts_with_the_steps_of_its_own_attempt(tmp_path: Path) -> None:
    ended = AttemptEnded(2, "completed", "", {})
    first = [PREDICTED, steps(0.1, 0.1)]
    second = [replace(PREDICTED, step_seconds=0.9), steps(0.5, 0.5), ended]
    run = run_of(tmp_path / "run", first, second, first_steps=(0, 2))
    found = forecast_of(run)
    assert found is not None
    assert found.prediction.step_seconds == 0.9
    assert (found.measured.attempt, found.measured.step_seconds) == (2, 0.5)
    assert found.measured.run_seconds is None


@pytest.mark.parametrize(
    ("memory_of", "expected"),
    [("", 30), ("reserved", 30), ("allocated", 20), ("resident", 90), ("swapped", None)],
)
def test_memory_is_compared_with_the_kind_that_was_predicted(
    tmp_path: Path, memory_of: str, expected: int | None
) -> None:
    event = memory(resident=[90, 80], allocated=[10, 20], reserved=[30, 25])
    run = run_of(tmp_path / "run", [replace(PREDICTED, memory_of=memory_of), event])
    assert rows(run)["peak memory"].measured == expected


def test_memory_that_one_process_lacks_is_not_that_of_the_others() -> None:
    event = memory(resident=[90, 80], reserved=[30, 25])
    del event.ranks[1]["reserved_bytes"]
    assert event.most("reserved") is None
    assert event.most() == ("resident", 90)
    assert MemoryMeasured(1, [], "").most() is None
    assert scalars(event) == {"memory/resident_bytes": 90.0}


def test_energy_of_start_up_and_of_other_attempts_is_left_out(tmp_path: Path) -> None:
    first = [joules(1e6, 0), steps(*[0.1] * 4), joules(1e6, 4)]
    second = [PREDICTED, joules(7e5, 0), steps(*[0.1] * 8)]
    second += [joules(None, 4, carried=True), joules(4.0 * TOKENS, 4), joules(9e5, 0)]
    run = run_of(tmp_path / "run", first, second, first_steps=(0, 4))
    assert rows(run)["energy per token"].measured == pytest.approx(0.5)


@given(st.lists(st.floats(0.1, 10.0), max_size=300))
def test_warm_up_takes_at_least_five_steps_but_never_more_than_half(seconds: list[float]) -> None:
    left = after_warm_up(seconds)
    assert left == seconds[len(seconds) - len(left) :]
    assert 2 * len(left) >= len(seconds)
    skipped = len(seconds) - len(left)
    if len(seconds) >= 10:
        assert skipped >= 5
        assert skipped >= 0.1 * len(seconds)
        assert statistics.median(left) > 0


def test_the_prediction_in_words() -> None:
    assert predicted_words(PREDICTED) == (
        "predicted: 0.31 s per step (0.28 to 0.35 s), 1.9 GiB, 0.5 J per token, the whole run in "
        "2 min 20 s"
    )
    bare = replace(
        PREDICTED, joules_per_token=None, run_seconds=None, extrapolated=["bf16", "two nodes"]
    )
    assert predicted_words(bare) == (
        "predicted: 0.31 s per step (0.28 to 0.35 s), 1.9 GiB; extrapolated: bf16, two nodes"
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.00173, "1.73 ms"), (0.0999, "99.9 ms"), (0.314, "0.31 s"), (9.996, "10.0 s"),
     (59.96, "1 min"), (140.0, "2 min 20 s"), (3599.8, "1 h"), (30 * 3600 + 300, "30 h 5 min")],
)  # fmt: skip
def test_seconds_in_words(seconds: float, said: str) -> None:
    assert seconds_words(seconds) == said


def test_bytes_and_ranges_in_words() -> None:
    assert [bytes_words(each) for each in (2048, 5 * 2**20, 1.9 * GIB, 80 * GIB)] == [
        "2 KiB", "5 MiB", "1.9 GiB", "80.0 GiB",
    ]  # fmt: skip
    assert range_words("0.28 s", "0.35 s") == "0.28 to 0.35 s"
    assert range_words("90 ms", "0.12 s") == "90 ms to 0.12 s"
    assert range_words("1 min 5 s", "2 min 20 s") == "1 min 5 s to 2 min 20 s"
