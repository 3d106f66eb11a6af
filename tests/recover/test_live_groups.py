"""Replica groups whose processes are killed, stopped, cut off and started again."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from live_runs import PHASES, Fault, Plan, arena, assert_like_reference, require_torchft

pytestmark = pytest.mark.distributed
STEPS = 10


@pytest.fixture(autouse=True)
def _torchft() -> None:
    require_torchft()


@pytest.mark.parametrize("phase", PHASES)
def test_the_survivor_does_the_whole_batch_of_the_step_in_which_a_group_is_killed(
    phase: str, tmp_path: Path
) -> None:
    plan = Plan(steps=STEPS, awaits=2)
    with arena(tmp_path) as groups:
        survivor = groups.start(0, plan)
        dead = groups.start(1, replace(plan, fault=Fault(phase, 4)))
        assert dead.end() == -signal.SIGKILL
        assert survivor.end() == 0
    assert_like_reference(survivor, STEPS)
    assert survivor.steps()[-1]["share"] == [0, 1]
    kinds = survivor.of("event")
    assert "member_lost" in kinds
    assert "membership_changed" in kinds


def test_two_groups_die_in_one_step_and_the_third_goes_on(tmp_path: Path) -> None:
    plan = Plan(steps=STEPS, awaits=3)
    with arena(tmp_path) as groups:
        first = groups.start(0, replace(plan, fault=Fault("mid all-reduce", 4)))
        second = groups.start(1, replace(plan, fault=Fault("backward", 4)))
        survivor = groups.start(2, plan)
        assert first.end() == second.end() == -signal.SIGKILL
        assert survivor.end() == 0
    assert_like_reference(survivor, STEPS)
    assert survivor.steps()[-1]["share"] == [0, 1]
    lost = {each["member"] for each in survivor.lines() if each.get("event") == "member_lost"}
    assert lost == {"group 0", "group 1"}


@pytest.mark.parametrize("rests", [False, True])
def test_a_group_that_returns_takes_the_state_of_a_peer_to_the_last_bit(
    rests: bool, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    plan = Plan(steps=100_000, awaits=2, stop=stop)
    with arena(tmp_path) as groups:
        survivor = groups.start(0, plan)
        dead = groups.start(1, replace(plan, fault=Fault("backward", 4)))
        assert dead.end() == -signal.SIGKILL
        # Another seed: whatever it has made itself must not matter.
        back = groups.start(1, replace(plan, returning=True, seed=7, rests=rests))
        back.wait_for(lambda life: len(life.steps()) >= 3)
        stop.touch()
        assert survivor.end() == back.end() == 0
    assert survivor.of("digest") == back.of("digest") != []
    done = [each["step"] for each in survivor.steps()]
    assert done == list(range(len(done)))
    assert_like_reference(survivor, len(done))
    healed, *_ = (each for each in back.lines() if each.get("event") == "state_recovered")
    assert healed["source"] == "peer"
    assert healed["bytes"] > 0


def test_a_group_killed_while_it_heals_disturbs_nobody(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    plan = Plan(steps=100_000, stop=stop)
    with arena(tmp_path) as groups:
        survivor = groups.start(0, plan)
        survivor.wait_for(lambda life: len(life.steps()) >= 3)
        healing = groups.start(1, replace(plan, returning=True, fault=Fault("heal", 0)))
        assert healing.end() == -signal.SIGKILL
        before = len(survivor.steps())
        survivor.wait_for(lambda life: len(life.steps()) >= before + 3)
        stop.touch()
        assert survivor.end() == 0
    assert_like_reference(survivor, len(survivor.steps()))


@pytest.mark.parametrize("phase", ["forward", "mid all-reduce", "vote", "before the step"])
def test_a_stopped_group_that_continues_heals_and_corrupts_nobody(
    phase: str, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    plan = Plan(steps=100_000, awaits=2, stop=stop)
    with arena(tmp_path) as groups:
        survivor = groups.start(0, plan)
        stopped = groups.start(1, replace(plan, fault=Fault(phase, 4, signal.SIGSTOP)))
        # The others have continued for some steps without it.
        survivor.wait_for(lambda life: [0, 1] in [each["share"] for each in life.steps()[-3:]])
        os.kill(stopped.process.pid, signal.SIGCONT)
        stopped.wait_for(lambda life: "state_recovered" in life.of("event"))
        before = len(stopped.steps())
        stopped.wait_for(lambda life: len(life.steps()) >= before + 3)
        stop.touch()
        assert survivor.end() == stopped.end() == 0
    assert survivor.of("digest") == stopped.of("digest") != []
    assert_like_reference(survivor, len(survivor.steps()))


def test_a_lighthouse_that_is_killed_and_started_again_costs_no_step(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    plan = Plan(steps=100_000, awaits=2, stop=stop)
    with arena(tmp_path) as groups:
        lives = [groups.start(number, plan) for number in range(2)]
        lives[0].wait_for(lambda life: len(life.steps()) >= 3)
        os.kill(groups.lighthouse.pid, signal.SIGKILL)
        time.sleep(0.2)
        assert groups.lighthouse.keep_alive()
        before = len(lives[0].steps())
        for life in lives:
            life.wait_for(
                lambda life: len([1 for each in life.steps()[before:] if each["share"][1] == 2]) > 3
            )
        stop.touch()
        assert [life.end() for life in lives] == [0, 0]
    assert lives[0].of("digest") == lives[1].of("digest") != []
    done = max(lives, key=lambda life: len(life.steps()))
    assert_like_reference(done, len(done.steps()))


def test_a_lighthouse_that_stays_away_ends_the_groups_with_a_sentence(tmp_path: Path) -> None:
    plan = Plan(steps=100_000, awaits=2, timeout_seconds=3.0)
    with arena(tmp_path) as groups:
        lives = [groups.start(number, plan) for number in range(2)]
        lives[0].wait_for(lambda life: len(life.steps()) >= 3)
        os.kill(groups.lighthouse.pid, signal.SIGKILL)
        assert [life.end() for life in lives] == [0, 0]
    for number, life in enumerate(lives):
        (error,) = life.of("error")
        assert f"group {number} waited 3 s for a quorum" in error
        assert "recover.lighthouse" in error


def test_a_group_of_another_job_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    plan = Plan(steps=100_000, stop=stop)
    with arena(tmp_path) as groups:
        survivor = groups.start(0, plan)
        survivor.wait_for(lambda life: len(life.steps()) >= 3)
        other = groups.start(1, replace(plan, identity="another job"))
        assert other.end() == 0
        before = len(survivor.steps())
        survivor.wait_for(lambda life: len(life.steps()) >= before + 3)
        stop.touch()
        assert survivor.end() == 0
    (error,) = other.of("error")
    assert "group 1 is of another job or version (another job" in error
    assert other.steps() == []
    assert_like_reference(survivor, len(survivor.steps()))


def test_a_group_that_returns_to_nobody_does_not_begin_anew(tmp_path: Path) -> None:
    with arena(tmp_path) as groups:
        alone = groups.start(1, Plan(returning=True))
        assert alone.end() == 0
    (error,) = alone.of("error")
    assert "it was started again" in error
    assert alone.steps() == []


def test_a_group_that_returns_to_nobody_takes_the_newest_saved_state(tmp_path: Path) -> None:
    saved = tmp_path / "saved.pt"
    plan = Plan(steps=STEPS, saved=saved)
    with arena(tmp_path) as groups:
        first = groups.start(0, replace(plan, fault=Fault("backward", 5)))
        assert first.end() == -signal.SIGKILL
        back = groups.start(0, replace(plan, returning=True, known=5))
        assert back.end() == 0
    assert [each["step"] for each in back.steps()] == list(range(5, STEPS))
    for each, loss in zip(first.steps() + back.steps(), _reference(), strict=True):
        assert each["loss"] == pytest.approx(loss, rel=1e-4)
    (found,) = (each for each in back.lines() if each.get("event") == "state_recovered")
    assert (found["source"], found["step"]) == ("shared", 5)


def _reference() -> list[float]:
    from live_runs import reference

    return reference(STEPS)


def test_no_group_steps_while_one_does_not_trust_its_gradients(tmp_path: Path) -> None:
    plan = Plan(steps=STEPS, awaits=2)
    with arena(tmp_path) as groups:
        lives = [groups.start(0, plan), groups.start(1, replace(plan, bad=(4,)))]
        assert [life.end() for life in lives] == [0, 0]
    assert lives[0].of("digest") == lives[1].of("digest") != []
    assert_like_reference(lives[0], STEPS)
    assert_like_reference(lives[1], STEPS)
