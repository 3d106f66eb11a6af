"""The documentation's table of checks is that of the code."""

import subprocess
import sys
from pathlib import Path

from outlast.guard import LEVELS, OPERATIONS
from outlast.guard.policy import table

PAGE = Path(__file__).parents[2] / "docs" / "guard-checks.md"


def test_the_page_has_the_table_of_the_code() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    written = [line for line in lines if line.startswith(("| check | level |", "| `"))]
    begun = [line.startswith("| check | level |") for line in written]
    assert any(begun), f"no table of checks in {PAGE}; python -m outlast.guard.policy prints it"
    first = lines.index(written[begun.index(True)])
    found = lines[first : first + len(OPERATIONS) + 3]
    expected = table().splitlines()
    assert found[: len(expected)] == expected, "print it: python -m outlast.guard.policy"
    assert found[len(expected) :] == [""]


def test_the_table_has_a_row_of_six_cells_for_every_check() -> None:
    head, rule, *rows = table().splitlines()
    assert len(rows) == len(OPERATIONS)
    for line in (head, rule, *rows):
        assert line.replace(r"\|", "").count("|") == 7
    for row, (name, operation) in zip(rows, OPERATIONS.items(), strict=True):
        cells = [cell.strip() for cell in row.replace(r"\|", "\0").split("|")[1:-1]]
        right = "yes" if operation.corrects else "no"
        assert (cells[0], cells[1], cells[5]) == (f"`{name}`", operation.level, right)
        assert cells[3].replace("\0", "|") == operation.sees
    assert rule == "|" + " --- |" * 6


def test_every_check_belongs_to_a_level_that_checks() -> None:
    assert {each.level for each in OPERATIONS.values()} == set(LEVELS) - {"off"}


def test_the_module_prints_the_table() -> None:
    command = [sys.executable, "-m", "outlast.guard.policy"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == table() + "\n"
    assert done.stderr == ""
