"""All of Outlast beside a training loop that stays as it is: `outlast.Run`.

with outlast.Run("job.toml", model=model, optimizer=optimizer, loader=loader, epochs=3) as run:
    for batch in run:
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss)
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from outlast import cluster
from outlast.autosave.position import Position
from outlast.errors import EXIT_TO_BE_CONTINUED, IntegrationError, WrongNumbersError
from outlast.integrations.given import loop_job_of
from outlast.integrations.progress import (
    Progress,
    entries_of,
    facts_of,
    held,
    refuse_two_savers,
    set_epoch,
)
from outlast.records import Warned, read_run
from outlast.runtime.engine import StepResult, loop_runtime
from outlast.runtime.guarding import RunGuard
from outlast.runtime.place import device_of, ranks_here
from outlast.runtime.recording import Recording
from outlast.runtime.stop import Stopping

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    from torch import nn
    from torch.optim import Optimizer

    from outlast.guard import Guard
    from outlast.job import LoopJob
    from outlast.records import Predicted

    Figure = torch.Tensor | np.ndarray | np.generic | float

_PROGRESS, _POSITION = "outlast.progress", "outlast.position"

_TELL_SECONDS = 1.0
"""What the guard has checked is recorded at most this often."""

_FEW_UPDATES = 1000
"""So many iterations without an optimizer's step are worth a warning: none of them was saved."""


class Run:
    """Goes through a loader for a training loop, and does all that the loop does not.

    It restores the newest state before the first batch and saves on the way, guards the numbers,
    measures energy and memory, writes the records that `outlast report` shows, keeps the state in
    memory for a restart by torchrun, and stops in time: at a signal or the end of a Slurm job's
    time it saves and ends the script with exit code 3, to be continued by the same command.

    A *step* is an iteration of the loop. Nothing is saved in the middle of a gradient accumulation:
    what is due waits for the iteration that ends with an optimizer's step. A loop that is left by
    ``break`` is saved, too, and goes on there when it is started again, behind the batches of its
    last optimizer's step; one that is left by an error goes on from its last save.

    All processes of the default process group, if there is one, make it together, and do their
    optimizers' steps in the same iterations.

    Args:
        job: A TOML file with the sections of `LoopJob`, or the settings themselves; None: defaults.
        model: The model or its DDP wrapper, FSDP2 module; or several by name.
        optimizer: Its optimizer, or several.
        loader: What the loop goes through, once per epoch. Of a `DataLoader` no sample that was
            used is read again.
        state: What else is to be saved: name -> object with `state_dict` and `load_state_dict`,
            such as a scheduler or a `GradScaler`.
        epochs: How often to go through the loader.
        steps: Iterations after which the run is complete, whatever the epoch; None: not limited.
        settings: Overrides of the form ``"section.key=value"``.
        tokens_per_step: Of one iteration, over all processes; 0: not known.
        fresh: Move a run aside that is in the directory already.
        prediction: What the run is expected to need, to be shown beside what it needed.

    Attributes:
        job: The settings.

    Raises:
        JobError: When a setting is wrong, or is one that the script decides.
        OutlastError: When the directory is in use or belongs to another run; when what was saved
            does not fit.
    """

    def __init__(
        self,
        job: str | os.PathLike[str] | LoopJob | None = None,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        loader: Iterable[Any],
        state: Mapping[str, Any] | None = None,
        epochs: int = 1,
        steps: int | None = None,
        settings: Sequence[str] = (),
        tokens_per_step: int = 0,
        fresh: bool = False,
        prediction: Predicted | None = None,
    ) -> None:
        refuse_two_savers()
        if epochs < 1 or (steps is not None and steps < 1):
            raise IntegrationError(
                f"epochs = {epochs} and steps = {steps} leave nothing to do; give 1 or more"
            )
        self.job = loop_job_of(job, settings)
        self._models = dict(model) if isinstance(model, Mapping) else {"model": model}
        self._optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
        self._loader = loader
        self._epochs = epochs
        self._steps = steps
        self._fresh = fresh
        self._prediction = prediction
        self._ranks = ranks_here()
        self._facts = facts_of(
            self._models.values(), loader, self._ranks.world_size, (epochs, steps), tokens_per_step
        )
        self._progress = Progress(self._ranks.world_size)
        self._position = Position(may_be_missing=True)
        # Of each process its own.
        own = {_PROGRESS: self._progress, f"{_POSITION}{self._ranks.rank}": self._position}
        self._state = entries_of(self._models, self._optimizers, own, state or {})
        self._iterator: Iterator[Any] | None = None
        self._resumes = self._iterating = self._in_step = False
        self._ranks_before = self._ranks.world_size
        self._without_update = 0
        self._told_step, self._told_seconds = 0, 0.0
        self._loss: torch.Tensor | float | None = None
        self._norm: torch.Tensor | float = math.nan
        self._metrics: dict[str, torch.Tensor | float] = {}
        self._stopped = ""
        self._open = contextlib.ExitStack()

    @property
    def step(self) -> int:
        """Iterations done in the run."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, from 0."""
        return self._progress.epoch

    @property
    def directory(self) -> Path:
        """Of the run's files; known within the `with`."""
        return self._recording.directory.path

    @property
    def guard(self) -> Guard | None:
        """The guard; None with ``guard.policy = "off"``. Known within the `with`."""
        return None if self._guard is None else self._guard.guard

    def log(self, loss: Figure | Mapping[str, Figure] | None = None, **metrics: Figure) -> None:
        """Tell the records the figures of this iteration; on a GPU, nothing waits for them.

        ``run.log(loss)``, ``run.log(loss, accuracy=accuracy)`` and ``run.log({"loss": loss})`` do
        the same. The report and the trackers show the means over ``log.every_steps``, also where
        they are not finite.

        Args:
            loss: One number, in nats, of this process; the first one's is recorded. Or all
                figures, by name.
            metrics: Numbers by name, tensors and arrays of one element among them;
                ``gradient_norm`` is that before clipping.

        Raises:
            IntegrationError: When one of them is not one number.
        """
        figures = dict(loss) if isinstance(loss, Mapping) else {}
        if loss is not None and not isinstance(loss, Mapping):
            figures["loss"] = loss
        figures |= metrics
        if not figures:
            raise IntegrationError("run.log was given no figure; give it the loss, for example")
        for name, value in figures.items():
            figure = held(str(name), value)
            if name == "loss":
                self._loss = figure
            elif name == "gradient_norm":
                self._norm = figure
            else:
                self._metrics[str(name)] = figure

    def __enter__(self) -> Run:
        with contextlib.ExitStack() as stack:
            self._stopping = Stopping(None, self._ranks, cluster)
            stack.enter_context(self._stopping.signals())
            self._recording = Recording(
                self.job,
                self._ranks,
                device_of(self._models.values()),
                self._facts,
                fresh=self._fresh,
                prediction=self._prediction,
                chain=cluster,
            )
            # Gives up the directory last: the next start finds files at rest.
            stack.push(self._close_records)
            runtime = self._runtime = loop_runtime(
                self.job,
                self._ranks,
                self._recording,
                self._stopping,
                self._state,
                note=self._note,
                chain=cluster,
            )
            stack.push(self._close_runtime)
            self._guard = runtime.guard = self._installed_guard()
            if self._guard is not None:
                stack.callback(self._guard.guard.remove)
            for optimizer in self._optimizers:
                stack.callback(optimizer.register_step_pre_hook(self._before_update).remove)
                stack.callback(optimizer.register_step_post_hook(self._after_update).remove)
            step, events = runtime.restore()
            runtime.saves.newest = -1 if runtime.memory.unsaved else step
            self._stopping.agree(step)
            self._resumes = step > 0
            self._ranks_before, self._progress.ranks = self._progress.ranks, self._ranks.world_size
            self._recording.ready(step, events, self._guard)
            if step and (self._progress.epoch >= self._epochs or self._has_all_steps()):
                self._say_complete()
            runtime.cadence.start(step)
            self._stopping.start()
            self._told_step = step
            self._open = stack.pop_all()
        return self

    def _say_complete(self) -> None:
        if not self._ranks.is_first:
            return
        found = read_run(self.directory).completion() or f"{self.directory} is complete"
        print(
            f"outlast: {found}; nothing is left to do. To go on with it, give a larger "
            f"{'epochs' if self._steps is None else 'steps (or epochs)'}; to begin anew, fresh=True"
            ", which moves it aside, or another run.name",
            flush=True,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._complete()
            elif issubclass(kind, WrongNumbersError) or self._ranks.world_size == 1:
                # Wrong numbers are an error on all ranks.
                self._tell_findings()
        except BaseException as late:
            self._open.__exit__(type(late), late, late.__traceback__)
            raise
        finally:
            # Its workers end with it.
            self._iterator = None
        self._open.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[Any]:
        if self._iterating or not hasattr(self, "_recording"):
            raise IntegrationError(
                "a Run is gone through once, within `with outlast.Run(...) as run:`; it goes "
                "through the loader `epochs` times by itself"
            )
        self._iterating = True
        progress, watch = self._progress, self._recording.watch
        while progress.epoch < self._epochs and not self._has_all_steps():
            set_epoch(self._loader, progress.epoch)
            iterator = self._iterator = self._begun()
            while not self._has_all_steps():
                try:
                    with watch("data"):
                        batch = next(iterator)
                except StopIteration:
                    progress.epoch, progress.count = progress.epoch + 1, 0
                    self._iterator = None
                    break
                self._without_update += 1
                self._in_step = True
                with watch("compute"):
                    yield batch
                self._in_step = False
                self._after_step()

    def _has_all_steps(self) -> bool:
        return self._steps is not None and self._progress.step >= self._steps

    def _begun(self) -> Iterator[Any]:
        """The loader's iterator, behind what is done of this epoch."""
        resumes, self._resumes = self._resumes, False
        if not resumes:
            return self._position.begin(self._loader)
        before, now, count = self._ranks_before, self._ranks.world_size, self._progress.count
        if before == now:
            return self._position.resume(self._loader)
        self._recording.write(
            Warned(
                f"{count} steps of this epoch were done with world size {before}, the others are "
                f"with {now}: where the batches of all processes together are as large as before, "
                "each sample is used once; random numbers are new"
            )
        )
        return self._position.skip(self._loader, count)

    def _installed_guard(self) -> RunGuard | None:
        if self.job.guard.policy == "off":
            return None
        models = [*self._models.values()]
        guarded = models[0] if len(models) == 1 else torch.nn.ModuleDict(self._models)
        guard = RunGuard(self.job.guard, self.job.run.seed, guarded, self._optimizers)
        for message in guard.warnings:
            self._recording.write(Warned(message))
        return guard

    def _before_update(self, *_: Any) -> None:
        self._runtime.before_update()

    def _after_update(self, *_: Any) -> None:
        self._without_update = 0

    def _count_step(self) -> bool:
        """Count an iteration; whether it was recorded."""
        self._progress.step += 1
        self._progress.count += 1
        recorded = self._runtime.record(
            StepResult(
                self.step,
                self._loss,
                self._norm,
                self._optimizers[0].param_groups[0]["lr"],
                self._metrics,
            )
        )
        self._loss, self._norm, self._metrics = None, math.nan, {}
        return recorded

    def _after_step(self) -> None:
        """Between two iterations: record, keep, save, stop.

        Raises:
            SystemExit: When the run is to stop and is saved.
        """
        runtime = self._runtime
        if self._count_step() and self._may_tell():
            self._tell_findings()
        runtime.observe(self._stopping.observe_step())
        if self._without_update:
            if self._without_update == _FEW_UPDATES:
                self._recording.write(Warned(_no_update(self.step)))
            return
        decision = runtime.agree(StepResult(self.step))
        if decision.stop:
            runtime.stop(self.step, decision)
            runtime.finish(self.step)
            self._stopped = decision.stop
            if self._ranks.is_first:
                print(
                    f"outlast: stopped after step {self.step} ({decision.stop}); the same command "
                    "goes on from there",
                    flush=True,
                )
            raise SystemExit(EXIT_TO_BE_CONTINUED)
        if decision.save:
            runtime.save(self.step, decision)
            self._stopping.clock.begin()

    def _note(self) -> None:
        """Bring the entry of the data's position up to date."""
        if self._resumes:
            # Nothing was begun since it was restored.
            return
        if self._iterator is None:
            self._position.pause(self.step)
            return
        self._position.note(
            self.step, self._progress.count, self._loader, self._iterator, ahead=self._in_step
        )

    def _complete(self) -> None:
        """The script has left the loop: save its last state."""
        if self._in_step and not self._without_update:
            # It has broken out of its last iteration, which it had done.
            self._in_step = False
            self._count_step()
        self._stopping.meet(self.step)
        if self._guard is not None:
            self._guard.finish()
        unused = self._without_update - self._in_step
        if unused > 0 and self._progress.epoch < self._epochs and not self._go_back(unused):
            # Nothing newer than the last save can be gone on from.
            self._runtime.leave()
        else:
            self._runtime.finish(self.step)
        self._tell_findings()

    def _go_back(self, unused: int) -> bool:
        """Go back to the last update: what was done since then has changed no weight.

        Args:
            unused: Iterations since then.

        Returns:
            Whether it was in this epoch; otherwise the data's position of then is not known.
        """
        if self._progress.count < unused:
            self._recording.write(
                Warned(
                    f"the loop was left within a gradient accumulation that an epoch's end is in: "
                    f"step {self.step} is not saved, and the next start goes on from the last save"
                )
            )
            return False
        self._progress.step -= unused
        self._progress.count -= unused
        # The loader has given more than that.
        self._in_step = True
        return True

    def _close_runtime(self, kind: type[BaseException] | None, *_: Any) -> None:
        wrong = kind is not None and issubclass(kind, WrongNumbersError)
        self._runtime.close(failed=kind is not None and not self._stopped, forget=wrong)

    def _close_records(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        if kind is None:
            self._recording.close("completed")
        elif self._stopped:
            self._recording.close("to_be_continued", self._stopped)
        else:
            self._recording.close("failed", f"{kind.__name__}: {error}")

    def _may_tell(self) -> bool:
        """Return whether it is time to record what the guard has found, alike on all ranks."""
        if self._ranks.world_size > 1:
            return self.step - self._told_step >= self.job.energy.every_steps
        return time.monotonic() - self._told_seconds >= _TELL_SECONDS

    def _tell_findings(self) -> None:
        """Write down what the guards of all ranks have found, and checked."""
        if self._guard is None:
            return
        self._told_step, self._told_seconds = self.step, time.monotonic()
        self._recording.checked(self._guard, self.step)


def _no_update(step: int) -> str:
    return (
        f"no optimizer given to outlast.Run has done a step in the last {_FEW_UPDATES} iterations, "
        f"up to step {step}: nothing is saved before one does; give it the optimizer that the loop "
        "steps"
    )
