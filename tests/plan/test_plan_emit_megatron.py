"""Emitted plans say what Megatron-core's own configurations take."""

import re
import shlex

import pytest
import yaml

pytest.importorskip("megatron.core", reason="megatron-core (the extra integrations) is missing")

import dataclasses

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from plan_emit_runs import CLUSTER, RUNS

from outlast.plan.emit import emitted

# What belongs to the model of Megatron-Bridge and to no configuration of the core.
OF_THE_PROVIDER = {"seq_length", "vocab_size", "share_embeddings_and_output_weights"}


def names_of(config):
    return {field.name for field in dataclasses.fields(config)}


@pytest.fixture(scope="module")
def texts():
    model, run = RUNS["megatron"]
    # Of fp8 it wants to see Transformer Engine.
    return emitted("megatron", model, dataclasses.replace(run, precision="bf16"), CLUSTER)


@pytest.mark.supports("megatron", "plan")
def test_the_bridge_is_given_what_the_core_takes(texts):
    values = yaml.safe_load(texts["megatron_bridge.yaml"])
    model = values["model"]
    assert model.keys() - OF_THE_PROVIDER <= names_of(TransformerConfig)
    assert values["ddp"].keys() <= names_of(DistributedDataParallelConfig)
    assert values["optimizer"].keys() <= names_of(OptimizerConfig)
    taken = {name: each for name, each in model.items() if name not in OF_THE_PROVIDER}
    # The name in mixed_precision gives these.
    config = TransformerConfig(
        **taken, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, bf16=True
    )
    assert config.num_layers == RUNS["megatron"][0].layers
    DistributedDataParallelConfig(**values["ddp"])
    OptimizerConfig(**values["optimizer"])


# What megatron/training/arguments.py turns into fields of another name, or needs itself.
OF_THE_SCRIPT = """
    seq_length max_position_embeddings position_embedding_type disable_bias_linear
    group_query_attention swiglu untie_embeddings_and_output_weights num_experts
    micro_batch_size global_batch_size train_iters lr_decay_style lr_warmup_iters seed save load
    save_interval exit_signal_handler log_interval eval_iters accumulate_allreduce_grads_in_fp32
    vocab_size tokenizer_type mock_data
"""


@pytest.mark.supports("megatron", "plan")
def test_the_arguments_have_the_names_of_the_core(texts):
    listed = re.search(r"arguments=\(\n(.*?)\n\)\n", texts["megatron.sh"], re.DOTALL)
    words = shlex.split(listed[1])
    given = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    fields = set.union(
        *map(names_of, (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig))
    )
    assert given - fields == set(OF_THE_SCRIPT.split())
