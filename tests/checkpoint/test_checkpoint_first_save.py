"""A store that does not answer at the first save, and one in which no save was ever finished."""

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import Holder, open_store
from typer.testing import CliRunner

from outlast.checkpoint import CheckpointStore, list_versions, storage_of
from outlast.checkpoint.storage import LocalStorage
from outlast.checkpoint.version import SEAL
from outlast.cli.ckpt import ckpt
from outlast.errors import CheckpointError


def state_of(value: int) -> dict[str, Any]:
    return {"data": Holder({"x": torch.arange(500) * value})}


def test_a_first_save_without_storage_is_a_failed_handle_and_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "mount"
    blocked.write_text("no directory")
    with CheckpointStore(blocked / "run", writer="thread") as store:
        for step in (1, 2):
            with pytest.warns(UserWarning, match=f"checkpoint of step {step} .*training continues"):
                handle = store.save_async(step, state_of(step))
            assert handle.done()
            error = handle.result().error
            assert error is not None
            assert "cannot be made" in error
        blocked.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert store.save(3, state_of(3)).error is None
    assert [each.step for each in list_versions(storage_of(blocked / "run"))] == [3]


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "full")])
@pytest.mark.parametrize("what", ["folders", "create"])
def test_whatever_the_storage_says_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, what: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with open_store(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, what, fail)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = store.save_async(1, state_of(1)).result()
            assert result.error is not None
            assert str(error.strerror) in result.error
        assert store.save(2, state_of(2)).error is None


@pytest.mark.slow
def test_a_storage_that_hangs_is_waited_for_in_vain_only_once_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    folders = LocalStorage.folders

    def hang(self: LocalStorage) -> list[str]:
        answers.wait(60)
        return folders(self)

    monkeypatch.setattr(LocalStorage, "folders", hang)
    with open_store(tmp_path, timeout_seconds=1.0) as store:
        begun = time.monotonic()
        with pytest.warns(UserWarning, match=r"did not answer within 1 s \(timeout_seconds\)"):
            handle = store.save_async(1, state_of(1))
        assert time.monotonic() - begun < 20
        assert handle.result().error
        answers.set()
        assert store.save(2, state_of(2)).error is None


def test_a_directory_that_is_deleted_during_the_run_is_made_again(tmp_path: Path) -> None:
    import shutil

    place = tmp_path / "run"
    with open_store(place) as store:
        store.save(1, state_of(1))
        shutil.rmtree(place)
        assert store.save_async(2, state_of(2)).result().error is None
        assert store.save(3, state_of(3)).error is None
    found = state_of(0)
    restored = open_store(place).restore(found)
    assert restored is not None
    assert restored.step == 3


def cut_short(place: Path, *kept: str) -> None:
    """Leave of the only version what a killed save leaves."""
    with open_store(place) as store:
        store.save(7, state_of(7))
    for path in (place / "step-00000007-a1").iterdir():
        if not any(part in path.name for part in kept):
            path.unlink()


@pytest.mark.parametrize("kept", [("pack",), ("pack", "catalogue"), ("catalogue",)])
def test_a_lone_version_that_was_never_finished_is_no_silence(
    tmp_path: Path, kept: tuple[str, ...]
) -> None:
    cut_short(tmp_path, *kept)
    store = open_store(tmp_path)
    with pytest.warns(UserWarning, match="nothing is restored from") as told:
        assert store.restore(state_of(0)) is None
    [text] = [str(each.message) for each in told]
    for words in ("step-00000007-a1 has no manifest", "cut short", "starts from its first step"):
        assert words in text
        assert words in store.unfinished
    for arguments in ([], ["--all"], ["--step", "7"]):
        found = CliRunner().invoke(ckpt, ["verify", str(tmp_path), *arguments])
        assert found.exit_code == 1, arguments
        assert "step 7, session 1: INCOMPLETE" in found.output
    with open_store(tmp_path) as store:
        with pytest.warns(UserWarning, match="nothing is restored"):
            store.restore(state_of(0))
        store.save(1, state_of(1))
        assert store.restore(state_of(0)) is not None
        assert store.unfinished == ""


def test_an_empty_store_is_restored_from_without_a_word(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.restore(state_of(0)) is None
    assert store.unfinished == ""


def test_a_newer_version_that_was_never_finished_is_named(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save(1, state_of(1))
        store.save(2, state_of(2))
    for name in (SEAL, "rank-00000-of-00001.json"):
        (tmp_path / "step-00000002-a1" / name).unlink()
    restored = open_store(tmp_path).restore(state_of(0))
    assert restored is not None
    assert restored.step == 1
    [sentence] = restored.skipped
    assert "step-00000002-a1 has no manifest: its save was cut short" in sentence
    found = CliRunner().invoke(ckpt, ["verify", str(tmp_path)])
    assert found.exit_code == 1
    assert "step 1, session 1: OK" in found.output
    assert "step 2, session 1: INCOMPLETE" in found.output


def test_a_step_that_is_asked_for_and_was_never_finished_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save(1, state_of(1))
        store.save(2, state_of(2))
    for name in (SEAL, "rank-00000-of-00001.json"):
        (tmp_path / "step-00000002-a1" / name).unlink()
    with open_store(tmp_path) as store:
        with pytest.raises(CheckpointError, match="step-00000002-a1"):
            store.restore(state_of(0), step=2)
        assert not store.unfinished
        restored = store.restore(state_of(0))
        assert restored is not None
        assert restored.step == 1


def test_a_save_does_not_wait_for_storage_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    with open_store(tmp_path, when_busy="skip") as store:
        store.save(1, state_of(1))
        read_bytes = Path.read_bytes
        monkeypatch.setattr("outlast.checkpoint.store._LOOK_SECONDS", 0.2)
        monkeypatch.setattr(
            Path,
            "read_bytes",
            lambda path: read_bytes(path) if path.name != "owner" else gate.wait(30) and b"",
        )
        for step in (2, 3, 4):
            begun = time.monotonic()
            store.save_async(step, state_of(step))
            assert time.monotonic() - begun < 5
        gate.set()
        monkeypatch.undo()


def test_who_asks_for_the_newest_version_hears_of_unfinished_ones(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save(7, state_of(1))
    for name in (SEAL, "rank-00000-of-00001.json"):
        (tmp_path / "step-00000007-a1" / name).unlink()
    with open_store(tmp_path) as store:
        with pytest.warns(UserWarning, match="step-00000007-a1 .*starts from its first step"):
            assert store.newest() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert store.restore(state_of(0)) is None, "said once"
            store.save(1, state_of(1))
            assert store.newest() is not None
