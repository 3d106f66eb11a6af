"""How a guard sits in other people's programs: several optimizers, copies, replaced functions."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from outlast.errors import DataCorruptionError, GuardError
from outlast.guard import Policy, guard, parameter_writes
from outlast.guard.forward_patch import FunctionPatch
from outlast.guard.inject import inject, parse_faults


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return functional.scaled_dot_product_attention(query, key, value)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.attention, self.head = Attention(), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(self.norm(self.embedding(ids))[:, None]).squeeze(1))


IDS = torch.arange(64).view(4, 16) % 16


def loss_of(model: nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model(IDS)
    return functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())


def trained(step: Any, level: str, steps: int = 12) -> tuple[list[str], list[torch.Tensor]]:
    """Train `Small`, with `step(model, optimizer)` after each backward pass."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = guard(model, optimizer, level) if level else None  # type: ignore[arg-type]
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        step(model, optimizer)
    findings = [] if handle is None else [*map(str, handle.ledger.findings)]
    if handle is not None:
        handle.finish()
        handle.remove()
    return findings, [parameter.detach().clone() for parameter in model.parameters()]


def clip_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def normalise_one_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    model.head.weight.data /= model.head.weight.data.norm(dim=1, keepdim=True)


def minimise_sharpness(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # SAM: the gradient of the step is that of perturbed weights.
    before = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad.sign(), alpha=0.05)
    optimizer.zero_grad()
    loss_of(model).backward()
    for parameter, old in zip(model.parameters(), before, strict=True):
        parameter.data.copy_(old)
    optimizer.step()


@pytest.mark.parametrize("level", ["linear", "full"])
@pytest.mark.parametrize("step", [clip_weights, normalise_one_weight, minimise_sharpness])
def test_what_a_program_writes_to_data_is_no_fault(step: Any, level: str) -> None:
    findings, weights = trained(step, level)
    assert not findings
    for one, other in zip(weights, trained(step, "")[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("removed", [False, True])
def test_torchs_data_comes_back_with_the_last_guard(removed: bool) -> None:
    gc.collect()
    # Guards of other tests may be left.
    before = len(parameter_writes._guarded)
    models = [Small(), Small()]
    handles = [guard(model, halves(model), "linear") for model in models]
    handles.pop().remove()
    models.pop()
    assert "data" in vars(nn.Parameter)
    if removed:
        handles.pop().remove()
    handles.clear()
    models.clear()
    for _ in range(3):
        gc.collect()
    assert nn.Parameter(torch.ones(1)).data == 1
    assert len(parameter_writes._guarded) == before
    assert ("data" in vars(nn.Parameter)) == bool(before)


@pytest.mark.parametrize("reads", [False, True])
def test_one_number_that_changes_without_a_write_of_the_program_is_a_fault(reads: bool) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        if reads:
            sum(float(parameter.data.norm()) for parameter in model.parameters())
        model.head.weight.data.view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << 20)

    with pytest.raises(DataCorruptionError, match=r"rest of optimizer.*torch\.no_grad"):
        trained(step, "full")


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [torch.optim.SGD(parameters[:3], lr=0.1), torch.optim.SGD(parameters[3:], lr=0.1)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_optimizers_in_any_order_use_no_wrong_numbers(order: tuple[int, int]) -> None:
    model = Small()
    optimizers = halves(model)
    handle = guard(model, optimizers, "linear")
    inject(handle, parse_faults(["linear.output:module=head:bit=30:permanent"]))
    before = copy.deepcopy(model.state_dict())
    loss_of(model).backward()
    with pytest.raises(DataCorruptionError, match="head"):
        optimizers[order[0]].step()
    with pytest.raises(DataCorruptionError, match="head"):
        optimizers[order[1]].step()
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())


def test_an_optimizer_that_steps_more_often_is_judged_every_time() -> None:
    model = Small()
    first, _ = optimizers = halves(model)
    handle = guard(model, optimizers, "linear")
    for _ in range(2):
        loss_of(model).backward()
        first.step()
    assert handle.watch.step == 1
    inject(handle, parse_faults(["linear.output:module=head:bit=30:permanent"]))
    loss_of(model).backward()
    with pytest.raises(DataCorruptionError):
        first.step()


def test_a_closure_is_refused() -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard(model, optimizer, "linear")

    def closure() -> Any:
        loss = loss_of(model)
        loss.backward()
        return loss

    with pytest.raises(GuardError, match="call step\\(\\) without a closure"):
        optimizer.step(closure)


def test_copies_and_pickles_of_a_fully_guarded_model_train_on() -> None:
    model = Small()
    guard(model, policy="full")
    twin = copy.deepcopy(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    expected = loss_of(model)
    for other in (twin, loaded):
        found = loss_of(other)
        found.backward()
        assert torch.equal(found, expected)


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = model[0].forward
    model[0].forward = lambda x: 2.0 * plain(x)
    x = torch.randn(3, 4)
    expected = model(x)
    handle = guard(model)
    assert torch.equal(model(x), expected)
    assert [bool(each.operations) for each in handle.coverage()] == [False, True]


def test_a_part_of_a_model_is_not_guarded_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    guard(model[0])
    with pytest.raises(GuardError, match="its part 0 is guarded already"):
        guard(model)


def test_integer_parameters_are_left_alone() -> None:
    model = Small()
    model.table = nn.Parameter(torch.arange(4), requires_grad=False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    handle = guard(model, optimizer, Policy("linear"))
    loss_of(model).backward()
    optimizer.step()
    assert not handle.ledger.findings


def test_a_weight_that_changed_is_not_accepted_by_trying_again() -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = guard(model, optimizer, "linear")
    inject(handle, parse_faults(["weight:module=head:bit=30:step=0"]))

    def attempts() -> None:
        for _ in handle.attempts():
            optimizer.zero_grad()
            loss_of(model).backward()

    with pytest.raises(DataCorruptionError):
        attempts()
    assert {each.operation for each in handle.ledger.findings} >= {"weight"}


def test_attempts_begin_with_the_same_random_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = guard(model, optimizer, "linear")
    inject(handle, parse_faults(["linear.saved:module=2:bit=30:step=0"]))
    x, losses = torch.randn(16, 8), []
    for _ in handle.attempts():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        losses.append(float(loss))
    assert len(losses) == 2
    assert losses[0] == losses[1]


def test_passes_between_two_optimizers_are_judged_before_the_second() -> None:
    models = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in models)
    handle = guard(models, [first, second], "linear")
    inject(handle, parse_faults(["linear.output:module=1:bit=30:permanent"]))
    before = copy.deepcopy(models[1].state_dict())
    models[0](torch.ones(2, 8)).sum().backward()
    first.step()
    models[1](torch.ones(2, 8)).sum().backward()
    with pytest.raises(DataCorruptionError, match=r"linear\.forward of 1"):
        second.step()
    assert all(torch.equal(models[1].state_dict()[name], each) for name, each in before.items())


def late_backward(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    loss_of(model).backward()


def late_grad(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """As penalties and meta-learning do, without ``torch.autograd.backward``."""
    found = torch.autograd.grad(loss_of(model), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


LATE = pytest.mark.parametrize("late", [late_backward, late_grad])
FAULT = "linear.output:module=head:bit=30:permanent"


@LATE
@pytest.mark.parametrize("verdict", ["attempts", "verdict"])
def test_passes_after_the_verdict_are_judged_before_the_step(late: Any, verdict: str) -> None:
    model = Small()
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    handle = guard(model, optimizer, "linear")
    for _ in handle.attempts() if verdict == "attempts" else range(1):
        optimizer.zero_grad()
        loss_of(model).backward()
    assert verdict == "attempts" or handle.verdict().clean
    inject(handle, parse_faults([FAULT]))
    before = copy.deepcopy(model.state_dict())
    late(model, parameters)
    assert handle.watch.uncorrected
    for _ in range(2):
        with pytest.raises(DataCorruptionError, match="head"):
            optimizer.step()
    assert all(torch.equal(model.state_dict()[name], own) for name, own in before.items())


@LATE
def test_passes_between_two_optimizers_are_judged_however_they_are_run(late: Any) -> None:
    model = Small()
    first, second = optimizers = halves(model)
    handle = guard(model, optimizers, "linear")
    for _ in handle.attempts():
        loss_of(model).backward()
    first.step()
    inject(handle, parse_faults([FAULT]))
    before = copy.deepcopy(model.head.state_dict())
    late(model, [*model.parameters()])
    with pytest.raises(DataCorruptionError, match="head"):
        second.step()
    assert all(torch.equal(model.head.state_dict()[name], own) for name, own in before.items())


def test_a_verdict_that_holds_is_not_asked_for_again() -> None:
    model, other = Small(), nn.Linear(8, 8)
    optimizers = halves(model)
    handle = guard(model, optimizers, "linear")
    asked = []
    verdict = handle.verdict
    handle.verdict = lambda: asked.append(handle.watch.step) or verdict()  # type: ignore
    for _ in range(2):
        for _ in handle.attempts():
            loss_of(model).backward()
        # Another model's passes are none of this one's.
        other(torch.ones(2, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert asked == [0, 1]


def test_checks_on_a_device_that_come_after_the_verdict_are_settled() -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = guard(model, optimizer, "linear")
    for _ in handle.attempts():
        loss_of(model).backward()
    one, site = torch.tensor(1.0), handle.ledger.site("head", "linear.dw")
    # As `Watch.wants` leaves it for a device that runs behind the host.
    handle.watch.unjudged = True
    numbers = (one, 100 * one, one, one)
    handle.watch._waiting.append((site, torch.device("cpu"), 1, numbers, True))
    with pytest.raises(DataCorruptionError, match="head"):
        optimizer.step()


def on_one_rank_alone(kind: str) -> list[str]:
    """What ranks say whose number of passes after the verdict differs."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    model, other = Small(), nn.Linear(8, 8)
    parameters, optimizers = [*model.parameters()], halves(model)
    handle = guard(model, optimizers, "linear")
    said = []
    for step in range(2):
        for _ in handle.attempts():
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model).backward()
        for optimizer in optimizers:
            if dist.get_rank() == 1:
                if step == 1 and kind == "fault":
                    inject(handle, parse_faults([FAULT]))
                if kind == "other":
                    other(torch.ones(2, 8)).sum().backward()
                else:
                    late_grad(model, parameters)
            try:
                optimizer.step()
                said.append("stepped")
            except DataCorruptionError as error:
                said.append(str(error).split(":")[1].split(" are")[0])
    return said


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["clean", "other", "fault"])
def test_passes_after_the_verdict_may_differ_between_ranks(kind: str, ranks: Any) -> None:
    last = " the numbers of rank 1" if kind == "fault" else "stepped"
    for said in ranks(2)(on_one_rank_alone, kind):
        assert said == ["stepped", "stepped", last, last]


@pytest.mark.slow
def test_checks_last_as_long_as_the_model_without_the_handle() -> None:
    model = Small()
    guard(model, policy="full")
    gc.collect()
    loss_of(model).backward()
    sites = model._outlast_watch.ledger.sites
    assert sites["operations", "attention.dv"].checks
    assert sites["loss", "loss.dlogits"].checks


def test_operations_are_struck_and_checked_by_the_guard_that_is_preferred() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.rand(2, 7, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    first, second = layer(), layer()
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (first, second)]
    preferred, last = guard(first, optimizers[0], "full"), guard(second, optimizers[1], "full")
    preferred.prefer()
    step(first, optimizers[0])
    injector = inject(preferred, parse_faults(["attention.output:bit=30:step=1"]))
    step(first, optimizers[0])
    assert [injection.site for injection in injector.injections] == ["attention.output"]
    assert [finding.outcome for finding in preferred.ledger.findings] == ["corrected"]
    assert not last.ledger.findings
    preferred.remove()
    last.remove()


@pytest.mark.slow
def test_a_model_that_nobody_needs_is_freed_with_its_checks() -> None:
    model = Small()
    freed = weakref.ref(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard(model, optimizer, policy="full")
    loss_of(model).backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    assert freed() is None


class Collecting(list[Any]):
    """The garbage collector runs before and after every change."""

    def append(self, item: Any) -> None:
        gc.collect()
        super().append(item)
        gc.collect()

    def remove(self, item: Any) -> None:
        gc.collect()
        super().remove(item)
        gc.collect()


def test_a_guard_may_be_freed_while_another_is_installed_or_removed() -> None:
    owner = ModuleType("owner")
    owner.function = len  # type: ignore[attr-defined]
    replaced = FunctionPatch(owner, "function")
    replaced._asking = Collecting()

    def called(original: Any, *args: Any) -> str:
        return "checked"

    def forget() -> None:
        """Leave a replacement to the garbage collector, as a model's that nobody needs."""
        replacing = replaced.by(lambda original, *args: "forgotten")
        replacing.__enter__()
        cycle: list[object] = [replacing]
        cycle.append(cycle)

    found: list[object] = []

    def run() -> None:
        for _ in range(2):
            forget()
            with replaced.by(called):
                found.append(owner.function(""))
                forget()
            gc.collect()
            found.append(owner.function(""))

    thread = threading.Thread(target=run, daemon=True)
    # What other tests have left would make every collection slow.
    gc.freeze()
    try:
        thread.start()
        thread.join(timeout=20)
    finally:
        gc.unfreeze()
    assert not thread.is_alive()
    assert found == ["checked", 0] * 2
    assert owner.function is len
