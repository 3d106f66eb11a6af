"""Coded sums through a server and between pairs, among real processes that stop and die."""

import functools
import operator
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from coded_ranks import (
    cyclic,
    die,
    full_gradient,
    get_through,
    gradient_of,
    losses_of,
    model_of,
    relative,
    repetition,
    samples_of,
    start,
    stop,
    supervised,
    work,
)

from outlast.coding.protocol import CodedGossip, CodedServer, peers
from outlast.coding.protocol.key_value_store import KeyValueStore
from outlast.errors import CodingError, LeftBehindError, LostChunksError

pytestmark = pytest.mark.distributed
CLOSE = 1e-11
BOTH = pytest.mark.parametrize("protocol", [CodedServer, CodedGossip], ids=["server", "gossip"])


@pytest.fixture
def workers(ranks):
    """Like ``ranks``, where a worker may die and its result is None then."""
    return lambda size, **settings: (
        lambda task, *args: ranks(size)(functools.partial(supervised, task, **settings), *args)
    )


def assert_equal_and_right(records, step, coefficients=None):
    """All records have the same gradient of a step to the bit, of the whole batch or as given."""
    first = records[0]
    for record in records:
        assert np.array_equal(record.gradients[step], first.gradients[step])
    chunks = len(first.outcomes[step].weights)
    right = full_gradient(step, np.ones(chunks) if coefficients is None else coefficients)
    assert relative(first.gradients[step], right) < CLOSE


def in_step(victim, step, fault):
    """The fault of a worker before its last chunk of a step."""

    def at(worker, number):
        if (worker, number) == (victim, step):
            fault()

    return at


@pytest.mark.smoke
@BOTH
def test_the_gradient_is_exact_and_equal_whoever_is_slow(workers, protocol):
    records = workers(4)(
        functools.partial(work, repetition(4, 1), 4, slow=operator.eq, protocol=protocol)
    )
    for step in range(4):
        assert_equal_and_right(records, step)
        outcome = records[0].outcomes[step]
        assert step in outcome.late
        assert outcome.exact
        assert outcome.weights[step] == 0


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 8])
def test_any_number_of_messages_is_added_up(workers, protocol, size):
    code = cyclic(size, 1) if size > 2 else repetition(size, 0)
    records = workers(size)(functools.partial(work, code, 2, patient=True, protocol=protocol))
    for step in range(2):
        assert_equal_and_right(records, step)


@BOTH
def test_long_gradients_go_in_pieces(workers, protocol):
    def in_pieces(code, steps, **settings):
        peers._PIECE_BYTES = 100
        return work(code, steps, **settings)

    records = workers(3)(
        functools.partial(in_pieces, cyclic(3, 1), 2, patient=True, protocol=protocol)
    )
    for step in range(2):
        assert_equal_and_right(records, step)


@BOTH
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_costs_no_step_and_later_steps_do_without_it(workers, protocol, victim):
    if protocol is CodedServer and victim == 0:
        pytest.skip("the server cannot be replaced: see the test of its death")
    at = in_step(victim, 1, die)
    begun = time.monotonic()
    records = workers(4)(
        functools.partial(
            work, repetition(4, 1), 5, at=at, protocol=protocol, patient=True, timeout_seconds=30.0
        )
    )
    # Nobody has waited for the dead one.
    assert time.monotonic() - begun < 25.0
    left = [record for record in records if record is not None]
    assert len(left) == 3
    for step in range(5):
        assert_equal_and_right(left, step)
        assert left[0].outcomes[step].exact
    assert sum(victim in outcome.lost for outcome in left[0].outcomes) == 1
    assert victim not in left[0].outcomes[4].late


def failing_on_the_way(victim, fault, protocol, code, steps, **settings):
    """The victim has announced its message first, and is among the survivors, when it fails."""
    whole = protocol._gather

    def gather(self, senders):
        if self.worker == victim and self._round == 0:
            fault()
        return whole(self, senders)

    def pause(worker, step, chunk):
        return 0.0 if worker == victim else 0.1

    protocol._gather = gather
    return work(code, steps, protocol=protocol, pause=pause, **settings)


@BOTH
def test_a_survivor_that_dies_before_it_has_sent_is_decoded_around(workers, protocol):
    records = workers(4)(
        functools.partial(
            failing_on_the_way, 1, die, protocol, cyclic(4, 1), 3, patient=True,
            timeout_seconds=30.0,
        )
    )  # fmt: skip
    left = [record for record in records if record is not None]
    assert len(left) == 3
    for step in range(3):
        assert_equal_and_right(left, step)
    assert left[0].outcomes[0].lost == (1,)
    assert 1 not in left[0].outcomes[0].survivors


@BOTH
def test_a_survivor_that_stands_still_on_the_way_is_left_behind_and_told_so(workers, protocol):
    records = workers(4)(
        functools.partial(
            failing_on_the_way, 1, stop, protocol, cyclic(4, 1), 3, patient=True,
            timeout_seconds=1.2,
        )
    )  # fmt: skip
    assert isinstance(records[1].error, LeftBehindError)
    left = [record for worker, record in enumerate(records) if worker != 1]
    for step in range(3):
        assert_equal_and_right(left, step)


@BOTH
def test_a_stopped_worker_holds_nobody_up_and_gets_the_sums_that_it_missed(workers, protocol):
    def after(worker, step):
        if worker != 3 and step == 2:
            get_through()

    # It stands still until the others have done all steps, or have waited for too long for it.
    records = workers(4, through=3)(
        functools.partial(
            work, repetition(4, 1), 3, at=in_step(3, 1, stop), after=after, protocol=protocol,
            patient=True, timeout_seconds=60.0,
        )
    )  # fmt: skip
    for step in range(3):
        assert_equal_and_right(records, step)
    for record in records[:3]:
        assert all(3 in outcome.late for outcome in record.outcomes[1:])
    assert records[3].seconds[1] > max(record.seconds[2] for record in records[:3])
    assert all(record.outcomes[2].lost == () for record in records)


@BOTH
def test_a_worker_that_stands_still_for_longer_is_left_behind_and_told_so(workers, protocol):
    at = in_step(2, 1, stop)
    # On a busy machine the others' first step takes a second.
    records = workers(4, stopped_seconds=12.0)(
        functools.partial(
            work, repetition(4, 1), 6, at=at, protocol=protocol, patient=True, timeout_seconds=4.0
        )
    )
    assert isinstance(records[2].error, LeftBehindError)
    left = [record for worker, record in enumerate(records) if worker != 2]
    for step in range(6):
        assert_equal_and_right(left, step)


@pytest.mark.parametrize("moment", ["while it computes", "before it has the messages"])
def test_all_workers_are_told_at_once_when_the_server_dies(workers, moment):
    settings = {"patient": True, "timeout_seconds": 120.0}
    if moment == "while it computes":
        task = functools.partial(
            work, repetition(4, 1), 3, at=in_step(0, 0, die), protocol=CodedServer, **settings
        )
    else:
        task = functools.partial(
            failing_on_the_way, 0, die, CodedServer, cyclic(4, 1), 3, **settings
        )
    begun = time.monotonic()
    records = workers(4)(task)
    assert time.monotonic() - begun < 60.0
    assert records[0] is None
    for record in records[1:]:
        assert "rank 0, the server of the gradients, is gone" in str(record.error)
        assert "restart from a checkpoint" in str(record.error)


def both_of_a_group_die(worker, step):
    if step == 1 and worker in {2, 3}:
        die()


@BOTH
def test_lost_chunks_are_named_on_all_workers_or_rescaled_away(workers, protocol):
    settings = {"at": both_of_a_group_die, "protocol": protocol, "timeout_seconds": 2.0}
    for record in workers(4)(functools.partial(work, repetition(4, 1), 3, **settings))[:2]:
        assert isinstance(record.error, LostChunksError)
        assert record.error.chunks == (2, 3)
    records = workers(4)(
        functools.partial(work, repetition(4, 1), 4, on_lost="rescale", **settings)
    )[:2]
    for step in (1, 2, 3):
        assert_equal_and_right(records, step, coefficients=[2.0, 2.0, 0.0, 0.0])
        outcome = records[0].outcomes[step]
        assert not outcome.exact
        assert outcome.certificate.error == pytest.approx(2.0)
        assert outcome.scale == pytest.approx(2.0)
    # The dead are not waited for again.
    assert records[0].seconds[3] < 1.0


def clipped(protocol):
    """Gradients are changed in place, and set to zero in place, while sums are on their way."""
    rank = start()
    model = model_of()
    coded = protocol(model, repetition(2, 1))
    dist.barrier()
    found = []
    for step in range(4):
        for chunk, weight in coded.chunks():
            (weight * losses_of(model, samples_of(step, chunk)).sum()).backward()
            time.sleep(0.3 * rank)
        coded.reduce(step)
        found.append(gradient_of(model).copy())
        for parameter in model.parameters():
            parameter.grad.mul_(float("nan"))
        model.zero_grad(set_to_none=False)
        for parameter in model.parameters():
            parameter.grad.zero_()
    coded.close()
    return found


@BOTH
def test_what_is_done_to_gradients_changes_nothing_that_others_get(workers, protocol):
    for gradients in workers(2)(clipped, protocol):
        for step, gradient in enumerate(gradients):
            assert relative(gradient, full_gradient(step, np.ones(2))) < CLOSE


def stay_small(protocol):
    start()
    model = model_of()
    coded = protocol(model, repetition(2, 1), key_values=KeyValueStore("small"))
    keys = []
    for step in range(12):
        for chunk, weight in coded.chunks():
            (weight * losses_of(model, samples_of(step, chunk)).sum()).backward()
        coded.reduce(step)
        dist.barrier()
        keys.append(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()
    coded.close()
    return keys


@BOTH
def test_the_store_does_not_fill_up(workers, protocol):
    for keys in workers(2)(stay_small, protocol):
        assert max(keys[6:]) <= max(keys[:6]) + 2


def refuse(protocol):
    start()
    with pytest.raises(CodingError) as refusal:
        protocol(model_of(), repetition(2, 1))
    return str(refusal.value)


@BOTH
def test_a_code_for_other_processes_is_refused(workers, protocol):
    assert "the code is for 2 workers, but the group has 1" in workers(1)(refuse, protocol)[0]


def test_a_device_is_awaited_without_a_thread_that_gloo_needs():
    class Queued:
        looks = 0

        def is_completed(self):
            self.looks += 1
            return self.looks > 3

    class OnDevice:
        is_cuda = True

    work_ = Queued()
    transfer = peers.Transfer(lambda tensor: work_, [OnDevice()])
    assert transfer.wait(time.monotonic() + 5.0)
    assert work_.looks == 4
    assert not torch.empty(0).is_cuda
