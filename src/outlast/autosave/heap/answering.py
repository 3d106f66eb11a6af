"""Objects whose class answers for attributes that they do not have, by ``__getattr__``.

Such an answer often reads an attribute that ``__init__`` sets. While an object is read back it has
none yet, and to ask it for its ``__setstate__`` would ask without end.
"""

from __future__ import annotations

from typing import Any

_PROTOCOL = 5


def reduced_answering(value: Any) -> Any:
    """How such an object is made again without being asked; NotImplemented for any other."""
    kind = type(value)
    if isinstance(value, type) or not hasattr(kind, "__getattr__") or hasattr(kind, "__setstate__"):
        return NotImplemented
    reduced = value.__reduce_ex__(_PROTOCOL)
    if not isinstance(reduced, tuple) or not 3 <= len(reduced) <= 5 or reduced[2] is None:
        return reduced
    return *reduced, *[None] * (5 - len(reduced)), _put


def _put(value: Any, state: Any) -> None:
    """What ``pickle`` does with the state of an object without a ``__setstate__``."""
    slots = None
    if isinstance(state, tuple):
        state, slots = state
    if state:
        object.__getattribute__(value, "__dict__").update(state)
    for name, slot in (slots or {}).items():
        object.__setattr__(value, name, slot)
