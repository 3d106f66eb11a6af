"""`save_state` and `load_state` of an `Accelerator`, kept in a store.

The folder that the framework names stands for a version; see `outlast.integrations.accelerate`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from outlast import cluster
from outlast.autosave.resume import random_states, set_random_states, source_of
from outlast.checkpoint import CheckpointStore
from outlast.checkpoint.version import SEAL
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations import require
from outlast.integrations.entries import EVERY_VERSION, TextEntry, read_facts
from outlast.job import LoopJob
from outlast.records import RunDirectory
from outlast.runtime.engine import Runtime
from outlast.runtime.memory import MemoryCheckpoint
from outlast.runtime.place import ranks_here, unwrapped
from outlast.runtime.saves import close_at_exit, restored_event, store_options

require("accelerate", "1.15", "2")

from accelerate import DistributedType  # noqa: E402
from accelerate.data_loader import (  # noqa: E402
    DataLoaderShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch
    from accelerate import Accelerator

    from outlast.checkpoint import Version
    from outlast.job import CheckpointSection

_NAME = "outlast.json"

_OWN = "optimizer*"
"""Accelerate's files of the optimizers, which are in every state that a store could hold."""

_FACTS, _RANDOM = "accelerator", "random-"

_HIDDEN = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")


def runtime_of(accelerator: Accelerator) -> Runtime:
    """The runtime of an accelerator, made when it is asked for first.

    `Accelerator.end_training` ends it: the guard makes its last checks, and the save under way is
    waited for. Called while an error is handled, as in a `finally`, it records that this error has
    ended the run.
    """
    found: Runtime | None = getattr(accelerator, "_outlast", None)
    if found is not None:
        return found
    runtime = accelerator._outlast = Runtime(ranks_here(), chain=cluster)
    own_end = accelerator.end_training

    def end_training() -> None:
        error = None if runtime.stopped else sys.exception()
        with runtime:
            if not runtime.stopped and error is None:
                runtime.last_checks()
            runtime.finish()
            own_end()
            if error is not None:
                runtime.close(error)

    accelerator.end_training = end_training
    return runtime


class Note(NamedTuple):
    """Note of what a folder leads to.

    Attributes:
        version: Number of the version.
        save: Name of this one save, since a run that goes back saves the same number again.
        store: The store's directory; in the file, as seen from the folder.
    """

    version: int
    save: str
    store: Path


def write_note(folder: Path, note: Note) -> None:
    """Let `folder` lead to a version."""
    store = os.path.relpath(os.path.realpath(note.store), os.path.realpath(folder))
    content = json.dumps({**note._asdict(), "store": store})
    (folder / _NAME).write_text(content + "\n", encoding="utf-8")


def read_note(folder: Path) -> Note | None:
    """Read what `folder` leads to; None where Accelerate itself has written it.

    Raises:
        CheckpointError: When the note is damaged, or the store that it names is not there.
    """
    path = folder / _NAME
    try:
        found = json.loads(path.read_bytes())
        version, save, where = int(found["version"]), str(found["save"]), str(found["store"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); load another folder, or none for the newest state"
        ) from None
    store = Path(os.path.normpath(Path(os.path.realpath(folder), where)))
    if not store.is_dir():
        raise CheckpointError(
            f"{folder} holds no state but leads to the store {store}, which is not there; move "
            "the two together, or load another folder"
        )
    return Note(version, save, store)


@dataclass
class _Epoch:
    """A loader within an epoch.

    Attributes:
        loader: The prepared one, or one that skips its first batches.
        begun: What `_sources` gave before the first draw, and the process's random states.
        before_batch: The random states before the newest batch was read, one ahead of the loop.
        batches: Batches of the epoch that the loop has got, with those that were skipped.
        counts: Whether its end leads the prepared loader on to the next epoch.
        iterator: Below the loader's; gone where the loop has broken off.
    """

    loader: Any
    begun: dict[str, Any]
    before_batch: dict[str, Any]
    batches: int
    counts: bool
    iterator: Callable[[], Any] = lambda: None


class ProcessEntry:
    """Random numbers, place of the loaders and gradients of a process, as an entry of a state.

    Args:
        accelerator: After `prepare`.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._loaders = [*accelerator._dataloaders]
        self._within: dict[int, _Epoch] = {}
        self._random: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        for number, loader in enumerate(self._loaders):
            self._follow(loader, number, 0)
        own_skip = accelerator.skip_first_batches

        def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
            loader = own_skip(dataloader, num_batches)
            for number, prepared in enumerate(self._loaders):
                if prepared is dataloader:
                    self._follow(loader, number, num_batches)
            return loader

        accelerator.skip_first_batches = skip_first_batches

    def state_dict(self) -> dict[str, Any]:
        """The random states, and what else there is now."""
        gradients = {
            name: parameter.grad
            for name, parameter in self._parameters()
            if parameter.grad is not None and not self._accelerator.sync_gradients
        }
        return {**random_states(), "loaders": self._places(), "gradients": gradients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what was saved, until `resume`."""
        self._random = dict(state)
        self._restored = self._random.pop("loaders", {})
        self._gradients = self._random.pop("gradients", {})

    def resume(self, *, as_before: bool) -> list[str]:
        """Continue where the loaded state is from.

        Args:
            as_before: Whether as many processes continue as saved it.

        Returns:
            Sentences on what will differ from an uninterrupted loop.
        """
        self._within.clear()
        places = self._restored
        self._restored = {name: place for name, place in places.items() if "begun" in place}
        for number, loader in enumerate(self._loaders):
            if (place := places.get(str(number))) is not None:
                loader.iteration = place["iteration"]
                _sources(loader, place)
        set_random_states(self._random)
        for name, place in self._restored.items():
            if place["first"]:
                # A loader that is none of the accelerator's, as `accelerate.skip_first_batches`
                # makes one, draws the order of the samples from here, and is not followed.
                set_random_states(place["begun"])
                _sources(self._loaders[int(name)], place["begun"])
                self._draw_again()
        if self._gradients and not as_before:
            warning = (
                "the state was saved within a gradient accumulation by another number of "
                "processes: its gradients so far are left out of the next optimizer's step"
            )
            return [warning]
        for name, parameter in self._parameters():
            parameter.grad = None
            if (gradient := self._gradients.get(name)) is not None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype)
        return []

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, model in enumerate(self._accelerator._models):
            for name, parameter in model.named_parameters():
                yield f"{number}.{name}", parameter

    def _places(self) -> dict[str, Any]:
        """Positions of the prepared loaders, those within an epoch with all they have drawn."""
        found: dict[str, Any] = {}
        self._within = {
            number: item for number, item in self._within.items() if item.iterator() is not None
        }
        for number, loader in enumerate(self._loaders):
            if not isinstance(loader, DataLoaderShard):
                continue
            epoch = self._within.get(number)
            # The loop has the last batch: the next one is the first of the next epoch.
            ends = epoch is not None and epoch.loader.end_of_dataloader
            found[str(number)] = place = {"iteration": loader.iteration, **_sources(loader)}
            if epoch is not None and ends:
                place["iteration"] += epoch.counts
            elif epoch is not None:
                place |= {
                    "first": next(iter(self._within)) == number,
                    "begun": epoch.begun,
                    "before_batch": epoch.before_batch,
                    "batches": epoch.batches,
                }
        return found

    def _draw_again(self) -> None:
        """Set the random numbers before the first forward pass of training, whatever began it."""

        def set_once(module: torch.nn.Module, *_: Any) -> None:
            if not module.training:
                return
            for handle in handles:
                handle.remove()
            if self._restored:
                set_random_states(self._random)
                self._restored = {}

        models = self._accelerator._models
        handles = [model.register_forward_pre_hook(set_once) for model in models]

    def _follow(self, loader: Any, number: int, skipped: int) -> None:
        """Note what a loader does, and let it begin as the restored one did."""
        if not isinstance(loader, DataLoaderShard):
            return
        own_begin, own_end, own_update = loader.begin, loader.end, loader._update_state_dict
        # An iterable dataset is read from its first sample on.
        unread = 0 if loader.skip_batches else skipped
        restored: dict[str, Any] | None = None

        def begin() -> None:
            nonlocal restored
            own_begin()
            restored = self._taken(number, skipped)
            if restored is not None:
                set_random_states(restored["begun"])
                _sources(loader, restored["begun"])
                if unread == restored["batches"]:
                    _set_before_first(loader, restored["before_batch"])
            begun = {**random_states(), **_sources(loader)}
            counts = restored is not None or loader is self._loaders[number]
            self._within.pop(number, None)
            self._within[number] = _Epoch(loader, begun, {}, unread, counts)

        def iterate() -> Any:
            iterator = own_iterate()
            if (epoch := self._within.get(number)) is not None:
                epoch.iterator = weakref.ref(iterator)
            return iterator

        def update() -> None:
            """Between two reads: the loop gets the batch that was read first after the other."""
            own_update()
            nonlocal restored
            epoch = self._within.get(number)
            if epoch is None or epoch.loader is not loader:
                return
            if restored is not None:
                if epoch.batches + 1 == restored["batches"]:
                    set_random_states(restored["before_batch"])
                elif epoch.batches >= restored["batches"] or unread > 0:
                    set_random_states(self._random)
                    restored = None
            epoch.before_batch = random_states()
            epoch.batches += 1

        def end() -> None:
            own_end()
            epoch = self._within.pop(number, None)
            if epoch is not None and epoch.counts:
                # The loader that skips is thrown away; the whole one has the next epoch.
                self._loaders[number].iteration = loader.iteration

        loader.begin, loader.end, loader._update_state_dict = begin, end, update
        own_iterate = loader.base_dataloader.__iter__
        loader.base_dataloader.__iter__ = iterate

    def _taken(self, number: int, skipped: int) -> dict[str, Any] | None:
        """The restored place of a loader that begins; None where it begins an epoch.

        Another loader that begins first, as an evaluation's does, leaves it where it is.
        """
        place: dict[str, Any] | None = self._restored.get(str(number))
        if place is None or not (skipped or place["first"]):
            return None
        self._restored = {}
        return place


def _set_before_first(loader: Any, states: dict[str, Any]) -> None:
    """Set the random states before the first batch is read, behind what the sampler draws."""
    sampler = loader.batch_sampler
    if not isinstance(sampler, SkipBatchSampler):
        return

    class Set(SkipBatchSampler):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            for number, samples in enumerate(super().__iter__()):
                if number == 0:
                    set_random_states(states)
                yield samples

    sampler.__class__ = Set


def _sources(loader: Any, restored: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what decides the order of a loader's samples, beside the process's random numbers.

    Args:
        loader: The loader.
        restored: What it is set to before; None: it stays as it is.
    """
    # Below all that shards and skips.
    sampler = loader.batch_sampler or loader.sampler
    while (inner := getattr(sampler, "batch_sampler", None)) is not None:
        sampler = inner
    sampler, restored = getattr(sampler, "sampler", sampler), restored or {}
    source = source_of(getattr(sampler, "generator", None))
    if "generator" in restored and source is not None:
        source.write(restored["generator"])
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = restored.get("seed", sampler.initial_seed)
        return {"seed": int(sampler.initial_seed)}
    return {} if source is None else {"generator": source.read()}


def check_savable(accelerator: Accelerator) -> None:
    """Refuse what a store cannot hold.

    Raises:
        IntegrationError: In one sentence.
    """
    if not accelerator._optimizers:
        raise IntegrationError(
            "add_checkpoints counts the steps of a prepared optimizer, and there is none; call it "
            "after accelerator.prepare(...)"
        )
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise IntegrationError(
            f"add_checkpoints cannot save what {kind.value} holds; of the Accelerator's engines, "
            "DDP and FSDP2 go with a store"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise IntegrationError("FSDP1 hides the parameters; set fsdp_version=2")
    if accelerator.dataloader_config.use_stateful_dataloader:
        raise IntegrationError(
            "DataLoaderConfiguration.use_stateful_dataloader = True is not kept in a store; set it "
            "to False and continue with accelerator.skip_first_batches"
        )
    if accelerator.project_configuration.save_on_each_node:
        raise IntegrationError(
            "ProjectConfiguration.save_on_each_node = True has no meaning for a store that all "
            "nodes write to together; leave it False"
        )


class _Choice(NamedTuple):
    """The state to load.

    Attributes:
        in_store: Whether it is in a store; else the Accelerator loads it.
        note: Of its folder; None: the newest in the store.
        folder: As named, or the one that Accelerate itself has written; None for neither.
        is_newest: Whether it is the newest of this run.
    """

    in_store: bool
    note: Note | None
    folder: str | None
    is_newest: bool


class Saving:
    """The store of one accelerator, in place of the files of its `save_state`.

    All processes make it, after `Accelerator.prepare`, and call its methods together.

    Args:
        accelerator: Whose `save_state` and `load_state` are replaced.
        directory: Of the store.
        settings: Of the store.

    Attributes:
        steps: Steps that the first optimizer has done in the run: a version's number, but that a
            second save after the same step counts as of the next one.
        directory: Of the store.
        store: Of the versions.
        own: What each process has for itself.

    Raises:
        IntegrationError: When the accelerator cannot be saved in this way.
    """

    def __init__(
        self, accelerator: Accelerator, directory: Path, settings: CheckpointSection
    ) -> None:
        check_savable(accelerator)
        self.steps = 0
        self.directory = directory
        self._accelerator = accelerator
        self._runtime = runtime_of(accelerator)
        self._saved_steps = self._kept_steps = -1
        # As in Accelerate, folders that the script names are limited by nobody.
        project = accelerator.project_configuration
        limit = project.total_limit if project.automatic_checkpoint_naming else None
        self.store = raise_together(
            lambda: CheckpointStore(
                directory, keep=limit or EVERY_VERSION, **store_options(settings)
            )
        )
        self._saves = self._runtime.save_to(self.store, raises=True)
        self._own_save, self._own_load = accelerator.save_state, accelerator.load_state
        self.own = ProcessEntry(accelerator)
        self._kept: dict[str, Any] = {}
        self._text = TextEntry()
        for optimizer in accelerator._optimizers:
            optimizer.optimizer.register_step_pre_hook(lambda *_: self._runtime.before_update())
        accelerator._optimizers[0].optimizer.register_step_post_hook(self._count)
        accelerator.save_state = self.save_state
        accelerator.load_state = self.load_state
        # A program may end without `end_training`.
        atexit.register(self._close_at_exit)

    def save_state(self, output_dir: str | None = None, *arguments: Any, **options: Any) -> str:
        """As `Accelerator.save_state`; returns when all is copied, and writes in the background.

        Returns:
            The folder, which stands for the state that is in the store.
        """
        self._saves.collect(wait=True)
        with self._runtime.watch("checkpoint"):
            with self._hidden():
                folder = str(self._own_save(output_dir, *arguments, **options))
            # No version is overwritten, and a folder leads to the state that it was given.
            again = self._saved_steps <= self.steps <= self._saves.begun
            number = self._saves.begun + 1 if again else self.steps
            note = Note(number, uuid.uuid4().hex, self.directory)
            if self._accelerator.is_main_process:
                write_note(Path(folder), note)
            saved = self._objects()
            facts = {**self._facts(saved), "number": number, "save": note.save}
            self._runtime.save(number, {**saved, **self._of_rank(TextEntry(facts))})
            self._saved_steps = self.steps
        return folder

    def load_state(self, input_dir: str | None = None, *arguments: Any, **options: Any) -> None:
        """As `Accelerator.load_state`; without a folder, the newest state that is whole.

        What Accelerate itself has written, it loads itself. A folder of another run is loaded from
        that run's store.

        Raises:
            OutlastError: When nothing can be used.
        """
        self._saves.collect(wait=True)
        choice = gather_objects(raise_together(lambda: self._chosen(input_dir)))[0]
        note = choice.note
        if choice.is_newest and self._loaded_from_memory():
            self._saved_steps = self._saves.begun = -1
        elif not choice.in_store:
            self._own_load(choice.folder, *arguments, **options)
        elif self._is_here(note):
            self._load(self.store, note)
            self._saved_steps = self._saves.begun = -1
        else:
            assert note is not None
            place = note.store
            with raise_together(lambda: CheckpointStore(place, writer="thread")) as other:
                self._load(other, note)

    def keep(self) -> None:
        """Keep the state of the step that was done last in memory, where `add_recover` was called.

        To be called after each step of the loop, where `save_state` could stand. In the middle of a
        gradient accumulation it does nothing.

        Raises:
            IntegrationError: When a process does not come to this step.
        """
        if self.steps != self._kept_steps:
            self._kept_steps = self.steps
            self._runtime.keep(self.steps)

    def newest(self) -> int | None:
        """Number of the newest state that can be loaded; None where there is none."""
        memory = self._runtime.memory
        if memory is not None and (kept := memory.find()) is not None:
            return kept
        version = self.store.newest()
        return None if version is None else version.step

    def collect(self, *, wait: bool = False) -> None:
        """See how the save under way went, if it is done; `wait`: wait for it."""
        self._saves.collect(wait=wait)

    def finish(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: When the last save has failed.
        """
        self._saves.wait()

    def close(self) -> None:
        """Wait for the save under way and give up the store, as `end_training` does.

        Raises:
            CheckpointError: When the last save has failed.
        """
        self._saves.close(failed=False)

    def _close_at_exit(self) -> None:
        # After an error, other processes may never finish the save under way.
        if getattr(sys, "last_value", None) is None and not self._saves.closed:
            close_at_exit(self.close)

    def remember(self, job: LoopJob, directory: RunDirectory) -> None:
        """Keep states in memory from now on, and load from there; see `add_recover`."""
        self._runtime.memory = MemoryCheckpoint(
            job, self._runtime.ranks, directory, self.store, self._kept, note=self._note
        )

    def _note(self) -> None:
        """Bring what is kept in memory up to date."""
        objects = self._objects()
        if not self._kept:
            self._kept |= {**objects, **self._of_rank(self._text)}
        self._text.content = self._facts(objects)

    def _load(self, store: CheckpointStore, note: Note | None) -> None:
        """Load what `note` leads to; None: the newest."""
        begun = time.perf_counter()
        version = None if note is None else note.version
        facts, number = read_facts(store, _FACTS, version, or_newest=True)
        if note is not None and number is None:
            self._runtime.tell(
                f"the state of step {version} was never published, as one that is cut short is "
                f"not; that of step {facts['number']} is loaded"
            )
        elif note is not None and facts["save"] != note.save:
            self._runtime.tell(
                f"the folder's own state of step {version} was never published, or the run went "
                "back and saved that step again; the one that was saved last is loaded"
            )
        while True:
            restored = store.restore(self._wanted(facts), step=number, warn=False)
            assert restored is not None
            for name in restored.skipped:
                self._runtime.tell(f"{name}; the version of step {restored.step} was loaded")
            if restored.step == facts["number"]:
                break
            # The newest is damaged, beyond what was read of it first.
            facts, number = read_facts(store, _FACTS, restored.step)
        self._take_over(facts)
        seconds = time.perf_counter() - begun
        self._runtime.tell(restored_event(store, restored, seconds))

    def _loaded_from_memory(self) -> bool:
        """Load the state in memory, where that is newer than the store's newest."""
        memory, text = self._runtime.memory, TextEntry()
        if memory is None:
            return False
        taken = memory.find() is not None and memory.read({_FACTS: text})
        if taken:
            self._kept |= self._wanted(text.content)
            taken = memory.take()
            self._kept.clear()
        self._runtime.tell(*memory.events)
        if taken:
            self._take_over(text.content)
        return taken

    def _take_over(self, facts: dict[str, Any]) -> None:
        """Continue where the objects that were loaded are from."""
        self.steps = facts["steps"]
        self._accelerator.step = facts["step"]
        self._accelerator.project_configuration.iteration = facts["iteration"]
        as_before = facts["ranks"] == self._runtime.ranks.world_size
        self._runtime.tell(*self.own.resume(as_before=as_before))

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        """Within it the accelerator looks as if nothing had been prepared."""
        accelerator = self._accelerator
        kept = {name: getattr(accelerator, name) for name in (*_HIDDEN, "scaler")}
        for name in _HIDDEN:
            setattr(accelerator, name, [])
        accelerator.scaler = None
        try:
            yield
        finally:
            for name, kept_item in kept.items():
                setattr(accelerator, name, kept_item)

    def _of_rank(self, facts: TextEntry) -> dict[str, Any]:
        """Entries beside the objects: this process's own, and on the first one the facts."""
        own = {f"{_RANDOM}{self._runtime.ranks.rank}": self.own}
        return {**own, _FACTS: facts} if self._runtime.ranks.is_first else own

    def _facts(self, entries: Iterable[str]) -> dict[str, Any]:
        """Facts that are saved beside the objects of these names."""
        return {
            "entries": [*entries],
            "ranks": self._runtime.ranks.world_size,
            "steps": self.steps,
            "step": self._accelerator.step,
            "iteration": self._accelerator.project_configuration.iteration,
        }

    def _objects(self) -> dict[str, Any]:
        """The live objects that are saved and restored, of all processes the same."""
        accelerator = self._accelerator
        models = [unwrapped(model) for model in accelerator._models]
        optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
        found: dict[str, Any] = {}
        if models:
            found["model"] = models[0] if len(models) == 1 else nn.ModuleList(models)
        if optimizers:
            found["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
        for number, scheduler in enumerate(accelerator._schedulers):
            found[f"scheduler-{number}"] = scheduler.scheduler
        for number, object_ in enumerate(accelerator._custom_objects):
            found[f"registered-{number}"] = object_
        if accelerator.scaler is not None:
            found["scaler"] = accelerator.scaler
        return found

    def _wanted(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The live objects to load into, with what is this process's own."""
        found = self._objects()
        saved = {fact for fact in facts["entries"] if not fact.startswith(_RANDOM)}
        if differing := saved ^ {*found}:
            name = min(differing)
            raise CheckpointError(
                f"{name} is {'' if name in saved else 'not '}in the state that was saved, but "
                f"{'not ' if name in saved else ''}in the accelerator: prepare and register the "
                "same objects as where it was saved"
            )
        # A process that was not there draws as one that was.
        return {**found, f"{_RANDOM}{self._runtime.ranks.rank % facts['ranks']}": self.own}

    def _chosen(self, input_dir: str | None) -> _Choice:
        """Choose the state that `load_state` is to load."""
        newest = self.store.newest()
        if input_dir is not None:
            note = read_note(Path(input_dir).expanduser())
            is_newest = note is not None and (newest is None or newest.step <= note.version)
            is_newest = is_newest and self._is_here(note)
            return _Choice(note is not None, note, input_dir, is_newest)
        if newest is not None and (folder := self._newer_own_folder(newest)) is not None:
            self._runtime.tell(
                f"{folder}, which Accelerate itself has written, is newer than the newest state in "
                f"{self.directory}, of step {newest.step}, and is loaded; to load the latter, name "
                "its folder"
            )
            return _Choice(False, None, str(folder), False)
        return _Choice(newest is not None, None, None, True)

    def _is_here(self, note: Note | None) -> bool:
        """Return whether a note leads to this store; without a note, it is the newest state."""
        return note is None or os.path.realpath(note.store) == os.path.realpath(self.directory)

    def _newer_own_folder(self, newest: Version) -> Path | None:
        """The folder that Accelerate itself has written after the newest version; None without."""
        project = self._accelerator.project_configuration
        if not project.automatic_checkpoint_naming:
            return None
        parent = Path(self._accelerator.project_dir) / "checkpoints"
        written = [
            (max(state.stat().st_mtime for state in states), folder)
            for folder in (parent.iterdir() if parent.is_dir() else ())
            if not (folder / _NAME).exists() and (states := [*folder.glob(_OWN)])
        ]
        seconds, folder = max(written, default=(-1.0, None))
        published = self.directory / newest.folder
        seal = published / SEAL
        is_newer = seconds > (seal if seal.exists() else published).stat().st_mtime
        return folder if is_newer else None

    def _count(self, *_: Any) -> None:
        self.steps += 1
