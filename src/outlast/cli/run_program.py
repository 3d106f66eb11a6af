"""Reading the script of ``outlast run``, and saying why one cannot be run so."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from outlast.cli.run_handover import LIBRARIES, Library
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.autosave.program.sites import Rewritten
    from outlast.autosave.program.source import SourceFile
    from outlast.autosave.program.training import Training

_OTHER_NAME = "pytorch_lightning"


def read_and_rewrite(
    script: Path, loop: str | None = None
) -> tuple[list[Rewritten], Library | None]:
    """The program of a script, rewritten so that it can be resumed.

    Args:
        script: The script.
        loop: ``FILE:LINE`` of its step loop; None finds it.

    Returns:
        Its files; and the library that trains it, in which case they are as they were.

    Raises:
        AutosaveError: When it cannot be read, or has no training loop.
    """
    from outlast.autosave.program.rewrite import rewrite
    from outlast.autosave.program.sites import Rewritten
    from outlast.autosave.program.source import read_program
    from outlast.autosave.program.training import find_training

    files = read_program(script)
    try:
        return rewrite(files, find_training(files, loop)), None
    except AutosaveError:
        library = None if loop is not None else library_of(files)
        if library is None:
            raise
        return [Rewritten(each, each.tree) for each in files], library


def read_training(script: Path, loop: str | None = None) -> tuple[list[SourceFile], Training]:
    """The files of a program and its own training loops.

    Raises:
        AutosaveError: When it cannot be read, or has no training loop of its own.
    """
    from outlast.autosave.program.source import read_program
    from outlast.autosave.program.training import find_training

    files = read_program(script)
    try:
        return files, find_training(files, loop)
    except AutosaveError:
        library = library_of(files)
        if library is None:
            raise
        raise AutosaveError(
            f"{script} is trained by {library.name}, whose loop is not the script's own: `outlast "
            "run` leaves saving and resuming to it, with Outlast's store, and there is no state of "
            "the script's own to look at"
        ) from None


def library_of(files: list[SourceFile]) -> Library | None:
    """The library that trains a program without a loop of its own.

    Raises:
        AutosaveError: For one under another name, which is not followed.
    """
    nodes = [node for source in files for node in ast.walk(source.tree)]
    imported = {name.partition(".")[0] for node in nodes for name in _imports(node)}
    called = {
        node.func.attr
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    if _OTHER_NAME in imported and LIBRARIES["lightning"].method in called:
        raise AutosaveError(
            f"{files[0].name()} imports {_OTHER_NAME}, which is not followed; import "
            "lightning.pytorch, the same library, in its place"
        )
    found = (LIBRARIES[package] for package in LIBRARIES if package in imported)
    return next((each for each in found if each.method in called), None)


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
