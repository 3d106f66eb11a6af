"""Runs as pictures: an HTML file that needs no network.

from outlast.report import write_report
write_report(["runs/quickstart"])                    # runs/quickstart/report.html
write_report(["runs/a", "runs/b"], Path("ab.html"))  # two runs side by side
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import RunError
from outlast.extras import require

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["write_report"]


def write_report(runs: Sequence[Path | str], output: Path | None = None) -> Path:
    """Write the report of one run, or of several side by side, and return its path.

    A file named by `output`, and that of several runs, holds all that it needs (5 MB). The
    default report of a run loads plotly from ``.report`` beside the run's directory, which the
    reports of all runs there share, and has 0.2 MB.

    Args:
        runs: Run directories, as `outlast train` leaves them. A directory named twice counts once.
        output: The HTML file to write. Default: ``RUN/report.html`` for a single run,
            ``report.html`` in the current directory for several.

    Raises:
        RunError: When a directory is not a run, none is given, or `output` cannot be written.
        MissingExtraError: Without plotly.
    """
    require("report", "a report", "plotly")
    from outlast.records import replace_file
    from outlast.report.overview import load
    from outlast.report.sections import render

    overviews, library = load(runs), ""
    if output is None:
        output = Path("report.html")
        if len(overviews) == 1:
            output = Path(runs[0]) / "report.html"
            library = _shared_library(output.resolve().parent)
    try:
        replace_file(output, render(overviews, library).encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(
            f"the report {output} cannot be written: {error.strerror}; name a file in a folder of "
            "yours (--output)"
        ) from None
    return output


def _shared_library(directory: Path) -> str:
    """Address of plotly for pages in a run's `directory`; empty where there is no room for it."""
    from importlib.metadata import version

    from outlast.records import replace_file

    folder = directory.parent / ".report"
    library = folder / f"plotly-{version('plotly')}.min.js"
    if not library.exists():
        from plotly.offline import get_plotlyjs

        try:
            folder.mkdir(exist_ok=True)
            replace_file(library, get_plotlyjs().encode())
        except OSError:
            return ""
    return f"../{folder.name}/{library.name}"
