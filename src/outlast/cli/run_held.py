"""What one rank of a script holds, in the form in which a checkpoint store takes it."""

from __future__ import annotations

from typing import Any

import torch

from outlast.autosave.execute import SavedState
from outlast.autosave.heap.capture import Captured

TENSORS = "tensors"
"""Name of the tensors in the state."""

_SMALLEST_PROGRAM_BYTES = 1 << 16


class HeldState:
    """What one rank holds, as the store takes it and gives it back.

    The bytes of the program are padded to a power of two: a state of the same sizes as the one
    before is saved by the plan that is made already.
    """

    def __init__(self, saved: SavedState | None = None) -> None:
        self.saved = saved

    def state_dict(self) -> dict[str, Any]:
        """The state, as tensors and plain values."""
        assert self.saved is not None
        found = self.saved.captured
        length = len(found.program)
        size = max(_SMALLEST_PROGRAM_BYTES, 1 << (length - 1).bit_length())
        padded = bytearray(size)
        padded[:length] = found.program
        program = torch.frombuffer(padded, dtype=torch.uint8)
        return {
            "length": length,
            "program": program,
            TENSORS: found.tensors,
            "logs": self.saved.logs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was saved."""
        program = state["program"].numpy().tobytes()[: state["length"]]
        self.saved = SavedState(Captured(program, state[TENSORS]), state["logs"])
