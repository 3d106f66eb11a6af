"""Rendezvous of the processes of ``outlast run``: rank 0 prepares the run, and all follow it.

Rank 0 may move an earlier run aside and makes the folder of this one; what others saw there before
or meanwhile means nothing. They hear of it before the script has made a process group: under
torchrun through the store of its agent, under srun through a file in the run's folder. Both outlive
a launch, so every word of rank 0 has a mark of its own, and no rank hears the same one twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from outlast.errors import AutosaveError, OutlastError
from outlast.records import replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.distributed import TCPStore

    from outlast.distributed.ranks import Ranks


_DEADLINE_SECONDS = 600.0


_PAUSE_SECONDS = 0.05


_WORD = "begun"


@dataclass(frozen=True)
class Begun:
    """Findings of rank 0.

    Attributes:
        finished: Whether the run has come to its end already.
        resuming: Whether there may be a state to go back to.
        died: Whether the start before this one came to no end on some rank.
        problem: Why the run cannot begin; rank 0 says it itself.
        crashed: Whether that is an error of the program, not of what it was given.
    """

    finished: bool = False
    resuming: bool = False
    died: bool = False
    problem: str = ""
    crashed: bool = False


def rendezvous(ranks: Ranks, folder: Path, look: Callable[[], Begun]) -> Begun:
    """Return the findings of rank 0, on every rank.

    Processes that are joined by neither torchrun nor srun look each for itself.

    Args:
        ranks: This process among the others.
        folder: Of the run.
        look: Prepares the run on rank 0.

    Raises:
        Exception: On rank 0, what `look` raises.
        AutosaveError: When rank 0 does not say within ten minutes, or cannot.
    """
    way = _way(os.environ, folder) if ranks.world_size > 1 else None
    if way is None:
        return look()
    launch, board = way
    launch = f"{launch}.{ranks.world_size}"
    if not ranks.is_first:
        return _hear(board, launch, ranks.rank)
    try:
        begun = look()
    except Exception as error:
        known = isinstance(error, OutlastError)
        problem = str(error) if known else f"{type(error).__name__}: {error}"
        # That it cannot be told hides nothing of what has happened.
        with contextlib.suppress(Exception):
            _tell(board, launch, Begun(problem=problem, crashed=not known))
        raise
    _tell(board, launch, begun)
    return begun


class _Board(Protocol):
    """Texts that rank 0 and the others write down, each under a name of its own."""

    def put(self, name: str, text: str) -> None: ...
    def get(self, name: str) -> str | None: ...
    def where(self) -> str: ...


def _way(environment: Mapping[str, str], folder: Path) -> tuple[str, _Board] | None:
    """The name of this launch, as far as its ranks know it, and where they meet."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agent = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        return _joined(environment, agent), _Store(environment)
    if "SLURM_STEP_ID" in environment and "SLURM_JOB_ID" in environment:
        step = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return _joined(environment, step), _Files(folder)
    return None


def _joined(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return ".".join(environment.get(name, "0") for name in names)


def _tell(board: _Board, launch: str, begun: Begun) -> None:
    board.put(_WORD, json.dumps([launch, uuid.uuid4().hex, asdict(begun)]))


def _hear(board: _Board, launch: str, rank: int) -> Begun:
    """The word of rank 0 in this launch, which this rank has not heard before.

    Raises:
        AutosaveError: When there is none in time.
    """
    heard = f"{_WORD}.rank{rank}"
    deadline = time.monotonic() + _DEADLINE_SECONDS
    try:
        last = board.get(heard)
        while time.monotonic() < deadline:
            with contextlib.suppress(ValueError):
                of, mark, begun = json.loads(board.get(_WORD) or "[]")
                if of == launch and mark != last:
                    board.put(heard, mark)
                    return Begun(**begun)
            time.sleep(_PAUSE_SECONDS)
        reason = f"there is no word of this launch in {board.where()}"
    # That of torch's store is the first.
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
    raise AutosaveError(
        f"rank 0 did not say within {_DEADLINE_SECONDS:g} s how the run begins ({reason}); see "
        "what it printed"
    )


class _Store:
    """The store of torchrun's agent."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self._opened: TCPStore | None = None

    def put(self, name: str, text: str) -> None:
        self._store().set(self._key(name), text)

    def get(self, name: str) -> str | None:
        key = self._key(name)
        return str(self._store().get(key).decode()) if self._store().check([key]) else None

    def where(self) -> str:
        return "the store of torchrun's agent"

    def _key(self, name: str) -> str:
        return f"outlast/run/{name}"

    def _store(self) -> TCPStore:
        from torch.distributed import TCPStore

        if self._opened is None:
            host, port = self._address
            self._opened = TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_DEADLINE_SECONDS),
            )
        return self._opened


class _Files:
    """Files in the folder of the run, which rank 0 makes if only to say why it is not made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / f"{name}.json", text.encode())

    def get(self, name: str) -> str | None:
        """The text of a file.

        Raises:
            OSError: When rank 0 cannot write here, so that there will never be one.
        """
        place = next(parent for parent in (self._folder, *self._folder.parents) if parent.exists())
        if not (place.is_dir() and os.access(place, os.W_OK)):
            raise OSError(f"{place} cannot be written")
        try:
            return (self._folder / f"{name}.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def where(self) -> str:
        return str(self._folder / f"{_WORD}.json")
