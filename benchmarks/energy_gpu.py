"""Joules per token of training settings on one GPU, and how well its meter repeats.

Reads counters only: clocks and power limits stay as they are. Windows of 20 s, five of each
setting in turns forwards and backwards (A B B A ...), after a warm-up to steady temperature.
Without a CUDA device and its meter the rows say why they are missing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from harness import Bar
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from outlast.energy import Energy, EnergyMeter, Unavailable, available_sources
from outlast.energy.sources import Source
from outlast.guard import guard
from outlast.tensorize import tensorize

LARGEST_VARIATION = 0.01
WINDOW_SECONDS, REPEATS, WARM_SECONDS = 20.0, 5, 30.0
CONFIG = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 1024,
}
SEQUENCE = 1024


@dataclass(frozen=True)
class Setting:
    """One way to train the same model.

    Attributes:
        batch: Sequences per step.
        dtype: Of autocast; None computes in fp32.
        tf32: Whether fp32 products may be rounded to TF32.
        rank: Share of the narrower side that low-rank layers keep; None leaves layers dense.
    """

    name: str
    batch: int = 8
    dtype: torch.dtype | None = torch.bfloat16
    tf32: bool = False
    compiled: bool = False
    rank: float | None = None
    guarded: bool = False


SETTINGS = (
    Setting("bf16, batch 8"),
    Setting("fp32", dtype=None),
    Setting("tf32", dtype=None, tf32=True),
    Setting("bf16, batch 2", batch=2),
    Setting("bf16, compiled", compiled=True),
    Setting("bf16, low rank 0.25", rank=0.25),
    Setting("bf16, guarded", guarded=True),
)


def trainer(
    setting: Setting, device: torch.device, config: dict[str, int], sequence: int
) -> Callable[[], None]:
    """A function that does one optimizer step on random tokens."""
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**config)).to(device)
    if setting.rank is not None:
        tensorize(model, form="low_rank", rank=setting.rank, match="*.mlp.*")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if setting.guarded:
        guard(model, optimizer, "linear")
    called = torch.compile(model) if setting.compiled else model
    autocast = torch.autocast(device.type, setting.dtype or torch.bfloat16, bool(setting.dtype))

    def step() -> None:
        torch.backends.cuda.matmul.allow_tf32 = setting.tf32
        tokens = torch.randint(config["vocab_size"], (setting.batch, sequence), device=device)
        with autocast:
            loss = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def window(
    step: Callable[[], None], sources: Sequence[Source], seconds: float, device: torch.device
) -> tuple[Energy | Unavailable, int]:
    """Energy of as many steps as fit into a window, and their number."""
    _synchronize(device)
    with EnergyMeter("window", sources) as meter:
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            step()
            _synchronize(device)
            count += 1
    return meter.total("gpu"), count


def joules_per_token(
    settings: Sequence[Setting],
    sources: Sequence[Source],
    device: torch.device,
    *,
    seconds: float = WINDOW_SECONDS,
    repeats: int = REPEATS,
    warm_seconds: float = WARM_SECONDS,
    config: dict[str, int] | None = None,
    sequence: int = SEQUENCE,
) -> dict[str, list[float]]:
    """(repeats,) joules per token of every setting, in windows that take turns."""
    steps = {each: trainer(each, device, config or CONFIG, sequence) for each in settings}
    for step in steps.values():
        window(step, sources, warm_seconds / len(steps), device)
    found: dict[str, list[float]] = {each.name: [] for each in settings}
    for repeat in range(repeats):
        for each in settings if repeat % 2 == 0 else reversed(settings):
            energy, count = window(steps[each], sources, seconds, device)
            if isinstance(energy, Energy):
                found[each.name].append(energy.joules / (count * each.batch * sequence))
    return found


def gpu_bars() -> Iterator[Bar]:
    """Repeatability of the meter, then a row for each setting."""
    sources = [each for each in available_sources()[0] if each.part == "gpu"]
    if not torch.cuda.is_available() or not sources:
        why = "no CUDA device with an energy meter on this machine"
        name = "H200: variation of joules per token over 20 s windows"
        yield Bar(name, None, "%", f"<= {LARGEST_VARIATION:.0%}", False, why)
        yield Bar("H200: joules per token by setting", None, "J", "a table", False, why)
        return
    found = joules_per_token(SETTINGS, sources, torch.device("cuda"))
    first = found[SETTINGS[0].name]
    spread = statistics.stdev(first) / statistics.mean(first)
    name = f"variation of joules per token over 20 s windows, {SETTINGS[0].name}"
    limit = 100 * LARGEST_VARIATION
    yield Bar(name, round(100 * spread, 3), "%", f"<= {limit:g}", 100 * spread <= limit, "none")
    for setting, values in found.items():
        low, high = min(values), max(values)
        name = f"joules per token, {setting} (from {low:.4g} to {high:.4g})"
        yield Bar(
            name, round(statistics.median(values), 6), "J", "reported", True, SETTINGS[0].name
        )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
