"""Memory of a run: published figures, the sum of its parts, limits and bad input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_runs import LLAMA_8B, MIXTURE, first_stage_allocated, first_stage_reserved

from outlast.plan.batch import Cases, cases, last_blocks, most_blocks, stage, stages_of
from outlast.plan.cluster import Cluster
from outlast.plan.configuration import Configuration
from outlast.plan.constants import MEMORY_NAMES, MEMORY_PRIORS, memory_constants
from outlast.plan.huggingface import published
from outlast.plan.memory import CLIFF_HEADROOM, MEMORY, Room, memory_parts, room
from outlast.plan.transformer import Transformer

GIB = 2**30


def h100(devices: int, gib: float = 80.0) -> Cluster:
    rates = {"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "fp32": 67e12}
    return Cluster(
        name="a test cluster",
        device="H100",
        nodes=-(-devices // 8),
        devices_per_node=8,
        fast_domain=8,
        peak_flop_per_s=rates,
        matmul_flop_per_s={name: 0.8 * rate for name, rate in rates.items()},
        memory_bytes=gib * GIB,
        memory_bytes_per_s=3.35e12,
        fast_bytes_per_s=450e9,
        fabric_bytes_per_s=50e9,
    )


def one(model: Transformer = LLAMA_8B, **settings: object) -> Cases:
    run = Configuration(**{"sequence": 4096, "micro_batch": 1, "batch": 64, **settings})
    return cases([(model, run, h100(run.devices))])


def reserved(model: Transformer = LLAMA_8B, **settings: object) -> float:
    return float(room(one(model, **settings), memory_constants()).reserved_bytes[0])


def part(name: str, of: Cases, **values: float) -> float:
    terms = memory_parts(of, memory_constants(values), stage(of, "first"))
    found = {each.name: each.values for each in terms}
    return float(np.max(found[name]))


# Korthikanti et al. 2022 (2205.05198): GPT-3's shapes, sequence 2048, tensor 8.
GPT_22B = Transformer(
    layers=48,
    hidden=6144,
    heads=64,
    kv_heads=64,
    head_width=96,
    intermediate=24576,
    gated=False,
    vocabulary=51200,
    tied=True,
)
GPT_175B = replace(
    GPT_22B, layers=96, hidden=12288, heads=96, kv_heads=96, head_width=128, intermediate=49152
)


@pytest.mark.parametrize(
    ("model", "settings", "gib"),
    [
        (GPT_22B, {"batch": 4, "micro_batch": 4, "sequence_parallel": False}, 59.25),
        (
            GPT_175B,
            {
                "batch": 64,
                "micro_batch": 1,
                "pipeline": 8,
                "stages_per_rank": 3,
                "schedule": "interleaved",
                "recompute": "attention",
            },
            12.3515625,
        ),
    ],
)
def test_activations_are_those_of_the_published_formulas(
    model: Transformer, settings: dict[str, object], gib: float
) -> None:
    run = {"sequence": 2048, "tensor": 8, "precision": "fp16", "fused_attention": False}
    # Dropout keeps a mask of one byte at two places of the hidden width.
    found = part(
        "activations", one(model, **run, **settings), hidden_values=5.0, attention_values=2.0
    )
    assert found / GIB == pytest.approx(gib, rel=1e-3)


def test_states_of_mixed_precision_adam_are_18_bytes_per_parameter() -> None:
    of = one()
    states = sum(part(name, of) for name in ("weights", "gradients", "optimizer states"))
    embedded = LLAMA_8B.parameters - 65 * LLAMA_8B.hidden
    assert states == pytest.approx(18 * embedded, rel=1e-3)


def test_muon_keeps_one_moment_of_hidden_matrices() -> None:
    saved = part("optimizer states", one()) - part("optimizer states", one(optimizer="muon"))
    assert saved == pytest.approx(4 * (LLAMA_8B.parameters - 2 * 128256 * 4096), rel=1e-3)


def test_a_process_on_processors_needs_its_libraries() -> None:
    here = replace(one(tensor=2), processor=np.ones(1))
    quiet = memory_constants({"process_bytes": 1e9, "library_bytes": 1e6, "workspace_bytes": 0.0})
    parts = {
        each.name: float(each.values[0]) for each in memory_parts(here, quiet, stage(here, "first"))
    }
    assert parts["workspaces and libraries"] == 1e9
    assert parts["cached for collectives"] == 0.0


def test_sharding_divides_what_its_stage_says() -> None:
    names = ("weights", "gradients", "optimizer states")
    whole = {name: part(name, one(data=8)) for name in names}
    for sharding, divided in (("optimizer", names[2:]), ("gradients", names[1:])):
        for name in names:
            share = part(name, one(data=8, sharding=sharding)) / whole[name]
            assert share == pytest.approx(1 / 8 if name in divided else 1.0)
    full = one(data=8, sharding="parameters")
    # FSDP2 keeps fp32 shards alone and gathers two blocks and the tables.
    assert part("weights", full) == 0.0
    assert 0 < part("gathered weights", full) < 0.25 * whole["weights"]


def test_hybrid_sharding_divides_by_its_group_alone() -> None:
    all_ranks = part("optimizer states", one(data=64, sharding="parameters"))
    group = part("optimizer states", one(data=64, sharding="parameters", sharding_ranks=8))
    assert group == pytest.approx(8 * all_ranks)


def test_experts_are_divided_by_their_own_ranks() -> None:
    together = part("weights", one(MIXTURE, data=8))
    apart = part("weights", one(MIXTURE, data=8, expert=8))
    routed = 32 * 8 * MIXTURE.expert_parameters
    assert together - apart == pytest.approx(2 * routed * 7 / 8, rel=1e-6)


def test_a_mixture_keeps_activations_of_routed_tokens() -> None:
    dense = replace(
        MIXTURE,
        experts=0,
        experts_per_token=0,
        expert_intermediate=0,
        intermediate=MIXTURE.expert_intermediate,
    )
    assert part("activations", one(MIXTURE)) > 1.5 * part("activations", one(dense))


def test_fp32_runs_have_no_second_copy_of_weights() -> None:
    fp32 = one(precision="fp32")
    parameters = LLAMA_8B.parameters
    assert part("weights", fp32) == pytest.approx(4 * parameters, rel=1e-3)
    assert part("optimizer states", fp32) == pytest.approx(8 * parameters, rel=1e-3)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_parts_add_up_to_the_stage(place: str) -> None:
    of = one(data=4, tensor=2, pipeline=4, sharding="optimizer", micro_batch=4)
    parts = memory_parts(of, memory_constants(), stage(of, place))
    assert [each.name for each in parts] == list(MEMORY)
    for each in parts:
        assert np.isfinite(each.values).all()
        assert (each.values >= 0).all(), each.name
    if place == "first":
        total = sum(float(each.values[0]) for each in parts)
        assert total == pytest.approx(first_stage_reserved(of, memory_constants())[0], rel=1e-12)


def test_every_constant_has_a_prior_and_is_named_by_a_term_or_a_limit() -> None:
    named = {name for text in MEMORY.values() for name in text.constants}
    assert set(MEMORY_NAMES) == set(MEMORY_PRIORS)
    assert set(MEMORY_NAMES) - named == {"stuck_share"}


def test_the_table_of_stages_has_embedding_first_and_logits_last() -> None:
    of = one(pipeline=4)
    table = [memory_parts(of, memory_constants(), each) for each in stages_of(of)]
    activations = [_value(stage, "activations") for stage in table]
    assert len(table) == 4
    assert activations == sorted(activations, reverse=True)
    assert activations[0] == pytest.approx(4 * activations[3])
    assert [_value(stage, "logits and loss") > 0 for stage in table] == [False] * 3 + [True]
    weights = [_value(stage, "weights") for stage in table]
    assert sum(weights) == pytest.approx(2 * LLAMA_8B.parameters, rel=1e-3)


def test_schedules_keep_their_micro_batches() -> None:
    def kept(**settings: object) -> float:
        return part("activations", one(pipeline=4, batch=64, **settings))

    plain = kept()
    assert kept(schedule="gpipe") == pytest.approx(64 / 4 * plain)
    assert kept(schedule="zero_bubble") == plain
    interleaved = kept(schedule="interleaved", stages_per_rank=2)
    assert interleaved == pytest.approx((1 + 3 / 8) * plain)
    assert kept(data=32) == pytest.approx(2 / 4 * plain)


def test_context_ranks_divide_activations() -> None:
    assert part("activations", one(context=4)) == pytest.approx(part("activations", one()) / 4)


def test_fused_attention_keeps_no_scores() -> None:
    long = {"sequence": 8192, "tensor": 8}
    unfused = part("activations", one(**long, fused_attention=False))
    again = part("activations", one(**long, fused_attention=False, recompute="attention"))
    fused = part("activations", one(**long))
    assert unfused > 2 * fused
    assert again == pytest.approx(fused)


def test_a_small_run_fits_and_a_large_one_does_not() -> None:
    small = one(data=8, sharding="parameters", recompute="full")
    large = one()
    constants = memory_constants()
    assert fits(room(small, constants))
    assert not fits(room(large, constants))
    assert room(small, constants).pressing[0] < 1.0 < room(large, constants).pressing[0]
    held = [room(each, constants).headroom[0] for each in (small, large)]
    assert held[0] > 0.13 > 0 > held[1]


def fits(found: Room, least: float = CLIFF_HEADROOM) -> bool:
    return bool(found.headroom[0] >= least and found.pressing[0] < 1.0)


def test_a_run_that_just_fits_is_at_the_cliff() -> None:
    constants = memory_constants()
    of = one(data=8, sharding="parameters")
    wanted = (1.0 - room(of, constants).headroom) * of.memory_bytes
    tight = room(replace(of, memory_bytes=wanted / 0.9), constants)
    assert tight.headroom[0] < CLIFF_HEADROOM
    assert not fits(tight)
    assert fits(tight, least=0.05)
    roomy = room(replace(of, memory_bytes=wanted / 0.8), constants)
    assert roomy.headroom[0] >= CLIFF_HEADROOM


def test_cached_memory_shrinks_where_the_device_is_full() -> None:
    of = one(data=2, tensor=4, micro_batch=8, sharding="optimizer")
    of = replace(of, memory_bytes=np.array([1e12]))
    constants = memory_constants({"buffers_ahead": 40.0})
    free = room(of, constants)
    full = replace(of, memory_bytes=0.95 * (1.0 - free.headroom) * of.memory_bytes)
    assert room(full, constants).reserved_bytes[0] < 0.97 * free.reserved_bytes[0]
    allocated = [first_stage_allocated(each, constants)[0] for each in (full, of)]
    assert allocated[0] == allocated[1]


def test_allocated_after_a_step_has_no_activations() -> None:
    constants = memory_constants()
    small, large = (
        float(first_stage_allocated(one(micro_batch=each), constants)[0]) for each in (1, 8)
    )
    assert small == large
    assert small < reserved()


def test_all_cases_come_back_also_where_they_agree() -> None:
    run = Configuration(sequence=4096, micro_batch=1, batch=64)
    same = cases([(LLAMA_8B, run, h100(1))] * 3)
    found = room(same, memory_constants())
    assert found.reserved_bytes.shape == found.pressing.shape == found.headroom.shape == (3,)


def _value(parts: tuple[object, ...], name: str) -> float:
    return next(float(np.max(each.values)) for each in parts if each.name == name)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layers", "head", "stages", "first", "last"),
    [
        (28, 3.56, 2, 16, 12),
        (32, 2.21, 2, 18, 14),
        (32, 2.21, 4, 9, 6),
        (80, 1.1, 4, 21, 19),
        (80, 1.1, 8, 11, 9),
        (126, 0.58, 2, 64, 62),
        (126, 0.58, 8, 16, 15),
    ],
)
def test_stages_by_cost_are_cut_where_nanotron_cuts_them(
    layers: int, head: float, stages: int, first: int, last: int
) -> None:
    # By hand with its rule: blocks go to a stage until the cost so far exceeds the stages' share.
    of = one(replace(LLAMA_8B, layers=layers), pipeline=stages, balance="cost")
    assert most_blocks(of, np.full(1, head)) == first
    assert last_blocks(of, np.full(1, head)) == last


# torchtitan's own table of December 2024 (benchmarks/llama3_h100_202412_torchtitan.md): H100 with
# 96 GB, float8, full recomputation, GiB that the fullest rank reserves.
TITAN = [
    (0.05, "llama-3-8b", 83.9, {"data": 8, "sequence": 32768, "micro_batch": 1}),
    (0.05, "llama-3-8b", 84.2, {"data": 4, "context": 2, "sequence": 65536, "micro_batch": 1}),
    (0.05, "llama-3-8b", 84.5, {"context": 8, "sequence": 262144, "micro_batch": 1}),
    (0.15, "llama-3-70b", 71.9, {"data": 32, "tensor": 8, "sequence": 8192, "micro_batch": 16}),
    (
        0.15,
        "llama-3.1-405b",
        82.5,
        {"data": 8, "tensor": 8, "pipeline": 8, "sequence": 8192, "micro_batch": 4},
    ),
]


@pytest.mark.parametrize(("within", "model", "measured", "layout"), TITAN)
def test_priors_alone_say_what_torchtitan_measured(
    within: float, model: str, measured: float, layout: dict[str, int]
) -> None:
    rounds = layout.get("data", 1) * layout["micro_batch"] * layout.get("pipeline", 1)
    run = Configuration(
        **layout, batch=rounds, sharding="parameters", recompute="full", precision="fp8"
    )
    numbers = cases([(published(model), run, h100(run.devices, 94.0))])
    found = float(room(numbers, memory_constants()).reserved_bytes[0]) / GIB
    assert found == pytest.approx(measured, rel=within)
