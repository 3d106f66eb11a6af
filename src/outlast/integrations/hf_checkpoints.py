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

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from outlast.autosave.resume import set_random_states
from outlast.checkpoint import CheckpointStore, Retention, list_versions
from outlast.checkpoint.version import is_published
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import IntegrationError
from outlast.integrations.entries import EVERY_VERSION, RandomEntry, TextEntry, read_facts
from outlast.records import RunDirectory
from outlast.runtime.engine import Runtime
from outlast.runtime.memory import MemoryCheckpoint
from outlast.runtime.place import ranks_here, trained_part, unwrapped
from outlast.runtime.saves import open_store, restored_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from transformers import Trainer

    from outlast.checkpoint import SaveResult
    from outlast.job import CheckpointSection, LoopJob
    from outlast.runtime.cadence import SaveCadence


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
    """

    kind: str
    place: str = ""
    step: int | None = None
    is_marked: bool = False


def chosen(resume: str | bool | None, directory: RunDirectory, newest: int | None) -> Choice:
    """Choose the state that `resume` names.

    Args:
        resume: As `Trainer.train` has it.
        directory: The trainer's output directory.
        newest: Step of the newest version in its store; None without any.
    """
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
    """Return whether a folder stands for a version in a store."""
    return (folder / _MARK).exists()


def step_of(folder: Path) -> int | None:
    """The step of the version that a folder stands for; None for any other folder."""
    step = _FOLDER.fullmatch(folder.name)
    return int(step[1]) if step is not None and stands_for_version(folder) else None


_MODEL, _OPTIMIZER, _SCHEDULER, _SCALER = "model", "optimizer", "scheduler", "scaler"

_TRAINER, _RANDOM, _UNLOGGED = "trainer", "random-", "unlogged-"

_NEWEST_BEST = "outlast_newest_best"
"""Figure of versions that were the best when they were saved: the later, the better they are."""


class _WentBackError(Exception):
    """The state begun with is damaged; the version of `step` is whole, or None: the newest."""

    def __init__(self, step: int | None) -> None:
        self.step = step


class Saving:
    """The store of one trainer, in place of its own files.

    Args:
        trainer: Whose methods are replaced.
        settings: Of the store.

    Attributes:
        cadence: Of saves beside those that the trainer asks for; None: there are none.
        kept: The settings by which each step is kept in memory, too; None: none is.
    """

    def __init__(self, trainer: Trainer, settings: CheckpointSection) -> None:
        self.cadence: SaveCadence | None = None
        self.kept: LoopJob | None = None
        self._trainer = trainer
        self._settings = settings
        self._runtime = Runtime(ranks_here())
        self._source: CheckpointStore | None = None
        self._within_save = False
        self._resumed = ""
        self._content: dict[str, Any] = {}
        self._in_memory = False
        self._step: int | None = None
        self._random: RandomEntry | None = None
        self._state: dict[str, Any] = {}
        self._text = StateText()
        self._unlogged = Unlogged(trainer)
        self._replace_methods()

    @property
    def results(self) -> list[SaveResult]:
        """Of the saves of the last training that have ended."""
        return [] if self._runtime.saves is None else [*self._runtime.saves.results]

    def collect(self, *, wait: bool = False) -> None:
        """See how the save under way went, if it is done; `wait`: wait for it."""
        if self._runtime.saves is not None:
            self._runtime.saves.collect(wait=wait)

    def train(
        self, runtime: Runtime, train: Callable[[Any], Any], resume: str | bool | None
    ) -> Any:
        """Train, from what `resume` names.

        Args:
            runtime: Of this training.
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
        self._runtime, self._content, self._random = runtime, {}, None
        store = self._source = self._open_store()
        runtime.save_to(store, cadence=self.cadence, raises=True)

        def choose() -> tuple[Choice, bool]:
            newest = store.newest()
            is_newest = resume is True or _is_store(resume, self._directory)
            step = None if newest is None else newest.step
            return chosen(resume, self._directory, step), is_newest

        choice, is_newest = gather_objects(raise_together(choose))[0]
        self._in_memory = self._is_in_memory(store, choice, is_newest=is_newest)
        if choice.kind == "nothing" and not self._in_memory:
            runtime.tell(
                f"checkpoint-{choice.step} was never published, and there is none before it: the "
                "training begins anew"
            )
            return train(None)
        if choice.kind == "trainer" and not self._in_memory:
            return train(choice.place or resume)
        self._step = None if self._in_memory else choice.step
        with contextlib.ExitStack() as stack:
            if not self._in_memory and choice.place != str(self._directory.checkpoints):
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

    def begin(self) -> None:
        """The first step begins, of which the state is kept in memory from now on."""
        if self._runtime.memory is None:
            return
        rank = self._runtime.ranks.rank
        self._text = StateText()
        self._state.clear()
        self._state |= {**self.objects(), f"{_RANDOM}{rank}": RandomEntry()}
        self._state[f"{_UNLOGGED}{rank}"] = self._unlogged
        if self._runtime.ranks.is_first:
            self._state[_TRAINER] = self._text
        self._unlogged.set()

    def has_checkpoint(self) -> bool:
        """Return whether there is something to resume from, here or written by the Trainer itself.

        All ranks ask together. So that the same command begins a run and continues with it::

            trainer.train(resume_from_checkpoint=saving.has_checkpoint())

        Raises:
            RecoverError: On all ranks, when steps were done of which nothing is left.
        """
        with self._open_store() as store:
            last = last_folder(self._directory)
            own = last is not None and not stands_for_version(last)
            if gather_objects(own or store.newest() is not None)[0]:
                return True
            if self.kept is None:
                return False
            memory = self._open_memory(store)
            try:
                return memory.find() is not None
            finally:
                memory.close(forget=False)

    def _open_memory(self, store: CheckpointStore) -> MemoryCheckpoint:
        assert self.kept is not None
        return MemoryCheckpoint(
            self.kept, ranks_here(), self._directory, store, self._state, note=self._note
        )

    def _note(self) -> None:
        if self._runtime.ranks.is_first:
            self._text.note(state_of(self._trainer), self._runtime.ranks.world_size)

    def _is_in_memory(self, store: CheckpointStore, choice: Choice, *, is_newest: bool) -> bool:
        """True if the newest state is asked for and lies in memory; its facts are read then.

        Raises:
            RecoverError: On all ranks, when steps were done of which nothing is left.
        """
        if self.kept is None:
            return False
        memory = self._runtime.memory = self._open_memory(store)
        step = memory.find() if is_newest else None
        # The Trainer itself may have written something newer, without Outlast.
        written = choice.step if choice.kind == "trainer" else None
        text = StateText()
        found = (
            step is not None
            and (written is None or written <= step)
            and memory.read({_TRAINER: text})
            and self._has_best(store, text.content)
        )
        self._tell_of_memory()
        if found:
            self._content = text.content
        return found

    def _tell_of_memory(self) -> None:
        memory = self._runtime.memory
        assert memory is not None
        events, memory.events = memory.events, []
        self._runtime.tell(*events)

    def _open_store(self) -> CheckpointStore:
        first = ranks_here().is_first
        raise_together(lambda: self._directory.create() if first else None)
        arguments = self._trainer.args
        limit = arguments.save_total_limit
        best = int(arguments.metric_for_best_model is not None)
        keep = Retention(
            limit if limit and limit > 0 else EVERY_VERSION,
            best=best,
            metric=_NEWEST_BEST if best else "",
            mode="max",
        )
        return raise_together(lambda: open_store(self._settings, self._directory, keep=keep))

    @property
    def _directory(self) -> RunDirectory:
        return RunDirectory(Path(self._trainer.args.output_dir))

    @property
    def _is_training(self) -> bool:
        return self._runtime.saves is not None and not self._runtime.saves.closed

    def _begin_resume(self, folder: Path, is_marked: bool) -> str:
        """Read the trainer's own state, and put it where the Trainer looks for it.

        Args:
            folder: To put it into.
            is_marked: Whether there has been a save of this step, perhaps one that was cut short.
        """
        if not self._in_memory:
            assert self._source is not None
            self._content, step = read_facts(
                self._source, _TRAINER, self._step, or_newest=is_marked
            )
            if step != self._step:
                self._runtime.tell(
                    f"checkpoint-{self._step} was never published, as a save that is cut short is "
                    f"not; the training continues from step {self._content['state']['global_step']}"
                )
            self._step = step
        path = folder / f"checkpoint-{self._content['state']['global_step']}"
        path.mkdir()
        text = json.dumps(self._content["state"])
        (path / TRAINER_STATE_NAME).write_text(text, encoding="utf-8")
        return str(path)

    def _restore(self) -> None:
        """Load all that was saved into what the Trainer has made."""
        runtime, ranks, before = self._runtime, self._runtime.ranks, self._content["ranks"]
        random = self._random = RandomEntry()
        wanted: dict[str, Any] = {**self.objects(), f"{_RANDOM}{ranks.rank % before}": random}
        if self._in_memory:
            memory = runtime.memory
            assert memory is not None
            if before == ranks.world_size:
                wanted[f"{_UNLOGGED}{ranks.rank}"] = self._unlogged
            self._state.clear()
            self._state |= wanted
            taken = memory.take()
            self._tell_of_memory()
            if not taken:
                self._in_memory = False
                raise _WentBackError(None)
            return
        assert self._source is not None
        begun = time.perf_counter()
        entries = self._content["entries"]
        state = {name: item for name, item in wanted.items() if name in entries}
        if _OPTIMIZER not in entries:
            runtime.tell(
                "only the model was saved (save_only_model): the optimizer and the schedule begin "
                "anew"
            )
        restored = self._source.restore(state, step=self._step, warn=False)
        assert restored is not None
        for item in restored.skipped:
            runtime.tell(f"{item}; the training continues from step {restored.step}")
        if restored.step != self._content["state"]["global_step"]:
            raise _WentBackError(restored.step)
        seconds = time.perf_counter() - begun
        runtime.tell(restored_event(self._source, restored, seconds))

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
        state, runtime = self._trainer.state, self._runtime
        assert runtime.saves is not None
        step = state.global_step
        if step == runtime.saves.begun:
            return
        with runtime.watch("checkpoint"):
            whole = not self._trainer.args.save_only_model
            saved: dict[str, Any] = self.objects() if whole else {_MODEL: self._model()}
            entries = [*saved]
            if whole:
                entries += [f"{_RANDOM}{rank}" for rank in range(runtime.ranks.world_size)]
                saved[f"{_RANDOM}{runtime.ranks.rank}"] = RandomEntry()
            if runtime.ranks.is_first:
                content = {
                    "state": dataclasses.asdict(state),
                    "entries": entries,
                    "ranks": runtime.ranks.world_size,
                }
                saved[_TRAINER] = TextEntry(content)
            runtime.save(step, saved, metrics=_metrics(state))

    def _replace_methods(self) -> None:
        """Put this store in the place of what reads and writes files."""
        trainer = self._trainer
        own_save, own_save_model = trainer._save_checkpoint, trainer.save_model
        own_load_best = trainer._load_best_model

        def save_checkpoint(*arguments: Any, **options: Any) -> None:
            if not self._is_training:
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
                # The folder stands for a version in the store.
                folder = Path(arguments[0])
                folder.mkdir(parents=True, exist_ok=True)
                said = {"store": os.path.relpath(self._directory.checkpoints, folder)}
                (folder / _MARK).write_text(json.dumps(said) + "\n", encoding="utf-8")

        def load_best_model() -> None:
            step = gather_objects(step_of(Path(trainer.state.best_model_checkpoint)))[0]
            if not self._is_training or step is None:
                own_load_best()
                return
            self.collect(wait=True)
            assert self._runtime.saves is not None
            self._runtime.saves.store.restore({_MODEL: self._model()}, step=step)

        def unless_saving(own: Callable[..., None]) -> Callable[..., None]:
            return lambda *given, **named: None if self._within_save else own(*given, **named)

        def unless_ours(own: Callable[..., None], read: Callable[[], None]) -> Callable[..., None]:
            def load(checkpoint: str | None, *arguments: Any, **options: Any) -> None:
                if checkpoint is not None and checkpoint == self._resumed:
                    read()
                else:
                    own(checkpoint, *arguments, **options)

            return load

        def set_random() -> None:
            if self._random is not None and self._random.states is not None:
                set_random_states(self._random.states)

        trainer._save_checkpoint = save_checkpoint
        trainer.save_model = save_model
        trainer._load_best_model = load_best_model
        for name in ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"):
            setattr(trainer, name, unless_saving(getattr(trainer, name)))
        reads = {
            "_load_from_checkpoint": lambda: None,
            "_load_optimizer_and_scheduler": self._restore,
            "_load_scaler": lambda: None,
            "_load_rng_state": set_random,
        }
        for name, read in reads.items():
            setattr(trainer, name, unless_ours(getattr(trainer, name), read))

    def _has_best(self, store: CheckpointStore, content: dict[str, Any]) -> bool:
        """True if the best checkpoint so far is complete; else the steps to it are done again.

        Where there is no other checkpoint to do them from, `content` loses it instead.
        """
        best = content["state"]["best_model_checkpoint"]
        step = None if best is None else step_of(Path(best))
        if step is None:
            return True
        found = {
            version.step
            for version in list_versions(store.storage)
            if is_published(store.storage, version)
        }
        has_best, has_any = gather_objects((step in found, bool(found)))[0]
        if has_best:
            return True
        follows = "it continues from its newest checkpoint, not from memory"
        if not has_any:
            for name in ("best_model_checkpoint", "best_global_step", "best_metric"):
                content["state"][name] = None
            follows = (
                "with no other checkpoint, it continues from memory and looks for the best anew"
            )
        self._runtime.tell(
            f"the best checkpoint, of step {step}, was not complete when the training ended: "
            f"{follows}"
        )
        return not has_any


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


class StateText(TextEntry):
    """The trainer's own state as JSON, of which the logs so far are not written anew each time.

    What is restored has ``state`` and ``ranks``.
    """

    def __init__(self) -> None:
        super().__init__()
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

    def text(self) -> str:
        """The state as it was noted last."""
        return self._written


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
