"""Ranks of `outlast run` decide alike, although signals and clocks are one rank's own."""

import contextlib
import io
import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.errors import IntegrationError
from outlast.runtime import agreement as agreement_module
from outlast.runtime.agreement import BoundaryAgreement, host_group
from outlast.runtime.engine import PeriodicConsensus, Runtime, StepResult
from outlast.runtime.place import ranks_here

pytestmark = pytest.mark.distributed

STEPS = 200


def _decide(stop_at, step_seconds):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    agreement, looked, found = BoundaryAgreement(0), [], None
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
    assert (found.stop, found.save) == (True, False)
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
    agreement = BoundaryAgreement(0)
    wishes = (own == 0, own == 1)
    said = [agreement.exchange(step, False, wish, 1.0).save for step, wish in enumerate(wishes)]
    dist.destroy_process_group()
    return said


def _uneven(ends, seconds):
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    rank, said = dist.get_rank(), ""
    agreement_module._TELL_SECONDS = 0.1
    agreement = BoundaryAgreement(0)
    try:
        for step in range(1, 5):
            if rank == 1 and step == 3:
                # It has fewer batches, and does not come back.
                agreement.left(2)
                if ends:
                    agreement.ended(2)
                break
            agreement.back()
            agreement.exchange(step, False, False, 1.0)
    except IntegrationError as error:
        said = str(error)
        _get_default_store().set("said", "")
    # Its connections are there until the other one has said it.
    _get_default_store().wait(["said"], timedelta(seconds=60))
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize(
    ("ends", "what", "seconds"),
    [(False, "left its training loop", 5.0), (True, "has ended", 1000.0)],
)
def test_a_rank_with_fewer_steps_is_named_and_not_waited_for(ranks, ends, what, seconds):
    first, second = ranks(2)(_uneven, ends, seconds)
    assert second == ""
    assert first.startswith(f"rank 1 {what} after 2 steps, and rank 0 did 3: ")
    assert "drop_last=True" in first


def _late():
    dist.init_process_group("gloo")
    agreement_module._TELL_SECONDS = agreement_module._AWAY_SECONDS = 0.05
    agreement, said = BoundaryAgreement(0), io.StringIO()
    if dist.get_rank() == 1:
        # An evaluation of its own between two loops: the other one has said that it waits.
        agreement.left(0)
        dist.barrier()
        agreement.back()
    else:
        looked = agreement._look

        def look(*arguments, **options):
            with contextlib.redirect_stderr(said):
                looked(*arguments, **options)
            if said.getvalue() and not released:
                released.append(True)
                dist.barrier()

        released = []
        agreement._look = look
    stop = agreement.exchange(1, dist.get_rank() == 1, False, 1.0).stop
    dist.destroy_process_group()
    return stop, said.getvalue()


def test_a_rank_that_comes_back_is_waited_for(ranks):
    (stopped, said), (other, nothing) = ranks(2)(_late)
    assert (stopped, other, nothing) == (True, True, "")
    # Once, and with the bound of the process group.
    assert said.count("outlast: rank 0 has waited for ") == 1
    assert "at step 1 for rank 1, which left its training loop after 0 steps" in said
    assert "it waits for 1800 s at most" in said


class _EndsMeanwhile:
    """A collective that ends between a wait in vain and the look whether it is done."""

    def __init__(self, work):
        self._work = work
        self.is_completed = work.is_completed

    def wait(self, *seconds):
        try:
            return self._work.wait(*seconds)
        except RuntimeError:
            _get_default_store().set("waited", "")
            deadline = time.monotonic() + 60
            while not self._work.is_completed():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            raise


def _slow():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        own = dist.all_reduce
        dist.all_reduce = lambda *arguments, **options: _EndsMeanwhile(own(*arguments, **options))
    agreement = BoundaryAgreement(0)
    if dist.get_rank() == 1:
        _get_default_store().wait(["waited"], timedelta(seconds=60))
    stop = agreement.exchange(1, dist.get_rank() == 1, False, 1.0).stop
    dist.destroy_process_group()
    return stop


def test_a_rank_that_comes_as_a_wait_ends_is_no_failure(ranks):
    assert ranks(2)(_slow) == [True, True]


def _twice(folder):
    said = []
    for life in range(2):
        world, rank = (int(os.environ[name]) for name in ("WORLD_SIZE", "RANK"))
        meeting = f"file://{folder}/{life}"
        dist.init_process_group("gloo", meeting, world_size=world, rank=rank)
        first = host_group()
        said += [BoundaryAgreement(0).any(0, dist.get_rank() == life) for _ in range(2)]
        assert host_group() is first
        dist.destroy_process_group()
    return said


def test_one_group_serves_all_and_ends_with_the_default_one(ranks, tmp_path):
    assert ranks(2)(_twice, tmp_path) == [[True] * 4] * 2


def _ends(steps):
    """Ranks with different numbers of steps, of which one meets the others at its end."""
    dist.init_process_group("gloo")
    runtime = Runtime(ranks_here(), PeriodicConsensus())
    runtime.take_signals()
    runtime.begin(0)
    said = ""
    try:
        for step in range(1, steps[dist.get_rank()] + 1):
            runtime.after_update(StepResult(step))
        runtime.end_steps(steps[dist.get_rank()])
    except IntegrationError as error:
        said = str(error)
    runtime.close()
    dist.destroy_process_group()
    return said


def test_ranks_that_end_after_unequal_steps_are_told(ranks):
    first, second = ranks(2)(_ends, (5, 1))
    assert "rank 1 did 1 steps, where the ranks did from 1 to " in second
    assert first.startswith("rank 0 did ")
    assert "drop_last=True" in first
    assert ranks(2)(_ends, (3, 3)) == ["", ""]
