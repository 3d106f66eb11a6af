"""Ranks of `outlast run` decide alike, although signals and clocks are one rank's own."""

import pytest
import torch.distributed as dist

from outlast.integrations.agreement import Agreed, Agreement

pytestmark = pytest.mark.distributed

STEPS = 200


def _decide(stop_at, step_seconds):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    agreement, looked, found = Agreement(0), [], None
    for step in range(STEPS):
        if not agreement.is_due(step):
            continue
        looked.append(step)
        stop = rank == 1 and step >= stop_at
        # Rank 1 would save each time, and has a clock of its own.
        found = agreement.exchange(step, stop, rank == 1 or step == 0, step_seconds / (1 + rank))
        if found.stop:
            break
    dist.destroy_process_group()
    return looked, found


def test_stop_of_one_rank_is_that_of_all_at_one_step(ranks):
    first, second = ranks(2)(_decide, 37, 0.05)
    assert first == second
    looked, found = first
    assert found == Agreed(stop=True, save=False)
    assert looked[-1] >= 37
    # 20 steps of 0.05 s are a second: no stop waits for longer than that.
    assert looked[:5] == [0, 2, 6, 14, 30]
    assert looked[-1] - 37 <= 20


def test_long_steps_are_looked_at_one_by_one(ranks):
    for looked, _ in ranks(2)(_decide, 4, 3.0):
        assert looked == [0, 1, 2, 3, 4]


def test_save_is_the_wish_of_the_first_rank(ranks):
    said = ranks(2)(_one_wish)
    assert said == [[True, False]] * 2


def _one_wish():
    dist.init_process_group("gloo")
    own = dist.get_rank()
    agreement = Agreement(0)
    wishes = (own == 0, own == 1)
    said = [agreement.exchange(step, False, wish, 1.0).save for step, wish in enumerate(wishes)]
    dist.destroy_process_group()
    return said
