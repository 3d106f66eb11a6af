"""Dropout belongs to samples: the same units on any ranks and in any micro-batch."""

import copy

import numpy as np
import pytest
import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  (loaded once, before ranks fork)
from forked import RanksFailedError
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import evaluations, losses, tiny_job, train
from torch import nn
from torch.nn import functional

from outlast.errors import EXIT_DONE, OutlastError
from outlast.train.dropout import DropoutStream, SampleDropout, uniform
from outlast.train.model import held_blocks
from outlast.train.parallelize import recompute_activations

# Largest difference in training loss (nats) over the six steps, as in test_parallel.
TOLERANCE = 2e-5

GPT2 = (
    'model.settings={model_type="gpt2", vocab_size=256, n_embd=32, n_layer=2, n_head=2, '
    "n_positions=32, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1}"
)


def numbers(sample_ids):
    return torch.tensor(sample_ids, dtype=torch.int64)


def kept(sample_ids, *, seed=0, step=0, block=0, earlier_calls=0, shape=(4, 50), p=0.5):
    """Which units of each sample are kept, (samples, *shape) bool."""
    with SampleDropout(seed, step, numbers(sample_ids)) as mode:
        mode.enter_block(block)
        for _ in range(earlier_calls):
            functional.dropout(torch.ones(len(sample_ids), 2), 0.1)
        return functional.dropout(torch.ones(len(sample_ids), *shape), p) > 0


class Net(nn.Module):
    """Two blocks that drop, and dropout before and after them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Dropout(0.4), nn.Dropout(0.4)) for _ in "ab")
        self.ends = nn.Dropout(0.4)

    def forward(self, x):
        x = self.ends(x)
        for block in self.blocks:
            x = block(x)
        return self.ends(x)


@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=12, unique=True),
    st.integers(0, 2**31),
    st.integers(0, 10**6),
    st.data(),
)
@settings(max_examples=50, deadline=None)
def test_a_samples_mask_is_the_same_in_any_micro_batch(sample_ids, seed, step, data):
    whole = kept(sample_ids, seed=seed, step=step)
    order = data.draw(st.permutations(range(len(sample_ids))))
    cut = data.draw(st.integers(0, len(order)))
    for part in (order[:cut], order[cut:]):
        mask = kept([sample_ids[index] for index in part], seed=seed, step=step)
        assert torch.equal(mask, whole[part])


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_dropped_share_is_the_one_asked_for(p):
    mask = kept(range(100), shape=(4000,), p=p)
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(1 - mask.double().mean().item() - p) < 5 * deviation


def test_kept_units_are_scaled_up():
    with SampleDropout(0, 0, numbers([3, 8])):
        out = functional.dropout(torch.full((2, 1000), 3.0), 0.25)
    assert set(out.unique().tolist()) == {0.0, 4.0}
    with SampleDropout(0, 0, numbers([3, 8])):
        out = functional.dropout(torch.full((2, 1000), 3.0, dtype=torch.bfloat16), 0.25)
    assert out.dtype == torch.bfloat16
    assert set(out.float().unique().tolist()) == {0.0, 4.0}


def chi_square(values, bins):
    """Of values in [0, 1) against the uniform distribution; mean bins - 1 if they are uniform."""
    counts, _ = np.histogram(values, bins=bins, range=(0.0, 1.0))
    expected = len(values) / bins
    return float(((counts - expected) ** 2).sum() / expected)


def bits_of(**where):
    """One number in [0, 1) from twelve units of one mask."""
    bits = kept([5], shape=(12,), **where).double().flatten()
    return (bits * 2.0 ** -torch.arange(1.0, 13.0)).sum().reshape(1)


def streams():
    """Long series of numbers along every direction in which neighbours could be alike."""
    several = torch.arange(20_000)
    yield "positions", uniform(1, several[:1], torch.Size((1, 20_000)))
    yield "samples", uniform(1, several, torch.Size((20_000, 1)))
    yield "far samples", uniform(1, several + 2**35, torch.Size((20_000, 1)))
    yield "keys", torch.cat([uniform(key, several[:1], torch.Size((1, 1))) for key in range(1000)])
    for name in ("step", "seed", "block"):
        yield name, torch.cat([bits_of(**{name: number}) for number in range(500)])


def test_numbers_are_uniform_and_neighbours_unrelated_in_every_direction():
    bins = 32
    for name, stream in streams():
        values = stream.double().flatten().numpy()
        assert values.min() >= 0.0, name
        assert values.max() < 1.0, name
        # With bins - 1 degrees of freedom the standard deviation is sqrt(2 (bins - 1)).
        assert abs(chi_square(values, bins) - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5, name
        for lag in (1, 2, 16):
            correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
            assert abs(correlation) < 5 / len(values) ** 0.5, (name, lag)


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"step": 1}, {"block": 1}, {"earlier_calls": 1}, {"sample_ids": range(1, 41)}],
    ids=lambda other: next(iter(other)),
)
def test_masks_of_other_seeds_steps_blocks_calls_and_samples_are_unrelated(other):
    where = {"sample_ids": range(40), "shape": (5000,)}
    first, second = kept(**where), kept(**(where | other))
    correlation = np.corrcoef(first.flatten().numpy(), second.flatten().numpy())[0, 1]
    assert abs(correlation) < 5 / first.numel() ** 0.5


def test_in_place():
    x = torch.ones(2, 100)
    with SampleDropout(0, 0, numbers([0, 1])):
        assert functional.dropout(x, 0.5, inplace=True) is x
    assert torch.equal(x > 0, kept([0, 1], shape=(100,)))


def test_zero_one_and_evaluation():
    x = torch.randn(2, 100)
    with SampleDropout(0, 0, numbers([0, 1])) as mode:
        assert torch.equal(functional.dropout(x, 0.0), x)
        assert torch.equal(functional.dropout(x, 0.5, training=False), x)
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)
        assert mode.used == 0
        assert torch.equal(functional.dropout(x, 1.0), torch.zeros_like(x))


def test_torchs_own_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    kept([1, 2])
    assert torch.equal(torch.rand(4), expected)


def test_blocks_count_their_own_calls_so_a_stage_alone_drops_the_same():
    net, x = Net(), torch.ones(2, 300)
    stream = DropoutStream(7, held_blocks(net))
    with stream.for_samples(4, numbers([9, 2])):
        before_last = net.blocks[0](net.ends(x))
        expected = net.blocks[1](before_last)
    # Another stage: it holds the last block only and has seen no call before it.
    with stream.for_samples(4, numbers([9, 2])):
        assert torch.equal(net.blocks[1](before_last), expected)


def test_a_model_that_drops_nothing_pays_nothing_after_its_first_micro_batch():
    net = Net()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    seen = []
    stream = DropoutStream(7, held_blocks(net))
    for step in range(2):
        with stream.for_samples(step, numbers([0])):
            net(torch.ones(1, 3))
            seen.append(torch.overrides._len_torch_function_stack())
    assert seen == [1, 0]


def attention(p):
    query = torch.ones(2, 1, 4, 8)
    return functional.scaled_dot_product_attention(query, query, query, dropout_p=p)


def test_fused_attention_that_drops_is_refused_with_the_remedy():
    with SampleDropout(0, 0, numbers([0, 1])):
        attention(0.0)
        with pytest.raises(OutlastError, match=r'set model.attention = "eager"'):
            attention(0.1)
        query = torch.ones(2, 1, 4, 8)
        with pytest.raises(OutlastError):
            functional.scaled_dot_product_attention(query, query, query, None, 0.1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.AlphaDropout(0.3), "alpha_dropout"),
        (nn.Dropout1d(0.3), "dropout1d"),
        (nn.Dropout2d(0.3), "dropout2d"),
    ],
)
def test_other_kinds_of_dropout_are_refused_rather_than_drawn_by_rank(module, name):
    x = torch.ones(2, 3, 4, 4)[..., 0] if name == "dropout1d" else torch.ones(2, 3, 4, 4)
    with SampleDropout(0, 0, numbers([0, 1])):
        module.eval()(x)
        with pytest.raises(OutlastError, match=f"torch.nn.functional.{name}, where masks cannot"):
            module.train()(x)


def test_torchs_multi_head_attention_with_dropout_is_refused():
    x = torch.ones(2, 4, 8)
    with SampleDropout(0, 0, numbers([0, 1])):
        plain = nn.MultiheadAttention(8, 2, dropout=0.0, batch_first=True)
        plain(x, x, x)
        dropping = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        dropping.eval()(x, x, x)
        with pytest.raises(OutlastError, match="multi_head_attention_forward"):
            dropping.train()(x, x, x)


def test_dropout_of_a_tensor_that_has_no_samples_dimension_is_refused():
    with SampleDropout(0, 0, numbers([0, 1])):
        for shape in ((), (6,), (3, 2, 4)):
            with pytest.raises(OutlastError, match="is not the 2 samples of the micro-batch"):
                functional.dropout(torch.ones(shape), 0.5)


def _gradients_with_and_without_recomputation():
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=16, n_layer=3, n_head=2, n_positions=16, use_cache=False
    )
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    recomputing = copy.deepcopy(plain)
    ids = torch.randint(0, 64, (3, 8))
    found = []
    for model in (plain, recomputing):
        stream = DropoutStream(5, held_blocks(model))
        if model is recomputing:
            recompute_activations(model, stream)
        for step in (0, 1):
            with stream.for_samples(step, numbers([4, 5, 6])):
                loss = model(ids).logits.square().mean()
            loss.backward()
        found.append([loss.item(), *(each.grad.tolist() for each in model.parameters())])
    with stream.for_samples(2, numbers([4, 5, 6])):
        other = model(ids).logits.square().mean()
    return found, other.item()


def test_recomputed_activations_give_identical_gradients(ranks):
    [(found, other_loss)] = ranks(1)(_gradients_with_and_without_recomputation)
    assert found[0] == found[1]
    assert other_loss != found[0][0], "dropout was on"


@pytest.mark.distributed
def test_gpt2_with_dropout_is_the_same_on_any_ranks_and_micro_batches(tmp_path):
    gpt2 = (GPT2, "model.attention=eager")
    reference = tiny_job(tmp_path, "reference", *gpt2)
    assert train(reference, 1) == EXIT_DONE
    layouts = {
        "two": (2, ["train.micro_batch_size=2"]),
        "five": (1, ["train.micro_batch_size=5", "train.activation_checkpointing=true"]),
        "sharded": (2, ["parallel.shard=2", "train.activation_checkpointing=true"]),
    }
    for name, (size, overrides) in layouts.items():
        job = tiny_job(tmp_path, name, *gpt2, *overrides)
        assert train(job, size) == EXIT_DONE
        assert losses(job) == pytest.approx(losses(reference), abs=TOLERANCE), name
        assert evaluations(job) == pytest.approx(evaluations(reference), abs=TOLERANCE), name
    without = tiny_job(tmp_path, "without", GPT2.replace("0.1", "0.0"))
    assert train(without, 1) == EXIT_DONE
    assert abs(losses(without)[0] - losses(reference)[0]) > 10 * TOLERANCE, "dropout was on"


@pytest.mark.distributed
def test_dropout_under_pipelining_is_that_of_one_process(tmp_path):
    llama = ("model.settings.attention_dropout=0.3", "model.attention=eager")
    reference = tiny_job(tmp_path, "reference", *llama)
    assert train(reference, 1) == EXIT_DONE
    stages = ("parallel.pipeline=2", "parallel.pipeline_microbatches=4")
    for name, more in {"plain": [], "again": ["train.activation_checkpointing=true"]}.items():
        job = tiny_job(tmp_path, name, *llama, *stages, *more)
        assert train(job, 2) == EXIT_DONE
        assert losses(job) == pytest.approx(losses(reference), abs=TOLERANCE)


@pytest.mark.distributed
def test_a_job_with_fused_attention_dropout_is_refused(tmp_path):
    with pytest.raises(RanksFailedError, match=r'set model.attention = "eager"'):
        train(tiny_job(tmp_path, "fused", GPT2), 1)
