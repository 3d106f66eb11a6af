"""Laws of the memory model that hold for every run."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.plan.batch import PLACES, Cases, stage
from outlast.plan.constants import memory_constants
from outlast.plan.memory import memory_parts, room

ENOUGH = 1e15
"""Bytes of a device on which nothing is squeezed out of the cache."""


@st.composite
def any_case(draw: st.DrawFn) -> Cases:
    """A run of any shape."""
    powers = st.integers(0, 5).map(lambda exponent: float(2**exponent))
    data, tensor, pipeline = draw(powers), draw(powers), draw(powers)
    layers = draw(st.integers(int(pipeline), 130))
    head_width = draw(st.sampled_from([64, 128]))
    heads = 8 * draw(st.integers(1, 16))
    half = draw(st.booleans())
    experts = draw(st.sampled_from([0, 8, 64]))
    chunks = draw(st.sampled_from([1.0, 2.0, 4.0])) if pipeline > 1 else 1.0
    numbers = {
        "layers": layers,
        "hidden": heads * head_width,
        "heads": heads,
        "query_width": heads * head_width,
        "kv_width": 8 * head_width,
        "intermediate": draw(st.integers(64, 60000)),
        "matrices": draw(st.sampled_from([2, 3])),
        "vocabulary": draw(st.integers(256, 300000)),
        "tied": draw(st.booleans()),
        "mixture_layers": layers if experts else 0,
        "experts": experts,
        "experts_per_token": 2 if experts else 0,
        "expert_intermediate": 1024 if experts else 0,
        "shared_intermediate": draw(st.sampled_from([0, 2048])) if experts else 0,
        "data": data,
        "tensor": tensor,
        "sequence_parallel": draw(st.booleans()),
        "context": draw(st.sampled_from([1.0, 2.0, 8.0])),
        "pipeline": pipeline,
        "stages_per_rank": chunks,
        "zero_bubble": 0,
        "gpipe": draw(st.booleans()) if chunks == 1.0 else 0,
        "by_cost": draw(st.booleans()),
        "expert": draw(st.sampled_from([1.0, min(data, 8.0)])) if experts else 1.0,
        "sharding": draw(st.integers(0, 3)),
        "sharding_ranks": data,
        "muon": draw(st.booleans()),
        "processor": draw(st.booleans()),
        "sequence": draw(st.integers(1, 32)) * 512,
        "micro_batch": draw(st.integers(1, 16)),
        "micro_batches": draw(st.integers(1, 64)),
        "recompute": draw(st.integers(0, 2)),
        "value_bytes": 2 if half else 4,
        "half": half,
        "quantized": 0,
        "gradient_bytes": draw(st.sampled_from([2, 4])) if half else 4,
        "fused_attention": draw(st.booleans()),
        "loss_bytes": 4,
        "memory_bytes": draw(st.sampled_from([ENOUGH, 80e9, 1e10])),
    }
    numbers["attention_parameters"] = numbers["hidden"] * (
        2 * numbers["query_width"] + 2 * numbers["kv_width"]
    )
    numbers["batch"] = data * numbers["micro_batch"] * numbers["micro_batches"]
    known = {field.name: np.array([float(numbers.get(field.name, 1))]) for field in fields(Cases)}
    return Cases(**known)


def reserved(case: Cases) -> float:
    return float(room(case, memory_constants()).reserved_bytes[0])


def changed(case: Cases, **values: float) -> Cases:
    return replace(case, **{name: np.array([float(value)]) for name, value in values.items()})


@settings(deadline=None, max_examples=60)
@given(any_case())
def test_parts_are_finite_and_not_negative_and_sum_to_the_total(case: Cases) -> None:
    constants = memory_constants()
    totals = {}
    for place in PLACES:
        parts = memory_parts(case, constants, stage(case, place))
        for part in parts:
            assert np.isfinite(part.values).all()
            assert (part.values >= 0.0).all(), part.name
        totals[place] = sum(float(np.max(part.values)) for part in parts)
    total = reserved(case)
    assert total == pytest.approx(max(totals["first"], totals["last"]), rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    any_case(),
    st.sampled_from(["micro_batch", "sequence", "vocabulary", "intermediate"]),
    st.integers(2, 5),
)
def test_more_of_anything_never_needs_less(case: Cases, name: str, factor: int) -> None:
    larger = changed(case, **{name: float(getattr(case, name)[0]) * factor})
    if name in {"vocabulary", "intermediate"}:
        # Where stages are balanced by cost, a dearer head moves blocks away from it.
        case, larger = changed(case, by_cost=0), changed(larger, by_cost=0)
    assert reserved(larger) >= reserved(case) * (1 - 1e-12)


@settings(deadline=None, max_examples=60)
@given(any_case(), st.integers(1, 40))
def test_more_layers_never_need_less(case: Cases, more: int) -> None:
    case = changed(case, memory_bytes=ENOUGH)
    layers = float(case.layers[0]) + more * float(case.pipeline[0])
    mixture = layers if case.mixture_layers[0] else 0
    larger = changed(case, layers=layers, mixture_layers=mixture)
    assert reserved(larger) >= reserved(case) * (1 - 1e-12)


@settings(deadline=None, max_examples=60)
@given(any_case())
def test_sharding_more_never_needs_more(case: Cases) -> None:
    case = changed(case, memory_bytes=ENOUGH)
    needs = [reserved(changed(case, sharding=level)) for level in range(4)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(needs))


@settings(deadline=None, max_examples=60)
@given(any_case(), st.sampled_from([2.0, 8.0]))
def test_a_larger_sharding_group_never_needs_more(case: Cases, factor: float) -> None:
    case = changed(case, memory_bytes=ENOUGH)
    ranks = float(case.sharding_ranks[0])
    wider = changed(case, sharding_ranks=ranks * factor, data=ranks * factor)
    case = changed(case, data=ranks * factor)
    assert reserved(wider) <= reserved(case) * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(any_case())
def test_recomputing_more_never_needs_more(case: Cases) -> None:
    none, attention, full = (reserved(changed(case, recompute=each)) for each in range(3))
    assert full <= attention * (1 + 1e-9)
    assert attention <= none * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(any_case())
def test_sequence_parallel_and_fused_attention_never_need_more(case: Cases) -> None:
    plain = reserved(changed(case, sequence_parallel=0))
    assert reserved(changed(case, sequence_parallel=1)) <= plain * (1 + 1e-9)
    unfused = reserved(changed(case, fused_attention=0))
    assert reserved(changed(case, fused_attention=1)) <= unfused * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(any_case())
def test_a_larger_device_is_never_worse(case: Cases) -> None:
    constants = memory_constants()
    small, large = changed(case, memory_bytes=40e9), changed(case, memory_bytes=80e9)
    worse, better = (room(each, constants) for each in (small, large))
    assert better.headroom[0] > worse.headroom[0]
    assert 0.0 <= better.pressing[0] <= worse.pressing[0]


@settings(deadline=None, max_examples=40)
@given(any_case())
def test_speeds_have_no_say_in_memory(case: Cases) -> None:
    faster = changed(case, peak_flop_per_s=1e15, fabric_bytes_per_s=1e12, devices_per_node=8)
    assert reserved(faster) == reserved(case)


@settings(deadline=None, max_examples=40)
@given(any_case())
def test_samples_and_tokens_are_two_units_of_the_same(case: Cases) -> None:
    # Fused attention keeps nothing per pair of tokens, so only their number counts.
    case = changed(case, fused_attention=1)
    halved = changed(
        case, sequence=float(case.sequence[0]) / 2, micro_batch=float(case.micro_batch[0]) * 2
    )
    assert reserved(halved) == pytest.approx(reserved(case), rel=1e-12)


@settings(deadline=None, max_examples=20)
@given(st.lists(any_case(), min_size=2, max_size=6))
def test_many_cases_at_once_are_the_same_as_one_by_one(some: list[Cases]) -> None:
    together = Cases(
        **{
            field.name: np.concatenate([getattr(case, field.name) for case in some])
            for field in fields(Cases)
        }
    )
    found = room(together, memory_constants()).reserved_bytes
    assert found == pytest.approx([reserved(case) for case in some], rel=1e-12)
