"""The executor: order, caps, deadlines and failures with real threads and files."""

from __future__ import annotations

import threading
import time

import pytest

from outlast.cluster.tasks.execute import Executor
from outlast.cluster.tasks.graph import Edge, Graph, Machine, Task
from outlast.cluster.tasks.planner import plan
from outlast.errors import ClusterError

MACHINE = Machine({"nodes": 1}, {"pfs": 1e6})


def move(transfer):
    left = round(transfer.size_bytes)
    while left:
        size = min(transfer.block_bytes, left)
        transfer.take(size)
        left -= size


def rest(seconds):
    return lambda _: time.sleep(seconds)


@pytest.mark.slow
def test_what_happened_is_near_what_was_planned():
    graph = Graph(
        [
            Task("train 1", "train", seconds=0.2, nodes=1),
            Task("drain 1", "drain", size_bytes=300_000, via=("pfs",)),
            Task("train 2", "train", seconds=0.2, nodes=1),
            Task("evaluate 1", "evaluate", seconds=0.1),
        ],
        [
            Edge("train 1", "drain 1"),
            Edge("train 1", "train 2"),
            Edge("drain 1", "evaluate 1", 100_000, ("pfs",)),
        ],
        MACHINE,
    )
    report = Executor(
        plan(graph),
        {"train": rest(0.2), "drain": move, "move": move, "evaluate": rest(0.1)},
        deadline_seconds=20.0,
    ).run()
    assert report.problems == []
    assert report.planned_seconds == pytest.approx(0.7)
    assert 0.65 <= report.seconds < 1.2
    assert report.task("drain 1").moved_bytes == 300_000
    for each in report.tasks:
        assert -0.1 < each.end_seconds - each.planned_end_seconds < 0.5
    assert report.task("train 2").start_seconds < report.task("drain 1").end_seconds


def test_transfers_share_the_bandwidth_that_there_is():
    tasks = [
        Task(f"drain {n}", "drain", size_bytes=100_000, via=("pfs",), cap_bytes_per_s=0.9e6)
        for n in range(4)
    ]
    report = Executor(plan(Graph(tasks, [], MACHINE)), {"drain": move}, deadline_seconds=20.0).run()
    # Together not faster than the resource, less what a bucket lets pass at once.
    assert report.seconds >= 0.35
    assert report.problems == []


@pytest.mark.slow
def test_the_plans_first_transfer_goes_first():
    graph = Graph(
        [
            Task("bulk", "stage-out", size_bytes=400_000, via=("pfs",)),
            Task("urgent", "drain", size_bytes=200_000, via=("pfs",)),
            Task("work", "evaluate", seconds=1.0, nodes=1),
        ],
        [Edge("urgent", "work")],
        MACHINE,
    )
    report = Executor(
        plan(graph),
        {"drain": move, "stage-out": move, "evaluate": rest(0.0)},
        deadline_seconds=20.0,
    ).run()
    assert report.task("urgent").end_seconds < 0.35
    assert report.task("bulk").end_seconds >= 0.5


def test_tasks_on_one_node_never_overlap():
    running, most = [], []

    def work(transfer):
        running.append(transfer.name)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(transfer.name)

    tasks = [Task(f"train {n}", "train", seconds=0.01 * (n + 1), nodes=1) for n in range(6)]
    report = Executor(plan(Graph(tasks, [], MACHINE)), {"train": work}, deadline_seconds=20.0).run()
    assert report.problems == []
    assert most == [1] * 6


def test_what_waits_for_a_failure_is_not_started():
    def fail(_):
        raise OSError("disk full")

    graph = Graph(
        [
            Task("save", "save", size_bytes=10.0, via=("pfs",)),
            Task("drain", "drain", size_bytes=10.0, via=("pfs",)),
            Task("other", "stage-in", size_bytes=10.0, via=("pfs",)),
        ],
        [Edge("save", "drain")],
        MACHINE,
    )
    report = Executor(
        plan(graph), {"save": fail, "drain": move, "stage-in": move}, deadline_seconds=10.0
    ).run()
    assert report.task("save").outcome == "failed"
    assert "disk full" in report.task("save").error
    assert report.task("drain").outcome == "not started"
    assert report.task("other").outcome == "done"
    assert len(report.problems) == 2


def test_the_deadline_ends_a_run_that_hangs():
    never = threading.Event()
    graph = Graph([Task("train", "train", seconds=1.0, nodes=1)], [], MACHINE)
    begun = time.monotonic()
    report = Executor(
        plan(graph), {"train": lambda _: never.wait(600.0)}, deadline_seconds=0.3
    ).run()
    assert time.monotonic() - begun < 2.0
    assert "longer than 0.3 s" in report.problems[0]
    never.set()


def test_a_transfer_ends_at_the_deadline_and_when_stopped():
    graph = Graph([Task("drain", "drain", size_bytes=1e9, via=("pfs",))], [], MACHINE)
    late = Executor(plan(graph), {"drain": move}, deadline_seconds=0.3)
    assert late.run().seconds < 2.0
    stopped = Executor(plan(graph), {"drain": move}, deadline_seconds=60.0)
    threading.Timer(0.2, stopped.stop).start()
    begun = time.monotonic()
    report = stopped.run()
    assert time.monotonic() - begun < 3.0
    assert report.task("drain").outcome == "failed"


def test_a_task_waits_for_its_time():
    graph = Graph([Task("a", "stage-in", seconds=0.0, earliest_seconds=0.3)], [], MACHINE)
    report = Executor(plan(graph), {}, deadline_seconds=10.0).run()
    assert report.task("a").start_seconds >= 0.3


def test_a_task_that_nobody_does_is_refused_before_the_run():
    graph = Graph([Task("drain 7", "drain", size_bytes=1.0, via=("pfs",))], [], MACHINE)
    with pytest.raises(ClusterError, match=r'"drain 7".*"drain"'):
        Executor(plan(graph), {"save": move}, deadline_seconds=1.0)
