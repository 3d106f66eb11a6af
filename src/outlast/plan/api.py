"""Entry points: a job and a cluster in, an estimate or a front out.

    training = training_of(load_job(Path("job.toml")), devices=8)

The meaning of every setting of a job is the trainer's (`outlast.train`): degrees, shares of the
batch, micro-batches, autocast.
"""

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
from outlast.plan.calibration import Calibration, from_text, read_calibration, step_model_of
from outlast.plan.cluster import Cluster
from outlast.plan.cluster_file import checked, cluster_of
from outlast.plan.configuration import (
    MEMORY_FOLDERS,
    NO_RECOVERY,
    TIERS,
    Configuration,
    Mechanisms,
    Recovery,
    Settings,
)
from outlast.plan.constraints import calibrated_as, framework_key, problems
from outlast.plan.fault_tolerance import refuse_impossible
from outlast.plan.huggingface import transformer_of
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
from outlast.plan.space import Axes, space
from outlast.plan.step_model import StepModel
from outlast.plan.transformer import Transformer
from outlast.tensorize.cost import TWO_FACTOR_FORMS

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
    form, rank = _tensorize(job, model)
    coded = job.coding.scheme == "coverage" and run.sharding == "none"
    settings = Settings(
        tiers=_tiers(job, cluster),
        guard=job.guard.policy,
        audit=job.guard.audit_share,
        coding_copies=min(job.coding.copies, run.data) if coded else 1,
        tensorize_form=form,
        tensorize_rank=rank,
        recovery=_recovery(job, run),
    )
    every = job.checkpoint.every_steps
    training = Training(
        model=model,
        run=run,
        tokens=float(job.train.steps) * run.tokens,
        compiled=job.train.compile,
        settings=settings,
        # A run that saves at its end alone loses everything until then.
        checkpoint_steps=0 if every == "auto" else every or job.train.steps,
        commits_without=settings.coding_copies > 1 and job.coding.lost == "commit",
        unmapped=_unmapped(job, run, settings, cluster),
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
    training, machines, known = _asked(job, cluster, calibration)
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
    training, machines, known = _asked(job, cluster, calibration)
    context = context_of(training, machines, calibration=known, **further)
    candidates = space(
        training.model,
        training.run,
        machines,
        axes,
        mechanisms or Mechanisms.of(training.settings),
        framework=training.framework,
    )
    refuse_impossible(machines, candidates.whole)
    return search_space(candidates, evaluator(context), budget, start=start)


def context_of(
    training: Training, cluster: Cluster, *, calibration: Calibrated = None, **further: Any
) -> Context:
    """Build the context that all candidates of a training on a cluster share."""
    known, run = _calibrated(calibration), training.run
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
        baseline=replace(run, precision="bf16") if run.precision == "fp8" else run,
        framework=training.framework,
        timed_as=next((name for name in names if known.times(name)), ""),
        unique_tokens=training.unique_tokens,
        commits_without=training.commits_without,
        unmapped=training.unmapped,
        **further,
    )


def _shipped(name: str) -> Calibration:
    return from_text((files("outlast.plan.facts") / name).read_text(encoding="utf-8"))


def published_constants() -> StepModel:
    """Constants that were fitted to published runs (see docs/plan.md)."""
    return step_model_of(_shipped(PUBLISHED))


@cache
def published_memory() -> Mapping[str, MemoryFit]:
    """Memory constants of frameworks that were fitted to published runs."""
    return MappingProxyType(device_memory_of(_shipped(PUBLISHED_MEMORY)))


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


def _asked(
    job: Job | Training, cluster: Cluster | str | Path, calibration: Calibrated
) -> tuple[Training, Cluster, Known]:
    """The training, the machines and what is known of both."""
    # A file is checked as it is read.
    machines = checked(cluster) if isinstance(cluster, Cluster) else cluster_of(str(cluster))
    known = _calibrated(calibration)
    if isinstance(job, Training):
        return with_interval(job, machines, known), machines, known
    return training_of(job, machines.devices, machines, calibration=known), machines, known


def run_of(job: Job, devices: int) -> tuple[Transformer, Configuration]:
    """The model of a job and how the trainer would run it.

    The model is the dense one; what [tensorize] replaces is for `outlast.tensorize.cost` to count.

    Args:
        job: A checked job.
        devices: Processes, one per device.

    Raises:
        PlanError: The model cannot be read without building it, or the degrees of parallelism do
            not multiply to `devices`.
    """
    model = model_of(job)
    data = _data_ranks(job, devices)
    parallel, train = job.parallel, job.train
    interleaved = parallel.pipeline > 1 and parallel.pipeline_schedule == "interleaved"
    stages_per_rank = parallel.pipeline_stages_per_rank if interleaved else 1
    sharded = parallel.shard > 1
    run = Configuration(
        data=data,
        tensor=parallel.tensor,
        # The trainer divides matrices by the model's own plan, which keeps norms whole.
        sequence_parallel=False,
        pipeline=parallel.pipeline,
        stages_per_rank=stages_per_rank,
        schedule="interleaved" if interleaved else "1f1b",
        sharding="parameters" if sharded else "none",
        sharding_ranks=parallel.shard if sharded else 0,
        sequence=job.data.sequence_length,
        micro_batch=_micro_batch(job, data, parallel.pipeline * stages_per_rank),
        batch=train.batch_size,
        recompute="full" if train.activation_checkpointing else "none",
        # bf16 is autocast: weights, gradients and optimizer stay in fp32.
        precision=train.precision,
        gradient_bytes=4,
        fused_attention=job.model.attention == "sdpa",
        loss_bytes=4,
        optimizer=job.optimizer.name,
    )
    return model, run


def model_of(job: Job) -> Transformer:
    """The model that a job names, from its config.

    Raises:
        PlanError: It comes from a Python function, or its config cannot be read.
    """
    model = job.model
    if model.module:
        raise PlanError(
            f'model.module = "{model.module}" is a function, whose model only running it can tell: '
            "give model.config or [model.settings], or predict with an outlast.plan Transformer"
        )
    config = model.settings or Path(model.config or model.directory or "")
    read = transformer_of(config, job.run.name)
    if job.data.tokenizer == "byte" and job.data.source != "tokens" and read.vocabulary < 256:
        raise PlanError(
            f'data.tokenizer = "byte" has 256 token ids, but the model\'s vocab_size is '
            f"{read.vocabulary}: raise it"
        )
    return read


def _data_ranks(job: Job, devices: int) -> int:
    """Replicas times shards, where `replicate` = 0 takes what the other degrees leave over."""
    parallel = job.parallel
    fixed = parallel.pipeline * parallel.shard * parallel.tensor
    replicate = parallel.replicate or max(devices // fixed, 1)
    if replicate * fixed != devices:
        raise PlanError(
            f"parallel.pipeline = {parallel.pipeline} x parallel.replicate = {replicate} x "
            f"parallel.shard = {parallel.shard} x parallel.tensor = {parallel.tensor} need "
            f"{replicate * fixed} devices, and {devices} are planned for: change one of them"
        )
    data = replicate * parallel.shard
    if job.train.batch_size < data:
        raise PlanError(
            f"train.batch_size = {job.train.batch_size} gives no sample to some of the {data} "
            "data-parallel processes: raise it or take fewer devices"
        )
    return data


def _micro_batch(job: Job, data: int, stages: int) -> int:
    """Samples of one pass: of a pipeline's micro-batch, else of equal parts of a rank's share."""
    share = -(-job.train.batch_size // data)
    if job.parallel.pipeline > 1:
        return -(-share // (job.parallel.pipeline_microbatches or 2 * stages))
    if not job.train.micro_batch_size:
        return share
    # The trainer takes as many micro-batches as keep each within the limit, and makes them equal.
    passes = -(-share // job.train.micro_batch_size)
    return -(-share // passes)


def _tensorize(job: Job, model: Transformer) -> tuple[str, float]:
    """Form and share of the full rank; a budget that only weights tell counts as dense."""
    chosen = job.tensorize
    if chosen.form == "off" or isinstance(chosen.rank, str):
        return "dense", 0.0
    share = chosen.rank if isinstance(chosen.rank, float) else chosen.rank / model.hidden
    return chosen.form, float(share)


def _recovery(job: Job, run: Configuration) -> Recovery:
    # Whoever has a job has loaded this.
    from outlast.job.sections import tiers_of

    chosen, tiers = job.recover, tiers_of(job.checkpoint, job.recover)
    if chosen.mode == "live":
        return Recovery(mode="live", heartbeat_seconds=chosen.heartbeat_seconds)
    if "memory" not in tiers:
        return Recovery(mode="off", heartbeat_seconds=chosen.heartbeat_seconds)
    if run.devices == 1:
        # Nobody starts a process again that trains alone.
        return NO_RECOVERY
    parity = None if chosen.parity == "auto" else chosen.parity
    if "peer" not in tiers:
        parity = 0
    return Recovery(
        mode="restart",
        every_steps=chosen.every_steps,
        parity=0 if chosen.domain == "process" else parity,
        parity_group=chosen.parity_group,
    )


def _tiers(job: Job, cluster: Cluster | None) -> tuple[str, ...]:
    fast, used = job.checkpoint.fast, {"shared"}
    if fast.startswith(MEMORY_FOLDERS):
        used.add("memory")
    elif fast and cluster is not None and cluster.storage.local_bytes_per_s > 0.0:
        used.add("local")
    return tuple(tier for tier in TIERS if tier in used)


def _unmapped(
    job: Job, run: Configuration, settings: Settings, cluster: Cluster | None
) -> tuple[str, ...]:
    """Parts of a job that are not predicted, a sentence each."""
    tensorize, saves, recover, coding = job.tensorize, job.checkpoint, job.recover, job.coding
    rank, structured = tensorize.rank, settings.tensorize_form != "dense"
    shown = rank if isinstance(rank, str) else f"{rank:g}"
    fast = {"memory", "local"} & set(settings.tiers)
    by_process = settings.recovery.mode == "restart" and recover.domain == "process"
    whose = "the cluster" if cluster is None else cluster.name
    found = {
        f'tensorize.rank = "{rank}" is a budget that only the model\'s weights tell: layers are '
        "predicted as dense; give a number or a share": (
            tensorize.form != "off" and isinstance(rank, str)
        ),
        f"tensorize.rank = {shown} of form {tensorize.form} is a share of the parameters: it is "
        "predicted as a share of the full rank; give a whole number": (
            structured and isinstance(rank, float) and tensorize.form not in TWO_FACTOR_FORMS
        ),
        "tensorize.match and exclude are not predicted: all linear layers of the blocks count as "
        "replaced": structured and bool(tensorize.match or tensorize.exclude),
        f'checkpoint.replay = "{saves.replay}" is not predicted: the steps since the last '
        "checkpoint count as lost": saves.replay != "off",
        'checkpoint.every_steps = "auto" is predicted as the interval with the least waste, '
        "without longest_minutes, slowdown_budget and mtbf_hours": saves.every_steps == "auto",
        f"checkpoint.mirror = {saves.mirror!r} counts as one with the run's directory, the shared "
        "storage": bool(saves.mirror),
        f"checkpoint.drain_every = {saves.drain_every} is not predicted: as many checkpoints are "
        "copied on as waste the least time": bool(fast),
        f"checkpoint.fast = {saves.fast!r} is not predicted, since nothing is known of the disks "
        f"of {whose}: give local_bytes_per_s under [storage] of the cluster file": (
            bool(saves.fast) and not fast
        ),
        f'coding.scheme = "{coding.scheme}" is not predicted: each replica would compute '
        f"{coding.copies} shares; steps count as without a code": (
            coding.scheme not in ("off", "coverage")
        ),
        'coding.scheme = "coverage" is not predicted for sharded states: steps count as without a '
        "code": coding.scheme == "coverage" and run.sharding != "none",
        f"recover.groups = {recover.groups} is not predicted: each of the {run.data} replicas "
        "counts as a group": recover.mode == "live" and recover.groups not in (0, run.data),
        "recover.fixed_order = true is not predicted: its sums of parts, and steps of smaller "
        "micro-batches, take longer than predicted": recover.fixed_order,
        'recover.domain = "process" keeps parity against lost processes: for lost nodes it is '
        "predicted as none": by_process and recover.parity != 0,
        f"checkpoint.fast = {saves.fast!r} counts as unused: states in memory (recover.mode) are "
        "newer and survive as much": settings.recovery.mode == "restart" and bool(fast),
        "guard.modules is not predicted: guard.policy counts for all modules": (
            bool(job.guard.modules)
        ),
    }
    return tuple(sentence for sentence, holds in found.items() if holds)
