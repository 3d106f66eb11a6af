"""The rounding-error thresholds: no clean product exceeds them, and they are tight."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outlast.errors import GuardError
from outlast.guard.product import powers_of
from outlast.guard.residual import equality_test, residual_test
from outlast.guard.threshold import DEVIATIONS, Bound, Rounding, product_bound, unit_roundoff

ROWS, OUTPUTS = 256, 96


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_unit_roundoff_is_half_of_the_spacing_above_one(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    assert unit_roundoff(name) == torch.finfo(dtype).eps / 2


def test_tf32_reads_like_fp16_and_stores_like_fp32() -> None:
    assert unit_roundoff("tf32") == unit_roundoff("float16") == 2.0**-11


@pytest.mark.parametrize("name", ["int8", "", "complex64", "torch.float32"])
def test_a_type_without_a_bound_is_refused(name: str) -> None:
    with pytest.raises(GuardError, match=f"no rounding bound for {name}; known are float64"):
        unit_roundoff(name)
    with pytest.raises(GuardError):
        product_bound(Rounding(name), 4, 4)


@given(
    st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]),
    st.integers(1, 10**6),
    st.integers(1, 10**5),
)
def test_variance_is_the_sum_of_its_terms(stored: str, terms: int, outputs: int) -> None:
    bound = product_bound(Rounding(stored), terms, outputs)
    powers, squares = 3.0, 5.0
    storing = unit_roundoff(stored) ** 2 / 3 * powers
    unit = unit_roundoff("float32") ** 2 / 3
    drift, walk = unit * terms / 3 * powers, unit * terms / 6 / 2.16 * squares
    expected = storing + drift + walk + bound.floor
    # The rest is the rounding of the check's own sums in fp64.
    assert bound.variance(powers, squares) == pytest.approx(expected, rel=1e-6)
    read = product_bound(Rounding(stored, read="tf32"), terms, outputs)
    extra = read.variance(powers, squares) - bound.variance(powers, squares)
    assert extra == pytest.approx(2 * 2.0**-22 / 3 * squares, rel=1e-6)
    alike = product_bound(Rounding(stored), terms, outputs, alike=True)
    extra = alike.variance(powers, squares, 2.0) - bound.variance(powers, squares, 2.0)
    assert extra == pytest.approx(unit * terms / 3 * 4.0, rel=1e-3, abs=1e-20)


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.floats(0, 1e6), st.floats(0, 1e6))
def test_variance_grows_with_every_part(
    terms: int, outputs: int, powers: float, squares: float
) -> None:
    rounding = Rounding("bfloat16", summed="float32")
    variance = product_bound(rounding, terms, outputs).variance(powers, squares)
    assert variance > 0
    assert product_bound(rounding, terms + 1, outputs).variance(powers, squares) >= variance
    assert product_bound(rounding, terms, outputs + 1).variance(powers, squares) >= variance
    assert product_bound(rounding, terms, outputs).variance(powers + 1, squares) >= variance
    assert product_bound(rounding, terms, outputs).variance(powers, squares + 1) >= variance


def test_variances_of_rows_are_those_of_numbers() -> None:
    bound = Bound(by_power=2.0, by_square=3.0, floor=0.5, by_value=4.0)
    rows = [torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]), torch.tensor([-3.0, 1.0])]
    assert bound.variance(*rows).tolist() == [2 + 6 + 0.5 + 36, 0.5 + 4]
    assert bound.variance(1.0, 2.0, -3.0) == 44.5
    assert bound.limit == DEVIATIONS**2


def test_the_detection_point_of_stored_numbers() -> None:
    point = product_bound(Rounding("bfloat16"), 1, 1000).detection_point()
    assert point == pytest.approx(2 * DEVIATIONS * 2.0**-8 / math.sqrt(3 * 2.16), rel=1e-3)


def sequential(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, terms) times weight (outputs, terms), every partial sum rounded to fp32 once."""
    total = torch.zeros(len(x), len(weight))
    for left, right in zip(x.double().T, weight.double().T, strict=True):
        total = (total.double() + left[:, None] * right).float()
    return total


def tf32(numbers: Tensor) -> Tensor:
    """Rounded to 10 explicit bits, as a tensor core reads fp32."""
    bits = numbers.float().view(torch.int32)
    rounded: Tensor = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return rounded


def ratios(x: Tensor, weight: Tensor, y: Tensor, bound: Bound) -> Tensor:
    """Differences of the rows of y, in standard deviations, over several draws of signs."""
    x, weight, wide = x.double(), weight.double(), y.double()
    powers = powers_of(wide).square().sum(dim=1)
    squares = x.square() @ weight.square().sum(dim=0)
    found = []
    for _ in range(12):
        signs = torch.randint(0, 2, (len(weight),)).double() * 2 - 1
        difference = wide @ signs - x @ (signs @ weight)
        variance = bound.variance(powers, squares)
        assert not residual_test(difference, variance, powers).flags.any()
        found.append(difference / variance.sqrt())
    return torch.cat(found)


def assert_tight(found: Tensor, least: float = 0.2, most: float = 1.1) -> None:
    assert found.abs().max() < DEVIATIONS
    assert least < found.square().mean().sqrt() < most


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_fp8_outputs(dtype: torch.dtype, mean: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, 128) + mean, torch.randn(OUTPUTS, 128) / 8 + mean / 8
    y = (x @ weight.T).to(dtype)
    assert torch.isfinite(y.float()).all()
    bound = product_bound(Rounding(str(dtype).removeprefix("torch.")), 128, OUTPUTS)
    assert_tight(ratios(x, weight, y, bound), 0.8)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_outputs_with_a_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(ROWS, 64) * 1e-4, torch.randn(OUTPUTS, 64)
    product = x @ weight.T
    scale = float(torch.finfo(dtype).max / product.abs().max()) / 2
    y = (product * scale).to(dtype)
    # The scale is applied to the operand of the check, too.
    bound = product_bound(Rounding(str(dtype).removeprefix("torch.")), 64, OUTPUTS)
    assert_tight(ratios(x.double() * scale, weight, y, bound), 0.8)


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_tf32_operands(mean: float) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(ROWS, 256) + mean, torch.randn(OUTPUTS, 256) + mean
    y = tf32(x) @ tf32(weight).T
    bound = product_bound(Rounding("float32", read="tf32"), 256, OUTPUTS)
    found = ratios(x, weight, y, bound)
    assert_tight(found, 0.4)
    # The bound of operands that are taken as they are would be wrong by far.
    blind = product_bound(Rounding("float32"), 256, OUTPUTS)
    with pytest.raises(AssertionError):
        ratios(x, weight, y, blind)


@pytest.mark.parametrize("mean", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("terms", [16, 1500])
def test_sums_one_after_the_other_in_fp32(terms: int, mean: float) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(ROWS, terms) + mean, torch.randn(16, terms) + mean
    found = ratios(x, weight, sequential(x, weight), product_bound(Rounding("float32"), terms, 16))
    # Sums that all rise to nearly the same value have significands that are not log-uniform: sums
    # that end just below a power of two are rounded up to 1.31 times more coarsely than the model.
    assert_tight(found, 0.6, 1.35 if mean == 3.0 else 1.1)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", [64, 65536])
@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_the_library_s_own_products(stored: torch.dtype, terms: int, mean: float) -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(96, terms) + mean, torch.randn(64, terms) / terms**0.5 + mean / terms
    x, weight = x.to(stored), weight.to(stored)
    y = x @ weight.T
    bound = product_bound(Rounding(str(stored).removeprefix("torch.")), terms, 64)
    # Libraries sum in blocks, which rounds less often than one sum after the other.
    least = 0.02 if stored == torch.float32 and terms > 64 else 0.2
    assert_tight(ratios(x, weight, y, bound), least)


@pytest.mark.parametrize("size", [1e-4, 1e-5, 1e-6, 1e-7, 1e-8])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_data_of_the_size_of_gradients(stored: torch.dtype, size: float) -> None:
    torch.manual_seed(5)
    x, weight = (torch.randn(ROWS, 64) * size).to(stored), (torch.randn(OUTPUTS, 64) / 8).to(stored)
    y = x @ weight.T
    bound = product_bound(Rounding(str(stored).removeprefix("torch.")), 64, OUTPUTS)
    # Below half of the smallest number all is 0, and no further from the truth than it.
    vanishing = stored == torch.float16 and size < 1e-7
    assert_tight(ratios(x, weight, y, bound), 0.0 if vanishing else 0.2)


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**-30, 1.0, 2.0**40])
def test_scales_cancel(factor: float) -> None:
    torch.manual_seed(6)
    x, weight = torch.randn(8, 64), torch.randn(16, 64)
    bound = product_bound(Rounding("float32"), 64, 16)
    plain, scaled = [], []
    for collected, scale in ((plain, 1.0), (scaled, factor)):
        torch.manual_seed(7)
        collected.append(ratios(x * scale, weight, (x * scale) @ weight.T, bound))
    assert torch.allclose(plain[0], scaled[0], rtol=1e-5, atol=1e-12)


@given(st.integers(0, 2**32 - 1), st.floats(1.5, 1e6))
def test_what_is_beyond_the_detection_point_is_found(seed: int, times: float) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    y = (x @ weight.T).bfloat16().double()
    bound = product_bound(Rounding("bfloat16"), 32, 16)
    signs = torch.randint(0, 2, (16,)).double() * 2 - 1
    expected = x.double() @ (signs @ weight.double())
    powers = powers_of(y).square().sum(dim=1)
    variance = bound.variance(powers, x.double().square() @ weight.double().square().sum(0))
    clean = residual_test(y @ signs - expected, variance, powers)
    assert not clean.flags.any()
    # An error as large as the threshold and what clean rounding may take away from it.
    error = (float(variance[2].sqrt()) * (DEVIATIONS + float(clean.worst))) * times
    found = residual_test(y @ signs - expected + torch.eye(4)[2] * error, variance, powers)
    assert found.flags.tolist() == [False, False, True, False]


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("argument", ["difference", "variance"])
def test_what_is_not_finite_is_flagged(argument: str, bad: float) -> None:
    given = {
        "difference": torch.zeros(3, dtype=torch.float64),
        "variance": torch.ones(3, dtype=torch.float64),
        "scale_squared": torch.ones(3, dtype=torch.float64),
    }
    given[argument][1] = bad
    judged = residual_test(**given)
    assert judged.flags.tolist() == [False, True, False]
    assert int(judged.exceeded) == 1
    assert math.isfinite(float(judged.widest))
    assert float(judged.total) == 0.0


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_scale_hides_nothing(bad: float) -> None:
    judged = residual_test(torch.tensor([9.0, 0.0]), torch.ones(2), torch.tensor([bad, bad]))
    assert judged.flags.tolist() == [True, False]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", ["x", "weight", "y"])
def test_a_product_with_what_is_not_finite_is_flagged(at: str, bad: float) -> None:
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    y = x @ weight.T
    {"x": x, "weight": weight, "y": y}[at][1, 2] = bad
    powers = powers_of(y.double()).square().sum(dim=1)
    squares = x.double().square() @ weight.double().square().sum(dim=0)
    difference = y.double().sum(dim=1) - x.double() @ weight.double().sum(dim=0)
    variance = product_bound(Rounding("float32"), 8, 6).variance(powers, squares)
    flags = residual_test(difference, variance, powers).flags.tolist()
    assert flags == ([True] * 4 if at == "weight" else [False, True, False, False])


def test_a_row_of_zeros_passes_without_a_detection_point() -> None:
    bound = product_bound(Rounding("float32"), 8, 6)
    zeros = torch.zeros(2, dtype=torch.float64)
    judged = residual_test(zeros, bound.variance(zeros, zeros), zeros)
    assert not judged.flags.any()
    assert float(judged.widest) == 0.0
    assert float(judged.worst) == 0.0


def test_the_judgement_of_one_row_by_hand() -> None:
    one: Callable[[float], Tensor] = lambda value: torch.tensor([value])  # noqa: E731
    passed = residual_test(one(6.0), one(4.0), one(16.0))
    assert (int(passed.exceeded), float(passed.worst), float(passed.total)) == (0, 3.0, 9.0)
    assert float(passed.widest) == pytest.approx(DEVIATIONS * 0.5)
    failed = residual_test(one(-12.0), one(4.0), one(16.0))
    assert (int(failed.exceeded), float(failed.worst), float(failed.total)) == (1, 6.0, 0.0)
    assert float(failed.widest) == 0.0


def test_exact_checks_flag_any_difference() -> None:
    judged = equality_test(torch.tensor([1, 2, 3]), torch.tensor([1, 5, 3]))
    assert judged.flags.tolist() == [False, True, False]
    assert int(judged.exceeded) == 1
    assert float(judged.worst) == math.inf
    assert float(equality_test(torch.tensor([1]), torch.tensor([1])).worst) == 0.0
