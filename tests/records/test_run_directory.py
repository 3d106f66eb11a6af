"""The run directory loses nothing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from outlast.errors import RunError
from outlast.records import RunDirectory, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_directory_exists_once_its_job_is_published(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "first")
    assert not directory.exists()
    directory.create("# \u00fc\n")
    assert directory.exists()
    assert directory.job_file.read_text(encoding="utf-8") == "# \u00fc\n"
    assert names(directory.path) == ["id", "job.toml"]
    assert len(directory.identifier) == 8


def test_a_run_keeps_its_identifier_and_the_next_of_its_name_has_another(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create("a = 1\n")
    first = directory.identifier
    directory.create("a = 2\n")
    assert directory.identifier == first
    directory.move_aside()
    directory.create("a = 1\n")
    assert directory.identifier != first


def test_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match="runs/first cannot be written: "):
        RunDirectory(tmp_path / "runs" / "first").create("")


def test_attempts_are_counted_from_one(tmp_path: Path) -> None:
    assert [RunDirectory(tmp_path).next_attempt() for _ in range(4)] == [1, 2, 3, 4]


def test_attempt_that_cannot_be_counted_is_refused(
    tmp_path: Path, file_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    with file_limit(0), pytest.raises(RunError, match="attempts cannot be written: "):
        RunDirectory(tmp_path).next_attempt()
    assert RunDirectory(tmp_path).next_attempt() == 1


def test_moving_aside_takes_the_first_free_name_and_everything_along(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    for content in ("one", "two", "three"):
        directory.create(content)
        (directory.path / "checkpoints").mkdir()
        (directory.path / "checkpoints" / "1").write_text(content)
        directory.move_aside()
    assert names(tmp_path) == ["run.old1", "run.old2", "run.old3"]
    for number, content in enumerate(("one", "two", "three"), start=1):
        old = tmp_path / f"run.old{number}"
        assert (old / "job.toml").read_text() == content
        assert (old / "checkpoints" / "1").read_text() == content


def test_replaced_file_holds_the_new_bytes(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    for content in (b"old", b"new", b""):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert names(tmp_path) == ["job.toml"]


def test_failed_replacement_leaves_the_old_bytes_and_nothing_else(
    tmp_path: Path, file_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "job.toml"
    replace_file(path, b"old")
    with file_limit(1000), pytest.raises(OSError, match="File too large"):
        replace_file(path, b"x" * 5000)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["job.toml"]


def test_replacement_interrupted_at_the_rename_leaves_the_old_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.toml"
    replace_file(path, b"old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["job.toml"]
