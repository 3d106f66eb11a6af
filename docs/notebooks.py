"""Notebooks from the tutorials: ``python docs/notebooks.py`` writes `examples/notebooks`.

A tutorial is a page of Markdown and the only source. Its fenced blocks are cells:

- ``bash`` and ``python`` blocks are run, in order, in one directory; the Python ones share their
  names;
- a block below ``<!-- file: NAME -->`` is written to that file;
- a block below ``<!-- shown: REASON -->`` is only shown, for instance since it needs Slurm;
- a ``text`` block shows what the block before it printed, and tests compare the two;
- code in a comment ``<!-- setup ... -->`` is run and not shown, in Python.

Solutions of exercises stand in ``<details>``. In a notebook their cells are folded.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
NOTEBOOKS = ROOT / "examples" / "notebooks"

NAMES = [
    "first_run",
    "resumable_script",
    "node_failure",
    "shared_cluster",
    "plan_a_run",
    "cut_energy",
    "compress_model",
]
"""The tutorials that are notebooks as well, in the order of the course."""

_FENCE = re.compile(r"^(`{3,})(\w*)")
_DIRECTIVE = re.compile(r"^<!-- (file|shown): (.+) -->$")
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(#[^)\s]*)?(?=\))")

_BEGIN = """\
# Work in an empty directory, with the commands of this Python's environment first on the path.
import os, sys, tempfile
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
os.chdir(tempfile.mkdtemp(prefix="outlast-"))"""


@dataclass(frozen=True)
class Cell:
    """A part of a page.

    Attributes:
        kind: markdown, bash, python, file, text (the output of the cell before), or shown.
        source: Its text, without fences.
        language: Of a block, as the page names it.
        name: Of a file; of a block that is only shown, the reason.
        line: Where it begins in the page, from 1.
        solution: Whether it belongs to the solution of an exercise.
    """

    kind: str
    source: str
    language: str = ""
    name: str = ""
    line: int = 1
    solution: bool = False


def cells_of(page: str) -> list[Cell]:
    """The cells of a page, in order."""
    cells: list[Cell] = []
    words: list[str] = []
    solution = False
    directive = ("", "")
    lines = page.splitlines()
    index = 0

    def flush() -> None:
        if text := "\n".join(words).strip("\n"):
            cells.append(Cell("markdown", text, line=index - len(words) + 1, solution=solution))
        words.clear()

    while index < len(lines):
        line = lines[index]
        if line == "<!-- setup":
            flush()
            end = lines.index("-->", index)
            source = "\n".join(lines[index + 1 : end])
            cells.append(Cell("python", source, "setup", line=index + 1))
            index = end + 1
        elif found := _DIRECTIVE.match(line):
            directive = (found[1], found[2])
            index += 1
        elif found := _FENCE.match(line):
            end = lines.index(found[1], index + 1)
            source, language = "\n".join(lines[index + 1 : end]), found[2]
            kind, name = directive
            if not kind:
                runs = language in {"bash", "python", "text"}
                kind = language if runs else "shown"
            flush()
            cells.append(Cell(kind, source, language, name, index + 1, solution))
            directive = ("", "")
            index = end + 1
        else:
            if line in {"<details>", "</details>"}:
                flush()
                solution = line == "<details>"
            words.append(line)
            index += 1
    flush()
    return cells


def notebook_of(name: str) -> str:
    """The notebook of a tutorial, as JSON."""
    found: list[dict[str, object]] = []

    def add(kind: str, source: str, folded: bool = False) -> None:
        cell: dict[str, object] = {"cell_type": kind, "id": f"{name}-{len(found)}"}
        cell["metadata"] = {"jupyter": {"source_hidden": True}} if folded else {}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        found.append({**cell, "source": source.splitlines(keepends=True)})

    for cell in cells_of((TUTORIALS / f"{name}.md").read_text()):
        match cell.kind:
            case "markdown":
                text = re.sub(r"</?details>\n?", "", _LINK.sub(_relinked, cell.source))
                text = text.replace("<summary>Solution</summary>", "**Solution**").strip("\n")
                if text:
                    add("markdown", text)
            case "bash":
                add("code", f"%%bash -e\n{cell.source}", cell.solution)
            case "python":
                add("code", cell.source, cell.solution)
            case "file":
                add("code", f"%%writefile {cell.name}\n{cell.source}", cell.solution)
            case _:
                add("markdown", f"```{cell.language}\n{cell.source}\n```")
        if len(found) == 1:
            add("code", _BEGIN)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    page = f"made by docs/notebooks.py from docs/tutorials/{name}.md; change that page"
    metadata = {"kernelspec": kernel, "source": page}
    notebook = {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _relinked(link: re.Match[str]) -> str:
    """A link of a tutorial, as it is written in a notebook."""
    path, anchor = link[1], link[2] or ""
    if Path(path).stem in NAMES and "/" not in path:
        return Path(path).stem + ".ipynb" + anchor
    target = (TUTORIALS / path).resolve().relative_to(ROOT)
    return f"../../{target}{anchor}"


def main() -> None:
    """Write all notebooks; with ``--check``, end with 1 if one is not what its page says."""
    stale = []
    for name in NAMES:
        file = NOTEBOOKS / f"{name}.ipynb"
        text = notebook_of(name)
        if not file.exists() or file.read_text() != text:
            stale.append(file.name)
            if "--check" not in sys.argv:
                file.write_text(text)
    if "--check" in sys.argv and stale:
        sys.exit(f"run `python docs/notebooks.py`: {', '.join(stale)} differ from their pages")


if __name__ == "__main__":
    main()
