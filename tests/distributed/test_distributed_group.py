"""Ranks agree: gather, any, fail together, the first decides, and nobody waits for the dead."""

import os
import time

import pytest
import torch
from forked import run_ranks

from outlast.distributed.group import Group, gather_objects, gather_on_first, raise_together
from outlast.distributed.ranks import join, ranks_from
from outlast.errors import CheckpointError, DataError, OutlastError

pytestmark = pytest.mark.distributed


def _joined():
    ranks = ranks_from(os.environ)
    join(ranks, torch.device("cpu"), 60.0)
    return ranks.rank


def _one_says(rank, said, nothing):
    return said if rank == 1 else nothing


def _agree():
    rank = _joined()
    group = Group()
    return {
        "gather": group.gather({"rank": rank}),
        "any": (group.any(rank == 2), group.any(False)),
        "any_of": group.any_of(rank == 0, False, rank == 2),
        "problem": group.first_problem(_one_says(rank, "no disk left", "")),
        "no problem": group.first_problem(""),
        "first": group.from_first(lambda: f"by {rank}"),
        "objects": gather_objects(rank),
        "on first": gather_on_first(rank),
    }


def test_every_rank_hears_the_same(ranks):
    found = ranks(3)(_agree)
    for rank, said in enumerate(found):
        assert said["gather"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert said["any"] == (True, False)
        assert said["any_of"] == (True, False, True)
        assert said["problem"] == "no disk left"
        assert said["no problem"] == ""
        assert said["first"] == "by 0"
        assert said["objects"] == [0, 1, 2]
        assert said["on first"] == ([0, 1, 2] if rank == 0 else [])


def _fail(error):
    raise error


def _fails_together(error_class):
    rank = _joined()
    group = Group(error=error_class)
    sentences = []
    for failing in (DataError("no disk left"), ValueError("a bug"), DataError()):
        try:
            group.raise_together(lambda failing=failing: rank != 1 or _fail(failing))
        except Exception as error:
            sentences.append(f"{type(error).__name__}: {error}")
    for failing in (DataError("no list"), OSError(28, "No space left on device")):
        try:
            group.from_first(lambda failing=failing: _fail(failing))
        except Exception as error:
            sentences.append(f"{type(error).__name__}: {error}")
    return sentences


def test_a_problem_of_one_rank_is_raised_by_all(ranks):
    for rank, sentences in enumerate(ranks(3)(_fails_together, None)):
        own = "ValueError: a bug" if rank == 1 else "OutlastError: ValueError: a bug"
        assert sentences == [
            "OutlastError: no disk left",
            own,
            "OutlastError: DataError",
            "OutlastError: no list",
            "OutlastError: [Errno 28] No space left on device",
        ]


def test_a_group_with_its_own_error_raises_that_on_all_ranks(ranks):
    for sentences in ranks(3)(_fails_together, CheckpointError):
        assert sentences == [
            "CheckpointError: no disk left",
            "CheckpointError: ValueError: a bug",
            "CheckpointError: DataError",
            "CheckpointError: no list",
            "CheckpointError: [Errno 28] No space left on device",
        ]


def _one_dies():
    rank = _joined()
    group = Group.new(20.0, error=CheckpointError, purpose="to save")
    group.gather(rank)
    if rank == 1:
        os._exit(9)
    begun = time.monotonic()
    try:
        group.gather(rank)
    except CheckpointError as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


def test_a_dead_rank_is_named_and_not_waited_for():
    sentence, seconds = run_ranks(2, _one_dies, may_die={1})[0]
    assert sentence.startswith("another rank did not come to save, or is gone: ")
    assert seconds < 20


def _one_is_late():
    rank = _joined()
    group = Group.new(1.0, error=CheckpointError, purpose="within timeout_seconds")
    if rank == 1:
        time.sleep(4)
        return ""
    try:
        group.any(True)
    except CheckpointError as error:
        return str(error)
    return "none"


def test_a_wait_ends_with_the_groups_deadline(ranks):
    assert "did not come within timeout_seconds" in ranks(2)(_one_is_late)[0]


def _decides_alone():
    rank = _joined()
    group = Group.new(5.0, alone=True)
    return rank, group.rank, group.size, group.gather("x"), group.any(rank == 1)


def test_a_group_of_its_own_may_be_of_one_process(ranks):
    assert ranks(2)(_decides_alone) == [(0, 0, 1, ["x"], False), (1, 0, 1, ["x"], True)]


def test_one_process_agrees_with_itself():
    group = Group()
    assert (group.rank, group.size) == (0, 1)
    assert group.gather(3) == gather_objects(3) == gather_on_first(3) == [3]
    assert group.any_of(True, False) == (True, False)
    assert group.from_first(lambda: 5) == raise_together(lambda: 5) == 5
    with pytest.raises(OutlastError, match="no disk left"):
        raise_together(lambda: _fail(DataError("no disk left")))
