"""The guard's cost model: figures, monotonicity, and agreement with a measured certificate."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outlast.errors import GuardError
from outlast.guard import guard
from outlast.guard.cost import (
    LIGHT_SHARE,
    LinearShape,
    check_bytes,
    check_seconds,
    covered_share,
    detection_point,
)
from outlast.guard.policy import LEVELS, Policy

SIZES = st.integers(1, 100_000)
SHAPES = st.builds(LinearShape, SIZES, SIZES, SIZES, st.integers(1, 100))
RATES = st.floats(1e6, 1e14)


def test_the_cost_model_loads_no_torch() -> None:
    code = (
        "import sys, outlast.guard.cost, outlast.guard.policy, outlast.guard.threshold\n"
        "import outlast.guard.policy, outlast.guard.findings\n"
        "print([name for name in ('torch', 'numpy', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_bytes_of_one_layer_by_hand() -> None:
    # Forward X and Y, backward dY and dX, dW, and W once, in two bytes each.
    shape = LinearShape(tokens=10, inputs=3, outputs=5)
    assert check_bytes(shape, 2) == 2 * (10 * (3 + 5 + 5 + 3) + 15 + 15)
    assert check_bytes(shape, 2, microbatches=4) == 2 * (4 * (160 + 15) + 15)
    assert check_bytes(LinearShape(10, 3, 5, count=7), 2) == 7 * check_bytes(shape, 2)
    assert shape.flop == 6 * 10 * 3 * 5


def test_seconds_by_hand() -> None:
    shapes = [LinearShape(10, 3, 5), LinearShape(10, 5, 3, count=2)]
    read = sum(check_bytes(each, 4, 2) for each in shapes)
    seconds = check_seconds(shapes, 4, 1e9, microbatches=2, call_seconds=1e-4)
    assert seconds == pytest.approx(read / 1e9 + 6 * 1e-4)
    assert check_seconds([], 4, 1e9) == 0.0


@pytest.mark.slow
@given(SHAPES, SHAPES, RATES, st.integers(1, 16))
def test_more_work_takes_longer(
    first: LinearShape, second: LinearShape, rate: float, microbatches: int
) -> None:
    alone = check_seconds([first], 2, rate, microbatches=microbatches)
    assert check_seconds([first, second], 2, rate, microbatches=microbatches) > alone
    assert check_seconds([first], 4, rate, microbatches=microbatches) > alone
    assert check_seconds([first], 2, rate, microbatches=microbatches + 1) > alone
    assert check_seconds([first], 2, 2 * rate, microbatches=microbatches) < alone


@given(st.integers(100, 10_000), st.integers(100, 10_000), st.integers(100, 10_000))
def test_a_larger_layer_has_a_smaller_share_of_checks(
    tokens: int, inputs: int, outputs: int
) -> None:
    small = LinearShape(tokens, inputs, outputs)
    large = LinearShape(2 * tokens, 2 * inputs, 2 * outputs)
    # Checks grow with the matrices' areas, products with their volume.
    small_share = check_bytes(small, 2) / small.flop
    assert check_bytes(large, 2) / large.flop == pytest.approx(small_share / 2)


@given(st.floats(1.0, 1e20), st.floats(0.0, 1e20))
def test_a_higher_level_covers_no_less(linear_flop: float, attention_flop: float) -> None:
    shares = [covered_share(level, linear_flop, attention_flop) for level in LEVELS]
    assert shares == sorted(shares)
    assert (shares[0], shares[1], shares[-1]) == (0.0, 0.0, 1.0)


@given(
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(1, 10**6),
    st.integers(1, 10**6),
)
def test_longer_sums_and_coarser_types_see_less(stored: str, terms: int, outputs: int) -> None:
    point = detection_point(stored, terms, outputs)
    assert 0 < point < 1
    assert detection_point(stored, 2 * terms, outputs) >= point
    assert detection_point(stored, terms, 2 * outputs) >= point
    assert detection_point(stored, terms, outputs, read="tf32") > point
    fine, coarse = (detection_point(each, terms, outputs) for each in ("float32", "bfloat16"))
    assert fine < coarse


def test_detection_points_of_the_documentation() -> None:
    assert detection_point("bfloat16", 1024, 1024) == pytest.approx(0.0176, rel=0.05)
    assert detection_point("float32", 1024, 1024) < 2e-5
    with pytest.raises(GuardError, match="no rounding bound for int8"):
        detection_point("int8", 10, 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(64, 96, 160), (300, 512, 48)])
def test_the_predicted_detection_point_is_the_measured_one_within_two(
    dtype: torch.dtype, tokens: int, inputs: int, outputs: int
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=False).to(dtype)
    handle = guard(layer)
    layer(torch.randn(tokens, inputs, dtype=dtype)).square().sum().backward()
    measured = handle.ledger.site("", "linear.forward").detection_point
    assert measured is not None
    predicted = detection_point(str(dtype).removeprefix("torch."), inputs, outputs)
    assert 0.5 < measured / predicted < 2.0


def test_a_light_guard_takes_its_budget() -> None:
    assert Policy().light_budget == LIGHT_SHARE


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(GuardError, match=r"bytes_per_s = -1\.0 is not above 0"):
        check_seconds([LinearShape(1, 1, 1)], 2, -1.0)
