"""What Outlast adds to one `Trainer`: begun before its training, ended after it."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from outlast.errors import EXIT_TO_BE_CONTINUED, IntegrationError, WrongNumbersError
from outlast.integrations.hf_trainer.checks import check_trainer
from outlast.integrations.place import ranks_here
from outlast.records import StopRequested, Warned

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from outlast.checkpoint import SaveResult
    from outlast.integrations.hf_trainer.guarding import Guarding
    from outlast.integrations.hf_trainer.recorder import Recorder
    from outlast.integrations.hf_trainer.remembering import Remembering
    from outlast.integrations.hf_trainer.saving import Saving
    from outlast.integrations.stopping import Stopping


class LogFigures(TrainerCallback):  # type: ignore[misc]
    """Adds figures to the next log, before other callbacks send it on.

    Attributes:
        figures: To be added.
    """

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures to this log and to the trainer's history."""
        if logs is None or not self.figures:
            return
        logs.update(self.figures)
        if state.log_history:
            state.log_history[-1].update(self.figures)
        self.figures = {}


class Adapter(TrainerCallback):  # type: ignore[misc]
    """Runs the mechanisms of one trainer in the order in which they need each other.

    Args:
        trainer: Whose `train`, `training_step` and `_finalize_training` are wrapped.

    Attributes:
        saving: Its store; None without.
        remembering: What keeps each step for a restart; None without.
        guarding: Its guard; None without.
        recorder: Its records; None without.
        stopping: When it is to stop; None without.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.saving: Saving | None = None
        self.remembering: Remembering | None = None
        self.guarding: Guarding | None = None
        self.recorder: Recorder | None = None
        self.stopping: Stopping | None = None
        self._trainer = trainer
        self._why = ""
        self._logged = LogFigures()
        # Before the callbacks that send logs to others, and behind the one that says what is due.
        trainer.callback_handler.callbacks.insert(0, self._logged)
        trainer.add_callback(self)
        self._wrap(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer has made or restored everything; the first step comes."""
        step = state.global_step
        if self.guarding is not None:
            self.guarding.begin(step)
        if self.recorder is not None:
            events = [] if self.saving is None else self.saving.events
            self.recorder.begin(step, events, self.guarding)
        if self.stopping is not None:
            self.stopping.begin(step)
        if self.remembering is not None:
            assert self.saving is not None
            self.remembering.agreement = None if self.stopping is None else self.stopping.agreement
            self.remembering.begin(self.saving.objects())

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """All that belongs to the last step of the epoch before is done."""
        if self.remembering is not None:
            self.remembering.keep()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Gradients are complete."""
        if self.remembering is not None:
            self.remembering.settle()
        if self.recorder is not None:
            self.recorder.observe_rate(float(self._trainer.optimizer.param_groups[0]["lr"]))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A step has been done: record, and see whether to stop."""
        step = state.global_step
        if self.saving is not None:
            self.saving.collect()
        if self.recorder is not None:
            self.recorder.step(step, self.guarding)
        if self.remembering is not None:
            self._tell_of_memory(self.remembering)
            self.remembering.step_done(step)
        if (
            self.stopping is not None
            and (why := self.stopping.why(step))
            and step < state.max_steps
        ):
            self._why = why
            control.should_save = control.should_log = True
        if self.guarding is not None and control.should_log:
            self.guarding.gather()
            self._logged.figures = self.guarding.figures(step)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer has saved: the place to stop.

        Raises:
            SystemExit: When the training is to stop, and all is on disk.
            CheckpointError: When it is to stop and could not be saved.
        """
        if not self._why:
            return
        step = state.global_step
        if self.recorder is not None and self.recorder.recording is not None:
            self.recorder.recording.write(StopRequested(step, self._why))
        if self.saving is not None:
            self.saving.finish()
        self._forget()
        if self.recorder is not None:
            self.recorder.tell(self.guarding, step)
            self.recorder.close("to_be_continued", self._why)
        if ranks_here().is_first:
            print(
                f"outlast: stopped after step {step} ({self._why}); the same command goes on from "
                "there with resume_from_checkpoint=True",
                flush=True,
            )
        raise SystemExit(EXIT_TO_BE_CONTINUED)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """All steps are done."""
        if self.saving is not None:
            self.saving.finish()
        self._forget()
        if self.recorder is not None:
            self.recorder.close("completed")

    def _forget(self) -> None:
        """Give the memory back: what it holds is on disk, or the training is over."""
        if self.remembering is not None:
            self.remembering.close(forget=True)

    def _tell_of_memory(self, remembering: Remembering) -> None:
        events, remembering.events = remembering.events, []
        for event in events:
            if self.recorder is not None and self.recorder.recording is not None:
                self.recorder.recording.write(event)
            if isinstance(event, Warned) and ranks_here().is_first:
                warnings.warn(event.message, stacklevel=2)

    def _train(self, own: Any, resume: str | bool | None, *arguments: Any, **options: Any) -> Any:
        """The trainer's own `train` within all that was added."""
        self._why = ""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._closed())
            if self.stopping is not None:
                stack.enter_context(self.stopping.signals())
            if self.saving is None:
                return own(resume, *arguments, **options)
            self.saving.on_result = self._saved
            if self.recorder is not None:
                self.saving.watch = self.recorder.watch
            return self.saving.train(lambda place: own(place, *arguments, **options), resume)

    @contextlib.contextmanager
    def _closed(self) -> Iterator[None]:
        """Leave the trainer as it was, whatever happens."""
        try:
            yield
        except BaseException as error:
            if self.remembering is not None:
                # A restart must not go on from what may be wrong.
                self.remembering.close(forget=isinstance(error, WrongNumbersError))
            if self.recorder is not None:
                self.recorder.close("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            if self.guarding is not None:
                self.guarding.remove()

    def _saved(self, result: SaveResult) -> None:
        if self.recorder is not None:
            self.recorder.saved(result)
        if self.stopping is not None and result.error is None:
            self.stopping.observe_save(result.seconds)

    def _step(self, own: Any, model: torch.nn.Module, *rest: Any, **options: Any) -> torch.Tensor:
        """The trainer's own `training_step`, guarded; its loss is recorded."""
        loss: torch.Tensor
        with self._watch("compute"):
            if self.guarding is None:
                loss = own(model, *rest, **options)
            else:
                loss = self.guarding.part(own, model, *rest, **options)
        if self.recorder is not None:
            self.recorder.observe_part(loss)
        return loss

    def _watch(self, purpose: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.recorder is None else self.recorder.watch(purpose)

    def _finalize(self, own: Any, *arguments: Any, **options: Any) -> Any:
        """The last step is done, and other weights may come: the guard ends here."""
        if self.stopping is not None:
            self.stopping.end(self._trainer.state.global_step)
        if self.remembering is not None:
            self.remembering.settle()
        if self.guarding is not None:
            try:
                self.guarding.finish()
            finally:
                if self.recorder is not None:
                    self.recorder.tell(self.guarding, self._trainer.state.global_step)
                self.guarding.remove()
        return own(*arguments, **options)

    def _wrap(self, trainer: Trainer) -> None:
        train, step, finalize = trainer.train, trainer.training_step, trainer._finalize_training

        def wrapped_train(
            resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any
        ) -> Any:
            return self._train(train, resume_from_checkpoint, *arguments, **options)

        def training_step(model: torch.nn.Module, *arguments: Any, **options: Any) -> torch.Tensor:
            return self._step(step, model, *arguments, **options)

        def finalize_training(*arguments: Any, **options: Any) -> Any:
            return self._finalize(finalize, *arguments, **options)

        trainer.train = wrapped_train
        trainer.training_step = training_step
        trainer._finalize_training = finalize_training


def adapter_of(trainer: Trainer, wanted: str) -> Adapter:
    """The adapter of a trainer, made when it is asked for first.

    Args:
        trainer: A `Trainer`.
        wanted: Which of its mechanisms is about to be added.

    Raises:
        IntegrationError: When it has that already, or trains, or is no `Trainer`.
    """
    check_trainer(trainer)
    found: Adapter | None = getattr(trainer, "_outlast", None)
    if found is None:
        found = trainer._outlast = Adapter(trainer)
    if getattr(found, wanted) is not None:
        raise IntegrationError(
            f"this trainer has its {wanted} already: add each part of Outlast once"
        )
    if trainer.is_in_train:
        raise IntegrationError("add parts of Outlast before trainer.train(), not within it")
    return found
