"""Whether gradients are dead between steps: learnt from what the program does with them.

Many loops leave the gradients of the last step lying until the next one sets them to None or to
zero. These need not be saved. In the first iterations of a loop every access to a gradient is
watched: one whose first use after the head of the loop was, each time, to be dropped or zeroed as
it lay there is dead at the head of this loop. One that is read or added to first is not, as in
the middle of an accumulation.

What was done so far is no proof of what will be. After a restore the gradients that were not saved
are watched until they have been set anew; whoever asks for one before is told, and the run stops.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from outlast.autosave.heap.tensors import Gradient, gradient, plain_gradient, set_gradient
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_ENOUGH = 2
"""Iterations in which a gradient must have been dropped unread."""

_PATIENCE = 16
"""Iterations without any gradient at the head of a loop after which none is waited for."""

_NEVER = -1


class Seen(NamedTuple):
    """A gradient as it lay at the head of a loop.

    Attributes:
        owner: Whose it is.
        grad: The gradient.
        version: It had this one.
    """

    owner: torch.Tensor
    grad: torch.Tensor | None
    version: int

    def lies(self) -> bool:
        """Whether it lies there as it did."""
        now = gradient(self.owner)
        return now is self.grad and (now is None or now._version == self.version)

    @classmethod
    def of(cls, owner: torch.Tensor) -> Seen:
        """The gradient of `owner` as it lies now."""
        grad = gradient(owner)
        return cls(owner, grad, 0 if grad is None else grad._version)


class GradientUse:
    """Watches what becomes of gradients.

    Only one at a time may watch in a process; `close` ends it.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}
        self._expected: dict[int, tuple[str, Seen]] = {}
        self._zeroed: set[int] = set()
        self._drops: dict[int, dict[int, int]] = {}
        self._settled: set[int] = set()
        self._without: Counter[int] = Counter()
        self._loop: int | None = None
        self._zeroing = False
        self._to_none = True
        self._remove: Callable[[], None] | None = None

    def boundary(self, loop: int, tensors: Iterable[torch.Tensor]) -> None:
        """The program is at the head of `loop`; `tensors` are those whose gradients count.

        Raises:
            AutosaveError: When a gradient that was not saved has been added to.
        """
        if self._remove is None and loop in self._settled:
            # Nothing is watched, nor will be: so it is at all but a loop's first steps.
            self._loop = loop
            return
        for seen in self._seen.values():
            # Nobody has dropped it in this iteration.
            self._judge(id(seen.owner), _NEVER)
        self._seen.clear()
        for path, left in self._expected.values():
            if not left.lies():
                raise _missing(path)
        self._loop = loop
        if loop not in self._settled:
            drops = self._drops.setdefault(loop, {})
            for owner in tensors:
                if gradient(owner) is not None and 0 <= drops.get(id(owner), 0) < _ENOUGH:
                    self._seen[id(owner)] = Seen.of(owner)
            self._without[loop] += not self._seen
            if not self._seen and (drops or self._without[loop] >= _PATIENCE):
                self._settled.add(loop)
        self._watch(bool(self._seen or self._expected))

    def is_dead(self, owner: torch.Tensor) -> bool:
        """Whether the gradient of `owner` is dropped before it is read, here at the loop's head."""
        if self._loop is None:
            return False
        return self._drops.get(self._loop, {}).get(id(owner), 0) >= _ENOUGH

    def stand_in(self, owner: torch.Tensor) -> Gradient | None:
        """What is saved in place of a dead gradient."""
        return Gradient.ZEROED if id(owner) in self._zeroed else Gradient.DROPPED

    def expect(self, path: str, owner: torch.Tensor) -> None:
        """The gradient of `owner`, called `path`, was not saved: see that nobody reads it."""
        self._expected[id(owner)] = (path, Seen.of(owner))
        self._watch(True)

    def close(self) -> None:
        """Watch no more."""
        self._seen.clear()
        self._expected.clear()
        self._watch(False)

    def _judge(self, owner: int, drop: int) -> None:
        assert self._loop is not None
        drops = self._drops[self._loop]
        drops[owner] = _NEVER if drop == _NEVER else drops.get(owner, 0) + 1

    def _read(self, owner: torch.Tensor) -> None:
        if self._zeroing:
            self._anew(owner)
            if not self._to_none:
                self._zeroed.add(id(owner))
            return
        if id(owner) in self._expected:
            raise _missing(self._expected[id(owner)][0])
        if self._seen.pop(id(owner), None) is not None:
            self._judge(id(owner), _NEVER)

    def _anew(self, owner: torch.Tensor) -> None:
        """A gradient is dropped or zeroed."""
        expected = self._expected.pop(id(owner), None)
        if expected is not None and not expected[1].lies():
            raise _missing(expected[0])
        seen = self._seen.pop(id(owner), None)
        if seen is not None:
            self._judge(id(owner), 1 if seen.lies() else _NEVER)

    def _watch(self, watched: bool) -> None:
        if watched and self._remove is None:
            self._remove = self._install()
        elif not watched and self._remove is not None:
            self._remove()
            self._remove = None

    def _install(self) -> Callable[[], None]:
        """Put watchers in the way to gradients; gives what takes them away again."""

        def get(owner: torch.Tensor) -> torch.Tensor | None:
            self._read(owner)
            return plain_gradient(owner)

        def put(owner: torch.Tensor, grad: torch.Tensor | None) -> None:
            self._anew(owner)
            set_gradient(owner, grad)

        def zeroing(plain: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(plain)
            def zero_grad(owner: Any, set_to_none: bool = True) -> Any:
                self._zeroing, self._to_none = True, set_to_none
                try:
                    return plain(owner, set_to_none)
                finally:
                    self._zeroing = False

            return zero_grad

        owners: tuple[Any, ...] = (torch.optim.Optimizer, torch.nn.Module)
        plain = [owner.zero_grad for owner in owners]
        torch.Tensor.grad = property(  # type: ignore[assignment]
            get, put, lambda owner: put(owner, None)
        )
        for owner, item in zip(owners, plain, strict=True):
            owner.zero_grad = zeroing(item)

        def remove() -> None:
            del torch.Tensor.grad
            for owner, item in zip(owners, plain, strict=True):
                owner.zero_grad = item

        return remove


def _missing(path: str) -> AutosaveError:
    return AutosaveError(
        f"the gradient of `{path}` is read or added to, but it was not saved: in the first steps "
        "the program dropped it first. Drop gradients at the end of each step, and start anew"
    )
