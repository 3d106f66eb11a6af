"""``outlast run`` and ``outlast autosave check``: an ordinary script, saved without a change.

The one runs and resumes it; the other finds what must be saved of it, and whether it resumes bit
for bit.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.console import Column, output, print_table, size_text
from outlast.cli.train import Processes
from outlast.errors import EXIT_DONE, AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from outlast.autosave.cost import MeasuredState
    from outlast.autosave.program import Rewritten, Site
    from outlast.autosave.run import RunOptions
    from outlast.autosave.script_replay import ScriptReplay
    from outlast.autosave.state_plan import StatePlan


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
    """Run a PyTorch script that can be killed at any time: the same command goes on.

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
    _print_classes(console, state)
    _print_sizes(console, state)


autosave = typer.Typer(
    name="autosave",
    help="What must be saved of a script, and whether it resumes bit for bit.",
    no_args_is_help=True,
)


_SHOWN = 12


_LOSES_STATE = 1
"""Exit code for a script that does not resume bit for bit."""


@autosave.callback()
def autosave_options() -> None:
    """Find what must be saved of a script, and check that it resumes bit for bit."""


@autosave.command(context_settings=SETTINGS)
def check(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.PY", help="What is to be checked.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Of the script.")
    ] = None,
    *,
    steps: Annotated[int, typer.Option(min=1, help="Steps after the save that are compared.")] = 3,
    at: Annotated[int, typer.Option(min=3, help="Steps before the save.")] = 4,
    timeout: Annotated[
        float, typer.Option(help="Seconds that each pass over the script may take.")
    ] = 600.0,
    loop: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:LINE", help="The loop whose iterations are the steps; default: found."
        ),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor with its class and why.")
    ] = False,
) -> None:
    """Prove on a script's first steps that it resumes bit for bit.

    The script runs to a save and some steps on; a fresh process resumes from the save and does
    the same steps; every tensor and value is compared after each. A third process takes over what
    state_dict() gives alone, to show what that loses. The script does its steps in earnest: files
    that it writes are written in each of these passes. What is measured is kept for `outlast run
    --explain`. Exit codes: 0 all the same, 1 not, 2 wrong input, or no check possible.
    """
    from outlast.autosave.cost import MeasuredState, measured_file, program_hash
    from outlast.autosave.libraries import read_training
    from outlast.autosave.run import say_options_behind
    from outlast.autosave.run_folder import folder_of
    from outlast.autosave.script_replay import replay_script
    from outlast.autosave.state_plan import KINDS
    from outlast.records import replace_file

    if not script.is_file():
        raise AutosaveError(f"there is no script {script}; give the path of a Python file")
    files, _ = read_training(script, loop)
    texts = [file.text for file in files]
    say_options_behind(script, arguments or (), _OWN, texts, "outlast autosave check")
    found = replay_script(
        script, arguments or (), at=at, steps=steps, timeout_seconds=timeout, loop=loop
    )
    measured = MeasuredState(
        program=program_hash(texts),
        at=found.at,
        tensors={kind: len(found.plan.of(kind)) for kind in KINDS},
        bytes={kind: found.plan.bytes(kind) for kind in KINDS},
        state=found.plan.cost,
        saved_bytes=found.saved_bytes,
        process_bytes=found.process_bytes,
        lints=found.plan.lints,
    )
    # Leave what was measured where ``outlast run --explain`` looks for it.
    file = measured_file(folder_of(script.resolve(), arguments or (), None).path)
    # The script may lie where nothing can be written; what was measured is printed all the same.
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        replace_file(file, measured.to_json().encode())
    console = output()
    if tensors:
        _print_tensors(console, found.plan)
    _print_classes(console, measured)
    if not found.plan.of("must-save"):
        console.print("note: nothing changed in the steps looked at; try a later one with --at")
    _print_sizes(console, measured)
    # Print what `state_dict()` alone would lose.
    lost = [
        *(f"{name} (tensor)" for name in found.lost_tensors),
        *(
            f"{lost_value.name}: {lost_value.found or 'nothing'} for {lost_value.expected}"
            for lost_value in found.lost_values
        ),
    ]
    console.print(
        f"lost by state_dict() alone after {found.at} steps (measured): "
        f"{len(found.lost_tensors)} tensors, {len(found.lost_values)} values, "
        "and the place in the loops and in the data",
        markup=False,
        soft_wrap=True,
    )
    _print_some(console, lost)
    _print_verdict(console, script, found)
    raise typer.Exit(EXIT_DONE if found.identical else _LOSES_STATE)


_OWN = ("--steps", "--at", "--timeout", "--tensors", "--loop")


def _print_tensors(console: Console, plan: StatePlan) -> None:
    print_table(
        console,
        [
            Column("tensor", number=False, least=24),
            Column("class", number=False),
            Column("bytes"),
            Column("type", number=False, optional=2),
            Column("copied", number=False, optional=1),
            Column("why", number=False, optional=3, least=20),
        ],
        [
            [
                tensor.name,
                tensor.kind,
                size_text(tensor.bytes),
                tensor.dtype,
                _WINDOWS[tensor.window],
                "; ".join(tensor.why),
            ]
            for tensor in plan.tensors
        ],
        title="tensors at the save",
    )


_WINDOWS = {
    "always": "at any time",
    "late": "up to the optimizer's step",
    "early": "at the boundary",
}


def _print_verdict(console: Console, script: Path, found: ScriptReplay) -> None:
    if found.unsteady:
        console.print(
            f"{len(found.unsteady)} names differ between two uninterrupted runs, too, and say "
            f"nothing: {', '.join(found.unsteady[:_SHOWN])}",
            markup=False,
            soft_wrap=True,
        )
    if found.identical:
        console.print(
            f"{script}: {found.tensors} tensors and {found.values} values are the same bit for "
            f"bit in each of {found.steps} steps after a restore in a fresh process",
            markup=False,
            soft_wrap=True,
        )
        return
    console.print(
        f"{script}: {len(found.differences)} of {found.tensors + found.values} names are NOT the "
        "same after a restore in a fresh process",
        markup=False,
        soft_wrap=True,
    )
    _print_some(console, [difference.sentence() for difference in found.differences])


def _print_some(console: Console, lines: list[str]) -> None:
    for line in lines[:_SHOWN]:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    if len(lines) > _SHOWN:
        console.print(f"  and {len(lines) - _SHOWN} more", markup=False)


_MEANING = {
    "must-save": "changes, and is read again",
    "save-once": "is read, and never changed",
    "derivable": "is made again by set-up, and never changed",
    "dead": "is written before it is read",
}


def _print_classes(console: Console, state: MeasuredState) -> None:
    """Tensors and bytes of each class, and what state_dict() misses."""
    print_table(
        console,
        [
            Column("class", number=False),
            Column("tensors"),
            Column("bytes"),
            Column("what it is", number=False, least=20),
        ],
        [
            [kind, str(count), size_text(state.bytes[kind]), _MEANING[kind]]
            for kind, count in state.tensors.items()
        ],
        title=f"what a step leaves behind (measured after {state.at} steps)",
    )
    for lint in state.lints:
        console.print(f"note: {lint}", markup=False, soft_wrap=True)


def _print_sizes(console: Console, state: MeasuredState) -> None:
    """Bytes of a save beside those of other ways to save."""
    print_table(
        console,
        [
            Column("bytes per save", number=False),
            Column("size"),
            Column("what it is", number=False),
        ],
        [[name, size_text(size), what] for name, size, what in state.rows()],
        title="bytes per save, before compression (measured)",
    )
