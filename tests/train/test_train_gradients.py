"""The norm of all gradients, clipping by it, and averaging in buckets."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.train import gradients
from outlast.train.gradients import average_over, clip, global_norm

SHAPES = [(7, 5), (6,), (3, 2, 4), (1,)]


def parameters_with_gradients(shapes=SHAPES, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for each in made:
        each.grad = torch.randn(each.shape, generator=generator) * scale
    return made


@given(
    st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=6), st.floats(1e-6, 1e6)
)
@settings(deadline=None)
def test_norm_and_clipping_are_torchs(shapes, scale):
    ours, theirs = (parameters_with_gradients(shapes, scale) for _ in range(2))
    largest = 1.5
    expected = torch.nn.utils.clip_grad_norm_(theirs, largest)
    norm = global_norm(ours)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    clip(ours, norm, largest)
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, their.grad)


def test_parameters_without_gradient_are_left_out():
    made = [*parameters_with_gradients(), nn.Parameter(torch.ones(3))]
    expected = torch.nn.utils.get_total_norm([each.grad for each in made[:-1]])
    assert global_norm(made) == pytest.approx(expected.item())
    clip(made, global_norm(made), 0.1)
    assert made[-1].grad is None


def test_a_small_gradient_is_not_scaled_up():
    made = parameters_with_gradients(scale=1e-3)
    before = [each.grad.clone() for each in made]
    clip(made, global_norm(made), 1.0)
    assert all(torch.equal(each.grad, old) for each, old in zip(made, before, strict=True))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(wrong):
    made = parameters_with_gradients()
    made[0].grad[0, 0] = wrong
    norm = global_norm(made)
    assert not math.isfinite(norm.item())
    clip(made, norm, 1.0)
    assert not all(torch.isfinite(each.grad).all() for each in made)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), st.integers(1, 20))
@settings(deadline=None)
def test_buckets_hold_every_tensor_once_in_order(sizes, capacity):
    kinds = {True: torch.float32, False: torch.bfloat16}
    tensors = [torch.zeros(size, dtype=kinds[single]) for size, single in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "_BUCKET_ELEMENTS", capacity)
        buckets = list(gradients._buckets(tensors))
    assert [id(each) for bucket in buckets for each in bucket] == [id(each) for each in tensors]
    for bucket in buckets:
        assert len({each.dtype for each in bucket}) == 1
        assert len(bucket) == 1 or sum(each.numel() for each in bucket) <= capacity


def _distributed_norm_and_clipping():
    """A mix of plain gradients and DTensors of two layouts, against the whole ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = parameters_with_gradients()
    placements = [[Shard(0)], None, [Shard(1)], [Replicate()]]
    mixed = []
    for each, placement in zip(whole, placements, strict=True):
        if placement is None:
            own = nn.Parameter(each.detach().clone())
            own.grad = each.grad.clone()
        else:
            own = nn.Parameter(distribute_tensor(each.detach(), mesh, placement))
            own.grad = distribute_tensor(each.grad.clone(), mesh, placement)
        mixed.append(own)
    expected = torch.nn.utils.clip_grad_norm_(whole, 0.5)
    norm = global_norm(mixed)
    clip(mixed, norm, 0.5)
    equal = [
        torch.allclose(
            own.grad.full_tensor() if hasattr(own.grad, "full_tensor") else own.grad, each.grad
        )
        for own, each in zip(mixed, whole, strict=True)
    ]
    dist.destroy_process_group()
    return norm.item(), expected.item(), equal


@pytest.mark.distributed
def test_sharded_and_plain_gradients_have_the_norm_of_the_whole(ranks):
    for norm, expected, equal in ranks(2)(_distributed_norm_and_clipping):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert equal == [True] * len(SHAPES)


def _staged_norm_and_average():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    whole = parameters_with_gradients()
    staged = global_norm(whole[:2] if rank == 0 else whole[2:], dist.group.WORLD).item()
    for each in whole:
        each.grad = torch.full_like(each, float(rank)) + each.grad
    gradients._BUCKET_ELEMENTS = 40
    average_over(whole, dist.group.WORLD)
    dist.destroy_process_group()
    return staged, [each.grad.tolist() for each in whole]


@pytest.mark.distributed
def test_stages_add_up_to_the_norm_and_replicas_to_their_mean(ranks):
    whole = parameters_with_gradients()
    expected = [(each.grad + 0.5).tolist() for each in whole]
    for norm, averaged in ranks(2)(_staged_norm_and_average):
        assert norm == pytest.approx(global_norm(whole).item(), rel=1e-6)
        for found, mean in zip(averaged, expected, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(mean))
