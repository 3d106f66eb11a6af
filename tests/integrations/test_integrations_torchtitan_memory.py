"""torchtitan's trainer under torchrun: a killed rank, and a group that continues from memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from forked import run_ranks, torchrun

pytest.importorskip("torchtitan", reason="pip install 'outlast[torchtitan]'")

from titan_trainer import STEPS, Plan, train

from outlast.records import CheckpointRestored, CheckpointSaved, StateRecovered, Warned, read_run

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

HERE = Path(__file__).parent

SCRIPT = """
from pathlib import Path

import torch.distributed as dist
from titan_trainer import Plan, train

from outlast.distributed.group import Group

HERE = Path(__file__).parent
made = Group.__init__

def make(self, process_group=None, **options):
    # NCCL alone, torchtitan's default group on GPUs, sends no host memory.
    assert process_group is not None or "node" not in options
    made(self, process_group, **options)

Group.__init__ = make
plan = Plan(HERE / "run", (HERE / "job.toml").read_text(), dies_at=7)
found = train(plan)
(HERE / f"digest{dist.get_rank()}").write_text(found.digest)
dist.destroy_process_group()
"""
"""Saves the steps 4 and 8 on disk; rank 1 dies when it has done the seventh."""


@pytest.mark.supports("torchtitan", "recover", "resume")
def test_a_killed_rank_costs_one_step_and_no_bit(tmp_path: Path) -> None:
    [whole, _] = run_ranks(2, train, Plan(tmp_path / "whole"))
    memory = tmp_path / "memory"
    (tmp_path / "job.toml").write_text(
        f'recover.memory = "{memory}"\nenergy.measure = false\nlog.every_steps = 1\n'
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    done = torchrun(
        tmp_path / "output",
        "--nproc-per-node=2",
        "--max-restarts=2",
        str(tmp_path / "train.py"),
    )
    assert done.code == 0, done.said
    assert [(tmp_path / f"digest{rank}").read_text() for rank in (0, 1)] == [whole.digest] * 2
    run = read_run(tmp_path / "run")
    assert len(run.attempts) == 2
    [(_, recovered)] = run.of(StateRecovered)
    # The seventh step was done and not kept yet; on disk was the fourth at best.
    assert (recovered.source, recovered.step) == ("memory", 6)
    assert dict(run.losses())[STEPS] == whole.losses[STEPS]
    assert run.of(CheckpointSaved)[-1][1].step == STEPS
    # All is on disk in the end.
    assert not list(memory.rglob("rank-*"))


def test_a_run_that_begins_at_a_step_of_its_recipe_is_restarted_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    memory = tmp_path / "memory"
    job = f'recover.memory = "{memory}"\nenergy.measure = false\n'
    plan = Plan(tmp_path / "run", job)
    # The newest version is of the eighth step, from which the next starts do not continue.
    [whole] = run_ranks(1, train, plan)
    begun = replace(plan, load_step=4, dies_at=7)
    assert run_ranks(1, train, begun, may_die={0}) == [None]
    with monkeypatch.context() as restarted:
        restarted.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        [rest] = run_ranks(1, train, begun)
    assert rest.losses == {step: whole.losses[step] for step in (7, 8)}
    assert rest.digest == whole.digest
    assert not list(memory.rglob("rank-*"))
    # What an earlier start has kept counts for no restart of one that was begun by hand.
    assert run_ranks(1, train, begun, may_die={0}) == [None]
    assert run_ranks(1, train, replace(begun, dies_at=5), may_die={0}) == [None]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    [rest] = run_ranks(1, train, begun)
    assert rest.losses == {step: whole.losses[step] for step in (5, 6, 7, 8)}
    run = read_run(tmp_path / "run")
    assert [(each.attempt, event.step) for each, event in run.of(StateRecovered)] == [(3, 6)]
    assert [each.attempt for each, _ in run.of(CheckpointRestored)] == [2, 4, 5, 6]
    assert [
        each.attempt for each, event in run.of(Warned) if "begins at step 4 again" in event.message
    ] == [6]
