"""Schedules of tasks, data and transfers: against the exact optimum, and how long they take.

    python benchmarks/cluster_tasks.py [--quick] [--json FILE]

Random graphs of training, saves, copies and evaluations in which nodes and bandwidth are about
equally busy. The optimum is over all orders and all rates (HiGHS); where it is not proved in time,
the solver is asked whether anything is more than 5 % shorter.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from pathlib import Path

from harness import Bar, arguments, at_most, publish

from outlast.cluster.tasks.graph import (
    Edge,
    Evaluation,
    Graph,
    Machine,
    Place,
    RunFigures,
    Task,
    TierFigures,
    run_graph,
)
from outlast.cluster.tasks.planner import plan

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

from exact_schedules import is_within, problems, shortest

PEER = "exact optimum (HiGHS), rates free"
_VIA = {"save": ("disk",), "drain": ("disk", "pfs"), "stage-in": ("pfs",)}


def random_graph(count: int, seed: int, nodes: int, *, after: float, moves: float = 0.25) -> Graph:
    """Tasks of which each waits for about `after` earlier ones, of the last 30 before it."""
    chance = random.Random(seed)
    specs = []
    for _ in range(count):
        kind = chance.choice(("train", "train", "save", "drain", "drain", "evaluate", "stage-in"))
        holds = chance.randint(1, nodes) if kind in ("train", "save", "evaluate") else 0
        work = kind in ("train", "evaluate")
        seconds = chance.uniform(1, 10) if work else chance.choice((0.0, 0.0, 1.0))
        via = _VIA.get(kind, ("pfs",) if kind == "evaluate" and chance.random() < 0.5 else ())
        size = chance.uniform(1, 10) if via else 0.0
        cap = chance.choice((math.inf, math.inf, chance.uniform(0.2, 1.0)))
        specs.append((kind, holds, seconds, via, size, cap))
    busy = sum(holds * seconds for _, holds, seconds, *_ in specs) / nodes or 1.0
    moved = sum(size for *_, via, size, _ in specs if "pfs" in via) or 1.0
    rate = moved / busy * chance.uniform(0.7, 1.5)
    tasks = []
    for number, (kind, holds, seconds, via, size, cap) in enumerate(specs):
        spare = Place("spare", 1, seconds * chance.uniform(1, 2))
        elsewhere = (spare,) if kind == "evaluate" and chance.random() < 0.6 else ()
        tasks.append(
            Task(
                f"{kind} {number}",
                kind,
                seconds=seconds,
                nodes=holds,
                size_bytes=size,
                via=via,
                cap_bytes_per_s=cap * rate,
                elsewhere=elsewhere,
            )
        )
    edges = []
    for target in range(1, count):
        window = range(max(0, target - 30), target)
        for source in window:
            if chance.random() < after / len(window):
                data = chance.random() < moves and len(edges) < count
                names = (tasks[source].name, tasks[target].name)
                size = chance.uniform(0.5, 4) if data else 0.0
                edges.append(Edge(*names, size, ("pfs",) if data else ()))
    machine = Machine({"nodes": nodes, "spare": 1}, {"pfs": rate, "disk": rate * 1.5})
    return Graph(tasks, edges, machine)


def long_run(segments: int) -> Graph:
    """A run with a save, copies to two tiers, pruning and evaluations in every segment."""
    return run_graph(
        RunFigures(
            steps=segments * 100,
            step_seconds=2.0,
            nodes=64,
            save_bytes=100e9,
            save_every_steps=100,
            save_seconds=1.0,
            tiers=(
                TierFigures("pfs", ("node-local disks", "shared file system"), keep=2),
                TierFigures("archive", ("shared file system",), every=5, cap_bytes_per_s=0.5e9),
            ),
            evaluation=Evaluation(5, 300.0, 4, 100e9),
            bytes_per_s={"shared file system": 2e9, "node-local disks": 20e9},
        )
    )


def bars(quick: bool) -> list[Bar]:
    return [*_small(quick), *_large(quick)]


def _small(quick: bool) -> list[Bar]:
    """Seeds from 1000 on: none of them was used to make the planner."""
    cases, limit = (8, 8.0) if quick else (30, 60.0)
    gaps: list[float] = []
    first: list[float] = []
    within = undecided = 0
    for case in range(cases):
        count = 6 + case % (2 if quick else 7)
        graph = random_graph(count, 1000 + case, 2 + case % 4, after=1.0)
        made = plan(graph)
        assert problems(made) == []
        best = shortest(graph, limit_seconds=limit, known_seconds=made.makespan_seconds)
        gap = made.makespan_seconds / best.bound_seconds - 1
        if best.proved:
            gaps.append(max(gap, 0.0))
            first.append(plan(graph, effort=0).makespan_seconds / best.seconds - 1)
            answer: bool | None = gap <= 0.05
        else:
            answer = gap <= 0.05 or is_within(graph, made.makespan_seconds, limit_seconds=limit)
        within += answer is True
        undecided += answer is None
        state = f"{max(gap, 0.0):+.2%}"
        if not best.proved:
            state = f"at most {gap:+.2%}; within 5 %: {'not known' if answer is None else answer}"
        print(f"  {count} tasks, {len(graph.activities)} activities: {state}", flush=True)
    words = f"{PEER}; {len(gaps)} of {cases} cases of 6 to 12 tasks with a proved optimum"
    plain = statistics.fmean(first)
    return [
        at_most("DAG: longest above the optimum", max(gaps), "share", 0.05, words),
        at_most("DAG: mean above the optimum", statistics.fmean(gaps), "share", 0.05, words),
        Bar(
            "DAG: cases shown to be within 5 % of the optimum",
            round(within / cases, 4),
            "share",
            "all that could be decided",
            within == cases - undecided,
            f"{PEER}; {undecided} of {cases} could not be decided in {limit:g} s + {limit:g} s",
        ),
        Bar(
            "DAG: mean above the optimum without search (plain HEFT with insertion)",
            round(plain, 4),
            "share",
            "<= 0.05",
            plain <= 0.05,
            words,
        ),
    ]


def _large(quick: bool) -> list[Bar]:
    graphs = {
        "random, 64 nodes": random_graph(10_000, 1, 64, after=1.0),
        "random, wide": random_graph(10_000, 2, 64, after=0.1),
        "random, deep": random_graph(10_000, 3, 8, after=2.0, moves=0.5),
        "a run of 2,900 segments": long_run(2_900),
    }
    found = []
    for name, graph in graphs.items():
        taken = []
        for _ in range(1 if quick else 3):
            begun = time.process_time()
            made = plan(graph)
            taken.append(time.process_time() - begun)
        seconds = statistics.median(taken)
        assert problems(made) == []
        words = f"{len(graph.tasks):,} tasks, {len(graph.activities):,} activities; "
        words += f"{made.gap:.1%} above the lower bound"
        found.append(at_most(f"DAG: plan of {name}", seconds, "CPU s", 2.0, words))
    return found


if __name__ == "__main__":
    options = arguments(str(__doc__).splitlines()[0])
    publish("cluster_tasks", bars(options.quick), options.json)
