import math
import re
import time

import numpy as np
import pytest
from every_pattern import check_every_pattern, every_mask, least_error
from graph_families import circulant, complete_bipartite, hypercube
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.code import decode
from outlast.coding.graph import (
    Graph,
    GraphCode,
    complete,
    edge_connectivity,
    extreme_eigenvalues,
    random_regular,
)
from outlast.errors import CodingError

TWO_TRIANGLES_AND_A_BRIDGE = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3)]
SMALL = {
    "two vertices": complete(2),
    "odd cycle": circulant(7, [1]),
    "even cycle": circulant(8, [1]),
    "complete on four": complete(4),
    "complete on five": complete(5),
    "complete bipartite": complete_bipartite(3),
    "prism": random_regular(6, 3, seed=3),
    "parallel edges": Graph(np.array([[0, 1], [0, 1], [1, 2], [2, 0], [2, 0]]), 3),
    "not regular": Graph(np.array(TWO_TRIANGLES_AND_A_BRIDGE), 6),
    "star": Graph(np.array([[0, 1], [0, 2], [0, 3]]), 4),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_has_the_least_error_and_keeps_the_bounds(name):
    check_every_pattern(GraphCode.of(SMALL[name]))


@pytest.mark.parametrize(
    "name", ["even cycle", "complete on four", "complete on five", "complete bipartite", "prism"]
)
def test_the_tolerance_of_small_graphs_is_tight(name):
    code = GraphCode.of(SMALL[name])
    masks = every_mask(code.workers)
    errors = code.errors(masks)
    assert errors[code.workers - masks.sum(axis=1) == code.tolerance + 1].max() > 0.1
    assert code.tolerance == code.degree - 1


def test_a_bridge_lowers_the_tolerance():
    # Two copies of K4 with one edge divided, the new vertices joined: cubic, with a bridge.
    half = [(0, 1), (0, 2), (1, 3), (2, 3), (1, 2), (0, 4), (3, 4)]
    edges = half + [(a + 5, b + 5) for a, b in half] + [(4, 9)]
    code = GraphCode(np.array(edges), 10)
    assert code.degree == 3
    assert code.tolerance == 1


def test_the_error_is_the_imbalance_of_bipartite_components():
    path = GraphCode(np.array([[0, 1], [1, 2], [2, 3], [3, 4], [4, 0]]), 5)
    decoded = path.decode([0, 1, 2, 3])  # the path 0-1-2-3-4: sides of 3 and 2
    assert decoded.error == pytest.approx((3 - 2) ** 2 / 5)
    np.testing.assert_allclose(decoded.coefficients, [0.8, 1.2, 0.8, 1.2, 0.8])
    lonely = path.decode([0])  # 0-1 is balanced, three vertices are alone
    np.testing.assert_allclose(lonely.coefficients, [1, 1, 0, 0, 0], atol=1e-12)


@st.composite
def regular_codes(draw):
    degree = draw(st.integers(2, 6))
    vertices = draw(st.integers(degree + 1, 40))
    vertices += vertices * degree % 2
    return GraphCode.of(random_regular(vertices, degree, draw(st.integers(0, 1000))))


@settings(max_examples=50, deadline=None)
@given(regular_codes(), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_decoding_is_optimal_for_random_graphs_and_stragglers(code, probability, seed):
    masks = np.random.default_rng(seed).random((5, code.workers)) >= probability
    errors = code.errors(masks)
    for alive, error in zip(masks, errors, strict=True):
        weights, single = decode(code, alive)
        assert single == pytest.approx(least_error(code, alive), abs=1e-9)
        assert error == pytest.approx(single, abs=1e-9)
        np.testing.assert_allclose(
            code.matrix.T @ weights, code.optimal_coefficients(alive[None])[0], atol=1e-9
        )
        bound = code.worst_error(int((~alive).sum()))
        assert single <= bound.value + 1e-9


def test_ten_thousand_workers_are_built_and_decoded_within_a_second():
    begun = time.process_time()
    code = GraphCode.random_regular(workers=9999, degree=3)
    alive = np.random.default_rng(0).random(9999) >= 0.2
    decoded = code.decode(alive)
    assert time.process_time() - begun < 1.0
    assert decoded.certificate.error == pytest.approx(code.errors(alive[None])[0])
    assert decoded.certificate.error / code.chunks == pytest.approx(0.2**3, rel=0.5)


def test_weights_do_not_amplify_rounding():
    code = GraphCode.random_regular(workers=9999, degree=3)
    alive = np.random.default_rng(0).random(9999) >= 0.1
    # Every coefficient is about 1 and a message counts for two of them: k / 2 is the least.
    assert code.decode(alive).certificate.amplification < 0.6 * code.chunks


def test_long_paths_are_decoded_exactly_where_gradient_steps_do_not_reach():
    code = GraphCode.of(circulant(4001, [1]))
    decoded = code.decode(np.arange(4001) != 17)
    assert decoded.certificate.error == pytest.approx(1 / 4001)
    full = code.decode(np.ones(4001, dtype=bool))
    assert full.error == 0.0


def test_lost_chunks_are_a_lower_bound_that_random_stragglers_nearly_reach():
    code = GraphCode.random_regular(workers=1500, degree=3, seed=1)
    generator = np.random.default_rng(0)
    masks = np.ones((400, 1500), dtype=bool)
    for each in masks:
        each[generator.choice(1500, 150, replace=False)] = False
    mean = code.errors(masks).mean()
    bound = code.expected_error(150)
    assert bound.kind == "lower"
    shares = math.comb(1497, 147) / math.comb(1500, 150)
    assert bound.value == pytest.approx(code.chunks * shares)
    assert bound.value * 0.9 < mean < bound.value * 1.3


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 12), st.integers(0, 60), st.integers(0, 1000))
def test_random_regular_graphs_are_simple_regular_and_connected(degree, more, seed):
    vertices = degree + 1 + more
    vertices += vertices * degree % 2
    graph = random_regular(vertices, degree, seed)
    assert set(graph.degrees) == {degree}
    assert graph.connected
    assert graph.adjacency.max() == 1
    assert graph.adjacency.diagonal().max() == 0


@pytest.mark.parametrize(
    ("graph", "second", "smallest"),
    [
        (complete(6), -1, -1),
        (hypercube(4), 2, -4),
        (complete_bipartite(4), 0, -4),
        (circulant(500, [1]), 2 * math.cos(2 * math.pi / 500), -2),
        (circulant(6, [1, 3]), 0, -3),
    ],
)
def test_spectra_are_those_of_textbooks(graph, second, smallest):
    assert extreme_eigenvalues(graph) == pytest.approx((smallest, second), abs=1e-6)


def test_edge_connectivity_finds_the_bridge():
    graph = Graph(np.array(TWO_TRIANGLES_AND_A_BRIDGE), 6)
    assert edge_connectivity(graph) == 1
    assert edge_connectivity(complete(5)) == 4


REFUSED = {
    "workers = 10 and degree = 3": lambda: GraphCode.random_regular(workers=10, degree=3),
    "take degree = 2 or 4, or workers = 12": lambda: GraphCode.random_regular(workers=10, degree=3),
    "workers = 6": lambda: GraphCode.random_regular(workers=5, degree=3),
    "degree = 1": lambda: GraphCode.random_regular(workers=9, degree=1),
    "both odd": lambda: random_regular(7, 3),
    "take 2 to 3": lambda: random_regular(4, 4),
    "has no edge": lambda: GraphCode(np.array([[0, 1]]), 3),
    "with itself": lambda: GraphCode(np.array([[0, 0]]), 1),
    "not in": lambda: GraphCode(np.array([[0, 4]]), 3),
    "shape": lambda: GraphCode(np.array([0, 4]), 5),
    "stragglers = 25": lambda: GraphCode.random_regular(workers=24, degree=3).worst_error(25),
    "not regular": lambda: GraphCode.of(SMALL["star"]).spectral_gap,
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_built_is_refused_with_the_reason(words):
    with pytest.raises(CodingError, match=words):
        REFUSED[words]()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(0, 12))
def test_advice_for_refused_degrees_can_be_followed(workers, degree):
    try:
        GraphCode.random_regular(workers=workers, degree=degree)
    except CodingError as error:
        degrees, _, fewest = str(error).split("take ")[-1].partition("workers = ")
        advised = [int(word) for word in re.findall(r"\d+", degrees)]
        assert advised or fewest
        for other in advised:
            GraphCode.random_regular(workers=workers, degree=other)
        if fewest:
            GraphCode.random_regular(workers=int(fewest.split()[0]), degree=max(degree, 2))
