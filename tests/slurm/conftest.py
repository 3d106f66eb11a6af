"""A real Slurm for the tests of this folder; without an installed one they are skipped."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_slurm import LocalSlurm, missing


@pytest.fixture(scope="session")
def slurm() -> Iterator[LocalSlurm]:
    """Eight virtual nodes."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    # A socket's name may have 107 characters, fewer than pytest's folders need.
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    with LocalSlurm(root) as running:
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(running.conf)
        yield running
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


@pytest.fixture
def empty_queue(slurm: LocalSlurm) -> Iterator[None]:
    """No job of a test is left for the next."""
    yield
    deadline = time.monotonic() + 30.0
    while jobs := slurm.run("squeue", "-h", "-o", "%A", check=False).split():
        assert time.monotonic() < deadline, f"still in the queue: {jobs}"
        slurm.run("scancel", *sorted(set(jobs)), check=False)
        time.sleep(0.3)


@pytest.fixture
def occupant(slurm: LocalSlurm, empty_queue: None) -> str:
    """The number of somebody's job on six of the eight nodes."""
    busy = ["sbatch", "--parsable", "-N6", "-t10", "--output=/dev/null", "--wrap", "sleep 600"]
    job = slurm.run(*busy).strip()
    deadline = time.monotonic() + 20.0
    while slurm.run("squeue", "-h", "-j", job, "-o", "%T").strip() != "RUNNING":
        assert time.monotonic() < deadline, "six nodes of an empty queue are free"
        time.sleep(0.1)
    return job
