"""The parts of staging by themselves: locks, read-ahead, and which copies go."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cluster.copying import BlockWriter, LocalReader, ReadAhead, blocks_of
from outlast.cluster.staging import FileLock, Kept, Stage, lacking_bytes, victims
from outlast.errors import ClusterError

MIB = 1 << 20


class Memory:
    """A reader of bytes that fails or hangs from some offset on."""

    def __init__(self, content: bytes, fails_at: int | None = None, slow: float = 0.0) -> None:
        self.content, self.fails_at, self.slow = content, fails_at, slow

    def read_into(self, view: memoryview, offset: int) -> None:
        time.sleep(self.slow)
        if self.fails_at is not None and offset >= self.fails_at:
            raise OSError("the disk is gone")
        view[:] = self.content[offset : offset + len(view)]

    def close(self) -> None:
        pass


CONTENT = bytes(range(256)) * (5 * MIB // 256)


@given(st.integers(0, len(CONTENT)), st.integers(0, len(CONTENT)), st.integers(1, 4))
def test_blocks_are_the_file_in_order(first: int, second: int, blocks: int) -> None:
    start, stop = min(first, second), max(first, second)
    reader, ahead = Memory(CONTENT), ReadAhead(MIB, blocks)
    read = [bytes(block) for block in blocks_of(reader, start, stop, ahead, deadline())]
    assert b"".join(read) == CONTENT[start:stop]
    assert all(len(block) == MIB for block in read[:-1])


def test_a_failure_comes_at_its_block() -> None:
    blocks = blocks_of(Memory(CONTENT, 2 * MIB), 0, 5 * MIB, ReadAhead(MIB, 3), deadline())
    assert [len(next(blocks)) for _ in range(2)] == [MIB, MIB]
    with pytest.raises(OSError, match="the disk is gone"):
        next(blocks)


@pytest.mark.alone
def test_a_block_that_does_not_come_ends_at_the_deadline() -> None:
    begun = time.monotonic()
    with pytest.raises(ClusterError, match=r"byte 0 of 5242880 did not come within the time"):
        list(blocks_of(Memory(CONTENT, slow=0.5), 0, 5 * MIB, ReadAhead(MIB, 2), begun + 0.1))
    assert time.monotonic() - begun < 0.4


def test_blocks_are_at_least_a_mebibyte() -> None:
    with pytest.raises(ClusterError, match=r"staging\.block_megabytes"):
        ReadAhead(MIB - 1)
    with pytest.raises(ClusterError, match="reads nothing"):
        ReadAhead(MIB, 0)


def test_a_file_that_was_cut_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    reader = LocalReader(tmp_path / "a")
    with pytest.raises(OSError, match="ends at byte 3"):
        reader.read_into(memoryview(bytearray(5)), 0)
    reader.close()


def test_a_lock_keeps_others_out_and_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    pid = holding_child(FileLock(path))
    mine = FileLock(path)
    assert not mine.take()
    assert not mine.take(shared=True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert mine.take()


@pytest.mark.parametrize("inherited", [False, True])
def test_children_keep_leases_and_no_claims(tmp_path: Path, inherited: bool) -> None:
    lock, other = FileLock(tmp_path / "x", inherited=inherited), FileLock(tmp_path / "x")
    assert lock.take()
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    time.sleep(0.05)
    assert not other.take()
    lock.release()
    assert other.take() is not inherited
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert other.take()


def test_many_may_share_what_one_may_not_have(tmp_path: Path) -> None:
    locks = [FileLock(tmp_path / "x") for _ in range(3)]
    assert locks[0].take(shared=True)
    assert locks[1].take(shared=True)
    assert not locks[2].take()
    locks[0].release()
    locks[1].release()
    assert locks[2].take()


def test_a_lock_on_a_deleted_file_keeps_nobody_out_and_is_none(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "x"), FileLock(tmp_path / "x")
    assert first.take()
    first.delete()
    assert second.take()
    assert not FileLock(tmp_path / "x").take()


COPIES = st.lists(
    st.builds(
        Kept,
        key=st.uuids().map(str),
        bytes=st.integers(0, 100),
        planned_bytes=st.integers(0, 100),
        last_used=st.floats(0, 10),
        busy=st.booleans(),
    ),
    max_size=8,
)


@given(COPIES, st.integers(-10, 500))
def test_victims_are_the_oldest_that_are_enough_and_never_in_use(
    kept: list[Kept], lacking: int
) -> None:
    chosen = victims(kept, lacking)
    idle = [each for each in kept if not each.busy]
    if chosen is None:
        assert sum(each.bytes for each in idle) < lacking
        return
    assert not any(each.busy for each in chosen)
    assert sum(each.bytes for each in chosen) >= lacking or lacking <= 0
    if chosen:
        assert sum(each.bytes for each in chosen[:-1]) < lacking
        spared = [each for each in idle if each not in chosen and each.bytes]
        newest = max(each.last_used for each in chosen)
        assert all(each.last_used >= newest for each in spared)


def test_what_others_are_about_to_write_is_taken_already() -> None:
    others = [Kept("a", 10, 40, 0.0, busy=True), Kept("b", 10, 40, 0.0, busy=False)]
    stage = Stage(Path("/disk"), keep_free_bytes=0)
    assert lacking_bytes(stage, 100, 80, 5, others) == 5
    assert lacking_bytes(replace(stage, keep_free_bytes=20), 100, 80, 5, others) == 25
    assert lacking_bytes(replace(stage, limit_bytes=100), 1000, 80, 5, others) == 30


def deadline() -> float:
    return time.monotonic() + 10.0


def holding_child(lock: FileLock) -> int:
    """A process that holds the lock; returns when it does."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(theirs, b"1" if lock.take() else b"0")
        time.sleep(30)
        os._exit(0)
    assert os.read(ours, 1) == b"1"
    return pid


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("sizes", [[MIB, MIB], [MIB, 5000], [17], []])
def test_blocks_are_written_from_the_offset_on(
    tmp_path: Path, direct: bool, sizes: list[int]
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * (MIB + 99))
    writer = BlockWriter(path, MIB, direct=direct)
    memory = mmap.mmap(-1, MIB)
    memory.write(os.urandom(MIB))
    for size in sizes:
        writer.write(memoryview(memory)[:size])
    writer.sync()
    writer.close()
    assert path.read_bytes() == b"x" * MIB + b"".join(memory[:size] for size in sizes)


def test_a_file_system_that_cannot_write_directly_is_written_to_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(descriptor: int, view: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, view, offset)

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", refusing)
    writer = BlockWriter(tmp_path / "a", 0)
    writer.write(memoryview(b"z" * 8192))
    writer.close()
    assert (tmp_path / "a").read_bytes() == b"z" * 8192
