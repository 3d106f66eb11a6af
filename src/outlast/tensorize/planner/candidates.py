"""The routes that are worth a price. No torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from outlast.tensorize.network import Layout, Network, Route, dense_route, lower
from outlast.tensorize.planner.walk import route_flops

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


def _traffic(network: Network, route: Route) -> int:
    """Numbers per token that go in and out of the stages."""
    return sum(stage.width + stage.out_width for stage in lower(network, route).stages)


def _merged(network: Network, route: Route) -> int:
    """Entries of the matrices of all groups."""
    return sum(stage.b * stage.m * stage.k for stage in lower(network, route).stages)


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
        flops = tokens * (route_flops(network, route) + 20 * _traffic(network, route))
        return flops + 20 * _merged(network, route)

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
        layouts: tuple[Layout, ...] = ("tokens",) if single else ("tokens", "features")
        routes += [
            Route(cut.groups, cut.backwards, layout, chunk)
            for layout in layouts
            for chunk in (chunks[:1] if single else chunks)
        ]
    return routes
