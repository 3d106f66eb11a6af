"""All of Outlast beside a training loop that stays as it is: `outlast.Run`.

with outlast.Run("runs/a", model=model, optimizer=optimizer, loader=loader, epochs=3) as run:
    for batch in run:
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
"""

from __future__ import annotations

import decimal
import math
import numbers
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from outlast import cluster
from outlast.autosave.position import Position
from outlast.autosave.program import RUNTIME
from outlast.distributed.group import raise_together
from outlast.durations import duration_text
from outlast.errors import DataCorruptionError, IntegrationError, OutlastError
from outlast.integrations import loop_job_of
from outlast.records import CheckpointSaved, StateRecovered, Warned, read_run
from outlast.runtime.cadence import job_cadence
from outlast.runtime.engine import PeriodicConsensus, Runtime, StepResult
from outlast.runtime.memory import MemoryCheckpoint
from outlast.runtime.place import device_of, parameters_in, ranks_here, unwrapped
from outlast.runtime.recording import LoopFacts, Recording
from outlast.runtime.saves import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Container, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from outlast.guard import Guard
    from outlast.job import LoopJob
    from outlast.records import Predicted

    Figure = torch.Tensor | np.ndarray | np.generic | float

_PROGRESS, _POSITION = "outlast.progress", "outlast.position"

_FEW_UPDATES = 1000
"""So many iterations without an optimizer's step are worth a warning: none of them was saved."""


class Progress:
    """Progress of a run, as an entry of its state: the same on all ranks.

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


class OtherModule:
    """A module that no optimizer trains, such as averaged weights, as an entry of a state.

    The names of an optimizer's tensors are those of one module; this is none, but has its state.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = unwrapped(module)

    def state_dict(self) -> dict[str, Any]:
        """The state of the module."""
        return self._module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""
        self._module.load_state_dict(state)


def entries_of(
    models: Mapping[str, nn.Module],
    optimizers: Sequence[Optimizer],
    own: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Entries of a state by name; several models are one entry, of which each is a part.

    Args:
        models: Those that the optimizers train.
        optimizers: One or more.
        own: Entries of the run itself.
        extra: Those that the script adds.

    Raises:
        IntegrationError: When an added entry has a name that is taken, or no state.
    """
    plain = {name: unwrapped(model) for name, model in models.items()}
    optimizer: Any = optimizers[0] if len(optimizers) == 1 else [*optimizers]
    found = {
        **(plain if len(plain) == 1 else {"model": nn.ModuleDict(plain)}),
        "optimizer": optimizer,
        **own,
    }
    for name, item in extra.items():
        found[name] = entry_of(name, item, found)
    return found


def entry_of(name: str, item: Any, taken: Container[str]) -> Any:
    """An object of the script's as an entry of the state.

    Args:
        name: Of the entry.
        item: Has a `state_dict` and a `load_state_dict`.
        taken: Names of other entries.

    Raises:
        IntegrationError: When the name is taken, or the object has no state.
    """
    if name in taken:
        raise IntegrationError(f"state[{name!r}] is the name of another entry; choose another name")
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        raise IntegrationError(
            f"state[{name!r}] is a {type(item).__name__}, which has no state_dict and "
            "load_state_dict; give it both, or put it into an object that has them"
        )
    return OtherModule(item) if isinstance(item, nn.Module) else item


class ExtraState(Mapping[str, Any]):
    """Objects that a script saves beside its models and optimizers: name -> object with a state.

    Args:
        items: Known from the start.
        add: Called with each one that comes later; raises IntegrationError.
    """

    def __init__(self, items: Mapping[str, Any], add: Callable[[str, Any], None]) -> None:
        self._items = dict(items)
        self._add = add

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __setitem__(self, name: str, item: Any) -> None:
        """Save `item` from now on; in a run that was resumed it gets back what was saved."""
        self._add(name, item)
        self._items[name] = item


def number_in(value: Any) -> torch.Tensor | float | None:
    """A figure as it is now, without waiting for the device that computes it.

    Args:
        value: A number of Python or NumPy, or a tensor or array of one element.

    Returns:
        None for everything else.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        if value.device.type != "cpu":
            return value.detach().clone()
        return float(value.item())
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    return float(value) if isinstance(value, numbers.Real | decimal.Decimal) else None


def number_of(name: str, value: Any) -> torch.Tensor | float:
    """As `number_in`, for what must be a number.

    Args:
        name: For the error.
        value: The figure.

    Raises:
        IntegrationError: When it is not one real number.
    """
    found = number_in(value)
    if found is not None:
        return found
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) != 1:
        raise IntegrationError(
            f"{name} has the shape {tuple(shape)}, but is one number; give its mean"
        )
    raise IntegrationError(
        f"{name} = {value!r:.80} is a {type(value).__name__}, but run.log takes numbers; log what "
        "can be measured, and print the rest"
    )


class Run:
    """Goes through a loader for a training loop, and does all that the loop does not.

    It restores the newest state before the first batch and saves on the way, guards the numbers,
    measures energy and memory, writes the records that `outlast report` shows, keeps the state in
    memory for a restart by torchrun, and stops in time: at a signal or the end of a Slurm job's
    time it saves and ends the script with exit code 3, to be continued by the same command.

    A *step* is an iteration of the loop. Nothing is saved in the middle of a gradient accumulation:
    what is due waits for the iteration that ends with an optimizer's step. A loop that is left by
    ``break`` is saved, too, and continues there when it is started again, behind the batches of its
    last optimizer's step; one that is left by an error continues from its last save.

    All processes of the default process group, if there is one, make it together, and do their
    optimizers' steps in the same iterations.

    Args:
        job: The run's directory, such as ``"runs/a"``; or a TOML file with the sections of
            `LoopJob`, or the settings themselves. None: the directory is ``runs/run``.
        model: The model or its DDP wrapper, FSDP2 module; or several by name.
        optimizer: Its optimizer, or several.
        loader: What the loop goes through, once per epoch. Of a `DataLoader` no sample that was
            used is read again.
        state: What else is to be saved: name -> object with `state_dict` and `load_state_dict`,
            such as a scheduler or a `GradScaler`.
        epochs: How often to go through the loader.
        steps: Iterations after which the run is complete, whatever the epoch; None: not limited.
        checkpoint: Settings of [checkpoint], such as ``{"every_steps": 200, "keep": 5}``.
        guard: Settings of [guard], such as ``{"policy": "linear"}``.
        recover: Settings of [recover].
        energy: Settings of [energy].
        log: Settings of [log], such as ``{"every_steps": 1, "tensorboard": True}``.
        settings: Overrides of the form ``"section.key=value"``.
        progress: Show progress on standard output, and say how the run began and how it ended.
        tokens_per_step: Of one iteration, over all processes; 0: not known.
        fresh: Move a run aside that is in the directory already.
        prediction: What the run is expected to need, to be shown beside what it needed.

    Attributes:
        job: The settings.
        state: What else is saved. Entries may be added before the first batch, on all processes
            alike: ``run.state["average"] = average``.

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
        checkpoint: Mapping[str, Any] | None = None,
        guard: Mapping[str, Any] | None = None,
        recover: Mapping[str, Any] | None = None,
        energy: Mapping[str, Any] | None = None,
        log: Mapping[str, Any] | None = None,
        settings: Sequence[str] = (),
        progress: bool = True,
        tokens_per_step: int = 0,
        fresh: bool = False,
        prediction: Predicted | None = None,
    ) -> None:
        # It is there as the program's own main module; whoever makes the run may be any other.
        if hasattr(sys.modules["__main__"], RUNTIME):
            raise IntegrationError(
                "outlast.Run and `outlast run` would both save this script; start it with python, "
                "in a chain by slurm.command, or leave outlast.Run out"
            )
        if epochs < 1 or (steps is not None and steps < 1):
            raise IntegrationError(
                f"epochs = {epochs} and steps = {steps} leave nothing to do; give 1 or more"
            )
        sections = {
            "checkpoint": checkpoint,
            "guard": guard,
            "recover": recover,
            "energy": energy,
            "log": log,
        }
        given = {name: dict(values) for name, values in sections.items() if values}
        self.job = loop_job_of(job, settings, given)
        self._models = dict(model) if isinstance(model, Mapping) else {"model": model}
        self._optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
        self._loader = loader
        self._epochs = epochs
        self._steps = steps
        self._fresh = fresh
        self._prediction = prediction
        self._ranks = ranks_here()
        self._facts = self._facts_of(tokens_per_step)
        self._progress = Progress(self._ranks.world_size)
        self._position = Position(may_be_missing=True)
        # Of each process its own.
        own = {_PROGRESS: self._progress, f"{_POSITION}{self._ranks.rank}": self._position}
        self._state = entries_of(self._models, self._optimizers, own, state or {})
        self.state = ExtraState(state or {}, self._add)
        self._shows = progress and self._ranks.is_first
        self._in_memory = False
        self._began_at = 0
        self._runtime: Runtime | None = None
        self._iterator: Iterator[Any] | None = None
        self._resumes = self._iterating = self._in_step = False
        self._ranks_before = self._ranks.world_size
        self._without_update = 0
        self._logged = StepResult(0)
        self._learning_rate: torch.Tensor | float = math.nan
        self._hooks: list[RemovableHandle] = []

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
        records = self._engine.records
        assert isinstance(records, Recording)
        return records.directory.path

    @property
    def guard(self) -> Guard | None:
        """The guard; None with ``guard.policy = "off"``. Known within the `with`."""
        guard = self._engine.guard
        return None if guard is None else guard.guard

    @property
    def _engine(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime

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
            figure = number_of(str(name), value)
            if name in ("loss", "gradient_norm"):
                setattr(self._logged, name, figure)
            else:
                self._logged.metrics = {**(self._logged.metrics or {}), str(name): figure}

    def evaluating(self) -> AbstractContextManager[None]:
        """A context between two steps, for an evaluation, whose time counts for no step."""
        return self._engine.evaluating()

    def __enter__(self) -> Run:
        runtime = self._runtime = Runtime(self._ranks, PeriodicConsensus(chain=cluster), cluster)
        try:
            runtime.take_signals()
            device = device_of(self._models.values())
            recording = runtime.open_records(
                self.job,
                device,
                self._facts,
                fresh=self._fresh,
                prediction=self._prediction,
                display=self._shows,
            )
            directory, settings = recording.directory, self.job.checkpoint
            store = raise_together(lambda: open_store(settings, directory))
            cadence = job_cadence(settings, self._ranks, directory, "pace.json")
            runtime.save_to(store, self._state, cadence, note=self._note)
            runtime.memory = MemoryCheckpoint(
                self.job,
                self._ranks,
                directory,
                store,
                self._state,
                note=self._note,
                shown=self._shows,
            )
            self._install_guard(runtime)
            for optimizer in self._optimizers:
                self._hooks += [
                    optimizer.register_step_pre_hook(self._before_update),
                    optimizer.register_step_post_hook(self._after_update),
                ]
            step, events = runtime.restore()
            self._resumes, self._began_at = step > 0, step
            self._in_memory = any(isinstance(event, StateRecovered) for event in events)
            self._ranks_before, self._progress.ranks = self._progress.ranks, self._ranks.world_size
            # The last step's checkpoint may be one of before the loader said that it has no more.
            if step and (self._is_complete() or step == self._facts.steps):
                self._say_complete()
            elif self._shows:
                self._say_begun(step)
            runtime.begin(step, events)
        except BaseException as error:
            self._close(error)
            raise
        return self

    def _install_guard(self, runtime: Runtime) -> None:
        models = [*self._models.values()]
        guarded = models[0] if len(models) == 1 else nn.ModuleDict(self._models)
        runtime.install_guard(self.job.guard, self.job.run.seed, guarded, self._optimizers)

    def _is_complete(self) -> bool:
        return self.epoch >= self._epochs or self._has_all_steps()

    def _add(self, name: str, item: Any) -> None:
        """Take an entry of the state in, and give it what was saved of it.

        Raises:
            IntegrationError: When it has no state, its name is taken, or it comes too late.
            OutlastError: When what was restored has no such entry.
        """
        if self._iterating:
            raise IntegrationError(
                f"state[{name!r}] was added after the first batch; add it before the loop, so that "
                "a run that is resumed gets it back before it is used"
            )
        part = {name: entry_of(name, item, self._state)}
        if self._resumes:
            self._restore_part(name, part)
        self._state |= part

    def _restore_part(self, name: str, part: dict[str, Any]) -> None:
        """Give an entry what was saved of it, from where the others were restored."""
        runtime = self._engine
        if self._in_memory:
            assert runtime.memory is not None
            if runtime.memory.find() != self.step or not runtime.memory.read(part):
                raise IntegrationError(
                    f"state[{name!r}] is not in memory any more; give it to outlast.Run as "
                    "state={...}"
                )
        else:
            assert runtime.saves is not None
            runtime.saves.store.restore(part, step=self.step)

    def _say(self, sentence: str) -> None:
        print(f"outlast: {self.directory} {sentence}", flush=True)

    def _say_begun(self, step: int) -> None:
        total = self._facts.steps
        if step:
            of = f" of {total:,}" if total else ""
            self._say(f"resumed at step {step:,}{of} from {self._source(step)}")
        else:
            lost = len(read_run(self.directory).attempts) > 1
            again = "started again, since nothing was saved before" if lost else "started"
            self._say(f"{again}: {total:,} steps" if total else again)

    def _source(self, step: int) -> str:
        """Say what was restored, and how old it is."""
        if self._in_memory:
            return "memory"
        saves = read_run(self.directory).of(CheckpointSaved)
        ages = [time.time() - record.time for record, event in saves if event.step == step]
        if not ages:
            return "its checkpoint"
        age = f"{ages[-1]:.0f} s" if ages[-1] < 100 else duration_text(ages[-1])
        return f"its checkpoint, saved {age} ago"

    def _say_complete(self) -> None:
        if not self._ranks.is_first:
            return
        found = read_run(self.directory).completion()
        found = found or f"{self.directory} is complete: it is at step {self.step:,}"
        print(
            f"outlast: {found}; nothing is left to do. To continue it, give a larger "
            f"{'epochs' if self._steps is None else 'steps (or epochs)'}; to start over, "
            "fresh=True, which moves the old run aside; or give another directory",
            flush=True,
        )

    def _say_ended(self) -> None:
        if not self._is_complete():
            self._say(f"was left after step {self.step:,}; the same command continues from there")
        elif self.step > self._began_at:
            report = f"`outlast report {self.directory}` draws it"
            if find_spec("plotly") is None:
                report += ", after pip install 'outlast[report]'"
            self._say(f"is complete after {self.step:,} steps; {report}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._complete()
        except BaseException as late:
            self._close(late)
            raise
        self._close(error)
        if error is None and self._shows:
            self._say_ended()

    def _close(self, error: BaseException | None) -> None:
        # Its workers end with it.
        self._iterator = None
        for hook in self._hooks:
            hook.remove()
        try:
            if isinstance(error, DataCorruptionError):
                self._go_back(error)
        except OutlastError as late:
            error = late
            raise
        finally:
            self._engine.close(error)

    def _go_back(self, error: DataCorruptionError) -> None:
        """Let the next start begin from before a memory fault: the loop is the script's.

        Raises:
            OutlastError: When all that was saved may hold the fault.
        """
        runtime = self._engine
        if runtime.guard is None:
            return
        # Once, since the script is started again.
        runtime.guard.may_go_back, runtime.returns = True, 1
        try:
            step = runtime.go_back(error)
        except DataCorruptionError as found:
            if found.in_versions:
                raise
            return
        runtime.is_right = True
        if self._ranks.is_first:
            self._say(f"went back to step {step:,}; the same command continues from there")

    def __iter__(self) -> Iterator[Any]:
        if self._iterating or self._runtime is None:
            raise IntegrationError(
                "a Run is gone through once, within `with outlast.Run(...) as run:`; it goes "
                "through the loader `epochs` times by itself"
            )
        self._iterating = True
        runtime, progress = self._runtime, self._progress
        while not self._is_complete():
            set_epoch(self._loader, progress.epoch)
            iterator = self._iterator = self._begun()
            while not self._has_all_steps():
                try:
                    with runtime.watch("data"):
                        batch = next(iterator)
                except StopIteration:
                    progress.epoch, progress.count = progress.epoch + 1, 0
                    self._iterator = None
                    break
                self._without_update += 1
                self._in_step = True
                with runtime.watch("compute"):
                    yield batch
                self._in_step = False
                self._after_step(runtime)

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
        self._engine.write(
            Warned(
                f"{count} steps of this epoch were done with world size {before}, the others are "
                f"with {now}: where the batches of all processes together are as large as before, "
                "each sample is used once; random numbers are new"
            )
        )
        return self._position.skip(self._loader, count)

    def _before_update(self, *_: Any) -> None:
        # A scheduler sets that of the next step before this one is recorded.
        rate = self._optimizers[0].param_groups[0]["lr"]
        self._learning_rate = number_of("learning_rate", rate)
        self._engine.before_update()

    def _after_update(self, *_: Any) -> None:
        self._without_update = 0

    def _counted(self) -> StepResult:
        """Count an iteration, whose figures were logged."""
        self._progress.step += 1
        self._progress.count += 1
        result, self._logged = self._logged, StepResult(0)
        result.step, result.updated = self.step, not self._without_update
        result.learning_rate = self._learning_rate
        return result

    def _after_step(self, runtime: Runtime) -> None:
        """Between two iterations: record, keep, save, stop.

        Raises:
            SystemExit: When the run is to stop and is saved.
        """
        decision = runtime.after_update(self._counted())
        if self._without_update == _FEW_UPDATES:
            runtime.write(
                Warned(
                    f"no optimizer given to outlast.Run has done a step in the last {_FEW_UPDATES} "
                    f"iterations, up to step {self.step}: nothing is saved before one does; give "
                    "it the optimizer that the loop steps"
                )
            )
        if decision.stop:
            runtime.stop(decision)
            runtime.finish(self.step)
            runtime.leave()
        if decision.save:
            runtime.save(self.step)

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
        runtime = self._engine
        if self._in_step and not self._without_update:
            # It has broken out of its last iteration, which it had done.
            self._in_step = False
            runtime.record(self._counted())
        runtime.end_steps(self.step)
        unused = self._without_update - self._in_step
        if (
            unused > 0
            and self._progress.epoch < self._epochs
            and not self._go_back_to_update(unused)
        ):
            # Nothing newer than the last save can be continued from.
            runtime.finish()
        else:
            runtime.finish(self.step)
        runtime.left = not self._is_complete()

    def _go_back_to_update(self, unused: int) -> bool:
        """Go back to the last update: what was done since then has changed no weight.

        Args:
            unused: Iterations since then.

        Returns:
            Whether it was in this epoch; otherwise the data's position of then is not known.
        """
        if self._progress.count < unused:
            self._engine.write(
                Warned(
                    f"the loop was left within a gradient accumulation that an epoch's end is in: "
                    f"step {self.step} is not saved, and the next start resumes from the last save"
                )
            )
            return False
        self._progress.step -= unused
        self._progress.count -= unused
        # The loader has given more than that.
        self._in_step = True
        return True

    def _facts_of(self, tokens_per_step: int) -> LoopFacts:
        """Facts that the records tell of the loop before its first step."""
        batch = getattr(self._loader, "batch_size", None) or 0
        try:
            total = len(self._loader) * self._epochs  # type: ignore[arg-type]
        except TypeError:
            # A DataLoader of a stream has a length that it does not know.
            total = 0
        steps = self._steps
        return LoopFacts(
            framework="pytorch",
            steps=min(total or steps or 0, steps or total),
            samples_per_step=batch * self._ranks.world_size,
            tokens_per_step=tokens_per_step,
            parameters=parameters_in(self._models.values()),
        )


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a sampler or a stream which epoch it is, as `DistributedSampler` asks for."""
    for name in ("sampler", "batch_sampler", "", "dataset"):
        owner = getattr(loader, name, None) if name else loader
        if callable(tell := getattr(owner, "set_epoch", None)):
            tell(epoch)
            return
