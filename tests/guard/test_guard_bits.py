"""Flipped bits that the checks of one product find, as the benchmark counts them."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from guard_bits import bit_detection

SMALL = {"rows": 64, "inputs": 128, "outputs": 256, "trials": 1024}


@pytest.mark.parametrize("which", ["forward", "dx", "dw"])
@pytest.mark.parametrize("scale", [1e-2, 1e-8])
def test_high_bits_are_found_whatever_the_size_of_the_numbers(which, scale):
    found = bit_detection(torch.float32, (31, 30, 23, 20), which=which, scale=scale, **SMALL)
    assert all(rate.share > 0.99 for rate in found.bits.values())
    assert found.bits[30].share == 1.0
    assert found.clean.count == 0
    assert found.spread < 1.1


@pytest.mark.parametrize("which", ["forward", "dx", "dw"])
def test_bf16_thresholds_are_as_tight_as_its_rounding(which):
    found = bit_detection(torch.bfloat16, (14, 0), which=which, scale=1e-3, **SMALL)
    assert found.bits[14].share == 1.0
    # The lowest bit is what rounding changes anyway.
    assert found.bits[0].share < 0.05
    assert found.clean.count == 0
    assert 0.85 < found.spread < 1.1
    assert 6 < found.threshold_ratio < 9
    assert 0.005 < found.detection_point < 0.1


def test_trials_are_rounded_up_to_whole_outputs_and_seeds_repeat():
    settings = {"rows": 24, "inputs": 32, "outputs": 64, "trials": 50}
    one = bit_detection(torch.float32, (20,), **settings)
    assert one.bits[20].total == one.clean.total == 72
    assert bit_detection(torch.float32, (20,), **settings) == one
