"""What a route costs: the operations of `outlast.tensorize.execute`, one by one, with prices.

`execute.Path` and `execute.differentiate` say what is done; this file must follow them. No torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.tensorize.network import lower
from outlast.tensorize.planner.contraction import steps
from outlast.tensorize.planner.views import is_view, move, same_order

if TYPE_CHECKING:
    from outlast.tensorize.network import Lowered, Network, Route, Stage
    from outlast.tensorize.planner.price import Prices

_TOKENS = "."


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
        self._merges: dict[tuple[tuple[int, ...], str], float] = {}
        self._unmerges: dict[tuple[tuple[int, ...], str, int], float] = {}
        self._merging: dict[tuple[tuple[int, ...], bool], float] = {}
        self._contracted: dict[tuple[tuple[str, ...], str], tuple[float, str]] = {}
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
        sizes = {**self._sizes, _TOKENS: tokens}
        lowered = lower(self.network, route)
        features = route.layout == "features"
        enter, enter_back = self._entrance(lowered, features, chunked, sizes)
        leave, leave_back = self._exit(lowered, features, chunked, sizes)
        # Token-major, a stage takes as many neighbours of x as it contracts.
        first, last = lowered.stages[0], lowered.stages[-1]
        run = self.network.in_features if features or first.is_plain else first.k
        far = self.prices.cold(
            tokens * self.network.in_features, whole * self.network.in_features, run
        )
        enter, enter_back = enter + far, enter_back + far
        run = self.network.out_features if features or last.is_plain else last.m
        far = self.prices.cold(
            tokens * self.network.out_features, whole * self.network.out_features, run
        )
        leave, leave_back = leave + far, leave_back + far
        inner = [
            self._stage(lowered.stages, position, features, sizes)
            for position in range(len(lowered.stages))
        ]
        arrange, multiply, multiply_back, arrange_back, weight = zip(*inner, strict=True)
        return Pass(
            enter, arrange, multiply, leave, leave_back, multiply_back, arrange_back, enter_back,
            weight,
        )  # fmt: skip

    def _stage(
        self, stages: tuple[Stage, ...], position: int, features: bool, sizes: dict[str, int]
    ) -> tuple[float, float, float, float, float]:
        """Of one stage: arrange, multiply, multiply_back, arrange_back and weight of `Pass`."""
        prices, stage = self.prices, stages[position]
        place = stages[position - 1].batch if position else ""
        if features:
            given = stage.before + _TOKENS
            groups = (stage.batch, stage.contracted, stage.free + _TOKENS)
        else:
            given = place + _TOKENS + stage.before[len(place) :]
            groups = (stage.batch, _TOKENS + stage.free, stage.contracted)
        arrange = self._moved(given, groups, sizes) + prices.launch["stage"]
        permuted = prices.launch["arrange"] if given != "".join(groups) else 0.0
        arrange += permuted
        arrange_back = permuted
        if position:
            # What comes back is contiguous in this stage's order.
            before = stages[position - 1]
            back = (
                (before.batch, before.new, before.free + _TOKENS)
                if features
                else (before.batch, _TOKENS + before.free, before.new)
            )
            arrange_back += self._moved("".join(groups), back, sizes)
        b, m, k, rows = stage.b, stage.m, stage.k, stage.f * sizes[_TOKENS]
        if features:
            multiply = prices.product(b, m, rows, k, "nn")
            multiply_back = prices.product(b, k, rows, m, "tn")
            weight = prices.product(b, m, k, rows, "nt")
        else:
            multiply = prices.product(b, rows, m, k, "nt")
            multiply_back = prices.product(b, rows, k, m, "nn")
            weight = prices.product(b, m, k, rows, "tn")
        return arrange, multiply, multiply_back + prices.launch["back"], arrange_back, weight

    def _entrance(
        self, lowered: Lowered, features: bool, chunked: bool, sizes: dict[str, int]
    ) -> tuple[float, float]:
        """Seconds of `enter` and `enter_back` of `Pass`."""
        network, prices, first = self.network, self.prices, lowered.stages[0]
        tokens, launch = sizes[_TOKENS], self.prices.launch["chunk"] / 2
        padded = tokens * first.width if first.width > network.in_features else 0
        enter, back = launch, 0.0
        if padded:
            enter += prices.copy(padded, network.in_features) + prices.element(padded) / 2
        if features:
            enter += prices.transpose(tokens, first.width) + prices.launch["turn"]
            given = first.batch + first.contracted + first.free + _TOKENS
            wanted = network.inputs + _TOKENS
            back += prices.transpose(network.in_features, tokens, fresh=not chunked)
        else:
            given = first.batch + _TOKENS + first.free + first.contracted
            wanted = _TOKENS + network.inputs
            if chunked or padded:
                back += prices.element(tokens * network.in_features, fresh=not chunked)
        if not same_order(given, wanted, sizes):
            back += prices.move(move(given, wanted, sizes))
        return enter, back

    def _exit(
        self, lowered: Lowered, features: bool, chunked: bool, sizes: dict[str, int]
    ) -> tuple[float, float]:
        """Seconds of `leave`, with the bias, and `leave_back` of `Pass`."""
        network, prices, last = self.network, self.prices, lowered.stages[-1]
        tokens, launch = sizes[_TOKENS], self.prices.launch["chunk"] / 2
        wide, full = tokens * network.out_features, tokens * network.size(network.outputs)
        plain = last.is_plain and last.new == network.outputs
        into = prices.element(wide, fresh=False) if chunked else 0.0
        leave = leave_back = launch
        if features:
            leave += prices.element(wide)
            leave += prices.transpose(network.out_features, tokens, fresh=not chunked)
        else:
            # A plain last product writes the bias first and adds to it.
            leave += into + (
                prices.element(wide, fresh=False) / 2 if plain else prices.element(wide)
            )
        if plain:
            return leave, leave_back
        leave += prices.launch["arrange"]
        leave_back += prices.launch["arrange"]
        if full > wide:
            leave_back += prices.copy(full, network.out_features) + prices.element(full) / 2
        if features:
            leave_back += prices.transpose(tokens, network.size(network.outputs))
            given, wanted = lowered.after + _TOKENS, network.outputs + _TOKENS
            groups = (last.batch, last.new, last.free + _TOKENS)
        else:
            given = last.batch + _TOKENS + lowered.after[len(last.batch) :]
            wanted = _TOKENS + network.outputs
            groups = (last.batch, _TOKENS + last.free, last.new)
        if not same_order(given, wanted, sizes):
            leave += prices.move(move(given, wanted, sizes))
            leave_back += self._moved(wanted, groups, sizes)
        return leave, leave_back

    def _moved(self, given: str, groups: tuple[str, ...], sizes: dict[str, int]) -> float:
        wanted = "".join(groups)
        if same_order(given, wanted, sizes) or is_view(given, groups, sizes):
            return 0.0
        return self.prices.move(move(given, wanted, sizes))

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
        stages = lower(self.network, replace(route, chunk=0)).stages
        asked = [not wanted.isdisjoint(stage.cores) for stage in stages]
        first = asked.index(True) if any(asked) else len(stages)
        parts = self.chunks(route, tokens)
        chunked = len(parts) > 1
        seconds = self.merging(route)
        for part in set(parts):
            one = self.one_pass(route, part, chunked=chunked, whole=tokens)
            each = one.leave_back
            if any(asked):
                each += one.enter + one.arrange[0] if kept and not chunked else one.inputs
            for position in reversed(range(len(stages))):
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
        for position, stage in enumerate(stages):
            if asked[position]:
                seconds += sum(self.unmerge(stage, core) for core in stage.cores if core in wanted)
        return seconds

    def merging(self, route: Route) -> float:
        """Seconds to merge the cores of all groups."""
        key = (route.groups, route.backwards)
        known = self._merging.get(key)
        if known is None:
            stages = lower(self.network, replace(route, chunk=0)).stages
            known = self.prices.launch["path"] * len(stages) + sum(map(self.merge_seconds, stages))
            self._merging[key] = known
        return known

    def merge_seconds(self, stage: Stage) -> float:
        """Seconds of `merge.merge`."""
        key = (stage.cores, stage.batch + stage.new + _TOKENS + stage.contracted)
        known = self._merges.get(key)
        if known is None:
            terms = tuple(self.network.cores[core] for core in stage.cores)
            groups = (stage.batch, stage.new, stage.contracted)
            known, natural = self._contract(terms, "".join(groups))
            known += self._moved(natural, groups, self._sizes)
            self._merges[key] = known
        return known

    def unmerge(self, stage: Stage, core: int) -> float:
        """Seconds of `merge.unmerge` for one core of a stage."""
        key = (stage.cores, stage.batch + stage.new + _TOKENS + stage.contracted, core)
        known = self._unmerges.get(key)
        if known is None:
            known = self._unmerges[key] = self._unmerge(stage, core)
        return known

    def _unmerge(self, stage: Stage, core: int) -> float:
        unfolded = stage.batch + stage.new + stage.contracted
        others = [self.network.cores[other] for other in stage.cores if other != core]
        target = self.network.cores[core]
        padded = stage.k * stage.m * stage.b < self.network.size(unfolded)
        seconds = self.prices.copy(self.network.size(unfolded), 64) if padded else 0.0
        if not others:
            # Autograd lays a permuted gradient out as the parameter is.
            if not same_order(unfolded, target, self._sizes):
                seconds += self.prices.move(move(unfolded, target, self._sizes))
            return seconds
        known, natural = self._contract((unfolded, *others), target)
        if not same_order(natural, target, self._sizes):
            known += self.prices.move(move(natural, target, self._sizes))
        return seconds + known

    def _contract(self, terms: tuple[str, ...], result: str) -> tuple[float, str]:
        """Seconds of `merge.contract`, and the order in memory of what it gives."""
        if terms == (result,):
            return 0.0, result
        known = self._contracted.get((terms, result))
        if known is not None:
            return known
        operands = list(terms)
        # What einsum gives is a view of what its product gave.
        orders = list(terms)
        seconds = 0.0
        for step in steps(terms, result, self.network.sizes):
            taken = [operands.pop(place) for place in step.places]
            lying = [orders.pop(place) for place in step.places]
            target = step.result
            seconds += self.prices.launch["einsum"]
            if len(taken) == 1:
                order = lying[0]
            else:
                more, order = self._pair(taken, lying, target)
                seconds += more
            operands.append(target)
            orders.append(order)
        known = self._contracted[terms, result] = seconds, orders[0]
        return known

    def _pair(self, taken: list[str], lying: list[str], target: str) -> tuple[float, str]:
        """Seconds of one torch.einsum of two, and the order in memory of its result."""
        left, right = lying
        shared = [letter for letter in target if letter in left and letter in right]
        rows = [letter for letter in target if letter in left and letter not in right]
        columns = [letter for letter in target if letter in right and letter not in left]
        # Sums are taken in the order of the first operand's indices: see `contraction`.
        summed = [letter for letter in taken[0] if letter in right and letter not in target]
        batch, row, column, total = map("".join, (shared, rows, columns, summed))
        if not total:
            # No product then, but a multiplication of every pair.
            return self.prices.element(self.network.size(target)), target
        seconds = self._moved(left, (batch, row, total), self._sizes)
        seconds += self._moved(right, (batch, total, column), self._sizes)
        size = self.network.size
        layout = "n" if self._moved(left, (batch, row, total), self._sizes) else _lies(left, row)
        layout += (
            "n" if self._moved(right, (batch, total, column), self._sizes) else _lies(right, total)
        )
        seconds += self.prices.product(size(batch), size(row), size(column), size(total), layout)
        return seconds, batch + row + column


def _lies(letters: str, slow: str) -> str:
    """Whether a matrix, whose slower dimension has some indices, lies transposed."""
    return "t" if letters and letters[-1] in slow else "n"


def dense_seconds(network: Network, tokens: int, prices: Prices, learns: bool) -> float:
    """Predicted seconds of a plain linear layer with a bias: forward, and backward if it learns."""
    rows, columns = network.in_features, network.out_features
    # The bias is written first, then the product is added.
    seconds = prices.product(1, tokens, columns, rows, "nt") + prices.launch["linear"] / 3
    seconds += prices.element(tokens * columns, fresh=False) / 2
    far = prices.cold(tokens * rows, tokens * rows, rows)
    far += prices.cold(tokens * columns, tokens * columns, columns)
    if learns:
        seconds += prices.product(1, tokens, rows, columns, "nn")
        seconds += prices.product(1, columns, rows, tokens, "tn")
        seconds += bias_gradient(network, tokens, prices) + prices.launch["linear"] * 2 / 3
        far *= 2
    return seconds + far


def bias_gradient(network: Network, tokens: int, prices: Prices) -> float:
    """Predicted seconds to sum dy over the tokens."""
    # A sum reads one tensor where an addition reads two and writes one.
    return prices.element(tokens * network.out_features, fresh=False) / 2


@functools.lru_cache(maxsize=4096)
def route_flops(network: Network, route: Route) -> int:
    """Additions and multiplications of a route forward, per token."""
    stages = lower(network, replace(route, chunk=0)).stages
    return sum(2 * stage.b * stage.m * stage.k * stage.f for stage in stages)
