"""Energy in the logs of Hugging Face's `Trainer`.

trainer = Trainer(...)
add_energy(trainer)              # every log has energy_joules_per_step, energy_joules, energy_watts
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from outlast.hardware.figure import Unavailable
from outlast.integrations.step_energy import StepEnergy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from outlast.energy.sources.protocol import Source
    from outlast.energy.window import Reading


class EnergyCallback(TrainerCallback):  # type: ignore[misc]
    """Adds joules per step, joules since the start and mean watts to every log.

    The figures are those of the meters that the logging process reads, by default all of its node.
    Where nothing can be read, a warning says why and the logs stay as they are. `Trainer` tells no
    callback that a training raised: its meter is closed by the next training, or with the callback.

    Args:
        sources: What is read. Default: all meters of this machine.

    Attributes:
        joules: Of the last training, or of this one until its last log.
    """

    def __init__(self, sources: Sequence[Source] | None = None) -> None:
        self.joules: Reading = Unavailable("the training has not begun")
        self._sources = sources
        self._energy: StepEnergy | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start to measure, on the process that logs."""
        # A training that raised has no end: its meter is still open.
        self._close()
        if not state.is_world_process_zero:
            return
        self._energy = StepEnergy(self._sources, state.global_step)
        if (warning := self._energy.warning()) is not None:
            warnings.warn(warning, stacklevel=2)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures since the last log to this one and to the trainer's history."""
        if self._energy is None or logs is None:
            return
        found = {f"energy_{k}": v for k, v in self._energy.take(state.global_step).items()}
        self.joules = self._energy.joules
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop to measure."""
        self._close()

    def _close(self) -> None:
        energy, self._energy = self._energy, None
        if energy is not None:
            self.joules = energy.close()


def add_energy(trainer: Trainer, sources: Sequence[Source] | None = None) -> EnergyCallback:
    """Give `trainer` an `EnergyCallback`, before the callbacks that send logs to others.

    `Trainer.add_callback` would put it behind them, and TensorBoard would miss the figures.
    """
    callback = EnergyCallback(sources)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
