import numpy as np
import pytest
from every_pattern import check_every_pattern, every_mask, holds
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.graph import Expander, one_step_error
from outlast.errors import CodingError

SMALL = {
    "cubic": Expander(8, 3, seed=1),
    "complete": Expander(5, 4),
    "cycle": Expander(7, 2),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_keeps_the_bounds(name):
    check_every_pattern(SMALL[name])


def spectral(code, stragglers):
    """What Raviv et al. prove for the fixed decoder, however large."""
    share = (code.expansion / code.degree) ** 2
    return share * code.workers * stragglers / (code.workers - stragglers)


@pytest.mark.parametrize("name", SMALL)
def test_the_fixed_decoder_keeps_the_bound_and_has_the_stated_mean(name):
    code = SMALL[name]
    masks = every_mask(code.workers)
    errors = code.errors(masks, "fixed")
    gone = code.workers - masks.sum(axis=1)
    for stragglers in range(code.workers):
        found = errors[gone == stragglers]
        assert found.max() <= spectral(code, stragglers) + 1e-9
        assert code.worst_error(stragglers).value == min(spectral(code, stragglers), code.chunks)
        optimal = code.errors(masks[gone == stragglers])
        assert optimal.max() <= code.worst_error(stragglers).value + 1e-6
        assert optimal.mean() <= code.expected_error(stragglers).value + 1e-6 <= code.chunks + 1e-6
        mean = one_step_error(code.workers, code.degree, code.workers - stragglers)
        assert found.mean() == pytest.approx(mean, abs=1e-12)
        # An adversary can stop all workers of so many chunks.
        assert found.max() >= stragglers // code.degree - 1e-9


def test_the_bound_is_reached_by_complete_graphs():
    code = Expander(5, 4)  # |lambda| = 1 for all but the first eigenvalue
    assert code.expansion == pytest.approx(1.0)
    worst = code.worst_error(2).value
    assert worst == pytest.approx((1 / 4) ** 2 * 5 * 2 / 3)
    assert code.decode([0, 1, 2], "fixed").error == pytest.approx(worst)


@settings(max_examples=50, deadline=None)
@given(st.integers(4, 30), st.integers(2, 5), st.integers(0, 1000), st.floats(0, 1))
def test_random_expanders_keep_the_bound(half, degree, seed, probability):
    code = Expander(2 * half, min(degree, 2 * half - 1), seed=seed)
    alive = np.random.default_rng(seed).random((5, code.workers)) >= probability
    fixed_errors, optimal_errors = code.errors(alive, "fixed"), code.errors(alive)
    for each, fixed, optimal in zip(alive, fixed_errors, optimal_errors, strict=True):
        decoded = code.decode(each, "fixed")
        assert fixed == pytest.approx(decoded.error, abs=1e-9)
        assert optimal <= fixed + 1e-6
        assert set(np.round(decoded.weights[each], 12)) <= {
            round(code.workers / max(each.sum(), 1), 12)
        }
        if each.any():
            gone = int((~each).sum())
            assert fixed <= spectral(code, gone) + 1e-9
            assert optimal <= code.worst_error(gone).value + 1e-6 <= code.chunks + 1e-6


def test_everyone_there_is_exact_and_the_encoding_is_not_binary():
    code = Expander(20, 3)
    assert code.decode(np.ones(20, dtype=bool), "fixed").error == 0.0
    assert not code.binary
    assert code.load == 3


def test_nobody_there_leaves_everything_undone():
    holds(Expander(20, 3).worst_error(20), 20.0)
    assert Expander(20, 3).decode([], "fixed").error == 20.0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Expander(7, 3), "take degree = 4 or 8 vertices"),
        (lambda: Expander(4, 5), "take 2 to 3"),
        (lambda: Expander(8, 3).worst_error(9), "stragglers = 9"),
        (lambda: one_step_error(5, 6, 3), "copies = 6"),
    ],
)
def test_what_cannot_be_built_is_refused(build, words):
    with pytest.raises(CodingError, match=words):
        build()
