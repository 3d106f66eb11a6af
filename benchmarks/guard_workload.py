"""What the benchmark of the guard trains: a small GPT on real text, and one linear layer."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
LENGTH = 256


class Block(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, length, width)."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A byte-level GPT of `width` and `layers`."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, max(width // 64, 1)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (batch, length) -> logits (batch, length, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Biased(nn.Module):
    """An MLP without normalisation, whose activations are far from zero mean."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (batch, length) -> logits (batch, length, vocabulary)."""
        x = self.tokens(tokens) + 3.0
        for layer in self.layers:
            x = x + functional.relu(layer(x) + 0.5)
        logits: torch.Tensor = self.head(x / 16)
        return logits


class Text:
    """Windows of the standard library's source text, drawn with a seed."""

    def __init__(self, seed: int = 0) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))[:60]
        self._bytes = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
        self._random = np.random.default_rng(seed)

    def batch(self, samples: int, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, both (samples, length) int64."""
        starts = self._random.integers(len(self._bytes) - length - 1, size=samples)
        rows = np.stack([self._bytes[start : start + length + 1] for start in starts])
        window = torch.from_numpy(rows.astype(np.int64))
        return window[:, :-1], window[:, 1:]


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    autocast: torch.dtype | None = None,
) -> float:
    """One step of AdamW; returns the loss."""
    tokens, targets = batch
    with torch.autocast(tokens.device.type, autocast, enabled=autocast is not None):
        logits = model(tokens)
    loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())
