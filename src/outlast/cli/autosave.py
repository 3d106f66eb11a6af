"""``outlast autosave check``: does a script resume bit for bit, and what would it lose without?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.errors import EXIT_BAD_INPUT, EXIT_DONE

if TYPE_CHECKING:
    from rich.console import Console

    from outlast.autosave.trace.script import ScriptReplay
    from outlast.autosave.trace.state import StatePlan

autosave = typer.Typer(
    name="autosave",
    help="What must be saved of a script, and whether it resumes bit for bit.",
    no_args_is_help=True,
)

CHECK_SETTINGS = {"allow_interspersed_args": False}
"""All behind the script belongs to the script."""

_SHOWN = 12


@autosave.callback()
def autosave_options() -> None:
    """What must be saved of a script, and whether it resumes bit for bit."""


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
        float, typer.Option(help="Seconds that each pass over the script may take.")
    ] = 600.0,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor with its class and why.")
    ] = False,
) -> None:
    """Prove on a script's first steps that it resumes bit for bit.

    The script runs to a save and some steps on; a fresh process resumes from the save and does
    the same steps; every tensor and value is compared after each. A third process takes over what
    state_dict() gives alone, to show what that loses. The script does its steps in earnest: files
    that it writes are written in each of these passes. Exit codes: 0 all the same, 2 not.
    """
    from outlast.autosave.trace.script import replay_script
    from outlast.cli.figures import output
    from outlast.errors import AutosaveError

    if not script.is_file():
        raise AutosaveError(f"there is no script {script}; give the path of a Python file")
    found = replay_script(script, arguments or (), at=at, steps=steps, timeout_seconds=timeout)
    console = output()
    _print_plan(console, found.plan, tensors=tensors)
    _print_lost(console, found)
    _print_verdict(console, script, found)
    raise typer.Exit(EXIT_DONE if found.identical else EXIT_BAD_INPUT)


def _print_plan(console: Console, plan: StatePlan, *, tensors: bool) -> None:
    from outlast.autosave.trace.state import KINDS
    from outlast.cli.figures import Column, print_table, size_text

    if tensors:
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
                    each.name,
                    each.kind,
                    size_text(each.bytes),
                    each.dtype,
                    _WINDOWS[each.window],
                    "; ".join(each.why),
                ]
                for each in plan.tensors
            ],
            title="tensors at the save",
        )
    rows = [
        [kind, str(len(plan.of(kind))), size_text(plan.bytes(kind)), _MEANING[kind]]
        for kind in KINDS
    ]
    rows.append(["state_dict()", "", size_text(plan.naive_bytes), "of modules and optimizers"])
    print_table(
        console,
        [
            Column("class", number=False),
            Column("tensors"),
            Column("bytes"),
            Column("what it is", number=False, least=20),
        ],
        rows,
        title="what a step leaves behind (measured)",
    )
    if not plan.of("must-save"):
        console.print("note: nothing changed in the steps looked at; try a later one with --at")
    for each in plan.lints:
        console.print(f"note: {each}", markup=False, soft_wrap=True)


_MEANING = {
    "must-save": "changes, and is read again",
    "save-once": "is read, and never changed",
    "derivable": "is made again by set-up, and never changed",
    "dead": "is written before it is read",
}
_WINDOWS = {
    "always": "at any time",
    "late": "up to the optimizer's step",
    "early": "at the boundary",
}


def _print_lost(console: Console, found: ScriptReplay) -> None:
    """What `state_dict()` alone would lose."""
    lost = [
        *(f"{name} (tensor)" for name in found.lost_tensors),
        *(
            f"{each.name}: {each.found or 'nothing'} for {each.expected}"
            for each in found.lost_values
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
    _print_some(console, [each.sentence() for each in found.differences])


def _print_some(console: Console, lines: list[str]) -> None:
    for each in lines[:_SHOWN]:
        console.print(f"  {each}", markup=False, soft_wrap=True)
    if len(lines) > _SHOWN:
        console.print(f"  and {len(lines) - _SHOWN} more", markup=False)
