"""Which versions there are, their order, and what is never overwritten."""

import os
from pathlib import Path

import pytest
import torch
from checkpoint_states import open_store, restore_step, steps_in
from torch import nn

from outlast.checkpoint import CheckpointStore, Retention, list_versions, storage_of
from outlast.errors import CheckpointError


def make_model(value: float) -> nn.Module:
    model = nn.Linear(4, 3)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def save(
    directory: Path, *steps: int, keep: int | Retention = 10, value: float | None = None
) -> None:
    """A session that saves versions whose weights are their steps."""
    with open_store(directory, keep=keep) as store:
        for step in steps:
            store.save(step, {"model": make_model(float(step) if value is None else value)})


def restored_step(directory: Path, step: int | None = None) -> int:
    """The step restored, after a check that the weights are its own."""
    model = make_model(-1.0)
    found = restore_step(directory, {"model": model}, step=step)
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, float(found)))
    return found


def test_an_empty_store_has_nothing_to_restore(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        store = open_store(directory)
        assert store.restore({"model": make_model(0.0)}) is None
        assert store.newest() is None
        assert steps_in(directory) == []
    assert not (tmp_path / "missing").exists(), "looking makes no directory"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert steps_in(tmp_path) == [4, 5]
    # Chunks that are still referred to may stay where they are.
    versions = [path.parent.name for path in tmp_path.rglob("*.json")]
    assert set(versions) == {"step-00000004-a1", "step-00000005-a1"}


def test_the_old_is_deleted_only_when_the_new_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    rename, unlink = os.replace, os.unlink
    monkeypatch.setattr(os, "replace", lambda a, b, **k: (events.append(str(b)), rename(a, b, **k)))
    monkeypatch.setattr(os, "unlink", lambda a, **k: (events.append(f"rm {a}"), unlink(a, **k)))
    save(tmp_path, 1, 2, 3, keep=2)
    published = events.index(str(tmp_path / "step-00000003-a1" / "rank-00000-of-00001.json"))
    deletions = [
        number
        for number, event in enumerate(events)
        if event.startswith("rm ") and "step-00000001" in event and not event.endswith(".tmp")
    ]
    assert deletions
    assert min(deletions) > published
    assert steps_in(tmp_path) == [2, 3]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep = 0"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize(("name", "value"), [("when_busy", "drop"), ("writer", "fork")])
def test_an_unknown_setting_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(CheckpointError, match=f'{name} = "{value}" must be'):
        CheckpointStore(tmp_path, **{name: value})


def test_versions_are_in_numeric_order_beyond_eight_digits(tmp_path: Path) -> None:
    large = [5, 99_999_999, 100_000_000, 1_234_567_890]
    save(tmp_path, *large)
    assert steps_in(tmp_path) == large
    assert [restored_step(tmp_path, step) for step in large] == large
    newest = open_store(tmp_path).newest()
    assert newest is not None
    assert newest.step == restored_step(tmp_path) == 1_234_567_890


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store, pytest.raises(CheckpointError, match="step = -1"):
        store.save_async(-1, {"model": make_model(0.0)})


def test_other_names_are_no_versions(tmp_path: Path) -> None:
    save(tmp_path, 1)
    others = [
        "step-5-a1",
        "step-0000000²-a1",
        "step-x",
        "notes",
        "step-00000009",
        "step-00000009-a0",
    ]
    for name in [*others, "step-000000009-a1", "step-00000009-a01"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000-of-00001.json").write_text("{}")
    (tmp_path / "step-00000007-a1").write_text("a file")
    assert [version.step for version in list_versions(storage_of(tmp_path))] == [1]
    assert restored_step(tmp_path) == 1
    save(tmp_path, 2, keep=1)
    assert steps_in(tmp_path) == [2]
    assert all((tmp_path / name).is_dir() for name in others), "what is no version is left alone"


def test_a_published_step_is_never_overwritten(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save(1, {"model": make_model(1.0)})
        with pytest.raises(CheckpointError, match="step-00000001-a1 is published already"):
            store.save(1, {"model": make_model(9.0)})
        assert restored_step(tmp_path) == 1
        store.save(2, {"model": make_model(2.0)})
    assert restored_step(tmp_path) == 2


def test_a_later_session_is_newer_whatever_its_step(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    save(tmp_path, 2, value=2.0)
    assert restored_step(tmp_path) == 2
    folders = [version.folder for version in list_versions(storage_of(tmp_path))]
    assert folders[-2:] == ["step-00000003-a1", "step-00000002-a2"]
    newest = open_store(tmp_path).newest()
    assert newest is not None
    assert newest.session == 2
    save(tmp_path, 3)
    assert restored_step(tmp_path) == 3
    assert [path.name for path in sorted(tmp_path.glob("step-00000003*"))] == [
        "step-00000003-a1",
        "step-00000003-a3",
    ]


def test_of_a_step_saved_twice_the_later_is_restored(tmp_path: Path) -> None:
    save(tmp_path, 2, value=77.0)
    save(tmp_path, 2)
    assert restored_step(tmp_path, 2) == 2


def test_a_session_that_goes_back_removes_the_abandoned_future(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    save(tmp_path, 2, keep=1)
    assert steps_in(tmp_path) == [2]
    assert restored_step(tmp_path) == 2


def test_a_version_just_written_is_never_the_one_deleted(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=1) as store:
        store.save(300, {"model": make_model(300.0)})
        store.save(50, {"model": make_model(50.0)})
        assert 50 in steps_in(tmp_path)
    assert restored_step(tmp_path, 50) == 50


def test_going_back_in_one_store_breaks_no_later_version(tmp_path: Path) -> None:
    frozen = torch.rand(200)
    with open_store(tmp_path, keep=1) as store:
        for step in (300, 50, 51, 301):
            model = make_model(float(step))
            model.register_buffer("frozen", frozen.clone() + (step != 300))
            store.save(step, {"model": model})
    model = make_model(0.0)
    model.register_buffer("frozen", torch.zeros(200))
    restored = open_store(tmp_path).restore({"model": model})
    assert restored is not None
    assert restored.skipped == []
    assert torch.equal(model.weight, torch.full((3, 4), float(restored.step)))


def test_a_store_that_went_back_itself_saves_on_from_there(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, {"model": make_model(float(step))})
        model = make_model(0.0)
        assert store.restore({"model": model}, step=1) is not None
        store.save(2, {"model": make_model(2.0)})
        newest = store.newest()
    assert newest is not None
    assert newest.step == 2
    assert restored_step(tmp_path) == 2


def test_leftovers_of_killed_saves_are_ignored_and_cleared(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step in (2, 3, 9):
        leftover = tmp_path / f"step-{step:08d}-a1"
        leftover.mkdir()
        (leftover / "rank-00000-of-00001.pack.1234abcd.tmp").write_bytes(b"half")
        (leftover / "rank-00000-of-00001.pack").write_bytes(b"whole")
    under_way = tmp_path / "step-00000007-a9"
    under_way.mkdir()
    assert restored_step(tmp_path) == 1
    with open_store(tmp_path, keep=2) as store:
        store.save(12, {"model": make_model(12.0)})
        assert (tmp_path / "step-00000012-a10").is_dir()
    assert steps_in(tmp_path) == [1, 12]
    assert not list(tmp_path.glob("step-0000000[2379]-*"))
    assert restored_step(tmp_path) == 12


def test_nothing_newer_than_the_newest_complete_version_is_touched(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=1) as store:
        store.save(1, {"model": make_model(1.0)})
        under_way = tmp_path / "step-00000009-a1"
        under_way.mkdir()
        (under_way / "rank-00000-of-00001.pack").write_bytes(b"being written")
        store.save(2, {"model": make_model(2.0)})
        assert (under_way / "rank-00000-of-00001.pack").exists()
        assert steps_in(tmp_path) == [2]


@pytest.mark.parametrize("keep", [1, 3])
def test_metrics_that_are_no_numbers_hinder_no_save(tmp_path: Path, keep: int) -> None:
    retention = Retention(keep, best=1, metric="loss")
    with open_store(tmp_path, keep=retention) as store:
        for step, loss in enumerate([2.0, 1.0, float("nan"), float("inf"), 3.0, 4.0], start=1):
            result = store.save_async(
                step, {"model": make_model(float(step))}, metrics={"loss": loss}
            ).result()
            assert result.error is None
    assert 2 in steps_in(tmp_path), "the best is the smallest number"
    assert restored_step(tmp_path) == 6


def test_metrics_may_be_numbers_of_numpy_and_torch(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        metrics = {"loss": torch.tensor(0.5), "accuracy": torch.ones(()).numpy()[()]}
        result = store.save_async(1, {"model": make_model(1.0)}, metrics=metrics).result()  # type: ignore[arg-type]
    assert result.error is None
