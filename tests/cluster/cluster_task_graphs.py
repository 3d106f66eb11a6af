"""Random graphs of tasks for property tests."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from outlast.cluster.tasks.graph import Edge, Graph, Machine, Place, Task

RESOURCES = ("pfs", "disk", "net")
_KINDS = ("train", "save", "drain", "evaluate", "stage-in", "stage-out", "prune")


@st.composite
def graphs(draw, most=9):
    nodes = draw(st.integers(1, 4))
    rates = {name: draw(st.floats(0.5, 4.0)) for name in RESOURCES}
    count = draw(st.integers(1, most))
    tasks, edges = [], []
    for number in range(count):
        via = tuple(draw(st.sets(st.sampled_from(RESOURCES), max_size=2)))
        tasks.append(
            Task(
                f"task {number}",
                draw(st.sampled_from(_KINDS)),
                seconds=draw(st.sampled_from((0.0, 0.5, 1.0, 3.25))),
                nodes=draw(st.integers(0, nodes)),
                size_bytes=draw(st.floats(0.1, 10.0)) if via else 0.0,
                via=via,
                cap_bytes_per_s=draw(st.sampled_from((math.inf, 0.7))),
                earliest_seconds=draw(st.sampled_from((0.0, 0.0, 2.0))),
                elsewhere=draw(st.sampled_from(((), (Place("spare", 1, 2.0),)))),
            )
        )
        for source in draw(st.sets(st.integers(0, number), max_size=2)) - {number}:
            size = draw(st.sampled_from((0.0, 0.0, 1.5)))
            edges.append(Edge(f"task {source}", f"task {number}", size, ("net",) if size else ()))
    return Graph(tasks, edges, Machine({"nodes": nodes, "spare": 1}, rates))
