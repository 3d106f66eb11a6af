"""Each step's state of a `Trainer` in memory outside of its processes, for restarts by torchrun.

What the Trainer does after a step, such as logging and evaluating, belongs to the step, and what it
does before the next, such as drawing the order of an epoch's samples, does not: the state is taken
when the next batch is asked for or the next epoch begins, whichever is first.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

from outlast.checkpoint import list_versions
from outlast.checkpoint.format.version import is_published
from outlast.distributed.group import gather_objects
from outlast.integrations.entries import RandomEntry, padded
from outlast.integrations.hf_trainer.folders import step_of
from outlast.integrations.memory import LoopMemory
from outlast.integrations.place import ranks_here
from outlast.records import Warned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import Trainer

    from outlast.checkpoint import CheckpointStore
    from outlast.integrations.agreement import Agreement
    from outlast.integrations.hf_trainer.folders import Choice
    from outlast.job import LoopJob
    from outlast.records import Event, RunDirectory

_TRAINER, _RANDOM, _UNLOGGED = "trainer", "random-", "unlogged-"


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
        self.agreement: Agreement | None = None
        self.events: list[Event] = []
        self._trainer = trainer
        self._job = job
        self._ranks = ranks_here()
        self._memory: LoopMemory | None = None
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
        self._memory = LoopMemory(
            self._job, self._ranks, directory, store, self._state, note=self._note
        )

    def find(self, choice: Choice) -> bool:
        """Whether the newest state is asked for and lies in memory; `content` is filled then.

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
            and self._memory.read({_TRAINER: text})
            and self._has_best(text.content)
        ):
            self.content = text.content
        else:
            self._drain()
        return bool(self.content)

    def has_any(self, store: CheckpointStore, directory: RunDirectory) -> bool:
        """Whether a state of the run lies in memory that is better than its newest checkpoint.

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
        self._state |= {**objects, f"{_RANDOM}{rank % before}": self.random}
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
        self._state |= {**objects, f"{_RANDOM}{rank}": RandomEntry()}
        self._state[f"{_UNLOGGED}{rank}"] = self._unlogged
        if self._ranks.is_first:
            self._state[_TRAINER] = self._text
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
        """Whether the best checkpoint so far is complete; else the steps to it are done again.

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
    """What the trainer has added up on this rank since its last log.

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
