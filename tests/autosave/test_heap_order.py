"""Sets get their order back, also where they have lost members."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.autosave.heap.kinds import LARGEST_TABLE, MANY, fill, keeps_order, layout


@given(st.sets(st.integers(0, 2000), max_size=80), st.sets(st.integers(0, 2000), max_size=60))
def test_a_set_that_keeps_its_order_is_filled_in_that_order(members, lost):
    value = set(members)
    for each in lost:
        value.discard(each)
    made = set()
    assert fill(made, tuple(value), layout(value))
    for each in (value, made):
        # What comes and goes later finds the same table.
        each.update(range(3000, 3040))
        each.difference_update(range(0, 2000, 7))
    assert list(made) == list(value)
    assert layout(made) == layout(value)


def test_numbers_that_lie_in_a_table_too_large_for_them_keep_their_order():
    value = set(range(0, 100, 3))
    value -= set(range(0, 100, 2))
    assert list(set(value)) != list(value)
    assert keeps_order(value)


def test_texts_have_no_order_to_be_kept():
    assert keeps_order({str(each) for each in range(50)} - {"7", "8"})


@pytest.mark.parametrize("kind", [np.int64, lambda number: frozenset([number]), float])
def test_members_of_other_kinds_keep_their_order(kind):
    value = {kind(number) for number in range(3000)}
    for each in random.Random(1).sample(list(value), 2940):
        value.discard(each)
    made = set()
    assert fill(made, tuple(value), layout(value))
    assert list(made) == list(value)
    assert list(set(value)) != list(value)


def test_large_sets_keep_their_order_where_a_new_one_has_the_same():
    value = set(range(6 * MANY)) - set(range(0, 6 * MANY, 3))
    assert keeps_order(value)
    made = set()
    fill(made, tuple(value), layout(value))
    assert list(made) == list(value)


def test_another_order_of_a_large_set_is_told():
    chosen = random.Random(2)
    value = set(chosen.sample(range(10**7), 6 * MANY))
    for each in chosen.sample(sorted(value), 4 * MANY):
        value.discard(each)
    made = set()
    fill(made, tuple(value), layout(value))
    assert list(made) != list(value)
    assert not keeps_order(value)


def test_a_table_that_is_too_large_is_not_read():
    value = set(range(LARGEST_TABLE + 500))
    for each in range(LARGEST_TABLE - 500):
        value.discard(each)
    assert not layout(value).size
    assert not keeps_order(value)
    assert keeps_order(set(value))


def test_large_sets_that_have_only_grown_are_not_refused():
    chosen = random.Random(3)
    assert keeps_order({chosen.getrandbits(50) for _ in range(2 * MANY)})
