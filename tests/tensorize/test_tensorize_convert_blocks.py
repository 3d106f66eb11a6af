import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import TensorizeError
from outlast.tensorize.shapes import monarch_modes, monarch_rank
from outlast.tensorize.svd import (
    blocks_weight,
    low_rank,
    low_rank_for_inputs,
    output_change,
    to_blocks,
    to_blocks_for_inputs,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_index_order() -> None:
    weight = draw(15, 24)
    factored = to_blocks(weight, in_modes=(4, 6), out_modes=(3, 5), rank=2)
    first, second = factored
    assert first.shape == (4, 3, 2, 6)
    assert second.shape == (3, 5, 4, 2)
    x = draw(7, 24, seed=1)
    h = torch.einsum("tam,abrm->tabr", x.reshape(7, 4, 6), first)
    y = torch.einsum("tabr,bnar->tbn", h, second).reshape(7, 15)
    torch.testing.assert_close(y, x @ blocks_weight(first, second, 24, 15).mT)


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 6)),
    st.tuples(st.integers(1, 4), st.integers(1, 6)),
    st.integers(0, 99),
    st.data(),
)
def test_every_block_is_as_good_as_a_matrix_can_be(in_modes, out_modes, seed, data) -> None:
    (m1, m0), (n0, n1) = in_modes, out_modes
    in_features = data.draw(st.integers(max(1, m1 * m0 - m0), m1 * m0))
    out_features = data.draw(st.integers(max(1, n0 * n1 - n1), n0 * n1))
    rank = data.draw(st.integers(1, min(m0, n1)))
    weight = draw(out_features, in_features, seed=seed)
    factored = to_blocks(weight, in_modes=in_modes, out_modes=out_modes, rank=rank)
    dense = blocks_weight(*factored, in_features, out_features)
    assert float((weight - dense).norm()) == pytest.approx(factored.error, abs=1e-9)
    padded = torch.zeros(n0 * n1, m1 * m0, dtype=torch.float64)
    padded[:out_features, :in_features] = weight
    squares = 0.0
    for row in range(n0):
        for column in range(m1):
            block = padded[row * n1 : (row + 1) * n1, column * m0 : (column + 1) * m0]
            squares += low_rank(block, rank=rank).error ** 2
    assert factored.error == pytest.approx(squares**0.5, abs=1e-9)


def test_no_perturbation_is_better() -> None:
    weight = draw(12, 12)
    first, second = to_blocks(weight, in_modes=(3, 4), out_modes=(3, 4), rank=2)
    best = (weight - blocks_weight(first, second, 12, 12)).norm()
    for seed in range(25):
        for size in (1e-3, 1e-1):
            moved = (
                first + size * draw(*first.shape, seed=2 * seed),
                second + size * draw(*second.shape, seed=2 * seed + 1),
            )
            assert (weight - blocks_weight(*moved, 12, 12)).norm() > best


def test_an_error_finds_the_smallest_rank() -> None:
    weight = draw(36, 36)
    modes = {"in_modes": (6, 6), "out_modes": (6, 6)}
    factored = to_blocks(weight, **modes, error=0.4)
    rank = factored.cores[0].shape[2]
    assert factored.relative_error <= 0.4
    assert to_blocks(weight, **modes, rank=rank - 1).relative_error > 0.4
    assert to_blocks(weight, **modes, rank=6).relative_error < 1e-12


def test_blocks_of_uncorrelated_inputs_are_each_the_best() -> None:
    weight, modes = draw(12, 12), {"in_modes": (3, 4), "out_modes": (3, 4)}
    parts = [draw(9, 4, seed=seed) * torch.logspace(1, -1, 4) for seed in range(3)]
    moment = torch.block_diag(*(part.mT @ part for part in parts))
    factored = to_blocks_for_inputs(weight, moment, **modes, rank=2)
    squares = sum(
        low_rank_for_inputs(
            weight[4 * row : 4 * row + 4, 4 * column : 4 * column + 4],
            moment[4 * column : 4 * column + 4, 4 * column : 4 * column + 4],
            rank=2,
        ).error
        ** 2
        for row in range(3)
        for column in range(3)
    )
    assert factored.error == pytest.approx(squares**0.5, rel=1e-4)
    plain = to_blocks(weight, **modes, rank=2)
    assert factored.error < 0.9 * output_change(weight - blocks_weight(*plain, 12, 12), moment)


def test_weighing_by_inputs_pads_and_helps_with_correlated_inputs() -> None:
    weight, modes = draw(21, 22), {"in_modes": (4, 6), "out_modes": (5, 5)}
    scales = torch.logspace(1.5, -1.5, 22)[torch.randperm(22, generator=torch.manual_seed(0))]
    inputs = (draw(500, 22) @ (torch.eye(22) + 0.1 * draw(22, 22, seed=3))) * scales
    moment = inputs.mT @ inputs / 500
    factored = to_blocks_for_inputs(weight, moment, **modes, rank=2)
    assert [tuple(core.shape) for core in factored] == [(4, 5, 2, 6), (5, 5, 4, 2)]
    dense = blocks_weight(*factored, 22, 21)
    plain = blocks_weight(*to_blocks(weight, **modes, rank=2), 22, 21)
    assert output_change(weight - dense, moment) == pytest.approx(factored.error)
    assert output_change(weight - dense, moment) < 0.8 * output_change(weight - plain, moment)


def test_blocks_of_inputs_never_seen_follow_the_weight() -> None:
    weight, modes = draw(12, 12), {"in_modes": (3, 4), "out_modes": (3, 4)}
    seen = torch.cat([torch.zeros(4), torch.ones(8)]).double()
    factored = to_blocks_for_inputs(weight, torch.diag(seen), **modes, rank=2)
    plain = to_blocks(weight, **modes, rank=2)
    torch.testing.assert_close(blocks_weight(*factored, 12, 12), blocks_weight(*plain, 12, 12))


def test_white_inputs_give_plain_blocks() -> None:
    weight, modes = draw(12, 12), {"in_modes": (3, 4), "out_modes": (3, 4)}
    plain, weighted = (
        to_blocks(weight, **modes, rank=2),
        to_blocks_for_inputs(weight, torch.eye(12), **modes, rank=2),
    )
    torch.testing.assert_close(blocks_weight(*weighted, 12, 12), blocks_weight(*plain, 12, 12))


def test_monarch_matrices_are_recovered() -> None:
    blocks, features = 4, 32
    in_modes, out_modes = monarch_modes(features, features, blocks)
    rank = monarch_rank(features, features, blocks)
    first = draw(in_modes[0], out_modes[0], rank, in_modes[1])
    second = draw(out_modes[0], out_modes[1], in_modes[0], rank, seed=1)
    weight = blocks_weight(first, second, features, features)
    modes = {"in_modes": in_modes, "out_modes": out_modes}
    factored = to_blocks(weight, **modes, rank=rank)
    assert factored.relative_error < 1e-12
    assert factored.parameters == 2 * features**2 // blocks
    # Monarch as its paper writes it: block-diagonal, permutation, block-diagonal.
    left = torch.block_diag(*second.permute(0, 1, 2, 3).reshape(blocks, features // blocks, -1))
    right = torch.block_diag(*first.reshape(blocks, -1, features // blocks))
    permutation = torch.arange(features).reshape(blocks, blocks, rank).transpose(0, 1).reshape(-1)
    torch.testing.assert_close(left @ right[permutation], weight)


def test_what_cannot_be_converted_is_refused() -> None:
    modes = {"in_modes": (3, 4), "out_modes": (3, 4)}
    with pytest.raises(TensorizeError, match="rank = 5 must be between 1 and 4"):
        to_blocks(draw(12, 12), **modes, rank=5)
    with pytest.raises(TensorizeError, match="modes hold 12"):
        to_blocks(draw(13, 12), **modes, rank=2)
    with pytest.raises(TensorizeError, match="not finite"):
        to_blocks(torch.full((12, 12), torch.inf), **modes, rank=2)
    with pytest.raises(TensorizeError, match="shape"):
        to_blocks(draw(12), **modes, rank=2)
