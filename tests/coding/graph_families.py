"""Graphs with many symmetries, whose spectra and cuts are known."""

from __future__ import annotations

import numpy as np

from outlast.coding.graph import Graph


def circulant(vertices: int, offsets: list[int]) -> Graph:
    """Vertex v is joined with v +- each offset (mod vertices)."""
    parts = []
    for step in offsets:
        # An offset of half the circle reaches the same edge from both of its ends.
        starts = np.arange(vertices // 2 if 2 * step == vertices else vertices)
        parts.append(np.stack([starts, (starts + step) % vertices], axis=1))
    return Graph(np.concatenate(parts).astype(np.int64), vertices, transitive=True)


def complete_bipartite(side: int) -> Graph:
    """Each of `side` vertices is joined with each of `side` others."""
    left, right = np.divmod(np.arange(side * side), side)
    return Graph(np.stack([left, side + right], axis=1), 2 * side, transitive=True)


def hypercube(dimensions: int) -> Graph:
    """Vertices are binary words of this length, joined where they differ in one digit."""
    words = np.arange(2**dimensions)
    flips = [words ^ (1 << digit) for digit in range(dimensions)]
    ends = np.concatenate([np.stack([words, other], axis=1)[words < other] for other in flips])
    return Graph(ends, 2**dimensions, transitive=True)
