"""A schedule as a Gantt chart: one SVG picture, and one HTML page around it that loads nothing.

Colours are those of the report (Okabe and Ito 2008, Color Universal Design), for light and dark
ground. Every bar says when one points at it what it is and when.
"""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

from outlast.cluster.tasks.lanes import (
    KINDS_SHOWN,
    Bar,
    Lane,
    Use,
    merged,
    node_lanes,
    transfer_lanes,
    uses,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.tasks.schedule import Schedule

_WIDTH = 1180
_LEFT, _RIGHT, _TOP = 172, 24, 30
_LANE, _GAP, _USE, _SECTION = 26, 4, 46, 18
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
    """The picture: lanes of nodes, of transfers in the background, and how busy resources are.

    Args:
        schedule: What is shown; thousands of tasks are fine, for those too short to be seen are
            drawn as one.
        title: Said to those who cannot see it.
    """
    scale = _Scale(schedule.makespan_seconds)
    parts: list[str] = []
    top = _TOP
    for lanes in (node_lanes(schedule), transfer_lanes(schedule)):
        top += _SECTION if parts and lanes else 0
        for lane in lanes:
            parts.append(_lane(lane, top, scale))
            top += _LANE + _GAP
            if lane.left_out:
                words = f"and {lane.left_out} more lanes"
                parts.append(_text(_LEFT - 10, top + 11, words, "end muted small"))
                top += _LANE - 8
    shown = uses(schedule)
    top += _SECTION if shown else 0
    for use in shown:
        parts.append(_use(use, top, scale, schedule.makespan_seconds))
        top += _USE + 10
    height = top + 8
    axis = _axis(scale, top)
    bound = _bound(schedule, scale, top)
    words = html.escape(title or "Gantt chart of a schedule", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img" aria-label="{words}"><style>{_style()}</style>'
        f"{axis}{''.join(parts)}{bound}</svg>"
    )


def legend(schedule: Schedule) -> str:
    """The kinds that a schedule has, as HTML."""
    kinds = {activity.kind for activity in schedule.graph.activities}
    return "".join(
        f'<span class="key"><i class="{kind}"></i>{_WORDS.get(kind, kind)}</span>'
        for kind in KINDS_SHOWN
        if kind in kinds
    )


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


def _lane(lane: Lane, top: int, scale: _Scale) -> str:
    parts = [
        _ground(top, _LANE),
        _text(_LEFT - 10, top + 17, _short(lane.label, 24), "end"),
    ]
    parts += [_bar(bar, top, scale) for bar in merged(lane.bars, 1.0 / scale.per_second)]
    return "".join(parts)


def _ground(top: int, height: int) -> str:
    width = _WIDTH - _LEFT - _RIGHT
    return f'<rect class="lane" x="{_LEFT}" y="{top}" width="{width}" height="{height}"/>'


def _bar(bar: Bar, top: int, scale: _Scale) -> str:
    left = scale.x(bar.start_seconds)
    width = max(scale.x(bar.end_seconds) - left, 0.8)
    times = (
        f"{duration(bar.start_seconds)} to {duration(bar.end_seconds)}, "
        f"{duration(bar.end_seconds - bar.start_seconds)}"
    )
    # A thread of ground between bars that touch.
    drawn = width - 1.0 if width > 4 else width
    found = (
        f'<g class="{bar.kind}"><title>{html.escape(bar.words)}: {times}</title>'
        f'<rect x="{left}" y="{top + 2}" width="{drawn:.2f}" height="{_LANE - 4}" rx="2"/>'
    )
    words = bar.words[bar.words.find("->") :].replace("->", "\u2192")
    words = words if bar.kind == "move" else bar.words.partition(" to ")[0]
    numbered = bar.kind in ("train", "save", "evaluate", "drain")
    for label in (words, words.split()[-1] if numbered else ""):
        if label and len(label) * _CHARACTER + 8 < width:
            found += _text(left + drawn / 2, top + 17, label, "middle on small")
            break
    return found + "</g>"


def _use(use: Use, top: int, scale: _Scale, end: float) -> str:
    """Layers of steps; each fills what it uses above those below it."""
    bottom = top + _USE
    parts = [
        _ground(top, _USE),
        _text(_LEFT - 10, top + 18, _short(use.label, 24), "end"),
        _text(
            _LEFT - 10,
            top + 34,
            f"{_rate(use.bytes_per_s)}, {use.busy:.0%} used",
            "end muted small",
        ),
    ]
    below = [0.0] * len(use.times)
    for kind, layer in zip(use.kinds, use.layers, strict=True):
        above = [low + rate for low, rate in zip(below, layer, strict=True)]
        path = _steps(use.times, below, above, use.bytes_per_s, (scale, bottom, end))
        if path:
            parts.append(
                f'<path class="{kind}" d="{path}"><title>{html.escape(use.label)}: '
                f"{_WORDS.get(kind, kind)}</title></path>"
            )
        below = above
    parts.append(f'<line class="full" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top}" y2="{top}"/>')
    return "".join(parts)


def _steps(
    times: Sequence[float],
    below: Sequence[float],
    above: Sequence[float],
    capacity: float,
    place: tuple[_Scale, int, float],
) -> str:
    scale, bottom, end = place
    parts = []
    # Stretches narrower than the picture shows are drawn as wide as it can show.
    narrow = 0.15 / scale.per_second
    for number, time in enumerate(times):
        until = times[number + 1] if number + 1 < len(times) else end
        if above[number] <= below[number] or until <= time:
            continue
        y0 = round(bottom - _USE * min(below[number] / capacity, 1.0), 1)
        y1 = round(bottom - _USE * min(above[number] / capacity, 1.0), 1)
        x0, x1 = scale.x(time), scale.x(max(until, time + narrow))
        parts.append(f"M{x0} {y0}V{y1}H{x1}V{y0}Z")
    return "".join(parts)


def _axis(scale: _Scale, bottom: int) -> str:
    parts = []
    count = math.floor(scale.end / scale.step + 1e-9)
    for number in range(count + 1):
        seconds = number * scale.step
        x = scale.x(seconds)
        last = f" {scale.name}" if number == count else ""
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{bottom}"/>')
        parts.append(_text(x, _TOP - 12, f"{seconds / scale.unit:g}{last}", "middle muted small"))
    return "".join(parts)


def _bound(schedule: Schedule, scale: _Scale, bottom: int) -> str:
    """A line before which no schedule can end, where that is not the end itself."""
    if not 0 < schedule.bound_seconds < schedule.makespan_seconds * (1 - 1e-3):
        return ""
    x = scale.x(schedule.bound_seconds)
    return (
        f"<g><title>no schedule ends before {duration(schedule.bound_seconds)}</title>"
        f'<line class="bound" x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{bottom}"/></g>'
    )


def _text(x: float, y: float, words: str, classes: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{classes}">{html.escape(words)}</text>'


def _short(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def _rate(bytes_per_s: float) -> str:
    for unit, name in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_s >= unit:
            return f"{bytes_per_s / unit:.3g} {name}"
    return f"{bytes_per_s / 1e3:.3g} kB/s"


def style_of_kinds() -> str:
    """CSS that defines every colour, for light and dark pages."""
    pairs = {**_GROUND, **{kind: colour[:2] for kind, colour in _COLOURS.items()}}
    light, dark = ("".join(f"--{n}:{pair[i]};" for n, pair in pairs.items()) for i in (0, 1))
    return (
        f":root{{color-scheme:light;{light}}}"
        "@media screen and (prefers-color-scheme:dark){"
        f':root:not([data-theme="light"]){{color-scheme:dark;{dark}}}}}'
        f'@media screen{{:root[data-theme="dark"]{{color-scheme:dark;{dark}}}}}'
    )


def _style() -> str:
    """CSS of the picture; without a page around it, its colours are those of light ground."""
    kinds = "".join(
        f"g.{kind} rect,path.{kind}{{fill:var(--{kind},{light})}}g.{kind} text.on{{fill:{label}}}"
        for kind, (light, _, label) in _COLOURS.items()
    )
    text, muted, lane, grid, accent = (
        f"var(--{name},{_GROUND[name][0]})" for name in ("text", "muted", "lane", "grid", "accent")
    )
    return (
        "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;"
        f"fill:{text}}}.small{{font-size:11.5px}}.end{{text-anchor:end}}"
        f".middle{{text-anchor:middle}}text.muted{{fill:{muted}}}text.on{{pointer-events:none}}"
        f".lane{{fill:{lane}}}.grid{{stroke:{grid}}}"
        f".full{{stroke:{muted};stroke-dasharray:3 3;stroke-width:.8}}"
        f".bound{{stroke:{accent};stroke-dasharray:6 4;stroke-width:1.5}}{kinds}"
    )
