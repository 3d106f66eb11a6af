"""The cheapest routes of a layer's computations together. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.tensorize.course import course, keeps
from outlast.tensorize.plan import Plan
from outlast.tensorize.planner.candidates import candidates
from outlast.tensorize.planner.walk import Walker, bias_gradient, dense_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.tensorize.network import Network, Route
    from outlast.tensorize.planner.price import Prices

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

    def price(self, plan: Plan) -> float:
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
        """Seconds that autograd takes for the way back, and to note the way forward."""
        launch, walker = self.walker.prices.launch, self.walker
        one = walker.one_pass(route, self.tokens, chunked=False)
        legs = course(self.network, route).legs
        seconds = one.leave_back + sum(one.weight) + sum(one.multiply_back) + one.enter_back
        seconds += sum(one.arrange_back)
        seconds += len(legs) * (launch["autograd"] - launch["back"]) + launch["plain"]
        everything = frozenset(range(len(self.network.cores)))
        for leg in legs:
            # Nothing is made again, but each product and each change of order is noted.
            merging = leg.merging
            seconds += walker.unmerging(merging, everything, again=False)
            seconds += len(merging.ahead) * launch["noted"]
        return max(seconds, launch["plain"])

    def may_be_plain(self, route: Route) -> bool:
        """Whether autograd keeps nothing that the operator does not, or little in all."""
        if 0 < route.chunk < self.tokens:
            return False
        way = course(self.network, replace(route, chunk=0))
        numbers, more = 0, False
        for position, leg in enumerate(way.legs):
            stage, merging = leg.stage, leg.merging
            numbers += self.tokens * stage.width + stage.b * stage.m * stage.k
            copied = way.features or leg.enter is not None
            more |= copied if position == 0 else not way.narrow
            more |= bool(merging.ahead) or merging.last is not None
        return not more or numbers * self.walker.prices.table.item_bytes <= _KEPT_BYTES

    def routes(self) -> list[Route]:
        """What there is to choose from."""
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

    def forward_only(self) -> list[tuple[float, Plan]]:
        """Plans without gradients, the fastest first; layers keep what they merged."""
        count = len(self.network.cores)
        found = [(self.forward(route), Plan.uniform(route, count)) for route in self.routes()]
        return sorted(found, key=lambda pair: pair[0])

    def uniform(self) -> list[tuple[float, Plan]]:
        """Plans that take one route for everything, the fastest first."""
        count = len(self.network.cores)
        plans = []
        for route in self.routes():
            plans.append(Plan.uniform(route, count))
            if self.may_be_plain(route):
                plans.append(Plan.uniform(route, count, plain=True))
        found = [(self.price(plan), plan) for plan in plans]
        return sorted(found, key=lambda pair: pair[0])

    def joint(self) -> list[tuple[float, Plan]]:
        """As `uniform`, after the best plan that takes several routes, if that is faster."""
        found = self.uniform()
        best_seconds, best = next(pair for pair in found if not pair[1].plain)
        pool = self._pool(found)
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

    def _pool(self, uniform: list[tuple[float, Plan]]) -> list[Route]:
        """Routes for the joint search: the best for all, and the best for one computation."""
        walker, tokens = self.walker, self.tokens
        routes = list(dict.fromkeys(plan.forward for _, plan in uniform))
        pool = routes[:_TRIED]
        pool.append(min(routes, key=lambda route: walker.forward(route, tokens)))
        none: frozenset[int] = frozenset()
        back = {route: walker.backward(route, tokens, none, want_x=True) for route in routes}
        pool.append(min(routes, key=back.__getitem__))
        if len(self.network.cores) <= _SEPARATE:
            for core in range(len(self.network.cores)):
                one = frozenset((core,))
                alone = {route: walker.backward(route, tokens, one, want_x=False)
                         for route in routes}  # fmt: skip
                pool.append(min(routes, key=alone.__getitem__))
        return list(dict.fromkeys(pool))


def _neighbours(plan: Plan, pool: list[Route]) -> Iterator[Plan]:
    """Plans with another route for one computation, or for several."""
    cores = plan.core_gradients
    for route in pool:
        together = (route,) * len(cores)
        yield replace(plan, forward=route)
        yield replace(plan, input_gradient=route)
        yield replace(plan, core_gradients=together)
        yield Plan(plan.forward, route, together)
        if len(cores) > 1:
            for core in range(len(cores)):
                changed = (*cores[:core], route, *cores[core + 1 :])
                yield replace(plan, core_gradients=changed)


def best_plan(network: Network, tokens: int, prices: Prices, learns: bool) -> Plan:
    """The plan with the least predicted seconds.

    Args:
        network: Whose.
        tokens: Rows of x.
        prices: What operations cost.
        learns: Whether there is a way back.
    """
    search = Search(Walker(network, prices), tokens)
    ranked = search.joint() if learns else search.forward_only()
    seconds, plan = ranked[0]
    dense = dense_seconds(network, tokens, prices, learns)
    kind = "measured" if prices.table.measured else "default"
    reason = f"{seconds / dense:.2f} x the dense layer's time by the {kind} table"
    return replace(plan, seconds=seconds, dense_seconds=dense, reason=reason)
