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
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.autosave.position import Position
from outlast.errors import EXIT_TO_BE_CONTINUED, IntegrationError
from outlast.integrations.keeping import StateKeeper
from outlast.integrations.place import device_of, ranks_here, unwrapped
from outlast.integrations.recording import LoopFacts, Recording
from outlast.integrations.stop import Stop
from outlast.job import LoopJob, load_loop_job
from outlast.records import Warned
from outlast.train.guarding import RunGuard

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from torch.optim import Optimizer

    from outlast.records import Predicted

_PROGRESS, _POSITION = "outlast.progress", "outlast.position"


class Progress:
    """How far a run is, as an entry of its state: the same on all ranks.

    Attributes:
        step: Iterations of the loop that are done.
        epoch: Times that the loader has been gone through.
        count: Iterations done of this epoch.
        ranks: Processes that did them.
    """

    def __init__(self, ranks: int) -> None:
        self.step = self.epoch = self.count = 0
        self.ranks = ranks

    def state_dict(self) -> dict[str, int]:
        """Plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over what was saved."""
        vars(self).update(state)


class Run:
    """Goes through a loader for a training loop, and does all that the loop does not.

    It restores the newest state before the first batch and saves on the way, guards the numbers,
    measures energy and memory, writes the records that `outlast report` shows, keeps the state in
    memory for a restart by torchrun, and stops in time: at a signal or the end of a Slurm job's
    time it saves and ends the script with exit code 3, to be continued by the same command.

    Nothing is saved in the middle of a gradient accumulation, but after the next optimizer step.

    All processes of the default process group, if there is one, make it together.

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
        if epochs < 1 or (steps is not None and steps < 1):
            raise IntegrationError(
                f"epochs = {epochs} and steps = {steps} leave nothing to do; give 1 or more"
            )
        self.job = _job_of(job, settings)
        self._models = dict(model) if isinstance(model, Mapping) else {"model": model}
        self._optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
        self._loader = loader
        self._epochs = epochs
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._fresh = fresh
        self._prediction = prediction
        self._ranks = ranks_here()
        self._progress = Progress(self._ranks.world_size)
        self._position = Position()
        self._iterator: Iterator[Any] | None = None
        self._resumes = self._iterating = self._in_step = False
        self._without_update = 0
        self._loss: torch.Tensor | float = math.nan
        self._norm: torch.Tensor | float = math.nan
        self._open = contextlib.ExitStack()
        self._state = self._entries(state or {})

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

    def log(
        self, loss: torch.Tensor | float, *, gradient_norm: torch.Tensor | float = math.nan
    ) -> None:
        """Tell the records the loss of this iteration.

        Args:
            loss: One number, in nats, of this process.
            gradient_norm: One number, before clipping.
        """
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._norm = (
            gradient_norm.detach() if isinstance(gradient_norm, torch.Tensor) else gradient_norm
        )

    def __enter__(self) -> Run:
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(Stop())
            self._recording = Recording(
                self.job,
                self._ranks,
                device_of(self._models.values()),
                self._facts(),
                fresh=self._fresh,
                prediction=self._prediction,
            )
            stack.callback(self._recording.close, "failed")
            self._keeper = StateKeeper(
                self.job,
                self._ranks,
                self._recording,
                stop,
                state=self._state,
                note=self._note,
            )
            stack.push(lambda kind, *_: self._keeper.close(failed=_is_failure(kind)))
            self._guard = self._installed_guard()
            if self._guard is not None:
                stack.callback(self._guard.guard.remove)
            for optimizer in self._optimizers:
                stack.callback(optimizer.register_step_pre_hook(self._before_update).remove)
                stack.callback(optimizer.register_step_post_hook(self._after_update).remove)
            step, events = self._keeper.restore()
            self._resumes = step > 0
            if self._guard is not None:
                self._guard.restart(step)
            self._recording.ready(step, events, self._guard)
            self._keeper.begin(step)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._complete()
            elif self._keeper.stopped:
                self._recording.close("to_be_continued", self._keeper.stopped)
            else:
                self._recording.close("failed", f"{kind.__name__}: {error}")
        except BaseException as late:
            self._open.__exit__(type(late), late, late.__traceback__)
            raise
        self._open.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[Any]:
        if self._iterating:
            raise IntegrationError(
                "a Run is gone through once: it goes through the loader `epochs` times by itself"
            )
        self._iterating = True
        progress, watch = self._progress, self._recording.watch
        while progress.epoch < self._epochs and not self._has_all_steps():
            _set_epoch(self._loader, progress.epoch)
            iterator = self._iterator = self._begun()
            while not self._has_all_steps():
                try:
                    with watch("data"):
                        batch = next(iterator)
                except StopIteration:
                    break
                self._without_update += 1
                self._in_step = True
                with watch("compute"):
                    yield batch
                self._in_step = False
                self._after_step()
            if not self._has_all_steps():
                progress.epoch, progress.count = progress.epoch + 1, 0
        self._iterator = None

    def _has_all_steps(self) -> bool:
        return self._steps is not None and self._progress.step >= self._steps

    def _begun(self) -> Iterator[Any]:
        """The loader's iterator, behind what is done of this epoch."""
        resumes, self._resumes = self._resumes, False
        if not resumes:
            return self._position.begin(self._loader)
        before, now = self._progress.ranks, self._ranks.world_size
        if before == now:
            return self._position.resume(self._loader)
        self._progress.ranks = now
        self._recording.write(
            Warned(
                f"{before} processes have done {self._progress.count} steps of this epoch and "
                f"{now} go on: where their batches together are as large as before, each sample "
                "is used once; random numbers are new"
            )
        )
        return self._position.skip(self._loader, self._progress.count)

    def _facts(self) -> LoopFacts:
        length = len(self._loader) if isinstance(self._loader, Sized) else 0
        batch = getattr(self._loader, "batch_size", None) or 0
        total = length * self._epochs
        parameters = {
            id(each): each for model in self._models.values() for each in model.parameters()
        }
        return LoopFacts(
            framework="pytorch",
            steps=min(total or self._steps or 0, self._steps or total),
            samples_per_step=batch * self._ranks.world_size,
            tokens_per_step=self._tokens_per_step,
            parameters=sum(each.numel() for each in parameters.values()),
        )

    def _installed_guard(self) -> RunGuard | None:
        if self.job.guard.policy == "off":
            return None
        models = [*self._models.values()]
        guarded = models[0] if len(models) == 1 else nn.ModuleDict(self._models)
        guard = RunGuard(self.job.guard, self.job.run.seed, guarded, self._optimizers)
        for message in guard.warnings:
            self._recording.write(Warned(message))
        return guard

    def _entries(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """What is saved, by name."""
        optimizers: Any = self._optimizers[0] if len(self._optimizers) == 1 else self._optimizers
        own = {
            **{name: unwrapped(each) for name, each in self._models.items()},
            "optimizer": optimizers,
            _PROGRESS: self._progress,
            # Of each process its own.
            f"{_POSITION}{self._ranks.rank}": self._position,
        }
        if taken := own.keys() & extra.keys():
            raise IntegrationError(f"state[{min(taken)!r}] is a name of the run's own; rename it")
        return {**own, **extra}

    def _before_update(self, *_: Any) -> None:
        self._keeper.settle()

    def _after_update(self, *_: Any) -> None:
        self._without_update = 0

    def _count_step(self) -> bool:
        """Count an iteration; whether it is to be recorded."""
        self._progress.step += 1
        self._progress.count += 1
        recorded = self._recording.step(
            self.step,
            loss=float(self._loss),
            gradient_norm=float(self._norm),
            learning_rate=float(self._optimizers[0].param_groups[0]["lr"]),
        )
        self._loss = self._norm = math.nan
        return recorded

    def _after_step(self) -> None:
        """Between two iterations: record, keep, save, stop.

        Raises:
            SystemExit: When the run is to stop and is saved.
        """
        if self._count_step():
            self._recording.record_steps()
            self._tell_findings()
        self._keeper.observe_step()
        if self._without_update:
            return
        if stop := self._keeper.boundary(self.step):
            if self._ranks.is_first:
                print(
                    f"outlast: stopped after step {self.step} ({stop}); the same command goes on "
                    "from there",
                    flush=True,
                )
            raise SystemExit(EXIT_TO_BE_CONTINUED)

    def _note(self) -> None:
        if self._iterator is not None:
            self._position.note(self.step, self._progress.count, self._loader, self._iterator)

    def _complete(self) -> None:
        """The script has left the loop: save its last state."""
        if self._in_step:
            # It has broken out of its last iteration.
            self._count_step()
        if self._guard is not None:
            self._guard.finish()
        self._keeper.save_last(self.step)
        self._tell_findings()
        self._recording.close("completed")

    def _tell_findings(self) -> None:
        """Write down what the guards of all ranks have found, and checked."""
        if self._guard is None:
            return
        for event in self._guard.news():
            self._recording.write(event)
        self._recording.write(self._guard.summary(self.step))


def _job_of(job: str | os.PathLike[str] | LoopJob | None, settings: Sequence[str]) -> LoopJob:
    if not isinstance(job, LoopJob):
        return load_loop_job(None if job is None else Path(job), [*settings])
    if settings:
        raise IntegrationError(
            f"settings = {[*settings]} change a file's settings, but job is a LoopJob already; "
            "leave them out"
        )
    return job


def _is_failure(kind: type[BaseException] | None) -> bool:
    return kind is not None and not issubclass(kind, SystemExit)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell a sampler which epoch it is, as `DistributedSampler` asks for."""
    for each in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None), loader):
        if callable(tell := getattr(each, "set_epoch", None)):
            tell(epoch)
            return
