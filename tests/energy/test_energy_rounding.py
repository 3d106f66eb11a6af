"""Plans with real clocks: they meet the deadline, keep above the bound, and beat plain rounding."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.energy.example import profile
from outlast.energy.linear_program import LinearProgram, lower_hull
from outlast.energy.operations import Choices
from outlast.energy.planner import Beam, Leaning, mirrored, mirrored_optimum, rounded
from outlast.energy.profile import Curve, Key, Point, Profile, effective
from outlast.energy.schedule import Operation, Schedule, one_f_one_b


def solved(own: Profile, schedule: Schedule, share: float) -> tuple[list[Point], float, float]:
    """The plan for a share of the way from the fastest to the slowest plan; deadline and bound."""
    watts = own.blocking_watts
    curves = {each.key: own.curve(each.key).pareto(watts) for each in schedule.operations}
    hulls = {key: lower_hull(points, watts) for key, points in curves.items()}
    keys = [each.key for each in schedule.operations]
    choices = Choices([curves[key] for key in keys], [hulls[key] for key in keys], watts)
    program = LinearProgram(schedule, choices.hulls, watts)
    slowest = schedule.makespan([curves[key][-1].seconds for key in keys])
    fastest = program.fastest_seconds
    deadline = fastest + share * (slowest - fastest)
    relaxed = program.solve(deadline)
    return rounded(schedule, choices, relaxed, deadline), deadline, relaxed.joules


def total(points: list[Point], watts: float) -> float:
    """Effective joules."""
    return sum(effective(point, watts) for point in points)


def best_of_all(own: Profile, schedule: Schedule, deadline: float) -> float:
    """Least effective joules over all plans, by trying them."""
    plans = itertools.product(*(own.curve(o.key).points for o in schedule.operations))
    return min(
        total(list(plan), own.blocking_watts)
        for plan in plans
        if schedule.makespan([point.seconds for point in plan]) <= deadline * (1 + 1e-9)
    )


@st.composite
def steps(draw: st.DrawFn, most: int = 12) -> tuple[Profile, Schedule]:
    """Any graph of operations with up to six clocks each; some have one clock only."""
    kinds = draw(st.integers(1, 4))
    curves = {}
    for kind in range(kinds):
        number = draw(st.integers(1, 6))
        grid = st.lists(
            st.tuples(st.integers(1, 100), st.integers(1, 100)), min_size=number, max_size=number
        )
        points = [Point(100 + i, t / 50, 3.0 * e) for i, (t, e) in enumerate(draw(grid))]
        curves[Key(kind, "work")] = Curve(tuple(points))
    count = draw(st.integers(1, most))
    operations = tuple(
        Operation(0, draw(st.integers(0, kinds - 1)), "work", i) for i in range(count)
    )
    pairs = list(itertools.combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return Profile(curves, draw(st.sampled_from([0.0, 5.0]))), Schedule(operations, tuple(edges), 1)


@settings(max_examples=60, deadline=None)
@given(steps(), st.floats(0, 1.1))
def test_every_plan_meets_its_deadline_and_is_not_below_the_bound(
    step: tuple[Profile, Schedule], share: float
) -> None:
    own, schedule = step
    points, deadline, bound = solved(own, schedule, share)
    assert schedule.makespan([point.seconds for point in points]) <= deadline * (1 + 1e-9)
    assert total(points, own.blocking_watts) >= bound - 1e-6 * (1 + abs(bound))
    for point, each in zip(points, schedule.operations, strict=True):
        assert point in own.curve(each.key).points


@settings(max_examples=25, deadline=None)
@given(steps(most=4), st.floats(0, 1))
def test_small_steps_get_a_plan_near_the_best_one(
    step: tuple[Profile, Schedule], share: float
) -> None:
    own, schedule = step
    points, deadline, _ = solved(own, schedule, share)
    # All points are tried for up to four operations, so the beam holds the best plan, or one
    # that differs from it by less than the grain.
    best = best_of_all(own, schedule, deadline)
    assert total(points, own.blocking_watts) <= best + 0.05 * abs(best) + 1e-9


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_plans_beat_rounding_every_operation_down(share: float) -> None:
    own, schedule = profile("a40"), one_f_one_b(4, 4)
    watts = own.blocking_watts
    points, deadline, _ = solved(own, schedule, share)
    curves = [own.curve(each.key).pareto(watts) for each in schedule.operations]
    program = LinearProgram(schedule, [lower_hull(c, watts) for c in curves], watts)
    seconds = program.solve(deadline).seconds
    plain = [
        max((p for p in curve if p.seconds <= limit * (1 + 1e-9)), key=lambda p: p.seconds)
        for curve, limit in zip(curves, seconds, strict=True)
    ]
    assert total(points, watts) < total(plain, watts)


@pytest.mark.parametrize("device", ["a100", "a40"])
def test_gaps_of_the_example_stay_small(device: str) -> None:
    own, schedule = profile(device), one_f_one_b(8, 12)
    top = schedule.makespan([own.curve(each.key).top.seconds for each in schedule.operations])
    points, deadline, bound = solved(own, schedule, 0.2)
    waiting = schedule.devices * own.blocking_watts * deadline
    assert deadline < 1.1 * top
    gap = (total(points, own.blocking_watts) - bound) / (bound + waiting)
    assert 0 <= gap <= 0.0025


def test_plans_are_the_same_whenever_they_are_asked_for() -> None:
    own, schedule = profile("a100"), one_f_one_b(3, 4)
    assert solved(own, schedule, 0.3)[0] == solved(own, schedule, 0.3)[0]


def test_one_operation_takes_the_slowest_clock_that_fits() -> None:
    curve = Curve((Point(1, 3.0, 1.0), Point(2, 2.0, 2.0), Point(3, 1.0, 4.0)))
    own = Profile({Key(0, "work"): curve}, 0.0)
    schedule = Schedule((Operation(0, 0, "work", 0),), (), 1)
    assert solved(own, schedule, 0.6)[0] == [Point(2, 2.0, 2.0)]


def test_prices_flow_through_operations() -> None:
    """What a second before an operation costs, it costs after it: the prices are a flow."""
    own, schedule = profile("a40"), one_f_one_b(4, 6)
    watts = own.blocking_watts
    hulls = [lower_hull(own.curve(o.key).pareto(watts), watts) for o in schedule.operations]
    program = LinearProgram(schedule, hulls, watts)
    relaxed = program.solve(program.fastest_seconds * 1.03)
    before = [0.0] * len(hulls)
    for price, (_, after) in zip(relaxed.edge_watts, schedule.edges, strict=True):
        before[after] += float(price)
    middle = [i for i in range(len(hulls)) if schedule.predecessors[i]]
    assert relaxed.watts > 0
    assert [before[i] for i in middle] == pytest.approx(
        [relaxed.operation_watts[i] for i in middle], abs=1e-6
    )


def test_prices_of_deadlines_nearby_never_make_a_plan_worse_than_the_fastest() -> None:
    own, schedule = profile("a40"), one_f_one_b(3, 4)
    watts = own.blocking_watts
    curves = [own.curve(each.key).pareto(watts) for each in schedule.operations]
    choices = Choices(curves, [lower_hull(curve, watts) for curve in curves], watts)
    program = LinearProgram(schedule, choices.hulls, watts)
    shortest = program.fastest_seconds
    relaxed, *nearby = [program.solve(shortest * each) for each in (1.02, 1.0, 1.04)]
    points = rounded(schedule, choices, relaxed, shortest * 1.02, nearby)
    assert schedule.makespan([p.seconds for p in points]) <= shortest * 1.02 * (1 + 1e-9)
    assert relaxed.joules <= total(points, watts) < total([c[0] for c in curves], watts)


@pytest.mark.parametrize("backwards", [False, True])
def test_searches_side_by_side_find_what_each_finds_alone(backwards: bool) -> None:
    own, schedule = profile("a100"), one_f_one_b(3, 4)
    watts = own.blocking_watts
    curves = [own.curve(each.key).pareto(watts) for each in schedule.operations]
    hulls = [lower_hull(curve, watts) for curve in curves]
    program = LinearProgram(schedule, hulls, watts)
    deadline = program.fastest_seconds * 1.03
    relaxed = program.solve(deadline)
    if backwards:
        schedule, relaxed = mirrored(schedule), mirrored_optimum(relaxed, deadline)
    beam = Beam(schedule, Choices(curves, hulls, watts), relaxed, deadline)
    leanings = [Leaning(0.3), Leaning(10.0, early=0.2), Leaning(2.0, grain=1e-2)]
    alone = [beam.search([each], 32)[0] for each in leanings]
    assert beam.search(leanings, 32) == alone
