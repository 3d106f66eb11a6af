"""The parity file keeps the last epoch whatever happens to the next; situations are judged."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from outlast.errors import RecoverError
from outlast.recover.parity import MemberReport, RecoverableEpoch, recoverable_epochs
from outlast.recover.parity_code import Layout, ParityFile, ParityMark

LAYOUT = Layout(4, 1, 64)
LENGTHS = (640, 640, 640, 640)


def _mark(epoch: int, digest: int = 0) -> ParityMark:
    return ParityMark(epoch, LENGTHS, (digest,) * 4)


def _write(file: ParityFile, epoch: int) -> None:
    file.begin(LAYOUT.rows(LENGTHS))
    for stripe in range(LAYOUT.parity_stripe(2, LAYOUT.rows(LENGTHS))):
        file.place(stripe)[:] = epoch


def _file(folder: Path) -> ParityFile:
    return ParityFile(folder, "parity", LAYOUT, 2)


def test_an_epoch_that_is_written_in_part_leaves_the_last_one(tmp_path: Path) -> None:
    file = _file(tmp_path)
    _write(file, 1)
    file.prepare(_mark(1))
    file.commit(_mark(1))
    _write(file, 2)
    again = _file(tmp_path)
    assert (again.committed, again.marks) == (_mark(1), (_mark(1),))
    assert np.all(again.stripe(_mark(1), 2) == 1)


def test_a_prepared_epoch_and_the_last_one_are_both_there(tmp_path: Path) -> None:
    file = _file(tmp_path)
    for epoch in (1, 2):
        _write(file, epoch)
        file.prepare(_mark(epoch))
        if epoch == 1:
            file.commit(_mark(epoch))
    again = _file(tmp_path)
    assert (again.committed, again.marks) == (_mark(1), (_mark(1), _mark(2)))
    assert np.all(again.stripe(_mark(1), 0) == 1)
    assert np.all(again.stripe(_mark(2), 0) == 2)
    again.begin(LAYOUT.rows(LENGTHS))
    assert _file(tmp_path).marks == (_mark(1),)


def test_the_epoch_before_is_there_until_the_next_one_begins(tmp_path: Path) -> None:
    file = _file(tmp_path)
    for epoch in (1, 2):
        _write(file, epoch)
        file.prepare(_mark(epoch))
        file.commit(_mark(epoch))
    again = _file(tmp_path)
    assert again.marks == (_mark(2), _mark(1))
    assert np.all(again.stripe(_mark(1), 0) == 1)
    _write(file, 3)
    assert _file(tmp_path).marks == (_mark(2),)


def test_a_group_that_was_ahead_goes_back_and_on(tmp_path: Path) -> None:
    file = _file(tmp_path)
    for epoch in (1, 2):
        _write(file, epoch)
        file.prepare(_mark(epoch))
        file.commit(_mark(epoch))
    file.commit(_mark(1))
    assert _file(tmp_path).marks == (_mark(1),)
    _write(file, 3)
    assert np.all(file.stripe(_mark(1), 0) == 1)


def test_stripes_that_stay_need_no_writing(tmp_path: Path) -> None:
    file = _file(tmp_path)
    _write(file, 1)
    file.prepare(_mark(1))
    file.commit(_mark(1))
    for epoch in (2, 3):
        file.begin(LAYOUT.rows(LENGTHS))
        file.place(1)[:] = epoch
        file.prepare(_mark(epoch))
        file.commit(_mark(epoch))
    assert [int(file.current(stripe)[0]) for stripe in range(3)] == [1, 3, 1]


@pytest.mark.parametrize("damage", [b"", b"00000000 {}", b"\xff\xfe", b"12"])
def test_a_damaged_head_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    file = _file(tmp_path)
    _write(file, 1)
    file.prepare(_mark(1))
    (head,) = tmp_path.glob("*.head")
    head.write_bytes(damage)
    again = _file(tmp_path)
    assert again.marks == ()


def test_a_head_without_its_stripes_counts_as_none(tmp_path: Path) -> None:
    file = _file(tmp_path)
    _write(file, 1)
    file.prepare(_mark(1))
    (stripes,) = tmp_path.glob("*.stripes")
    stripes.write_bytes(b"")
    assert _file(tmp_path).marks == ()


def test_closed_files_go_if_asked(tmp_path: Path) -> None:
    file = _file(tmp_path)
    _write(file, 1)
    file.prepare(_mark(1))
    file.close()
    assert len(list(tmp_path.iterdir())) == 3
    file.close(remove=True)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecoverError, match="parity cannot be kept in"):
        _file(tmp_path / "file")


def _judge(slots: list[dict[int, int]], marks: list[list[ParityMark]]) -> list[RecoverableEpoch]:
    reports = [
        MemberReport({epoch: (640, digest) for epoch, digest in each.items()}, tuple(kept))
        for each, kept in zip(slots, marks, strict=True)
    ]
    return recoverable_epochs(LAYOUT, reports)


def test_the_newest_epoch_that_survives_is_first() -> None:
    both = {1: 0, 2: 0}
    kept = [[_mark(1), _mark(2)], [_mark(1)], [_mark(1)], []]
    found = _judge([both, both, both, {}], kept)
    assert [each.mark.epoch for each in found] == [1]
    assert found[0].lost_data == found[0].lost_parity == {3}
    kept = [[_mark(1), _mark(2)], [_mark(2)], [_mark(1), _mark(2)], []]
    found = _judge([both, both, both, {}], kept)
    assert [each.mark.epoch for each in found] == [2]


def test_data_of_all_need_no_parity() -> None:
    (found,) = _judge([{5: 0}] * 4, [[]] * 4)
    assert found == RecoverableEpoch(_mark(5), frozenset(), frozenset(range(4)))


def test_a_stale_file_of_another_history_is_told_apart() -> None:
    stale, true = _mark(3, digest=7), _mark(3)
    (found,) = _judge([{3: 0}, {3: 0}, {3: 0}, {3: 7}], [[true], [true], [true], [stale]])
    assert found == RecoverableEpoch(true, frozenset({3}), frozenset({3}))


def test_too_many_losses_leave_nothing() -> None:
    assert _judge([{1: 0}, {1: 0}, {}, {}], [[_mark(1)], [_mark(1)], [], []]) == []


def _hold(folder: Path, pipe: Connection) -> None:
    _file(folder)
    pipe.send(None)
    time.sleep(60)


def test_a_member_that_is_still_alive_keeps_its_files(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    holder = fork.Process(target=_hold, args=(tmp_path, theirs))
    holder.start()
    try:
        assert ours.poll(60)
        os.kill(holder.pid or 0, signal.SIGSTOP)
        with pytest.raises(RecoverError, match="is still alive as another process"):
            _file(tmp_path)
    finally:
        holder.kill()
        holder.join()
    assert _file(tmp_path).committed is None
