"""What the frameworks that run a configuration can and cannot divide.

This table is for judging a run that exists or is asked about: `legal.problems` refuses what a
framework cannot run at all, so that measured rows and jobs of all kinds can be predicted. What
`emit` can write for a framework is narrower and in `outlast.plan.emit.frameworks`; a search within
a framework keeps to both, since its answer is to be written out and launched.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from outlast.errors import PlanError

_ALL_SCHEDULES = frozenset({"1f1b", "interleaved", "zero_bubble", "gpipe"})
_ALL_SHARDING = frozenset({"none", "optimizer", "gradients", "parameters"})
_ALL_PRECISIONS = frozenset({"fp32", "fp16", "bf16", "fp8"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """The abilities of one framework.

    Attributes:
        label: For people.
        calibrated_as: Name that published runs of it have; empty where there are none.
        also: Other names that users and logs give it; letter case is ignored.
        replicates_kv_heads: More tensor ranks than key heads, each head held several times.
        pads_vocabulary: To a multiple of the tensor ranks.
        uneven_interleaved: Stages of an interleaved schedule may hold different numbers of
            blocks; without, only embedding and head may each stand for a block.
        whole_rounds: An interleaved schedule needs a multiple of the stages in micro-batches.
        uneven_batches: Ranks and micro-batches may have shares that differ by a sample.
        tensor: Divides matrices.
        context: Divides sequences.
        expert: Divides experts.
        replicas_with_tensor: Whole replicas whose matrices are divided.
        tensor_in_pipeline: Both at once.
        most_sharding_in_pipeline: As ZeRO counts, what pipeline ranks can share with replicas.
        tied_in_pipeline: Embedding and head may be one tensor on two stages.
        schedules: Of the pipeline; empty where there is none.
        sharding: What data ranks may divide.
        precisions: Of the products.
    """

    label: str
    calibrated_as: str = ""
    also: tuple[str, ...] = ()
    replicates_kv_heads: bool = True
    pads_vocabulary: bool = False
    uneven_interleaved: bool = True
    whole_rounds: bool = False
    uneven_batches: bool = False
    tensor: bool = True
    context: bool = True
    expert: bool = True
    replicas_with_tensor: bool = True
    tensor_in_pipeline: bool = True
    most_sharding_in_pipeline: int = 3
    tied_in_pipeline: bool = True
    schedules: frozenset[str] = _ALL_SCHEDULES
    sharding: frozenset[str] = _ALL_SHARDING
    precisions: frozenset[str] = _ALL_PRECISIONS


_MEGATRON = Framework(
    label="Megatron-LM",
    calibrated_as="Megatron-LM",
    also=("Megatron-Core",),
    pads_vocabulary=True,
    uneven_interleaved=False,
    whole_rounds=True,
    most_sharding_in_pipeline=1,
    schedules=frozenset({"1f1b", "interleaved"}),
    sharding=frozenset({"none", "optimizer", "parameters"}),
)

FRAMEWORKS: Mapping[str, Framework] = {
    "any": Framework(label="any framework", pads_vocabulary=True),
    "outlast": Framework(
        label="Outlast",
        replicates_kv_heads=False,
        whole_rounds=True,
        uneven_batches=True,
        context=False,
        expert=False,
        replicas_with_tensor=False,
        tensor_in_pipeline=False,
        most_sharding_in_pipeline=0,
        tied_in_pipeline=False,
        schedules=frozenset({"1f1b", "interleaved"}),
        sharding=frozenset({"none", "parameters"}),
        precisions=frozenset({"fp32", "bf16"}),
    ),
    "torchtitan": Framework(
        label="torchtitan",
        replicates_kv_heads=False,
        whole_rounds=True,
        tied_in_pipeline=False,
        sharding=frozenset({"none", "gradients", "parameters"}),
        precisions=frozenset({"fp32", "bf16", "fp8"}),
    ),
    "megatron": _MEGATRON,
    "nemo": Framework(
        label="NeMo",
        calibrated_as="Megatron-Bridge",
        pads_vocabulary=True,
        uneven_interleaved=False,
        whole_rounds=True,
        most_sharding_in_pipeline=1,
        schedules=_MEGATRON.schedules,
        sharding=_MEGATRON.sharding,
    ),
    "nanotron": Framework(
        label="nanotron",
        calibrated_as="nanotron",
        replicates_kv_heads=False,
        pads_vocabulary=True,
        context=False,
        most_sharding_in_pipeline=1,
        schedules=frozenset({"1f1b", "gpipe"}),
        sharding=frozenset({"none", "optimizer"}),
        precisions=frozenset({"fp32", "bf16"}),
    ),
    "deepspeed": Framework(
        label="DeepSpeed",
        calibrated_as="Megatron-DeepSpeed",
        most_sharding_in_pipeline=1,
        schedules=frozenset({"1f1b"}),
        precisions=frozenset({"fp32", "fp16", "bf16"}),
    ),
    "accelerate": Framework(
        label="Accelerate",
        also=("HF Trainer", "Transformers"),
        replicates_kv_heads=False,
        expert=False,
        schedules=frozenset(),
    ),
    "llm-foundry": Framework(
        label="llm-foundry",
        calibrated_as="llm-foundry",
        also=("MosaicML", "mosaic"),
        replicates_kv_heads=False,
        tensor=False,
        context=False,
        expert=False,
        schedules=frozenset(),
        sharding=frozenset({"none", "gradients", "parameters"}),
    ),
}
"""By the name that `framework` settings give.

Abilities are from memory of each one's documentation: check before refusing a run for them. What a
framework calls experimental (Megatron's layout of stages by hand) is left out. "any" has all that
some framework has.
"""


KEYS: Mapping[str, str] = {
    name.casefold(): key
    for key, kind in FRAMEWORKS.items()
    for name in (*kind.also, kind.calibrated_as, kind.label, key)
    if name
}
"""Keys of `FRAMEWORKS` by every name of a framework, in small letters."""
CALIBRATED_AS: Mapping[str, str] = {
    name: kind.calibrated_as
    for key, kind in FRAMEWORKS.items()
    for name in (key, *kind.also)
    if kind.calibrated_as
}
"""Names that published runs have, by the names of frameworks; others keep their own."""


def framework_key(name: str) -> str:
    """The key in `FRAMEWORKS` of a framework by any of its names.

    Raises:
        PlanError: No such framework; the sentence suggests the nearest.
    """
    found = KEYS.get(str(name).casefold())
    if found is None:
        near = difflib.get_close_matches(str(name).casefold(), KEYS, n=1)
        hint = f"did you mean {KEYS[near[0]]!r}?" if near else f"known are {', '.join(FRAMEWORKS)}"
        raise PlanError(f"framework = {name!r} is not known: {hint}")
    return found


def framework_named(name: str) -> Framework:
    """The abilities of a framework.

    Raises:
        PlanError: As `framework_key`.
    """
    return FRAMEWORKS[framework_key(name)]
