"""What a rewritten program calls while it runs: `__outlast__`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

from outlast.autosave.heap.capture import Captured, capture, restore
from outlast.autosave.heap.names import Names
from outlast.autosave.resume.frames import Frames, Place
from outlast.autosave.resume.randomness import random_states, set_random_states
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from outlast.autosave.program.rewrite import Rewritten


class Keeper(Protocol):
    """Decides when to save, and does it."""

    def due(self, step: int) -> bool:
        """Whether to save after `step` steps; asked once for each step, in ascending order."""

    def save(self, step: int, captured: Captured) -> None:
        """Save; returns when the tensors may change again."""

    def digest(self, step: int, text: str) -> str | None:
        """Keep the digest of a step soon after a save, beside that save; on stable storage.

        Where an earlier life of the run kept one of this step after the same save, it is left as
        it is and returned: the session compares, and stops the run when they differ. None where
        nothing is to be compared (a first life, changes that were accepted).
        """


class Session:
    """A run of a rewritten program.

    Args:
        files: The program.
        keeper: Saves it.
        saved: What to go back to; None starts from the beginning.

    Attributes:
        live: Whether the program does its work; False on the way back to where it was saved.
        restoring: Whether the frame that asks is to take its local names over.
        unset: Stands for a local name that had no value.
        step: Steps done.
    """

    unset = object()

    def __init__(
        self, files: list[Rewritten], keeper: Keeper, saved: Captured | None = None
    ) -> None:
        self.live = True
        self.restoring = False
        self.step = 0
        self._frames = Frames(files)
        self._modules = {str(each.source.path) for each in files}
        self._keeper = keeper
        self._saved = saved
        self._names: Names | None = None
        self._target: list[Place] = []
        self._random: Any = None
        self._reached: set[int] = set()
        self._frame_values: dict[str, Any] = {}

    def goes(self, number: int) -> bool:
        """Whether the program enters site `number`."""
        if self._names is None and self._frames.sites[number].kind in ("step", "loop"):
            self._begin(sys._getframe(1))
        if self.live:
            return True
        depth = self._frames.matches(sys._getframe(1), number, self._target)
        if depth is None:
            return False
        if depth not in self._reached:
            self._reached.add(depth)
            self._frame_values = self._target[depth].names
            self.restoring = True
        return True

    def values(self, names: list[str]) -> list[Any]:
        """Values of local names of the frame that asks."""
        self.restoring = False
        return [self._frame_values.get(name, self.unset) for name in names]

    def iterate(self, number: int, iterable: Iterable[Any]) -> LoopIterator:
        """The iterator of loop `number`."""
        return LoopIterator(self, number, iter(iterable))

    def head(self, number: int) -> bool:
        """At the head of `while` loop `number`: whether to go in without asking its condition."""
        if not self.live:
            return not self.arrives(number, sys._getframe(1))
        if self._frames.sites[number].kind == "step":
            self.boundary(number, sys._getframe(1))
        return False

    def arrives(self, number: int, frame: FrameType) -> bool:
        """Whether the head of loop `number` is where the program was saved; then it is live."""
        depth = self._frames.matches(frame, number, self._target)
        if depth != len(self._target) - 1 or self._target[-1].site != number:
            return False
        set_random_states(self._random)
        self.live = True
        return True

    def boundary(self, number: int, frame: FrameType) -> None:
        """Between two steps of loop `number`."""
        if self._keeper.due(self.step):
            self._keeper.save(self.step, self._capture(number, frame))
        self.step += 1

    def finish(self) -> None:
        """At the end of the program.

        Raises:
            AutosaveError: When the way back was not found.
        """
        if not self.live:
            raise AutosaveError(
                "the program ended without coming to where it was saved; its set-up must lead to "
                "the same loop in every run"
            )

    def _begin(self, frame: FrameType) -> None:
        """The first training loop is reached: set-up is done."""
        roots = {name: values for name, (_, values) in self._globals().items()}
        for depth, each in enumerate(self._frames.of(frame)):
            if each.f_code.co_name != "<module>":
                roots |= {f"{depth}:{name}": value for name, value in each.f_locals.items()}
        flat = {
            f"{module}.{name}": value
            for module, (_, values) in self._globals().items()
            for name, value in values.items()
        }
        locals_ = {name: value for name, value in roots.items() if ":" in name}
        modules = {module for module, _ in self._globals().items()}
        self._names = Names({**flat, **locals_}, modules)
        if self._saved is not None:
            step, places, values, self._random = restore(
                self._saved, self._names, {"session": self}
            )
            self.step, self._target, self._saved = step, places, None
            for module, names in values.items():
                vars(sys.modules[module]).update(names)
            self.live = False

    def _capture(self, number: int, frame: FrameType) -> Captured:
        assert self._names is not None
        places = self._frames.places(frame, number)
        values = {
            module: {name: each for name, each in values.items() if self._kept(module, name)}
            for module, (_, values) in self._globals().items()
        }
        content = (self.step, places, values, random_states())
        return capture(self._names, content, {"session": self})

    def _kept(self, module: str, name: str) -> bool:
        return True

    def _globals(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Name of each module of the program: its file, and its global names."""
        found = {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file in self._modules:
                values = {
                    each: value
                    for each, value in vars(module).items()
                    if not (each.startswith("__") and each.endswith("__"))
                    or each[:10] == "__outlast_"
                }
                values.pop("__outlast__", None)
                found[name] = (file, values)
        return found


class LoopIterator:
    """The iterator of a training loop; asks the session at each head of the loop."""

    __slots__ = ("_inner", "_number", "_session", "_step")

    def __init__(self, session: Session, number: int, inner: Iterator[Any]) -> None:
        self._session = session
        self._number = number
        self._inner = inner
        self._step = session._frames.sites[number].kind == "step"

    def __iter__(self) -> LoopIterator:
        return self

    def __next__(self) -> Any:
        session = self._session
        if not session.live:
            if not session.arrives(self._number, sys._getframe(1)):
                return None
        elif self._step:
            session.boundary(self._number, sys._getframe(1))
        return next(self._inner)

    def __reduce__(self) -> Any:
        return LoopIterator, (self._session, self._number, self._inner)
