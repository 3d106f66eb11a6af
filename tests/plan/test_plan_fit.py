"""The fit finds constants that made the data, and says how sure it is."""

from dataclasses import replace

import numpy as np
import pytest
from plan_runs import H100, LLAMA_8B, configuration

from outlast.errors import PlanError
from outlast.plan.batch import cases
from outlast.plan.constants import NAMES, PRIORS, constants
from outlast.plan.step_fit import Belonging, believed, fit, fit_residual
from outlast.plan.step_time import step_seconds

HERE = Belonging("h100", "site", "trainer")


def sweep():
    """60 runs of several sizes and layouts."""
    small = replace(LLAMA_8B, layers=16, hidden=2048, head_width=64, intermediate=8192)
    found = []
    for model in (small, LLAMA_8B):
        for tensor, pipeline, data in ((1, 1, 8), (2, 1, 4), (8, 1, 4), (4, 2, 4), (2, 4, 8)):
            for micro_batch in (1, 4):
                for micro_batches in (1, 4, 16):
                    run = configuration(
                        tensor=tensor,
                        pipeline=pipeline,
                        data=data,
                        micro_batch=micro_batch,
                        batch=data * micro_batch * micro_batches,
                        sequence=4096,
                    )
                    found.append((model, run, H100))
    return cases(found)


@pytest.fixture(scope="module")
def fitted():
    numbers = sweep()
    truth = {"matmul_efficiency": 0.7, "kernel_seconds": 6e-5, "fabric_efficiency": 0.35}
    noise = np.random.default_rng(0).normal(0.0, 0.02, len(numbers))
    seconds = step_seconds(numbers, constants(truth)) * np.exp(noise)
    seconds[7] *= 3.0
    seconds[20] *= 0.4
    return numbers, truth, seconds, fit(numbers, seconds, [HERE] * len(numbers))


def test_constants_are_found_in_spite_of_outliers(fitted):
    _, truth, _, found = fitted
    values = found.constants([HERE])
    for name, value in truth.items():
        assert float(getattr(values, name)[0]) == pytest.approx(value, rel=0.2)


def test_what_is_known_of_a_chip_holds_until_its_runs_say_otherwise():
    hopper, ampere = Belonging("h100-sxm", "", ""), Belonging("a100-sxm-80", "", "")
    before = [believed().constants([whose]) for whose in (hopper, ampere)]
    ratio = before[0].attention_efficiency / before[1].attention_efficiency
    assert ratio[0] == pytest.approx(0.35 / 0.6)
    assert before[1].attention_efficiency[0] == pytest.approx(0.45)
    assert before[0].matmul_efficiency == before[1].matmul_efficiency

    numbers = replace(sweep(), sequence=np.array([65536.0]))
    seconds = step_seconds(numbers, constants({"attention_efficiency": 0.7}))
    found = fit(numbers, seconds, [hopper] * len(numbers)).constants([hopper])
    assert found.attention_efficiency[0] == pytest.approx(0.7, rel=0.2)


def test_the_fit_predicts_better_than_the_priors(fitted):
    numbers, truth, _, found = fitted
    clean = step_seconds(numbers, constants(truth))
    after = np.abs(np.log(step_seconds(numbers, found.constants([HERE])) / clean))
    before = np.abs(np.log(step_seconds(numbers, constants()) / clean))
    assert np.median(after) < 0.02 < np.median(before)


def test_what_was_measured_is_surer_than_what_was_not(fitted):
    numbers, _, _, found = fitted
    known = found.log_deviation(numbers, [HERE] * len(numbers))
    elsewhere = [Belonging("mi300x", "other site", "other trainer")] * len(numbers)
    unknown = found.log_deviation(numbers, elsewhere)
    assert np.median(known) < 0.03
    assert (unknown > 2.0 * known).all()


def test_other_groups_get_the_common_constants(fitted):
    _, _, _, found = fitted
    here = float(found.constants([HERE]).kernel_seconds[0])
    other = float(found.constants([Belonging("h100", "site", "other")]).kernel_seconds[0])
    assert PRIORS["kernel_seconds"].median < other < here


def test_no_efficiency_exceeds_its_bound():
    numbers = sweep()
    impossible = step_seconds(numbers, constants()) / 5.0
    values = fit(numbers, impossible, [HERE] * len(numbers)).constants([HERE])
    for name in NAMES:
        assert float(getattr(values, name)[0]) <= PRIORS[name].most


def test_a_step_of_no_time_is_refused():
    numbers = sweep()
    seconds = step_seconds(numbers, constants())
    seconds[3] = 0.0
    with pytest.raises(PlanError, match="step_seconds of every run must be a number above 0"):
        fit(numbers, seconds, [HERE] * len(numbers))


@pytest.mark.parametrize("name", NAMES)
def test_the_fitted_scale_can_be_undone(name):
    value = np.array([PRIORS[name].median * 0.7])
    assert PRIORS[name].bounded(PRIORS[name].unbounded(value)) == pytest.approx(value)


def test_a_neighbourhoods_deviation_is_learned_and_stays_there():
    numbers = sweep()
    wide = np.broadcast_to(numbers.tensor, (len(numbers),)) == 8
    residuals = np.where(wide, 0.15, 0.0)
    residuals[0] = 2.0
    correction = fit_residual(numbers, residuals, ["here"] * len(numbers))
    mean, variance = correction.correction(numbers, ["here"])
    assert np.median(mean[wide]) > 0.08
    assert abs(mean[0]) < 0.2
    assert (variance >= 0.0).all()
    assert not correction.correction(numbers, ["elsewhere"])[0].any()


def test_what_other_runs_taught_is_where_a_few_runs_begin(fitted):
    numbers, truth, _, before = fitted
    elsewhere = Belonging("h100", "another site", "trainer")
    slower = {**truth, "fabric_efficiency": 0.2}
    few = numbers.taken(np.array([3, 21, 30, 45]))
    measured = step_seconds(few, constants(slower))
    after = fit(few, measured, [elsewhere] * 4, prior=before)
    alone = fit(few, measured, [elsewhere] * 4)
    wanted = step_seconds(numbers, constants(slower))
    errors = [
        np.median(np.abs(np.log(step_seconds(numbers, each.constants([elsewhere])) / wanted)))
        for each in (after, alone)
    ]
    assert errors[0] < errors[1]
    assert set(before.columns) <= set(after.columns)
    kept = float(after.constants([HERE]).kernel_seconds[0])
    assert kept == pytest.approx(truth["kernel_seconds"], rel=0.3)
