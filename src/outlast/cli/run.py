"""``outlast run``: an ordinary script, saved and resumed without a change to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli.train import Processes
from outlast.errors import EXIT_DONE, AutosaveError

SETTINGS = {"allow_interspersed_args": False}
"""All behind the script belongs to the script."""


def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.PY", help="What is to be run.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Of the script.")
    ] = None,
    *,
    every: Annotated[
        str,
        typer.Option(
            metavar="STEPS|TIME|auto",
            help='How often to save: "100" (steps), "10m", "1.5h", or as often as is best.',
        ),
    ] = "auto",
    directory: Annotated[
        Path | None,
        typer.Option(help="Where to save; default: .outlast/ beside the script."),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="Newest versions kept.")] = 2,
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help='Save and end before so long, e.g. "4h"; default: the limit of the Slurm job.',
        ),
    ] = None,
    nproc: Processes = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an earlier run aside and start anew.")
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Resume although script, arguments or environment have changed.",
        ),
    ] = False,
    loop: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:LINE", help="The loop whose iterations are the steps; default: found."
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print what would be saved where; run nothing."),
    ] = False,
) -> None:
    """Run a PyTorch script that can be killed at any time: the same command goes on.

    The script is an ordinary one and need not be changed. Its training loops are found in its
    text, and its state is saved between two steps. It ends with the numbers of an uninterrupted
    `python SCRIPT.PY`. It works alone, with --nproc, under torchrun (-m outlast run ...) and under
    srun. SIGTERM, SIGUSR1, Ctrl-C and the time limit end it at the next step, saved. Exit codes:
    those of the script, 2 wrong input, 3 stopped and to be continued.
    """
    from outlast.cli.run_start import Asked, run_script

    _check_script(script)
    asked = Asked(
        script=script,
        arguments=tuple(arguments or ()),
        every=every,
        directory=directory,
        keep=keep,
        time_limit=time_limit,
        fresh=fresh,
        accept_changes=accept_changes,
        loop=loop,
    )
    if explain:
        from outlast.cli.run_explain import explain_program

        explain_program(asked)
        raise typer.Exit(EXIT_DONE)
    raise typer.Exit(run_script(asked, nproc))


def _check_script(path: Path) -> None:
    """Refuse what is no file.

    Raises:
        AutosaveError: With what it is.
    """
    if path.is_dir():
        raise AutosaveError(f"{path} is a folder; name the script in it that is to be run")
    if not path.exists():
        raise AutosaveError(f"there is no script {path}; give the path of a Python file")
