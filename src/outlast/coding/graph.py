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
from scipy.sparse.csgraph import breadth_first_order, connected_components, maximum_flow
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from outlast.coding.certificate import roundoff
from outlast.coding.code import Bound, GradientCode, survivors_of
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt


_DENSE_VERTICES = 400
_REPAIRS = 200
_BATCH_HALF_EDGES = 4_000_000
_SMOOTHING_STEPS = 12
_BATCH_ENTRIES = 2_000_000
_EXAMINED_VERTICES = 256


@dataclass(frozen=True, eq=False)
class Graph:
    """An undirected graph.

    Attributes:
        edges: (edges, 2) int64, the two ends of each edge.
        vertices: Number of vertices, counted from 0.
        transitive: Whether some symmetry of the graph takes any vertex to any other.
    """

    edges: npt.NDArray[np.int64]
    vertices: int
    transitive: bool = False

    @property
    def degrees(self) -> npt.NDArray[np.int64]:
        """(vertices,) edges at each vertex."""
        return np.bincount(self.edges.ravel(), minlength=self.vertices).astype(np.int64)

    @property
    def adjacency(self) -> csr_array:
        """(vertices, vertices) symmetric, float64; counts parallel edges."""
        ends = np.concatenate([self.edges, self.edges[:, ::-1]])
        shape = (self.vertices, self.vertices)
        return csr_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=shape)

    @property
    def connected(self) -> bool:
        """True if there is a path between any two vertices."""
        return bool(connected_components(self.adjacency, directed=False)[0] == 1)


def edge_connectivity(graph: Graph) -> int:
    """Fewest edges whose removal disconnects the graph: one maximum flow to each vertex."""
    capacity = graph.adjacency.astype(np.int32)
    flows = (maximum_flow(capacity, 0, other).flow_value for other in range(1, graph.vertices))
    return int(min(flows, default=0))


def extreme_eigenvalues(graph: Graph) -> tuple[float, float]:
    """The smallest and second largest eigenvalue of a connected graph's adjacency matrix.

    Minus and plus the largest degree, which bound them, where they are too close to others to be
    computed.
    """
    adjacency = graph.adjacency
    if graph.vertices <= _DENSE_VERTICES:
        values = np.linalg.eigvalsh(adjacency.toarray())
        return float(values[0]), float(values[-2] if len(values) > 1 else values[0])
    # A fixed start makes the Lanczos iteration, and so a code's stated bounds, reproducible.
    start = np.random.default_rng(0).standard_normal(graph.vertices)
    settings = {"v0": start, "tol": 1e-6, "maxiter": 500, "return_eigenvectors": False}
    try:
        top = eigsh(adjacency, k=2, which="LA", **settings)
        low = eigsh(adjacency, k=1, which="SA", **settings)
    except ArpackNoConvergence:
        # Eigenvalues as close as those of long cycles.
        return -float(graph.degrees.max()), float(graph.degrees.max())
    return float(low[0]), float(np.min(top))


def random_regular(vertices: int, degree: int, seed: int = 0) -> Graph:
    """A connected random regular graph without loops and parallel edges.

    The pairing model: every vertex has `degree` stubs, and stubs are matched at random. Loops and
    parallel edges then exchange ends with random other edges, so the distribution is close to
    uniform, not exactly so.

    Raises:
        CodingError: Where no such graph exists.
    """
    _refuse_degree(vertices, degree)
    generator = np.random.default_rng(seed)
    if degree == vertices - 1:
        return complete(vertices)
    if degree == 2:  # pairings seldom give one connected cycle; draw it directly.
        order = generator.permutation(vertices)
        return Graph(np.stack([order, np.roll(order, 1)], axis=1), vertices, transitive=True)
    if degree > (vertices - 1) // 2:
        # The complement of a sparse one: at more than half of all edges, pairings find no place.
        missing = vertices - 1 - degree
        rest: npt.NDArray[np.int64] | None = None
        while rest is None:
            rest = _simple_pairing(vertices, missing, generator)
        absent = np.ones((vertices, vertices), dtype=bool)
        absent[rest[:, 0], rest[:, 1]] = absent[rest[:, 1], rest[:, 0]] = False
        # A vertex with more than half of all neighbours leaves no room for a second component.
        return Graph(np.argwhere(np.triu(absent, 1)), vertices)
    while True:
        edges = _simple_pairing(vertices, degree, generator)
        if edges is not None and (graph := Graph(edges, vertices)).connected:
            return graph


def _refuse_degree(vertices: int, degree: int) -> None:
    if not 2 <= degree < vertices:
        raise CodingError(
            f"degree = {degree} is not possible with {vertices} vertices; "
            f"take 2 to {max(vertices - 1, 2)}"
        )
    if vertices * degree % 2:
        near = degree + 1 if degree + 1 < vertices else degree - 1
        raise CodingError(
            f"degree = {degree} and {vertices} vertices are both odd, so no regular graph has "
            f"them; take degree = {near} or {vertices + 1} vertices"
        )


def _simple_pairing(
    vertices: int, degree: int, generator: np.random.Generator
) -> npt.NDArray[np.int64] | None:
    """Edges of a simple regular graph; None where the repairs did not end."""
    stubs = generator.permutation(np.repeat(np.arange(vertices), degree))
    edges = np.sort(stubs.reshape(-1, 2), axis=1)
    for _ in range(_REPAIRS):
        bad = _bad_edges(edges, vertices)
        if not bad.any():
            return edges
        _switch(edges, bad, vertices, generator)
    return None


def _switch(
    edges: npt.NDArray[np.int64],
    bad: npt.NDArray[np.bool_],
    vertices: int,
    generator: np.random.Generator,
) -> None:
    """Replace bad edges uv and random other edges xy by ux and vy, where these are new; in place.

    Every exchange leaves one bad edge less.
    """
    wrong, right = np.flatnonzero(bad), np.flatnonzero(~bad)
    count = min(len(wrong), len(right))
    wrong, other = wrong[:count], generator.choice(right, size=count, replace=False)
    turned = generator.random(count) < 0.5
    partners = np.where(turned[:, None], edges[other][:, ::-1], edges[other])
    # (2, count, 2): the edges ux and the edges vy.
    offered = np.sort(np.stack([edges[wrong], partners], axis=2).transpose(1, 0, 2), axis=2)
    keys = offered[..., 0] * vertices + offered[..., 1]
    found, inverse, times = np.unique(keys, return_inverse=True, return_counts=True)
    known = np.isin(found, edges[:, 0] * vertices + edges[:, 1])
    new = ((times == 1) & ~known)[inverse.reshape(keys.shape)] & (offered[..., 0] < offered[..., 1])
    accepted = new.all(axis=0)
    edges[wrong[accepted]] = offered[0, accepted]
    edges[other[accepted]] = offered[1, accepted]


def _bad_edges(edges: npt.NDArray[np.int64], vertices: int) -> npt.NDArray[np.bool_]:
    """(edges,) loops, and all but the first of parallel edges; takes sorted ends."""
    keys = edges[:, 0] * vertices + edges[:, 1]
    bad = edges[:, 0] == edges[:, 1]
    first = np.unique(keys, return_index=True)[1]
    repeated = np.ones(len(edges), dtype=bool)
    repeated[first] = False
    return np.asarray(bad | repeated)


def complete(vertices: int) -> Graph:
    """Every two vertices are joined."""
    if vertices < 2:
        raise CodingError(f"vertices = {vertices} leave no edge; take at least 2")
    ends = np.stack(np.triu_indices(vertices, 1), axis=1)
    return Graph(ends.astype(np.int64), vertices, transitive=True)


class HalfEdges:
    """The edges of a graph from both of their ends, sorted by the vertex they start at.

    Args:
        edges: (edges, 2) the two ends.
        vertices: Number of vertices.

    Attributes:
        edge: (2 edges,) the edge of each half.
        neighbour: (2 edges,) the vertex it leads to.
        pointers: (vertices + 1,) where the halves of each vertex begin.
    """

    def __init__(self, edges: npt.NDArray[np.int64], vertices: int) -> None:
        self.edges, self.vertices = edges, vertices
        order = np.argsort(edges.ravel(), kind="stable")
        self.edge = order // 2
        self.neighbour = edges[:, ::-1].ravel()[order].astype(np.int32)
        self.pointers = _starts(np.bincount(edges.ravel(), minlength=vertices))

    def coefficients(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Coefficients alpha for many sets of survivors at once.

        From the components of the bipartite double cover, where vertex v is there twice and edge uv
        joins each copy of u with the other one of v. An odd cycle joins both copies and gives a
        component with as many first as second copies, so one formula serves all components. All
        sets of a batch make one block-diagonal graph.

        Args:
            alive: (draws, edges) masks.

        Returns:
            (draws, vertices) coefficients.
        """
        size = max(_BATCH_HALF_EDGES // len(self.edge), 1)
        if len(alive) > size:
            batches = (alive[start : start + size] for start in range(0, len(alive), size))
            return np.concatenate([self.coefficients(batch) for batch in batches])
        draws, vertices, count = len(alive), self.vertices, len(self.edge)
        kept = alive[:, self.edge]
        offsets = (2 * vertices * np.arange(draws) + vertices).astype(np.int32)
        targets = (offsets[:, None] + self.neighbour)[kept]
        # Edges in one direction are enough, so the rows of second copies are empty.
        begin = self.pointers[:-1] + count * np.arange(draws)[:, None]
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

    def weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Decoding weights for one set of survivors, in O(edges).

        A few conjugate-gradient steps towards the weights of least norm; what they leave is put
        right exactly on a spanning tree of each component, from its leaves to its root, and on one
        odd edge where there is one. The tree alone would do, but its alternating sums along
        branches make larger weights, which amplify rounding.

        Args:
            alive: (edges,) mask.

        Returns:
            (edges,) weights, 0 where not alive.
        """
        edges, (starts, ends) = self.edges, self.edges.T
        adjacency, labels, order, parents, signs = self._forest(alive)
        components = int(labels.max()) + 1
        odd_edges = np.flatnonzero(alive & (signs[starts] == signs[ends]))
        odd_of = np.full(components, -1)
        odd_of[labels[starts[odd_edges]]] = odd_edges
        excess = np.bincount(labels, signs, components) / np.bincount(labels, minlength=components)
        coefficients = np.where(odd_of[labels] >= 0, 1.0, 1.0 - signs * excess[labels])

        potential = _smooth_potential(adjacency, coefficients)
        weights = np.where(alive, potential[starts] + potential[ends], 0.0)
        missing = coefficients - self._sums_at_vertices(edges, weights)
        chosen = odd_of[odd_of >= 0]
        imbalance = np.bincount(labels, signs * missing, components)[odd_of >= 0]
        added = 0.5 * imbalance * signs[starts[chosen]]
        weights[chosen] += added
        missing -= self._sums_at_vertices(edges[chosen], added)
        # The weight of the edge to each vertex's parent, from the leaves on. Plain lists: one pass
        # in order, in which each step needs the one before.
        carried, above = [*missing.tolist(), 0.0], parents.tolist()
        for vertex in reversed(order.tolist()):
            carried[above[vertex]] -= carried[vertex]
        flows = np.array(carried[:-1])
        for parent, child in ((starts, ends), (ends, starts)):
            on_tree = np.flatnonzero(alive & (parents[child] == parent))
            # Of parallel edges between parent and child one carries the flow.
            named, first = np.unique(child[on_tree], return_index=True)
            weights[on_tree[first]] += flows[named]
        return weights

    def bipartite(self) -> bool:
        """True if no component of the whole graph has an odd cycle."""
        signs = self._forest(np.ones(len(self.edges), dtype=bool))[-1]
        return bool(np.all(signs[self.edges[:, 0]] != signs[self.edges[:, 1]]))

    def _forest(
        self, alive: npt.NDArray[np.bool_]
    ) -> tuple[
        csr_array,
        npt.NDArray[np.int32],
        npt.NDArray[np.int32],
        npt.NDArray[np.int64],
        npt.NDArray[np.float64],
    ]:
        """Breadth-first trees of all components of the surviving edges, below one more vertex.

        Returns:
            The adjacency matrix; the component of each vertex; the vertices from the roots
            outwards; the parent of each (for roots: `vertices`); +1 and -1 by depth in the tree.
        """
        kept, vertices = alive[self.edge], self.vertices
        neighbours, pointers = self.neighbour[kept], _starts(kept)[self.pointers]
        adjacency = csr_array(
            (np.ones(len(neighbours)), neighbours, pointers), shape=(vertices, vertices)
        )
        labels = connected_components(adjacency, directed=False)[1]
        roots = np.unique(labels, return_index=True)[1].astype(np.int32)
        indices = np.concatenate([neighbours, roots])
        hung = csr_array(
            (np.ones(len(indices)), indices, np.append(pointers, len(indices))),
            shape=(vertices + 1, vertices + 1),
        )
        order, parents = breadth_first_order(hung, vertices)
        signs, above = [-1.0] * (vertices + 1), parents.tolist()
        for vertex in order[1:].tolist():
            signs[vertex] = -signs[above[vertex]]
        above_each = np.asarray(parents[:vertices], dtype=np.int64)
        return adjacency, labels, order[1:], above_each, np.array(signs[:-1])

    def _sums_at_vertices(
        self, edges: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """(vertices,) sum of the weights of the edges at each vertex."""
        sums = np.bincount(edges[:, 0], weights, self.vertices)
        return np.asarray(sums + np.bincount(edges[:, 1], weights, self.vertices))


def _starts(counts: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """0 and the cumulative sums."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _smooth_potential(
    adjacency: csr_array, coefficients: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """(vertices,) y after conjugate gradients on (D + A) y = alpha; edge uv weighs y_u + y_v."""
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
    return potential


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
        self._halves = HalfEdges(ends, vertices)
        regular = int(degrees.min()) == int(degrees.max())
        self.degree: int | None = int(degrees[0]) if regular else None
        roundoff(dtype)
        self.dtype = dtype
        self.tolerance = self._proven_tolerance()

    @classmethod
    def of(cls, graph: Graph, *, dtype: str = "float32") -> GraphCode:
        """The code of a graph; `random_regular` makes one."""
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
        return cls.of(random_regular(2 * workers // degree, degree, seed), dtype=dtype)

    def optimal_weights(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """See `HalfEdges.weights`; of nearly least norm."""
        return self._halves.weights(alive)

    def optimal_coefficients(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """(draws, chunks) coefficients of the optimal decoder; takes (draws, workers) masks."""
        return self._halves.coefficients(alive)

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
        return self.degree - extreme_eigenvalues(self.graph)[1]

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
        if self._halves.bipartite():
            return degree - 1
        # Connected vertex-transitive graphs have no cut of fewer than `degree` edges (Mader 1971);
        # small graphs are examined.
        whole = self.graph.transitive or (
            vertices <= _EXAMINED_VERTICES and edge_connectivity(self.graph) == degree
        )
        if not (self.graph.connected and whole):
            return (degree - 1) // 2
        if degree % 2 or vertices % 2 == 0:
            return degree - 1
        if vertices > _EXAMINED_VERTICES:
            return (degree - 1) // 2
        smallest = extreme_eigenvalues(self.graph)[0]
        inside = math.ceil((degree + smallest) * vertices / 4.0 - 1e-6)
        return max((degree - 1) // 2, min(degree, inside) - 1)


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
        self.graph = random_regular(workers, degree, seed)
        self.degree = degree
        self.matrix = self.graph.adjacency / degree
        roundoff(dtype)
        self.dtype = dtype
        self.tolerance = 0

    @functools.cached_property
    def expansion(self) -> float:
        """max(|lambda_2|, |lambda_n|) of the graph; the smaller, the better the bound."""
        return max(abs(value) for value in extreme_eigenvalues(self.graph))

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


def one_step_error(workers: int, copies: int, survivors: int) -> float:
    """Mean error of the one-step decoder over random survivors: n (n - u)(n - d) / ((n - 1) u d).

    Holds for every 0/1 code in which each of n chunks has d copies, decoded with n / (u d) for each
    of u survivors (Charles, Papailiopoulos and Ellenberg 2017).

    Raises:
        CodingError: For copies or survivors that are not in [1, workers].
    """
    for name, value in (("copies", copies), ("survivors", survivors)):
        if not 1 <= value <= workers:
            raise CodingError(f"{name} = {value} is not in [1, {workers}]")
    if survivors == workers:
        return 0.0
    above = workers * (workers - survivors) * (workers - copies)
    return above / ((workers - 1) * survivors * copies)
