"""Codes with short messages and partial results: precision, deadlines and orders.

The bars of `benchmarks/coding.py` for `outlast.coding.codes.communication` and
`outlast.coding.codes.partial`. The peers' figures are those of the prototype that the codes were
chosen by: worst over 400 sets of stragglers, messages in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from harness import Bar

from outlast.coding.code import GradientCode, straggler_patterns
from outlast.coding.codes.blocks import BlockCode
from outlast.coding.codes.communication import StableBlocks, YeAbbe
from outlast.coding.codes.partial import (
    assignment_of,
    cyclic_orders,
    matching_orders,
    missing_copies,
    q_max,
    q_max_bound,
)

Orders = npt.NDArray[np.int64]

SETTINGS = ((24, 2, 3), (30, 2, 2))
"""Workers, stragglers, parts."""
PROTOTYPE = {
    "random": (1.3e-3, 3.6e-5),
    "vandermonde": (0.115, 2.9e-2),  # the first is 0.11 in the prototype, to two digits
    "gaussian": (6e-7, 7e-8),
    "golden": (6e-7, 7e-8),
    "best": (6e-7, 7e-8),
}
GRADIENT = 600
SEEDS = 8


def bar(name: str, figure: float, unit: str, peer: str, limit: float | None = None) -> Bar:
    """A figure of any magnitude, to three digits; without a limit it is reported only."""
    kind = "simulated" if "MSE" in unit else "measured"
    shown = float(f"{figure:.3g}")
    if limit is None:
        return Bar(name, shown, unit, "reported", True, peer, kind)
    return Bar(name, shown, unit, f"<= {limit:g}", figure <= limit, peer, kind)


def worst_error(
    workers: int,
    stragglers: int,
    patterns: int,
    code_of: Callable[[npt.NDArray[np.int64]], BlockCode],
) -> float:
    """Largest relative error of the recovered sum of fp32 gradients with fp32 messages."""
    generator = np.random.default_rng(1)
    gradients = generator.standard_normal((workers, GRADIENT)).astype(np.float32)
    total = gradients.astype(np.float64).sum(axis=0)
    worst = 0.0
    for gone in straggler_patterns(workers, stragglers, patterns)[0]:
        survivors = np.setdiff1d(np.arange(workers), gone)
        code = code_of(survivors)
        messages = [code.encode(w, gradients[code.assignment.chunks_of(w)]) for w in survivors]
        recovered = code.recover(survivors, np.stack(messages))
        worst = max(worst, float(np.linalg.norm(recovered - total) / np.linalg.norm(total)))
    return worst


def precision_bars(quick: bool) -> Iterator[Bar]:
    """Worst relative errors of all kinds."""
    patterns = 100 if quick else 400
    unit, peer = "worst relative error, fp32", "prototype"
    for number, (workers, stragglers, parts) in enumerate(SETTINGS):
        label = f"n = {workers}, s = {stragglers}, m = {parts}"
        for kind in ("random", "vandermonde"):
            code = YeAbbe(workers, stragglers, parts, kind=kind, tolerance=math.inf)
            figure = worst_error(workers, stragglers, patterns, lambda _, code=code: code)
            limit = PROTOTYPE[kind][number]
            yield bar(f"Ye-Abbe {kind}, {label}", figure, unit, peer, limit)
        draws = []
        for seed in range(1, 3 if quick else SEEDS):
            code = YeAbbe(workers, stragglers, parts, seed=seed, tolerance=math.inf)
            draws.append(worst_error(workers, stragglers, patterns, lambda _, code=code: code))
        yield bar(
            f"Ye-Abbe random, {label}, worst of {len(draws)} more draws", max(draws), unit, peer
        )
        for kind in ("gaussian", "golden", "best"):
            scheme = StableBlocks(workers, stragglers, parts, kind=kind)
            figure = worst_error(workers, stragglers, patterns, scheme.agreed)
            limit = None if kind == "gaussian" else PROTOTYPE[kind][number]
            yield bar(f"stable blocks {kind}, {label}", figure, unit, peer, limit)


class Binary(GradientCode):
    """The classical use of an assignment: all chunks of a worker or nothing."""

    name = "0/1 code"
    source = "random regular assignment, optimal decoding"

    def __init__(self, orders: Orders) -> None:
        self.matrix = assignment_of(orders).incidence
        self.tolerance = 0


def random_regular(workers: int, copies: int, generator: np.random.Generator) -> Orders:
    """Orders of a random regular assignment: permutations that nowhere agree."""
    while True:
        orders = np.stack([generator.permutation(workers) for _ in range(copies)], axis=1)
        if np.all(np.diff(np.sort(orders, axis=1), axis=1)):
            return orders


def deadline_bars(quick: bool) -> Iterator[Bar]:
    """Mean square errors when workers stop at a deadline: 200 workers, 3 copies, 1 + Exp(0.5)."""
    workers, copies = 200, 3
    generator = np.random.default_rng(0)
    orders = random_regular(workers, copies, generator)
    matched = matching_orders(assignment_of(orders))
    unit, draws = "MSE / chunks", 4000 if quick else 20_000
    known = {4: ("0.189", "9.8e-3", "3.3e-4"), 5: ("4.1e-2", "6.7e-4", "0 in 60 draws")}
    for deadline, figures in known.items():
        classical, anyhow, ordered = (f"prototype {each}" for each in figures)
        seconds = 1.0 + generator.exponential(0.5, (draws, workers))
        finished = np.minimum(deadline // seconds, copies).astype(np.int64)
        label = f"deadline {deadline} s"
        alive = finished[: 30 if quick else 200] == copies
        error = float(Binary(orders).errors(alive).mean()) / workers
        yield bar(f"{label}, all or nothing", error, unit, classical)
        # A new random order for each block of draws, since one order has its own luck.
        shares = [
            missing_copies(generator.permuted(orders, axis=1), block).mean() / workers
            for block in np.array_split(finished, 40)
        ]
        yield bar(f"{label}, random order", float(np.mean(shares)), unit, anyhow)
        share = float(missing_copies(matched, finished).mean()) / workers
        limit = 3.3e-4 if deadline == 4 else 1e-5
        yield bar(f"{label}, order by matchings", share, unit, ordered, limit)


def order_bars(quick: bool) -> Iterator[Bar]:
    """Chunks computed in the worst case before all are covered, above the lower bound."""
    generator = np.random.default_rng(0)
    sizes = ((7, 3), (200, 3), (10_000, 3)) if quick else ((7, 3), (31, 3), (200, 3), (10_000, 3))
    peer = "1 + d (n - d) + d (d - 1) / 2"
    for workers, copies in sizes:
        bound = q_max_bound(workers, copies)
        orders = random_regular(workers, copies, generator)
        matched = matching_orders(assignment_of(orders))
        worst = max(q_max(matched), q_max(cyclic_orders(workers, copies)))
        label = f"n = {workers}, d = {copies}"
        yield bar(f"orders by matchings, {label}", worst - bound, "chunks above", peer, 0.0)
        by_number = q_max(np.sort(orders, axis=1))
        yield bar(f"orders by number, {label}", by_number - bound, "chunks above", peer)


def partial_bars(quick: bool) -> Iterator[Bar]:
    """All bars of these codes."""
    yield from precision_bars(quick)
    yield from deadline_bars(quick)
    yield from order_bars(quick)
