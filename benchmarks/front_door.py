"""What a new user meets first: the size of an installation, imports, the help.

The size is that of the files which pip wrote for the core's requirements, without those of torch,
numpy and what they require; compare `pip install .` into an environment that holds those two.
"""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from harness import Bar, arguments, at_most, median, publish
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numpy")
IMPORT_RUN = """
import time, torch
begun = time.process_time()
import outlast
outlast.Run
print(time.process_time() - begun)
"""


def closure(requirements: list[str]) -> set[str]:
    """Names of what `requirements` install on this machine, themselves included."""
    found: set[tuple[str, str]] = set()
    left = [(Requirement(text), "") for text in requirements]
    while left:
        wanted, extra = left.pop()
        if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        for extra in ("", *wanted.extras):
            name = canonicalize_name(wanted.name)
            if (name, extra) in found:
                continue
            try:
                required = distribution(name).requires or []
            except PackageNotFoundError:
                # torch's wheels for CPUs name CUDA packages that are not there.
                continue
            found.add((name, extra))
            left += [(Requirement(text), extra) for text in required]
    return {name for name, _ in found}


def installed_mb(name: str) -> float:
    """Size of a distribution's files, in 1e6 bytes."""
    files = [Path(str(file.locate())) for file in distribution(name).files or []]
    return sum(file.stat().st_size for file in files if file.exists()) / 1e6


def core_bar() -> Bar:
    """Installed size of the core, which names its largest parts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    beyond = closure(project["dependencies"]) - closure(list(HEAVY))
    sizes = {name: installed_mb(name) for name in beyond}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:4]
    parts = ", ".join(f"{name} {sizes[name]:.0f}" for name in largest)
    return at_most("core beyond torch and numpy", sum(sizes.values()), "MB", 60, parts)


def time_bars(repeats: int) -> list[Bar]:
    """How fast the library and the command line are there."""
    imports, helps = [], []
    for _ in range(repeats):
        said = subprocess.run(
            [sys.executable, "-c", IMPORT_RUN], check=True, capture_output=True, text=True
        )
        imports.append(float(said.stdout))
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-m", "outlast", "--help"], check=True, capture_output=True)
        helps.append(time.perf_counter() - begun)
    return [
        at_most("import outlast; outlast.Run", median(imports), "CPU-s", 1.0, "import torch"),
        at_most("outlast --help", median(helps), "s", 0.4, "-"),
    ]


def main() -> None:
    """Print the table, and write it where asked."""
    asked = arguments(__doc__ or "")
    publish("front_door", [core_bar(), *time_bars(3 if asked.quick else 5)], asked.json)


if __name__ == "__main__":
    main()
