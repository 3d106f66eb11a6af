"""A `Trainer` that saves to a checkpoint store and resumes from it, by its own arguments.

The Trainer runs its own code, which decides when to save, which checkpoint is the best and which
are deleted. Where that code would write weights, optimizer, scheduler, scaler and random numbers,
nothing is written; when it is done, all of these go to the store at once. A ``checkpoint-N`` folder
holds only the trainer's state, and stands for the version of step N.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.autosave.resume.process import set_random_states
from outlast.checkpoint import CheckpointStore, Retention
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations.entries import RandomEntry, TextEntry
from outlast.integrations.hf_trainer.folders import (
    Choice,
    chosen,
    last_folder,
    mark,
    stands_for_version,
    step_of,
)
from outlast.integrations.place import ranks_here, trained_part, unwrapped
from outlast.integrations.saves import Saves
from outlast.records import CheckpointRestored, RunDirectory
from outlast.train.saving import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from transformers import Trainer

    from outlast.integrations.hf_trainer.remembering import Remembering
    from outlast.job import CheckpointSection

_MODEL, _OPTIMIZER, _SCHEDULER, _SCALER = "model", "optimizer", "scheduler", "scaler"
_TRAINER, _RANDOM = "trainer", "random-"
_NEWEST_BEST = "outlast_newest_best"
"""Figure of versions that were the best when they were saved: the later, the better they are."""

_ALL = 10**9
_STATE_FILE = "trainer_state.json"


class _WentBackError(Exception):
    """What was begun with is damaged; the version of `step` is whole, or None: the newest one."""

    def __init__(self, step: int | None) -> None:
        self.step = step


class Saving(Saves):
    """The store of one trainer, in place of its own files.

    Args:
        trainer: Whose methods are replaced.
        settings: Of the store.

    Attributes:
        memory: Keeps the state of each step, too; None without.
    """

    def __init__(self, trainer: Trainer, settings: CheckpointSection) -> None:
        super().__init__(ranks_here())
        self.memory: Remembering | None = None
        self._trainer = trainer
        self._settings = settings
        self._store: CheckpointStore | None = None
        self._source: CheckpointStore | None = None
        self._within_save = False
        self._resumed = ""
        self._content: dict[str, Any] = {}
        self._step: int | None = None
        self._random: RandomEntry | None = None
        self._replace_methods()

    def train(self, train: Callable[[Any], Any], resume: str | bool | None) -> Any:
        """Train, from what `resume` names.

        Args:
            train: The trainer's own, with the checkpoint to resume from as its argument.
            resume: As `Trainer.train` has it.

        Raises:
            CheckpointError: When nothing there can be used.
        """
        if self._trainer.hp_search_backend is not None:
            raise IntegrationError(
                "hyperparameter_search trains one model after the other, which one store cannot "
                "hold; leave add_checkpoints out"
            )
        self.events, self.results = [], []
        self._number = -1
        with contextlib.ExitStack() as stack:
            stack.push(lambda kind, *_: self._close(failed=_is_failure(kind)))
            self._store = self._open_store()
            choice = gather_objects(raise_together(lambda: self._chosen(resume)))[0]
            in_memory = self._look_into_memory(choice)
            if choice.kind == "nothing" and not in_memory:
                self._tell(
                    f"checkpoint-{choice.step} was never published, and there is none before it: "
                    "the training begins anew"
                )
                return train(None)
            if choice.kind == "trainer" and not in_memory:
                return train(choice.place or resume)
            self._source, self._step = self._store, None if in_memory else choice.step
            if not in_memory and choice.place != str(self._directory.checkpoints):
                self._source = stack.enter_context(CheckpointStore(choice.place))
            while True:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="outlast-resume-"))
                self._resumed = self._begin_resume(Path(folder), choice.is_marked)
                try:
                    return train(self._resumed)
                except _WentBackError as error:
                    self._step = error.step
                finally:
                    self._resumed = ""

    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from, here or written by the Trainer itself.

        All ranks ask together. So that the same command begins a run and goes on with it::

            trainer.train(resume_from_checkpoint=saving.has_checkpoint())
        """
        with self._open_store() as store:
            last = last_folder(self._directory)
            own = last is not None and not stands_for_version(last)
            if gather_objects(own or store.newest() is not None)[0]:
                return True
            return self.memory is not None and self.memory.has_any(store, self._directory)

    def _look_into_memory(self, choice: Choice) -> bool:
        """Whether the training goes on from memory, of which the trainer's own state is read."""
        if self.memory is None:
            return False
        assert self._store is not None
        self.memory.open(self._store, self._directory)
        found = self.memory.find(choice)
        self._take_over_events()
        return found

    def _take_over_events(self) -> None:
        assert self.memory is not None
        told, self.memory.events = self.memory.events, []
        self._tell_all(told)

    def _open_store(self) -> CheckpointStore:
        raise_together(lambda: self._directory.identify() if self._ranks.is_first else None)
        return raise_together(self._opened)

    @property
    def _directory(self) -> RunDirectory:
        return RunDirectory(Path(self._trainer.args.output_dir))

    def _opened(self) -> CheckpointStore:
        arguments = self._trainer.args
        limit = arguments.save_total_limit
        best = int(arguments.metric_for_best_model is not None)
        keep = Retention(
            limit if limit and limit > 0 else _ALL,
            best=best,
            metric=_NEWEST_BEST if best else "",
            mode="max",
        )
        return open_store(self._settings, self._directory, keep=keep)

    def _close(self, *, failed: bool) -> None:
        store, self._store, self._source = self._store, None, None
        self._content, self._random = {}, None
        if store is not None:
            try:
                if not failed:
                    self.collect(wait=True)
            finally:
                self._handle = None
                store.close(drain=not failed, failed=failed)

    def _chosen(self, resume: str | bool | None) -> Choice:
        assert self._store is not None
        newest = self._store.newest()
        return chosen(resume, self._directory, None if newest is None else newest.step)

    def _begin_resume(self, folder: Path, is_marked: bool) -> str:
        """Read the trainer's own state, and put it where the Trainer looks for it.

        Args:
            folder: To put it into.
            is_marked: Whether there has been a save of this step, perhaps one that was cut short.
        """
        if self.memory is not None and self.memory.content:
            self._content = self.memory.content
        else:
            self._content = self._read_content(is_marked)
        path = folder / f"checkpoint-{self._content['state']['global_step']}"
        path.mkdir()
        text = json.dumps(self._content["state"])
        (path / _STATE_FILE).write_text(text, encoding="utf-8")
        return str(path)

    def _read_content(self, is_marked: bool) -> dict[str, Any]:
        """The trainer's own state, and what there is beside it, of the version to resume from."""
        assert self._source is not None
        entry = TextEntry()
        try:
            restored = self._source.restore({_TRAINER: entry}, step=self._step)
        except CheckpointError:
            newest = self._source.newest()
            if not is_marked or self._step is None or newest is None or newest.step >= self._step:
                raise
            self._tell(
                f"checkpoint-{self._step} was never published, as a save that is cut short is not; "
                f"the training goes on from step {newest.step}"
            )
            self._step = None
            restored = self._source.restore({_TRAINER: entry})
        assert restored is not None
        return entry.content

    def _restore(self) -> None:
        """Load all that was saved into what the Trainer has made."""
        if self.memory is not None and self.memory.content:
            taken = self.memory.take(self.objects())
            self._take_over_events()
            if not taken:
                raise _WentBackError(None)
            self._random = self.memory.random
            return
        assert self._source is not None
        begun = time.perf_counter()
        entries = self._content["entries"]
        rank = self._ranks.rank % self._content["ranks"]
        self._random = RandomEntry()
        wanted = {**self.objects(), f"{_RANDOM}{rank}": self._random}
        state = {name: item for name, item in wanted.items() if name in entries}
        if _OPTIMIZER not in entries:
            self._tell(
                "only the model was saved (save_only_model): the optimizer and the schedule begin "
                "anew"
            )
        restored = self._source.restore(state, step=self._step)
        assert restored is not None
        for item in restored.skipped:
            self._tell(f"{item}; the training goes on from step {restored.step}")
        if restored.step != self._content["state"]["global_step"]:
            raise _WentBackError(restored.step)
        seconds = time.perf_counter() - begun
        self.events.append(CheckpointRestored(restored.step, seconds, restored.skipped))

    def objects(self) -> dict[str, Any]:
        """The live objects, of all ranks the same."""
        trainer = self._trainer
        found: dict[str, Any] = {_MODEL: self._model()}
        optimizer = trainer.optimizer
        found[_OPTIMIZER] = getattr(optimizer, "optimizer", optimizer)
        found[_SCHEDULER] = trainer.lr_scheduler
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            found[_SCALER] = scaler
        return found

    def _model(self) -> nn.Module:
        """What of the model is saved: of one with adapters, what they train."""
        model = unwrapped(self._trainer.model)
        return trained_part(model) if hasattr(model, "peft_config") else model

    def _save(self) -> None:
        """Begin to save what the Trainer has just decided to save."""
        assert self._store is not None
        state = self._trainer.state
        step = state.global_step
        if step == self._number:
            return
        with self.watch("checkpoint"):
            whole = not self._trainer.args.save_only_model
            saved: dict[str, Any] = self.objects() if whole else {_MODEL: self._model()}
            entries = [*saved]
            if whole:
                entries += [f"{_RANDOM}{rank}" for rank in range(self._ranks.world_size)]
                saved[f"{_RANDOM}{self._ranks.rank}"] = RandomEntry()
            if self._ranks.is_first:
                content = {
                    "state": dataclasses.asdict(state),
                    "entries": entries,
                    "ranks": self._ranks.world_size,
                }
                saved[_TRAINER] = TextEntry(content)
            self._handle = self._store.save_async(step, saved, metrics=_metrics(state))
        self._number = step

    def _replace_methods(self) -> None:
        """Put this store in the place of what reads and writes files."""
        trainer = self._trainer
        own_save, own_save_model = trainer._save_checkpoint, trainer.save_model
        own_load_best = trainer._load_best_model

        def save_checkpoint(*arguments: Any, **options: Any) -> None:
            if self._store is None:
                # Not within a training.
                own_save(*arguments, **options)
                return
            # A folder that comes is behind a version that is there.
            self.collect(wait=True)
            self._within_save = True
            try:
                own_save(*arguments, **options)
            finally:
                self._within_save = False
            self._save()

        def save_model(*arguments: Any, **options: Any) -> None:
            if not self._within_save:
                own_save_model(*arguments, **options)
            elif trainer.args.should_save:
                mark(Path(arguments[0]), self._directory)

        def load_best_model() -> None:
            step = gather_objects(step_of(Path(trainer.state.best_model_checkpoint)))[0]
            if self._store is None or step is None:
                own_load_best()
                return
            self.collect(wait=True)
            self._store.restore({_MODEL: self._model()}, step=step)

        trainer._save_checkpoint = save_checkpoint
        trainer.save_model = save_model
        trainer._load_best_model = load_best_model
        for name in ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"):
            setattr(trainer, name, self._unless_saving(getattr(trainer, name)))
        reads = {
            "_load_from_checkpoint": lambda: None,
            "_load_optimizer_and_scheduler": self._restore,
            "_load_scaler": lambda: None,
            "_load_rng_state": self._set_random_states,
        }
        for name, read in reads.items():
            setattr(trainer, name, self._unless_ours(getattr(trainer, name), read))

    def _set_random_states(self) -> None:
        if self._random is not None and self._random.states is not None:
            set_random_states(self._random.states)

    def _unless_saving(self, own: Callable[..., None]) -> Callable[..., None]:
        def write(*arguments: Any, **options: Any) -> None:
            if not self._within_save:
                own(*arguments, **options)

        return write

    def _unless_ours(
        self, own: Callable[..., None], read: Callable[[], None]
    ) -> Callable[..., None]:
        def load(checkpoint: str | None, *arguments: Any, **options: Any) -> None:
            if checkpoint is not None and checkpoint == self._resumed:
                read()
            else:
                own(checkpoint, *arguments, **options)

        return load


def _metrics(state: Any) -> dict[str, float]:
    """Figures of this step's evaluation, and whether it is the best so far."""
    found: dict[str, float] = {}
    for entry in reversed(state.log_history):
        if entry.get("step") != state.global_step:
            break
        found.update(
            (name, float(value))
            for name, value in entry.items()
            if name.startswith("eval_") and isinstance(value, int | float)
        )
    if state.best_global_step == state.global_step:
        # As the Trainer has it: a later best one takes the place of the one before.
        found[_NEWEST_BEST] = time.time()
    return found


def _is_failure(kind: type[BaseException] | None) -> bool:
    return kind is not None and not issubclass(kind, SystemExit)
