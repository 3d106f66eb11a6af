"""What must be the same between two starts of a run, and how a change is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from outlast.autosave.program.rewrite import rewrite
from outlast.autosave.program.source import read_program
from outlast.autosave.program.training import find_training
from outlast.autosave.run_folder import (
    arguments_hash,
    from_json,
    identity_of,
    refuse_changes,
    version_warnings,
)
from outlast.errors import AutosaveError

SCRIPT = """\
import settings

def train(model, batches):
    for batch in batches:
        model(batch).backward()
        model.step()

train(settings.model, settings.batches)
"""
PLACE = Path("runs/a")


@pytest.fixture
def program(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "settings.py").write_text("model, batches = None, []\n")

    def read(arguments=("--lr", "1"), world_size=2):
        files = read_program(tmp_path / "train.py")
        found = rewrite(files, find_training(files))
        return identity_of(found, arguments, world_size, "2.13.0")

    read.folder = tmp_path
    return read


def refused(before, now, **how):
    with pytest.raises(AutosaveError) as error:
        refuse_changes(before, now, PLACE, **how)
    return str(error.value)


def test_the_same_program_is_the_same_after_a_round_trip(program):
    before = from_json(program().to_json(), PLACE)
    assert before == program()
    refuse_changes(before, program(), PLACE)
    assert version_warnings(before, program()) == []


def test_changed_module_is_refused_with_its_lines(program):
    before = program()
    (program.folder / "settings.py").write_text("model, batches = None, [1]\n")
    said = refused(before, program())
    assert "settings.py (saved)" in said
    assert "-model, batches = None, []" in said
    assert "+model, batches = None, [1]" in said
    assert "--accept-changes" in said
    refuse_changes(before, program(), PLACE, accept_changes=True)


def test_changed_arguments_are_refused_with_both(program):
    said = refused(program(), program(("--lr", "2")))
    assert "- arguments: --lr 1" in said
    assert "+ arguments: --lr 2" in said
    refuse_changes(program(), program(("--lr", "2")), PLACE, accept_changes=True)


def test_shifted_lines_are_accepted_and_a_moved_training_loop_is_refused(program):
    before = program()
    text = SCRIPT.replace("    for batch", "    if batches:\n        return\n    for batch")
    text = f"# Eleven lines more.\n{10 * chr(10)}{text}"
    (program.folder / "train.py").write_text(text.replace("train(settings", "\n\ntrain(settings"))
    refuse_changes(before, program(), PLACE, accept_changes=True)
    looped = SCRIPT.replace("train(settings.model", "while True: train(settings.model")
    (program.folder / "train.py").write_text(looped)
    said = refused(before, program(), accept_changes=True)
    assert "cannot continue even with --accept-changes" in said


def test_another_number_of_processes_is_refused_whatever_is_accepted(program):
    said = refused(program(), program(world_size=3), accept_changes=True)
    assert "saved by 2 processes and cannot continue with 3 processes" in said


def test_other_versions_are_told_and_not_refused(program):
    now = replace(program(), torch="2.14.0", python="3.12.1")
    refuse_changes(program(), now, PLACE)
    python, torch = version_warnings(program(), now)
    assert "3.12.1" in python
    assert "torch 2.13.0 and continues under 2.14.0" in torch


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 2, "arguments": 3}'])
def test_damaged_file_is_told_by_its_name(text):
    with pytest.raises(AutosaveError, match=r"runs/a is damaged .* --fresh"):
        from_json(text, PLACE)


def test_file_of_another_format_is_told(program):
    text = program().to_json().replace('"format": 2', '"format": 9')
    with pytest.raises(AutosaveError, match="has the format 9"):
        from_json(text, PLACE)


def test_runs_with_other_arguments_have_other_hashes():
    assert arguments_hash(["a b"]) != arguments_hash(["a", "b"])
    assert arguments_hash(["a", "b"]) == arguments_hash(["a", "b"])


def test_a_program_is_the_same_in_another_folder(program):
    before = program()
    moved = program.folder.with_name("moved")
    program.folder.rename(moved)
    files = read_program(moved / "train.py")
    now = identity_of(rewrite(files, find_training(files)), ("--lr", "1"), 2, "2.13.0")
    assert now == before
    assert "train.py:train" in now.sites[0]
    assert not any(str(moved) in site for site in now.sites)


TWICE = """\
import settings

if settings.batches:
    def train(model, batches):
        for batch in batches:
            model(batch).backward()
            model.step()
else:
    def train(model, batches):
        for batch in batches:
            model(batch).backward()
            model.step()

train(settings.model, settings.batches)
"""


def test_functions_of_one_name_are_told_apart(tmp_path):
    (tmp_path / "train.py").write_text(TWICE)
    (tmp_path / "settings.py").write_text("model, batches = None, []\n")
    files = read_program(tmp_path / "train.py")
    found = identity_of(rewrite(files, find_training(files)), (), 1, "2.13.0")
    bodies = {site.partition(" in ")[2].partition(" within")[0] for site in found.sites}
    assert {"train.py:train", "train.py:train (2)"} <= bodies
