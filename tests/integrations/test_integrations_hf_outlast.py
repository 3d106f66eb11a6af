"""All of Outlast in Hugging Face's Trainer: guard, records, stop, tensorized layers, refusals."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from forked import run_ranks
from hf_training import (
    LENGTH,
    QUIET,
    Plan,
    Weighted,
    alone,
    alone_with,
    kept,
    together,
    trainer_of,
)
from transformers import Trainer

from outlast.autosave.libraries import HandedOver
from outlast.errors import IntegrationError, JobError
from outlast.integrations.hf_trainer import (
    add_checkpoints,
    add_guard,
    add_outlast,
    add_records,
    add_stop,
    predicted,
    take_over,
)
from outlast.job import load_loop_job
from outlast.records import (
    AttemptStarted,
    CheckpointRestored,
    CheckpointSaved,
    CorruptionDetected,
    EnergyMeasured,
    Guarded,
    Predicted,
    StopRequested,
    read_run,
)
from outlast.runtime.cadence import Every

pytestmark = pytest.mark.distributed


@pytest.mark.supports("transformers", "chain", "records", "resume")
def test_a_signal_ends_with_code_3_and_the_same_command_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "out"
    settings = ("guard.policy=off",)
    whole = alone(Plan(str(tmp_path / "whole"), add=(), options={"save_steps": 100}))
    stops = Plan(
        str(output), add=("outlast",), settings=settings, signals_at=5, options={"save_steps": 100}
    )
    stopped = alone(stops)
    assert whole is not None
    assert stopped is not None
    assert stopped.code == 3
    assert stopped.saved == [6]
    stops.signals_at, stops.resume = 0, "if any"
    resumed = alone(stops)
    assert resumed is not None
    assert (resumed.first, resumed.code) == (6, 0)
    assert resumed.losses == whole.losses
    assert resumed.digest == whole.digest
    run = read_run(output)
    assert [each.outcome for each in run.attempts] == ["to_be_continued", "completed"]
    assert [event.reason for _, event in run.of(StopRequested)] == ["SIGTERM"]
    assert [event.step for _, event in run.of(CheckpointSaved)] == [6, 12]
    assert [event.step for _, event in run.of(CheckpointRestored)] == [6]
    assert [step for step, _ in run.losses()] == list(range(1, 13))
    assert [loss for _, loss in run.losses()] == pytest.approx(whole.losses, rel=1e-3)


@pytest.mark.supports("transformers", "chain")
def test_a_signal_to_any_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    plan = Plan(
        str(tmp_path), add=("checkpoints", "stop"), batch=2, steps=400, signals_at=3,
        signals_rank=1, options={"save_strategy": "no", "logging_steps": 400},
    )  # fmt: skip
    outcomes = [each for each in together(2, plan) if each is not None]
    assert [each.code for each in outcomes] == [3, 3]
    assert outcomes[0].saved == outcomes[1].saved
    assert 4 <= outcomes[0].saved[0] < 400


def test_a_program_that_ends_itself_ends_with_its_save(tmp_path: Path) -> None:
    ended = alone(Plan(str(tmp_path), exits_at=2))
    assert ended is not None
    assert (ended.code, ended.saved) == (4, [2])


class Crowded(Weighted):
    """A trainer whose second step does not fit into memory with eight samples."""

    def training_step(self, model: Any, inputs: Any, *arguments: Any) -> Any:
        if self.state.global_step == 1 and len(inputs["input_ids"]) == 8:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *arguments)


def finds_its_batch_size(folder: str) -> tuple[int, int, list[int]]:
    """Steps done, hooks that are left on the layers, and steps that were saved."""
    options = {"auto_find_batch_size": True}
    trainer = trainer_of(Plan(folder, steps=4, batch=8, options=options), Crowded)
    saving = add_outlast(trainer, load_loop_job(None, [*QUIET, "guard.policy=linear"]))
    kept.append(trainer)
    trainer.train()
    hooks = sum(len(module._forward_pre_hooks) for module in trainer.model.modules())
    return trainer.state.global_step, hooks, [result.step for result in saving.results]


@pytest.mark.supports("transformers", "records", "guard")
def test_a_batch_that_does_not_fit_begins_another_attempt(tmp_path: Path) -> None:
    assert alone_with(finds_its_batch_size, str(tmp_path)) == (4, 0, [2, 4])
    run = read_run(tmp_path)
    assert [attempt.outcome for attempt in run.attempts] == ["failed", "completed"]
    assert [event.samples_per_step for _, event in run.of(AttemptStarted)] == [8, 7]
    assert [step for step, _ in run.losses()] == [1, 2, 3, 4]


def test_an_error_of_a_training_keeps_no_tensors_alive(tmp_path: Path) -> None:
    adapter = add_stop(trainer_of(Plan(str(tmp_path))))
    gone: list[Any] = []

    def fails(*_: Any) -> None:
        tensor = torch.zeros(4)
        gone.append(weakref.ref(tensor))
        raise ValueError("it went wrong")

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            adapter._train(fails)
        assert gone[0]() is None
    finally:
        gc.enable()


@pytest.mark.supports("transformers", "guard")
def test_wrong_numbers_are_put_right_in_the_middle_of_a_step(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "save_strategy": "no"}
    add, fault = ("guard",), "linear.dw:module=*.mlp.*:bit=30:step=2"
    whole = alone(Plan(str(tmp_path / "whole"), add=(), steps=4, options=options))
    struck = alone(Plan(str(tmp_path / "struck"), add=add, steps=4, fault=fault, options=options))
    assert whole is not None
    assert struck is not None
    logs = [each for each in struck.history if "loss" in each]
    assert [each["guard_findings"] for each in logs] == [0.0, 0.0, 1.0, 1.0]
    assert all(each["guard_checks"] > 0 for each in logs)
    assert struck.losses == pytest.approx(whole.losses, rel=1e-6)
    assert struck.digest == whole.digest


@pytest.mark.supports("transformers", "guard")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_done_again_where_nothing_is_put_right_in_place(
    tmp_path: Path, ranks: int
) -> None:
    options = {"gradient_accumulation_steps": 2, "save_strategy": "no"}
    plan = Plan(str(tmp_path / "whole"), add=(), steps=4, batch=2, options=options)
    whole = alone(plan) if ranks == 1 else together(2, plan)[0]
    fault = f"linear.saved:bit=29:step=2:module=*.0.mlp.gate_proj:rank={ranks - 1}"
    plan = Plan(
        str(tmp_path / "out"), ("outlast",), ("guard.policy=linear",), fault, steps=4, batch=2,
        options=options,
    )  # fmt: skip
    struck = alone(plan) if ranks == 1 else together(2, plan)[0]
    assert whole is not None
    assert struck is not None
    assert struck.digest == whole.digest
    assert struck.losses == pytest.approx(whole.losses, rel=1e-6)
    run = read_run(tmp_path / "out")
    found = [event for _, event in run.of(CorruptionDetected)]
    assert {(each.step, each.outcome, each.found_on) for each in found} == {
        (2, "repeated", ranks - 1)
    }
    assert run.of(Guarded)[-1][1].checks > 0


@pytest.mark.supports("transformers", "tensorize")
def test_tensorized_layers_train_and_come_back(tmp_path: Path) -> None:
    whole = alone(Plan(str(tmp_path / "whole"), add=(), form="low_rank"))
    output = str(tmp_path / "out")
    assert alone(Plan(output, dies_at=5, form="low_rank")) is None
    resumed = alone(Plan(output, resume=True, form="low_rank"))
    assert whole is not None
    assert resumed is not None
    assert resumed.first == 4
    assert resumed.digest == whole.digest


@pytest.mark.supports("transformers", "energy", "plan", "records")
def test_measured_energy_and_the_prediction_are_in_the_records(tmp_path: Path) -> None:
    meter = tmp_path / "joules"
    meter.write_text("10.0\n")
    job = load_loop_job(
        None, [f'energy.sources=["file:{meter}"]', "log.every_steps=1", "energy.every_steps=1"]
    )
    plan = Plan(str(tmp_path / "out"), add=(), steps=3, options={"save_strategy": "no"})
    trainer = trainer_of(plan)
    prediction = predicted(trainer, LENGTH, "h100x64")
    assert 0.0 < prediction.step_seconds_low < prediction.step_seconds_high
    own = trainer.training_step

    def step(*arguments: Any, **options: Any) -> Any:
        meter.write_text(f"{float(meter.read_text()) + 2.0}\n")
        return own(*arguments, **options)

    trainer.training_step = step
    add_records(trainer, job, tokens_per_step=64, prediction=prediction)
    trainer.train()
    run = read_run(tmp_path / "out")
    assert run.of(Predicted)[0][1] == prediction
    assert run.of(EnergyMeasured)
    assert run.attempts[0].outcome == "completed"


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"save_on_each_node": True}, add_checkpoints, "save_on_each_node = True"),
    ({"save_only_model": True}, add_stop, "save_only_model = True"),
    ({"enable_jit_checkpoint": True}, add_stop, "enable_jit_checkpoint = True"),
    ({}, lambda trainer: add_checkpoints(trainer, every_steps=5), "save_steps say when to save"),
    ({}, lambda trainer: add_checkpoints(trainer, keep=5), "save_total_limit"),
    (
        {},
        lambda trainer: add_checkpoints(trainer, when_busy="skip"),
        'checkpoint.when_busy = "skip" has no effect',
    ),
    (
        {},
        lambda trainer: add_outlast(trainer, load_loop_job(None, ["run.name=other"])),
        "TrainingArguments.output_dir",
    ),
]


@pytest.mark.parametrize(("options", "add", "words"), REFUSED)
def test_what_cannot_be_kept_is_refused_at_once(
    tmp_path: Path, options: dict[str, Any], add: Any, words: str
) -> None:
    trainer = trainer_of(Plan(str(tmp_path), options=options))
    with pytest.raises(IntegrationError, match=words):
        add(trainer)
    # Nothing was replaced.
    assert not hasattr(trainer, "_outlast")


def test_a_wrong_setting_and_a_part_added_twice(tmp_path: Path) -> None:
    trainer = trainer_of(Plan(str(tmp_path)))
    with pytest.raises(JobError, match="compresion is not a known key"):
        add_checkpoints(trainer, compresion="lz4")
    add_guard(trainer)
    with pytest.raises(IntegrationError, match="add each part of Outlast once"):
        add_guard(trainer)


def test_a_directory_that_cannot_be_a_run(tmp_path: Path) -> None:
    trainer = trainer_of(Plan(str(tmp_path / "my output")))
    with pytest.raises(IntegrationError, match="cannot hold a run's records"):
        add_records(trainer)


def test_no_trainer_of_transformers() -> None:
    with pytest.raises(IntegrationError, match="it is no transformers"):
        add_checkpoints(object())  # type: ignore[arg-type]


def _limited(output: str) -> tuple[int, int, bool]:
    """Trains when the program's time was used up after the trainer was made."""
    own = Trainer.__init__
    handed = HandedOver(Every(), Path(output) / "stores.json", Path(output), limit_seconds=1000.0)
    undo = take_over(handed)
    trainer = trainer_of(Plan(output))
    undo()
    handed.limit_seconds = 0.0
    try:
        trainer.train()
        code = 0
    except SystemExit as error:
        code = int(str(error.code))
    return code, trainer.state.global_step, Trainer.__init__ is own


def test_the_time_limit_of_a_program_counts_from_its_start_and_trainers_are_left_as_they_were(
    tmp_path: Path,
) -> None:
    assert run_ranks(1, _limited, str(tmp_path)) == [(3, 1, True)]
