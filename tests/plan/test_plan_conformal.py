"""Intervals cover what they promise, in every group, and say when they reach beyond their data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import PlanError
from outlast.plan.conformal import OTHERS, Conformal, Support, support_of
from outlast.plan.conformal import conformal as quantiles_of


def conformal(residuals: np.ndarray, deviations: np.ndarray, groups: list[str]) -> Conformal:
    return quantiles_of(residuals, deviations, groups, np.zeros(len(groups)))


GROUPS = {"a": (60, 0.03), "b": (40, 0.12), "c": (12, 0.06), "d": (5, 0.2), "e": (100, 0.05)}


def draw(random, heavy=True, counts=None):
    """Residuals of groups of several sizes and spreads, with heavy tails, and deviations."""
    groups, residuals, deviations = [], [], []
    for name, (count, spread) in GROUPS.items():
        count = counts or count
        deviation = spread * random.uniform(0.2, 0.8, count)
        scale = np.hypot(spread, deviation)
        noise = random.standard_t(4, count) if heavy else random.normal(size=count)
        groups += [name] * count
        residuals.append(scale * noise)
        deviations.append(deviation)
    return np.concatenate(residuals), np.concatenate(deviations), groups


@pytest.mark.parametrize("heavy", [False, True])
def test_plan_conformal_coverage_overall_and_in_every_group(heavy):
    random = np.random.default_rng(5)
    hits = {name: [] for name in GROUPS}
    for _ in range(60):
        found = conformal(*draw(random, heavy))
        residuals, deviations, groups = draw(random, heavy, counts=20)
        inside = np.abs(residuals) <= found.half_widths(deviations, groups, np.zeros(len(groups)))
        for name in GROUPS:
            hits[name].append(float(inside[np.array(groups) == name].mean()))
    shares = {name: np.mean(each) for name, each in hits.items()}
    weights = {name: count for name, (count, _) in GROUPS.items()}
    overall = sum(shares[n] * weights[n] for n in GROUPS) / sum(weights.values())
    assert 0.87 <= overall <= 0.93
    assert min(shares.values()) >= 0.80


def test_plan_conformal_quantile_is_the_corrected_rank():
    # One group of equal difficulty: the rank is ceil(20 x 0.9) = 18 of 19, and leaving one out of
    # the group's mean moves it by little.
    residuals = np.arange(1, 20) / 100
    found = conformal(residuals, np.zeros(19), ["g"] * 19)
    width = found.half_widths(np.zeros(1), ["g"], np.zeros(1))[0]
    assert width == pytest.approx(0.18, rel=0.06)


def test_plan_conformal_hard_groups_get_wider_intervals_and_small_ones_lean_on_all():
    random = np.random.default_rng(1)
    names = ["easy"] * 80 + ["hard"] * 80 + ["tiny"] * 2
    spread = np.array([0.02] * 80 + [0.2] * 80 + [0.02] * 2)
    found = conformal(spread * random.normal(size=162), np.zeros(162), names)
    assert found.quantiles["hard"] > 5 * found.quantiles["easy"]
    assert found.quantiles["tiny"] > 1.5 * found.quantiles["easy"]
    assert found.quantiles[OTHERS] >= found.quantiles["tiny"]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=30),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 3),
)
def test_plan_conformal_widths_grow_with_difficulty(residuals, deviation, more, distance):
    found = conformal(np.array(residuals), np.full(len(residuals), 0.1), ["g"] * len(residuals))
    narrow = found.half_widths(np.array([deviation]), ["g"], np.zeros(1))[0]
    wide = found.half_widths(np.array([deviation + more]), ["g"], np.array([distance]))[0]
    assert np.isfinite(wide)
    assert 0 <= narrow <= wide


def test_plan_conformal_few_rows_stretch_the_largest():
    found = conformal(np.array([0.1, -0.1]), np.zeros(2), ["g", "g"])
    width = found.half_widths(np.zeros(1), ["g"], np.zeros(1))[0]
    assert width > 0.15


def test_plan_conformal_support_says_what_is_outside_and_by_how_much():
    support = support_of({"devices": np.array([2.0, 512.0]), "expert": np.array([0.0, 0.0])})
    inside = {"devices": 512.0, "expert": 0.0, "unheard": 9.0}
    assert support.outside(inside) == ()
    (phrase,) = support.outside({"devices": 4096.0, "expert": 0.0})
    assert phrase == "devices = 4096 is 8 times above the calibrated 2 to 512"
    assert "2 times below" in support.outside({"devices": 1.0})[0]
    assert len(support.outside({"devices": 1.0, "expert": 8.0})) == 2
    away = support.distances({"devices": np.array([512.0, 1024.0, 1.0, 8.0])})
    assert away == pytest.approx([0.0, np.log(2), np.log(2), 0.0])
    assert support.distances({"expert": np.array([0.0, 4.0])}) == pytest.approx([0.0, 1.0])


def test_plan_conformal_support_refuses():
    with pytest.raises(PlanError, match="feature devices"):
        support_of({"devices": np.array([-1.0])})
    with pytest.raises(PlanError, match="support of layers"):
        Support({"layers": (5.0, 2.0)})


def test_one_probe_of_few_that_strays_does_not_widen_all_intervals():
    residuals = np.array([0.1, -0.1, 0.12, -0.08, 0.1, -0.1, 0.09, -0.12, 0.1, 0.11, -0.9])
    found = conformal(residuals, np.zeros(11), ["mine"] * 11)
    width = found.half_widths(np.zeros(1), ["mine"], np.zeros(1))[0]
    # Student's quantile at 15 degrees is 1.753, and the rows' own scale 1.4826 * 0.1.
    assert width == pytest.approx(1.753 * np.sqrt((4 * 0.1**2 + 11 * 0.14826**2) / 15), rel=1e-3)
    other = found.half_widths(np.zeros(1), ["yours"], np.zeros(1))[0]
    assert other == pytest.approx(np.sqrt(2.0) * width)


def test_three_rows_that_lie_close_say_too_little_for_a_narrow_interval():
    found = conformal(np.array([0.001, -0.002, 0.001]), np.zeros(3), ["mine"] * 3)
    assert 0.1 < found.half_widths(np.zeros(1), ["mine"], np.zeros(1))[0] < 0.2
