"""Cases 1 and 19 of `never.py`: chains on a Slurm of this machine's own, and their commands."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import Bar, at_most
from never_front_door import dead_ends

SLURM_TESTS = Path(__file__).resolve().parents[1] / "tests" / "slurm"
sys.path.insert(0, str(SLURM_TESTS))

STEPS = 400
LEAVES_SECONDS = 15.0
WALL_TIMES = {
    "10:00:00": "10:00:00",
    "1-00:00:00": "1-00:00:00",
    "90": "01:30:00",
    "8h": "08:00:00",
    "30m": "00:30:00",
    "2:30:00": "02:30:00",
}
"""As typed, unquoted -> as sbatch is told."""


@contextlib.contextmanager
def own_slurm(**settings: int) -> Iterator[tuple[object, Path]]:
    """A Slurm on this machine, which commands find, and a folder."""
    from local_slurm import LocalSlurm

    with tempfile.TemporaryDirectory(prefix="never-") as folder:
        root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        before = os.environ.get("SLURM_CONF")
        with LocalSlurm(root, **settings) as slurm:
            os.environ["SLURM_CONF"] = str(slurm.conf)
            try:
                yield slurm, Path(folder)
            finally:
                os.environ.pop("SLURM_CONF")
                if before is not None:
                    os.environ["SLURM_CONF"] = before


def without_slurm(name: str) -> Bar | None:
    """The row of a case that needs Slurm, where there is none."""
    from local_slurm import missing

    reason = missing()
    return Bar(name, None, "", "<= 0", False, f"skipped: {reason}") if reason else None


def node_failure() -> Bar:
    """A node's slurmd is killed, and Slurm gives the node up while all on it continues."""
    name = "node failure recorded as success, or an orphan that continues"
    if row := without_slurm(name):
        return row
    from chains import ending, noted, program_plan

    from outlast.cluster.chain import begin
    from outlast.cluster.chain_files import run_log
    from outlast.records import AttemptStarted, CheckpointSaved, read_run

    with own_slurm(nodes=2, node_timeout=5) as (slurm, folder):
        loop = [sys.executable, SLURM_TESTS / "own_loop.py", folder / "runs", "own", STEPS, 0.02]
        files, plan = program_plan(folder, f"OMP_NUM_THREADS=1 srun {shlex.join(map(str, loop))}")
        begin(files, plan, "")
        _wait(lambda: run_log(files).step >= 40, 40.0)
        host = noted(files, "started")[0]["hosts"][0]
        orphans = slurm.tasks_on(host)  # type: ignore[attr-defined]
        slurm.kill_slurmd(host)  # type: ignore[attr-defined]
        slurm.run("scontrol", "update", f"NodeName={host}", "State=DOWN", "Reason=lost")  # type: ignore[attr-defined]
        _wait(lambda: noted(files, "ended") or len(noted(files, "started")) > 1, 20.0)
        _wait(lambda: not any(map(_lives, orphans)), LEAVES_SECONDS)
        left = sum(map(_lives, orphans))
        _wait(lambda: ending(files), 40.0)
        end, run = ending(files), read_run(files.run)
        newest, late = 0, 0
        for record in run.records:
            if isinstance(record.event, AttemptStarted):
                newest = max(newest, record.attempt)
            late += isinstance(record.event, CheckpointSaved) and record.attempt < newest
        wrong = (
            int(end is None or end["outcome"] != "done" or run.attempts[-1].outcome != "completed")
            + int(run_log(files).step < STEPS)
            + int(len(noted(files, "started")) < 2)
            + left
            + late
        )
    what = "of: ended as done and complete, all steps, a successor, orphans left, their saves"
    return at_most(name, wrong, what, 0, "kill -9 of slurmd alone, outlast.Run under srun")


def commands() -> Bar:
    """Submitting with and without a time limit, runs of `outlast.Run`, waiting jobs, Ctrl-C."""
    name = "dead ends of submit, plan, adopt, status, the own loop and Ctrl-C"
    if row := without_slurm(name):
        return row
    asked, wrong = 0, dead_ends()

    def counts(found: str, *needed: str) -> None:
        nonlocal asked, wrong
        asked += 1
        wrong += "Traceback" in found or not all(each in found for each in needed)

    with tempfile.TemporaryDirectory(prefix="never-") as folder:
        nowhere = {**os.environ, "PATH": "/nonexistent"}
        counts(_outlast(folder, "submit", "--dry-run", environment=nowhere), "#SBATCH --nodes=1")
        counts(_outlast(folder, "cluster", "plan", environment=nowhere), "its last save begins 2")
        for typed, told in WALL_TIMES.items():
            arguments = ("submit", "--dry-run", f"slurm.wall_time={typed}")
            counts(_outlast(folder, *arguments, environment=nowhere), f"--time={told}\n")
    with own_slurm(nodes=2) as (slurm, place):
        loop = [sys.executable, str(SLURM_TESTS / "own_loop.py"), str(place / "runs"), "own", "30"]
        subprocess.run([*loop, "0"], check=True, capture_output=True, timeout=60)
        command = f"slurm.command={shlex.join(['srun', *loop, '0'])}"
        held = ['slurm.directives=["--hold"]', "slurm.wall_time=10:00", "run.name=own"]
        counts(_outlast(place, "submit", command, *held), "submitted ")
        counts(_outlast(place, "cluster", "status", "runs/own"), "JobHeldUser", "scontrol release")
        _outlast(place, "cluster", "stop", "runs/own")
        by_hand = slurm.run("sbatch", "--parsable", "-N1", "--hold", "--wrap", "true").strip()  # type: ignore[attr-defined]
        counts(_outlast(place, "cluster", "adopt", by_hand, "runs/own"), "slurm.command")
        adopted = ("cluster", "adopt", by_hand, "runs/own", command, "slurm.wall_time=10:00")
        counts(_outlast(place, *adopted), f"to follow job {by_hand}")
    return at_most(
        name, wrong, f"of {asked + 6} commands", 0, "Slurm of this machine's own, and none"
    )


def _outlast(folder: Path | str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "outlast", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env=environment,
    )
    return done.stdout + done.stderr


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait(condition: Callable[[], object], seconds: float) -> None:
    """Wait until `condition` holds, or give up: what follows counts."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)


CASES: dict[int, Callable[[], Bar]] = {1: node_failure, 19: commands}
