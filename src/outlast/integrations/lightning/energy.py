"""Energy in the logs of Lightning's `Trainer`.

Trainer(callbacks=[EnergyCallback()])   # logs energy/joules_per_step, energy/joules, energy/watts
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from outlast.hardware.figure import Unavailable
from outlast.integrations.step_energy import StepEnergy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning.pytorch import LightningModule, Trainer

    from outlast.energy.sources.protocol import Source
    from outlast.energy.window import Reading


class EnergyCallback(Callback):  # type: ignore[misc]
    """Logs joules per step, joules since the start and mean watts as often as the trainer logs.

    The figures are those of the meters that the first process reads, by default all of its node.
    Where nothing can be read, a warning says why and nothing is logged.

    Args:
        sources: What is read. Default: all meters of this machine.

    Attributes:
        joules: Of the last training, or of this one until its last log.
    """

    def __init__(self, sources: Sequence[Source] | None = None) -> None:
        super().__init__()
        self.joules: Reading = Unavailable("the training has not begun")
        self._sources = sources
        self._energy: StepEnergy | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to measure, on the process that logs."""
        self._close()
        if not trainer.is_global_zero:
            return
        self._energy = StepEnergy(self._sources, trainer.global_step)
        if (warning := self._energy.warning()) is not None:
            warnings.warn(warning, stacklevel=2)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures since the last log."""
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what came after the last log, and stop to measure."""
        self._log(trainer)
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop to measure: a training that raised has no end."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop to measure."""
        self._close()

    def _close(self) -> None:
        energy, self._energy = self._energy, None
        if energy is not None:
            self.joules = energy.close()

    def _log(self, trainer: Trainer) -> None:
        if self._energy is None:
            return
        found = {f"energy/{k}": v for k, v in self._energy.take(trainer.global_step).items()}
        self.joules = self._energy.joules
        for logger in trainer.loggers if found else ():
            logger.log_metrics(found, step=trainer.global_step)
