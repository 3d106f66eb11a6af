"""The first hour of a new user: installed size, imports, help, examples, bad input, first run.

The counts are of tests: those of the README's programs, of the programs for one part alone, and of
wrong inputs to every command.

The size is that of the files which pip wrote for the core's requirements, without those of torch,
numpy and what they require; compare `pip install .` into an environment that holds those two.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from xml.etree import ElementTree

from harness import Bar, arguments, at_least, at_most, median, publish
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from outlast.records import TrainingStarted, read_run

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


def passed(*pytest_arguments: str) -> tuple[int, int]:
    """Tests that pass, and all that were asked for."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={file}", *pytest_arguments],
            cwd=ROOT,
            check=False,
            capture_output=True,
        )
        suite = ElementTree.parse(file).getroot()[0]
    count, *wrong = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    return count - sum(wrong), count


def count_bars() -> list[Bar]:
    """Examples that run, and wrong inputs that are answered with one sentence."""
    readme = passed("tests/docs/test_documents.py", "-k", "readme or README")
    parts = passed("tests/docs/test_pages.py", "-k", "part_used_alone")
    inputs = passed("tests/cli/test_cli_bad_inputs.py", "-k", "wrong_input")
    pages = passed("tests/docs/test_pages.py", "-k", "no_page_is_without")
    return [
        at_least("README's code that runs", readme[0] / readme[1], "", 1.0, f"{readme[1]} tests"),
        at_least("programs for one part alone that run", parts[0], "", 10, f"of {parts[1]}"),
        at_least(
            "wrong inputs answered by one sentence", inputs[0] / inputs[1], "", 1.0, f"{inputs[1]}"
        ),
        at_most("pages without an example that a test runs", pages[1] - pages[0], "", 0, "-"),
    ]


def run_bars() -> list[Bar]:
    """The embedded default, as `make train` runs it once all is installed."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "outlast", "train"], cwd=folder, check=True, capture_output=True
        )
        whole = time.perf_counter() - begun
        [(_, started)] = read_run(Path(folder) / "runs" / "quickstart").of(TrainingStarted)
    return [
        at_most("outlast train: to the first step", started.seconds, "s", 8, "2 cores"),
        at_most("outlast train: to the report", whole, "s", 90, "2 cores"),
    ]


def main() -> None:
    """Print the table, and write it where asked."""
    asked = arguments(__doc__ or "")
    bars = [core_bar(), *time_bars(3 if asked.quick else 5)]
    if not asked.quick:
        bars += [*run_bars(), *count_bars()]
    publish("front_door", bars, asked.json)


if __name__ == "__main__":
    main()
