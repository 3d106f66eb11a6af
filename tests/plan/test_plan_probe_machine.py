"""This machine as a cluster, and what a rank's peak memory is made of on it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_probe_machine import MACHINE, RATES
from plan_runs import H100, LLAMA_8B, configuration, uncalibrated

from outlast.cli.plan_calibrate import Here, places, write
from outlast.errors import PlanError
from outlast.job import load_job
from outlast.plan.batch import cases
from outlast.plan.calibration import read_calibration, step_model_of
from outlast.plan.cluster import divided
from outlast.plan.cluster_file import read_cluster
from outlast.plan.constants import constants
from outlast.plan.memory_fit import RESIDENT_PRIORS, Resident, fit_resident, resident_of
from outlast.plan.probes import family, loopback_bytes_per_s, machine_text, numbers_of
from outlast.plan.rows import Row
from outlast.plan.step_time import orthogonal_seconds, step_parts, step_seconds

SETTINGS = family(load_job(None), 2, most=40)


def test_plan_probe_machine_is_a_cluster_with_measured_rates():
    found = read_cluster(machine_text(RATES))
    assert found.processor
    assert found.devices == 1
    assert found.matmul_flop_per_s == {"fp32": 3.3e11, "bf16": 1.2e12}
    assert found.memory_bytes_per_s == 2.5e10
    assert found.failures == () or all(cause.per_node_day == 0.0 for cause in found.failures)
    assert found.sources["matmul_flop_per_s.bf16"].origin == "measured"
    assert found.sources["fast_bytes_per_s"].origin == "measured"


def test_plan_probe_machine_is_shared_by_its_ranks():
    two = divided(MACHINE, 2)
    assert two.devices == two.fast_domain == 2
    assert 2 * two.matmul_flop_per_s["fp32"] == MACHINE.matmul_flop_per_s["fp32"]
    assert 2 * two.memory_bytes == MACHINE.memory_bytes
    assert two.sources["memory_bytes_per_s"].value == two.memory_bytes_per_s
    assert divided(MACHINE, 1).matmul_flop_per_s == MACHINE.matmul_flop_per_s


def test_plan_probe_machine_with_gpus_has_one_for_each_rank():
    assert divided(H100, 4).matmul_flop_per_s == H100.matmul_flop_per_s
    with pytest.raises(PlanError, match="9 ranks need as many GPUs, and this machine has 8"):
        divided(H100, 9)


def test_plan_probe_machine_socket_is_timed():
    assert 1e7 < loopback_bytes_per_s() < 1e12


@pytest.mark.parametrize(
    ("out", "names"),
    [
        ("here.calibration.toml", ("here.calibration.toml", "here.cluster.toml")),
        ("mine.toml", ("mine.toml", "mine.cluster.toml")),
        ("folder", ("folder/calibration.toml", "folder/cluster.toml")),
    ],
)
def test_plan_probe_files_are_beside_each_other(tmp_path, out, names):
    assert places(tmp_path / out) == tuple(tmp_path / name for name in names)


def _rows(memory, count=12, noise=0.0):
    numbers = numbers_of(SETTINGS[:count], MACHINE)
    factors = np.exp(noise * np.random.default_rng(0).normal(size=count))
    return [
        Row(
            name=each.name,
            model=each.model,
            run=each.run,
            cluster=divided(MACHINE, each.run.devices),
            source="here",
            framework="outlast",
            reserved_bytes=float(peak),
        )
        for each, peak in zip(SETTINGS, memory.bytes(numbers) * factors, strict=False)
    ]


def _truth():
    values = {
        name: item["mean"] + 0.8 * item["deviation"] for name, item in RESIDENT_PRIORS.items()
    }
    return Resident(values, np.zeros((len(RESIDENT_PRIORS), len(RESIDENT_PRIORS))), 0.0, 0)


def test_plan_probe_memory_is_learnt_from_a_dozen_runs():
    found = fit_resident(_rows(_truth(), noise=0.02))
    asked = numbers_of(SETTINGS[12:], MACHINE)
    truth = _truth().bytes(asked)
    assert np.median(np.abs(found.bytes(asked) / truth - 1.0)) < 0.03
    assert np.mean(np.abs(np.log(found.bytes(asked) / truth)) <= found.half_widths(asked)) > 0.9


def test_plan_probe_memory_is_read_as_it_was_written(tmp_path):
    memory = fit_resident(_rows(_truth(), noise=0.02))
    here = Here(MACHINE, (), uncalibrated(), memory, 1.0, ())
    write(here, machine_text(RATES), places(tmp_path))
    again = read_calibration(tmp_path / "calibration.toml")
    found = resident_of(again)
    assert found is not None
    assert found.values == memory.values
    assert found.log_deviation == memory.log_deviation
    assert step_model_of(again).rows == 0
    assert read_cluster(tmp_path / "cluster.toml") == MACHINE
    others = {name: each for name, each in again.constants.items() if "resident" not in name}
    assert resident_of(replace(again, constants=others)) is None
    del others["step_seconds"]
    some = {**others, "resident memory: states": again.constants["resident memory: states"]}
    with pytest.raises(PlanError, match="the calibration lacks resident memory: process"):
        resident_of(replace(again, constants=some, order=(), correlation=np.eye(0)))


def test_plan_probe_memory_forgives_one_wild_run():
    rows = _rows(_truth())
    rows[3] = replace(rows[3], reserved_bytes=4.0 * rows[3].reserved_bytes)
    asked = numbers_of(SETTINGS[12:], MACHINE)
    errors = np.abs(fit_resident(rows).bytes(asked) / _truth().bytes(asked) - 1.0)
    assert np.median(errors) < 0.06


def test_plan_probe_memory_needs_a_figure():
    rows = [replace(row, reserved_bytes=None) for row in _rows(_truth())]
    with pytest.raises(PlanError, match="no probe has a memory figure"):
        fit_resident(rows)


@given(
    layers=st.integers(1, 16),
    sequence=st.sampled_from([64, 128, 512]),
    micro_batch=st.integers(1, 8),
    ranks=st.sampled_from([1, 2]),
)
def test_plan_probe_memory_grows_with_the_run(layers, sequence, micro_batch, ranks):
    def peak(**changes):
        model = replace(SETTINGS[0].model, layers=changes.get("layers", layers))
        run = replace(
            SETTINGS[0].run,
            data=ranks,
            sharding="none",
            sharding_ranks=0,
            sequence=changes.get("sequence", sequence),
            micro_batch=changes.get("micro_batch", micro_batch),
            batch=64,
            recompute=changes.get("recompute", "none"),
        )
        return _truth().bytes(cases([(model, run, divided(MACHINE, ranks))]))[0]

    assert peak() <= peak(layers=layers + 1)
    assert peak() <= peak(sequence=2 * sequence)
    assert peak() <= peak(micro_batch=micro_batch + 1)
    assert peak(recompute="full", layers=16) <= peak(layers=16)


def test_plan_probe_muon_adds_products_that_adam_has_not():
    runs = [configuration(optimizer=name) for name in ("adamw", "muon")]
    numbers = cases([(LLAMA_8B, run, H100) for run in runs])
    found = orthogonal_seconds(numbers, constants(), numbers.layers)
    assert found[0] == 0.0
    # 5 iterations of 4 k^2 l + 2 k^3 on seven matrices of a block, at most at the best rate.
    square, inner = 4096.0, 14336.0
    shapes = [(square, square)] * 2 + [(1024.0, square)] * 2 + [(square, inner)] * 3
    flops = 32 * sum(5 * (4 * k**2 * l_ + 2 * k**3) for k, l_ in shapes)
    assert flops / 795e12 < found[1] < 2.0 * flops / 795e12
    parts = {
        part.name: np.broadcast_to(part.values, (2,)) for part in step_parts(numbers, constants())
    }
    assert parts["orthogonal updates"] == pytest.approx(found)


def test_plan_probe_muon_gathers_divided_matrices_in_every_iteration():
    slow = replace(H100, fast_bytes_per_s=H100.fast_bytes_per_s / 1000.0)

    def seconds(cluster, sharding):
        run = configuration(optimizer="muon", sharding=sharding, data=8)
        numbers = cases([(LLAMA_8B, run, cluster)])
        return orthogonal_seconds(numbers, constants(), numbers.layers)[0]

    assert seconds(slow, "optimizer") == seconds(H100, "optimizer")
    added = seconds(slow, "parameters") - seconds(H100, "parameters")
    square, inner, kv = 4096.0, 14336.0, 1024.0
    values = 4 * square**2 + 2 * square**2 + 4 * kv * square + 2 * kv**2
    values += 2 * square * inner + square**2
    rate = slow.fast_bytes_per_s * constants().fast_efficiency[0]
    expected = 32 * 5 * 2.0 * values * 7 / 8 / rate
    assert added == pytest.approx(expected, rel=0.01)


def test_plan_probe_processors_start_kernels_and_compute_in_turn():
    run = replace(SETTINGS[0].run, data=1, sharding="none", sharding_ranks=0, batch=8)
    row = (SETTINGS[0].model, run, divided(MACHINE, 1))
    slow, fast = (
        step_seconds(cases([row]), constants({"kernel_seconds": seconds}))[0]
        for seconds in (4e-5, 2e-5)
    )
    faster = step_seconds(cases([row]), constants({"kernel_seconds": 1e-9}))[0]
    assert slow - fast == pytest.approx(fast - faster, rel=1e-3)
