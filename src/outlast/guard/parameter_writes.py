"""Writes of a program to parameters, to be told from faults in their memory.

torch counts the writes to a tensor, but not those to what its ``.data`` gives, which programs use
for target networks, clipped weights and perturbed ones. So ``nn.Parameter.data`` keeps what it
gives of the parameters of guarded models: aliases of the same memory with a count of their own.
One number of one parameter that is written so is taken for a fault, as it would be for a buffer.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from outlast.guard.residual import equal_bits

if TYPE_CHECKING:
    from collections.abc import Iterator

_COPIES = 4
"""Parameters of a step that are copied to see how many numbers a write changes; see `_Given`."""
_KEPT = 64
"""Aliases of a parameter whose writes are counted; of older ones only those until then."""


@dataclass
class _Given:
    """Aliases that a parameter's ``.data`` has given since the last step.

    Attributes:
        aliases: Of the parameter's memory.
        before: A copy of it; None behind the first parameters of a step: a program that writes to
            so many need not be asked how much it changes in one.
        count: Writes until the last step.
    """

    aliases: list[Tensor] = field(default_factory=list)
    before: Tensor | None = None
    count: int = 0

    def new(self) -> int:
        """Writes since the last step."""
        return sum(alias._version for alias in self.aliases)

    def forget(self, count: int) -> None:
        """Begin anew with so many writes."""
        self.aliases, self.before, self.count = [], None, count


_given: Any = WeakIdKeyDictionary()
"""Of guarded parameters; a `_Given` each."""
_open: dict[int, _Given] = {}
"""Those among them that have given something since the last step, by the parameter's id."""
_guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose parameters are counted."""
_lock = threading.RLock()


def data_writes(parameter: Tensor) -> int:
    """Count of the program's writes to a parameter's ``.data``; ``_version`` has the others."""
    given: _Given | None = _given.get(parameter)
    return 0 if given is None else _count(given)


def _count(given: _Given) -> int:
    new = given.new()
    if new and not any(other is not given and other.new() for other in list(_open.values())):
        before = given.before
        with _disable_current_modes():
            changed = 0 if before is None else int((~equal_bits(given.aliases[-1], before)).sum())
        new = new if changed > 1 else 0
    return given.count + new


def step_done() -> None:
    """An optimizer's step is done: writes from now on are others."""
    with _lock:
        counts = [(given, _count(given)) for given in _open.values()]
        for given, count in counts:
            given.forget(count)
        _open.clear()


@contextlib.contextmanager
def counted_writes(model: nn.Module) -> Iterator[None]:
    """Count the writes to the ``.data`` of a model's parameters from now on."""
    with _lock:
        for parameter in model.parameters():
            # A DTensor's numbers are in another tensor.
            if type(_original.__get__(parameter)) is Tensor:
                _given.setdefault(parameter, _Given())
        _guarded.add(model)
        nn.Parameter.data = property(_data, _set_data)  # type: ignore[assignment]
    try:
        yield
    finally:
        _guarded.discard(model)
        _release()


def _release() -> None:
    """Give torch its attribute back if no model is left, which may go without its guard's end."""
    with _lock:
        if not _guarded and "data" in vars(nn.Parameter):
            del nn.Parameter.data
            _given.clear()
            _open.clear()


def _data(parameter: Tensor) -> Tensor:
    alias: Tensor = _original.__get__(parameter)
    given: _Given | None = _given.get(parameter)
    if given is None and not _guarded:
        _release()
    if given is not None and not alias.is_inference():
        with _lock:
            if id(parameter) not in _open:
                if len(_open) < _COPIES and not alias.is_meta:
                    with _disable_current_modes():
                        given.before = alias.clone()
                _open[id(parameter)] = given
            given.aliases.append(alias)
            if len(given.aliases) > _KEPT:
                given.count += given.aliases.pop(0)._version
    return alias


def _set_data(parameter: Tensor, value: Tensor) -> None:
    given: _Given | None = _given.get(parameter)
    if given is not None:
        with _lock:
            # The memory that they are of may go.
            given.forget(given.count + given.new() + 1)
    _original.__set__(parameter, value)


_original: Any = Tensor.data
