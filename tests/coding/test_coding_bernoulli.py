import time

import numpy as np
import pytest
from every_pattern import check_every_pattern, every_mask, least_error
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.codes.bernoulli import (
    BernoulliCode,
    StochasticBlock,
    StochasticCode,
    bernoulli_one_step_error,
)
from outlast.coding.codes.repetition import FractionalRepetition
from outlast.errors import CodingError

SMALL = {
    "Bernoulli": BernoulliCode(8, 2.5, seed=3),
    "full": BernoulliCode(6, 6),
    "blocks": StochasticBlock(9, 2, blocks=3, inside=0.8, seed=1),
    "uneven blocks": StochasticBlock(8, 2, blocks=3, inside=0.6, seed=2),
    "stochastic": StochasticCode(8, 3, 0.2),
    "stochastic, unequal": StochasticCode(7, [1, 2, 3, 7, 4], 0.1),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_has_the_least_error_and_keeps_the_bounds(name):
    check_every_pattern(SMALL[name])


@pytest.mark.parametrize("name", ["Bernoulli", "blocks", "uneven blocks"])
def test_the_mean_of_the_fixed_decoder_is_the_stated_one(name):
    code = SMALL[name]
    masks = every_mask(code.workers)
    errors = code.errors(masks, "fixed")
    gone = code.workers - masks.sum(axis=1)
    for stragglers in range(code.workers):
        found = errors[gone == stragglers].mean()
        bound = code.expected_error(stragglers)
        # Weights of zero are open to the optimal decoder, and better than these from there on.
        assert bound.value == pytest.approx(min(found, code.chunks))
        assert (bound.source == "weights of zero") == (found > code.chunks)


def test_the_published_mean_over_bernoulli_codes_is_met():
    alive = np.arange(100) >= 20
    errors = [BernoulliCode(100, 5, seed=s).decode(alive, "fixed").error for s in range(600)]
    assert np.mean(errors) == pytest.approx(bernoulli_one_step_error(100, 5, 80), rel=0.03)


def test_stochastic_sums_are_unbiased_and_have_the_stated_error():
    code = SMALL["stochastic, unequal"]
    masks = every_mask(code.workers)
    counts = masks.sum(axis=1)
    chances = 0.9**counts * 0.1 ** (code.workers - counts)
    coefficients = masks @ code.matrix.toarray()
    np.testing.assert_allclose(chances @ coefficients, 1.0)
    assert chances @ code.errors(masks, "fixed") == pytest.approx(code.mean_error)
    assert np.array_equal(code.decode(masks[5], "fixed").weights, masks[5])


def test_two_chunks_share_as_many_workers_as_chance_gives():
    code = StochasticCode(50, [5] * 200 + [10] * 200, 0.1)
    shared = (code.matrix != 0).astype(float).T @ (code.matrix != 0).astype(float)
    dense = shared.toarray()
    off = ~np.eye(200, dtype=bool)
    assert dense[:200, :200][off].mean() == pytest.approx(5 * 5 / 50, rel=0.05)
    assert dense[200:, 200:][off].mean() == pytest.approx(10 * 10 / 50, rel=0.05)
    assert dense[:200, 200:].mean() == pytest.approx(5 * 10 / 50, rel=0.05)


def test_blocks_of_the_load_are_fractional_repetition():
    code = StochasticBlock(12, 3, blocks=4, inside=1.0)
    assert not (code.matrix != FractionalRepetition(12, 2).matrix).nnz


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(1, 10), st.floats(0.05, 1), st.data())
def test_random_codes_decode_optimally(workers, blocks, share, data):
    blocks = min(blocks, workers)
    load = max(share * workers, 0.5)
    most = min(1.0, workers // blocks / load)
    if most < 1 / blocks:
        return
    inside = data.draw(st.floats(1 / blocks, most))
    seed = data.draw(st.integers(0, 1000))
    code = StochasticBlock(workers, load, blocks=blocks, inside=inside, seed=seed)
    assert code.matrix.nnz == 0 or code.binary
    alive = np.random.default_rng(seed).random(workers) < 0.7
    assert code.decode(alive).error == pytest.approx(least_error(code, alive), abs=1e-9)


def test_the_share_inside_blocks_is_what_was_asked_for():
    code = StochasticBlock(600, 12, blocks=20, inside=0.75)
    rows, columns = code.matrix.nonzero()
    inside = (rows // 30 == columns // 30).mean()
    assert inside == pytest.approx(0.75, abs=0.03)
    assert code.matrix.nnz / 600 == pytest.approx(12, rel=0.05)


def test_ten_thousand_workers_are_built_and_decoded_within_a_second():
    for build in (
        lambda: BernoulliCode(10_000, 5),
        lambda: StochasticBlock(10_000, 5, blocks=1000, inside=0.9),
        lambda: StochasticCode(10_000, 5, 0.1),
    ):
        begun = time.process_time()
        code = build()
        code.decode(np.arange(10_000) % 10 != 0, "fixed")
        assert time.process_time() - begun < 1.0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: BernoulliCode(8, 9), r"mean_copies = 9 is not in \(0, 8\]"),
        (lambda: BernoulliCode(8, 0), "mean_copies = 0"),
        (lambda: BernoulliCode(0, 2), "workers = 0 is below 1"),
        (lambda: StochasticCode(0, 2, 0.1), "workers = 0 is below 1"),
        (lambda: StochasticBlock(8, 2, blocks=9, inside=1), r"blocks = 9 is not in \[1, 8\]"),
        (
            lambda: StochasticBlock(8, 2, blocks=4, inside=0.1),
            r"inside = 0.1 is not in \[0.25, 1\]",
        ),
        (lambda: StochasticBlock(8, 4, blocks=4, inside=0.8), r"\[0.25, 0.5\]"),
        (lambda: StochasticCode(8, 9, 0.1), r"copies = 9 are not all in \[1, 8\]"),
        (lambda: StochasticCode(8, [1, 2], 0.1, chunks=3), "chunks = 3"),
        (lambda: StochasticCode(8, 2, 1.0), "straggler_probability = 1.0"),
        (lambda: BernoulliCode(8, 2).expected_error(-1), "stragglers = -1"),
    ],
)
def test_settings_out_of_range_are_refused(build, words):
    with pytest.raises(CodingError, match=words):
        build()
