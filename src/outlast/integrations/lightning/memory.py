"""The newest step of a `Trainer` in memory, from which a restart by torchrun goes on.

What is kept is what Lightning would write into a checkpoint file, and a restart loads it in the
place of one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from outlast.checkpoint import CheckpointStore
from outlast.distributed.group import gather_objects
from outlast.integrations.content import KEY, plain, restored
from outlast.integrations.memory import LoopMemory
from outlast.integrations.place import ranks_here
from outlast.integrations.recording import directory_of
from outlast.integrations.settled import only_settled, places_of, settled
from outlast.records import Warned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.hooks import RemovableHandle

    from outlast.integrations.lightning.callback import OutlastCallback
    from outlast.integrations.recording import Recording
    from outlast.job import LoopJob
    from outlast.records import Event, RunDirectory

_CHECKPOINT, _PLACE = "lightning.checkpoint", "lightning.place"


class TrainerMemory:
    """Keeps what a checkpoint of a trainer holds after each step, and restores it.

    All ranks call its methods together, but for `settle` and `close`.

    Args:
        job: The settings; [recover] counts here.

    Attributes:
        events: What restoring had to say.
        taking: Whether a checkpoint is made for memory, where each rank keeps its own place in the
            data.
    """

    def __init__(self, job: LoopJob) -> None:
        self.events: list[Event] = []
        self.taking = False
        self._job = job
        self._trainer: Trainer
        self._is_watching = False
        self._memory: LoopMemory | None = None
        self._store: CheckpointStore | None = None
        self._recording: Recording | None = None
        self._checkpoint, self._place = _Entry(), _Entry()
        self._step = -1
        self._left_out = 0
        self._told = False
        self._hooks: list[RemovableHandle] = []

    def watch(self, trainer: Trainer, outlast: OutlastCallback) -> None:
        """From now on a fit begins with what is in memory, where that is newer than its file."""
        self._trainer, self._outlast, self._is_watching = trainer, outlast, True
        self._step, self._left_out, self.events = -1, 0, []
        connector = trainer._checkpoint_connector
        vars(connector).pop("resume_start", None)
        from_file = connector.resume_start

        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            found = self._found(checkpoint_path)
            if found is None:
                from_file(checkpoint_path, weights_only=weights_only)
            else:
                connector._loaded_checkpoint = found

        connector.resume_start = resume_start

    def begin(self, recording: Recording) -> None:
        """The training begins, with what was restored; `recording` has its directory."""
        self._recording = recording
        self._step = self._trainer.global_step
        if self._memory is None:
            self._memory = self._opened(recording.directory)
            # Of a training that this one does not go on from; nor must a restart of this one.
            self._memory.forget_earlier()
        if not self._trainer.lightning_module.automatic_optimization:
            # The step of an optimizer without Lightning's wrapper calls no callback.
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self.settle())
                for optimizer in self._trainer.optimizers
            ]

    def settle(self) -> None:
        """To be called before an optimizer's step: what was being copied is copied."""
        if self._memory is not None:
            self._memory.settle()

    def after_batch(self) -> None:
        """All callbacks have done their part of a batch: begin to keep the state behind a step."""
        step = self._trainer.global_step
        if self._memory is None or step == self._step or step % self._job.recover.every_steps:
            return
        self._step = step
        assert self._recording is not None
        if not self._is_followed():
            self._left_out = 0
            self._recording.write(self._memory.keep(step))
            return
        self._left_out += 1
        if self._left_out == 2 and self._memory.is_on and not self._told:
            self._told = True
            self._recording.write(
                Warned(
                    f"step {step}, and the one before after which the state would be kept in "
                    "memory, are followed by a validation or the end of an epoch, where it is not: "
                    "a restart may go back to the newest checkpoint"
                )
            )

    def close(self, *, forget: bool) -> None:
        """The training is over.

        Args:
            forget: Give the memory back: all is on disk, or may be wrong. Otherwise it is kept
                for a restart.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        memory, self._memory = self._memory, None
        store, self._store = self._store, None
        if memory is not None:
            memory.close(forget=forget)
        if store is not None:
            store.close()
        self._recording = None
        if self._is_watching:
            vars(self._trainer._checkpoint_connector).pop("resume_start", None)

    def _is_followed(self) -> bool:
        """Whether a validation or the epoch's end comes before the next batch.

        A checkpoint is resumed behind them, so that they would be left out; from the step before
        they are done.
        """
        fit = self._trainer.fit_loop
        if fit.epoch_loop._is_training_done:
            return True
        if getattr(self._trainer, "_val_check_time_interval", None) is not None:
            # Each rank goes by its own clock, and all must keep the same steps.
            return False
        return bool(fit.epoch_loop._should_check_val_fx(fit._data_fetcher))

    def _found(self, path: Any) -> dict[str, Any] | None:
        """The checkpoint in memory, where it counts and is newer; None without one."""
        directory = directory_of(self._job)
        if self._trainer.state.fn != TrainerFn.FITTING or not _counts(
            self._trainer, path, directory
        ):
            return None
        otherwise = ""
        if str(path) not in _last_files(self._trainer):
            does = f"goes on from {path}" if path else "begins anew"
            otherwise = f'the training {does}, as the script says (ckpt_path="last" goes on)'
        memory = self._memory = self._opened(directory, otherwise)
        is_taken = memory.find() is not None and memory.take()
        self.events = memory.events
        if not is_taken:
            return None
        content, self._checkpoint.content = self._checkpoint.content, {}
        found: dict[str, Any] = restored(content[KEY], unpickle=True)
        places = {"places": self._places(content["ranks"])}
        found.setdefault("callbacks", {})[self._outlast.state_key] = places
        return found

    def _places(self, ranks_before: int) -> list[list[dict[str, Any]]]:
        """Where each rank stood in each loader; of another number of ranks, where the first did."""
        # A rank that there was not has none.
        told: list[list[dict[str, Any]]] = gather_objects(self._place.content.get("loaders", []))
        self._place.content = {}
        if len(told) == ranks_before:
            return told
        return [[*told[0]] for _ in range(ranks_before)]

    def _opened(self, directory: RunDirectory, otherwise: str = "") -> LoopMemory:
        ranks = ranks_here()
        self._store = CheckpointStore(directory.checkpoints, collective=False)
        state = {_CHECKPOINT: self._checkpoint, f"{_PLACE}{ranks.rank}": self._place}
        return LoopMemory(
            self._job,
            ranks,
            directory,
            self._store,
            state,
            note=self._note,
            otherwise=otherwise,
        )

    def _note(self) -> None:
        """Bring what is kept up to date."""
        trainer, ranks = self._trainer, ranks_here()
        self.taking = True
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self.taking = False
        places = places_of([trainer.lightning_module], trainer.optimizers)
        found = settled(plain(checkpoint), places)
        if ranks.local_rank > 0:
            # Beside parameters, which are equal, a node keeps what its first rank has.
            found = only_settled(found)
        self._checkpoint.content = {KEY: found, "ranks": ranks.world_size}
        self._place.content = {"loaders": self._outlast.places_here()}


class KeepLast(Checkpoint):  # type: ignore[misc]
    """Part of `with_outlast`: a checkpoint callback, and so behind all that are none.

    Args:
        memory: Where each step is kept.
    """

    def __init__(self, memory: TrainerMemory) -> None:
        super().__init__()
        self._memory = memory

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin to keep the state, when an optimizer has done a step."""
        self._memory.after_batch()


class _Entry:
    """A dictionary as an entry of what is kept."""

    may_be_missing = True

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.content = dict(state)


def _counts(trainer: Trainer, path: Any, directory: RunDirectory) -> bool:
    """Whether a training goes on from memory, and not from what the script names, on all ranks.

    A script that torchrun has started again names what it named at first. One that was started by
    hand goes on where it asks for the last checkpoint.
    """
    counts = directory.exists()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        counts = counts and str(path) in _last_files(trainer)
    return gather_objects(counts)[0]


def _last_files(trainer: Trainer) -> list[str]:
    """The files of which ``ckpt_path="last"`` means the newest."""
    return [
        str(found)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
        for found in callback._find_last_checkpoints(trainer)
    ]
