"""What automatic checkpoints cost, by their formulas."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.autosave.cost import StateBytes, StepTimes, overhead_fraction, save_block
from outlast.errors import AutosaveError

sizes = st.floats(0.0, 1e12)
seconds = st.floats(0.0, 1e4)


@given(sizes, sizes, seconds, seconds, st.floats(0.01, 1.0))
def test_windows_never_block_longer_at_the_full_rate_and_never_less_than_what_is_early(
    early, late, passes, capture, share
):
    state, step = StateBytes(early, late), StepTimes(passes, 1.0)
    found = save_block(state, step, copy_bytes_per_s=1e9, capture_seconds=capture)
    assert found.windowed_seconds <= found.plain_seconds * (1 + 1e-12)
    assert found.windowed_seconds >= capture + early / 1e9
    slower = save_block(
        state, step, copy_bytes_per_s=1e9, capture_seconds=capture, beside_share=share
    )
    assert slower.windowed_seconds >= found.windowed_seconds
    assert slower.plain_seconds == found.plain_seconds


def test_a_save_with_long_passes_blocks_for_the_early_bytes_alone():
    state = StateBytes(early=1e8, late=9e8, constant=5e8, dead=1e8, naive=1.5e9)
    found = save_block(state, StepTimes(2.0, 0.5), copy_bytes_per_s=1e9, beside_share=0.5)
    assert found.plain_seconds == pytest.approx(1.0)
    assert found.windowed_seconds == pytest.approx(0.1)
    assert found.ratio == pytest.approx(0.1)
    short = save_block(state, StepTimes(1.0, 0.5), copy_bytes_per_s=1e9, beside_share=0.5)
    assert short.windowed_seconds == pytest.approx(0.9)


def test_bytes_of_saves():
    state = StateBytes(early=1.0, late=2.0, constant=4.0, dead=8.0)
    assert (state.first_save, state.later_save, state.process_image) == (7.0, 3.0, 15.0)


def test_overhead_is_the_boundary_and_the_share_of_a_save():
    step = StepTimes(0.08, 0.02)
    found = overhead_fraction(
        step, boundary_seconds=1e-4, block_seconds=0.5, steps_between_saves=1000.0
    )
    assert found == pytest.approx((1e-4 + 5e-4) / 0.1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: StateBytes(-1.0, 0.0), "early bytes = -1.0 is below 0"),
        (lambda: StepTimes(1.0, float("nan")), "optimizer_seconds = nan is below 0"),
        (
            lambda: save_block(StateBytes(1, 1), StepTimes(1, 1), copy_bytes_per_s=0.0),
            "copy_bytes_per_s = 0.0 is not above 0",
        ),
        (
            lambda: save_block(
                StateBytes(1, 1), StepTimes(1, 1), copy_bytes_per_s=1.0, beside_share=2.0
            ),
            "beside_share = 2.0 is above 1",
        ),
        (
            lambda: overhead_fraction(
                StepTimes(1, 1), boundary_seconds=0, block_seconds=0, steps_between_saves=0
            ),
            "steps_between_saves = 0 is below 1",
        ),
    ],
)
def test_impossible_numbers_are_refused(make, sentence):
    with pytest.raises(AutosaveError, match=sentence):
        make()


def test_costs_need_no_torch():
    code = "import sys, outlast.autosave.cost; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert done.returncode == 0
