import math

import numpy as np
import pytest

from outlast.coding.code import FractionalRepetition, conditioning, straggler_patterns
from outlast.coding.cyclic import CyclicMDS
from outlast.errors import CodingError


def test_few_patterns_are_all_examined():
    sets, every = straggler_patterns(6, 2, most=15)
    assert every
    assert {tuple(each) for each in sets} == {(i, j) for i in range(6) for j in range(i + 1, 6)}


def test_a_sample_has_different_stragglers_and_begins_with_neighbours():
    sets, every = straggler_patterns(20, 4, most=100)
    assert not every
    assert len(sets) == 100
    assert all(len(set(each.tolist())) == 4 for each in sets)
    assert sets[18].tolist() == [18, 19, 0, 1]


def test_a_sample_of_a_large_code_is_not_of_neighbours_only():
    sets, _ = straggler_patterns(1000, 4, most=300)
    apart = [each for each in sets if np.ptp(np.diff(np.sort(each)))]
    assert len(sets) == 300
    assert len(apart) >= 150


def test_a_repetition_code_amplifies_nothing():
    found = conditioning(FractionalRepetition(12, 2))
    assert found.condition == pytest.approx(math.sqrt(3))
    assert found.amplification == 4.0
    assert found.largest_weight == 1.0
    assert found.rounding == pytest.approx(2.0**-24 * 4 * math.sqrt(3 / 12))


def test_the_report_is_the_worst_over_all_patterns():
    code = CyclicMDS(8, 3)
    found = conditioning(code)
    assert found.exhaustive
    assert found.patterns == math.comb(8, 3)
    dense = code.matrix.toarray()
    conditions, amplifications, largest = [], [], []
    for gone in straggler_patterns(8, 3, 100)[0]:
        rows = np.delete(dense, gone, axis=0)
        weights = np.linalg.lstsq(rows.T, np.ones(8), rcond=None)[0]
        conditions.append(np.linalg.cond(rows))
        amplifications.append(np.abs(weights).sum())
        largest.append(np.abs(weights).max())
    assert found.condition == pytest.approx(max(conditions))
    assert found.amplification == pytest.approx(max(amplifications))
    assert found.largest_weight == pytest.approx(max(largest))


def test_all_stragglers_gone_is_no_error():
    found = conditioning(FractionalRepetition(4, 1), stragglers=4)
    assert found.amplification == found.rounding == 0.0


def test_the_condition_number_of_a_large_code_is_left_out():
    found = conditioning(FractionalRepetition(2000, 3), patterns=5)
    assert math.isnan(found.condition)
    assert found.amplification == 500.0


def test_the_refusal_gives_the_figures_and_the_advice():
    code = CyclicMDS(12, 3)
    with pytest.raises(CodingError) as refused:
        code.accept(1e-9, "take another")
    figure = conditioning(code)
    assert str(refused.value) == (
        f"cyclic MDS for 12 workers and 3 stragglers multiplies messages by weights that sum to "
        f"{figure.amplification:.3g}; in float32 (unit roundoff 6e-08) rounding could be "
        f"{figure.rounding:.2g} of the gradient, above tolerance = 1e-09; take another"
    )


def test_a_longer_sample_continues_a_shorter_one():
    short, long = (straggler_patterns(30, 4, most)[0] for most in (60, 200))
    assert all(np.array_equal(*pair) for pair in zip(short, long, strict=False))


def test_codes_within_the_tolerance_are_returned_with_their_report():
    code = CyclicMDS(12, 3)
    assert code.accept(1e-2, "none") == code.conditioning
