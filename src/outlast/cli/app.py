"""The command line: ``outlast train``, ``init``, ``export``, ``report``, ``doctor`` and others.

Groups of commands live in modules of their own, whose heavy imports happen when a command is
called, so ``outlast --help`` answers at once.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from outlast.cli.autosave import autosave
from outlast.cli.ckpt import ckpt
from outlast.cli.cluster import cluster
from outlast.cli.coding import coding
from outlast.cli.doctor import doctor
from outlast.cli.drill import drill
from outlast.cli.energy import energy
from outlast.cli.plan import plan
from outlast.cli.run import SETTINGS as RUN_SETTINGS
from outlast.cli.run import run
from outlast.cli.runs import convert, export, report, resize
from outlast.cli.submit import submit
from outlast.cli.train import init, train
from outlast.cli.watch import watch
from outlast.errors import EXIT_INTERRUPTED
from outlast.version import __version__


class Commands(typer.core.TyperGroup):
    """All commands; Ctrl-C ends one that does not handle it with the exit code of a shell."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Otherwise Typer would say "Aborted." and end with 1, as after an error.
            typer.echo("outlast: interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    name="outlast",
    cls=Commands,
    help="Make a PyTorch training run finish: through failures, on shared clusters, measured.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_RUN, _LOOK, _PLAN, _CLUSTER, _TEST = "Run", "Look", "Plan", "Cluster", "Test"
app.command(rich_help_panel=_RUN)(train)
app.command(context_settings=RUN_SETTINGS, rich_help_panel=_RUN)(run)
app.command(rich_help_panel=_RUN)(init)
app.command(rich_help_panel=_RUN)(resize)
app.command(rich_help_panel=_RUN)(export)
app.command(rich_help_panel=_RUN)(convert)
app.command(rich_help_panel=_LOOK)(watch)
app.command(rich_help_panel=_LOOK)(report)
app.add_typer(ckpt, rich_help_panel=_LOOK)
app.add_typer(energy, rich_help_panel=_LOOK)
app.add_typer(plan, rich_help_panel=_PLAN)
app.add_typer(coding, rich_help_panel=_PLAN)
app.command(rich_help_panel=_CLUSTER)(submit)
app.add_typer(cluster, rich_help_panel=_CLUSTER)
app.command(rich_help_panel=_TEST)(doctor)
app.command(rich_help_panel=_TEST)(drill)
app.add_typer(autosave, rich_help_panel=_TEST)


def _flow(group: typer.Typer) -> None:
    """Let the help's paragraphs wrap to the terminal, and not where the docstrings do."""
    for command in group.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for found in group.registered_groups:
        if found.typer_instance is not None:
            _flow(found.typer_instance)


_flow(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outlast {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version)
    ] = False,
) -> None:
    """Options of the program itself."""
