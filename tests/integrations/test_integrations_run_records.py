"""What `outlast.Run` records, what it guards, and what it refuses."""

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_runs import QUIET, SCRIPT, assert_same, finish, records, saved_steps, start, undisturbed
from running import outlast as outlast_command
from tensorboard.backend.event_processing import event_accumulator
from torch import nn

import outlast
from outlast.errors import CheckpointError, IntegrationError, JobError, OutlastError
from outlast.guard.findings import HARMFUL
from outlast.integrations.run import entries_of
from outlast.job import LoopJob, load_job, to_toml
from outlast.records import (
    AttemptEnded,
    CheckpointCopied,
    CheckpointRestored,
    CorruptionDetected,
    Guarded,
    MemoryMeasured,
    RunDirectory,
    StepsDone,
    Warned,
    energy_totals,
    forecast_of,
    read_run,
)
from outlast.report import write_report
from outlast.report.overview import load
from outlast.report.sections import KeyFigure, Unavailable, key_figures
from outlast.report.tables import job_table


def figures(folder: Path) -> dict[str, KeyFigure]:
    [overview] = load([folder / "runs" / "it"])
    return {each.label: each for each in key_figures(overview)}


@pytest.mark.distributed
@pytest.mark.supports("pytorch", "records", "energy", "plan")
def test_the_report_shows_loss_joules_saves_and_the_prediction(tmp_path: Path) -> None:
    meter = tmp_path / "joules"
    meter.write_text("1000.0\n")
    settings = [
        "energy.measure=true",
        f'energy.sources=["file:{meter}"]',
        "energy.region=SE",
        "energy.pue=1.5",
        "checkpoint.every_steps=12",
    ]
    finish(tmp_path, *settings, tokens=640, joules=str(meter), predicted=True)
    run = records(tmp_path)
    assert [step for step, _ in run.losses()] == [*range(3, 37, 3)]
    totals = energy_totals(run)
    assert totals is not None
    assert totals.joules == pytest.approx(360.0)
    assert totals.tokens == 36 * 640
    found = figures(tmp_path)
    assert found["Steps"].value == "36"
    assert found["Steps"].note == "of 36"
    assert found["Tokens"].value == "23,040"
    assert (found["Energy"].value, found["Energy"].unit) == ("360.0", "J")
    assert found["Checkpoints"].value == "3"
    assert saved_steps(tmp_path) == [12, 24, 36]
    assert not isinstance(found["Training loss"].value, Unavailable)
    forecast = forecast_of(run)
    assert forecast is not None
    compared = {each.name: each for each in forecast.compared()}
    assert compared["step time"].predicted == 0.5
    assert all(compared[name].measured for name in ("step time", "throughput", "peak memory"))
    write_report([tmp_path / "runs" / "it"], None)
    page = (tmp_path / "runs" / "it" / "report.html").read_text()
    assert "gCO2e" in page
    assert "Predicted and measured figures" in page


def logged(settings: list[str]) -> Path:
    """Three steps that tell figures of all kinds; the run's directory."""
    parts = small()
    model, optimizer = parts["model"], parts["optimizer"]
    with outlast.Run(**parts, settings=settings) as run:
        for number, batch in enumerate(run):
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            run.log(
                loss=loss,
                accuracy=torch.tensor(0.25 * number),
                gradient_norm=np.float32(2.0),
                words=np.int64(7),
                right=True,
            )
            # A second call adds to the first.
            run.log({"top/5@1": np.array([0.5]), "ratio": float("nan")})
    return run.directory


@pytest.mark.supports("pytorch", "records")
def test_named_figures_are_recorded_and_shown_by_the_report_and_the_trackers(
    tmp_path: Path,
) -> None:
    settings = [f'run.directory="{tmp_path}"', "log.every_steps=3", "log.tensorboard=true"]
    settings += ["checkpoint.writer=thread", "energy.measure=false"]
    with pytest.warns(UserWarning, match=r"ratio = nan up to step 3; it is recorded as it is"):
        directory = logged(settings)
    found = read_run(directory)
    [(_, event)] = found.of(StepsDone)
    assert math.isfinite(event.loss)
    assert event.gradient_norm == 2.0
    ratio = event.metrics.pop("ratio")
    assert math.isnan(ratio)
    assert event.metrics == {"accuracy": 0.25, "words": 7.0, "right": 1.0, "top/5@1": 0.5}
    assert any("ratio = nan" in warned.message for _, warned in found.of(Warned))
    write_report([directory], None)
    page = (directory / "report.html").read_text()
    for name in ("Metrics of the loop", "Median accuracy 0.2500", "No ratio is recorded"):
        assert name in page
    curves = event_accumulator.EventAccumulator(str(directory / "tensorboard")).Reload()
    assert {"metrics/accuracy", "metrics/top/5@1"} <= {*curves.Tags()["scalars"]}


@pytest.mark.distributed
@pytest.mark.supports("pytorch", "records")
def test_what_a_loop_does_not_tell_is_not_shown_as_zero(tmp_path: Path) -> None:
    finish(tmp_path, silent=True, stream=True, predicted=True)
    found = figures(tmp_path)
    for label in ("Training loss", "Throughput", "Tokens", "Energy"):
        assert isinstance(found[label].value, Unavailable), label
    assert found["Tokens"].value == Unavailable("the tokens of a step are not known")
    assert found["Steps"].note == ""
    forecast = forecast_of(records(tmp_path))
    assert forecast is not None
    [throughput] = [each for each in forecast.compared() if each.name == "throughput"]
    assert (throughput.measured, throughput.missing) == (
        None,
        "the tokens of a step are not known",
    )
    write_report([tmp_path / "runs" / "it"], None)
    page = (tmp_path / "runs" / "it" / "report.html").read_text()
    assert "loss not finite" not in page
    assert "training loss is nan" not in page
    assert "tokens trained on" not in page


@pytest.mark.distributed
@pytest.mark.supports("pytorch", "guard", "records")
def test_a_wrong_number_is_found_put_right_and_recorded(tmp_path: Path) -> None:
    other = undisturbed(tmp_path)
    finish(tmp_path, "guard.policy=linear", fault="linear.output:bit=29:step=4")
    assert_same(tmp_path, other)
    run = records(tmp_path)
    [(_, wrong)] = run.of(CorruptionDetected)
    assert (wrong.operation, wrong.outcome, wrong.step) == ("linear.forward", "corrected", 4)
    assert run.of(Guarded)[-1][1].checks > 36
    assert figures(tmp_path)["Silent data corruption"].value == "1"


@pytest.mark.distributed
@pytest.mark.supports("pytorch", "guard")
def test_numbers_that_stay_wrong_end_the_run_before_they_are_used(tmp_path: Path) -> None:
    other = undisturbed(tmp_path)
    settings = ["guard.policy=linear", "checkpoint.every_steps=5"]
    ended = start(tmp_path, *settings, fault="linear.output:bit=29:step=13:permanent")
    assert ended.code == 1
    assert "DataCorruptionError" in ended.said
    run = records(tmp_path)
    assert {each.outcome for _, each in run.of(CorruptionDetected)} <= set(HARMFUL)
    assert run.attempts[-1].outcome == "failed"
    finish(tmp_path, *settings)
    [(_, restored)] = records(tmp_path).of(CheckpointRestored)
    assert restored.step == 10
    assert_same(tmp_path, other)


@pytest.mark.distributed
def test_another_process_or_another_seed_is_refused_and_fresh_moves_aside(tmp_path: Path) -> None:
    finish(tmp_path, steps=4)
    directory = tmp_path / "runs" / "it"
    lock = RunDirectory(directory).lock()
    lock.acquire()
    ended = start(tmp_path)
    lock.release()
    assert ended.code == 1
    assert f"the run directory {directory} is in use" in ended.said
    ended = start(tmp_path, "run.seed=5")
    assert ended.code == 1
    assert "belongs to a run with other settings (run.seed: 0 -> 5)" in ended.said
    assert len(records(tmp_path).attempts) == 1
    finish(tmp_path, "run.seed=5", fresh=True)
    assert len(records(tmp_path).attempts) == 1
    assert records(tmp_path).of(CheckpointRestored) == []
    assert read_run(tmp_path / "runs" / "it.old1").steps()[-1][1].step == 4


def small() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [torch.ones(2)] * 3,
    }


def test_wrong_arguments_are_refused_with_what_would_be_right(tmp_path: Path) -> None:
    with pytest.raises(IntegrationError, match="epochs = 0 and steps = None leave nothing to do"):
        outlast.Run(**small(), epochs=0)
    with pytest.raises(IntegrationError, match=r"settings = \['run.seed=1'\] change a file's"):
        outlast.Run(LoopJob(), **small(), settings=["run.seed=1"])
    with pytest.raises(IntegrationError, match=r"state\['optimizer'\] is the name of another"):
        outlast.Run(**small(), state={"optimizer": nn.Linear(1, 1)})
    with pytest.raises(IntegrationError, match=r"state\['count'\] is a int, which has no state"):
        outlast.Run(**small(), state={"count": 3})
    with pytest.raises(JobError, match=r"\[train\] is a section of `outlast train`"):
        outlast.Run(**small(), settings=["train.steps=5"])
    run = outlast.Run(**small())
    with pytest.raises(IntegrationError, match="was given no figure"):
        run.log()
    with pytest.raises(IntegrationError, match=r"accuracy has the shape \(2,\), but is one number"):
        run.log(0.5, accuracy=torch.ones(2))
    with pytest.raises(IntegrationError, match=r"stage = 'warm' is a str, but run.log takes"):
        run.log(stage="warm")
    with pytest.raises(IntegrationError, match=r"within `with outlast\.Run"):
        next(iter(run))
    with pytest.raises(IntegrationError, match=r"loss has the shape \(3,\), but is one number"):
        run.log(torch.ones(3))


def test_several_models_are_one_entry_and_others_have_their_own() -> None:
    one, two, average = nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, two)]
    found = entries_of({"one": one, "two": two}, optimizers, {}, {"average": average})
    assert set(found) == {"model", "optimizer", "average"}
    assert set(found["model"].state_dict()) == {"one.weight", "one.bias", "two.weight", "two.bias"}
    assert not isinstance(found["average"], nn.Module)


@pytest.mark.distributed
@pytest.mark.supports("pytorch", "checkpoint", "resume")
def test_two_models_with_an_optimizer_each_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["checkpoint.writer=thread", "energy.measure=false"]

    def trained(name: str, *steps: int) -> list[torch.Tensor]:
        for last in steps:
            torch.manual_seed(3)
            models = {"maker": nn.Linear(4, 4), "judge": nn.Linear(4, 1)}
            optimizers = [torch.optim.Adam(each.parameters()) for each in models.values()]
            with outlast.Run(
                model=models,
                optimizer=optimizers,
                loader=[torch.full((2, 4), float(number)) for number in range(9)],
                steps=last,
                settings=[f"run.name={name}", *settings],
            ) as run:
                for batch in run:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                        models["judge"](models["maker"](batch)).square().mean().backward()
                        optimizer.step()
                with pytest.raises(IntegrationError, match="a Run is gone through once"):
                    next(iter(run))
        return [each for model in models.values() for each in model.parameters()]

    for one, other in zip(trained("whole", 9), trained("parts", 4, 9), strict=True):
        assert torch.equal(one, other)


@pytest.mark.distributed
def test_a_last_save_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    things = small()
    with (  # noqa: PT012
        pytest.raises(
            CheckpointError,
            match=r"step 3 could not be saved: .*cannot be made.*; no save of this start has",
        ),
        outlast.Run(**things, settings=["checkpoint.writer=thread"]) as run,
    ):
        for batch in run:
            things["model"](batch).sum().backward()
            things["optimizer"].step()
        # Nobody can write where a file is.
        folder = tmp_path / "runs" / "run" / "checkpoints"
        if folder.exists():
            folder.rename(folder.with_name("gone"))
        folder.write_text("")
    assert read_run(run.directory).attempts[-1].outcome == "failed"


@pytest.mark.distributed
def test_a_meter_that_is_refused_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["checkpoint.writer=thread", "energy.region=SE"]
    refused = pytest.raises(OutlastError, match="nowhere")
    with refused, outlast.Run(**small(), settings=[*quick, "energy.tariff=nowhere"]):
        pass
    directory = RunDirectory(tmp_path / "runs" / "run")
    [(_, ended)] = read_run(directory.path).of(AttemptEnded)
    assert (ended.outcome, "nowhere" in ended.reason) == ("failed", True)
    # Its lock is given up.
    with outlast.Run(**small(), settings=[*quick, "energy.measure=false"]):
        pass
    assert read_run(directory.path).attempts[-1].outcome == "left"


@pytest.mark.distributed
def test_a_loop_stands_beside_other_runs_with_the_settings_that_it_has(tmp_path: Path) -> None:
    finish(tmp_path, "checkpoint.keep=5", steps=3)
    trained = RunDirectory(tmp_path / "runs" / "trained")
    trained.create(to_toml(load_job(None, ["train.steps=700"])))
    found = job_table(load([tmp_path / "runs" / "it", trained.path]))
    rows = re.findall(
        r"<tr><th[^>]*>([\w.]+)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", found
    )
    settings = {name: (one, other, decides) for name, one, other, decides in rows}
    assert settings["checkpoint.keep"] == ("5", "3", "no")
    # What the script decides is no setting of its run.
    assert settings["train.steps"] == ("the script&#x27;s", "700", "yes")
    assert "run.seed" not in settings


@pytest.mark.distributed
def test_a_script_that_outlast_run_saves_already_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = outlast_command("run", script, json.dumps({"settings": QUIET}))
    assert ended.code == 2, ended.said
    assert "outlast.Run and `outlast run` would both save this script" in ended.said
    assert "Traceback" not in ended.said


@pytest.mark.distributed
def test_a_run_that_stops_records_the_last_copy_before_its_end(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    # The copy takes longer than the run needs to end.
    settings = (f'checkpoint.mirror="{mirror}"', "checkpoint.mirror_megabytes_per_s=0.05")
    assert start(tmp_path, *settings, plan="7 SIGTERM").code == 3
    run = records(tmp_path)
    [(ended, end)] = run.of(AttemptEnded)
    assert end.outcome == "to_be_continued"
    copied, copy = run.of(CheckpointCopied)[-1]
    assert copy.step == end.step
    assert copied.monotonic <= ended.monotonic


def test_a_copy_that_fails_is_told_on_the_way(tmp_path: Path) -> None:
    mirror, parts = tmp_path / "mirror", small()
    mirror.write_text("")
    settings = [f'run.directory="{tmp_path}"', "energy.measure=false", "checkpoint.every_steps=1"]
    settings += ["log.every_steps=1", f'checkpoint.mirror="{mirror}"', "checkpoint.writer=thread"]
    parts["loader"] = [torch.ones(2)] * 400
    with outlast.Run(**parts, settings=settings) as run:
        for _ in trained(run, parts):
            time.sleep(0.01)
            if any("mirror" in event.message for _, event in read_run(run.directory).of(Warned)):
                break
        else:
            pytest.fail("nothing was told before the end")


def test_memory_is_measured_on_the_way(tmp_path: Path) -> None:
    parts = small()
    settings = [f'run.directory="{tmp_path}"', "energy.measure=false", "log.every_steps=1"]
    parts["loader"] = [torch.ones(2)] * 400
    with outlast.Run(**parts, settings=settings) as run:
        for _ in trained(run, parts):
            time.sleep(0.01)
            if read_run(run.directory).of(MemoryMeasured):
                break
        else:
            pytest.fail("nothing was measured before the end")


def test_the_learning_rate_is_that_of_the_step(tmp_path: Path) -> None:
    parts = small()
    schedule = torch.optim.lr_scheduler.LambdaLR(parts["optimizer"], lambda step: 1 / (step + 1))
    settings = [f'run.directory="{tmp_path}"', "energy.measure=false", "log.every_steps=1"]
    with outlast.Run(**parts, settings=settings, state={"schedule": schedule}) as run:
        for _ in trained(run, parts):
            schedule.step()
    steps = [event for _, event in read_run(run.directory).of(StepsDone)]
    assert [step.learning_rate for step in steps] == pytest.approx([0.1, 0.05, 0.1 / 3])


def test_an_evaluation_counts_for_no_step(tmp_path: Path) -> None:
    parts = small()
    settings = [f'run.directory="{tmp_path}"', "energy.measure=false", "log.every_steps=1"]
    with outlast.Run(**parts, settings=settings) as run:
        for _ in trained(run, parts):
            with run.evaluating():
                time.sleep(0.3)
    steps = [event for _, event in read_run(run.directory).of(StepsDone)]
    assert all(step.seconds["evaluation"] >= 0.3 for step in steps)
    assert all(max(step.step_seconds) < 0.3 for step in steps)


@pytest.mark.distributed
def test_a_run_in_a_thread_trains_and_says_what_it_cannot(tmp_path: Path) -> None:
    parts = small()
    settings = [f'run.directory="{tmp_path}"', "energy.measure=false"]

    def work() -> None:
        with (
            pytest.warns(RuntimeWarning, match="outside of the main thread"),
            outlast.Run(**parts, settings=settings) as run,
        ):
            list(trained(run, parts))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert read_run(tmp_path / "run").attempts[-1].outcome == "completed"


def trained(run: outlast.Run, parts: dict[str, Any]) -> Iterator[None]:
    """Each step of the run, done."""
    for batch in run:
        loss = parts["model"](batch).sum()
        loss.backward()
        parts["optimizer"].step()
        yield


def test_a_run_is_named_by_its_directory_and_set_by_keywords(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, parts = tmp_path / "runs" / "a", small()
    saving = {"every_steps": 2, "keep": 5}
    with outlast.Run(
        runs, **parts, steps=4, epochs=9, checkpoint=saving, log={"every_steps": 1}
    ) as run:
        for _ in trained(run, parts):
            run.log(loss=1.0, accuracy=0.5)
    assert run.directory == runs
    assert run.job.checkpoint.every_steps == 2
    assert len(list(runs.glob("checkpoints/step-*"))) == 2
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"outlast: {runs} started: 4 steps"
    assert any(line.startswith("step 4/4  loss 1.0000") for line in said)
    assert (
        said[-1] == f"outlast: {runs} is complete after 4 steps; `outlast report {runs}` draws it"
    )
    with outlast.Run(
        runs, **parts, steps=6, epochs=9, checkpoint=saving, log={"every_steps": 1}
    ) as run:
        for _ in trained(run, parts):
            pass
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"outlast: {runs} resumed at step 4 of 6 from its checkpoint, saved \d+ s ago", said[0]
    )
    assert any(re.match(r"step 6/6  \S+ ms/step  eta 0 s", line) for line in said), "no loss"
    with outlast.Run(runs, **small(), steps=6, checkpoint=saving, progress=False) as run:
        pass
    assert "is complete: step 6" in capsys.readouterr().out


def test_wrong_keywords_and_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"checkpoint.every_step.*did you mean.*every_steps"):
        outlast.Run(tmp_path / "a", **small(), checkpoint={"every_step": 2})
    with pytest.raises(JobError, match=r"run.name"):
        outlast.Run(tmp_path / "a b", **small())
    with pytest.raises(IntegrationError, match=r"a job file ends in .toml"):
        outlast.Run(tmp_path / "job.yaml", **small())
    with pytest.raises(IntegrationError, match=r"guard = .* change a file's settings"):
        outlast.Run(LoopJob(), **small(), guard={"policy": "off"})


class Counter:
    """Something of the script's with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_state_added_in_the_run_comes_back_before_the_first_batch(tmp_path: Path) -> None:
    def train(steps: int) -> tuple[int, int]:
        counter, parts = Counter(), small()
        with outlast.Run(tmp_path / "a", **parts, epochs=9, steps=steps, progress=False) as run:
            run.state["counter"] = counter
            begun = counter.count
            for _ in trained(run, parts):
                counter.count += 1
        return begun, counter.count

    assert train(3) == (0, 3)
    assert train(5) == (3, 5)
    with outlast.Run(tmp_path / "a", **small(), epochs=9, steps=7, progress=False) as run:
        with pytest.raises(IntegrationError, match="name of another entry"):
            run.state["model"] = Counter()
        with pytest.raises(IntegrationError, match="has no state_dict"):
            run.state["number"] = 3
        with pytest.raises(CheckpointError, match="other"):
            run.state["other"] = Counter()
        for _ in run:
            with pytest.raises(IntegrationError, match="after the first batch"):
                run.state["late"] = Counter()
            break
