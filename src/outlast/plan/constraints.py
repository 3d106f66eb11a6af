"""Constraints on the division of the work, one rule per sentence, and limits of frameworks.

The rules judge a run that exists or is asked about: `problems` refuses what a framework cannot
run at all, so that measured rows and jobs of all kinds can be predicted. What
`emit` can write for a framework is narrower and in `outlast.plan.targets`; a search within
a framework keeps to both, since its answer is to be written out and launched.

    problems(model, run, cluster, "megatron")     # [] or one sentence for each thing that is wrong
    legal(cases, devices=512)                     # (cases,) of bool, by the same rules
    warnings(model, run, cluster)                 # what is possible and unwise

Frameworks differ in what they can: `FRAMEWORKS` says how. "any" asks only for what no framework
could do without. Whether a run fits into memory is not asked here.

Every rule reads `Cases`, so that one definition serves one run and many.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from outlast.errors import PlanError
from outlast.plan.batch import SHARDING, Cases, Mask, cases, remainder
from outlast.plan.cluster import Cluster
from outlast.plan.configuration import Configuration, Precision, Schedule, Sharding
from outlast.plan.facts import facts
from outlast.plan.transformer import Transformer


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
    also: Sequence[str] = ()
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
    schedules: Sequence[str] = get_args(Schedule)
    sharding: Sequence[str] = get_args(Sharding)
    precisions: Sequence[str] = get_args(Precision)


FRAMEWORKS: Mapping[str, Framework] = {
    name: Framework(**table) for name, table in facts("frameworks").items()
}
"""By the name that `framework` settings give."""

KEYS: Mapping[str, str] = {
    name.casefold(): key
    for key, kind in FRAMEWORKS.items()
    for name in (*kind.also, kind.calibrated_as, kind.label, key)
    if name
}
"""Keys of `FRAMEWORKS` by every name of a framework, in small letters."""


def calibrated_as(framework: str) -> str:
    """The name under which runs of a framework are calibrated: an unknown one's own."""
    key = KEYS.get(framework.casefold())
    return framework if key is None else FRAMEWORKS[key].calibrated_as or key


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


_SCHEDULES = {"1f1b": 0.0, "interleaved": 1.0, "zero_bubble": 2.0, "gpipe": 3.0}
_PRECISIONS = {"fp32": 0.0, "fp16": 1.0, "bf16": 1.0, "fp8": 2.0}


def _impossible(many: Cases, there: float, kind: Framework) -> dict[str, Mask]:
    """Masks of the cases that no framework of its kind could run, by the sentence to say of one.

    Fields of model and run, and those of `_words`, are named in braces.
    """
    stages = many.pipeline * many.stages_per_rank
    kv_heads = many.kv_width * many.heads / many.query_width
    interleaved = (many.stages_per_rank > 1) & (many.zero_bubble == 0)
    return {
        "data x tensor x context x pipeline = {devices} devices, but {cluster} has {there}: lower "
        "one of them or take more nodes": (np.asarray(many.devices > there)),
        "tensor = {tensor} does not divide heads = {heads} of {model}": (
            remainder(many.heads, many.tensor)
        ),
        "tensor = {tensor} does not divide kv_heads = {kv_heads} of {model}, and {framework} "
        "{copies_of_kv_heads}: change tensor": (
            remainder(np.maximum(kv_heads, many.tensor), np.minimum(kv_heads, many.tensor))
            if kind.replicates_kv_heads
            else remainder(kv_heads, many.tensor)
        ),
        "tensor = {tensor} does not divide vocabulary = {vocabulary} of {model}, which {framework} "
        "does not pad: pad it in the model or change tensor": (
            remainder(many.vocabulary, many.tensor) & (not kind.pads_vocabulary)
        ),
        "tensor = {tensor} does not divide intermediate = {intermediate} of {model}": (
            (many.mixture_layers < many.layers) & remainder(many.intermediate, many.tensor)
        ),
        "tensor = {tensor} does not divide expert_intermediate = {expert_intermediate} and "
        "shared_intermediate = {shared_intermediate} of {model}": (
            (many.mixture_layers > 0)
            & (
                remainder(many.expert_intermediate, many.tensor)
                | remainder(many.shared_intermediate, many.tensor)
            )
        ),
        "sequence = {sequence} is no multiple of twice context = {context}: each rank takes an "
        "early and a late piece of a sequence": (
            (many.context > 1) & remainder(many.sequence, 2.0 * many.context)
        ),
        "sequence = {sequence} is no multiple of tensor = {tensor} x context = {context}, which "
        "sequence_parallel = true needs": (
            (many.sequence_parallel > 0)
            & (many.tensor > 1)
            & remainder(many.sequence, many.tensor * many.context)
        ),
        "pipeline = {pipeline} x stages_per_rank = {stages_per_rank} are {stages} stages, but "
        "{model} has {layers} layers: use fewer stages": (np.asarray(many.layers < stages)),
        "layers = {layers} of {model} do not divide into {stages} stages (pipeline = {pipeline} x "
        "stages_per_rank = {stages_per_rank}), which {framework} needs where they are "
        "interleaved": (
            remainder(many.layers, stages)
            & (many.layers >= stages)
            & (many.stages_per_rank > 1)
            # Embedding and head may each stand for a block.
            & remainder(many.layers + 2.0, stages)
            & (not kind.uneven_interleaved)
        ),
        "stages_per_rank = {stages_per_rank} needs pipeline > 1 and a schedule other than gpipe, "
        "and here pipeline = {pipeline} and schedule = {schedule!r}": (
            (many.stages_per_rank > 1) & ((many.pipeline == 1) | (many.gpipe > 0))
        ),
        "micro_batches = {micro_batches} do not fill the interleaved schedule of pipeline = "
        "{pipeline}: {framework} needs at least as many, or a multiple of it; change batch or "
        "micro_batch": (
            interleaved
            & (
                remainder(many.micro_batches, many.pipeline)
                if kind.whole_rounds
                else many.micro_batches < many.pipeline
            )
        ),
        "batch = {batch} gives no sample to some of data = {data} ranks: raise it or lower data": (
            np.asarray(many.batch < many.data)
        ),
        "batch = {batch} is no multiple of data = {data} x micro_batch = {micro_batch}": (
            (many.batch >= many.data)
            & remainder(many.batch, many.data * many.micro_batch)
            & (not kind.uneven_batches)
        ),
        "expert = {expert}, but {model} has no experts: set it to 1": (
            (many.expert > 1) & (many.mixture_layers == 0)
        ),
        "expert = {expert} does not divide experts = {experts} of {model}": (
            (many.mixture_layers > 0) & remainder(many.experts, many.expert)
        ),
        "expert = {expert} does not divide data = {data}, whose ranks it takes": (
            remainder(many.data, many.expert)
        ),
        "sharding_ranks = {sharding_ranks} does not divide data = {data}": (
            remainder(many.data, many.sharding_ranks)
        ),
    }


def _unsupported(many: Cases, kind: Framework) -> dict[str, Mask]:
    """Masks of the cases that a framework lacks the means for, as `_impossible`."""
    plain = np.where(many.stages_per_rank > 1, 1.0, 0.0)
    schedule = np.where(many.gpipe > 0, 3.0, np.where(many.zero_bubble > 0, 2.0, plain))
    # bf16 and fp16 are the same numbers in `Cases`, and every framework here has the first.
    precision = np.where(many.quantized > 0, 2.0, np.where(many.half > 0, 1.0, 0.0))
    return {
        "schedule = {schedule!r} of {stages} stages is not one that "
        "{framework} has: use {possible_schedules}": (
            (many.pipeline > 1) & ~np.isin(schedule, [_SCHEDULES[name] for name in kind.schedules])
        ),
        "sharding = {sharding!r} is not one that {framework} has: use {possible_sharding}": (
            ~np.isin(many.sharding, [SHARDING[name] for name in kind.sharding]) & (many.data > 1)
        ),
        "precision = {precision!r} is not one that {framework} has: use {possible_precisions}": (
            ~np.isin(precision, [_PRECISIONS[name] for name in kind.precisions])
        ),
        "context = {context}: {framework} does not divide sequences; set it to 1": (
            (many.context > 1) & (not kind.context)
        ),
        "expert = {expert}: {framework} does not divide experts; set it to 1": (
            (many.expert > 1) & (not kind.expert)
        ),
        "tensor = {tensor}: {framework} does not divide matrices; set it to 1": (
            (many.tensor > 1) & (not kind.tensor)
        ),
        "tensor = {tensor} and pipeline = {pipeline} cannot be combined in {framework}: set one of "
        "them to 1": ((many.pipeline > 1) & (many.tensor > 1) & (not kind.tensor_in_pipeline)),
        "tensor = {tensor} and data = {data} whole replicas cannot be combined in {framework}: set "
        'sharding = "parameters"': (
            (many.tensor > 1)
            & (many.data > 1)
            & (many.sharding == 0)
            & (not kind.replicas_with_tensor)
        ),
        "sharding = {sharding!r} and pipeline = {pipeline} cannot be combined in {framework}: set "
        "pipeline to 1 or shard less": (
            (many.pipeline > 1) & (many.sharding > kind.most_sharding_in_pipeline) & (many.data > 1)
        ),
        "pipeline = {pipeline} needs separate input and output embeddings in {framework}, and "
        "those of {model} are tied": (
            (many.pipeline > 1) & (many.tied > 0) & (not kind.tied_in_pipeline)
        ),
    }


def _broken(many: Cases, there: float, kind: Framework) -> dict[str, Mask]:
    return _impossible(many, there, kind) | _unsupported(many, kind)


_LARGEST_PUBLISHED = 16_384
"""Devices of the largest run whose step time is on record here (Llama 3, 2407.21783)."""


def problems(
    model: Transformer, run: Configuration, cluster: Cluster, framework: str = "any"
) -> list[str]:
    """One sentence for each reason why a run is impossible; empty where it is possible.

    Args:
        model: What is trained.
        run: How.
        cluster: Where.
        framework: One of `FRAMEWORKS`.

    Raises:
        PlanError: No such framework.
    """
    kind = framework_named(framework)
    found: list[str] = []
    try:
        one = cases([(model, run, cluster)])
    except PlanError as error:
        found.append(str(error))
        if not cluster.peak_flop_per_s:
            return found
        # How fast it is plays no part in what is possible.
        peak: dict[str, float] = {run.precision: next(iter(cluster.peak_flop_per_s.values()))}
        known = replace(cluster, peak_flop_per_s=peak, matmul_flop_per_s=peak)
        one = cases([(model, run, known)])
    words = _words(model, run, cluster, kind)
    found += [
        sentence.format_map(words)
        for sentence, broken in _broken(one, float(cluster.devices), kind).items()
        if bool(broken.any())
    ]
    return found


def legal(many: Cases, *, devices: float = np.inf, framework: str = "any") -> Mask:
    """Mask of the runs that are possible, by the same rules as `problems`.

    Args:
        many: The runs.
        devices: How many there are.
        framework: One of `FRAMEWORKS`.

    Returns:
        (cases,) of bool.

    Raises:
        PlanError: No such framework.
    """
    kind = framework_named(framework)
    possible = np.ones(len(many), dtype=np.bool_)
    for broken in _broken(many, devices, kind).values():
        possible &= ~broken
    return possible


def warnings(
    model: Transformer, run: Configuration, cluster: Cluster, framework: str = "any"
) -> list[str]:
    """One sentence for each thing that is possible and costs something.

    Raises:
        PlanError: No such framework.
    """
    kind = framework_named(framework)
    words = _words(model, run, cluster, kind)
    stages = run.pipeline * run.stages_per_rank
    found = {
        "tensor = {tensor} goes beyond the fast domain of {fast_domain} devices of {cluster}: its "
        "collectives cross the network": run.tensor > cluster.fast_domain,
        "tensor = {tensor} exceeds kv_heads = {kv_heads} of {model}: each key head is held and "
        "computed {copies} times": run.tensor > model.kv_heads,
        "layers = {layers} of {model} over {stages} stages are uneven: some stages hold {most} "
        "blocks and others {fewest}, and the step waits for the largest": bool(
            model.layers % stages
        ),
        "vocabulary = {vocabulary} of {model} is no multiple of tensor = {tensor}: {framework} "
        "pads it": kind.pads_vocabulary and bool(model.vocabulary % run.tensor),
        "micro_batches = {micro_batches} are fewer than pipeline = {pipeline}: most of the "
        "pipeline idles; raise batch or lower micro_batch": run.micro_batches < run.pipeline,
        "expert = {expert} x tensor = {tensor} goes beyond the fast domain of {fast_domain} "
        "devices of {cluster}: tokens cross the network": run.expert > 1
        and run.expert * run.tensor > cluster.fast_domain,
        "the run takes {devices} of the {there} devices of {cluster}: the rest idle": (
            run.devices < cluster.devices
        ),
        "{devices} devices are more than any run whose step time is on record here: figures are "
        "extrapolated": run.devices > _LARGEST_PUBLISHED,
    }
    return [text.format_map(words) for text, holds in found.items() if holds]


def _words(
    model: Transformer, run: Configuration, cluster: Cluster, kind: Framework
) -> Mapping[str, object]:
    """Values that sentences name."""
    stages = run.pipeline * run.stages_per_rank
    runs = {name: getattr(run, name) for name in Configuration.__dataclass_fields__}
    models = {name: getattr(model, name) for name in Transformer.__dataclass_fields__}
    return {
        **models,
        **runs,
        "model": model.name,
        "cluster": cluster.name,
        "framework": kind.label,
        "devices": run.devices,
        "there": cluster.devices,
        "fast_domain": cluster.fast_domain,
        "micro_batches": run.micro_batches,
        "stages": stages,
        "most": -(-model.layers // stages),
        "fewest": model.layers // stages,
        "copies_of_kv_heads": (
            "copies key heads a whole number of times only"
            if kind.replicates_kv_heads
            else "does not copy key heads"
        ),
        "copies": -(-run.tensor // model.kv_heads),
        "possible_schedules": ", ".join(sorted(kind.schedules)) or "pipeline = 1",
        "possible_sharding": ", ".join(sorted(kind.sharding)),
        "possible_precisions": ", ".join(sorted(kind.precisions)),
    }
