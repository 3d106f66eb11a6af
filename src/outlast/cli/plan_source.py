"""From what a user asked to what the planner reads: training, cluster, and what was assumed.

Nothing is guessed in silence: what neither source nor options say stands in `Planned.assumed`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from outlast.errors import PlanError

if TYPE_CHECKING:
    from outlast.cli.plan_asked import Asked
    from outlast.job import Job
    from outlast.plan.api import Training
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.context import Context
    from outlast.plan.pareto.settings import Mechanisms
    from outlast.plan.pareto.space import Axes


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run to plan.

    Attributes:
        asked: As the user said it.
        training: What is trained, and how; a search varies the division of the work.
        cluster: On what.
        context: Both with the calibration.
        own: The division of the work that the source states; None where it states none.
        own_problem: Why the one that it states is not possible; empty where it is.
        job: The job, where the source is one.
        assumed: What nobody said, a phrase each.
        load_of_others: Share of the shared file system's bandwidth that other jobs ask for.
        target: What all that is found can be written for; empty where it is the framework itself,
            or nothing is written.
    """

    asked: Asked
    training: Training
    cluster: Cluster
    context: Context
    own: Configuration | None
    own_problem: str
    job: Job | None
    assumed: tuple[str, ...]
    load_of_others: float = 0.0
    target: str = ""

    @property
    def axes(self) -> Axes:
        """What is searched: what the user fixed has one choice."""
        from outlast.plan.pareto.space import Axes

        asked = self.asked
        fixed: dict[str, Any] = {}
        if asked.micro_batch is not None:
            fixed["micro_batch"] = (asked.micro_batch,)
        if asked.precision is not None:
            fixed["precision"] = (asked.precision,)
        elif self.training.run.precision not in ("bf16", "fp8"):
            fixed["precision"] = (self.training.run.precision,)
        return Axes(**fixed)

    @property
    def mechanisms(self) -> Mechanisms:
        """Their settings: those asked for, else the job's own."""
        from outlast.plan.pareto.settings import Mechanisms, Recovery

        asked, own = self.asked, self.training.settings
        return Mechanisms(
            checkpoint_seconds=tuple(asked.checkpoint_seconds or (own.checkpoint_seconds,)),
            tiers=tuple(tuple(name.split("+")) for name in asked.tier or ()) or (own.tiers,),
            guard=tuple(asked.guard or (own.guard,)),
            coding_copies=tuple(asked.copies or (own.coding_copies,)),
            tensorize=tuple(_form(name) for name in asked.tensorize or ())
            or ((own.tensorize_form, own.tensorize_rank),),
            clock_mhz=(own.clock_mhz,),
            recovery=tuple(Recovery.of(name) for name in asked.recover or ()) or (own.recovery,),
        )


def planned(asked: Asked) -> Planned:
    """Read a source, a cluster and a calibration.

    Raises:
        PlanError: One of them cannot be read or says something that is not possible.
        JobError: The job is wrong.
    """
    from outlast.cli.plan_model import training_of_model
    from outlast.cli.plan_place import calibration_for
    from outlast.cli.plan_sharing import load_of_others, shared_with
    from outlast.plan.api import context_of

    _check(asked)
    job = _job(asked)
    load = load_of_others(asked, job)
    cluster = shared_with(_cluster(asked, job), load)
    assumed: list[str] = []
    if job is not None:
        training, own, problem = _of_job(job, asked, cluster)
    else:
        training = training_of_model(asked, cluster, assumed)
        own, problem = None, ""
    training = _restated(training, asked)
    assumed += _assumed_of_cluster(cluster)
    context = context_of(
        training,
        cluster,
        calibration=calibration_for(asked.cluster, asked.calibration),
        deadline_seconds=_deadline_seconds(asked.deadline),
    )
    return Planned(
        asked=asked,
        training=training,
        cluster=cluster,
        context=context,
        own=own,
        own_problem=problem,
        job=job,
        assumed=tuple(assumed),
        load_of_others=load,
    )


def _check(asked: Asked) -> None:
    from outlast.plan.configuration import Precision
    from outlast.plan.pareto.objectives import FIGURES

    if not asked.source:
        raise PlanError("SOURCE is empty: name a job, a config.json or a model")
    for name in ("batch", "sequence", "micro_batch"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise PlanError(f"--{name.replace('_', '-')} = {value}: give at least 1")
    if asked.precision is not None and asked.precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise PlanError(f"--precision = {asked.precision!r} is none of {known}")
    if asked.by not in FIGURES:
        raise PlanError(f"--by = {asked.by!r} is none of {', '.join(FIGURES)}")
    if not Path(asked.source).exists() and (near := _near_command(asked.source)):
        raise PlanError(
            f"{asked.source!r} is no file and no model: did you mean `outlast plan {near}`?"
        )


def _job(asked: Asked) -> Job | None:
    if not asked.source.endswith(".toml"):
        if asked.overrides:
            raise PlanError(
                f"{asked.overrides[0]!r} replaces a setting of a job, and {asked.source} is none: "
                "leave it out, or use the options"
            )
        return None
    from outlast.job import load_job

    for name in ("batch", "sequence", "tokens", "precision"):
        if getattr(asked, name) is not None:
            setting = {
                "batch": "train.batch_size",
                "sequence": "data.sequence_length",
                "tokens": "train.steps",
                "precision": "train.precision",
            }[name]
            raise PlanError(f"--{name} is the job's to say: write {setting}=... after it")
    return load_job(Path(asked.source), asked.overrides)


def _cluster(asked: Asked, job: Job | None) -> Cluster:
    from outlast.cli.plan_place import place_of
    from outlast.plan.energy import with_region

    ranks = job.launch.nproc if job is not None and job.launch.nproc > 1 else 0
    found = place_of(asked.cluster, ranks)
    prices = found.prices
    if asked.price is not None:
        if not 0.0 <= asked.price < float("inf"):
            raise PlanError(f"--price = {asked.price:g}: give a number of at least 0")
        prices = replace(prices, per_device_hour=asked.price)
    if asked.region is not None:
        prices = with_region(prices, asked.region)
    return replace(found, prices=prices)


def _of_job(job: Job, asked: Asked, cluster: Cluster) -> tuple[Training, Configuration | None, str]:
    """The training, and the job's own division of the work or why it is not possible."""
    from outlast.plan.api import training_of
    from outlast.plan.constraints import problems

    parallel = job.parallel
    fixed = parallel.pipeline * parallel.shard * parallel.tensor * max(parallel.replicate, 1)
    devices = fixed if parallel.replicate else cluster.devices
    framework = asked.framework or "outlast"
    try:
        training = replace(training_of(job, devices, cluster), framework=framework)
    except PlanError as error:
        # The search needs batch, sequence and precision alone.
        plain = job.model_copy(update={"parallel": type(parallel)()})
        return replace(training_of(plain, 1), framework=framework), None, str(error)
    run = training.run
    if asked.micro_batch is not None:
        run = replace(run, micro_batch=asked.micro_batch)
    wrong = problems(training.model, run, cluster, framework)
    return training, (None if wrong else run), "; ".join(wrong)


def _restated(training: Training, asked: Asked) -> Training:
    from outlast.cli.plan_model import count_of
    from outlast.plan.constraints import framework_named

    framework_named(training.framework)
    if asked.unique_tokens is None:
        return training
    return replace(training, unique_tokens=count_of(asked.unique_tokens, "--unique-tokens"))


def _assumed_of_cluster(cluster: Cluster) -> list[str]:
    assumed: dict[str, str] = {}
    for name, source in cluster.sources.items():
        if source.text.startswith("assumed: "):
            subject = "failures" if name.startswith("failures.") else f"{name} = {source.value:g}"
            assumed.setdefault(subject, source.text.removeprefix("assumed: "))
    return [f"{subject}: {text}" for subject, text in assumed.items()]


def _deadline_seconds(text: str | None) -> float | None:
    from outlast.plan.pareto.budget import parse

    if text is None:
        return None
    limit = parse(text, datetime.now().astimezone())
    if limit.figure != "hours":
        raise PlanError(f"--deadline = {text!r} is no time: give hours, days or a date")
    return limit.value * 3600.0


def _form(text: str) -> tuple[str, float]:
    form, _, rank = text.partition(":")
    try:
        return form, float(rank or 0.0)
    except ValueError:
        raise PlanError(
            f"--tensorize = {text!r}: give a form and the share of its rank, as low_rank:0.5"
        ) from None


def _near_command(word: str) -> str:
    from outlast.cli.plan import plan

    names = [str(command.name or command.callback.__name__) for command in plan.registered_commands]  # type: ignore[union-attr]
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.75)
    return near[0] if near else ""
