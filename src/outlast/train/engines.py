"""The engine of a layout: its model wrapped, sharded or cut into stages, in the order of that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outlast.train.dropout import DropoutStream
from outlast.train.engine import PipelineEngine, ReplicaEngine, loss_sum
from outlast.train.model import held_blocks
from outlast.train.parallelize import (
    compile_blocks,
    recompute_activations,
    refuse_dropout,
    replicate,
    settle_order,
    shard,
    split_tensors,
)
from outlast.train.preflight import pipeline_shape

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.data import BatchLoader
    from outlast.job import Job
    from outlast.runtime.communication import CommunicationWait
    from outlast.train.build import SetUp
    from outlast.train.coding import CodingNotes
    from outlast.train.engine import Engine
    from outlast.train.layout import Layout

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


def coded_engine(
    setup: SetUp, inner: ReplicaEngine, loader: BatchLoader, mesh: DeviceMesh
) -> tuple[Engine, CodingNotes]:
    """The engine of [coding] around the one that runs a replica's micro-batches."""
    # Codes need scipy, which other runs need not load.
    from outlast.coding.protocol import CodedAllReduce, Coverage
    from outlast.train.coding import CodedEngine, CodingNotes, CoverageEngine, code_of

    job, layout, rank = setup.job, setup.plan.layout, setup.ranks.rank
    settings, timeout = job.coding, job.launch.timeout_seconds
    replicas = mesh["replicate"].get_group()
    replica, shard_rank = divmod(layout.data_rank(rank), layout.shard)
    notes = CodingNotes(settings.scheme, replica, layout.replicate, speaks=shard_rank == 0)
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
    coded = CodedAllReduce(
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


def pipeline_engine(setup: SetUp, model: nn.Module, mesh: DeviceMesh) -> PipelineEngine:
    """Cut the model into this rank's stages, each replicated over the data ranks."""
    # torch's pipelining loads its compiler, a second that other layouts need not spend.
    from outlast.train.pipeline import (
        StageModule,
        keep_local,
        make_schedule,
        make_stage,
        stage_blocks,
        stage_view,
    )

    job, layout, device = setup.job, setup.plan.layout, setup.device
    stages, microbatches = pipeline_shape(job, layout)
    rank = layout.pipeline_rank(setup.ranks.rank)
    # Interleaving gives every rank each pipeline-th stage.
    mine = range(rank, stages, layout.pipeline)
    blocks = stage_blocks(setup.plan.facts.layers or 0, stages)
    local = {block for index in mine for block in blocks[index]}
    keep_local(model, local, first=0 in mine, last=stages - 1 in mine)
    model.to(device)
    dropout = DropoutStream(job.run.seed, held_blocks(model))
    if job.train.activation_checkpointing:
        recompute_activations(model, dropout)
    modules = []
    for index in mine:
        first, last = index == 0, index == stages - 1
        view = stage_view(model, blocks[index], first=first, last=last)
        bf16 = torch.bfloat16 if job.train.precision == "bf16" else None
        modules.append(StageModule(view, first=first, last=last, dropout=dropout, autocast=bf16))
    loss_scale = [1.0]
    runtimes = [
        make_stage(module, index, stages, device, mesh["pipeline"].get_group())
        for index, module in zip(mine, modules, strict=True)
    ]
    schedule = make_schedule(
        runtimes, microbatches, lambda logits, targets: loss_sum(logits, targets) * loss_scale[0]
    )
    replicas = mesh["replicate"].get_group()
    return PipelineEngine(schedule, modules, device, replicas, loss_scale, setup.mark)
