"""What users read off loss differences, and the laws that these keep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.hardware.figure import Unavailable
from outlast.plan import loss
from outlast.plan.loss import (
    CHINCHILLA,
    TERMS,
    UNEQUAL,
    coding_error,
    critical_batch_tokens,
    law_parameters,
    loss_differences,
    precision_share,
    rank_share,
    repeated_tokens,
    runs,
)
from outlast.plan.transformer import Transformer

sizes = st.floats(1e7, 1e12)
data = st.floats(1e9, 1e14)
batches = st.floats(1e4, 1e8)
errors = st.floats(0.0, 2.0)
precisions = st.sampled_from(["fp32", "bf16", "fp16", "fp8"])
factors = st.floats(1.0, 50.0)


def loss_difference(run, baseline, row=0):
    return loss_differences(run, baseline).total(row).figure


@st.composite
def any_runs(draw):
    tokens = draw(data)
    return runs(
        draw(sizes),
        tokens,
        draw(batches),
        unique_tokens=tokens / draw(factors),
        precision=draw(precisions),
        gradient_error=draw(errors),
    )


@given(any_runs(), any_runs())
def test_terms_add_up_the_interval_holds_the_middle_and_swapping_turns_the_sign(one, other):
    there, back = loss_differences(one, other), loss_differences(other, one)
    total = there.total()
    assert math.isfinite(there.middle[0])
    assert math.isfinite(there.low[0])
    assert math.isfinite(there.high[0])
    assert abs(sum(there.terms[name][0] for name in TERMS) - there.middle[0]) <= 1e-9
    assert total.figure.low <= total.figure.middle <= total.figure.high
    assert [term.name for term in total.terms] == list(TERMS)
    assert back.middle[0] == pytest.approx(-there.middle[0], rel=1e-9, abs=1e-12)
    assert back.low[0] == pytest.approx(-there.high[0], rel=1e-9, abs=1e-12)


@given(any_runs())
def test_a_run_differs_from_itself_by_exactly_nothing(run):
    same = loss_difference(run, run)
    assert (same.low, same.middle, same.high) == (0.0, 0.0, 0.0)
    assert same.extrapolated == ()


@given(any_runs(), st.floats(1.0, 1e3))
def test_more_data_never_raises_the_loss(run, more):
    longer = replace(run, tokens=run.tokens * more, unique_tokens=run.unique_tokens * more)
    again = replace(run, tokens=run.tokens * more)
    assert loss_differences(longer, run).middle[0] <= 1e-12
    assert loss_differences(again, run).middle[0] <= 1e-12


@given(any_runs(), st.floats(1.0, 1e3))
def test_repeated_data_never_beat_fresh_data(run, more):
    fresh = replace(run, unique_tokens=np.array([np.inf]))
    wider = replace(run, unique_tokens=run.unique_tokens * more)
    assert loss_differences(run, fresh).middle[0] >= -1e-12
    assert loss_differences(wider, run).middle[0] <= 1e-12


@given(any_runs(), st.floats(1.0, 1e4))
def test_a_larger_batch_or_a_worse_gradient_never_lowers_the_loss_at_equal_data(run, more):
    larger = replace(run, batch_tokens=run.batch_tokens * more)
    worse = replace(run, gradient_error=run.gradient_error + more - 1.0)
    for other, name in ((larger, "batch"), (worse, "gradient error")):
        found = loss_differences(other, run)
        assert found.middle[0] >= -1e-12
        assert found.terms["tokens"][0] == 0.0
        assert name == "gradient error" or found.terms[name][0] >= -1e-12


@given(sizes, data, st.floats(1.0, 16.0), st.floats(0.0, 8.0))
def test_more_bits_never_hurt(parameters, tokens, bits, more):
    few = replace(runs(parameters, tokens, 1e6), weight_bits=np.array([bits]))
    many = replace(few, weight_bits=np.array([bits + more]))
    assert loss_differences(many, few).middle[0] <= 1e-12


def test_half_a_model_costs_what_the_law_says_with_a_tight_interval():
    found = loss_difference(runs(3.5e9, 100e9, 1e6), runs(7e9, 100e9, 1e6))
    assert found.middle == pytest.approx(482.01 * (3.5e9**-0.3478 - 7e9**-0.3478), rel=1e-12)
    # Independent standard errors of A and alpha would give more than ten times this width.
    assert found.high - found.low < 0.6 * found.middle
    assert found.extrapolated == ()


def test_the_covariance_gives_back_the_published_standard_errors():
    deviations = np.sqrt(np.diag(CHINCHILLA.covariance))
    scales = np.array([482.01, 1.8172])
    assert deviations[[0, 2]] * scales == pytest.approx([124.58, 0.03], rel=0.15)
    assert deviations[3:] == pytest.approx([0.02, 0.02], abs=0.006)
    assert np.linalg.eigvalsh(CHINCHILLA.covariance).min() > 0.0


def test_the_gradient_is_that_of_the_loss():
    where = np.array([3e9]), np.array([5e10])
    names = ("parameter_scale", "token_scale", "irreducible")
    exponents = ("parameter_exponent", "token_exponent")
    found = CHINCHILLA.gradient(*where)[0]
    for place, name in enumerate((*names, *exponents)):
        value = getattr(CHINCHILLA, name)
        step = 1e-6 * (value if name in names else 1.0)
        up, down = (
            law.irreducible + law.parameter_loss(where[0])[0] + law.token_loss(where[1])[0]
            for law in (
                replace(CHINCHILLA, **{name: value + step}),
                replace(CHINCHILLA, **{name: value - step}),
            )
        )
        assert (up - down) / 2e-6 == pytest.approx(found[place], rel=1e-5)


@pytest.mark.parametrize(
    ("constant", "deviation"), [("REPEATS", 0.2), ("CRITICAL_BATCH", 0.3), ("PRECISION", 0.15)]
)
def test_the_interval_is_what_the_ends_of_a_constant_give(monkeypatch, constant, deviation):
    exact = replace(CHINCHILLA, other_data=0.0, covariance=((0.0,) * 5,) * 5)
    monkeypatch.setattr(loss, "CHINCHILLA", exact)
    changes = {
        "REPEATS": {"unique_tokens": 1e9},
        "CRITICAL_BATCH": {"batch_tokens": 8e6},
        "PRECISION": {"precision": "fp8"},
    }
    numbers = {"parameters": 1e9, "tokens": 20e9, "batch_tokens": 1.0}
    run, plain = runs(**(numbers | changes[constant])), runs(**numbers)
    found = loss_differences(run, plain)
    ends = []
    for sign in (-1.0, 1.0):
        factor = math.exp(sign * 1.6448536 * deviation)
        known = getattr(loss, constant)
        moved = (
            {part: replace(each, value=each.value * factor) for part, each in known.items()}
            if constant == "PRECISION"
            else replace(known, value=known.value * factor)
        )
        with monkeypatch.context() as patch:
            patch.setattr(loss, constant, moved)
            ends.append(loss_differences(run, plain).middle[0])
    assert (found.low[0], found.high[0]) == pytest.approx((min(ends), max(ends)), rel=1e-4)
    assert found.low[0] > 0.0


def test_four_epochs_are_nearly_free_and_forty_are_not():
    fresh = runs(2.8e9, 55e9, 1e6)
    four = loss_difference(runs(2.8e9, 55e9, 1e6, unique_tokens=55e9 / 4), fresh)
    forty = loss_difference(runs(2.8e9, 55e9, 1e6, unique_tokens=55e9 / 40), fresh)
    assert 0.0 < four.middle < 0.01
    assert forty.middle > 5 * four.middle
    assert any("16 epochs" in phrase for phrase in forty.extrapolated)
    assert not any("16 epochs" in phrase for phrase in four.extrapolated)
    # Endless repetition is worth R* + 1 times the text and no more.
    assert repeated_tokens(np.array([1e15]), np.array([1e9]))[0] == pytest.approx(16.4e9)


def test_the_critical_batch_grows_with_data_and_takes_a_fifth_more_tokens():
    data = np.array([1e9, 1e10])
    critical = critical_batch_tokens(data)
    assert critical[1] / critical[0] == pytest.approx(10**0.47)
    at_critical = runs(1e9, 12e9, critical_batch_tokens(np.array([12e9])))
    tiny = loss_differences(at_critical, runs(1e9, 12e9, 1.0))
    law = CHINCHILLA.token_loss(np.array([10e9, 12e9]))
    assert tiny.middle[0] == pytest.approx(law[0] - law[1], rel=1e-4)


def test_eight_bits_cost_little_and_say_beyond_which_size_nobody_looked():
    small = loss_difference(runs(1e9, 20e9, 1e6, precision="fp8"), runs(1e9, 20e9, 1e6))
    large = loss_difference(runs(70e9, 1e12, 1e6, precision="fp8"), runs(70e9, 1e12, 1e6))
    assert 0.0 < small.middle < 0.02
    assert small.extrapolated == ()
    assert any("precision measured up to" in phrase for phrase in large.extrapolated)
    assert (large.high - large.low) / large.middle > 1.5 * (small.high - small.low) / small.middle
    assert small.low > 0.0
    assert large.low > 0.0
    assert precision_share(*np.full((3, 1), 16.0))[0] == 1.0


def test_structured_layers_go_through_what_is_known_of_their_form():
    known = np.array([rank_share("cola", share, 1.34e9) for share in (0.4, 1.0, 0.4)])
    low, middle, high, _ = known.T
    assert middle[1] == 1.0
    assert middle[0] == middle[2]
    assert np.all((low <= middle) & (middle <= high))
    dense = runs(1.34e9, 26e9, 5e5)
    found = loss_differences(runs(1.34e9, 26e9, 5e5, rank=known), dense)
    assert found.terms["rank"][0] == pytest.approx(found.middle[0])
    assert found.middle[1] == 0.0
    plain = np.array([rank_share("low_rank", 0.4, 1.34e9)])
    worse = loss_difference(runs(1.34e9, 26e9, 5e5, rank=plain), dense)
    assert 0.0 < worse.low < worse.middle < worse.high
    beyond = np.array([rank_share("cola", 0.4, 70e9)])
    flags = loss_difference(runs(70e9, 26e9, 5e5, rank=beyond), runs(70e9, 26e9, 5e5))
    assert any("structured layers" in phrase for phrase in flags.extrapolated)
    assert isinstance(rank_share("tt", 0.4, 1e9), Unavailable)


def test_a_code_with_more_copies_loses_less_of_the_gradient():
    copies, failure = np.array([1, 2, 3, 1]), np.array([0.1, 0.1, 0.1, 0.0])
    found = coding_error(np.array([64]), np.array([8]), copies, failure)
    assert found[0] == pytest.approx(0.1 / 0.9)
    assert np.all(np.diff(found[:3]) < 0.0)
    assert found[3] == 0.0


def test_many_runs_at_once_are_the_same_runs_one_by_one():
    parameters = np.array([1e9, 7e9, 70e9])
    precision = np.array(["bf16", "fp8", "fp32"])
    many = runs(parameters, [2e10, 1e11, 1e12], [1e6, 4e6, 1.6e7], precision=precision)
    baseline = runs(7e9, 1e11, 4e6)
    found = loss_differences(many, baseline)
    for row, one in enumerate(((1e9, 2e10, 1e6), (7e9, 1e11, 4e6), (70e9, 1e12, 1.6e7))):
        alone = loss_difference(runs(*one, precision=str(precision[row])), baseline)
        there = found.total(row).figure
        assert there.middle == pytest.approx(alone.middle, rel=1e-12)
        assert (there.low, there.high) == pytest.approx((alone.low, alone.high), rel=1e-9)
        assert there.extrapolated == alone.extrapolated


def test_unequal_data_are_flagged():
    run = runs(7e9, 140e9, 1e6)
    assert UNEQUAL in loss_difference(run, runs(7e9, 100e9, 1e6)).extrapolated
    assert UNEQUAL not in loss_difference(run, runs(3e9, 140e9, 1e6)).extrapolated
    assert loss_difference(run, runs(7e9, 100e9, 1e6)).middle < 0.0


def test_terms_name_formula_inputs_constants_and_source():
    total = loss_differences(
        runs(7e9, 140e9, 4e6, precision="fp8", unique_tokens=70e9), runs(7e9, 140e9, 1e6)
    ).total()
    terms = {term.name: term for term in total.terms}
    assert total.unit == "nat/token"
    assert all(term.formula and term.source and term.inputs for term in total.terms)
    assert terms["precision"].inputs["weight_bits of the run"] == 8.0
    assert terms["batch"].constants["k"].value == 0.47
    assert terms["repeated tokens"].constants["R*"].value == 15.4
    assert terms["parameters"].constants["A"].value == 482.01


def test_a_mixture_counts_what_a_token_goes_through_and_says_so():
    shape = {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4,
        "head_width": 16,
        "gated": True,
        "vocabulary": 96,
    }
    dense = Transformer(intermediate=128, **shape)
    mixture = Transformer(
        intermediate=0, experts=8, experts_per_token=2, expert_intermediate=128, **shape
    )
    assert law_parameters(dense) == dense.parameters
    assert law_parameters(mixture) == mixture.active_parameters
    found = loss_difference(runs(1e9, 1e10, 1e6, mixture=1.0), runs(2e9, 1e10, 1e6))
    assert any("mixture" in phrase for phrase in found.extrapolated)
