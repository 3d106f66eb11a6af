"""The plain batch script of the examples on a real Slurm: which ends another job follows."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
from local_slurm import LocalSlurm

EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "sbatch.sh"

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]

# Ends with the next of the codes that its arguments name; a line for each start.
PROGRAM = """
import sys
from pathlib import Path
file = Path("starts")
with file.open("a") as lines:
    lines.write(".\\n")
sys.exit(int(sys.argv[len(file.read_text().split())]))
"""
# Says that it runs, and ends with 3 at the signal, as a run of Outlast does.
WAITING = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
with Path("starts").open("a") as lines:
    lines.write(".\\n")
if len(Path("starts").read_text().split()) == 1:
    time.sleep(200)
"""


def submit(slurm: LocalSlurm, folder: Path, program: str, *arguments: str) -> str:
    shutil.copy(EXAMPLE, folder / "sbatch.sh")
    (folder / "program.py").write_text(program)
    python = f"--export=ALL,PYTHON={sys.executable}"
    command = ["sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/log", python]
    return slurm.run(*command, str(folder / "sbatch.sh"), "program.py", *arguments).strip()


def starts(folder: Path) -> int:
    file = folder / "starts"
    return len(file.read_text().split()) if file.exists() else 0


def wait_until_empty(slurm: LocalSlurm, folder: Path) -> None:
    deadline = time.monotonic() + 120.0
    while slurm.run("squeue", "-h", "-o", "%A").split():
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        # Continued until it is done.
        ([3, 3, 0, 9], 3),
        # Wrong values: nobody starts it again.
        ([3, 4, 9], 2),
        # Four crashes in a row are one too many.
        ([1, 1, 1, 1, 0], 4),
        # What has made progress may crash again.
        ([1, 1, 3, 1, 1, 1, 2, 9], 7),
    ],
)
def test_the_next_job_follows_where_the_exit_code_says_so(
    codes: list[int], expected: int, tmp_path: Path, slurm: LocalSlurm
) -> None:
    submit(slurm, tmp_path, PROGRAM, *map(str, codes))
    wait_until_empty(slurm, tmp_path)
    assert starts(tmp_path) == expected, (tmp_path / "log").read_text()


def test_the_signal_reaches_the_script_and_the_run_goes_on(
    tmp_path: Path, slurm: LocalSlurm
) -> None:
    job = submit(slurm, tmp_path, WAITING)
    deadline = time.monotonic() + 60.0
    while starts(tmp_path) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # To the tasks of the step, as --signal=USR1@180 does it.
    slurm.run("scancel", "--signal=USR1", f"{job}.0")
    wait_until_empty(slurm, tmp_path)
    assert starts(tmp_path) == 2, (tmp_path / "log").read_text()
