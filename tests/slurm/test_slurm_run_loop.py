"""A hand-written loop under `outlast.Run` as the program of a chain on a real Slurm."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from chains import ending, noted, program_plan, wait
from loop_runs import QUIET, SCRIPT, assert_same, records, undisturbed

from outlast.cluster.chain import begin, status_of

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm", "empty_queue")]


@pytest.mark.supports("pytorch", "chain")
def test_a_loop_that_is_told_to_stop_goes_on_in_the_next_link(tmp_path: Path) -> None:
    other = undisturbed(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan").write_text("9 SIGTERM")
    command = shlex.join([sys.executable, "train.py", json.dumps({"settings": QUIET})])
    files, plan = program_plan(tmp_path, f"OMP_NUM_THREADS=1 {command}")
    begin(files, plan, "")
    assert wait(lambda: ending(files), files)["outcome"] == "done"
    assert len(noted(files, "started")) == 2
    assert [each.last_step for each in status_of(files).links] == [10, 36]
    assert [each.outcome for each in records(tmp_path).attempts] == ["to_be_continued", "completed"]
    assert_same(tmp_path, other)
