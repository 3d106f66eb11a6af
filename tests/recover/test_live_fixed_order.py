"""Groups that die and return in the fixed order of sums: the bits of a run without deaths."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from live_runs import Fault, Plan, arena, assert_like_reference, require_torchft

pytestmark = pytest.mark.distributed
STEPS = 10
PARTS = 6


@pytest.fixture(autouse=True)
def _torchft() -> None:
    require_torchft()


def undisturbed(folder: Path, groups: int, steps: int) -> str:
    """What the state of groups that nothing befalls is in the end."""
    folder.mkdir()
    plan = Plan(steps=steps, awaits=groups, parts=PARTS)
    with arena(folder) as place:
        lives = [place.start(number, plan) for number in range(groups)]
        assert [life.end() for life in lives] == [0] * groups
    (digest,) = {each for life in lives for each in life.of("digest")}
    return str(digest)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state after all steps, of three groups as of one."""
    require_torchft()
    folder = tmp_path_factory.mktemp("undisturbed")
    three, one = (undisturbed(folder / str(groups), groups, STEPS) for groups in (3, 1))
    assert three == one
    return one


@pytest.mark.parametrize("phase", ["after a part", "mid all-reduce", "vote", "before the step"])
def test_survivors_of_a_death_end_with_the_bits_of_the_undisturbed_run(
    phase: str, tmp_path: Path, expected: str
) -> None:
    plan = Plan(steps=STEPS, awaits=3, parts=PARTS)
    with arena(tmp_path) as groups:
        survivors = [groups.start(0, plan), groups.start(2, plan)]
        dead = groups.start(1, replace(plan, fault=Fault(phase, 4)))
        assert dead.end() == -signal.SIGKILL
        assert [life.end() for life in survivors] == [0, 0]
    for life in survivors:
        assert_like_reference(life, STEPS)
    assert survivors[0].steps()[-1]["share"] == [0, 2]
    assert {each for life in survivors for each in life.of("digest")} == {expected}


def test_so_do_a_group_that_returns_and_the_one_that_it_heals_from(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    plan = Plan(steps=100_000, awaits=2, stop=stop, parts=PARTS)
    with arena(tmp_path) as groups:
        survivor = groups.start(0, plan)
        dead = groups.start(1, replace(plan, fault=Fault("backward", 4)))
        assert dead.end() == -signal.SIGKILL
        back = groups.start(1, replace(plan, returning=True, seed=7))
        back.wait_for(lambda life: len(life.steps()) >= 3)
        stop.touch()
        assert survivor.end() == back.end() == 0
    steps = len(survivor.steps())
    assert [0, 1] in [each["share"] for each in survivor.steps()]
    assert survivor.of("digest") == back.of("digest") == [undisturbed(tmp_path / "two", 2, steps)]


def test_groups_that_sum_otherwise_do_not_meet(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    plan = Plan(steps=100_000, stop=stop, parts=PARTS)
    with arena(tmp_path) as groups:
        trains = groups.start(0, plan)
        trains.wait_for(lambda life: len(life.steps()) >= 2)
        other = groups.start(1, replace(plan, parts=0))
        assert other.end() == 0
        stop.touch()
        assert trains.end() == 0
    (error,) = other.of("error")
    assert "of another job or version" in error
    assert "batches in 6 parts" in error
