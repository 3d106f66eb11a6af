"""Laws of whole predictions that hold whatever the job, the cluster and the mechanisms are."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plan_random_runs import jobs

from outlast.hardware import Unavailable
from outlast.plan.api import Training, predict, published_constants
from outlast.plan.cluster import Cluster
from outlast.plan.configuration import Configuration, Settings
from outlast.plan.estimate import Interval, Total
from outlast.plan.mechanisms import HELD
from outlast.plan.prediction import Estimate
from outlast.plan.step_model import StepModel
from outlast.plan.transformer import Transformer

Job = tuple[Training, Cluster]
ALL = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
ROUNDING = 1.0 + 1e-9


@cache
def constants() -> StepModel:
    return published_constants()


def estimate(training: Training, cluster: Cluster, **further: Any) -> Estimate:
    return predict(training, cluster, calibration=constants(), **further)


def figures(found: Estimate) -> dict[str, Interval]:
    every = {name: getattr(found, name) for name in found.__dataclass_fields__}
    totals = {name: each.figure for name, each in every.items() if isinstance(each, Total)}
    return totals | {name: each for name, each in every.items() if isinstance(each, Interval)}


@given(jobs())
@ALL
def test_every_figure_is_finite_and_its_terms_are(job: Job) -> None:
    found = estimate(*job)
    for name, figure in figures(found).items():
        assert -math.inf < figure.low <= figure.middle <= figure.high < math.inf, name
        assert figure.low >= 0.0 or name == "loss_difference", name
    gains = ("structured layers",)
    for name in ("step_seconds", "memory", "joules", "ettr", "loss_difference"):
        total = getattr(found, name)
        assert not isinstance(total, Unavailable)
        values = [term.value for term in total.terms]
        assert all(math.isfinite(value) for value in values), name
        assert math.fsum(values) == pytest.approx(total.figure.middle, rel=1e-9, abs=1e-12), name
        if name in ("step_seconds", "memory", "joules"):
            assert all(t.value >= 0.0 for t in total.terms if t.name not in gains), name
    assert found.ettr.figure.high <= 1.0
    for value in (found.lost_work_seconds, found.last_save_seconds, found.resume_seconds):
        assert 0.0 <= value < math.inf
    assert 0.0 < found.checkpoint_seconds < math.inf


PEAKS = (
    "peak_flop_per_s",
    "matmul_flop_per_s",
    "memory_bytes_per_s",
    "fast_bytes_per_s",
    "fabric_bytes_per_s",
)


@pytest.mark.slow
@given(jobs(), st.sampled_from(PEAKS))
@ALL
def test_doubling_a_peak_never_slows_a_step(job: Job, name: str) -> None:
    training, cluster = job

    def doubled(field: str) -> Any:
        old = getattr(cluster, field)
        if isinstance(old, dict):
            return {key: 2.0 * value for key, value in old.items()}
        return 2.0 * old

    # No product is faster than the peak, and no network than the fast link.
    with_it = {"matmul_flop_per_s": "peak_flop_per_s", "fabric_bytes_per_s": "fast_bytes_per_s"}
    names = {name, with_it.get(name, name)}
    faster = replace(cluster, **{field: doubled(field) for field in names})
    before = estimate(training, cluster).step_seconds.figure.middle
    assert estimate(training, faster).step_seconds.figure.middle <= before * ROUNDING


@given(jobs(), st.floats(1.0, 10.0), st.integers(0, 3))
@ALL
def test_more_failures_never_raise_the_progress_of_a_job(
    job: Job, factor: float, which: int
) -> None:
    training, cluster = job
    # With the interval that is best for the rates, each is chosen to first order only.
    fixed = replace(training.settings, checkpoint_seconds=3600.0)
    training = replace(training, settings=fixed)
    worse = tuple(
        replace(cause, per_node_day=cause.per_node_day * (factor if index == which else 1.0))
        for index, cause in enumerate(cluster.failures)
    )
    before, after = (
        estimate(training, cluster),
        estimate(training, replace(cluster, failures=worse)),
    )
    assert after.ettr.figure.middle <= before.ettr.figure.middle + 1e-6


@given(jobs())
@ALL
def test_energy_of_a_job_is_at_least_idle_power_over_its_time(job: Job) -> None:
    _, cluster = job
    found, power = estimate(*job), cluster.power
    assert power is not None
    assert isinstance(found.joules, Total)
    assert isinstance(found.run_joules, Interval)
    nodes = found.devices / cluster.devices_per_node
    least = (found.devices * power.idle_watts + nodes * power.node_watts) * power.pue
    assert found.joules.figure.middle * ROUNDING >= least * found.step_seconds.figure.middle
    productive = found.finish_seconds.middle * found.ettr.figure.middle
    assert found.run_joules.middle * ROUNDING >= least * productive


@given(jobs(), st.sampled_from(["shared", "memory"]))
@ALL
def test_faster_storage_never_costs_progress(job: Job, tier: str) -> None:
    training, cluster = job
    # How seldom a slower tier saves would be chosen, to first order and by whole numbers.
    fixed = replace(training.settings, checkpoint_seconds=3600.0, tiers=("shared",))
    name = f"{tier}_bytes_per_s"
    storage = replace(cluster.storage, **{name: 2.0 * getattr(cluster.storage, name)})
    before = estimate(replace(training, settings=fixed), cluster)
    after = estimate(replace(training, settings=fixed), replace(cluster, storage=storage))
    # A store that cannot keep up with the saves is given fewer, and does not know how many are due.
    assume(after.checkpoint_seconds == before.checkpoint_seconds)
    assert after.ettr.figure.middle >= before.ettr.figure.middle - 1e-6


@given(jobs(), st.sampled_from([1000.0, 1e-3]))
@ALL
def test_a_price_in_another_unit_changes_nothing_else(job: Job, factor: float) -> None:
    training, cluster = job
    rent = cluster.prices.per_device_hour
    assert rent is not None
    other = replace(cluster, prices=replace(cluster.prices, per_device_hour=rent * factor))
    before, after = figures(estimate(*job)), figures(estimate(training, other))
    assert after.pop("money").middle == pytest.approx(before.pop("money").middle * factor)
    assert after == before


@given(jobs(), st.sampled_from([2.0, 10.0]))
@ALL
def test_more_tokens_take_longer_and_as_many_joules_more(job: Job, factor: float) -> None:
    training, cluster = job
    before = estimate(*job)
    after = estimate(replace(training, tokens=training.tokens * factor), cluster)
    assert after.step_seconds.figure == before.step_seconds.figure
    assert after.steps >= before.steps
    # A part of a step counts as a whole one.
    times = after.steps / before.steps
    assert after.finish_seconds.middle == pytest.approx(times * before.finish_seconds.middle)
    assert not isinstance(before.run_joules, Unavailable)
    assert not isinstance(after.run_joules, Unavailable)
    assert after.run_joules.middle == pytest.approx(times * before.run_joules.middle)


@pytest.mark.slow
@given(jobs(), st.floats(0.01, 100.0))
@ALL
def test_a_later_deadline_is_never_less_likely_kept(job: Job, factor: float) -> None:
    seconds = estimate(*job).finish_seconds.middle * factor
    chances = [estimate(*job, deadline_seconds=seconds * each).on_time for each in (0.5, 1.0, 2.0)]
    assert all(chance is not None and 0.0 <= chance <= 1.0 for chance in chances)
    assert chances == sorted(chances)  # type: ignore[type-var]


def test_structured_layers_are_held_to_the_utilisation_of_their_own_operations() -> None:
    """A faster memory does not lower what they save of a step that the dense model is held to."""
    model = Transformer(
        name="narrow",
        layers=64,
        hidden=8128,
        heads=8,
        kv_heads=8,
        head_width=128,
        intermediate=8,
        gated=False,
        vocabulary=768,
    )
    run = Configuration(sequence=2048, micro_batch=1, batch=8, precision="fp8")
    settings = Settings(tensorize_form="low_rank", tensorize_rank=0.25, guard="light")
    training = Training(model=model, run=run, tokens=1e12, settings=settings, framework="any")
    peaks = {"bf16": 5.6e15, "fp8": 1.88e12}
    slow = Cluster(
        name="slow",
        device="own",
        nodes=1,
        devices_per_node=1,
        fast_domain=1,
        peak_flop_per_s=peaks,
        matmul_flop_per_s={"bf16": 4.3e15, "fp8": 1.44e12},
        memory_bytes=3e10,
        memory_bytes_per_s=1e13,
        fast_bytes_per_s=2e8,
        fabric_bytes_per_s=2e8,
        fabric_latency_seconds=1e-3,
    )
    fast = replace(slow, memory_bytes_per_s=2e13)
    assert any(
        term.name == HELD and term.value > 0.0
        for term in estimate(replace(training, settings=Settings()), fast).step_seconds.terms
    )
    before, after = estimate(training, slow).step_seconds, estimate(training, fast).step_seconds
    assert after.figure.middle < before.figure.middle
