"""Graph and expander codes; optimal decoding from components of the surviving edges.

In graph codes workers are edges, chunks are vertices (Glasgow and Wootters 2021). The coefficients
of the optimal decoder sum to 2 along every surviving edge. So they are all 1 in a component
with an odd cycle, and 1 -+ (|L| - |R|) / (|L| + |R|) on the sides L and R of one without (a
bipartite component).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from outlast.coding.certificate import roundoff
from outlast.coding.code import Bound, GradientCode, survivors_of
from outlast.coding.codes import graph_families
from outlast.coding.codes.bernoulli import one_step_error
from outlast.coding.codes.graph_families import Graph
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt


_BATCH_HALF_EDGES = 4_000_000
_SMOOTHING_STEPS = 12
_BATCH_ENTRIES = 2_000_000
_EXAMINED_VERTICES = 256


@dataclass(frozen=True, eq=False)
class HalfEdges:
    """The edges of a graph from both of their ends, sorted by the vertex they start at.

    Attributes:
        edges: (edges, 2) the two ends.
        vertices: Number of vertices.
        edge: (2 edges,) the edge of each half.
        neighbour: (2 edges,) the vertex it leads to.
        pointers: (vertices + 1,) where the halves of each vertex begin.
    """

    edges: npt.NDArray[np.int64]
    vertices: int
    edge: npt.NDArray[np.int64]
    neighbour: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]

    @classmethod
    def of(cls, edges: npt.NDArray[np.int64], vertices: int) -> HalfEdges:
        """The halves of these edges."""
        order = np.argsort(edges.ravel(), kind="stable")
        neighbour = edges[:, ::-1].ravel()[order].astype(np.int32)
        degrees = np.bincount(edges.ravel(), minlength=vertices)
        return cls(edges, vertices, order // 2, neighbour, _starts(degrees))

    def surviving(
        self, alive: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Column indices and row pointers of the adjacency matrix of the edges in the mask."""
        kept = alive[self.edge]
        return self.neighbour[kept], _starts(kept)[self.pointers]


def optimal_coefficients(
    halves: HalfEdges, alive: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Coefficients alpha for many sets of survivors at once.

    From the components of the bipartite double cover, where vertex v is there twice and edge uv
    joins each copy of u with the other one of v. An odd cycle joins both copies and gives a
    component with as many first as second copies, so one formula serves all components. All sets
    of a batch make one block-diagonal graph.

    Args:
        halves: The graph.
        alive: (draws, edges) masks.

    Returns:
        (draws, vertices) coefficients.
    """
    coefficients = np.empty((len(alive), halves.vertices))
    size = max(_BATCH_HALF_EDGES // len(halves.edge), 1)
    for start in range(0, len(alive), size):
        batch = alive[start : start + size]
        coefficients[start : start + size] = _cover_coefficients(halves, batch)
    return coefficients


def _cover_coefficients(halves: HalfEdges, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    draws, vertices, count = len(alive), halves.vertices, len(halves.edge)
    kept = alive[:, halves.edge]
    offsets = (2 * vertices * np.arange(draws) + vertices).astype(np.int32)
    targets = (offsets[:, None] + halves.neighbour)[kept]
    # Edges in one direction are enough, so the rows of second copies are empty.
    begin = halves.pointers[:-1] + count * np.arange(draws)[:, None]
    end = np.repeat(count * np.arange(1, draws + 1)[:, None], vertices, axis=1)
    places = np.append(np.hstack([begin, end]).ravel(), draws * count)
    cover = csr_array(
        (np.ones(len(targets)), targets, _starts(kept.ravel())[places].astype(np.int32)),
        shape=(2 * vertices * draws, 2 * vertices * draws),
    )
    components, labels = connected_components(cover, directed=False)
    sides = np.tile(np.repeat([1.0, -1.0], vertices), draws)
    sizes = np.bincount(labels, minlength=components)
    excess = np.bincount(labels, sides, minlength=components) / sizes
    return np.asarray(1.0 - excess[labels.reshape(draws, 2 * vertices)[:, :vertices]])


def optimal_weights(halves: HalfEdges, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Decoding weights for one set of survivors, in O(edges).

    A few conjugate-gradient steps towards the weights of least norm; what they leave is put right
    exactly on a spanning tree of each component, from its leaves to its root, and on one odd edge
    where there is one. The tree alone would do, but its alternating sums along branches make
    larger weights, which amplify rounding.

    Args:
        halves: The graph.
        alive: (edges,) mask.

    Returns:
        (edges,) weights, 0 where not alive.
    """
    vertices, edges = halves.vertices, halves.edges
    neighbours, pointers = halves.surviving(alive)
    shape = (vertices, vertices)
    adjacency = csr_array((np.ones(len(neighbours)), neighbours, pointers), shape=shape)
    components, labels = connected_components(adjacency, directed=False)
    order, parents = _forest(neighbours, pointers, labels)
    signs = _alternating_signs(order, parents)

    odd_edges = np.flatnonzero(alive & (signs[edges[:, 0]] == signs[edges[:, 1]]))
    odd_of = np.full(components, -1)
    odd_of[labels[edges[odd_edges, 0]]] = odd_edges
    excess = np.bincount(labels, signs, components) / np.bincount(labels, minlength=components)
    coefficients = np.where(odd_of[labels] >= 0, 1.0, 1.0 - signs * excess[labels])

    weights = _smooth_weights(adjacency, edges, alive, coefficients)
    missing = coefficients - _sums_at_vertices(edges, weights, vertices)
    chosen = odd_of[odd_of >= 0]
    imbalance = np.bincount(labels, signs * missing, components)[odd_of >= 0]
    added = 0.5 * imbalance * signs[edges[chosen, 0]]
    weights[chosen] += added
    missing -= _sums_at_vertices(edges[chosen], added, vertices)
    flows = _peel(order, parents, missing)
    starts, ends = edges[:, 0], edges[:, 1]
    for parent, child in ((starts, ends), (ends, starts)):
        on_tree = np.flatnonzero(alive & (parents[child] == parent))
        # Of parallel edges between parent and child one carries the flow: each child is named once.
        named, first = np.unique(child[on_tree], return_index=True)
        weights[on_tree[first]] += flows[named]
    return weights


def bipartite(halves: HalfEdges) -> bool:
    """True if no component of the whole graph has an odd cycle."""
    neighbours, pointers = halves.surviving(np.ones(len(halves.edges), dtype=bool))
    shape = (halves.vertices, halves.vertices)
    adjacency = csr_array((np.ones(len(neighbours)), neighbours, pointers), shape=shape)
    labels = connected_components(adjacency, directed=False)[1]
    signs = _alternating_signs(*_forest(neighbours, pointers, labels))
    return bool(np.all(signs[halves.edges[:, 0]] != signs[halves.edges[:, 1]]))


def _starts(counts: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """0 and the cumulative sums."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _forest(
    neighbours: npt.NDArray[np.int32],
    pointers: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Breadth-first trees of all components, hung below one more vertex.

    Returns:
        The vertices from the roots outwards, and the parent of each (for roots: `vertices`).
    """
    vertices = len(labels)
    roots = np.unique(labels, return_index=True)[1].astype(np.int32)
    indices = np.concatenate([neighbours, roots])
    hung = csr_array(
        (np.ones(len(indices)), indices, np.append(pointers, len(indices))),
        shape=(vertices + 1, vertices + 1),
    )
    order, parents = breadth_first_order(hung, vertices)
    return order[1:], np.asarray(parents[:vertices], dtype=np.int64)


def _alternating_signs(
    order: npt.NDArray[np.int32], parents: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """(vertices,) +1 and -1 by depth in the tree."""
    signs = [-1.0] * (len(parents) + 1)
    above = parents.tolist()
    for vertex in order.tolist():
        signs[vertex] = -signs[above[vertex]]
    return np.array(signs[:-1])


def _peel(
    order: npt.NDArray[np.int32], parents: npt.NDArray[np.int64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """(vertices,) weight of the edge to each vertex's parent, so that vertices sum to `wanted`."""
    # Plain lists: one pass in order, each step needs the one before.
    flows = [*wanted.tolist(), 0.0]
    above = parents.tolist()
    for vertex in reversed(order.tolist()):
        flows[above[vertex]] -= flows[vertex]
    return np.array(flows[:-1])


def _smooth_weights(
    adjacency: csr_array,
    edges: npt.NDArray[np.int64],
    alive: npt.NDArray[np.bool_],
    coefficients: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Conjugate gradients on (D + A) y = alpha; the weight of edge uv is y_u + y_v."""
    degrees = np.diff(adjacency.indptr)
    potential = np.zeros(len(coefficients))
    residual = coefficients.copy()
    direction = residual
    square = float(residual @ residual)
    negligible = 1e-20 * square
    for _ in range(_SMOOTHING_STEPS):
        image = degrees * direction + adjacency @ direction
        curvature = float(direction @ image)
        # Nothing left to do, or only isolated vertices, which no edge reaches.
        if square <= negligible or curvature <= 0.0:
            break
        step = square / curvature
        potential += step * direction
        residual = residual - step * image
        before, square = square, float(residual @ residual)
        direction = residual + square / before * direction
    return np.where(alive, potential[edges[:, 0]] + potential[edges[:, 1]], 0.0)


def _sums_at_vertices(
    edges: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], vertices: int
) -> npt.NDArray[np.float64]:
    """(vertices,) sum of the weights of the edges at each vertex."""
    sums = np.bincount(edges[:, 0], weights, vertices)
    return np.asarray(sums + np.bincount(edges[:, 1], weights, vertices))


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
        """The code of a graph; `outlast.coding.codes.graph_families` has constructions."""
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
        return cls.of(
            graph_families.random_regular(2 * workers // degree, degree, seed), dtype=dtype
        )

    def permuted(self, seed: int) -> GraphCode:
        """The same code with its chunks in another order.

        With a new seed every epoch, the small components that carry the error of persistent
        stragglers do not always fall on the same data.
        """
        order = np.random.default_rng(seed).permutation(self.chunks)
        edges, transitive = order[self.graph.edges], self.graph.transitive
        return GraphCode(edges, self.chunks, transitive=transitive, dtype=self.dtype)

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """See `outlast.coding.codes.graph.optimal_weights`; of nearly least norm."""
        return optimal_weights(self._halves, alive)

    def optimal_coefficients(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """(draws, chunks) coefficients of the optimal decoder; takes (draws, workers) masks."""
        return optimal_coefficients(self._halves, alive)

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
        return self.degree - graph_families.second_eigenvalue(self.graph)

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
        if bipartite(self._halves):
            return degree - 1
        if not self._known_edge_connected():
            return (degree - 1) // 2
        if degree % 2 or vertices % 2 == 0:
            return degree - 1
        if vertices > _EXAMINED_VERTICES:
            return (degree - 1) // 2
        smallest = graph_families.smallest_eigenvalue(self.graph)
        inside = math.ceil((degree + smallest) * vertices / 4.0 - 1e-6)
        return max((degree - 1) // 2, min(degree, inside) - 1)

    def _known_edge_connected(self) -> bool:
        """True if every cut is known to have `degree` edges or more.

        Connected vertex-transitive graphs are such (Mader 1971); small graphs are examined.
        """
        if not self.graph.connected:
            return False
        if self.graph.transitive:
            return True
        return (
            self.chunks <= _EXAMINED_VERTICES
            and graph_families.edge_connectivity(self.graph) == self.degree
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
        self._set(graph_families.random_regular(workers, degree, seed), dtype)

    @classmethod
    def of(cls, graph: Graph, *, dtype: str = "float32") -> Expander:
        """The code of a given regular graph, e.g. `outlast.coding.codes.graph_families.ramanujan`.

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
        return graph_families.expansion(self.graph)

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
