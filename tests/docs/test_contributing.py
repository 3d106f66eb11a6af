"""CONTRIBUTING.md describes the tree and the layers that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def block_below(heading: str) -> list[str]:
    """The lines of the first text block below a heading."""
    found = re.search(rf"^## {heading}.*?^```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1].splitlines()


def test_the_layout_names_every_package_and_module_with_a_line_on_each() -> None:
    described = dict(line.split(maxsplit=1) for line in block_below("Layout") if "  " in line[2:])
    listed = {name for name in described if not (ROOT / name).exists()}
    source = ROOT / "src" / "outlast"
    packages = {f"{each.parent.name}/" for each in source.glob("*/__init__.py")}
    modules = {each.name for each in source.glob("*.py") if not each.name.startswith("__")}
    assert listed == packages | modules
    assert all(len(line.split()) > 1 for line in described.values())
    assert {"tests/", "benchmarks/", "docs/", "examples/"} <= described.keys()


def test_the_layers_are_those_that_import_linter_checks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    [layers] = [each["layers"] for each in contracts if each["type"] == "layers"]
    assert block_below("Layers") == [each.replace("outlast.", "") for each in layers]
    # The last sentence of the section names what the contracts forbid torch in.
    for contract in contracts:
        if contract["type"] == "forbidden" and "torch" in contract["forbidden_modules"]:
            for module in contract["source_modules"]:
                assert f"`{module.split('.')[1]}`" in TEXT, module


def test_every_path_that_is_named_is_there() -> None:
    places = (ROOT, ROOT / "src" / "outlast", ROOT / "src")
    named = set(re.findall(r"`((?:[\w.]+/)+[\w.]*)`", TEXT))
    named = {each for each in named if "NAME" not in each}
    missing = [each for each in named if not any((place / each).exists() for place in places)]
    assert sorted(missing) == []


def test_no_package_reaches_into_the_modules_of_another_ones_subpackage() -> None:
    reached = set()
    for file in (ROOT / "src" / "outlast").glob("*/**/*.py"):
        package = file.relative_to(ROOT / "src" / "outlast").parts[0]
        for other, rest in re.findall(
            r"^\s*(?:from|import) outlast\.(\w+)((?:\.\w+)*)", file.read_text(), re.MULTILINE
        ):
            if other != package and rest.count(".") > 1:
                reached.add(f"{file.relative_to(ROOT)}: outlast.{other}{rest}")
    assert sorted(reached) == []
