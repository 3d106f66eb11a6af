"""An output layer that multiplies with the factors of the embedding it is tied to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.tensorize.forms.embedding import StructuredEmbedding


class TiedHead(nn.Module):
    """Scores of every row of an embedding's table; has no factors of its own.

    The embedding is no child of it, so every parameter has one name in the model.

    Args:
        embedding: What it is tied to.
        bias: Whether there is a bias, one number per row.
        device: Where that lies.
        dtype: Its.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        embedding: StructuredEmbedding,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.tie(embedding)
        empty = torch.empty(self.out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, *others: Any
    ) -> None:
        # A dense weight that is loaded here is the embedding's, which refuses what it cannot take.
        state.pop(f"{prefix}weight", None)
        super()._load_from_state_dict(state, prefix, metadata, *others)

    @property
    def embedding(self) -> StructuredEmbedding:
        """What it is tied to."""
        (embedding,) = self._tied
        return embedding

    def tie(self, embedding: StructuredEmbedding) -> None:
        """Take the factors of another embedding of the same sizes from now on."""
        self._tied = (embedding,)

    @property
    def weight(self) -> Tensor:
        """The embedding's table; see `StructuredLinear.weight`."""
        return self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x: (..., in_features) -> (..., out_features)."""
        scores = self.embedding.logits(x)
        return scores if self.bias is None else scores + self.bias.to(scores.dtype)

    def extra_repr(self) -> str:
        """What `print` shows."""
        biased = self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={biased}, tied to an embedding"


def tied_heads(model: nn.Module) -> dict[str, TiedHead]:
    """All such layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TiedHead)}


def name_of(module: nn.Module, model: nn.Module) -> str:
    """The first name of a module that is part of a model."""
    name: str = next(name for name, item in model.named_modules() if item is module)
    return name
