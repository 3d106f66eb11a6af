"""Factors that are shown in another dtype than they are stored in."""

import torch
from torch import nn

from outlast.tensorize import LowRankLinear, TTLinear
from outlast.tensorize.fsdp import WholeCores
from outlast.tensorize.optimizers import (
    ProductDecay,
    SpectralBound,
    UnfoldedMuon,
    factor_unfoldings,
)
from outlast.tensorize.parameters import (
    factor_multipliers,
    factor_parameters,
    mup_initialize_,
    parameter_groups,
    structured_layers,
)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(LowRankLinear(12, 16, 5), TTLinear(16, 12, 3, cores=2))


def _shown_in_bfloat16(model: nn.Module) -> None:
    WholeCores(dict(model.named_parameters()), None).cast(model, torch.bfloat16)  # type: ignore[arg-type]


def test_parameters_behind_the_factors_are_found() -> None:
    model = _model()
    stored = [each for layer in model for each in layer.factors()]
    _shown_in_bfloat16(model)
    assert any(
        seen is not each
        for seen, each in zip([*model[0].factors(), *model[1].factors()], stored, strict=True)
    )
    found = [each for layer in model for each in factor_parameters(layer)]
    assert all(one is other for one, other in zip(found, stored, strict=True))
    assert len(list(structured_layers(model))) == 2


def test_rules_know_the_factors() -> None:
    model = _model()
    stored = [each for layer in model for each in layer.factors()]
    expected = factor_multipliers(model), factor_unfoldings(model)
    _shown_in_bfloat16(model)
    assert (factor_multipliers(model), factor_unfoldings(model)) == expected
    groups = {group["name"]: group for group in parameter_groups(model, 0.1, 0.01)}
    assert {id(each) for each in groups["factors"]["params"]} == set(map(id, stored))
    assert "matrices" not in groups
    UnfoldedMuon(stored, factor_unfoldings(model))
    before = [each.detach().clone() for each in stored]
    mup_initialize_(model)
    assert not any(map(torch.equal, stored, before))


def test_decay_is_of_what_is_stored_and_not_of_its_rounding() -> None:
    plain, shown = _model(), _model()
    _shown_in_bfloat16(shown)
    for model in (plain, shown):
        optimizer = torch.optim.SGD(parameter_groups(model, 0.1, 0.0))
        ProductDecay(optimizer, model, 0.3)
        optimizer.step()
    for one, other in zip(plain.parameters(), shown.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_spectral_bound_holds_for_factors_that_are_shown_in_another_dtype() -> None:
    layer = LowRankLinear(8, 6, 3, bias=False)
    _shown_in_bfloat16(layer)
    down, up = factor_parameters(layer)
    before = (up @ down).detach()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    SpectralBound(optimizer, layer, 0.05)
    for each in (down, up):
        each.grad = torch.randn_like(each)
    optimizer.step()
    moved = torch.linalg.matrix_norm((up @ down).detach() - before, 2)
    assert 0.02 < float(moved) <= 0.05 * 1.001
