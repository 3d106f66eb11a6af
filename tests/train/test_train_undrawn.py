"""Runs that continue draw no first weights, and end as if they had."""

import os
import shutil

import pytest
import torch
from forked import run_ranks
from tiny import assert_equal_bits, losses, tiny_job, train, weights

from outlast.checkpoint import CheckpointStore
from outlast.distributed.ranks import ranks_from
from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED, CheckpointError, OutlastError
from outlast.records import read_run
from outlast.train import build
from outlast.train.run import Start, run_directory, work

pytestmark = pytest.mark.distributed


def counted(job, blind):
    """Train on this rank: its exit code, and how often anything was drawn from normal numbers.

    Rank 1 sees no version if it is `blind`.
    """
    ranks, draws = ranks_from(os.environ), []
    draw = torch.Tensor.normal_

    def noted(tensor, *arguments, **options):
        draws.append(tensor.shape)
        return draw(tensor, *arguments, **options)

    torch.Tensor.normal_ = noted
    if blind and ranks.rank == 1:
        CheckpointStore.newest = lambda _, warn=True: None
    return work(Start(job), ranks), len(draws)


@pytest.mark.parametrize("layout", [(), ("parallel.shard=2",)], ids=["ddp", "fsdp2"])
def test_run_that_goes_on_undrawn_ends_in_equal_bits(tmp_path, layout):
    whole = tiny_job(tmp_path, "whole", *layout)
    assert train(whole, 2) == EXIT_DONE
    part = tiny_job(tmp_path, "parts", "train.stop_after_steps=2", *layout)
    (code, first), (_, other) = run_ranks(2, counted, part, False)
    assert code == EXIT_TO_BE_CONTINUED
    # Two of these matrices are in each of 4 blocks at the least.
    assert min(first, other) > 8
    assert run_ranks(2, counted, part, False) == [(EXIT_TO_BE_CONTINUED, 0)] * 2
    # What one rank does not see may be on no disk of its node: none may rely on it.
    assert run_ranks(2, counted, part, True) == [(EXIT_DONE, first), (EXIT_DONE, other)]
    attempts = read_run(run_directory(part).path).attempts
    assert [attempt.first_step for attempt in attempts] == [0, 2, 4]
    assert losses(part) == losses(whole)
    assert_equal_bits(weights(part), weights(whole))


def failed(job, prepare):
    """Train on this rank: the error that ends it."""
    ranks = ranks_from(os.environ)
    prepare(job, ranks.rank)
    try:
        return work(Start(job), ranks)
    except OutlastError as error:
        return type(error), str(error)


def without_a_list(_, rank):
    def newest(_, warn=True):
        raise CheckpointError("the folder of rank 1 cannot be listed")

    if rank == 1:
        CheckpointStore.newest = newest


def gone_once_seen(job, rank):
    build_model = build.build_whole_model

    def deleting(*arguments, **options):
        if rank == 0:
            shutil.rmtree(run_directory(job).checkpoints)
            run_directory(job).checkpoints.mkdir()
        return build_model(*arguments, **options)

    build.build_whole_model = deleting


def test_what_is_not_there_to_restore_ends_all_ranks_with_a_sentence(tmp_path):
    job = tiny_job(tmp_path, "run", "train.stop_after_steps=2")
    assert train(job, 2) == EXIT_TO_BE_CONTINUED
    ends = run_ranks(2, failed, job, without_a_list)
    assert [text for _, text in ends] == ["the folder of rank 1 cannot be listed"] * 2
    gone = "the checkpoint that was there when this start began has gone"
    for kind, text in run_ranks(2, failed, job, gone_once_seen):
        assert kind is CheckpointError
        assert text.startswith(gone)
