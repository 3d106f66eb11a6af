"""Restarts of a torchtitan training whose recipe says at which step it begins.

torchrun gives each restart the same recipe. A restart goes on from memory; a start by hand begins
at the step, and what was kept before it counts no more.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from outlast.checkpoint.format.version import Version
from outlast.distributed.group import gather_objects
from outlast.errors import RecoverError
from outlast.records import Warned

if TYPE_CHECKING:
    from outlast.checkpoint import CheckpointStore
    from outlast.integrations.memory import LoopMemory
    from outlast.records import Event


class _Begun:
    """What a memory must know of the store of a run that began at one of its steps.

    Later versions may be of what the run does not go on from, and are no better than memory.
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def newest(self) -> Version:
        """What the run goes on from without memory."""
        return Version(0, self._step)


def begun_at(step: int) -> CheckpointStore:
    """The store to make a memory with, of a run that began at `step`."""
    return cast("CheckpointStore", _Begun(step))


def begins_again(step: int) -> str:
    """What a restart does without memory."""
    return f"the run begins at step {step} again, as checkpoint.load_step says"


def take(memory: LoopMemory, step: int) -> tuple[int | None, list[Event]]:
    """Restore what is in memory, where this is a restart; all ranks together.

    Args:
        memory: Made with `begun_at` and `begins_again`.
        step: At which the recipe begins.

    Returns:
        The steps that the state has done, None where the run begins at `step`; and what there is to
        say.

    Raises:
        RecoverError: On all ranks, when it does not fit, and the step has no whole state.
    """
    # Of the agents of several nodes those that have seen no failure count no restart.
    if not any(gather_objects(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")):
        memory.forget_earlier()
        return None, []
    found = memory.find()
    if found is None:
        return None, memory.events or [
            Warned(f"there is no newer state in memory; {begins_again(step)}")
        ]
    if memory.take():
        return found, memory.events
    if step == 0:
        # A seed has weights alone, and optimizers may be filled in part.
        raise RecoverError(
            "what is in memory does not fit, and checkpoint.load_step = 0 names a seed, which has "
            "weights alone: start again by hand"
        )
    return None, memory.events
