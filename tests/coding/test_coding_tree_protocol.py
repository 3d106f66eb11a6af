"""CodedReduce between processes: exact with stragglers in every group, at every level."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from server_ranks import (
    KILLED,
    chunk_loss,
    die,
    full_gradient,
    mortal,
    network,
    numbers,
    start,
    stop,
    tried,
)

from outlast.coding.codes.tree import CodedReduce
from outlast.coding.protocol.tree import TreeRoot
from outlast.coding.protocol.tree_node import TreeNode

pytestmark = pytest.mark.distributed


def climb(tree, steps, slow=lambda rank, step, position: None, pause=0.0, deadline=15.0):
    """Train; returns at the root outcomes, relative errors and parameters, else steps sent."""
    rank = start()
    model = network()
    if rank:
        node = TreeNode(model, tree, patience_seconds=20.0)
        sent = []
        for step in node.steps():
            for position, point in enumerate(node.points):
                slow(rank, step, position)
                chunk_loss(model, step, point).backward()
                if not node.add(point):
                    break
            if node.wanted and node.send(step):
                sent.append(step)
        return sent
    root = TreeRoot(model, tree, deadline_seconds=deadline)
    outcomes, errors = [], []
    for step in range(steps):
        expected = full_gradient(model, step, tree.points)
        root.publish(step)
        _, outcome = root.collect(step)
        found = numbers(each.grad for each in model.parameters())
        errors.append(float(np.linalg.norm(found - expected) / np.linalg.norm(expected)))
        outcomes.append(outcome)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.001 * parameter.grad
        time.sleep(pause)
    root.close()
    return outcomes, errors


@pytest.mark.parametrize(
    "shape", [(1, 1, 0), (3, 1, 0), (3, 1, 2), (4, 1, 1), (2, 2, 0), (2, 2, 1)], ids=str
)
def test_the_root_has_the_gradient_of_all_points(ranks, shape):
    tree = CodedReduce(*shape)
    outcomes, errors = ranks(tree.workers + 1)(climb, tree, 3)[0]
    assert max(errors) < 2e-5
    for outcome in outcomes:
        assert outcome.gone == ()
        assert sorted(outcome.delivered + outcome.stragglers) == list(tree.plan(0).children)


def test_nobody_waits_for_one_straggler_in_each_group(ranks):
    # Nodes 1 and 2 below the root, 3 and 4 below 1, 5 and 6 below 2.
    tree = CodedReduce(2, 2, 1)
    slow = lambda rank, step, position: time.sleep(1.5 if rank in {1, 5} else 0.0)  # noqa: E731
    outcomes, errors = ranks(7)(lambda: climb(tree, 3, slow))[0]
    assert max(errors) < 2e-5
    assert all(outcome.delivered == (2,) for outcome in outcomes)
    assert max(outcome.seconds for outcome in outcomes) < 1.3


def test_a_killed_inner_node_leaves_its_children_in_the_training(ranks):
    tree = CodedReduce(2, 2, 1)

    def slow(rank, step, position):
        if rank == 1 and step == 1:
            die()

    def work():
        return mortal(lambda: climb(tree, 5, slow, pause=0.3))

    results = ranks(7)(work)
    outcomes, errors = results[0]
    assert results[1] == KILLED
    assert max(errors) < 2e-5
    assert outcomes[-1].gone == (1,)
    assert outcomes[-1].delivered == (2,)
    # The children of the dead node still follow the root's steps.
    assert results[3][-1] == results[4][-1] == 4


def test_a_stopped_node_comes_back(ranks):
    tree = CodedReduce(2, 2, 1)

    def slow(rank, step, position):
        if rank == 2 and step == 1 and position == 0:
            stop(1.5)

    outcomes, errors = (results := ranks(7)(lambda: climb(tree, 12, slow, pause=0.25)))[0]
    assert max(errors) < 2e-5
    assert max(outcome.seconds for outcome in outcomes) < 2.0
    assert sum(2 not in outcome.delivered for outcome in outcomes) >= 5
    assert results[2][-1] == 11
    assert 3 not in results[2]


def test_more_stragglers_than_the_tree_survives_are_reported(ranks):
    tree = CodedReduce(2, 2, 1)

    def slow(rank, step, position):
        if rank in {1, 2} and step == 1:
            die()

    begun = time.monotonic()
    results = ranks(7)(lambda: mortal(lambda: tried(climb, tree, 3, slow)))
    name, text, points = results[0]
    assert name == "LostChunksError"
    assert "nodes [1, 2]" in text
    assert points == tuple(range(tree.points))
    assert "rank 0 is gone" in results[3][1]
    assert time.monotonic() - begun < 8.0


def test_the_deadline_ends_the_wait_for_slow_children(ranks):
    tree = CodedReduce(2, 1, 0)
    slow = lambda rank, step, position: time.sleep(1.0 if rank == 2 else 0.0)  # noqa: E731
    result = ranks(3)(lambda: mortal(lambda: tried(climb, tree, 1, slow, deadline=0.5)))[0]
    assert result[0] == "LostChunksError"
    assert "waited 0.5" in result[1]
    assert "nodes [2]" in result[1]


def test_a_job_of_another_size_is_refused(ranks):
    def work():
        start()
        return tried(lambda: TreeRoot(network(), CodedReduce(2, 2, 1), deadline_seconds=1.0))

    name, text, _ = ranks(2)(work)[0]
    assert name == "CodingError"
    assert "6 nodes" in text
    assert "2 ranks instead of 7" in text
