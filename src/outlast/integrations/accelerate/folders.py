"""Folders of `save_state`: the note that leads to a version of a store, and Accelerate's own."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from outlast.errors import CheckpointError

_NAME = "outlast.json"
_OWN = "optimizer*"
"""What Accelerate writes for the optimizers, which are in every state that a store could hold."""


@dataclass(frozen=True)
class Note:
    """What a folder leads to.

    Attributes:
        version: Number of the version.
        save: Name of this one save, since a run that goes back saves the same number again.
        store: The store's directory; in the file, as seen from the folder.
    """

    version: int
    save: str
    store: Path


class OwnFolder(NamedTuple):
    """A folder that Accelerate itself has written, and when, in seconds of the epoch."""

    seconds: float
    path: Path


def write_note(folder: Path, note: Note) -> None:
    """Let `folder` lead to a version."""
    store = os.path.relpath(os.path.realpath(note.store), os.path.realpath(folder))
    content = json.dumps({**asdict(note), "store": store})
    (folder / _NAME).write_text(content + "\n", encoding="utf-8")


def read_note(folder: Path) -> Note | None:
    """What `folder` leads to; None where Accelerate itself has written it.

    Raises:
        CheckpointError: When the note is damaged, or the store that it names is not there.
    """
    path = folder / _NAME
    try:
        found = json.loads(path.read_bytes())
        version, save, where = int(found["version"]), str(found["save"]), str(found["store"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); load another folder, or none for the newest state"
        ) from None
    store = Path(os.path.normpath(Path(os.path.realpath(folder), where)))
    if not store.is_dir():
        raise CheckpointError(
            f"{folder} holds no state but leads to the store {store}, which is not there; move "
            "the two together, or load another folder"
        )
    return Note(version, save, store)


def newest_own_folder(parent: Path) -> OwnFolder | None:
    """The folder in `parent` that Accelerate itself has written last.

    Args:
        parent: Of the folders that automatic names are given to.
    """
    found = [
        OwnFolder(max(state.stat().st_mtime for state in states), folder)
        for folder in (parent.iterdir() if parent.is_dir() else ())
        if not (folder / _NAME).exists() and (states := [*folder.glob(_OWN)])
    ]
    return max(found, default=None)
