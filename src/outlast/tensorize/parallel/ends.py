"""Both ends of a model whose residual stream is split over features: embedding, norm and head.

The embedding is split over features and needs no collective. Logits are made in one of two ways.
Where it can be, the head is split over the vocabulary: the normalised features are gathered, d
numbers per token, and then the logits, V numbers. A head that is tied to the embedding is split
over features like it, and its partial logits are summed with the norm's statistic in one
all-reduce, which a ring makes of 2 V numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.parallel.collectives import gather_features
from outlast.tensorize.parallel.grouped import adopt, check_plain_norm, epsilon_of
from outlast.tensorize.parallel.online_norm import normalized, normalized_projection
from outlast.tensorize.parallel.shards import group_of, local, split_parameter

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
