"""The support matrix in the documents says what the tests say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tools import support_matrix as matrix

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def support() -> matrix.Support:
    return matrix.read_tests()


def test_every_mark_names_what_there_is(support: matrix.Support) -> None:
    assert support.problems == []


def test_every_cell_has_a_test_or_else_a_reason(support: matrix.Support) -> None:
    assert matrix.unexplained(support) == []
    assert matrix.outdated(support) == [], "remove these from NOT_YET and NOT_APPLICABLE"


@pytest.mark.parametrize("path", [matrix.PAGE, matrix.README], ids=lambda path: path.name)
def test_the_documents_have_the_matrix_of_the_tests(path: Path, support: matrix.Support) -> None:
    wanted = matrix.pages(support)[path]
    assert path.read_text() == wanted, "run `python tests/tools/support_matrix.py`"


def test_every_framework_has_its_page() -> None:
    pages = matrix.PAGE.parent / "integrations"
    assert [name for name in matrix.FRAMEWORKS if not (pages / f"{name}.md").exists()] == []


def test_marks_are_found_wherever_they_are(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "deep").mkdir(parents=True)
    (tests / "deep" / "test_all.py").write_text(
        'import pytest, never_installed\npytestmark = [pytest.mark.supports("dcp", "resume")]\n'
    )
    (tests / "test_one.py").write_text(
        "import pytest\n"
        '@pytest.mark.slow\n@pytest.mark.supports("torchft", "guard", "chain")\ndef test_a(): ...\n'
        "both = pytest.param(1, marks=pytest.mark.supports('dcp', 'plan'))\n"
        '@pytest.mark.parametrize("x", [both])\ndef test_b(x): ...\n'
        '@pytest.mark.supports("jax", "guard")\ndef test_c(): ...\n'
        '@pytest.mark.supports("dcp", "flying")\ndef test_d(): ...\n'
        '@pytest.mark.supports("dcp")\ndef test_e(): ...\n'
    )
    support = matrix.read_tests(tests)
    assert dict(support.tests) == {
        ("dcp", "resume"): ["tests/deep/test_all.py::*"],
        ("torchft", "guard"): ["tests/test_one.py::test_a"],
        ("torchft", "chain"): ["tests/test_one.py::test_a"],
        ("dcp", "plan"): ["tests/test_one.py::*"],
    }
    assert len(support.problems) == 3


def test_a_page_keeps_what_is_around_the_matrix() -> None:
    text = "a <!-- support matrix -->old<!-- end of support matrix --> b\n"
    assert matrix.with_block(text, "new") == text.replace("old", "new")
    with pytest.raises(SystemExit, match="no place for the support matrix"):
        matrix.with_block("a\n", "new")
