"""Every kind of state that a step can hide is found, classed and named."""

import numpy as np
import pytest
import torch
from torch import nn

from outlast.autosave.state_plan import find_state
from outlast.errors import AutosaveError


def training(model, after=lambda: None, optimizer=None):
    """A step of `model`, its optimizer, and what follows it."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        after()

    return step, optimizer


def kinds(plan):
    return {each.name: each.kind for each in plan.tensors}


def test_statistics_of_a_batch_norm_are_found_although_its_operation_hides_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    step, optimizer = training(model)
    plan = find_state(step, {"model": model, "optimizer": optimizer})
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        found = plan.find(f"model.1.{name}")
        assert found.kind == "must-save"
        assert found.window == "early"
        assert any(each.startswith("trace: read, then written") for each in found.why)
        assert any(each.startswith("graph: ") for each in found.why)
        assert "content: changes" in found.why
    assert plan.find("model.0.weight").window == "late"
    assert not plan.lints


def test_a_batch_norm_in_evaluation_is_constant():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    step, _ = training(model)
    plan = find_state(step, model)
    assert plan.find("model.1.running_mean").kind == "save-once"


class Attribute(nn.Module):
    """Holds a running mean that is no buffer, in place and by assignment."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_place = torch.zeros(4)
        self.assigned = torch.zeros(4)

    def forward(self, x):
        x = self.linear(x)
        self.in_place.mul_(0.9).add_(x.detach().mean(0))
        self.assigned = self.assigned * 0.9 + x.detach().mean(0)
        return x - self.in_place - self.assigned


@pytest.mark.slow
def test_plain_attributes_are_found_and_reported():
    model = Attribute()
    plan = find_state(training(model)[0], model)
    for name in ("in_place", "assigned"):
        assert plan.find(f"model.{name}").kind == "must-save"
        assert not plan.find(f"model.{name}").in_state_dict
        assert any(f"`model.{name}` changes" in each for each in plan.lints)
        assert any(
            f"Attribute.{name} is written in the forward pass" in each for each in plan.lints
        )


class Buffers(nn.Module):
    """Buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("recent", torch.zeros(3, 4), persistent=False)
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("scratch", torch.zeros(8, 4))

    def forward(self, x):
        x = self.linear(x) * self.mask * self.scale + self.recent.mean(0)
        self.count += 1
        self.recent[0].copy_(self.recent[1])
        self.recent[1] = x.detach()[0]
        self.scratch.copy_(x.detach())
        return x + self.scratch


def test_buffers_that_are_written_in_place_in_part_not_at_all_or_first():
    model = Buffers()
    plan = find_state(training(model)[0], model)
    assert plan.find("model.count").kind == "must-save"
    assert plan.find("model.recent").kind == "must-save"
    assert plan.find("model.mask").kind == "derivable"
    assert plan.find("model.scale").kind == "save-once"
    # The graph says that it is written, and cannot say that nothing of it is read: must-save.
    assert plan.find("model.scratch").kind == "must-save"
    (lint,) = plan.lints
    assert "`model.recent` is a buffer with persistent=False" in lint


def test_scratch_memory_outside_of_a_module_is_dead():
    model, scratch = nn.Linear(4, 4), torch.zeros(4)

    def after():
        scratch.zero_()
        scratch.add_(model.bias.detach())

    plan = find_state(training(model, after)[0], model)
    assert plan.find("scratch").kind == "dead"
    assert plan.find("model.weight.grad").kind == "dead"


def test_a_slice_that_is_overwritten_keeps_the_rest_alive():
    model, ring = nn.Linear(4, 4), torch.zeros(5, 4)

    def after():
        ring[:1].copy_(model.bias.detach())

    plan = find_state(training(model, after)[0], model)
    assert plan.find("ring").kind == "must-save"


def test_averages_of_weights_are_found_wherever_they_are():
    model = nn.Linear(4, 4)
    average = torch.optim.swa_utils.AveragedModel(model)
    copies = [each.detach().clone() for each in model.parameters()]

    def after():
        average.update_parameters(model)
        torch._foreach_lerp_(copies, [each.detach() for each in model.parameters()], 0.1)

    plan = find_state(training(model, after)[0], [model])
    assert plan.find("average.module.weight").kind == "must-save"
    assert plan.find("average.n_averaged").kind == "must-save"
    assert plan.find("copies[0]").kind == "must-save"
    assert plan.find("copies[0]").window == "late"
    assert plan.find("average.module.weight").in_state_dict
    assert any("`copies[1]` changes" in each for each in plan.lints)


class Scaled(nn.Module):
    """Delayed scaling, as 8-bit floats need it: the scale comes from the largest values before."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("largest", torch.ones(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        packed = (x * self.scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.largest.copy_(torch.roll(self.largest, 1))
        self.largest[0] = x.detach().abs().max()
        self.scale.copy_(448.0 / self.largest.max())
        return self.linear(packed.to(torch.float32) / self.scale)


def test_scales_of_eight_bit_floats_are_found():
    model = Scaled()
    model.packed = torch.ones(4).to(torch.float8_e4m3fn)
    plan = find_state(training(model)[0], model)
    assert plan.find("model.scale").kind == "must-save"
    assert plan.find("model.largest").kind == "must-save"
    assert plan.find("model.packed").kind == "save-once"


def test_the_state_of_a_recurrent_network_is_found():
    cell = nn.GRUCell(4, 4)
    state = {"hidden": torch.zeros(8, 4)}
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        hidden = cell(torch.randn(8, 4), state["hidden"])
        hidden.square().mean().backward()
        optimizer.step()
        state["hidden"] = hidden.detach()

    plan = find_state(step, [cell, optimizer])
    assert plan.find("state['hidden']").kind == "must-save"
    assert any("state['hidden']" in each for each in plan.lints)


def test_what_moves_on_without_being_read_is_kept():
    model = nn.Linear(4, 4)
    seen = [torch.zeros(4), torch.zeros(4), torch.zeros(4)]

    def step():
        model(torch.randn(8, 4) + seen[2].sum()).sum().backward()
        seen[2], seen[1], seen[0] = seen[1], seen[0], torch.randn(4)

    found = kinds(find_state(step, model))
    assert {found[f"seen[{place}]"] for place in range(3)} == {"must-save"}


def test_gradients_that_are_carried_over_are_found():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = iter(range(1000))

    def step():
        model(torch.randn(8, 4)).square().mean().backward()
        if next(count) % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    plan = find_state(step, [model, optimizer], steps=4)
    assert plan.find("model.weight.grad").kind == "must-save"


def test_operations_that_hide_what_they_write_are_caught():
    with torch.library._scoped_library("outlast_test", "DEF") as library:
        library.define("silent(Tensor x, Tensor state) -> Tensor")

        def silent(x, state):
            state.add_(x.sum())
            return x * 2

        library.impl("silent", silent, "CPU")
        model, hidden = nn.Linear(4, 4), torch.zeros(4)

        def after():
            with torch.no_grad():
                torch.ops.outlast_test.silent(model.weight, hidden)

        plan = find_state(training(model, after)[0], model)
    assert plan.find("hidden").kind == "must-save"
    assert "trace: read, then written" in plan.find("hidden").why
    assert plan.find("hidden").window == "late"
    assert any("outlast_test::silent writes an argument" in each for each in plan.lints)


def test_what_numpy_writes_behind_the_back_of_torch_is_found():
    model, counts, memory = nn.Linear(4, 4), np.zeros(4), torch.zeros(4)
    view = memory.numpy()

    def after():
        counts[0] += 1
        view[0] += 1

    plan = find_state(training(model, after)[0], {"model": model, "memory": memory})
    assert plan.find("counts").kind == "must-save"
    assert plan.find("memory").kind == "must-save"
    assert plan.find("memory").window == "early"
    assert any("`memory` changes without an operation of torch" in each for each in plan.lints)


def test_memory_that_is_overwritten_but_also_numpys_is_not_dead():
    model, memory = nn.Linear(4, 4), torch.zeros(4)
    total = []

    def after():
        total.append(float(memory.numpy().sum()))
        memory.copy_(model.bias.detach())

    plan = find_state(training(model, after)[0], model)
    assert plan.find("memory").kind == "must-save"


def test_a_tensor_that_nothing_leads_to_is_reported_with_its_line():
    model = nn.Linear(4, 4)

    class Elsewhere:
        __slots__ = ("function",)

    def hiding():
        hidden = torch.zeros(4)
        while True:
            hidden.add_(1)
            yield

    generator = hiding()
    elsewhere = Elsewhere()
    elsewhere.function = lambda: next(generator)
    plan = find_state(training(model, elsewhere.function)[0], model)
    found = [each for each in plan.lints if "no root leads to" in each]
    reached = [each for each in plan.tensors if "hidden" in each.name]
    assert found or reached
    if found:
        assert __file__ in found[0]


def test_tied_weights_are_one_storage_with_two_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    plan = find_state(training(model)[0], model)
    found = plan.find("model.1.weight")
    assert found is plan.find("model.0.weight")
    assert "model.1.weight" in (found.name, *found.aliases)


def test_what_is_saved_is_counted_against_state_dict():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    plan = find_state(training(model, optimizer=optimizer)[0], [model, optimizer])
    assert plan.bytes("must-save") == 80
    assert plan.bytes("save-once") == 80
    assert plan.naive_bytes == 160
    assert "must-save: 2 tensors, 80 bytes" in plan.table()
    assert "state_dict() has 160 bytes" in plan.table()


def test_a_buffer_that_is_written_now_and_then_is_kept():
    model, rare = nn.Linear(4, 4), torch.zeros(4)
    count = iter(range(1000))

    def after():
        if next(count) % 2:
            rare.copy_(model.bias.detach())

    plan = find_state(training(model, after)[0], model)
    assert plan.find("rare").kind == "must-save"


def test_too_few_steps_are_refused():
    with pytest.raises(AutosaveError, match="steps = 1 is too few"):
        find_state(lambda: None, steps=1)


def test_gradients_that_only_some_steps_make_are_dead_unless_the_next_step_reads_them():
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    count = iter(range(1000))

    def step():
        optimizer.zero_grad()
        used = other if next(count) % 2 else model
        used(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    plan = find_state(step, {"model": model, "other": other, "optimizer": optimizer})
    carried = [each.name for each in plan.tensors if each.kind != "dead" and "grad" in each.name]
    assert not carried


def test_memory_that_grows_is_kept():
    model, history = nn.Linear(4, 4), []
    plan = find_state(
        training(model, lambda: history.append(model.bias.detach().clone()))[0], model
    )
    # The first is there from the first traced step on, and is constant.
    found = [plan.find(f"history[{place}]").kind for place in range(4)]
    assert found == ["save-once", "must-save", "must-save", "must-save"]
