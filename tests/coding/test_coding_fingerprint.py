import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.protocol.gradients import PROJECTIONS, Fingerprint, Fingerprints

SHAPES = [(7,), (1024,), (33, 65), (5000,)]
TOLERANCE = 1e-3


def gradients(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def take(tensors):
    return Fingerprints().take(tensors)


def norm(tensors):
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


def test_equal_gradients_have_equal_fingerprints_in_all_processes():
    assert take(gradients(0)) == take(gradients(0))
    assert take(gradients(0)).difference(take(gradients(0))) == 0


def test_the_first_number_is_the_norm():
    found = take(gradients(1)).numbers
    assert len(found) == 1 + PROJECTIONS
    assert found[0] == pytest.approx(norm(gradients(1)), rel=1e-5)


@given(
    seed=st.integers(0, 1000),
    tensor=st.integers(0, len(SHAPES) - 1),
    place=st.integers(0, 10**6),
    share=st.floats(2e-3, 1e3),
    sign=st.sampled_from([1.0, -1.0]),
)
@settings(max_examples=50, deadline=None)
def test_a_single_wrong_number_is_always_seen(seed, tensor, place, share, sign):
    right, wrong = gradients(seed), gradients(seed)
    flat = wrong[tensor].view(-1)
    flat[place % len(flat)] += sign * share * norm(right)
    assert take(right).difference(take(wrong)) > TOLERANCE


@given(seed=st.integers(0, 10**6), exponent=st.floats(-4, -0.5))
@settings(max_examples=50, deadline=None)
def test_the_difference_estimates_the_norm_of_a_random_error_within_a_factor(seed, exponent):
    right = gradients(seed)
    scale = 10.0**exponent
    noise = gradients(seed + 10**7)
    wrong = [a + scale * b for a, b in zip(right, noise, strict=True)]
    error = scale * norm(noise) / norm(right)
    # Four squares of nearly normal numbers: a chi-square with four degrees of freedom, over four.
    assert 0.02 * error < take(right).difference(take(wrong)) < 4 * error


@given(seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_rounding_in_another_order_stays_below_the_tolerance(seed):
    parts = [gradients(10 * seed + each) for each in range(8)]
    forward, backward = gradients(0), gradients(0)
    for each in parts:
        forward = [a + b for a, b in zip(forward, each, strict=True)]
    for each in reversed(parts):
        backward = [a + b for a, b in zip(backward, each, strict=True)]
    assert any((a != b).any() for a, b in zip(forward, backward, strict=True))
    assert take(forward).difference(take(backward)) < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_differs_from_what_is_and_says_nothing_about_its_like(bad):
    wrong = gradients(3)
    wrong[2][4, 4] = bad
    assert take(wrong).difference(take(gradients(3))) == math.inf
    assert take(gradients(3)).difference(take(wrong)) == math.inf
    assert take(wrong).difference(take(wrong)) == 0


def test_swapped_numbers_and_swapped_tensors_are_seen():
    right = gradients(4)
    swapped = gradients(4)
    swapped[3] = swapped[3].roll(1)
    assert take(right).difference(take(swapped)) > TOLERANCE
    one, other = torch.randn(100), torch.randn(100)
    assert take([one, other]).difference(take([other, one])) > TOLERANCE


def test_two_zeros_do_not_differ():
    zeros = [torch.zeros(5)]
    assert take(zeros).difference(take(zeros)) == 0


def test_one_zero_differs_wholly():
    assert take([torch.zeros(5)]).difference(take([torch.ones(5)])) >= 1


@given(st.lists(st.floats(width=64), min_size=1 + PROJECTIONS, max_size=1 + PROJECTIONS))
@settings(max_examples=50, deadline=None)
def test_text_keeps_every_bit(numbers):
    back = Fingerprint.read(Fingerprint(tuple(numbers)).text())
    assert np.array_equal(back.numbers, numbers, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fingerprints_of_other_types_are_as_precise_as_the_numbers(dtype):
    tensors = gradients(5, dtype)
    exact = take([each.double() for each in tensors])
    assert take(tensors).difference(exact) < 1e-5


def test_an_empty_share_of_a_gradient_counts_nothing():
    assert take([torch.zeros(0), torch.ones(4)]).numbers[0] == pytest.approx(2.0)
