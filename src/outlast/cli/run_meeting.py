"""How the processes of ``outlast run`` begin together: rank 0 looks, and all do what it says.

Rank 0 may move an earlier run aside and makes the folder of this one; what others saw there before
or meanwhile means nothing. They hear of it before the script has made a process group: under
torchrun through the store of its agent, under srun through a file in the run's folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from outlast.errors import AutosaveError, OutlastError
from outlast.records import replace_file

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.train.ranks import Ranks

_DEADLINE_SECONDS = 600.0
_PAUSE_SECONDS = 0.05
_KEY = "outlast/run/begun"

Say = Callable[[str], None]
Hear = Callable[[], str]


@dataclass(frozen=True)
class Begun:
    """What rank 0 has found.

    Attributes:
        finished: Whether the run has come to its end already.
        resuming: Whether there may be a state to go back to.
        died: Whether the start before this one came to no end on some rank.
        problem: Why the run cannot begin; rank 0 says it itself.
    """

    finished: bool = False
    resuming: bool = False
    died: bool = False
    problem: str = ""


def begin_together(ranks: Ranks, folder: Path, look: Callable[[], Begun]) -> Begun:
    """What rank 0 has found, on every rank.

    Processes that are joined by neither torchrun nor srun look each for itself.

    Args:
        ranks: This process among the others.
        folder: Of the run.
        look: Prepares the run on rank 0.

    Raises:
        OutlastError: On rank 0, what `look` raises.
        AutosaveError: When rank 0 does not say within ten minutes.
    """
    way = _way(os.environ, folder) if ranks.world_size > 1 else None
    if way is None:
        return look()
    say, hear = way
    if not ranks.is_first:
        return Begun(**json.loads(hear()))
    try:
        begun = look()
    except OutlastError as error:
        say(json.dumps(asdict(Begun(problem=str(error)))))
        raise
    say(json.dumps(asdict(begun)))
    return begun


def _way(environment: Mapping[str, str], folder: Path) -> tuple[Say, Hear] | None:
    """How rank 0 speaks to the others, and they hear it."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _by_store(environment)
    if "SLURM_STEP_ID" in environment and "SLURM_JOB_ID" in environment:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return _by_file(
            folder / "begun.json", ".".join(environment.get(each, "0") for each in names)
        )
    return None


def _by_store(environment: Mapping[str, str]) -> tuple[Say, Hear]:
    from torch.distributed import TCPStore

    key = f"{_KEY}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def store() -> TCPStore:
        return TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_DEADLINE_SECONDS),
        )

    def hear() -> str:
        try:
            return str(store().get(key).decode())
        except RuntimeError as error:
            raise _silent(str(error).splitlines()[0]) from None

    return lambda text: store().set(key, text), hear


def _by_file(file: Path, launch: str) -> tuple[Say, Hear]:
    """By a file that says of which launch it is: that of an earlier one may still be there."""

    def say(text: str) -> None:
        if file.parent.is_dir():
            replace_file(file, json.dumps([launch, text]).encode())

    def hear() -> str:
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while time.monotonic() < deadline:
            try:
                of, text = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                of, text = "", ""
            if of == launch:
                return str(text)
            time.sleep(_PAUSE_SECONDS)
        raise _silent(f"there is no word of this launch in {file}")

    return say, hear


def _silent(what: str) -> AutosaveError:
    return AutosaveError(
        f"rank 0 did not say within {_DEADLINE_SECONDS:g} s how the run begins ({what}); see what "
        "it printed"
    )
