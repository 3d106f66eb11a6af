"""Decoding in DDP's communication hook: the whole batch's gradient, whoever is missing."""

import functools

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

from outlast.coding.protocol.hook import DecodingState, coded_hook
from outlast.errors import CodingError

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


def test_a_state_that_cannot_be_used_is_refused():
    with pytest.raises(CodingError, match=r"worker = 4 is not in \[0, 4\)"):
        DecodingState(repetition(4, 1), 4)
    imaginary = Code(np.eye(2), 0)
    imaginary.matrix = imaginary.matrix.astype(np.complex128)
    with pytest.raises(CodingError, match="complex"):
        DecodingState(imaginary, 0)


def test_the_weights_follow_the_survivors():
    state = DecodingState(repetition(4, 1), 1)
    assert state.decode([0, 2]).exact
    assert state.weight == 0
    assert state.decode([1, 2]).exact
    assert state.weight == pytest.approx(1.0)
    assert state.decode([2, 3]).error == pytest.approx(2.0)
