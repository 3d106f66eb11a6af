"""A rewritten script run as plain Python would run it, and its session, `__outlast__`.

Objects are named when set-up is done, and what has a name need not be written down as a whole.
FSDP2 makes hooks, buffers and settings of its modules in their first forward pass: made before it,
they are there in every start of the program, and have names.

Digests of the steps after a save, to see whether a resumed run does what the first did.

A digest has the states of the random numbers, and of up to 128 tensors some of their numbers: of
what set-up has named and of what the optimizers hold. A step with another batch, another state of
an optimizer or another random number changes all parameters, so a sample shows it; reading it
takes milliseconds. It is done for each of the steps that follow a save, up to the 32nd, and then
for ever fewer of them: what a step has done to the numbers is still seen in those of later steps.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import gc
import hashlib
import json
import operator
import pickle
import sys
import types
import weakref
import zlib
from collections import Counter
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from outlast.autosave.heap.capture import Captured, capture, restore
from outlast.autosave.heap.names import Names, Unsaveable, marked, settled
from outlast.autosave.heap.tensors import GradientUse
from outlast.autosave.program.scopes import environment_names
from outlast.autosave.program.source import RUNTIME, rewritten_imports
from outlast.autosave.resume import files, iterators, loaders, process
from outlast.autosave.resume.files import (
    Handlers,
    Logs,
    add_handlers,
    file_handlers,
    later_handlers,
    reopened_logs,
)
from outlast.autosave.resume.frames import (
    FOREIGN,
    MODULE,
    Entries,
    Frames,
    Generators,
    Held,
    Place,
    entered_context,
    is_own,
    located,
    refuse_fed_queues,
    refuse_shared,
)
from outlast.autosave.resume.iterators import resumable, resumable_bars
from outlast.autosave.resume.loaders import resumable_loaders
from outlast.autosave.resume.modules import ForeignModules, ProgramModules, globals_of, own_names
from outlast.autosave.resume.process import (
    changed,
    random_states,
    set_random_states,
    set_switches,
    switches,
    visible_caches,
)
from outlast.errors import EXIT_CRASHED, AutosaveError, OutlastError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

    from outlast.autosave.program.source import Rewritten, Site, SourceFile
    from outlast.autosave.resume.files import FirstSizes
    from outlast.autosave.resume.modules import Changes


_EACH = 5


"""Powers of two of steps after a save of which each has a digest."""


_FIRST = 2


"""Steps after a save whose digests have a large sample."""


_TENSORS, _LATER_TENSORS = 128, 16


_NUMBERS = 4096


_TOLERANCE = 1e-4


"""Of the sums of sampled numbers, where a device adds in an order that changes."""


def is_compared(steps: int) -> bool:
    """Return True if there is a digest so many steps after a save."""
    return steps > 0 and steps % (1 << max(0, steps.bit_length() - 1 - _EACH)) == 0


def digest(
    steps: int, objects: Mapping[str, Any], lost: Collection[str], random_states: Any
) -> str:
    """The digest of this moment.

    Args:
        steps: Since the save.
        objects: Path to object: all that set-up has named.
        lost: Paths of those to which nothing leads any more; they are not saved, nor looked at.
        random_states: Of the sources of random numbers.
    """
    tensors = dict(_tensors({path: objects[path] for path in objects.keys() - lost}))
    paths = sorted(tensors)
    most = _TENSORS if steps <= _FIRST else _LATER_TENSORS
    chosen = paths[:: -(-len(paths) // most)] if paths else []
    exact = torch.are_deterministic_algorithms_enabled() or all(
        tensor.device.type == "cpu" for tensor in tensors.values()
    )
    found = {
        "random": hashlib.sha256(pickle.dumps(random_states, protocol=5)).hexdigest()[:16],
        "exact": exact,
        "lost": sorted(lost),
        "tensors": {path: _numbers(tensors[path]) for path in chosen},
    }
    return json.dumps(found)


def difference(before: str, now: str) -> str:
    """Differences between two digests of a step, in words; empty when there are none."""
    old, new = json.loads(before), json.loads(now)
    if old["random"] != new["random"]:
        return "the state of the random numbers"
    was, there = old["tensors"], new["tensors"]
    # What was lost was found by saves, which two lives do not make after the same steps.
    of_same_size = len(was) > _LATER_TENSORS or len(there) <= _LATER_TENSORS
    if old["lost"] == new["lost"] and of_same_size and was.keys() != there.keys():
        return "which tensors there are"
    exact = old["exact"] and new["exact"]
    different = [path for path in there if path in was and not _same(was[path], there[path], exact)]
    if not different:
        return ""
    others = f" and {len(different) - 1} other tensors" if len(different) > 1 else ""
    return f"`{different[0]}`{others}"


def _tensors(objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that training may change, by name."""
    for path, value in objects.items():
        if isinstance(value, torch.optim.Optimizer):
            for place, state in enumerate(list(value.state.values())):
                for name, item in state.items() if isinstance(state, dict) else ():
                    if _readable(item):
                        yield f"{path}.state[{place}].{name}", item
        elif _readable(value) and value.is_floating_point():
            yield path, value


def _readable(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not hasattr(value, "__tensor_flatten__")
        and value.numel() > 0
        and value.is_contiguous()
    )


def _numbers(tensor: torch.Tensor) -> tuple[int, float, float]:
    """Checksum, sum and sum of the sizes of some of a tensor's numbers."""
    flat = tensor.detach().view(-1)
    some = flat[:: -(-flat.numel() // _NUMBERS)].cpu().contiguous()
    wide = some.double()
    check = zlib.crc32(some.view(torch.uint8).numpy().tobytes())
    return check, float(wide.sum()), float(wide.abs().sum())


def _same(old: Any, new: Any, exact: bool) -> bool:
    if exact:
        return bool(old[0] == new[0])
    return all(
        abs(one - other) <= _TOLERANCE * max(old[2], new[2])
        for one, other in zip(old[1:], new[1:], strict=True)
    )


_OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.iadd,
    "Sub": operator.isub,
    "Mult": operator.imul,
    "MatMult": operator.imatmul,
    "Div": operator.itruediv,
    "FloorDiv": operator.ifloordiv,
    "Mod": operator.imod,
    "Pow": operator.ipow,
    "LShift": operator.ilshift,
    "RShift": operator.irshift,
    "BitOr": operator.ior,
    "BitXor": operator.ixor,
    "BitAnd": operator.iand,
}


"""Name of an operator in `ast` to what it does."""


def augmented(kind: str, before: Any, value: Any) -> Any:
    """Return the value to assign; an object that can is changed in place.

    Args:
        kind: Name of the operator in `ast`.
        before: What was at the place.
        value: What stands behind the operator.
    """
    return _OPERATIONS[kind](before, value)


REDUCERS: Mapping[type, Callable[[Any], Any]] = {
    **files.REDUCERS,
    **iterators.REDUCERS,
    **loaders.REDUCERS,
    **process.REDUCERS,
}


"""Type to how its objects, and those of types derived from it, are pickled."""


IN_PLACE: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    **files.IN_PLACE,
    **iterators.IN_PLACE,
    **loaders.IN_PLACE,
}


"""Type to what its objects hold, and how to make others hold it; those that set-up makes anew."""


class SavedState(NamedTuple):
    """State that a keeper restores.

    Attributes:
        captured: What was in memory.
        logs: Path of each log to its size in bytes.
    """

    captured: Captured
    logs: dict[str, int]


class Keeper(Protocol):
    """Decides when to save a script, does it, and brings it back."""

    def due(self, step: int) -> bool:
        """Return True if the state is to be saved after `step` steps; asked once for each."""

    def save(self, step: int, state: SavedState) -> None:
        """Save; returns when the tensors may change again."""

    def saved(self) -> SavedState | None:
        """Return the state to resume from, when set-up is done; None starts from the beginning.

        By then the script has made its process group, so that all ranks choose the same version.
        """

    def digest(self, step: int, text: str) -> str | None:
        """Keep the digest of a step soon after a save, beside that save; on stable storage.

        Where an earlier life of the run kept one of this step after the same save, it is left as
        it is and returned: the session compares, and stops the run when they differ. None where
        nothing is to be compared (a first life, changes that were accepted).
        """

    def left(self, step: int) -> None:
        """A step loop has come to its end after `step` steps; another one may follow."""

    def note(self, sentence: str) -> None:
        """Tell people of something that is not saved."""

    def failed(self, error: OutlastError) -> None:
        """Remember why the program must not continue; its script may catch the error itself."""


_TRIED = 2


"""Boundaries of each loop, before and after its first step, at which a save is tried."""


class Passed(BaseException):
    """Leaves a call that set-up had begun, and that is not while resuming."""


class Session:
    """A run of a rewritten program.

    Args:
        files: The program.
        keeper: Saves it, and brings it back.
        logs: The files that it opens for writing.
        gradients: Tells which gradients need not be saved; None makes one.

    Attributes:
        augmented: What `place += value` computes.
        live: Whether the program does its work; False while resuming to where it was saved.
        restoring: Whether the frame that asks is to take its local names over.
        late: Depths of the frames that take theirs over when they are back from a call.
        passed: What leaves a call that is not on the way.
        unset: Stands for a local name that had no value.
        anew: Stands for a function, class or module that is defined or imported again.
        slice: What makes a slice, whatever the program calls by that name.
        step: Iterations of step loops begun so far; at a boundary, steps done.
        generators: What rewritten generator functions call.
        abandoned: Contexts that set-up has entered and that are not ended while resuming.
    """

    passed = Passed
    unset = object()
    anew = object()
    augmented = staticmethod(augmented)
    slice = slice

    def __init__(
        self,
        files: list[Rewritten],
        keeper: Keeper,
        logs: Logs,
        gradients: GradientUse | None = None,
    ) -> None:
        self.live = True
        self.restoring = False
        self.late: set[int] = set()
        self.step = 0
        self.abandoned: list[Any] = []
        self._frames = Frames(files)
        self.generators = Generators(self, self._frames, files)
        self._files = frozenset(str(file.source.path) for file in files)
        self._modules = ProgramModules([file.source.path for file in files])
        self._sources = [file.source for file in files]
        self._environment = environment_names(self._sources)
        self._setup_values: dict[str, dict[str, Any]] = {}
        self._foreign = ForeignModules(self._sources, self._modules.is_own)
        self._script = files[0].source.name()
        self._keeper = keeper
        self._logs = logs
        # The modules that FSDP2 has sharded, when set-up is done.
        self._sharded: list[weakref.ref[FSDPModule]] = []
        self._names: Names | None = None
        self._target: list[Place] = []
        self._random: Any = None
        self._switches: dict[str, Any] = {}
        self._at_setup: dict[str, Any] = {}
        self._handlers: Handlers = {}
        self._reached: set[int] = set()
        self._frame_values: dict[str, Any] = {}
        self._passed: set[tuple[int, int]] = set()
        self._asked = -1
        self._watched_from: int | None = None
        self._tried: Counter[int] = Counter()
        self._visits: Counter[int] = Counter()
        self._entries = Entries(self._frames, self._files)
        # Elsewhere than in its steps, the program may read what its next step would drop.
        learns = not any(file.reads_gradients for file in files)
        self._gradients = (gradients or GradientUse()) if learns else None
        self._known = {"session": self, "anew": self.anew, "builtins": vars(builtins)}

    def goes(self, number: int) -> bool:
        """Return True if the program enters site `number`."""
        if self._names is None and self._frames.sites[number].kind in ("step", "loop"):
            self._begin(sys._getframe(1))
            if not self.live and self._frames.is_left(sys._getframe(1), self._target):
                raise Passed
        self._visits[number] += 1
        if self.live:
            return True
        depth = self._frames.matches(sys._getframe(1), number, self._target)
        if depth is None:
            return False
        if depth not in self._reached:
            self._reached.add(depth)
            self._frame_values = self._target[depth].names
            self.restoring = sys._getframe(1).f_code.co_name != MODULE
        return True

    def leads(self) -> bool:
        """After a call that was left: whether the way leads on through the frame that asks."""
        return not self._frames.is_left(sys._getframe(1), self._target)

    def enter(self) -> None:
        """A function that leads to training begins."""
        frames = self._frames.of(sys._getframe(1))
        site = self._frames.leading(frames[-2]) if len(frames) > 1 else None
        visit = 0 if site is None else self._visits[site.number]
        self._entries.entered(frames, visit, in_setup=self._names is None)

    def values(self, names: list[str]) -> list[Any]:
        """Values of local names of the frame that asks."""
        self.restoring = False
        values, self._frame_values = self._frame_values, {}
        return [values.get(name, self.unset) for name in names]

    def returns(self) -> bool:
        """Return True if the calling frame is back from the call in which set-up had brought it."""
        frame = sys._getframe(1)
        depth = len(self._frames.of(frame)) - 1
        if depth not in self.late:
            return False
        place = self._target[depth]
        if self._frames.number_of(self._frames.leading(frame)) != place.site:
            return False
        self.late.discard(depth)
        self._frame_values = place.names
        if not self.late:
            self._target = []
        return True

    def entered(self, name: str, context: str) -> Any:
        """Context that stands for the expression of a `with`; None if it is to be evaluated.

        Args:
            name: What the statement binds.
            context: Name of the hidden variable that holds its context.
        """
        if self.live:
            return None
        values = sys._getframe(1).f_locals
        return values.get(context) or entered_context(values.get(name), self._files, own=False)

    def held(self, context: Any) -> Held:
        """Stand-in for an entered context, which ends it when the program does its work."""
        return Held(self, context, own=is_own(context, self._files))

    def iterate(self, number: int, iterable: Iterable[Any]) -> LoopIterator:
        """The iterator of loop `number`."""
        return LoopIterator(self, number, resumable(iterable))

    def head(self, number: int) -> bool:
        """At the head of `while` loop `number`: whether to go in without asking its condition."""
        if not self.live:
            return not self.arrives(number, sys._getframe(1))
        if self._frames.sites[number].kind == "step":
            self.boundary(number, sys._getframe(1))
        return False

    def arrives(self, number: int, frame: FrameType) -> bool:
        """Return True if the program was saved at the head of loop `number`; then it is live.

        Raises:
            AutosaveError: When an iteration has passed without a way to where it was saved.
        """
        depth = self._frames.matches(frame, number, self._target)
        if depth is None or (number, depth) in self._passed:
            raise self._lost()
        if depth != len(self._target) - 1 or self._target[-1].site != number:
            self._passed.add((number, depth))
            return False
        set_random_states(self._random)
        set_switches(self._switches)
        self._random = None
        self.late = {
            place
            for place, item in enumerate(self._frames.of(frame))
            if place not in self._reached and item.f_code.co_name != MODULE
        }
        self._target = [
            item if place in self.late else item._replace(names={})
            for place, item in enumerate(self._target)
        ]
        self.live = True
        return True

    def boundary(self, number: int, frame: FrameType) -> None:
        """Between two steps of loop `number`."""
        step = self.step
        if step == self._asked:
            # The loop of one epoch has ended, and that of the next begins.
            return
        self._asked = step
        if self._gradients is not None and self._names is not None:
            self._gradients.boundary(number, self._names.weights)
        if self._watched_from is not None and is_compared(step - self._watched_from):
            with self._noted("a step of the program could not be compared"):
                self._compare(step)
        due = self._keeper.due(step)
        if not due and self._tried[number] >= _TRIED:
            return
        with self._noted("the program's state could not be captured"):
            captured = self._capture(number, frame)
        if due:
            self._keeper.save(step, SavedState(captured, self._logs.sizes()))
            self._watched_from = step
        else:
            # What a save would refuse is refused before hours are lost.
            self._tried[number] += 1

    def left(self) -> None:
        """A step loop has come to its end, whatever ended it; after an error it is not told."""
        self._keeper.left(self.step)

    def finish(self) -> None:
        """At the end of the program.

        Raises:
            AutosaveError: When the place where it was saved was not found.
        """
        if not self.live:
            raise self._lost()

    def close(self) -> None:
        """Look at the program's gradients no more; to be called however it ends."""
        if self._gradients is not None:
            self._gradients.close()

    def kept(self, site: Site, name: str, value: Any) -> Any:
        """Value to write down for a local name at a site."""
        if name not in site.defined or self._names is None:
            return value
        return self.anew if self._names.path_of(value) is None else value

    def _lost(self) -> AutosaveError:
        site = self._frames.sites[self._target[-1].site or 0]
        error = AutosaveError(
            f"{self._script} did not come back to the loop in line {site.line} where it was saved "
            f"after {self.step} steps; its set-up must lead to the same loop in every run"
        )
        self._keeper.failed(error)
        return error

    @contextlib.contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Tell the keeper of an error, since the script may catch it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, OutlastError):
                self._keeper.failed(AutosaveError(f"{what} ({type(error).__name__}: {error})"))
            else:
                self._keeper.failed(error)
            raise

    def _begin(self, frame: FrameType) -> None:
        """The first training loop is reached: set-up is done."""
        self._sharded = _sharded_modules()
        with self._noted("the program's state could not be brought back"):
            saved = self._keeper.saved()
            names = self._name_objects(frame)
            if saved is not None:
                self._go_back(saved.captured, names)
            self._logs.cut_back(None if saved is None else saved.logs)

    def _name_objects(self, frame: FrameType) -> Names:
        """Name all that set-up has made, and look at what it has set."""
        own = self._modules.globals()
        # Frames of functions: that of a module has global names.
        frames = {
            depth: item
            for depth, item in enumerate(self._frames.of(frame))
            if item.f_code.co_name != MODULE
        }
        roots = {
            f"{module}.{name}": value
            for module, values in own.items()
            for name, value in values.items()
        }
        for depth, item in frames.items():
            roots |= {f"{depth}:{name}": value for name, value in item.f_locals.items()}
        reducers = {**REDUCERS, types.GeneratorType: self.generators.reduction}
        foreign = self._foreign.begin(own)
        self._names = Names(
            roots, list(own), reducers, IN_PLACE, foreign, self._foreign.packages, self._environment
        )
        places: dict[str, Mapping[str, Any]] = own | {
            f"{depth}:{self._frames.body_of(item)}": item.f_locals for depth, item in frames.items()
        }
        self._setup_values = {
            place: {name: values[name] for name in values.keys() & self._environment}
            for place, values in places.items()
        }
        process.remember(roots, self._names)
        self._at_setup, self._handlers = switches(), file_handlers()
        return self._names

    def _settled(self, place: str, values: dict[str, Any]) -> dict[str, Any]:
        assert self._names is not None
        before = self._setup_values.get(place, {})
        return settled(values, before, functools.partial(self._names.renewed, place))

    def _go_back(self, saved: Captured, names: Names) -> None:
        found = restore(saved, names, self._known, self._gradients)
        self.step, self._target, values, self._random, self._switches, handlers, *later = found
        self._target = [
            place._replace(names=self._settled(f"{depth}:{place.body}", place.names))
            for depth, place in enumerate(self._target)
        ]
        values = {module: self._settled(module, value) for module, value in values.items()}
        if names.renewals:
            self._keeper.note(
                f"{', '.join(names.renewals)}: set-up takes this from the environment, where it is "
                "another value than when the run was saved; the new one counts"
            )
        add_handlers(handlers)
        for changes in later:
            self._foreign.put(changes)
        self._asked = self.step
        self._watched_from = self.step
        site = self._target[0].site
        dead = frozenset[str]() if site is None else self._frames.sites[site].dead
        for module, found in values.items():
            own = globals_of(module)
            for name in own_names(own):
                if name not in found and name not in dead:
                    del own[name]
            own.update(found)
        self.live = False

    def _capture(self, number: int, frame: FrameType) -> Captured:
        assert self._names is not None

        def marks(place: str, values: dict[str, Any]) -> dict[str, Any]:
            before = self._setup_values.get(place, {})
            return marked(values.items(), before, self._environment) if before else values

        for reference in self._sharded:
            if (sharded := reference()) is not None:
                # Parameters that a forward pass without a backward pass has left gathered.
                sharded.reshard()
        frames = self._frames.of(frame)
        self._entries.refuse_unseen(frames)
        refuse_fed_queues(self._names, self._files)
        places = [
            place._replace(names=marks(f"{depth}:{place.body}", place.names))
            for depth, place in enumerate(self._frames.places(frame, number, self.kept))
        ]
        dead = {
            frame.f_globals["__name__"]: self._frames.sites[place.site].dead
            for frame, place in zip(frames, places, strict=True)
            if frame.f_code.co_name == MODULE and place.site is not None
        }

        values = {
            module: marks(
                module,
                {name: value for name, value in values.items() if name not in dead.get(module, ())},
            )
            for module, values in self._modules.globals().items()
        }
        set_later = (changed(self._at_setup), later_handlers(self._handlers))
        ask = refuse_shared(frames, self._sources)
        while True:
            foreign = self._foreign.changes()
            state = (self.step, places, values, random_states(), *set_later, foreign)
            try:
                return capture(self._names, state, self._known, self._gradients, ask)
            except Unsaveable as error:
                if not self._leave(error, foreign):
                    raise located(error, self._sources, frames) from None
                self._keeper.note(
                    f"what is at {error} It is a package's, and is left as each start makes it"
                )

    def _leave(self, error: Unsaveable, foreign: Changes) -> bool:
        """Save no more what a package holds, and cannot be; gives whether it is such a thing."""
        assert self._names is not None
        if error.root is not None:
            return self._names.leave(error.root)
        if len(error.path) < 4 or error.path[0] != f"[{FOREIGN}]":
            return False
        owner = list(foreign)[int(error.path[1].removeprefix("[value ").removesuffix("]"))]
        return self._foreign.leave(owner, ast.literal_eval(error.path[3][1:-1]))

    def _compare(self, step: int) -> None:
        """Keep the digest of a step after a save, or compare it with what an earlier life kept."""
        assert self._names is not None
        assert self._watched_from is not None
        names = self._names
        text = digest(step - self._watched_from, names.objects, names.lost, random_states())
        before = self._keeper.digest(step, text)
        different = "" if before is None else difference(before, text)
        if not different:
            return
        renewed = f" ({', '.join(names.renewals)})" if names.renewals else ""
        raise AutosaveError(
            f"{self._script} was resumed, but after step {step} {different} differs from what the "
            "run had there before it was stopped; something that it depends on is not saved, or "
            "its computations are not the same each time (torch.use_deterministic_algorithms(True) "
            f"tells), or its environment has changed{renewed}: then set that as before, or give "
            "--accept-changes if other results are wanted"
        )


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
        item = next(self._inner)
        if self._step:
            session.step += 1
        return item

    def __reduce__(self) -> Any:
        return LoopIterator, (self._session, self._number, self._inner)


def _sharded_modules() -> list[weakref.ref[FSDPModule]]:
    """The modules that FSDP2 has sharded, with all that their first forward pass makes."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    # By their types, since asking an object for its class may run code of its own.
    found = [object_ for object_ in gc.get_objects() if issubclass(type(object_), FSDPModule)]
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    for module in found:
        if id(module) not in inner:
            # As its first forward pass does, and with the same outcome.
            module._get_fsdp_state()._lazy_init()
    return [weakref.ref(module) for module in found]


_INTERRUPTED = 130
"""What a shell sees of a process that Ctrl-C has ended."""


def execute(
    script: Path,
    files: list[Rewritten],
    arguments: Sequence[str],
    keeper: Keeper,
    *,
    resuming: bool,
    first_sizes: FirstSizes | None = None,
    gradients: GradientUse | None = None,
) -> int:
    """Run a program to its end.

    The script finds what it finds under ``python script.py``: its own `__main__`, its arguments,
    its folder first on the path. Its traceback begins with its own first line. When it ends,
    `__main__` stays in place, for functions that it has registered to be called at the exit.

    Args:
        script: The script as the command line names it.
        files: The program, the script first.
        arguments: Of the script.
        keeper: Saves its state, and brings it back.
        resuming: Whether there may be a state to go back to, so that set-up must empty no log.
        first_sizes: What the logs were before the run; None knows of none.
        gradients: Tells which gradients need not be saved; None learns it from the first steps.

    Returns:
        The exit code that the script would have had; 0 when it has come to its end.

    Raises:
        OutlastError: Raised on the way, or when the way to where it was saved is not found.
    """
    root = files[0].source.path.parent
    reopened = reopened_logs(resuming, root, first_sizes)
    with reopened as logs, resumable_loaders(), resumable_bars():
        session = Session(files, keeper, logs, gradients)
        own = frozenset(str(file.source.path) for file in files)
        imports = rewritten_imports(files[1:], session)
        with imports, visible_caches(own), contextlib.closing(session):
            return _execute(script, files[0].source, files[0].tree, arguments, session)


def execute_plainly(script: Path, source: SourceFile, arguments: Sequence[str]) -> int:
    """As `execute`, for a script as it is, which somebody else saves and resumes."""
    return _execute(script, source, source.tree, arguments, None)


def _execute(
    script: Path,
    source: SourceFile,
    tree: ast.Module,
    arguments: Sequence[str],
    session: Session | None,
) -> int:
    real = source.path
    # The script's __main__, as Python makes it.
    module = types.ModuleType("__main__")
    module.__file__ = str(script.absolute())
    module.__loader__ = SourceFileLoader("__main__", str(script.absolute()))
    module.__dict__["__cached__"] = None
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    if session is not None:
        module.__dict__[RUNTIME] = session
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        # Python has put the folder there of the program that runs the script.
        sys.path[0] = str(real.parent)
    code = compile(tree, str(real), "exec", dont_inherit=True)
    try:
        exec(code, module.__dict__)
    except SystemExit as ended:
        code_given: Any = ended.code
        if code_given is None:
            status = 0
        elif isinstance(code_given, int):
            status = code_given & 0xFF
        else:
            # A text is printed, as Python does.
            print(code_given, file=sys.stderr, flush=True)
            status = 1
        if status == 0 and session is not None:
            session.finish()
        return status
    except OutlastError:
        raise
    except BaseException as error:
        # Hand the script's error to `sys.excepthook`, without the frames that led to the script.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = trace
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        sys.excepthook(type(error), error, trace)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_CRASHED
    if session is not None:
        session.finish()
    return 0
