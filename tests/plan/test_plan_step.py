"""Laws of a step's time: what must hold whatever the constants are."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_runs import H100, LLAMA_8B, MIXTURE, configuration

from outlast.plan.batch import cases
from outlast.plan.constants import NAMES, PRIORS, constants
from outlast.plan.step_time import step_parts, step_seconds

POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def runs(draw):
    """A model, a configuration and a cluster; not all of them wise."""
    tensor, pipeline, context = draw(POWERS), draw(POWERS), draw(st.sampled_from([1, 2]))
    data = draw(st.sampled_from([1, 2, 8, 64]))
    micro_batch = draw(POWERS)
    run = configuration(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=draw(st.sampled_from([1, 2, 8])) if data >= 8 else 1,
        stages_per_rank=draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
        schedule=draw(st.sampled_from(["1f1b", "zero_bubble"])),
        balance=draw(st.sampled_from(["layers", "cost"])),
        sharding=draw(st.sampled_from(["none", "optimizer", "gradients", "parameters"])),
        recompute=draw(st.sampled_from(["none", "attention", "full"])),
        precision=draw(st.sampled_from(["bf16", "fp8"])),
        fused_attention=draw(st.booleans()),
        sequence=draw(st.sampled_from([512, 4096, 32768])),
        micro_batch=micro_batch,
        batch=data * micro_batch * draw(POWERS),
    )
    return draw(st.sampled_from([LLAMA_8B, MIXTURE])), run, H100


@st.composite
def drawn_constants(draw):
    return constants(
        {
            name: min(
                PRIORS[name].median
                * math.exp(draw(st.floats(-2.0, 2.0)) * PRIORS[name].log_deviation),
                PRIORS[name].most,
            )
            for name in NAMES
        }
    )


def seconds(*run, with_constants=None):
    return float(step_seconds(cases([run]), with_constants or constants())[0])


@given(runs(), drawn_constants())
@settings(max_examples=80, deadline=None)
def test_terms_are_finite_and_not_negative_and_add_up(run, drawn):
    numbers = cases([run])
    parts = step_parts(numbers, drawn)
    values = [float(np.broadcast_to(part.values, (1,))[0]) for part in parts]
    assert all(math.isfinite(value) and value >= 0.0 for value in values)
    assert math.fsum(values) == pytest.approx(float(step_seconds(numbers, drawn)[0]), rel=1e-12)
    assert len({part.name for part in parts}) == len(parts)


@pytest.mark.parametrize(
    "figure",
    [
        "peak_flop_per_s",
        "matmul_flop_per_s",
        "memory_bytes_per_s",
        "fast_bytes_per_s",
        "fabric_bytes_per_s",
    ],
)
@given(run=runs(), drawn=drawn_constants())
@settings(max_examples=30, deadline=None)
def test_doubling_a_peak_never_slows(figure, run, drawn):
    model, configured, cluster = run
    # Stages that are balanced by cost are cut elsewhere when costs change.
    configured = replace(configured, balance="layers")
    old = getattr(cluster, figure)
    new = {key: 2.0 * value for key, value in old.items()} if isinstance(old, dict) else 2.0 * old
    faster = replace(cluster, **{figure: new})
    before = seconds(model, configured, cluster, with_constants=drawn)
    assert seconds(model, configured, faster, with_constants=drawn) <= before * (1 + 1e-9)


@given(run=runs(), field=st.sampled_from(["micro_batches", "layers", "vocabulary"]))
@settings(max_examples=40, deadline=None)
def test_more_work_takes_longer(run, field):
    model, configured, cluster = run
    if field == "micro_batches":
        more = model, replace(configured, batch=2 * configured.batch), cluster
    else:
        bigger = {field: 2 * getattr(model, field)}
        if field == "layers":
            bigger["dense_layers"] = 2 * model.dense_layers
        more = replace(model, **bigger), configured, cluster
    assert seconds(*more) > seconds(*run)


def test_many_runs_are_predicted_as_each_alone():
    several = [
        (LLAMA_8B, configuration(), H100),
        (LLAMA_8B, configuration(tensor=8, data=1, batch=8), H100),
        (MIXTURE, configuration(expert=8), H100),
    ]
    together = step_seconds(cases(several), constants())
    assert together.tolist() == pytest.approx([seconds(*run) for run in several], rel=1e-12)


def test_a_plain_run_is_as_fast_as_people_see():
    """8B on 8 H100: published tuned runs reach 35 to 55 % of the peak (model FLOPs)."""
    run = configuration(sharding="parameters", recompute="none", micro_batch=2, batch=64)
    flops = LLAMA_8B.flops_per_token(run.sequence) * run.tokens / run.devices
    utilisation = flops / seconds(LLAMA_8B, run, H100) / H100.peak_flop_per_s["bf16"]
    assert 0.3 < utilisation < 0.6


def test_zero_bubble_is_faster_and_recomputation_slower():
    piped = configuration(data=1, tensor=2, pipeline=4, batch=16)
    plain = seconds(LLAMA_8B, piped, H100)
    assert seconds(LLAMA_8B, replace(piped, schedule="zero_bubble"), H100) < plain
    assert seconds(LLAMA_8B, replace(piped, recompute="full"), H100) > 1.2 * plain


def test_the_head_is_seen_by_stages_that_are_balanced_by_cost():
    wide = replace(LLAMA_8B, vocabulary=512_000)
    piped = configuration(data=1, pipeline=8, batch=64)
    equal = seconds(wide, piped, H100)
    assert seconds(wide, replace(piped, balance="cost"), H100) < equal


@pytest.mark.parametrize("sharding", ["gradients", "parameters"])
def test_a_pipeline_of_sharded_replicas_gathers_once_in_a_step(sharding):
    def gathering(**changes):
        numbers = cases([(LLAMA_8B, configuration(sharding=sharding, **changes), H100)])
        [part] = [
            each
            for each in step_parts(numbers, constants({"gather_exposed": 0.9}))
            if each.name == "gathering of weights"
        ]
        return float(np.ravel(part.values)[0])

    piped = {"data": 8, "pipeline": 8}
    few, many = (gathering(**piped, batch=batch) for batch in (64, 512))
    assert many <= few * (1.0 + 1e-9)
    # Without stages, each pass gathers again.
    assert gathering(batch=512) > 4.0 * gathering(batch=64) > 0.0
