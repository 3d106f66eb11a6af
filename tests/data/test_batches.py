"""Batches: who takes which samples, and that none is lost or seen twice."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.data import (
    BatchLoader,
    SampleOrder,
    SampleWindow,
    TokenFile,
    microbatch_count,
    microbatches,
    share,
)
from outlast.errors import DataError

counts = st.integers(1, 40)


@pytest.fixture
def token_file(tmp_path):
    np.arange(1, 1004, dtype=np.uint16).tofile(tmp_path / "t.bin")
    return TokenFile.open(tmp_path / "t.bin")


def loader(token_file, batch_size=10, **settings):
    windows = SampleWindow(token_file, 10)
    return BatchLoader(windows, SampleOrder(windows.samples, seed=1), batch_size, **settings)


def sample_ids(parts):
    return [int(number) for part in parts for number in part.sample_ids]


def contents(parts):
    return np.concatenate([part.inputs for part in parts]).tolist()


@given(start=st.integers(0, 10**12), size=st.integers(0, 500), ranks=counts)
def test_shares_cover_the_batch_evenly(start, size, ranks):
    shares = [share(start, start + size, rank, ranks) for rank in range(ranks)]
    assert shares[0][0] == start
    assert shares[-1][1] == start + size
    assert all(one[1] == other[0] for one, other in itertools.pairwise(shares))
    sizes = [last - first for first, last in shares]
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) <= 1


@given(first=st.integers(0, 1000), size=st.integers(0, 200), count=counts)
def test_microbatches_cover_the_share_evenly(first, size, count):
    parts = microbatches(first, first + size, count)
    assert len(parts) == count
    assert [n for low, high in parts for n in range(low, high)] == list(range(first, first + size))
    sizes = [high - low for low, high in parts]
    assert max(sizes) - min(sizes) <= 1


@given(batch_size=st.integers(1, 300), ranks=counts, micro_batch_size=counts)
def test_microbatch_count_is_the_least_that_keeps_the_limit(batch_size, ranks, micro_batch_size):
    def largest(count):
        return max(
            high - low
            for rank in range(ranks)
            for low, high in microbatches(*share(0, batch_size, rank, ranks), count)
        )

    count = microbatch_count(batch_size, ranks, micro_batch_size)
    assert largest(count) <= micro_batch_size
    assert count == 1 or largest(count - 1) > micro_batch_size
    assert microbatch_count(batch_size, ranks, 0) == 1


@pytest.mark.parametrize(("tokens", "samples"), [(11, 1), (20, 1), (21, 2), (1003, 100)])
def test_windows_predict_each_token_once(tmp_path, tokens, samples):
    np.arange(tokens, dtype=np.uint16).tofile(tmp_path / "t.bin")
    windows = SampleWindow(TokenFile.open(tmp_path / "t.bin"), 10)
    assert windows.samples == samples
    inputs, targets = windows.gather(np.arange(samples))
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.flags.c_contiguous
    assert inputs.ravel().tolist() == list(range(samples * 10))
    assert targets.ravel().tolist() == list(range(1, samples * 10 + 1))


def test_bad_windows_are_refused(tmp_path, token_file):
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "short.bin")
    with pytest.raises(DataError, match=r"short\.bin holds 10 tokens.*sequence_length = 10"):
        SampleWindow(TokenFile.open(tmp_path / "short.bin"), 10)
    with pytest.raises(DataError, match=r"data\.sequence_length = 0"):
        SampleWindow(token_file, 0)
    for indices in ([100], [-1], [0, 100]):
        with pytest.raises(DataError, match=r"not all in \[0, 100\)"):
            SampleWindow(token_file, 10).gather(np.array(indices))


@pytest.mark.parametrize("parts", [1, 3])
def test_any_number_of_ranks_sees_the_same_samples(token_file, parts):
    """Also when the number of ranks changes from step to step, across the ends of epochs."""
    one = loader(token_file)
    for step in range(25):
        expected = one.batch(step)
        for ranks in (1, 2, 3, 4):
            shares = [
                part
                for rank in range(ranks)
                for part in loader(token_file, rank=rank, ranks=ranks, microbatches=parts).batch(
                    step
                )
            ]
            assert sample_ids(shares) == sample_ids(expected)
            assert contents(shares) == contents(expected)


@pytest.mark.parametrize("batch_size", [7, 10, 64])
def test_each_sample_is_seen_once_per_epoch(token_file, batch_size):
    """The ranks go 1, 2, 3, 4, 1, ...; batches that straddle two epochs are divided exactly."""
    epochs = 3
    seen = []
    step = 0
    while len(seen) < 100 * epochs:
        ranks = step % 4 + 1
        for rank in range(ranks):
            for part in loader(token_file, batch_size, rank=rank, ranks=ranks).batch(step):
                seen.extend((part.inputs[:, 0] // 10).tolist())
        step += 1
    for epoch in range(epochs):
        assert sorted(seen[epoch * 100 : (epoch + 1) * 100]) == list(range(100))


def test_targets_follow_inputs(token_file):
    (part,) = loader(token_file).batch(3)
    assert part.sample_ids.tolist() == list(range(30, 40))
    assert np.array_equal(part.targets, part.inputs + 1)


def test_more_parts_than_samples_gives_empty_parts_on_the_right_rank(token_file):
    parts = loader(token_file, batch_size=3, ranks=2, rank=0, microbatches=2).batch(0)
    assert [part.inputs.shape for part in parts] == [(0, 10), (1, 10)]


def test_prefetching_gives_the_same_batches(token_file):
    source = loader(token_file, microbatches=2)
    steps = []
    for step, parts in source.prefetching(5, 12):
        steps.append(step)
        assert contents(parts) == contents(source.batch(step))
    assert steps == list(range(5, 12))
    assert list(source.prefetching(3, 3)) == []


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("outlast-data")]


def test_prefetching_closes_its_thread(token_file):
    source = loader(token_file).prefetching(0, 1000)
    assert next(source)[0] == 0
    assert data_threads()
    source.close()
    assert not data_threads()


def test_errors_of_the_background_thread_reach_the_caller(token_file):
    source = loader(token_file)
    good = source.windows.gather

    def broken(indices):
        if source.order.index(20) in indices:
            raise DataError("the disk went away")
        return good(indices)

    source.windows.gather = broken
    steps = []
    with pytest.raises(DataError, match="the disk went away"):
        steps.extend(step for step, _ in source.prefetching(0, 10))
    assert not data_threads()


def test_bad_settings_are_refused(token_file):
    with pytest.raises(DataError, match=r"rank 2 is not in \[0, 2\)"):
        loader(token_file, rank=2, ranks=2)
    with pytest.raises(DataError, match=r"train.batch_size = 3 is less than the 4"):
        loader(token_file, batch_size=3, ranks=4)
    with pytest.raises(DataError, match="0 micro-batches"):
        loader(token_file, microbatches=0)
    with pytest.raises(DataError, match="order is of 5 samples, the data of 100"):
        BatchLoader(SampleWindow(token_file, 10), SampleOrder(5, 0), 2)
