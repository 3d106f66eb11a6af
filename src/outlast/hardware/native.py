"""C sources that come with a package, compiled once per machine by the system's C compiler.

library, why_not = load(resources.files(__name__), ["combine.c"], ("-O3", "-march=native"))

Never imports torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.resources.abc import Traversable
from pathlib import Path

_LIBRARY_FLAGS = ("-shared", "-fPIC", "-lm")
_COMPILE_SECONDS = 120


def load(
    folder: Traversable, files: Sequence[str], *flags: Sequence[str]
) -> tuple[ctypes.CDLL | None, str]:
    """Compile and load a library, or find it in the user's cache.

    Args:
        folder: Where the sources lie.
        files: The C file to compile, then the headers that it includes.
        flags: Compiler flags to try in this order, until the compiler takes them.

    Returns:
        The library and "", or None and in a few words why it cannot be had: no compiler, one that
        takes none of the flags, or ``OUTLAST_NATIVE=0`` in the environment.
    """
    if os.environ.get("OUTLAST_NATIVE") == "0":
        return None, "OUTLAST_NATIVE=0 is set"
    compiler = _compiler()
    if not compiler:
        return None, "no C compiler was found (CC, cc, gcc, clang)"
    sources = {name: (folder / name).read_text(encoding="utf-8") for name in files}
    key = hashlib.sha256(repr((sources, compiler, flags, _processor())).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outlast"
    file = cache / f"{Path(files[0]).stem}-{key[:16]}.so"
    problem = "" if file.exists() else _compile(compiler, sources, flags, file)
    if problem:
        return None, problem
    try:
        return ctypes.CDLL(str(file)), ""
    except OSError as error:
        return None, f"{file} cannot be loaded: {error}"


def _compiler() -> list[str]:
    if chosen := shlex.split(os.environ.get("CC", "")):
        return chosen if shutil.which(chosen[0]) else []
    return [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]


def _processor() -> str:
    """Return what ``-march=native`` depends on: homes may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(
    compiler: list[str], sources: dict[str, str], choices: Sequence[Sequence[str]], file: Path
) -> str:
    """Compile to `file`, whole or not at all; returns what went wrong."""
    main = next(iter(sources))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            for name, text in sources.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            built = Path(folder) / file.name
            said = ""
            for flags in choices:
                command = [*compiler, str(Path(folder) / main), "-o", str(built), *flags]
                done = subprocess.run(
                    [*command, *_LIBRARY_FLAGS],
                    capture_output=True,
                    text=True,
                    timeout=_COMPILE_SECONDS,
                    check=False,
                )
                if done.returncode == 0:
                    built.replace(file)
                    return ""
                said = done.stderr.strip()
            return f"{compiler[0]} failed: {said.splitlines()[0] if said else 'no message'}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"{main} cannot be compiled: {error}"
