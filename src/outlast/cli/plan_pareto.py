"""``outlast plan pareto`` and ``check``: the front as files, one question as an exit code."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.asks import asks
from outlast.cli.plan_asked import Asked, Layout
from outlast.cli.plan_rank import AsJson
from outlast.errors import EXIT_CRASHED, NothingAllowedError, PlanError

if TYPE_CHECKING:
    from outlast.cli.plan_choice import Chosen
    from outlast.cli.plan_source import Planned
    from outlast.hardware.figure import Unavailable
    from outlast.plan.estimate import Interval
    from outlast.plan.prediction import Estimate


@asks
def pareto(
    asked: Asked,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the interactive page here.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one line per point here.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Search the exact Pareto front, as a page to look at, CSV or JSON.

    The front weighs time, energy, expected lost time, the probability to miss a
    --deadline and loss against each other. The page loads nothing from anywhere.

    Example: outlast plan pareto llama-3-8b --cluster h100x64 --html front.html

    --json: {"axes", "left_out", "limits", "coverage", "kind", "searched",
    "allowed", "within", "knee", "points": [{"cluster", "configuration",
    "settings", "figures", "extrapolated"}]}.
    """
    from outlast.cli.plan_ranking import refuse_unknown, search_front
    from outlast.cli.plan_source import planned
    from outlast.plan.pareto.objectives import FIGURES
    from outlast.plan.pareto.page import page

    read = planned(asked)
    front, _, _ = search_front(read)
    refuse_unknown(front, asked.by)
    front = front.ordered(asked.by)
    if html is not None:
        title = f"{read.training.model.name} on {read.cluster.name}"
        within, start = asked.budget or (), datetime.now().astimezone()
        _write(html, page(front, title=title, within=within, minimise=asked.by, start=start))
    if csv is not None:
        _write(csv, front.to_csv())
    if json:
        print(front.to_json(indent=2))
        return
    print(
        f"{front.searched:,} configurations searched, {front.allowed:,} fit with headroom, "
        f"{len(front):,} on the exact front of {', '.join(FIGURES[e].words for e in front.axes)}"
    )
    for path in (html, csv):
        if path is not None:
            print(f"wrote {path}")
    if html is None and csv is None:
        print("nothing was written: give --html FILE, --csv FILE or --json")


@asks
def check(
    asked: Asked,
    layout: Layout,
    *,
    headroom: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help='Memory of a device that must stay free: "20%" or "10 GiB"; default: what keeps '
            "clear of the memory cliff.",
        ),
    ] = None,
    surely: Annotated[
        bool,
        typer.Option("--surely", help="Limits hold at the unfavourable end of the intervals."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    json: AsJson = False,
) -> None:
    """Answer one question by exit code: will it fit and keep to the budget?

    0: yes; 1: no, with a sentence why; 2: wrong input, or a limit on what is not
    known. For CI, or the prolog of a Slurm job. Checked is the job's own
    configuration, or the one that --choose or the sizes name; of a source without
    one, the best that can be found.

    Example: outlast plan check job.toml --cluster h100x64 --budget "40 h"
    --budget "3 MWh"

    --json: {"holds", "reasons", "layout", "configuration", "limits", "figures",
    "extrapolated"}.
    """
    from outlast.cli.figures import print_json
    from outlast.cli.plan_choice import chosen
    from outlast.cli.plan_rank import beyond
    from outlast.cli.plan_source import planned
    from outlast.cli.plan_words import plain
    from outlast.plan.pareto.formatting import layout_words

    read = planned(asked)
    bounds = _bounds(read, headroom)
    try:
        found = chosen(read, layout)
    except NothingAllowedError as error:
        reasons = [str(error)]
        if json:
            print_json({"holds": False, "reasons": reasons, "limits": bounds})
        elif not quiet:
            print(f"no: {error}")
        raise typer.Exit(EXIT_CRASHED) from None
    reasons = _reasons(found, bounds, surely)
    if json:
        figures = {name: plain(figure_of(found.estimate, name)) for name in bounds}
        print_json(
            {
                "holds": not reasons,
                "reasons": reasons,
                "layout": layout_words(found.run),
                "configuration": plain(found.run),
                "limits": bounds,
                "figures": figures,
                "extrapolated": list(beyond(found.estimate)),
            }
        )
    elif not quiet:
        words = f"{layout_words(found.run)} ({found.origin})"
        print(f"no: {'; '.join(reasons)} [{words}]" if reasons else f"yes: {words}")
        for item in beyond(found.estimate):
            print(f"extrapolated: {item}")
    raise typer.Exit(EXIT_CRASHED if reasons else 0)


def _bounds(planned: Planned, headroom: str | None) -> dict[str, float]:
    from outlast.plan.pareto.budget import limits

    asked, prices = planned.asked, planned.cluster.prices
    start = datetime.now().astimezone()
    found = limits(asked.budget or (), start=start, currency=prices.currency)
    if headroom is not None:
        least = _headroom_bytes(headroom, planned.cluster.memory_bytes)
        found["headroom_bytes"] = max(found.get("headroom_bytes", 0.0), least)
    return found


def _headroom_bytes(text: str, capacity: float) -> float:
    from outlast.plan.pareto.budget import parse

    if text.strip().endswith("%"):
        try:
            share = float(text.strip().removesuffix("%")) / 100.0
        except ValueError:
            share = -1.0
        if not 0.0 <= share < 1.0:
            raise PlanError(f"--headroom = {text}: give 0 to 100 %, or as 10 GiB")
        return share * capacity
    limit = parse(text)
    if limit.figure != "headroom_bytes":
        raise PlanError(f"--headroom = {text!r} is no amount of memory: give 20% or 10 GiB")
    return limit.value


def _reasons(found: Chosen, bounds: dict[str, float], surely: bool) -> list[str]:
    """What does not hold, a phrase each.

    Raises:
        PlanError: A limited figure is not known.
    """
    from outlast.cli.plan_words import bytes_words
    from outlast.hardware.figure import Unavailable
    from outlast.plan.pareto.objectives import FIGURES

    each = found.estimate
    used = each.capacity_bytes - each.headroom_bytes
    memory = f"{bytes_words(used)} of {bytes_words(each.capacity_bytes)} on the fullest device"
    reasons = []
    if not each.fits:
        reasons.append(f"it does not fit: {memory}")
    elif each.cliff:
        reasons.append(f"it is in the memory cliff: {memory}, so that the allocator slows it down")
    for name, bound in bounds.items():
        figure = figure_of(each, name)
        if isinstance(figure, Unavailable):
            raise PlanError(
                f"a limit of {FIGURES[name].words} cannot be checked, since it is not known: "
                f"{figure}"
            )
        more = FIGURES[name].more
        worst = figure.low if more else figure.high
        value = worst if surely else figure.middle
        if (value < bound) if more else (value > bound):
            end = " at the unfavourable end" if surely else ""
            least = "at least" if more else "at most"
            reasons.append(
                f"{FIGURES[name].words} is {_words(name, value)}{end}, and {least} "
                f"{_words(name, bound)} was asked for"
            )
    return reasons


def figure_of(found: Estimate, name: str) -> Interval | Unavailable:
    """A figure of the search in an estimate, in the search's units."""
    from outlast.hardware.figure import Unavailable
    from outlast.plan.estimate import Interval

    hours = found.finish_seconds.scaled(1.0 / 3600.0)
    half = found.memory.figure
    figures: dict[str, Any] = {
        "hours": hours,
        "device_hours": hours.scaled(float(found.devices)),
        "lost_hours": hours.scaled(1.0 - found.ettr.figure.middle),
        "loss_difference": found.loss_difference.figure,
        "money": found.money,
        "grams_co2": found.carbon_grams,
        "kwh": found.run_joules
        if isinstance(found.run_joules, Unavailable)
        else found.run_joules.scaled(1.0 / 3.6e6),
        "headroom_bytes": Interval(
            found.headroom_bytes - (half.high - half.middle),
            found.headroom_bytes,
            found.headroom_bytes + (half.middle - half.low),
            half.coverage,
        ),
    }
    if name == "miss_probability":
        if found.on_time is None:
            return Unavailable("no deadline was given", "give --deadline")
        missed = 1.0 - found.on_time
        return Interval(missed, missed, missed)
    figure: Interval | Unavailable = figures[name]
    return figure


def _words(name: str, value: float) -> str:
    from outlast.cli.plan_words import bytes_words, joules_words, rounded, seconds_words
    from outlast.plan.pareto.objectives import FIGURES

    if name in ("hours", "lost_hours"):
        return seconds_words(3600.0 * value)
    if name == "kwh":
        return joules_words(3.6e6 * value)
    if name == "headroom_bytes":
        return bytes_words(value)
    if name == "miss_probability":
        return f"{100 * value:.3g} %"
    return f"{rounded(value, 4)} {FIGURES[name].unit}".strip()


def _write(path: Path, text: str) -> None:
    from outlast.records import replace_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}") from None
