"""``outlast doctor``: what this machine can do for a training run, and what to install or fix."""

from pathlib import Path
from typing import Annotated

import typer

from outlast.errors import EXIT_CRASHED


def doctor(
    path: Annotated[
        Path, typer.Option(help="Directory whose storage is tested: where checkpoints will go.")
    ] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Check this machine for training and say what to install or fix.

    Really runs a two-process all-reduce, small matrix products and fsyncs; changes nothing.

    Exit code 0: training works here; 1: an essential part is broken.
    """
    from outlast.cli.diagnosis import diagnose

    if not diagnose(path, as_json=json):
        raise typer.Exit(EXIT_CRASHED)
