"""The guard's cost model: figures, monotonicity, and agreement with a measured certificate."""

import math
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
    correction_seconds,
    covered_share,
    detection_point,
    false_alarms,
    guard_cost,
    missed_probability,
)
from outlast.guard.policy import LEVELS, Level, Policy

SIZES = st.integers(1, 100_000)
SHAPES = st.builds(LinearShape, SIZES, SIZES, SIZES, st.integers(1, 100))
RATES = st.floats(1e6, 1e14)


def test_the_cost_model_loads_no_torch() -> None:
    code = (
        "import sys, outlast.guard.cost, outlast.guard.policy, outlast.guard.threshold\n"
        "import outlast.guard.coverage, outlast.guard.findings\n"
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


@given(SHAPES, RATES, st.integers(1, 1000))
def test_correcting_costs_at_most_one_product(
    shape: LinearShape, flop_per_s: float, rows: int
) -> None:
    seconds = correction_seconds(shape, flop_per_s, rows=rows)
    product = 2.0 * shape.tokens * shape.inputs * shape.outputs / flop_per_s
    assert 0 < seconds <= product * (1 + 1e-9)
    assert seconds <= correction_seconds(shape, flop_per_s, rows=rows + 1)


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


@given(st.floats(0.0, 1e18))
def test_false_alarms_grow_with_checks(checks: float) -> None:
    assert false_alarms(checks) == pytest.approx(checks * false_alarms(1.0))
    assert false_alarms(1.0) == pytest.approx(8.9e-9, rel=0.02)


def test_signs_that_are_drawn_again_leave_less_and_less() -> None:
    assert [missed_probability(steps) for steps in (0, 1, 10)] == [1.0, 0.5, 2.0**-10]
    with pytest.raises(GuardError, match="steps = -1 is below 0"):
        missed_probability(-1)


SHAPE = LinearShape(4096, 1024, 4096, count=24)


def cost_of(level: Level, **changes: float) -> tuple[float, float, float | None, float]:
    options = {"step_seconds": 0.5, "bytes_per_s": 2e12, "attention_flop": 1e12, **changes}
    cost = guard_cost(level, [SHAPE], errors_per_hour=2.0, **options)  # type: ignore[arg-type]
    return cost.overhead, cost.coverage, cost.detection_point, cost.undetected_per_hour


def test_levels_buy_coverage_with_time() -> None:
    off, light, linear, full = (cost_of(level) for level in LEVELS)
    assert off == (0.0, 0.0, None, 2.0)
    assert light == (LIGHT_SHARE, 0.0, None, 2.0)
    assert Policy().light_budget == LIGHT_SHARE
    assert off[0] < light[0] < linear[0] <= full[0]
    assert light[1] < linear[1] < full[1] == 1.0
    assert linear[3] == pytest.approx(2.0 * (1.0 - linear[1]))
    assert full[3] == 0.0
    assert linear[2] == detection_point("bfloat16", 1024, 4096)


def test_a_shorter_step_pays_a_larger_share() -> None:
    assert cost_of("linear", step_seconds=0.25)[0] == pytest.approx(2 * cost_of("linear")[0])


def test_the_widest_layer_gives_the_detection_point() -> None:
    shapes = [LinearShape(8, 16, 16), LinearShape(8, 10**6, 16)]
    cost = guard_cost("linear", shapes, step_seconds=1.0, bytes_per_s=1e9, stored="float32")
    assert cost.detection_point == detection_point("float32", 10**6, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_seconds": 0.0}, r"step_seconds = 0.0 is not above 0"),
        ({"bytes_per_s": -1.0}, r"bytes_per_s = -1.0 is not above 0"),
    ],
)
def test_times_and_rates_must_be_positive(changes: dict[str, float], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        cost_of("linear", **changes)


def test_an_unknown_level_has_no_price() -> None:
    with pytest.raises(GuardError, match="level = 'all' is not one of off, light, linear, full"):
        cost_of("all")  # type: ignore[arg-type]
    assert math.isfinite(cost_of("full")[0])
