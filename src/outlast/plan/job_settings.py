"""What a job says of its mechanisms, as the planner's settings, and what it cannot be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.plan.pareto.settings import NO_RECOVERY, TIERS, Recovery, Settings
from outlast.tensorize.cost import TWO_FACTOR_FORMS

if TYPE_CHECKING:
    from outlast.job import Job
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.transformer import Transformer

MEMORY_FOLDERS = ("/dev/shm", "/run/shm")
"""Folders that a node keeps in its memory."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A job's mechanisms.

    Attributes:
        settings: All but the interval between saves.
        checkpoint_steps: Between two saves; 0 for the interval with the least waste.
        commits_without: A code commits steps without the chunks that were lost.
        unmapped: What is no part of a prediction, a sentence each.
    """

    settings: Settings
    checkpoint_steps: int
    commits_without: bool
    unmapped: tuple[str, ...]


def mapped(
    job: Job, model: Transformer, run: Configuration, cluster: Cluster | None = None
) -> Mapped:
    """The mechanisms of a job.

    Args:
        job: Checked.
        model: Of the job.
        run: Of the job.
        cluster: Whose tiers can be used; None where it is not known yet.
    """
    left: list[str] = []
    form, rank = _tensorize(job, model, left)
    steps = _steps(job, left)
    settings = Settings(
        tiers=_tiers(job, cluster, left),
        guard=job.guard.policy,
        coding_copies=_copies(job, run, left),
        tensorize_form=form,
        tensorize_rank=rank,
        recovery=_recovery(job, run, left),
    )
    if settings.recovery.mode == "restart" and {"memory", "local"} & set(settings.tiers):
        left.append(
            f"checkpoint.fast = {job.checkpoint.fast!r} counts as unused: states in memory "
            "(recover.mode) are newer and survive as much"
        )
    if job.guard.modules:
        left.append("guard.modules is not predicted: guard.policy counts for all modules")
    commits = settings.coding_copies > 1 and job.coding.lost == "commit"
    return Mapped(settings, steps, commits, tuple(left))


def _tensorize(job: Job, model: Transformer, left: list[str]) -> tuple[str, float]:
    chosen = job.tensorize
    if chosen.form == "off":
        return "dense", 0.0
    if isinstance(chosen.rank, str):
        left.append(
            f'tensorize.rank = "{chosen.rank}" is a budget that only the model\'s weights tell: '
            "layers are predicted as dense; give a number or a share"
        )
        return "dense", 0.0
    share = chosen.rank if isinstance(chosen.rank, float) else chosen.rank / model.hidden
    if isinstance(chosen.rank, float) and chosen.form not in TWO_FACTOR_FORMS:
        left.append(
            f"tensorize.rank = {chosen.rank:g} of form {chosen.form} is a share of the parameters: "
            "it is predicted as a share of the full rank; give a whole number"
        )
    if chosen.match or chosen.exclude:
        left.append(
            "tensorize.match and exclude are not predicted: all linear layers of the blocks count "
            "as replaced"
        )
    return chosen.form, float(share)


def _recovery(job: Job, run: Configuration, left: list[str]) -> Recovery:
    chosen = job.recover
    if chosen.mode == "live" and chosen.groups not in (0, run.data):
        left.append(
            f"recover.groups = {chosen.groups} is not predicted: each of the {run.data} replicas "
            "counts as a group"
        )
    if chosen.fixed_order:
        left.append(
            "recover.fixed_order = true is not predicted: its sums of parts, and steps of smaller "
            "micro-batches, take longer than predicted"
        )
    if chosen.mode != "restart":
        return Recovery(mode=chosen.mode, heartbeat_seconds=chosen.heartbeat_seconds)
    if run.devices == 1:
        # Nobody starts a process again that trains alone.
        return NO_RECOVERY
    parity = None if chosen.parity == "auto" else chosen.parity
    if chosen.domain == "process" and parity != 0:
        left.append(
            'recover.domain = "process" keeps parity against lost processes: for lost nodes it is '
            "predicted as none"
        )
        parity = 0
    return Recovery(
        mode="restart",
        every_steps=chosen.every_steps,
        parity=parity,
        parity_group=chosen.parity_group,
    )


def _steps(job: Job, left: list[str]) -> int:
    saves = job.checkpoint
    if saves.replay != "off":
        left.append(
            f'checkpoint.replay = "{saves.replay}" is not predicted: the steps since the last '
            "checkpoint count as lost"
        )
    if saves.delta_chain:
        left.append(
            f"checkpoint.delta_chain = {saves.delta_chain} is not predicted: checkpoints count as "
            "stored in full"
        )
    if saves.every_steps == "auto":
        left.append(
            'checkpoint.every_steps = "auto" is predicted as the interval with the least waste, '
            "without longest_minutes, slowdown_budget and mtbf_hours"
        )
        return 0
    # A run that saves at its end alone loses everything until then.
    return saves.every_steps or job.train.steps


def _tiers(job: Job, cluster: Cluster | None, left: list[str]) -> tuple[str, ...]:
    saves = job.checkpoint
    if saves.mirror:
        left.append(
            f"checkpoint.mirror = {saves.mirror!r} counts as one with the run's directory, the "
            "shared storage"
        )
    used = {"shared"}
    if saves.fast:
        tier = "memory" if saves.fast.startswith(MEMORY_FOLDERS) else "local"
        if tier == "memory" or (cluster is not None and cluster.storage.local_bytes_per_s > 0.0):
            used.add(tier)
            left.append(
                f"checkpoint.drain_every = {saves.drain_every} is not predicted: as many "
                "checkpoints are copied on as waste the least time"
            )
        else:
            of = "the cluster" if cluster is None else cluster.name
            left.append(
                f"checkpoint.fast = {saves.fast!r} is not predicted, since nothing is known of "
                f"the disks of {of}: give local_bytes_per_s under [storage] of the cluster file"
            )
    return tuple(tier for tier in TIERS if tier in used)


def _copies(job: Job, run: Configuration, left: list[str]) -> int:
    coding = job.coding
    if coding.scheme == "off":
        return 1
    if coding.scheme != "coverage":
        left.append(
            f'coding.scheme = "{coding.scheme}" is not predicted: each replica would compute '
            f"{coding.copies} shares; steps count as without a code"
        )
        return 1
    if run.sharding != "none":
        left.append(
            'coding.scheme = "coverage" is not predicted for sharded states: steps count as '
            "without a code"
        )
        return 1
    return min(coding.copies, run.data)
