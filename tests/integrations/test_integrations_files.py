"""Paths that lead into a store: overwritten, removed, damaged, and saves that fail."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outlast.checkpoint import storage_of
from outlast.checkpoint.retention import complete_versions
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations.files import CheckpointFiles, read_pointer
from outlast.job import CheckpointSection

QUICK = CheckpointSection(writer="thread")


def content(number: float, **more: Any) -> dict[str, Any]:
    return {"weights": {"a": torch.full((300, 7), number)}, "optimizer": {0: number}, **more}


def versions(place: Path) -> list[int]:
    return [version.step for version in complete_versions(storage_of(place))]


def test_what_torch_would_pickle_comes_back_as_it_was(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path / "store", QUICK)
    saved = content(
        1.0,
        when=datetime.timedelta(seconds=3),
        place=Path("somewhere"),
        shape=torch.Size([2, 3]),
        half=torch.arange(6, dtype=torch.bfloat16),
        array=np.arange(3),
        nested=[(1, None), {"x": {2.5}}, float("inf"), b"bytes"],
    )
    files.save(tmp_path / "one.ckpt", saved, 3)
    found = files.load(tmp_path / "one.ckpt")
    files.close()
    assert found.keys() == saved.keys()
    for name in ("when", "place", "shape", "nested", "optimizer"):
        assert found[name] == saved[name]
        assert type(found[name]) is type(saved[name])
    assert torch.equal(found["half"], saved["half"])
    assert torch.equal(found["weights"]["a"], saved["weights"]["a"])
    assert np.array_equal(found["array"], saved["array"])
    with pytest.raises(CheckpointError, match="weights_only = True forbids"):
        CheckpointFiles(tmp_path / "store").load(tmp_path / "one.ckpt", unpickle=False)


def test_a_path_keeps_what_it_led_to_and_a_removed_one_takes_its_version(tmp_path: Path) -> None:
    place, last = tmp_path / "store", tmp_path / "names" / "last.ckpt"
    files = CheckpointFiles(place, QUICK)
    for step in (1, 2, 3, 4):
        files.save(last, content(step), step)
        files.save(tmp_path / f"{step}.ckpt", content(step, name=str(step)), step)
        if step > 1:
            files.remove(tmp_path / f"{step - 1}.ckpt")
    files.close()
    assert sorted(each.name for each in tmp_path.glob("*.ckpt")) == ["4.ckpt"]
    assert versions(place) == [3, 4]
    assert [each.version for each in read_pointer(last).entries] == [
        "step-00000004-a1",
        "step-00000003-a1",
    ]
    assert files.load(last)["optimizer"] == {0: 4}
    assert files.load(tmp_path / "4.ckpt")["name"] == "4"


def test_another_content_of_the_same_step_has_a_version_of_its_own(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path / "store", QUICK)
    state = content(1.0)
    files.save(tmp_path / "a", state, 5)
    files.save(tmp_path / "b", {**state, "more": 1}, 5)
    state["weights"]["a"].add_(1.0)
    files.save(tmp_path / "c", state, 5)
    files.save(tmp_path / "d", state, 6)
    files.close()
    assert versions(tmp_path / "store") == [5, 6, 7]
    values = [files.load(tmp_path / name)["weights"]["a"][0, 0].item() for name in "abcd"]
    assert values == [1.0, 1.0, 2.0, 2.0]
    assert files.load(tmp_path / "b")["more"] == 1
    assert "more" not in files.load(tmp_path / "a")


@pytest.mark.filterwarnings("ignore:the checkpoint of step 2")
def test_nothing_is_removed_for_a_save_that_failed(tmp_path: Path) -> None:
    place = tmp_path / "store"
    files = CheckpointFiles(place, QUICK)
    files.save(tmp_path / "one", content(1.0), 1)
    files.wait()
    # In the place of the next version's folder, there is a file.
    (place / "step-00000002-a1").write_text("")
    files.save(tmp_path / "two", content(2.0), 2)
    files.remove(tmp_path / "one")
    with pytest.raises(CheckpointError, match="the checkpoint of step 2"):
        files.wait()
    assert files.load(tmp_path / "one")["optimizer"] == {0: 1.0}
    with pytest.raises(CheckpointError, match="two cannot be used"):
        files.load(tmp_path / "two")
    files.save(tmp_path / "three", content(3.0), 3)
    files.close()
    assert not (tmp_path / "one").exists()
    assert files.load(tmp_path / "three")["optimizer"] == {0: 3.0}


def test_a_path_of_a_process_that_died_in_its_save_is_swept(tmp_path: Path) -> None:
    place, path = tmp_path / "store", tmp_path / "last.ckpt"
    files = CheckpointFiles(place, QUICK)
    files.save(path, content(1.0), 1)
    files.close()
    # As a kill leaves them: the folder has no manifest.
    for each in (place / "step-00000001-a1").iterdir():
        each.unlink()
    again = CheckpointFiles(place, QUICK)
    with pytest.warns(UserWarning, match="was not complete when its process ended"):
        again.sweep()
    assert not path.exists()
    again.save(path, content(2.0), 2)
    again.close()
    assert again.load(path)["optimizer"] == {0: 2.0}


def test_a_file_of_another_kind_is_not_taken_for_one(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path / "store", QUICK)
    (tmp_path / "other").write_bytes(os.urandom(100))
    with pytest.raises(CheckpointError, match="other is no checkpoint file of Outlast"):
        files.load(tmp_path / "other")
    with pytest.raises(CheckpointError, match="missing is not there"):
        files.load(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="folder is a directory"):
        files.save(tmp_path / "folder", content(1.0), 1)
    files.close()
    settings: list[dict[str, Any]] = [
        {"keep": 9},
        {"every_steps": 7},
        {"longest_minutes": 2.0},
        {"when_busy": "skip"},
    ]
    for each in settings:
        [name] = each
        with pytest.raises(IntegrationError, match=rf"checkpoint\.{name} = .* cannot be followed"):
            CheckpointFiles(tmp_path / "store", CheckpointSection(**each))


def test_a_store_that_is_moved_with_its_paths_loses_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    files = CheckpointFiles(first / "store", QUICK)
    files.save(first / "names" / "best", content(1.0), 1)
    files.save(first / "names" / "last", content(2.0), 2)
    files.close()
    first.rename(second)
    moved = CheckpointFiles(second / "store", QUICK)
    for step in (3, 4):
        moved.save(second / "names" / "last", content(step), step)
    moved.close()
    assert versions(second / "store") == [1, 3, 4]
    assert moved.load(second / "names" / "best")["optimizer"] == {0: 1.0}


def best_and_last(folder: Path, *steps: int) -> CheckpointFiles:
    """Saves the best of step 1, and all steps as the last one."""
    files = CheckpointFiles(folder / "store", QUICK)
    files.save(folder / "best", content(1.0), 1)
    for step in steps:
        files.save(folder / "last", content(step), step)
    files.close()
    return files


@pytest.mark.parametrize("lost", ["removed", "cut"])
def test_where_the_list_of_paths_is_lost_all_versions_stay(tmp_path: Path, lost: str) -> None:
    place = tmp_path / "store"
    files = best_and_last(tmp_path, 2)
    if lost == "removed":
        (place / "files.json").unlink()
    else:
        (place / "files.json").write_text('[{"path": "')
    with pytest.warns(UserWarning, match="its 2 versions are kept"):
        files.save(tmp_path / "elsewhere" / "new", content(3.0), 3)
    files.close()
    # Also by who comes later, and what is new goes when nothing leads to it.
    for step in (4, 5, 6):
        files.save(tmp_path / "elsewhere" / "new", content(step), step)
    files.close()
    assert versions(place) == [1, 2, 5, 6]
    assert files.load(tmp_path / "best")["optimizer"] == {0: 1.0}


@pytest.mark.filterwarnings("ignore:no version is deleted")
def test_nothing_is_deleted_while_a_path_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, best = tmp_path / "store", tmp_path / "best"
    files = best_and_last(tmp_path, 2)
    own_open = Path.open

    def failing(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == best:
            raise OSError(5, "Input/output error")
        return own_open(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing)
        for step in (3, 4, 5):
            files.save(tmp_path / "last", content(step), step)
        files.close()
        again = CheckpointFiles(place, QUICK)
        again.sweep()
        with pytest.warns(UserWarning, match=r"no version is deleted while .*best cannot be read"):
            again.save(tmp_path / "last", content(6.0), 6)
        again.close()
        assert versions(place) == [1, 2, 3, 4, 5, 6]
    files.save(tmp_path / "last", content(7.0), 7)
    files.close()
    assert versions(place) == [1, 6, 7]
    assert files.load(best)["optimizer"] == {0: 1.0}


def test_a_path_that_is_copied_or_renamed_beside_the_others_keeps_its_version(
    tmp_path: Path,
) -> None:
    files = best_and_last(tmp_path, 2)
    (tmp_path / "copy").write_bytes((tmp_path / "last").read_bytes())
    (tmp_path / "best").rename(tmp_path / "renamed")
    for step in (3, 4, 5):
        files.save(tmp_path / "last", content(step), step)
    files.close()
    assert versions(tmp_path / "store") == [1, 2, 4, 5]
    assert files.load(tmp_path / "renamed")["optimizer"] == {0: 1.0}
    assert files.load(tmp_path / "copy")["optimizer"] == {0: 2}


FAILING = """
import sys
from pathlib import Path

import torch

from outlast.integrations.files import CheckpointFiles
from outlast.job import CheckpointSection

place = Path(sys.argv[1])
place.mkdir()
# In the place of the version's folder, there is a file.
(place / "step-00000001-a1").write_text("")
files = CheckpointFiles(place, CheckpointSection(writer="thread"))
files.save(place.parent / "one", {"a": torch.ones(3)}, 1)
if "raise" in sys.argv:
    try:
        raise ValueError("of the script")
    finally:
        files.release()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "raise"])
def test_a_save_that_failed_is_told_by_the_exit_code_and_hides_no_exception(
    tmp_path: Path, how: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING, tmp_path / "store", how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "the checkpoint of step 1" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: of the script" if how == "raise" else "outlast: ")
