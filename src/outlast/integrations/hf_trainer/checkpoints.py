"""The folders ``checkpoint-N`` of a `Trainer`, of which each may stand for a version in a store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from outlast import cluster
from outlast.autosave.resume.process import set_random_states
from outlast.checkpoint import CheckpointStore, Retention, list_versions
from outlast.checkpoint.version import is_published
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations.entries import RandomEntry, TextEntry, padded
from outlast.records import CheckpointRestored, RunDirectory, Warned
from outlast.runtime.memory import MemoryCheckpoint
from outlast.runtime.place import ranks_here, trained_part, unwrapped
from outlast.runtime.saves import AdapterSaves, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from transformers import Trainer

    from outlast.job import CheckpointSection, LoopJob
    from outlast.records import Event
    from outlast.runtime.agreement import BoundaryAgreement


_MARK = "outlast.json"


_FOLDER = re.compile(r"checkpoint-(\d+)")


class Choice(NamedTuple):
    """The state to resume from.

    Attributes:
        kind: ``store``; ``trainer``: what the Trainer itself has to load, or to refuse; or
            ``nothing``: a folder whose version was never published, and no other version.
        place: Of the store, or a folder that the Trainer itself has written; empty: as named.
        step: Of the version, or of what the Trainer has written; None for the newest version.
        is_marked: Whether a folder stands for that version, be it published or not.
        is_newest: Whether the newest state is asked for, wherever it is.
    """

    kind: str
    place: str = ""
    step: int | None = None
    is_marked: bool = False
    is_newest: bool = False


def chosen(resume: str | bool | None, directory: RunDirectory, newest: int | None) -> Choice:
    """Choose the state that `resume` names.

    Args:
        resume: As `Trainer.train` has it.
        directory: The trainer's output directory.
        newest: Step of the newest version in its store; None without any.
    """
    is_newest = resume is True or _is_store(resume, directory)
    return _chosen(resume, directory, newest)._replace(is_newest=is_newest)


def _chosen(resume: str | bool | None, directory: RunDirectory, newest: int | None) -> Choice:
    if newest is not None and _is_store(resume, directory):
        return Choice("store", str(directory.checkpoints))
    if resume is True and newest is not None:
        written = _written_by_trainer(directory)
        if max(written, default=-1) > newest:
            return Choice("trainer", str(written[max(written)]), max(written))
        return Choice("store", str(directory.checkpoints))
    folder = last_folder(directory) if resume is True else Path(resume or "")
    if folder is None or (step := _FOLDER.fullmatch(folder.name)) is None:
        return Choice("trainer")
    is_marked = stands_for_version(folder)
    if folder.is_dir() and not is_marked:
        return Choice("trainer", step=int(step[1]))
    own = folder.parent.resolve() == directory.path.resolve()
    place = directory.checkpoints if own else folder.parent / "checkpoints"
    if own and newest is None:
        return Choice("nothing" if is_marked else "trainer", step=int(step[1]))
    if own or place.is_dir():
        return Choice("store", str(place), int(step[1]), is_marked)
    return Choice("trainer")


def _is_store(resume: str | bool | None, directory: RunDirectory) -> bool:
    """Return whether the store itself is named, whatever the Trainer has written beside it."""
    return isinstance(resume, str) and Path(resume).resolve() == directory.checkpoints.resolve()


def _written_by_trainer(directory: RunDirectory) -> dict[int, Path]:
    """Folders with all that the Trainer itself has written, by their steps."""
    found = {}
    for folder in directory.path.glob("checkpoint-*"):
        step = _FOLDER.fullmatch(folder.name)
        # The state is what the Trainer writes last.
        complete = (folder / TRAINER_STATE_NAME).exists() and not stands_for_version(folder)
        if step is not None and complete:
            found[int(step[1])] = folder
    return found


def last_folder(directory: RunDirectory) -> Path | None:
    """The folder of the highest step; None without any."""
    last = get_last_checkpoint(str(directory.path)) if directory.path.is_dir() else None
    return None if last is None else Path(last)


def stands_for_version(folder: Path) -> bool:
    """Return whether a folder was made by `mark`."""
    return (folder / _MARK).exists()


def step_of(folder: Path) -> int | None:
    """The step of the version that a folder stands for; None for any other folder."""
    step = _FOLDER.fullmatch(folder.name)
    return int(step[1]) if step is not None and stands_for_version(folder) else None


def mark(folder: Path, directory: RunDirectory) -> None:
    """Make a folder that stands for a version in the store of `directory`."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"store": os.path.relpath(directory.checkpoints, folder)}
    (folder / _MARK).write_text(json.dumps(said) + "\n", encoding="utf-8")


_MODEL, _OPTIMIZER, _SCHEDULER, _SCALER = "model", "optimizer", "scheduler", "scaler"


_TRAINER, _RANDOM = "trainer", "random-"


_NEWEST_BEST = "outlast_newest_best"
"""Figure of versions that were the best when they were saved: the later, the better they are."""


_ALL = 10**9


_STATE_FILE = "trainer_state.json"


class _WentBackError(Exception):
    """The state begun with is damaged; the version of `step` is whole, or None: the newest."""

    def __init__(self, step: int | None) -> None:
        self.step = step


class Saving(AdapterSaves):
    """The store of one trainer, in place of its own files.

    Args:
        trainer: Whose methods are replaced.
        settings: Of the store.

    Attributes:
        memory: Keeps the state of each step, too; None without.
    """

    def __init__(self, trainer: Trainer, settings: CheckpointSection) -> None:
        super().__init__(ranks_here(), cluster)
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
        """Return whether there is something to resume from, here or written by the Trainer itself.

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
        """True if the training goes on from memory, of which the trainer's own state is read."""
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
        raise_together(lambda: self._directory.create() if self._ranks.is_first else None)
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
        """The part of the model that is saved: of one with adapters, what they train."""
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


_KEPT_TRAINER, _KEPT_RANDOM, _UNLOGGED = "trainer", "random-", "unlogged-"


class Remembering:
    """Keeps the state of each training of one trainer, and finds it again after a restart.

    Args:
        trainer: Whose `get_batch_samples` is wrapped.
        job: The settings; [recover] counts here.

    Attributes:
        content: The trainer's own state that was found in memory, with the number of ranks; empty
            where the training does not go on from memory.
        random: This rank's random numbers in it.
        agreement: By which the ranks agree on other things; None: on nothing else.
        events: What there is to say and not yet said.
    """

    def __init__(self, trainer: Trainer, job: LoopJob) -> None:
        self.content: dict[str, Any] = {}
        self.random = RandomEntry()
        self.agreement: BoundaryAgreement | None = None
        self.events: list[Event] = []
        self._trainer = trainer
        self._job = job
        self._ranks = ranks_here()
        self._memory: MemoryCheckpoint | None = None
        self._storage: Any = None
        self._state: dict[str, Any] = {}
        self._text = StateText()
        self._unlogged = Unlogged(trainer)
        self._pending = 0
        own_batches = trainer.get_batch_samples

        def get_batch_samples(*arguments: Any, **options: Any) -> Any:
            self.keep()
            return own_batches(*arguments, **options)

        trainer.get_batch_samples = get_batch_samples

    def open(self, store: CheckpointStore, directory: RunDirectory) -> None:
        """A training of the run in `directory` begins; all ranks together."""
        self.content, self._pending = {}, 0
        self._storage = store.storage
        self._memory = MemoryCheckpoint(
            self._job, self._ranks, directory, store, self._state, note=self._note
        )

    def find(self, choice: Choice) -> bool:
        """True if the newest state is asked for and lies in memory; `content` is filled then.

        Raises:
            RecoverError: On all ranks, when steps were done of which nothing is left.
        """
        assert self._memory is not None
        step = self._memory.find() if choice.is_newest else None
        # The Trainer itself may have written something newer, without Outlast.
        written = choice.step if choice.kind == "trainer" else None
        text = StateText()
        if (
            step is not None
            and (written is None or written <= step)
            and self._memory.read({_KEPT_TRAINER: text})
            and self._has_best(text.content)
        ):
            self.content = text.content
        else:
            self._drain()
        return bool(self.content)

    def has_any(self, store: CheckpointStore, directory: RunDirectory) -> bool:
        """True if a state of the run lies in memory that is better than its newest checkpoint.

        Raises:
            RecoverError: As `find`.
        """
        self.open(store, directory)
        assert self._memory is not None
        try:
            return self._memory.find() is not None
        finally:
            self.close(forget=False)

    def take(self, objects: Mapping[str, Any]) -> bool:
        """Fill the live objects with what was found; else the newest checkpoint must be taken.

        Args:
            objects: Model, optimizer and so on, by their names in the store.

        Raises:
            RecoverError: On all ranks, when it does not fit, and there is no checkpoint.
        """
        assert self._memory is not None
        before, rank = self.content["ranks"], self._ranks.rank
        self._state.clear()
        self._state |= {**objects, f"{_KEPT_RANDOM}{rank % before}": self.random}
        if before == self._ranks.world_size:
            self._state[f"{_UNLOGGED}{rank}"] = self._unlogged
        taken = self._memory.take()
        self._drain()
        if not taken:
            self.content = {}
        return taken

    def begin(self, objects: Mapping[str, Any]) -> None:
        """The first step begins, of which the state is kept from now on."""
        rank = self._ranks.rank
        self._text = StateText()
        self._state.clear()
        self._state |= {**objects, f"{_KEPT_RANDOM}{rank}": RandomEntry()}
        self._state[f"{_UNLOGGED}{rank}"] = self._unlogged
        if self._ranks.is_first:
            self._state[_KEPT_TRAINER] = self._text
        self._unlogged.set()

    def step_done(self, step: int) -> None:
        """A step has been done; what belongs to it follows."""
        self._pending = step

    def keep(self) -> None:
        """Keep the state of the last step, if that is not done yet; all ranks together.

        Raises:
            IntegrationError: When a rank does not come to this step.
        """
        step, self._pending = self._pending, 0
        if not step or self._memory is None:
            return
        if (warning := self._memory.keep(step, self.agreement)) is not None:
            self.events.append(warning)

    def settle(self) -> None:
        """Parameters and optimizer are about to change."""
        if self._memory is not None:
            self._memory.settle()

    def close(self, *, forget: bool) -> None:
        """The training ends; `forget`: what is in memory is on disk, or may be wrong."""
        memory, self._memory = self._memory, None
        self.agreement = None
        self._pending = 0
        if memory is not None:
            memory.close(forget=forget)
        self._state.clear()

    def _note(self) -> None:
        if self._ranks.is_first:
            self._text.note(state_of(self._trainer), self._ranks.world_size)

    def _has_best(self, content: dict[str, Any]) -> bool:
        """True if the best checkpoint so far is complete; else the steps to it are done again.

        Where there is no other checkpoint to do them from, `content` loses it instead.
        """
        best = content["state"]["best_model_checkpoint"]
        step = None if best is None else step_of(Path(best))
        if step is None:
            return True
        found = {
            version.step
            for version in list_versions(self._storage)
            if is_published(self._storage, version)
        }
        has_best, has_any = gather_objects((step in found, bool(found)))[0]
        if has_best:
            return True
        if has_any:
            follows = "it goes on from its newest checkpoint, not from memory"
        else:
            content["state"] |= {
                "best_model_checkpoint": None,
                "best_global_step": None,
                "best_metric": None,
            }
            follows = "with no other checkpoint, it goes on from memory and looks for the best anew"
        assert self._memory is not None
        self._memory.events.append(
            Warned(
                f"the best checkpoint, of step {step}, was not complete when the training ended: "
                f"{follows}"
            )
        )
        return not has_any

    def _drain(self) -> None:
        assert self._memory is not None
        self.events += self._memory.events
        self._memory.events = []


class StateText:
    """The trainer's own state as JSON, of which the logs so far are not written anew each time.

    Attributes:
        content: What was restored: ``state`` and ``ranks``.
    """

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}
        self._history: list[str] = []
        self._written = ""

    def note(self, state: TrainerState, ranks: int) -> None:
        """Take in the state as it is now."""
        entries = state.log_history
        # The last one may have been given more figures since.
        known = min(len(self._history), len(entries)) - 1
        del self._history[max(known, 0) :]
        self._history += [_written(name) for name in entries[len(self._history) :]]
        others = {**vars(state)}
        del others["log_history"]
        head = _written({"ranks": ranks, "state": others})
        self._written = f'{head[:-2]}, "log_history": [{", ".join(self._history)}]}}}}'

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The text, filled up with spaces."""
        return {"text": padded(self._written)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what was kept."""
        self.content = json.loads(state["text"].numpy().tobytes())


class Unlogged:
    """Sums of the trainer on this rank since its last log.

    Args:
        trainer: Whose.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._found: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The loss, its first step, and the floating-point operations."""
        trainer = self._trainer
        return {
            "loss": trainer._tr_loss.detach().clone(),
            "since": trainer._globalstep_last_logged,
            "operations": float(trainer.current_flos),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what was restored until the trainer begins."""
        self._found = dict(state)

    def set(self) -> None:
        """Give it to the trainer, which begins with nothing; all ranks together."""
        trainer, found = self._trainer, self._found
        if not found:
            return
        self._found = {}
        trainer._tr_loss.copy_(found["loss"])
        trainer._globalstep_last_logged = found["since"]
        trainer.current_flos = found["operations"]
        # The mean of the whole training is that of the steps from here on.
        losses = gather_objects(float(found["loss"]))
        trainer._total_loss_scalar -= sum(losses) / len(losses)


def state_of(trainer: Trainer) -> TrainerState:
    """The trainer's state with those of its callbacks as they are now, as it would be saved."""
    handler = trainer.callback_handler
    callbacks = [
        callback
        for callback in [*handler.callbacks, trainer.control]
        if isinstance(callback, ExportableState)
    ]
    fields = {
        field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(TrainerState)
    }
    return TrainerState(**{**fields, "stateful_callbacks": callbacks})


def _written(content: Any) -> str:
    # A metric may be a number of NumPy's or torch's.
    return json.dumps(content, default=float)
