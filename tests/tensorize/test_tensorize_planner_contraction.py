"""The order in which small tensors are contracted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.tensorize.contraction import steps

SIZES = (("a", 4), ("b", 5), ("c", 3), ("p", 2), ("q", 6), ("r", 3))
CHAINS = (
    (("ap", "bq", "pqr", "cr"), "abc"),
    (("abc", "bq", "pqr", "cr"), "ap"),
    (("abc", "ap", "pqr", "cr"), "bq"),
    (("ap", "pbq", "qc"), "cba"),
    (("ap", "ap"), "pa"),
    (("abc",), "cab"),
)


def _followed(terms: tuple[str, ...], result: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = dict(SIZES)
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn([size[each] for each in term], generator=generator, dtype=torch.float64)
        for term in terms
    ]
    left = list(tensors)
    for step in steps(terms, result, SIZES):
        left.append(torch.einsum(step.equation, *[left.pop(place) for place in step.places]))
    assert len(left) == 1
    return left[0], torch.einsum(",".join(terms) + "->" + result, *tensors)


@settings(deadline=None, max_examples=20)
@given(chain=st.sampled_from(CHAINS), seed=st.integers(0, 99))
def test_steps_give_what_one_einsum_gives(chain: tuple[tuple[str, ...], str], seed: int) -> None:
    ours, theirs = _followed(*chain, seed)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chain", CHAINS[:4])
def test_the_larger_tensor_comes_first(chain: tuple[tuple[str, ...], str]) -> None:
    size = dict(SIZES)
    left = [torch.empty([size[each] for each in term]) for term in chain[0]]
    for step in steps(*chain, SIZES):
        taken = [left.pop(place) for place in step.places]
        assert len(taken) < 2 or taken[0].numel() >= taken[1].numel()
        left.append(torch.einsum(step.equation, *taken))
