"""The frontier as one SVG picture that needs nothing else: seconds against kilojoules.

Colours are those of the report (Okabe and Ito 2008), darker ones on light ground and the other way
round, so that the picture can stand in a page of either kind.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from outlast.energy.frontier.plan import publish_text
from outlast.energy.frontier.stragglers import Frontier
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 56, 50
_SERIES = (
    ("#0072b2", "#3d9fdd"),
    ("#d55e00", "#ee7a2a"),
    ("#009e73", "#19b98c"),
    ("#cc79a7", "#d98cb7"),
    ("#e69f00", "#e69f00"),
)
_STYLE = """
svg{background:#fff;color:#1a1e24;font:13px system-ui,sans-serif}
text{fill:currentColor}.small{font-size:12px}.grid{stroke:#e9ecf0}.line{fill:none;stroke-width:2}
.panel{fill:#fff}
.bound{stroke:#57606b;stroke-dasharray:5 4}.muted{stroke:#8a929c;stroke-dasharray:1 4}
"""
_DARK = """
svg{background:#161a20;color:#e5e9ee}.grid{stroke:#262c35}.panel{fill:#161a20}.bound{stroke:#9ba6b2}
"""
_WORDS = {
    "none": "one clock for all devices",
    "per_stage": "one clock per device",
    "per_phase": "one clock per device and phase",
    "free": "a clock for every operation",
}

Point = tuple[float, float]


def frontier_svg(frontiers: Mapping[str, Frontier] | Frontier, title: str = "") -> str:
    """A picture of one frontier, or of those of several budgets of switches.

    Args:
        frontiers: By their name in the legend; names such as "per_stage" are put in words.
        title: What was planned, e.g. the model and the device.

    Returns:
        An SVG document. It shows the plans, the energy of top clocks, and the bound below which no
        plan is.

    Raises:
        EnergyError: When there is no plan to show.
    """
    named = _named(frontiers)
    plans = [plan for frontier in named.values() for plan in frontier.plans]
    if not plans:
        raise EnergyError("there is no plan to draw: give a frontier with one plan or more")
    area = _Area(
        [plan.deadline_seconds for plan in plans],
        [
            joules / 1e3
            for plan in plans
            for joules in (plan.joules, plan.bound_joules, plan.fastest_joules)
        ],
    )
    longest = max(named.values(), key=lambda frontier: len(frontier.plans)).plans
    top = [(plan.deadline_seconds, plan.fastest_joules / 1e3) for plan in longest]
    bound = [(plan.deadline_seconds, plan.bound_joules / 1e3) for plan in longest]
    parts = [area.axes(), area.line(top, "line muted"), area.line(bound, "line bound")]
    legend = [("top clocks", "line muted"), ("no plan is below", "line bound")]
    for number, (name, frontier) in enumerate(named.items()):
        style = f"line s{number % len(_SERIES)}"
        shown = [(plan.deadline_seconds, plan.joules / 1e3) for plan in frontier.plans]
        notes = [
            f"{plan.deadline_seconds:.4g} s: {plan.joules / 1e3:.4g} kJ, saves {plan.saving:.1%}, "
            f"at most {plan.gap:.2%} above the bound, {plan.switches} changes of clock"
            for plan in frontier.plans
        ]
        parts += [area.line(shown, style), area.dots(shown, notes, style)]
        legend.append((_WORDS.get(name, name), style))
    kind = ", ".join(sorted({plan.kind for plan in plans}))
    heading = escape(title or "Time-energy frontier")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{heading}">'
        f"<style>{_STYLE}{_series_style(0)}"
        f"@media (prefers-color-scheme:dark){{{_DARK}{_series_style(1)}}}</style>"
        f'<text x="{_LEFT}" y="22" font-weight="600">{heading}</text>'
        f'<text x="{_LEFT}" y="40" class="small">predicted from a {kind} profile</text>'
        f"{''.join(parts)}{_legend(legend)}</svg>\n"
    )


def save_picture(
    frontiers: Mapping[str, Frontier] | Frontier, path: Path | str, title: str = ""
) -> None:
    """Write `frontier_svg` to a file that ends with .svg or .html.

    Raises:
        EnergyError: For another ending, for nothing to draw, or when the place cannot be written.
    """
    path = Path(path)
    picture = frontier_svg(frontiers, title)
    if path.suffix.lower() == ".html":
        picture = (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            f"<title>{escape(title or 'Time-energy frontier')}</title>"
            f"<body>{picture}</body></html>\n"
        )
    elif path.suffix.lower() != ".svg":
        raise EnergyError(f"{path} ends with neither .svg nor .html: choose one of them")
    publish_text(path, picture)


class _Area:
    """The plot's rectangle and its scales.

    Args:
        seconds: All values on the horizontal axis.
        kilojoules: All values on the vertical axis.
    """

    def __init__(self, seconds: Sequence[float], kilojoules: Sequence[float]) -> None:
        self._across, self._up = _ticks(seconds), _ticks(kilojoules)

    def at(self, point: Point) -> Point:
        across = (point[0] - self._across[0]) / (self._across[-1] - self._across[0])
        up = (point[1] - self._up[0]) / (self._up[-1] - self._up[0])
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    def axes(self) -> str:
        parts = []
        low = self._across[0], self._up[0]
        for tick in self._across:
            x, y = self.at((tick, low[1]))
            parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{y:.1f}"/>')
            parts.append(f'<text class="small" x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">')
            parts.append(f"{tick:g}</text>")
        for tick in self._up:
            x, y = self.at((low[0], tick))
            parts.append(f'<path class="grid" d="M{x:.1f} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            parts.append(f'<text class="small" x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">')
            parts.append(f"{tick:g}</text>")
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        parts.append(
            f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">'
            "time of a step in s</text>"
            f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">'
            "energy of a step in kJ</text>"
        )
        return "".join(parts)

    def line(self, points: Sequence[Point], style: str) -> str:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, points))
        return f'<polyline class="{style}" points="{places}"/>'

    def dots(self, points: Sequence[Point], notes: Sequence[str], style: str) -> str:
        return "".join(
            f'<circle class="{style.removeprefix("line ")}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>{escape(note)}</title></circle>"
            for (x, y), note in zip(map(self.at, points), notes, strict=True)
        )


def _named(frontiers: Mapping[str, Frontier] | Frontier) -> Mapping[str, Frontier]:
    if not isinstance(frontiers, Frontier):
        return frontiers
    return {frontiers.plans[0].budget if frontiers.plans else "free": frontiers}


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers that enclose all values, 5 to 12 of them."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    raw = span / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    if first == last:
        first, last = first - 1, last + 1
    return [round(step * number, 12) for number in range(first, last + 1)]


def _series_style(ground: int) -> str:
    return "".join(
        f"polyline.s{number}{{stroke:{colours[ground]}}}circle.s{number}{{fill:{colours[ground]}}}"
        for number, colours in enumerate(_SERIES)
    )


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    x = _WIDTH - _RIGHT - 230
    parts = [
        f'<rect class="panel" x="{x - 8}" y="{_TOP}" width="238" height="{18 * len(entries) + 6}"/>'
    ]
    for number, (words, style) in enumerate(entries):
        y = _TOP + 14 + 18 * number
        parts.append(f'<polyline class="{style}" points="{x},{y - 4} {x + 24},{y - 4}"/>')
        parts.append(f'<text class="small" x="{x + 32}" y="{y}">{escape(words)}</text>')
    return "".join(parts)
