"""The field, the sums and the code: whatever is lost comes back bit for bit."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.recover import parity_code as module
from outlast.recover.parity_code import (
    Bytes,
    Layout,
    Stripe,
    combine,
    inverse,
    invert,
    multiply,
    power,
    products,
    rebuilding,
    same,
    stripes_of,
    weight,
)

BYTE = st.integers(0, 255)
NOT_ZERO = st.integers(1, 255)


def _by_bits(a: int, b: int) -> int:
    """The product of two polynomials modulo 0x11D, by the definition."""
    total = 0
    for bit in range(8):
        if b >> bit & 1:
            total ^= a << bit
    for bit in range(14, 7, -1):
        if total >> bit & 1:
            total ^= 0x11D << bit - 8
    return total


@given(BYTE, BYTE)
def test_products_are_those_of_polynomials(a: int, b: int) -> None:
    assert multiply(a, b) == _by_bits(a, b) == products(a)[b]


@given(BYTE, BYTE, BYTE)
def test_the_field_has_its_laws(a: int, b: int, c: int) -> None:
    assert multiply(a, b ^ c) == multiply(a, b) ^ multiply(a, c)
    assert multiply(a, multiply(b, c)) == multiply(multiply(a, b), c)
    assert multiply(a, 1) == a


def test_every_byte_but_zero_is_one_power_and_has_one_inverse() -> None:
    assert sorted(power(exponent) for exponent in range(255)) == list(range(1, 256))
    assert all(multiply(a, inverse(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        inverse(0)


@given(NOT_ZERO, NOT_ZERO)
def test_inverses_of_matrices(a: int, b: int) -> None:
    if a == b:
        return
    matrix = [[1, 1], [a, b]]
    other = invert(matrix)
    product = [
        [multiply(row[0], other[0][j]) ^ multiply(row[1], other[1][j]) for j in range(2)]
        for row in matrix
    ]
    assert product == [[1, 0], [0, 1]]


def _stripe(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("compiled", [True, False])
@given(st.lists(st.tuples(NOT_ZERO, st.integers(0, 20_000)), max_size=5), st.integers(0, 300))
def test_sums_of_stripes_of_unlike_lengths(
    compiled: bool, terms: list[tuple[int, int]], more: int
) -> None:
    size = max((length for _, length in terms), default=0) + more
    sources = [(constant, _stripe(k, length)) for k, (constant, length) in enumerate(terms)]
    out = np.full(size, 77, np.uint8)
    (combine if compiled else module.combine_in_numpy)(out, sources)
    expected = np.zeros(size, np.uint8)
    for constant, source in sources:
        expected[: source.size] ^= products(constant)[source]
    assert np.array_equal(out, expected)


def test_stripes_are_the_same_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        a = _stripe(1, 5000)
        b = a.copy()
        assert same(a, b)
        b[-1] ^= 1
        assert not same(a, b)
        assert not same(a, a[:-1])
        monkeypatch.setattr(module, "_library", lambda: None)


def _row(layout: Layout, row: int) -> dict[Stripe, Bytes]:
    """The stripes of a row, with data of unlike lengths; parity by its definition."""
    found: dict[Stripe, Bytes] = {}
    for stripe in stripes_of(layout, row):
        whole = np.zeros(layout.stripe_bytes, np.uint8)
        if stripe.parity is None:
            length = layout.stripe_bytes - 7 * stripe.member
            whole[:length] = _stripe(stripe.member, length)
        else:
            for other, data in list(found.items()):
                if other.parity is None:
                    whole ^= products(weight(stripe.parity, other.member))[data]
        found[stripe] = whole
    return found


@pytest.mark.parametrize(
    "layout", [Layout(2, 1, 128), Layout(4, 1, 128), Layout(3, 2, 128), Layout(6, 2, 128)]
)
def test_every_loss_of_a_row_is_made_good(layout: Layout) -> None:
    for row in range(layout.members):
        stripes = _row(layout, row)
        for count in range(1, layout.losses + 1):
            for lost in itertools.combinations(stripes, count):
                made = rebuilding(list(stripes), lost)
                assert set(made) == set(lost)
                for stripe, combination in made.items():
                    assert not set(combination) & set(lost)
                    out = np.empty(layout.stripe_bytes, np.uint8)
                    combine(out, [(c, stripes[each]) for each, c in combination.items()])
                    assert np.array_equal(out, stripes[stripe]), (row, lost, stripe)


@given(st.integers(3, 255), st.data())
def test_two_of_many_are_made_good(members: int, data: st.DataObject) -> None:
    layout = Layout(members, 2, 64)
    row = data.draw(st.integers(0, members - 1))
    stripes = stripes_of(layout, row)
    values = {each: data.draw(BYTE) for each in stripes[:3] if each.parity is None}
    values = {each: values.get(each, 1) for each in stripes if each.parity is None}
    for parity in stripes[-2:]:
        total = 0
        for each, value in values.items():
            if each.parity is None:
                total ^= multiply(weight(parity.parity or 0, each.member), value)
        values[parity] = total
    lost = data.draw(st.permutations(stripes))[:2]
    for stripe, combination in rebuilding(stripes, lost).items():
        total = 0
        for each, constant in combination.items():
            total ^= multiply(constant, values[each])
        assert total == values[stripe]
