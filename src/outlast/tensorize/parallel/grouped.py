"""Grouped projections, online RMSNorm, and the collectives that they need.

Projections that read the same norm, grouped: one product for q, k and v, one for gate and up.

The norm of a block gives what all its readers' down-projections make of it, side by side, instead
of its normalised input: one product (..., d) x (d, r_1 + r_2 + ...) and, where features are split
over ranks, one all-reduce (BOOST, arXiv 2512.12131, grouping). Each reader takes its columns. The
code of the block is not touched: whatever calls norm and then reader still does.

Online RMSNorm: a norm over split features and the projections that follow, one all-reduce.

Every rank holds some features of x. The mean square needs all of them, so a plain RMSNorm would
wait for a collective before its projection can begin. But the norm's divisor is one number per
token, and a projection is linear: every rank projects what it has, sends (partial projections, sum
of squares) together, and divides afterwards (BOOST, arXiv 2512.12131, section on online RMSNorm).
The result is exact.

Collectives with the backward pass that their consumer needs.

A tensor that all ranks hold is used in one of two ways. Where every rank computes a part of what
follows (a column-split matrix), the gradients that come back are parts of a sum, ``partial``. Where
every rank computes all of what follows (the loss of replicated logits), every rank gets the whole
gradient, ``whole``, and adding them up would count it p times.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import ACTIVATIONS, through_activation
from outlast.tensorize.forms.low_rank import BottleneckLinear, LowRankLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def activated_linear(
    latent: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """act(latent) weight^T + bias; backward, act(latent) is computed again.

    Compiled graphs decide themselves what they compute again.

    Args:
        latent: (..., rank), maybe a view of some columns.
        weight: (out_features, rank).
        bias: (out_features,).
        activation: A key of `ACTIVATIONS`.

    Returns:
        (..., out_features)
    """
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(latent.device.type):
        return functional.linear(ACTIVATIONS[activation](latent), weight, bias)
    result: Tensor = _ActivatedLinear.apply(latent, weight, bias, activation)  # type: ignore[no-untyped-call]
    return result


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, latent: Tensor, weight: Tensor, bias: Tensor | None, activation: str
    ) -> Tensor:
        ctx.save_for_backward(latent, weight)
        ctx.activation = activation
        return functional.linear(ACTIVATIONS[activation](latent), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        latent, weight = ctx.saved_tensors
        upstream = gradients[0]
        needs_latent, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = upstream.reshape(-1, upstream.shape[-1])
        flat = latent.reshape(-1, latent.shape[-1])
        found, grad_weight = through_activation(
            flat, weight, rows, ctx.activation, wanted=(needs_latent, needs_weight)
        )
        grad_latent = None if found is None else found.view(latent.shape)
        return grad_latent, grad_weight, rows.sum(0) if needs_bias else None, None


Gradient = Literal["partial", "whole"]

_OPERATORS = torch.ops._c10d_functional
"""The names of their Python wrappers change between torch 2.11 and 2.13; theirs do not."""


def all_reduced(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the ranks of `group`, outside autograd; None: of this rank alone."""
    if group is None:
        return tensor
    return _waited(_OPERATORS.all_reduce(tensor.contiguous(), "sum", group.group_name))


def _waited(tensor: Tensor) -> Tensor:
    result: Tensor = _OPERATORS.wait_tensor(tensor)
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, gradient: Gradient) -> Tensor:
        ctx.group = group if gradient == "partial" else None
        return all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return all_reduced(gradients[0], ctx.group), None, None


def sum_over(tensor: Tensor, group: ProcessGroup | None, gradient: Gradient) -> Tensor:
    """All-reduce of `tensor` (any shape); backward another one if gradients are partial."""
    if group is None:
        return tensor
    result: Tensor = _Sum.apply(tensor, group, gradient)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, gradient: Gradient) -> Tensor:
        ctx.group, ctx.gradient = group, gradient
        size, name = group.size(), group.group_name
        gathered = _OPERATORS.all_gather_into_tensor(tensor.contiguous(), size, name)
        pieces = _waited(gathered).chunk(size)
        return torch.cat(pieces, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        pieces = gradients[0].chunk(ctx.group.size(), dim=-1)
        if ctx.gradient == "whole":
            return pieces[ctx.group.rank()].contiguous(), None, None
        stacked = torch.cat(pieces)
        size, name = ctx.group.size(), ctx.group.group_name
        piece = _OPERATORS.reduce_scatter_tensor(stacked, "sum", size, name)
        return _waited(piece), None, None


def gather_features(tensor: Tensor, group: ProcessGroup, gradient: Gradient) -> Tensor:
    """Concatenate the ranks' features: (..., features / p) -> (..., features).

    Backward a reduce-scatter if gradients are partial, else this rank's slice.
    """
    lead = tensor.shape[:-1]
    # A plain matrix, so that pieces of ranks follow each other also without leading dimensions.
    flat = tensor.reshape(-1, tensor.shape[-1])
    gathered: Tensor = _Gather.apply(flat, group, gradient)  # type: ignore[no-untyped-call]
    return gathered.reshape(*lead, -1)


_PIECES = 3
"""bfloat16 numbers of 8 bits that hold the 24 bits of a float32."""


def normalized_projection(
    x: Tensor,
    scale: Tensor,
    weight: Tensor,
    *,
    epsilon: float,
    features: int,
    group: ProcessGroup | None = None,
    gradient: Gradient = "partial",
) -> Tensor:
    """Projections of an RMSNorm, with x, scale and weight split over features.

    h = (sum_i W_i (scale_i x_i)) / sqrt(sum_i |x_i|^2 / features + epsilon), i over ranks; alone,
    weight @ (scale * x / rms(x)).
    Statistics are float32 at least. Saves x, h and one number per token.

    Args:
        x: (..., features / p), this rank's features.
        scale: (features / p), the norm's weight.
        weight: (rows, features / p).
        epsilon: Added to the mean square.
        features: Features on all ranks together.
        group: Ranks that hold the other features; None: there are none.
        gradient: Whether the gradients of h that come back are parts of a sum over ranks.

    Returns:
        (..., rows), the same on all ranks.
    """
    dtype = weight.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    settings = (epsilon, features, group, gradient, dtype)
    latent: Tensor = _Projection.apply(x, scale, weight, settings)  # type: ignore[no-untyped-call]
    return latent


def normalized(
    x: Tensor, scale: Tensor, *, epsilon: float, features: int, group: ProcessGroup | None
) -> Tensor:
    """RMSNorm with x and scale split over features; one column is summed forward and backward.

    Args:
        x: (..., features / p).
        scale: (features / p).
        epsilon: Added to the mean square.
        features: Features on all ranks together.
        group: Ranks that hold the other features.

    Returns:
        (..., features / p), in the dtype of x.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = sum_over(exact.square().sum(-1, keepdim=True), group, "partial")
    return scale * (exact * torch.rsqrt(squares / features + epsilon)).to(x.dtype)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, weight: Tensor, settings: Any) -> Tensor:
        epsilon, features, group, _, dtype = settings
        wide = torch.promote_types(x.dtype, torch.float32)
        squares = x.to(wide).square().sum(-1, keepdim=True)
        own = _root_mean(squares, x.shape[-1], epsilon)
        unit = _normalized(x, own.reciprocal(), scale, dtype)
        # Products of order 1 do not overflow in half precision; the scale comes back afterwards.
        partial = (unit @ weight.to(dtype).t()).to(wide) * own
        total, squares = _sum_with_statistic(partial, squares, group, dtype)
        inverse = _root_mean(squares, features, epsilon).reciprocal()
        latent = (total * inverse).to(dtype)
        ctx.save_for_backward(x, scale, weight, latent, inverse)
        ctx.settings = settings
        return latent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale, weight, latent, inverse = ctx.saved_tensors
        _, features, group, gradient, dtype = ctx.settings
        upstream = gradients[0].to(dtype)
        if gradient == "partial":
            upstream = all_reduced(upstream, group)
        wide = inverse.dtype
        needs_x, needs_scale, needs_weight, _ = ctx.needs_input_grad
        grad_x = grad_scale = grad_weight = None
        if needs_x or needs_scale:
            back = (upstream @ weight.to(dtype)).to(wide) * inverse
            if needs_scale:
                flat = (back * x.to(wide)).reshape(-1, x.shape[-1])
                grad_scale = flat.sum(0).to(scale.dtype)
            if needs_x:
                # h is P R with R = (S / d + eps)^(-1/2), so dS = -1/2 <g, h> R^2 / d.
                inner = (upstream.to(wide) * latent.to(wide)).sum(-1, keepdim=True)
                correction = x.to(wide) * (inner * inverse.square() / features)
                grad_x = (back * scale.to(wide) - correction).to(x.dtype)
        if needs_weight:
            # Not from this rank's own norm: when a compiled graph computes that again, it reads
            # the sum of squares where the all-reduce was done in place (torch 2.13, Inductor).
            unit = _normalized(x, inverse, scale, dtype).reshape(-1, x.shape[-1])
            product = upstream.reshape(-1, upstream.shape[-1]).t() @ unit
            grad_weight = product.to(weight.dtype)
        return grad_x, grad_scale, grad_weight, None


def _root_mean(squares: Tensor, features: int, epsilon: float) -> Tensor:
    """sqrt(squares / features + epsilon), never 0: a shard or token of zeros is divided too."""
    return (squares / features + epsilon).clamp_min(torch.finfo(squares.dtype).tiny).sqrt()


def _normalized(x: Tensor, inverse: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Features over a root mean square, times scale, for a product."""
    return (x.to(inverse.dtype) * inverse).to(dtype) * scale.to(dtype)


def _sum_with_statistic(
    partial: Tensor, squares: Tensor, group: ProcessGroup | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Sum (..., rows) and (..., 1) over ranks in one all-reduce.

    In bfloat16 the statistic would lose 16 of its 24 bits, and its error would be common to all of
    a token's features. So every rank has three columns of its own, where the others send zeros: no
    sum rounds there. Other types travel in float32 at least.
    """
    if group is None:
        return partial, squares
    rows = partial.shape[-1]
    if dtype != torch.bfloat16:
        summed = all_reduced(torch.cat([partial, squares], dim=-1), group)
        return summed[..., :rows], summed[..., rows:]
    slots = partial.new_zeros(*partial.shape[:-1], group.size(), _PIECES, dtype=dtype)
    rest = squares.squeeze(-1)
    for piece in range(_PIECES):
        slots[..., group.rank(), piece] = rest.to(dtype)
        rest = rest - rest.to(dtype)
    summed = all_reduced(torch.cat([partial.to(dtype), slots.flatten(-2)], dim=-1), group)
    summed = summed.to(partial.dtype)
    return summed[..., :rows], summed[..., rows:].sum(-1, keepdim=True)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, differentiable; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def group_of(tensor: Tensor) -> ProcessGroup | None:
    """The ranks that hold the other parts; None for a plain tensor."""
    return tensor.device_mesh.get_group() if isinstance(tensor, DTensor) else None


def split_parameter(owner: nn.Module, name: str, mesh: DeviceMesh, dimension: int | None) -> None:
    """Distribute a parameter over the mesh along a dimension; None: whole on every rank.

    Rank 0's numbers are taken, as torch's own tensor parallelism does.
    """
    parameter = owner.get_parameter(name)
    placement = Replicate() if dimension is None else Shard(dimension)
    split = distribute_tensor(parameter.detach(), mesh, [placement])
    owner.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))


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
    """Return whether a module is one of the two-factor layers, and not yet adopted."""
    return type(module) in (LowRankLinear, BottleneckLinear)


@dataclass(frozen=True)
class Readers:
    """Layers that read a norm."""

    projections: tuple[LowRankLinear, ...]

    def weight(self) -> Tensor:
        """(sum of ranks, features / p): the down-projections of all readers."""
        return torch.cat([local(projection.down.weight) for projection in self.projections])


class IntoLatents(nn.Module):
    """RMSNorm followed by the down-projections of its readers."""

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
    """Return the number that an RMSNorm adds to the mean square."""
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
