"""torchtitan's checkpoints in a store: `OutlastCheckpointManager`.

Its trainer calls `load` before the first step, `save` after every step and
`maybe_wait_for_staging` before every update, which is all that a store needs.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    CheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from outlast.checkpoint import CheckpointStore, Reduction, Retention
from outlast.distributed.group import raise_together
from outlast.errors import (
    EXIT_TO_BE_CONTINUED,
    CheckpointError,
    IntegrationError,
    WrongNumbersError,
)
from outlast.integrations.memory import LoopMemory
from outlast.integrations.stopping import Stopping
from outlast.integrations.torchtitan.restarts import begins_again, begun_at, take
from outlast.integrations.torchtitan.sources import Source, check_data_keys
from outlast.integrations.torchtitan.state import Entries, module_of
from outlast.records import CheckpointRestored, StateRecovered, StopRequested

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

    from outlast.checkpoint import SaveHandle, SaveResult
    from outlast.distributed.ranks import Ranks
    from outlast.integrations.recording import Recording
    from outlast.job import LoopJob
    from outlast.records import Event

MODEL_FOLDER = "model"
"""Below the folder: what holds the model alone, a last save or a seed."""

_logger = logging.getLogger(__name__)


class OutlastCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and restores a training of torchtitan as versions of a `CheckpointStore`.

    It takes what torchtitan's own managers take. Of its settings, ``async_mode`` means:
    ``disabled``: `save` returns when the version is published; ``async``: when the state is
    copied; ``async_with_pinned_mem``: at once, and the copy is made until the next update.

    A save in the background that fails is logged, and the training goes on; the last save, and one
    before a stop, raise. At SIGTERM, SIGUSR1 and SIGINT, and before a Slurm job's time is up, all
    ranks save after the same step and end with exit code 3: the same command goes on from there.

    Attributes:
        stopped: Why the run was ended before its last step; empty for one that was not.

    Raises:
        IntegrationError: When a setting cannot be followed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The settings of torchtitan's own manager, and what only a store has."""

        delta_chain: int = 0
        """Versions in a row that are stored as differences; 0: none."""

        stop_in_time: bool = True
        """Whether signals and the end of a Slurm job's time end the training after a save."""

        timeout_seconds: float = 1800.0
        """Longest wait for the storage or another rank."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: SaveHandle | None = None
        self.stopped = ""
        self._recording: Recording | None = None
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise IntegrationError(
                "checkpoint.last_save_in_hf = True needs a model with a state_dict_adapter; set it "
                "to False"
            )
        self.config = config
        self.folder = filesystem.join(base_folder, config.folder)
        self.sd_adapter = sd_adapter
        self.states = states
        states |= {
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            DATALOADER: dataloader,
            LR_SCHEDULER: lr_schedulers,
        }
        self.entries = Entries(states, model_parts)
        self._store = raise_together(lambda: self._opened(self.folder))
        self._memory: LoopMemory | None = None
        self._memory_of: Callable[..., LoopMemory] | None = None
        self._handle: SaveHandle | None = None
        self._saved_step = -1
        self._done_step = 0
        self._closed = False
        self._stopping: Stopping | None = None
        if config.stop_in_time and not config.load_only:
            self._stopping = Stopping(None)
            self._signals: AbstractContextManager[Any] = self._stopping.signals()
            self._signals.__enter__()

    def attach(self, recording: Recording, job: LoopJob, ranks: Ranks) -> None:
        """Tell a run's records what happens, and keep the state in memory as its [recover] says.

        To be called before `load`, on all ranks.
        """
        if self.enable:
            self._recording = recording
            self._memory_of = partial(LoopMemory, job, ranks, recording.directory)

    def _load(self, step: int = -1) -> bool:
        """Restore the newest version or that of `step`, or what the run is to begin with.

        Raises:
            IntegrationError: When what there is cannot be gone on from.
            CheckpointError: When there is nothing of `step`, or it is damaged or does not fit.
        """
        with torch.no_grad():
            found = self._restored(step)
        if self._stopping is not None:
            self._stopping.begin(self._done_step)
        return found

    def _restored(self, step: int) -> bool:
        wanted = self._wanted()
        if step != -1 and self._restarted(wanted, step):
            return True
        if step != 0 and self._restored_version(wanted, None if step == -1 else step):
            return True
        if self._restored_seed():
            return True
        if step == 0:
            raise CheckpointError(f"checkpoint.load_step = 0, and {self.folder} holds no seed")
        source = Source.of(self.config, self.sd_adapter)
        if source is None:
            return False
        source.load(self, None if self.config.initial_load_model_only else wanted)
        return True

    def _restored_version(self, wanted: dict[str, Any], step: int | None) -> bool:
        """Whether there was a state of the run, of the newest or that step; it is restored then."""
        check_data_keys(self._store, wanted, step)
        if step is None:
            memory = self._opened_memory(wanted, self._store)
            if memory is not None:
                return self._restored_by(memory, wanted)
        began = time.monotonic()
        restored = self._store.restore(wanted, step=step)
        if restored is None:
            return False
        for sentence in restored.skipped:
            _logger.warning("%s; the run goes on from step %d", sentence, restored.step)
        self.entries.loaded(wanted)
        self._done_step = self._saved_step = restored.step
        seconds = time.monotonic() - began
        self._write(CheckpointRestored(restored.step, seconds, restored.skipped))
        return True

    def _opened_memory(
        self, wanted: dict[str, Any], store: CheckpointStore, otherwise: str = ""
    ) -> LoopMemory | None:
        """The memory of the run, which is `self._memory` from now on; None where it has none."""
        if self._memory_of is None or self.config.exclude_from_loading or self.config.load_only:
            return None
        note = partial(self.entries.note, wanted)
        memory = self._memory_of(store, wanted, note=note, otherwise=otherwise)
        self._memory = memory if memory.is_on else None
        return self._memory

    def _restarted(self, wanted: dict[str, Any], step: int) -> bool:
        """Whether a run that began at `step` goes on from memory, which is restored then."""
        memory = self._opened_memory(wanted, begun_at(step), begins_again(step))
        if memory is None:
            return False
        done, events = take(memory, step)
        for event in events:
            self._write(event)
        if done is None:
            return False
        self.entries.loaded(wanted)
        self._done_step, self._saved_step = done, -1
        return True

    def _restored_by(self, memory: LoopMemory, wanted: dict[str, Any]) -> bool:
        """Whether there was a state in memory or in the store, whichever is sooner back."""
        done, events = memory.restore()
        for event in events:
            self._write(event)
        if not any(isinstance(event, CheckpointRestored | StateRecovered) for event in events):
            return False
        self.entries.loaded(wanted)
        self._done_step = done
        self._saved_step = -1 if memory.unsaved else done
        return True

    def _restored_seed(self) -> bool:
        """Whether the weights of a seed checkpoint are there, which are restored then."""
        with self._opened(filesystem.join(self.folder, MODEL_FOLDER)) as store:
            newest = store.newest()
            if newest is None:
                return False
            if newest.step != 0:
                raise IntegrationError(
                    f"{self.folder} holds the model of step {newest.step} alone, whose training "
                    "was complete; train on from it with checkpoint.initial_load_path = "
                    f'"{filesystem.join(self.folder, MODEL_FOLDER)}" and another '
                    "checkpoint.folder"
                )
            return self.entries.restore_model(store, 0)

    def _wanted(self) -> dict[str, Any]:
        """Entries of all states but those that are not to be loaded."""
        excluded = self.config.exclude_from_loading
        if unknown := [name for name in excluded if name not in self.states]:
            raise IntegrationError(
                f'checkpoint.exclude_from_loading names "{unknown[0]}"; there are '
                f"{', '.join(self.states)}"
            )
        return self.entries.of(name for name in self.states if name not in excluded)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save after step `curr_step`, if that is due.

        Raises:
            CheckpointError: When the last save fails, or one before a stop.
            SystemExit: With code 3, when the run is to stop and is saved.
        """
        if self.config.load_only:
            return False
        self._done_step = curr_step
        if self._handle is not None and self._handle.done():
            self._wait_for_saving()
        why = "" if last_step or self._stopping is None else self._stopping.why(curr_step)
        due = (
            last_step
            or curr_step % self.config.interval == 0
            or (curr_step == 1 and self.config.enable_first_step_checkpoint)
        )
        if self._memory is not None and not why and not last_step:
            agreement = None if self._stopping is None else self._stopping.agreement
            self._write(self._memory.keep(curr_step, agreement))
        if due or why:
            self.maybe_wait_for_saving()
            GarbageCollection.collect("GC collection invoked by checkpointer.")
            with torch.no_grad():
                # A seed, which is saved as the last step of none, is the weights alone.
                if last_step and (self.config.last_save_model_only or curr_step == 0):
                    self._save_model(curr_step)
                    self._saved_step = curr_step
                elif self._saved_step != curr_step:
                    self._save_all(curr_step, wait=bool(why) or last_step)
        if why:
            self.stopped = why
            self._write(StopRequested(curr_step, why))
            _logger.warning("stopped after step %d (%s): run the same again", curr_step, why)
            # The trainer closes its manager after errors and at its end, which this is neither.
            self.close()
            raise SystemExit(EXIT_TO_BE_CONTINUED)
        return due

    def _save_all(self, step: int, *, wait: bool) -> None:
        mode = self.config.async_mode
        handle = self._store.save_async(
            step,
            self.entries.of(self.states),
            late=self.entries.is_still if mode == "async_with_pinned_mem" and not wait else (),
        )
        self._handle = self.save_future = handle
        if wait:
            self._handle = self.save_future = None
            result = handle.result()
            self._ended(result)
            if result.error is not None:
                raise CheckpointError(result.error)
        elif mode == "disabled":
            self._wait_for_saving()

    def _save_model(self, step: int) -> None:
        """Save the model alone, as the last save or a seed."""
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        weights = {
            name: state.to(dtype) if state.is_floating_point() else state
            for name, state in self.states[MODEL].state_dict().items()
            if isinstance(state, torch.Tensor)
        }
        if self.config.last_save_in_hf:
            from torchtitan.components.checkpointer import AsyncMode

            CheckpointManager.dcp_save(
                self,
                weights,
                checkpoint_id=filesystem.join(self.folder, f"step-{step}"),
                async_mode=AsyncMode.DISABLED,
                to_hf=True,
            )
            return
        with self._opened(filesystem.join(self.folder, MODEL_FOLDER)) as store:
            result = store.save(step, {MODEL: module_of(weights)})
        if self._recording is not None:
            self._recording.saved(result)

    def _maybe_wait_for_staging(self) -> None:
        """Finish the copies of the state under way: the next update writes to the weights."""
        if self._memory is not None:
            self._memory.settle()
        if self._handle is not None:
            self._handle.copied()

    def _wait_for_saving(self) -> None:
        """Wait for the save under way; a failure is logged."""
        assert self._handle is not None
        handle, self._handle, self.save_future = self._handle, None, None
        result = handle.result()
        self._ended(result)
        if result.error is not None:
            _logger.error("step %d was not saved: %s", result.step, result.error)

    def _ended(self, result: SaveResult) -> None:
        """A save has ended, well or not."""
        if self._recording is not None:
            self._recording.saved(result)
        if result.error is not None:
            return
        self._saved_step = result.step
        if self._stopping is not None:
            self._stopping.observe_save(result.seconds)

    def _close(self) -> None:
        """Give up the store; after an error, without waiting for other ranks."""
        if self._closed:
            return
        self._closed = True
        error = sys.exception()
        failed = error is not None and not isinstance(error, SystemExit)
        if not failed:
            self.maybe_wait_for_saving()
        if self._stopping is not None:
            self._signals.__exit__(None, None, None)
            self._stopping = None
        if self._memory is not None:
            # Where the data ran out, nothing was saved of the last step.
            is_saved = not failed and self._saved_step == self._done_step
            self._memory.close(forget=is_saved or isinstance(error, WrongNumbersError))
        self._store.close(drain=not failed, failed=failed)

    def _write(self, event: Event | None) -> None:
        """Write an event into the run's records, where it has any."""
        if self._recording is not None:
            self._recording.write(event)

    def _opened(self, place: str) -> CheckpointStore:
        """A store with the run's settings; `keep_latest_k` = 0 keeps everything."""
        keep = self.config.keep_latest_k
        return CheckpointStore(
            place,
            keep=keep or Retention(1, every=1),
            reduction=Reduction(chain=self.config.delta_chain),
            timeout_seconds=self.config.timeout_seconds,
        )
