"""``outlast plan SOURCE``: does it fit, how long, how many kWh, what to change."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import (
    Column,
    bar,
    bytes_words,
    count_words,
    output,
    print_facts,
    print_json,
    print_table,
    rounded,
    seconds_words,
    share_words,
    unit_of_joules,
    unit_of_seconds,
)
from outlast.cli.options import AsJson, PlanOptions, with_options
from outlast.cli.plan_pareto import answers, beyond, ranking

if TYPE_CHECKING:
    from rich.console import Console

    from outlast.cli.plan_pareto import Choice, Ranking
    from outlast.cli.plan_source import Planned
    from outlast.cluster.cost import Chain
    from outlast.plan.configuration import Configuration, Settings
    from outlast.plan.estimate import Interval
    from outlast.plan.prediction import Estimate


@with_options
def rank(
    asked: PlanOptions,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 10,
    wall_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="A queue's limit, e.g. 24h: what a chain of such links takes."
        ),
    ] = None,
    queue_wait: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With it, how long each link waits; default: not."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Rank all ways to run a training on a cluster; what `outlast plan SOURCE` does.

    Predicts time, memory, energy, failures, loss and cost of every legal
    configuration, with intervals, and needs no GPU. The rows marked * are on the
    exact Pareto front.

    Example: outlast plan llama-3-8b --cluster h100x64 --tokens 300B --budget "40
    d"

    --json: {"planned", "assumed", "searched", "allowed", "within", "front",
    "axes", "limits", "choices": [{"number", "layout", "configuration", "settings",
    "on_front", "knee", "estimate"}], "own", "own_problem", "what_ifs", "advice",
    "settings", "queue", "file_system"}; an estimate holds figures as {"low",
    "middle", "high", "coverage", "extrapolated"}, totals with their terms, in s,
    B, J, nats.
    """
    from outlast.cli.plan_source import planned, sharing_of, sharing_words
    from outlast.plan.objectives import FIGURES

    found = ranking(planned(asked), top)
    own = own_estimate(found.planned)
    ifs = what_ifs(found.planned, found.choices[0])
    said = advice(found, own, ifs)
    chain = queued(wall_time, queue_wait, found.choices[0].estimate)
    if json:
        print_json(_document(found, own, ifs, said, chain))
        return
    console = output()
    print_planned(console, found.planned)
    best, currency = found.choices[0], found.planned.cluster.prices.currency
    flags = [("flag", text) for text in best.estimate.warnings]
    facts = [*answers(best.estimate, currency), *flags, ("change", said)]
    if chain is not None:
        facts.insert(2, ("on a queue", queue_words(chain)))
    sharing = sharing_of(found.planned.load_of_others, best.estimate, best.settings)
    if sharing is not None:
        facts.append(("file system", sharing_words(sharing)))
    if settings := job_settings(found.planned, best):
        facts.append(("settings", " ".join(settings)))
    print_facts(console, "The best found (row 1)", facts)
    if own is not None and changes_words(found.planned, best):
        print_facts(console, "Your own configuration", answers(own, currency))
    _print_choices(console, found)
    front = found.front
    axes = ", ".join(FIGURES[name].words for name in front.axes)
    within = f"; {front.within:,} of them within the budget" if front.limits else ""
    lines = [
        (
            f"{front.searched:,} configurations searched; {front.allowed:,} fit with headroom"
            f"{within}; {len(front):,} on the exact front (*) of {axes}; k: its knee."
        ),
        *(
            f"Not weighed: {FIGURES[name].words} ({why.reason})."
            for name, why in front.left_out.items()
        ),
        (
            "takes: mean wall time with failures, interval: 80 %; more of a row: outlast plan "
            "explain SOURCE --choose N."
        ),
    ]
    console.print()
    for line in lines:
        console.print(line, style="dim", markup=False)


def print_planned(console: Console, planned: Planned) -> None:
    """Print the training, the cluster, and the assumptions."""
    training, cluster, model = planned.training, planned.cluster, planned.training.model
    run, context = training.run, planned.context
    in_use = f", {count_words(model.active_parameters)} in use" if model.experts else ""
    spare = cluster.device + (f", spare nodes: {cluster.spares:,}" if cluster.spares else "")
    facts = [
        ("model", f"{model.name}, {count_words(model.parameters)} parameters{in_use}"),
        (
            "training",
            (
                f"{context.steps:,} step{'s'[: context.steps != 1]} of {run.batch:,} x "
                f"{run.sequence:,} tokens, "
                f"{count_words(context.tokens)} in all"
            ),
        ),
        ("cluster", f"{cluster.name}: {cluster.nodes:,} x {cluster.devices_per_node} {spare}"),
        ("framework", training.framework),
        *(("assumed", name) for name in planned.assumed),
    ]
    print_facts(console, "Plan (every figure below is predicted)", facts)


def _print_choices(console: Console, found: Ranking) -> None:
    from outlast.hardware.figure import Unavailable
    from outlast.plan.configuration import layout_words, settings_words
    from outlast.plan.objectives import FIGURES

    # One unit for all rows, so that they can be compared.
    first = found.choices[0].estimate
    joules = 0.0 if isinstance(first.run_joules, Unavailable) else first.run_joules.middle
    scales = unit_of_seconds(first.finish_seconds.middle), unit_of_joules(joules)
    rows = [_row(console, choice, *scales) for choice in found.choices]
    # Settings common to the rows, and those particular to each.
    split = [
        [*layout_words(choice.run).split(" \N{MIDDLE DOT} "),
         *settings_words(choice.settings).split(" \N{MIDDLE DOT} ")]
        for choice in found.choices
    ]  # fmt: skip
    common = [part for part in split[0] if all(part in parts for parts in split)]
    if len(split) == 1:
        common = [split[0][-1]]
    layouts = [" \N{MIDDLE DOT} ".join(p for p in parts if p not in common) for parts in split]
    shared = " \N{MIDDLE DOT} ".join(common)
    for row, layout in zip(rows, layouts, strict=True):
        row[1] = layout
    columns = [
        Column("#"),
        Column("layout", number=False, least=24),
        Column("takes"),
        Column("interval", optional=3),
        Column("energy"),
        Column("memory", number=False, optional=1),
        Column("MFU"),
        Column("ETTR", optional=2),
        Column("limited by", number=False, optional=4, least=12),
        Column("money", optional=5),
        Column("CO2", optional=6),
    ]
    kept = [
        number
        for number, column in enumerate(columns)
        if not (column.name in ("money", "CO2") and all(row[number] == "-" for row in rows))
    ]
    console.print()
    title = f"Ranked by {FIGURES[found.planned.asked.by].words}, the front first"
    if not first.calibrated:
        title += "; not calibrated on this cluster"
    shown = [[row[number] for number in kept] for row in rows]
    print_table(console, [columns[number] for number in kept], shown, title)
    if shared:
        console.print(f"in all rows: {shared}", style="dim", markup=False)
    # Rows by what is beyond what was measured in them, where it is not so in row 1.
    said = set(beyond(found.choices[0].estimate))
    beyond_rows: dict[str, list[int]] = {}
    for choice in found.choices:
        for reason in beyond(choice.estimate):
            if reason not in said:
                beyond_rows.setdefault(reason, []).append(choice.number)
    for phrase, numbers in beyond_rows.items():
        which = ", ".join(map(str, numbers))
        console.print(
            f"extrapolated, row{'s'[: len(numbers) != 1]} {which}: {phrase}", markup=False
        )


def _row(
    console: Console, each: Choice, times: tuple[str, float], energies: tuple[str, float]
) -> list[str]:
    from outlast.hardware.figure import Unavailable

    found = each.estimate
    time, money, grams = found.finish_seconds, found.money, found.carbon_grams
    used = 1.0 - found.headroom_bytes / found.capacity_bytes
    unit, factor = times
    energy_unit, joules_each = energies
    ends = f"{rounded(time.low / factor)} to {rounded(time.high / factor)}"
    blocks = bar(used) if console.encoding.startswith("utf") else ""
    joules = found.run_joules
    return [
        f"{each.number}{'*' if each.on_front else ' '}{'k' if each.knee else ''}",
        "",
        f"{rounded(time.middle / factor)} {unit}",
        ends,
        "-"
        if isinstance(joules, Unavailable)
        else f"{rounded(joules.middle / joules_each, 4)} {energy_unit}",
        f"{blocks} {100 * used:.0f} %".strip(),
        f"{100 * found.utilisation.middle:.1f} %",
        share_words(found.ettr.figure.middle),
        found.limiting,
        "-" if isinstance(money, Unavailable) else rounded(money.middle),
        "-" if isinstance(grams, Unavailable) else f"{rounded(grams.middle / 1e3)} kg",
    ]


def _document(
    found: Ranking, own: Estimate | None, ifs: tuple[WhatIf, ...], said: str, chain: Chain | None
) -> dict[str, Any]:
    from outlast.cli.plan_source import sharing_of
    from outlast.plan.configuration import layout_words

    front, planned, best = found.front, found.planned, found.choices[0]
    sharing = sharing_of(planned.load_of_others, best.estimate, best.settings)
    return {
        "kind": "predicted",
        "planned": {
            "source": planned.asked.source,
            "model": planned.training.model,
            "parameters": planned.training.model.parameters,
            "cluster": planned.cluster.name,
            "devices": planned.cluster.devices,
            "framework": planned.training.framework,
            "tokens": planned.context.tokens,
            "steps": planned.context.steps,
        },
        "assumed": list(planned.assumed),
        "searched": front.searched,
        "allowed": front.allowed,
        "within": front.within,
        "front": len(front),
        "axes": list(front.axes),
        "limits": dict(front.limits),
        "choices": [
            {
                "number": choice.number,
                "layout": layout_words(choice.run),
                "configuration": choice.run,
                "settings": choice.settings,
                "on_front": choice.on_front,
                "knee": choice.knee,
                "estimate": choice.estimate,
            }
            for choice in found.choices
        ],
        "own": own,
        "own_problem": planned.own_problem,
        "queue": chain,
        "file_system": sharing,
        "what_ifs": [{"change": e.change, "estimate": e.estimate} for e in ifs],
        "advice": said,
        "settings": list(job_settings(planned, best)),
    }


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
    """Prediction of the source's own configuration; None where it has none."""
    from outlast.plan.prediction import predict

    if planned.own is None:
        return None
    return predict(planned.context, planned.own, planned.training.settings)


def advice(found: Ranking, own: Estimate | None, what_ifs: tuple[WhatIf, ...]) -> str:
    """One line."""
    from outlast.hardware.figure import Unavailable

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
    energy, joules, before = "", best.estimate.run_joules, own.run_joules
    if not isinstance(joules, Unavailable) and not isinstance(before, Unavailable):
        less = 100.0 * (1.0 - joules.middle / before.middle)
        energy = f", {rounded(abs(less), 2)} % {'less' if less >= 0 else 'more'} energy"
    return (
        f"{changes}: {seconds_words(best.estimate.finish_seconds.middle)} in place of "
        f"{seconds_words(own.finish_seconds.middle)} ({100 * gain:.3g} % less, faster with "
        f"probability {sure:.2f}){energy}"
    )


def changes_words(planned: Planned, best: Choice) -> str:
    """Differences from the source's own configuration, as settings of the job where it is one."""
    own = planned.own
    if own is None:
        return ""
    changed = _differing(own, best.run) + _differing(planned.training.settings, best.settings)
    return ", ".join(changed)


def job_settings(planned: Planned, best: Choice) -> tuple[str, ...]:
    """Overrides that turn an Outlast job into a row of the ranking, for `outlast train`.

    Empty for other sources, and where nothing is to be changed.
    """
    from outlast.errors import PlanError
    from outlast.plan.emit import mechanism_tables

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
    """Probability that the first is less than the second: log-normal, errors partly agree."""
    z = NormalDist().inv_cdf(0.5 + one.coverage / 2.0)
    s, t = (math.log(item.high / item.middle) / z for item in (one, other))
    variance = s**2 + t**2 - 2.0 * CORRELATION * s * t
    lead = math.log(other.middle / one.middle)
    if variance <= 0.0:
        return 1.0 if lead > 0.0 else 0.5 if lead == 0.0 else 0.0
    return NormalDist().cdf(lead / math.sqrt(variance))


def what_ifs(planned: Planned, best: Choice) -> tuple[WhatIf, ...]:
    """Effects of other circumstances on a choice, those that are worth naming, best first."""
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


def queued(wall_time: str | None, queue_wait: str | None, found: Estimate) -> Chain | None:
    """The chain of links that a run becomes; None where no time limit was given.

    Args:
        wall_time: Limit of a link, as a person says it.
        queue_wait: How long each link waits; None for not at all.
        found: The run without a queue.

    Raises:
        PlanError: A wait without a limit.
        ClusterError: A time that cannot be read, or a limit in which nothing trains.
    """
    from outlast.cluster.cost import LinkOverhead, QueueWait, chain
    from outlast.durations import limit_seconds
    from outlast.errors import PlanError

    if wall_time is None:
        if queue_wait is not None:
            raise PlanError(f"queue_wait = {queue_wait} is of each link: give wall_time, too")
        return None
    wait = limit_seconds(queue_wait, "--queue-wait") if queue_wait else 0.0
    overhead = LinkOverhead(
        restart_seconds=found.resume_seconds,
        save_seconds=found.last_save_seconds,
        step_seconds=found.step_seconds.figure.middle,
    )
    work = found.finish_seconds.middle
    return chain(work, limit_seconds(wall_time, "--wall-time"), overhead, QueueWait(wait))


def queue_words(found: Chain) -> str:
    """A chain in a line."""
    links = "1 job" if found.links == 1 else f"{found.links:,} links"
    return (
        f"{seconds_words(found.seconds)} as {links}: {seconds_words(found.wait_seconds)} of it "
        f"waiting, {seconds_words(found.overhead_seconds)} ({share_words(found.waste)} of the "
        "nodes' time) in last saves and restarts"
    )
