"""Where in a piece of memory a tensor may begin."""

from __future__ import annotations

_ALIGNMENT_BYTES = 64


def aligned(size: int) -> int:
    """`size` in bytes, rounded up so that what follows begins where any element may lie."""
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
