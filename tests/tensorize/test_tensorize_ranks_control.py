"""Gates on bonds: they find ranks, and leave no trace when they go."""

import pytest
import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.forms import BottleneckLinear, LowRankLinear, TTLinear, TuckerLinear
from outlast.tensorize.ranks import RankControl, match_ranks, resize, shrink

DOUBLE = {"dtype": torch.float64}


def test_gates_find_the_rank_that_the_task_has():
    torch.manual_seed(0)
    layer = LowRankLinear(12, 12, 8, bias=False, **DOUBLE)
    target = torch.randn(12, 3, **DOUBLE) @ torch.randn(3, 12, **DOUBLE) / 12**0.5
    control = RankControl(layer, weight=0.3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=5e-3, weight_decay=0.0)
    assert control.share == 1.0
    for _ in range(800):
        optimizer.zero_grad()
        x = torch.randn(64, 12, **DOUBLE)
        control.objective((layer(x) - x @ target).square().mean()).backward()
        optimizer.step()
    assert control.share <= 0.75
    x = torch.randn(5, 12, **DOUBLE)
    y = layer(x).detach()
    changes = control.finish([optimizer])
    assert 3 <= changes[0].after < 8
    assert list(layer.state_dict()) == ["down.weight", "up.weight"]
    torch.testing.assert_close(layer(x), y, rtol=0.1, atol=0.1)
    layer(x).sum().backward()
    optimizer.step()


def test_the_late_stage_works_on_what_is_farther_from_its_target():
    layer = LowRankLinear(6, 6, 4)
    control = RankControl(layer, target_loss=1.0, target_share=0.5)
    term = float(control.rank_term().detach())
    near, far = torch.tensor(1.1), torch.tensor(5.0)
    of_rank, of_loss = 0.11 + 1.01 * term, 5.5 + 0.01 * term
    assert float(control.objective(near).detach()) == pytest.approx(of_rank, rel=1e-5)
    assert float(control.objective(far).detach()) == pytest.approx(of_loss, rel=1e-5)
    # The mean over all ranks decides, not the loss of this one.
    chosen = control.objective(far, loss_for_choice=1.1).detach()
    assert float(chosen) == pytest.approx(0.5 + 1.01 * term, rel=1e-5)


def test_units_whose_gates_live_stay_whatever_their_size():
    torch.manual_seed(0)
    layer = BottleneckLinear(8, 6, 4, **DOUBLE)
    with torch.no_grad():
        layer.up.weight[:, 1] *= 1e4  # large, and yet its gate dies
    control = RankControl(layer)
    (gate,) = control.parameters()
    gate.data[1] = 1e-4
    rows, columns = layer.down.weight[[0, 2, 3]].clone(), layer.up.weight[:, [0, 2, 3]].clone()
    control.finish()
    assert torch.equal(layer.down.weight, rows)
    assert torch.equal(layer.up.weight, columns)


@pytest.mark.parametrize(
    "layer",
    [TTLinear(24, 24, 4, 2, **DOUBLE), TuckerLinear(24, 24, 3, **DOUBLE)],
    ids=["tt", "tucker"],
)
def test_cores_with_several_gates(layer):
    weight = layer.to_dense().detach()
    names = list(layer.state_dict())
    control = RankControl(layer)
    gates = list(control.parameters())
    assert len(gates) == len(layer.network.bonds)
    for place, gate in enumerate(gates):
        gate.data.fill_(2.0 + place)
    factor = torch.stack([gate[0] for gate in gates]).prod()
    control.finish()
    assert list(layer.state_dict()) == names
    torch.testing.assert_close(layer.to_dense(), weight * factor)


def test_gates_leave_the_groups_with_their_names():
    model = nn.Sequential(LowRankLinear(6, 6, 4), nn.Linear(6, 2))
    control = RankControl(model)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    (group,) = optimizer.param_groups
    assert len(group["param_names"]) == 6
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    control.finish([optimizer])
    assert len(group["params"]) == len(group["param_names"]) == 5
    assert not any("gate" in name for name in group["param_names"])
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("whole", [True, False])
def test_tied_layers_are_gated_together(whole):
    torch.manual_seed(0)
    model = nn.Sequential(*(LowRankLinear(6, 6, 4, bias=False, **DOUBLE) for _ in range(2)))
    if whole:
        model[1].down, model[1].up = model[0].down, model[0].up
    else:
        model[1].down.weight, model[1].up.weight = model[0].down.weight, model[0].up.weight
    control = RankControl(model)
    (gate,) = control.parameters()
    gate.data.copy_(torch.tensor([2.0, 1e-3, 1.0, 1.0]))
    expected = model[0].to_dense().detach()
    assert torch.equal(model[1].to_dense(), expected)
    (change,) = control.finish()
    assert change.after == 3
    for layer in model:
        assert layer.rank == 3
        torch.testing.assert_close(layer.to_dense(), expected, rtol=0.0, atol=1e-2)
    assert torch.equal(model[0].to_dense(), model[1].to_dense())
    assert len(list(model.parameters())) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: resize(model[0], 2, name="0"),
        shrink,
        lambda model: RankControl(model),
        lambda model: match_ranks(model, nn.Sequential(LowRankLinear(6, 6, 2)).state_dict()),
    ],
    ids=["resize", "shrink", "control", "match"],
)
def test_gated_layers_say_what_to_do_first(change):
    model = nn.Sequential(LowRankLinear(6, 6, 4))
    RankControl(model)
    with pytest.raises(TensorizeError, match=r"ranks of 0 are gated: call RankControl.finish"):
        change(model)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_loss": 1.0}, "go together"),
        ({"target_loss": 0.0, "target_share": 0.5}, "target_loss = 0.0"),
        ({"target_loss": 1.0, "target_share": 0.0}, "target_share = 0.0"),
        ({"target_loss": 1.0, "target_share": 1.5}, "target_share = 1.5"),
    ],
)
def test_targets_out_of_range_are_refused(settings, words):
    with pytest.raises(TensorizeError, match=words):
        RankControl(LowRankLinear(4, 4, 2), **settings)
    with pytest.raises(TensorizeError, match="no structured layer"):
        RankControl(nn.Linear(3, 3))
