"""``outlast run --explain``: what is found in a script, and how its text is rewritten."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def explain_program(script: Path, loop: str | None = None) -> None:
    """Print what is found in a script and its modules; nothing of it is run.

    Args:
        script: The script.
        loop: ``FILE:LINE`` of its step loop; None finds it.

    Raises:
        AutosaveError: When it cannot be run so.
    """
    from outlast.autosave.program.explain import explain
    from outlast.autosave.program.rewrite import rewrite
    from outlast.cli.run_program import read_training

    files, training = read_training(script, loop)
    print(explain(files, training, rewrite(files, training)).text(), end="")
    print(
        f"\nwhat a step leaves behind and bytes per save, from its first steps: outlast autosave "
        f"check {script}"
    )
