"""The whole page: template, style sheet, script, plotly and the figures' data in one text."""

from __future__ import annotations

import json
import string
from importlib import resources
from typing import TYPE_CHECKING

from outlast.report import palette, sections, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.report.overview import Overview


def render(overviews: Sequence[Overview]) -> str:
    """The report of these runs (at least one) as HTML that loads nothing from anywhere."""
    from plotly.offline import get_plotlyjs

    figures = sections.pictures(overviews)
    names = ", ".join(overview.label for overview in overviews)
    return string.Template(_asset("page.html")).substitute(
        title=text.escape(f"{names} - Outlast report"),
        heading="" if len(overviews) == 1 else f"<h1>{len(overviews)} runs side by side</h1>",
        colours=palette.style_sheet(),
        style=_asset("page.css"),
        head=sections.head(overviews),
        body=sections.body(overviews, figures),
        figures=embed({figure.name: figure.payload() for figure in figures}),
        plotly=get_plotlyjs(),
        script=_asset("page.js"),
    )


def embed(value: object) -> str:
    """`value` as JSON that no content can break out of a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("outlast.report") / name).read_text(encoding="utf-8")
