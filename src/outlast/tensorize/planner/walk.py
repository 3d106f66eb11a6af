"""What a route costs: the operations of `outlast.tensorize.execute`, one by one, with prices.

`execute.Path` and `execute.differentiate` say what is done; this file must follow them. No torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.tensorize.course import Course, Leg, course
from outlast.tensorize.network import lower
from outlast.tensorize.planner.views import is_view, move, same_order
from outlast.tensorize.turn import TOKENS, Groups, Turn

if TYPE_CHECKING:
    from outlast.tensorize.contraction import Merging, Product
    from outlast.tensorize.network import Network, Route
    from outlast.tensorize.planner.price import Prices


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

    def __init__(self, network: Network, prices: Prices) -> None:
        self.network = network
        self.prices = prices
        self._sizes = dict(network.sizes)
        self._passes: dict[tuple[Route, int, int], Pass] = {}
        self._merging: dict[tuple[tuple[int, ...], bool], float] = {}
        self._unmerging: dict[tuple[object, ...], float] = {}
        self._backward: dict[tuple[object, ...], float] = {}

    def chunks(self, route: Route, tokens: int) -> list[int]:
        """How many tokens go through the chain at a time."""
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
        way, network, prices = course(self.network, route), self.network, self.prices
        sizes = {**self._sizes, TOKENS: tokens}
        first, last = way.legs[0].stage, way.legs[-1].stage
        enter, enter_back = self._entrance(way, chunked, sizes)
        leave, leave_back = self._exit(way, chunked, sizes)
        # Token-major, a stage takes as many neighbours of x as it contracts.
        run = network.in_features if way.features or first.is_plain else first.k
        far = prices.cold(tokens * network.in_features, whole * network.in_features, run)
        enter, enter_back = enter + far, enter_back + far
        run = network.out_features if way.features or last.is_plain else last.m
        far = prices.cold(tokens * network.out_features, whole * network.out_features, run)
        leave, leave_back = leave + far, leave_back + far
        inner = [self._leg(leg, way.features, sizes) for leg in way.legs]
        arrange, multiply, multiply_back, arrange_back, weight = zip(*inner, strict=True)
        return Pass(
            enter, arrange, multiply, leave, leave_back, multiply_back, arrange_back, enter_back,
            weight,
        )  # fmt: skip

    def _leg(
        self, leg: Leg, features: bool, sizes: dict[str, int]
    ) -> tuple[float, float, float, float, float]:
        """Of one stage: arrange, multiply, multiply_back, arrange_back and weight of `Pass`."""
        prices, stage = self.prices, leg.stage
        arrange = self._turned(leg.enter, sizes) + prices.launch["stage"]
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
        arrange_back = self._turned(leg.back, sizes)
        return arrange, multiply, multiply_back + prices.launch["back"], arrange_back, weight

    def _entrance(self, way: Course, chunked: bool, sizes: dict[str, int]) -> tuple[float, float]:
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

    def _exit(self, way: Course, chunked: bool, sizes: dict[str, int]) -> tuple[float, float]:
        """Seconds of `leave`, with the bias, and `leave_back` of `Pass`."""
        network, prices, last = self.network, self.prices, way.legs[-1].stage
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

    def _turned(self, turn: Turn | None, sizes: dict[str, int]) -> float:
        """Seconds of a change of order."""
        if turn is None:
            return 0.0
        return self.prices.launch["arrange"] + self._moved(turn.given, turn.wanted, sizes)

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
        legs = course(self.network, replace(route, chunk=0)).legs
        asked = [not wanted.isdisjoint(leg.stage.cores) for leg in legs]
        first = asked.index(True) if any(asked) else len(legs)
        parts = self.chunks(route, tokens)
        chunked = len(parts) > 1
        seconds = self.merging(route)
        for part in set(parts):
            one = self.one_pass(route, part, chunked=chunked, whole=tokens)
            each = one.leave_back
            if any(asked):
                each += one.enter + one.arrange[0] if kept and not chunked else one.inputs
            for position in reversed(range(len(legs))):
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
        for position, leg in enumerate(legs):
            if asked[position]:
                seconds += self.unmerging(leg.merging, wanted)
        return seconds

    def merging(self, route: Route) -> float:
        """Seconds to merge the cores of all groups."""
        key = (route.groups, route.backwards)
        known = self._merging.get(key)
        if known is None:
            legs = course(self.network, replace(route, chunk=0)).legs
            known = self.prices.launch["path"] * len(legs)
            known += sum(self.merge_seconds(leg.merging) for leg in legs)
            self._merging[key] = known
        return known

    def merge_seconds(self, merging: Merging) -> float:
        """Seconds of `merge.merge`."""
        seconds = sum(self._product(making.product) for making in merging.ahead)
        return seconds + self._turned(merging.last, self._sizes)

    def unmerging(self, merging: Merging, wanted: frozenset[int], *, again: bool = True) -> float:
        """Seconds of `merge.unmerge`; without making anything again if autograd kept it."""
        mine = wanted.intersection(merging.cores)
        key = (merging.cores, merging.matrix, merging.padding, mine, again)
        known = self._unmerging.get(key)
        if known is None:
            known = self._unmerging[key] = self._unmerge(merging, mine, again)
        return known

    def _unmerge(self, merging: Merging, wanted: frozenset[int], again: bool) -> float:
        seconds = 0.0
        if any(merging.padding):
            seconds += self.prices.copy(self.network.size("".join(merging.matrix)), 64)
        back = merging.back_to(wanted)
        # All but the matrix is made again.
        products = [*merging.ahead[:-1], *back] if back and again else back
        seconds += sum(self._product(making.product) for making in products)
        for core, closing in zip(merging.cores, merging.closing, strict=True):
            if core in wanted and closing is not None:
                seconds += self._turned(closing, self._sizes)
                # A gradient is laid out as its parameter.
                if is_view("".join(closing.given), closing.wanted, self._sizes):
                    seconds += self._copied(closing)
        return seconds

    def _copied(self, turn: Turn) -> float:
        """Seconds of a copy for a change of order that could do without."""
        given, wanted = "".join(turn.given), "".join(turn.wanted)
        if same_order(given, wanted, self._sizes):
            return 0.0
        return self.prices.move(move(given, wanted, self._sizes))

    def _product(self, product: Product) -> float:
        """Seconds of one product of the merging."""
        prices, layout = self.prices, list(product.layout)
        seconds = prices.launch["product"]
        for side, turn in enumerate((product.left, product.right)):
            copy = 0.0 if turn is None else self._moved(turn.given, turn.wanted, self._sizes)
            if copy:
                seconds, layout[side] = seconds + copy, "n"
        return seconds + prices.product(product.b, product.m, product.n, product.k, "".join(layout))


def dense_seconds(network: Network, tokens: int, prices: Prices, learns: bool) -> float:
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


def bias_gradient(network: Network, tokens: int, prices: Prices) -> float:
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
    network: Network, tokens: int, prices: Prices, *, activated: bool, crossing: bool
) -> float:
    """Predicted seconds of what is done between two factors, forward and backward.

    Args:
        network: Of two factors.
        tokens: Rows of x.
        prices: What operations cost.
        activated: Whether there is a nonlinearity, computed again on the way back.
        crossing: Whether the features of another layer are added, by autograd.
    """
    passes = 3 * _EXPONENTIAL * activated + 3 * crossing
    started = 4 * activated + 4 * crossing
    seconds = passes * prices.element(tokens * network.size(network.bonds))
    return seconds + started * prices.launch["noted"] + prices.launch["plain"]


def sparse_seconds(network: Network, tokens: int, entries: int, prices: Prices) -> float:
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
