"""What a framework can express: one table, asked for one run or for many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_emit_runs import CLUSTER, DENSE, MIXTURE, PLAIN, SHARED, configured

from outlast.errors import PlanError
from outlast.plan.batch import cases
from outlast.plan.configuration import Configuration
from outlast.plan.targets import TARGETS, can_express, problem

CHOICES = {
    "data": (1, 2, 4, 8),
    "tensor": (1, 1, 2, 3, 4),
    "sequence_parallel": (False, True),
    "context": (1, 1, 2, 3, 4),
    "pipeline": (1, 1, 2, 3, 4),
    "stages_per_rank": (1, 1, 2),
    "schedule": ("1f1b", "interleaved", "zero_bubble", "gpipe"),
    "balance": ("layers", "cost"),
    "expert": (1, 1, 2, 4),
    "sharding": ("none", "optimizer", "gradients", "parameters"),
    "sharding_ranks": (0, 1),
    "sequence": (512, 100),
    "micro_batch": (1, 2),
    "batch": (1, 16, 24),
    "recompute": ("none", "attention", "full"),
    "precision": ("fp32", "fp16", "bf16", "fp8"),
    "gradient_bytes": (4, 4, 2),
    "fused_attention": (True, False),
}


def drawn(**narrower):
    """Any run; of one value or several where so named."""
    return st.builds(
        Configuration,
        **{name: st.sampled_from(narrower.get(name, values)) for name, values in CHOICES.items()},
    )


runs = drawn()
models = st.sampled_from((DENSE, PLAIN, MIXTURE, SHARED))


@given(several=st.lists(st.tuples(models, runs), min_size=1, max_size=12))
def test_the_answer_for_many_is_the_answer_for_each(several):
    together = cases([(model, run, CLUSTER) for model, run in several])
    fp16 = np.array([run.precision == "fp16" for _, run in several])
    for target in TARGETS:
        able = can_express(target, together, fp16=fp16)
        assert able.tolist() == [problem(target, model, run) is None for model, run in several]


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_can_express_plain_data_parallelism(target):
    assert problem(target, DENSE, configured(data=4)) is None


REFUSED = (
    ("deepspeed", {"context": 2}, "context = 2", "context = 1"),
    ("deepspeed", {"pipeline": 2}, "pipeline = 2", 'sharding = "parameters"'),
    ("deepspeed", {"precision": "fp8"}, 'precision = "fp8"', '"bf16"'),
    (
        "deepspeed",
        {"data": 8, "sharding": "parameters", "sharding_ranks": 4},
        "sharding_ranks = 4",
        "sharding_ranks = 0",
    ),
    ("accelerate", {"pipeline": 2, "schedule": "zero_bubble"}, "pipeline = 2", "pipeline = 1"),
    ("accelerate", {"data": 2, "tensor": 2}, "tensor = 2", 'sharding = "parameters"'),
    ("accelerate", {"data": 2, "sharding": "optimizer"}, '"optimizer"', '"gradients"'),
    ("megatron", {"pipeline": 2, "schedule": "zero_bubble"}, '"zero_bubble"', '"interleaved"'),
    ("torchtitan", {"recompute": "attention"}, '"attention"', '"full"'),
    ("torchtitan", {"precision": "fp16"}, '"fp16"', '"bf16"'),
    ("outlast", {"pipeline": 2, "balance": "cost"}, '"cost"', '"layers"'),
    ("outlast", {"tensor": 2, "sequence_parallel": True}, "sequence_parallel = true", "false"),
    ("outlast", {"context": 4}, "context = 4", "context = 1"),
    ("megatron", {"tensor": 8}, "kv_heads = 4", "divides both"),
    ("megatron", {"data": 3}, "batch = 64", "multiple"),
    ("torchtitan", {"expert": 2, "data": 2}, "experts = 0", "or 1"),
)


@pytest.mark.parametrize(("target", "values", "named", "nearest"), REFUSED)
def test_what_cannot_be_expressed_is_named_with_the_nearest_that_can(
    target, values, named, nearest
):
    sentence = problem(target, DENSE, configured(**values))
    assert sentence is not None
    first, _, rest = sentence.partition(" cannot be expressed for ")
    assert named in first
    assert nearest in rest.partition("the nearest is ")[2]
    assert "\n" not in sentence


def test_an_unknown_target_is_answered_with_the_known_ones():
    with pytest.raises(PlanError, match="none of outlast, torchtitan"):
        problem("nemo", DENSE, configured())
