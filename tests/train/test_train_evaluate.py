"""The validation loss is one number, however the samples are divided."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.data import SampleWindow, TokenFile
from outlast.errors import DataError
from outlast.train.engine import IGNORED_TARGET, Evaluation, loss_sum

LENGTH = 5
TOKENS = np.random.default_rng(0).integers(0, 97, 40 * LENGTH + 1)


class Counting:
    """An engine whose loss of a token is its own value, so that every token counts visibly."""

    def __init__(self):
        self.shapes = set()
        self.batches = 0

    def evaluate(self, batch):
        assert batch.inputs.shape == batch.targets.shape
        self.shapes.add(batch.inputs.shape)
        self.batches += 1
        counting = batch.targets[batch.targets != IGNORED_TARGET]
        return torch.tensor(float(counting.sum()))


class Noting:
    """An agreement that keeps what each rank would add up."""

    device = torch.device("cpu")

    def __init__(self):
        self.totals = []

    def sum(self, value):
        self.totals.append(float(value))
        return float(value)


def evaluation(tmp_path, **settings):
    path = tmp_path / "tokens.npy"
    np.save(path, TOKENS)
    return Evaluation(SampleWindow(TokenFile.open(path), LENGTH), **settings)


@given(samples=st.integers(1, 40), batch_size=st.integers(1, 9), ranks=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_any_ranks_and_batch_sizes_give_the_same_mean(samples, batch_size, ranks, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    model, noting, engines = nn.Identity(), Noting(), []
    for rank in range(ranks):
        part = evaluation(folder, samples=samples, batch_size=batch_size, rank=rank, ranks=ranks)
        engines.append(Counting())
        part.measure(model, engines[-1], noting)
    windows = part.windows.samples
    chosen = [number * windows // samples for number in range(samples)]
    expected = sum(TOKENS[i * LENGTH + 1 : (i + 1) * LENGTH + 1].sum() for i in chosen)
    assert len(set(chosen)) == samples
    assert chosen[-1] >= windows - windows / samples - 1
    assert sum(noting.totals) == expected
    assert part.tokens == samples * LENGTH
    # Collective operations of sharded models need equal batches on all ranks.
    assert {engine.batches for engine in engines} == {engines[0].batches}
    assert {shape for engine in engines for shape in engine.shapes} == {(batch_size, LENGTH)}


def test_rows_that_only_fill_the_batch_do_not_count():
    logits = torch.randn(3, 4, 7)
    targets = torch.randint(0, 7, (3, 4))
    padded = targets.clone()
    padded[2] = IGNORED_TARGET
    expected = nn.functional.cross_entropy(logits[:2].flatten(0, 1), targets[:2].flatten())
    assert loss_sum(logits, padded) == pytest.approx(expected.item() * 8, rel=1e-5)
    assert loss_sum(logits, torch.full_like(targets, IGNORED_TARGET)) == 0.0


def test_the_model_evaluates_without_dropout_and_goes_back_to_training(tmp_path):
    model, seen = nn.Dropout(0.5).train(), []

    class Looking(Counting):
        def evaluate(self, batch):
            seen.append(model.training)
            return super().evaluate(batch)

    evaluation(tmp_path, samples=4, batch_size=2, rank=0, ranks=1).measure(
        model, Looking(), Noting()
    )
    assert seen == [False, False]
    assert model.training

    class Failing(Counting):
        def evaluate(self, batch):
            raise DataError("gone")

    with pytest.raises(DataError):
        evaluation(tmp_path, samples=4, batch_size=2, rank=0, ranks=1).measure(
            model, Failing(), Noting()
        )
    assert model.training


def test_bits_per_byte_where_the_bytes_are_known(tmp_path):
    known = evaluation(tmp_path, samples=4, batch_size=2, rank=0, ranks=1)
    assert known.bits_per_byte(2.0) is None
    file = TokenFile(known.windows.file.path, known.windows.file.tokens, bytes=len(TOKENS) * 4)
    of_bytes = Evaluation(SampleWindow(file, LENGTH), 4, 2, 0, 1)
    # Four bytes a token, log2(e) bits a nat.
    assert of_bytes.bits_per_byte(2.0) == pytest.approx(2.0 * 1.442695 / 4)
