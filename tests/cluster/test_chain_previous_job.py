"""What a link finds of the job before it: its lock, its cancellation."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from slurm_programs import accounted, put_command, shown, slurm_commands

from outlast.cluster import verdict as judging
from outlast.cluster import verdict as runlock
from outlast.cluster.chain_files import ChainFiles, ChainPlan, chain_files, entries, note, of_kind
from outlast.cluster.slurm import Patience
from outlast.cluster.verdict import verdict_on_previous

PLAN = ChainPlan("abc", "n", "dependent", (1,), 1, 3600.0, "/", "python")


def chain(folder: Path) -> ChainFiles:
    files = chain_files(folder / "run")
    files.path.mkdir(parents=True)
    return files


def started(files: ChainFiles, **fields: Any) -> None:
    note(files, "started", job="7", step=0, hosts=["gpu7"], **fields)


def killed(files: ChainFiles) -> None:
    started(files)
    note(files, "ended", job="7", code=137)


def filler(files: ChainFiles) -> None:
    started(files, role="filler")


def resumed(files: ChainFiles) -> None:
    started(files)
    note(files, "resumed")


@pytest.mark.parametrize("before", [killed, filler, resumed])
def test_a_dead_trainers_lock_stops_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Any
) -> None:
    """The trainer would refuse a lock of another host for two minutes, with exit code 2."""
    files = chain(tmp_path)
    before(files)
    lock = files.run / "lock"
    lock.write_text('{"host": "gpu7", "boot": "b", "pid": 1, "started": 1.0}')
    slurm_commands(tmp_path, monkeypatch, squeue=shown("7", "FAILED"))
    assert verdict_on_previous(files, PLAN, "8") is None
    assert not lock.exists()


def test_the_lock_of_a_job_that_is_being_taken_down_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = chain(tmp_path)
    killed(files)
    lock = files.run / "lock"
    lock.write_text('{"host": "gpu7", "boot": "b", "pid": 1, "started": 1.0}')
    monkeypatch.setattr(runlock, "_LOOK_SECONDS", 0.05)
    nearly_stale = time.time() - 119.8
    os.utime(lock, (nearly_stale, nearly_stale))
    slurm_commands(tmp_path, monkeypatch, squeue=shown("7", "COMPLETING"))
    put_command(tmp_path, "sacct", f"echo '{accounted('7', 'FAILED')}'")
    assert verdict_on_previous(files, PLAN, "8") is None
    assert lock.exists(), "waited for until the trainer breaks it"


def test_a_first_link_waits_for_the_lock_of_who_trained_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = chain(tmp_path)
    note(files, "submitted", job="8", number=1)
    lock = files.run / "lock"
    lock.write_text('{"host": "gpu7", "boot": "b", "pid": 1, "started": 1.0}')
    nearly_stale = time.time() - 119.8
    os.utime(lock, (nearly_stale, nearly_stale))
    monkeypatch.setattr(runlock, "_LOOK_SECONDS", 0.05)
    slurm_commands(tmp_path, monkeypatch)
    begun = time.monotonic()
    assert verdict_on_previous(files, PLAN, "8") is None
    assert time.monotonic() - begun > 0.15


@pytest.mark.parametrize(
    ("state", "outcome"), [("CANCELLED", "cancelled"), ("COMPLETED", None), ("TIMEOUT", None)]
)
def test_a_cancelled_job_that_was_adopted_cancels_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, outcome: str | None
) -> None:
    files = chain(tmp_path)
    note(files, "created")
    note(files, "submitted", job="7", number=1, adopted=True)
    note(files, "submitted", job="8", number=2)
    slurm_commands(tmp_path, monkeypatch, squeue=shown("7", state))
    verdict = verdict_on_previous(files, PLAN, "8")
    assert (verdict.outcome if verdict else None) == outcome
    assert [each["state"] for each in of_kind(entries(files), "judged")] == [state]
    # Once a link of its own has started, that is the one before.
    note(files, "started", job="8", step=0, hosts=[])
    note(files, "ended", job="8", code=1)
    assert verdict_on_previous(files, PLAN, "9") is None


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "outcome"), [(1, "cancelled"), (99, None)])
def test_a_silent_slurm_cancels_no_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int, outcome: str | None
) -> None:
    """The link before was told to end early, and squeue fails for a moment or for long."""
    files = chain(tmp_path)
    started(files)
    note(files, "signalled", job="7", signal="SIGTERM", left=999.0, state=None)
    monkeypatch.setattr(judging, "_PATIENCE", Patience(total_seconds=2.0))
    slurm_commands(tmp_path, monkeypatch)
    count = tmp_path / "count"
    put_command(
        tmp_path,
        "squeue",
        f"echo >> {count}; if [ $(wc -l < {count}) -gt {fails} ]; "
        f"then echo '{shown('7', 'CANCELLED')}'; else echo 'Socket timed out' >&2; exit 1; fi",
    )
    verdict = verdict_on_previous(files, PLAN, "8")
    assert (verdict.outcome if verdict else None) == outcome
    state = of_kind(entries(files), "lost")[0]["state"]
    assert state == ("CANCELLED" if outcome else "UNKNOWN")
