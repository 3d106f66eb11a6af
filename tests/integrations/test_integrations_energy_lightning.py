"""Energy in the logs of Lightning's trainer, in a real training of a tiny model."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from energy_counter import Counter
from torch import Tensor
from torch.utils.data import DataLoader

from outlast.energy.window import Energy
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from pathlib import Path

lightning = pytest.importorskip("lightning.pytorch")

from outlast.integrations.lightning import EnergyCallback  # noqa: E402

STEP_JOULES = 3.0


def meter_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "outlast-energy"]


class Line(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A model of one weight; each of its training steps takes energy."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self._counter = [counter]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self._counter[0].add(STEP_JOULES)
        return (self.weight * batch - 2).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Collected(lightning.loggers.logger.DummyLogger):  # type: ignore[misc, name-defined]
    """What a logger such as TensorBoard is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "energy/joules" in metrics:
            self.logs.append((step or 0, metrics))


def trained(folder: Path, counter: Counter, callback: EnergyCallback) -> Collected:
    collected = Collected()
    trainer = lightning.Trainer(
        default_root_dir=folder, max_steps=7, log_every_n_steps=2, accelerator="cpu",
        logger=collected, callbacks=[callback], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, barebones=False,
    )  # fmt: skip
    trainer.fit(Line(counter), DataLoader(torch.ones(28, 1), batch_size=2))
    return collected


@pytest.mark.filterwarnings("ignore")
def test_logs_have_the_joules_of_their_steps(tmp_path: Path) -> None:
    counter = Counter(tmp_path / "joules")
    callback = EnergyCallback([counter.source])
    logs = trained(tmp_path, counter, callback).logs
    assert [step for step, _ in logs] == [2, 4, 6, 7]
    assert [each["energy/joules_per_step"] for _, each in logs] == [STEP_JOULES] * 4
    assert [each["energy/joules"] for _, each in logs] == [6.0, 12.0, 18.0, 21.0]
    assert isinstance(callback.joules, Energy)
    assert callback.joules.joules == 21.0


@pytest.mark.filterwarnings("ignore")
def test_without_a_figure_nothing_is_logged_and_the_callback_says_why(tmp_path: Path) -> None:
    gone = Counter(tmp_path / "gone")
    source = gone.source
    gone.path.unlink()
    callback = EnergyCallback([source])
    assert trained(tmp_path, Counter(tmp_path / "joules"), callback).logs == []
    assert isinstance(callback.joules, Unavailable)


class Counted:
    """A source that is polled, and fails when it is told to."""

    name, part, kind, update_seconds, poll_seconds = "node", "node", "measured", 0.0, 3600.0

    def __init__(self, counter: Counter, fails_after: float = 1e9) -> None:
        self.counter, self.fails_after, self.reads = counter, fails_after, 0

    def joules(self) -> float:
        self.reads += 1
        if self.counter.joules > self.fails_after:
            raise KeyError("the driver is gone")
        return self.counter.joules


class Stopping(Line):
    """A training that raises in its third step."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 2:
            assert meter_threads()
            raise RuntimeError("the data is bad")
        return super().training_step(batch, index)


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_raises_leaves_no_thread(tmp_path: Path) -> None:
    counter = Counter(tmp_path / "joules")
    callback = EnergyCallback([Counted(counter)])
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, max_steps=7, accelerator="cpu", logger=False,
        callbacks=[callback], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="the data is bad"):
        trainer.fit(Stopping(counter), DataLoader(torch.ones(28, 1), batch_size=2))
    assert meter_threads() == []
    assert isinstance(callback.joules, Energy)
    assert callback.joules.joules == 2 * STEP_JOULES


@pytest.mark.filterwarnings("ignore")
def test_a_meter_that_fails_does_not_end_the_training_and_is_read_once_per_log(
    tmp_path: Path,
) -> None:
    counter = Counter(tmp_path / "joules")
    source = Counted(counter)
    trained(tmp_path, counter, EnergyCallback([source]))
    # The thread's and the meter's first read, four logs, and the end.
    assert source.reads <= 2 + 4 + 2
    failing = EnergyCallback([Counted(counter, fails_after=counter.joules + 3 * STEP_JOULES)])
    logs = trained(tmp_path, counter, failing).logs
    assert [step for step, _ in logs] == [2]
    assert isinstance(failing.joules, Unavailable)
    assert "KeyError" in failing.joules.reason
