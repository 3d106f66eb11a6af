"""The tutorials do what they say, and the notebooks are made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import ROOT, module_of, notebooks, run_page

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_and_its_solutions_run_as_written(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path) > 2


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_says_what_it_takes_and_has_exercises(page: Path) -> None:
    text = page.read_text()
    for word in ("**At the end**", "**Time**", "**You need**", "## Exercises", "## Where next"):
        assert word in text, word
    assert text.count("<summary>Solution</summary>") in {2, 3}
    assert all(cell.name for cell in notebooks.cells_of(text) if cell.kind == "shown"), (
        "a block that is not run says why"
    )


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_the_notebook_is_what_the_page_makes(name: str) -> None:
    committed = (notebooks.NOTEBOOKS / f"{name}.ipynb").read_text()
    assert committed == notebooks.notebook_of(name), "run `python docs/notebooks.py`"
    for cell in json.loads(committed)["cells"]:
        assert cell["cell_type"] in {"markdown", "code"}


@pytest.mark.parametrize("name", ["commands", "settings", "api"])
def test_the_reference_is_what_the_code_makes(name: str) -> None:
    reference = module_of("reference_pages")
    written = (reference.REFERENCE / f"{name}.md").read_text()
    assert written == reference.PAGES[name](), "run `python docs/reference_pages.py`"
