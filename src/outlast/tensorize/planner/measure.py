"""Measuring what operations cost on this machine, once."""

from __future__ import annotations

import functools
import json
import math
import time
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from outlast.tensorize.execute import Path, apply, differentiate
from outlast.tensorize.network import Network, Route
from outlast.tensorize.operator import Merged, chain
from outlast.tensorize.plan import Plan
from outlast.tensorize.planner.table import (
    AXIS,
    BYTES_AXIS,
    LAYOUTS,
    RUN_AXIS,
    STRETCH_AXIS,
    STRIDED_ELEMENTS,
    Table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from outlast.tensorize.network import Layout

# Larger products, and larger ones of a batch, run at the rate of the largest that is measured. An
# accelerator is not busy with what takes a core milliseconds.
_MOST_FLOPS = {"cpu": 1.4e8, "cuda": 3e11}
_MOST_ITEM_FLOPS = {"cpu": 9e6, "cuda": 2e10}
_BATCH = 8
_FAULT_BYTES = 32 << 20


class Clock:
    """The least seconds of an operation: a thread's on a CPU, the device's elsewhere."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats

    def __call__(self, action: Callable[[], object], least: float = 1e-4) -> float:
        """The least seconds of one of several repeats, each of `least` seconds."""
        action()
        first = self.once(action, 1)
        times = max(1, math.ceil(least / max(first, 1e-7)))
        repeats = self._repeats if first < 2e-3 else max(self._repeats - 2, 1)
        return min(first, *(self.once(action, times) for _ in range(repeats)))

    def once(self, action: Callable[[], object], times: int) -> float:
        """Seconds of one of several runs."""
        if self._device.type == "cpu":
            # Other threads of the process do not count, but those of the operation itself do.
            clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
            begin = clock()
            for _ in range(times):
                action()
            return (clock() - begin) / times
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        start.record()
        for _ in range(times):
            action()
        end.record()
        torch.cuda.synchronize(self._device)
        return float(start.elapsed_time(end)) * 1e-3 / times


def measure(dtype: torch.dtype, device: torch.device, machine: str = "", repeats: int = 3) -> Table:
    """Measure a device; about ten seconds on one core.

    Args:
        dtype: Of the numbers.
        device: Which.
        machine: What it is called.
        repeats: Of every point, of which the fastest counts.
    """
    clock = Clock(device, repeats)
    options: Any = {"dtype": dtype, "device": device}
    with torch.no_grad():
        start = clock(_small_product(options))
        single, batched = {}, {}
        for layout in LAYOUTS:
            single[layout], batched[layout] = _products(layout, clock, start, options)
        copies = [_log(clock(_copy(size, run, options))) for size in BYTES_AXIS for run in RUN_AXIS]
        strided = [_log(_strided(inner, stride, clock, options)) for inner in STRETCH_AXIS
                   for stride in STRETCH_AXIS]  # fmt: skip
        turned = [_turned(m, n, clock, options) for m in AXIS for n in AXIS]
        added = [_log(clock(_addition(size, options))) for size in BYTES_AXIS]
        faults = _faults(clock, options)
        launches = _launches(start, device, options)
    return Table(
        machine=machine,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        torch=torch.__version__,
        measured=True,
        item_bytes=dtype.itemsize,
        matrix=single,
        batched=batched,
        copy=copies,
        strided=strided,
        transpose=turned,
        element=added,
        launch=launches,
        fault_seconds_per_byte=faults,
        fault_bytes=_FAULT_BYTES if device.type == "cpu" else 1e18,
    )


def _log(seconds: float) -> float:
    return round(math.log2(max(seconds, 1e-9)), 3)


def _small_product(options: Any) -> Callable[[], Tensor]:
    left, right = torch.ones(2, 1, 1, **options), torch.ones(2, 1, 1, **options)
    return lambda: torch.bmm(left, right)


def _operands(
    layout: str, batch: int, sizes: tuple[int, int, int], options: Any
) -> tuple[Tensor, Tensor]:
    m, n, k = sizes

    def side(rows: int, columns: int, turned: bool) -> Tensor:
        if turned:
            return torch.ones(batch, columns, rows, **options).mT
        return torch.ones(batch, rows, columns, **options)

    left, right = side(m, k, layout[0] == "t"), side(k, n, layout[1] == "t")
    return left, right


def _within(sizes: tuple[int, int, int], most: float) -> tuple[tuple[int, int, int], float]:
    """Sizes of at most so many operations, and how many times as much the original ones are."""
    m, n, k = sizes
    times = 1.0
    while 2 * m * n * k > most:
        if max(m, n, k) == k:
            k //= 4
        elif m >= n:
            m //= 4
        else:
            n //= 4
        times *= 4
    return (m, n, k), times


def _products(
    layout: str, clock: Clock, start: float, options: Any
) -> tuple[list[float], list[float]]:
    single, batched = [], []
    kind = options["device"].type
    most, most_item = _MOST_FLOPS[kind], _MOST_ITEM_FLOPS[kind]
    known: dict[tuple[int, int, int], float] = {}
    for m in AXIS:
        for n in AXIS:
            for k in AXIS:
                at, times = _within((m, n, k), most)
                if at not in known:
                    left, right = (side[0] for side in _operands(layout, 1, at, options))
                    known[at] = clock(functools.partial(torch.mm, left, right))
                single.append(_log(known[at] * times))
    known = {}
    for m in AXIS:
        for n in AXIS:
            for k in AXIS:
                at, times = _within((m, n, k), most_item)
                if at not in known:
                    left, right = _operands(layout, _BATCH, at, options)
                    seconds = clock(functools.partial(torch.bmm, left, right))
                    known[at] = max(seconds - start, seconds / 20) / _BATCH
                batched.append(_log(known[at] * times))
    return single, batched


def _copy(size: int, run: int, options: Any) -> Callable[[], Tensor]:
    item = options["dtype"].itemsize
    run = max(run // item, 1)
    count = max(size // item // run, 1)
    # As between stages, three indices change places and none can be joined with its neighbour.
    side = max(round(count ** (1 / 3)), 1)
    source = torch.ones(side, max(count // side**2, 1), side, run, **options)
    return lambda: source.permute(2, 1, 0, 3).contiguous()


def _strided(inner: int, stride: int, clock: Clock, options: Any) -> float:
    # Odd sizes, for with powers of two some lines of the cache get all.
    inner, stride = inner + inner // 16, stride + stride // 16
    blocks = max(STRIDED_ELEMENTS // (inner * stride), 1)
    source = torch.ones(blocks, inner, stride, **options)
    seconds = clock(lambda: source.permute(0, 2, 1).contiguous())
    return seconds * STRIDED_ELEMENTS / source.numel()


def _turned(m: int, n: int, clock: Clock, options: Any) -> float:
    (rows, columns, _), times = _within((m, n, 1), 8.4e6)
    source = torch.ones(rows, columns, **options)
    return _log(clock(lambda: source.t().contiguous()) * times)


def _addition(size: int, options: Any) -> Callable[[], Tensor]:
    count = max(size // options["dtype"].itemsize, 1)
    source, other = torch.ones(count, **options), torch.ones(count, **options)
    return lambda: source + other


def _faults(clock: Clock, options: Any) -> float:
    if options["device"].type != "cpu":
        return 0.0
    count = _FAULT_BYTES // options["dtype"].itemsize
    there = torch.empty(count, **options)
    anew = clock(lambda: torch.empty(count, **options).zero_())
    again = clock(there.zero_)
    return max(anew - again, 0.0) / _FAULT_BYTES


def _train(count: int) -> Network:
    """A chain of matrices of two rows and columns."""
    letters = "abcdefg"[: count + 1]
    cores = tuple(letters[at + 1] + letters[at] for at in range(count))
    return Network(letters[0], letters[-1], cores, tuple((letter, 2) for letter in letters), 2, 2)


def _blocks() -> Network:
    """Two block-diagonal matrices."""
    sizes = tuple((character, 2) for character in "minor")
    return Network("mi", "no", ("mnri", "nomr"), sizes, 4, 4)


class _Tiny:
    """A layer so small that nothing but starting operations takes time."""

    def __init__(
        self, network: Network, clock: Callable[..., float], options: Any, merged: int = 1
    ) -> None:
        self.network = network
        self.clock = clock
        self.options = options
        self.cores = [torch.ones(network.shape(core), **options)
                      for core in range(len(network.cores))]  # fmt: skip
        self.route = Route((merged,) * (len(network.cores) // merged))

    def merging(self) -> float:
        """Seconds to make a path."""
        dtype = self.options["dtype"]
        return self.clock(lambda: Path(self.network, self.route, self.cores, dtype))

    def forward(self, tokens: int = 1, layout: Layout = "tokens", chunk: int = 0) -> float:
        """Seconds to apply one."""
        route = replace(self.route, layout=layout, chunk=chunk)
        path = Path(self.network, route, self.cores, self.options["dtype"])
        x = torch.ones(tokens, self.network.in_features, **self.options)
        return self.clock(lambda: apply(path, x))

    def backward(self) -> float:
        """Seconds to differentiate one."""
        path = Path(self.network, self.route, self.cores, self.options["dtype"])
        x = torch.ones(1, self.network.in_features, **self.options)
        dy = torch.ones(1, self.network.out_features, **self.options)
        wanted = tuple(range(len(self.cores)))
        return self.clock(
            lambda: differentiate(path, x, dy, cores=self.cores, wanted=wanted, want_x=True)
        )

    def learning(self, plain: bool) -> float:
        """Seconds of forward and backward of the layer."""
        plan = Plan.uniform(self.route, len(self.cores), plain=plain)
        cores = [core.clone().requires_grad_() for core in self.cores]
        bias, x, dy = (torch.ones(size, **self.options) for size in ((2,), (1, 2), (1, 2)))
        leaves = [x.requires_grad_(), bias.requires_grad_(), *cores]

        def step() -> None:
            y = chain(x, cores, self.network, bias, plan)
            torch.autograd.grad(y, leaves, dy)

        with torch.enable_grad():
            return self.clock(step)

    def decoding(self) -> float:
        """Seconds of the layer without gradients, its cores merged before."""
        plan, merged = Plan.uniform(self.route, len(self.cores)), Merged()
        x = torch.ones(1, 2, **self.options)
        return self.clock(lambda: chain(x, self.cores, self.network, None, plan, merged=merged))


def _linear(clock: Callable[..., float], options: Any) -> float:
    """Seconds of forward and backward of a tiny dense layer."""
    weight, bias, x, dy = (torch.ones(size, **options) for size in ((2, 2), (2,), (1, 2), (1, 2)))
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]

    def step() -> None:
        torch.autograd.grad(functional.linear(x, weight, bias), leaves, dy)

    with torch.enable_grad():
        return clock(step)


def _launches(start: float, device: torch.device, options: Any) -> dict[str, float]:
    """Seconds around operations, from tiny layers of which nothing else takes time."""
    clock = _host_clock(device)
    matrix = torch.ones(2, 2, **options)
    product = clock(lambda: torch.mm(matrix, matrix.t()))
    turn = clock(lambda: torch.ones(2, 1, **options).t().contiguous())
    two, four, blocks = (_Tiny(item, clock, options) for item in (_train(2), _train(4), _blocks()))
    pairs = _Tiny(_train(4), clock, options, merged=2)
    merging, forward, backward = two.merging(), two.forward(), two.backward()
    path = merging / 2
    stage = _positive((four.forward() - forward) / 2 - product)
    # A stage goes forward once more, back, and gives the gradient of its matrix.
    back = _positive((four.backward() - backward) / 2 - 3 * product - stage)
    node = _positive((four.learning(True) - two.learning(True)) / 2 - 3 * product - stage - path)
    merge = (pairs.merging() - merging) / 2
    noted = (pairs.learning(True) - two.learning(True)) / 2 - 3 * merge
    # Tokens-major, blocks are put in order before both products and after them.
    arrange = _positive((blocks.forward() - forward) / 3)
    found = {
        "operation": start,
        "product": merge - product,
        "noted": noted,
        "path": path,
        "stage": stage,
        "back": back,
        "arrange": arrange,
        "turn": two.forward(layout="features") - forward - turn,
        "chunk": two.forward(4, chunk=2) / 2 - 2 * (product + stage),
        "chain": two.decoding() - forward,
        "function": two.learning(False) - merging - forward - merging - backward,
        "autograd": node,
        "plain": two.learning(True) - 2 * (3 * product + stage + path + node),
        "linear": _linear(clock, options) - 3 * product,
    }
    return {name: float(f"{_positive(seconds):.3g}") for name, seconds in found.items()}


def write_default(device: torch.device | None = None) -> str:
    """Make the table of this machine the built-in one; for an idle machine and one thread.

    ``python -m outlast.tensorize.planner.measure`` does it.

    Args:
        device: A CPU; None: this machine's.

    Returns:
        The file that was written.
    """
    torch.set_num_threads(1)
    name = "one core of an Intel Xeon with AVX-512"
    table = measure(torch.float32, device or torch.device("cpu"), name, repeats=7)
    path = FilePath(__file__).with_name("default.json")
    path.write_text(json.dumps(table.to_json()) + "\n")
    return str(path)


def _positive(seconds: float) -> float:
    return max(seconds, 1e-7)


def _host_clock(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Starting an operation takes the time of the CPU, whatever the device."""
    clock = Clock(device if device.type == "cpu" else torch.device("cpu"), 15)
    return lambda action: clock(action, 1e-3)


if __name__ == "__main__":
    print(write_default())
