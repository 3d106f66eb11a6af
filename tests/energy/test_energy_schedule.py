"""Schedules: what runs where, who waits for whom, and how long a step takes at least."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.energy.schedule import (
    Action,
    Operation,
    Schedule,
    gpipe,
    interleaved,
    linked,
    one_f_one_b,
    sharded,
    single_stage,
    with_tail,
    with_transfers,
    zero_bubble,
)
from outlast.errors import EnergyError

QUICK = settings(max_examples=25, deadline=None)


@st.composite
def pipelines(draw: st.DrawFn) -> Schedule:
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    kind = draw(st.sampled_from(["gpipe", "1f1b", "zero bubble", "interleaved"]))
    if kind == "interleaved":
        rounds, virtual = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        return interleaved(stages, stages * rounds, virtual)
    make = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero bubble": zero_bubble}[kind]
    return make(stages, microbatches)


@st.composite
def timed(draw: st.DrawFn) -> tuple[Schedule, list[float]]:
    schedule = draw(pipelines())
    if draw(st.booleans()):
        schedule = with_tail(with_transfers(schedule))
    keys = sorted({each.key for each in schedule.operations})
    of_key = {key: draw(st.floats(0.001, 10.0)) for key in keys}
    return schedule, [of_key[each.key] for each in schedule.operations]


def seconds_by_phase(schedule: Schedule, **phases: float) -> list[float]:
    return [phases[each.phase] for each in schedule.operations]


@QUICK
@given(pipelines())
def test_every_stage_runs_each_microbatch_once_forward_and_once_backward(schedule: Schedule):
    stages = {each.stage for each in schedule.operations}
    batches = {each.microbatch for each in schedule.operations}
    count = Counter((each.stage, each.phase, each.microbatch) for each in schedule.operations)
    assert set(count.values()) == {1}
    for stage in stages:
        for batch in batches:
            assert count[stage, "forward", batch] == 1
            halves = count[stage, "backward_input", batch], count[stage, "backward_weight", batch]
            assert (count[stage, "backward", batch], *halves) in {(1, 0, 0), (0, 1, 1)}


@QUICK
@given(pipelines())
def test_activations_and_gradients_are_waited_for(schedule: Schedule):
    starts = schedule.earliest_starts([1.0] * len(schedule.operations))
    at = {(o.stage, o.phase, o.microbatch): starts[i] for i, o in enumerate(schedule.operations)}
    last = max(each.stage for each in schedule.operations)
    for (stage, phase, batch), start in at.items():
        if phase == "forward" and stage:
            assert start >= at[stage - 1, "forward", batch] + 1
        if phase in {"backward", "backward_input"}:
            assert start >= at[stage, "forward", batch] + 1
            assert stage == last or start >= at[stage + 1, phase, batch] + 1
        if phase == "backward_weight":
            assert start >= at[stage, "backward_input", batch] + 1


@QUICK
@given(timed())
def test_operations_of_a_device_never_overlap(case: tuple[Schedule, list[float]]):
    schedule, seconds = case
    starts = schedule.earliest_starts(seconds)
    for device in range(schedule.devices):
        spans = sorted(
            (starts[i], starts[i] + seconds[i])
            for i, each in enumerate(schedule.operations)
            if each.device == device
        )
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(spans))


@QUICK
@given(timed(), st.data())
def test_a_step_lasts_at_least_as_long_as_each_device_and_longer_operations_never_shorten_it(
    case: tuple[Schedule, list[float]], data: st.DataObject
):
    schedule, seconds = case
    whole = schedule.makespan(seconds)
    busy = Counter[int]()
    for each, own in zip(schedule.operations, seconds, strict=True):
        busy[each.device] += own
    assert all(busy[device] <= whole * (1 + 1e-9) for device in range(schedule.devices))
    slower = list(seconds)
    slower[data.draw(st.integers(0, len(seconds) - 1))] *= 1.5
    assert whole <= schedule.makespan(slower) * (1 + 1e-12)
    assert schedule.makespan([2 * own for own in seconds]) == pytest.approx(2 * whole)


@QUICK
@given(timed())
def test_everything_ends_by_its_latest_end_and_something_has_no_slack(
    case: tuple[Schedule, list[float]],
):
    schedule, seconds = case
    starts = schedule.earliest_starts(seconds)
    ends = schedule.latest_ends(seconds, schedule.makespan(seconds))
    slack = [e - s - own for s, e, own in zip(starts, ends, seconds, strict=True)]
    assert min(slack) == pytest.approx(0.0, abs=1e-9)


@QUICK
@given(st.integers(1, 6), st.integers(1, 10))
def test_equal_stages_take_the_time_that_the_papers_give(stages: int, microbatches: int):
    """(m + p - 1)(F + B) for GPipe and 1F1B (Narayanan et al., SC'21, section 2.2)."""
    for schedule in (gpipe(stages, microbatches), one_f_one_b(stages, microbatches)):
        seconds = seconds_by_phase(schedule, forward=1.0, backward=2.0)
        assert schedule.makespan(seconds) == pytest.approx((microbatches + stages - 1) * 3.0)


@QUICK
@given(st.integers(2, 5), st.integers(1, 3), st.integers(2, 3))
def test_interleaving_divides_the_bubble(devices: int, rounds: int, virtual: int):
    schedule = interleaved(devices, devices * rounds, virtual)
    seconds = seconds_by_phase(schedule, forward=1.0 / virtual, backward=2.0 / virtual)
    bubble = schedule.makespan(seconds) - devices * rounds * 3.0
    assert bubble == pytest.approx((devices - 1) * 3.0 / virtual)


@QUICK
@given(st.integers(2, 6), st.integers(0, 6))
def test_zero_bubble_leaves_a_third_of_the_bubble(stages: int, more: int):
    """(p - 1)(F + B - W) instead of (p - 1)(F + B + W) (Qi et al., ICLR'24, table 2)."""
    schedule = zero_bubble(stages, stages + more)
    seconds = seconds_by_phase(schedule, forward=1, backward_input=1, backward_weight=1)
    assert schedule.makespan(seconds) - 3 * (stages + more) == pytest.approx(stages - 1)


@QUICK
@given(st.integers(1, 6), st.integers(1, 10), st.sampled_from([one_f_one_b, zero_bubble]))
def test_no_stage_keeps_more_activations_than_stages_follow_it(stages, microbatches, make):
    schedule = make(stages, microbatches)
    for stage in range(stages):
        held = most = 0
        for each in schedule.operations:
            if each.stage == stage:
                held += {"forward": 1, "backward": -1, "backward_input": -1}.get(each.phase, 0)
                most = max(most, held)
        assert most == min(stages - stage, microbatches)


def test_one_virtual_stage_per_device_is_not_interleaved_at_all():
    assert interleaved(4, 8, 1) == one_f_one_b(4, 8)
    assert single_stage(3) == one_f_one_b(1, 3)


def test_transfers_delay_only_what_crosses_devices():
    schedule = with_transfers(gpipe(2, 1))
    sent = [each for each in schedule.operations if each.device == -1]
    assert sent == [Operation(-1, 0, "send_forward", 0), Operation(-1, 1, "send_backward", 0)]
    lasts = {"forward": 1.0, "backward": 2.0, "send_forward": 0.25, "send_backward": 0.5}
    assert schedule.makespan(seconds_by_phase(schedule, **lasts)) == pytest.approx(6.75)
    assert with_transfers(schedule) == schedule


def test_the_tail_comes_once_per_device_after_everything():
    schedule = with_tail(interleaved(2, 4, 2))
    tails = [each for each in schedule.operations if each.phase == "tail"]
    assert tails == [Operation(0, 0, "tail", -1), Operation(1, 1, "tail", -1)]
    without = [0.0 if each.phase == "tail" else 1.0 for each in schedule.operations]
    with_it = [5.0 if each.phase == "tail" else 1.0 for each in schedule.operations]
    assert schedule.makespan(with_it) == schedule.makespan(without) + 5.0
    assert with_tail(schedule) == schedule


def sharded_seconds(schedule: Schedule, compute: float, link: float) -> float:
    return schedule.makespan([link if o.device < 0 else compute for o in schedule.operations])


def test_a_sharded_step_hides_collectives_that_are_shorter_than_computing():
    schedule = sharded(layers=4)
    # The first gather and the last reduction cannot hide.
    assert sharded_seconds(schedule, compute=1.0, link=0.3) == pytest.approx(8 + 2 * 0.3)
    without = sharded(layers=4, prefetch=0)
    assert sharded_seconds(without, compute=1.0, link=0.3) > 8 + 2 * 0.3 + 1.0
    # Where the link is the bottleneck, it sets the time: 4 + 3 gathers and 4 reductions.
    assert sharded_seconds(schedule, compute=0.01, link=1.0) == pytest.approx(11, rel=0.01)


def test_unsharded_backwards_need_no_second_gather():
    phases = Counter(o.phase for o in sharded(3, reshard_after_forward=False).operations)
    assert phases["gather_forward"] == 3
    assert phases["gather_backward"] == 0
    assert Counter(o.phase for o in sharded(3).operations)["gather_backward"] == 2


def test_the_tail_of_a_sharded_step_waits_for_its_gradients():
    schedule = with_tail(sharded(2, 2))
    lasts = [{"reduce_scatter": 7.0, "tail": 1.0}.get(o.phase, 0.1) for o in schedule.operations]
    assert schedule.makespan(lasts) > 4 * 7.0 + 1.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: one_f_one_b(0, 4), "stages = 0 is below 1"),
        (lambda: zero_bubble(4, 0), "microbatches = 0 is below 1"),
        (lambda: interleaved(4, 6, 2), "microbatches = 6 is not a multiple of devices = 4"),
        (lambda: sharded(2, prefetch=-1), "prefetch = -1 is below 0"),
        (lambda: linked([]), "stages must be numbered"),
    ],
)
def test_impossible_counts_are_refused(make, words: str):
    with pytest.raises(EnergyError, match=words):
        make()


def work(stage: int, *names: str) -> list[Action]:
    phases = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
    return [Action(stage, phases[name[0]], int(name[1:])) for name in names]


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ([work(0, "F0", "F1", "B0", "B1"), work(1, "F0", "B0")], "stage 1 runs 1 micro-batches"),
        ([work(0, "F0", "B0", "B0")], "2 x backward"),
        ([work(0, "F0", "I0")], "one backward_input and one backward_weight"),
        ([work(0, "F0", "B0"), work(0, "F1", "B1")], "stage 0 runs on device 0 and on device 1"),
        ([work(1, "F0", "B0")], "without gaps"),
        ([work(0, "B0", "F0")], "circle"),
        # The last stage may not go backward through what it has not gone forward through.
        ([work(0, "F0", "F1", "B0", "B1"), work(1, "F1", "B0", "F0", "B1")], "circle"),
    ],
)
def test_orders_that_are_no_step_are_refused(orders: list[list[Action]], words: str):
    with pytest.raises(EnergyError, match=words):
        linked(orders)


@QUICK
@given(timed())
def test_every_schedule_that_is_built_here_passes_the_check(step):
    schedule, _ = step
    schedule.check()
    sharded(3, 2).check()


FORWARD, BACKWARD = Operation(0, 0, "forward", 0), Operation(0, 0, "backward", 0)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (
            Schedule((FORWARD, BACKWARD), (), 1),
            r"device 0 would run operations 0 \(forward 0 of stage 0\) and 1 .* at once: say by an",
        ),
        (Schedule((Operation(5, 0, "forward", 0),), (), 1), "is on device 5, but there are 1"),
        (Schedule((FORWARD, BACKWARD), ((0, 2),), 1), r"edge \(0, 2\) names an operation that is"),
        (Schedule((FORWARD, BACKWARD), ((0, 1), (-2, 1)), 1), r"edge \(-2, 1\) names"),
        (Schedule((FORWARD, BACKWARD), ((0, 1), (1, 0)), 1), "circle"),
    ],
)
def test_what_is_no_step_is_refused(schedule: Schedule, words: str):
    with pytest.raises(EnergyError, match=words):
        schedule.check()


def test_the_order_of_a_device_may_be_given_by_way_of_another():
    other = Operation(1, 1, "forward", 0)
    Schedule((FORWARD, other, BACKWARD), ((0, 1), (1, 2)), 2).check()
    with pytest.raises(EnergyError, match="device 0 would run operations 0"):
        Schedule((FORWARD, other, BACKWARD), ((0, 1),), 2).check()


def test_transfers_may_overlap():
    links = tuple(Operation(-1, 0, "send_forward", batch) for batch in range(2))
    Schedule((FORWARD, *links), ((0, 1), (0, 2)), 1).check()
