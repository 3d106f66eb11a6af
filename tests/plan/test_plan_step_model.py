"""A calibration from runs: cross-validated, with intervals, written down and read back."""

from dataclasses import replace

import numpy as np
import pytest
from plan_runs import H100, LLAMA_8B, configuration, shared, uncalibrated

from outlast.errors import PlanError
from outlast.plan.api import published_constants
from outlast.plan.batch import cases
from outlast.plan.calibration import (
    Provenance,
    calibration_of,
    from_text,
    step_model_of,
    to_text,
)
from outlast.plan.constants import NAMES, PRIORS, constants
from outlast.plan.rows import Row
from outlast.plan.step_fit import Belonging
from outlast.plan.step_model import (
    belonging,
    step_model,
    utilisation,
    validate,
)
from outlast.plan.step_time import step_seconds

SMALL = replace(LLAMA_8B, layers=16, hidden=2048, head_width=64, intermediate=8192)


def measured():
    """Runs of three frameworks that differ in what a kernel start costs them."""
    rng = np.random.default_rng(1)
    rows = []
    for framework, kernel in (("one", 1e-5), ("two", 5e-5), ("three", 2e-5)):
        for model in (SMALL, LLAMA_8B):
            for tensor, data in ((1, 8), (2, 4), (4, 4), (8, 2)):
                for micro_batch in (1, 2, 4):
                    run = configuration(
                        tensor=tensor,
                        data=data,
                        micro_batch=micro_batch,
                        batch=data * micro_batch * 4,
                        sequence=2048,
                    )
                    numbers = cases([(model, run, H100)])
                    seconds = step_seconds(numbers, constants({"kernel_seconds": kernel}))
                    rows.append(
                        Row(
                            name=f"{framework} {len(rows)}",
                            model=model,
                            run=run,
                            cluster=H100,
                            source=f"table of {framework}",
                            framework=framework,
                            step_seconds=float(seconds[0] * np.exp(rng.normal(0.0, 0.03))),
                        )
                    )
    return rows


@pytest.fixture(scope="module")
def rows():
    return measured()


@pytest.fixture(scope="module")
def model(rows):
    return step_model(rows, 5)


def numbers_of(rows):
    return cases([(row.model, row.run, row.cluster) for row in rows])


@pytest.mark.slow
def test_runs_that_were_held_out_are_predicted(rows):
    held = validate(rows, 5)
    assert np.median(np.abs(held.log_errors)) < 0.05
    assert (held.deviations > 0.0).all()


@pytest.mark.slow
def test_a_step_is_the_sum_of_its_parts_the_correction_included(rows, model):
    numbers = numbers_of(rows)
    for index in (0, 10, 50):
        one = numbers.taken(np.array([index]))
        whose = belonging(rows[index])
        parts = model.parts(one, whose)
        total = sum(float(np.broadcast_to(part.values, (1,))[0]) for part in parts)
        assert total == pytest.approx(float(model.seconds(one, [whose])[0]), rel=1e-12)
        assert all(part.formula for part in parts)


@pytest.mark.slow
def test_intervals_hold_what_was_measured_and_are_wider_elsewhere(rows, model):
    numbers = numbers_of(rows)
    inside = []
    for index, row in enumerate(rows):
        one = numbers.taken(np.array([index]))
        half = model.half_widths(one, belonging(row))
        error = np.log(row.step_seconds / model.seconds(one, [belonging(row)]))
        inside.append(abs(float(error[0])) <= float(half[0]))
    assert np.mean(inside) > 0.85
    known = model.half_widths(numbers, belonging(rows[0]))
    unknown = model.half_widths(numbers, Belonging("mi300x", "elsewhere", "another"))
    assert np.median(unknown) > 1.5 * np.median(known)


def test_what_is_beyond_the_calibration_is_said(rows, model):
    far = cases([(LLAMA_8B, configuration(data=4096, batch=65536, sequence=2048), H100)])
    said = " ".join(model.outside(far, belonging(rows[0])))
    assert "data = 4096" in said
    assert model.outside(numbers_of(rows), belonging(rows[0])) == ()
    assert "priors alone" in uncalibrated().outside(far, belonging(rows[0]))[0]


def test_a_calibration_is_written_and_read_without_loss(rows, model):
    calibration = calibration_of(model, Provenance(date="2026-11-22", version="0"))
    again = step_model_of(from_text(to_text(calibration)))
    numbers, whose = numbers_of(rows), [belonging(row) for row in rows]
    assert again.seconds(numbers, whose) == pytest.approx(model.seconds(numbers, whose), rel=1e-12)
    assert again.deviations(numbers, whose) == pytest.approx(
        model.deviations(numbers, whose), rel=1e-6
    )
    assert again.half_widths(numbers, whose[0]) == pytest.approx(
        model.half_widths(numbers, whose[0]), rel=1e-6
    )


def test_a_calibration_of_another_version_is_refused(model):
    calibration = calibration_of(model, Provenance(date="2026-11-22", version="0"))
    one = calibration.order[0]
    renamed = dict(calibration.constants)
    renamed["matmul_speed"] = renamed.pop(one)
    order = ("matmul_speed", *calibration.order[1:])
    with pytest.raises(PlanError, match="matmul_speed"):
        step_model_of(replace(calibration, constants=renamed, order=order))
    kept = [index for index, name in enumerate(calibration.order) if name != one]
    less = replace(
        calibration,
        constants={name: calibration.constants[name] for name in calibration.order if name != one},
        order=tuple(calibration.order[index] for index in kept),
        correlation=calibration.correlation[np.ix_(kept, kept)],
    )
    with pytest.raises(PlanError, match=f"lacks {one}"):
        step_model_of(less)


def test_what_is_shared_knows_chips_and_frameworks_but_no_cluster(rows, model):
    general = shared(model)
    assert {column.level for column in general.constants.columns} == {None, "chip", "framework"}
    assert general.residual is None
    numbers, whose = numbers_of(rows), [belonging(row) for row in rows]
    ratio = general.seconds(numbers, whose) / model.seconds(numbers, whose)
    assert np.median(np.abs(np.log(ratio))) < 0.05


def test_the_published_constants_are_possible():
    published = published_constants()
    assert published.rows > 300
    for framework in ("nanotron", "Megatron-DeepSpeed", "nobody's"):
        values = published.constants.constants([Belonging("h100-sxm", "a site", framework)])
        for name in NAMES:
            assert 0.0 < float(getattr(values, name)[0]) <= PRIORS[name].most


def test_utilisation_is_that_of_model_flops(rows):
    row = rows[0]
    flops = row.model.flops_per_token(2048) * row.run.tokens
    reached = flops / row.run.devices / 989e12 / row.step_seconds
    assert utilisation([row])[0] == pytest.approx(reached)
