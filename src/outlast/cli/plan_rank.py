"""``outlast plan SOURCE``: does it fit, how long, how many kWh, what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.asks import asks
from outlast.cli.plan_asked import Asked

if TYPE_CHECKING:
    from rich.console import Console

    from outlast.cli.plan_advice import WhatIf
    from outlast.cli.plan_ranking import Choice, Ranking
    from outlast.cli.plan_source import Planned
    from outlast.cluster.cost import Chain
    from outlast.plan.prediction import Estimate

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


@asks
def rank(
    asked: Asked,
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
    "axes", "knee", "choices": [{"number", "layout", "configuration", "settings",
    "on_front", "knee", "estimate"}], "own", "own_problem", "what_ifs", "advice",
    "settings", "queue", "file_system"}; an estimate holds figures as {"low",
    "middle", "high", "coverage", "extrapolated"}, totals with their terms, in s,
    B, J, nats.
    """
    from outlast.cli.figures import output, print_json
    from outlast.cli.plan_advice import advice, own_estimate, what_ifs
    from outlast.cli.plan_queue import queued
    from outlast.cli.plan_ranking import ranking
    from outlast.cli.plan_source import planned

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
    _print_answers(console, found, own, said, chain)
    _print_choices(console, found)
    _print_searched(console, found)


def print_planned(console: Console, planned: Planned) -> None:
    """What is trained, on what, and what was assumed."""
    from outlast.cli.figures import print_facts
    from outlast.cli.plan_words import count_words

    training, cluster, model = planned.training, planned.cluster, planned.training.model
    run, context = training.run, planned.context
    in_use = f", {count_words(model.active_parameters)} in use" if model.experts else ""
    spare = cluster.device + (f", spare nodes: {cluster.spares:,}" if cluster.spares else "")
    facts = [
        (
            "model",
            f"{model.name}, {count_words(model.parameters)} parameters{in_use}",
        ),
        (
            "training",
            (
                f"{context.steps:,} step{'s'[: context.steps != 1]} of {run.batch:,} x "
                f"{run.sequence:,} tokens, "
                f"{count_words(context.tokens)} in all"
            ),
        ),
        (
            "cluster",
            f"{cluster.name}: {cluster.nodes:,} x {cluster.devices_per_node} {spare}",
        ),
        ("framework", training.framework),
        *(("assumed", name) for name in planned.assumed),
    ]
    print_facts(console, "Plan (every figure below is predicted)", facts)


def _print_answers(
    console: Console, found: Ranking, own: Estimate | None, said: str, chain: Chain | None
) -> None:
    from outlast.cli.figures import print_facts
    from outlast.cli.plan_advice import changes_words, job_settings
    from outlast.cli.plan_queue import queue_words
    from outlast.cli.plan_sharing import sharing_of, sharing_words

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


def answers(found: Estimate, currency: str = "") -> list[tuple[str, str]]:
    """Will it fit, how long, how much energy, what do failures cost, what does it cost."""
    from outlast.cli.plan_words import (
        bytes_words,
        joules_range,
        range_words,
        seconds_range,
        seconds_words,
        share_words,
    )

    used = found.capacity_bytes - found.headroom_bytes
    fits = "yes" if found.fits and not found.cliff else "no"
    if found.fits and found.cliff:
        fits = "only in the memory cliff, where the allocator slows it down"
    lost = sorted(found.ettr.terms[1:], key=lambda term: term.value)
    wall = found.finish_seconds.middle
    largest = [
        f"{term.name.removeprefix('lost to ')} {seconds_words(-term.value * wall)}"
        for term in lost[:3]
        if -term.value >= 5e-5
    ]
    worst = f": {', '.join(largest)}" if largest else ""
    share = 1.0 - found.ettr.figure.middle
    answered = [
        (
            "fits",
            (
                f"{fits}: {bytes_words(used)} of {bytes_words(found.capacity_bytes)} on the "
                "fullest device"
            ),
        ),
        *([("because", found.unfit)] if found.unfit else []),
        ("takes", f"{seconds_range(found.finish_seconds)}, failures included"),
        ("energy", joules_range(found.run_joules)),
        (
            "failures",
            f"{share_words(share)} of the time, {seconds_words(share * wall)}{worst}",
        ),
        ("money", range_words(found.money, currency)),
        ("CO2", range_words(found.carbon_grams, "kg", 1e3)),
    ]
    loss = found.loss_difference.figure
    if loss.high != loss.low:
        words = f"{range_words(loss, 'nats')} above the bf16 baseline at equal data"
        answered.append(("loss", words))
    if found.on_time is not None:
        answered.append(("in time", f"with probability {found.on_time:.2f}"))
    answered += [("extrapolated", name) for name in beyond(found)]
    return answered


def beyond(found: Estimate) -> tuple[str, ...]:
    """Why figures are beyond what was measured: of all of them first, then of one by its name."""
    from outlast.hardware.figure import Unavailable

    shared = found.finish_seconds.extrapolated
    single = {
        "memory": found.memory.figure,
        "energy": found.run_joules,
        "loss": found.loss_difference.figure,
    }
    alone = [
        f"{name}: {phrase}"
        for name, figure in single.items()
        if not isinstance(figure, Unavailable)
        for phrase in figure.extrapolated
        if phrase not in shared
    ]
    return (*shared, *alone)


def _print_choices(console: Console, found: Ranking) -> None:
    from outlast.cli.figures import Column, print_table
    from outlast.cli.plan_words import unit_of_joules, unit_of_seconds
    from outlast.hardware.figure import Unavailable
    from outlast.plan.pareto.objectives import FIGURES

    # One unit for all rows, so that they can be compared.
    first = found.choices[0].estimate
    joules = 0.0 if isinstance(first.run_joules, Unavailable) else first.run_joules.middle
    scales = unit_of_seconds(first.finish_seconds.middle), unit_of_joules(joules)
    rows = [_row(console, choice, *scales) for choice in found.choices]
    shared, layouts = _layouts(found)
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
        number for number, column in enumerate(columns) if not _unknown(column.name, rows, number)
    ]
    console.print()
    title = f"Ranked by {FIGURES[found.planned.asked.by].words}, the front first"
    if not first.calibrated:
        title += "; not calibrated on this cluster"
    shown = [[row[number] for number in kept] for row in rows]
    print_table(console, [columns[number] for number in kept], shown, title)
    if shared:
        console.print(f"in all rows: {shared}", style="dim", markup=False)
    for phrase, numbers in _beyond_of_rows(found).items():
        which = ", ".join(map(str, numbers))
        console.print(
            f"extrapolated, row{'s'[: len(numbers) != 1]} {which}: {phrase}",
            markup=False,
        )


def _beyond_of_rows(found: Ranking) -> dict[str, list[int]]:
    """Rows by what is beyond what was measured in them, where it is not so in row 1."""
    said = set(beyond(found.choices[0].estimate))
    rows: dict[str, list[int]] = {}
    for choice in found.choices:
        for phrase in beyond(choice.estimate):
            if phrase not in said:
                rows.setdefault(phrase, []).append(choice.number)
    return rows


def _unknown(name: str, rows: list[list[str]], number: int) -> bool:
    return name in ("money", "CO2") and all(row[number] == "-" for row in rows)


def _row(
    console: Console, each: Choice, times: tuple[str, float], energies: tuple[str, float]
) -> list[str]:
    from outlast.cli.plan_words import bar, rounded, share_words
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


def _layouts(found: Ranking) -> tuple[str, list[str]]:
    """What the rows have in common, and what each has beside."""
    from outlast.plan.pareto.formatting import layout_words, settings_words

    split = [
        [*layout_words(choice.run).split(" \N{MIDDLE DOT} "),
         *settings_words(choice.settings).split(" \N{MIDDLE DOT} ")]
        for choice in found.choices
    ]  # fmt: skip
    shared = [part for part in split[0] if all(part in parts for parts in split)]
    if len(split) == 1:
        shared = [split[0][-1]]
    rest = [" \N{MIDDLE DOT} ".join(p for p in parts if p not in shared) for parts in split]
    return " \N{MIDDLE DOT} ".join(shared), rest


def _print_searched(console: Console, found: Ranking) -> None:
    from outlast.plan.pareto.objectives import FIGURES

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


def _document(
    found: Ranking,
    own: Estimate | None,
    ifs: tuple[WhatIf, ...],
    said: str,
    chain: Chain | None,
) -> dict[str, Any]:
    from outlast.cli.plan_advice import job_settings
    from outlast.cli.plan_sharing import sharing_of
    from outlast.cli.plan_words import plain
    from outlast.plan.pareto.formatting import layout_words

    front, planned, best = found.front, found.planned, found.choices[0]
    sharing = sharing_of(planned.load_of_others, best.estimate, best.settings)
    return {
        "kind": "predicted",
        "planned": {
            "source": planned.asked.source,
            "model": plain(planned.training.model),
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
                "configuration": plain(choice.run),
                "settings": plain(choice.settings),
                "on_front": choice.on_front,
                "knee": choice.knee,
                "estimate": plain(choice.estimate),
            }
            for choice in found.choices
        ],
        "own": None if own is None else plain(own),
        "own_problem": planned.own_problem,
        "queue": None if chain is None else plain(chain),
        "file_system": None if sharing is None else plain(sharing),
        "what_ifs": [{"change": e.change, "estimate": plain(e.estimate)} for e in ifs],
        "advice": said,
        "settings": list(job_settings(planned, best)),
    }
