"""The lock that a killed build of an operator leaves is told before anybody waits for it."""

import subprocess
import sys

import pytest

pytest.importorskip("deepspeed", reason="deepspeed (the extra integrations) is not installed")

from outlast.errors import IntegrationError
from outlast.integrations import deepspeed as run

HOLD = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Where a build of cpu_adam has its lock."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


@pytest.mark.slow
def test_a_live_build_is_waited_for_and_a_killed_one_is_refused(lock):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as builder:
        assert builder.stdout.readline() == "held\n"
        run.refuse_stale_locks()
        builder.kill()
    assert lock.exists()
    with pytest.raises(IntegrationError, match=rf"delete it: rm {lock}$"):
        run.refuse_stale_locks()
    lock.unlink()
    # Of others' extensions nothing is said.
    (lock.parents[1] / "of_others").mkdir()
    (lock.parents[1] / "of_others" / "lock").touch()
    run.refuse_stale_locks()


@pytest.mark.slow
def test_the_adapter_is_not_imported_beside_a_stale_lock(lock):
    lock.touch()
    done = subprocess.run(
        [sys.executable, "-c", "import outlast.integrations.deepspeed"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "IntegrationError: a build of a DeepSpeed operator was killed" in done.stderr
    assert done.stderr.strip().endswith(f"rm {lock}")


def test_locks_on_a_shared_file_system_may_be_other_machines(lock, monkeypatch):
    lock.touch()
    monkeypatch.setattr(run, "_sees_all_builds", lambda folder: False)
    assert run.stale_locks(lock.parents[1], ["cpu_adam"]) == []
    monkeypatch.setattr(run, "_LONGEST_BUILD_SECONDS", -1.0)
    assert run.stale_locks(lock.parents[1], ["cpu_adam"]) == [lock]
