"""``outlast report``: runs as one self-contained HTML page."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="run directories; several are laid side by side")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="HTML file to write; default: RUN/report.html, or ./report.html for several runs",
        ),
    ] = None,
) -> None:
    """Show runs as pictures: one HTML file that needs no network.

    Loss, throughput, step times, where the time went, events, attempts, warnings, the model's
    sample and the job. Works while the run goes on and after it was killed.
    """
    from outlast.report import write_report

    typer.echo(write_report(runs, output))
