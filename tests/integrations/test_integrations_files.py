"""Paths that lead into a store: overwritten, removed, damaged, and saves that fail."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outlast.checkpoint import storage_of
from outlast.checkpoint.format.retention import complete_versions
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations.files import CheckpointFiles
from outlast.integrations.pointer import read_pointer
from outlast.job import CheckpointSection

QUICK = CheckpointSection(writer="thread")


def content(number: float, **more: Any) -> dict[str, Any]:
    return {"weights": {"a": torch.full((300, 7), number)}, "optimizer": {0: number}, **more}


def versions(place: Path) -> list[int]:
    return [each.version.step for each in complete_versions(storage_of(place))]


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
    with pytest.raises(IntegrationError, match=r"checkpoint\.keep = 9 cannot be followed"):
        CheckpointFiles(tmp_path / "store", CheckpointSection(keep=9))


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
