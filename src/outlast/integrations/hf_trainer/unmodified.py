"""The `Trainer` of a script that knows nothing of Outlast, under `outlast run`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

from outlast import cluster
from outlast.integrations.hf_trainer.adapter import add_checkpoints, add_stop
from outlast.runtime.handover import SaveTimes
from outlast.runtime.place import ranks_here
from outlast.runtime.stop import Stopping

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from outlast.runtime.cadence import SaveCadence
    from outlast.runtime.handover import HandedOver


class SaveWhenDue(TrainerCallback):  # type: ignore[misc]
    """Asks for checkpoints beside those that `TrainingArguments` ask for.

    Args:
        pace: When; None: never.
        handed: Told how far the training is.
    """

    def __init__(self, pace: SaveCadence | None, handed: HandedOver) -> None:
        self._pace = pace
        self._handed = handed
        self._times: SaveTimes | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer has made or restored everything."""
        self._handed.step = state.global_step
        if self._pace is not None:
            self._times = SaveTimes(self._pace, state.global_step, ranks_here().world_size)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A step has been done."""
        self._handed.step = state.global_step
        if self._times is not None and self._times.due(state.global_step):
            control.should_save = True


def take_over(handed: HandedOver) -> Callable[[], None]:
    """Have all trainers that are made from now on save to a store, resume from it and stop in time.

    Args:
        handed: What to tell them.

    Returns:
        What leaves those alone that are made afterwards.
    """
    own = Trainer.__init__

    @functools.wraps(own)
    def made(trainer: Trainer, *arguments: Any, **options: Any) -> None:
        own(trainer, *arguments, **options)
        # A script that adds parts of Outlast itself does so behind this, and is told.
        _add(trainer, handed)

    def undo() -> None:
        Trainer.__init__ = own

    Trainer.__init__ = made
    return undo


def _add(trainer: Trainer, handed: HandedOver) -> None:
    add_checkpoints(trainer)
    add_stop(trainer)
    by_itself = trainer.args.save_strategy != "no"
    trainer.add_callback(SaveWhenDue(handed.pace(saves_by_itself=by_itself), handed))
    train = trainer.train

    def resumed(resume_from_checkpoint: str | bool | None = None, *rest: Any, **more: Any) -> Any:
        store = Path(trainer.args.output_dir) / "checkpoints"
        # What the script names is where the run begins, not where each of its starts does.
        resume = str(store) if handed.begins(store) else resume_from_checkpoint
        # The limit is the program's, of which a part is gone by now.
        trainer._outlast.stopping = Stopping(handed.seconds_left(), ranks_here(), cluster)
        return train(resume, *rest, **more)

    trainer.train = resumed
