"""Lightning's `Trainer` under torchrun: what was killed continues from memory."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from forked import torchrun
from lightning_runs import EVERY_5, QUIET, assert_same, finish, losses, records, start

from outlast.errors import RecoverError
from outlast.integrations.lightning import KeepLast, with_outlast
from outlast.records import CheckpointRestored, StateRecovered, Warned
from outlast.runtime.memory import MemoryCheckpoint

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

HOW: dict[str, Any] = {"devices": 2, "validate": True}
"""Six steps an epoch on two ranks, and a validation at its end."""

SAVED = [EVERY_5, "checkpoint.asynchronous=false"]

SCRIPT = f"""
import sys
from pathlib import Path

sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from lightning_runs import fit

sys.exit(fit(Path(sys.argv[1]), sys.argv[2:], {HOW!r}))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    finish(folder, **HOW)
    return folder


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a training as torchrun does, for the n-th time."""

    def nth(number: int, folder: Path, *settings: str, **how: Any) -> list[int | None]:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "9")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        return start(folder, f'recover.memory="{folder}/memory"', *settings, **how)

    return nth


def recovered(folder: Path) -> list[int]:
    """At which steps the training has continued from memory."""
    events = [event for _, event in records(folder).of(StateRecovered)]
    assert {each.source for each in events} <= {"memory"}
    return [each.step for each in events]


def read(folder: Path) -> list[int]:
    """At which steps the training has continued from a file."""
    return [event.step for _, event in records(folder).of(CheckpointRestored)]


@pytest.mark.supports("lightning", "recover", "resume")
def test_a_rank_that_is_killed_under_torchrun_costs_one_step_at_most_and_no_bit(
    whole: Path, tmp_path: Path
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "killed"
    script.write_text(SCRIPT)
    folder.mkdir()
    # Not where a file is saved: the other rank may still complete that.
    (folder / "plan").write_text("9 SIGKILL 1")
    done = torchrun(
        tmp_path / "output",
        "--nproc-per-node=2",
        "--max-restarts=2",
        script,
        str(folder),
        f'recover.memory="{folder}/memory"',
        *SAVED,
    )
    assert done.code == 0, done.said
    assert_same(folder, whole, ranks=2)
    # Nine steps were done; a group that is ended may not come to keep the last of them.
    (step,) = recovered(folder)
    assert step in (8, 9)
    assert read(folder) == []
    assert len((folder / "losses0.jsonl").read_text().splitlines()) <= 18 + 9 - step + 1
    first, last = [each.outcome for each in records(folder).attempts]
    # The first rank may have come to say that the other is gone.
    assert first in ("died", "failed")
    assert last == "completed"
    # All is over, and nothing is left in memory.
    assert not list((folder / "memory").rglob("rank-*"))


@pytest.mark.supports("lightning", "recover")
def test_a_validation_is_not_left_out_and_a_file_read_where_the_memory_is_gone(
    whole: Path, tmp_path: Path, restarts: Any
) -> None:
    assert None in restarts(0, tmp_path, *SAVED, plan="4 SIGKILL 1", **HOW)
    # Before the validation at the end of the first epoch.
    assert None in restarts(1, tmp_path, *SAVED, plan="6 SIGKILL 0", **HOW)
    assert None in restarts(2, tmp_path, *SAVED, plan="16 SIGKILL 1", **HOW)
    shutil.rmtree(tmp_path / "memory")
    assert restarts(3, tmp_path, *SAVED, **HOW) == [0, 0]
    assert_same(tmp_path, whole, ranks=2)
    first, second = recovered(tmp_path)
    assert first in (3, 4)
    assert second == 5
    assert read(tmp_path) == [15]
    assert (tmp_path / "validations0").read_text().split() == ["6", "12", "18"]


@pytest.mark.supports("lightning", "recover", "malleable")
def test_what_two_ranks_have_kept_is_gone_on_with_by_one(tmp_path: Path, restarts: Any) -> None:
    how: dict[str, Any] = {"plain": True, "epochs": 2}
    other, folder = tmp_path / "whole", tmp_path / "shrunk"
    finish(other, devices=2, **how)
    assert None in restarts(0, folder, plan="10 SIGKILL 0", devices=2, **how)
    assert restarts(1, folder, batch=16, **how) == [0]
    (step,) = recovered(folder)
    assert step in (9, 10)
    whole, found = [losses(other, rank) for rank in range(2)], losses(folder)
    for batch in range(step, 12):
        mean = sum(of_rank[batch] for of_rank in whole) / 2
        assert found[batch] == pytest.approx(mean, rel=1e-4), batch


def test_a_command_that_is_given_again_goes_on_from_memory_where_it_asks_for_the_last(
    tmp_path: Path, restarts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "killed"
    assert restarts(0, folder, *SAVED, plan="8 SIGKILL") == [None]
    for name in ("before", "unusable"):
        shutil.copytree(folder, tmp_path / name)
    assert restarts(0, folder, *SAVED) == [0]
    assert recovered(folder) in ([7], [8])
    assert read(folder) == []
    # Where it asks for no file, it begins anew.
    shutil.rmtree(folder)
    (tmp_path / "before").rename(folder)
    assert restarts(0, folder, *SAVED, **{"from": None}) == [0]
    assert recovered(folder) == read(folder) == []
    assert len((folder / "losses0.jsonl").read_text().splitlines()) == 8 + 36
    # So it does where torchrun starts it again and the memory cannot be used, which is said.
    shutil.rmtree(folder)
    (tmp_path / "unusable").rename(folder)

    def take(*_: Any) -> None:
        raise RecoverError("it has gone")

    monkeypatch.setattr(MemoryCheckpoint, "_take", take)
    assert restarts(1, folder, *SAVED, epochs=1, **{"from": None}) == [0]
    assert recovered(folder) == read(folder) == []
    (warned,) = [event.message for _, event in records(folder).of(Warned)]
    assert warned.startswith("it has gone; the training begins anew, as the script says")


def test_what_is_on_no_disk_stays_in_memory_where_all_steps_were_done(
    tmp_path: Path, restarts: Any
) -> None:
    assert restarts(0, tmp_path, *SAVED, plan="8 SIGKILL") == [None]
    assert restarts(1, tmp_path, *SAVED, steps=7) == [0]
    assert restarts(2, tmp_path, *SAVED, steps=12) == [0]
    assert recovered(tmp_path) in ([7], [8])
    assert read(tmp_path) == []
    assert not list((tmp_path / "memory").rglob("rank-*"))


def test_a_command_that_begins_anew_is_not_restarted_into_the_training_before(
    tmp_path: Path, restarts: Any
) -> None:
    settings = ["recover.every_steps=4", "checkpoint.every_steps=50"]
    anew = {"from": None}
    assert restarts(0, tmp_path, *settings, plan="10 SIGKILL") == [None]
    # It dies before it has kept anything itself.
    assert restarts(0, tmp_path, *settings, plan="2 SIGKILL", **anew) == [None]
    assert restarts(1, tmp_path, *settings, **anew) == [0]
    assert recovered(tmp_path) == read(tmp_path) == []
    assert len((tmp_path / "losses0.jsonl").read_text().splitlines()) == 10 + 2 + 36


def test_what_is_kept_is_copied_before_any_step_of_a_manual_optimization(
    tmp_path: Path, restarts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"

    def telling(name: str) -> None:
        own = getattr(MemoryCheckpoint, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with told.open("a") as file:
                file.write(f"{name}\n")
            return own(*arguments, **options)

        monkeypatch.setattr(MemoryCheckpoint, name, call)

    telling("keep")
    telling("settle")
    assert restarts(0, tmp_path, epochs=1, steps_told_in=told) == [0]
    said = told.read_text().split()
    # Not behind the last batch of the epoch.
    assert (said.count("keep"), said.count("step")) == (11, 12)
    followed = {second for first, second in pairwise(said) if first == "keep"}
    assert followed == {"settle"}


def test_it_is_said_where_a_validation_follows_each_step(tmp_path: Path, restarts: Any) -> None:
    assert restarts(0, tmp_path, validate=True, validate_every=1) == [0]
    (warned,) = [event.message for _, event in records(tmp_path).of(Warned)]
    assert warned.startswith("step 2, and the one before after which the state would be kept")


def test_nothing_is_kept_where_nobody_would_start_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = [*QUIET, f'run.directory="{tmp_path}"']
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    def keeps(*settings: str) -> bool:
        found = with_outlast(settings=[*place, *settings])["callbacks"]
        return isinstance(found[-1], KeepLast)

    assert not keeps()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert keeps()
    assert not keeps('recover.mode="off"')
