"""One tiny, real model per family, of transformers' or torch's own classes.

``FAMILIES[name](dtype=torch.bfloat16)`` gives a `Case`: a model, its batches and its loss. Those of
transformers are `outlast.guard.inject.zoo`'s; the others are built from torch's modules here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outlast.guard.inject import zoo
from outlast.guard.inject.zoo import DTYPES, Case

__all__ = ["DTYPES", "FAMILIES", "UNKNOWN_OPERATIONS", "Case", "with_unknown"]


class Recurrent(nn.Module):
    """A classifier of token sequences by the last state of an LSTM or GRU."""

    def __init__(self, kind: Callable[..., nn.Module], width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, width)
        self.layers = kind(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.layers(self.tokens(ids))
        logits: Tensor = self.head(states[:, -1])
        return logits


class UNetBlock(nn.Module):
    """Group norm, SiLU and a convolution, with the time added, around a residual."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(4, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.time = nn.Linear(time, outputs)
        self.second = nn.Sequential(
            nn.GroupNorm(4, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.first(x) + self.time(time)[:, :, None, None]
        found: Tensor = self.skip(x) + self.second(inner)
        return found


class UNet(nn.Module):
    """The noise predictor of a small diffusion model."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32))
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.down = UNetBlock(width, width, 32)
        self.shrink = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = UNetBlock(2 * width, 2 * width, 32)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = UNetBlock(2 * width, width, 32)
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time = self.time(time)
        outer = self.down(self.start(x), time)
        inner = self.middle(self.shrink(outer), time)
        places = self.norm(inner).flatten(2).transpose(1, 2)
        mixed, _ = self.attention(places, places, places, need_weights=False)
        inner = inner + mixed.transpose(1, 2).reshape(inner.shape)
        inner = self.up(torch.cat([self.grow(inner), outer], 1), time)
        found: Tensor = self.end(inner)
        return found


class Inception(nn.Module):
    """Branches of grouped, dilated, depthwise and asymmetric convolutions, in 2-D and 1-D."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.branches = nn.ModuleList(
            (
                nn.Conv2d(width, width, 1),
                nn.Conv2d(width, width, 3, padding=1, groups=4),
                nn.Conv2d(width, width, 3, padding=2, dilation=2),
                nn.Conv2d(width, width, 3, padding=1, groups=width),
                nn.Sequential(
                    nn.Conv2d(width, width, (1, 5), padding=(0, 2)),
                    nn.Conv2d(width, width, (5, 1), padding=(2, 0)),
                ),
            )
        )
        self.mix = nn.Conv1d(5 * width, 32, 3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.start(images)).relu()
        x = torch.cat([branch(x) for branch in self.branches], 1).relu()
        logits: Tensor = self.head(self.mix(x.mean(2)).relu().mean(2))
        return logits


class Translator(nn.Module):
    """`nn.Transformer` between embeddings and a linear layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, width)
        self.transformer = nn.Transformer(width, 4, 1, 2, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        logits: Tensor = self.head(self.transformer(x, x, tgt_mask=mask, tgt_is_causal=True))
        return logits


def mlp() -> nn.Module:
    layers = (nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    return nn.Sequential(*layers)


def _case(
    build: Callable[[], nn.Module],
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]],
    loss: Callable[..., Tensor],
    *,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A case of a model of torch's modules; the last of its inputs are the targets."""
    torch.manual_seed(0)

    def batch(step: int) -> tuple[Tensor, ...]:
        drawn = inputs(torch.Generator().manual_seed(1000 + step))
        return tuple(item.to(dtype) if item.is_floating_point() else item for item in drawn)

    def of_model(model: nn.Module, drawn: tuple[Tensor, ...]) -> Tensor:
        return loss(model(*drawn[:-1]), drawn[-1])

    return Case(build().to(dtype).train(), batch, of_model)


def _ids(draw: torch.Generator) -> Tensor:
    return torch.randint(3, 128, (4, 32), generator=draw)


def _classes(count: int, size: int) -> Callable[[torch.Generator], Tensor]:
    return lambda draw: torch.randint(count, (size,), generator=draw)


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda draw: torch.randn(*shape, generator=draw)


def _all(*parts: Callable[[torch.Generator], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda draw: tuple(part(draw) for part in parts)


def _next_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# The functions are looked up when they are called: the guard replaces them.
def _classification(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)


def _distance(found: Tensor, wanted: Tensor) -> Tensor:
    return functional.mse_loss(found, wanted)


def _noise_and_time(draw: torch.Generator) -> tuple[Tensor, ...]:
    images, noise = (torch.randn(2, 3, 16, 16, generator=draw) for _ in range(2))
    time = torch.rand(2, 1, generator=draw)
    share = time[:, :, None, None]
    return (1 - share) * images + share * noise, time, noise


def _tokens_twice(draw: torch.Generator) -> tuple[Tensor, ...]:
    ids = _ids(draw)
    return ids, ids


_OWN: dict[str, tuple[Callable[[], nn.Module], Any, Callable[..., Tensor]]] = {
    "lstm": (partial(Recurrent, nn.LSTM), _all(_ids, _classes(5, 4)), _classification),
    "gru": (partial(Recurrent, nn.GRU), _all(_ids, _classes(5, 4)), _classification),
    "unet": (UNet, _noise_and_time, _distance),
    "transformer": (Translator, _tokens_twice, _next_tokens),
    "mlp": (mlp, _all(_normal(32, 64), _classes(10, 32)), _classification),
    "inception": (
        Inception,
        _all(_normal(4, 3, 32, 32), _classes(10, 4)),
        _classification,
    ),
}

FAMILIES: dict[str, Callable[..., Case]] = {
    **zoo.FAMILIES,
    **{name: partial(_case, *parts) for name, parts in _OWN.items()},
}
"""By name; each takes the weights' ``dtype``, fp32 unless given."""


@torch.library.custom_op("outlast_zoo::blend", mutates_args=())
def blend(x: Tensor) -> Tensor:
    return x + 0.125 * x.flip(-1)


blend.register_fake(torch.empty_like)
blend.register_autograd(lambda ctx, dy: dy + 0.125 * dy.flip(-1))


class Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 0.125 * x.flip(-1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy + 0.125 * dy.flip(-1)


UNKNOWN_OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "custom_op": blend,
    "autograd_function": Blend.apply,
}
"""The same change, as two kinds of code that no check has seen."""


def with_unknown(model: nn.Module, operation: Callable[[Tensor], Tensor]) -> None:
    """Let an unknown operation change what one layer in the middle of the model gives."""
    kinds = (nn.Linear, nn.Conv2d, nn.LSTM, nn.GRU, nn.LayerNorm, nn.Embedding)
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    layer = layers[len(layers) // 2]

    def changed(_: nn.Module, __: Any, found: Any) -> Any:
        return (operation(found[0]), *found[1:]) if isinstance(found, tuple) else operation(found)

    layer.register_forward_hook(changed)
