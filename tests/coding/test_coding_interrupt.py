import copy

import pytest
import torch
from torch import nn

from outlast.coding.protocol.gradients import Abandoned, Interrupt, keyed

LAYERS = 4


class Layer(nn.Module):
    """A layer that writes down its passes."""

    def __init__(self, passes):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.passes = passes

    def forward(self, x):
        self.passes.append("forward")
        x = self.linear(x)
        x.register_hook(lambda gradient: self.passes.append("backward"))
        return x


class Nested(nn.Module):
    """Layers inside a module list inside a model, as in transformers."""

    def __init__(self, passes):
        super().__init__()
        self.layers = nn.ModuleList(Layer(passes) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def passes():
    return []


@pytest.fixture(params=["sequence", "module list"])
def model(passes, request):
    torch.manual_seed(0)
    if request.param == "sequence":
        return nn.Sequential(*(Layer(passes) for _ in range(LAYERS)))
    return Nested(passes)


def loss(model):
    return model(torch.ones(2, 3)).square().sum()


def test_the_forward_pass_is_left_between_two_layers(model, passes):
    interrupt = Interrupt(model, lambda: len(passes) >= 2)
    with pytest.raises(Abandoned), interrupt.listening():
        loss(model)
    assert passes == ["forward", "forward"]


def test_the_backward_pass_is_left_within_a_layer(model, passes):
    interrupt = Interrupt(model, lambda: passes.count("backward") >= 2)
    with pytest.raises(Abandoned), interrupt.listening():
        loss(model).backward()
    assert passes.count("forward") == LAYERS
    assert 2 <= passes.count("backward") <= 3


def test_the_question_is_not_put_outside_listening(model):
    asked = []

    def unwanted():
        asked.append(1)
        return False

    interrupt = Interrupt(model, unwanted)
    loss(model).backward()
    assert not asked
    with interrupt.listening():
        loss(model).backward()
    assert len(asked) >= LAYERS + len(list(model.parameters()))
    count = len(asked)
    loss(model).backward()
    assert len(asked) == count


def test_listening_ends_with_the_exception(model):
    interrupt = Interrupt(model, lambda: True)
    with pytest.raises(Abandoned), interrupt.listening():
        loss(model)
    loss(model).backward()


def test_an_abandoned_pass_leaves_the_model_as_good_as_new(model, passes):
    loss(model).backward()
    right = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    unwanted = True
    interrupt = Interrupt(model, lambda: unwanted and passes.count("backward") >= LAYERS + 2)
    with pytest.raises(Abandoned), interrupt.listening():
        loss(model).backward()
    unwanted = False
    model.zero_grad()
    with interrupt.listening():
        loss(model).backward()
    for found, each in zip(right, model.parameters(), strict=True):
        assert torch.equal(found, each.grad)


def test_removing_takes_all_hooks_off_the_model(model):
    def hooks():
        forward = sum(len(module._forward_pre_hooks) for module in model.modules())
        after = sum(
            len(each._post_accumulate_grad_hooks or {})  # None where there never was one
            for each in model.parameters()
        )
        return forward, after

    interrupt = Interrupt(model, lambda: True)
    assert hooks() == (LAYERS, 2 * LAYERS)
    interrupt.remove()
    assert hooks() == (0, 0)
    with interrupt.listening():
        loss(model).backward()


def test_frozen_parameters_and_models_without_layer_lists_are_served(passes):
    model = nn.Linear(3, 1)
    model.bias.requires_grad_(False)
    interrupt = Interrupt(model, lambda: True)
    with pytest.raises(Abandoned), interrupt.listening():
        model(torch.ones(2, 3))


def test_an_abandoned_pass_gives_the_random_stream_back(model):
    interrupt = Interrupt(model, lambda: True)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with pytest.raises(Abandoned), keyed(0, 1, 2), interrupt.listening():
        loss(nn.Sequential(nn.Dropout(0.5), model))
    assert torch.equal(torch.rand(4), expected)


def test_compiled_layers_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].compile(backend="eager")
    Interrupt(model, lambda: True)
    assert not model[0]._forward_pre_hooks
    assert model[1]._forward_pre_hooks


def test_random_numbers_belong_to_the_chunk_and_not_to_who_draws_them():
    def drawn(*place):
        with keyed(*place):
            return torch.rand(3).tolist()

    torch.manual_seed(1)
    first = drawn(0, 5, 7)
    torch.manual_seed(2)
    torch.rand(10)
    assert drawn(0, 5, 7) == first
    others = [drawn(1, 5, 7), drawn(0, 6, 7), drawn(0, 5, 8), drawn(0, 7, 5)]
    assert all(each != first for each in others)


def test_copied_and_saved_models_keep_working_and_ask_nothing(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    interrupt = Interrupt(model, lambda: True)
    copies = [copy.deepcopy(model)]
    torch.save(model, tmp_path / "model.pt")
    copies.append(torch.load(tmp_path / "model.pt", weights_only=False))
    with interrupt.listening():
        for each in copies:
            each(torch.randn(2, 3)).sum().backward()
        with pytest.raises(Abandoned):
            model(torch.randn(2, 3))


def test_nothing_is_asked_inside_a_compiled_module():
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = nn.Sequential(nn.Linear(3, 3), inner)
    inner.compile(backend="eager")
    Interrupt(model, lambda: True)
    assert not any(each._forward_pre_hooks for each in inner.modules() if each is not inner)
    assert model[0]._forward_pre_hooks
