"""The loopback all-reduce: hanging and failing ranks are reported, and always ended."""

import subprocess
import sys

import pytest

from outlast.cli.doctor import end_ranks, gloo_check, start_gloo_ranks


def rank(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def test_a_hanging_rank_meets_the_deadline():
    ranks = [rank("import time; time.sleep(60)"), rank("import time; time.sleep(60)")]
    try:
        check = gloo_check(ranks, 0.2)
    finally:
        end_ranks(ranks)
    assert check.broken
    assert check.found == "no result within 0.2 s"
    assert all(process.returncode is not None for process in ranks)


def test_a_failing_rank_is_reported_at_once_with_its_error():
    ranks = [rank("import time; time.sleep(60)"), rank("raise OSError('no interface')")]
    try:
        check = gloo_check(ranks, 30.0)
    finally:
        end_ranks(ranks)
    assert "rank 1 failed with exit code 1: OSError: no interface" in check.found


@pytest.mark.distributed
def test_an_interface_that_does_not_exist_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0")
    ranks = start_gloo_ranks(tmp_path / "store", 5.0)
    try:
        check = gloo_check(ranks, 60.0)
    finally:
        end_ranks(ranks)
    assert check.broken
    assert "rank" in check.found
