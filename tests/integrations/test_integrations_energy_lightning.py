"""Energy in the logs of Lightning's trainer, in a real training of a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from energy_counter import Counter
from torch import Tensor
from torch.utils.data import DataLoader

from outlast.energy.reading import Energy
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from pathlib import Path

lightning = pytest.importorskip("lightning.pytorch")

from outlast.integrations.lightning import EnergyCallback  # noqa: E402

STEP_JOULES = 3.0


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
