"""Ordinary programs, run plainly, and under ``outlast run`` with deaths on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from running import Ended, in_process, plain, run_command

PROGRAMS = Path(__file__).parent / "programs"


def names() -> list[str]:
    """The programs, without the modules that they import."""
    return sorted(each.stem for each in PROGRAMS.glob("*.py"))


def arguments(name: str, out: Path) -> list[str]:
    """The command line of a program that writes its result to `out`."""
    return ["--out", str(out)] if name == "nested_epochs" else [str(out)]


def run_plainly(name: str, out: Path) -> Ended:
    """``python PROGRAM``."""
    return plain(PROGRAMS / f"{name}.py", *arguments(name, out))


def run_outlast(name: str, out: Path, folder: Path, *, dies_at: int = 0) -> Ended:
    """``outlast run PROGRAM``, which is killed at its boundary number `dies_at`."""
    command = ["run", "--every", "1", "--directory", str(folder)]
    command += [str(PROGRAMS / f"{name}.py"), *arguments(name, out)]
    return in_process(_dying, [str(dies_at), *command], {})


def _dying(arguments: list[str]) -> None:
    """Run a command that kills its process with SIGKILL at a boundary, saved or not."""
    from outlast.autosave.resume.session import Session

    number, boundary, passed = int(arguments[0]), Session.boundary, 0

    def counted(*args: Any) -> None:
        nonlocal passed
        passed += 1
        if passed == number:
            os.kill(os.getpid(), signal.SIGKILL)
        boundary(*args)

    Session.boundary = counted
    run_command(arguments[1:])


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
