"""A search within a framework finds nothing that cannot be written out for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_runs import H100, LLAMA_8B, MIXTURE, configuration

from outlast.errors import PlanError
from outlast.plan.emit import emitted
from outlast.plan.space import WORDS, Axes, Space, space
from outlast.plan.targets import can_express
from outlast.plan.transformer import Transformer

TARGETS = ("outlast", "torchtitan", "megatron", "deepspeed", "accelerate")
BASE = configuration(batch=256, sequence=4096)


def found(model: Transformer, framework: str, **axes: object) -> Space:
    return space(model, BASE, H100, Axes(**axes), framework=framework)


@pytest.mark.parametrize("framework", TARGETS)
@pytest.mark.parametrize("model", [LLAMA_8B, MIXTURE], ids=lambda model: model.name)
def test_every_layout_of_a_framework_can_be_written(model: Transformer, framework: str) -> None:
    there = found(
        model,
        framework,
        devices=(8, 24, 64),
        sequence_parallel=(True, False),
        schedule=("1f1b", "interleaved", "zero_bubble", "gpipe"),
    )
    fp16 = there.table["precision"] == WORDS["precision"].index("fp16")
    assert np.all(can_express(framework, there.whole.layouts, fp16=fp16))
    for row in np.random.default_rng(0).integers(0, len(there), 30):
        files = emitted(framework, model, there.candidate(int(row)).configuration, H100)
        assert all(files.values())


@pytest.mark.parametrize("framework", TARGETS)
def test_the_usual_choices_divide_matrices_in_every_framework(framework: str) -> None:
    assert (found(LLAMA_8B, framework).table["tensor"] > 1).any()


def test_no_run_stops_within_a_node() -> None:
    devices = {"devices": (12, 24), "tensor": (3, 1), "pipeline": (1, 3)}
    odd = replace(LLAMA_8B, heads=24, kv_heads=24)
    alone = found(odd, "torchtitan", **devices)
    assert {alone.candidate(row).configuration.devices for row in range(len(alone))} == {24}
    free = found(odd, "any", **devices)
    assert {free.candidate(row).configuration.devices for row in range(len(free))} == {12, 24}


def test_a_search_that_finds_nothing_to_write_says_why() -> None:
    with pytest.raises(
        PlanError, match="can be written for deepspeed: for example, sequence_parallel"
    ):
        found(LLAMA_8B, "deepspeed", tensor=(2,), sequence_parallel=(True,))
    latent = replace(LLAMA_8B, projection_parameters=4096 * 4096)
    with pytest.raises(PlanError, match=r"projection_parameters = .* is not written for megatron"):
        found(latent, "megatron")
    assert len(found(latent, "accelerate")) > 0
