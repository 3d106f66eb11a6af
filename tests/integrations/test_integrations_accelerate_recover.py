"""Loops on Accelerate under torchrun: a killed process, and a group that continues from memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from forked import torchrun
from test_integrations_accelerate import Plan, run

from outlast.records import CheckpointRestored, StateRecovered, read_run

pytestmark = pytest.mark.distributed

SCRIPT = """
import json
import os
import sys
from pathlib import Path

sys.path[:0] = {paths!r}
from test_integrations_accelerate import Plan, looped

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
dies_at = 11 if first and rank == 1 else 0
found = looped(Plan(folder, remembers=True, records=True, every=100, dies_at=dies_at, waits=False))
(folder / f"outcome{{rank}}").write_text(json.dumps(found))
"""


@pytest.mark.supports("accelerate", "recover", "resume")
def test_a_killed_process_of_a_loop_costs_one_step_at_most_and_no_bit(tmp_path: Path) -> None:
    [whole, _] = run(2, Plan(tmp_path / "whole", every=100))
    script, folder = tmp_path / "train.py", tmp_path / "killed"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script.write_text(SCRIPT.format(paths=paths))
    folder.mkdir()
    done = torchrun(
        tmp_path / "output",
        "--nproc-per-node=2",
        "--max-restarts=2",
        script,
        folder,
    )
    assert done.code == 0, done.said
    first, losses, digest, code = json.loads((folder / "outcome0").read_text())
    # Eleven steps were done; a group that is ended may not come to keep the last of them.
    assert first in (10, 11)
    assert losses == whole[1][first:]
    assert (digest, code) == (whole[2], 0)
    found = read_run(folder / "run")
    assert len(found.attempts) == 2
    [(_, recovered)] = found.of(StateRecovered)
    assert (recovered.step, recovered.source) == (first, "memory")
    assert recovered.lost_steps <= 1
    assert not found.of(CheckpointRestored)
    # The loop has ended, and nothing is left in memory.
    assert not list((folder / "memory").rglob("rank-*"))


@pytest.mark.supports("accelerate", "recover", "malleable")
def test_the_newer_of_memory_and_store_is_loaded_on_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    [whole, _] = run(2, Plan(tmp_path / "whole", dropout=0.0))
    folder = tmp_path / "killed"
    plain = {"dropout": 0.0, "remembers": True}
    assert run(2, Plan(folder, dies_at=11, waits=False, **plain)) == [None, None]  # type: ignore[arg-type]
    # A folder that is not the newest is loaded as it is.
    [older, _] = run(2, Plan(folder, load=str(folder / "state-3"), **plain))  # type: ignore[arg-type]
    assert older[0] == 3
    assert older[2] == whole[2]
    # Its end has given the memory back.
    [saved, _] = run(2, Plan(folder, **plain))  # type: ignore[arg-type]
    assert saved[0] == 15
    branch = tmp_path / "shrunk"
    assert run(2, Plan(branch, dies_at=11, waits=False, **plain)) == [None, None]  # type: ignore[arg-type]
    [shrunk] = run(1, Plan(branch, **plain))  # type: ignore[arg-type]
    assert shrunk[0] == 11
    assert shrunk[1] == pytest.approx(whole[1][11:], rel=1e-4)
