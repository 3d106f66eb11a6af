"""``outlast run --explain``: what is found in a script, and how its text is rewritten."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outlast.autosave.measured import MeasuredState
    from outlast.autosave.program.sites import Rewritten, Site
    from outlast.cli.run_start import Asked


def explain_program(asked: Asked) -> None:
    """Print what is found in a script and its modules; nothing of it is run.

    The classes of its tensors and the bytes of a save are those that ``outlast autosave check``
    has measured, where it has.

    Args:
        asked: The command line.

    Raises:
        AutosaveError: When it cannot be run so.
    """
    from outlast.autosave.measured import measured_file, read_measured
    from outlast.autosave.program.explain import explain
    from outlast.autosave.program.training import find_training
    from outlast.cli.run_folder import folder_of
    from outlast.cli.run_program import read_and_rewrite

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
    from outlast.autosave.program.scopes import defined_names

    for file in files:
        defined = frozenset(defined_names(file.source.tree))
        for site in sorted(file.sites, key=lambda site: site.line):
            if site.kind in ("step", "loop") and site.body in file.bodies:
                yield _alive_at(site, file.source.name(), defined)


def _alive_at(site: Site, file: str, of_module: frozenset[str]) -> str:
    from outlast.autosave.program.sites import RUNTIME

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
    from outlast.autosave.measured import program_hash
    from outlast.cli.figures import output
    from outlast.cli.state_tables import print_classes, print_sizes

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
