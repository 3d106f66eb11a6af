"""Guard, records, energy and stop in torchtitan's own trainer."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from forked import run_ranks

pytest.importorskip("torchtitan", reason="pip install 'outlast[torchtitan]'")

from titan_trainer import LENGTH, SAMPLES, STEPS, Outcome, Plan, recipe, train
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.trainer import Trainer

from outlast.errors import EXIT_TO_BE_CONTINUED, IntegrationError, JobError
from outlast.integrations.torchtitan import OutlastTrainer, job_of, use_outlast
from outlast.records import (
    AttemptStarted,
    CheckpointRestored,
    CheckpointSaved,
    CorruptionDetected,
    EnergyMeasured,
    Guarded,
    StateRecovered,
    StepsDone,
    StopRequested,
    read_run,
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

QUIET = "energy.measure = false\nlog.every_steps = 1\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What torchtitan's own trainer does without Outlast."""
    first, second = run_ranks(2, train, Plan(tmp_path_factory.mktemp("whole") / "run"))
    assert first == second
    assert [*first.losses] == list(range(1, STEPS + 1))
    assert first.losses[STEPS] < first.losses[1]
    return first


@pytest.mark.supports("torchtitan", "records", "energy", "guard")
def test_a_guarded_run_has_the_bits_of_one_without_and_its_records(
    tmp_path: Path, whole: Outcome
) -> None:
    meter = tmp_path / "joules"
    meter.write_text("10.0\n")
    job = (
        f'guard.policy = "linear"\nlog.every_steps = 1\nenergy.sources = ["file:{meter}"]\n'
        "energy.every_steps = 1\n"
    )
    plan = Plan(tmp_path / "run", job, meter=meter)
    assert run_ranks(2, train, plan) == [whole, whole]
    run = read_run(tmp_path / "run")
    assert [each.outcome for each in run.attempts] == ["completed"]
    assert dict(run.losses()) == whole.losses
    [(_, started)] = run.of(AttemptStarted)
    assert (started.total_steps, started.samples_per_step) == (STEPS, SAMPLES)
    assert started.tokens_per_step == SAMPLES * LENGTH
    assert started.parallel["shard"] == 2
    assert started.versions["torchtitan"].startswith("0.3")
    assert started.flops_per_token > 0
    steps = [event for _, event in run.of(StepsDone)]
    assert all(each.gradient_norm > 0 and each.learning_rate > 0 for each in steps)
    spent = {purpose for each in steps for purpose in each.seconds}
    assert {"data", "compute", "checkpoint"} <= spent
    assert [event.step for _, event in run.of(CheckpointSaved)] == [4, 8]
    assert run.of(Guarded)[-1][1].checks > 0
    joules = [
        device["joules"]
        for _, event in run.of(EnergyMeasured)
        for device in event.devices
        if "joules" in device
    ]
    assert sum(joules) == pytest.approx(2.0 * STEPS)


@pytest.mark.supports("torchtitan", "guard")
def test_a_step_is_done_again_where_its_numbers_are_wrong(tmp_path: Path, whole: Outcome) -> None:
    fault = "linear.saved:bit=29:step=2:module=layers.0.*.w1:rank=1"
    job = f'{QUIET}guard.policy = "linear"\n'
    first, second = run_ranks(2, train, Plan(tmp_path / "run", job, fault=fault))
    assert (first.digest, second.digest) == (whole.digest, whole.digest)
    assert first.losses == pytest.approx(whole.losses, rel=1e-6)
    # Tokens of passes that are made again count once.
    assert (first.tokens, second.tokens) == (whole.tokens, whole.tokens)
    found = [event for _, event in read_run(tmp_path / "run").of(CorruptionDetected)]
    assert {(each.step, each.outcome, each.found_on) for each in found} == {(2, "repeated", 1)}


@pytest.mark.supports("torchtitan", "chain", "resume", "records")
def test_a_signal_ends_with_code_3_and_the_same_command_goes_on(
    tmp_path: Path, whole: Outcome
) -> None:
    folder = tmp_path / "run"
    first, second = run_ranks(2, train, Plan(folder, QUIET, interval=100, signals_at=3))
    assert (first.code, second.code) == (EXIT_TO_BE_CONTINUED, EXIT_TO_BE_CONTINUED)
    assert first.step == second.step
    resumed, _ = run_ranks(2, train, Plan(folder, QUIET, interval=100))
    assert {**first.losses, **resumed.losses} == whole.losses
    assert min(resumed.losses) == first.step + 1
    assert (resumed.code, resumed.digest) == (0, whole.digest)
    run = read_run(folder)
    assert [each.outcome for each in run.attempts] == ["to_be_continued", "completed"]
    assert [event.step for _, event in run.of(StopRequested)] == [first.step]
    assert [event.step for _, event in run.of(CheckpointRestored)] == [first.step]
    assert dict(run.losses()) == whole.losses


RECIPE = """
from outlast.integrations.torchtitan import use_outlast
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3.config_registry import llama3_debugmodel

def my_run():
    config = use_outlast(llama3_debugmodel(), "job.toml", enable=True, timeout_seconds=60.0)
    config.activation_checkpoint = FullAC.Config()
    return config
"""


def test_a_signal_before_the_first_step_completes_nothing(tmp_path: Path) -> None:
    found = run_ranks(2, train, Plan(tmp_path / "run", QUIET, signals_loading=True))
    assert [outcome.code for outcome in found] == [EXIT_TO_BE_CONTINUED] * 2
    assert [attempt.outcome for attempt in read_run(tmp_path / "run").attempts] == ["failed"]


def test_torchtitan_s_parser_takes_the_recipe_and_the_settings_of_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes_with_a_job.py").write_text(RECIPE)
    (tmp_path / "job.toml").write_text("guard.policy = 'full'\nrecover.mode = 'off'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "recipes_with_a_job", raising=False)
    importlib.invalidate_caches()
    arguments = ["--module", "recipes_with_a_job", "--config", "my_run"]
    settings = ["--training.disable_cuda_graphs", "--outlast_settings", "guard.policy=linear"]
    config = ConfigManager().parse_args(arguments + settings)
    assert isinstance(config, OutlastTrainer.Config)
    assert (config.checkpoint.enable, config.checkpoint.timeout_seconds) == (True, 60.0)
    job = job_of(config)
    assert (job.guard.policy, job.recover.mode) == ("linear", "off")
    assert (job.run.directory, job.run.name) == (str(tmp_path), "outputs")
    config.outlast_settings = []
    assert job_of(config).guard.policy == "full"


def test_where_the_data_runs_out_the_last_step_that_was_done_stays_in_memory(
    tmp_path: Path, whole: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    memory = tmp_path / "memory"
    job = f'{QUIET}guard.policy = "light"\nrecover.memory = "{memory}"\n'
    # Six steps and one of two micro-batches of the seventh, with a checkpoint of the fourth.
    plan = Plan(tmp_path / "run", job, texts=13, by_name=True)
    first, _ = run_ranks(2, train, plan)
    assert [*first.losses] == [*range(1, 7)]
    run = read_run(tmp_path / "run")
    assert run.of(Guarded)[-1][1].step == 6
    assert all(event.gradient_norm > 0 for _, event in run.of(StepsDone))
    assert [event.step for _, event in run.of(CheckpointSaved)] == [4]
    resumed, _ = run_ranks(2, train, replace(plan, texts=None, model_only=True))
    assert resumed.losses == {step: whole.losses[step] for step in (7, 8)}
    [(_, recovered)] = read_run(tmp_path / "run").of(StateRecovered)
    assert (recovered.source, recovered.step) == ("memory", 6)
    # Now what is wanted of the last step is on disk.
    assert not list(memory.rglob("rank-*"))


class Mine(OutlastTrainer):
    """A trainer of one's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(OutlastTrainer.Config):
        more: int = 1


class Another(Trainer):
    """One that knows nothing of Outlast."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        more: int = 1


def test_trainers_of_one_s_own_derive_from_ours() -> None:
    config = Mine.Config(more=2)
    assert use_outlast(config, "mine.toml") is config
    assert (config.outlast_job, config.more) == ("mine.toml", 2)
    use_outlast(config, overrides=["guard.policy=off"])
    use_outlast(config, enable=True)
    assert config.outlast_job == "mine.toml"
    assert config.outlast_settings == ["guard.policy=off"]
    with pytest.raises(IntegrationError, match=r"Another\.Config, whose trainer has steps of its"):
        use_outlast(Another.Config(), "job.toml")


REFUSED: list[tuple[list[str], dict[str, Any], str]] = [
    (["checkpoint.keep=5"], {}, r"checkpoint\.keep = 5 in a job has no effect in torchtitan"),
    (["run.name=other"], {}, "its run lives in the recipe's dump_folder"),
    (
        ["log.every_steps=5"],
        {"dump_folder": "my runs"},
        "dump_folder = 'my runs' cannot hold a run's records",
    ),
    (["guard.policy=linear"], {"disable_cuda_graphs": False}, "disable_cuda_graphs = True"),
    (
        ["guard.policy=full"],
        {"activation_checkpoint": SelectiveAC.Config()},
        "does not go with activation_checkpoint = SelectiveAC",
    ),
    (["guard.policy=light"], {"pipeline_parallel_degree": 2}, "the guard knows no pipelines"),
]


@pytest.mark.parametrize(("settings", "changes", "sentence"), REFUSED)
def test_what_does_not_go_together_is_refused_before_anything_is_built(
    tmp_path: Path, settings: list[str], changes: dict[str, Any], sentence: str
) -> None:
    config = use_outlast(recipe(tmp_path / "run"), overrides=settings)
    for name, value in changes.items():
        owners = (config, config.training, config.parallelism)
        setattr(next(each for each in owners if hasattr(each, name)), name, value)
    with pytest.raises(IntegrationError, match=sentence):
        config.build()


def test_a_setting_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    config = use_outlast(recipe(tmp_path / "run"), tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text("guard.polcy = 'full'\n")
    with pytest.raises(JobError, match=r"did you mean guard\.policy"):
        config.build()
