"""Guarded linear layers: the same bits as without a guard, and what becomes of wrong values."""

import copy
import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from outlast.errors import DataCorruptionError, GuardError
from outlast.guard import Guard, Policy, guard

INPUTS: dict[str, Callable[[], Tensor]] = {
    "1d": lambda: torch.randn(48),
    "2d": lambda: torch.randn(7, 48),
    "3d": lambda: torch.randn(3, 5, 48),
    "4d": lambda: torch.randn(2, 3, 4, 48),
    "one row": lambda: torch.randn(1, 48),
    "expanded": lambda: torch.randn(1, 48).expand(6, 48),
    "transposed": lambda: torch.randn(48, 9).t(),
    "rows transposed": lambda: torch.randn(4, 48, 5).transpose(1, 2),
    "every second column": lambda: torch.randn(6, 4, 96)[:, :, ::2],
    "axes swapped": lambda: torch.randn(4, 6, 48).transpose(0, 1),
}

TYPES = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "fp64": (torch.float64, None),
    "autocast bf16": (torch.float32, torch.bfloat16),
    "autocast fp16": (torch.float32, torch.float16),
}


class Net(nn.Module):
    """Layers with and without bias, one called twice, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 40)
        self.down = nn.Linear(40, 16, bias=False)
        self.again = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        x = x + self.again(torch.tanh(self.again(x)))
        logits: Tensor = self.head(x)
        return logits


def quietly(model: nn.Module, *args: object) -> Guard:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return guard(model, *args)  # type: ignore[arg-type]


def same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left, right)


def train(
    guarded: bool,
    kind: str = "fp32",
    fault_hook: Callable[[str, str, Tensor], None] | None = None,
    steps: int = 5,
    conv1d: bool = False,
) -> tuple[list[float], list[Tensor], Guard | None]:
    """Losses and weights of some steps of two micro-batches each."""
    dtype, autocast = TYPES[kind]
    torch.manual_seed(0)
    model = Net()
    if conv1d:
        model.up = Conv1D(40, 16)
    model.to(dtype)
    # In fp16 AdamW divides by an epsilon that is 0.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    handle = quietly(model, optimizer) if guarded else None
    if handle is not None:
        handle.watch.fault_hook = fault_hook
    losses = []
    for _ in range(steps):
        for _ in range(2):
            ids = torch.randint(0, 32, (4, 12))
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                logits = model(ids).flatten(0, 1)
            loss = functional.cross_entropy(logits.float(), ids.flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [each.detach() for each in model.parameters()], handle


def once(at: str, module: str, change: Callable[[Tensor], None]) -> Callable[..., None]:
    """A fault_hook that changes numbers at the second pass through one site of one module."""
    calls = []

    def fault_hook(site: str, name: str, numbers: Tensor) -> None:
        if (site, name) == (at, module):
            calls.append(1)
            if len(calls) == 2:
                change(numbers)

    return fault_hook


def spoil(numbers: Tensor) -> None:
    numbers.reshape(-1)[5].add_(7.0) if numbers.is_contiguous() else numbers[0, 5].add_(7.0)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["", "weight", "bias", "input"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", TYPES)
def test_one_layer_gives_the_bits_of_an_unguarded_one(kind: str, bias: bool, frozen: str) -> None:
    dtype, autocast = TYPES[kind]
    torch.manual_seed(1)
    plain = nn.Linear(48, 33, bias=bias).to(dtype)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name != frozen)
    guarded = copy.deepcopy(plain)
    handle = guard(guarded)
    for name, make in INPUTS.items():
        x = make().to(dtype)
        dy = torch.randn(*x.shape[:-1], 33)
        made = []
        for layer in (plain, guarded):
            layer.zero_grad()
            x = x.detach().requires_grad_(frozen != "input")
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                y = layer(x)
            y.backward(dy.to(y.dtype))
            made.append((y.detach(), x.grad, *(each.grad for each in layer.parameters())))
        assert all(same(*pair) for pair in zip(*made, strict=True)), name
    assert handle.ledger.checks > 0
    assert handle.ledger.findings == []


def _gradients_with_swapped_axes(level: str, offloaded: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.GRU(32, 32, batch_first=True), nn.Linear(32, 50))
    handle = None if not level else quietly(model, None, level)
    saving = torch.autograd.graph.save_on_cpu() if offloaded else nullcontext()
    with saving:
        states, _ = model[0](torch.randn(8, 6, 32))
        # States lie in memory by time, and the loss wants classes before time.
        logits = model[1](states).transpose(1, 2)
        functional.cross_entropy(logits, torch.randint(0, 50, (8, 6))).backward()
    assert handle is None or not handle.ledger.findings
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_bias_sums_a_gradient_with_swapped_axes_as_torch_does(offloaded: bool) -> None:
    expected = _gradients_with_swapped_axes("", offloaded)

    found = _gradients_with_swapped_axes("linear", offloaded)

    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", TYPES)
def test_a_conv1d_of_transformers_gives_the_bits_of_an_unguarded_one(kind: str) -> None:
    dtype, autocast = TYPES[kind]
    torch.manual_seed(1)
    plain = Conv1D(33, 48).to(dtype)
    guarded = copy.deepcopy(plain)
    handle = guard(guarded)
    seen = set()
    for name, make in INPUTS.items():
        x = make().to(dtype)
        made = []
        for layer in (plain, guarded):
            layer.zero_grad()
            x = x.detach().requires_grad_()
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                try:
                    y = layer(x)
                except RuntimeError as error:
                    made.append(str(error))
                    continue
            seen.add(name)
            y.backward(torch.arange(y.numel()).view(y.shape).to(y.dtype) / y.numel())
            made.append((y.detach(), x.grad, *(each.grad for each in layer.parameters())))
        if "view" in made[0]:
            assert made[0] == made[1]
            continue
        assert all(same(*pair) for pair in zip(*made, strict=True)), name
    assert seen >= {"1d", "2d", "3d", "4d", "one row", "transposed"}
    assert handle.ledger.checks > 0
    assert handle.ledger.findings == []


@pytest.mark.parametrize("kind", TYPES)
def test_training_has_the_same_losses_and_weights(kind: str) -> None:
    losses, weights, _ = train(guarded=False, kind=kind)
    guarded_losses, guarded_weights, handle = train(guarded=True, kind=kind)
    assert guarded_losses == losses
    assert all(torch.equal(*pair) for pair in zip(weights, guarded_weights, strict=True))
    assert handle is not None
    assert handle.ledger.findings == []


def test_every_forward_and_gradient_is_checked() -> None:
    _, _, handle = train(guarded=True, steps=3)
    assert handle is not None
    rows, passes = 4 * 12, 3 * 2
    checks = {key: site.checks for key, site in handle.ledger.sites.items()}
    assert checks["up", "linear.forward"] == passes * rows
    assert checks["up", "linear.dx"] == passes * rows
    assert checks["up", "linear.dw"] == passes * 40
    assert checks["again", "linear.forward"] == 2 * passes * rows


@pytest.mark.parametrize("conv1d", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "autocast bf16"])
@pytest.mark.parametrize(
    ("at", "operation", "outcome"),
    [
        ("linear.operand", "linear.forward", "corrected"),
        ("linear.output", "linear.forward", "corrected"),
        ("linear.check", "linear.forward", "check"),
        ("linear.dx", "linear.dx", "corrected"),
        ("linear.dw", "linear.dw", "corrected"),
    ],
)
def test_a_transient_fault_leaves_no_trace(
    at: str, operation: str, outcome: str, kind: str, conv1d: bool
) -> None:
    losses, weights, _ = train(guarded=False, kind=kind, conv1d=conv1d)
    fault_hook = once(at, "up", spoil)
    guarded_losses, guarded_weights, handle = train(
        guarded=True, kind=kind, fault_hook=fault_hook, conv1d=conv1d
    )
    assert handle is not None
    assert [(f.module, f.operation, f.outcome) for f in handle.ledger.findings] == [
        ("up", operation, outcome)
    ]
    assert guarded_losses == losses
    assert all(torch.equal(*pair) for pair in zip(weights, guarded_weights, strict=True))


@pytest.mark.parametrize(
    ("at", "operation"), [("linear.saved", "linear.saved"), ("weight", "weight")]
)
def test_what_cannot_be_computed_again_stops_the_step(at: str, operation: str) -> None:
    with pytest.raises(DataCorruptionError, match=f"{operation} of up at step 0.*: detected"):
        train(guarded=True, fault_hook=once(at, "up", spoil))


def test_a_changed_input_is_told_apart_from_a_wrong_gradient() -> None:
    layer = nn.Linear(8, 4)
    handle = guard(layer)
    handle.watch.fault_hook = once("linear.saved", "", spoil)
    for _ in range(2):
        layer(torch.randn(6, 8)).sum().backward()
    (finding,) = handle.ledger.findings
    assert (finding.operation, finding.outcome) == ("linear.saved", "detected")
    assert not handle.verdict().clean


def test_overflow_in_the_data_is_no_fault() -> None:
    torch.manual_seed(0)
    model = Net().half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    handle = quietly(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    ids = torch.randint(0, 32, (4, 12))
    before = model.up.weight.detach().clone()
    for _ in range(12):
        loss = functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        scaler.scale(loss).backward()
        # Not unscale_, which takes no fp16 gradients.
        if all(torch.isfinite(each.grad).all() for each in model.parameters()):  # type: ignore[arg-type]
            break
        scaler.update(scaler.get_scale() / 2)
        optimizer.zero_grad()
    assert {each.outcome for each in handle.ledger.findings} == {"not_finite"}
    optimizer.step()
    assert not torch.equal(model.up.weight, before)


def test_a_bias_gradient_that_overflows_alone_is_no_fault() -> None:
    layer = nn.Linear(4, 3).half()
    handle = guard(layer)
    y = layer(torch.full((300, 4), 1e-3, dtype=torch.float16))
    y.backward(torch.full_like(y, 300.0))
    assert layer.bias.grad is not None
    assert torch.isinf(layer.bias.grad).all()
    assert [each.outcome for each in handle.ledger.findings] == ["not_finite"]
    assert handle.verdict().clean


def test_a_gradient_of_gradients_is_the_same() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(8, 4)
    guarded = copy.deepcopy(plain)
    handle = guard(guarded)
    made = []
    for layer in (plain, guarded):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        made.append((x.grad, layer.weight.grad))
    assert all(same(*pair) for pair in zip(*made, strict=True))
    assert handle.ledger.findings == []


def test_evaluation_and_empty_batches_are_left_alone() -> None:
    layer = nn.Linear(8, 4)
    handle = guard(layer)
    x = torch.randn(3, 8)
    assert layer(x[:0]).shape == (0, 4)
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))
    assert handle.ledger.checks == 0
    layer.train()
    with torch.no_grad():
        layer(x)
    assert handle.ledger.checks == 3


def test_weights_that_change_between_calls_are_no_fault() -> None:
    layer = nn.Linear(8, 4)
    handle = guard(layer)
    for parameter in (layer.weight, layer.bias):
        layer(torch.randn(3, 8)).sum().backward()
        with torch.no_grad():
            parameter.mul_(3.0).add_(1.0)
    layer(torch.randn(3, 8)).sum().backward()
    assert handle.ledger.findings == []


def test_a_layer_with_parametrized_weight_is_checked() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    handle = quietly(layer)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        layer(torch.randn(3, 8)).square().sum().backward()
        optimizer.step()
    assert handle.ledger.checks == 3 * (3 + 4)
    assert handle.ledger.findings == []


def test_a_layer_with_its_own_forward_is_listed_as_unguarded() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = guard(model, optimizer)
    assert [bool(each.operations) for each in handle.coverage()] == [False, True]
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    first, second = handle.coverage()
    assert first.operations == ("bias.gradient", "product")
    assert "linear.dw" in second.operations
    assert not handle.uncovered()


def test_a_copy_is_watched_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    handle = guard(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.add_(1.0)
    twin(torch.randn(5, 4)).sum().backward()
    assert handle.ledger.checks == 5 + 4
    assert twin[0].weight.grad is not None
    assert model[0].weight.grad is None


def test_a_copy_of_a_transposed_layer_keeps_its_product() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(6, 6), Conv1D(3, 6))
    x = torch.randn(5, 6)
    plain = model(x)
    handle = guard(model)
    twin = copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    assert torch.equal(twin(x), plain)
    assert torch.equal(average(x), plain)
    assert torch.equal(twin.eval()(x), plain)
    assert not handle.ledger.findings


@pytest.mark.parametrize("level", ["linear", "full"])
def test_a_default_device_is_not_taken_for_the_model_s(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    x = torch.randn(5, 4)
    model(x).square().mean().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with torch.device("meta"):
        handle = guard(model, policy=level)
        model(x).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert handle.ledger.checks
    assert not handle.ledger.findings


def test_a_saved_model_is_one_without_a_guard() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    keys = list(model.state_dict())
    handle = guard(model)
    assert list(model.state_dict()) == keys
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(2, 4)
    assert torch.equal(loaded(x), model(x))
    handle.remove()
    before = handle.ledger.checks
    loaded(x)
    assert handle.ledger.checks == before
    guard(loaded)


def test_removing_gives_the_layer_back() -> None:
    layer = nn.Linear(4, 4)
    handle = guard(layer)
    with pytest.raises(GuardError, match="guarded already"):
        guard(layer)
    handle.remove()
    assert "forward" not in vars(layer)
    layer(torch.randn(2, 4)).sum().backward()
    assert handle.ledger.checks == 0
    guard(layer)


def test_findings_are_only_counted_where_correction_is_off() -> None:
    layer = nn.Linear(8, 4)
    handle = guard(layer, None, Policy(correct=False))
    handle.watch.fault_hook = once("linear.output", "", spoil)
    for _ in range(2):
        layer(torch.randn(6, 8))
    assert [each.outcome for each in handle.ledger.findings] == ["detected"]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("level", ["linear", "full"])
def test_gradients_arrive_in_the_order_of_an_unguarded_model(level: str, autocast: bool) -> None:
    # DDP puts them into buckets in this order, which decides how three and more ranks are added.
    def arrived(guarded: bool) -> list[str]:
        torch.manual_seed(0)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        handle = quietly(model, None, level) if guarded else None
        order: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(torch.randn(2, 6, 16)).float().square().mean().backward()
        if handle is not None:
            handle.remove()
        return order

    assert len(arrived(True)) == 24
    assert arrived(True) == arrived(False)
