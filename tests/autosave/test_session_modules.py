"""Which modules are the program's."""

import importlib
import sys

import pytest

from outlast.autosave.resume.modules import ProgramModules


@pytest.fixture
def program(tmp_path, monkeypatch):
    for name in ("train", "beside_it", "src/worked_on", "tools/searched_here"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("value = 1\n")
    before = set(sys.modules)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "tools"))
    monkeypatch.syspath_prepend(tmp_path / "tools")
    # As the path files of editable packages do, before the script begins.
    monkeypatch.syspath_prepend(tmp_path / "src")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for each in set(sys.modules) - before:
        del sys.modules[each]


def found(modules):
    for each in ("beside_it", "worked_on", "searched_here"):
        importlib.import_module(each)
    return modules.globals().keys() & {"beside_it", "worked_on", "searched_here"}


def test_packages_that_are_worked_on_are_not_the_programs(program):
    modules = ProgramModules([program / "train.py"])
    assert found(modules) == {"beside_it", "searched_here"}


def test_files_of_theirs_that_the_program_was_read_with_are(program):
    modules = ProgramModules([program / "train.py", program / "src" / "worked_on.py"])
    assert found(modules) == {"beside_it", "worked_on", "searched_here"}


def test_what_setuptools_maps_is_not_the_programs(program, monkeypatch):
    finder = type(sys)("__editable___some_finder")
    finder.MAPPING = {"beside_it": str(program / "beside_it.py")}
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    assert found(ProgramModules([program / "train.py"])) == {"searched_here"}
