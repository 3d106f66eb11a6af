"""Static schemes: closed forms, brute force at few workers, and the published ratios."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late_workers import Additive, ChunkCosts, Combined, FailStop, Fixed, Pareto

from outlast.coding.delays import DelayModel, Delays, Markov, ShiftedExponential, Slow, sample
from outlast.coding.graph import GraphCode
from outlast.coding.simulate import (
    deadline,
    drop_slowest,
    erasure_head,
    fixed_load,
    fluid,
    graph_code,
    rebalance,
    repetition,
    repetition_on_demand,
    wait_all,
)
from outlast.errors import CodingError

MIXED = Combined((Pareto(1.5), Additive(0.4), ChunkCosts(0.3)))
SEEDS = st.integers(0, 10_000)


@pytest.mark.parametrize(
    ("model", "ratios", "tolerance"),
    [
        # d = 2 and d = 4 of fixed load, repetition, repetition on demand; 5 % dropped.
        (ShiftedExponential(0.1), (1.88, 3.55, 1.58, 2.79, 1.00, 1.00, 0.81), 0.01),
        (ShiftedExponential(0.5), (1.75, 3.09, 1.16, 1.57, 0.83, 0.81, 0.61), 0.025),
        (Slow(0.05, 10.0), (1.97, 3.86, 0.61, 0.39, 0.39, 0.24, 0.45), 0.15),
        (Additive(0.5), (1.12, 1.52, 0.83, 1.14, 0.74, 0.74, 0.62), 0.02),
        # The mean of the slowest of 240 has infinite variance, and all ratios share its error.
        (Pareto(2.0), (0.99, 1.23, 0.30, 0.26, 0.24, 0.17, 0.16), 0.2),
    ],
    ids=["exp 0.1", "exp 0.5", "slow", "additive", "pareto"],
)
def test_mean_steps_stand_in_the_published_ratios_to_training_without_a_code(
    model: DelayModel, ratios: tuple[float, ...], tolerance: float
) -> None:
    delays = sample(model, 1500, 240, seed=1)
    steps = [scheme(delays, 1.0, d) for scheme in SCHEMES for d in (2, 4)]
    steps.append(drop_slowest(delays, 1.0, 0.05))
    plain = wait_all(delays, 1.0).seconds.mean()
    assert [each.seconds.mean() / plain for each in steps] == pytest.approx(ratios, rel=tolerance)


SCHEMES = (fixed_load, repetition, repetition_on_demand)


@pytest.mark.parametrize("model", [MIXED, Combined((MIXED, FailStop(0.2))), Slow(0.3, 5.0)])
@settings(max_examples=25, deadline=None)
@given(st.sampled_from([(2, 2), (4, 2), (6, 3), (6, 6), (5, 1)]), SEEDS)
def test_schemes_end_when_their_rules_say(
    model: DelayModel, size: tuple[int, int], seed: int
) -> None:
    workers, copies = size
    delays = sample(model, 1, workers, seed=seed)
    start, slow, cost = (each[0].tolist() for each in delays.flat())
    own = [start[w] + slow[w] * cost[w] for w in range(workers)]
    assert wait_all(delays, 1.0).seconds[0, 0] == pytest.approx(max(own))
    window = [sum(cost[(w + i) % workers] for i in range(copies)) for w in range(workers)]
    ends = sorted(start[w] + slow[w] * window[w] for w in range(workers))
    assert fixed_load(delays, 1.0, copies).seconds[0, 0] == pytest.approx(ends[workers - copies])
    groups = [range(g, g + copies) for g in range(0, workers, copies)]
    first = [min(start[w] + slow[w] * sum(cost[m] for m in g) for w in g) for g in groups]
    assert repetition(delays, 1.0, copies).seconds[0, 0] == pytest.approx(max(first))
    share_ends = [math.inf] * workers
    for group in groups:
        for w in group:
            clock = start[w]
            for place in range(copies):
                share = group[(w - group[0] + place) % copies]
                clock += slow[w] * cost[share]
                share_ends[share] = min(share_ends[share], clock)
    on_demand = repetition_on_demand(delays, 1.0, copies)
    assert on_demand.seconds[0, 0] == pytest.approx(max(share_ends))


@pytest.mark.parametrize("model", [MIXED, Slow(0.2, 10.0), Markov(0.2, 0.9, 3.0), Additive(1.0)])
@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_nothing_beats_work_that_is_divided_at_will(model: DelayModel, seed: int) -> None:
    delays = sample(model, 10, 12, steps=3, seed=seed)
    least = fluid(delays, 1.0).seconds * (1.0 - 1e-9)
    plain = wait_all(delays, 1.0).seconds
    assert np.all(least <= plain)
    assert np.all(least <= rebalance(delays, 1.0, 4).seconds)
    for copies in (1, 2, 3):
        on_demand = repetition_on_demand(delays, 1.0, copies).seconds
        assert np.all(least <= on_demand)
        assert np.all(on_demand <= plain * (1.0 + 1e-9))


def test_work_divided_at_will_by_hand() -> None:
    # Rates 1 and 1/2 from the start, 1 more after a second: 1.5 of the 3 shares are done at 1 s.
    delays = Delays(
        np.array([[[0.0, 1.0, 0.0]]]), np.array([[[1.0, 1.0, 2.0]]]), np.ones((1, 1, 3))
    )
    assert fluid(delays, 1.0).seconds[0, 0] == pytest.approx(1.6)
    delays.start_seconds[0, 0, 1] = math.inf
    assert fluid(delays, 1.0).seconds[0, 0] == pytest.approx(2.0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.2, 20.0), min_size=1, max_size=4), st.integers(1, 3))
def test_rebalanced_loads_are_the_best_whole_ones_for_the_speeds_of_the_step_before(
    slowdowns: list[float], chunks: int
) -> None:
    workers = len(slowdowns)
    delays = sample(Fixed(tuple(slowdowns)), 1, workers, steps=2)
    total = chunks * workers
    best = min(
        max(load * slow / chunks for load, slow in zip(loads, slowdowns, strict=True))
        for loads in itertools.product(range(total + 1), repeat=workers)
        if sum(loads) == total
    )
    seconds = rebalance(delays, 1.0, chunks).seconds[0]
    assert seconds[0] == pytest.approx(max(slowdowns))
    assert seconds[1] == pytest.approx(best)


def test_rebalancing_deals_as_many_chunks_as_there_are() -> None:
    # At the best makespan of 2 s six chunks could be done, but there are only four.
    slowdown = np.array([[[2.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]])
    delays = Delays(np.zeros(slowdown.shape), slowdown, np.ones(slowdown.shape))
    assert rebalance(delays, 1.0, 1).seconds[0].tolist() == [2.0, 1.0]


def test_rebalancing_helps_where_slowness_lasts_and_hurts_where_it_does_not() -> None:
    lasting = sample(Markov(0.1, 0.98, 4.0), 200, 16, steps=10, seed=2)
    passing = sample(Markov(0.1, 0.1, 4.0), 200, 16, steps=10, seed=2)
    for delays, helps in ((lasting, True), (passing, False)):
        moved = rebalance(delays, 1.0, 8).seconds[:, 1:].mean()
        assert (moved < wait_all(delays, 1.0).seconds[:, 1:].mean()) == helps


def test_a_worker_that_was_dead_gets_no_work_in_the_next_step() -> None:
    starts = np.zeros((1, 3, 4))
    starts[0, 0, 2] = starts[0, 1, 2] = math.inf
    delays = Delays(starts, np.ones(starts.shape), np.ones(starts.shape))
    seconds = rebalance(delays, 1.0, 6).seconds[0]
    assert seconds.tolist() == [math.inf, pytest.approx(8 / 6), pytest.approx(8 / 6)]


def test_costs_that_stay_with_the_chunk_are_evened_out() -> None:
    delays = sample(ChunkCosts(0.4), 50, 8, seed=1)
    moved = rebalance(delays, 1.0, 8).seconds
    assert moved.ravel() == pytest.approx(delays.chunk_cost.mean(axis=-1).ravel())
    assert moved.mean() < 0.7 * wait_all(delays, 1.0).seconds.mean()


def test_dropping_waits_for_the_others_and_keeps_their_share() -> None:
    delays = sample(Fixed((1.0, 5.0, 2.0, 9.0, 3.0)), 1, 5)
    for drop, seconds, kept in (
        (0.0, 9.0, 1.0),
        (0.2, 5.0, 0.8),
        (0.39, 5.0, 0.8),
        (0.4, 3.0, 0.6),
    ):
        steps = drop_slowest(delays, 1.0, drop)
        assert steps.seconds[0, 0] == seconds
        assert steps.kept[0, 0] == pytest.approx(kept)


def test_at_a_deadline_each_keeps_what_it_has_finished() -> None:
    starts = np.array([[[0.0, 0.5, 0.0, math.inf]]])
    delays = Delays(starts, np.array([[[1.0, 1.0, 8.0, 1.0]]]), np.ones(starts.shape))
    steps = deadline(delays, 1.0, 4, 1.0)
    assert steps.kept[0, 0] == pytest.approx((4 + 2 + 0 + 0) / 16)
    assert steps.seconds[0, 0] == 1.0
    late = deadline(delays, 1.0, 4, 100.0)
    assert late.kept[0, 0] == pytest.approx(12 / 16)
    assert late.seconds[0, 0] == 100.0
    alive = deadline(sample(Fixed((1.0, 2.0)), 1, 2), 1.0, 4, 100.0)
    assert (alive.seconds[0, 0], alive.kept[0, 0]) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (lambda delays: repetition(delays, 1.0, 4), "3 would"),
        (lambda delays: fixed_load(delays, 1.0, 7), "copies = 7"),
        (lambda delays: drop_slowest(delays, 1.0, 1.0), "drop = 1.0"),
    ],
)
def test_impossible_settings_are_refused_with_what_would_do(refused, named: str) -> None:
    with pytest.raises(CodingError, match=named):
        refused(sample(Slow(0.1, 2.0), 1, 6))


def test_an_erasure_head_goes_on_without_the_slowest_groups() -> None:
    delays = Delays(np.zeros((1, 1, 8)), np.ones((1, 1, 8)), np.ones((1, 1, 8)))
    delays.slowdown[0, 0] = [9.0, 8.0, 1.0, 5.0, 3.0, 2.0, 1.0, 1.0]
    steps = erasure_head(delays, 1.0, 2, 0.25)
    assert steps.seconds.item() == pytest.approx(2 * 2.0)
    assert steps.kept.item() == pytest.approx(0.75)
    whole = erasure_head(delays, 1.0, 2, 0.0)
    assert whole.seconds.item() == repetition(delays, 1.0, 2).seconds.item()


def test_a_graph_code_keeps_what_its_certificate_says_at_the_deadline() -> None:
    code = GraphCode.random_regular(workers=12, degree=4, seed=1)
    delays = sample(Slow(0.5, 3.0), 20, 12, seed=4)
    steps = graph_code(delays, 1.0, code, 5.0)
    for draw in range(20):
        alive = delays.slowdown[draw, 0] == 1.0
        certificate = code.decode(alive).certificate
        expected = 1.0 / (1.0 + certificate.centred / code.chunks)
        assert steps.kept[draw, 0] == pytest.approx(expected, abs=1e-9)
        assert steps.seconds[draw, 0] == (4.0 if alive.all() else 5.0)
    patient = graph_code(delays, 1.0, code, math.inf)
    assert (patient.kept == 1.0).all()
    odd = GraphCode.random_regular(workers=12, degree=3)
    with pytest.raises(CodingError, match="graph of even degree"):
        graph_code(sample(Slow(0.5, 3.0), 1, 12), 1.0, odd, 5.0)
    with pytest.raises(CodingError, match="but the code has 12"):
        graph_code(sample(Slow(0.5, 3.0), 1, 10), 1.0, odd, 5.0)
