"""Optimal decoding of graph codes from the connected components of the surviving edges.

Workers are edges, chunks are vertices (Glasgow and Wootters 2021). The coefficients of the optimal
decoder sum to 2 along every surviving edge. So they are all 1 in a component with an odd cycle,
and 1 -+ (|L| - |R|) / (|L| + |R|) on the sides L and R of one without (a bipartite component).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

if TYPE_CHECKING:
    import numpy.typing as npt

_BATCH_HALF_EDGES = 4_000_000
_SMOOTHING_STEPS = 12


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
    """Whether no component of the whole graph has an odd cycle."""
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
    order: npt.NDArray[np.int32],
    parents: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.float64],
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
