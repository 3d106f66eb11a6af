"""torchtitan's checkpoints in a store: `OutlastCheckpointManager`.

Its trainer calls `load` before the first step, `save` after every step and
`maybe_wait_for_staging` before every update, which is all that a store needs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    AsyncMode,
    BaseCheckpointManager,
    CheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from outlast import cluster
from outlast.checkpoint import (
    CheckpointStore,
    Retention,
    list_versions,
    load,
    storage_of,
)
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import (
    EXIT_TO_BE_CONTINUED,
    CheckpointError,
    IntegrationError,
    RecoverError,
)
from outlast.integrations.entries import Entry
from outlast.records import CheckpointRestored, StateRecovered, Warned
from outlast.runtime.engine import Decision, PeriodicConsensus, Runtime, StepResult
from outlast.runtime.memory import MemoryCheckpoint
from outlast.runtime.place import made_submodule, ranks_here
from outlast.runtime.recording import directory_of
from outlast.runtime.saves import restored_event
from outlast.state.live import module_tensors, reshard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outlast.checkpoint import SaveHandle, SaveResult
    from outlast.job import LoopJob

MODEL_FOLDER = "model"
"""Below the folder: what holds the model alone, a last save or a seed."""

_logger = logging.getLogger(__name__)


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """A module that has all that the parts of a model have, under the names that it has there.

    A rank of a pipeline holds several parts of one model, each with other children of the same
    names. Nothing is copied.

    Raises:
        IntegrationError: A part has parameters of its own beside those of its children.
    """
    if len(parts) == 1:
        return parts[0]
    whole = nn.Module()
    for part in parts:
        own = [*part._parameters, *(set(part._buffers) - part._non_persistent_buffers_set)]
        if own:
            raise IntegrationError(
                f"`{own[0]}` of {type(part).__name__} lies outside of any layer, so the parts of a "
                "pipeline cannot be saved as one model; put it into a module of its own"
            )
    for name in dict.fromkeys(name for part in parts for name in part._modules):
        children = [part._modules.get(name) for part in parts]
        whole.add_module(name, joined([child for child in children if child is not None]))
    return whole


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module whose buffers are `tensors`, under their full names; nothing is copied."""
    whole = nn.Module()
    for name, tensor in tensors.items():
        owner, _, own = name.rpartition(".")
        made_submodule(whole, owner).register_buffer(own, tensor)
    return whole


def names_in(store: CheckpointStore, step: int | None) -> set[str]:
    """Names of all that the newest version or that of `step` holds; empty where there is none."""
    versions = list_versions(store.storage)[::-1]
    for version in versions:
        if step is None or version.step == step:
            # What is incomplete or damaged will not be restored either.
            with contextlib.suppress(CheckpointError):
                catalogue = load(store.storage, version).catalogue
                return {*catalogue.tensors, *catalogue.values}
    return set()


def _by_key(name: str, state: Mapping[str, Any]) -> dict[str, Entry]:
    """Each key of an object's state as an entry of a store.

    torchtitan's data loaders give each data-parallel rank a key of its own in one state. As
    entries of their own, all are saved, whichever rank has them.

    Args:
        name: Of the object among the states.
        state: What its ``state_dict()`` gave.
    """
    return {f"{name}.{key}": Entry({"value": value}) for key, value in state.items()}


class Entries:
    """The states of a torchtitan checkpoint manager as entries of a store.

    Args:
        states: Name -> object, as the manager has them: the model, optimizers, learning rates, data
            loader and what the trainer adds.
        model_parts: The parts of the model on this rank.

    Raises:
        IntegrationError: When the parts cannot be saved as one model.
    """

    def __init__(self, states: Mapping[str, Any], model_parts: Sequence[nn.Module]) -> None:
        self._states = states
        self._parts = model_parts
        self._model = joined(model_parts)
        self._still = {
            f"{MODEL}.{name}"
            for name, item in module_tensors(self._model)
            if isinstance(item, nn.Parameter)
        }

    def model(self) -> dict[str, Any]:
        """The entry of the model alone."""
        for part in self._parts:
            # The root of a part of a pipeline is no module of the joined one.
            reshard({MODEL: part})
        return {MODEL: self._model}

    def restore_model(self, store: CheckpointStore, step: int | None) -> bool:
        """Restore the weights alone, of the newest version or that of `step`.

        A version of everything has them under the parameters' names, one of the model alone under
        those of torchtitan's own checkpoints, where fused projections are apart.

        Returns:
            Whether there is a version.

        Raises:
            CheckpointError: When it is damaged or does not fit.
        """
        apart = module_of(self._states[MODEL].state_dict())
        own = {f"{MODEL}.{name}" for name, _ in module_tensors(self._model)}
        is_apart = bool(own - names_in(store, step))
        wanted = {MODEL: apart} if is_apart else self.model()
        restored = store.restore(wanted, step=step, allow=["retyped"])
        if restored is not None and is_apart:
            self._states[MODEL].load_state_dict(dict(module_tensors(apart)))
        return restored is not None

    def of(self, names: Iterable[str]) -> dict[str, Any]:
        """Entries of the states of these names; a state that is None has none."""
        entries: dict[str, Any] = {}
        for name in names:
            state = self._states[name]
            if name == MODEL:
                entries |= self.model()
            elif name == OPTIMIZER:
                entries[name] = [*state]
            elif name == DATALOADER and state is not None:
                entries |= _by_key(name, state.state_dict())
            elif state is not None:
                entries[name] = state
        return entries

    def note(self, entries: Mapping[str, Any]) -> None:
        """Bring the entries of the data loader up to date; the others show their objects as is."""
        self.model()
        loader = self._states[DATALOADER]
        state = {} if loader is None else loader.state_dict()
        for name, entry in _by_key(DATALOADER, state).items():
            entries[name].content = entry.content

    def loaded(self, entries: Mapping[str, Any]) -> None:
        """Give the data loader what its entries have got."""
        found = {
            name.removeprefix(f"{DATALOADER}."): entry.content["value"]
            for name, entry in entries.items()
            if isinstance(entry, Entry)
        }
        if found:
            self._states[DATALOADER].load_state_dict(found)

    def is_still(self, name: str) -> bool:
        """Return whether a tensor is written to by the optimizers' updates alone."""
        return name in self._still or name.startswith(f"{OPTIMIZER}.state.")


def _store_at(path: str) -> tuple[str, int | None] | None:
    """The store that a path is or leads into, and the step of the version; None for others."""
    parent, _, own = path.rstrip("/").rpartition("/")
    for version in list_versions(storage_of(parent)):
        if version.folder == own:
            return parent, version.step
    return (path, None) if list_versions(storage_of(path)) else None


def check_data_keys(store: CheckpointStore, entries: Mapping[str, Any], step: int | None) -> None:
    """See that the data loaders of as many ranks were saved as are to continue.

    Raises:
        IntegrationError: On all ranks alike.
    """
    prefix = f"{DATALOADER}."
    own = {name for name in entries if name.startswith(prefix)}
    wanted: set[str] = set().union(*gather_objects(own))
    saved = {name for name in names_in(store, step) if name.startswith(prefix)}
    if not saved or not wanted:
        return
    if saved != wanted:
        raise IntegrationError(
            f"the data loader was saved with {_listed(saved, prefix)} and has now "
            f"{_listed(wanted, prefix)}: torchtitan's loaders continue with as many data-parallel "
            f'ranks as before; set checkpoint.exclude_from_loading=["{DATALOADER}"] to begin with '
            "the data anew"
        )


def _listed(names: set[str], prefix: str) -> str:
    return ", ".join(sorted(name.removeprefix(prefix) for name in names)) or "nothing"


class OutlastCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and restores a training of torchtitan as versions of a `CheckpointStore`.

    It takes what torchtitan's own managers take. Of its settings, ``async_mode`` means:
    ``disabled``: `save` returns when the version is published; ``async``: when the state is
    copied; ``async_with_pinned_mem``: at once, and the copy is made until the next update.

    A save in the background that fails is logged, and the training continues; the last save, and
    one before a stop, raise. At SIGTERM, SIGUSR1 and SIGINT, and before a Slurm job's time is up,
    all ranks save after the same step and end with exit code 3: the same command continues from
    there.

    Raises:
        IntegrationError: When a setting cannot be followed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The settings of torchtitan's own manager, and what only a store has."""

        stop_in_time: bool = True
        """True if signals and the end of a Slurm job's time end the training after a save."""

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
        self.job: LoopJob | None = None
        self._closed = not self.enable
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
        self._awaited = False
        self.runtime = Runtime(ranks_here(), chain=cluster, save_told=self._log_failure)
        self._store = raise_together(lambda: self._opened(self.folder))
        self._saves = self.runtime.save_to(self._store, raises=True)
        if config.stop_in_time and not config.load_only:
            self.runtime.consensus = PeriodicConsensus(chain=cluster)
            self.runtime.take_signals()

    @property
    def stopped(self) -> str:
        """Reason to end the run before its last step; empty for one that was not ended so."""
        return self.runtime.stopped if self.enable else ""

    def _load(self, step: int = -1) -> bool:
        """Restore the newest version or that of `step`, or what the run is to begin with.

        Raises:
            IntegrationError: When what there is cannot be continued from.
            CheckpointError: When there is nothing of `step`, or it is damaged or does not fit.
        """
        with torch.no_grad():
            found = self._restored(step)
        if self.runtime.records is None:
            self.runtime.begin(self.runtime.step)
        return found

    def _restored(self, step: int) -> bool:
        # Entries of all states but those that are not to be loaded.
        excluded = self.config.exclude_from_loading
        if unknown := [name for name in excluded if name not in self.states]:
            raise IntegrationError(
                f'checkpoint.exclude_from_loading names "{unknown[0]}"; there are '
                f"{', '.join(self.states)}"
            )
        wanted = self.entries.of(name for name in self.states if name not in excluded)
        if step != -1 and self._restarted(wanted, step):
            return True
        if step != 0 and self._restored_version(wanted, None if step == -1 else step):
            return True
        if self._restored_seed():
            return True
        if step == 0:
            raise CheckpointError(f"checkpoint.load_step = 0, and {self.folder} holds no seed")
        path = self._initial_path()
        if path:
            self._load_initial(path, None if self.config.initial_load_model_only else wanted)
        return bool(path)

    def _initial_path(self) -> str:
        """The folder that ``checkpoint.initial_load_*`` names; empty for none.

        Raises:
            IntegrationError: When there is no such folder.
        """
        path, in_hf = self.config.initial_load_path, self.config.initial_load_in_hf
        if path is None and in_hf:
            path = getattr(self.sd_adapter, "hf_assets_path", None)
        if not path and in_hf:
            raise IntegrationError(
                "checkpoint.initial_load_in_hf = True needs initial_load_path, or a model with "
                "a state_dict_adapter and its assets"
            )
        if path and not filesystem.isdir(path):
            raise IntegrationError(
                f"checkpoint.initial_load_path = {path!r} is no folder; give that of a store, of "
                "a checkpoint of torchtitan or of Hugging Face's safetensors"
            )
        return path or ""

    def _load_initial(self, path: str, wanted: Mapping[str, Any] | None) -> None:
        """Load from a store, a folder of a version in one, of DCP, or of Hugging Face.

        Args:
            path: Of the folder.
            wanted: The entries of the states that are loaded; None: the weights alone.

        Raises:
            CheckpointError: When nothing there can be used.
        """
        config, entries = self.config, self.entries
        if not config.initial_load_in_hf and (found := _store_at(path)) is not None:
            place, step = found
            with CheckpointStore(place) as store:
                if wanted is None:
                    is_there = entries.restore_model(store, step)
                else:
                    is_there = store.restore(wanted, step=step, allow=["retyped"]) is not None
            if not is_there:
                raise CheckpointError(f"no checkpoint in {place} was completed")
            entries.loaded(wanted or {})
            return
        others = {
            name: state
            for name, state in self.states.items()
            if name != MODEL and any(f"{item}.".startswith(f"{name}.") for item in wanted or ())
        }
        CheckpointManager.dcp_load(
            self,
            {**others, **self.states[MODEL].state_dict()},
            path,
            config.initial_load_in_hf,
            config.initial_load_in_hf_quantized,
        )

    def _restored_version(self, wanted: dict[str, Any], step: int | None) -> bool:
        """True if there was a state of the run, of the newest or that step; it is restored then."""
        check_data_keys(self._store, wanted, step)
        if step is None and self._keep_in_memory(wanted):
            return self._restored_newest(wanted)
        began = time.monotonic()
        restored = self._store.restore(wanted, step=step, warn=False)
        if restored is None:
            return False
        for sentence in restored.skipped:
            _logger.warning("%s; the run continues from step %d", sentence, restored.step)
        seconds = time.monotonic() - began
        self._begin_at(wanted, restored.step, saved=True)
        self.runtime.write(restored_event(self._store, restored, seconds))
        return True

    def _restored_newest(self, wanted: dict[str, Any]) -> bool:
        """Return whether there was a state in memory or in the store, whichever is newer."""
        runtime, memory = self.runtime, self.runtime.memory
        assert memory is not None
        done, events = runtime.restore()
        for event in events:
            runtime.write(event)
        if not any(isinstance(event, CheckpointRestored | StateRecovered) for event in events):
            return False
        self._begin_at(wanted, done, saved=not memory.unsaved)
        return True

    def _restarted(self, wanted: dict[str, Any], step: int) -> bool:
        """Return whether a run that began at `step` resumes from memory, which is restored then."""
        otherwise = f"the run begins at step {step} again, as checkpoint.load_step says"
        if not self._keep_in_memory(wanted, begins_at=step, otherwise=otherwise):
            return False
        memory = self.runtime.memory
        assert memory is not None
        # Of the agents of several nodes those that have seen no failure count no restart.
        if not any(gather_objects(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")):
            memory.forget_earlier()
            return False
        done = memory.find()
        taken = done is not None and memory.take()
        if done is not None and not taken and step == 0:
            # A seed has weights alone, and optimizers may be filled in part.
            raise RecoverError(
                "what is in memory does not fit, and checkpoint.load_step = 0 names a seed, which "
                "has weights alone: start again by hand"
            )
        if done is None and not memory.events:
            self.runtime.write(Warned(f"there is no newer state in memory; {otherwise}"))
        for event in memory.events:
            self.runtime.write(event)
        if done is not None and taken:
            self._begin_at(wanted, done, saved=False)
        return taken

    def _begin_at(self, wanted: dict[str, Any], step: int, *, saved: bool) -> None:
        """Note that `wanted` was restored to `step`, and whether a version holds it."""
        self.entries.loaded(wanted)
        self.runtime.step = step
        self._saves.newest = step if saved else -1

    def _keep_in_memory(
        self, wanted: dict[str, Any], *, begins_at: int | None = None, otherwise: str = ""
    ) -> bool:
        """Keep the state in memory as the job's [recover] says; False where nothing is kept."""
        if self.job is None or self.config.exclude_from_loading or self.config.load_only:
            return False
        memory = self.runtime.memory = MemoryCheckpoint(
            self.job,
            self.runtime.ranks,
            directory_of(self.job),
            self._store,
            wanted,
            begins_at=begins_at,
            note=partial(self.entries.note, wanted),
            otherwise=otherwise,
        )
        return memory.is_on

    def _restored_seed(self) -> bool:
        """Return whether the weights of a seed checkpoint are there, which are restored then."""
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

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save after step `curr_step`, if that is due.

        Raises:
            CheckpointError: When the last save fails, or one before a stop.
            DataCorruptionError: When what is to be saved is not what the last step has left.
            SystemExit: With code 3, when the run is to stop and is saved.
        """
        if self.config.load_only:
            return False
        runtime = self.runtime
        if self.save_future is not None and self.save_future.done():
            self._wait_for_saving()
        decision = Decision() if last_step else runtime.agree(StepResult(curr_step))
        runtime.step = curr_step
        due = (
            last_step
            or curr_step % self.config.interval == 0
            or (curr_step == 1 and self.config.enable_first_step_checkpoint)
        )
        if decision.stop:
            runtime.stop(decision)
        elif last_step:
            runtime.check_state(last=True)
        else:
            runtime.keep(curr_step)
        if due or decision.stop:
            self.maybe_wait_for_saving()
            GarbageCollection.collect("GC collection invoked by checkpointer.")
            with torch.no_grad():
                # A seed, which is saved as the last step of none, is the weights alone.
                if last_step and (self.config.last_save_model_only or curr_step == 0):
                    self._save_model(curr_step)
                    self._saves.newest = curr_step
                elif self._saves.newest != curr_step:
                    self._save_all(curr_step, wait=bool(decision.stop) or last_step)
        if decision.stop:
            _logger.warning(
                "stopped after step %d (%s): run the same again", curr_step, decision.stop
            )
            runtime.tell_findings()
            # The trainer closes its manager after errors and at its end, which this is neither.
            self.close()
            raise SystemExit(EXIT_TO_BE_CONTINUED)
        return due

    def _save_all(self, step: int, *, wait: bool) -> None:
        mode = self.config.async_mode
        late = self.entries.is_still if mode == "async_with_pinned_mem" and not wait else ()
        handle = self.runtime.save(step, self.entries.of(self.states), late=late)
        self._awaited = wait
        if wait:
            self._saves.wait()
        else:
            self.save_future = handle
            if mode == "disabled":
                self._wait_for_saving()

    def _log_failure(self, result: SaveResult) -> None:
        # One that is waited for is raised.
        if result.error is not None and not self._awaited:
            _logger.error("step %d was not saved: %s", result.step, result.error)

    def _save_model(self, step: int) -> None:
        """Save the model alone, as the last save or a seed."""
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        weights = {
            name: state.to(dtype) if state.is_floating_point() else state
            for name, state in self.states[MODEL].state_dict().items()
            if isinstance(state, torch.Tensor)
        }
        if self.config.last_save_in_hf:
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
        self.runtime.save_ended(result)

    def _maybe_wait_for_staging(self) -> None:
        """Finish the copies of the state under way: the next update writes to the weights."""
        self.runtime.before_update()

    def _wait_for_saving(self) -> None:
        """Wait for the save under way; a failure is logged."""
        self.save_future = None
        self._saves.collect(wait=True)

    def _close(self) -> None:
        """Give up the store; after an error, without waiting for other ranks."""
        if self._closed:
            return
        self._closed = True
        error = sys.exception()
        failed = error is not None and not isinstance(error, SystemExit)
        if not failed:
            self.maybe_wait_for_saving()
        # Where the data ran out, nothing was saved of the last step, which stays in memory.
        if not failed and self._saves.newest == self.runtime.step:
            self.runtime.forget()
        self.runtime.close(error)

    def _opened(self, place: str) -> CheckpointStore:
        """A store with the run's settings; `keep_latest_k` = 0 keeps everything."""
        keep = self.config.keep_latest_k
        return CheckpointStore(
            place,
            keep=keep or Retention(1, every=1),
            timeout_seconds=self.config.timeout_seconds,
        )
