"""What a graph refuses, and how its activities follow from tasks and edges."""

from __future__ import annotations

import math

import pytest

from outlast.cluster.tasks.graph import Edge, Graph, Machine, Place, Task
from outlast.errors import ClusterError

MACHINE = Machine({"nodes": 4, "spare": 1}, {"pfs": 1e9, "disk": 2e9})


def refused(tasks, edges=(), machine=MACHINE):
    with pytest.raises(ClusterError) as caught:
        Graph(tasks, edges, machine)
    words = str(caught.value)
    assert "\n" not in words
    return words


def test_a_circle_is_named():
    tasks = [Task(name, "train") for name in "abcd"]
    edges = [Edge("a", "b"), Edge("b", "c"), Edge("c", "b"), Edge("c", "d")]
    words = refused(tasks, edges)
    assert "b -> c -> b" in words or "c -> b -> c" in words
    assert "a" not in words.partition("circle")[2].replace("->", "")


def test_a_circle_through_data_names_tasks_only():
    tasks = [Task("a", "train"), Task("b", "train")]
    words = refused(tasks, [Edge("a", "b", 5.0, ("pfs",)), Edge("b", "a")])
    assert words.endswith(("a -> b -> a", "b -> a -> b"))


def test_a_task_that_waits_for_itself_is_refused():
    assert "a -> a" in refused([Task("a", "train")], [Edge("a", "a")])


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task("a", "train", seconds=-1.0), "seconds = -1"),
        (Task("a", "train", seconds=math.nan), "seconds = nan"),
        (Task("a", "drain", size_bytes=-5.0, via=("pfs",)), "size_bytes = -5"),
        (Task("a", "drain", size_bytes=5.0, via=("tape",)), '"tape"'),
        (Task("a", "drain", size_bytes=5.0), "via"),
        (Task("a", "drain", size_bytes=5.0, cap_bytes_per_s=0.0), "cap_bytes_per_s = 0"),
        (Task("a", "train", nodes=5), "which has 4"),
        (Task("a", "train", nodes=-1), "nodes = -1"),
        (Task("a", "train", nodes=1, group="gpus"), '"gpus"'),
        (Task("a", "train", earliest_seconds=-3.0), "earliest_seconds = -3"),
        (Task("a", "move"), 'kind "move"'),
        (Task("a", "fry"), 'kind "fry"'),
        (Task("a", "train", elsewhere=(Place("spare", 2, 1.0),)), "which has 1"),
    ],
)
def test_wrong_figures_of_a_task_are_named(task, said):
    words = refused([task])
    assert said in words
    assert '"a"' in words


def test_names_must_be_known_and_unique():
    assert 'the name "a"' in refused([Task("a", "train"), Task("a", "save")])
    assert '"b"' in refused([Task("a", "train")], [Edge("a", "b")])
    tasks = [Task("a", "train"), Task("b", "train")]
    assert "twice" in refused(tasks, [Edge("a", "b"), Edge("a", "b")])
    assert "size_bytes" in refused(tasks, [Edge("a", "b", -1.0, ("pfs",))])


def test_a_machine_without_bandwidth_or_nodes_is_refused():
    with pytest.raises(ClusterError, match="bytes_per_s"):
        Machine({"nodes": 1}, {"pfs": 0.0})
    with pytest.raises(ClusterError, match="nodes"):
        Machine({"nodes": 0}, {})


def test_edges_with_bytes_become_activities_between_their_tasks():
    graph = Graph(
        [Task("a", "train"), Task("b", "evaluate"), Task("c", "prune")],
        [Edge("a", "b", 6e9, ("disk", "pfs"), cap_bytes_per_s=3e9), Edge("a", "c")],
        MACHINE,
    )
    assert [each.name for each in graph.activities] == ["a", "b", "c", "a -> b"]
    assert graph.before == ((), (3,), (0,), (0,))
    assert graph.after == ((3, 2), (), (), (1,)) or graph.after == ((2, 3), (), (), (1,))
    # The slowest resource on its way limits it.
    assert graph.activities[3].flow_seconds == pytest.approx(6.0)
    place = {number: at for at, number in enumerate(graph.order)}
    assert place[0] < place[3] < place[1]
