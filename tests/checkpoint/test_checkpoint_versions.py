"""Which versions there are, which are kept, and which is trusted."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.checkpoint import CheckpointStore, list_versions, verify
from outlast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def make_model(value: float) -> nn.Module:
    model = nn.Linear(4, 3)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def save(directory: Path, *steps: int, keep: int = 10) -> CheckpointStore:
    """Versions whose weights are their steps."""
    store = CheckpointStore(directory, keep=keep)
    for step in steps:
        store.save(step, {"model": make_model(float(step))})
    return store


def restored_step(directory: Path) -> int:
    """The step restored, after a check that the weights are its own."""
    model = make_model(-1.0)
    restored = CheckpointStore(directory).restore({"model": model})
    assert restored is not None
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, float(restored.step)))
    return restored.step


def steps(directory: Path) -> list[int]:
    return [version.step for version in list_versions(directory)]


def test_an_empty_store_has_nothing_to_restore(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        store = CheckpointStore(directory)
        assert store.restore({"model": make_model(0.0)}) is None
        assert store.newest() is None
        assert list_versions(directory) == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert steps(tmp_path) == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_the_old_is_deleted_only_when_the_new_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = save(tmp_path, 1, 2, keep=2)
    rename, unlink = os.rename, os.unlink
    done: list[str] = []
    monkeypatch.setattr(os, "rename", lambda a, b, **k: (done.append(str(b)), rename(a, b, **k)))
    monkeypatch.setattr(os, "unlink", lambda a, **k: (done.append(f"rm {a}"), unlink(a, **k)))
    store.save(3, {"model": make_model(3.0)})
    published = done.index(str(tmp_path / "step-00000003"))
    deletions = [number for number, event in enumerate(done) if event.startswith("rm ")]
    assert deletions
    assert min(deletions) > published
    assert steps(tmp_path) == [2, 3]


def test_a_version_just_written_is_never_the_one_deleted(tmp_path: Path) -> None:
    save(tmp_path, 300, keep=1).save(50, {"model": make_model(50.0)})
    assert 50 in steps(tmp_path)


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep = 0"):
        CheckpointStore(tmp_path, keep=0)


def test_versions_are_in_numeric_order_beyond_eight_digits(tmp_path: Path) -> None:
    large = [99_999_999, 1_234_567_890, 5, 100_000_000]
    save(tmp_path, *large)
    assert steps(tmp_path) == sorted(large)
    for version in list_versions(tmp_path):
        verify(version)
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    assert newest.step == restored_step(tmp_path) == 1_234_567_890


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step = -1"):
        CheckpointStore(tmp_path).save_async(-1, {"model": make_model(0.0)})


def test_other_names_are_no_versions(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in ("step-5", "step-0000000²", "step-x", "notes", "step-00000009.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    assert steps(tmp_path) == [1]
    assert restored_step(tmp_path) == 1


def test_a_published_step_is_never_overwritten(tmp_path: Path) -> None:
    store = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="step-00000001 is published already"):
        store.save(1, {"model": make_model(9.0)})
    assert restored_step(tmp_path) == 1


def test_a_damaged_step_can_be_saved_again(tmp_path: Path) -> None:
    store = save(tmp_path, 1)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    store.save(1, {"model": make_model(1.0)})
    assert restored_step(tmp_path) == 1
    assert (tmp_path / "step-00000001.damaged1").is_dir()


def test_leftovers_of_killed_saves_are_ignored_and_cleared(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step in (2, 3, 9):
        leftover = tmp_path / f"step-{step:08d}.partial"
        leftover.mkdir()
        (leftover / "__0_0.distcp").write_bytes(b"half")
        (leftover / "stray").write_bytes(b"of another process")
    assert restored_step(tmp_path) == 1
    save(tmp_path, 3)
    assert restored_step(tmp_path) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000003",
        "step-00000009.partial",
    ]


def data_file(version: Path) -> Path:
    return max(version.glob("*.distcp"), key=lambda path: path.stat().st_size)


def flip(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def truncate(path: Path) -> Path:
    os.truncate(path, path.stat().st_size - 1)
    return path


def delete(path: Path) -> Path:
    path.unlink()
    return path


def replace(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def rewrite(path: Path, change: Callable[[dict], object]) -> Path:
    manifest = json.loads(path.read_text())
    change(manifest)
    return replace(path, json.dumps(manifest))


def rename_hash(manifest: dict) -> None:
    for file in manifest["files"].values():
        file["xxh3_129"] = file.pop("xxh3_128")


DAMAGE: dict[str, Callable[[Path], Path]] = {
    "one bit of the tensors": lambda version: flip(data_file(version)),
    "one bit of DCP's metadata": lambda version: flip(version / ".metadata"),
    "tensors cut": lambda version: truncate(data_file(version)),
    "tensors deleted": lambda version: delete(data_file(version)),
    "metadata deleted": lambda version: delete(version / ".metadata"),
    "manifest deleted": lambda version: delete(version / "manifest.json"),
    "manifest cut": lambda version: truncate(version / "manifest.json"),
    "manifest empty": lambda version: replace(version / "manifest.json", ""),
    "manifest a list": lambda version: replace(version / "manifest.json", "[]"),
    "manifest of another step": lambda version: rewrite(
        version / "manifest.json", lambda manifest: manifest.update(step=7)
    ),
    "manifest of a later format": lambda version: rewrite(
        version / "manifest.json", lambda manifest: manifest.update(format=2)
    ),
    "manifest with another key": lambda version: rewrite(version / "manifest.json", rename_hash),
    "manifest with a list of files": lambda version: rewrite(
        version / "manifest.json", lambda manifest: manifest.update(files=[])
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_version_falls_back(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 1, 2)
    damaged = DAMAGE[kind](tmp_path / "step-00000002")
    with pytest.raises(CheckpointError) as caught:
        verify(list_versions(tmp_path)[-1])
    assert damaged.name in str(caught.value)
    model = make_model(-1.0)
    restored = CheckpointStore(tmp_path).restore({"model": model})
    assert restored is not None
    assert restored.step == 1
    [skipped] = restored.skipped
    assert str(damaged) in skipped
    assert torch.equal(model.weight, torch.ones(3, 4))
    assert steps(tmp_path) == [1]
    assert (tmp_path / "step-00000002.damaged1").is_dir()


def test_a_version_set_aside_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    for damages in (1, 2):
        flip(data_file(tmp_path / "step-00000003"))
        assert restored_step(tmp_path) == 2
        save(tmp_path, 3, keep=3)
        assert steps(tmp_path) == [1, 2, 3]
        assert (tmp_path / f"step-00000003.damaged{damages}").is_dir()
    save(tmp_path, 4, 5, keep=2)
    assert steps(tmp_path) == [4, 5]
    assert (tmp_path / "step-00000003.damaged1").is_dir()


def test_two_damaged_versions_are_both_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    delete(data_file(tmp_path / "step-00000002"))
    truncate(data_file(tmp_path / "step-00000003"))
    restored = CheckpointStore(tmp_path).restore({"model": make_model(0.0)})
    assert restored is not None
    assert restored.step == 1
    newer, older = restored.skipped
    assert "step-00000003" in newer
    assert "step-00000002" in older


def test_when_all_are_damaged_the_error_names_them_and_keeps_them(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    files = [flip(data_file(version.path)) for version in list_versions(tmp_path)]
    model = make_model(-1.0)
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(tmp_path).restore({"model": model})
    sentence = str(caught.value)
    assert all(str(file) in sentence for file in files)
    assert "restore the files from a copy" in sentence
    assert torch.equal(model.weight, torch.full((3, 4), -1.0))
    assert steps(tmp_path) == [1, 2]


def test_one_who_may_not_rename_can_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    flip(data_file(tmp_path / "step-00000002"))

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    assert restored_step(tmp_path) == 1


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of two versions by their names."""
    directory = tmp_path_factory.mktemp("intact")
    save(directory, 1, 2)
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_is_ever_restored(
    tmp_path_factory: pytest.TempPathFactory, intact: dict[str, bytes], data: st.DataObject
) -> None:
    damaged = data.draw(st.sampled_from([name for name in sorted(intact) if "00002/" in name]))
    position = data.draw(st.integers(0, len(intact[damaged]) - 1))
    bit = data.draw(st.integers(0, 7))
    directory = tmp_path_factory.mktemp("flipped")
    for name, content in intact.items():
        changed = bytearray(content)
        if name == damaged:
            changed[position] ^= 1 << bit
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(changed)
    # The manifest has bytes of no consequence, such as blanks; all others must be noticed.
    assert restored_step(directory) in ((1, 2) if "manifest" in damaged else (1,))
