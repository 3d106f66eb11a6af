"""The logs of a resumed program are those of an uninterrupted one."""

# ruff: noqa: PTH123, SIM115 (programs use open, and leave files open)

import csv
import io
import logging
import multiprocessing
import os
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from loading import written

from outlast.autosave.resume.files import (
    IN_PLACE,
    FirstSizes,
    begin_logs,
    place,
    reopened_logs,
    set_place,
)
from outlast.errors import AutosaveError
from outlast.records.directory import RunDirectory


class Logging:
    """A program that writes one line a step to a log that it opens in its set-up.

    Args:
        path: The log.
        mode: To open it.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self.file = open(path, mode)
        self.file.write("begun\n")

    def steps(self, numbers: range) -> None:
        """Write."""
        for number in numbers:
            print("step", number, file=self.file)


@pytest.mark.parametrize("lives", [1, 2, 3])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("mode", ["w", "a", "w+", "x"])
def test_log_goes_on_where_it_was(tmp_path: Path, mode: str, in_place: bool, lives: int) -> None:
    path = tmp_path / "log.txt"
    with reopened_logs(resuming=False) as logs:
        program = Logging(path, mode)
        program.steps(range(3))
        sizes, seen = logs.sizes(), place(program.file)
        program.steps(range(3, 9))
        program.file.close()
    for _ in range(lives):
        with reopened_logs(resuming=True) as logs:
            program = Logging(path, mode)
            if in_place:
                set_place(program.file, seen)
            logs.cut_back(sizes)
            assert path.read_text() == "begun\nstep 0\nstep 1\nstep 2\n"
            program.steps(range(3, 7))
            program.file.close()
    lines = path.read_text().splitlines()
    assert lines == ["begun", *(f"step {number}" for number in range(7))]
    assert list(tmp_path.iterdir()) == [path]


def test_log_behind_a_link_goes_on(tmp_path: Path) -> None:
    link, path = tmp_path / "newest.txt", tmp_path / "log.txt"
    link.symlink_to(path)
    with reopened_logs(resuming=False) as logs:
        program = Logging(link, "w")
        program.steps(range(2))
        sizes = logs.sizes()
        program.file.close()
    with reopened_logs(resuming=True) as logs:
        program = Logging(link, "w")
        logs.cut_back(sizes)
        program.steps(range(2, 3))
        program.file.close()
    assert link.is_symlink()
    assert path.read_text() == "begun\nstep 0\nstep 1\nstep 2\n"


def test_log_stays_when_a_program_dies_before_it_is_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("begun\nstep 0\nstep 1\n")
    with reopened_logs(resuming=True):
        Logging(path, "w").file.close()
        assert path.read_text() == "begun\n"
    assert path.read_text() == "begun\nstep 0\nstep 1\n"


def test_log_is_found_again_after_a_kill_during_set_up(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("begun\nstep 0\nstep 1\n")
    child = os.fork()
    if child == 0:
        with reopened_logs(resuming=True):
            Logging(path, "w").file.flush()
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert path.read_text() == "begun\n"
    with reopened_logs(resuming=True) as logs:
        program = Logging(path, "w")
        logs.cut_back({str(path): 13})
        program.steps(range(1, 2))
        program.file.close()
    assert path.read_text() == "begun\nstep 0\nstep 1\n"
    assert list(tmp_path.iterdir()) == [path]


def test_log_of_a_new_run_is_not_that_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("begun\nstep 0\n")
    child = os.fork()
    if child == 0:
        with reopened_logs(resuming=True):
            Logging(path, "w")
            os._exit(9)
    os.waitpid(child, 0)
    with reopened_logs(resuming=False) as logs:
        program = Logging(path, "w")
        program.steps(range(5, 8))
        sizes = logs.sizes()
        program.file.close()
    with reopened_logs(resuming=True) as logs:
        program = Logging(path, "w")
        logs.cut_back(sizes)
        program.file.close()
    assert path.read_text() == "begun\nstep 5\nstep 6\nstep 7\n"


@pytest.mark.distributed
def test_log_that_several_ranks_open_is_kept(tmp_path: Path, ranks: Any) -> None:
    path = tmp_path / "log.txt"
    text = "a line of an earlier life\n" * 40_000
    path.write_text(text)
    all_opened = multiprocessing.get_context("fork").Barrier(3)

    def work() -> None:
        with reopened_logs(resuming=True) as logs:
            file = open(path, "w")
            all_opened.wait(60)
            logs.cut_back({str(path): len(text)})
            file.close()

    ranks(3)(work)
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_set_up_writes_and_closes_are_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("a long text of an earlier life")
    with reopened_logs(resuming=True) as logs:
        path.write_text("{}")
        assert path.read_text() == "{}"
        logs.cut_back({})
    assert path.read_text() == "{}"
    assert list(tmp_path.iterdir()) == [path]


def test_log_that_is_opened_for_each_line_is_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"

    def write(text: str) -> None:
        with open(path, "a") as file:
            file.write(text)

    with reopened_logs(resuming=False) as logs:
        write("epoch,loss\n")
        write("1,0.5\n")
        sizes = logs.sizes()
        write("2,0.4\n")
    with reopened_logs(resuming=True) as logs:
        write("epoch,loss\n")
        logs.cut_back(sizes)
        write("2,0.4\n")
    assert path.read_text() == "epoch,loss\n1,0.5\n2,0.4\n"


def test_tables_and_loggers_go_on(tmp_path: Path) -> None:
    def set_up() -> tuple[Any, Any, logging.FileHandler]:
        table = open(tmp_path / "table.csv", "w", newline="")
        writer = csv.writer(table)
        writer.writerow(["step", "loss"])
        handler = logging.FileHandler(tmp_path / "run.log", mode="w")
        handler.emit(logging.makeLogRecord({"msg": "begun"}))
        return table, writer, handler

    def step(number: int) -> None:
        writer.writerow([number, 0.5])
        handler.emit(logging.makeLogRecord({"msg": f"step {number}"}))

    with reopened_logs(resuming=False) as logs:
        table, writer, handler = set_up()
        step(0)
        sizes = logs.sizes()
        step(1)
        table.close()
        handler.close()
    with reopened_logs(resuming=True) as logs:
        table, writer, handler = set_up()
        logs.cut_back(sizes)
        step(1)
        table.close()
        handler.close()
    assert (tmp_path / "table.csv").read_bytes() == b"step,loss\r\n0,0.5\r\n1,0.5\r\n"
    assert (tmp_path / "run.log").read_text() == "begun\nstep 0\nstep 1\n"


@pytest.mark.parametrize(
    ("mode", "text"), [("w", True), ("a", True), ("wb", False), ("ab", False), ("r+b", False)]
)
def test_file_that_was_opened_after_training_had_begun_is_opened_again(
    tmp_path: Path, mode: str, text: bool
) -> None:
    path = tmp_path / "late"
    path.write_bytes(b"")
    with reopened_logs(resuming=False):
        file = open(path, mode)
        file.write("one\n" if text else b"one\n")
        data = written({"file": file, "also": file})
        file.write("two\n" if text else b"two\n")
        file.close()
    with reopened_logs(resuming=True) as logs:
        made = pickle.loads(data)
        logs.cut_back({})
        assert made["file"] is made["also"]
        assert set(made["file"].mode) == set(mode)
        made["file"].write("three\n" if text else b"three\n")
        made["file"].close()
    assert path.read_bytes() == b"one\nthree\n"


def test_file_that_is_read_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("one\ntwo\nthree\n")
    with path.open() as file:
        assert file.readline() == "one\n"
        with path.open() as other:
            set_place(other, place(file))
            assert other.readline() == "two\n"
        with pickle.loads(written(file)) as late:
            assert late.read() == "two\nthree\n"


def test_lines_of_a_loop_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("one\ntwo\nthree\n")
    with path.open() as file:
        next(file)
        with pytest.raises(AutosaveError, match=r"data cannot be saved.*readline"):
            place(file)


def test_closed_files_and_the_standard_ones() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe, os.fdopen(reader):
        # A pipe that set-up has made again is left as it is.
        set_place(pipe, place(pipe))
        with pytest.raises(AutosaveError, match="open it before the training loop"):
            written(pipe)
    assert place(pipe).closed
    assert pickle.loads(written(pipe)).closed
    assert pickle.loads(written(sys.stderr)) is sys.stderr
    assert io.TextIOWrapper in IN_PLACE


def test_log_that_has_lost_its_end_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("one\n")
    with reopened_logs(resuming=True) as logs, open(path, "a") as file:
        with pytest.warns(UserWarning, match=r"log\.txt has 4 bytes, and had 40"):
            logs.cut_back({str(path): 40})
        file.write("two\n")
    assert path.read_text() == "one\ntwo\n"


def test_events_of_tensorboard_stay(tmp_path: Path) -> None:
    writers = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    events = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    with reopened_logs(resuming=False) as logs:
        writer = writers.EventFileWriter(str(tmp_path))
        for step in range(3):
            writer.add_event(events.Event(step=step))
        sizes = logs.sizes()
        writer.close()
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    with reopened_logs(resuming=True) as logs:
        logs.cut_back(sizes)
    assert path.read_bytes() == content


def test_files_of_threads_and_of_what_saves_the_program_are_left(tmp_path: Path) -> None:
    def write() -> None:
        with open(tmp_path / "of a thread", "a") as file:
            file.write("one")

    with reopened_logs(resuming=False) as logs:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write).result()
        RunDirectory(tmp_path).next_attempt()
        (tmp_path / "own").open("a").close()
        assert logs.sizes() == {str(tmp_path / "own"): 0}


def test_pythons_own_open_is_back_after_a_session(tmp_path: Path) -> None:
    before = open
    with reopened_logs(resuming=False):
        assert open is not before
        assert (tmp_path / "text").write_text("one") == 3
    assert open is before
    assert io.open is before


def write_line(path: Path, text: str, mode: str = "a") -> None:
    with open(path, mode) as file:
        file.write(f"{text}\n")


def test_logs_of_a_run_that_was_killed_before_its_first_save_are_put_back(tmp_path: Path) -> None:
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    folder = tmp_path / "run"
    old.write_text("of an earlier run\n")
    for rank in range(2):
        with reopened_logs(False, tmp_path, FirstSizes(folder, rank)):
            write_line(old, f"of rank {rank}")
            write_line(new, f"of rank {rank}")
            write_line(old, "one more")
    whole = old.read_text()
    told = begin_logs(folder, tmp_path, alive_until=time.time() + 40.0)
    assert old.read_text() == "of an earlier run\n"
    assert not new.exists()
    # Nothing is lost.
    assert (folder / "log-ends/old.txt").read_text() == whole.removeprefix("of an earlier run\n")
    assert (folder / "log-ends/new.txt").read_text() == "of rank 0\nof rank 1\n"
    assert [str(folder / "log-ends") in each for each in told] == [True, True]
    # That is done once: what comes later is of another life.
    write_line(old, "by hand")
    assert begin_logs(folder, tmp_path, alive_until=time.time() + 40.0) == []
    assert old.read_text() == "of an earlier run\nby hand\n"


def test_logs_that_somebody_has_written_to_after_the_kill_stay(tmp_path: Path) -> None:
    log, folder = tmp_path / "results.csv", tmp_path / "run"
    with reopened_logs(False, tmp_path, FirstSizes(folder)):
        write_line(log, "of the killed run")
    killed = time.time()
    write_line(log, "of another run")
    os.utime(log, (killed + 90.0, killed + 90.0))
    [told] = begin_logs(folder, tmp_path, alive_until=killed + 40.0)
    assert "was written to after the run was killed" in told
    assert log.read_text() == "of the killed run\nof another run\n"


def test_logs_of_a_run_that_ended_in_an_error_stay(tmp_path: Path) -> None:
    log, folder = tmp_path / "log.txt", tmp_path / "run"
    with reopened_logs(False, tmp_path, FirstSizes(folder)):
        write_line(log, "why it ended")
    assert begin_logs(folder, tmp_path, alive_until=None) == []
    assert begin_logs(folder, tmp_path, alive_until=time.time() + 40.0) == []
    assert log.read_text() == "why it ended\n"


def test_logs_of_other_nodes_and_what_is_not_ours_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, folder = tmp_path / "log.txt", tmp_path / "run"
    folder.mkdir()
    (folder / "logs.jsonl").write_text("of the user\n")
    log.write_text("of this node\n")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("socket.gethostname", lambda: "another node")
        FirstSizes(folder, 1).note("log.txt", None)
    assert begin_logs(folder, tmp_path, alive_until=time.time() + 40.0) == []
    assert log.read_text() == "of this node\n"
    assert (folder / "logs.jsonl").read_text() == "of the user\n"


def test_only_what_was_opened_to_be_appended_to_is_noted(tmp_path: Path) -> None:
    folder, missing = tmp_path / "run", tmp_path / "missing/log.txt"
    first = FirstSizes(folder)
    with reopened_logs(False, tmp_path, first):
        with pytest.raises(FileNotFoundError):
            write_line(missing, "one")
        with open("log.txt", "a", opener=lambda _, flags: os.open(tmp_path / "own", flags)) as file:
            file.write("one")
        write_line(tmp_path / "cache.bin", "one", "x")
    assert first.appended() == {}


def test_log_that_was_first_opened_behind_the_save_goes_on_from_there(tmp_path: Path) -> None:
    old, new, folder = tmp_path / "old.txt", tmp_path / "new.txt", tmp_path / "run"
    old.write_text("of an earlier run\n")
    with reopened_logs(False, tmp_path, FirstSizes(folder)) as logs:
        saved = logs.sizes()
        write_line(old, "step 1")
        write_line(new, "step 1")
    with reopened_logs(True, tmp_path, FirstSizes(folder)) as logs:
        with pytest.warns(UserWarning, match="is again as it was before the run"):
            logs.cut_back(saved)
        assert old.read_text() == "of an earlier run\n"
        assert not new.exists()
        write_line(old, "step 1")
        saved = logs.sizes()
        write_line(old, "step 2")
    # The life that is saved next has not appended to it, and saves its size all the same.
    with reopened_logs(True, tmp_path, FirstSizes(folder)) as logs:
        logs.cut_back(saved)
        saved = logs.sizes()
        write_line(old, "step 2")
    with reopened_logs(True, tmp_path, FirstSizes(folder)) as logs:
        logs.cut_back(saved)
    assert old.read_text() == "of an earlier run\nstep 1\n"


def test_log_that_another_rank_may_be_writing_is_not_put_back_behind_a_save(
    tmp_path: Path,
) -> None:
    log, folder = tmp_path / "log.txt", tmp_path / "run"
    for rank in range(2):
        with reopened_logs(False, tmp_path, FirstSizes(folder, rank)):
            write_line(log, f"of rank {rank}")
    with reopened_logs(True, tmp_path, FirstSizes(folder, 1)) as logs:
        logs.cut_back({})
    assert log.read_text() == "of rank 0\nof rank 1\n"


def test_sizes_that_cannot_be_read_count_for_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "log-sizes").mkdir(parents=True)
    (folder / "log-sizes/rank0.json").write_bytes(b'[{"path": "\xff')
    first = FirstSizes(folder)
    first.note("log.txt", 5)
    assert FirstSizes(folder).appended() == {"log.txt": 5}
