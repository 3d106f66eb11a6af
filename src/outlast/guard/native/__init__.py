"""The passes of `sweep.c`, compiled once per machine by the system's C compiler.

Where there is no compiler, `library` is None and `outlast.guard.product` uses torch operations,
which are right but read every matrix several times.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

_FILES = ("sweep.c", "rows.h")
# Sums in any order, but NaN and infinity as they are.
_SUMS = ("-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math")
_LIBRARY = ("-Wno-psabi", "-shared", "-fPIC", "-lm")
_FLAGS = (
    *_SUMS,
    *("-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fno-math-errno"),
    *_LIBRARY,
)
_PLAIN_FLAGS = (*_SUMS, *_LIBRARY)
_COMPILE_SECONDS = 120


def _fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


_POINTER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Verdict(ctypes.Structure):
    """``verdict`` of `sweep.c`."""

    _fields_ = _fields(
        (_REAL, "by_power by_square by_value constant limit worst total widest"),
        (_INTEGER, "exceeded"),
    )


class Forward(ctypes.Structure):
    """``forward`` of `sweep.c`."""

    _fields_ = _fields(
        (_POINTER, "x y"),
        (_INTEGER, "type rows inputs outputs x_stride y_stride threads"),
        (_POINTER, "encoded input_signs output_signs"),
        (_REAL, "beta offset"),
        (_POINTER, "projections squares flags"),
        (Verdict, "verdict"),
    )


class Backward(ctypes.Structure):
    """``backward`` of `sweep.c`."""

    _fields_ = _fields(
        (_POINTER, "dy dx dw db"),
        (_INTEGER, "type rows inputs outputs dy_stride dx_stride dw_stride threads"),
        (_POINTER, "encoded input_signs projections squares"),
        (_REAL, "beta"),
        (_POINTER, "dx_flags dw_flags"),
        (Verdict, "dx_verdict dw_verdict"),
    )


class Encode(ctypes.Structure):
    """``encoding`` of `sweep.c`."""

    _fields_ = _fields(
        (_POINTER, "weight bias"),
        (_INTEGER, "type outputs inputs stride threads"),
        (_POINTER, "input_signs output_signs right left"),
        (_REAL, "rows_largest columns_largest offset"),
    )


class Library:
    """The loaded functions; each returns 0, 1 for an unknown type or 2 without memory."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        self.forward = loaded.outlast_forward
        self.forward.argtypes = (ctypes.POINTER(Forward),)
        self.backward = loaded.outlast_backward
        self.backward.argtypes = (ctypes.POINTER(Backward),)
        self.knows = loaded.outlast_knows
        self.knows.argtypes = (_INTEGER,)
        self.encode = loaded.outlast_encode
        self.encode.argtypes = (ctypes.POINTER(Encode),)


@functools.cache
def library() -> Library | None:
    """The compiled passes, or None where they cannot be had (see `why_not`)."""
    found, _ = _load()
    return found


def why_not() -> str:
    """Why there is no library, in a few words; empty where there is one."""
    return _load()[1]


@functools.cache
def _load() -> tuple[Library | None, str]:
    if os.environ.get("OUTLAST_NATIVE") == "0":
        return None, "OUTLAST_NATIVE=0 is set"
    compiler = _compiler()
    if not compiler:
        return None, "no C compiler was found (CC, cc, gcc, clang)"
    sources = {name: _source(name) for name in _FILES}
    key = hashlib.sha256(repr((sources, compiler, _FLAGS, _processor())).encode()).hexdigest()
    file = _cache() / f"sweep-{key[:16]}.so"
    problem = ""
    if not file.exists():
        problem = _compile(compiler, sources, file)
    try:
        return (Library(file), "") if not problem else (None, problem)
    except OSError as error:
        return None, f"{file} cannot be loaded: {error}"


def _compiler() -> list[str]:
    if chosen := shlex.split(os.environ.get("CC", "")):
        return chosen if shutil.which(chosen[0]) else []
    return [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]


def _source(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _processor() -> str:
    """What ``-march=native`` depends on: homes may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outlast"


def _compile(compiler: list[str], sources: dict[str, str], file: Path) -> str:
    """Compile to `file`, whole or not at all; returns what went wrong."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            for name, text in sources.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            built = Path(folder) / file.name
            said = ""
            for flags in (_FLAGS, _PLAIN_FLAGS):
                command = [*compiler, str(Path(folder) / "sweep.c"), "-o", str(built), *flags]
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
                )
                if done.returncode == 0:
                    built.replace(file)
                    return ""
                said = done.stderr.strip()
            return f"{compiler[0]} failed: {said.splitlines()[0] if said else 'no message'}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"the passes cannot be compiled: {error}"
