"""Which divisions of the work are possible: one sentence each, and the same for many at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import PlanError
from outlast.plan.batch import cases
from outlast.plan.cluster_file import cluster_of
from outlast.plan.configuration import Configuration
from outlast.plan.constraints import FRAMEWORKS, legal, problems, warnings
from outlast.plan.huggingface import published
from outlast.plan.transformer import Transformer

H100 = cluster_of("h100x64")
LLAMA = published("llama-3-8b")
BIG = published("llama-3.1-405b")
MIXTURE = published("qwen3-30b-a3b")


def run(**changes: Any) -> Configuration:
    usual: dict[str, Any] = {"sequence": 8192, "micro_batch": 1, "batch": 64}
    return Configuration(**{**usual, **changes})


def test_common_runs_are_possible_everywhere() -> None:
    assert problems(LLAMA, run(data=64, sharding="parameters"), H100) == []
    assert problems(LLAMA, run(data=8, tensor=8), H100, "megatron") == []
    assert problems(LLAMA, run(data=64, sharding="parameters"), H100, "outlast") == []
    assert problems(LLAMA, run(), H100) == []
    huge = cluster_of("h100x100000")
    wide = run(data=12500, tensor=8, batch=12500)
    assert problems(BIG, wide, huge) == []
    assert any("extrapolated" in text for text in warnings(BIG, wide, huge))


@pytest.mark.parametrize(
    ("model", "changes", "framework", "said"),
    [
        (LLAMA, {"data": 128, "batch": 128}, "any", "128 devices, but h100x64 has 64"),
        (LLAMA, {"tensor": 3}, "any", "tensor = 3 does not divide heads = 32"),
        (LLAMA, {"tensor": 16}, "torchtitan", "tensor = 16 does not divide kv_heads = 8"),
        (published("gpt2"), {"tensor": 2, "sequence": 1024}, "torchtitan", "vocabulary = 50257"),
        (LLAMA, {"pipeline": 64}, "any", "64 stages, but llama-3-8b has 32 layers"),
        (
            published("llama-3-70b"),
            {"pipeline": 8, "stages_per_rank": 3, "schedule": "interleaved"},
            "megatron",
            "layers = 80 of llama-3-70b do not divide into 24 stages",
        ),
        (
            LLAMA,
            {"pipeline": 8, "stages_per_rank": 2, "schedule": "interleaved", "batch": 4},
            "any",
            "micro_batches = 4 do not fill",
        ),
        (
            LLAMA,
            {"pipeline": 8, "stages_per_rank": 2, "schedule": "interleaved", "batch": 12},
            "megatron",
            "micro_batches = 12 do not fill",
        ),
        (LLAMA, {"stages_per_rank": 2, "schedule": "interleaved"}, "any", "needs pipeline > 1"),
        (LLAMA, {"data": 64, "batch": 32}, "any", "batch = 32 gives no sample"),
        (LLAMA, {"data": 8, "micro_batch": 3}, "any", "batch = 64 is no multiple"),
        (LLAMA, {"context": 16, "sequence": 8200}, "any", "twice context = 16"),
        (LLAMA, {"tensor": 8, "sequence": 1001}, "any", "sequence_parallel = true needs"),
        (LLAMA, {"data": 8, "expert": 8}, "any", "llama-3-8b has no experts"),
        (MIXTURE, {"data": 24, "batch": 24, "expert": 24}, "any", "does not divide experts = 128"),
        (MIXTURE, {"data": 8, "expert": 16}, "any", "expert = 16 does not divide data = 8"),
        (
            LLAMA,
            {"data": 8, "sharding": "parameters", "sharding_ranks": 3},
            "any",
            "sharding_ranks = 3 does not divide data = 8",
        ),
        (LLAMA, {"context": 2}, "outlast", "Outlast does not divide sequences"),
        (LLAMA, {"pipeline": 2, "tensor": 2}, "outlast", "cannot be combined in Outlast"),
        (LLAMA, {"data": 8, "sharding": "optimizer"}, "outlast", "use none, parameters"),
        (LLAMA, {"precision": "fp8"}, "outlast", "precision = 'fp8'"),
        (LLAMA, {"data": 2, "tensor": 2}, "outlast", "whole replicas"),
        (published("llama-3.2-1b"), {"pipeline": 2}, "outlast", "are tied"),
        (
            LLAMA,
            {"pipeline": 2, "data": 2, "sharding": "parameters"},
            "deepspeed",
            "cannot be combined in DeepSpeed",
        ),
        (LLAMA, {"pipeline": 2}, "accelerate", "use pipeline = 1"),
    ],
)
def test_impossible_runs_are_told_in_one_sentence(
    model: Transformer, changes: dict[str, Any], framework: str, said: str
) -> None:
    found = problems(model, run(**changes), H100, framework)
    assert [text for text in found if said in text], found
    assert not [text for text in found if "{" in text or "\n" in text]


def test_key_heads_are_copied_where_the_framework_can() -> None:
    wide = run(tensor=16, data=4)
    assert problems(LLAMA, wide, H100, "megatron") == []
    assert any("computed 2 times" in text for text in warnings(LLAMA, wide, H100, "megatron"))
    assert any("fast domain of 8" in text for text in warnings(LLAMA, wide, H100))
    assert problems(LLAMA, wide, H100, "torchtitan")


def test_uneven_stages_are_possible_and_said() -> None:
    uneven = run(pipeline=16, data=2, tensor=2)
    assert problems(BIG, uneven, H100, "megatron") == []
    assert any(
        "layers = 126 of llama-3.1-405b over 16 stages are uneven: some stages hold 8" in text
        for text in warnings(BIG, uneven, H100)
    )
    even = published("llama-3-70b")
    assert not any("uneven" in text for text in warnings(even, uneven, H100))
    # 126 blocks, the embedding and the head make 128 even parts.
    parts = run(pipeline=16, stages_per_rank=2, schedule="interleaved")
    assert problems(BIG, parts, H100, "megatron") == []


def test_a_precision_that_the_cluster_has_not_is_a_problem() -> None:
    a100 = cluster_of("a100x8")
    found = problems(LLAMA, run(precision="fp8", tensor=3), a100)
    assert "fp8" in found[0]
    assert "heads = 32" in found[1]


def test_unknown_frameworks_are_answered_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="did you mean 'megatron'"):
        problems(LLAMA, run(), H100, "megatorn")


SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16])


@st.composite
def models(draw: st.DrawFn) -> Transformer:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts = draw(st.sampled_from([0, 4, 6, 16]))
    layers = draw(st.integers(1, 24))
    return Transformer(
        layers=layers,
        hidden=64,
        heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads=kv_heads,
        head_width=draw(st.sampled_from([7, 16, 128])),
        intermediate=draw(st.sampled_from([48, 50, 96])),
        gated=draw(st.booleans()),
        vocabulary=draw(st.sampled_from([96, 50257])),
        tied=draw(st.booleans()),
        experts=experts,
        experts_per_token=2 if experts else 0,
        expert_intermediate=draw(st.sampled_from([24, 25])) if experts else 0,
        dense_layers=draw(st.integers(0, layers)) if experts else 0,
    )


@st.composite
def runs(draw: st.DrawFn) -> Configuration:
    data = draw(SIZES)
    return Configuration(
        data=data,
        tensor=draw(SIZES),
        sequence_parallel=draw(st.booleans()),
        context=draw(st.sampled_from([1, 1, 2, 3])),
        pipeline=draw(SIZES),
        stages_per_rank=draw(st.sampled_from([1, 1, 2, 3])),
        schedule=draw(st.sampled_from(["1f1b", "interleaved", "zero_bubble", "gpipe"])),
        expert=draw(st.sampled_from([1, 1, 2, 3, 4])),
        sharding=draw(st.sampled_from(["none", "optimizer", "gradients", "parameters"])),
        sharding_ranks=draw(st.integers(0, data)),
        sequence=draw(st.sampled_from([96, 100, 4096])),
        micro_batch=draw(st.sampled_from([1, 2, 3])),
        batch=draw(st.sampled_from([1, 4, 8, 24, 48, 144])),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp8"])),
    )


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(st.tuples(models(), runs()), min_size=1, max_size=12),
    framework=st.sampled_from(sorted(FRAMEWORKS)),
)
def test_many_at_once_agree_with_one_at_a_time(
    rows: list[tuple[Transformer, Configuration]], framework: str
) -> None:
    many = cases([(model, each, H100) for model, each in rows])
    one_by_one = [not problems(model, each, H100, framework) for model, each in rows]
    assert legal(many, devices=H100.devices, framework=framework).tolist() == one_by_one


def possible(model: Transformer, run: Configuration, devices: int) -> bool:
    """What "any" framework asks for, written again with integers."""
    stages = run.pipeline * run.stages_per_rank
    large, small = max(model.kv_heads, run.tensor), min(model.kv_heads, run.tensor)
    checks = [
        run.devices <= devices,
        model.heads % run.tensor == 0,
        large % small == 0,
        not model.plain_layers or model.intermediate % run.tensor == 0,
        not model.mixture_layers or model.expert_intermediate % run.tensor == 0,
        run.context == 1 or run.sequence % (2 * run.context) == 0,
        not (run.sequence_parallel and run.tensor > 1)
        or run.sequence % (run.tensor * run.context) == 0,
        model.layers >= stages,
        run.stages_per_rank == 1 or (run.pipeline > 1 and run.schedule != "gpipe"),
        run.stages_per_rank == 1
        or run.schedule == "zero_bubble"
        or run.micro_batches >= run.pipeline,
        run.batch % (run.data * run.micro_batch) == 0,
        run.expert == 1 or model.mixture_layers > 0,
        not model.mixture_layers or model.experts % run.expert == 0,
        run.data % run.expert == 0,
        run.data % (run.sharding_ranks or run.data) == 0,
    ]
    return all(checks)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(models(), runs()), min_size=1, max_size=8))
def test_legality_is_what_the_rules_say(rows: list[tuple[Transformer, Configuration]]) -> None:
    many = cases([(model, each, H100) for model, each in rows])
    expected = [possible(model, each, H100.devices) for model, each in rows]
    assert legal(many, devices=H100.devices).tolist() == expected


def test_a_hundred_thousand_cases_of_one_model_are_judged_at_once() -> None:
    one = cases([(LLAMA, run(), H100)])
    count = 100_000
    tensor = np.tile([1.0, 2.0, 3.0, 8.0], count // 4)
    many = replace(one, tensor=tensor, devices=tensor)
    assert legal(many, devices=64.0).tolist() == np.tile([True, True, False, True], 25_000).tolist()
