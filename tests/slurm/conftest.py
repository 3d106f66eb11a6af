"""A real Slurm for the tests of this folder; without an installed one they are skipped."""

import os
import tempfile
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
