"""One model made parallel: tensor, recomputation, compilation, sharding, replication.

Plain functions, applied in this order by `outlast.train.build`. Each takes the model and changes it
in place or returns its wrapper. Pipelines are in `outlast.train.pipeline`.
"""

from __future__ import annotations

import fnmatch
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import CodingError, OutlastError
from outlast.tensorize.fsdp import shard_tensorized
from outlast.tensorize.low_rank import LowRankLinear
from outlast.tensorize.tensor_parallel import parallelize_bottleneck
from outlast.train.dropout import DropoutStream
from outlast.train.engine import CodedEngine, CodingNotes, CoverageEngine, ReplicaEngine
from outlast.train.model import blocks_of, held_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from outlast.coding import GradientCode
    from outlast.coding.protocol import CodedReduce
    from outlast.data import BatchLoader
    from outlast.job import Job
    from outlast.runtime.watching import CommunicationWait
    from outlast.train.build import SetUp
    from outlast.train.engine import Engine
    from outlast.train.layout import Layout


# Hugging Face names its tensor-parallel styles by strings; these are torch's for the same layouts.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
}


def tensor_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The DTensor plan, module name -> style, from the model's own ``tp_plan``.

    Raises:
        OutlastError: When the model has no plan, or the plan needs a style that DTensor has not.
    """
    patterns: dict[str, str] = getattr(model, "tp_plan", None) or {}
    if not patterns:
        raise OutlastError(
            f"parallel.tensor > 1 needs a model with a tp_plan, and {type(model).__name__} has "
            "none; use parallel.shard instead"
        )
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = _matching(patterns, name)
        if style is None or not any(True for _ in module.parameters()):
            continue
        if style not in _STYLES or not isinstance(module, (nn.Linear, nn.Embedding)):
            raise OutlastError(
                f"the tp_plan of {type(model).__name__} wants the style {style!r} for {name}, "
                "which has no DTensor counterpart here; use parallel.shard instead"
            )
        plan[name] = _STYLES[style]()
    return plan


def _matching(patterns: dict[str, str], name: str) -> str | None:
    for pattern, style in patterns.items():
        if fnmatch.fnmatchcase(name, pattern):
            return style
    return None


def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Distribute the matrices named by the model's plan over the mesh, keeping tied ones tied.

    A model of two-factor layers is split at their ranks instead, where collectives are narrow.
    """
    if any(isinstance(module, LowRankLinear) for module in model.modules()):
        parallelize_bottleneck(model, mesh)
        return
    tied = _tied_parameters(model)
    parallelize_module(model, mesh, tensor_plan(model))
    for first, others in tied.items():
        shared = model.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, shared)


def _tied_parameters(model: nn.Module) -> dict[str, list[str]]:
    """First name -> further names of every parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: rest for first, *rest in names.values() if rest}


def recompute_activations(model: nn.Module, dropout: DropoutStream) -> None:
    """Wrap every block so that its activations are computed again in the backward pass."""
    wrap = functools.partial(
        checkpoint_wrapper,
        checkpoint_impl=CheckpointImpl.NO_REENTRANT,
        context_fn=dropout.recomputation,
        # Masks do not come from torch's generator, whose state need not be kept.
        preserve_rng_state=False,
    )
    for name, block in blocks_of(model).items():
        if any(True for _ in block.parameters()):
            model.set_submodule(name, wrap(block))


def refuse_dropout(model: nn.Module) -> None:
    """Refuse a model with dropout layers, whose masks could not belong to samples.

    Raises:
        OutlastError: Naming the first such layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise OutlastError(
                f"train.compile = true cannot be combined with dropout, and {name} drops with "
                f"p = {module.p}; set one of them to false or 0"
            )


def compile_blocks(model: nn.Module) -> None:
    """torch.compile every block; equal blocks share one compiled graph."""
    for block in blocks_of(model).values():
        block.compile()


def shard(model: nn.Module, mesh: DeviceMesh, *, bf16: bool) -> None:
    """FSDP2: shard every block and the rest over the mesh (2-D: replicate x shard, HSDP).

    Small cores of tensorized layers are cut along a dimension that leaves no rank empty.
    """
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_tensorized(model, mesh, units=blocks_of(model).values(), policy=policy)


def replicate(model: nn.Module, mesh: DeviceMesh, *, sync: bool = True) -> DistributedDataParallel:
    """DDP over the mesh; `sync` gives all replicas the first one's weights."""
    return DistributedDataParallel(
        model, process_group=mesh.get_group(), gradient_as_bucket_view=True, init_sync=sync
    )


def settle_order(replicas: DistributedDataParallel) -> None:
    """Have DDP decide now in which order it sums gradients, whatever life of the run this is.

    Which gradients share a bucket decides in which order three or more replicas are summed, and a
    first backward pass decides on the buckets of all later ones. This is one in which gradients of
    zeros arrive from the last parameter to the first, so that the first step of a resumed run sums
    as the same step of a run that was never stopped.
    """
    model = replicas.module
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    result = torch.zeros((), device=parameters[0].device, requires_grad=True)
    for parameter in parameters:
        result = _Arriving.apply(result, parameter)  # type: ignore[no-untyped-call]
    vars(model)["forward"] = lambda: result
    try:
        replicas().backward()
    finally:
        del vars(model)["forward"]
    for parameter in parameters:
        parameter.grad = None


class _Arriving(torch.autograd.Function):
    """Passes `rest` on, and in the backward pass gives `parameter` a gradient of zeros first."""

    @staticmethod
    def forward(ctx: Any, rest: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        return rest.clone()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        [parameter] = ctx.saved_tensors
        return given[0], torch.zeros_like(parameter)


_GRACE_SECONDS = 1.0


def replica_engine(
    setup: SetUp,
    model: nn.Module,
    mesh: DeviceMesh | None,
    waits: CommunicationWait,
    *,
    saved: bool,
) -> ReplicaEngine:
    """Tensor parallel, recomputation, compile, then FSDP2 or DDP, in this order."""
    job, layout, device = setup.job, setup.plan.layout, setup.device
    if job.train.compile:
        refuse_dropout(model)
    dropout = DropoutStream(job.run.seed, held_blocks(model), never=job.train.compile)
    if mesh is not None and layout.tensor > 1:
        split_tensors(model, mesh["tensor"])
    if layout.shard == 1:
        # FSDP2 moves block by block itself, so the whole model need not fit on one device.
        model.to(device)
    if job.train.activation_checkpointing:
        recompute_activations(model, dropout)
    if job.train.compile:
        compile_blocks(model)
    bf16 = job.train.precision == "bf16"
    called: nn.Module = model
    # Gradient coding sums over replicas itself.
    summed_here = layout.replicate > 1 and not is_coded(job, layout)
    if mesh is not None and layout.shard > 1:
        axes = ("replicate", "shard") if summed_here else ("shard",)
        shard(model, mesh[axes], bf16=bf16)
    elif mesh is not None and summed_here:
        called = replicate(model, mesh["replicate"], sync=not saved)
        if layout.replicate > 2:
            # Two summands have no order.
            settle_order(called)
        waits.watch_gradients(model)
    return ReplicaEngine(
        model=called,
        inner=model,
        device=device,
        dropout=dropout,
        waits=waits,
        data_ranks=layout.data_ranks,
        bf16_autocast=bf16 and layout.shard == 1,
        mark=setup.mark,
    )


def is_coded(job: Job, layout: Layout) -> bool:
    """Return whether gradients are summed over replicas by [coding]."""
    return job.coding.scheme != "off" and layout.replicate > 1


def code_of(job: Job, replicas: int) -> GradientCode:
    """The fixed-load code of [coding] for so many replicas.

    Raises:
        CodingError: When the replicas do not fit the code, with the nearest that do.
    """
    # Codes need scipy, which other runs need not load.
    from outlast.coding import CyclicMDS, CyclicRepetition, FractionalRepetition, GraphCode

    scheme, copies = job.coding.scheme, job.coding.copies
    try:
        match scheme:
            case "fractional_repetition":
                return FractionalRepetition(workers=replicas, stragglers=copies - 1)
            case "cyclic_repetition":
                return CyclicRepetition(workers=replicas, stragglers=copies - 1)
            case "cyclic_mds":
                return CyclicMDS(workers=replicas, stragglers=copies - 1)
            case _:
                seed = job.run.seed
                return GraphCode.random_regular(workers=replicas, degree=copies, seed=seed)
    except CodingError as error:
        raise CodingError(
            f'coding.scheme = "{scheme}" with coding.copies = {copies} (1 more than stragglers) '
            f"does not fit {replicas} replicas (workers): {error}"
        ) from None


def coded_engine(
    setup: SetUp, inner: ReplicaEngine, loader: BatchLoader, mesh: DeviceMesh
) -> tuple[Engine, CodingNotes]:
    """The engine of [coding] around the one that runs a replica's micro-batches."""
    from outlast.coding.protocol import CodedAllReduce, CodedGossip, CodedServer, Coverage

    job, layout, rank = setup.job, setup.plan.layout, setup.ranks.rank
    settings, timeout = job.coding, job.launch.timeout_seconds
    replicas = mesh["replicate"].get_group()
    replica, shard_rank = divmod(layout.data_rank(rank), layout.shard)
    notes = CodingNotes(settings, replica, layout.replicate, speaks=shard_rank == 0)
    if settings.scheme == "coverage":
        coverage = Coverage(
            inner.model,
            chunks_per_rank=loader.microbatches,
            copies=min(settings.copies, layout.replicate),
            lost=settings.lost,
            deadline_seconds=settings.deadline_seconds or None,
            group=replicas,
            team=mesh["shard"].get_group() if layout.shard > 1 else None,
            seed=job.run.seed,
            timeout_seconds=timeout,
            # The rest of the trainer needs all processes: if one is gone, the run starts again.
            grace_seconds=min(_GRACE_SECONDS, timeout),
        )
        return CoverageEngine(inner, coverage, loader, layout, shard_rank, notes), notes
    code = code_of(job, layout.replicate)
    protocols: dict[str, type[CodedReduce]] = {
        "all_reduce": CodedAllReduce,
        "server": CodedServer,
        "gossip": CodedGossip,
    }
    coded = protocols[settings.protocol](
        inner.model,
        code,
        group=replicas,
        deadline_seconds=settings.deadline_seconds or None,
        timeout_seconds=timeout,
        on_lost="rescale" if settings.lost == "commit" else "raise",
        largest_error=settings.largest_error * code.chunks,
    )
    load = len(code.assignment.chunks_of(coded.worker))
    prefetched = code.chunks == loader.ranks
    shares = loader if prefetched else replace(loader, rank=0, ranks=code.chunks)
    return CodedEngine(inner, coded, shares, load, notes, prefetched), notes
