"""The cost model of gradient coding: closed forms against simulation, and its figures by hand."""

import math
import subprocess
import sys

import numpy as np
import pytest
from closed_forms import (
    exponential_order,
    fixed_code_break_even,
    fixed_code_ratio,
    pareto_order,
    repetition_ratio,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from late_workers import Additive, FailStop, Fixed, Pareto

from outlast.coding.assignment import spread
from outlast.coding.certificate import certify
from outlast.coding.cost import CostModel, all_reduce_bytes, coding_cost, dropped_error, lost_chunks
from outlast.coding.delays import ShiftedExponential, Slow, sample
from outlast.coding.simulate import cover, fixed_load, repetition, wait_all
from outlast.errors import CodingError

COSTS = CostModel(chunk_seconds=0.1, chunks_per_worker=8, gradient_bytes=1e6)


def test_the_cost_model_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, outlast.coding.cost\n"
        "print([name for name in ('torch', 'numpy', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_choosing_and_simulating_load_no_torch() -> None:
    code = "import sys, outlast.coding.choose\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 20), st.data())
def test_order_statistics_have_the_means_of_samples(workers: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, workers))
    generator = np.random.default_rng(1)
    exponential = np.sort(generator.exponential(1.0, (20_000, workers)), axis=1)[:, rank - 1]
    assert exponential_order(workers, rank) == pytest.approx(exponential.mean(), rel=0.05)
    pareto = np.sort(1.0 + generator.pareto(4.0, (20_000, workers)), axis=1)[:, rank - 1]
    assert pareto_order(workers, rank, 4.0) == pytest.approx(pareto.mean(), rel=0.05)


def test_a_tail_without_a_mean_has_none() -> None:
    assert pareto_order(10, 10, 1.0) == math.inf
    assert math.isfinite(pareto_order(10, 9, 1.0))


@pytest.mark.parametrize(("scale", "copies"), [(0.1, 2), (0.5, 2), (0.5, 4), (3.0, 3)])
def test_ratios_of_fixed_codes_are_those_of_the_simulation(scale: float, copies: int) -> None:
    for additive, model in ((False, ShiftedExponential(scale)), (True, Additive(scale))):
        delays = sample(model, 4000, 24, seed=1)
        plain = wait_all(delays, 1.0).seconds.mean()
        cyclic = fixed_load(delays, 1.0, copies).seconds.mean() / plain
        assert fixed_code_ratio(24, copies, scale, additive=additive) == pytest.approx(
            cyclic, rel=0.02
        )
        grouped = repetition(delays, 1.0, copies).seconds.mean() / plain
        assert repetition_ratio(24, copies, scale, additive=additive) == pytest.approx(
            grouped, rel=0.02
        )


def test_ratios_are_the_published_ones() -> None:
    assert fixed_code_ratio(240, 2, 0.1) == pytest.approx(1.88, abs=0.01)
    assert fixed_code_ratio(240, 4, 0.1) == pytest.approx(3.55, abs=0.01)
    assert repetition_ratio(240, 2, 0.1) == pytest.approx(1.58, abs=0.01)
    assert repetition_ratio(240, 4, 0.1) == pytest.approx(2.79, abs=0.01)


@given(st.integers(2, 6), st.integers(7, 200))
def test_a_fixed_code_pays_beyond_its_break_even_whatever_the_number_of_workers(
    copies: int, workers: int
) -> None:
    scale = fixed_code_break_even(copies)
    assert fixed_code_ratio(workers, copies, scale, additive=True) == pytest.approx(1.0)
    assert fixed_code_ratio(workers, copies, 1.1 * scale, additive=True) < 1.0
    assert fixed_code_ratio(workers, copies, 0.9 * scale, additive=True) > 1.0


@given(st.integers(2, 6), st.integers(7, 200), st.floats(0.0, 2.0))
def test_a_fixed_code_is_slower_than_none_where_delays_grow_with_the_load(
    copies: int, workers: int, scale: float
) -> None:
    assert fixed_code_ratio(workers, copies, scale) > 1.0


def test_one_copy_is_no_code() -> None:
    assert fixed_code_ratio(12, 1, 0.7) == pytest.approx(1.0)
    assert repetition_ratio(12, 1, 0.7) == pytest.approx(1.0)
    assert fixed_code_break_even(1) == math.inf


def test_lost_chunks_are_those_of_the_simulation() -> None:
    delays = sample(FailStop(0.2), 2000, 12, seed=3)
    covered = cover(spread(12, 4, 2), delays, 1.0)
    expected = lost_chunks(12, 4, 2, 0.2)
    assert expected == pytest.approx(12 * 4 * 0.04)
    assert covered.uncovered.mean() == pytest.approx(expected, rel=0.08)
    assert (covered.uncovered > 0).mean() <= expected


@given(st.integers(1, 40), st.data())
def test_the_error_of_dropping_is_the_certificates(chunks: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, chunks))
    coefficients = np.where(np.arange(chunks) < kept, 1.0, 0.0)
    certificate = certify(coefficients, coefficients, np.ones(chunks))
    assert dropped_error(kept / chunks) * chunks == pytest.approx(certificate.centred)
    assert dropped_error(0.0) == math.inf


def test_bytes_by_hand() -> None:
    assert all_reduce_bytes(1, 100.0) == 0.0
    assert all_reduce_bytes(4, 100.0) == pytest.approx(150.0)


def test_claims_by_hand() -> None:
    costs = CostModel(0.1, 8, reduction_seconds=0.2, claim_seconds=1e-3)
    assert costs.claims_seconds == pytest.approx(8e-3)
    assert costs.claims_overhead == pytest.approx(8e-3 / 1.0)
    assert costs.share_seconds == pytest.approx(0.8)


def test_without_stragglers_coverage_costs_its_claims() -> None:
    cost = coding_cost(8, Fixed((1.0,) * 8), COSTS)
    assert cost.step_ratio == pytest.approx(1.0 + cost.overhead)
    assert cost.overhead < 0.01
    assert cost.extra_bytes == 1e6
    assert cost.sent_bytes == pytest.approx(1.75e6)
    assert cost.lost_chunks == 0.0


@pytest.mark.parametrize("model", [Slow(0.05, 10.0), Pareto(2.0), ShiftedExponential(0.3)])
def test_with_stragglers_coverage_saves_and_more_copies_save_more(model) -> None:
    two, three = (coding_cost(16, model, COSTS, copies=d, seed=2).step_ratio for d in (2, 3))
    assert three < two < 0.85


def test_coverage_ends_steps_that_never_would() -> None:
    assert coding_cost(12, FailStop(0.02), COSTS, failure_probability=0.02).step_ratio == 0.0
    assert coding_cost(12, FailStop(1.0), COSTS).step_ratio == 1.0


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (lambda: CostModel(0.0), "chunk_seconds = 0.0"),
        (lambda: CostModel(0.1, 0), "chunks_per_worker = 0"),
        (lambda: CostModel(0.1, claim_seconds=-1.0), "claim_seconds = -1.0"),
        (lambda: exponential_order(3, 4), r"rank = 4 is not in \[1, 3\]"),
        (lambda: repetition_ratio(10, 3, 1.0), "copies = 3 does not divide"),
        (lambda: lost_chunks(4, 2, 5, 0.1), "copies = 5"),
        (lambda: lost_chunks(4, 2, 2, 1.1), "failure_probability = 1.1"),
        (lambda: all_reduce_bytes(0, 1.0), "workers = 0"),
    ],
)
def test_impossible_settings_are_refused_by_name(refused, named: str) -> None:
    with pytest.raises(CodingError, match=named):
        refused()
