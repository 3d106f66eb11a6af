"""Runs as pictures: one self-contained HTML file that needs no network.

from outlast.report import write_report
write_report(["runs/quickstart"])                    # runs/quickstart/report.html
write_report(["runs/a", "runs/b"], Path("ab.html"))  # two runs side by side
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["write_report"]


def write_report(runs: Sequence[Path | str], output: Path | None = None) -> Path:
    """Write the report of one run, or of several side by side, and return its path.

    Args:
        runs: Run directories, as `outlast train` leaves them. A directory named twice counts once.
        output: The HTML file to write. Default: ``RUN/report.html`` for a single run,
            ``report.html`` in the current directory for several.

    Raises:
        RunError: When a directory is not a run, none is given, or `output` cannot be written.
    """
    from outlast.records import replace_file
    from outlast.report.overview import load
    from outlast.report.sections import render

    overviews = load(runs)
    if output is None:
        single = len(overviews) == 1
        output = overviews[0].run.path / "report.html" if single else Path("report.html")
    try:
        replace_file(output, render(overviews).encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"the report {output} cannot be written: {error}") from None
    return output
