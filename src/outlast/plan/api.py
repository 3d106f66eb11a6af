"""Entry points: a job and a cluster in, an estimate or a front out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from outlast.errors import PlanError
from outlast.plan.calibration import from_text, read_calibration, step_model_of
from outlast.plan.cluster import Cluster
from outlast.plan.cluster_file import checked, cluster_of
from outlast.plan.configuration import Configuration
from outlast.plan.constraints import calibrated_as, framework_key, problems
from outlast.plan.fault_tolerance import refuse_impossible
from outlast.plan.job import mapped, run_of
from outlast.plan.memory_fit import (
    COMPILED,
    OUTLAST,
    Known,
    MemoryFit,
    device_memory_of,
    known_of,
)
from outlast.plan.model import Context, evaluator
from outlast.plan.pareto import Front
from outlast.plan.pareto import search as search_space
from outlast.plan.prediction import Estimate
from outlast.plan.prediction import predict as predict_run
from outlast.plan.settings import Mechanisms, Settings
from outlast.plan.space import Axes, space
from outlast.plan.step_model import StepModel
from outlast.plan.transformer import Transformer

if TYPE_CHECKING:
    from outlast.job import Job


PUBLISHED = "published_time.toml"
PUBLISHED_MEMORY = "published_memory.toml"
Calibrated: TypeAlias = Known | StepModel | str | Path | None
"""What was calibrated, or the path of a file that says it; None for constants that were fitted to
published runs. Memory of frameworks that a calibration has no runs of is that of published runs."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Specification of a training, for those who have no job file.

    Attributes:
        model: The transformer.
        run: How; a search varies its division of the work.
        tokens: Of the whole training.
        settings: Of the mechanisms.
        unique_tokens: Different ones in the data; infinite where nothing repeats.
        framework: Software that trains, by any of its names (`frameworks.framework_key`); kept by
            its key.
        compiled: Outlast compiles its steps (`train.compile`): what compiled runs have taught of
            time and of memory counts; where there were none, what others have.
        checkpoint_steps: Between two saves, where `settings` gives no seconds; 0 for the interval
            with the least waste.
        commits_without: A gradient code commits a step without the chunks that were lost.
        unmapped: What of a job is no part of the prediction, a sentence each.
    """

    model: Transformer
    run: Configuration
    tokens: float
    settings: Settings = field(default_factory=Settings)
    unique_tokens: float = float("inf")
    framework: str = OUTLAST
    compiled: bool = False
    checkpoint_steps: int = 0
    commits_without: bool = False
    unmapped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "framework", framework_key(self.framework))
        if self.checkpoint_steps < 0:
            raise PlanError(f"checkpoint_steps = {self.checkpoint_steps}: give at least 0")


def training_of(
    job: Job, devices: int, cluster: Cluster | None = None, *, calibration: Calibrated = None
) -> Training:
    """An Outlast job as the model reads it, its mechanisms among it.

    Args:
        job: Checked.
        devices: That it runs on.
        cluster: Whose storage the job's checkpoints use; None where it is not known yet. With it,
            `checkpoint.every_steps` becomes seconds by the predicted step.
        calibration: See `Calibrated`.

    Raises:
        PlanError: A model that only a program can describe.
    """
    model, run = run_of(job, devices)
    found = mapped(job, model, run, cluster)
    training = Training(
        model=model,
        run=run,
        tokens=float(job.train.steps) * run.tokens,
        compiled=job.train.compile,
        settings=found.settings,
        checkpoint_steps=found.checkpoint_steps,
        commits_without=found.commits_without,
        unmapped=found.unmapped,
    )
    return training if cluster is None else with_interval(training, cluster, calibration)


def with_interval(training: Training, cluster: Cluster, calibration: Calibrated = None) -> Training:
    """A training whose steps between saves are seconds, by the predicted step.

    It stays as it is where seconds are given already, where no steps are, and where the run is not
    legal, so that it has no step.
    """
    settings = training.settings
    if not training.checkpoint_steps or settings.checkpoint_seconds:
        return training
    if problems(training.model, training.run, cluster, training.framework):
        return training
    context = context_of(training, cluster, calibration=calibration)
    step = predict_run(context, training.run, settings).step_seconds.figure.middle
    seconds = training.checkpoint_steps * step
    return replace(training, settings=replace(settings, checkpoint_seconds=seconds))


def predict(
    job: Job | Training,
    cluster: Cluster | str | Path,
    *,
    calibration: Calibrated = None,
    **further: Any,
) -> Estimate:
    """Time, memory, energy, goodput, loss and cost of a run, each with an interval and its terms.

    Args:
        job: An Outlast job, or a `Training`.
        cluster: A `Cluster`, the path of a cluster file, a shipped name, or "h100x64".
        calibration: See `Calibrated`.
        **further: Fields of `Context`: deadline_seconds, restart, delays, clocks, busy_watts.

    Raises:
        PlanError: The run is not legal, or something is not known; one sentence each.
    """
    machines = _cluster(cluster)
    known = _calibrated(calibration)
    training = _training(job, machines, known)
    wrong = problems(training.model, training.run, machines, training.framework)
    if wrong:
        raise PlanError("\n".join(wrong))
    context = context_of(training, machines, calibration=known, **further)
    return predict_run(context, training.run, training.settings)


def search(
    job: Job | Training,
    cluster: Cluster | str | Path,
    budget: str | Iterable[str] = (),
    *,
    calibration: Calibrated = None,
    axes: Axes | None = None,
    mechanisms: Mechanisms | None = None,
    start: datetime | None = None,
    **further: Any,
) -> Front:
    """The exact Pareto front of all legal configurations within a budget.

    Args:
        job: An Outlast job, or a `Training`; batch, sequence and tokens are kept.
        cluster: See `predict`.
        budget: Limits such as "40 h", "3 MWh", "20 kEUR", "1.5 tCO2".
        calibration: See `Calibrated`.
        axes: What is varied; None for everything usual.
        mechanisms: Their settings; None for the job's own.
        start: When the run starts, for deadlines by date.
        **further: Fields of `Context`.

    Raises:
        PlanError: Nothing fits; the sentence says what the least is.
    """
    machines = _cluster(cluster)
    known = _calibrated(calibration)
    training = _training(job, machines, known)
    context = context_of(training, machines, calibration=known, **further)
    candidates = space(
        training.model,
        training.run,
        machines,
        axes,
        mechanisms or _as_mechanisms(training.settings),
        framework=training.framework,
    )
    refuse_impossible(machines, candidates.whole)
    return search_space(candidates, evaluator(context), budget, start=start)


def context_of(
    training: Training, cluster: Cluster, *, calibration: Calibrated = None, **further: Any
) -> Context:
    """Build the context that all candidates of a training on a cluster share."""
    known = _calibrated(calibration)
    names = [calibrated_as(training.framework)]
    if training.compiled and training.framework == OUTLAST:
        names.insert(0, COMPILED)
    memory = next((known.memory[name] for name in names if name in known.memory), None)
    return Context(
        model=training.model,
        cluster=cluster,
        step=known.step,
        memory=None if cluster.processor else memory,
        memory_elsewhere=any(memory is fit for fit in published_memory().values()),
        tokens=training.tokens,
        baseline=replace(training.run, precision="bf16")
        if training.run.precision == "fp8"
        else training.run,
        framework=training.framework,
        timed_as=next((name for name in names if known.times(name)), ""),
        unique_tokens=training.unique_tokens,
        commits_without=training.commits_without,
        unmapped=training.unmapped,
        **further,
    )


def published_constants() -> StepModel:
    """Constants that were fitted to published runs (see docs/plan.md)."""
    text = (files("outlast.plan.facts") / PUBLISHED).read_text(encoding="utf-8")
    return step_model_of(from_text(text))


@cache
def published_memory() -> Mapping[str, MemoryFit]:
    """Memory constants of frameworks that were fitted to published runs."""
    text = (files("outlast.plan.facts") / PUBLISHED_MEMORY).read_text(encoding="utf-8")
    return MappingProxyType(device_memory_of(from_text(text)))


def _calibrated(calibration: Calibrated) -> Known:
    if calibration is None:
        own = Known(published_constants())
    elif isinstance(calibration, StepModel):
        own = Known(calibration)
    elif isinstance(calibration, Known):
        own = calibration
    else:
        own = known_of(read_calibration(Path(calibration)))
    return replace(own, memory={**published_memory(), **own.memory})


def _cluster(cluster: Cluster | str | Path) -> Cluster:
    # A file is checked as it is read.
    return checked(cluster) if isinstance(cluster, Cluster) else cluster_of(str(cluster))


def _training(job: Job | Training, cluster: Cluster, calibration: Known) -> Training:
    if isinstance(job, Training):
        return with_interval(job, cluster, calibration)
    return training_of(job, cluster.devices, cluster, calibration=calibration)


def _as_mechanisms(settings: Settings) -> Mechanisms:
    return Mechanisms(
        checkpoint_seconds=(settings.checkpoint_seconds,),
        tiers=(settings.tiers,),
        guard=(settings.guard,),
        coding_copies=(settings.coding_copies,),
        tensorize=((settings.tensorize_form, settings.tensorize_rank),),
        clock_mhz=(settings.clock_mhz,),
        recovery=(settings.recovery,),
    )
