"""Structure of the code base: its size, how finely it is cut, import circles, what a run loads.

python benchmarks/structure.py --list names the places behind the figures, which are places to
look, not verdicts. A full run also times `make test`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import networkx
from harness import Bar, at_most, publish

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
RIDDLE = re.compile(r"^(What|How|Whether|Where|Who|When|Which|That)\b")

# Trains the embedded default for a few steps and prints which modules of ours were loaded, and in
# which of our files the steps from `first` on ran.
TRAINED = """
import json, sys, threading
from pathlib import Path
from outlast import records
root = str(Path(records.__file__).parents[1])
files, calls = set(), []
def note(frame, event, argument):
    if event == "call" and 3 <= len(calls) < 8 and frame.f_code.co_filename.startswith(root):
        files.add(frame.f_code.co_filename)
sys.setprofile(note)
threading.setprofile(note)
from outlast.train.loop import Trainer
inner = Trainer.step
def step(self, *arguments, **settings):
    calls.append(0)
    return inner(self, *arguments, **settings)
Trainer.step = step
sys.argv = ["outlast", "train", "train.steps=8", "schedule.warmup_steps=2",
            "schedule.decay_fraction=0.1", "checkpoint.every_steps=5",
            f"run.directory={sys.argv[1]}"]
from outlast.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
loaded = [name for name in sys.modules if name.split(".")[0] == "outlast"]
print("figures", json.dumps([len(loaded), len(files)]))
"""


@dataclass
class Structure:
    """Places behind each figure, by package where a table shows them."""

    graph: networkx.DiGraph
    files: Counter[str] = field(default_factory=Counter)
    code_lines: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def circles(self) -> list[list[str]]:
        """Groups of modules that import each other."""
        return [sorted(part) for part in networkx.strongly_connected_components(self.graph)
                if len(part) > 1]  # fmt: skip


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines that are neither blank, comment, docstring nor import."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstring = node.body[0]
            skipped.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return sum(
        1
        for number, line in enumerate(text.splitlines(), 1)
        if number not in skipped and line.strip() and not line.strip().startswith("#")
    )


def imported(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Modules of the project that `tree` imports at run time, inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from {name if name in modules else node.module} & modules
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & modules
        else:
            yield from imported(node, modules)


def measure() -> Structure:
    """Structure of src/outlast."""
    texts = {path: path.read_text() for path in sorted((SOURCE / "outlast").rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    names = {
        path: ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for path in texts
    }
    found = Structure(networkx.DiGraph())
    found.graph.add_nodes_from(names.values())
    for path, tree in trees.items():
        for other in imported(tree, set(names.values())):
            if other != names[path]:
                found.graph.add_edge(names[path], other)
    for path, tree in trees.items():
        parts = path.relative_to(SOURCE / "outlast").parts
        package = parts[0] if len(parts) > 1 else "(top)"
        place = str(path.relative_to(ROOT))
        found.files[package] += 1
        found.code_lines[package] += code_lines(texts[path], tree)
        if found.graph.in_degree(names[path]) <= 1:
            found.places["lonely"].append(place)
        words = Counter(re.findall(r"\w+", texts[path]))
        for node in ast.walk(tree):
            line = f"{place}:{getattr(node, 'lineno', 1)}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                private = node.name.startswith("_") and not node.name.startswith("__")
                if private and words[node.name] == 2:
                    found.places["used once"].append(f"{line} {node.name}")
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if RIDDLE.match(first):
                    found.places["riddles"].append(f"{line} {first}")
            loop = isinstance(node, ast.For | ast.comprehension)
            if loop and ast.unparse(node.target) == "each":
                found.places["each"].append(f"{place}:{node.target.lineno}")
    return found


def trained() -> tuple[int, int]:
    """Modules that `outlast train` loads on the embedded default, and files a step runs through."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", TRAINED, f"{folder}/run"],
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("figures ")]
    if not said:
        raise SystemExit(f"outlast train failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    loaded, files = json.loads(said[0].removeprefix("figures "))
    return loaded, files


def tests_minutes() -> float:
    """Wall time of `make test` where .venv is set up; raises if a test fails."""
    subprocess.run(["make", ".venv/.installed-test"], cwd=ROOT, check=True)
    began = time.monotonic()
    subprocess.run(["make", "test"], cwd=ROOT, check=True)
    return (time.monotonic() - began) / 60


def main() -> None:
    """Measure, print and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="do not time `make test`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    parser.add_argument("--list", action="store_true", help="name places instead")
    asked = parser.parse_args()
    found = measure()
    circles = found.circles()
    if asked.list:
        for circle in circles:
            print("circle:", ", ".join(circle))
        for kind, places in found.places.items():
            print(*(f"{kind}: {place}" for place in places), sep="\n")
        return
    for package, lines in found.code_lines.most_common():
        print(f"{package:14}{found.files[package]:5} files{lines:8} code lines")
    files, lonely = found.files.total(), len(found.places["lonely"])
    loaded, run_through = trained()
    bars: list[Bar] = [
        at_most("Python files", files, "", 560, "src/outlast"),
        at_most("code lines", found.code_lines.total(), "", 82_000,
                "without docstrings, blanks, comments and imports"),
        at_most("import circles", len(circles), "", 0, "src/outlast"),
        at_most("modules imported by at most one other", 100 * lonely / files, "%", 25,
                f"{lonely} modules"),
        at_most("private functions with one caller in their file",
                len(found.places["used once"]), "", 1300, "src/outlast"),
        at_most("docstrings that open as a riddle", len(found.places["riddles"]), "", 150,
                "What, How, Whether ..."),
        at_most("loops over each", len(found.places["each"]), "", 0, "src/outlast"),
        at_most("modules loaded by outlast train", loaded, "", 260, "embedded default"),
        at_most("files a step of outlast train runs through", run_through, "", 90,
                "steps 3 to 7 of the embedded default"),
    ]  # fmt: skip
    if not asked.quick:
        bars.append(at_most("make test", tests_minutes(), "min", 5, "wall time"))
    publish("structure", bars, asked.json)


if __name__ == "__main__":
    main()
