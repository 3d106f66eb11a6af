"""Runs small programs in this process: plainly, until a step, and again from there."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from typing import TYPE_CHECKING

import torch

from outlast.autosave.heap.capture import Captured
from outlast.autosave.program.rewrite import rewrite
from outlast.autosave.program.source import RUNTIME, read_program, rewritten_imports
from outlast.autosave.program.training import find_training
from outlast.autosave.resume.files import Logs
from outlast.autosave.resume.loaders import resumable_loaders
from outlast.autosave.resume.process import visible_caches
from outlast.autosave.resume.session import SavedState, Session
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from pathlib import Path


class Stopped(BaseException):
    """Ends a program when it has been saved."""


class DictKeeper:
    """Keeps one state and the digests after it in memory.

    Args:
        at: Step to save after; the program ends then. None never saves.
        stops: Whether the program ends when it is saved.
    """

    def __init__(self, at: int | None = None, *, stops: bool = True) -> None:
        self.at = at
        self.stops = stops
        self.asked: list[int] = []
        self.saved: Captured | None = None
        self.digests: dict[int, str] = {}

    def due(self, step: int) -> bool:
        self.asked.append(step)
        return step == self.at

    def save(self, step: int, captured: Captured) -> None:
        copies = {name: each.detach().clone() for name, each in captured.tensors.items()}
        self.saved = Captured(captured.program, copies)
        if self.stops:
            raise Stopped

    def digest(self, step: int, text: str) -> str | None:
        if step in self.digests:
            return self.digests[step]
        self.digests[step] = text
        return None

    def note(self, sentence: str) -> None:
        self.notes = [*getattr(self, "notes", []), sentence]

    def left(self, step: int) -> None:
        """Nothing waits for the end of a loop."""


class _Restoring:
    """The session's side of a `DictKeeper`, with what is to be gone back to."""

    def __init__(self, keeper: DictKeeper, saved: Captured | None) -> None:
        self.due, self.digest = keeper.due, keeper.digest
        self.note, self.left = keeper.note, keeper.left
        self._keeper, self._saved = keeper, saved

    def saved(self) -> SavedState | None:
        return None if self._saved is None else SavedState(self._saved, {})

    def save(self, step: int, state: SavedState) -> None:
        self._keeper.save(step, state.captured)

    def failed(self, error: OutlastError) -> None:
        """The error itself ends the test."""


def run_plain(script: Path) -> str:
    """What a program prints under plain Python."""
    return _run(script, compile(script.read_text(), str(script), "exec"), None)


class Program:
    """A program as it is rewritten, once for any number of runs."""

    def __init__(self, script: Path) -> None:
        files = read_program(script)
        self.script = script
        self.rewritten = rewrite(files, find_training(files))
        self.code = compile(self.rewritten[0].tree, str(script), "exec")

    def run(self, keeper: DictKeeper, saved: Captured | None = None) -> str:
        """What it prints, up to where its keeper stops it."""
        session = Session(self.rewritten, _Restoring(keeper, saved), Logs(resuming=False))
        with (
            rewritten_imports(self.rewritten, session),
            resumable_loaders(),
            visible_caches(frozenset(str(each.source.path) for each in self.rewritten)),
            contextlib.closing(session),
        ):
            return _run(self.script, self.code, session)


def run(script: Path, keeper: DictKeeper, saved: Captured | None = None) -> str:
    """What a program prints when it is rewritten, up to where its keeper stops it."""
    return Program(script).run(keeper, saved)


def _run(script: Path, code: types.CodeType, session: Session | None) -> str:
    before_modules, before_path = dict(sys.modules), list(sys.path)
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    if session is not None:
        module.__dict__[RUNTIME] = session
    sys.modules["__main__"] = module
    sys.path.insert(0, str(script.parent))
    printed = io.StringIO()
    torch.manual_seed(99)
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(Stopped):
            exec(code, module.__dict__)
            if session is not None:
                session.finish()
    finally:
        for name in set(sys.modules) - set(before_modules):
            if str(script.parent) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        sys.modules["__main__"] = before_modules["__main__"]
        sys.path[:] = before_path
    return printed.getvalue()


def check_every_step(script: Path) -> int:
    """Stop and resume a program at each of its steps; gives their number.

    The program must print nothing before its first training loop.
    """
    plain = run_plain(script)
    counting = DictKeeper()
    # Twice, as two processes would: the resumed program is not the one that was stopped.
    first, second = Program(script), Program(script)
    assert first.run(counting) == plain
    for step in counting.asked:
        keeper = DictKeeper(step)
        begun = first.run(keeper)
        assert keeper.saved is not None
        resumed = second.run(DictKeeper(), keeper.saved)
        assert begun + resumed == plain, f"saved after step {step}"
    return len(counting.asked)
