"""A loop of Fabric under torchrun, which starts it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lightning.fabric")

from fabric_runs import assert_same, finish, records
from forked import torchrun
from running import outlast as outlast_command

from outlast.records import StateRecovered

SCRIPT = """
import json
import sys
from pathlib import Path

import torch.distributed as dist
from fabric_runs import train

code = train(Path(sys.argv[1]), [], json.loads(sys.argv[2]))
# Gloo's threads may hold tensors of the last collective, and abort a process that ends with them.
dist.destroy_process_group()
sys.exit(code)
"""


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.supports("fabric", "recover")
def test_a_killed_process_of_torchrun_goes_on_from_memory(tmp_path: Path) -> None:
    other, folder = tmp_path / "undisturbed", tmp_path / "killed"
    finish(other, ranks=2, strategy="fsdp")
    folder.mkdir()
    (folder / "plan").write_text("9 SIGKILL 1")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = torchrun(
        tmp_path / "output",
        "--nproc-per-node=2",
        "--max-restarts=1",
        script,
        str(folder),
        json.dumps({"ranks": 2, "strategy": "fsdp"}),
    )
    assert done.code == 0, done.said
    assert_same(folder, other)
    # Nothing was on disk.
    [(_, recovered)] = records(folder).of(StateRecovered)
    assert recovered.source == "memory"
    assert recovered.step >= 7


OWN_SCRIPT = """
import torch
from lightning.fabric import Fabric

from outlast.integrations.fabric import Run

fabric = Fabric(accelerator="cpu", devices=1)
model = torch.nn.Linear(1, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
with Run(fabric, model=model, optimizer=optimizer, loader=[torch.ones(1, 1)]) as run:
    for batch in run:
        fabric.backward(model(batch).sum())
        optimizer.step()
"""


@pytest.mark.distributed
def test_a_script_of_fabric_that_outlast_run_saves_already_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN_SCRIPT)
    ended = outlast_command("run", script)
    assert ended.code == 2, ended.said
    assert "outlast.Run and `outlast run` would both save this script" in ended.said
