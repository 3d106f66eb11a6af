"""What a job's state means for a chain."""

from __future__ import annotations

from collections.abc import Iterable

PENDING = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    }
)
RUNNING = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING"}
)
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "TIMEOUT",
        "REVOKED",
    }
)
_FLAGS = ("COMPLETING", "CONFIGURING", "STAGE_OUT", "RESIZING", "REQUEUED", "SIGNALING")


def state_of(words: Iterable[str]) -> str:
    """One word for a state with flags, such as ``CANCELLED by 1000`` or ``CANCELLED COMPLETING``.

    A job that is being taken down is in the state that it will end in.
    """
    found = [part for word in words for part in word.upper().replace("+", " ").split()]
    base = [part for part in found if part in PENDING | RUNNING | ENDED and part not in _FLAGS]
    if base:
        return base[0]
    return next((part for part in found if part in _FLAGS), found[0] if found else "")


def is_live(state: str) -> bool:
    """Whether a job in this state has processes, or may still have some."""
    return state in RUNNING


def is_waiting(state: str) -> bool:
    """Whether it has yet to start."""
    return state in PENDING


def has_ended(state: str) -> bool:
    """Whether it will never run again."""
    return state in ENDED
