"""Graph and expander codes; optimal decoding from components of the surviving edges.

In graph codes workers are edges, chunks are vertices (Glasgow and Wootters 2021). The coefficients
of the optimal decoder sum to 2 along every surviving edge. So they are all 1 in a component
with an odd cycle, and 1 -+ (|L| - |R|) / (|L| + |R|) on the sides L and R of one without (a
bipartite component).

Regular graphs for gradient codes: random, symmetric and Ramanujan ones, and their spectra.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components, maximum_flow
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from outlast.coding.certificate import roundoff
from outlast.coding.code import Bound, GradientCode, is_prime, survivors_of
from outlast.coding.codes.bernoulli import one_step_error
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


_DENSE_VERTICES = 400


_REPAIRS = 200


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


def second_eigenvalue(graph: Graph) -> float:
    """The second largest eigenvalue of the adjacency matrix (of a connected graph).

    An upper bound, the largest degree, where it is too close to others to be computed.
    """
    return float(_extreme_eigenvalues(graph)[1])


def smallest_eigenvalue(graph: Graph) -> float:
    """The smallest eigenvalue of the adjacency matrix."""
    return float(_extreme_eigenvalues(graph)[0])


def edge_connectivity(graph: Graph) -> int:
    """Fewest edges whose removal disconnects the graph: one maximum flow to each vertex."""
    capacity = graph.adjacency.astype(np.int32)
    flows = (maximum_flow(capacity, 0, other).flow_value for other in range(1, graph.vertices))
    return int(min(flows, default=0))


def expansion(graph: Graph) -> float:
    """max(|lambda_2|, |lambda_n|) of the adjacency matrix; the degree where G is bipartite."""
    smallest, second = _extreme_eigenvalues(graph)
    return max(abs(smallest), abs(second))


def _extreme_eigenvalues(graph: Graph) -> tuple[float, float]:
    """The smallest and the second largest eigenvalue."""
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
        # Eigenvalues as close as those of long cycles. All are within the largest degree.
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


def circulant(vertices: int, offsets: Sequence[int]) -> Graph:
    """Vertex v is joined with v +- each offset (mod vertices).

    Raises:
        CodingError: For offsets that are not different numbers in [1, vertices / 2].
    """
    steps = sorted(set(offsets))
    if len(steps) != len(offsets) or not steps or not 1 <= steps[0] <= steps[-1] <= vertices // 2:
        raise CodingError(
            f"offsets = {list(offsets)} are not different numbers in [1, {vertices // 2}]"
        )
    parts = []
    for step in steps:
        # An offset of half the circle reaches the same edge from both of its ends.
        starts = np.arange(vertices // 2 if 2 * step == vertices else vertices)
        parts.append(np.stack([starts, (starts + step) % vertices], axis=1))
    return Graph(np.concatenate(parts).astype(np.int64), vertices, transitive=True)


def complete(vertices: int) -> Graph:
    """Every two vertices are joined."""
    if vertices < 2:
        raise CodingError(f"vertices = {vertices} leave no edge; take at least 2")
    ends = np.stack(np.triu_indices(vertices, 1), axis=1)
    return Graph(ends.astype(np.int64), vertices, transitive=True)


def complete_bipartite(side: int) -> Graph:
    """Each of `side` vertices is joined with each of `side` others."""
    if side < 1:
        raise CodingError(f"side = {side} leaves no edge; take at least 1")
    left, right = np.divmod(np.arange(side * side), side)
    return Graph(np.stack([left, side + right], axis=1), 2 * side, transitive=True)


def hypercube(dimensions: int) -> Graph:
    """Vertices are binary words of this length, joined where they differ in one digit."""
    if not 1 <= dimensions <= 20:  # at most 10 million edges
        raise CodingError(f"dimensions = {dimensions} is not in [1, 20]")
    words = np.arange(2**dimensions)
    flips = [words ^ (1 << digit) for digit in range(dimensions)]
    ends = np.concatenate([np.stack([words, other], axis=1)[words < other] for other in flips])
    return Graph(ends, 2**dimensions, transitive=True)


def ramanujan(p: int, q: int) -> Graph:
    """The (p + 1)-regular Ramanujan graph X^{p,q} of Lubotzky, Phillips and Sarnak (1988).

    The Cayley graph of PGL(2, q) where p is no square modulo q (bipartite, q^3 - q vertices), else
    of PSL(2, q) (half as many), by the p + 1 integer quaternions of norm p with odd positive real
    part and even rest. All eigenvalues but +-(p + 1) are at most 2 sqrt(p). p = 5, q = 13 has 2184
    vertices and 6552 edges, as in Glasgow and Wootters (2021).

    Raises:
        CodingError: Unless p and q are different primes, both 1 mod 4, with q > 2 sqrt(p).
    """
    for name, value in (("p", p), ("q", q)):
        if value % 4 != 1 or not is_prime(value):
            near = next(x for x in itertools.count(max(value, 2)) if x % 4 == 1 and is_prime(x))
            raise CodingError(f"{name} = {value} is not a prime that is 1 mod 4; take {near}")
    if p == q or q * q <= 4 * p:
        raise CodingError(f"q = {q} is not a prime other than p = {p} and above 2 sqrt(p)")
    # (p + 1, 2, 2) matrices over F_q of the quaternions a + bi + cj + dk of norm p.
    root = next(x for x in range(1, q) if x * x % q == q - 1)
    reach = math.isqrt(p)
    odd = range(1, reach + 1, 2)
    even = range(-(reach // 2) * 2, reach + 1, 2)
    found = [
        [[a + root * b, c + root * d], [-c + root * d, a - root * b]]
        for a, b, c, d in itertools.product(odd, even, even, even)
        if a * a + b * b + c * c + d * d == p
    ]
    generators = _normalised(np.array(found, dtype=np.int64) % q, q)
    # (elements, 2, 2) invertible matrices over F_q up to factors, first non-zero entry 1.
    square_determinant = pow(p, (q - 1) // 2, q) == 1
    grid = np.indices((q, q, q)).reshape(3, -1).T
    first = np.column_stack([np.ones(len(grid), np.int64), grid])
    pairs = np.indices((q, q)).reshape(2, -1).T
    second = np.column_stack([np.zeros(len(pairs), np.int64), np.ones(len(pairs), np.int64), pairs])
    entries = np.concatenate([first, second])
    determinants = (entries[:, 0] * entries[:, 3] - entries[:, 1] * entries[:, 2]) % q
    squares = np.unique(np.arange(1, q) ** 2 % q)
    kept = np.isin(determinants, squares) if square_determinant else determinants != 0
    elements = entries[kept].reshape(-1, 2, 2).astype(np.int64)
    keys = _keys(elements, q)
    order = np.argsort(keys)
    parts = []
    for generator in generators:
        products = _normalised(np.matmul(elements, generator) % q, q)
        targets = order[np.searchsorted(keys[order], _keys(products, q))]
        starts = np.arange(len(elements))
        parts.append(np.stack([starts, targets], axis=1)[starts < targets])
    return Graph(np.concatenate(parts), len(elements), transitive=True)


def _normalised(matrices: npt.NDArray[np.int64], q: int) -> npt.NDArray[np.int64]:
    """Each matrix over F_q divided by its first non-zero entry."""
    inverses = np.array([0, *(pow(x, -1, q) for x in range(1, q))], dtype=np.int64)
    flat = matrices.reshape(-1, 4)
    leading = np.where(flat[:, 0] != 0, flat[:, 0], flat[:, 1])
    return (flat * inverses[leading][:, None] % q).reshape(-1, 2, 2)


def _keys(matrices: npt.NDArray[np.int64], q: int) -> npt.NDArray[np.int64]:
    """One number for each matrix over F_q."""
    return matrices.reshape(-1, 4) @ np.array([q**3, q**2, q, 1], dtype=np.int64)


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
        """The code of a graph; `outlast.coding.codes.graph` has constructions."""
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
        return self.degree - second_eigenvalue(self.graph)

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
        smallest = smallest_eigenvalue(self.graph)
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
        return self.chunks <= _EXAMINED_VERTICES and edge_connectivity(self.graph) == self.degree


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
        self._set(random_regular(workers, degree, seed), dtype)

    @classmethod
    def of(cls, graph: Graph, *, dtype: str = "float32") -> Expander:
        """The code of a given regular graph, e.g. `outlast.coding.codes.graph.ramanujan`.

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
        return expansion(self.graph)

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
