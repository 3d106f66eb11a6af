"""Regular graphs for gradient codes: random, symmetric and Ramanujan ones, and their spectra."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, maximum_flow
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from outlast.coding.code import is_prime
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
