"""Energy in the logs of Hugging Face's trainer, in a real training of a tiny model."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from energy_counter import Counter
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from outlast.energy.window import Energy
from outlast.hardware.figure import Unavailable
from outlast.integrations.hf_trainer import EnergyCallback, add_energy

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("accelerate")

STEP_JOULES = 3.0


def meter_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "outlast-energy"]


class Line(nn.Module):
    """A model of one weight; each of its training steps takes energy."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._counter = [counter]

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self._counter[0].add(STEP_JOULES)
        return {"loss": (self.weight * x - labels).square().mean()}


class Collected(TrainerCallback):  # type: ignore[misc]
    """What a logger such as TensorBoard is sent."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def trained(folder: Path, counter: Counter, sources: Any) -> tuple[Trainer, EnergyCallback, Any]:
    data = [{"x": torch.tensor([1.0]), "labels": torch.tensor([2.0])} for _ in range(12)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=2, logging_steps=2,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    collected = Collected()
    trainer = Trainer(Line(counter), arguments, train_dataset=data, callbacks=[collected])
    callback = add_energy(trainer, sources)
    trainer.train()
    return trainer, callback, collected


@pytest.mark.slow
def test_every_log_has_the_joules_of_its_steps(tmp_path: Path) -> None:
    counter = Counter(tmp_path / "joules")
    trainer, callback, collected = trained(tmp_path, counter, [counter.source])
    logs = [each for each in trainer.state.log_history if "loss" in each]
    assert [each["energy_joules_per_step"] for each in logs] == [STEP_JOULES] * 3
    assert [each["energy_joules"] for each in logs] == [6.0, 12.0, 18.0]
    assert all(each["energy_watts"] > 0 for each in logs)
    assert isinstance(callback.joules, Energy)
    assert callback.joules.joules == 18.0
    # Loggers that were there before see them too.
    assert [each.get("energy_joules") for each in collected.logs[:3]] == [6.0, 12.0, 18.0]


@pytest.mark.slow
def test_without_a_figure_the_logs_have_none_and_the_callback_says_why(tmp_path: Path) -> None:
    counter = Counter(tmp_path / "joules")
    gone = Counter(tmp_path / "gone")
    source = gone.source
    gone.path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, callback, _ = trained(tmp_path, counter, [source])
    assert not any("energy" in name for each in trainer.state.log_history for name in each)
    assert isinstance(callback.joules, Unavailable)


class Stopping(TrainerCallback):  # type: ignore[misc]
    """Makes the first training raise."""

    raised = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.raised:
            self.raised = True
            raise RuntimeError("the data is bad")


@pytest.mark.slow
def test_the_meter_of_a_training_that_raised_goes_with_the_next_one_or_the_callback(
    tmp_path: Path,
) -> None:
    counter = Counter(tmp_path / "joules")
    data = [{"x": torch.tensor([1.0]), "labels": torch.tensor([2.0])} for _ in range(12)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(Line(counter), arguments, train_dataset=data, callbacks=[Stopping()])
    callback = add_energy(trainer, [counter.source])
    with pytest.raises(RuntimeError, match="the data is bad"):
        trainer.train()
    assert len(meter_threads()) == 1
    trainer.train()
    assert meter_threads() == []
    # As a training that raised leaves it.
    callback.on_train_begin(arguments, trainer.state, trainer.control)
    (thread,) = meter_threads()
    del callback, trainer
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()
