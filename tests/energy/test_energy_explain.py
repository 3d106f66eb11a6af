"""Whether a schedule explains measured steps: fitted where it does, refused where it does not."""

from __future__ import annotations

import random

import pytest

from outlast.energy import example
from outlast.energy.profile import Key, check_profile
from outlast.energy.schedule import (
    ExecutedStep,
    Schedule,
    explained,
    gpipe,
    one_f_one_b,
    with_tail,
    with_transfers,
)
from outlast.errors import EnergyError

SCHEDULE = one_f_one_b(4, 12)
TRUTH = with_tail(with_transfers(SCHEDULE))


def executed(
    count: int,
    *,
    transfer: float = 0.0,
    tail: float = 0.0,
    noise: float = 0.0,
    truth: Schedule = TRUTH,
) -> list[ExecutedStep]:
    """Steps of stages whose speeds change from step to step."""
    draw = random.Random(1)
    steps = []
    for _ in range(count):
        speed = [draw.uniform(0.9, 1.3) for _ in range(4)]
        base = {"forward": 0.1, "backward": 0.2}
        seconds = [base[o.phase] * speed[o.stage] for o in SCHEDULE.operations]
        added = {"send_forward": transfer, "send_backward": transfer, "tail": tail}
        of_key = {o.key: s for o, s in zip(SCHEDULE.operations, seconds, strict=True)}
        whole = truth.makespan([of_key.get(o.key, added.get(o.phase, 0)) for o in truth.operations])
        steps.append(ExecutedStep(tuple(seconds), whole * (1 + draw.gauss(0, noise))))
    return steps


def test_transfers_and_tail_are_found_and_unseen_steps_predicted():
    steps = executed(16, transfer=0.004, tail=0.06)
    found = explained(SCHEDULE, steps[:10])
    assert found.transfer_seconds == pytest.approx(0.004, rel=0.1)
    assert found.tail_seconds == pytest.approx(0.06, rel=0.1)
    assert found.residual < 0.001
    for step in steps[10:]:
        predicted = found.step_seconds(step.operation_seconds)
        assert predicted == pytest.approx(step.step_seconds, rel=1e-3)


def test_noise_shows_in_the_residual():
    exact = explained(SCHEDULE, executed(12, transfer=0.004, tail=0.06))
    noisy = explained(SCHEDULE, executed(12, transfer=0.004, tail=0.06, noise=0.004))
    assert 0.02 > noisy.residual > exact.residual + 0.002


def test_steps_without_anything_else_need_nothing_fitted():
    found = explained(SCHEDULE, executed(6))
    assert found.transfer_seconds == found.tail_seconds == 0.0
    assert found.residual == pytest.approx(0.0, abs=1e-12)
    assert explained(SCHEDULE, executed(1)).fitted_share == pytest.approx(0.0, abs=1e-12)


def test_communication_bound_steps_are_refused_with_share_and_limit():
    steps = executed(10, transfer=0.03, tail=0.2)
    with pytest.raises(EnergyError, match=r"\d+\.\d% .*limit 5\.0%.*communication-bound"):
        explained(SCHEDULE, steps)
    found = explained(SCHEDULE, steps, fitted_limit=0.5)
    assert found.transfer_seconds == pytest.approx(0.03, rel=0.1)


def test_timed_transfers_are_not_fitted_and_may_take_as_long_as_they_do():
    timed = with_transfers(SCHEDULE)
    steps = []
    for step in executed(8):
        seconds = (*step.operation_seconds, *[0.05] * (len(timed.operations) - 96))
        steps.append(ExecutedStep(seconds, timed.makespan(seconds) + 0.03))
    found = explained(timed, steps)
    assert found.transfer_seconds == 0.0
    assert found.tail_seconds == pytest.approx(0.03, rel=0.01)


def test_what_changes_from_step_to_step_is_refused():
    steps = executed(10, tail=0.05, noise=0.05)
    with pytest.raises(EnergyError, match=r"leaves \d+\.\d% .*limit 2\.0%.*even with fitted"):
        explained(SCHEDULE, steps)


def test_few_steps_must_be_explained_without_a_fit():
    with pytest.raises(EnergyError, match="measure at least 4 steps"):
        explained(SCHEDULE, executed(3, tail=0.2))


def test_another_schedule_than_the_one_that_ran_is_refused():
    # Backwards that began before all forwards had ended.
    ran = [
        ExecutedStep(step.operation_seconds, 0.7 * gpipe(4, 12).makespan(step.operation_seconds))
        for step in executed(6)
    ]
    with pytest.raises(
        EnergyError, match=r"alone would take 4\d\.\d% longer .*another schedule ran"
    ):
        explained(gpipe(4, 12), ran)


def test_a_profile_with_transfers_and_tail_can_be_planned_with():
    found = explained(SCHEDULE, executed(8, transfer=0.004, tail=0.06))
    profile = found.extended(example.profile("a100"))
    for each in found.schedule.operations:
        assert profile.curve(each.key).points
    assert profile.curve(Key(0, "send_forward")).top.joules == 0.0
    assert profile.curve(Key(3, "tail")).top.seconds == found.tail_seconds


@pytest.mark.parametrize(
    ("transfer", "tail", "added"),
    [(0.0, 0.0, set()), (0.0, 0.06, {"tail"}), (0.004, 0.0, {"send_forward", "send_backward"})],
)
def test_what_takes_no_time_is_left_out(transfer: float, tail: float, added: set[str]):
    found = explained(
        SCHEDULE, executed(3 if not transfer + tail else 8, transfer=transfer, tail=tail)
    )
    assert {o.phase for o in found.schedule.operations} == {"forward", "backward"} | added
    found.schedule.check()
    check_profile(found.extended(example.profile("a100")))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "no measured step"),
        ([ExecutedStep((0.1,), 1.0)], "measured step 0 has 1 operation_seconds"),
        ([ExecutedStep((), 1.0)], "no operation_seconds"),
        ([ExecutedStep((float("nan"),) * 96, 1.0)], "operation_seconds = nan"),
        ([ExecutedStep((0.1,) * 96, -1.0)], "step_seconds = -1.0"),
    ],
)
def test_malformed_measurements_are_refused(steps: list[ExecutedStep], words: str):
    with pytest.raises(EnergyError, match=words):
        explained(SCHEDULE, steps)
