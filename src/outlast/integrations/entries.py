"""Entries beside tensors in a framework's checkpoint: its state, facts as text, random numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from outlast.autosave.resume import random_states
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outlast.checkpoint import CheckpointStore

EVERY_VERSION = 10**9
"""Versions kept where somebody else says which go."""

_SMALLEST_BYTES = 1 << 14


class Entry:
    """A dictionary as an entry of a state.

    Args:
        content: What is saved.
        loaded: Called when it was restored.
        may_be_missing: Whether it stays as it is where none was saved under its name.

    Attributes:
        content: What is saved, or was restored.
    """

    def __init__(
        self,
        content: dict[str, Any] | None = None,
        *,
        loaded: Callable[[], None] | None = None,
        may_be_missing: bool = False,
    ) -> None:
        self.content = content or {}
        self.may_be_missing = may_be_missing
        self._loaded = loaded

    def state_dict(self) -> dict[str, Any]:
        """The content."""
        return self.content

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""
        self.content = dict(state)
        if self._loaded is not None:
            self._loaded()


class TextEntry:
    """JSON as an entry of a state: one tensor, of a size that seldom changes.

    Attributes:
        content: What is saved, or was restored.
    """

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        self.content = content or {}

    def text(self) -> str:
        """The content as text."""
        return json.dumps(self.content)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The text as bytes, filled up with spaces."""
        written = self.text().encode()
        size = max(_SMALLEST_BYTES, 1 << len(written).bit_length())
        return {"text": torch.frombuffer(bytearray(written.ljust(size)), dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what was saved."""
        self.content = json.loads(state["text"].numpy().tobytes())


class RandomEntry:
    """The random generators of this process, as an entry of its state.

    Attributes:
        states: What was restored; None before.
    """

    def __init__(self) -> None:
        self.states: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The states as they are now."""
        return random_states()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what was saved, until it is time to set it."""
        self.states = dict(state)


def read_facts(
    store: CheckpointStore, name: str, step: int | None, *, or_newest: bool = False
) -> tuple[dict[str, Any], int | None]:
    """Read the text of a version that says what else it holds.

    Args:
        store: Of the version.
        name: Of the text's entry.
        step: Of the version; None: the newest.
        or_newest: Whether the newest is taken where that of `step` is not whole, and none is newer.

    Returns:
        The text's content; and the version that it is of, as `step`.

    Raises:
        CheckpointError: When there is none.
    """
    entry = TextEntry()
    try:
        restored = store.restore({name: entry}, step=step)
    except CheckpointError:
        newest = store.newest()
        if not or_newest or step is None or newest is None or newest.step >= step:
            raise
        return read_facts(store, name, None)
    if restored is None:
        raise CheckpointError(f"there is no complete state in {store.storage.location} to load")
    return entry.content, step
