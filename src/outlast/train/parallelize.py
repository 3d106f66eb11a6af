"""One model, made parallel: tensor, activation checkpointing, compile, sharded or replicated.

Plain functions, applied in this order by `outlast.train.build`. Each takes the model and changes it
in place or returns its wrapper.
"""

from __future__ import annotations

import fnmatch
import functools
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

from outlast.errors import OutlastError
from outlast.tensorize.forms.low_rank import LowRankLinear
from outlast.tensorize.parallel.bottleneck import parallelize_bottleneck
from outlast.tensorize.parallel.fsdp import shard_tensorized
from outlast.train.model import blocks_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from outlast.train.dropout import DropoutStream

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
