"""Expander codes: the normalised adjacency matrix of a regular graph, decoded by equal weights."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from outlast.coding.certificate import roundoff
from outlast.coding.code import Bound, GradientCode, survivors_of
from outlast.coding.codes.equal_weights import one_step_error
from outlast.coding.codes.graph import families
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.coding.codes.graph.families import Graph


class Expander(GradientCode):
    """B = A(G) / d for a connected d-regular graph G with as many vertices as workers.

    Worker w computes the chunks of its d neighbours and sends the mean of their gradients. The
    fixed decoder gives every one of u survivors the weight n / u, and its error is at most
    (lambda / d)^2 n s / u for any s stragglers, with lambda = max(|lambda_2|, |lambda_n|) of G.

    Args:
        workers: n; chunks are as many.
        degree: d, copies of each chunk.
        seed: Of the random regular graph.
        dtype: Type of the messages.

    Raises:
        CodingError: Where no such graph exists.
    """

    name: ClassVar[str] = "expander code"
    source: ClassVar[str] = "Raviv, Tamo, Tandon and Dimakis, ICML 2018"

    def __init__(self, workers: int, degree: int, *, seed: int = 0, dtype: str = "float32") -> None:
        self._set(families.random_regular(workers, degree, seed), dtype)

    @classmethod
    def of(cls, graph: Graph, *, dtype: str = "float32") -> Expander:
        """The code of a given regular graph, e.g. `outlast.coding.codes.graph.families.ramanujan`.

        Raises:
            CodingError: For a graph that is not regular or not connected.
        """
        code = cls.__new__(cls)
        code._set(graph, dtype)
        return code

    def _set(self, graph: Graph, dtype: str) -> None:
        degrees = graph.degrees
        if int(degrees.min()) != int(degrees.max()) or not graph.connected:
            raise CodingError(
                f"the graph with degrees {int(degrees.min())} to {int(degrees.max())} is not "
                "regular and connected, as an expander must be"
            )
        self.graph = graph
        self.degree = int(degrees[0])
        self.matrix = graph.adjacency / self.degree
        roundoff(dtype)
        self.dtype = dtype
        self.tolerance = 0

    @functools.cached_property
    def expansion(self) -> float:
        """max(|lambda_2|, |lambda_n|) of the graph; the smaller, the better the bound."""
        return families.expansion(self.graph)

    def fixed_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """(workers,) n / u for each of u survivors."""
        return np.where(alive, self.workers / max(int(alive.sum()), 1), 0.0)

    def worst_error(self, stragglers: int) -> Bound:
        """The smaller of (lambda / d)^2 n s / (n - s) and n, the error of weights of zero.

        The first holds for the fixed decoder too, which can exceed the second.
        """
        survivors = survivors_of(self.workers, stragglers)
        if not survivors:
            return Bound(float(self.chunks), "exact", "weights of zero")
        if stragglers == 0:
            return Bound(0.0, "exact", self.source)
        share = (self.expansion / self.degree) ** 2
        spectral = share * self.workers * stragglers / survivors
        if spectral > self.chunks:
            return Bound(float(self.chunks), "upper", "weights of zero")
        return Bound(spectral, "upper", self.source)

    def expected_error(self, stragglers: int) -> Bound:
        """The smaller of the fixed decoder's mean error and n, the error of weights of zero.

        The former is exact for that decoder, and so an upper bound of the optimal one's.
        """
        survivors = survivors_of(self.workers, stragglers)
        if not survivors:
            return Bound(float(self.chunks), "exact", "weights of zero")
        if stragglers == 0:
            return Bound(0.0, "exact", self.source)
        mean = one_step_error(self.workers, self.degree, survivors)
        if mean > self.chunks:
            return Bound(float(self.chunks), "upper", "weights of zero")
        return Bound(mean, "upper", "one-step decoder, Charles et al. 2017")


def worst_case_lower_bound(copies: int, stragglers: int) -> float:
    """No code in which each chunk has d copies has a smaller worst error: floor(s / d).

    An adversary stops all workers of floor(s / d) chunks. Raviv et al. state it for the norm,
    sqrt(floor(s / d)).

    Raises:
        CodingError: For copies below 1 or stragglers below 0.
    """
    if copies < 1 or stragglers < 0:
        raise CodingError(
            f"copies = {copies} and stragglers = {stragglers} must be at least 1 and 0"
        )
    return float(math.floor(stragglers / copies))
