"""Entries beside tensors in a framework's checkpoint: its own state as text, and random numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from outlast.autosave.resume.process import random_states

if TYPE_CHECKING:
    from collections.abc import Mapping

_SMALLEST_BYTES = 1 << 14


class TextEntry:
    """JSON as an entry of a state: one tensor, of a size that seldom changes.

    Attributes:
        content: What is saved, or was restored.
    """

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        self.content = content or {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The text, filled up with spaces."""
        return {"text": padded(json.dumps(self.content))}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what was saved."""
        self.content = json.loads(state["text"].numpy().tobytes())


def padded(text: str) -> torch.Tensor:
    """`text` as bytes, filled up with spaces to a size that seldom changes."""
    written = text.encode()
    size = max(_SMALLEST_BYTES, 1 << len(written).bit_length())
    return torch.frombuffer(bytearray(written.ljust(size)), dtype=torch.uint8)


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
