"""Plan of a layer for a number of tokens, looked up in microseconds, and why it is that one.

Plans and prices are held in memory; tables and timed plans also in files for later runs.

A pair of factors can go through the Triton kernels, by their bytes and operations.

A kernel's time is that of what it is bound by: of its operations, at a share of the rate of the
device's matrix products, or of the bytes that it moves. Neither has been measured: **no kernel has
run on a GPU yet**, so the shares below are guesses on the cautious side, and nothing here is ever
chosen before `warm` was called for it, which a CPU refuses.

For a few tokens, as in decoding, the kernels are not for: of 64 tokens a bottleneck is one program,
and all but one of the device's processors would wait for it.

No torch at import.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.network import Route
from outlast.tensorize.prices import (
    AXIS,
    BYTES_AXIS,
    OperationPrices,
    PriceTable,
    default_table,
)
from outlast.tensorize.route_search import (
    Search,
    Walker,
    best_plan,
    bias_gradient,
    middle_seconds,
    route_flops,
    sparse_seconds,
)

if TYPE_CHECKING:
    import torch

    from outlast.tensorize.network import Network


# By network, bucket of tokens, dtype, kind of device, and whether there is a backward pass.
PLANS: dict[tuple[Network, int, torch.dtype, str, bool], LayerPlan] = {}

# By kind of device and dtype.
PRICES: dict[tuple[str, str], OperationPrices] = {}

# Timed plans by kind of device and dtype, and then by `timed_key`.
TIMED: dict[tuple[str, str], dict[str, LayerPlan]] = {}

_TIMED_VERSION = 1

# Errors of files that are damaged, or of something else.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


def forget() -> None:
    """Forget all plans and tables in memory; files stay."""
    PRICES.clear()
    PLANS.clear()
    TIMED.clear()


def directory() -> Path:
    """Folder of the tables: in OUTLAST_CACHE, else in XDG_CACHE_HOME, else in ~/.cache."""
    own = os.environ.get("OUTLAST_CACHE")
    if own:
        return Path(own) / "tensorize"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "outlast" / "tensorize"


class Setting(NamedTuple):
    """Conditions under which a table or a plan holds: threads are 0 on devices but CPUs."""

    machine: str
    dtype: str
    threads: int
    torch: str

    @property
    def file(self) -> Path:
        """The file of the table."""
        text = f"{self.machine} {self.dtype} {self.threads}t torch {self.torch}"
        return directory() / f"{re.sub(r'[^A-Za-z0-9.]+', '-', text).strip('-')}.json"

    @property
    def plans_file(self) -> Path:
        """The file of the timed plans."""
        return self.file.with_name(f"{self.file.stem}-plans.json")


def setting_of(dtype: torch.dtype, device: torch.device) -> Setting:
    """The setting of a device now."""
    import torch

    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return Setting(machine_of(device), dtype_name(dtype), threads, torch.__version__)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files: ``float32``."""
    return str(dtype).removeprefix("torch.")


def load(setting: Setting) -> PriceTable | None:
    """The table of a file; None if there is none, or it is damaged or of something else."""
    try:
        table = PriceTable.from_json(json.loads(setting.file.read_text()))
    except _UNREADABLE:
        return None
    mine = (table.machine, table.dtype, table.threads, table.torch)
    return table if table.measured and mine == setting else None


def store(table: PriceTable) -> Path | None:
    """Write a table; None if the directory cannot be written, for then each run measures anew."""
    from outlast.records import replace_file

    path = Setting(table.machine, table.dtype, table.threads, table.torch).file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(table.to_json()).encode())
    except OSError:
        return None
    return path


def timed_key(network: Network, bucket: int, learns: bool) -> str:
    """Return the key of a timed plan in its file."""
    return f"{network}; up to 2^{bucket} tokens; {'learns' if learns else 'forward'}"


def load_timed(setting: Setting) -> dict[str, LayerPlan]:
    """The timed plans of a file by `timed_key`; those that can be read."""
    plans = {}
    try:
        content = json.loads(setting.plans_file.read_text())
        if (content["version"], content["machine"]) != (_TIMED_VERSION, setting.machine):
            return {}
        for key, entry in content["plans"].items():
            forward, back, *others = (
                Route(tuple(groups), *rest) for groups, *rest in entry["routes"]
            )
            plans[key] = LayerPlan(
                forward,
                back,
                tuple(others),
                bool(entry["plain"]),
                seconds=float(entry["seconds"]),
                dense_seconds=float(entry["dense_seconds"]),
                timed=True,
                reason=str(entry["reason"]),
            )
    except _UNREADABLE:
        return {}
    return plans


def store_timed(setting: Setting, plans: dict[str, LayerPlan]) -> None:
    """Add timed plans to a file; those that another process writes meanwhile may be lost."""
    content = {
        "version": _TIMED_VERSION,
        "machine": setting.machine,
        "plans": {
            key: {
                "routes": [
                    [route.groups, route.backwards, route.layout, route.chunk]
                    for route in (plan.forward, plan.input_gradient, *plan.core_gradients)
                ],
                "plain": plan.plain,
                "seconds": plan.seconds,
                "dense_seconds": plan.dense_seconds,
                "reason": plan.reason,
            }
            for key, plan in {**load_timed(setting), **plans}.items()
        },
    }
    # Reading a factored model needs no records.
    from outlast.records import replace_file

    with contextlib.suppress(OSError):
        setting.file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(setting.plans_file, json.dumps(content).encode())


_SHARE = 0.6
"""Of the rate of large products that the kernels reach; a guess."""

_CACHE_SPEED = 3.0
"""Bytes that the L2 cache gives while the memory gives one; from data sheets and tests of others'
kernels, a guess for these."""

_START = 5
"""Starts of an operation that starting a kernel takes as long as: Triton's launcher is Python."""

_PROCESSORS = 128
"""Multiprocessors of the devices that the kernels are for have: 108 to 132."""

FEWEST_TOKENS = 128
"""Tokens below which no kernel is taken: they fill no tile."""

_TILE = 64
"""Tokens to a program of a bottleneck; those of blocks take twice as many, and as many columns."""


@dataclass(frozen=True)
class LowRankPair:
    """act(x A^T) B^T: `outlast.tensorize.kernels.bottleneck`.

    Attributes:
        inputs: Features of x.
        rank: Features between.
        outputs: Features of y.
        activation: ``identity`` or a key of `outlast.tensorize.bottleneck.ACTIVATIONS`.
    """

    inputs: int
    rank: int
    outputs: int
    activation: str = "identity"

    def forward(self, tokens: int, prices: OperationPrices, *, keep: bool) -> float:
        """Predicted seconds of y, and of writing h if it is kept."""
        return self._launch(tokens, prices, int(keep))

    def backward(self, tokens: int, prices: OperationPrices) -> float:
        """Predicted seconds of the gradients of x and of both factors."""
        seconds = self._launch(tokens, prices, 1 if self.activation == "identity" else 3)
        seconds += prices.product(1, self.rank, self.inputs, tokens, "tn")
        return seconds + prices.product(1, self.outputs, self.rank, tokens, "tn")

    def _launch(self, tokens: int, prices: OperationPrices, narrow: int) -> float:
        """One kernel that reads or writes so many tensors as wide as the rank beside x and y."""
        ends = self.inputs + self.outputs
        padded = max(16, 1 << (self.rank - 1).bit_length())
        programs = math.ceil(tokens / _TILE)
        return _kernel(
            prices,
            flops=2 * tokens * ends * padded,
            moved=tokens * (ends + narrow * self.rank) + ends * self.rank,
            cached=programs * ends * padded,
            programs=programs,
        )

    def products(self, tokens: int, prices: OperationPrices) -> float:
        """Predicted seconds of all that `forward` and `backward` do, by products of torch."""
        forth = prices.product(1, tokens, self.rank, self.inputs, "nt")
        forth += prices.product(1, tokens, self.outputs, self.rank, "nt")
        back = prices.product(1, tokens, self.rank, self.outputs, "nn")
        back += prices.product(1, tokens, self.inputs, self.rank, "nn")
        back += prices.product(1, self.rank, self.inputs, tokens, "tn")
        back += prices.product(1, self.outputs, self.rank, tokens, "tn")
        # The activation, once more in the backward pass, and its slope.
        return forth + back + 3 * prices.element(tokens * self.rank)


@dataclass(frozen=True)
class BlockPair:
    """Block tensor-trains and Monarch: `outlast.tensorize.kernels.blocks`.

    Attributes:
        in_modes: m1, m0.
        out_modes: n0, n1.
        rank: r.
    """

    in_modes: tuple[int, int]
    out_modes: tuple[int, int]
    rank: int

    def forward(self, tokens: int, prices: OperationPrices, *, keep: bool) -> float:
        """Predicted seconds of y; what is between the halves stays in the L2 cache."""
        (m1, m0), (n0, n1) = self.in_modes, self.out_modes
        wide = float(keep)
        first = _half(tokens, prices, (m1, n0 * self.rank, m0), (1.0, wide))
        return first + _half(tokens, prices, (n0, n1, m1 * self.rank), (wide, 1.0))

    def backward(self, tokens: int, prices: OperationPrices) -> float:
        """Predicted seconds of h again, and of the gradients of x and of both cores."""
        (m1, m0), (n0, n1), rank = self.in_modes, self.out_modes, self.rank
        first = (m1, n0 * rank, m0), (n0, m1 * rank, n1), (m1, m0, n0 * rank)
        seconds = sum(_half(tokens, prices, sizes, (1.0, 1.0)) for sizes in first)
        seconds += prices.product(m1, n0 * rank, m0, tokens, "nn")
        return seconds + prices.product(n0, n1, m1 * rank, tokens, "tt")


def _half(
    tokens: int, prices: OperationPrices, sizes: tuple[int, int, int], memory: tuple[float, float]
) -> float:
    """One launch: so many blocks of products of (tokens, terms) with (terms, columns).

    Args:
        tokens: Rows.
        prices: Of the device.
        sizes: Blocks, columns, terms.
        memory: Which part of what is read, and of what is written, the memory sees.
    """
    blocks, columns, terms = sizes
    read, written = (blocks * tokens * item for item in (terms, columns))
    # Products are in tiles of at least 32 columns and terms.
    tiled = math.ceil(columns / 32) * math.ceil(terms / 32) * 1024
    rows = math.ceil(tokens / (2 * _TILE))
    across = math.ceil(columns / (2 * _TILE))
    weight = blocks * columns * terms
    return _kernel(
        prices,
        flops=2 * blocks * tokens * tiled,
        moved=read * memory[0] + written * memory[1] + weight,
        cached=read * across + written + weight * rows,
        programs=blocks * rows * across,
    )


def _kernel(
    prices: OperationPrices, *, flops: float, moved: float, cached: float, programs: int
) -> float:
    """Predicted seconds of one launch, from numbers moved in memory and through the L2 cache."""
    by_flops, by_number = _rates(prices)
    bound = max(flops * by_flops / _SHARE, moved * by_number, cached * by_number / _CACHE_SPEED)
    busy = min(programs / _PROCESSORS, 1.0)
    return _START * prices.launch["operation"] + bound / busy


@functools.lru_cache(maxsize=64)
def _rates(prices: OperationPrices) -> tuple[float, float]:
    """Seconds of an operation of a large product, and of moving a number."""
    side, size = AXIS[-1], BYTES_AXIS[-1]
    item = prices.table.item_bytes
    product = prices.product(1, side, side, side, "nt") / (2 * side**3)
    # The measured addition reads two numbers and writes one.
    return product, prices.element(size // item, fresh=False) / (3 * size / item)


@functools.lru_cache(maxsize=4096)
def pair_of(network: Network, activation: str = "identity") -> LowRankPair | BlockPair | None:
    """Return a network as the kernels see it; None if they have nothing for it.

    Args:
        network: Of two cores.
        activation: What is between them.
    """
    inputs, outputs = network.inputs, network.outputs
    whole = network.size(inputs), network.size(outputs)
    bonds, plain = network.bonds, activation == "identity"
    if len(bonds) != 1 or whole != (network.in_features, network.out_features):
        return None
    rank = network.size(bonds)
    if (len(inputs), len(outputs)) == (1, 1) and network.cores == (bonds + inputs, outputs + bonds):
        return LowRankPair(whole[0], rank, whole[1], activation)
    if not plain or (len(inputs), len(outputs)) != (2, 2):
        return None
    m1, m0, n0, n1 = (*inputs, *outputs)
    if network.cores != (m1 + n0 + bonds + m0, n0 + n1 + m1 + bonds):
        return None
    sizes = dict(network.sizes)
    return BlockPair((sizes[m1], sizes[m0]), (sizes[n0], sizes[n1]), rank)


# Pairs, buckets of tokens and dtypes for which the kernels have been compiled and tuned.
READY: set[tuple[LowRankPair | BlockPair | None, int, torch.dtype]] = set()


def is_ready(network: Network, tokens: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether kernels have been warmed for a layer, a number of tokens and a dtype."""
    return device.type == "cuda" and (pair_of(network), bucket_of(tokens), dtype) in READY


def kernel_seconds(network: Network, tokens: int, prices: OperationPrices, learns: bool) -> float:
    """Predicted seconds of a layer's forward and backward by kernels; infinite without kernels.

    Counts what `outlast.tensorize.route_search.Search.price` counts for other plans.

    Args:
        network: That of the layer.
        tokens: Rows of x.
        prices: What operations cost.
        learns: Whether there is a backward pass; forward alone if not.
    """
    pair = pair_of(network)
    if pair is None:
        return math.inf
    if not learns:
        return pair.forward(tokens, prices, keep=False) + prices.launch["chain"]
    keep = isinstance(pair, LowRankPair)
    seconds = pair.forward(tokens, prices, keep=keep) + pair.backward(tokens, prices)
    return seconds + bias_gradient(network, tokens, prices) + prices.launch["function"]


def bottleneck_pays(
    pair: LowRankPair, tokens: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether two factors with an activation between them should go through the kernel.

    Args:
        pair: The factors.
        tokens: Rows of x.
        dtype: Of x and the factors.
        device: Where they are.
    """
    bucket = bucket_of(tokens)
    if device.type != "cuda" or (pair, bucket, dtype) not in READY:
        return False
    return _pays(pair, 1 << bucket, prices_of(dtype, device))


@functools.lru_cache(maxsize=1024)
def _pays(pair: LowRankPair, tokens: int, prices: OperationPrices) -> bool:
    fused = pair.forward(tokens, prices, keep=True) + pair.backward(tokens, prices)
    return fused < pair.products(tokens, prices)


FORMS_WITHOUT_PLANS = ("cola", "lax", "sltrain")
"""Forms that compute something else than the product of their factors."""

PRICED_DEVICES = ("cpu", "cuda")
"""Types of devices of which there are tables."""


def plan_for(
    network: Network, tokens: int, dtype: torch.dtype, device: torch.device, learns: bool
) -> LayerPlan:
    """The plan for a number of tokens; nothing is timed here.

    It is the fastest that was timed on this machine, if any was (`tune`); else the cheapest by this
    machine's prices, if they were measured (`calibrate`), or by built-in ones.

    Args:
        network: How the cores make the weight.
        tokens: Rows of x; rounded up to a power of two.
        dtype: Of x.
        device: Of x.
        learns: Whether there is a backward pass.
    """
    bucket = bucket_of(tokens)
    key = (network, bucket, dtype, device.type, learns)
    plan = PLANS.get(key)
    if plan is None:
        plan = _timed(dtype, device).get(timed_key(network, bucket, learns))
        if plan is None:
            prices = prices_of(dtype, device)
            plan = best_plan(network, 1 << bucket, prices, learns)
            if is_ready(network, 1 << bucket, dtype, device):
                seconds = kernel_seconds(network, 1 << bucket, prices, learns)
                if seconds < plan.seconds:
                    share = seconds / plan.dense_seconds
                    # Its routes stay, for tensors that no kernel can read.
                    plan = replace(
                        plan,
                        fused=True,
                        plain=False,
                        seconds=seconds,
                        reason=f"{share:.2f} x the dense layer's time by a fused kernel, derived "
                        "and not measured",
                    )
        PLANS[key] = plan
    return plan


def bucket_of(tokens: int) -> int:
    """The power of two that a number of tokens is rounded up to."""
    return (tokens - 1).bit_length() if tokens > 1 else 0


def keep(
    network: Network,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    plan: LayerPlan,
    *,
    learns: bool,
) -> None:
    """Take a timed plan from now on, in this process and in later ones.

    Args:
        network: Whose.
        tokens: Rows of x.
        dtype: Of x.
        device: Of x.
        plan: Which.
        learns: Whether there is a backward pass.
    """
    bucket = bucket_of(tokens)
    key = timed_key(network, bucket, learns)
    _timed(dtype, device)[key] = plan
    PLANS[network, bucket, dtype, device.type, learns] = plan
    # Of kernels, a later process would have to tune them first.
    store_timed(setting_of(dtype, device), {} if plan.fused else {key: plan})


def _timed(dtype: torch.dtype, device: torch.device) -> dict[str, LayerPlan]:
    key = device.type, dtype_name(dtype)
    if key not in TIMED:
        TIMED[key] = load_timed(setting_of(dtype, device))
    return TIMED[key]


def extra_seconds(
    form: str,
    network: Network,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    activated: bool = False,
    entries: int = 0,
) -> float:
    """Predicted seconds that a layer takes beyond the plan of its factors, with a backward pass.

    Zero for forms that are computed along their plan: all but `FORMS_WITHOUT_PLANS`.

    Args:
        form: See `outlast.tensorize.shapes.FORMS`.
        network: Of the layer's factors.
        tokens: Rows of x; rounded up to a power of two.
        dtype: Of x.
        device: Of x.
        activated: Whether there is a nonlinearity in the middle.
        entries: Of the sparse part.
    """
    if form not in FORMS_WITHOUT_PLANS:
        return 0.0
    prices, rows = prices_of(dtype, device), 1 << bucket_of(tokens)
    if form == "sltrain":
        own = plan_for(network, tokens, dtype, device, True).seconds
        return sparse_seconds(network, rows, entries, prices) - own
    crossing = form == "lax"
    return middle_seconds(network, rows, prices, activated=activated, crossing=crossing)


def basis_of(dtype: torch.dtype, device: torch.device, *, timed: bool) -> str:
    """Say how the speeds of layers on a device are known."""
    if device.type not in PRICED_DEVICES:
        return f"unknown on {device.type} devices, which nothing was measured on"
    if timed:
        return "timed on this machine"
    table = prices_of(dtype, device).table
    if table.measured:
        return "predicted from what this machine was measured to take"
    return (
        f"predicted by the package's own table of costs ({table.machine}), for this machine is not "
        "calibrated: calibrate = True measures it"
    )


def prices_of(dtype: torch.dtype, device: torch.device) -> OperationPrices:
    """Return the costs of operations on a device: measured if that was done, else built in."""
    key = device.type, dtype_name(dtype)
    if key not in PRICES:
        PRICES[key] = OperationPrices(load(setting_of(dtype, device)) or default_table(*key))
    return PRICES[key]


def use(table: PriceTable, device: str) -> None:
    """Take a table from now on; what was planned before is planned again."""
    PRICES[device, table.dtype] = OperationPrices(table)
    PLANS.clear()


def machine_of(device: torch.device) -> str:
    """Return the name of a device: a GPU's model, or the machine of a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no GPU"
    from outlast.hardware import this_machine

    return this_machine().summary()


_ALTERNATIVES = 4


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _count(flops: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= unit:
            return f"{flops / unit:.3g} {name}FLOP"
    return f"{flops:.0f} FLOP"


def _why(route: Route, best: Route, search: Search) -> str:
    """Say which cost of one route exceeds that of another."""
    network, tokens, walker = search.network, search.tokens, search.walker

    def terms(item: Route) -> dict[str, float]:
        parts = walker.chunks(item, tokens)
        one = walker.one_pass(item, parts[0], chunked=len(parts) > 1)
        return {
            "products": sum(one.multiply) * len(parts),
            "moving numbers between products": (one.enter + sum(one.arrange) + one.leave)
            * len(parts),
            "merging cores": walker.merging(item),
        }

    this, least = terms(route), terms(best)
    more = {name: this[name] - least[name] for name in this}
    worst = max(more, key=lambda name: more[name])
    if more[worst] <= 0:
        return "slower in the backward pass"
    if worst == "products" and route_flops(network, route) <= route_flops(network, best):
        return f"{_time(more[worst])} more for products of worse shapes"
    return f"{_time(more[worst])} more for {worst}"


def explain(network: Network, tokens: int, dtype: torch.dtype, device: torch.device) -> str:
    """The plan of a layer for a number of tokens, forward and backward, and what it beats.

    Args:
        network: How the cores make the weight.
        tokens: Rows of x; rounded up to a power of two.
        dtype: Of x.
        device: Of x.
    """
    prices = prices_of(dtype, device)
    table = prices.table
    plan = plan_for(network, tokens, dtype, device, True)
    bucket = 1 << bucket_of(tokens)
    walker = Walker(network, prices)
    search = Search(walker, bucket)
    source = "measured on this machine" if table.measured else "built in, not measured here"
    dense_flops = 2 * bucket * network.in_features * network.out_features

    def flops(route: Route) -> str:
        return _count(route_flops(network, route) * bucket)

    ends = f"{network.in_features} -> {network.out_features}"
    forward = _time(walker.forward(plan.forward, bucket))
    lines = [
        f"{ends}, {network.parameters:,} parameters, up to {bucket} tokens, {table.dtype}",
        f"prices: {table.machine}, {source}",
        f"forward:        {plan.forward}, {forward}, {flops(plan.forward)}",
    ]
    if plan.fused:
        # What is not fused is said as well, for other tensors go that way.
        lines[-1] = f"fused kernel:   {_time(plan.seconds)} forward and backward, {plan.reason}"
    elif plan.plain:
        lines.append("backward:       left to autograd, which starts fewer operations")
    else:
        seconds = walker.backward(plan.input_gradient, bucket, frozenset(), want_x=True)
        back = plan.input_gradient
        lines.append(f"gradient of x:  {back}, {_time(seconds)}, {flops(back)}")
        for core, route in enumerate(plan.core_gradients):
            seconds = walker.backward(route, bucket, frozenset((core,)), want_x=False)
            lines.append(f"gradient of {network.cores[core]}: {route}, {_time(seconds)} alone")
    dense, known = plan.dense_seconds, "timed on this machine" if plan.timed else "predicted"
    ratio = dense / plan.seconds
    lines += [
        f"together:       {_time(plan.seconds)} {known}",
        f"dense layer:    {_time(dense)} {known}, {ratio:.2f} x as long, {_count(dense_flops)}",
        "what else there is:",
    ]
    others = [pair for pair in search.uniform() if pair[1] != plan]
    shown: list[tuple[float, LayerPlan]] = []
    names: set[tuple[object, ...]] = set()
    for seconds, other in others:
        name = (other.forward.groups, other.forward.backwards, other.forward.layout, other.plain)
        if name not in names and len(shown) < _ALTERNATIVES:
            names.add(name)
            shown.append((seconds, other))
    rebuilt = [other for other in others if len(other[1].forward.groups) == 1]
    shown += [pair for pair in rebuilt[:1] if pair not in shown]
    for seconds, other in shown:
        label = f"{other.forward}{', by autograd' if other.plain else ''}"
        lines.append(f"  {_time(seconds)}: {label}; {_why(other.forward, plan.forward, search)}")
    if not plan.fused and is_ready(network, bucket, dtype, device):
        lines.append(f"  {_time(kernel_seconds(network, bucket, prices, True))}: fused kernel")
    return "\n".join(lines)
