"""What a `with` statement has entered, when the statement is executed again on the way back."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType


class Entered:
    """Stands for the expression of a `with` whose value has come back with the local names.

    It is not entered a second time, which would begin a file again; it is left as usual.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __enter__(self) -> Any:
        return self._value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        return self._value.__exit__(kind, error, traceback)


def entered(values: Mapping[str, Any], name: str, files: frozenset[str]) -> Entered | None:
    """The value of `name`, if it came back as it was: a file, a bar, an object of the program.

    What belongs to the process, as `torch.autocast` or a profiler, is made and entered anew.

    Args:
        values: Local names of the frame.
        name: What the `with` statement binds.
        files: Files of the program, whose classes' objects are its own.
    """
    value = values.get(name)
    if value is None or not hasattr(value, "__exit__"):
        return None
    kind = type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if isinstance(value, io.IOBase) or kind.__module__.split(".")[0] == "tqdm" or file in files:
        return Entered(value)
    return None
