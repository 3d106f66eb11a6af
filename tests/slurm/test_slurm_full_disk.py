"""A disk that is full when a link saves for the last time, on a real Slurm."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from chains import ending, files_of, job_file, noted, outlast, wait
from local_slurm import LocalSlurm

from outlast.cluster.chain import ChainStatus, status_of
from outlast.cluster.chain_files import run_log

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("empty_queue"),
]

STEPS_OF_A_LINK = 40


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own for the runs."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"this machine lets nobody mount a file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, free_bytes: int) -> Path:
    """A file that leaves so much, whatever the run writes meanwhile."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while (left := _free_bytes(disk) - free_bytes) > 0:
                file.write(bytes(min(left, 1 << 20)))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return ballast


def _free_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def test_a_chain_says_that_the_disk_is_full_and_goes_on_when_there_is_space(
    tmp_path: Path, disk: Path, slurm: LocalSlurm
) -> None:
    job = job_file(
        tmp_path,
        "full",
        "train.steps=1000000",
        f"train.stop_after_steps={STEPS_OF_A_LINK}",
        "checkpoint.every_steps=0",
        "slurm.wall_time=30min",
        "slurm.attempts_without_progress=50",
    )
    outlast("submit", job)
    files = files_of(tmp_path, "full")
    wait(lambda: len(noted(files, "ended")) == 1, files, 90.0)
    # Enough for words, not for the third of a megabyte of a checkpoint.
    ballast = fill(disk, 200_000)
    full = wait(
        lambda: [each for each in noted(files, "ended") if "No space left" in each["reason"]],
        files,
        90.0,
    )[0]
    assert full["verdict"] == "continue"
    assert "failed: No space left on device" in full["reason"]
    saved = full["step"]
    assert saved >= STEPS_OF_A_LINK, "what was saved before is not touched"
    ballast.unlink()
    wait(lambda: run_log(files).step > saved, files, 120.0)
    assert ending(files) is None, "it continued by itself"

    ballast = fill(disk, 0)
    reached = run_log(files).step

    def over() -> ChainStatus | None:
        found = status_of(files)
        return found if found.outcome in ("stalled", "stopped") else None

    found = wait(over, files, 120.0)
    assert "is full" in found.reason or "No space left" in found.reason
    assert found.step == reached
    ballast.unlink()
    outlast("cluster", "resume", files.run)
    wait(lambda: run_log(files).step > reached, files, 120.0)
    outlast("cluster", "stop", files.run)
