"""Cores of every conversion mean the same in the layers that they are for."""

from collections.abc import Sequence

import pytest
import torch

from outlast.tensorize import (
    BottleneckLinear,
    BTTLinear,
    LowRankLinear,
    MonarchLinear,
    TTLinear,
    TTMLinear,
)
from outlast.tensorize.conversion import start_from_dense
from outlast.tensorize.decompose import to_tensor_train, to_tensor_train_matrix
from outlast.tensorize.shapes import balanced_modes, block_modes, monarch_modes, monarch_rank
from outlast.tensorize.svd import low_rank, to_blocks

SIZES = [(24, 36), (23, 31), (60, 17)]


def fill(layer: torch.nn.Module, cores: Sequence[torch.Tensor]) -> torch.Tensor:
    """The layer's weight after its factors were set."""
    with torch.no_grad():
        for factor, core in zip(layer.factors(), cores, strict=True):
            assert factor.shape == core.shape
            factor.copy_(core)
        return layer.to_dense()


@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
def test_layers_hold_what_conversion_found(in_features: int, out_features: int) -> None:
    weight = torch.randn(
        out_features, in_features, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    features, kind = (in_features, out_features), {"dtype": torch.float64}
    modes = {
        "in_modes": balanced_modes(in_features, 2),
        "out_modes": balanced_modes(out_features, 2),
    }
    in_pair, out_pair = block_modes(in_features, out_features)
    pairs = [
        (LowRankLinear(*features, 5, **kind), low_rank(weight, rank=5)),
        (TTLinear(*features, 5, cores=2, **kind), to_tensor_train(weight, **modes, rank=5)),
        (TTMLinear(*features, 5, cores=2, **kind), to_tensor_train_matrix(weight, **modes, rank=5)),
        (
            BTTLinear(*features, 2, **kind),
            to_blocks(weight, in_modes=in_pair, out_modes=out_pair, rank=2),
        ),
        (
            MonarchLinear(*features, 3, **kind),
            to_blocks(
                weight,
                in_modes=monarch_modes(*features, 3)[0],
                out_modes=monarch_modes(*features, 3)[1],
                rank=monarch_rank(*features, 3),
            ),
        ),
    ]
    for layer, found in pairs:
        error = float((weight - fill(layer, found.cores)).norm())
        # Padded trains know an upper bound only; all others know the error.
        if isinstance(layer, TTLinear | TTMLinear):
            assert 0 < error <= found.error + 1e-9
            assert error >= 0.8 * found.error
        else:
            assert error == pytest.approx(found.error)


def test_bottlenecks_start_near_the_dense_layer() -> None:
    torch.manual_seed(0)
    dense = torch.nn.Linear(16, 12)
    layer = BottleneckLinear(16, 12, 12)
    start_from_dense(layer, dense)
    x = torch.randn(200, 16)
    with torch.no_grad():
        assert float((layer(x) - dense(x)).norm() / dense(x).norm()) < 0.25
