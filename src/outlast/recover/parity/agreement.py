"""What all members of a group do together or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

from outlast.errors import RecoverError
from outlast.recover.parity.wire import Wire

_Result = TypeVar("_Result")


class AgreedError(RecoverError):
    """All members know of this failure, so they can go on together."""


def gather(wire: Wire, content: Any) -> list[Any]:
    """What every member says, as JSON, in order of members."""
    return [json.loads(item) for item in wire.gather(json.dumps(content).encode())]


def settle(wire: Wire, action: Callable[[], _Result]) -> _Result:
    """Do something that may fail at any member, and fail at all members where it does.

    Raises:
        AgreedError: It failed somewhere; says at whom and why.
    """
    result, problem = None, ""
    try:
        result = action()
    except Exception as error:
        problem = str(error) or type(error).__name__
    for member, said in enumerate(gather(wire, problem)):
        if said:
            raise AgreedError(f"member {member} of the parity group: {said}")
    return cast("_Result", result)
