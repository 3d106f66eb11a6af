"""Projections that read the same norm, grouped: one product for q, k and v, one for gate and up.

The norm of a block gives what all its readers' down-projections make of it, side by side, instead
of its normalised input: one product (..., d) x (d, r_1 + r_2 + ...) and, where features are split
over ranks, one all-reduce (BOOST, arXiv 2512.12131, grouping). Each reader takes its columns. The
code of the block is not touched: whatever calls norm and then reader still does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.forms.low_rank import BottleneckLinear, LowRankLinear
from outlast.tensorize.parallel.activated import activated_linear
from outlast.tensorize.parallel.online_norm import normalized_projection
from outlast.tensorize.parallel.shards import group_of, local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


@dataclass(frozen=True)
class BlockPlan:
    """Names of a transformer block's modules.

    Attributes:
        groups: Every RMSNorm, with the projections that are all that reads it.
        rows: Projections that write to the residual stream.
    """

    groups: tuple[tuple[str, tuple[str, ...]], ...]
    rows: tuple[str, ...]

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of all projections."""
        return (*(name for _, readers in self.groups for name in readers), *self.rows)


LLAMA_BLOCK = BlockPlan(
    groups=(
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ),
    rows=("self_attn.o_proj", "mlp.down_proj"),
)
"""The block of Llama, Mistral and Qwen2 in transformers."""


def group_projections(model: nn.Module, plan: BlockPlan = LLAMA_BLOCK) -> int:
    """Group the down-projections of every block of `model`, in place, without changing results.

    The children ``down`` and ``up`` keep their names and their parameters. A group is left as it is
    where one of its readers is no low-rank layer. Sharding by FSDP must take whole blocks, and
    ranks must be changed before.

    Args:
        model: A model or one block; blocks are modules that have all that the plan names.
        plan: Which norms are read by which projections.

    Returns:
        Number of groups made.

    Raises:
        TensorizeError: There are none, a norm is no plain RMSNorm, or a reader's `down` is no plain
            `nn.Linear`.
    """
    made = 0
    for name, block in list(blocks_with(model, plan)):
        for norm, readers in plan.groups:
            if all(is_low_rank(block.get_submodule(reader)) for reader in readers):
                make_group(block, norm, readers, where=name)
                made += 1
    if not made:
        names = ", ".join(plan.projections)
        raise TensorizeError(
            f"{type(model).__name__} has no block whose projections ({names}) are low-rank; call "
            "tensorize(model, form='low_rank') first or give another plan"
        )
    return made


def blocks_with(model: nn.Module, plan: BlockPlan) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of everything that has all children that the plan names."""
    wanted = [*plan.projections, *(norm for norm, _ in plan.groups)]
    for name, module in model.named_modules():
        try:
            for item in wanted:
                module.get_submodule(item)
        except AttributeError:
            continue
        yield name, module


def is_low_rank(module: nn.Module) -> bool:
    """Whether a module is one of the two-factor layers, and not yet adopted."""
    return type(module) in (LowRankLinear, BottleneckLinear)


@dataclass(frozen=True)
class Readers:
    """Who reads a norm."""

    projections: tuple[LowRankLinear, ...]

    def weight(self) -> Tensor:
        """(sum of ranks, features / p): the down-projections of all readers."""
        return torch.cat([local(projection.down.weight) for projection in self.projections])


class IntoLatents(nn.Module):
    """An RMSNorm that goes on to the down-projections of its readers."""

    weight: Tensor
    readers: Readers

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., features / p) -> (..., sum of ranks), before any activation."""
        return normalized_projection(
            hidden_states,
            local(self.weight),
            self.readers.weight(),
            epsilon=epsilon_of(self),
            features=self.weight.shape[0],
            group=group_of(self.weight),
        )


class FromLatents(nn.Module):
    """A low-rank layer whose down-projection was done for its whole group."""

    up: nn.Linear
    columns: slice

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., sum of ranks) -> (..., out_features / p)."""
        return up_project(self, x[..., self.columns])


class HeldFactor(nn.Module):
    """A factor whose weight its layer reads; nobody calls it, so hooks and checks have no place."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features), if the weight is whole."""
        return nn.functional.linear(x, self.weight, self.bias)


def hold_factors(layer: LowRankLinear) -> None:
    """Make the factors ones that are not called, which their type shows to who looks for layers."""
    for factor in (layer.down, layer.up):
        adopt(factor, HeldFactor)


def up_project(layer: Any, latent: Tensor) -> Tensor:
    """Activation and up-projection: (..., rank) -> (..., out_features / p)."""
    weight = local(layer.up.weight)
    bias = None if layer.up.bias is None else local(layer.up.bias)
    if isinstance(layer, BottleneckLinear):
        return activated_linear(latent, weight, bias, layer.activation)
    return nn.functional.linear(latent, weight, bias)


def make_group(block: nn.Module, norm: str, readers: tuple[str, ...], *, where: str = "") -> None:
    """Let `norm` of `block` give the latents of `readers`.

    Raises:
        TensorizeError: The norm is no plain RMSNorm, or a `down` is no plain `nn.Linear`.
    """
    layer = block.get_submodule(norm)
    check_plain_norm(layer, f"{where}.{norm}".lstrip("."))
    projections: list[LowRankLinear] = []
    start = 0
    for name in readers:
        reader = block.get_submodule(name)
        assert isinstance(reader, LowRankLinear)
        check_plain_factors(reader, f"{where}.{name}".lstrip("."))
        rank = reader.down.out_features
        adopt(reader, FromLatents)
        hold_factors(reader)
        reader.columns = slice(start, start + rank)  # type: ignore[assignment]
        start += rank
        projections.append(reader)
    adopt(layer, IntoLatents)
    layer.readers = Readers(tuple(projections))  # type: ignore[assignment]


def adopt(module: nn.Module, way: type[nn.Module]) -> None:
    """Give `module` the forward of `way`; it stays an instance of its class, as FSDP2 does it."""
    module.__class__ = _adopted(type(module), way)  # type: ignore[arg-type]


@functools.cache
def _adopted(own: type[nn.Module], way: type[nn.Module]) -> type[nn.Module]:
    # Not the other way round: what is told by the end of its name, as norms are, is not that.
    return type(f"{own.__name__}{way.__name__}", (way, own), {})


def epsilon_of(norm: Any) -> float:
    """What an RMSNorm adds to the mean square."""
    epsilon = getattr(norm, "variance_epsilon", None)
    if epsilon is None:
        epsilon = getattr(norm, "eps", None)
    # torch's own RMSNorm takes the resolution of its input where it is given none.
    return torch.finfo(norm.weight.dtype).eps if epsilon is None else float(epsilon)


def check_plain_norm(norm: nn.Module, name: str) -> None:
    """Refuse a norm that does something else than weight * x / rms(x).

    It is tried, since classes of many names do that and some of the same name do more.

    Raises:
        TensorizeError: Naming it.
    """
    weight = getattr(norm, "weight", None)
    plain = isinstance(weight, nn.Parameter) and [*dict(norm.named_parameters())] == ["weight"]
    if plain and not norm.weight.is_meta:
        plain = _does(norm, lambda x: x * torch.rsqrt(x.square().mean(-1, True) + epsilon_of(norm)))
    if not plain:
        raise TensorizeError(
            f"{name} is a {type(norm).__name__} and does not compute weight * x / rms(x); grouping "
            "and bottleneck tensor parallelism need a plain RMSNorm"
        )


@torch.no_grad()
def _does(norm: Any, unscaled: Callable[[Tensor], Tensor]) -> bool:
    weight: Tensor = norm.weight
    # Also small numbers, whose norm epsilon decides.
    sizes = torch.tensor([[1.0], [1e-3]], device=weight.device, dtype=weight.dtype)
    ramp = torch.linspace(-1, 2, weight.numel(), device=weight.device).to(weight.dtype) * sizes
    expected = weight.float() * unscaled(ramp.float())
    found: Tensor = norm(ramp)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 0.05
    return torch.allclose(found.float(), expected, rtol=tolerance, atol=tolerance)


def check_plain_factors(layer: LowRankLinear, name: str) -> None:
    """Refuse factors that something else has replaced, since their forward is not called.

    Raises:
        TensorizeError: Naming the factor.
    """
    for child in ("down", "up"):
        factor = layer.get_submodule(child)
        if type(factor) is not nn.Linear or factor._forward_hooks or factor._forward_pre_hooks:
            raise TensorizeError(
                f"{name}.{child} is a {type(factor).__name__} with a forward of its own or hooks, "
                "which grouping would pass by; group before they are replaced, or leave them out"
            )
    if layer.down.bias is not None:
        raise TensorizeError(f"{name}.down has a bias, and a low-rank layer has none there")
