"""Turns by token files: one at a time, in order, never blocked by the dead, with deadlines."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid

import pytest

from outlast.cluster.storage import Ticket, TicketFolder, ask, turn
from outlast.errors import ClusterError
from outlast.records.claims import Owner, started_ticks

HOLDER = """
import sys, time
from outlast.cluster.storage import turn
with turn(sys.argv[1], 1e6, deadline_seconds=5.0) as mine:
    print(mine.granted, flush=True)
    time.sleep(600)
"""


def ticket():
    return Ticket(uuid.uuid4().hex, 0, 1.0, 1.0)


def holder(directory):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def test_a_turn_is_granted_at_once_when_nobody_writes(tmp_path):
    with turn(tmp_path / "turns", 1e6) as mine:
        assert mine.granted
        assert mine.why == ""
        assert mine.waited_seconds < 1.0
    assert [each.name[:4] for each in (tmp_path / "turns").iterdir()] == ["free"]


def test_one_at_a_time(tmp_path):
    writing, most = [], []

    def save(number):
        with turn(tmp_path, 1e6, deadline_seconds=30.0) as mine:
            assert mine.granted
            writing.append(number)
            most.append(len(writing))
            time.sleep(0.02)
            writing.remove(number)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most == [1] * 6


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", ["big", "small"]), ("least-waste", ["small", "big"])]
)
def test_the_order_decides_among_those_that_wait(tmp_path, order, expected):
    served = []

    def save(name, size):
        with turn(tmp_path, size, nodes=4, order=order, deadline_seconds=20.0):
            served.append(name)

    with turn(tmp_path, 1.0, order=order):
        threads = []
        for name, size in (("big", 8e9), ("small", 1e9)):
            threads.append(threading.Thread(target=save, args=(name, size)))
            threads[-1].start()
            time.sleep(0.1)
    for each in threads:
        each.join()
    assert served == expected


def test_sets_write_side_by_side(tmp_path):
    with turn(tmp_path, 1e6, order="set-10", period_seconds=10.0) as one:
        with turn(tmp_path, 1e6, order="set-10", period_seconds=100.0, deadline_seconds=0.5) as two:
            assert one.granted
            assert two.granted
        with turn(tmp_path, 1e6, order="set-10", period_seconds=12.0, deadline_seconds=0.2) as same:
            assert not same.granted


def test_the_deadline_ends_a_wait_and_the_saver_goes_on(tmp_path):
    with turn(tmp_path, 1e6) as first:
        assert first.granted
        begun = time.monotonic()
        with turn(tmp_path, 1e6, deadline_seconds=0.3) as second:
            assert not second.granted
            assert second.why == "deadline"
            assert 0.3 <= time.monotonic() - begun < 1.5
            assert second.waited_seconds >= 0.3
        # Its request is gone, and the first one's turn is not.
        with turn(tmp_path, 1e6, deadline_seconds=0.1) as third:
            assert third.why == "deadline"
    with turn(tmp_path, 1e6, deadline_seconds=0.0) as fourth:
        assert fourth.granted


def test_the_turn_of_a_killed_process_is_passed_over(tmp_path):
    process = holder(tmp_path)
    with turn(tmp_path, 1e6, deadline_seconds=0.2) as mine:
        assert not mine.granted
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    begun = time.monotonic()
    with turn(tmp_path, 1e6, deadline_seconds=30.0) as mine:
        assert mine.granted
        assert time.monotonic() - begun < 2.0
    process.stdout.close()


def test_the_request_of_a_killed_process_is_removed(tmp_path):
    first = holder(tmp_path)
    script = HOLDER.replace("deadline_seconds=5.0", "deadline_seconds=600.0").replace("1e6", "1.0")
    waiter = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    board = TicketFolder(tmp_path)
    end = time.monotonic() + 20.0
    while not board.waiting(time.time()):
        assert time.monotonic() < end
        time.sleep(0.02)
    waiter.kill()
    waiter.wait()
    # Its request, of a byte, would come before this one.
    with ask(tmp_path, 1e9) as mine:
        assert not mine.granted
        assert len(board.waiting(time.time())) == 1
        first.kill()
        first.wait()
        assert mine.wait(20.0)
    first.stdout.close()


def foreign(path, **changed):
    """Make the owner in a token file one on another node."""
    content = json.loads(path.read_text())
    content["owner"].update(host="elsewhere", boot="other", **changed)
    path.write_text(json.dumps(content))


def silent(path, seconds):
    """Let the owner of a token file have said nothing for so long."""
    old = time.time() - seconds
    os.utime(path, (old, old))


def test_an_owner_on_another_node_lives_by_its_heartbeat(tmp_path):
    request = ask(tmp_path, 1e6)
    assert request.ready()
    [held] = tmp_path.glob("held-*")
    foreign(held)
    request._ended.set()
    with turn(tmp_path, 1e6, deadline_seconds=0.2) as mine:
        assert mine.why == "deadline"
    old = time.time() - 500.0
    os.utime(held, (old, old))
    with turn(tmp_path, 1e6, deadline_seconds=5.0) as mine:
        assert mine.granted


def test_slurm_may_be_asked_whether_an_owner_lives(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    request = ask(tmp_path, 1e6)
    assert request.ready()
    request._ended.set()
    [held] = tmp_path.glob("held-*")
    foreign(held)
    silent(held, 60.0)
    asked = []

    def alive(owner):
        asked.append(owner.job)
        return False

    with turn(tmp_path, 1e6, deadline_seconds=5.0, ask_alive=alive) as mine:
        assert mine.granted
    assert "4711" in asked


def test_slurm_is_not_asked_about_an_owner_that_has_just_been_heard(tmp_path):
    request = ask(tmp_path, 1e6)
    assert request.ready()
    [held] = tmp_path.glob("held-*")
    foreign(held)
    with turn(tmp_path, 1e6, deadline_seconds=0.2, ask_alive=lambda owner: 1 / 0) as mine:
        assert mine.why == "deadline"
    request.release()


def test_a_suspended_owner_does_not_block(tmp_path):
    process = holder(tmp_path)
    os.kill(process.pid, signal.SIGSTOP)
    [held] = tmp_path.glob("held-*")
    old = time.time() - 500.0
    os.utime(held, (old, old))
    try:
        with turn(tmp_path, 1e6, deadline_seconds=10.0) as mine:
            assert mine.granted
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_who_looked_too_long_ago_gets_no_turn(tmp_path):
    """A generation that is over and swept away cannot be taken again."""
    board = TicketFolder(tmp_path)
    slow = board.ask(ticket())
    for generation in range(3):
        quick = board.ask(ticket())
        assert board.take(quick, generation)
        board.give_back(quick, generation + 1)
    assert not board.take(slow, 0)
    assert not board.take(slow, 1)
    assert board.held(0, time.time()) == (3, None)
    assert board.take(slow, 3)


def test_of_two_that_take_one_generation_one_gets_it(tmp_path):
    board = TicketFolder(tmp_path)
    tickets = [board.ask(ticket()) for _ in range(8)]
    barrier = threading.Barrier(8)
    won = []

    def take(ticket):
        barrier.wait()
        if board.take(ticket, 0):
            won.append(ticket)

    threads = [threading.Thread(target=take, args=(each,)) for each in tickets]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(won) == 1


def test_turns_work_without_hard_links(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with turn(tmp_path, 1e6) as mine:
        assert mine.granted
        with turn(tmp_path, 1e6, deadline_seconds=0.1) as other:
            assert not other.granted


def test_a_directory_that_cannot_be_used_hinders_nobody(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    ran = False
    with turn(blocked / "turns", 1e6) as mine:
        ran = True
        assert not mine.granted
        assert "cannot be used" in mine.why
    assert ran


def test_a_directory_that_goes_away_hinders_nobody(tmp_path):
    directory = tmp_path / "turns"
    with turn(directory, 1e6):
        request = ask(directory, 1e6)
        assert not request.ready()
        for each in directory.iterdir():
            each.unlink()
        directory.rmdir()
        assert request.ready()
        assert not request.granted


def test_damaged_files_are_ignored(tmp_path):
    (tmp_path / "ticket-abc.json").write_text("{")
    (tmp_path / "held-0-000000000001.json").write_text("not JSON")
    (tmp_path / "held-0-abc.json").write_text("")
    old = time.time() - 3600.0
    for each in tmp_path.iterdir():
        os.utime(each, (old, old))
    with turn(tmp_path, 1e6, deadline_seconds=2.0) as mine:
        assert mine.granted


def test_a_job_computes_until_it_is_its_turn(tmp_path):
    steps = 0
    first = ask(tmp_path, 1e6)
    assert first.ready()
    second = ask(tmp_path, 1e6, mtbf_seconds=1e5, unsaved_seconds=100.0)
    while not second.ready():
        steps += 1
        if steps == 5:
            first.release()
    assert steps == 5
    with second:
        assert second.granted


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"size_bytes": 0}, "size_bytes = 0"),
        ({"size_bytes": 1, "nodes": -1}, "nodes = -1"),
        ({"size_bytes": 1, "order": "lifo"}, "lifo"),
        ({"size_bytes": 1, "order": "set-10"}, "period_seconds"),
        ({"size_bytes": 1, "deadline_seconds": -1}, "deadline_seconds = -1"),
    ],
)
def test_settings_without_a_meaning_are_refused(tmp_path, settings, said):
    with pytest.raises(ClusterError, match=said), turn(tmp_path, **settings):
        pass


def test_processes_are_told_apart():
    mine = Owner.here()
    assert mine.is_alive() is True
    assert dataclasses.replace(mine, started=mine.started + 1).is_alive() is False
    assert dataclasses.replace(mine, host="elsewhere").is_alive() is None
    assert dataclasses.replace(mine, namespace="pid:[1]").is_alive() is None
    assert Owner.of(json.loads(json.dumps(dataclasses.asdict(mine)))) == mine
    assert Owner.of({"host": "a"}) is None
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    owner = dataclasses.replace(mine, pid=child.pid, started=started_ticks(child.pid))
    assert owner.is_alive() is True
    child.kill()
    end = time.monotonic() + 10.0
    # A zombie that nobody has waited for is dead too.
    while owner.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert owner.is_alive() is False
    child.wait()


WRITER = """
import os, sys, time
from pathlib import Path
from outlast.cluster.storage import turn
directory, number = Path(sys.argv[1]), sys.argv[2]
busy = directory / "busy"
done = 0
while done < 15:
    with turn(directory / "turns", 1e6, nodes=int(number), deadline_seconds=60.0) as mine:
        assert mine.granted, mine.why
        # Fails if another live process is at it; a killed one has left its mark behind.
        mark = f"{os.getpid()}"
        if busy.exists():
            other = int(busy.read_text() or 0)
            assert not other or not Path(f"/proc/{other}").exists(), f"{mark} beside {other}"
        busy.write_text(mark)
        time.sleep(0.005)
        assert busy.read_text() == mark
        busy.unlink()
    done += 1
print(done, flush=True)
"""


@pytest.mark.distributed
def test_real_processes_write_one_at_a_time_though_some_are_killed(tmp_path):
    def start(number):
        return subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    processes = [start(number) for number in range(1, 5)]
    victims = [start(number) for number in (5, 6)]
    for each in victims:
        time.sleep(0.4)
        each.kill()
        each.communicate()
    for each in processes:
        output, errors = each.communicate(timeout=60.0)
        assert output == "15\n", errors
    assert not list((tmp_path / "turns").glob("ticket-*"))
