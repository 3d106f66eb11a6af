"""Runs the blocks of a documentation page, as docs/notebooks.py describes them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def module_of(name: str) -> ModuleType:
    """A script of the folder docs, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    # A dataclass looks its module up.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebooks = module_of("notebooks")

_TIMEOUT_SECONDS = 240

_PYTHON = """
import json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    exec(compile(json.loads(line), "cell", "exec"), names)
    print("\\0", flush=True)
"""


class Session:
    """Runs cells in one directory, the Python ones in one process, as a notebook does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        binaries = str(Path(sys.executable).parent)
        self.environment = os.environ | {
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "80",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self._python: subprocess.Popen[str] | None = None

    def run(self, kind: str, source: str) -> str:
        """What a bash or Python cell prints; fails as the cell does."""
        if kind == "bash":
            ended = subprocess.run(
                ["bash", "-e", "-c", source],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
            assert ended.returncode == 0, (
                f"{source}\n\nended with {ended.returncode}:\n{ended.stdout}"
            )
            return ended.stdout
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-c", _PYTHON],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        self._python.stdin.write(json.dumps(source) + "\n")
        self._python.stdin.flush()
        printed = []
        for line in self._python.stdout:
            if line.endswith("\0\n"):
                return "".join([*printed, line[:-2]])
            printed.append(line)
        raise AssertionError(f"{source}\n\nfailed:\n{''.join(printed)}")

    def close(self) -> None:
        """End the process of the Python cells."""
        if self._python is not None:
            self._python.kill()
            self._python.communicate()


def plain(text: str) -> str:
    """A text without its numbers and its spaces."""
    return re.sub(r"\d(?:[\d.,]*\d)?", "#", re.sub(r"\s+", "", text))


def run_page(page: Path, directory: Path) -> int:
    """Run a page's blocks in order, compare what they print with what it shows; count them."""
    session, printed, count = Session(directory), "", 0
    try:
        for cell in notebooks.cells_of(page.read_text()):
            if cell.kind == "file":
                file = directory / cell.name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(cell.source + "\n")
            elif cell.kind in {"bash", "python"}:
                printed = session.run(cell.kind, cell.source)
                count += cell.language != "setup"
            elif cell.kind == "text":
                for line in cell.source.splitlines():
                    # Dots stand for what is not the same each time.
                    parts = [re.escape(plain(part)) for part in line.split("...")]
                    where = f"{page.name}:{cell.line} shows a line that was not printed"
                    assert re.search(".*".join(parts), plain(printed)), (
                        f"{where}: {line}\n{printed}"
                    )
    finally:
        session.close()
    return count
