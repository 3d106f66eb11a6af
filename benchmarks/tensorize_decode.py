"""Writing text token by token: tensorized models against the dense one.

    python benchmarks/tensorize_decode.py [--quick] [--json FILE]

A small LLaMA with random weights continues 64 tokens, with a key-value cache, for 1, 8 and 64
sequences at a time. On the CPU the figures are CPU time of one thread per step, all models in
turns, so that nobody finds its weights in the cache; on CUDA elapsed time per step in bfloat16,
compiled, with CUDA graphs for all sides. Medians. The head and the embedding stay dense; the
vocabulary of 4096 keeps them from weighing more than in a deep model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from harness import Bar, arguments, at_least, median, publish
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from outlast.tensorize.export import absorb
from outlast.tensorize.layer import merged
from outlast.tensorize.replace import tensorize

DENSE = "dense"
PROMPT = 64
WARM_UP = 4


@dataclass(frozen=True)
class Side:
    """A model that takes part.

    Attributes:
        form: What its layers become; None: they stay.
        rank: See `tensorize`.
        absorbed: Whether chains are merged to two factors first.
    """

    form: str | None
    rank: float | int = 0.25
    absorbed: bool = False


SIDES = {
    DENSE: Side(None),
    "low rank d/4": Side("low_rank"),
    "cola d/4": Side("cola"),
    "monarch, 8 blocks": Side("monarch", 8),
    "tt, rank 64": Side("tt", 64),
    "tt, rank 64, absorbed": Side("tt", 64, absorbed=True),
}


def models(hidden: int, layers: int, device: str) -> dict[str, LlamaForCausalLM]:
    """The dense model and its variants; all layers are replaced, also where none is gained."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=1024,
    )
    found = {}
    for name, side in SIDES.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        if side.form is not None:
            tensorize(model, form=side.form, rank=side.rank, force=True)
        if side.absorbed:
            absorb(model)
        kind = torch.bfloat16 if device == "cuda" else torch.float32
        found[name] = model.to(device, kind)
    return found


def parameters(model: torch.nn.Module) -> int:
    """Numbers that a step reads: all but the embedding."""
    return sum(each.numel() for each in model.parameters()) - 4096 * model.config.hidden_size


class Writer:
    """A model that writes one token after the other for some sequences."""

    def __init__(self, model: Any, sequences: int, steps: int, *, graphs: bool) -> None:
        self._forward: Callable[..., Any] = model.forward
        self._graphs = graphs
        ids = torch.randint(4096, (sequences, PROMPT), device=model.device)
        length = PROMPT + steps + WARM_UP
        self._cache: Any = (
            StaticCache(config=model.config, max_cache_len=length)
            if graphs
            else DynamicCache(config=model.config)
        )
        self._ids = self._next(model(input_ids=ids, past_key_values=self._cache, use_cache=True))
        if graphs:
            self._forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    def _next(self, output: Any) -> torch.Tensor:
        return output.logits[:, -1:].argmax(-1).clone()

    def step(self) -> None:
        """Write one token for each sequence."""
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        output = self._forward(input_ids=self._ids, past_key_values=self._cache, use_cache=True)
        self._ids = self._next(output)

    def seconds(self) -> float:
        """Time of a step: elapsed on CUDA, CPU time of this thread elsewhere."""
        if not self._graphs:
            begun = time.thread_time()
            self.step()
            return time.thread_time() - begun
        torch.cuda.synchronize()
        begun = time.perf_counter()
        self.step()
        torch.cuda.synchronize()
        return time.perf_counter() - begun


@torch.no_grad()
def step_seconds(
    all_models: dict[str, LlamaForCausalLM], sequences: int, steps: int, *, graphs: bool
) -> tuple[dict[str, float], dict[str, str]]:
    """Median time of a step of every model, in turns; and why some could not be timed."""
    failed: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        writers = {}
        for name, model in all_models.items():
            stack.enter_context(merged(model))
            try:
                writer = Writer(model, sequences, steps, graphs=graphs)
                for _ in range(WARM_UP):
                    writer.step()
            except RuntimeError as error:  # the compiler's errors are RuntimeErrors
                if name == DENSE:
                    raise
                failed[name] = " ".join(str(error).split())[:100]
                continue
            writers[name], times[name] = writer, []
        for _ in range(steps):
            for name, writer in writers.items():
                times[name].append(writer.seconds())
    return {name: median(found) for name, found in times.items()}, failed


def decode_bars(quick: bool) -> Iterator[Bar]:
    """Tokens per second against dense."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    hidden, layers = (1024, 2) if quick else (2048, 4)
    steps = 9 if quick else 41
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        all_models = models(hidden, layers, device)
        dense_size = parameters(all_models[DENSE])
        for sequences in (1, 8) if quick else (1, 8, 64):
            seconds, failed = step_seconds(all_models, sequences, steps, graphs=on_gpu)
            dense = seconds.pop(DENSE)
            where = f"{hidden} wide, {sequences} at a time, {device}"
            for name, mine in seconds.items():
                share = parameters(all_models[name]) / dense_size
                label = f"decode, {name}, {where}"
                peer = f"dense, {dense * 1e3:.3g} ms a step; {share:.2f} of its parameters"
                if on_gpu and sequences == 1 and name == "low rank d/4":
                    yield at_least(label, dense / mine, "x", 2.0, peer)
                else:
                    yield Bar(label, round(dense / mine, 3), "x", "reported", True, peer)
            for name, why in failed.items():
                wanted = sequences == 1 and name == "low rank d/4"
                bar = ">= 2" if wanted else "reported"
                yield Bar(f"decode, {name}, {where}", None, "x", bar, False, why)
        if not on_gpu:
            why = "needs a CUDA device"
            yield Bar("decode, low rank d/4, 1 at a time, cuda", None, "x", ">= 2", False, why)
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    publish("tensorize_decode", list(decode_bars(options.quick)), options.json)


if __name__ == "__main__":
    main()
