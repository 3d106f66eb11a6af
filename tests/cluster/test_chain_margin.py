"""When the last save begins."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outlast.cluster.chain_files import ChainPlan
from outlast.cluster.stopping import END_SECONDS, best_lead_seconds, lead_seconds_of, save_times
from outlast.errors import ClusterError

TIMES = st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=30)


@given(TIMES, st.floats(1.0, 1e6))
def test_a_lead_fits_into_what_is_at_risk(seconds: list[float], at_risk: float) -> None:
    lead = best_lead_seconds(save_times(seconds), at_risk)
    assert 0.0 < lead <= 0.5 * at_risk


@given(TIMES)
def test_more_at_risk_asks_for_no_shorter_lead(seconds: list[float]) -> None:
    times = save_times(seconds)
    leads = [best_lead_seconds(times, at_risk) for at_risk in (1e4, 1e5, 1e6, math.inf)]
    assert leads == sorted(leads) or leads[-1] == pytest.approx(max(leads), rel=1e-6)


def test_the_lead_is_the_best_of_all_leads() -> None:
    """Against a search of every lead by 0.1 s; the bound on missed saves does not matter here."""
    times = save_times([20.0, 25.0, 18.0, 22.0, 30.0, 21.0, 19.0, 24.0])
    at_risk = 20 * 3600.0
    worth = {
        lead / 10: (at_risk - lead / 10) * times.share_within(lead / 10)
        for lead in range(100, 3000)
    }
    best = max(worth, key=lambda lead: worth[lead])
    assert best_lead_seconds(times, at_risk) == pytest.approx(best, abs=0.1)


def test_few_saves_ask_for_more_time_than_many() -> None:
    drawn = random.Random(1)
    many = [drawn.lognormvariate(math.log(20.0), 0.2) for _ in range(200)]
    few = many[:3]
    ratio = best_lead_seconds(save_times(few), 28800.0) / best_lead_seconds(
        save_times(many), 28800.0
    )
    assert 1.1 < ratio < 3.0


def test_a_scattered_file_system_asks_for_more_time() -> None:
    steady = save_times([20.0, 21.0, 19.0, 20.0, 20.5] * 4)
    scattered = save_times([20.0, 60.0, 7.0, 35.0, 12.0] * 4)
    assert best_lead_seconds(scattered, 28800.0) > 2 * best_lead_seconds(steady, 28800.0)


@pytest.mark.parametrize("seconds", [[], [0.0], [1.0, -2.0], [math.inf], [math.nan]])
def test_what_is_no_save_time_is_refused(seconds: list[float]) -> None:
    with pytest.raises(ClusterError, match="above 0 s"):
        save_times(seconds)


def test_the_jobs_own_lead_counts_and_a_hard_end_gets_a_margin() -> None:
    plan = ChainPlan("c", "n", "dependent", (1,), 1, 3600.0, "/", "python", lead_seconds=77.0)
    assert lead_seconds_of(plan, [3.0], at_risk_seconds=3600.0, hard_end=True) == 77.0
    free = ChainPlan("c", "n", "dependent", (1,), 1, 3600.0, "/", "python", save_seconds=10.0)
    soft = lead_seconds_of(free, [], at_risk_seconds=3600.0, hard_end=False)
    hard = lead_seconds_of(free, [], at_risk_seconds=3600.0, hard_end=True)
    assert hard == pytest.approx(soft + END_SECONDS)
    assert soft > 10.0, "an assumed save is no measured one"


@given(TIMES, st.floats(0.01, 1000.0), st.floats(0.5, 1.0 - 1e-7))
def test_save_times_are_log_student(seconds: list[float], within: float, share: float) -> None:
    times = save_times(seconds)
    student = stats.t(times.freedom, times.centre, times.spread)
    assert times.share_within(within) == pytest.approx(student.cdf(math.log(within)), abs=1e-12)
    quantile = math.exp(student.ppf(share))
    assert times.quantile_seconds(share) == pytest.approx(quantile, rel=1e-6)
