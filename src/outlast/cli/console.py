"""Figures, tables, progress and JSON as the commands show them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from outlast.hardware.figure import Unavailable
    from outlast.plan.estimate import Interval


LINE_SECONDS = 10.0
"""Without a terminal, how long until the next line about progress."""


FILE_CHARACTERS = 240
"""Width of a table in a file or pipe."""


MOST_ROWS = 1000
"""Of a table: more take minutes, and nobody reads them."""


_GAP = 2


def size_text(size: int | None) -> str:
    """Bytes for people: ``1.23 GB``; a dash for None."""
    if size is None:
        return "-"
    if size < 1000:
        return f"{size} B"
    exponent = min(int(math.log10(size) / 3), 5)
    value = size / 1000**exponent
    # 999.6 KB would be printed as 1000 KB.
    if value >= 999.5 and exponent < 5:
        exponent, value = exponent + 1, 1.0
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {' KMGTP'[exponent]}B"


def ratio_text(ratio: float | None) -> str:
    """Ratio of two sizes as text: ``2.3x``; a dash for None."""
    if ratio is None:
        return "-"
    return (
        f"{ratio:.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x" if ratio >= 9.95 else f"{ratio:.2f}x"
    )


def count_text(count: int, noun: str) -> str:
    """A number with its noun: ``1 version``, ``1,200 versions``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` with escapes for what would do something to a terminal, or no terminal can take."""
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)


def output() -> Console:
    """Console for tables: as wide as the window, or as every row needs where there is none.

    Names and texts may come from anyone's files: what is not printable is shown as escapes.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Output(Console):
        def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
            for segment in super().render(*arguments, **options):
                text = segment.text if segment.control else visible(segment.text)
                yield Segment(text, segment.style, segment.control)

    console = Output(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_CHARACTERS
    return console


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        name: Its heading.
        number: Whether it holds numbers, which are aligned right.
        optional: In a narrow window, columns with large figures are left out first; 0: it stays.
        least: To how many characters it may be squeezed; 0: it is never broken.
    """

    name: str
    number: bool = True
    optional: int = 0
    least: int = 0


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str = ""
) -> None:
    """Print a table that fits the window.

    Where it is too wide, optional columns with one and the same cell become a line above it; then
    optional columns are left out, which is said.
    """
    from rich.markup import escape

    rows, unshown = rows[:MOST_ROWS], len(rows) - MOST_ROWS
    widths = [
        max([len(column.name), *(len(row[number]) for row in rows)])
        for number, column in enumerate(columns)
    ]
    needed = [min(w, c.least) if c.least else w for w, c in zip(widths, columns, strict=True)]
    shown = set(range(len(columns)))
    alike: list[int] = []
    left_out: list[int] = []
    cells = [{row[number] for row in rows} - {"-"} for number in range(len(columns))]
    if sum(widths) + _GAP * len(shown) > console.width and len(rows) > 1:
        alike = [
            number
            for number, column in enumerate(columns)
            if column.optional and len(cells[number]) <= 1
        ]
        shown.difference_update(alike)
    for number in sorted(shown, key=lambda number: -columns[number].optional):
        too_wide = sum(needed[name] for name in shown) + _GAP * len(shown) > console.width
        if too_wide and columns[number].optional:
            shown.remove(number)
            left_out.append(number)
    if title:
        console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
    common = [f"{columns[number].name} {''.join(cells[number])}" for number in alike]
    common = [text for number, text in zip(alike, common, strict=True) if cells[number]]
    if common:
        console.print(f"all of them: {escape(', '.join(common))}", style="dim")
    excess = sum(widths[name] for name in shown) + _GAP * len(shown) - console.width
    for number in sorted(shown, key=lambda number: -columns[number].optional):
        squeezed = min(max(excess, 0), widths[number] - needed[number])
        widths[number] -= squeezed
        excess -= squeezed
    console.print(_table(columns, rows, {name: widths[name] for name in sorted(shown)}))
    if unshown > 0:
        console.print(f"and {unshown:,} more: --json has all")
    if left_out:
        names = ", ".join(columns[number].name for number in sorted(left_out))
        text = f"a wider window or --json also shows: {names}"
        console.print(escape(text), style="dim")


def _table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], widths: dict[int, int]
) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for number, width in widths.items():
        table.add_column(
            columns[number].name,
            justify="right" if columns[number].number else "left",
            width=width,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(escape(row[number]) for number in widths))
    return table


def print_facts(console: Console, title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Print names and what they are."""
    from rich.markup import escape

    console.print(f"[bold]{escape(title)}[/bold]")
    console.print(facts_table(facts))


def facts_table(rows: Sequence[Sequence[str | Text]]) -> Table:
    """Names, in some tables a word beside each (a state, a default), and what they are.

    Args:
        rows: Of two or of three cells each; what is text is shown as it is.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    if rows and len(rows[0]) > 2:
        table.add_column(style="green", max_width=16, overflow="fold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def print_json(document: Any, *, line: bool = False) -> None:
    """Print dataclasses, dictionaries and lists as one JSON document; see `json_text`.

    Args:
        document: To be printed.
        line: On one line, for a command that prints several.
    """
    print(json_text(document, line=line), flush=line)


def json_text(document: Any, *, line: bool = False) -> str:
    """Dataclasses, dictionaries and lists as JSON.

    What is not known says why (`Unavailable`), and a number that is not finite is null.
    """
    return json.dumps(_plain(document), indent=None if line else 2, allow_nan=False)


@contextlib.contextmanager
def stdout_kept(kept: bool) -> Iterator[None]:
    """Within it, what this process and those that it starts print goes to stderr, if wanted.

    So that a JSON document is all that is on stdout in the end.
    """
    if not kept:
        yield
        return
    sys.stdout.flush()
    try:
        own = os.dup(1)
    except OSError:
        # It was closed by who started this.
        own = None
    if own is not None:
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        if own is not None:
            os.dup2(own, 1)
            os.close(own)


def _plain(value: Any) -> Any:
    from outlast.hardware.figure import Unavailable

    if isinstance(value, Unavailable):
        return {"unavailable": value.reason, "remedy": value.remedy}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, PurePath):
        return str(value)
    return value


@contextlib.contextmanager
def bytes_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Shows bytes done and in all on stderr: a bar on a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        begun = last = time.monotonic()

        def show(done_bytes: int, total_bytes: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= LINE_SECONDS:
                last = now
                share = done_bytes / total_bytes if total_bytes else 1.0
                console.print(
                    f"{title}: {size_text(done_bytes)} of {size_text(total_bytes)} ({share:.0%}) "
                    f"after {now - begun:.0f} s",
                    soft_wrap=True,
                    markup=False,
                )

        yield show
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[figures]}", justify="right"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=None, figures="")

        def show(done_bytes: int, total_bytes: int) -> None:
            figures = f"{size_text(done_bytes)} of {size_text(total_bytes)}"
            bar.update(task, completed=done_bytes, total=total_bytes, figures=figures)

        yield show


GIB = 2.0**30


_TIMES = ((1.5 * 86_400.0 * 4, "d", 86_400.0), (5400.0, "h", 3600.0), (90.0, "min", 60.0))


_SMALL_TIMES = ((1.0, "s", 1.0), (1e-3, "ms", 1e-3), (0.0, "us", 1e-6))


_ENERGIES = ((2e12 * 3.6, "GWh", 3.6e12), (2e6 * 3.6e3, "MWh", 3.6e9), (3.6e5, "kWh", 3.6e6))


_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0))


_BAR = 8


def rounded(value: float, digits: int = 3) -> str:
    """A number with so many digits, and no exponent where a person would write none."""
    if value == 0.0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude <= 12:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - magnitude, 0)}f}"


def count_words(count: float) -> str:
    """A large number: ``8.03 B``."""
    unit, factor = next(item for item in _COUNTS if count >= item[1] or item[1] == 1.0)
    if not unit and count == int(count):
        return f"{int(count)}"
    return f"{rounded(count / factor, 4)} {unit}".strip()


def unit_of_seconds(seconds: float) -> tuple[str, float]:
    """The unit in which a time reads well, and its seconds."""
    ladder = (*_TIMES, *_SMALL_TIMES)
    return next((unit, factor) for least, unit, factor in ladder if abs(seconds) >= least)


def seconds_words(seconds: float) -> str:
    """A time: ``48.4 h``."""
    if seconds == 0.0:
        return "0 s"
    unit, factor = unit_of_seconds(seconds)
    return f"{rounded(seconds / factor)} {unit}"


def seconds_range(found: Interval) -> str:
    """A time with its interval: ``48.4 h (34.0 to 68.9)``."""
    unit, factor = unit_of_seconds(found.middle)
    return _range(found, factor, unit)


def joules_words(joules: float) -> str:
    """Energy: ``2,785 kWh``."""
    unit, factor = unit_of_joules(joules)
    return f"{rounded(joules / factor, 4)} {unit}"


def joules_range(found: Interval | Unavailable) -> str:
    """Energy with its interval, or why it is not known."""
    from outlast.hardware.figure import Unavailable

    if isinstance(found, Unavailable):
        return str(found)
    unit, factor = unit_of_joules(found.middle)
    return _range(found, factor, unit)


def range_words(found: Interval | Unavailable, unit: str, factor: float = 1.0) -> str:
    """A figure in a unit of so many of its own, with its interval, or why it is not known."""
    from outlast.hardware.figure import Unavailable

    return str(found) if isinstance(found, Unavailable) else _range(found, factor, unit)


def bytes_words(size: float) -> str:
    """Memory of a device, as its users count: ``42.1 GiB``."""
    return (
        f"{rounded(size / GIB)} GiB" if abs(size) >= 0.1 * GIB else f"{rounded(size / 2**20)} MiB"
    )


def share_words(share: float) -> str:
    """``97.7 %``."""
    digits = ".3g" if abs(share) < 0.995 or share >= 1.0 else ".2f"
    return f"{100.0 * share:{digits}} %"


def bar(share: float, blocks: bool = True) -> str:
    """Bar of a device's memory: full is the whole bar, an overflow ends it with ``>``."""
    if not blocks:
        return ""
    count = min(round(_BAR * share), _BAR)
    tail = ">" if share > 1.0 else ""
    return (
        "\N{BLACK VERTICAL RECTANGLE}" * count
        + "\N{WHITE VERTICAL RECTANGLE}" * (_BAR - count)
        + tail
    )


def unit_of_joules(joules: float) -> tuple[str, float]:
    """The unit in which an energy reads well, and its joules."""
    found = ((unit, factor) for least, unit, factor in _ENERGIES if joules >= least)
    return next(found, ("J", 1.0))


def _range(found: Interval, factor: float, unit: str) -> str:
    low, middle, high = (rounded(item / factor) for item in (found.low, found.middle, found.high))
    between = "" if low == high else f" ({low} to {high})"
    return " ".join(filter(None, (middle, unit))) + between
