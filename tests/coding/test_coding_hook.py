"""Decoding in DDP's communication hook: the whole batch's gradient, whoever is missing."""

import functools
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from coded_ranks import (
    Code,
    cyclic,
    full_gradient,
    gradient_of,
    losses_of,
    model_of,
    relative,
    repetition,
    samples_of,
    start,
    supervised,
)
from torch.nn.parallel import DistributedDataParallel

from outlast.coding.protocol import DecodingState, coded_hook
from outlast.errors import CodingError, LostChunksError

WORKERS = 4


def train(code, dtype, spoil=False):
    """One step for every single straggler, whose own gradient is nonsense; and one for nobody."""
    rank = start()
    model = model_of(dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    state = DecodingState(code, rank)
    ddp.register_comm_hook(state, coded_hook)
    own = list(state.chunks())
    found = []
    for step in range(WORKERS + 1):
        with ddp.no_sync():
            for chunk, weight in own[:-1]:
                (weight * losses_of(ddp, samples_of(step, chunk, dtype)).sum()).backward()
        certificate = state.decode([each for each in range(WORKERS) if each != step])
        chunk, weight = own[-1]
        factor = float("inf") if spoil and rank == step else weight
        (factor * losses_of(ddp, samples_of(step, chunk, dtype)).sum()).backward()
        found.append((gradient_of(model), certificate.exact))
        model.zero_grad()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("code", "dtype", "close"),
    [
        (repetition(WORKERS, 1), torch.float32, 1e-6),
        (cyclic(WORKERS, 1, "float32"), torch.float32, 1e-5),
        (cyclic(WORKERS, 1), torch.float64, 1e-13),
    ],
    ids=["repetition", "cyclic", "cyclic in double precision"],
)
def test_every_single_straggler_is_decoded_around(ranks, code, dtype, close):
    records = ranks(WORKERS)(functools.partial(supervised, train), code, dtype)
    for step in range(WORKERS + 1):
        right = full_gradient(step, np.ones(WORKERS), dtype)
        for record in records:
            gradient, exact = record[step]
            assert exact
            assert np.array_equal(gradient, records[0][step][0])
            assert relative(gradient, right) < close


@pytest.mark.distributed
def test_a_stragglers_nonsense_reaches_nobody(ranks):
    records = ranks(WORKERS)(
        functools.partial(supervised, train), repetition(WORKERS, 1), torch.float32, True
    )
    for step in range(WORKERS + 1):
        right = full_gradient(step, np.ones(WORKERS), torch.float32)
        assert relative(records[0][step][0], right) < 1e-6


def reduce_within_pairs():
    """Two groups of two workers each sum for themselves."""
    rank = start()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    model = model_of()
    ddp = DistributedDataParallel(model, process_group=group)
    state = DecodingState(repetition(2, 1), rank % 2, group=group)
    ddp.register_comm_hook(state, coded_hook)
    state.decode([1])
    with ddp.no_sync():
        losses_of(ddp, samples_of(rank // 2, 0)).sum().backward()
    losses_of(ddp, samples_of(rank // 2, 1)).sum().backward()
    return gradient_of(model)


@pytest.mark.distributed
def test_the_sum_is_over_the_group_that_is_given(ranks):
    for rank, gradient in enumerate(ranks(4)(functools.partial(supervised, reduce_within_pairs))):
        assert relative(gradient, full_gradient(rank // 2, np.ones(2))) < 1e-13


def train_in_agreement(code, steps, pause, **settings):
    rank = start()
    model = model_of()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    state = DecodingState(code, rank, **settings)
    ddp.register_comm_hook(state, coded_hook)
    found = []
    for step in range(steps):
        dist.barrier()
        computed = 0
        with ddp.no_sync():
            for chunk, weight in state.first_chunks():
                (weight * losses_of(ddp, samples_of(step, chunk)).sum()).backward()
                time.sleep(pause(rank, step))
                computed += 1
        try:
            certificate = state.agree(step)
        except LostChunksError as error:
            found.append(error.chunks)
            model.zero_grad()
            continue
        chunk, weight = state.last_chunk
        (weight * losses_of(ddp, samples_of(step, chunk)).sum()).backward()
        found.append((gradient_of(model), certificate.exact, state.weight, computed))
        model.zero_grad()
    dist.barrier()
    keys = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return found, keys


@pytest.mark.distributed
def test_ranks_agree_before_the_last_chunk_to_do_without_the_late_one(ranks):
    def pause(rank, step):
        return 0.3 if rank == step else 0.0

    records = ranks(WORKERS)(
        functools.partial(supervised, train_in_agreement), repetition(WORKERS, 3), 3, pause
    )
    for step in range(3):
        right = full_gradient(step, np.ones(WORKERS))
        steps = [found[step] for found, _ in records]
        for gradient, exact, _, _ in steps:
            assert exact
            assert np.array_equal(gradient, steps[0][0])
            assert relative(gradient, right) < 1e-13
        _, _, weight, computed = steps[step]
        assert weight == 0
        assert computed < 3
        assert sum(each[2] for each in steps) == pytest.approx(1.0)


@pytest.mark.distributed
def test_what_is_not_ready_by_the_deadline_is_lost_for_all_ranks_and_can_be_repeated(ranks):
    def pause(rank, step):
        return 1.0 if rank >= 2 and step == 0 else 0.0

    records = ranks(WORKERS)(
        functools.partial(supervised, train_in_agreement, deadline_seconds=0.3),
        repetition(WORKERS, 1),
        2,
        pause,
    )
    for found, _ in records:
        assert found[0] == (2, 3)
        assert found[1][1]
        assert relative(found[1][0], full_gradient(1, np.ones(WORKERS))) < 1e-13


@pytest.mark.distributed
def test_agreeing_does_not_fill_the_store(ranks):
    few, many = (
        ranks(2)(
            functools.partial(supervised, train_in_agreement),
            repetition(2, 1),
            steps,
            lambda rank, step: 0.0,
        )
        for steps in (3, 13)
    )
    assert many[0][1] <= few[0][1] + 2


def agree_in_a_group_of_another_size():
    start()
    state = DecodingState(repetition(4, 1), 0)
    with pytest.raises(CodingError) as refusal:
        state.agree(0)
    return str(refusal.value)


@pytest.mark.distributed
def test_a_group_that_does_not_fit_the_code_cannot_agree(ranks):
    work = functools.partial(supervised, agree_in_a_group_of_another_size)
    assert "the group has 1 processes: build it for 1" in ranks(1)(work)[0]


def test_a_state_that_cannot_be_used_is_refused():
    with pytest.raises(CodingError, match="deadline_seconds = 0"):
        DecodingState(repetition(4, 1), 0, deadline_seconds=0)
    with pytest.raises(CodingError, match=r"worker = 4 is not in \[0, 4\)"):
        DecodingState(repetition(4, 1), 4)
    imaginary = Code(np.eye(2), 0)
    imaginary.matrix = imaginary.matrix.astype(np.complex128)
    with pytest.raises(CodingError, match="complex"):
        DecodingState(imaginary, 0)


def test_a_worker_without_chunks_is_told_what_to_do():
    state = DecodingState(Code([[1.0, 1.0], [0.0, 0.0]], 0), 1)
    with pytest.raises(CodingError, match="worker 1 has no chunks"):
        _ = state.last_chunk


def test_the_weights_follow_the_survivors():
    state = DecodingState(repetition(4, 1), 1)
    assert state.decode([0, 2]).exact
    assert state.weight == 0
    assert state.decode([1, 2]).exact
    assert state.weight == pytest.approx(1.0)
    assert state.decode([2, 3]).error == pytest.approx(2.0)
