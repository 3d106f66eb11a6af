"""What all benchmarks share: bars, the machine, the table and the JSON file."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outlast.hardware import this_machine


@dataclass(frozen=True)
class Bar:
    """One figure and what it must reach.

    Attributes:
        figure: What was found; None where it could not be had (`peer` then says why).
        bar: What it must reach, in words, e.g. ">= 0.97".
        holds: Whether it does.
        peer: What it is compared with.
        kind: measured, simulated or predicted.
    """

    name: str
    figure: float | None
    unit: str
    bar: str
    holds: bool
    peer: str
    kind: str = "measured"


def at_least(name: str, figure: float, unit: str, limit: float, peer: str) -> Bar:
    """A figure that must not be below `limit`."""
    return Bar(name, round(figure, 4), unit, f">= {limit:g}", figure >= limit, peer)


def at_most(name: str, figure: float, unit: str, limit: float, peer: str) -> Bar:
    """A figure that must not be above `limit`."""
    return Bar(name, round(figure, 7), unit, f"<= {limit:g}", figure <= limit, peer)


def median(values: list[float]) -> float:
    """The median, for repeats on a noisy machine."""
    return statistics.median(values)


def arguments(description: str) -> argparse.Namespace:
    """``--quick`` and ``--json FILE``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="under a minute on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    return parser.parse_args()


def run_parts(area: str, description: str, parts: dict[str, str]) -> None:
    """Run the parts of an area that are asked for, and publish their bars.

    Args:
        area: Of the benchmark.
        description: Its first line is the command's.
        parts: Name of a part to ``MODULE.FUNCTION``, which gives its bars for `quick` or not; the
            module's imports and needs are its own.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small cases only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    parser.add_argument("--only", nargs="*", choices=parts, default=[*parts], help="these parts")
    options = parser.parse_args()
    bars: list[Bar] = []
    for part in options.only:
        module, _, function = parts[part].partition(".")
        try:
            bars += getattr(importlib.import_module(module), function)(options.quick)
        except ModuleNotFoundError as error:
            bars.append(Bar(part, None, "", "", False, f"cannot run here: {error}"))
    publish(area, bars, options.json, part=set(options.only) != set(parts))


def publish(area: str, bars: list[Bar], file: Path | None, *, part: bool = False) -> None:
    """Print the table of `bars` and write them to `file`.

    Args:
        area: Of the benchmark.
        bars: Its rows.
        file: JSON; None to print only.
        part: Only some of the area's rows were run: the others of an existing file stay.
    """
    if part and file is not None and file.exists():
        new = {each.name for each in bars}
        known = [Bar(**row) for row in json.loads(file.read_text())["bars"]]
        bars = [*(each for each in known if each.name not in new), *bars]
    machine = this_machine()
    table = Table(title=f"{area} on {machine.summary()}", title_justify="left")
    for column in ("figure", "value", "unit", "bar", "holds", "against", "kind"):
        table.add_column(column)
    for each in bars:
        value = "unavailable" if each.figure is None else f"{each.figure:g}"
        holds = "yes" if each.holds else "NO"
        table.add_row(each.name, value, each.unit, each.bar, holds, each.peer, each.kind)
    Console(width=150).print(table)
    if file is not None:
        content = {"machine": machine.to_dict(), "bars": [asdict(each) for each in bars]}
        file.write_text(json.dumps(content, indent=1, default=lambda value: value.item()) + "\n")
