"""The planner of tensorized layers: never slower than dense, and how near the best plan it is.

By the package's own table, as without any calibration; by the prices of operations that were
measured; and after plans were timed (`tune`), as ``tensorize(calibrate=True)`` does. Timed plans go
to a cache of their own.

    python benchmarks/tensorize_planner.py [--quick] [--json FILE]

Random layers of six forms with fewer parameters than the dense ones. CPU time of one thread, the
best of several repeats, in turns with the peer, the allocator's defaults for both.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from harness import Bar, arguments, at_least, at_most, median, publish
from torch import Tensor, nn

from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.low_rank import low_rank_network
from outlast.tensorize.measure import calibrate, tune
from outlast.tensorize.network import Network, block_network, train_matrix_network, train_network
from outlast.tensorize.operator import Merged, chain
from outlast.tensorize.planner import bucket_of, plan_for, prices_of
from outlast.tensorize.route_search import Search, Walker
from outlast.tensorize.shapes import balanced_modes, block_modes, monarch_modes, monarch_rank

CPU = torch.device("cpu")
FORMS = ("low_rank", "tt", "ttm", "btt", "monarch", "tucker")
# A plan that is predicted to take this many times as long as the chosen one is not timed.
HOPELESS = 4.0
# Most tokens x in x out of a random layer.
WORK = 1e9


@dataclass(frozen=True)
class Case:
    """A layer and the number of tokens that it gets."""

    form: str
    network: Network
    tokens: int

    @property
    def learns(self) -> bool:
        """Few tokens are decoded, many are trained on."""
        return self.tokens >= 64

    def __str__(self) -> str:
        share = self.network.parameters / (self.network.in_features * self.network.out_features)
        ends = f"{self.network.in_features}->{self.network.out_features}"
        return f"{self.form} {ends} {share:.1%} of the parameters, {self.tokens} tokens"


def _log_uniform(source: random.Random, low: float, high: float) -> float:
    return math.exp(source.uniform(math.log(low), math.log(high)))


def random_network(source: random.Random, form: str, most: float = 4096) -> Network:
    """A layer with fewer parameters than the dense one."""
    while True:
        into = 8 * round(_log_uniform(source, 256, most) / 8)
        out = 8 * round(_log_uniform(source, 256, most) / 8)
        network = _network(source, form, into, out)
        if network.parameters < into * out:
            return network


def _network(source: random.Random, form: str, into: int, out: int) -> Network:
    if form == "low_rank":
        return low_rank_network(into, out, int(_log_uniform(source, 8, min(into, out) / 2)))
    if form == "btt":
        modes = block_modes(into, out)
        return block_network(
            into, out, source.choice((1, 2, 4)), in_modes=modes[0], out_modes=modes[1]
        )
    if form == "monarch":
        blocks = source.choice((2, 4, 8, 16))
        monarch = monarch_modes(into, out, blocks)
        rank = monarch_rank(into, out, blocks)
        return block_network(into, out, rank, in_modes=monarch[0], out_modes=monarch[1])
    count = source.choice((2, 3))
    in_modes, out_modes = balanced_modes(into, count), balanced_modes(out, count)
    rank = int(_log_uniform(source, 4, 64))
    if form == "tt":
        return train_network(into, out, rank, in_modes=in_modes, out_modes=out_modes)
    if form == "ttm":
        return train_matrix_network(into, out, rank, in_modes=in_modes, out_modes=out_modes)
    in_modes, out_modes = balanced_modes(into, 2), balanced_modes(out, 2)
    ranks = [min(rank, mode) for mode in (*in_modes, *out_modes)]
    sizes = tuple(zip("abcdpqrs", (*in_modes, *out_modes, *ranks), strict=True))
    return Network("ab", "cd", ("ap", "bq", "pqrs", "cr", "ds"), sizes, into, out)


def cases(count: int, seed: int, *, work: float = math.inf) -> Iterator[Case]:
    """Random layers, of every form as many.

    Args:
        count: How many.
        seed: Of the draws.
        work: Draw again while tokens x in x out is more.
    """
    source = random.Random(seed)
    for place in range(count):
        while True:
            form = FORMS[place % len(FORMS)]
            network = random_network(source, form)
            tokens = int(_log_uniform(source, 1, 8193))
            if tokens * network.in_features * network.out_features <= work:
                break
        yield Case(form, network, tokens)


def _gradients(y: Tensor, dy: Tensor, leaves: list[Tensor]) -> None:
    y.backward(dy)
    for leaf in leaves:
        leaf.grad = None


class Bench:
    """The tensors of a case, and what is timed."""

    def __init__(self, case: Case) -> None:
        network = case.network
        self.case = case
        learns = case.learns
        self.x = torch.randn(case.tokens, network.in_features, requires_grad=learns)
        self.dy = torch.randn(case.tokens, network.out_features)
        scale = network.size(network.bonds) ** -0.5
        self.cores = [
            (torch.randn(network.shape(core)) * scale).requires_grad_(learns)
            for core in range(len(network.cores))
        ]
        self.bias = torch.randn(network.out_features, requires_grad=learns)
        self.merged = Merged()
        self.dense = nn.Linear(network.in_features, network.out_features)
        self.dense.requires_grad_(learns)

    def run_dense(self) -> None:
        """One step of nn.Linear."""
        y = self.dense(self.x)
        if self.case.learns:
            _gradients(y, self.dy, [self.x, self.dense.weight, self.dense.bias])

    def along(self, plan: LayerPlan) -> Callable[[], None]:
        """One step along a plan, with its look-up."""

        def step() -> None:
            _plan(self.case)
            y = chain(self.x, self.cores, self.case.network, self.bias, plan, merged=self.merged)
            if self.case.learns:
                _gradients(y, self.dy, [self.x, self.bias, *self.cores])

        return step


def best_of(
    actions: list[Callable[[], object]], repeats: int, least: float = 0.002, drop: float = math.inf
) -> list[float]:
    """Least CPU seconds of each action, in turns.

    Args:
        actions: What to time.
        repeats: Of each.
        least: Seconds that a repeat lasts, by calling an action several times.
        drop: An action whose first repeat takes this many times as long as the fastest is left.
    """
    best, times = [], []
    for action in actions:
        action()
        begin = time.thread_time()
        action()
        first = max(time.thread_time() - begin, 1e-7)
        best.append(first)
        times.append(max(1, math.ceil(least / first)))
    live = [place for place in range(len(actions)) if best[place] <= drop * min(best)]
    for _ in range(repeats):
        for place in live:
            begin = time.thread_time()
            for _ in range(times[place]):
                actions[place]()
            best[place] = min(best[place], (time.thread_time() - begin) / times[place])
    return best


def _plan(case: Case) -> LayerPlan:
    return plan_for(case.network, case.tokens, torch.float32, CPU, case.learns)


def _tuned(case: Case) -> LayerPlan:
    return tune(case.network, case.tokens, torch.float32, CPU, learns=case.learns, anew=True)


@dataclass(frozen=True)
class Slowdown:
    """How long a case takes next to the dense layer, by the prices' plan and by the timed one."""

    case: Case
    plan: LayerPlan
    ratio: float
    timed_plan: LayerPlan
    timed_ratio: float

    @property
    def accepted(self) -> bool:
        """Whether the prices say that it is not slower, so that `tensorize` takes it."""
        return self.plan.seconds <= self.plan.dense_seconds

    @property
    def timed_accepted(self) -> bool:
        """Likewise after plans were timed."""
        return self.timed_plan.seconds <= self.timed_plan.dense_seconds


def against_dense(count: int, repeats: int, *, seed: int, work: float) -> Iterator[Slowdown]:
    """Seconds of the planner's choice over those of nn.Linear, for random layers."""
    for case in cases(count, seed, work=work):
        plan = _plan(case)
        timed = _tuned(case)
        bench = Bench(case)
        actions = [bench.run_dense, bench.along(plan), bench.along(timed)]
        dense, ours, ours_timed = best_of(actions, repeats)
        yield Slowdown(case, plan, ours / dense, timed, ours_timed / dense)


@dataclass(frozen=True)
class Regret:
    """The planner's choices and the fastest of all plans of a case."""

    case: Case
    plan: LayerPlan
    seconds: float
    timed_plan: LayerPlan
    timed_seconds: float
    best: LayerPlan
    best_seconds: float

    @property
    def ratio(self) -> float:
        """How many times as long the choice by prices takes as the best."""
        return self.seconds / self.best_seconds

    @property
    def timed_ratio(self) -> float:
        """Likewise the choice after timing."""
        return self.timed_seconds / self.best_seconds


def swept(case: Case) -> list[LayerPlan]:
    """All uniform plans of a case that have a chance, after the planner's two choices."""
    chosen = _plan(case)
    # Plans are for powers of two of tokens, as is what they may keep.
    tokens = 1 << bucket_of(case.tokens)
    search = Search(Walker(case.network, prices_of(torch.float32, CPU)), tokens)
    ranked = search.joint() if case.learns else search.forward_only()
    limit = HOPELESS * ranked[0][0]
    plans = [plan for seconds, plan in ranked if seconds <= limit]
    timed = _tuned(case)
    return list(dict.fromkeys([replace(chosen), replace(timed), *plans]))


def regrets(count: int, repeats: int, *, seed: int, work: float) -> Iterator[Regret]:
    """The choices against a timed sweep, for random layers."""
    for case in cases(count, seed, work=work):
        bench, plans = Bench(case), swept(case)
        timed = plans.index(_plan(case))
        actions = [bench.along(plan) for plan in plans]
        seconds = best_of(actions, max(repeats // 3, 2), drop=1.6)
        # The first half selects, the second decides, so that luck does not.
        near = [place for place in range(len(plans)) if seconds[place] <= 1.25 * min(seconds)]
        near = sorted(near, key=seconds.__getitem__)[:5]
        near = list(dict.fromkeys([0, timed, *near]))
        final = best_of([actions[place] for place in near], repeats)
        best = min(range(len(near)), key=final.__getitem__)
        mine = final[near.index(timed)]
        yield Regret(case, plans[0], final[0], plans[timed], mine, plans[near[best]], final[best])


def look_up_seconds() -> float:
    """Median seconds of `plan_for` after its first call."""
    network = low_rank_network(1024, 1024, 256)
    plan_for(network, 4096, torch.float32, CPU, True)
    found = []
    for _ in range(7):
        begin = time.thread_time()
        for tokens in range(3000, 4000):
            plan_for(network, tokens, torch.float32, CPU, True)
        found.append((time.thread_time() - begin) / 1000)
    return median(found)


def planning_seconds() -> float:
    """Seconds to plan a tensor train of 8 cores for the first time."""
    modes = (4, 8, 8, 4)
    network = train_network(1024, 1024, 30, in_modes=modes, out_modes=modes)
    begin = time.thread_time()
    plan_for(network, 4096, torch.float32, CPU, True)
    return time.thread_time() - begin


def planner_bars(quick: bool) -> Iterator[Bar]:
    """All bars of the planner."""
    repeats = 3 if quick else 7
    yield from _shipped_bars(12 if quick else 200, repeats)
    begin = time.perf_counter()
    calibrate(torch.float32, CPU, anew=True)
    yield at_most("calibration", time.perf_counter() - begin, "s", 30, "wall clock, once")
    yield at_most("look-up of a plan", look_up_seconds() * 1e6, "us", 20, "CPU time, median of 7")
    yield at_most("first plan, 8 cores", planning_seconds() * 1e3, "ms", 50, "CPU time")
    work = WORK
    found = list(against_dense(12 if quick else 200, repeats, seed=1, work=work))
    yield from _dense_bars(found)
    seen = list(regrets(8 if quick else 100, repeats, seed=2, work=work))
    peer = f"timed sweep of all plans of {len(seen)} random layers"
    alone = sum(each.ratio <= 1.10 for each in seen) / len(seen)
    timed = sum(each.timed_ratio <= 1.10 for each in seen) / len(seen)
    name = "choice within 10 % of the best plan"
    yield _reported(f"{name}, by prices alone", alone, "of layers", peer)
    yield at_least(f"{name}, after timing", timed, "of layers", 0.95, peer)


def _shipped_bars(count: int, repeats: int) -> Iterator[Bar]:
    """How layers fare that the package's own table accepts, with no file of this machine."""
    ratios = []
    for case in cases(count, 1, work=WORK):
        plan = _plan(case)
        if plan.seconds <= plan.dense_seconds:
            bench = Bench(case)
            dense, ours = best_of([bench.run_dense, bench.along(plan)], repeats)
            ratios.append(ours / dense)
    kind, slower = "accepted by the package's table", sum(ratio > 1.05 for ratio in ratios)
    peer = f"nn.Linear, {len(ratios)} of {count} random layers"
    yield _reported(f"choice / dense, worst; {kind}", max(ratios, default=0.0), "of its time", peer)
    yield _reported(f"more than 5 % slower than dense; {kind}", slower, "layers", peer)


def _dense_bars(found: list[Slowdown]) -> Iterator[Bar]:
    kinds = {
        "all layers, forced": [each.ratio for each in found],
        "accepted by prices alone": [each.ratio for each in found if each.accepted],
        "accepted after timing": [each.timed_ratio for each in found if each.timed_accepted],
    }
    for kind, ratios in kinds.items():
        peer = f"nn.Linear, {len(ratios)} of {len(found)} random layers"
        slower = sum(ratio > 1.05 for ratio in ratios)
        worst = max(ratios, default=0.0)
        if kind == "accepted after timing":
            yield at_most(f"choice / dense, worst; {kind}", worst, "of its time", 1.05, peer)
            yield at_most(f"more than 5 % slower than dense; {kind}", slower, "layers", 0, peer)
        else:
            yield _reported(f"choice / dense, worst; {kind}", worst, "of its time", peer)
            yield _reported(f"more than 5 % slower than dense; {kind}", slower, "layers", peer)


def _reported(name: str, figure: float, unit: str, peer: str) -> Bar:
    return Bar(name, round(figure, 4), unit, "reported", True, peer)


def main() -> None:
    """Run and print."""
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OUTLAST_CACHE"] = folder
        publish("tensorize_planner", list(planner_bars(options.quick)), options.json)


if __name__ == "__main__":
    main()
