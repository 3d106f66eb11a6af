import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.codes.cyclic import CyclicRepetition
from outlast.coding.codes.tree import MASTER, CodedReduce
from outlast.errors import CodingError


def reduce(tree, gradients, alive):
    """The master's sum by messages alone, as a protocol would make it."""
    messages = {}
    for node in reversed(range(tree.workers + 1)):
        plan = tree.plan(node)
        message = plan.coefficients @ gradients[plan.points]
        delivered = [child for child in plan.children if alive[child] and child in messages]
        try:
            weights = plan.weights(delivered)
        except CodingError:
            continue
        for child, weight in zip(plan.children, weights, strict=True):
            if child in delivered:
                message = message + weight * messages[child]
        messages[node] = message
    return messages.get(MASTER)


def groups(tree):
    return [plan.children for plan in map(tree.plan, range(tree.workers + 1)) if plan.children]


@pytest.mark.parametrize(("children", "levels", "stragglers"), [(3, 2, 1), (2, 3, 1), (4, 1, 2)])
def test_exact_for_every_choice_of_stragglers_in_every_group(children, levels, stragglers):
    tree = CodedReduce(children, levels, stragglers)
    gradients = np.random.default_rng(0).standard_normal((tree.points, 2))
    choices = list(itertools.combinations(range(children), stragglers))
    for chosen in itertools.islice(itertools.product(choices, repeat=len(groups(tree))), 600):
        alive = np.ones(tree.workers + 1, dtype=bool)
        for group, gone in zip(groups(tree), chosen, strict=True):
            alive[[group[each] for each in gone]] = False
        assert np.allclose(reduce(tree, gradients, alive), gradients.sum(axis=0), atol=1e-6)
        assert tree.error(alive) < 1e-12


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_exact_for_random_trees_and_stragglers(data):
    children = data.draw(st.integers(1, 6))
    levels = data.draw(st.integers(1, 3 if children < 5 else 2))
    stragglers = data.draw(st.integers(0, min(children - 1, 2)))
    tree = CodedReduce(children, levels, stragglers)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    alive = np.ones(tree.workers + 1, dtype=bool)
    for group in groups(tree):
        alive[generator.choice(group, stragglers, replace=False)] = False
    gradients = generator.standard_normal((tree.points, 2))
    total = gradients.sum(axis=0)
    size = np.abs(gradients).sum()
    assert np.abs(reduce(tree, gradients, alive) - total).max() < 1e-6 * size


@pytest.mark.parametrize(
    ("children", "levels", "stragglers"), [(3, 2, 1), (4, 3, 1), (10, 2, 3), (5, 1, 2), (2, 4, 1)]
)
def test_every_worker_computes_the_share_of_the_paper(children, levels, stragglers):
    tree = CodedReduce(children, levels, stragglers)
    ratio = children / (stragglers + 1)
    share = 1.0 / sum(ratio**level for level in range(1, levels + 1))
    assert tree.share == pytest.approx(share)
    assert tree.workers == sum(children**level for level in range(1, levels + 1))
    for node in range(1, tree.workers + 1):
        assert len(set(tree.plan(node).points.tolist())) == tree.local_points
    assert len(tree.plan(MASTER).points) == 0


def test_a_tree_receives_little_at_the_master_and_computes_no_more_than_with_a_flat_code():
    tree = CodedReduce(children=10, levels=3, stragglers=1)
    flat = CodedReduce(children=1110, levels=1, stragglers=110)  # one in ten as well
    assert tree.messages_received == 9
    assert flat.messages_received == 1000
    assert tree.share < flat.share


def test_parents_and_children_agree():
    tree = CodedReduce(3, 3, 1)
    for node in range(1, tree.workers + 1):
        parent = tree.plan(node).parent
        assert node in tree.plan(parent).children
    leaves = [node for node in range(tree.workers + 1) if not tree.plan(node).children]
    assert len(leaves) == 27
    assert tree.plan(MASTER).parent is None


def test_beyond_the_tolerance_a_node_says_so_and_the_error_is_what_is_missing():
    tree = CodedReduce(4, 2, 1)
    alive = np.ones(tree.workers + 1, dtype=bool)
    alive[[1, 2]] = False  # both of the two that share the first half of the batch
    with pytest.raises(CodingError, match="any 3 would do"):
        tree.plan(MASTER).weights([3, 4])
    assert tree.error(alive) == pytest.approx(tree.points / 2)
    assert sorted(tree.coefficients(alive).round(9).tolist()) == [0.0] * (tree.points // 2) + [
        1.0
    ] * (tree.points // 2)
    # Not all pairs are that bad: fractional repetition survives one of each half.
    assert tree.plan(MASTER).weights([1, 3]).tolist() == [1.0, 0.0, 1.0, 0.0]


def test_a_subtree_below_a_straggler_is_not_needed():
    tree = CodedReduce(3, 3, 1)
    alive = np.ones(tree.workers + 1, dtype=bool)
    alive[1] = False
    pending = list(tree.plan(1).children)
    while pending:
        node = pending.pop()
        alive[node] = False
        pending += tree.plan(node).children
    assert alive.sum() == 1 + 2 * 13
    assert tree.error(alive) < 1e-12


def test_other_codes_and_more_points_do():
    code = CyclicRepetition(4, 2)
    tree = CodedReduce(4, 2, 2, code=code)
    more = CodedReduce(4, 2, 2, code=code, points=3 * tree.points)
    assert more.local_points == 3 * tree.local_points
    alive = np.ones(more.workers + 1, dtype=bool)
    alive[[1, 2, 13, 14]] = False
    assert more.error(alive) < 1e-12


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: CodedReduce(4, 2, 1, points=7), "12 or 24 can"),
        (lambda: CodedReduce(4, 2, 1, points=0), "12 or 24 can"),
        (lambda: CodedReduce(4, 2, 4), "3 would do"),
        (lambda: CodedReduce(4, 2, -1), "0 would do"),
        (lambda: CodedReduce(0, 2, 0), "at least 1"),
        (lambda: CodedReduce(4, 0, 0), "at least 1"),
        (lambda: CodedReduce(4, 2, 1).plan(21), "0 to 20"),
        (lambda: CodedReduce(4, 2, 1).plan(0).weights([9]), "no children"),
        (lambda: CodedReduce(4, 2, 1).error(np.ones(3, dtype=bool)), "20 workers"),
        (lambda: CodedReduce(4, 2, 1, code=CyclicRepetition(5, 1)), "for 5 workers"),
    ],
)
def test_wrong_settings_are_refused_with_what_would_do(make, hint):
    with pytest.raises(CodingError) as caught:
        make()
    assert hint in str(caught.value)
