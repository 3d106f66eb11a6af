"""Max-min fair rates: laws, worked cases, and the passing of time."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outlast.cluster.tasks.schedule import Flow, Fluid, fair_rates
from outlast.errors import ClusterError

NAMES = ("a", "b", "c")


@st.composite
def cases(draw, levels=1):
    rates = {name: draw(st.floats(0.1, 100.0)) for name in NAMES}
    flows = [
        Flow(
            tuple(draw(st.sets(st.sampled_from(NAMES), min_size=1))),
            draw(st.sampled_from((math.inf, 0.5, 3.0, 20.0))),
            draw(st.integers(1, levels)),
        )
        for _ in range(draw(st.integers(1, 8)))
    ]
    return flows, rates


def used(flows, found, name):
    return math.fsum(rate for flow, rate in zip(flows, found, strict=True) if name in flow.via)


@given(cases(levels=3))
def test_no_capacity_and_no_cap_is_exceeded(case):
    flows, rates = case
    found = fair_rates(flows, rates)
    for name, capacity in rates.items():
        assert used(flows, found, name) <= capacity * (1 + 1e-9)
    for flow, rate in zip(flows, found, strict=True):
        assert 0.0 <= rate <= flow.cap_bytes_per_s


@given(cases())
def test_rates_are_max_min_fair(case):
    """A flow that is below its cap goes through a full resource in which none has more."""
    flows, rates = case
    found = fair_rates(flows, rates)
    for flow, rate in zip(flows, found, strict=True):
        if rate >= flow.cap_bytes_per_s * (1 - 1e-9):
            continue
        assert any(
            used(flows, found, name) >= rates[name] * (1 - 1e-9)
            and all(
                other <= rate * (1 + 1e-9)
                for each, other in zip(flows, found, strict=True)
                if name in each.via
            )
            for name in flow.via
        )


@given(cases(levels=3))
def test_later_levels_change_nothing_for_earlier_ones(case):
    flows, rates = case
    found = fair_rates(flows, rates)
    first = min(flow.level for flow in flows)
    alone = fair_rates([flow for flow in flows if flow.level == first], rates)
    kept = [rate for flow, rate in zip(flows, found, strict=True) if flow.level == first]
    assert kept == pytest.approx(alone)


@given(cases(), st.sampled_from((1e-6, 8.0, 1e9)))
def test_the_unit_of_bytes_does_not_matter(case, unit):
    flows, rates = case
    scaled = [Flow(flow.via, flow.cap_bytes_per_s * unit) for flow in flows]
    found = fair_rates(scaled, {name: rate * unit for name, rate in rates.items()})
    assert [rate / unit for rate in found] == pytest.approx(fair_rates(flows, rates))


def test_worked_case():
    # The classic line: one long flow through both links, short ones on each; the narrow link
    # gives 1 to each of its three flows, and the wide one has the rest for its own flow.
    flows = [Flow(("a", "b")), Flow(("a",)), Flow(("a",)), Flow(("b",))]
    assert fair_rates(flows, {"a": 3.0, "b": 10.0}) == [1.0, 1.0, 1.0, 9.0]


def test_a_flow_that_nothing_limits_is_refused():
    with pytest.raises(ClusterError, match="nothing limits"):
        fair_rates([Flow(())], {"a": 1.0})
    with pytest.raises(ClusterError, match='"z"'):
        fair_rates([Flow(("z",))], {"a": 1.0})
    assert fair_rates([Flow((), 5.0)], {"a": 1.0}) == [5.0]


def finished(flows, capacities):
    """End of each (start, via, cap, size) in a `Fluid`."""
    fluid = Fluid(capacities)
    coming = sorted(range(len(flows)), key=lambda number: flows[number][0])
    ends = {}
    while coming or len(ends) < len(flows):
        until = min(fluid.next_end(), flows[coming[0]][0] if coming else math.inf)
        assert until < math.inf
        for flow in fluid.advance(until):
            ends[flow] = until
        while coming and flows[coming[0]][0] <= until:
            number = coming.pop(0)
            fluid.add(number, *flows[number][1:])
        fluid.share()
    return ends, fluid


def test_time_passes_as_worked_by_hand():
    # 12 bytes at 0 and 4 bytes at 2 through a resource of 2 bytes/s: alone until 2 (4 bytes), then
    # 1 byte/s each until the second is done at 6 (8 bytes), then 2 bytes/s for the last 4.
    ends, fluid = finished([(0.0, (0,), 9.0, 12.0), (2.0, (0,), 9.0, 4.0)], [2.0])
    assert ends == pytest.approx({0: 8.0, 1: 6.0})
    assert fluid.profile(0) == ((0.0, 2.0, 2.0), (2.0, 6.0, 1.0), (6.0, 8.0, 2.0))
    assert fluid.profile(1) == ((2.0, 6.0, 1.0),)


timed = st.lists(
    st.tuples(
        st.floats(0.0, 20.0),
        st.sets(st.integers(0, 2), min_size=1).map(lambda each: tuple(sorted(each))),
        st.sampled_from((100.0, 0.5, 3.0)),
        st.floats(0.01, 50.0),
    ),
    min_size=1,
    max_size=8,
)


@given(timed, st.lists(st.floats(0.2, 10.0), min_size=3, max_size=3))
@settings(max_examples=60)
def test_every_flow_moves_exactly_its_bytes(flows, capacities):
    ends, fluid = finished(flows, capacities)
    for number, (start, _, cap, size) in enumerate(flows):
        profile = fluid.profile(number)
        moved = math.fsum((until - since) * rate for since, until, rate in profile)
        assert moved == pytest.approx(size, rel=1e-6, abs=1e-9)
        assert profile[0][0] >= start
        assert profile[-1][1] <= ends[number] + 1e-9
        assert all(rate <= cap * (1 + 1e-12) for _, _, rate in profile)


@given(timed, st.floats(0.2, 10.0))
@settings(max_examples=60)
def test_work_is_conserved_on_one_resource(flows, capacity):
    """Without caps, a resource never idles while there is work: it is a queue's busy time."""
    flows = [(start, (0,), math.inf, size) for start, _, _, size in flows]
    assume(len({start for start, *_ in flows}) == len(flows))
    ends, _ = finished(flows, [capacity])
    free = 0.0
    for start, _, _, size in sorted(flows):
        free = max(free, start) + size / capacity
    assert max(ends.values()) == pytest.approx(free)


@given(timed, st.sampled_from((1e-3, 1e9)))
@settings(max_examples=40)
def test_ends_do_not_depend_on_the_unit_of_bytes(flows, unit):
    ends, _ = finished(flows, [1.0, 2.0, 4.0])
    scaled = [(start, via, cap * unit, size * unit) for start, via, cap, size in flows]
    found, _ = finished(scaled, [unit, 2 * unit, 4 * unit])
    assert found == pytest.approx(ends)


@given(timed, st.lists(st.floats(0.2, 10.0), min_size=3, max_size=3))
@settings(max_examples=60)
def test_rates_over_time_are_those_of_each_moment(flows, capacities):
    """Between any two events, the classes of `Fluid` give what `fair_rates` gives flow by flow."""
    ends, fluid = finished(flows, capacities)
    profiles = [fluid.profile(number) for number in range(len(flows))]
    events = sorted({*ends.values(), *(start for start, *_ in flows)})
    for since, until in itertools.pairwise(events):
        middle = 0.5 * (since + until)
        if until - since < 1e-6:
            continue
        active = [n for n, (start, *_) in enumerate(flows) if start <= middle < ends[n]]
        found = [next((r for a, b, r in profiles[n] if a <= middle < b), 0.0) for n in active]
        asked = [Flow(tuple(map(str, flows[n][1])), flows[n][2]) for n in active]
        rates = {str(number): rate for number, rate in enumerate(capacities)}
        assert found == pytest.approx(fair_rates(asked, rates), rel=1e-6, abs=1e-9)
