"""The heap of a program as bytes and tensors, and back into the objects of another process.

From the values to be captured every named object is reached that they lead to, and what each holds
is written down if it counts. Objects that set-up has made and that nothing leads to any more are
left out, unless they have changed: somebody may hold them where nobody can look.

Whether a block of memory has changed since the last save is not asked here. Versions of tensors do
not tell: NumPy, `.data`, batch normalization and custom operators write past them. The content
hashes of the store do, at the price of reading each block once per save, and what has not changed
is written once.
"""

from __future__ import annotations

import functools
import io
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from outlast.autosave.heap.blocks import Blocks, Geometry, RestoredBlocks, lies_in_block
from outlast.autosave.heap.environment import has_marks, settled_content
from outlast.autosave.heap.parametrized import ParametrizedClass, class_from, class_of
from outlast.autosave.heap.refusal import (
    CHAIN_ADVICE,
    CLASS_ADVICE,
    SetupDiffersError,
    Unsaveable,
    advice_for,
    locate,
    name_of,
)
from outlast.autosave.heap.results import LARGEST_BYTES, Results
from outlast.autosave.heap.sizes import NOT_SAVED, sizes_of
from outlast.autosave.heap.tensors import Gradient, gradient
from outlast.autosave.heap.undisturbed import undisturbed
from outlast.autosave.heap.values import Reader, Writer
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FunctionType

    from outlast.autosave.heap.content import Content
    from outlast.autosave.heap.gradients import GradientUse
    from outlast.autosave.heap.names import Names


@dataclass
class Captured:
    """What was found in memory.

    Attributes:
        program: All but the numbers of tensors and arrays, pickled.
        tensors: Name to a block of memory as one row; views of the live memory. Names of blocks
            that set-up makes begin with ``=``, those of later ones with ``+``.
        sizes: Bytes by what they are: parameters, buffers, optimizer, gradients, arrays, tensors,
            program; and apart from these, ``gradients not saved``.
    """

    program: bytes = b""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Header:
    """What must be known before the rest is read.

    Attributes:
        places: Path of each named tensor and array to how it lies in its block.
        types: Path of each named object that is mentioned to its class's name after set-up.
        became: Path to class, where that is another one now.
        next_hook: Number of the next hook that a module will be given.
        written: Paths of the tensors that the program has written to since set-up.
        lost: Paths of the tensors and optimizers that were not saved: nothing led to them.
    """

    places: dict[str, Geometry]
    types: dict[str, str]
    became: dict[str, type | ParametrizedClass]
    next_hook: int
    written: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()


def capture(
    names: Names,
    values: Any,
    known: Mapping[str, Any],
    gradients: GradientUse | None = None,
    ask: Callable[[FunctionType], None] | None = None,
) -> Captured:
    """Write down `values` and the named objects they lead to; no block of memory is copied.

    Args:
        names: Objects that exist in every process of the program.
        values: Anything, e.g. local names.
        known: Further objects with names, which hold nothing.
        gradients: Tells which gradients need not be saved; None saves all.
        ask: Asked whether a function may be written by value; raises an error where not.

    Raises:
        Unsaveable: When something can be written down in no way.
    """
    with undisturbed():
        return _Capture(names, known, gradients, ask).of(values)


def restore(
    captured: Captured,
    names: Names,
    known: Mapping[str, Any],
    gradients: GradientUse | None = None,
) -> Any:
    """Put what was captured into the objects of this process; gives `values` back.

    Raises:
        SetupDiffersError: When set-up has made other objects here.
    """
    with undisturbed():
        return _restore(captured, names, known, gradients)


def _restore(
    captured: Captured, names: Names, known: Mapping[str, Any], gradients: GradientUse | None
) -> Any:
    header, body = pickle.loads(captured.program)
    RemovableHandle.next_id = max(RemovableHandle.next_id, header.next_hook)
    _check(header, names)
    for path, kind in header.became.items():
        names.objects[path].__class__ = class_from(kind)
    blocks = _fill(captured.tensors, header.places, names)
    names.count_as_written(header.written)
    names.lost = header.lost
    reader = Reader(io.BytesIO(body), names, known, blocks)
    values = reader.load()
    held: dict[str, Content] = {}
    while (more := reader.load()) is not None:
        held |= more
    # Keys of dictionaries and members of sets first: their hashes may depend on what they hold.
    for hashed in (False, True):
        for path, seen in held.items():
            if (seen.kind in ("dict", "set", "weak")) is hashed:
                value = names.objects[path]
                kept = seen
                if has_marks(seen):
                    now = names.kinds.of(value).content(value)
                    kept = settled_content(seen, now, functools.partial(names.renewed, path))
                names.kinds.of(value).put(value, kept)
                if gradients and seen.kind == "tensor" and isinstance(seen.items[1], Gradient):
                    gradients.expect(path, value)
    return values


def _check(header: _Header, names: Names) -> None:
    for path, kind in header.types.items():
        if path not in names.objects:
            raise SetupDiffersError(path, "was there when the program was saved, and is not now")
        now = name_of(names.types[path])
        if now != kind:
            raise SetupDiffersError(
                path, f"was a {kind} when the program was saved, and is a {now}"
            )


def _fill(
    tensors: Mapping[str, torch.Tensor], places: Mapping[str, Geometry], names: Names
) -> RestoredBlocks:
    """Put the numbers back, in place where set-up has made as much room for them."""
    blocks = RestoredBlocks(tensors)
    with torch.no_grad():
        for name in tensors:
            value = names.objects.get(name[1:]) if name[0] == "=" else None
            if value is not None and lies_in_block(value):
                blocks.into(name, value)
        for path, where in places.items():
            value = names.objects[path]
            if blocks.lies(value, where):
                continue
            if not isinstance(value, torch.Tensor):
                size = f"{value.shape} of {value.dtype}"
                raise SetupDiffersError(
                    path, f"was an array {where.size} of {where.dtype}, and is one {size}"
                )
            value.data = blocks.tensor(where)
    return blocks


class _Capture:
    def __init__(
        self,
        names: Names,
        known: Mapping[str, Any],
        gradients: GradientUse | None,
        ask: Callable[[FunctionType], None] | None,
    ) -> None:
        self._names = names
        self._known = known
        self._gradients = gradients
        self._found = Captured()
        self._blocks = Blocks(self._found.tensors, names.now_at())
        self._file = io.BytesIO()
        self._writer = Writer(self._file, names, known, self._blocks, self._mention, ask)
        self._reached: set[str] = set()
        self._waiting: list[str] = []
        self._mentioned: set[str] = set()
        self._places: dict[str, Geometry] = {}
        self._dropped = 0

    def of(self, values: Any) -> Captured:
        self._write(values)
        self._follow()
        for path in self._names.objects:
            if path not in self._reached and self._names.touched(path):
                self._reach(path)
        self._follow()
        self._write(None)
        names = self._names
        mentioned = self._mentioned | self._places.keys()
        names.lost = frozenset(
            path
            for path, value in names.objects.items()
            if path not in self._reached and isinstance(value, torch.Tensor | torch.optim.Optimizer)
        )
        header = _Header(
            self._places,
            {path: name_of(names.types[path]) for path in mentioned},
            {
                path: class_of(names.objects[path])
                for path in mentioned
                if type(names.objects[path]) is not names.types[path]
            },
            RemovableHandle.next_id,
            frozenset(path for path in self._places if names.is_written(path)),
            names.lost,
        )
        self._writer.refuse_addresses()
        self._refuse_classes(header.became)
        self._found.program = pickle.dumps((header, self._file.getvalue()), protocol=5)
        self._found.sizes = sizes_of(self._found.tensors, names, self._reached)
        self._found.sizes |= {"program": len(self._found.program), NOT_SAVED: self._dropped}
        return self._found

    def _refuse_classes(self, became: Mapping[str, type | ParametrizedClass]) -> None:
        """Refuse an object whose class is another one now, which no other process could find."""
        for path, kind in became.items():
            try:
                pickle.dumps(kind)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                value = self._names.objects[path]
                raise Unsaveable(value, CLASS_ADVICE, root=path) from error

    def _reach(self, path: str) -> None:
        if path not in self._reached:
            self._reached.add(path)
            self._waiting.append(path)

    def _mention(self, path: str) -> None:
        self._mentioned.add(path)
        self._reach(path)

    def _follow(self) -> None:
        """Write down what the named objects hold that were reached, and so on from there."""
        while self._waiting:
            held: dict[str, Content] = {}
            while self._waiting:
                self._look(self._waiting.pop(), held)
            if held:
                self._mentioned |= held.keys()
                self._write(held)

    def _look(self, path: str, held: dict[str, Content]) -> None:
        value = self._names.objects[path]
        if lies_in_block(value):
            self._places[path], _ = self._blocks.place(value)
        now = self._names.held(path)
        dead = self._dead_gradient(value)
        if dead is not None and self._gradients is not None:
            self._dropped += dead.nbytes
            now = now or self._names.kinds.of(value).content(value)
            assert now is not None
            stand_in = self._gradients.stand_in(value)
            now = now._replace(items=(now.items[0], stand_in, *now.items[2:]))
        if now is not None and not (isinstance(value, Results) and self._is_large(now)):
            held[path] = now
        for beyond in self._names.led_to(path):
            if dead is None or self._names.objects[beyond] is not dead:
                self._reach(beyond)

    def _is_large(self, content: Content) -> bool:
        """Whether content cannot be written, or brings many bytes that have no names."""
        tensors: dict[str, torch.Tensor] = {}
        file, blocks = io.BytesIO(), Blocks(tensors, self._names.blocks)
        try:
            Writer(file, self._names, self._known, blocks, lambda path: None).dump(content)
        except Exception:
            # Whatever the pickling of a class of somebody else's raises.
            return True
        later = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("+"))
        return file.tell() + later > LARGEST_BYTES

    def _dead_gradient(self, value: Any) -> torch.Tensor | None:
        if self._gradients is None or not isinstance(value, torch.Tensor):
            return None
        return gradient(value) if self._gradients.is_dead(value) else None

    def _write(self, part: Any) -> None:
        try:
            self._writer.dump(part)
        except Unsaveable as error:
            raise self._explained(part) or error from error
        except AutosaveError:
            raise
        except Exception as error:
            # Whatever the pickling of a class of somebody else's raises.
            explained = self._explained(part)
            if explained is None:
                raise
            raise explained from error

    def _explained(self, part: Any) -> Unsaveable | None:
        """The refusal of what in `part`, values or contents by path, cannot be written down."""
        if not (isinstance(part, dict) and part.keys() <= self._names.objects.keys()):
            return self._refusal(part, None)
        failing = (path for path, content in part.items() if self._error_of(content) is not None)
        path = next(failing, None)
        return None if path is None else self._refusal(self._names.objects[path], path)

    def _refusal(self, value: Any, root: str | None) -> Unsaveable | None:
        path, culprit = locate(self._names.kinds, value, self._error_of)
        error = self._error_of(culprit)
        advice = error.advice if isinstance(error, Unsaveable) else advice_for(culprit)
        if isinstance(error, RecursionError):
            advice = CHAIN_ADVICE
        return Unsaveable(culprit, advice, path, root)

    def _error_of(self, part: Any) -> Exception | None:
        blocks = Blocks({}, self._names.blocks)
        writer = Writer(io.BytesIO(), self._names, self._known, blocks, lambda path: None)
        try:
            writer.dump(part)
        except Exception as error:
            return error
        return None
