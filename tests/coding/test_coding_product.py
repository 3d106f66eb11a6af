import itertools
import time

import numpy as np
import pytest
from every_pattern import check_every_pattern, every_mask, least_error
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.codes.cyclic import CyclicMDS, CyclicRepetition
from outlast.coding.codes.design import SymmetricDesign
from outlast.coding.codes.graph import GraphCode, complete
from outlast.coding.codes.product import Kronecker, ProductCode
from outlast.coding.codes.repetition import FractionalRepetition
from outlast.errors import CodingError

PAIRS = {
    "repetition twice": (FractionalRepetition(4, 1), FractionalRepetition(2, 1)),
    "repetition and graph": (FractionalRepetition(2, 1), GraphCode.of(complete(3))),
    "cyclic and repetition": (CyclicMDS(4, 1), FractionalRepetition(2, 1)),
    "trivial": (FractionalRepetition(1, 0), FractionalRepetition(4, 1)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("kind", [Kronecker, ProductCode])
def test_every_pattern_has_the_least_error_and_keeps_the_bounds(name, kind):
    check_every_pattern(kind(*PAIRS[name]))


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (FractionalRepetition(4, 1), FractionalRepetition(4, 1)),
        (CyclicRepetition(3, 1), CyclicMDS(3, 2)),
        (CyclicMDS(4, 1), FractionalRepetition(4, 1)),
    ],
)
def test_the_tolerance_of_products_is_exact_and_tight(row, column):
    code = ProductCode(row, column)
    assert code.tolerance == (row.tolerance + 1) * (column.tolerance + 1) - 1
    for gone in itertools.combinations(range(code.workers), code.tolerance):
        alive = np.ones(code.workers, dtype=bool)
        alive[list(gone)] = False
        weights = code.peeled_weights(alive)
        assert weights is not None
        assert not weights[~alive].any()
        np.testing.assert_allclose(code.matrix.T @ weights, 1.0, atol=1e-9)
    block = np.ones((column.workers, row.workers), dtype=bool)
    block[: column.tolerance + 1, : row.tolerance + 1] = False
    assert code.error(block.ravel()) > 1e-3


def test_restored_rows_help_columns_and_the_other_way_round():
    # Each row and each column of a 3 x 3 grid of CyclicMDS(3, 1)-like codes misses one or two.
    code = ProductCode(CyclicRepetition(3, 1), CyclicRepetition(3, 1))
    grid = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 1]], dtype=bool)
    assert (~grid).sum() <= code.tolerance
    staircase = np.array([[1, 1, 0], [1, 1, 0], [0, 1, 1]], dtype=bool)
    for alive in (grid.ravel(), staircase.ravel()):
        weights = code.peeled_weights(alive)
        np.testing.assert_allclose(code.matrix.T @ weights, 1.0, atol=1e-9)
        assert not weights[~alive].any()


def test_peeling_decodes_all_that_can_be_decoded_in_small_repetition_grids():
    code = ProductCode(FractionalRepetition(4, 1), FractionalRepetition(2, 1))
    for alive in every_mask(code.workers):
        exact = least_error(code, alive) < 1e-9
        assert (code.peeled_weights(alive) is not None) == exact


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_errors_of_product_form_stragglers_factorise(data):
    first, second = GraphCode.of(complete(5)), SymmetricDesign(7)
    rows = np.array(data.draw(st.lists(st.booleans(), min_size=10, max_size=10)))
    columns = np.array(data.draw(st.lists(st.booleans(), min_size=7, max_size=7)))
    code = Kronecker(first, second)
    alive = np.outer(rows, columns).ravel()
    decoded = code.decode(alive)
    assert decoded.error == pytest.approx(least_error(code, alive), abs=1e-9)
    product = 35 - (5 - first.error(rows)) * (7 - second.error(columns))
    assert decoded.error == pytest.approx(product if rows.any() and columns.any() else 35)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.6))
def test_random_patterns_have_the_least_error(seed, probability):
    code = ProductCode(FractionalRepetition(6, 1), CyclicMDS(5, 2))
    alive = np.random.default_rng(seed).random(code.workers) >= probability
    assert code.decode(alive).error == pytest.approx(least_error(code, alive), abs=1e-6)


def test_ten_thousand_workers_are_built_and_decoded_within_a_second():
    begun = time.process_time()
    code = ProductCode(FractionalRepetition(100, 1), FractionalRepetition(100, 1))
    alive = np.random.default_rng(0).random(10_000) >= 0.03
    decoded = code.decode(alive)
    assert time.process_time() - begun < 1.0
    assert (~alive).sum() > code.tolerance
    assert decoded.error == 0.0


def test_products_of_binary_codes_are_binary():
    assert ProductCode(*PAIRS["repetition twice"]).binary
    assert not ProductCode(*PAIRS["cyclic and repetition"]).binary


def test_factors_must_have_the_same_messages_and_round_little_together():
    narrow, wide = CyclicMDS(4, 1), CyclicMDS(4, 1, dtype="float64")
    with pytest.raises(CodingError, match="'float32' and dtype = 'float64'"):
        Kronecker(narrow, wide)
    with pytest.raises(CodingError, match=r"above tolerance = 1e-08; take FractionalRepetition"):
        ProductCode(narrow, narrow, tolerance=1e-8)
    rough = CyclicMDS(16, 3, dtype="bfloat16", tolerance=float("inf"))
    assert rough.conditioning.rounding > 0.1
    with pytest.raises(CodingError, match="rounding in bfloat16"):
        Kronecker(rough, rough)


def test_errors_of_sets_that_peel_are_zero_to_the_last_digit():
    code = ProductCode(CyclicMDS(4, 1), FractionalRepetition(4, 1))
    generator = np.random.default_rng(2)
    alive = generator.random((200, code.workers)) > 0.25
    errors = code.errors(alive)
    peels = np.array([code.peeled_weights(each) is not None for each in alive])
    assert peels.any()
    assert not peels.all()
    assert not errors[peels].any()
    np.testing.assert_allclose(errors, [least_error(code, each) for each in alive], atol=1e-6)
