"""`outlast.Run` in a hand-written loop: killed, stopped and left at any step, with one result."""

import warnings
from pathlib import Path

import pytest
import torch
from loop_runs import assert_same, finish, records, saved_steps, start, undisturbed

from outlast.integrations.run import Run
from outlast.records import AttemptEnded, CorruptionDetected, StateRecovered, StopRequested

pytestmark = pytest.mark.distributed

EVERY_5 = "checkpoint.every_steps=5"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs in one go, with the settings' defaults."""
    return undisturbed(tmp_path_factory.mktemp("run"))


@pytest.mark.supports("pytorch", "checkpoint", "resume", "records")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_is_killed_ends_with_the_bits_of_one_that_is_not(
    tmp_path: Path, whole: Path, workers: int
) -> None:
    # Before the first save, between saves, in the last step of an epoch, in the first of another.
    for step in (3, 7, 11, 12):
        ended = start(tmp_path, EVERY_5, plan=f"{step} SIGKILL", workers=workers)
        assert ended.code == -9, ended.said
    finish(tmp_path, EVERY_5, workers=workers)
    assert_same(tmp_path, whole)
    run = records(tmp_path)
    assert [each.outcome for each in run.attempts] == ["died"] * 4 + ["completed"]
    assert [event.step for _, event in run.steps()][-1] == 36


@pytest.mark.supports("pytorch", "checkpoint", "resume")
def test_a_writer_process_saves_as_often_as_is_best(tmp_path: Path, whole: Path) -> None:
    settings = ["checkpoint.writer=process", 'checkpoint.every_steps="auto"']
    assert start(tmp_path, *settings, plan="25 SIGKILL").code == -9
    finish(tmp_path, *settings)
    assert_same(tmp_path, whole)
    assert saved_steps(tmp_path)[-1] == 36


@pytest.mark.supports("pytorch", "chain", "resume", "records")
def test_signals_stop_after_the_step_with_exit_code_3(tmp_path: Path, whole: Path) -> None:
    for step, signal in ((9, "SIGTERM"), (14, "SIGUSR1"), (20, "SIGINT")):
        ended = start(tmp_path, plan=f"{step} {signal}")
        assert ended.code == 3, ended.said
        sentence = (
            f"stopped after step {step + 1} ({signal}); the same command continues from there"
        )
        assert sentence in ended.said
    finish(tmp_path)
    assert_same(tmp_path, whole)
    run = records(tmp_path)
    assert [event.step for _, event in run.of(StopRequested)] == [10, 15, 21]
    ends = [(end.outcome, end.reason) for _, end in run.of(AttemptEnded)]
    stops = [("to_be_continued", signal) for signal in ("SIGTERM", "SIGUSR1", "SIGINT")]
    assert ends == [*stops, ("completed", "")]
    # Nothing was done twice.
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 36


@pytest.mark.supports("pytorch", "guard", "resume", "records")
def test_after_a_memory_fault_the_next_start_continues_from_before_it(tmp_path: Path) -> None:
    # Of two iterations one updates the weights: steps of the loop are none of the guard.
    whole = undisturbed(tmp_path, accumulate=2)
    settings = ["guard.policy=full", "checkpoint.every_steps=4"]
    ended = start(tmp_path, *settings, plan="13 flip", accumulate=2)
    assert ended.code == 1
    assert "DataCorruptionError: step 8: the numbers of rank 0 are wrong" in ended.said
    assert "went back to step 12; the same command continues from there" in ended.said
    finish(tmp_path, *settings, accumulate=2)
    assert_same(tmp_path, whole)
    run = records(tmp_path)
    [(_, back)] = run.of(StateRecovered)
    assert (back.step, back.source, back.lost_steps) == (12, "shared", 3)
    assert [event.outcome for _, event in run.of(CorruptionDetected)] == ["restored"]
    assert [attempt.first_step for attempt in run.attempts] == [0, 12]


@pytest.mark.supports("pytorch", "resume", "records")
def test_a_loop_that_is_left_is_saved_and_one_that_fails_is_not(
    tmp_path: Path, whole: Path
) -> None:
    finish(tmp_path, plan="4 break")
    # A batch that nothing was done with comes again.
    finish(tmp_path, plan="9 leave")
    ended = start(tmp_path, plan="13 raise")
    assert ended.code == 1
    assert "ValueError: it went wrong" in ended.said
    finish(tmp_path)
    assert saved_steps(tmp_path) == [5, 9, 36]
    assert_same(tmp_path, whole)
    ends = [(end.outcome, end.reason) for _, end in records(tmp_path).of(AttemptEnded)]
    failed = ("failed", "ValueError: it went wrong")
    assert ends == [("left", ""), ("left", ""), failed, ("completed", "")]


@pytest.mark.supports("pytorch", "resume")
def test_a_run_that_was_complete_can_be_made_longer(tmp_path: Path, whole: Path) -> None:
    finish(tmp_path, steps=5)
    finish(tmp_path, epochs=2)
    # There is nothing to do, which is said, with when it was over and what can be done.
    again = start(tmp_path, epochs=2)
    assert again.code == 0
    for part in ("runs/it is complete: step 24, since 20", "give a larger epochs", "fresh=True"):
        assert part in again.said
    third = start(tmp_path, epochs=2)
    assert third.said.splitlines()[-1] == again.said.splitlines()[-1]
    finish(tmp_path, epochs=3)
    assert saved_steps(tmp_path) == [5, 24, 36]
    assert_same(tmp_path, whole)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 36


def test_a_last_step_that_was_saved_on_the_way_completes_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with Run(
            tmp_path / "run",
            model=model,
            optimizer=optimizer,
            loader=[torch.ones(1, 2)] * 6,
            checkpoint={"every_steps": 3},
        ) as run:
            for batch in run:
                model(batch).sum().backward()
                optimizer.step()
    assert "is complete: step 6, since 20" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("progress", [False, True])
def test_what_could_not_be_restored_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: bool, progress: bool
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps: int) -> None:
        with Run(
            tmp_path / "run",
            model=model,
            optimizer=optimizer,
            loader=[torch.ones(1, 2)] * steps,
            checkpoint={"every_steps": 3},
            progress=progress,
        ) as run:
            for batch in run:
                model(batch).sum().backward()
                optimizer.step()

    train(6)
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    if damaged:
        [pack] = saved[-1].glob("*.pack")
        pack.write_bytes(bytes(pack.stat().st_size))
    else:
        for version in saved:
            for manifest in version.glob("*.json"):
                manifest.unlink()
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(9)
    shown = "".join(capsys.readouterr())
    told = [shown, *(str(each.message) for each in said)]
    words = "rank-00000-of-00001.pack is damaged" if damaged else "nothing is restored from"
    assert sum(text.count(words) for text in told) == 1, told
