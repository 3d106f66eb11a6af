"""The folders ``checkpoint-N`` of a `Trainer`, of which each may stand for a version in a store."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

if TYPE_CHECKING:
    from outlast.records import RunDirectory

_MARK = "outlast.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")


class Choice(NamedTuple):
    """What to resume from.

    Attributes:
        kind: ``store``; ``trainer``: what the Trainer itself has to load, or to refuse; or
            ``nothing``: a folder whose version was never published, and no other version.
        place: Of the store, or a folder that the Trainer itself has written; empty: as named.
        step: Of the version, or of what the Trainer has written; None for the newest version.
        is_marked: Whether a folder stands for that version, be it published or not.
        is_newest: Whether the newest state is asked for, wherever it is.
    """

    kind: str
    place: str = ""
    step: int | None = None
    is_marked: bool = False
    is_newest: bool = False


def chosen(resume: str | bool | None, directory: RunDirectory, newest: int | None) -> Choice:
    """What `resume` names.

    Args:
        resume: As `Trainer.train` has it.
        directory: The trainer's output directory.
        newest: Step of the newest version in its store; None without any.
    """
    is_newest = resume is True or _is_store(resume, directory)
    return _chosen(resume, directory, newest)._replace(is_newest=is_newest)


def _chosen(resume: str | bool | None, directory: RunDirectory, newest: int | None) -> Choice:
    if newest is not None and _is_store(resume, directory):
        return Choice("store", str(directory.checkpoints))
    if resume is True and newest is not None:
        written = _written_by_trainer(directory)
        if max(written, default=-1) > newest:
            return Choice("trainer", str(written[max(written)]), max(written))
        return Choice("store", str(directory.checkpoints))
    folder = last_folder(directory) if resume is True else Path(resume or "")
    if folder is None or (step := _FOLDER.fullmatch(folder.name)) is None:
        return Choice("trainer")
    is_marked = stands_for_version(folder)
    if folder.is_dir() and not is_marked:
        return Choice("trainer", step=int(step[1]))
    own = folder.parent.resolve() == directory.path.resolve()
    place = directory.checkpoints if own else folder.parent / "checkpoints"
    if own and newest is None:
        return Choice("nothing" if is_marked else "trainer", step=int(step[1]))
    if own or place.is_dir():
        return Choice("store", str(place), int(step[1]), is_marked)
    return Choice("trainer")


def _is_store(resume: str | bool | None, directory: RunDirectory) -> bool:
    """Whether the store itself is named, whatever the Trainer has written beside it."""
    return isinstance(resume, str) and Path(resume).resolve() == directory.checkpoints.resolve()


def _written_by_trainer(directory: RunDirectory) -> dict[int, Path]:
    """Folders with all that the Trainer itself has written, by their steps."""
    found = {}
    for folder in directory.path.glob("checkpoint-*"):
        step = _FOLDER.fullmatch(folder.name)
        # The state is what the Trainer writes last.
        complete = (folder / TRAINER_STATE_NAME).exists() and not stands_for_version(folder)
        if step is not None and complete:
            found[int(step[1])] = folder
    return found


def last_folder(directory: RunDirectory) -> Path | None:
    """The folder of the highest step; None without any."""
    last = get_last_checkpoint(str(directory.path)) if directory.path.is_dir() else None
    return None if last is None else Path(last)


def stands_for_version(folder: Path) -> bool:
    """Whether a folder was made by `mark`."""
    return (folder / _MARK).exists()


def step_of(folder: Path) -> int | None:
    """The step of the version that a folder stands for; None for any other folder."""
    step = _FOLDER.fullmatch(folder.name)
    return int(step[1]) if step is not None and stands_for_version(folder) else None


def mark(folder: Path, directory: RunDirectory) -> None:
    """Make a folder that stands for a version in the store of `directory`."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"store": os.path.relpath(directory.checkpoints, folder)}
    (folder / _MARK).write_text(json.dumps(said) + "\n", encoding="utf-8")
