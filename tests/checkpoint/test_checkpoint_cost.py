"""The checkpoint formulas against a simulation, their limits and their laws."""

import itertools
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.cost import (
    Failures,
    SaveCost,
    Sizes,
    budget_interval_seconds,
    choose_interval,
    choose_tiers,
    optimal_interval_seconds,
    save_seconds,
    waste_fraction,
)
from outlast.errors import CheckpointError

SYNCHRONOUS = SaveCost(blocked_seconds=4.0)
ASYNCHRONOUS = SaveCost(blocked_seconds=1.0, write_seconds=30.0, slowdown=0.1)

save_costs = st.builds(
    SaveCost,
    blocked_seconds=st.floats(0.001, 100.0),
    write_seconds=st.floats(0.0, 300.0),
    slowdown=st.floats(0.0, 0.5),
)
mtbfs = st.floats(600.0, 1e8)


def young_interval_seconds(overhead_seconds: float, mtbf_seconds: float) -> float:
    """Work between two saves, first order (Young 1974, CACM 17(9), p. 531)."""
    return math.sqrt(2.0 * overhead_seconds * mtbf_seconds)


def daly_interval_seconds(overhead_seconds: float, mtbf_seconds: float) -> float:
    """Work between two synchronous saves, higher order (Daly 2006, FGCS 22, eq. 37)."""
    half = overhead_seconds / (2.0 * mtbf_seconds)
    if half >= 1.0:
        return mtbf_seconds
    young = young_interval_seconds(overhead_seconds, mtbf_seconds)
    return young * (1.0 + math.sqrt(half) / 3.0 + half / 9.0) - overhead_seconds


class Machine:
    """Wall time under failures that strike at exponential gaps, during recoveries too."""

    def __init__(self, failures: Failures, seed: int) -> None:
        self.failures = failures
        self.random = random.Random(seed)
        self.now = 0.0
        self.fails_at = self.random.expovariate(failures.per_second)

    def survives(self, seconds: float) -> bool:
        """Let `seconds` pass, or the time until a failure and the way back from it."""
        if self.now + seconds <= self.fails_at:
            self.now += seconds
            return True
        self.now = self.fails_at
        self.fails_at += self.random.expovariate(self.failures.per_second)
        while not self.survives(self.failures.recovery_seconds):
            pass
        return False


def simulated_waste(interval: float, save: SaveCost, failures: Failures, seed: int = 0) -> float:
    """The share of wall time without progress over 6000 intervals, event by event."""
    machine = Machine(failures, seed)
    work = interval - save.overhead_seconds
    latency = save.write_seconds / (1.0 + save.slowdown)
    durable, intervals, since_copy = 0, 6000, 0.0
    while durable < intervals:
        if (
            machine.survives(work - since_copy)
            and machine.survives(save.blocked_seconds)
            and machine.survives(save.write_seconds)
        ):
            durable += 1
            since_copy = latency
        else:
            since_copy = 0.0
    return 1.0 - intervals * work / machine.now


@pytest.mark.parametrize("save", [SYNCHRONOUS, ASYNCHRONOUS])
@pytest.mark.parametrize("interval", [40.0, 100.0, 400.0])
def test_the_waste_agrees_with_a_simulation(save: SaveCost, interval: float) -> None:
    failures = Failures.every(1000.0, restart_seconds=60.0, restore_seconds=15.0)
    wastes = [simulated_waste(interval, save, failures, seed) for seed in range(3)]
    assert np.mean(wastes) == pytest.approx(waste_fraction(interval, save, failures), abs=0.01)


@pytest.mark.parametrize("save", [SYNCHRONOUS, ASYNCHRONOUS])
def test_the_optimum_agrees_with_the_simulated_one(save: SaveCost) -> None:
    failures = Failures.every(1000.0, restart_seconds=60.0)
    best = optimal_interval_seconds(save, failures)
    logarithms = np.linspace(-1.0, 1.0, 9)
    wastes = [
        np.mean([simulated_waste(best * math.exp(x), save, failures, seed) for seed in range(2)])
        for x in logarithms
    ]
    fit = np.polynomial.Polynomial.fit(logarithms, wastes, 4)
    fine = np.linspace(-1.0, 1.0, 401)
    simulated = best * math.exp(fine[np.argmin(fit(fine))])
    assert simulated == pytest.approx(best, rel=0.15)


def test_the_waste_is_that_of_daly_for_synchronous_saves() -> None:
    mtbf, restart, save, work, interval = 900.0, 30.0, 5.0, 7200.0, 65.0
    daly = mtbf * math.exp(restart / mtbf) * math.expm1(interval / mtbf) * work / (interval - save)
    failures = Failures.every(mtbf, restart_seconds=restart)
    waste = waste_fraction(interval, SaveCost(save), failures)
    assert work / (1.0 - waste) == pytest.approx(daly)


@given(save=save_costs, mtbf=mtbfs, factor=st.floats(0.2, 5.0))
def test_no_other_interval_wastes_less(save: SaveCost, mtbf: float, factor: float) -> None:
    failures = Failures.every(mtbf, restart_seconds=100.0)
    chosen = choose_interval(save, failures, budget=1e9)
    other = max(chosen.seconds * factor, save.durable_seconds)
    assert chosen.waste <= waste_fraction(other, save, failures) + 1e-12
    assert 0.0 <= chosen.waste <= 1.0


@given(save=save_costs, mtbf=mtbfs, more=st.floats(1.01, 100.0))
def test_more_failures_shorten_and_costlier_saves_lengthen_the_interval(
    save: SaveCost, mtbf: float, more: float
) -> None:
    interval = optimal_interval_seconds(save, Failures.every(mtbf))
    assert optimal_interval_seconds(save, Failures.every(mtbf / more)) < interval
    costlier = SaveCost(save.blocked_seconds * more, save.write_seconds, save.slowdown)
    assert optimal_interval_seconds(costlier, Failures.every(mtbf)) > interval


@given(save=save_costs, mtbf=mtbfs, latency=st.floats(0.0, 1000.0))
def test_the_optimum_ignores_restarts_and_latency_but_the_waste_does_not(
    save: SaveCost, mtbf: float, latency: float
) -> None:
    slow = Failures.every(mtbf, restart_seconds=latency)
    best = optimal_interval_seconds(save, Failures.every(mtbf))
    assert optimal_interval_seconds(save, slow) == best
    hidden = SaveCost(save.overhead_seconds, write_seconds=latency)
    assert optimal_interval_seconds(hidden, slow) == pytest.approx(best)
    interval = best + save.durable_seconds + hidden.durable_seconds
    exact = 1.0 - waste_fraction(interval, SaveCost(save.overhead_seconds), slow)
    delayed = 1.0 - waste_fraction(interval, hidden, slow)
    assert delayed == pytest.approx(exact * math.exp(-latency / mtbf))


@given(mtbf=mtbfs, ratio=st.floats(1e-9, 1e-4))
def test_daly_and_the_exact_optimum_tend_to_young(mtbf: float, ratio: float) -> None:
    overhead = ratio * mtbf
    young = young_interval_seconds(overhead, mtbf)
    assert daly_interval_seconds(overhead, mtbf) == pytest.approx(young, rel=math.sqrt(ratio))
    exact = optimal_interval_seconds(SaveCost(overhead), Failures.every(mtbf)) - overhead
    assert exact == pytest.approx(young, rel=math.sqrt(ratio))


@given(mtbf=mtbfs, ratio=st.floats(1e-6, 0.5))
def test_daly_is_nearer_the_exact_optimum_than_young(mtbf: float, ratio: float) -> None:
    overhead = ratio * mtbf
    exact = optimal_interval_seconds(SaveCost(overhead), Failures.every(mtbf)) - overhead
    daly_error = abs(daly_interval_seconds(overhead, mtbf) - exact)
    assert daly_error < abs(young_interval_seconds(overhead, mtbf) - exact)
    assert daly_error < 0.01 * exact


def test_saves_that_outlast_the_failures_are_capped_at_the_mtbf() -> None:
    assert daly_interval_seconds(3000.0, 1000.0) == 1000.0
    exact = optimal_interval_seconds(SaveCost(30_000.0), Failures.every(1000.0))
    assert exact - 30_000.0 == pytest.approx(1000.0)


@given(save=save_costs, mtbf=mtbfs, budget=st.floats(0.001, 0.5))
def test_the_budget_is_kept_and_named_when_it_binds(
    save: SaveCost, mtbf: float, budget: float
) -> None:
    chosen = choose_interval(save, Failures.every(mtbf), budget=budget)
    work = chosen.seconds - save.overhead_seconds
    assert save.overhead_seconds <= budget * work * (1.0 + 1e-9)
    free = optimal_interval_seconds(save, Failures.every(mtbf))
    floors = {
        "waste": free,
        "budget": budget_interval_seconds(save, budget),
        "write": save.durable_seconds,
    }
    assert chosen.seconds == floors[chosen.rule] == max(floors.values())


def test_the_longest_interval_yields_to_the_budget() -> None:
    never = Failures(0.0)
    assert choose_interval(SYNCHRONOUS, never).seconds == math.inf
    capped = choose_interval(SYNCHRONOUS, never, longest_seconds=600.0)
    assert (capped.seconds, capped.rule) == (600.0, "longest")
    assert capped.waste == pytest.approx(4.0 / 600.0)
    crowded = choose_interval(SYNCHRONOUS, never, longest_seconds=10.0)
    assert crowded.rule == "budget"
    assert crowded.seconds == pytest.approx(4.0 / 0.035 + 4.0)


def test_a_free_save_is_made_as_often_as_it_can_be_written() -> None:
    chosen = choose_interval(SaveCost(0.0, write_seconds=7.0), Failures.every(1e4))
    assert (chosen.seconds, chosen.rule) == (7.0, "write")
    immediate = choose_interval(SaveCost(0.0), Failures.every(1e4, restart_seconds=100.0))
    assert immediate.seconds == 0.0
    assert immediate.waste == pytest.approx(1.0 - math.exp(-0.01))


def test_a_run_that_fails_in_every_interval_never_ends() -> None:
    assert waste_fraction(1e6, SYNCHRONOUS, Failures.every(1.0)) == 1.0
    assert waste_fraction(math.inf, SYNCHRONOUS, Failures.every(1e9)) == 1.0


@given(save=save_costs, mtbf=mtbfs)
def test_one_tier_is_youngs(save: SaveCost, mtbf: float) -> None:
    tiers = choose_tiers([(save, Failures.every(mtbf))])
    young = young_interval_seconds(save.overhead_seconds, mtbf)
    assert tiers.every == (1,)
    assert tiers.base_seconds == pytest.approx(max(young, save.durable_seconds))


def tiers_waste(
    base: float, every: tuple[int, ...], tiers: list[tuple[SaveCost, Failures]]
) -> float:
    """The stated first-order waste when every tier is used."""
    return sum(
        save.overhead_seconds / (n * base)
        + failures.per_second * (n * base / 2.0 + failures.recovery_seconds + save.latency_seconds)
        for n, (save, failures) in zip(every, tiers, strict=True)
    )


def test_tiers_are_as_good_as_the_best_of_all_integers() -> None:
    tiers = [
        (SaveCost(0.5), Failures.every(5e3, restore_seconds=2.0)),
        (SaveCost(3.0), Failures.every(6e4, restore_seconds=20.0)),
        (SaveCost(40.0), Failures.every(8e5, restore_seconds=90.0)),
    ]
    chosen = choose_tiers(tiers)
    assert chosen.waste == pytest.approx(tiers_waste(chosen.base_seconds, chosen.every, tiers))
    assert chosen.every[2] % chosen.every[1] == 0 < chosen.every[1]
    bases = np.geomspace(chosen.base_seconds / 3.0, chosen.base_seconds * 3.0, 25)
    best = min(
        tiers_waste(base, (1, middle, last), tiers)
        for base, middle, last in itertools.product(bases, range(1, 20), range(1, 200, 2))
    )
    assert chosen.waste <= best * 1.01
    lower_bound = sum(
        math.sqrt(2.0 * failures.per_second * save.overhead_seconds)
        + failures.per_second * failures.recovery_seconds
        for save, failures in tiers
    )
    assert lower_bound <= chosen.waste <= 1.02 * lower_bound


def test_the_better_neighbour_of_the_real_optimum_is_taken() -> None:
    save = SaveCost(1.0)
    for ratio, every in ((1.99, 2), (2.01, 2), (1.01, 1), (7.9, 8)):
        rare = Failures(1e-4 / ratio**2, restore_seconds=5000.0)
        assert choose_tiers([(save, Failures(1e-4)), (save, rare)]).every == (1, every)


def test_a_tier_is_worth_more_where_it_shortens_the_recovery() -> None:
    rare = Failures(1e-7, restore_seconds=5000.0)
    quick = (SaveCost(20.0), Failures(1e-4, restore_seconds=1.0))
    assert choose_tiers([quick, (SaveCost(19.0), rare)]).every[0] == 1
    slow = (SaveCost(20.0), Failures(1e-4, restore_seconds=5000.0))
    assert choose_tiers([slow, (SaveCost(19.0), rare)]).every[0] == 0


def test_a_tier_that_is_not_worth_its_cost_is_left_out() -> None:
    dear, cheap = SaveCost(20.0), SaveCost(1.0)
    chosen = choose_tiers([(dear, Failures(1e-7)), (cheap, Failures(1e-4))])
    assert chosen.every == (0, 1)
    assert chosen.base_seconds == pytest.approx(young_interval_seconds(1.0, 1.0 / (1e-4 + 1e-7)))


@given(
    overheads=st.lists(st.floats(0.01, 100.0), min_size=2, max_size=4),
    mtbf_list=st.lists(mtbfs, min_size=4, max_size=4),
)
def test_more_tiers_never_waste_more_than_the_safest_alone(
    overheads: list[float], mtbf_list: list[float]
) -> None:
    tiers = [
        (SaveCost(overhead), Failures.every(mtbf))
        for overhead, mtbf in zip(overheads, mtbf_list, strict=False)
    ]
    rate = sum(failures.per_second for _, failures in tiers)
    alone = choose_tiers([(tiers[-1][0], Failures(rate))])
    assert choose_tiers(tiers).waste <= alone.waste * (1.0 + 1e-12)


def test_a_save_takes_the_time_of_its_slower_half() -> None:
    sizes = Sizes(1000.0, full_ratio=2.0)
    assert save_seconds(sizes, 500.0, 100.0) == 5.0
    assert save_seconds(sizes, 100.0, 500.0) == 10.0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: SaveCost(-1.0), "blocked_seconds = -1.0 .* at least 0"),
        (lambda: SaveCost(1.0, slowdown=math.nan), "slowdown = nan"),
        (lambda: Failures(math.inf), "per_second = inf"),
        (lambda: Failures.every(0.0), "mtbf_seconds = 0.0 .* above 0"),
        (lambda: Sizes(-1.0), "state_bytes = -1.0 .* at least 0"),
        (lambda: Sizes(1.0, full_ratio=0.0), "full_ratio = 0.0 .* above 0"),
        (lambda: budget_interval_seconds(SYNCHRONOUS, 0.0), "budget = 0.0 .* above 0"),
        (lambda: waste_fraction(3.0, SYNCHRONOUS, Failures(0.0)), "= 3 .* at least 4"),
        (lambda: choose_interval(SYNCHRONOUS, Failures(0.0), longest_seconds=0.0), "longest_s"),
        (lambda: choose_tiers([]), "tiers has 0 entries: give 1 to 6"),
        (lambda: choose_tiers([(SYNCHRONOUS, Failures(0.0))]), r"tiers\[0\] failures per_second"),
        (lambda: save_seconds(Sizes(1.0), 0.0, 1.0), "encode_bytes_per_s = 0.0"),
    ],
)
def test_a_wrong_number_is_refused_by_name(call, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        call()


def test_the_planner_can_import_it_without_torch() -> None:
    program = "import sys, outlast.checkpoint.cost; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
