"""Reading the script of ``outlast run``, and saying why one cannot be run so."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.autosave.program.sites import Rewritten
    from outlast.autosave.program.source import SourceFile
    from outlast.autosave.program.training import Training

_OF_TRANSFORMERS = (
    "trainer.train(resume_from_checkpoint=True) with TrainingArguments(save_strategy=...); "
    "outlast.integrations.hf_trainer adds Outlast's measurements to it"
)
_OF_LIGHTNING = (
    'trainer.fit(..., ckpt_path="last") with ModelCheckpoint(save_last=True); '
    "outlast.integrations.lightning adds Outlast's measurements to it"
)
_TRAINERS = {
    "transformers": ("train", "Hugging Face's Trainer", _OF_TRANSFORMERS),
    "trl": ("train", "a trainer of TRL, which is Hugging Face's Trainer", _OF_TRANSFORMERS),
    "lightning": ("fit", "Lightning's Trainer", _OF_LIGHTNING),
    "pytorch_lightning": ("fit", "Lightning's Trainer", _OF_LIGHTNING),
}
"""Package to the method that trains, its name, and how its own resume is used."""


def read_and_rewrite(script: Path, loop: str | None = None) -> list[Rewritten]:
    """The program of a script, rewritten so that it can be resumed.

    Args:
        script: The script.
        loop: ``FILE:LINE`` of its step loop; None finds it.

    Raises:
        AutosaveError: When it cannot be read, or has no training loop of its own.
    """
    from outlast.autosave.program.rewrite import rewrite

    files, training = read_training(script, loop)
    return rewrite(files, training)


def read_training(script: Path, loop: str | None = None) -> tuple[list[SourceFile], Training]:
    """The files of a program and its training loops; otherwise as `read_and_rewrite`."""
    from outlast.autosave.program.source import read_program
    from outlast.autosave.program.training import find_training

    files = read_program(script)
    try:
        return files, find_training(files, loop)
    except AutosaveError:
        if sentence := _trainer_of_others(files):
            raise AutosaveError(f"{script}: {sentence}") from None
        raise


def _trainer_of_others(files: list[SourceFile]) -> str:
    """Why a program without a loop of its own needs none, if another library trains it."""
    nodes = [node for source in files for node in ast.walk(source.tree)]
    imported = {name.partition(".")[0] for node in nodes for name in _imports(node)}
    called = {
        node.func.attr
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    for package in sorted(imported):
        found = _TRAINERS.get(package)
        if found is not None and found[0] in called:
            _, name, how = found
            return (
                f"this script trains with {name}, whose loop is not the script's own; it saves and "
                f"resumes by itself: use {how}"
            )
    return ""


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
