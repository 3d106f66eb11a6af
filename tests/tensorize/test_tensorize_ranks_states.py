"""What optimizers hold follows a change of rank, or the change is refused."""

import pytest
import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize import BTTLinear, LowRankLinear, SparseLowRankLinear, TTLinear
from outlast.tensorize.optimizers import UnfoldedMuon, factor_unfoldings
from outlast.tensorize.ranks import grow, resize, shrink

DOUBLE = {"dtype": torch.float64}

OPTIMIZERS = {
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def stepped(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(32, model[0].in_features, dtype=next(model.parameters()).dtype)
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_never_negative_stays_so(name):
    torch.manual_seed(0)
    model = nn.Sequential(LowRankLinear(10, 8, 6))
    optimizer = OPTIMIZERS[name](model.parameters())
    stepped(model, optimizer)
    factors = [model[0].down.weight, model[0].up.weight]
    positive = {
        key
        for key, value in optimizer.state[factors[0]].items()
        if value.shape == factors[0].shape
        and all(float(optimizer.state[each][key].min()) >= 0 for each in factors)
    }
    assert positive
    resize(model[0], 4, optimizers=[optimizer])
    for each in model[0].factors():
        for key in positive:
            assert float(optimizer.state[each][key].min()) >= 0, key
    stepped(model, optimizer)
    assert all(bool(each.isfinite().all()) for each in model.parameters())


def test_an_average_of_the_parameter_is_mapped_like_the_parameter():
    torch.manual_seed(0)
    model = nn.Sequential(LowRankLinear(10, 8, 6, bias=False, **DOUBLE))
    optimizer = torch.optim.ASGD(model.parameters())
    stepped(model, optimizer, 1)
    for each in model[0].factors():
        optimizer.state[each]["ax"].copy_(each.detach())
    resize(model[0], 3, optimizers=[optimizer])
    for each in model[0].factors():
        torch.testing.assert_close(optimizer.state[each]["ax"], each.detach())


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: resize(model[0], 3, optimizers=[optimizer]),
        lambda model, optimizer: shrink(model, 0.5, optimizers=[optimizer]),
    ],
    ids=["resize", "shrink"],
)
def test_no_step_of_adam_after_a_change_is_longer_than_gradients_can_make_one(change):
    torch.manual_seed(0)
    model = nn.Sequential(LowRankLinear(10, 8, 6, bias=False, **DOUBLE))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    stepped(model, optimizer)
    # Cauchy and Schwarz, over the gradients of three steps.
    reach = 0.1**2 / 0.001 * sum((0.9**2 / 0.999) ** k for k in range(3))
    for each in model[0].factors():
        state = optimizer.state[each]
        # As far as gradients can bring them; the squares of a map know no signs.
        state["exp_avg_sq"].fill_(1.0)
        state["exp_avg"].copy_(torch.randn_like(each).sign() * reach**0.5)
    change(model, optimizer)
    assert model[0].rank < 6
    for each in model[0].factors():
        state = optimizer.state[each]
        assert (state["exp_avg"].square() <= reach * state["exp_avg_sq"] * (1 + 1e-12)).all()


def test_squares_that_are_not_averaged_bound_nothing():
    model = nn.Sequential(LowRankLinear(10, 8, 6, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.0))
    stepped(model, optimizer)
    resize(model[0], 3, optimizers=[optimizer])
    stepped(model, optimizer)
    assert all(bool(each.isfinite().all()) for each in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: resize(model[1], 2, optimizers=[optimizer]),
        lambda model, optimizer: shrink(model, 0.5, optimizers=[optimizer]),
        lambda model, optimizer: grow(model, used=0.1, optimizers=[optimizer]),
    ],
    ids=["resize", "shrink", "grow"],
)
def test_states_of_another_shape_are_refused_before_anything_changes(change):
    torch.manual_seed(0)
    model = nn.Sequential(LowRankLinear(10, 8, 4), LowRankLinear(8, 8, 4))
    optimizer = torch.optim.Adafactor(model[1].parameters())
    stepped(model, optimizer)
    before = list(model.parameters())
    with pytest.raises(TensorizeError, match="Adafactor holds 'row_var'"):
        change(model, optimizer)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert [layer.rank for layer in model] == [4, 4]


@pytest.mark.parametrize("dead", ["all", "some"])
@pytest.mark.parametrize(
    "build",
    [lambda: LowRankLinear(10, 8, 6), lambda: BTTLinear(12, 12, 4)],
    ids=["low_rank", "btt"],
)
def test_directions_that_carry_nothing_stay_alive(build, dead):
    torch.manual_seed(0)
    layer = build()
    model = nn.Sequential(layer)
    right = layer.factors()[1]
    with torch.no_grad():
        right[..., 0 if dead == "all" else 2 :] = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepped(model, optimizer, 1)
    with torch.no_grad():
        right[..., 0 if dead == "all" else 2 :] = 0.0
    weight = layer.to_dense().detach()
    resize(layer, 3, optimizers=[optimizer])
    torch.testing.assert_close(layer.to_dense(), weight, rtol=1e-4, atol=1e-6)
    left, right = layer.factors()
    place = layer.network.cores[0].index("r")
    assert bool(left.movedim(place, 0)[2].any())  # learns again
    assert not right[..., 2].any()
    for each in (left, right):
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[each][key]
            assert bool(state.isfinite().all())
            assert float(state.abs().max()) < 1e3
    assert not optimizer.state[right]["exp_avg"][..., 2].any()
    assert not optimizer.state[left]["exp_avg_sq"].movedim(place, 0)[2].any()
    stepped(model, optimizer)
    assert layer.factors()[1][..., 2].abs().sum() > 0


def test_directions_of_little_energy_are_kept_as_they_are():
    """bfloat16 has three digits, and yet a direction of a thousandth is exact in its own scale."""
    torch.manual_seed(0)
    layer = LowRankLinear(16, 16, 5, bias=False, dtype=torch.bfloat16)
    left, right = (torch.linalg.qr(torch.randn(16, 5, **DOUBLE)).Q for _ in range(2))
    sizes = torch.tensor([1.0, 0.5, 1e-3, 1e-4, 1e-9], **DOUBLE)
    with torch.no_grad():
        layer.down.weight.copy_(left.T)
        layer.up.weight.copy_(right * sizes)
    change = resize(layer, 4)
    small = right[:, 2] @ layer.to_dense().double() @ left[:, 2]
    assert float(small) == pytest.approx(1e-3, rel=0.5)
    norms = [layer.down.weight[2].double().norm(), layer.up.weight[:, 2].double().norm()]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=0.02)
    assert float(norms[0] * norms[1]) == pytest.approx(1e-3, rel=0.1)
    assert change.error < 1e-8


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_units_of_very_different_scales_are_no_loss(scale):
    torch.manual_seed(0)
    layer = LowRankLinear(12, 12, 4, bias=False, **DOUBLE)
    with torch.no_grad():
        layer.down.weight[0] *= scale
        layer.up.weight[:, 0] /= scale
        layer.up.weight[:, 3] *= 1e-7
    weight = layer.to_dense().detach()
    resize(layer, 3)
    torch.testing.assert_close(layer.to_dense(), weight, rtol=1e-5, atol=1e-6)


def test_unfolded_muon_hears_of_new_factors():
    torch.manual_seed(0)
    model = nn.Sequential(TTLinear(24, 24, 6, cores=2))
    cores = factor_unfoldings(model)
    optimizer = UnfoldedMuon(cores, cores, lr=0.01)
    stepped(model, optimizer, 1)
    for bond in model[0].network.bonds:
        resize(model[0], 3, bond=bond, optimizers=[optimizer])
    stepped(model, optimizer, 1)
    assert {each.shape for each in model[0].factors()} <= {
        optimizer.state[each]["momentum_buffer"].shape for each in model[0].factors()
    }


@pytest.mark.parametrize("rank", [2, 8])
def test_alpha_stays_and_the_function_as_well(rank):
    torch.manual_seed(0)
    layer = SparseLowRankLinear(12, 10, 4, 0.1, alpha=8.0, bias=False, **DOUBLE)
    with torch.no_grad():
        layer.down.weight[2:] = 0.0
    weight = layer.to_dense().detach()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    x, dy = torch.randn(20, 12, **DOUBLE), torch.randn(20, 10, **DOUBLE)
    layer(x).backward(dy)
    optimizer.step()
    resize(layer, rank, optimizers=[optimizer])
    assert layer.scale == 8.0 / rank
    assert layer.settings()["alpha"] == 8.0
    torch.testing.assert_close(layer.to_dense(), weight)
    layer.zero_grad()
    layer(x).backward(dy)
    # A gradient that was averaged before is the one of the new factors.
    kept = slice(0, min(rank, 2))
    moment = optimizer.state[layer.down.weight]["momentum_buffer"][kept]
    torch.testing.assert_close(moment, layer.down.weight.grad[kept])
