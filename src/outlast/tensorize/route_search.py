"""Search for the cheapest routes of a layer's computations together. No torch.

`Walker` adds up the operations of `outlast.tensorize.execute`, one by one, with prices:
`execute.MergedPath` and `execute.differentiate` say what is done, and this file must follow them.
`candidates` lists the routes that are worth a price.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.tensorize.contraction import (
    TOKENS,
    ExecutionPlan,
    Groups,
    LayerPlan,
    Permutation,
    PlannedStage,
    execution_plan,
    keeps,
)
from outlast.tensorize.network import MemoryLayout, Network, Route, dense_route, lower
from outlast.tensorize.prices import is_view, move, same_order

if TYPE_CHECKING:
    from outlast.tensorize.contraction import MatrixProduct, Merging
    from outlast.tensorize.prices import OperationPrices


@dataclass(frozen=True)
class Pass:
    """Seconds of the parts of one chunk's way along a route.

    Attributes:
        enter: Of making x what the first stage takes.
        arrange: Of making what one stage gives what the next takes, by stage.
        multiply: Of every stage's product.
        leave: Of making y, with its bias.
        leave_back: Of making dy the gradient of what the last stage gives.
        multiply_back: Of every stage's product with its transposed matrix.
        arrange_back: Of making that the gradient of what the stage before gives.
        enter_back: Of making dx.
        weight: Of the gradient of every stage's matrix.
    """

    enter: float
    arrange: tuple[float, ...]
    multiply: tuple[float, ...]
    leave: float
    leave_back: float
    multiply_back: tuple[float, ...]
    arrange_back: tuple[float, ...]
    enter_back: float
    weight: tuple[float, ...]

    @property
    def forward(self) -> float:
        """Seconds of all of the way forward."""
        return self.enter + sum(self.arrange) + sum(self.multiply) + self.leave

    @property
    def inputs(self) -> float:
        """Seconds to compute again what goes into every stage."""
        return self.enter + sum(self.arrange) + sum(self.multiply[:-1])


class Walker:
    """Prices of the ways of one network.

    Args:
        network: Whose.
        prices: What operations cost.
    """

    def __init__(self, network: Network, prices: OperationPrices) -> None:
        self.network = network
        self.prices = prices
        self._sizes = dict(network.sizes)
        self._passes: dict[tuple[Route, int, int], Pass] = {}
        self._merging: dict[tuple[tuple[int, ...], bool], float] = {}
        self._unmerging: dict[tuple[object, ...], float] = {}
        self._backward: dict[tuple[object, ...], float] = {}

    def chunks(self, route: Route, tokens: int) -> list[int]:
        """Return the sizes of the chunks of tokens that go through the chain one after another."""
        if not 0 < route.chunk < tokens:
            return [tokens]
        whole, rest = divmod(tokens, route.chunk)
        return [route.chunk] * whole + ([rest] if rest else [])

    def one_pass(
        self, route: Route, tokens: int, *, chunked: bool, whole: int | None = None
    ) -> Pass:
        """The parts of a way for as many tokens as go through the chain at a time.

        Args:
            route: The way.
            tokens: How many those are.
            chunked: Whether there are more.
            whole: How many there are.
        """
        whole = whole or tokens
        key = (replace(route, chunk=int(chunked)), tokens, whole)
        known = self._passes.get(key)
        if known is None:
            known = self._passes[key] = self._walk(replace(route, chunk=0), tokens, chunked, whole)
        return known

    def _walk(self, route: Route, tokens: int, chunked: bool, whole: int) -> Pass:
        way, network, prices = execution_plan(self.network, route), self.network, self.prices
        sizes = {**self._sizes, TOKENS: tokens}
        first, last = way.stages[0].stage, way.stages[-1].stage
        enter, enter_back = self._entrance(way, chunked, sizes)
        leave, leave_back = self._exit(way, chunked, sizes)
        # Token-major, a stage takes as many neighbours of x as it contracts.
        run = network.in_features if way.features or first.is_plain else first.k
        far = prices.cold(tokens * network.in_features, whole * network.in_features, run)
        enter, enter_back = enter + far, enter_back + far
        run = network.out_features if way.features or last.is_plain else last.m
        far = prices.cold(tokens * network.out_features, whole * network.out_features, run)
        leave, leave_back = leave + far, leave_back + far
        inner = [self._stage(planned, way.features, sizes) for planned in way.stages]
        arrange, multiply, multiply_back, arrange_back, weight = zip(*inner, strict=True)
        return Pass(
            enter, arrange, multiply, leave, leave_back, multiply_back, arrange_back, enter_back,
            weight,
        )  # fmt: skip

    def _stage(
        self, planned: PlannedStage, features: bool, sizes: dict[str, int]
    ) -> tuple[float, float, float, float, float]:
        """Of one stage: arrange, multiply, multiply_back, arrange_back and weight of `Pass`."""
        prices, stage = self.prices, planned.stage
        arrange = self._turned(planned.enter, sizes) + prices.launch["stage"]
        b, m, k, rows = stage.b, stage.m, stage.k, stage.f * sizes[TOKENS]
        if features:
            multiply = prices.product(b, m, rows, k, "nn")
            multiply_back = prices.product(b, k, rows, m, "tn")
            weight = prices.product(b, m, k, rows, "nt")
        else:
            multiply = prices.product(b, rows, m, k, "nt")
            multiply_back = prices.product(b, rows, k, m, "nn")
            weight = prices.product(b, m, k, rows, "tn")
        # Of the first stage that of x must lie in order, whether a product takes it or not.
        arrange_back = self._turned(planned.back, sizes)
        return arrange, multiply, multiply_back + prices.launch["back"], arrange_back, weight

    def _entrance(
        self, way: ExecutionPlan, chunked: bool, sizes: dict[str, int]
    ) -> tuple[float, float]:
        """Seconds of `enter` and `enter_back` of `Pass`, but for changes of order."""
        network, prices = self.network, self.prices
        tokens, launch = sizes[TOKENS], prices.launch["chunk"] / 2
        padded = tokens * way.width if way.width > network.in_features else 0
        enter, back = launch, 0.0
        if padded:
            enter += prices.copy(padded, network.in_features) + prices.element(padded) / 2
        if way.features:
            enter += prices.transpose(tokens, way.width) + prices.launch["turn"]
            back += prices.transpose(network.in_features, tokens, fresh=not chunked)
        elif chunked or padded:
            back += prices.element(tokens * network.in_features, fresh=not chunked)
        return enter, back

    def _exit(
        self, way: ExecutionPlan, chunked: bool, sizes: dict[str, int]
    ) -> tuple[float, float]:
        """Seconds of `leave`, with the bias, and `leave_back` of `Pass`."""
        network, prices, last = self.network, self.prices, way.stages[-1].stage
        tokens, launch = sizes[TOKENS], prices.launch["chunk"] / 2
        wide, full = tokens * network.out_features, tokens * way.out_width
        into = prices.element(wide, fresh=False) if chunked else 0.0
        leave = leave_back = launch
        if way.features:
            leave += prices.element(wide)
            leave += prices.transpose(network.out_features, tokens, fresh=not chunked)
        else:
            # A plain last product writes the bias first and adds to it.
            adds = last.b == 1 and way.leave is None and full == wide
            leave += into + (
                prices.element(wide, fresh=False) / 2 if adds else prices.element(wide)
            )
        if full > wide:
            leave_back += prices.copy(full, network.out_features) + prices.element(full) / 2
        if way.features and way.leave_back is not None:
            leave_back += prices.transpose(tokens, way.out_width)
        leave += self._turned(way.leave, sizes)
        leave_back += self._turned(way.leave_back, sizes)
        return leave, leave_back

    def _turned(self, permutation: Permutation | None, sizes: dict[str, int]) -> float:
        """Seconds of a change of order."""
        if permutation is None:
            return 0.0
        return self.prices.launch["arrange"] + self._moved(
            permutation.given, permutation.wanted, sizes
        )

    def _moved(self, given: Groups, wanted: Groups, sizes: dict[str, int]) -> float:
        """Seconds of the copy that a change of order needs, if it needs one."""
        before, after = "".join(given), "".join(wanted)
        if same_order(before, after, sizes) or is_view(before, wanted, sizes):
            return 0.0
        return self.prices.move(move(before, after, sizes))

    def forward(self, route: Route, tokens: int, *, merged: bool = False) -> float:
        """Seconds of `execute.apply`, with the merging unless that was done before."""
        parts = self.chunks(route, tokens)
        chunked = len(parts) > 1
        seconds = 0.0 if merged else self.merging(route)
        for part in set(parts):
            seconds += (
                parts.count(part)
                * self.one_pass(route, part, chunked=chunked, whole=tokens).forward
            )
        if chunked:
            seconds += self.prices.fresh(tokens * self.network.out_features)
        return seconds

    def backward(
        self, route: Route, tokens: int, wanted: frozenset[int], *, want_x: bool, kept: bool = False
    ) -> float:
        """Seconds of `execute.differentiate`, with the merging.

        Args:
            route: The way.
            tokens: Rows of x.
            wanted: Cores whose gradients are asked for.
            want_x: Whether that of x is.
            kept: Whether the inputs of the stages were kept.
        """
        key = (route, tokens, wanted, want_x, kept)
        known = self._backward.get(key)
        if known is None:
            known = self._back(route, tokens, wanted, want_x=want_x, kept=kept)
            self._backward[key] = known
        return known

    def _back(
        self, route: Route, tokens: int, wanted: frozenset[int], *, want_x: bool, kept: bool
    ) -> float:
        planned_stages = execution_plan(self.network, replace(route, chunk=0)).stages
        asked = [not wanted.isdisjoint(planned.stage.cores) for planned in planned_stages]
        first = asked.index(True) if any(asked) else len(planned_stages)
        parts = self.chunks(route, tokens)
        chunked = len(parts) > 1
        seconds = self.merging(route)
        for part in set(parts):
            one = self.one_pass(route, part, chunked=chunked, whole=tokens)
            each = one.leave_back
            if any(asked):
                each += one.enter + one.arrange[0] if kept and not chunked else one.inputs
            for position in reversed(range(len(planned_stages))):
                if position < first and not want_x:
                    break
                if asked[position]:
                    each += one.weight[position]
                if want_x or position > first:
                    each += one.multiply_back[position] + one.arrange_back[position]
            if want_x:
                each += one.enter_back
            seconds += parts.count(part) * each
        if chunked and want_x:
            seconds += self.prices.fresh(tokens * self.network.in_features)
        for position, planned in enumerate(planned_stages):
            if asked[position]:
                seconds += self.unmerging(planned.merging, wanted)
        return seconds

    def merging(self, route: Route) -> float:
        """Seconds to merge the cores of all groups."""
        key = (route.groups, route.backwards)
        known = self._merging.get(key)
        if known is None:
            planned_stages = execution_plan(self.network, replace(route, chunk=0)).stages
            known = self.prices.launch["path"] * len(planned_stages)
            known += sum(self.merge_seconds(planned.merging) for planned in planned_stages)
            self._merging[key] = known
        return known

    def merge_seconds(self, merging: Merging) -> float:
        """Seconds of `execute.merge`."""
        seconds = sum(self._product(making.product) for making in merging.ahead)
        return seconds + self._turned(merging.last, self._sizes)

    def unmerging(self, merging: Merging, wanted: frozenset[int], *, again: bool = True) -> float:
        """Seconds of `execute.unmerge`; without making anything again if autograd kept it."""
        mine = wanted.intersection(merging.cores)
        key = (merging.cores, merging.matrix, merging.padding, mine, again)
        known = self._unmerging.get(key)
        if known is None:
            seconds = 0.0
            if any(merging.padding):
                seconds += self.prices.copy(self.network.size("".join(merging.matrix)), 64)
            back = merging.back_to(mine)
            # All but the matrix is made again.
            products = [*merging.ahead[:-1], *back] if back and again else back
            seconds += sum(self._product(making.product) for making in products)
            for core, closing in zip(merging.cores, merging.closing, strict=True):
                if core in mine and closing is not None:
                    seconds += self._turned(closing, self._sizes)
                    # A gradient is laid out as its parameter.
                    if is_view("".join(closing.given), closing.wanted, self._sizes):
                        seconds += self._copied(closing)
            known = self._unmerging[key] = seconds
        return known

    def _copied(self, permutation: Permutation) -> float:
        """Seconds of a copy for a change of order that could do without."""
        given, wanted = "".join(permutation.given), "".join(permutation.wanted)
        if same_order(given, wanted, self._sizes):
            return 0.0
        return self.prices.move(move(given, wanted, self._sizes))

    def _product(self, product: MatrixProduct) -> float:
        """Seconds of one product of the merging."""
        prices, layout = self.prices, list(product.layout)
        seconds = prices.launch["product"]
        for side, permutation in enumerate((product.left, product.right)):
            copy = (
                0.0
                if permutation is None
                else self._moved(permutation.given, permutation.wanted, self._sizes)
            )
            if copy:
                seconds, layout[side] = seconds + copy, "n"
        return seconds + prices.product(product.b, product.m, product.n, product.k, "".join(layout))


def dense_seconds(network: Network, tokens: int, prices: OperationPrices, learns: bool) -> float:
    """Predicted seconds of a plain linear layer with a bias: forward, and backward if it learns."""
    rows, columns = network.in_features, network.out_features
    # The bias is written first, then the product is added.
    seconds = prices.product(1, tokens, columns, rows, "nt")
    seconds += prices.element(tokens * columns, fresh=False) / 2
    far = prices.cold(tokens * rows, tokens * rows, rows)
    far += prices.cold(tokens * columns, tokens * columns, columns)
    if learns:
        seconds += prices.product(1, tokens, rows, columns, "nn")
        seconds += prices.product(1, columns, rows, tokens, "tn")
        seconds += bias_gradient(network, tokens, prices) + prices.launch["linear"]
        far *= 2
    return seconds + far


def bias_gradient(network: Network, tokens: int, prices: OperationPrices) -> float:
    """Predicted seconds to sum dy over the tokens."""
    # A sum reads one tensor where an addition reads two and writes one.
    return prices.element(tokens * network.out_features, fresh=False) / 2


# A smooth nonlinearity takes about as long as so many additions.
_EXPONENTIAL = 3

# An entry of a sparse matrix that is gathered, multiplied and added in place takes about as long as
# so many multiplications of a matrix product. (One token through low rank + sparse was measured at
# 0.11 of dense speed.)
_SCATTERED = 3000


def middle_seconds(
    network: Network, tokens: int, prices: OperationPrices, *, activated: bool, crossing: bool
) -> float:
    """Predicted seconds of what is done between two factors, forward and backward.

    Args:
        network: Of two factors.
        tokens: Rows of x.
        prices: What operations cost.
        activated: Whether there is a nonlinearity, computed again in the backward pass.
        crossing: Whether the features of another layer are added, by autograd.
    """
    passes = 3 * _EXPONENTIAL * activated + 3 * crossing
    started = 4 * activated + 4 * crossing
    seconds = passes * prices.element(tokens * network.size(network.bonds))
    return seconds + started * prices.launch["noted"] + prices.launch["plain"]


def sparse_seconds(network: Network, tokens: int, entries: int, prices: OperationPrices) -> float:
    """Predicted seconds of a layer of low rank + sparse, forward and backward with a bias.

    Args:
        network: Of the two factors.
        tokens: Rows of x.
        entries: Of the sparse part.
        prices: What operations cost.
    """
    into, out, rank = network.in_features, network.out_features, network.size(network.bonds)
    product = prices.product
    entry = _SCATTERED * product(1, 1024, 1024, 1024, "nn") / 1024**3
    seconds = bias_gradient(network, tokens, prices) + prices.launch["function"]
    built = product(1, out, into, rank, "nn") + 2 * prices.element(out * into) + entries * entry
    dense = 2 * built + product(1, rank, into, out, "tn") + product(1, out, rank, into, "nt")
    dense += dense_seconds(network, tokens, prices, True) + entries * entry
    # A few tokens go through the factors and the entries by themselves.
    split = 3 * tokens * entries * entry + 20 * prices.launch["operation"]
    for features in (into, out):
        split += product(1, tokens, rank, features, "nt") + product(1, tokens, features, rank, "nn")
        split += product(1, rank, features, tokens, "tn")
    return seconds + min(dense, split)


@functools.lru_cache(maxsize=4096)
def route_flops(network: Network, route: Route) -> int:
    """Additions and multiplications of a route forward, per token."""
    stages = lower(network, replace(route, chunk=0)).stages
    return sum(2 * stage.b * stage.m * stage.k * stage.f for stage in stages)


CHUNKS = (0, 64, 128, 256, 512)

# Chains of more cores have more groupings than there is time to price.
_ALL_GROUPS = 4

_KEPT = 10


def groupings(count: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut a chain into at most so many groups of neighbours."""
    if count == 0:
        yield ()
    elif most:
        for first in range(1, count + 1):
            for rest in groupings(count - first, most - 1):
                yield (first, *rest)


@functools.lru_cache(maxsize=4096)
def _cuts(network: Network, tokens: int) -> tuple[Route, ...]:
    """Groupings and directions; of a long chain those with the least work."""
    count = len(network.cores)
    most = count if count <= _ALL_GROUPS else _ALL_GROUPS
    routes = []
    for groups in groupings(count, most):
        directions = (False, True) if len(groups) > 1 else (False,)
        routes += [Route(groups, backwards) for backwards in directions]

    def work(route: Route) -> float:
        # A number that is moved takes about as long as ten that are multiplied.
        stages = lower(network, route).stages
        moved = sum(stage.width + stage.out_width for stage in stages)
        merged = sum(stage.b * stage.m * stage.k for stage in stages)
        return tokens * (route_flops(network, route) + 20 * moved) + 20 * merged

    if len(routes) <= _KEPT:
        return tuple(routes)
    kept = sorted(routes, key=work)[:_KEPT]
    two = min((route for route in routes if len(route.groups) == 2), key=work)
    return tuple(dict.fromkeys([*kept, two, dense_route(network)]))


def candidates(network: Network, tokens: int, *, chunked: bool = True) -> list[Route]:
    """Routes for a number of tokens.

    Args:
        network: Whose.
        tokens: Rows of x.
        chunked: Whether taking few tokens at a time can gain; it does where caches are large
            next to the time to start an operation.
    """
    chunks = [chunk for chunk in (CHUNKS if chunked else CHUNKS[:1]) if chunk < tokens]
    routes = []
    for cut in _cuts(network, tokens):
        # A single product reads x as it is, and no stage follows it whose input could be near.
        single = len(cut.groups) == 1
        layouts: tuple[MemoryLayout, ...] = ("tokens",) if single else ("tokens", "features")
        routes += [
            Route(cut.groups, cut.backwards, layout, chunk)
            for layout in layouts
            for chunk in (chunks[:1] if single else chunks)
        ]
    return routes


# Routes beside the best uniform one that the joint search tries, for each computation.
_TRIED = 5

# Cores up to which the best route of each alone is tried.
_SEPARATE = 5

_GAIN = 0.99

_DOUBT = 1.1

# Bytes that a plain plan may leave for the backward pass if the others leave less.
_KEPT_BYTES = 1 << 20


@dataclass(frozen=True)
class Search:
    """Prices of the plans of a network for a number of tokens.

    Attributes:
        walker: Prices of its routes.
        tokens: Rows of x.
    """

    walker: Walker
    tokens: int

    @property
    def network(self) -> Network:
        """Whose plans these are."""
        return self.walker.network

    def price(self, plan: LayerPlan) -> float:
        """Predicted seconds of forward and backward with a bias."""
        walker, tokens = self.walker, self.tokens
        launch = walker.prices.launch
        seconds = bias_gradient(self.network, tokens, walker.prices)
        seconds += self._doubted(walker.forward(plan.forward, tokens), plan.forward)
        if plan.plain:
            return seconds + self._plain(plan.forward)
        kept = keeps(self.network, plan, self.tokens)
        routes = [plan.input_gradient, *plan.core_gradients]
        for route in dict.fromkeys(routes):
            mine = frozenset(
                core for core, other in enumerate(plan.core_gradients) if other == route
            )
            for_x = route == plan.input_gradient
            kept_here = kept and route == plan.forward
            back = walker.backward(route, tokens, mine, want_x=for_x, kept=kept_here)
            seconds += self._doubted(back, route)
        return seconds + launch["function"]

    def _plain(self, route: Route) -> float:
        """Seconds that autograd takes for the backward pass, and to record the forward pass."""
        launch, walker = self.walker.prices.launch, self.walker
        one = walker.one_pass(route, self.tokens, chunked=False)
        planned_stages = execution_plan(self.network, route).stages
        seconds = one.leave_back + sum(one.weight) + sum(one.multiply_back) + one.enter_back
        seconds += sum(one.arrange_back)
        seconds += len(planned_stages) * (launch["autograd"] - launch["back"]) + launch["plain"]
        everything = frozenset(range(len(self.network.cores)))
        for planned in planned_stages:
            # Nothing is made again, but each product and each change of order is noted.
            merging = planned.merging
            seconds += walker.unmerging(merging, everything, again=False)
            seconds += len(merging.ahead) * launch["noted"]
        return max(seconds, launch["plain"])

    def may_be_plain(self, route: Route) -> bool:
        """Return whether autograd keeps nothing that the operator does not, or little in all."""
        if 0 < route.chunk < self.tokens:
            return False
        way = execution_plan(self.network, replace(route, chunk=0))
        numbers, more = 0, False
        for position, planned in enumerate(way.stages):
            stage, merging = planned.stage, planned.merging
            numbers += self.tokens * stage.width + stage.b * stage.m * stage.k
            copied = way.features or planned.enter is not None
            more |= copied if position == 0 else not way.narrow
            more |= bool(merging.ahead) or merging.last is not None
        return not more or numbers * self.walker.prices.table.item_bytes <= _KEPT_BYTES

    def routes(self) -> list[Route]:
        """Routes to choose from."""
        # A GPU's caches are small next to what keeps it busy.
        chunked = self.walker.prices.table.cached
        return candidates(self.network, self.tokens, chunked=chunked)

    def forward(self, route: Route) -> float:
        """Predicted seconds without gradients, of a layer that keeps what it merged."""
        launch = self.walker.prices.launch["chain"]
        return self._doubted(self.walker.forward(route, self.tokens, merged=True), route) + launch

    def _doubted(self, seconds: float, route: Route) -> float:
        """Somewhat more for chunks, which fare worse when others use the caches too."""
        return seconds * _DOUBT if 0 < route.chunk < self.tokens else seconds

    def forward_only(self) -> list[tuple[float, LayerPlan]]:
        """Plans without gradients, the fastest first; layers keep what they merged."""
        count = len(self.network.cores)
        found = [(self.forward(route), LayerPlan.uniform(route, count)) for route in self.routes()]
        return sorted(found, key=lambda pair: pair[0])

    def uniform(self) -> list[tuple[float, LayerPlan]]:
        """Plans that take one route for everything, the fastest first."""
        count = len(self.network.cores)
        plans = []
        for route in self.routes():
            plans.append(LayerPlan.uniform(route, count))
            if self.may_be_plain(route):
                plans.append(LayerPlan.uniform(route, count, plain=True))
        found = [(self.price(plan), plan) for plan in plans]
        return sorted(found, key=lambda pair: pair[0])

    def joint(self) -> list[tuple[float, LayerPlan]]:
        """As `uniform`, after the best plan that takes several routes, if that is faster."""
        found = self.uniform()
        best_seconds, best = next(pair for pair in found if not pair[1].plain)
        # Routes for the joint search: the best for all, and the best for one computation.
        walker, tokens = self.walker, self.tokens
        routes = list(dict.fromkeys(plan.forward for _, plan in found))
        chosen = routes[:_TRIED]
        chosen.append(min(routes, key=lambda route: walker.forward(route, tokens)))
        none: frozenset[int] = frozenset()
        back = {route: walker.backward(route, tokens, none, want_x=True) for route in routes}
        chosen.append(min(routes, key=back.__getitem__))
        if len(self.network.cores) <= _SEPARATE:
            for core in range(len(self.network.cores)):
                one = frozenset((core,))
                alone = {route: walker.backward(route, tokens, one, want_x=False)
                         for route in routes}  # fmt: skip
                chosen.append(min(routes, key=alone.__getitem__))
        pool = list(dict.fromkeys(chosen))
        while True:
            seconds, plan = min(
                ((self.price(plan), plan) for plan in _neighbours(best, pool)),
                key=lambda pair: pair[0],
                default=(best_seconds, best),
            )
            # Less is no gain but noise of the prices.
            if seconds >= best_seconds * _GAIN:
                break
            best_seconds, best = seconds, plan
        mixed = [(best_seconds, best)] if all(best != plan for _, plan in found) else []
        return sorted([*mixed, *found], key=lambda pair: pair[0])


def _neighbours(plan: LayerPlan, pool: list[Route]) -> Iterator[LayerPlan]:
    """Plans with another route for one computation, or for several."""
    cores = plan.core_gradients
    for route in pool:
        together = (route,) * len(cores)
        yield replace(plan, forward=route)
        yield replace(plan, input_gradient=route)
        yield replace(plan, core_gradients=together)
        yield LayerPlan(plan.forward, route, together)
        if len(cores) > 1:
            for core in range(len(cores)):
                changed = (*cores[:core], route, *cores[core + 1 :])
                yield replace(plan, core_gradients=changed)


def best_plan(network: Network, tokens: int, prices: OperationPrices, learns: bool) -> LayerPlan:
    """The plan with the least predicted seconds.

    Args:
        network: Whose.
        tokens: Rows of x.
        prices: What operations cost.
        learns: Whether there is a backward pass.
    """
    search = Search(Walker(network, prices), tokens)
    ranked = search.joint() if learns else search.forward_only()
    seconds, plan = ranked[0]
    dense = dense_seconds(network, tokens, prices, learns)
    kind = "measured" if prices.table.measured else "default"
    reason = f"{seconds / dense:.2f} x the dense layer's time by the {kind} table"
    return replace(plan, seconds=seconds, dense_seconds=dense, reason=reason)
