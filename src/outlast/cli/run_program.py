"""Reading the script of ``outlast run``, and saying why one cannot be run so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.cli.run_library import library_of
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.autosave.program.sites import Rewritten
    from outlast.autosave.program.source import SourceFile
    from outlast.autosave.program.training import Training
    from outlast.cli.run_handover import Library


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
        AutosaveError: When it cannot be read, has no training loop, or one that cannot be followed.
    """
    from outlast.autosave.program.rewrite import rewrite
    from outlast.autosave.program.sites import Rewritten
    from outlast.autosave.program.source import read_program
    from outlast.autosave.program.training import NoTrainingLoopError, find_training

    files = read_program(script)
    try:
        training = find_training(files, loop)
    except NoTrainingLoopError:
        library = library_of(files)
        if library is None:
            raise
        return [Rewritten(file, file.tree) for file in files], library
    return rewrite(files, training), None


def read_training(script: Path, loop: str | None = None) -> tuple[list[SourceFile], Training]:
    """The files of a program and its own training loops.

    Raises:
        AutosaveError: When it cannot be read, or has no training loop of its own.
    """
    from outlast.autosave.program.source import read_program
    from outlast.autosave.program.training import NoTrainingLoopError, find_training

    files = read_program(script)
    try:
        return files, find_training(files, loop)
    except NoTrainingLoopError:
        library = library_of(files)
        if library is None:
            raise
        raise AutosaveError(
            f"{script} is trained by {library.name}, whose loop is not the script's own: `outlast "
            "run` leaves saving and resuming to it, with Outlast's store, and there is no state of "
            "the script's own to look at"
        ) from None
