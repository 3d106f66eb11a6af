"""What a save consists of, in bytes."""

import subprocess
import sys

import pytest

from outlast.autosave.cost import StateBytes
from outlast.errors import AutosaveError


def test_bytes_of_later_saves():
    assert StateBytes(early=1.0, late=2.0, constant=4.0, dead=8.0).later_save == 3.0


@pytest.mark.parametrize("early", [-1.0, float("nan")])
def test_impossible_numbers_are_refused(early):
    with pytest.raises(AutosaveError, match=f"early bytes = {early} is below 0"):
        StateBytes(early, 0.0)


def test_measured_state_needs_no_torch():
    code = "import sys, outlast.autosave.cost; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert done.returncode == 0
