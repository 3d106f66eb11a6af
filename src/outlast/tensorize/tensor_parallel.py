"""Bottleneck tensor parallelism: collectives on tensors as wide as the rank.

The residual stream is split over features. A chunk runs from the up-projections of q, k and v (or
gate and up), split over their outputs, through attention heads (or the products of the MLP) of this
rank alone, to the next down-projection, split over its inputs. So what is summed over ranks is
(tokens, rank), before the activation, and the rank itself is never split (BOOST, arXiv 2512.12131).
A block sends 7 ranks' widths forward and 7 backward, plus two numbers per token; a dense block in
the manner of Megatron (arXiv 1909.08053) sends 2 d and 2 d.

Projections that read the same norm are grouped: one product for q, k and v, one for gate and up.
The norm of a block gives what all its readers' down-projections make of it, side by side, instead
of its normalised input: one product (..., d) x (d, r_1 + r_2 + ...) and one all-reduce. Each reader
takes its columns. The code of the block is not touched: whatever calls norm and then reader still
does.

RMSNorm is online. The mean square needs all features, so a plain norm would wait for a collective
before its projection can begin. But the norm's divisor is one number per token, and a projection is
linear: every rank projects what it has, sends (partial projections, sum of squares) together, and
divides afterwards. The result is exact.

The embedding is split over features and needs no collective. Logits are made in one of two ways.
Where it can be, the head is split over the vocabulary: the normalised features are gathered, d
numbers per token, and then the logits, V numbers. A head that is tied to the embedding is split
over features like it, and its partial logits are summed with the norm's statistic in one
all-reduce, which a ring makes of 2 V numbers.

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
from outlast.tensorize.low_rank import BottleneckLinear, LowRankLinear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class _ActivatedLinear(torch.autograd.Function):
    """act(latent) weight^T + bias; backward, act(latent) is computed again."""

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


def group_of(tensor: Tensor) -> ProcessGroup:
    """The ranks that hold the parts of a tensor."""
    assert isinstance(tensor, DTensor)
    return tensor.device_mesh.get_group()


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

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all modules."""
        return (*self.projections, *(norm for norm, _ in self.groups))


LLAMA_BLOCK = BlockPlan(
    groups=(
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ),
    rows=("self_attn.o_proj", "mlp.down_proj"),
)
"""The block of Llama, Mistral and Qwen2 in transformers."""


@dataclass(frozen=True)
class ModelPlan:
    """Names of a causal language model's modules.

    Attributes:
        block: Those of every block.
        embedding: The `nn.Embedding` that the residual stream begins with.
        norm: The RMSNorm after the last block.
        head: The `nn.Linear` that makes logits, maybe tied to the embedding.
    """

    block: BlockPlan = LLAMA_BLOCK
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"


LLAMA = ModelPlan()
"""Llama, Mistral and Qwen2 in transformers."""


def blocks_with(model: nn.Module, plan: BlockPlan) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of everything that has all children that the plan names."""
    for name, module in model.named_modules():
        try:
            for item in plan.modules:
                module.get_submodule(item)
        except AttributeError:
            continue
        yield name, module


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


class FeatureEmbedding(nn.Module):
    """An embedding of which every rank has some features."""

    weight: Tensor
    padding_idx: int | None

    def forward(self, input_ids: Tensor) -> Tensor:
        """(...) -> (..., features / p)."""
        return functional.embedding(input_ids, local(self.weight), self.padding_idx)


class GatheredNorm(nn.Module):
    """The last RMSNorm, giving all features to a head that is split over the vocabulary."""

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., features / p) -> (..., features)."""
        group = group_of(self.weight)
        exact = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        squares = sum_over(exact.square().sum(-1, keepdim=True), group, "partial")
        inverse = torch.rsqrt(squares / self.weight.shape[0] + epsilon_of(self))
        part = local(self.weight) * (exact * inverse).to(hidden_states.dtype)
        return gather_features(part, group, "partial")


class VocabularyHead(nn.Module):
    """A head of which every rank has the rows of some tokens."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., vocabulary)."""
        bias = None if self.bias is None else local(self.bias)
        logits = functional.linear(x, local(self.weight), bias)
        return gather_features(logits, group_of(self.weight), "whole")


class IntoLogits(nn.Module):
    """The last RMSNorm together with a head that is split over features."""

    weight: Tensor
    head: tuple[nn.Linear]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., features / p) -> (..., vocabulary)."""
        return normalized_projection(
            hidden_states,
            local(self.weight),
            local(self.head[0].weight),
            epsilon=epsilon_of(self),
            features=self.weight.shape[0],
            group=group_of(self.weight),
            gradient="whole",
        )


class DoneHead(nn.Module):
    """A head whose product its norm has done."""

    bias: Tensor | None

    def forward(self, logits: Tensor) -> Tensor:
        """(..., vocabulary), with the bias."""
        return logits if self.bias is None else logits + local(self.bias)


class IntoLatents(nn.Module):
    """RMSNorm followed by the down-projections of the layers that read it."""

    weight: Tensor
    readers: tuple[LowRankLinear, ...]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., features / p) -> (..., sum of ranks), before any activation."""
        return normalized_projection(
            hidden_states,
            local(self.weight),
            torch.cat([local(reader.down.weight) for reader in self.readers]),
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


class RowThenColumn(nn.Module):
    """A low-rank layer from a chunk's features to those of the residual stream."""

    down: nn.Linear
    up: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features / p) -> (..., out_features / p)."""
        latent = functional.linear(x, local(self.down.weight))
        return up_project(self, sum_over(latent, group_of(self.down.weight), "partial"))


class HeldFactor(nn.Module):
    """A factor whose weight its layer reads; nobody calls it, so hooks and checks have no place."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features), if the weight is whole."""
        return functional.linear(x, self.weight, self.bias)


def up_project(layer: Any, latent: Tensor) -> Tensor:
    """Activation and up-projection: (..., rank) -> (..., out_features / p)."""
    weight = local(layer.up.weight)
    bias = None if layer.up.bias is None else local(layer.up.bias)
    if not isinstance(layer, BottleneckLinear):
        return functional.linear(latent, weight, bias)
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(latent.device.type):
        # Compiled graphs decide themselves what they compute again.
        return functional.linear(ACTIVATIONS[layer.activation](latent), weight, bias)
    result: Tensor = _ActivatedLinear.apply(latent, weight, bias, layer.activation)  # type: ignore[no-untyped-call]
    return result


def parallelize_bottleneck(
    model: nn.Module, mesh: DeviceMesh, plan: ModelPlan | BlockPlan = LLAMA
) -> None:
    """Split a model of low-rank layers over the ranks of a mesh, in place.

    Parameters become DTensors with one `Shard` each, so optimizers, clipping and checkpoints see
    their global shapes; FSDP2 and HSDP go around it, by blocks. All ranks get the same tokens, and
    all return the same logits (batch, sequence, vocabulary). Results and gradients are those of one
    rank up to the order of sums.

    Args:
        model: A causal language model, or with a `BlockPlan` one block or several, whose input and
            output are then split over features: (..., d / p).
        mesh: One-dimensional.
        plan: Names of the modules.

    Raises:
        TensorizeError: A size is not divisible by the number of ranks, a projection is no low-rank
            layer, or the model has a parameter that the plan does not name.
    """
    if mesh.ndim != 1:
        raise TensorizeError(
            f"a mesh of {mesh.ndim} dimensions cannot be split over; give one, as mesh['tensor']"
        )
    names = plan.block if isinstance(plan, ModelPlan) else plan
    blocks = list(blocks_with(model, names))
    if not blocks:
        raise TensorizeError(
            f"{type(model).__name__} has no block with {', '.join(names.projections)}; give a "
            "plan with the names of its modules, or shard it (parallel.shard of a job) instead"
        )
    for where, block in blocks:
        _check_block(block, names, mesh.size(), where=where)
    # Of parameters that stayed whole, each rank would have another gradient.
    split = [f"{where}.{name}".lstrip(".") for where, _ in blocks for name in names.modules]
    if isinstance(plan, ModelPlan):
        split += [plan.embedding, plan.norm, plan.head]
    for name, _ in model.named_parameters():
        if not name.startswith(tuple(f"{part}." for part in split)):
            raise TensorizeError(
                f"{type(model).__name__} has the parameter {name}, which the plan of bottleneck "
                "tensor parallelism does not split; shard the model (parallel.shard of a job) "
                "instead"
            )
    if isinstance(plan, ModelPlan):
        split_ends(model, plan, mesh)
    for _, block in blocks:
        split_block(block, names, mesh)


def _check_block(block: nn.Module, plan: BlockPlan, size: int, *, where: str) -> None:
    for name in plan.projections:
        layer, path = block.get_submodule(name), f"{where}.{name}".lstrip(".")
        # Not yet adopted either.
        if type(layer) not in (LowRankLinear, BottleneckLinear):
            raise TensorizeError(
                f"{path} is a {type(layer).__name__}, and bottleneck tensor parallelism needs a "
                "LowRankLinear or BottleneckLinear; tensorize all projections of a block, or shard "
                "the model (parallel.shard of a job) instead"
            )
        for child in ("down", "up"):
            factor = layer.get_submodule(child)
            if type(factor) is not nn.Linear or factor._forward_hooks or factor._forward_pre_hooks:
                raise TensorizeError(
                    f"{path}.{child} is a {type(factor).__name__} with a forward of its own or "
                    "hooks, which grouping would pass by; group before they are replaced, or leave "
                    "them out"
                )
        if layer.down.bias is not None:  # type: ignore[union-attr]
            raise TensorizeError(f"{path}.down has a bias, and a low-rank layer has none there")
        sizes = {side: int(getattr(layer, side)) for side in ("in_features", "out_features")}
        head = getattr(block.get_submodule(name.rpartition(".")[0]), "head_dim", None)
        if head is not None and name not in plan.rows:
            sizes["heads"] = sizes["out_features"] // int(head)
        for side, count in sizes.items():
            if count % size:
                raise TensorizeError(
                    f"a mesh of {size} ranks (parallel.tensor = {size} of a job) does not divide "
                    f"{count} {side} of {path}; use a divisor, or shard the model (parallel.shard "
                    "of a job) instead"
                )
    for norm, _ in plan.groups:
        check_plain_norm(block.get_submodule(norm), f"{where}.{norm}".lstrip("."))


def split_block(block: nn.Module, plan: BlockPlan, mesh: DeviceMesh) -> None:
    """Split a transformer block over a mesh; projections are grouped by the norm that they read."""
    for norm, readers in plan.groups:
        projections: list[LowRankLinear] = []
        start = 0
        for name in readers:
            reader: Any = block.get_submodule(name)
            adopt(reader, FromLatents)
            reader.columns = slice(start, start + reader.down.out_features)
            start = reader.columns.stop
            projections.append(reader)
        layer: Any = block.get_submodule(norm)
        adopt(layer, IntoLatents)
        layer.readers = tuple(projections)
        split_parameter(layer, "weight", mesh, 0)
    for name in plan.rows:
        adopt(block.get_submodule(name), RowThenColumn)
    for name in plan.projections:
        down, up = (block.get_submodule(f"{name}.{side}") for side in ("down", "up"))
        for factor in (down, up):
            # Not called, which their type shows to who looks for layers.
            adopt(factor, HeldFactor)
        split_parameter(down, "weight", mesh, 1)
        split_parameter(up, "weight", mesh, 0)
        if up.bias is not None:
            split_parameter(up, "bias", mesh, 0)


@torch.no_grad()
def check_plain_norm(norm: Any, name: str) -> None:
    """Refuse a norm that does something else than weight * x / rms(x).

    It is tried, since classes of many names do that and some of the same name do more.

    Raises:
        TensorizeError: Naming it.
    """
    weight: Any = getattr(norm, "weight", None)
    plain = isinstance(weight, nn.Parameter) and [*dict(norm.named_parameters())] == ["weight"]
    if plain and not weight.is_meta:
        # Also small numbers, whose norm epsilon decides.
        sizes = torch.tensor([[1.0], [1e-3]], device=weight.device, dtype=weight.dtype)
        ramp = torch.linspace(-1, 2, weight.numel(), device=weight.device).to(weight.dtype) * sizes
        x = ramp.float()
        expected = weight.float() * x * torch.rsqrt(x.square().mean(-1, True) + epsilon_of(norm))
        tolerance = 1e-4 if weight.dtype == torch.float32 else 0.05
        plain = torch.allclose(norm(ramp).float(), expected, rtol=tolerance, atol=tolerance)
    if not plain:
        raise TensorizeError(
            f"{name} is a {type(norm).__name__} and does not compute weight * x / rms(x); grouping "
            "and bottleneck tensor parallelism need a plain RMSNorm"
        )


def split_ends(model: nn.Module, plan: ModelPlan, mesh: DeviceMesh) -> None:
    """Split embedding, last norm and head over a mesh, keeping tied weights tied.

    Raises:
        TensorizeError: One is of another kind, or features cannot be divided.
    """
    embedding, norm, head = map(model.get_submodule, (plan.embedding, plan.norm, plan.head))
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        raise TensorizeError(
            f"the embedding is a {type(embedding).__name__} and the head a {type(head).__name__}; "
            "bottleneck tensor parallelism needs an nn.Embedding and an nn.Linear: leave them as "
            "they are when tensorizing"
        )
    if embedding.max_norm is not None or embedding.scale_grad_by_freq:
        raise TensorizeError(
            "an embedding with max_norm or scale_grad_by_freq cannot be split over features; set "
            "them to None and False"
        )
    if embedding.embedding_dim % mesh.size():
        raise TensorizeError(
            f"a mesh of {mesh.size()} ranks (parallel.tensor = {mesh.size()} of a job) does not "
            f"divide the {embedding.embedding_dim} features of the embedding; use a divisor, or "
            "shard the model (parallel.shard of a job) instead"
        )
    check_plain_norm(norm, "the last norm")
    tied = head.weight is embedding.weight
    by_vocabulary = not tied and head.out_features % mesh.size() == 0
    adopt(embedding, FeatureEmbedding)
    split_parameter(embedding, "weight", mesh, 1)
    split_parameter(norm, "weight", mesh, 0)
    if tied:
        head.weight = embedding.weight
    else:
        split_parameter(head, "weight", mesh, 0 if by_vocabulary else 1)
    if head.bias is not None:
        split_parameter(head, "bias", mesh, 0 if by_vocabulary else None)
    if by_vocabulary:
        adopt(norm, GatheredNorm)
        adopt(head, VocabularyHead)
        return
    adopt(norm, IntoLogits)
    norm.head = (head,)  # type: ignore[assignment]
    adopt(head, DoneHead)
