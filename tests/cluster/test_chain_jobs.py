"""A chain's own jobs: which follow, which are cancelled, what they run; the live queue."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast.cluster.chain_files import ChainFiles, ChainPlan
from outlast.cluster.link import LinkJob, program_of
from outlast.cluster.policies.forecast import queue_of
from outlast.cluster.simulate import forecast_start
from outlast.cluster.slurm import partitions_from_text, queue_from_text
from outlast.cluster.submission import batch_script, comment_of

PLAN = ChainPlan("abc", "n", "dependent", (4, 2), 2, 3600.0, "/", "python")
FOLDER = Path(__file__).parent / "slurm_outputs"


def link(plan: ChainPlan, number: int, job: str = "7") -> LinkJob:
    return LinkJob(ChainFiles(Path("/runs/n/chain")), plan, number, job)


def submitted(*jobs: str) -> list[dict[str, Any]]:
    return [{"kind": "submitted", "time": 0.0, "job": job} for job in jobs]


def test_a_link_that_ends_the_chain_cancels_all_others() -> None:
    assert link(PLAN, 2, "8").other_jobs(submitted("7", "8", "9")) == ["7", "9"]


def test_a_place_of_an_array_cancels_those_after_it() -> None:
    array = replace(PLAN, kind="array", links=6)
    assert link(array, 3, "7_2").other_jobs(submitted("7")) == ["7_[3-5]"]
    assert link(array, 6, "7_5").other_jobs(submitted("7")) == []
    # An array that a resume has submitted, from link 4 on.
    assert link(array, 5, "9_1").other_jobs(submitted("7", "9")) == ["7", "9_[2-2]"]


def test_the_last_link_is_the_one_that_was_allowed() -> None:
    assert not link(PLAN, 99).is_last
    limited = replace(PLAN, links=3)
    assert [link(limited, number).is_last for number in (2, 3, 4)] == [False, True, True]


def test_a_link_is_a_step_of_all_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    train = ["python", "-m", "outlast", "train", "/runs/n/chain/job.toml"]
    # Ranks that stop to be continued end with 0 there: see tests/slurm/test_slurm_chain.py.
    step = ["srun", "--nodes=2", "--ntasks=4", "--kill-on-bad-exit=1"]
    step.append("--export=ALL,OUTLAST_LINK_RECORD=1")
    assert program_of(link(PLAN, 5)) == [*step, *train]
    alone = replace(PLAN, nodes=(1,), tasks_per_node=1)
    assert program_of(link(alone, 1)) == train, "in a container without srun"
    own = replace(PLAN, command="srun mine")
    assert program_of(link(own, 1)) == ["bash", "-c", "srun mine"]


def test_a_filler_has_its_own_script_and_is_told_its_size(tmp_path: Path) -> None:
    files = ChainFiles(tmp_path)
    filler = replace(PLAN, filler_nodes=(2, 1)).shaped(2, 1800.0, filler=True)
    text = batch_script(files, filler, 3)
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --time=00:30:00\n" in text
    assert text.splitlines()[-1].endswith(f"-m outlast.cluster.chain {tmp_path} 3 filler 2 1800")
    assert comment_of(filler, 3) != comment_of(PLAN, 3), "found again apart from its link"


def test_the_live_queue_is_the_simulators() -> None:
    partitions = partitions_from_text((FOLDER / "sinfo.txt").read_text())
    jobs = queue_from_text((FOLDER / "squeue.txt").read_text())
    now = 1795352119.0 + 60.0
    queue = queue_of(partitions[:1], jobs, now)
    assert (queue.nodes, queue.free_nodes) == (8, 4)
    assert queue.running_nodes.tolist() == [4]
    assert queue.running_end_seconds.tolist() == [1795353919.0]
    # The job with a dependency does not wait for nodes; the next in line is the highest priority.
    assert queue.pending_nodes.tolist() == [8, 1]
    assert queue.pending_jobs.tolist() == [2, 4]
    # Of four free nodes one goes to the job of one node, while that of eight waits.
    assert forecast_start(queue, 3, 600.0) == now
    assert forecast_start(queue, 4, 600.0) > now
    assert forecast_start(queue, 3, 7200.0) > now
