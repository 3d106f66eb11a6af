"""One pass over a script, in a process of its own: recorded, resumed, or with `state_dict()` alone.

`script.py` starts it with the file of an order; orders and results lie in one folder, which nobody
else writes to.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import xxhash

from outlast.autosave.execute import SavedState, execute
from outlast.autosave.heap.capture import Captured
from outlast.autosave.program.rewrite import rewrite
from outlast.autosave.program.source import read_program
from outlast.autosave.program.training import find_training
from outlast.autosave.resume.randomness import random_states
from outlast.autosave.trace.content import digest, digests, holds_numbers
from outlast.autosave.trace.dispatch import storage_key
from outlast.autosave.trace.gradients import ComparedGradients
from outlast.autosave.trace.plan import StateFinder
from outlast.autosave.trace.roots import outermost_modules, readable_names
from outlast.autosave.trace.state import StatePlan
from outlast.autosave.trace.values import flat_values
from outlast.autosave.trace.view import ProgramView
from outlast.errors import OutlastError

Kind = Literal["record", "resume", "state_dict"]
TRACED_STEPS = 3
"""Steps before the save that are looked at: one whose inputs are noted, and two that are traced."""

SAVED, PLAIN = "saved.pickle", "state_dict.pickle"


@dataclass(frozen=True)
class Order:
    """What a pass is to do.

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
    """What a pass has seen.

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
            self._trace(step)
        return super().due(step) or step == at

    def save(self, step: int, state: SavedState) -> None:
        captured = state.captured
        if step > self._order.at:
            self._compare(step, captured)
            return
        self.result.saved_bytes = len(captured.program) + sum(
            tensor.nbytes for tensor in captured.tensors.values()
        )
        self.result.process_bytes = _process_bytes()
        objects = self._view.objects()
        write(self._folder / SAVED, (captured.program, captured.tensors, state.logs))
        write(self._folder / PLAIN, {path: item.state_dict() for path, item in _plain(objects)})

    def _trace(self, step: int) -> None:
        if self._finder is None:
            self._finder = StateFinder(self._view.objects)
        else:
            self._finder.end_step()
        if step < self._order.at:
            self._finder.begin_step()
        else:
            self.result.plan = self._finder.plan()
            self._look()


class _Resuming(_Pass):
    def saved(self) -> SavedState | None:
        program, tensors, logs = read(self._folder / SAVED)
        return SavedState(Captured(program, tensors), logs)


class _StateDicts(_Pass):
    def due(self, step: int) -> bool:
        return True

    def save(self, step: int, state: SavedState) -> None:
        plain = read(self._folder / PLAIN)
        for path, item in _plain(self._view.objects()):
            # The program may have come to other modules and optimizers than it begins with; what
            # does not fit is lost.
            with contextlib.suppress(KeyError, RuntimeError, TypeError, ValueError):
                item.load_state_dict(plain[path])
        self._look()
        self._end()


def _plain(objects: dict[str, Any]) -> list[tuple[str, Any]]:
    """The outermost modules and the optimizers, with their paths."""
    modules = {id(module) for module in outermost_modules(objects.values())}
    return [
        (path, object_)
        for path, object_ in objects.items()
        if id(object_) in modules or isinstance(object_, torch.optim.Optimizer)
    ]


def _process_bytes() -> int:
    """What an image of this process would hold, on the host and on its device."""
    device = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    return int(psutil.Process().memory_info().rss) + device


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
