"""A schedule as a Gantt chart: one SVG picture, and one HTML page around it that loads nothing.

Colours are those of the report (Okabe and Ito 2008, Color Universal Design), for light and dark
ground. Every bar says when one points at it what it is and when.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.extras import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outlast.cluster.tasks.schedule import Row, Schedule


KINDS_SHOWN = ("stage-in", "train", "save", "drain", "move", "evaluate", "prune", "stage-out")
MOST_STEPS = 1000
"""Steps of a resource's use; more are averaged."""
MOST_ROWS = 12
"""Rows of one group of nodes, or of transfers; the rest is said to be left out."""


@dataclass(frozen=True)
class Bar:
    """A stretch in a row.

    Attributes:
        start_seconds: Its start.
        end_seconds: Its end.
        kind: Of its tasks.
        words: What it is called.
        count: How many tasks it stands for.
    """

    start_seconds: float
    end_seconds: float
    kind: str
    words: str
    count: int = 1


@dataclass(frozen=True)
class GanttRow:
    """A labelled row of bars.

    Attributes:
        label: Its name.
        bars: By start; they do not overlap.
        left_out: Rows that are not shown after this one.
    """

    label: str
    bars: tuple[Bar, ...]
    left_out: int = 0


@dataclass(frozen=True)
class Use:
    """Use of a resource over time.

    Attributes:
        label: Its name.
        bytes_per_s: Its bandwidth.
        times: Seconds; steps begin at each.
        layers: By kind, lowest first, bytes per second from each time to the next.
        busy: Share of the whole time that its bandwidth is used for.
    """

    label: str
    bytes_per_s: float
    times: Sequence[float]
    layers: dict[str, list[float]]
    busy: float


def node_rows(schedule: Schedule) -> list[GanttRow]:
    """One row for all nodes that do the same, group by group."""
    by_node: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in schedule.rows:
        for node in row.nodes:
            by_node[row.group, node].append(row)
    found = []
    for group, (name, count) in enumerate(schedule.graph.machine.nodes.items()):
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for node in range(count):
            alike[tuple(row.name for row in by_node[group, node])].append(node)
        lanes = sorted(alike.values())
        for number, nodes in enumerate(lanes[:MOST_ROWS], 1):
            left_out = max(len(lanes) - MOST_ROWS, 0) if number == MOST_ROWS else 0
            word = name.removesuffix("s") if len(nodes) == 1 else name
            bars = _bars(by_node[group, nodes[0]])
            found.append(GanttRow(f"{word} {_ranges(nodes)}", bars, left_out))
    return found


def transfer_rows(schedule: Schedule) -> list[GanttRow]:
    """Rows of activities that need no nodes, by kind; each in a free row of its kind."""
    sorts: dict[str, list[list[Row]]] = {}
    free: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for row in schedule.rows:
        if row.nodes:
            continue
        label = _sort(row)
        lanes, ends = sorts.setdefault(label, []), free[label]
        if ends and ends[0][0] <= row.start_seconds:
            number = heapq.heappop(ends)[1]
            lanes[number].append(row)
        else:
            number = len(lanes)
            lanes.append([row])
        heapq.heappush(ends, (row.end_seconds, number))
    most = max(MOST_ROWS // max(len(sorts), 1), 1)
    found = []
    for label, lanes in sorts.items():
        shown = lanes[: max(most, MOST_ROWS - sum(map(len, sorts.values())) + len(lanes))]
        for number, lane in enumerate(shown):
            left_out = len(lanes) - len(shown) if lane is shown[-1] else 0
            found.append(GanttRow(label if not number else "", _bars(lane), left_out))
    return found


def _sort(row: Row) -> str:
    """Kind of a transfer, with its target if its name states one."""
    if row.kind == "move":
        return "read"
    _, to, place = row.name.partition(" to ")
    return f"{row.kind}{to}{place}" if row.kind == "drain" else row.kind


def uses(schedule: Schedule) -> list[Use]:
    """Load of each resource over time, by kind."""
    changes: dict[int, list[tuple[float, int, float]]] = defaultdict(list)
    for number, activity in enumerate(schedule.graph.activities):
        kind = KINDS_SHOWN.index(activity.kind)
        for start, end, rate in schedule.rate_of(number) if activity.size_bytes else ():
            for resource in activity.via:
                changes[resource] += [(start, kind, rate), (end, kind, -rate)]
    return [
        _use_of(name, capacity, sorted(changes[resource]), schedule.makespan_seconds)
        for resource, (name, capacity) in enumerate(schedule.graph.machine.bytes_per_s.items())
        if changes[resource]
    ]


def _use_of(name: str, capacity: float, changes: list[tuple[float, int, float]], end: float) -> Use:
    kinds = sorted({kind for _, kind, _ in changes})
    now = dict.fromkeys(kinds, 0.0)
    steps = {0.0: dict(now)}
    moved = before = 0.0
    for time, together in itertools.groupby(changes, key=lambda change: change[0]):
        moved += sum(now.values()) * (time - before)
        for _, kind, rate in together:
            # What rounding leaves when all flows have ended is none.
            now[kind] = now[kind] + rate if now[kind] + rate > 1e-9 * capacity else 0.0
        steps[time], before = dict(now), time
    times: Sequence[float] = list(steps)
    layers = {KINDS_SHOWN[kind]: [rates[kind] for rates in steps.values()] for kind in kinds}
    if len(times) > MOST_STEPS:
        layers = {kind: _averaged(times, rates, end) for kind, rates in layers.items()}
        times = [number * end / MOST_STEPS for number in range(MOST_STEPS)]
    return Use(name, capacity, times, layers, moved / (capacity * end) if end else 0.0)


def _averaged(times: Sequence[float], rates: Sequence[float], end: float) -> list[float]:
    """The mean rate in each of `MOST_STEPS` stretches of equal length."""
    width = end / MOST_STEPS
    found = [0.0] * MOST_STEPS
    for number, (start, rate) in enumerate(zip(times, rates, strict=True)):
        until = min(times[number + 1] if number + 1 < len(times) else end, end)
        last = min(int(until / width), MOST_STEPS - 1) if rate else -1
        for step in range(int(start / width), last + 1):
            within = min(until, (step + 1) * width) - max(start, step * width)
            found[step] += rate * max(within, 0.0) / width
    return found


def _bars(rows: Iterable[Row]) -> tuple[Bar, ...]:
    return tuple(Bar(row.start_seconds, row.end_seconds, row.kind, row.name) for row in rows)


def merged(bars: Sequence[Bar], shortest_seconds: float) -> list[Bar]:
    """Bars too short to be seen, made one with neighbours of their kind."""
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found and found[-1].kind == bar.kind else None
        since = -math.inf if last is None else last.end_seconds
        gap, width = bar.start_seconds - since, bar.end_seconds - bar.start_seconds
        if last is not None and max(gap, width) < shortest_seconds:
            count = last.count + 1
            words = f"{count} x {bar.kind}"
            found[-1] = Bar(last.start_seconds, bar.end_seconds, bar.kind, words, count)
        else:
            found.append(bar)
    return found


def _ranges(nodes: Sequence[int]) -> str:
    """``1-4, 7``: nodes counted from 1."""
    parts = []
    for _, run in itertools.groupby(enumerate(nodes), key=lambda item: item[1] - item[0]):
        found = [node + 1 for _, node in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ", ".join(parts) if len(parts) < 4 else f"{', '.join(parts[:3])}, ..."


_WIDTH = 1180
_LEFT, _RIGHT, _TOP = 172, 24, 30
_ROW, _GAP, _USE, _SECTION = 26, 4, 46, 18
_CHARACTER = 6.4
_COLOURS = {
    "stage-in": ("#56b4e9", "#7cc7f0", "#10222e"),
    "train": ("#0072b2", "#2f8fcf", "#ffffff"),
    "save": ("#e69f00", "#e69f00", "#241a00"),
    "drain": ("#d55e00", "#e2702a", "#ffffff"),
    "move": ("#e3d41f", "#f0e442", "#262300"),
    "evaluate": ("#00805c", "#109c75", "#ffffff"),
    "prune": ("#8a929c", "#8a929c", "#14181d"),
    "stage-out": ("#cc79a7", "#d98cb7", "#2a0f1e"),
}
_GROUND = {
    "page": ("#f5f6f8", "#0e1116"),
    "ground": ("#ffffff", "#161a20"),
    "lane": ("#f2f4f6", "#1f252e"),
    "text": ("#1a1e24", "#e5e9ee"),
    "muted": ("#57606b", "#9ba6b2"),
    "grid": ("#e0e4e9", "#2d343e"),
    "accent": ("#005f9e", "#6fb7f2"),
}
_WORDS = {
    "move": "read for an evaluation",
    "drain": "drain (copy to a lower tier)",
    "save": "save (training waits)",
}
_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def gantt_svg(schedule: Schedule, title: str = "") -> str:
    """The picture: rows of nodes, of transfers in the background, and how busy resources are.

    Args:
        schedule: What is shown; thousands of tasks are fine, for those too short to be seen are
            drawn as one.
        title: Said to those who cannot see it.
    """
    scale = _Scale(schedule.makespan_seconds)
    shown: list[dict[str, Any]] = []
    top = _TOP
    for rows in (node_rows(schedule), transfer_rows(schedule)):
        top += _SECTION if shown and rows else 0
        for row in rows:
            left_out = f"and {row.left_out} more lanes" if row.left_out else ""
            bars = [_drawn(bar, scale) for bar in merged(row.bars, 1.0 / scale.per_second)]
            label = _short(row.label, 24)
            shown.append({"top": top, "label": label, "bars": bars, "left_out": left_out})
            top += _ROW + _GAP + (_ROW - 8 if left_out else 0)
    used = uses(schedule)
    top += _SECTION if used else 0
    layers = []
    for use in used:
        layers.append(_layers(use, top, scale, schedule.makespan_seconds))
        top += _USE + 10
    count = math.floor(scale.end / scale.step + 1e-9)
    seconds = [number * scale.step for number in range(count + 1)]
    ticks = [(scale.x(at), f"{at / scale.unit:g}") for at in seconds]
    ticks[-1] = (ticks[-1][0], f"{ticks[-1][1]} {scale.name}")
    bound = schedule.bound_seconds
    early = 0 < bound < schedule.makespan_seconds * (1 - 1e-3)
    return _rendered(
        "gantt.svg.jinja",
        title=title or "Gantt chart of a schedule",
        width=_WIDTH,
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        axis=_TOP,
        bottom=top,
        height=_ROW,
        rows=shown,
        uses=layers,
        ticks=ticks,
        # No line where no schedule can end before the end itself.
        bound=(scale.x(bound), duration(bound)) if early else None,
        colours=_GROUND,
        kinds=_COLOURS,
    )


def _rendered(template: str, **values: Any) -> str:
    # Only who wants a picture waits for it.
    require("plan", "a picture of a schedule", "jinja2")
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=folder, autoescape=True).get_template(template).render(values)


class _Scale:
    """Seconds to the picture's x, and seconds in words."""

    def __init__(self, end_seconds: float) -> None:
        self.end = end_seconds or 1.0
        self.per_second = (_WIDTH - _LEFT - _RIGHT) / self.end
        wanted = self.end / 9
        fitting = [tick for tick in _TICKS if tick >= wanted]
        if wanted < 1:
            power = 10.0 ** math.floor(math.log10(wanted))
            self.step = next(f * power for f in (1, 2, 5, 10) if f * power >= wanted)
        elif fitting:
            self.step = float(fitting[0])
        else:
            self.step = 86400.0 * math.ceil(wanted / 86400.0)
        self.unit, self.name = next(
            (unit, name)
            for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
            if self.step >= unit or (self.step >= unit / 2 and self.end >= 2 * unit) or unit == 1.0
        )

    def x(self, seconds: float) -> float:
        return round(_LEFT + seconds * self.per_second, 2)


def duration(seconds: float) -> str:
    """Seconds for people: ``1 h 02 min``, ``3 min 20 s``, ``4.1 s``."""
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 6000:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60:02d} h"


def _drawn(bar: Bar, scale: _Scale) -> dict[str, Any]:
    left = scale.x(bar.start_seconds)
    width = max(scale.x(bar.end_seconds) - left, 0.8)
    times = f"{duration(bar.start_seconds)} to {duration(bar.end_seconds)}"
    words = bar.words[bar.words.find("->") :].replace("->", "\u2192")
    words = words if bar.kind == "move" else bar.words.partition(" to ")[0]
    numbered = bar.kind in ("train", "save", "evaluate", "drain")
    labels = (words, words.split()[-1] if numbered else "")
    fitting = (label for label in labels if label and len(label) * _CHARACTER + 8 < width)
    return {
        "kind": bar.kind,
        "title": f"{bar.words}: {times}, {duration(bar.end_seconds - bar.start_seconds)}",
        "x": left,
        # A thread of ground between bars that touch.
        "width": width - 1.0 if width > 4 else width,
        "label": next(fitting, ""),
    }


def _layers(use: Use, top: int, scale: _Scale, end: float) -> dict[str, Any]:
    """Layers of steps; each fills what it uses above those below it."""
    layers = []
    # Stretches narrower than the picture shows are drawn as wide as it can show.
    narrow = 0.15 / scale.per_second
    below = [0.0] * len(use.times)
    stretches = list(itertools.pairwise([*use.times, end]))
    for kind, rates in use.layers.items():
        above = [low + rate for low, rate in zip(below, rates, strict=True)]
        path = ""
        for (time, until), low, high in zip(stretches, below, above, strict=True):
            if high > low and until > time:
                shares = (min(rate / use.bytes_per_s, 1.0) for rate in (low, high))
                y0, y1 = (round(top + _USE - _USE * share, 1) for share in shares)
                x0, x1 = scale.x(time), scale.x(max(until, time + narrow))
                path += f"M{x0} {y0}V{y1}H{x1}V{y0}Z"
        if path:
            layers.append((kind, path, f"{use.label}: {_WORDS.get(kind, kind)}"))
        below = above
    return {
        "top": top,
        "height": _USE,
        "label": _short(use.label, 24),
        "words": f"{_amount(use.bytes_per_s)}/s, {use.busy:.0%} used",
        "layers": layers,
    }


def _short(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def _amount(size_bytes: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes / 1e3:.3g} kB"


MOST_TABLE_ROWS = 500
"""Rows of the table; a page with more tells no more."""


def page(schedule: Schedule, *, title: str = "Schedule", unmanaged: Schedule | None = None) -> str:
    """The page.

    Args:
        schedule: The plan.
        title: Its heading.
        unmanaged: What would happen without a plan, to compare with.
    """
    from markupsafe import Markup

    names = list(schedule.graph.machine.nodes)
    sizes = {activity.name: activity.size_bytes for activity in schedule.graph.activities}
    kinds = {activity.kind for activity in schedule.graph.activities}
    count, most = len(schedule.rows), MOST_TABLE_ROWS
    return _rendered(
        "gantt.html.jinja",
        title=title,
        colours={**_GROUND, **_COLOURS},
        kinds=[(kind, _WORDS.get(kind, kind)) for kind in KINDS_SHOWN if kind in kinds],
        cards=_cards(schedule, unmanaged),
        picture=Markup(gantt_svg(schedule, title)),
        shown=f"the first {most} of {count:,}" if count > most else f"{count}",
        duration=duration,
        rows=[
            (
                row,
                _amount(sizes[row.name]) if sizes[row.name] else "",
                f"{len(row.nodes)} of {names[row.group]}" if row.nodes else "",
            )
            for row in schedule.rows[:most]
        ],
    )


def _cards(schedule: Schedule, unmanaged: Schedule | None) -> Sequence[tuple[str, str, str]]:
    shares = {"capped": "copies keep bandwidth caps", "fair": "copies need no caps"}
    longer, best = f"this one is {schedule.gap:.1%} longer", "this one is as short as can be"
    near = longer if schedule.gap >= 5e-4 else best
    found = [
        ("all is done after", duration(schedule.makespan_seconds), shares[schedule.sharing]),
        ("no schedule is shorter than", duration(schedule.bound_seconds), near),
    ]
    training = [row for row in schedule.rows if row.kind == "train"]
    if training:
        worked, end = 0.0, training[0].start_seconds
        for row in training:
            worked += max(row.end_seconds - max(row.start_seconds, end), 0.0)
            end = max(end, row.end_seconds)
        stopped = duration(end - training[0].start_seconds - worked)
        found.append(("training runs for", duration(worked), f"and stands still for {stopped}"))
    if unmanaged is not None:
        fair = unmanaged.makespan_seconds
        more = fair / schedule.makespan_seconds - 1.0
        words = "the same" if abs(more) < 5e-4 else f"{more:+.1%}"
        found.append(("without a plan or caps", duration(fair), f"{words}, shared fairly"))
    return found
