"""A program's set-up done twice, with training and a save in between."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.autosave.heap.capture import Captured, capture, restore
from outlast.autosave.heap.names import Names

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Runs:
    """The variables of the run that was saved, those of the one that took over, and the save."""

    saved: dict[str, Any]
    resumed: dict[str, Any]
    captured: Captured


def copied(captured: Captured) -> Captured:
    """What another process would read: no memory is shared with this one."""
    tensors = {name: row.clone() for name, row in captured.tensors.items()}
    return Captured(captured.program, tensors)


def resume(
    setup: Callable[[], dict[str, Any]],
    train: Callable[[dict[str, Any]], None],
    module: str,
    **kinds: Any,
) -> Runs:
    """Set up, train, save; set up again, and go back to what was saved."""
    first = setup()
    names = Names(first, {module}, **kinds)
    train(first)
    captured = copied(capture(names, first, {}))
    second = setup()
    values = restore(captured, Names(second, {module}, **kinds), {})
    return Runs(first, values, captured)


def sizes_on_disk(captured: Captured) -> int:
    """Bytes of a save."""
    return len(pickle.dumps(captured.program)) + sum(
        row.nbytes for row in captured.tensors.values()
    )
