"""Schedules: possible, not shorter than the bounds, and good."""

from __future__ import annotations

import dataclasses
import math

import pytest
from cluster_task_graphs import graphs
from exact_schedules import is_within, problems, shortest
from hypothesis import given, settings

from outlast.cluster.tasks.graph import Edge, Graph, Machine, Place, Task
from outlast.cluster.tasks.planner import lower_bounds, plan, run_greedily, upward_ranks
from outlast.errors import ClusterError


@given(graphs())
@settings(max_examples=80, deadline=None)
def test_plans_are_possible_and_not_below_the_bounds(graph):
    for schedule in (plan(graph, effort=400), run_greedily(graph)):
        assert problems(schedule) == []
        bounds = lower_bounds(graph)
        assert schedule.makespan_seconds >= bounds.seconds * (1 - 1e-9)
        for row in schedule.rows:
            assert len(row.nodes) == len(set(row.nodes))


@given(graphs())
@settings(max_examples=40, deadline=None)
def test_no_node_does_two_things_at_once(graph):
    schedule = plan(graph, effort=200)
    for one in schedule.rows:
        number = [each.name for each in graph.activities].index(one.name)
        assert len(one.nodes) == (schedule.option(number).nodes if one.seconds else 0)
        for other in schedule.rows:
            if one is not other and one.group == other.group and {*one.nodes} & {*other.nodes}:
                overlap = min(one.end_seconds, other.end_seconds) - max(
                    one.start_seconds, other.start_seconds
                )
                assert overlap <= 1e-6


@given(graphs(most=6))
@settings(max_examples=30, deadline=None)
def test_search_never_makes_a_plan_longer(graph):
    quick, searched = plan(graph, effort=0), plan(graph, effort=2000)
    assert searched.makespan_seconds <= quick.makespan_seconds * (1 + 1e-9)
    again = plan(graph, effort=2000)
    assert list(again.starts) == list(searched.starts)


@given(graphs())
@settings(max_examples=30, deadline=None)
def test_the_unit_of_bytes_does_not_matter(graph):
    unit = 2.0**30

    def scaled(each):
        return dataclasses.replace(
            each, size_bytes=each.size_bytes * unit, cap_bytes_per_s=each.cap_bytes_per_s * unit
        )

    machine = Machine(
        graph.machine.nodes, {n: r * unit for n, r in graph.machine.bytes_per_s.items()}
    )
    other = Graph(map(scaled, graph.tasks), map(scaled, graph.edges), machine)
    for make in (lambda g: plan(g, effort=0), run_greedily):
        assert make(other).makespan_seconds == pytest.approx(make(graph).makespan_seconds)


def chain(count, **machine):
    return Machine({"nodes": count}, {"pfs": 1.0, **machine})


def test_ranks_and_bounds_of_a_worked_case():
    # a (2 s on 2 nodes) -> 3 bytes at 1 byte/s -> b (4 s); c (5 s on 1 node) beside them.
    graph = Graph(
        [
            Task("a", "train", seconds=2.0, nodes=2),
            Task("b", "evaluate", seconds=4.0, nodes=1),
            Task("c", "train", seconds=5.0, nodes=1),
        ],
        [Edge("a", "b", 3.0, ("pfs",))],
        chain(2),
    )
    assert upward_ranks(graph) == [9.0, 4.0, 5.0, 7.0]
    bounds = lower_bounds(graph)
    assert bounds.critical_path_seconds == 9.0
    assert bounds.nodes_seconds == pytest.approx((4 + 4 + 5) / 2)
    assert bounds.bandwidth_seconds == pytest.approx(2 + 3 + 4)
    schedule = plan(graph)
    # c fits into the gap while the data move.
    assert schedule.row("c").start_seconds == 2.0
    assert schedule.makespan_seconds == 9.0


def test_a_transfer_that_is_waited_for_goes_first():
    # Shared fairly, the urgent 4 bytes take 8 s before the 6 s of work that waits for them.
    graph = Graph(
        [
            Task("urgent", "drain", size_bytes=4.0, via=("pfs",)),
            Task("work", "evaluate", seconds=6.0, nodes=1),
            Task("bulk", "stage-out", size_bytes=4.0, via=("pfs",)),
        ],
        [Edge("urgent", "work")],
        chain(1),
    )
    assert run_greedily(graph).makespan_seconds == pytest.approx(14.0)
    planned = plan(graph)
    assert planned.makespan_seconds == pytest.approx(10.0)
    assert planned.sharing == "capped"
    number = next(n for n, each in enumerate(graph.activities) if each.name == "bulk")
    assert planned.rate_of(number)[0] == (4.0, 8.0, 1.0)


def test_an_evaluation_moves_to_the_spare_node_when_that_ends_first():
    tasks = [
        Task("train", "train", seconds=10.0, nodes=1),
        Task("evaluate", "evaluate", seconds=4.0, nodes=1, elsewhere=(Place("spare", 1, 6.0),)),
    ]
    machine = Machine({"nodes": 1, "spare": 1}, {})
    assert plan(Graph(tasks, [], machine)).makespan_seconds == pytest.approx(10.0)


def test_a_task_does_not_start_before_its_time():
    graph = Graph([Task("a", "train", seconds=1.0, nodes=1, earliest_seconds=7.0)], [], chain(1))
    for schedule in (plan(graph), run_greedily(graph)):
        assert schedule.row("a").start_seconds == 7.0


def test_nothing_to_do_takes_no_time():
    schedule = plan(Graph([], [], chain(1)))
    assert schedule.makespan_seconds == 0.0
    assert schedule.rows == ()


def test_impossible_schedules_are_told():
    graph = Graph(
        [
            Task("a", "train", seconds=2.0, nodes=1),
            Task("b", "train", seconds=2.0, nodes=1),
            Task("c", "drain", size_bytes=4.0, via=("pfs",)),
        ],
        [Edge("a", "b")],
        chain(1),
    )
    good = plan(graph)
    assert problems(good) == []
    together = dataclasses.replace(
        good, starts=[0.0] * 3, work_ends=[2.0, 2.0, 0.0], ends=[2.0, 2.0, 4.0]
    )
    words = " ".join(problems(together))
    assert "starts before" in words
    assert "2 nodes" in words
    fast = dataclasses.replace(
        good, rate_of=lambda number: ((0.0, 2.0, 2.0),) if number == 2 else ()
    )
    assert any("carries 2" in each for each in problems(fast))
    short = dataclasses.replace(
        good, rate_of=lambda number: ((0.0, 2.0, 1.0),) if number == 2 else ()
    )
    assert any("moves 2 of 4" in each for each in problems(short))


@given(graphs(most=4))
@settings(max_examples=12, deadline=None)
def test_small_plans_are_near_the_optimum(graph):
    schedule = plan(graph)
    found = shortest(graph, limit_seconds=10.0, known_seconds=schedule.makespan_seconds)
    assert found.bound_seconds >= lower_bounds(graph).seconds * (1 - 1e-6)
    assert found.seconds <= schedule.makespan_seconds * (1 + 1e-6)
    if found.proved:
        assert schedule.makespan_seconds <= 1.10 * found.seconds


def test_the_oracle_finds_a_known_optimum_by_itself():
    # Two machines, 3 + 3 + 2 + 2 + 2: the longest-first rule needs 7, the optimum is 6.
    lengths = (3.0, 3.0, 2.0, 2.0, 2.0)
    tasks = [Task(f"t{n}", "train", seconds=s, nodes=1) for n, s in enumerate(lengths)]
    graph = Graph(tasks, [], chain(2))
    found = shortest(graph, limit_seconds=20.0, known_seconds=7.0)
    assert found.seconds == pytest.approx(6.0, rel=1e-4)
    assert found.proved
    assert is_within(graph, 6.2) is True
    assert is_within(graph, 7.0) is False
    assert plan(graph).makespan_seconds == pytest.approx(6.0)


def test_the_oracle_lets_nothing_start_at_once():
    late = Graph([Task("late", "train", seconds=0.5, earliest_seconds=2.0)], [], chain(1))
    assert shortest(late, known_seconds=2.75).seconds == pytest.approx(2.5, rel=1e-4)


@given(graphs(most=4))
@settings(max_examples=10, deadline=None)
def test_the_oracle_finds_what_the_plan_has_found(graph):
    """Told of a makespan that is 10 % too long only, so that a model too strict would show."""
    made = plan(graph).makespan_seconds
    found = shortest(graph, limit_seconds=10.0, known_seconds=1.1 * made)
    if found.proved:
        assert found.seconds <= made * (1 + 2e-4)


def test_the_oracle_shares_bandwidth_as_it_likes():
    graph = Graph(
        [
            Task("urgent", "drain", size_bytes=4.0, via=("pfs",)),
            Task("work", "evaluate", seconds=6.0, nodes=1),
            Task("bulk", "stage-out", size_bytes=4.0, via=("pfs",)),
            Task("late", "stage-out", size_bytes=1.0, via=("pfs",), earliest_seconds=9.0),
        ],
        [Edge("urgent", "work")],
        chain(1),
    )
    found = shortest(graph, limit_seconds=20.0, known_seconds=20.0)
    assert found.seconds == pytest.approx(10.0, rel=1e-4)


def test_the_oracle_refuses_what_is_too_large():
    tasks = [Task(f"t{n}", "train", seconds=1.0, nodes=1) for n in range(41)]
    with pytest.raises(ClusterError, match="at most 40"):
        shortest(Graph(tasks, [], chain(2)))


def test_equal_independent_tasks_keep_grahams_bound():
    # Without transfers, list scheduling is at most 2 - 1/m times the optimum.
    for count, nodes in ((7, 3), (12, 5), (9, 2)):
        tasks = [Task(f"t{n}", "train", seconds=1.0 + n % 3, nodes=1) for n in range(count)]
        graph = Graph(tasks, [], chain(nodes))
        made = plan(graph, effort=0).makespan_seconds
        assert made <= (2 - 1 / nodes) * lower_bounds(graph).seconds + 1e-9
        assert not math.isinf(made)
