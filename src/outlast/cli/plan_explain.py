"""``outlast plan explain``: every figure as a sum of terms with formulas, values and sources."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from outlast.cli.asks import asks
from outlast.cli.plan_asked import Asked, Layout
from outlast.cli.plan_rank import AsJson
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from outlast.cli.plan_choice import Chosen
    from outlast.cli.plan_source import Planned
    from outlast.plan.estimate import Source, Term, Total


@asks
def explain(asked: Asked, layout: Layout, json: AsJson = False) -> None:
    """Take one way to run apart: every figure, its interval and its terms.

    Shown are the source's own configuration, a row of the ranking (--choose 2),
    or one in your words (--tensor 8 --pipeline 4). Each term has its formula, the
    values and constants in it, and where these come from; terms add up to the
    total.

    Example: outlast plan explain llama-3-8b --cluster h100x64 --tensor 2 --shard
    parameters

    --json: {"planned", "origin", "layout", "configuration", "settings",
    "estimate", "warnings", "assumed", "cluster"}.
    """
    from outlast.cli.figures import output, print_json
    from outlast.cli.plan_choice import chosen
    from outlast.cli.plan_source import planned
    from outlast.cli.plan_words import plain
    from outlast.plan.pareto.formatting import layout_words

    read = planned(asked)
    found = chosen(read, layout)
    if json:
        print_json(
            {
                "kind": "predicted",
                "planned": {"source": asked.source, "model": plain(read.training.model)},
                "origin": found.origin,
                "layout": layout_words(found.run),
                "configuration": plain(found.run),
                "settings": plain(found.settings),
                "estimate": plain(found.estimate),
                "warnings": list(found.warnings),
                "assumed": list(read.assumed),
                "cluster": plain(read.cluster),
            }
        )
        return
    _print(output(), read, found)


def _print(console: Console, planned: Planned, found: Chosen) -> None:
    from outlast.cli.figures import print_facts
    from outlast.cli.plan_rank import answers, print_planned
    from outlast.cli.plan_words import range_words, seconds_words
    from outlast.plan.pareto.formatting import layout_words, settings_words

    each = found.estimate
    print_planned(console, planned)
    facts = [
        ("layout", f"{layout_words(found.run)} ({found.origin})"),
        ("mechanisms", settings_words(found.settings)),
        *answers(each, planned.cluster.prices.currency),
        ("throughput", range_words(each.tokens_per_s, "tokens/s")),
        ("MFU", range_words(each.utilisation, "% of the peak, no recomputation counted", 0.01)),
        ("checkpoints", f"every {seconds_words(each.checkpoint_seconds)}"),
        ("redone work", seconds_words(each.lost_work_seconds)),
        *(("flag", text) for text in found.warnings),
    ]
    print_facts(console, "What is predicted", facts)
    _print_total(console, "time of a step", each.step_seconds)
    _print_total(console, "reserved memory of the fullest device", each.memory)
    _print_stages(console, found)
    if isinstance(each.joules, Unavailable):
        console.print(f"\nenergy of a step: {each.joules}", soft_wrap=True, markup=False)
    else:
        _print_total(console, "energy of a step, all devices", each.joules)
    _print_total(console, "share of the wall time that is progress (ETTR)", each.ettr)
    _print_total(console, "loss against the baseline at equal data", each.loss_difference)
    _print_cluster(console, planned)


def _print_total(console: Console, title: str, total: Total) -> None:
    """A total, its terms, and the constants in them."""
    from outlast.cli.plan_words import range_words

    terms = [term for term in total.terms if term.value]
    nothing = [term.name for term in total.terms if not term.value]
    words = range_words(total.figure, _shown_unit(total.unit), _factor(total.unit))
    console.print(f"\n[bold]{title}[/bold]: {words}", soft_wrap=True)
    common = _common(terms)
    for term in sorted(terms, key=lambda term: -abs(term.value)):
        _print_term(console, term, total, set(common))
    if common:
        values = ", ".join(f"{name} = {value:.6g}" for name, value in common.items())
        _print_wrapped(console, f"with {values} in all terms", "  ")
    if nothing:
        _print_wrapped(console, f"nothing: {', '.join(nothing)}", "  ")
    summed = math.fsum(term.value for term in total.terms)
    console.print(
        f"  sum of {len(total.terms)} terms: {summed / _factor(total.unit):.6g} "
        f"{_shown_unit(total.unit)}".rstrip()
    )
    for name, source in sorted(_constants(total).items()):
        _print_wrapped(console, f"{name} = {source_words(source)}", "  ")


def _common(terms: list[Term]) -> dict[str, float]:
    """Values that all terms share, to be said once."""
    if len(terms) < 2:
        return {}
    return {
        name: value
        for name, value in terms[0].inputs.items()
        if all(term.inputs.get(name) == value for term in terms)
    }


def _print_term(console: Console, term: Term, total: Total, said: set[str]) -> None:
    unit, whole = total.unit, total.figure.middle
    value = f"{term.value / _factor(unit):.6g} {_shown_unit(unit)}".strip()
    share = f"{100 * term.value / whole:.1f} %" if whole and unit not in ("1", "nats") else ""
    values = ", ".join(
        f"{name} = {given:.6g}" for name, given in term.inputs.items() if name not in said
    )
    parts = [f"= {term.formula}", f"with {values}" if values else "", f"[{term.source}]"]
    if console.is_terminal:
        console.print(f"  {term.name:<28} {value:>18} {share:>8}", markup=False)
        for part in filter(None, parts):
            _print_wrapped(console, part, "      ")
        return
    line = "  ".join(filter(None, [f"  {term.name}", value, share, *parts]))
    console.print(line, soft_wrap=True, markup=False)


def _print_wrapped(console: Console, text: str, indent: str) -> None:
    """Wrapped on a terminal, else one line."""
    if not console.is_terminal:
        console.print(f"{indent}{text}", soft_wrap=True, markup=False, style="dim")
        return
    for line in textwrap.wrap(
        text, console.width, initial_indent=indent, subsequent_indent=f"{indent}  "
    ):
        console.print(line, markup=False, style="dim", soft_wrap=True)


def _constants(total: Total) -> dict[str, Source]:
    return {name: source for term in total.terms for name, source in term.constants.items()}


def source_words(source: Source) -> str:
    """A constant: value, unit, origin and where to find it."""
    unit = "" if source.unit == "1" else f" {source.unit}"
    return f"{source.value:.6g}{unit} ({source.origin}: {source.text})"


def _print_stages(console: Console, found: Chosen) -> None:
    """Memory of every stage, alike ones in one line."""
    from outlast.cli.plan_words import bar, bytes_words

    capacity = found.estimate.capacity_bytes
    if len(found.estimate.memory_by_stage) < 2:
        return
    console.print("  by stage of the pipeline:")
    for first, last, held in _runs(found.estimate.memory_by_stage):
        name = f"stage {first}" if first == last else f"stages {first} to {last}"
        picture = bar(held / capacity) if console.encoding.startswith("utf") else ""
        console.print(
            f"  {name:<16} {picture} {bytes_words(held)} of {bytes_words(capacity)}", markup=False
        )


def _runs(values: tuple[float, ...]) -> Iterator[tuple[int, int, float]]:
    """First and last index of stages that hold the same, to a per cent."""
    first = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or abs(values[index] / values[first] - 1.0) > 0.01:
            yield first, index - 1, max(values[first:index])
            first = index


def _print_cluster(console: Console, planned: Planned) -> None:
    """Every figure of the cluster with its source."""
    console.print("\n[bold]figures of the cluster[/bold]")
    for name, source in sorted(planned.cluster.sources.items()):
        _print_wrapped(console, f"{name} = {source_words(source)}", "  ")


def _shown_unit(unit: str) -> str:
    return {"B": "GiB", "J": "MJ", "1": "", "s": "s"}.get(unit, unit)


def _factor(unit: str) -> float:
    return {"B": 2.0**30, "J": 1e6}.get(unit, 1.0)
