"""Ordinary programs, run plainly, and under ``outlast run`` with deaths on the way."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE_SECONDS = 240.0


def names() -> list[str]:
    """The programs, without the modules that they import."""
    return sorted(each.stem for each in PROGRAMS.glob("*.py"))


def arguments(name: str, out: Path) -> list[str]:
    """The command line of a program that writes its result to `out`."""
    return ["--out", str(out)] if name == "nested_epochs" else [str(out)]


def run_plainly(name: str, out: Path) -> int:
    """``python PROGRAM``, in a process of its own; its exit code."""

    def work() -> None:
        sys.argv = [f"{name}.py", *arguments(name, out)]
        sys.path.insert(0, str(PROGRAMS))
        runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")

    return _in_child(work)


def run_outlast(name: str, out: Path, folder: Path, *options: str, dies_at: int = 0) -> int:
    """``outlast run PROGRAM``, which is killed at its boundary number `dies_at`; its exit code."""

    def work() -> None:
        from outlast.autosave.resume.session import Session
        from outlast.cli.main import main

        if dies_at:
            _die_at(Session, dies_at)
        script = str(PROGRAMS / f"{name}.py")
        sys.argv = ["outlast", "run", "--every", "1", "--directory", str(folder), *options]
        sys.argv += [script, *arguments(name, out)]
        main()

    return _in_child(work)


def _die_at(session: type, number: int) -> None:
    """Kill this process with SIGKILL at its boundary `number`, saved or not."""
    boundary = session.boundary
    passed = 0

    def counted(*args: Any) -> None:
        nonlocal passed
        passed += 1
        if passed == number:
            os.kill(os.getpid(), signal.SIGKILL)
        boundary(*args)

    session.boundary = counted  # type: ignore[attr-defined]


def _in_child(work: Callable[[], None]) -> int:
    process = multiprocessing.get_context("fork").Process(target=_child, args=(work,))
    gc.freeze()
    process.start()
    gc.unfreeze()
    process.join(DEADLINE_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the program has not ended in {DEADLINE_SECONDS:g} s")
    return process.exitcode


def _child(work: Callable[[], None]) -> None:
    # A group of its own, as a shell gives it; and no tests' settings.
    torch.set_num_threads(1)
    work()


def result(out: Path) -> Any:
    """What a program has written, with the files beside it."""
    found = torch.load(out, weights_only=False)
    beside = {
        each.suffix: each.read_bytes()
        for each in sorted(out.parent.glob(f"{out.stem}.*"))
        if each.suffix in (".log", ".csv", ".txt")
    }
    return [found, beside]


def differences(one: Any, other: Any, path: str = "result") -> list[str]:
    """Where two results differ in a bit."""
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(
            torch.nan_to_num(one), torch.nan_to_num(other)
        )
        return [] if same else [f"{path}: {one} and {other}"]
    if isinstance(one, np.ndarray):
        return [] if np.array_equal(one, other) else [f"{path}: {one} and {other}"]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{path}: keys {list(one)} and {list(other)}"]
        return [line for key in one for line in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} items"]
        return [
            line
            for place, (mine, theirs) in enumerate(zip(one, other, strict=True))
            for line in differences(mine, theirs, f"{path}[{place}]")
        ]
    return [] if one == other else [f"{path}: {one!r} and {other!r}"]
