"""`Accelerator.save_state` and `load_state` by way of a checkpoint store.

Accelerate's own code still runs: it names folders, deletes old ones and calls hooks. It sees an
accelerator without models, optimizers and other objects, since all of these go to the store.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from outlast.autosave.resume.randomness import set_random_states
from outlast.checkpoint import CheckpointStore, Compression, Reduction
from outlast.checkpoint.format.version import SEAL
from outlast.errors import CheckpointError
from outlast.integrations.accelerate.checks import check_savable
from outlast.integrations.accelerate.folders import (
    Note,
    newest_own_folder,
    read_note,
    write_note,
)
from outlast.integrations.entries import RandomEntry, TextEntry
from outlast.integrations.place import ranks_here, unwrapped
from outlast.records import CheckpointRestored, Warned
from outlast.train.ranks import shared, together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accelerate import Accelerator

    from outlast.checkpoint import SaveHandle, SaveResult
    from outlast.job import CheckpointSection
    from outlast.records import Event

_FACTS, _RANDOM = "accelerator", "random-"
_ALL = 10**9
_HIDDEN = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")


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
        events: What loading had to say.
        results: Of the saves that have ended.
        on_result: Called with each result.
        watch: Makes contexts whose time counts for a purpose.

    Raises:
        IntegrationError: When the accelerator cannot be saved in this way.
    """

    def __init__(
        self, accelerator: Accelerator, directory: Path, settings: CheckpointSection
    ) -> None:
        check_savable(accelerator)
        self.steps = 0
        self.events: list[Event] = []
        self.results: list[SaveResult] = []
        self.on_result: Callable[[SaveResult], None] = lambda _: None
        self.watch: Callable[[str], contextlib.AbstractContextManager[Any]] = lambda _: (
            contextlib.nullcontext()
        )
        self._accelerator = accelerator
        self._directory = directory
        self._ranks = ranks_here()
        self._handle: SaveHandle | None = None
        self._saved_steps = self._saved_number = -1
        self._store = together(lambda: self._opened(settings))
        self._own_save, self._own_load = accelerator.save_state, accelerator.load_state
        self._random: dict[str, Any] | None = None
        own_end, own_skip = accelerator.end_training, accelerator.skip_first_batches
        accelerator._optimizers[0].optimizer.register_step_post_hook(self._count)

        def end_training() -> None:
            self.close()
            own_end()

        def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
            if num_batches:
                self._draw_again()
            return own_skip(dataloader, num_batches)

        accelerator.skip_first_batches = skip_first_batches
        accelerator.save_state = self.save_state
        accelerator.load_state = self.load_state
        accelerator.end_training = end_training

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
            note = Note(self._next_number(), uuid.uuid4().hex, self._directory)
            if accelerator.is_main_process:
                write_note(Path(folder), note)
            saved = self._objects()
            entries = [*saved, *(f"{_RANDOM}{rank}" for rank in range(self._ranks.world_size))]
            saved[f"{_RANDOM}{self._ranks.rank}"] = RandomEntry()
            if self._ranks.is_first:
                content = {
                    "entries": entries,
                    "ranks": self._ranks.world_size,
                    "steps": self.steps,
                    "number": note.version,
                    "save": note.save,
                    "step": accelerator.step,
                    "iteration": accelerator.project_configuration.iteration,
                }
                saved[_FACTS] = TextEntry(content)
            self._handle = self._store.save_async(note.version, saved)
            self._saved_steps, self._saved_number = self.steps, note.version
        return folder

    def load_state(self, input_dir: str | None = None, *arguments: Any, **options: Any) -> None:
        """As `Accelerator.load_state`; without a folder, the newest state that is whole.

        What Accelerate itself has written, it loads itself. A folder of another run is loaded from
        that run's store.

        Raises:
            OutlastError: When nothing can be used.
        """
        self.collect(wait=True)
        ours, note, folder = shared(together(lambda: self._chosen(input_dir)))[0]
        if not ours:
            self._own_load(folder, *arguments, **options)
        elif note is None or os.path.realpath(note.store) == os.path.realpath(self._directory):
            self._load(self._store, note)
            self._saved_steps = self._saved_number = -1
        else:
            other = together(lambda: CheckpointStore(note.store, writer="thread"))
            try:
                self._load(other, note)
            finally:
                other.close()

    def _load(self, store: CheckpointStore, note: Note | None) -> None:
        """Load what `note` leads to; None: the newest."""
        begun = time.perf_counter()
        facts, number = self._facts(store, note)
        while True:
            random = RandomEntry()
            wanted = self._wanted(facts, random)
            restored = store.restore(wanted, step=number)
            assert restored is not None
            for each in restored.skipped:
                self._tell(f"{each}; the version of step {restored.step} was loaded")
            if restored.step == facts["number"]:
                break
            # The newest is damaged, beyond what was read of it first.
            facts, number = _read_facts(store, restored.step), restored.step
        self.steps = facts["steps"]
        self._accelerator.step = facts["step"]
        self._accelerator.project_configuration.iteration = facts["iteration"]
        assert random.states is not None
        self._random = random.states
        set_random_states(random.states)
        seconds = time.perf_counter() - begun
        self.events.append(CheckpointRestored(restored.step, seconds, restored.skipped))

    def newest(self) -> int | None:
        """Number of the newest state that can be loaded; None where there is none."""
        version = self._store.newest()
        return None if version is None else version.step

    def collect(self, *, wait: bool = False) -> None:
        """See how the save under way went, if it is done.

        Args:
            wait: Wait for it.
        """
        if self._handle is None or not (wait or self._handle.done()):
            return
        with self.watch("checkpoint"):
            result = self._handle.result()
        self._handle = None
        self.results.append(result)
        self.on_result(result)
        if result.error is not None:
            self._saved_steps = self._saved_number = -1
            warnings.warn(result.error, stacklevel=2)

    def finish(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: When the last save has failed.
        """
        self.collect(wait=True)
        if self.results and self.results[-1].error is not None:
            raise CheckpointError(self.results[-1].error)

    def close(self) -> None:
        """Wait for the save under way and give up the store; `end_training` calls it.

        Raises:
            CheckpointError: When the last save has failed.
        """
        try:
            self.finish()
        finally:
            self._store.close()

    def _opened(self, settings: CheckpointSection) -> CheckpointStore:
        project = self._accelerator.project_configuration
        # As in Accelerate, folders that the script names are limited by nobody.
        limit = project.total_limit if project.automatic_checkpoint_naming else None
        return CheckpointStore(
            self._directory,
            keep=limit or _ALL,
            reduction=Reduction(Compression(settings.compression), chain=settings.delta_chain),
            asynchronous=settings.asynchronous,
            writer=settings.writer,
            timeout_seconds=settings.timeout_seconds,
        )

    def _draw_again(self) -> None:
        """Set the random numbers when the first batch has come.

        In the middle of an epoch, a loader that begins draws a number that was drawn long ago.
        """
        states, self._random = self._random, None
        if states is None:
            return
        found = states

        def set_once(module: nn.Module, *_: Any) -> None:
            if module.training:
                set_random_states(found)
                handle.remove()

        handle = self._accelerator._models[0].register_forward_pre_hook(set_once)

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
            for name, each in kept.items():
                setattr(accelerator, name, each)

    def _objects(self) -> dict[str, Any]:
        """The live objects that are saved and restored, of all processes the same."""
        accelerator = self._accelerator
        models = [unwrapped(each) for each in accelerator._models]
        found: dict[str, Any] = {}
        if models:
            found["model"] = models[0] if len(models) == 1 else nn.ModuleList(models)
        optimizers = [each.optimizer for each in accelerator._optimizers]
        if optimizers:
            found["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
        for number, each in enumerate(accelerator._schedulers):
            found[f"scheduler-{number}"] = each.scheduler
        for number, each in enumerate(accelerator._custom_objects):
            found[f"registered-{number}"] = each
        if accelerator.scaler is not None:
            found["scaler"] = accelerator.scaler
        return found

    def _wanted(self, facts: dict[str, Any], random: RandomEntry) -> dict[str, Any]:
        """The live objects to load into, with this process's random numbers."""
        found = self._objects()
        saved = {each for each in facts["entries"] if not each.startswith(_RANDOM)}
        if differing := saved ^ {*found}:
            name = min(differing)
            raise CheckpointError(
                f"{name} is {'' if name in saved else 'not '}in the state that was saved, but "
                f"{'not ' if name in saved else ''}in the accelerator: prepare and register the "
                "same objects as where it was saved"
            )
        # A process that was not there draws as one that was.
        return {**found, f"{_RANDOM}{self._ranks.rank % facts['ranks']}": random}

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

    def _chosen(self, input_dir: str | None) -> tuple[bool, Note | None, str | None]:
        """Whether a state is in a store, and its note or None for the newest; else its folder."""
        if input_dir is not None:
            note = read_note(Path(input_dir).expanduser())
            return note is not None, note, input_dir
        newest = self._store.newest()
        if (
            newest is None
            or not self._accelerator.project_configuration.automatic_checkpoint_naming
        ):
            return newest is not None, None, None
        own = newest_own_folder(Path(self._accelerator.project_dir) / "checkpoints")
        published = self._directory / newest.folder
        seal = published / SEAL
        if own is None or own.seconds <= (seal if seal.exists() else published).stat().st_mtime:
            return True, None, None
        self._tell(
            f"{own.path}, which Accelerate itself has written, is newer than the newest state in "
            f"{self._directory}, of step {newest.step}, and is loaded; to load the latter, name "
            "its folder"
        )
        return False, None, str(own.path)

    def _next_number(self) -> int:
        """Number of the next version: the steps done, or one more than that of the save before.

        No version is overwritten, and a folder leads to the state that it was given.
        """
        if self._saved_steps <= self.steps <= self._saved_number:
            return self._saved_number + 1
        return self.steps

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def _tell(self, sentence: str) -> None:
        self.events.append(Warned(sentence))
        if self._ranks.is_first:
            warnings.warn(sentence, stacklevel=2)


def _read_facts(store: CheckpointStore, number: int | None) -> dict[str, Any]:
    """What was saved beside the objects of a version; None for the newest."""
    entry = TextEntry()
    if store.restore({_FACTS: entry}, step=number) is None:
        raise CheckpointError(f"there is no complete state in {store.storage.location} to load")
    content: dict[str, Any] = entry.content
    return content
