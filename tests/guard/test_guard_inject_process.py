"""Faults of whole processes."""

import errno
import multiprocessing
import os
import signal
import time

import pytest

from outlast.guard.inject import ProcessFaults, parse_faults


def _steps(texts, pipe, marks=None, rank=0, steps=4):
    faults = ProcessFaults(parse_faults(texts), rank=rank, marks=marks)
    for step in range(steps):
        faults.at(step)
        pipe.send(step)


def _child(*args):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_steps, args=(args[0], theirs, *args[1:]))
    process.start()
    theirs.close()
    return process, ours


def _received(pipe):
    steps = []
    try:
        while pipe.poll(10):
            steps.append(pipe.recv())
    except EOFError:
        pass
    return steps


def test_a_kill_ends_the_process_before_its_step_and_only_once(tmp_path):
    process, pipe = _child(["kill:step=2"], tmp_path)
    assert _received(pipe) == [0, 1]
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    process, pipe = _child(["kill:step=2"], tmp_path)
    assert _received(pipe) == [0, 1, 2, 3]
    process.join(10)
    assert process.exitcode == 0


def test_other_ranks_go_on():
    process, pipe = _child(["kill:step=2:rank=1"], None, 0)
    assert _received(pipe) == [0, 1, 2, 3]
    process.join(10)
    assert process.exitcode == 0


def test_a_stopped_process_stands_still_and_goes_on():
    process, pipe = _child(["stop:step=1:seconds=0.5"])
    begin = time.monotonic()
    assert pipe.poll(10)
    assert pipe.recv() == 0
    assert not pipe.poll(0.2)
    assert _received(pipe) == [1, 2, 3]
    assert 0.4 < time.monotonic() - begin < 9
    process.join(10)
    assert process.exitcode == 0


def test_a_full_disk_refuses_writes_for_its_steps(tmp_path):
    faults = ProcessFaults(parse_faults(["disk-full:step=1:steps=2:room_bytes=100"]))
    results = []
    for step in range(4):
        faults.at(step)
        try:
            (tmp_path / "small").write_bytes(b"x" * 100)
            (tmp_path / f"step-{step}").write_bytes(b"x" * 101)
            results.append(0)
        except OSError as error:
            results.append(error.errno)
    assert results == [0, errno.EFBIG, errno.EFBIG, 0]
    assert [fault.kind for fault in faults.happened] == ["disk-full"]


def test_the_disk_has_room_again_when_the_run_ends_early(tmp_path):
    faults = ProcessFaults(parse_faults(["disk-full:step=0:steps=99"]))
    faults.at(0)
    with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        (tmp_path / "file").write_bytes(b"x")
    faults.end()
    (tmp_path / "file").write_bytes(b"x")
