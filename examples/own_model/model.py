"""A model of one's own: any nn.Module from token ids to logits trains with `outlast train`."""

import torch
from torch import nn


class Recurrent(nn.Module):
    """A small GRU language model: token ids (batch, sequence) to logits."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits (batch, sequence, vocabulary) for the token after each position."""
        states, _ = self.recurrent(self.embedding(token_ids))
        return self.head(states)


def build(vocabulary: int = 256, width: int = 64, layers: int = 1) -> nn.Module:
    """What `model.module` names; [model.arguments] are its arguments."""
    return Recurrent(vocabulary, width, layers)
