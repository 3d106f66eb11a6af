"""Layers against `nn.Linear`, hand-written products, tensorly-torch and plain einsum.

Every figure is CPU time of one thread, forward and backward with a bias, the best of several
interleaved repeats. All sides share one allocator policy (`keep_memory`): by default glibc maps
every block of 32 MiB or more anew, and first use of its pages costs more than a narrow product.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from harness import Bar, at_least, at_most
from torch import Tensor, nn
from torch.nn import functional

from outlast.tensorize import (
    BottleneckLinear,
    BTTLinear,
    CPLinear,
    LowRankLinear,
    MonarchLinear,
    TTLinear,
    TTMLinear,
    TuckerLinear,
)

TOKENS = 4096
DENSE = "nn.Linear"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_memory() -> None:
    """Let glibc keep freed blocks of any size, for all sides alike."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def best_seconds(works: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The best CPU time of one thread of each work, interleaved."""
    torch.set_num_threads(1)
    best = dict.fromkeys(works, math.inf)
    for repeat in range(-2, repeats):
        for name, work in works.items():
            begun = time.thread_time()
            work()
            if repeat >= 0:  # the first two warm up
                best[name] = min(best[name], time.thread_time() - begun)
    return best


def training(layer: nn.Module, tokens: int, features: int) -> Callable[[], None]:
    """Forward and backward of a layer, gradients of x and all parameters."""
    x = torch.randn(tokens, features, requires_grad=True)
    dy = torch.randn_like(layer(x))

    def work() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)

    return work


class TwoProducts(nn.Module):
    """What a person would write: two factors of the merged rank, two calls."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, features) / features**0.5)
        self.up = nn.Parameter(torch.randn(features, rank) / rank**0.5)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, features)."""
        return functional.linear(functional.linear(x, self.down), self.up, self.bias)


class Einsum(nn.Module):
    """The cores of a structured layer by `torch.einsum`, which asks opt_einsum for a path."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        network = layer.network
        self.cores = nn.ParameterList(core.detach().clone() for core in layer.factors())
        self.bias = nn.Parameter(torch.zeros(layer.out_features))
        self.modes = [network.size(letter) for letter in network.inputs]
        terms = ",".join(network.cores)
        self.equation = f"Z{network.inputs},{terms}->Z{network.outputs}"

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, features)."""
        y = torch.einsum(self.equation, x.reshape(-1, *self.modes), *self.cores)
        return y.reshape(x.shape[0], -1) + self.bias


def speed_bars(quick: bool) -> Iterator[Bar]:
    """Forms against the dense layer."""
    widths = (768,) if quick else (768, 1024, 2048)
    repeats = 3 if quick else 9
    limits: dict[tuple[str, int], float] = {}
    for width, factors, train in ((768, 1.8, 6.9), (1024, 1.8, 6.9), (2048, 1.95, 13.5)):
        limits["low rank d/4", width] = limits["CoLA d/4", width] = factors
        limits["merged TT r = 30", width] = train
        limits["TTM r = 16", width] = 0.95
    limits["BTT r = 2", 1024], limits["BTT r = 2", 2048] = 1.8, 3.0
    for width in widths:
        layers: dict[str, nn.Module] = {
            DENSE: nn.Linear(width, width),
            "low rank d/4": LowRankLinear(width, width, width // 4),
            "two hand-written products, d/4": TwoProducts(width, width // 4),
            "CoLA d/4": BottleneckLinear(width, width, width // 4),
            "merged TT r = 30": TTLinear(width, width, 30),
            "two hand-written products, r = 30": TwoProducts(width, 30),
            "BTT r = 2": BTTLinear(width, width, 2),
            "BTT r = 4": BTTLinear(width, width, 4),
            "Monarch, 4 blocks": MonarchLinear(width, width, 4),
            "Monarch, 8 blocks": MonarchLinear(width, width, 8),
            "TTM r = 16": TTMLinear(width, width, 16),
        }
        works = {name: training(layer, TOKENS, width) for name, layer in layers.items()}
        seconds = best_seconds(works, repeats)
        for name in layers:
            if name == DENSE:
                continue
            ratio = seconds[DENSE] / seconds[name]
            label = f"{name}, d = {width}, {TOKENS} tokens"
            limit = limits.get((name, width))
            peer = f"{DENSE}, {seconds[DENSE] * 1e3:.0f} ms"
            if limit is None:
                yield Bar(label, round(ratio, 3), "x dense", "reported", True, peer)
            else:
                yield at_least(label, ratio, "x dense", limit, peer)
        hand = seconds["two hand-written products, r = 30"]
        ratio = seconds["merged TT r = 30"] / hand
        name = f"merged TT / two hand-written products, d = {width}"
        yield at_most(name, ratio, "of their time", 1.05, f"{hand * 1e3:.1f} ms")


def library_bars(quick: bool) -> Iterator[Bar]:
    """The same factorizations in tensorly-torch, and by einsum with opt_einsum."""
    import tltorch

    shapes = {768: (8, 8, 12), 1024: (8, 8, 16), 2048: (8, 16, 16)}
    for width in (768,) if quick else (768, 1024, 2048):
        modes = shapes[width]
        given = {"in_modes": modes, "out_modes": modes}
        ours: dict[str, tuple[Any, str, int]] = {
            "TTM r = 8": (TTMLinear(width, width, 8, **given), "blocktt", 8),
            "Tucker r = 4": (TuckerLinear(width, width, 4, **given), "tucker", 4),
            "CP r = 64": (CPLinear(width, width, 64, **given), "cp", 64),
        }
        for name, (layer, factorization, rank) in ours.items():
            ranks = {"blocktt": (1, rank, rank, 1), "tucker": (rank,) * 6, "cp": rank}
            peers = {
                f"tensorly-torch, {how}": tltorch.FactorizedLinear(
                    modes, modes, factorization=factorization, rank=ranks[factorization],
                    implementation=how,
                )
                for how in ("factorized", "reconstructed")
            }  # fmt: skip
            for peer in peers.values():
                peer.weight.normal_(0, 0.02)
            for tokens in (512,) if quick else (16, 512, 4096):
                layers = {"ours": layer, "einsum + opt_einsum": Einsum(layer), **peers}
                works = {each: training(module, tokens, width) for each, module in layers.items()}
                seconds = best_seconds(works, 3 if quick else 7)
                theirs = min(peers, key=lambda each: seconds[each])
                label = f"{name}, d = {width}, {tokens} tokens"
                peer = f"{theirs}, {seconds[theirs] * 1e3:.2f} ms"
                yield at_least(label, seconds[theirs] / seconds["ours"], "x its speed", 2.0, peer)
                ratio = seconds["einsum + opt_einsum"] / seconds["ours"]
                what = f"einsum + opt_einsum, {seconds['einsum + opt_einsum'] * 1e3:.2f} ms"
                yield Bar(label, round(ratio, 3), "x its speed", "reported", True, what)


def saved_numbers(layer: nn.Module, x: Tensor) -> int:
    """Numbers that the graph of a forward pass keeps, apart from x and parameters."""
    known = {x.data_ptr()} | {parameter.data_ptr() for parameter in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    del y
    return sum(kept.values())


def saved_bars() -> Iterator[Bar]:
    """Activations that the backward pass keeps."""
    width, rank = 1024, 256
    x = torch.randn(TOKENS, width, requires_grad=True)
    cola = saved_numbers(BottleneckLinear(width, width, rank), x) / (TOKENS * rank)
    yield at_most("CoLA d/4: kept beyond x", cola, "tokens x rank", 1.0, "prototype: 2")
    for name, layer in (("BTT r = 2", BTTLinear(width, width, 2)),
                        ("Monarch, 4 blocks", MonarchLinear(width, width, 4))):  # fmt: skip
        share = saved_numbers(layer, x) / x.numel()
        yield at_most(f"{name}: kept beyond x", share, "of x", 0.0, "its middle: 2 x")
    train = saved_numbers(TTLinear(width, width, 30), x) / (TOKENS * 31)
    name = "merged TT r = 30: kept beyond x"
    yield at_most(name, train, "tokens x (rank + 1)", 1.0, "one column is the bias")
