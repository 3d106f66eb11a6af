"""Measurements on this machine: prices of operations, and times of the best plans.

`calibrate` measures prices once. `tune` times the plans that the prices put first, for prices are
off by some percent, and `warm` the kernels. Never in a training step: only where it is asked for.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.execute import MergedPath, apply, differentiate
from outlast.tensorize.network import Network, Route
from outlast.tensorize.operator import Merged, chain
from outlast.tensorize.planner import (
    FEWEST_TOKENS,
    PLANS,
    PRICED_DEVICES,
    READY,
    BlockPair,
    LowRankPair,
    bucket_of,
    keep,
    load,
    machine_of,
    pair_of,
    plan_for,
    prices_of,
    setting_of,
    store,
    use,
)
from outlast.tensorize.prices import (
    AXIS,
    BYTES_AXIS,
    LAYOUTS,
    RUN_AXIS,
    STRETCH_AXIS,
    STRIDED_ELEMENTS,
    PriceTable,
)
from outlast.tensorize.route_search import Search, Walker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from outlast.tensorize.network import MemoryLayout


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


def measure(
    dtype: torch.dtype, device: torch.device, machine: str = "", repeats: int = 3
) -> PriceTable:
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
        left, right = torch.ones(2, 1, 1, **options), torch.ones(2, 1, 1, **options)
        start = clock(lambda: torch.bmm(left, right))
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
    return PriceTable(
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
        return self.clock(lambda: MergedPath(self.network, self.route, self.cores, dtype))

    def forward(self, tokens: int = 1, layout: MemoryLayout = "tokens", chunk: int = 0) -> float:
        """Seconds to apply one."""
        route = replace(self.route, layout=layout, chunk=chunk)
        path = MergedPath(self.network, route, self.cores, self.options["dtype"])
        x = torch.ones(tokens, self.network.in_features, **self.options)
        return self.clock(lambda: apply(path, x))

    def backward(self) -> float:
        """Seconds to differentiate one."""
        path = MergedPath(self.network, self.route, self.cores, self.options["dtype"])
        x = torch.ones(1, self.network.in_features, **self.options)
        dy = torch.ones(1, self.network.out_features, **self.options)
        wanted = tuple(range(len(self.cores)))
        return self.clock(
            lambda: differentiate(path, x, dy, cores=self.cores, wanted=wanted, want_x=True)
        )

    def learning(self, plain: bool) -> float:
        """Seconds of forward and backward of the layer."""
        plan = LayerPlan.uniform(self.route, len(self.cores), plain=plain)
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
        plan, merged = LayerPlan.uniform(self.route, len(self.cores)), Merged()
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
    # Starting an operation takes the time of the CPU, whatever the device.
    host = device if device.type == "cpu" else torch.device("cpu")
    clock = functools.partial(Clock(host, 15), least=1e-3)
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

    ``python -m outlast.tensorize.measure`` does it.

    Args:
        device: A CPU; None: this machine's.

    Returns:
        The file that was written.
    """
    torch.set_num_threads(1)
    name = "one core of an Intel Xeon with AVX-512"
    table = measure(torch.float32, device or torch.device("cpu"), name, repeats=7)
    path = FilePath(__file__).with_name("prices.json")
    path.write_text(json.dumps(table.to_json()) + "\n")
    return str(path)


def _positive(seconds: float) -> float:
    return max(seconds, 1e-7)


def calibrate(dtype: torch.dtype, device: torch.device, *, anew: bool = False) -> PriceTable:
    """Measure what operations cost on this machine, unless a file says it.

    Takes about ten seconds of one core, once per machine, dtype, number of threads and version of
    torch. Call it before training; a step never does.

    Args:
        dtype: Of activations.
        device: Where layers will run.
        anew: Measure even if there is a file.

    Returns:
        The table; a built-in one for devices that are neither a CPU nor CUDA's.
    """
    if device.type not in PRICED_DEVICES:
        return prices_of(dtype, device).table
    table = None if anew else load(setting_of(dtype, device))
    if table is None:
        table = measure(dtype, device, machine_of(device))
        store(table)
    use(table, device.type)
    return table


def warm(
    network: Network,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    activation: str = "identity",
) -> bool:
    """Compile and tune the kernels for a layer; from then on its plans may take them.

    Triton finds a kernel's fastest tiles at its first call by running them all, which waits for
    the device and takes seconds: neither a training step nor the capture of a CUDA graph may do
    that. Hence the planner takes no kernel that has not been warmed, and this is to be called
    before, with the numbers of tokens that will come, in every process. What is found serves all
    numbers of tokens up to the next power of two, from more than half of that.

    Which tiles are fastest is a matter of noise among equals, and other tiles round differently: a
    run that was resumed may differ in the last bits from one that was not.

    Args:
        network: That of the layer.
        tokens: Rows of x.
        dtype: Of x; that of autocast where it is on.
        device: Where the layer runs.
        activation: Between the factors of a low-rank layer.

    Returns:
        Whether there are kernels for it: not on a CPU, nor without Triton, nor for other networks,
        nor for a few tokens.
    """
    from outlast.tensorize.kernels import available

    pair = pair_of(network, activation)
    if pair is None or tokens < FEWEST_TOKENS or not available(device, dtype):
        return False
    if not kernels_fit(pair, dtype):
        return False
    if (pair, bucket_of(tokens), dtype) not in READY:
        tune_kernels(pair, tokens, dtype, device)
        READY.add((pair, bucket_of(tokens), dtype))
        PLANS.clear()
    return True


def kernels_fit(pair: LowRankPair | BlockPair, dtype: torch.dtype) -> bool:
    """Return whether the kernels serve these sizes well."""
    from outlast.tensorize.kernels import blocks, bottleneck

    if isinstance(pair, LowRankPair):
        return pair.activation in bottleneck.ACTIVATIONS and bottleneck.fits(pair.rank, dtype)
    return blocks.fits(pair.in_modes, pair.out_modes, pair.rank, dtype)


def tune_kernels(
    pair: LowRankPair | BlockPair, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Call every kernel that a layer of this pair can take, so that none is tuned later.

    Args:
        pair: Which kernels, and of which sizes.
        tokens: Rows of x.
        dtype: Of everything.
        device: Where.
    """
    from outlast.tensorize.kernels import blocks, bottleneck

    zeros = functools.partial(torch.zeros, dtype=dtype, device=device)
    if isinstance(pair, BlockPair):
        (m1, m0), (n0, n1) = pair.in_modes, pair.out_modes
        x = zeros(tokens, m1 * m0)
        right, left = zeros(m1, n0, pair.rank, m0), zeros(n0, n1, m1, pair.rank)
        for bias in (None, zeros(n0 * n1)):
            y = blocks.blocks_forward(x, right, left, bias)
        blocks.blocks_backward(y, right, left)
        blocks.blocks_hidden(x, right)
        return
    x = zeros(tokens, pair.inputs)
    down, up = zeros(pair.rank, pair.inputs), zeros(pair.outputs, pair.rank)
    act = pair.activation
    for bias in (None, zeros(pair.outputs)):
        for save in (False, True):
            # Triton tunes anew for other tensors that are given, the last is that of training.
            y, hidden = bottleneck.bottleneck_forward(x, down, up, bias, activation=act, save=save)
    hidden = None if act == "identity" else hidden
    bottleneck.bottleneck_backward(y, hidden, down, up, activation=act)


def warm_model(
    model: nn.Module,
    tokens: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> int:
    """`warm` for all layers of a model.

    Args:
        model: With tensorized layers.
        tokens: In one pass.
        dtype: Of activations; None: that of each layer's factors.
        device: Where the model will run; None: where its factors lie.

    Returns:
        The number of layers for which there are kernels.
    """
    from outlast.tensorize.layer import StructuredLinear
    from outlast.tensorize.low_rank import LatentLinear, SparseLowRankLinear

    count = 0
    for layer in model.modules():
        own = isinstance(layer, LatentLinear | SparseLowRankLinear)
        if isinstance(layer, StructuredLinear) and not own:
            first = layer.factors()[0]
            activation = getattr(layer, "activation", "identity")
            where = device or first.device
            count += warm(layer.network, tokens, dtype or first.dtype, where, activation=activation)
    return count


if __name__ == "__main__":
    print(write_default())


# Plans that are predicted to take this many times as long as the best are not timed.
_NEAR = 1.7

_MOST = 24

# Those that took this many times as long as the fastest at first are not timed again.
_HOPE = 1.3

# A repeat lasts this many seconds at least.
_LEAST = 2e-3

_ROUNDS = 12

_GAIN = 1.05

_PAIRS = 7

# With more tokens than this the time is in proportion to them, nearly.
_ENOUGH = 2048

_SPEEDS: dict[tuple[str, ...], float] = {}


def tune(
    network: Network,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    learns: bool = True,
    seconds: float = 2.0,
    anew: bool = False,
) -> LayerPlan:
    """Time the plans that are predicted to be fastest, and the dense layer; keep the fastest.

    `plan_for` gives it from then on, in later processes as well: it is kept in a file by network,
    power of two of tokens, dtype, machine, number of threads and version of torch.

    Args:
        network: How the cores make the weight.
        tokens: Rows of x.
        dtype: Of x and the cores.
        device: Where.
        learns: Whether there is a backward pass.
        seconds: Time to spend on timing once every plan has run.
        anew: Time again what was timed before.

    Returns:
        The fastest plan; that of `plan_for` on devices that are neither a CPU nor CUDA's.
    """
    known = plan_for(network, tokens, dtype, device, learns)
    if device.type not in PRICED_DEVICES or (known.timed and not anew):
        return known
    search = Search(Walker(network, prices_of(dtype, device)), 1 << bucket_of(tokens))
    ranked = search.joint() if learns else search.forward_only()
    near = [plan for cost, plan in ranked if cost <= _NEAR * ranked[0][0]][:_MOST]
    if warm(network, tokens, dtype, device):
        near.append(replace(near[0], plain=False, fused=True))
    rows = min(tokens, _ENOUGH)
    layer = _Layer(network, rows, {"dtype": dtype, "device": device}, learns)
    actions = [layer.dense, *(layer.along(plan) for plan in near)]
    dense, *found = fastest(actions, device, seconds)
    best = min(range(len(near)), key=found.__getitem__)
    # Less is noise, and the prices may know better.
    if found[0] <= _GAIN * found[best] or not _wins(actions[1 + best], actions[1], device):
        best = 0
    scale = tokens / rows
    plan = replace(
        near[best],
        seconds=found[best] * scale,
        dense_seconds=dense * scale,
        timed=True,
        reason=f"{found[best] / dense:.2f} x the dense layer's time, the fastest of {len(near)} "
        "plans that were timed",
    )
    keep(network, tokens, dtype, device, plan, learns=learns)
    return plan


def fastest(
    actions: Sequence[Callable[[], object]], device: torch.device, seconds: float
) -> list[float]:
    """The least seconds of every action, in turns; of the first and the fastest ones often.

    Args:
        actions: What to time.
        device: Where they run.
        seconds: Time to spend once all have run.
    """
    clock = Clock(device, 1)
    best, times = [], []
    for action in actions:
        action()
        first = clock.once(action, 1)
        times.append(max(1, math.ceil(_LEAST / max(first, 1e-7))))
        best.append(min(first, clock.once(action, times[-1])))
    end = time.perf_counter() + seconds
    for number in range(_ROUNDS):
        limit = (_HOPE if number else 2 * _HOPE) * min(best[1:], default=math.inf)
        for place, action in enumerate(actions):
            if time.perf_counter() > end:
                return best
            if place == 0 or best[place] <= limit:
                best[place] = min(best[place], clock.once(action, times[place]))
    return best


def _wins(
    challenger: Callable[[], object], holder: Callable[[], object], device: torch.device
) -> bool:
    """Return whether one is faster in most pairs of runs, for others' load is on both of a pair."""
    clock = Clock(device, 1)
    first = clock.once(holder, 1)
    times = max(1, math.ceil(_LEAST / max(first, 1e-7)))
    ratios = [clock.once(holder, times) / clock.once(challenger, times) for _ in range(_PAIRS)]
    return statistics.median(ratios) > _GAIN


class _Layer:
    """Random tensors of a layer, and its steps."""

    def __init__(self, network: Network, tokens: int, options: Any, learns: bool) -> None:
        self.network = network
        self.learns = learns
        self.x = torch.randn(tokens, network.in_features, **options)
        self.dy = torch.randn(tokens, network.out_features, **options)
        self.weight = torch.randn(network.out_features, network.in_features, **options)
        self.bias = torch.randn(network.out_features, **options)
        self.cores = [
            torch.randn(network.shape(core), **options) for core in range(len(network.cores))
        ]
        for tensor in (self.x, self.weight, self.bias, *self.cores):
            tensor.requires_grad_(learns)
        self.merged = Merged()

    def dense(self) -> None:
        """A step of a plain linear layer."""
        with torch.set_grad_enabled(self.learns):
            self.back(functional.linear(self.x, self.weight, self.bias), [self.weight])

    def along(self, plan: LayerPlan) -> Callable[[], None]:
        """A step along a plan."""

        def step() -> None:
            with torch.set_grad_enabled(self.learns):
                y = chain(self.x, self.cores, self.network, self.bias, plan, merged=self.merged)
                self.back(y, self.cores)

        return step

    def back(self, y: Tensor, weights: list[Tensor]) -> None:
        """The gradients of all that is learned, and of x."""
        if self.learns:
            torch.autograd.grad(y, [self.x, self.bias, *weights], self.dy, allow_unused=True)


def timed_speed(
    layer: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Time a layer that has no plan beside the dense one, forward and backward.

    Args:
        layer: A structured linear layer, on any device; a copy of it is timed.
        tokens: Rows of x.
        dtype: Of x and the factors.
        device: Where.

    Returns:
        Seconds of the dense layer over its own; None on devices that are neither a CPU nor CUDA's.
    """
    if device.type not in PRICED_DEVICES:
        return None
    structured: Any = layer
    options: Any = {"dtype": dtype, "device": device}
    key = (
        structured.form,
        repr(sorted(structured.settings().items())),
        bucket_of(tokens),
        *map(str, options.values()),
    )
    if key not in _SPEEDS:
        rows = min(tokens, _ENOUGH)
        tensors = _Layer(structured.network, rows, options, True)
        made = type(structured)(**structured.settings(), **options)

        def step() -> None:
            tensors.back(made(tensors.x), [*made.parameters()])

        dense, own = fastest([tensors.dense, step], device, 2.0)
        _SPEEDS[key] = dense / own
    return _SPEEDS[key]


def tune_model(
    model: nn.Module,
    tokens: int,
    *,
    dtype: torch.dtype | None = None,
    learns: bool = True,
    seconds: float = 2.0,
    progress: Callable[[str], None] | None = None,
) -> list[LayerPlan]:
    """Time the plans of all layers of a model, each shape once; see `tune`.

    Args:
        model: With tensorized layers, where they will run.
        tokens: In one pass.
        dtype: Of activations; None: that of each layer's factors.
        learns: Whether there is a backward pass.
        seconds: Time to spend on one shape.
        progress: Is told about every shape in a line.

    Returns:
        The plans.
    """
    from outlast.tensorize.layer import StructuredLinear
    from outlast.tensorize.low_rank import BottleneckLinear, LatentLinear, SparseLowRankLinear

    # Only layers that go along plans: neither those with their own kernels nor their parts.
    others = BottleneckLinear | LatentLinear | SparseLowRankLinear
    found = {}
    for layer in model.modules():
        if not isinstance(layer, StructuredLinear) or isinstance(layer, others):
            continue
        first = layer.factors()[0]
        setting = layer.network, dtype or first.dtype, first.device
        if setting in found:
            continue
        network, kind, device = setting
        plan = tune(network, tokens, kind, device, learns=learns, seconds=seconds)
        found[setting] = plan
        if progress is not None:
            ends = f"{layer.in_features} -> {layer.out_features}"
            progress(f"{layer.form} {ends}: {plan.forward}, {plan.reason}")
    return list(found.values())
