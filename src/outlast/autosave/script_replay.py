"""The oracle for a script: is a resumed run the same as one that was not interrupted, bit for bit?

A pass over the script is a process that is started with the file of its order; orders and results
lie in one folder, which nobody else writes to.

The script runs in processes of its own: once to its save and on, once from the save on, and once
with nothing but what `state_dict()` gives. Only when the first two differ it runs once more
uninterrupted, to tell what differs anyway (clocks, or a script that is not deterministic).

Pickled bytes of equal states differ (they tell which equal texts are one object), so they are read
into inert stand-ins and written as one line for each value.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
import xxhash

from outlast.autosave.heap.capture import Captured
from outlast.autosave.heap.names import Names
from outlast.autosave.heap.tensors import Gradient, GradientUse, Seen, gradient
from outlast.autosave.program.rewrite import rewrite
from outlast.autosave.program.source import RUNTIME, read_program
from outlast.autosave.program.training import find_training
from outlast.autosave.resume.frames import MODULE, Frames, name_of
from outlast.autosave.resume.loaders import ATOMS as _ATOMS
from outlast.autosave.resume.process import random_states
from outlast.autosave.resume.session import SavedState, execute
from outlast.autosave.state_plan import StateFinder, StatePlan, outermost_modules, readable_names
from outlast.autosave.step_trace import digest, digests, holds_numbers, storage_key
from outlast.errors import AutosaveError, OutlastError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    from outlast.autosave.program.source import Rewritten


class ProgramView:
    """The variables of a rewritten program: of its modules, and of the frames that lead here.

    Args:
        files: The program.
    """

    def __init__(self, files: list[Rewritten]) -> None:
        self._frames = Frames(files)
        self._files = {str(file.source.path) for file in files}
        self._live: dict[str, frozenset[str]] = {}
        self._dead: dict[str, frozenset[str]] = {}
        for site in self._frames.sites.values():
            self._live[site.body] = self._live.get(site.body, frozenset()) | site.names
            self._dead[site.body] = self._dead.get(site.body, site.dead) & site.dead

    def variables(self) -> dict[str, Any]:
        """Name to value: `name` of frames, outer ones first, and `module.name` of other modules.

        Without those that are read after no site of their body.
        """
        found: dict[str, Any] = {}
        dead: dict[str, frozenset[str]] = {}
        for frame in self._frames.of(sys._getframe(1)):
            body = name_of(frame.f_code)
            if frame.f_code.co_name == MODULE:
                dead[frame.f_globals["__name__"]] = self._dead.get(body, frozenset())
                continue
            live = self._live.get(body, frozenset())
            for name, item in frame.f_locals.items():
                if name in live and not name.startswith(RUNTIME.rstrip("_")):
                    found[_unused_name(name, found)] = item
        for module_name, module in self._modules():
            for name, variable in vars(module).items():
                if not name.startswith("__") and name not in dead.get(module_name, ()):
                    short = name if module_name == "__main__" else f"{module_name}.{name}"
                    found[_unused_name(short, found)] = variable
        return found

    def objects(self) -> dict[str, Any]:
        """Path to object, of all that the variables lead to."""
        return dict(Names(self.variables(), [name for name, _ in self._modules()]).objects)

    def plain_values(self, objects: dict[str, Any]) -> dict[str, str]:
        """Name to value, of variables, attributes and items that are numbers and texts."""
        found = self.variables()
        for path, object_ in objects.items():
            if isinstance(object_, dict):
                found |= {f"{path}[{key!r}]": value for key, value in object_.items()}
            elif isinstance(object_, list):
                found |= {f"{path}[{place}]": value for place, value in enumerate(object_)}
            elif hasattr(object_, "__dict__") and not isinstance(object_, type):
                found |= {f"{path}.{name}": value for name, value in vars(object_).items()}
        return {name: repr(value) for name, value in found.items() if isinstance(value, _ATOMS)}

    def _modules(self) -> list[tuple[str, ModuleType]]:
        return [
            (name, module)
            for name, module in list(sys.modules.items())
            if getattr(module, "__file__", None) in self._files
        ]


def _unused_name(name: str, found: Mapping[str, Any]) -> str:
    while name in found:
        name += "'"
    return name


_LONG = 120


_MANY = 1_000_000
"""Values from which on what is met twice is told once."""


def flat_values(program: bytes, blocks: Mapping[str, str]) -> dict[str, str]:
    """Location to value, of everything in `Captured.program`.

    What is met twice is told twice: equal objects need not be one in a program that was resumed.

    Args:
        program: As `heap.capture` writes it.
        blocks: Name of each block of memory to what it is to be called.
    """
    found: dict[str, str] = {}
    told: set[int] = set()
    waiting: list[tuple[str, Any, _Within]] = [
        (location, value, None) for location, value in reversed(_loaded(program))
    ]
    while waiting:
        location, value, within = waiting.pop()
        text = None
        if isinstance(value, str) and value in blocks:
            text = blocks[value]
        elif isinstance(value, _ATOMS):
            text = _short(repr(value))
        elif isinstance(value, (set, frozenset)):
            text = _short(" ".join(sorted(map(_name, value))))
        elif isinstance(value, type):
            text = value.__qualname__
        elif not _is_within(value, within) and (id(value) not in told or len(found) < _MANY):
            told.add(id(value))
            inner = (id(value), within)
            waiting.extend((where, item, inner) for where, item in _parts(location, value))
        if text is not None:
            found[_unused_name(location, found)] = text
    return found


_Within = Any
"""Identities of the objects around a value, the nearest first: `(identity, those around)`."""


def _is_within(value: Any, within: _Within) -> bool:
    while within is not None:
        identity, within = within
        if identity == id(value):
            return True
    return False


def _loaded(program: bytes) -> list[tuple[str, Any]]:
    """The pickles that a captured program consists of, as `heap.capture` writes them.

    First how things lie in memory; then the values, and the contents of named objects in turn.
    """
    header, body = _Reader(io.BytesIO(program)).load()
    reader = _Reader(io.BytesIO(body))
    found = [("memory", header), ("frames", reader.load())]
    while (contents := reader.load()) is not None:
        found += [(path, content) for path, content in contents.items()]
    return found


def _parts(location: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{location}[{_name(key)}]", item) for key, item in reversed(value.items())]
    if isinstance(value, _Inert):
        return [(location, type(value)), (location, value.parts)]
    # Contents of objects are names and values in turn.
    before = [None, *value]
    return [
        (f"{location}.{last}" if isinstance(last, str) else f"{location}[{place}]", item)
        for place, (last, item) in enumerate(zip(before, value, strict=False))
    ]


def _name(value: Any) -> str:
    if isinstance(value, _Inert):
        return f"{type(value).__qualname__}{tuple(map(_name, value.parts))}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_name, value))})"
    return repr(value) if isinstance(value, _ATOMS) else type(value).__qualname__


def _short(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[:20]}... ({len(text)} characters, {xxhash.xxh3_64_hexdigest(text.encode())})"


class _Inert:
    """Stands for an object of any class: keeps what it is made of."""

    parts: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        made = super().__new__(cls)
        made.parts = [*args, *([kwargs] if kwargs else [])]
        return made

    def append(self, value: Any) -> None:
        """As of a list; as `add` of a set."""
        self.parts.append(value)

    add = __setstate__ = append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append((key, value))

    def extend(self, values: Any) -> None:
        """As of a list."""
        self.parts.extend(values)


@functools.cache
def _inert(module: str, name: str) -> type[_Inert]:
    return type(name, (_Inert,), {"__qualname__": f"{module}.{name}"})


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _inert(module, name)

    def persistent_load(self, identity: Any) -> Any:
        return _inert("named", str(identity))()


class ComparedGradients(GradientUse):
    """As a run watches gradients; but what is compared lacks only what the save has lacked.

    A run that continues has learnt which gradients its loop drops, and one that was resumed has
    not: what each would save is not the same. What the save has left out counts for none of both,
    as long as it lies there; whoever reads it in the resumed run ends that.

    Attributes:
        comparing: Whether what is captured now is to be compared, not to be continued from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.comparing = False
        self._left_out: dict[int, tuple[Seen, Gradient]] = {}

    def is_dead(self, owner: torch.Tensor) -> bool:
        """Return True if the gradient of `owner` is left out."""
        if not self.comparing:
            return super().is_dead(owner)
        found = self._left_out.get(id(owner))
        return found is not None and found[0].lies()

    def stand_in(self, owner: torch.Tensor) -> Gradient | None:
        """Value to capture in place of a gradient that is left out: as it is after a restore."""
        if not self.comparing:
            made = super().stand_in(owner)
            assert made is not None
            self._left_out[id(owner)] = (Seen.of(owner), made)
            return made
        _, made = self._left_out[id(owner)]
        return None if made is Gradient.DROPPED else made

    def expect(self, path: str, owner: torch.Tensor) -> None:
        """The gradient of `owner`, called `path`, was not saved."""
        super().expect(path, owner)
        made = Gradient.DROPPED if gradient(owner) is None else Gradient.ZEROED
        self._left_out[id(owner)] = (Seen.of(owner), made)


Kind = Literal["record", "resume", "state_dict"]


TRACED_STEPS = 3
"""Steps before the save that are looked at: one whose inputs are noted, and two that are traced."""


SAVED, PLAIN = "saved.pickle", "state_dict.pickle"


@dataclass(frozen=True)
class Order:
    """Task of a pass.

    Attributes:
        kind: Record the original, resume from what it saved, or from its `state_dict()`s.
        script: The script.
        arguments: Of the script.
        at: After how many steps to save.
        steps: Steps to compare after that.
        folder: Where the passes leave files for each other.
        result: File of this pass's result.
        loop: ``FILE:LINE`` of the step loop; None finds it.
    """

    kind: Kind
    script: str
    arguments: tuple[str, ...]
    at: int
    steps: int
    folder: str
    result: str
    loop: str | None = None


@dataclass
class Result:
    """Observations of a pass.

    Attributes:
        tensors: Step to name to digest, of every tensor that the session saves.
        values: Step to location to value, of everything else that it saves.
        held: Readable name to digest of the tensors where the program stood.
        plain: Name to value of the plain values there.
        plan: The classes of the tensors; of the recording pass only.
        saved_bytes: Of the save; of the recording pass only.
        process_bytes: Memory of the process at the save; of the recording pass only.
        notes: What is not saved, one sentence each.
        error: One sentence, when it could not be done.
    """

    tensors: dict[int, dict[str, str]] = field(default_factory=dict)
    values: dict[int, dict[str, str]] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    plan: StatePlan | None = None
    saved_bytes: int = 0
    process_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    error: str = ""


class _Pass:
    """The keeper of a pass: looks instead of saving."""

    def __init__(self, order: Order, view: ProgramView) -> None:
        self._order = order
        self._view = view
        self._folder = Path(order.folder)
        self._last = order.at + order.steps
        self.gradients = ComparedGradients()
        self.result = Result()

    def digest(self, step: int, text: str) -> str | None:
        return None

    def left(self, step: int) -> None:
        pass

    def note(self, sentence: str) -> None:
        if sentence not in self.result.notes:
            self.result.notes.append(sentence)

    def failed(self, error: OutlastError) -> None:
        self.result.error = str(error)

    def saved(self) -> SavedState | None:
        return None

    def due(self, step: int) -> bool:
        self.gradients.comparing = step > self._order.at
        return self._order.at < step <= self._last

    def save(self, step: int, state: SavedState) -> None:
        self._compare(step, state.captured)

    def _compare(self, step: int, captured: Captured) -> None:
        tensors, blocks = self._digests(captured.tensors)
        self.result.tensors[step] = tensors
        self.result.values[step] = flat_values(captured.program, blocks)
        if step == self._last:
            self._end()

    def _digests(self, blocks: dict[str, torch.Tensor]) -> tuple[dict[str, str], dict[str, str]]:
        """Digests of the tensors that lie in the `blocks`, and what to call each block.

        A block may be larger than its tensors, and the rest was never written; one that no known
        tensor lies in is known by all of its content.
        """
        objects = self._view.objects()
        called = readable_names(objects)
        found: dict[str, str] = {}
        told: dict[int, str] = {}
        kept = {storage_key(block) for block in blocks.values()}
        for path, object_ in objects.items():
            if (
                isinstance(object_, torch.Tensor)
                and holds_numbers(object_)
                and object_.layout == torch.strided
            ):
                key = storage_key(object_)
                if key in kept:
                    name = called.get(id(object_), path)
                    told.setdefault(key, name)
                    found[name] = digest(object_)
        names: dict[str, str] = {}
        for block, item in blocks.items():
            content = digest(item)
            names[block] = told.get(storage_key(item), f"tensor without a name ({content})")
            found.setdefault(names[block], content)
        return found, names

    def _look(self) -> None:
        objects = self._view.objects()
        called = readable_names(objects)
        self.result.held = {
            called.get(id(objects[path]), path): item for path, item in digests(objects).items()
        }
        self.result.plain = self._view.plain_values(objects)
        for name, state in random_states().items():
            text = xxhash.xxh3_64_hexdigest(pickle.dumps(state))
            self.result.plain[f"random numbers ({name})"] = text

    def _end(self) -> None:
        """Leave as a killed program does, without its own last words."""
        write(Path(self._order.result), self.result)
        sys.stdout.flush()
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(0)


class _Recording(_Pass):
    def __init__(self, order: Order, view: ProgramView) -> None:
        super().__init__(order, view)
        self._finder: StateFinder | None = None

    def due(self, step: int) -> bool:
        at = self._order.at
        if at - TRACED_STEPS <= step <= at:
            # Before the save, since the session looks at tensors itself after one.
            if self._finder is None:
                self._finder = StateFinder(self._view.objects)
            else:
                self._finder.end_step()
            if step < self._order.at:
                self._finder.begin_step()
            else:
                self.result.plan = self._finder.plan()
                self._look()
        return super().due(step) or step == at

    def save(self, step: int, state: SavedState) -> None:
        captured = state.captured
        if step > self._order.at:
            self._compare(step, captured)
            return
        self.result.saved_bytes = len(captured.program) + sum(
            tensor.nbytes for tensor in captured.tensors.values()
        )
        device = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        self.result.process_bytes = int(psutil.Process().memory_info().rss) + device
        objects = self._view.objects()
        write(self._folder / SAVED, (captured.program, captured.tensors, state.logs))
        write(
            self._folder / PLAIN, {path: item.state_dict() for path, item in _plain_value(objects)}
        )


class _Resuming(_Pass):
    def saved(self) -> SavedState | None:
        program, tensors, logs = read(self._folder / SAVED)
        return SavedState(Captured(program, tensors), logs)


class _StateDicts(_Pass):
    def due(self, step: int) -> bool:
        return True

    def save(self, step: int, state: SavedState) -> None:
        plain = read(self._folder / PLAIN)
        for path, item in _plain_value(self._view.objects()):
            # The program may have come to other modules and optimizers than it begins with; what
            # does not fit is lost.
            with contextlib.suppress(KeyError, RuntimeError, TypeError, ValueError):
                item.load_state_dict(plain[path])
        self._look()
        self._end()


def _plain_value(objects: dict[str, Any]) -> list[tuple[str, Any]]:
    """The outermost modules and the optimizers, with their paths."""
    modules = {id(module) for module in outermost_modules(objects.values())}
    return [
        (path, object_)
        for path, object_ in objects.items()
        if id(object_) in modules or isinstance(object_, torch.optim.Optimizer)
    ]


def write(path: Path, value: Any) -> None:
    """Write a value with `torch.save`; the file is there when it is whole."""
    beside = path.with_suffix(".part")
    torch.save(value, beside)
    beside.replace(path)


def read(path: Path) -> Any:
    """Read what `write` has written."""
    return torch.load(path, weights_only=False)


_PASSES: dict[Kind, type[_Pass]] = {
    "record": _Recording,
    "resume": _Resuming,
    "state_dict": _StateDicts,
}


def main(path: str) -> int:
    """Do what an order says; the exit code is that of the script."""
    order: Order = read(Path(path))
    keeper: _Pass | None = None
    try:
        sources = read_program(Path(order.script))
        files = rewrite(sources, find_training(sources, order.loop))
        keeper = _PASSES[order.kind](order, ProgramView(files))
        status = execute(
            Path(order.script),
            files,
            order.arguments,
            keeper,
            resuming=order.kind == "resume",
            gradients=keeper.gradients,
        )
    except OutlastError as error:
        write(Path(order.result), Result(error=str(error)))
        return 2
    return status


@dataclass(frozen=True)
class Difference:
    """Something that is not the same after a number of steps.

    Attributes:
        step: The first step after which it differs.
        name: Of the tensor, or where the value is.
        expected: Digest or value in the original; empty when it is not there.
        found: In the other.
    """

    step: int
    name: str
    expected: str
    found: str

    def sentence(self) -> str:
        """For people."""
        if not self.expected:
            return f"step {self.step}: {self.name} is there, but should not be"
        if not self.found:
            return f"step {self.step}: {self.name} is missing"
        return f"step {self.step}: {self.name} is {self.found}, should be {self.expected}"


def first_differences(
    expected: Mapping[int, Mapping[str, str]], found: Mapping[int, Mapping[str, str]]
) -> Iterator[Difference]:
    """Each name that differs once, at the first step where it does."""
    told: set[str] = set()
    for step, names in expected.items():
        for difference in differences(step, names, found.get(step, {})):
            if difference.name not in told:
                told.add(difference.name)
                yield difference


def differences(
    step: int, expected: Mapping[str, str], found: Mapping[str, str]
) -> Iterator[Difference]:
    """The names whose digests or values are not the same."""
    for name in dict.fromkeys([*expected, *found]):
        if expected.get(name, "") != found.get(name, ""):
            yield Difference(step, name, expected.get(name, ""), found.get(name, ""))


_ITERATOR = f"['{RUNTIME.rstrip('_')}_"


_START = "import sys; from outlast.autosave.script_replay import main; sys.exit(main(sys.argv[1]))"


@dataclass(frozen=True)
class ScriptReplay:
    """Result of replaying a script.

    Attributes:
        plan: The classes of its tensors at the save.
        at: Steps done at the save.
        steps: Steps compared.
        tensors: Tensors compared after each step.
        values: Other values compared after each step.
        differences: What the resumed run had differently.
        unsteady: Names that differ between two uninterrupted runs, too.
        lost_tensors: Live tensors that `state_dict()` alone does not bring back.
        lost_values: Plain values that it does not bring back.
        saved_bytes: Of the save.
        process_bytes: Memory of the process at the save.
    """

    plan: StatePlan
    at: int
    steps: int
    tensors: int
    values: int
    differences: tuple[Difference, ...]
    unsteady: tuple[str, ...]
    lost_tensors: tuple[str, ...]
    lost_values: tuple[Difference, ...]
    saved_bytes: int
    process_bytes: int

    @property
    def identical(self) -> bool:
        """Return True if nothing was lost, as far as the script itself is the same every time."""
        return not self.differences


def replay_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    at: int = 4,
    steps: int = 3,
    timeout_seconds: float = 600.0,
    loop: str | None = None,
) -> ScriptReplay:
    """Save `script` after `at` steps, continue for `steps`, and do so again from the save.

    Args:
        script: The script; what it writes to files, it writes in each pass.
        arguments: Of the script.
        at: Steps before the save, at least 3.
        steps: Steps to compare, at least 1.
        timeout_seconds: Wall time that one pass may take.
        loop: ``FILE:LINE`` of its step loop; None finds it.

    Raises:
        AutosaveError: When the script fails, is too short, or cannot be resumed at all.
    """
    if at < TRACED_STEPS or steps < 1:
        raise AutosaveError(
            f"a replay after {at} steps over {steps} steps shows nothing; use at least "
            f"{TRACED_STEPS} steps before it and 1 to compare"
        )
    with tempfile.TemporaryDirectory(prefix="outlast-replay-") as folder:
        order = Order("record", str(script), tuple(arguments), at, steps, folder, "", loop)
        original = _run_pass(order, timeout_seconds)
        resumed = _run_pass(replace(order, kind="resume"), timeout_seconds)
        plain = _run_pass(replace(order, kind="state_dict"), timeout_seconds)
        found = _differences(original, resumed)
        unsteady: set[str] = set()
        if found:
            again = _run_pass(order, timeout_seconds)
            # A clock's value may differ. A tensor may not: in a script without a seed all do, and
            # what is lost could not be told from them.
            unsteady = {difference.name for difference in _differences(original, again)} - {
                difference.name for difference in first_differences(original.tensors, again.tensors)
            }
    plan = original.plan
    assert plan is not None
    needed = {
        name
        for tensor in plan.tensors
        if tensor.kind in ("must-save", "save-once")
        for name in (tensor.name, *tensor.aliases)
    }
    lost = [item for item in differences(at, original.held, plain.held) if item.expected]
    values = differences(at, original.plain, plain.plain)
    return ScriptReplay(
        plan=plan,
        at=at,
        steps=steps,
        tensors=len(original.tensors[at + 1]),
        values=len(original.values[at + 1]),
        differences=tuple(difference for difference in found if difference.name not in unsteady),
        unsteady=tuple(sorted(unsteady & {difference.name for difference in found})),
        lost_tensors=tuple(item.name for item in lost if item.name in needed),
        lost_values=tuple(item for item in values if item.expected),
        saved_bytes=original.saved_bytes,
        process_bytes=original.process_bytes,
    )


def _differences(original: Result, other: Result) -> list[Difference]:
    """Differences of the script's own.

    A resumed iterator may know more than one that was never stopped, such as the states that its
    workers began with; what it knows must not differ.
    """
    return [
        *first_differences(original.tensors, other.tensors),
        *(
            difference
            for difference in first_differences(original.values, other.values)
            if (difference.expected and difference.found) or _ITERATOR not in difference.name
        ),
    ]


def _run_pass(order: Order, timeout_seconds: float) -> Result:
    """One pass over the script, to its end.

    Raises:
        AutosaveError: When it does not come to its end.
    """
    with tempfile.NamedTemporaryFile(dir=order.folder, delete=False) as made:
        place = Path(made.name)
    result, output = place.with_suffix(".result"), place.with_suffix(".output")
    write(place, replace(order, result=str(result)))
    last = order.at + order.steps
    try:
        with output.open("wb") as file:
            done = subprocess.run(
                [sys.executable, "-c", _START, str(place)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout_seconds,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise AutosaveError(
            f"{order.script} did not come to step {last} within {timeout_seconds:g} s; allow more, "
            "or check fewer steps"
        ) from None
    if result.exists():
        found: Result = read(result)
        if found.error:
            raise AutosaveError(found.error)
        return found
    words = output.read_text(errors="replace").strip().splitlines()
    if done.returncode:
        raise AutosaveError(
            f"{order.script} ended with exit code {done.returncode} in the pass {order.kind!r} "
            f"before step {last}: {words[-1] if words else 'it printed nothing'}"
        )
    raise AutosaveError(f"{order.script} ended before step {last}; check fewer steps")
