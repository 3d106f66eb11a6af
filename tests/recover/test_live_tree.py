"""Sums over a fixed tree: the same bits whatever groups add up what."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_runs import require_torchft

from outlast.errors import RecoverError
from outlast.recover.live import LiveGroups
from outlast.recover.quorum import Buckets, PartSums, halves, nodes_within, span_of

COUNTS = st.integers(1, 40)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 5), (1,), (7,))]


def gradients(part: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of magnitudes that make the order of sums count; one is a negative zero."""
    random = torch.Generator().manual_seed(part)
    found = [
        (torch.randn(each.shape, generator=random) * 10.0 ** (part % 7)).to(dtype)
        for each in parameters(dtype)
    ]
    found[1].fill_(-0.0)
    return found


def summed(parts: int, groups: int, dtype: torch.dtype, *, idle: int = 0) -> list[torch.Tensor]:
    """The root as each group has it, where `groups` compute and further ones are idle."""
    owners = []
    for number in range(groups + idle):
        own = parameters(dtype)
        sums = PartSums(Buckets(own), parts)
        sums.begin((number if number < groups else 0, groups), idle=number >= groups)
        # In any order, and once more after a doubt.
        for attempt in range(2):
            sums.clear()
            for part in sorted(sums.own, reverse=attempt == 0):
                for parameter, gradient in zip(own, gradients(part, dtype), strict=True):
                    parameter.grad = gradient
                sums.add(part, float(part))
        owners.append((sums, own))
    given: list[list[list[torch.Tensor]]] = []
    for sums, _ in owners:
        # What a group hands over does not depend on what it gets.
        heard: list[list[torch.Tensor]] = []
        sums.sum(lambda flat, heard=heard: heard.append([each.clone() for each in flat]))  # type: ignore[misc]
        given.append(heard)
    totals = [
        [torch.stack(tensors).sum(0, dtype=tensors[0].dtype) for tensors in zip(*each, strict=True)]
        for each in zip(*given, strict=True)
    ]
    assert len({len(each) for each in given}) == 1
    return _roots(owners, parts, groups, dtype, totals)


def _roots(owners, parts, groups, dtype, totals) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    roots = []
    for number in range(len(owners)):
        own = parameters(dtype)
        sums = PartSums(Buckets(own), parts)
        sums.begin((number if number < groups else 0, groups), idle=number >= groups)
        for part in sums.own:
            for parameter, gradient in zip(own, gradients(part, dtype), strict=True):
                parameter.grad = gradient
            sums.add(part, float(part))
        heard = iter(totals)

        def exchange(flat: list[torch.Tensor], heard=heard) -> None:  # type: ignore[no-untyped-def]
            for mine, total in zip(flat, next(heard), strict=True):
                mine.copy_(total)

        roots.append(torch.cat(sums.sum(exchange)))
    return roots


@given(COUNTS, st.integers(1, 12))
def test_the_nodes_of_all_groups_are_the_tree_s_and_cover_every_part_once(
    parts: int, groups: int
) -> None:
    nodes = [
        node
        for index in range(groups)
        for node in nodes_within((0, parts), span_of(parts, index, groups))
    ]
    assert nodes[0][0] == 0
    assert nodes[-1][1] == parts
    assert all(before[1] == after[0] for before, after in pairwise(nodes))
    tree = {(0, parts)}
    for _ in range(parts):
        tree |= {half for node in tree if node[1] - node[0] > 1 for half in halves(node)}
    assert set(nodes) <= tree


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(parts=st.integers(1, 12), groups=st.integers(1, 5), idle=st.integers(0, 1))
@settings(max_examples=12, deadline=None)
def test_the_bits_do_not_depend_on_the_groups(
    dtype: torch.dtype, parts: int, groups: int, idle: int
) -> None:
    (alone,) = summed(parts, 1, dtype)
    for root in summed(parts, groups, dtype, idle=idle):
        assert torch.equal(root.view(torch.uint8), alone.view(torch.uint8))


def test_another_order_has_other_bits() -> None:
    (tree,) = summed(8, 1, torch.float32)
    plain = torch.zeros_like(tree)
    for part in range(8):
        plain += torch.cat([each.reshape(-1) for each in gradients(part, torch.float32)])
    assert torch.allclose(tree, plain, rtol=1e-4)
    assert not torch.equal(tree, plain)


def test_parts_are_added_once_each_and_none_is_left_out() -> None:
    own = parameters()
    sums = PartSums(Buckets(own), 4)
    sums.begin((0, 2), idle=False)
    assert list(sums.own) == [0, 1]
    own[0].grad = torch.ones_like(own[0])
    sums.add(0, 1.0)
    assert own[0].grad is None
    for part in (0, 2):
        with pytest.raises(RecoverError, match=f"part {part} is not to be added"):
            sums.add(part, 1.0)
    with pytest.raises(RecoverError, match="part 1 is missing"):
        sums.sum(lambda flat: None)
    sums.add(1, 1.0)
    assert sums.used == [1.0, 0.0, 0.0]
    sums.begin((0, 2), idle=True)
    with pytest.raises(RecoverError, match="part 0 is not to be added: this group adds none"):
        sums.add(0, 1.0)


def test_running_statistics_are_refused() -> None:
    require_torchft()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(RecoverError, match="1 keeps running statistics"):
        LiveGroups({"model": model}, group=0, lighthouse="localhost:1", parts=4)
