"""One model made parallel: tensor, pipeline, recomputation, compilation, sharding, replication.

Plain functions, applied in this order by `outlast.train.build`. Each takes the model and changes it
in place or returns its wrapper.

A Hugging Face decoder cut into pipeline stages, without touching its forward.

Blocks that live elsewhere are replaced by `Elsewhere`, which hands its input on and has no
parameters; a stage that is not the first takes hidden states as ``inputs_embeds``; the final norm
and head of a stage that is not the last hand on, too. Parameter names stay those of the whole
model, so a checkpoint fits any number of stages.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import OutlastError
from outlast.guard.forward_patch import suspended_checks
from outlast.tensorize.fsdp import shard_tensorized
from outlast.tensorize.low_rank import LowRankLinear
from outlast.tensorize.tensor_parallel import parallelize_bottleneck
from outlast.train.dropout import DropoutStream
from outlast.train.engine import PipelineEngine, ReplicaEngine, loss_sum
from outlast.train.model import Elsewhere, blocks_of, held_blocks, logits_of
from outlast.train.preflight import pipeline_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    from outlast.data import BatchLoader
    from outlast.job import Job
    from outlast.runtime.communication import CommunicationWait
    from outlast.train.build import SetUp
    from outlast.train.coding import CodingNotes
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


class StageModule(nn.Module):
    """One stage: token ids or hidden states in, hidden states or logits out.

    Args:
        model: A copy of the whole model in which blocks of other stages are `Elsewhere`.
        first: Whether it takes token ids.
        last: Whether it gives logits.
        dropout: The run's dropout stream.
        autocast: Type of matrix products, or None for the parameters' own.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        first: bool,
        last: bool,
        dropout: DropoutStream,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.first, self.last = first, last
        self._autocast = autocast
        self._dropout = dropout
        self.step = 0

    def forward(self, inputs: torch.Tensor, sample_ids: torch.Tensor) -> torch.Tensor:
        """Run this stage on one micro-batch.

        Args:
            inputs: Token ids (batch, sequence), or hidden states (batch, sequence, width).
            sample_ids: (batch,) global sample indices.
        """
        given = {"input_ids": inputs} if self.first else {"inputs_embeds": inputs}
        masks = (
            self._dropout.for_samples(self.step, sample_ids)
            if self.training
            else contextlib.nullcontext()
        )
        precision = torch.autocast(
            inputs.device.type, self._autocast, enabled=self._autocast is not None
        )
        with masks, precision:
            return logits_of(self.model(**given)).float()


@dataclass(frozen=True)
class Parts:
    """Module names of what a pipeline stage needs in a decoder."""

    embedding: str
    layers: str
    norm: str
    head: str


def parts_of(model: nn.Module) -> Parts:
    """Find the parts of a decoder by its own ``pp_plan``.

    Raises:
        OutlastError: When the model has no such plan or ties its embeddings.
    """
    plan: dict[str, Any] = getattr(model, "pp_plan", None) or {}
    names = list(plan)
    by_ending = {name.rpartition(".")[2]: name for name in names}
    try:
        parts = Parts(
            embedding=by_ending["embed_tokens"],
            layers=by_ending["layers"],
            norm=by_ending["norm"],
            head=by_ending["lm_head"],
        )
    except KeyError:
        raise OutlastError(
            "parallel.pipeline > 1 needs a decoder whose pp_plan names embed_tokens, layers, norm "
            f"and lm_head, and that of {type(model).__name__} names {names or 'nothing'}; "
            "use parallel.shard instead"
        ) from None
    return parts


def stage_blocks(layers: int, stages: int) -> list[range]:
    """Blocks of each stage: contiguous and as even as possible, larger ones first.

    Raises:
        OutlastError: When there are fewer layers than stages.
    """
    if layers < stages:
        raise OutlastError(
            f"the pipeline has {stages} stages (parallel.pipeline x "
            f"parallel.pipeline_stages_per_rank), but the model has only {layers} layers; "
            "use fewer stages"
        )
    whole, extra = divmod(layers, stages)
    starts = [index * whole + min(index, extra) for index in range(stages + 1)]
    return [range(starts[index], starts[index + 1]) for index in range(stages)]


def keep_local(
    model: nn.Module, local: set[int], *, first: bool, last: bool
) -> dict[int, nn.Module]:
    """Replace everything of `model` that this rank does not hold by `Elsewhere`.

    Args:
        model: The whole model.
        local: Indices of the blocks that this rank holds.
        first: Whether it holds the embedding.
        last: Whether it holds the final norm and the head.

    Returns:
        The blocks that are held, by index from 0.
    """
    parts = parts_of(model)
    layers = model.get_submodule(parts.layers)
    assert isinstance(layers, nn.ModuleList)
    for index in range(len(layers)):
        if index not in local:
            layers[index] = Elsewhere()
    if not first:
        model.set_submodule(parts.embedding, Elsewhere())
    if not last:
        model.set_submodule(parts.norm, Elsewhere())
        model.set_submodule(parts.head, Elsewhere())
    return {index: layers[index] for index in sorted(local)}


def stage_view(model: nn.Module, blocks: range, *, first: bool, last: bool) -> nn.Module:
    """A shallow copy of `model` that runs only `blocks`, sharing all modules with it.

    The same parameters, names and hooks; what this stage has not is `Elsewhere`.
    """
    parts = parts_of(model)
    view = _shallow(model)
    holder, _, name = parts.layers.rpartition(".")
    if holder:
        view.set_submodule(holder, _shallow(model.get_submodule(holder)))
    layers = model.get_submodule(parts.layers)
    assert isinstance(layers, nn.ModuleList)
    kept = [block if index in blocks else Elsewhere() for index, block in enumerate(layers)]
    setattr(view.get_submodule(holder), name, nn.ModuleList(kept))
    if not first:
        view.set_submodule(parts.embedding, Elsewhere())
    if not last:
        view.set_submodule(parts.norm, Elsewhere())
        view.set_submodule(parts.head, Elsewhere())
    return view


def _shallow(module: nn.Module) -> nn.Module:
    """A copy of `module` itself with its own table of the same submodules."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def make_schedule(
    stages: list[PipelineStage],
    microbatches: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> _PipelineSchedule:
    """1F1B for one stage per rank, interleaved 1F1B for several; gradients are not rescaled."""
    if len(stages) == 1:
        return Schedule1F1B(stages[0], microbatches, loss_fn=loss, scale_grads=False)
    return ScheduleInterleaved1F1B(list(stages), microbatches, loss_fn=loss, scale_grads=False)


class _Stage(PipelineStage):
    """A stage that learns its shapes from memory that nobody has written to, unseen by a guard."""

    def _forward_metadata_inference(self, *arguments: Any, **options: Any) -> Any:
        with suspended_checks(self.submod):
            return super()._forward_metadata_inference(*arguments, **options)

    def _backward_metadata_inference(self, *arguments: Any, **options: Any) -> Any:
        with suspended_checks(self.submod):
            return super()._backward_metadata_inference(*arguments, **options)


def make_stage(
    module: nn.Module, index: int, stages: int, device: torch.device, group: ProcessGroup
) -> PipelineStage:
    """The stage runtime; shapes are learnt from the first micro-batch."""
    return _Stage(module, index, stages, device, group=group)
