"""What a link does while its program runs, with real processes."""

import os
import shutil
import time
from pathlib import Path

import pytest
from slurm_programs import slurm_commands

from outlast.cluster import fence, link
from outlast.cluster.chain_files import ChainFiles, ChainPlan, RunLog
from outlast.cluster.fence import Fence
from outlast.cluster.link import LinkJob, Prefetching, Watch
from outlast.cluster.stopping import LinkClock, read_countdown


@pytest.fixture(autouse=True)
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_LOOK_SECONDS", 0.05)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    slurm_commands(tmp_path, monkeypatch)


def watch(folder: Path, program: str, left_seconds: float, lead_seconds: float) -> Watch:
    """`program` stands for ``python``: without srun it is what a link of one process runs."""
    script = folder / "python"
    script.write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\ncd {folder}\n{program}\n")
    script.chmod(0o755)
    files = ChainFiles(folder / "chain")
    files.path.mkdir()
    plan = ChainPlan(
        "c", "n", "dependent", (1,), 1, 600.0, "/", str(script), lead_seconds=lead_seconds
    )
    held = Fence(files.fence, "7", lambda job: None)
    held.acquire()
    clock = LinkClock(lambda: left_seconds)
    clock.refresh()
    log = RunLog(folder / "events.jsonl")
    found = Watch(LinkJob(files, plan, 1, "7"), time.time(), held, clock, log, [])
    found.measure_lead()
    return found


def test_ranks_that_cannot_read_the_file_are_sent_a_signal_before_the_end(tmp_path: Path) -> None:
    found = watch(tmp_path, "trap 'exit 3' USR1\nfor i in {1..40}; do sleep 0.05; done", 0.4, 0.3)
    assert found.train() == 3


@pytest.mark.parametrize(
    ("left", "signals", "ending"), [(500.0, [], False), (5.0, [], True), (500.0, ["SIGTERM"], True)]
)
def test_copies_for_the_next_link_leave_the_file_system_to_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float, signals: list[str], ending: bool
) -> None:
    asked = []

    def look(self: Prefetching, *, under_way: bool, ending: bool = False) -> None:
        asked.append(ending)
        (tmp_path / "looked").touch()

    monkeypatch.setattr(Prefetching, "look", look)
    program = "for i in {1..600}; do [ -e looked ] && exit 3; sleep 0.05; done"
    found = watch(tmp_path, program, left, 10.0)
    found.signals += signals
    assert found.train() == 3
    assert set(asked) == {ending}


def test_a_full_disk_does_not_end_a_program_that_saves(tmp_path: Path) -> None:
    found = watch(tmp_path, "sleep 0.3\nexit 3", 500.0, 10.0)
    # As a full disk does, this refuses every line.
    found.link.files.journal.mkdir()
    found.signals.append("SIGTERM")
    assert found.train() == 3
    assert found.stop == "SIGTERM"


def test_whatever_goes_wrong_the_program_is_not_left_alone(tmp_path: Path) -> None:
    program = "trap 'sleep 0.2; touch saved; exit 3' TERM\ntouch ready\nsleep 5 & wait"
    found = watch(tmp_path, program, 500.0, 10.0)

    def broken() -> float:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        raise RuntimeError("broken")

    found.clock = LinkClock(broken)
    with pytest.raises(RuntimeError, match="broken"):
        found.train()
    assert (tmp_path / "saved").exists(), "it was asked to end, and waited for"


def breaks(folder: Path, found: Watch) -> None:
    """Let the link's own loop fail as soon as its program runs."""

    def broken() -> float:
        while not (folder / "ready").exists():
            time.sleep(0.01)
        os.utime(found.link.files.fence, (7.0, 7.0))
        raise RuntimeError("broken")

    found.clock = LinkClock(broken)


def test_ranks_that_are_waited_for_see_that_the_link_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "HEARTBEAT_SECONDS", 0.05)
    program = "trap 'sleep 0.5; touch saved; exit 3' TERM\ntouch ready\nsleep 5 & wait"
    found = watch(tmp_path, program, 500.0, 10.0)
    breaks(tmp_path, found)
    with pytest.raises(RuntimeError, match="broken"):
        found.train()
    assert (tmp_path / "saved").exists()
    assert found.link.files.fence.stat().st_mtime > 7.0, "else they would end in the middle of it"


def test_ranks_that_are_waited_for_end_where_another_link_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "HEARTBEAT_SECONDS", 0.05)
    lost = f"trap 'rm {tmp_path}/chain/fence.json' TERM\n"
    program = lost + "touch ready\nfor i in {1..300}; do sleep 0.1; done"
    found = watch(tmp_path, program, 500.0, 10.0)
    breaks(tmp_path, found)
    with pytest.raises(RuntimeError, match="broken"):
        found.train()
    assert found.fenced


def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    found = watch(tmp_path, "", 500.0, 10.0)
    found.stop = "SIGTERM"
    shutil.rmtree(found.link.files.path)
    found._publish()
    found.link.files.path.mkdir()
    found._publish()
    told = read_countdown(found.link.files.clock)
    assert told is not None
    assert told.stop == "SIGTERM"


def test_slurms_warning_is_known_by_the_lead_that_it_was_asked_for(tmp_path: Path) -> None:
    """With ``USR1@300`` it comes 300 to 360 s before the limit."""
    found = watch(tmp_path, "", 355.0, 300.0)
    assert found._in_time()
    found.clock = LinkClock(lambda: 900.0)
    found.clock.refresh()
    assert not found._in_time(), "so early it is a person's wish"
