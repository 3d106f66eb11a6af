"""``outlast run``: an ordinary script, saved and resumed without a change to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.console import output
from outlast.cli.train import Processes
from outlast.errors import EXIT_DONE, AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.autosave.cost import MeasuredState
    from outlast.autosave.program import Rewritten, Site
    from outlast.autosave.run import RunOptions


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
        Path | None, typer.Option(help="Where to save; default: .outlast/ beside the script.")
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
        bool, typer.Option("--explain", help="Print what would be saved where; run nothing.")
    ] = False,
) -> None:
    """Run a PyTorch script that can be killed at any time: the same command continues.

    The script is an ordinary one and need not be changed. Its training loops are found in its
    text, and its state is saved between two steps. It ends with the numbers of an uninterrupted
    `python SCRIPT.PY`. It works alone, with --nproc, under torchrun (-m outlast run ...) and under
    srun. SIGTERM, SIGUSR1, Ctrl-C and the time limit end it at the next step, saved. Exit codes:
    those of the script, 2 wrong input, 3 stopped and to be continued.
    """
    from outlast import cluster
    from outlast.autosave.run import RunOptions, run_script

    # Refuse what is no file.
    if script.is_dir():
        raise AutosaveError(f"{script} is a folder; name the script in it that is to be run")
    if not script.exists():
        raise AutosaveError(f"there is no script {script}; give the path of a Python file")
    asked = RunOptions(
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
        explain_program(asked)
        raise typer.Exit(EXIT_DONE)
    raise typer.Exit(run_script(asked, nproc, chain=cluster))


def explain_program(asked: RunOptions) -> None:
    """Print what is found in a script and its modules; nothing of it is run.

    The classes of its tensors and the bytes of a save are those that ``outlast autosave check``
    has measured, where it has.

    Args:
        asked: The command line.

    Raises:
        AutosaveError: When it cannot be run so.
    """
    from outlast.autosave.cost import measured_file, read_measured
    from outlast.autosave.libraries import read_and_rewrite
    from outlast.autosave.program import explain, find_training
    from outlast.autosave.run_folder import folder_of

    rewritten, library = read_and_rewrite(asked.script, asked.loop)
    files = [item.source for item in rewritten]
    if library is not None:
        print(
            f"{asked.script} is trained by {library.name}, whose loop is not the script's own: "
            "outlast run leaves saving and resuming to it, with Outlast's store, and "
            "rewrites nothing"
        )
        return
    found = explain(files, find_training(files, asked.loop), rewritten)
    folder = folder_of(asked.script.resolve(), asked.arguments, None)
    print(found.head())
    print("names alive at the head of each loop:")
    for line in _alive(rewritten):
        print(f"  {line}")
    print()
    state = read_measured(measured_file(folder.path))
    _print_state(state, [file.text for file in files], asked.script)
    print()
    for sentence in folder.notes():
        print(f"note of the last start: {sentence}")
    print("".join(found.differences), end="")


def _alive(files: list[Rewritten]) -> Iterator[str]:
    """Of each loop, the names that a save needs of its body, and those that it does not."""
    from outlast.autosave.program import defined_names

    for file in files:
        defined = frozenset(defined_names(file.source.tree))
        for site in sorted(file.sites, key=lambda site: site.line):
            if site.kind in ("step", "loop") and site.body in file.bodies:
                yield _alive_at(site, file.source.name(), defined)


def _alive_at(site: Site, file: str, of_module: frozenset[str]) -> str:
    from outlast.autosave.program import RUNTIME

    # What a definition or import makes is made again by set-up.
    known = site.defined | (of_module if site.body.endswith(":<module>") else frozenset())
    hidden = RUNTIME.rstrip("_")
    alive, dead = (
        sorted(name for name in names - known if not name.startswith(hidden))
        for names in (site.names, site.dead)
    )
    kind = "step loop" if site.kind == "step" else "loop"
    dropped = f"; not needed: {', '.join(dead)}" if dead else ""
    return f"{file}:{site.line}  {kind}  {', '.join(alive) or 'none'}{dropped}"


def _print_state(state: MeasuredState | None, texts: list[str], script: Path) -> None:
    from outlast.autosave.cost import program_hash
    from outlast.cli.autosave import print_classes, print_sizes

    console = output()
    if state is None:
        console.print(
            "the class of each tensor and the bytes of a save are known when steps have run: "
            f"`outlast autosave check {script}` measures them on its first steps, and this then "
            "shows them",
            markup=False,
            soft_wrap=True,
        )
        return
    if state.program != program_hash(texts):
        console.print(
            "note: the figures are of an earlier text of the script; "
            f"`outlast autosave check {script}` takes them anew",
            markup=False,
            soft_wrap=True,
        )
    print_classes(console, state)
    print_sizes(console, state)
