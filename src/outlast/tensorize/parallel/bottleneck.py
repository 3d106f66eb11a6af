"""Bottleneck tensor parallelism: collectives on tensors as wide as the rank.

The residual stream is split over features. A chunk runs from the up-projections of q, k and v (or
gate and up), split over their outputs, through attention heads (or the products of the MLP) of this
rank alone, to the next down-projection, split over its inputs. So what is summed over ranks is
(tokens, rank), before the activation, and the rank itself is never split (BOOST, arXiv 2512.12131).
A block sends 7 ranks' widths forward and 7 backward, plus two numbers per token; a dense block in
the manner of Megatron (arXiv 1909.08053) sends 2 d and 2 d.

Both ends of a model whose residual stream is split over features: embedding, norm and head.

The embedding is split over features and needs no collective. Logits are made in one of two ways.
Where it can be, the head is split over the vocabulary: the normalised features are gathered, d
numbers per token, and then the logits, V numbers. A head that is tied to the embedding is split
over features like it, and its partial logits are summed with the norm's statistic in one
all-reduce, which a ring makes of 2 V numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.forms.low_rank import LowRankLinear
from outlast.tensorize.parallel.grouped import (
    LLAMA_BLOCK,
    BlockPlan,
    adopt,
    blocks_with,
    check_plain_factors,
    check_plain_norm,
    epsilon_of,
    gather_features,
    group_of,
    hold_factors,
    is_low_rank,
    local,
    make_group,
    normalized,
    normalized_projection,
    split_parameter,
    sum_over,
    up_project,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


class FeatureEmbedding(nn.Module):
    """An embedding of which every rank has some features."""

    weight: Tensor
    padding_idx: int | None

    def forward(self, input_ids: Tensor) -> Tensor:
        """(...) -> (..., features / p)."""
        return nn.functional.embedding(input_ids, local(self.weight), self.padding_idx)


class GatheredNorm(nn.Module):
    """The last RMSNorm, giving all features to a head that is split over the vocabulary."""

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., features / p) -> (..., features)."""
        group = group_of(self.weight)
        assert group is not None
        features, epsilon = self.weight.shape[0], epsilon_of(self)
        scale = local(self.weight)
        part = normalized(hidden_states, scale, epsilon=epsilon, features=features, group=group)
        return gather_features(part, group, "partial")


class VocabularyHead(nn.Module):
    """A head of which every rank has the rows of some tokens."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., vocabulary)."""
        group = group_of(self.weight)
        assert group is not None
        bias = None if self.bias is None else local(self.bias)
        logits = nn.functional.linear(x, local(self.weight), bias)
        return gather_features(logits, group, "whole")


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


def check_ends(embedding: nn.Module, norm: nn.Module, head: nn.Module, *, ranks: int) -> None:
    """Refuse ends that cannot be split.

    Raises:
        TensorizeError: One is of another kind, or features cannot be divided.
    """
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
    if embedding.embedding_dim % ranks:
        raise TensorizeError(
            f"a mesh of {ranks} ranks (parallel.tensor = {ranks} of a job) does not divide the "
            f"{embedding.embedding_dim} features of the embedding; use a divisor, or shard the "
            "model (parallel.shard of a job) instead"
        )
    check_plain_norm(norm, "the last norm")


def split_ends(embedding: nn.Embedding, norm: nn.Module, head: nn.Linear, mesh: DeviceMesh) -> None:
    """Split embedding, last norm and head over a mesh, keeping tied weights tied."""
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


class RowThenColumn(nn.Module):
    """A low-rank layer from a chunk's features to those of the residual stream."""

    down: nn.Linear
    up: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features / p) -> (..., out_features / p)."""
        latent = nn.functional.linear(x, local(self.down.weight))
        return up_project(self, sum_over(latent, group_of(self.down.weight), "partial"))


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
    block_plan = plan.block if isinstance(plan, ModelPlan) else plan
    blocks = list(blocks_with(model, block_plan))
    if not blocks:
        raise TensorizeError(
            f"{type(model).__name__} has no block with {', '.join(block_plan.projections)}; give a "
            "plan with the names of its modules, or shard it (parallel.shard of a job) instead"
        )
    for name, block in blocks:
        _check_block(block, block_plan, mesh.size(), where=name)
    _check_all_named(model, plan, [name for name, _ in blocks])
    if isinstance(plan, ModelPlan):
        ends = (plan.embedding, plan.norm, plan.head)
        embedding, norm, head = (model.get_submodule(end) for end in ends)
        check_ends(embedding, norm, head, ranks=mesh.size())
        assert isinstance(embedding, nn.Embedding)
        assert isinstance(head, nn.Linear)
        split_ends(embedding, norm, head, mesh)
    for name, block in blocks:
        _split_block(block, block_plan, mesh, where=name)


def _check_block(block: nn.Module, plan: BlockPlan, size: int, *, where: str) -> None:
    for name in plan.projections:
        layer, path = block.get_submodule(name), f"{where}.{name}".lstrip(".")
        if not is_low_rank(layer):
            raise TensorizeError(
                f"{path} is a {type(layer).__name__}, and bottleneck tensor parallelism needs a "
                "LowRankLinear or BottleneckLinear; tensorize all projections of a block, or shard "
                "the model (parallel.shard of a job) instead"
            )
        check_plain_factors(layer, path)  # type: ignore[arg-type]
        for side in ("in_features", "out_features"):
            _check_divides(size, getattr(layer, side), f"{side} of {path}")
        attention = block.get_submodule(name.rpartition(".")[0])
        head = getattr(attention, "head_dim", None)
        if head is not None and name not in plan.rows:
            heads = int(layer.out_features) // int(head)  # type: ignore[arg-type]
            _check_divides(size, heads, f"heads of {path}")
    for norm, _ in plan.groups:
        check_plain_norm(block.get_submodule(norm), f"{where}.{norm}".lstrip("."))


def _check_divides(ranks: int, size: int, name: str) -> None:
    if size % ranks:
        raise TensorizeError(
            f"a mesh of {ranks} ranks (parallel.tensor = {ranks} of a job) does not divide {size} "
            f"{name}; use a divisor, or shard the model (parallel.shard of a job) instead"
        )


def _check_all_named(model: nn.Module, plan: ModelPlan | BlockPlan, blocks: list[str]) -> None:
    """Refuse parameters that would stay whole: each rank would have another gradient of them."""
    block = plan.block if isinstance(plan, ModelPlan) else plan
    inside = [*block.projections, *(norm for norm, _ in block.groups)]
    named = [f"{start}.{norm}".lstrip(".") for start in blocks for norm in inside]
    if isinstance(plan, ModelPlan):
        named += [plan.embedding, plan.norm, plan.head]
    prefixes = tuple(f"{name}." for name in named)
    for name, _ in model.named_parameters():
        if not name.startswith(prefixes):
            raise TensorizeError(
                f"{type(model).__name__} has the parameter {name}, which the plan of bottleneck "
                "tensor parallelism does not split; shard the model (parallel.shard of a job) "
                "instead"
            )


def _split_block(block: nn.Module, plan: BlockPlan, mesh: DeviceMesh, *, where: str) -> None:
    for norm, readers in plan.groups:
        make_group(block, norm, readers, where=where)
        split_parameter(block.get_submodule(norm), "weight", mesh, 0)
    for name in plan.rows:
        layer = block.get_submodule(name)
        assert isinstance(layer, LowRankLinear)
        adopt(layer, RowThenColumn)
        hold_factors(layer)
    for name in plan.projections:
        layer = block.get_submodule(name)
        split_parameter(layer.get_submodule("down"), "weight", mesh, 1)
        up = layer.get_submodule("up")
        split_parameter(up, "weight", mesh, 0)
        if up.bias is not None:
            split_parameter(up, "bias", mesh, 0)
