"""What works in which framework, as the tests say: written into the documentation and the README.

    python tests/tools/support_matrix.py

A cell works where a test carries ``@pytest.mark.supports(framework, mechanism, ...)``. The marks
are read from the text of the tests; nothing of them is imported. Every other cell has a reason in
`NOT_APPLICABLE` or `NOT_YET`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "integrations.md"
README = ROOT / "README.md"

FRAMEWORKS = {
    "pytorch": "Plain PyTorch",
    "transformers": "Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "fabric": "Fabric",
    "torchtitan": "torchtitan",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-core",
    "torchft": "torchft",
    "dcp": "DCP",
}
"""Name in the marks, which is that of the page, and title."""

MECHANISMS = {
    "checkpoint": "asynchronous, verified saves in Outlast's store",
    "resume": "continues after `kill -9`",
    "malleable": "continues with another number of processes",
    "guard": "wrong values found and corrected",
    "energy": "joules measured",
    "recover": "continues from memory or from peers, without a checkpoint",
    "tensorize": "trains structured layers",
    "plan": "a prediction of the run, or a plan written for it",
    "records": "a run directory for `outlast report`",
    "chain": "ends in time with exit code 3, to be continued",
}

_NO_STEPS = "it saves and loads, and runs no steps"
_OF_FORMATS = "its forward pass needs CUDA; so far its files and arguments are read and written"

NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "dcp": dict.fromkeys(
        ("guard", "energy", "recover", "tensorize", "plan", "records", "chain"), _NO_STEPS
    ),
}
"""By framework and mechanism: why there is nothing to do."""

NOT_YET: dict[str, dict[str, str]] = {
    "megatron": dict.fromkeys(
        (
            *("checkpoint", "resume", "malleable", "guard", "energy"),
            *("recover", "tensorize", "records", "chain"),
        ),
        _OF_FORMATS,
    ),
    "torchft": {
        "energy": "`EnergyMeter` measures any block; no line of its own for a Manager",
        "tensorize": "`tensorize(model)` before the Manager; not tested with it",
        "plan": "the planner knows `recover.mode`, and no Manager",
        "records": 'groups have no common run directory; those of `recover.mode = "live"` have',
        "chain": "a group does not ask the others to stop with it",
    },
}
"""By framework and mechanism: what is missing."""


@dataclass
class Support:
    """What the tests say.

    Attributes:
        tests: (framework, mechanism) -> names of the tests, as ``file::function``.
        problems: Marks that name something unknown.
    """

    tests: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)

    def works(self, framework: str, mechanism: str) -> bool:
        return (framework, mechanism) in self.tests

    def reason(self, framework: str, mechanism: str) -> tuple[str, str] | None:
        """Why a cell does not work, and under which heading."""
        for heading, table in (("n/a", NOT_APPLICABLE), ("not yet", NOT_YET)):
            if mechanism in table.get(framework, {}):
                return heading, table[framework][mechanism]
        return None


def marks_of(text: str) -> list[tuple[str, list[str]]]:
    """Every mark ``supports`` in the source of a test file: the function it is at, its arguments.

    A mark in ``pytestmark`` holds for all tests of the file and is given to the name ``*``.
    """
    found: list[tuple[str, list[str]]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            function = node.name
        if isinstance(node, ast.Call) and _is_mark(node.func):
            found.append((function, [_text(each) for each in node.args]))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(text), "*")
    return found


def _is_mark(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "supports"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
    )


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def read_tests(folder: Path = ROOT / "tests") -> Support:
    """What the tests below `folder` say."""
    support = Support()
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "mark.supports" not in text:
            continue
        name = file.relative_to(folder.parent).as_posix()
        for function, arguments in marks_of(text):
            test = f"{name}::{function}"
            framework, mechanisms = (arguments or [""])[0], arguments[1:]
            unknown = [each for each in mechanisms if each not in MECHANISMS]
            if framework not in FRAMEWORKS or unknown or not mechanisms:
                support.problems.append(f"{test}: supports({', '.join(arguments)})")
                continue
            for mechanism in mechanisms:
                support.tests[framework, mechanism].append(test)
    return support


def unexplained(support: Support) -> list[str]:
    """Cells with neither a test nor a reason."""
    return [
        f"{framework}, {mechanism}"
        for framework in FRAMEWORKS
        for mechanism in MECHANISMS
        if not support.works(framework, mechanism) and support.reason(framework, mechanism) is None
    ]


def outdated(support: Support) -> list[str]:
    """Cells with a test and a reason why there is none."""
    return [
        f"{framework}, {mechanism}"
        for framework in FRAMEWORKS
        for mechanism in MECHANISMS
        if support.works(framework, mechanism) and support.reason(framework, mechanism) is not None
    ]


def page(support: Support) -> str:
    """The matrix with its reasons and tests, in Markdown."""
    lines = ["| | " + " | ".join(MECHANISMS) + " |", "|---" * (len(MECHANISMS) + 1) + "|"]
    for framework, title in FRAMEWORKS.items():
        cells = [_cell(support, framework, mechanism) for mechanism in MECHANISMS]
        lines.append(f"| [{title}](integrations/{framework}.md) | {' | '.join(cells)} |")
    lines += ["", "What the columns mean:", ""]
    lines += [f"- *{name}*: {meaning}" for name, meaning in MECHANISMS.items()]
    for heading, words in (("n/a", "Not applicable"), ("not yet", "Not yet")):
        lines += ["", f"{words}:", ""]
        lines += [
            f"- {FRAMEWORKS[framework]}, {', '.join(mechanisms)}: {reason}"
            for (framework, reason), mechanisms in _reasons(support, heading).items()
        ]
    lines += ["", "The tests behind the cells:", "", "| | mechanisms | tests |", "|---|---|---|"]
    for framework, title in FRAMEWORKS.items():
        for file, mechanisms in _files(support, framework).items():
            lines.append(f"| {title} | {', '.join(mechanisms)} | `{file}` |")
    return "\n".join(lines)


def _cell(support: Support, framework: str, mechanism: str) -> str:
    if support.works(framework, mechanism):
        return "works"
    found = support.reason(framework, mechanism)
    return found[0] if found is not None else "?"


def _reasons(support: Support, heading: str) -> dict[tuple[str, str], list[str]]:
    """(framework, reason) -> mechanisms, of the cells with this heading."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for framework in FRAMEWORKS:
        for mechanism in MECHANISMS:
            reason = support.reason(framework, mechanism)
            if not support.works(framework, mechanism) and reason and reason[0] == heading:
                found[framework, reason[1]].append(mechanism)
    return found


def _files(support: Support, framework: str) -> dict[str, list[str]]:
    """File -> mechanisms that its tests show in this framework."""
    found: dict[str, list[str]] = defaultdict(list)
    for mechanism in MECHANISMS:
        tests = support.tests.get((framework, mechanism), [])
        for file in sorted({each.split("::")[0] for each in tests}):
            found[file].append(mechanism)
    return found


def paragraph(support: Support) -> str:
    """The same in a few words, for the README: frameworks with the same mechanisms together."""
    titles: dict[str, list[str]] = defaultdict(list)
    for framework, title in FRAMEWORKS.items():
        there = [each for each in MECHANISMS if support.works(framework, each)]
        missing = [each for each in MECHANISMS if each not in there]
        what = "everything" if not missing else f"everything but {', '.join(missing)}"
        if len(missing) > len(there) / 2:
            what = ", ".join(there).replace("malleable", "resizing")
        if there:
            titles[what].append(f"[{title}](docs/integrations/{framework}.md)")
    groups = "; ".join(f"{what} in {', '.join(found)}" for what, found in titles.items())
    return f"Tests show {groups}."


def with_block(text: str, block: str) -> str:
    """`text` with `block` between the two comments that mark its place."""
    before, begin, rest = text.partition("<!-- support matrix -->")
    _, end, after = rest.partition("<!-- end of support matrix -->")
    if not begin or not end:
        raise SystemExit("the page has no place for the support matrix: two comments mark it")
    return f"{before}{begin}{block}{end}{after}"


def pages(support: Support) -> dict[Path, str]:
    """File -> what should be in it."""
    return {
        PAGE: with_block(PAGE.read_text(encoding="utf-8"), f"\n\n{page(support)}\n\n"),
        README: with_block(README.read_text(encoding="utf-8"), paragraph(support)),
    }


def main() -> None:
    """Write the pages, and say what wants a person."""
    support = read_tests()
    for file, text in pages(support).items():
        if file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"{file.relative_to(ROOT)} written")
    for words, found in (
        ("marks that name something unknown", support.problems),
        ("cells without a test and a reason", unexplained(support)),
        ("cells with a test and a reason", outdated(support)),
    ):
        if found:
            print(f"{words}:", *found, sep="\n  ")


if __name__ == "__main__":
    main()
