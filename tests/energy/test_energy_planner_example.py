"""The example that users copy runs as it stands."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from outlast.energy.plan import ClockPlan

EXAMPLE = Path(__file__).parents[2] / "examples" / "energy_frontier.py"


@pytest.mark.slow
def test_the_frontier_example_saves_energy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "free: saves 2" in done.stdout
    assert "while another pipeline is 10 % slower: saves" in done.stdout
    assert ClockPlan.load(tmp_path / "plan.json").saving > 0.2
    ET.parse(tmp_path / "frontier.svg")
    assert len(EXAMPLE.read_text().splitlines()) <= 40
