"""`Accelerator.save_state` and `load_state` by way of a checkpoint store.

Accelerate's own code still runs: it names folders, deletes old ones and calls hooks. It sees an
accelerator without models, optimizers and other objects, since all of these go to the store.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from outlast.checkpoint import CheckpointStore, Compression, Reduction
from outlast.checkpoint.format.version import SEAL
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import CheckpointError
from outlast.integrations.accelerate.checks import check_savable
from outlast.integrations.accelerate.folders import (
    Note,
    newest_own_folder,
    read_note,
    write_note,
)
from outlast.integrations.accelerate.loaders import ProcessEntry
from outlast.integrations.entries import TextEntry
from outlast.integrations.place import ranks_here, unwrapped
from outlast.integrations.saves import Saves, close_at_exit
from outlast.records import CheckpointRestored

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accelerate import Accelerator

    from outlast.integrations.accelerate.remembering import Remembering
    from outlast.job import CheckpointSection

_FACTS, _RANDOM = "accelerator", "random-"
_ALL = 10**9
_HIDDEN = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")


class Saving(Saves):
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
        memory: Keeps the state of each step, too; None without.
        own: What each process has for itself.

    Raises:
        IntegrationError: When the accelerator cannot be saved in this way.
    """

    def __init__(
        self, accelerator: Accelerator, directory: Path, settings: CheckpointSection
    ) -> None:
        check_savable(accelerator)
        super().__init__(ranks_here())
        self.steps = 0
        self.memory: Remembering | None = None
        self._accelerator = accelerator
        self.directory = directory
        self._saved_steps = -1
        self.store = raise_together(lambda: self._opened(settings))
        self._own_save, self._own_load = accelerator.save_state, accelerator.load_state
        self.own = ProcessEntry(accelerator)
        own_end, own_skip = accelerator.end_training, accelerator.skip_first_batches
        accelerator._optimizers[0].optimizer.register_step_post_hook(self._count)

        def end_training() -> None:
            self.close()
            own_end()

        def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
            loader = own_skip(dataloader, num_batches)
            self.own.skipping(dataloader, loader, num_batches)
            return loader

        accelerator.skip_first_batches = skip_first_batches
        accelerator.save_state = self.save_state
        accelerator.load_state = self.load_state
        accelerator.end_training = end_training
        # A program may end without `end_training`.
        atexit.register(self._close_at_exit)

    def save_state(self, output_dir: str | None = None, *arguments: Any, **options: Any) -> str:
        """As `Accelerator.save_state`; returns when all is copied, and writes in the background.

        Returns:
            The folder, which stands for the state that is in the store.
        """
        self.collect(wait=True)
        accelerator = self._accelerator
        with self.watch("checkpoint"):
            with self._hidden():
                folder = str(self._own_save(output_dir, *arguments, **options))
            note = Note(self._next_number(), uuid.uuid4().hex, self.directory)
            if accelerator.is_main_process:
                write_note(Path(folder), note)
            saved = self.objects()
            entries = [*saved]
            saved[f"{_RANDOM}{self._ranks.rank}"] = self.own
            if self._ranks.is_first:
                facts = {**self.facts(entries), "number": note.version, "save": note.save}
                saved[_FACTS] = TextEntry(facts)
            self._handle = self.store.save_async(note.version, saved)
            self._saved_steps, self._number = self.steps, note.version
        return folder

    def load_state(self, input_dir: str | None = None, *arguments: Any, **options: Any) -> None:
        """As `Accelerator.load_state`; without a folder, the newest state that is whole.

        What Accelerate itself has written, it loads itself. A folder of another run is loaded from
        that run's store.

        Raises:
            OutlastError: When nothing can be used.
        """
        self.collect(wait=True)
        looked = raise_together(lambda: self._looked(input_dir))
        (ours, note, folder), is_newest = gather_objects(looked)[0]
        if is_newest and self._loaded_from_memory():
            self._saved_steps = self._number = -1
        elif not ours:
            self._own_load(folder, *arguments, **options)
        elif note is None or os.path.realpath(note.store) == os.path.realpath(self.directory):
            self._load(self.store, note)
            self._saved_steps = self._number = -1
        else:
            other = raise_together(lambda: CheckpointStore(note.store, writer="thread"))
            try:
                self._load(other, note)
            finally:
                other.close()

    def _load(self, store: CheckpointStore, note: Note | None) -> None:
        """Load what `note` leads to; None: the newest."""
        begun = time.perf_counter()
        facts, number = self._facts(store, note)
        while True:
            wanted = self._wanted(facts)
            restored = store.restore(wanted, step=number)
            assert restored is not None
            for name in restored.skipped:
                self._tell(f"{name}; the version of step {restored.step} was loaded")
            if restored.step == facts["number"]:
                break
            # The newest is damaged, beyond what was read of it first.
            facts, number = _read_facts(store, restored.step), restored.step
        self._take_over(facts)
        seconds = time.perf_counter() - begun
        self.events.append(CheckpointRestored(restored.step, seconds, restored.skipped))

    def _loaded_from_memory(self) -> bool:
        """Load the state in memory, where that is newer than the store's newest."""
        if self.memory is None or self.memory.find() is None or not self.memory.read():
            self._take_over_events()
            return False
        taken = self.memory.take(self._wanted(self.memory.facts))
        self._take_over_events()
        if taken:
            self._take_over(self.memory.facts)
        return taken

    def _take_over_events(self) -> None:
        self._tell_all(() if self.memory is None else self.memory.events)

    def _take_over(self, facts: dict[str, Any]) -> None:
        """Go on where the objects that were loaded are from."""
        self.steps = facts["steps"]
        self._accelerator.step = facts["step"]
        self._accelerator.project_configuration.iteration = facts["iteration"]
        for sentence in self.own.resume(as_before=facts["ranks"] == self._ranks.world_size):
            self._tell(sentence)

    def newest(self) -> int | None:
        """Number of the newest state that can be loaded; None where there is none."""
        kept = None if self.memory is None else self.memory.find()
        if kept is not None:
            return kept
        version = self.store.newest()
        return None if version is None else version.step

    def close(self) -> None:
        """Wait for the save under way and give up the store; `end_training` calls it.

        Raises:
            CheckpointError: When the last save has failed.
        """
        atexit.unregister(self._close_at_exit)
        try:
            self.finish()
        finally:
            self.store.close()

    def _close_at_exit(self) -> None:
        # After an error, other processes may never finish the save under way.
        if getattr(sys, "last_value", None) is None:
            close_at_exit(self.close)

    def _opened(self, settings: CheckpointSection) -> CheckpointStore:
        project = self._accelerator.project_configuration
        # As in Accelerate, folders that the script names are limited by nobody.
        limit = project.total_limit if project.automatic_checkpoint_naming else None
        return CheckpointStore(
            self.directory,
            keep=limit or _ALL,
            reduction=Reduction(Compression(settings.compression), chain=settings.delta_chain),
            asynchronous=settings.asynchronous,
            writer=settings.writer,
            timeout_seconds=settings.timeout_seconds,
        )

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

    def facts(self, entries: Sequence[str]) -> dict[str, Any]:
        """What is saved beside the objects.

        Args:
            entries: Their names.
        """
        return {
            "entries": [*entries],
            "ranks": self._ranks.world_size,
            "steps": self.steps,
            "step": self._accelerator.step,
            "iteration": self._accelerator.project_configuration.iteration,
        }

    def objects(self) -> dict[str, Any]:
        """The live objects that are saved and restored, of all processes the same."""
        accelerator = self._accelerator
        models = [unwrapped(model) for model in accelerator._models]
        found: dict[str, Any] = {}
        if models:
            found["model"] = models[0] if len(models) == 1 else nn.ModuleList(models)
        optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
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
        found = self.objects()
        saved = {fact for fact in facts["entries"] if not fact.startswith(_RANDOM)}
        if differing := saved ^ {*found}:
            name = min(differing)
            raise CheckpointError(
                f"{name} is {'' if name in saved else 'not '}in the state that was saved, but "
                f"{'not ' if name in saved else ''}in the accelerator: prepare and register the "
                "same objects as where it was saved"
            )
        # A process that was not there draws as one that was.
        return {**found, f"{_RANDOM}{self._ranks.rank % facts['ranks']}": self.own}

    def _facts(
        self, store: CheckpointStore, note: Note | None
    ) -> tuple[dict[str, Any], int | None]:
        """What was saved beside the objects, and the version to load; None for the newest."""
        if note is None:
            return _read_facts(store, None), None
        try:
            facts = _read_facts(store, note.version)
        except CheckpointError:
            newest = store.newest()
            if newest is None or newest.step >= note.version:
                raise
            self._tell(
                f"the state of step {note.version} was never published, as one that is cut short "
                f"is not; that of step {newest.step} is loaded"
            )
            return _read_facts(store, None), None
        if facts["save"] != note.save:
            self._tell(
                f"the folder's own state of step {note.version} was never published, or the run "
                "went back and saved that step again; the one that was saved last is loaded"
            )
        return facts, note.version

    def _looked(self, input_dir: str | None) -> tuple[tuple[bool, Note | None, str | None], bool]:
        """What `_chosen` says, and whether that is the newest state of this run."""
        _, note, folder = found = self._chosen(input_dir)
        if note is None:
            return found, folder is None
        newest = self.store.newest()
        own = os.path.realpath(note.store) == os.path.realpath(self.directory)
        return found, own and (newest is None or newest.step <= note.version)

    def _chosen(self, input_dir: str | None) -> tuple[bool, Note | None, str | None]:
        """Whether a state is in a store, and its note or None for the newest; else its folder."""
        if input_dir is not None:
            note = read_note(Path(input_dir).expanduser())
            return note is not None, note, input_dir
        newest = self.store.newest()
        if (
            newest is None
            or not self._accelerator.project_configuration.automatic_checkpoint_naming
        ):
            return newest is not None, None, None
        own = newest_own_folder(Path(self._accelerator.project_dir) / "checkpoints")
        published = self.directory / newest.folder
        seal = published / SEAL
        if own is None or own.seconds <= (seal if seal.exists() else published).stat().st_mtime:
            return True, None, None
        self._tell(
            f"{own.path}, which Accelerate itself has written, is newer than the newest state in "
            f"{self.directory}, of step {newest.step}, and is loaded; to load the latter, name "
            "its folder"
        )
        return False, None, str(own.path)

    def _next_number(self) -> int:
        """Number of the next version: the steps done, or one more than that of the save before.

        No version is overwritten, and a folder leads to the state that it was given.
        """
        if self._saved_steps <= self.steps <= self._number:
            return self._number + 1
        return self.steps

    def _count(self, *_: Any) -> None:
        self.steps += 1


def _read_facts(store: CheckpointStore, number: int | None) -> dict[str, Any]:
    """What was saved beside the objects of a version; None for the newest."""
    entry = TextEntry()
    if store.restore({_FACTS: entry}, step=number) is None:
        raise CheckpointError(f"there is no complete state in {store.storage.location} to load")
    content: dict[str, Any] = entry.content
    return content
