"""What should I change: the job's own configuration against the best, and what else would help."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from outlast.cli.plan_words import bytes_words, rounded, seconds_words
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.cli.plan_ranking import Choice, Ranking
    from outlast.cli.plan_source import Planned
    from outlast.plan.configuration import Configuration
    from outlast.plan.estimate import Interval
    from outlast.plan.pareto.settings import Settings
    from outlast.plan.prediction import Estimate

WORTH = 0.01
"""Share of the time below which a change is not named."""
CORRELATION = 0.5
"""Of the errors of two predictions of one model, as the front takes them."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The best choice under other circumstances.

    Attributes:
        change: What is different.
        estimate: What is predicted then.
    """

    change: str
    estimate: Estimate


def own_estimate(planned: Planned) -> Estimate | None:
    """What is predicted of the source's own configuration; None where it has none."""
    from outlast.plan.prediction import predict

    if planned.own is None:
        return None
    return predict(planned.context, planned.own, planned.training.settings)


def advice(found: Ranking, own: Estimate | None, what_ifs: tuple[WhatIf, ...]) -> str:
    """One line."""
    planned, best = found.planned, found.choices[0]
    if planned.own is None or own is None:
        if planned.own_problem:
            said = planned.own_problem.removesuffix(".")
            return f"the job's own division of the work is not possible ({said}): take row 1"
        return _most(best, what_ifs)
    changes = changes_words(planned, best)
    if not own.fits or own.cliff:
        where = "does not fit" if not own.fits else "is in the memory cliff"
        need = own.capacity_bytes - own.headroom_bytes
        return (
            f"your configuration {where} ({bytes_words(need)} of "
            f"{bytes_words(own.capacity_bytes)}): {changes}"
        )
    gain = 1.0 - best.estimate.finish_seconds.middle / own.finish_seconds.middle
    if not changes or gain < WORTH:
        return f"nothing in the layout: none found is over {WORTH:.0%} faster than your own; " + (
            _most(best, what_ifs)
        )
    sure = probability_faster(best.estimate.step_seconds.figure, own.step_seconds.figure)
    return (
        f"{changes}: {seconds_words(best.estimate.finish_seconds.middle)} in place of "
        f"{seconds_words(own.finish_seconds.middle)} ({100 * gain:.3g} % less, faster with "
        f"probability {sure:.2f}){_energy(best.estimate, own)}"
    )


def changes_words(planned: Planned, best: Choice) -> str:
    """What differs from the source's own configuration, as settings of the job where it is one."""
    own = planned.own
    if own is None:
        return ""
    changed = _differing(own, best.run) + _differing(planned.training.settings, best.settings)
    return ", ".join(changed)


def job_settings(planned: Planned, best: Choice) -> tuple[str, ...]:
    """What turns an Outlast job into a row of the ranking, as `outlast train` takes it.

    Empty for other sources, and where nothing is to be changed.
    """
    from outlast.errors import PlanError
    from outlast.plan.emit.outlast_job import mechanism_tables

    job, training = planned.job, planned.training
    if job is None or training.framework != "outlast":
        return ()
    wanted = _of_job(best.run)
    own = {} if planned.own is None else _of_job(planned.own)
    changed = [(name, value) for name, value in wanted.items() if own.get(name, "") != value]
    model, name, before = training.model, job.run.name, training.settings
    try:
        tables = mechanism_tables(model, best.settings, name, before)
    except PlanError:
        # Where its checkpoints should go is for its user to say.
        elsewhere = replace(best.settings, tiers=before.tiers)
        tables = mechanism_tables(model, elsewhere, name, before)
    changed += [
        (f"{section}.{key}", str(value))
        for section, values in tables.items()
        for key, value in values.items()
    ]
    return tuple(f"{name}={value}" for name, value in changed)


def _of_job(run: Configuration) -> dict[str, str]:
    shard = (run.sharding_ranks or run.data) if run.sharding == "parameters" else 1
    found = {
        "parallel.replicate": str(run.data // shard),
        "parallel.shard": str(shard),
        "parallel.tensor": str(run.tensor),
        "parallel.pipeline": str(run.pipeline),
        "train.precision": run.precision,
        "train.activation_checkpointing": str(run.recompute == "full").lower(),
    }
    if run.pipeline == 1:
        return {**found, "train.micro_batch_size": str(run.micro_batch)}
    found["parallel.pipeline_microbatches"] = str(run.micro_batches)
    if run.stages_per_rank > 1:
        found["parallel.pipeline_schedule"] = "interleaved"
        found["parallel.pipeline_stages_per_rank"] = str(run.stages_per_rank)
    return found


def probability_faster(one: Interval, other: Interval) -> float:
    """That the first is less than the second: log-normal, with errors that partly agree."""
    z = NormalDist().inv_cdf(0.5 + one.coverage / 2.0)
    s, t = (math.log(item.high / item.middle) / z for item in (one, other))
    variance = s**2 + t**2 - 2.0 * CORRELATION * s * t
    lead = math.log(other.middle / one.middle)
    if variance <= 0.0:
        return 1.0 if lead > 0.0 else 0.5 if lead == 0.0 else 0.0
    return NormalDist().cdf(lead / math.sqrt(variance))


def what_ifs(planned: Planned, best: Choice) -> tuple[WhatIf, ...]:
    """What other circumstances would do to a choice, those that are worth naming, best first."""
    from outlast.errors import PlanError
    from outlast.plan.prediction import predict

    context, cluster = planned.context, planned.cluster
    spares = max(cluster.nodes // 64, 1)
    tiers = tuple(
        tier
        for tier, rate in (
            ("memory", 1.0),
            ("peer", cluster.storage.peer_bytes_per_s),
            ("shared", cluster.storage.shared_bytes_per_s),
        )
        if rate > 0.0
    )
    more = replace(cluster, spares=cluster.spares + spares)
    loss = _loss_of(planned, best, batch=2.0)
    tried = [
        (
            f"{spares} spare node{'s' if spares > 1 else ''} more",
            replace(context, cluster=more),
            best.run,
            best.settings,
        ),
        (
            f"checkpoints to {' + '.join(tiers)}",
            context,
            best.run,
            replace(best.settings, tiers=tiers) if "shared" in tiers else best.settings,
        ),
        (
            f"twice the batch at equal tokens (loss {loss.low:+.2g} to {loss.high:+.2g} nats)",
            replace(context, baseline=replace(context.baseline, batch=2 * best.run.batch)),
            replace(best.run, batch=2 * best.run.batch),
            best.settings,
        ),
    ]
    found = []
    for change, around, run, settings in tried:
        try:
            there = predict(around, run, settings)
        except PlanError:
            continue
        gain = 1.0 - there.finish_seconds.middle / best.estimate.finish_seconds.middle
        if not there.fits or there.cliff or gain < WORTH:
            continue
        larger = run.batch != best.run.batch
        # As much time is saved by stopping earlier: a larger batch must cost less loss than that.
        if larger and loss.middle >= _loss_of(planned, best, tokens=1.0 - gain).middle:
            continue
        # What changes the loss comes last: it is no gain for nothing.
        found.append((larger, -gain, WhatIf(change, there)))
    return tuple(item for *_, item in sorted(found, key=lambda name: name[:2]))


def _loss_of(
    planned: Planned, best: Choice, *, batch: float = 1.0, tokens: float = 1.0
) -> Interval:
    """Loss with so many times the batch and the tokens, less the loss with one of each."""
    from outlast.plan.loss import law_parameters, loss_differences, runs

    context, model = planned.context, planned.training.model
    changed, plain = (
        runs(
            law_parameters(model),
            share * context.tokens,
            times * context.baseline.tokens,
            unique_tokens=context.unique_tokens,
            precision=best.run.precision,
            mixture=float(bool(model.experts)),
        )
        for times, share in ((batch, tokens), (1.0, 1.0))
    )
    return loss_differences(changed, plain).total(0).figure


def _most(best: Choice, what_ifs: tuple[WhatIf, ...]) -> str:
    limit = f"row 1's step is limited by {best.estimate.limiting}"
    if not what_ifs:
        return limit
    first = what_ifs[0]
    before, after = best.estimate.finish_seconds.middle, first.estimate.finish_seconds.middle
    return (
        f"{first.change}: {seconds_words(after)} in place of {seconds_words(before)}, "
        f"{100 * (1 - after / before):.3g} % less; {limit}"
    )


def _differing(own: Configuration | Settings, best: Configuration | Settings) -> list[str]:
    found = []
    for field in fields(own):
        before, after = getattr(own, field.name), getattr(best, field.name)
        if before != after and not _same_meaning(field.name, own, best):
            found.append(f"{field.name} {_shown(before)} -> {_shown(after)}")
    return found


def _same_meaning(name: str, own: object, best: object) -> bool:
    """Values that differ and say the same."""
    if name == "sharding_ranks":
        if "none" in (getattr(own, "sharding", ""), getattr(best, "sharding", "")):
            return True
        group = [
            0
            if getattr(run, "sharding", "none") == "none"
            else getattr(run, name) or getattr(run, "data", 0)
            for run in (own, best)
        ]
        return group[0] == group[1]
    if name == "balance":
        return getattr(best, "pipeline", 1) == 1
    if name == "sequence_parallel":
        return getattr(best, "tensor", 1) == 1
    if name == "schedule":
        return getattr(best, "pipeline", 1) == 1 == getattr(own, "pipeline", 1)
    return False


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,g}" if isinstance(value, float) else str(value)


def _energy(best: Estimate, own: Estimate) -> str:
    if isinstance(best.run_joules, Unavailable) or isinstance(own.run_joules, Unavailable):
        return ""
    gain = 100.0 * (1.0 - best.run_joules.middle / own.run_joules.middle)
    return f", {rounded(abs(gain), 2)} % {'less' if gain >= 0 else 'more'} energy"
