"""Graph codes: workers are edges, chunks are vertices, decoded by connected components."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.sparse import csr_array

from outlast.coding.certificate import roundoff
from outlast.coding.code import Bound, GradientCode, survivors_of
from outlast.coding.codes.graph import components, families
from outlast.coding.codes.graph.components import HalfEdges
from outlast.coding.codes.graph.families import Graph
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

_BATCH_ENTRIES = 2_000_000
_EXAMINED_VERTICES = 256


class GraphCode(GradientCode):
    """The graph scheme of Glasgow and Wootters (2021).

    The worker of an edge computes the two chunks at its ends and sends the sum of their gradients.
    In a d-regular graph every chunk has d copies. The coefficients of the optimal decoder follow
    from the connected components that surviving edges make: they sum to 2 along every edge, so a
    component with an odd cycle has all 1, and one with sides L and R (bipartite) has
    1 -+ (|L| - |R|) / (|L| + |R|). The error is the sum of (|L| - |R|)^2 / (|L| + |R|).

    `tolerance` is proven, not tight for every graph: d - 1 for bipartite regular graphs and for
    regular ones known to be d-edge-connected, else the (d - 1) // 2 that holds for every one.

    Args:
        edges: (workers, 2) the two chunks of each worker.
        vertices: Number of chunks.
        transitive: Whether a symmetry of the graph takes any vertex to any other.
        dtype: Type of the messages.

    Raises:
        CodingError: For edges that name unknown vertices or join a vertex with itself, and for
            vertices without an edge.
    """

    name: ClassVar[str] = "graph code"
    source: ClassVar[str] = "Glasgow and Wootters, JSAIT 2021 (arXiv 2006.09638)"

    def __init__(
        self,
        edges: npt.NDArray[np.int64],
        vertices: int,
        *,
        transitive: bool = False,
        dtype: str = "float32",
    ) -> None:
        ends = np.asarray(edges, dtype=np.int64)
        if ends.ndim != 2 or ends.shape[1] != 2 or not len(ends):
            raise CodingError(f"edges have shape {ends.shape}; an array (workers, 2) is right")
        if not 0 <= int(ends.min()) <= int(ends.max()) < vertices:
            raise CodingError(f"edges name vertices that are not in [0, {vertices})")
        if np.any(ends[:, 0] == ends[:, 1]):
            raise CodingError("an edge joins a vertex with itself; its worker has one chunk only")
        self.graph = Graph(ends, vertices, transitive)
        degrees = self.graph.degrees
        if int(degrees.min()) == 0:
            raise CodingError(f"vertex {int(degrees.argmin())} has no edge: nobody has that chunk")
        columns = np.sort(ends, axis=1).ravel()
        pointers = np.arange(0, 2 * len(ends) + 1, 2)
        self.matrix = csr_array(
            (np.ones(2 * len(ends)), columns, pointers), shape=(len(ends), vertices)
        )
        self._halves = HalfEdges.of(ends, vertices)
        regular = int(degrees.min()) == int(degrees.max())
        self.degree: int | None = int(degrees[0]) if regular else None
        roundoff(dtype)
        self.dtype = dtype
        self.tolerance = self._proven_tolerance()

    @classmethod
    def of(cls, graph: Graph, *, dtype: str = "float32") -> GraphCode:
        """The code of a graph; `outlast.coding.codes.graph.families` has constructions."""
        return cls(graph.edges, graph.vertices, transitive=graph.transitive, dtype=dtype)

    @classmethod
    def random_regular(
        cls, *, workers: int, degree: int, seed: int = 0, dtype: str = "float32"
    ) -> GraphCode:
        """A code on a random regular graph with 2 workers / degree chunks.

        Raises:
            CodingError: Where no such graph exists.
        """
        if degree < 2 or 2 * workers % degree or 2 * workers // degree <= degree:
            raise CodingError(_no_regular_graph(workers, degree))
        return cls.of(families.random_regular(2 * workers // degree, degree, seed), dtype=dtype)

    def permuted(self, seed: int) -> GraphCode:
        """The same code with its chunks in another order.

        With a new seed every epoch, the small components that carry the error of persistent
        stragglers do not always fall on the same data.
        """
        order = np.random.default_rng(seed).permutation(self.chunks)
        edges, transitive = order[self.graph.edges], self.graph.transitive
        return GraphCode(edges, self.chunks, transitive=transitive, dtype=self.dtype)

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """See `outlast.coding.codes.graph.components.optimal_weights`; of nearly least norm."""
        return components.optimal_weights(self._halves, alive)

    def optimal_coefficients(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """(draws, chunks) coefficients of the optimal decoder; takes (draws, workers) masks."""
        return components.optimal_coefficients(self._halves, alive)

    def _optimal_errors(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Right up to rounding, unlike the general ones: from the components."""
        errors = np.empty(len(alive))
        size = max(_BATCH_ENTRIES // self.workers, 1)
        for start in range(0, len(alive), size):
            off = self.optimal_coefficients(alive[start : start + size]) - 1.0
            errors[start : start + size] = np.einsum("dc,dc->d", off, off)
        return errors

    @functools.cached_property
    def spectral_gap(self) -> float:
        """Degree minus the second eigenvalue of the graph.

        Raises:
            CodingError: For a graph that is not regular.
        """
        if self.degree is None:
            raise CodingError("the graph is not regular: the spectral gap says nothing about it")
        return self.degree - families.second_eigenvalue(self.graph)

    def worst_error(self, stragglers: int) -> Bound:
        """Bound over all sets of s stragglers, with p = s / workers, for regular families.

        The smaller of chunks (2d - gap) / (2d) p / (1 - p) (Glasgow and Wootters) and 2 s / d: a
        bipartite component has d (|L| - |R|) fewer surviving edge ends on one side, stragglers
        have 2 s ends, and (|L| - |R|)^2 / (|L| + |R|) <= |L| - |R|.
        """
        survivors = survivors_of(self.workers, stragglers)
        if stragglers <= self.tolerance:
            return Bound(0.0, "exact", self.source)
        if self.degree is None or not survivors:
            return Bound(float(self.chunks), "upper", "weights of zero")
        share = (2 * self.degree - self.spectral_gap) / (2 * self.degree)
        spectral = self.chunks * share * stragglers / survivors
        ends = 2.0 * stragglers / self.degree
        if spectral <= min(ends, self.chunks):
            return Bound(spectral, "upper", self.source)
        return Bound(min(ends, float(self.chunks)), "upper", "edge ends lost by each component")

    def expected_error(self, stragglers: int) -> Bound:
        """Mean number of chunks that lose all their workers: a lower bound, nearly reached.

        For random sets of s of m workers a chunk of degree d is lost with probability
        C(m - d, s - d) / C(m, s), about p^d; components with more vertices add what is left.
        """
        survivors_of(self.workers, stragglers)
        if stragglers <= self.tolerance:
            return Bound(0.0, "exact", self.source)
        degrees, counts = np.unique(self.graph.degrees, return_counts=True)
        lost = 0.0
        for degree, count in zip(degrees.tolist(), counts.tolist(), strict=True):
            shares = [(stragglers - i) / (self.workers - i) for i in range(degree)]
            lost += count * math.prod(shares) if stragglers >= degree else 0.0
        return Bound(lost, "lower", "chunks that lose all their workers")

    def mean_coefficient(self, probability: float, *, draws: int = 1000, seed: int = 0) -> float:
        """E[alpha] when each worker straggles independently with this probability, by simulation.

        It is the same for every chunk of a vertex-transitive graph: dividing the decoded gradient
        by it makes that unbiased. For other graphs it is the mean over chunks. As alpha is the
        projection of 1, sum alpha = chunks - error in every draw.

        Raises:
            CodingError: For a probability that is not in [0, 1), or no draws.
        """
        if not 0.0 <= probability < 1.0:
            raise CodingError(f"probability = {probability} is not in [0, 1)")
        if draws < 1:
            raise CodingError(f"draws = {draws} is below 1")
        generator = np.random.default_rng(seed)
        size = max(_BATCH_ENTRIES // self.workers, 1)
        total = 0.0
        for start in range(0, draws, size):
            shape = (min(size, draws - start), self.workers)
            total += float(self.errors(generator.random(shape) >= probability).sum())
        return 1.0 - total / (draws * self.chunks)

    def _proven_tolerance(self) -> int:
        """Stragglers that leave no bipartite component with sides of different size.

        In such a component stragglers take d (|L| - |R|) more edge ends from L than from R. In a
        bipartite graph each takes at most one from L, so there are at least d; in any graph each
        takes at most two. A d-edge-connected graph is in one piece after fewer than d stragglers,
        e_L of them inside L and e_R inside R, with 2 (e_L - e_R) = d (|L| - |R|). That needs d of
        them unless d is even and n odd; then 4 (e_L + e_R) >= (d + lambda_n) n, by the signless
        Laplacian D + A at the vector that is 1 on L and -1 on R.
        """
        everyone = np.ones((1, self.workers), dtype=bool)
        if self.degree is None:
            return 0 if float(self.errors(everyone)[0]) < 1e-9 else -1
        degree, vertices = self.degree, self.chunks
        if components.bipartite(self._halves):
            return degree - 1
        if not self._known_edge_connected():
            return (degree - 1) // 2
        if degree % 2 or vertices % 2 == 0:
            return degree - 1
        if vertices > _EXAMINED_VERTICES:
            return (degree - 1) // 2
        smallest = families.smallest_eigenvalue(self.graph)
        inside = math.ceil((degree + smallest) * vertices / 4.0 - 1e-6)
        return max((degree - 1) // 2, min(degree, inside) - 1)

    def _known_edge_connected(self) -> bool:
        """Whether every cut is known to have `degree` edges or more.

        Connected vertex-transitive graphs are such (Mader 1971); small graphs are examined.
        """
        if not self.graph.connected:
            return False
        if self.graph.transitive:
            return True
        return (
            self.chunks <= _EXAMINED_VERTICES
            and families.edge_connectivity(self.graph) == self.degree
        )


def _no_regular_graph(workers: int, degree: int) -> str:
    """Why a graph with so many edges and this degree does not exist, and which would."""
    fitting = [d for d in range(2, workers) if not 2 * workers % d and 2 * workers // d > d]
    near = sorted(sorted(fitting, key=lambda d: abs(d - degree))[:2])
    nearest = max(degree, 2)
    # Vertices times degree is twice the edges, and there are more vertices than the degree.
    step = nearest // math.gcd(nearest, 2)
    fewest = -(-max(workers, nearest * (nearest + 1) // 2) // step) * step
    options = [f"degree = {' or '.join(map(str, near))}"] if near else []
    if fewest != workers:
        options.append(f"workers = {fewest}" + (f" with degree = {nearest}" * (degree < 2)))
    return (
        f"workers = {workers} and degree = {degree} make no regular graph, which needs "
        f"2 workers / degree vertices, more than degree of them; take {', or '.join(options)}"
    )
