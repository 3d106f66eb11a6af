"""``outlast run --explain``: the loops found in a script, and how its text is rewritten."""

from __future__ import annotations

import ast
import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outlast.autosave.program.sites import Rewritten

_KINDS = {
    "step": "its iterations are the steps; the state is saved between two of them",
    "loop": "leads to the steps",
    "call": "leads to the steps",
    "branch": "is around them",
}


def explain_program(script: Path) -> None:
    """Print what is found in a script and its modules; nothing of it is run.

    Raises:
        AutosaveError: When it cannot be run so.
    """
    from outlast.cli.run_program import read_and_rewrite

    files = read_and_rewrite(script)
    for line in [*_way(files), *(line for each in files for line in _difference(each))]:
        print(line)


def _way(files: list[Rewritten]) -> Iterator[str]:
    """The statements on the way to a step, in the order of the files."""
    for each in files:
        lines = each.source.text.splitlines()
        for site in sorted(each.sites, key=lambda site: site.line):
            text = lines[site.line - 1].strip()
            yield f"{each.source.path.name}:{site.line}: {text}"
            yield f"    {_KINDS[site.kind]}"


def _difference(rewritten: Rewritten) -> Iterator[str]:
    """What is changed in a file; both sides are written by `ast.unparse`, without comments."""
    if not rewritten.sites:
        return
    name = rewritten.source.path.name
    yield ""
    yield from difflib.unified_diff(
        ast.unparse(rewritten.source.tree).splitlines(),
        ast.unparse(rewritten.tree).splitlines(),
        name,
        f"{name} (as it runs)",
        lineterm="",
    )
