"""The lighthouse's process: it starts, is started again at the same port, and ends."""

import os
import signal
import time

import psutil
import pytest
from live_runs import require_torchft

from outlast.errors import RecoverError
from outlast.recover import live as module
from outlast.recover.live import Lighthouse
from outlast.recover.live import require_torchft as require


@pytest.fixture(autouse=True)
def _torchft() -> None:
    require_torchft()


def test_it_is_started_again_at_the_same_place_and_ends_with_its_owner() -> None:
    with Lighthouse() as lighthouse:
        address = lighthouse.address
        assert not lighthouse.keep_alive()
        os.kill(lighthouse.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30.0
        while not lighthouse.keep_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert lighthouse.address == address
        pid = lighthouse.pid
    assert not psutil.pid_exists(pid)


def test_a_port_that_is_taken_is_a_sentence() -> None:
    with Lighthouse() as lighthouse:
        port = int(lighthouse.address.rpartition(":")[2])
        with pytest.raises(RecoverError, match=f"did not start at port {port}"):
            lighthouse._start(port)


def test_without_torchft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecoverError, match=r'pip install "outlast\[ft\]"'):
        require()
