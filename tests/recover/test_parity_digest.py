"""Digests tell states apart."""

import numpy as np
import pytest

from outlast.recover.parity_code import Layout, digest, hash_stripe, hash_stripes

DATA = np.random.default_rng(1).integers(0, 256, 50_000, np.uint8)


@pytest.mark.parametrize("place", [0, 4095, 16_384, 20_000, 49_200])
def test_a_byte_of_a_page_that_is_looked_at_makes_a_difference(place: int) -> None:
    other = DATA.copy()
    other[place] ^= 1
    assert hash_stripe(other) != hash_stripe(DATA)


def test_a_state_that_was_overwritten_in_part_is_another_one() -> None:
    for begin in range(0, 30_000, 5000):
        other = DATA.copy()
        other[begin : begin + 17_000] = 7
        assert hash_stripe(other) != hash_stripe(DATA)


def test_the_length_and_the_order_of_stripes_count() -> None:
    layout = Layout(3, 1, 64)
    hashes = hash_stripes(layout, DATA[:200])
    assert len(hashes) == 4
    assert digest(hashes, 200) == digest(hash_stripes(layout, DATA[:200].copy()), 200)
    assert digest(hashes, 200) != digest(hashes, 201)
    assert digest(hashes, 200) != digest(hashes[::-1], 200)
    assert hash_stripe(DATA[:0]) == hash_stripe(DATA[:0].copy())
