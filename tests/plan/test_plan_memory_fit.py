"""The fit of memory constants: what was put in comes out, and failed runs count."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from plan_runs import first_stage_allocated, first_stage_reserved

from outlast.plan.batch import Cases, cases
from outlast.plan.cluster import Cluster
from outlast.plan.configuration import Configuration
from outlast.plan.constants import MEMORY_PRIORS, MemoryConstants, memory_constants
from outlast.plan.memory import room
from outlast.plan.memory_fit import MemoryRuns, fit_memory
from outlast.plan.transformer import Transformer

MODEL = Transformer(
    layers=24,
    hidden=2048,
    heads=16,
    kv_heads=16,
    head_width=128,
    intermediate=8192,
    gated=True,
    vocabulary=50304,
    tied=True,
)
TRUE = {
    "bucket_bytes": 2.0,
    "copy_bytes": 1.5,
    "gather_buffers": 2.0,
    "buffers_ahead": 30.0,
    "fragment_share": 0.05,
    "library_bytes": 5e8,
}


def sweep(constants: MemoryConstants, software: str = "ours", **settings: object) -> MemoryRuns:
    """Runs of many shapes, whose memory the model itself says."""
    runs = []
    for data, tensor in ((1, 1), (2, 1), (8, 1), (1, 4), (4, 4), (2, 8)):
        for pipeline in (1, 4):
            for micro_batch in (1, 4, 16):
                for sharding in ("none", "optimizer"):
                    run = Configuration(
                        data=data,
                        tensor=tensor,
                        pipeline=pipeline,
                        sequence=4096,
                        micro_batch=micro_batch,
                        batch=32 * data * micro_batch,
                        sharding=sharding,
                        **settings,
                    )
                    runs.append((MODEL, run, _cluster(run.devices)))
    many = cases(runs)
    failed = room(many, constants).pressing > 1.0
    reserved = np.where(failed, np.nan, first_stage_reserved(many, constants))
    allocated = np.where(failed, np.nan, first_stage_allocated(many, constants))
    return MemoryRuns(
        cases=many,
        allocated_bytes=allocated,
        peak_bytes=np.full(len(runs), np.nan),
        reserved_bytes=reserved,
        out_of_memory=failed,
        software=(software,) * len(runs),
    )


def _cluster(devices: int) -> Cluster:
    return Cluster(
        name="a test cluster",
        device="A100",
        nodes=-(-devices // 8),
        devices_per_node=8,
        fast_domain=8,
        peak_flop_per_s={"bf16": 312e12, "fp32": 19.5e12},
        matmul_flop_per_s={"bf16": 250e12, "fp32": 15e12},
        memory_bytes=80 * 2**30,
        memory_bytes_per_s=2e12,
        fast_bytes_per_s=300e9,
        fabric_bytes_per_s=25e9,
    )


@pytest.fixture(scope="module")
def runs() -> MemoryRuns:
    return sweep(memory_constants(TRUE))


def test_what_was_put_in_comes_out(runs: MemoryRuns) -> None:
    assert 0.1 < runs.out_of_memory.mean() < 0.6
    seen = np.arange(len(runs.software)) % 5 < 3
    fitted = fit_memory(runs.taken(seen))
    others = runs.taken(~seen)
    constants = fitted.constants(others.software)
    known = ~others.out_of_memory
    reserved = first_stage_reserved(others.cases, constants)[known]
    assert reserved == pytest.approx(others.reserved_bytes[known], rel=0.03)
    allocated = first_stage_allocated(others.cases, constants)[known]
    assert allocated == pytest.approx(others.allocated_bytes[known], rel=0.01)
    told = room(others.cases, constants).pressing > 1.0
    assert (told == others.out_of_memory).mean() > 0.95
    assert fitted.values["bucket_bytes"] == pytest.approx(2.0, rel=0.05)


def test_failed_runs_alone_lower_the_limit(runs: MemoryRuns) -> None:
    usual = memory_constants(TRUE)
    close = (room(runs.cases, usual).pressing > 0.85) & ~runs.out_of_memory
    assert close.any()
    told = MemoryRuns(
        cases=runs.cases,
        allocated_bytes=runs.allocated_bytes,
        peak_bytes=runs.peak_bytes,
        reserved_bytes=np.where(close, np.nan, runs.reserved_bytes),
        out_of_memory=runs.out_of_memory | close,
        software=runs.software,
    )
    before, after = fit_memory(runs), fit_memory(told)
    assert after.values["usable_share"] < before.values["usable_share"]


def test_what_was_reserved_could_be_had(runs: MemoryRuns) -> None:
    fitting = np.flatnonzero(~runs.out_of_memory)
    usual = runs.taken(fitting)
    fullest = int(np.argmax(usual.reserved_bytes))
    reserved = usual.reserved_bytes.copy()
    reserved[fullest] = 0.985 * 80 * 2**30
    told = replace(usual, reserved_bytes=reserved)
    before, after = (fit_memory(each).values["usable_share"] for each in (usual, told))
    assert before + 0.003 < after < 0.985


def test_programs_differ_where_they_may(runs: MemoryRuns) -> None:
    quiet = sweep(memory_constants({**TRUE, "buffers_ahead": 1.0}), "theirs")
    both = MemoryRuns(
        cases=cases_of(runs, quiet),
        allocated_bytes=np.concatenate([runs.allocated_bytes, quiet.allocated_bytes]),
        peak_bytes=np.concatenate([runs.peak_bytes, quiet.peak_bytes]),
        reserved_bytes=np.concatenate([runs.reserved_bytes, quiet.reserved_bytes]),
        out_of_memory=np.concatenate([runs.out_of_memory, quiet.out_of_memory]),
        software=runs.software + quiet.software,
    )
    constants = fit_memory(both).constants(("ours", "theirs", "a third"))
    ours, theirs, third = constants.buffers_ahead
    assert ours > 15.0 > 5.0 > theirs
    assert theirs < third < ours
    assert constants.fragment_share.shape == (1,)


def cases_of(*some: MemoryRuns) -> Cases:
    columns = {
        field.name: np.concatenate(
            [np.broadcast_to(getattr(each.cases, field.name), len(each.software)) for each in some]
        )
        for field in fields(Cases)
    }
    return Cases(**columns)


def test_a_process_on_a_cpu_is_fitted_from_its_resident_set() -> None:
    truth = memory_constants({"process_bytes": 7e8})
    known = sweep(truth, precision="fp32")
    here = replace(known.cases, processor=np.ones(1))
    resident = MemoryRuns(
        cases=here,
        allocated_bytes=np.full(len(known.software), np.nan),
        peak_bytes=np.full(len(known.software), np.nan),
        reserved_bytes=room(here, truth).reserved_bytes,
        out_of_memory=np.zeros(len(known.software), bool),
        software=known.software,
        first_stage=False,
    )
    fitted = fit_memory(resident.taken(np.arange(0, len(known.software), 7)))
    found = room(here, fitted.constants(resident.software)).reserved_bytes
    assert np.median(np.abs(found / resident.reserved_bytes - 1.0)) < 0.05


def test_bounds_hold_and_scales_are_inverse() -> None:
    for name, prior in MEMORY_PRIORS.items():
        position = prior.unbounded(np.array(prior.median))
        assert prior.bounded(position) == pytest.approx(prior.median), name
        assert prior.bounded(position + 50.0) <= prior.most
