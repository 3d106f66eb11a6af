"""torchft's Manager with a vote of the guards, a common store and rules for those that return."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torchft_groups import Plan, arena, reference

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torchft", reason="torchft (the extra ft) is not installed")


from outlast.checkpoint import CheckpointStore
from outlast.errors import IntegrationError
from outlast.guard import guard
from outlast.integrations.torchft import guarded_commit, kept_state

pytestmark = pytest.mark.distributed

FAULTY = "linear.output:module=2:bit=27:permanent:step=4"
"""Of the second layer, from the fifth step on, whenever it is computed."""


def assert_like_reference(weights: torch.Tensor, steps: int) -> None:
    torch.testing.assert_close(weights, reference(steps), rtol=1e-4, atol=1e-5)


@pytest.mark.supports("torchft", "guard")
@pytest.mark.parametrize("waits_for_quorum", [False, True])
def test_a_group_with_wrong_numbers_leaves_and_no_step_has_any_of_them(
    waits_for_quorum: bool, tmp_path: Path
) -> None:
    plan = Plan(steps=10, waits_for_quorum=waits_for_quorum)
    with arena(tmp_path) as groups:
        sound, faulty = groups.start_all(plan, replace(plan, fault=FAULTY))
        assert faulty.end() == sound.end() == 0
    assert faulty.of("error") == ["DataCorruptionError"]
    assert "step 5: this group's numbers are wrong and stay so" in faulty.of("message")[0]
    assert "linear.forward of 2" in faulty.of("message")[0]
    # Its first vote was refused by both, its second was its last.
    assert faulty.steps(committed=False) == [4]
    assert sound.steps(committed=False)[:2] == [4, 4]
    assert sound.steps() == list(range(10))
    assert_like_reference(sound.weights(), 10)


@pytest.mark.supports("torchft", "guard")
def test_without_faults_the_votes_change_nothing(tmp_path: Path) -> None:
    plan = Plan(steps=10)
    with arena(tmp_path) as groups:
        first, second = groups.start_all(plan, plan)
        assert first.end() == second.end() == 0
    assert first.steps() == second.steps() == list(range(10))
    assert first.of("findings") == second.of("findings") == [[]]
    assert torch.equal(first.weights(), second.weights())
    assert_like_reference(first.weights(), 10)


@pytest.mark.supports("torchft", "checkpoint", "resume", "malleable")
def test_a_run_of_two_killed_groups_goes_on_with_one(tmp_path: Path) -> None:
    plan = Plan(steps=30, kept=tmp_path / "checkpoints", every=4, killed_at=14)
    with arena(tmp_path) as groups:
        lives = groups.start_all(plan, plan)
        assert [each.end() for each in lives] == [-signal.SIGKILL] * 2
    with arena(tmp_path) as groups:
        alone = groups.start(0, replace(plan, killed_at=-1, seed=7, returning=True))
        assert alone.end() == 0
    (restored,) = alone.of("restored")
    assert restored in (8, 12)
    assert alone.steps() == list(range(restored, 30))
    assert_like_reference(alone.weights(), 30)


@pytest.mark.supports("torchft", "recover", "guard", "checkpoint")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_group_that_returns_takes_a_peers_state_and_its_guard_finds_nothing(
    killed: int, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    plan = Plan(steps=0, kept=tmp_path / "checkpoints", every=3, ends_with=stop)
    with arena(tmp_path) as groups:
        plans = [replace(plan, killed_at=5) if each == killed else plan for each in (0, 1)]
        lives = groups.start_all(*plans)
        survivor, dead = lives[1 - killed], lives[killed]
        assert dead.end() == -signal.SIGKILL
        # Other first weights: whatever it has made itself must not matter.
        back = groups.start(killed, replace(plan, seed=7, returning=True))
        back.wait_for(lambda life: len(life.steps()) >= 10)
        stop.touch()
        assert survivor.end() == back.end() == 0
    assert survivor.of("error") == back.of("error") == []
    assert survivor.of("findings") == back.of("findings") == [[]]
    both = back.digests()
    assert min(both) >= 5
    common = survivor.digests()
    assert all(common.get(step, digest) == digest for step, digest in both.items())
    assert len(both.keys() & common.keys()) >= 9
    # Whoever is the first of the groups has saved on, group 0 again where it has returned.
    with CheckpointStore(plan.kept) as store:
        newest = store.newest()
    assert newest is not None
    assert newest.step > min(both)
    assert_like_reference(survivor.weights(), survivor.of("reached")[0])


@pytest.mark.supports("torchft", "recover")
def test_a_group_that_returns_to_nobody_does_not_begin_anew(tmp_path: Path) -> None:
    plan = Plan(steps=6, kept=tmp_path / "checkpoints", every=100, returning=True)
    with arena(tmp_path) as groups:
        alone = groups.start(0, plan)
        assert alone.end() == 0
    assert alone.of("error") == ["RecoverError"]
    assert "step 0 would be done a second time" in alone.of("message")[0]
    assert alone.steps() == []
    with arena(tmp_path) as groups:
        known = groups.start(0, replace(plan, returning=False, known=40))
        assert known.end() == 0
    assert "the run has reached step 40" in known.of("message")[0]
    assert known.steps() == []


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    state = {"model": model}
    with (
        pytest.raises(IntegrationError, match="every = 0 must be 1 or more"),
        kept_state(None, tmp_path, state, every=0),
    ):
        pass
    with (
        pytest.raises(IntegrationError, match='state\\["torchft"\\] is a name of its own'),
        kept_state(None, tmp_path, {"torchft": model}, every=1),
    ):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outlast.integrations.version", lambda _: "0.1.1")
        with (
            pytest.raises(IntegrationError, match=r"torchft 0\.1\.1 is installed; .* from 0\.2"),
            guarded_commit(None, guard(model)),
        ):
            pass
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        with (
            pytest.raises(IntegrationError, match="the model and the optimizer themselves"),
            guarded_commit(None, guard(wrapped)),
        ):
            pass
    finally:
        torch.distributed.destroy_process_group()
