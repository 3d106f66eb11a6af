"""Sets get their order back, also where they have lost members."""

from hypothesis import given
from hypothesis import strategies as st

from outlast.autosave.heap.order import fill, keeps_order, layout


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
