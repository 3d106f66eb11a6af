import time

import numpy as np
import pytest
from every_pattern import check_every_pattern, every_mask, least_error
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.design import BernoulliCode
from outlast.errors import CodingError

SMALL = {
    "Bernoulli": BernoulliCode(8, 2.5, seed=3),
    "full": BernoulliCode(6, 6),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_has_the_least_error_and_keeps_the_bounds(name):
    check_every_pattern(SMALL[name])


@pytest.mark.parametrize("name", ["Bernoulli", "full"])
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
    # n (n - d) / (u d)
    assert np.mean(errors) == pytest.approx(100 * 95 / (80 * 5), rel=0.03)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.floats(0.05, 1), st.integers(0, 1000))
def test_random_codes_decode_optimally(workers, share, seed):
    code = BernoulliCode(workers, share * workers, seed=seed)
    assert code.matrix.nnz == 0 or code.binary
    alive = np.random.default_rng(seed).random(workers) < 0.7
    assert code.decode(alive).error == pytest.approx(least_error(code, alive), abs=1e-9)


def test_ten_thousand_workers_are_built_and_decoded_within_a_second():
    begun = time.process_time()
    code = BernoulliCode(10_000, 5)
    code.decode(np.arange(10_000) % 10 != 0, "fixed")
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: BernoulliCode(8, 9), r"mean_copies = 9 is not in \(0, 8\]"),
        (lambda: BernoulliCode(8, 0), "mean_copies = 0"),
        (lambda: BernoulliCode(0, 2), "workers = 0 is below 1"),
        (lambda: BernoulliCode(8, 2).expected_error(-1), "stragglers = -1"),
    ],
)
def test_settings_out_of_range_are_refused(build, words):
    with pytest.raises(CodingError, match=words):
        build()
