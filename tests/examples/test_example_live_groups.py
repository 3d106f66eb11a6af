"""The example of live groups runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "live_groups.py"


@pytest.mark.distributed
def test_two_groups_end_with_one_loss_although_one_was_killed() -> None:
    pytest.importorskip("torchft", reason="torchft (the extra ft) is not installed")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed group 1" in done.stdout
    assert "MemberLost" in done.stdout
    last = re.findall(r"group (\d): step 600, loss (\S+?)(?=group|\s)", done.stdout)
    assert dict(last).keys() == {"0", "1"}
    assert len(set(dict(last).values())) == 1
