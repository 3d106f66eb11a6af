"""``outlast autosave check``: does a script resume bit for bit, and what would it lose without?"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import Column, output, print_json, print_table, size_text
from outlast.cli.options import AsJson
from outlast.errors import EXIT_DONE

if TYPE_CHECKING:
    from rich.console import Console

    from outlast.autosave.cost import MeasuredState
    from outlast.autosave.script_replay import ScriptReplay
    from outlast.autosave.state_plan import StatePlan


autosave = typer.Typer(
    name="autosave",
    help="What must be saved of a script, and whether it resumes bit for bit.",
    no_args_is_help=True,
)


CHECK_SETTINGS = {"allow_interspersed_args": False}
"""All behind the script belongs to the script."""


_SHOWN = 12


_LOSES_STATE = 1
"""Exit code for a script that does not resume bit for bit."""


@autosave.callback()
def autosave_options() -> None:
    """Find what must be saved of a script, and check that it resumes bit for bit."""


@autosave.command(context_settings=CHECK_SETTINGS)
def check(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.PY", help="What is to be checked.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Of the script.")
    ] = None,
    *,
    steps: Annotated[int, typer.Option(min=1, help="Steps after the save that are compared.")] = 3,
    at: Annotated[int, typer.Option(min=3, help="Steps before the save.")] = 4,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that each pass over the script may take.")
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
    json: AsJson = False,
) -> None:
    """Prove on a script's first steps that it resumes bit for bit.

    The script runs to a save and some steps on; a fresh process resumes from the save and does
    the same steps; every tensor and value is compared after each. A third process takes over what
    state_dict() gives alone, to show what that loses. The script does its steps in earnest: files
    that it writes are written in each of these passes. What is measured is kept for `outlast run
    --explain`. Exit codes: 0 all the same, 1 not, 2 wrong input, or no check possible.

    --json: {"script", "kind", "identical", "at", "steps", "compared", "differences", "unsteady",
    "lost", "classes", "saves", "notes"}, and "tensors" with --tensors; sizes in bytes.
    """
    from outlast.autosave.cost import MeasuredState, measured_file, program_hash
    from outlast.autosave.libraries import read_training
    from outlast.autosave.run import say_options_behind
    from outlast.autosave.run_folder import folder_of
    from outlast.autosave.script_replay import replay_script
    from outlast.autosave.state_plan import KINDS
    from outlast.errors import AutosaveError
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
    if json:
        print_json(_document(script, found, measured, tensors=tensors))
        raise typer.Exit(EXIT_DONE if found.identical else _LOSES_STATE)
    console = output()
    if tensors:
        _print_tensors(console, found.plan)
    print_classes(console, measured)
    if not found.plan.of("must-save"):
        console.print("note: nothing changed in the steps looked at; try a later one with --at")
    print_sizes(console, measured)
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


_OWN = ("--steps", "--at", "--timeout", "--tensors", "--loop", "--json")


def _document(
    script: Path, found: ScriptReplay, measured: MeasuredState, *, tensors: bool
) -> dict[str, Any]:
    document = {
        "script": script,
        "kind": "measured",
        "identical": found.identical,
        "at": found.at,
        "steps": found.steps,
        "compared": {"tensors": found.tensors, "values": found.values},
        "differences": found.differences,
        "unsteady": found.unsteady,
        "lost": {"tensors": found.lost_tensors, "values": found.lost_values},
        "classes": {
            kind: {"tensors": count, "bytes": measured.bytes[kind]}
            for kind, count in measured.tensors.items()
        },
        "saves": [{"name": name, "bytes": size} for name, size, _ in measured.rows()],
        "notes": measured.lints,
    }
    return {**document, "tensors": found.plan.tensors} if tensors else document


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


def print_classes(console: Console, state: MeasuredState) -> None:
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


def print_sizes(console: Console, state: MeasuredState) -> None:
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
