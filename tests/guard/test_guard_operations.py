"""Checks of products, convolutions and recurrent layers wherever torch computes them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from outlast.guard import Guard, guard
from outlast.guard.inject.fault import Pattern
from outlast.guard.inject.operations import PRODUCTS, OperationFault, faults_at

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Uses(nn.Module):
    """A module that computes with two parameters as it is told to."""

    def __init__(self, use: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) / 4) for shape in shapes)

    def forward(self) -> Tensor:
        return self.use(*self.weights)


def products(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """Every kernel of a product, on batches (4, 12, 16) and (4, 16, 20)."""
    made = torch.bmm(a, b) + torch.baddbmm(bias, a, b, alpha=0.5, beta=2.0)
    made = made + torch.einsum("nij,njk->nik", a, b)
    # Operands and results that lie in memory the other way round.
    made = made + torch.bmm(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
    flat = torch.addmm(bias, a[0], b[0], beta=3.0) + torch.mm(a[1], b[1])
    vector = (
        torch.mv(a[2], b[2, :, 0])[:, None] + torch.addmv(vector_of(a), a[3], b[3, :, 1])[:, None]
    )
    into = torch.empty_like(flat)
    torch.mm(a[0].detach(), b[0].detach(), out=into)
    into.addmm_(a[1].detach(), b[1].detach())
    return made + flat + vector + into


def vector_of(a: Tensor) -> Tensor:
    return a[0, :, 0]


CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], str]] = {
    "products": (products, ((4, 12, 16), (4, 16, 20), (20,)), "product"),
    "experts": (
        lambda x, w: torch._grouped_mm(x, w, offs=torch.tensor([3, 8, 16], dtype=torch.int32)),
        ((16, 8), (3, 8, 24)),
        "product",
    ),
    "experts' gradients": (
        lambda x, y: torch._grouped_mm(x.t(), y, offs=torch.tensor([3, 3, 16], dtype=torch.int32)),
        ((16, 8), (16, 24)),
        "product",
    ),
    "experts by columns": (
        lambda w, x: torch._grouped_mm(w, x.t(), offs=torch.tensor([8, 16], dtype=torch.int32)),
        ((2, 24, 8), (16, 8)),
        "product",
    ),
    "batch of products": (
        lambda x, w: torch._grouped_mm(x, w),
        ((3, 16, 8), (3, 8, 24)),
        "product",
    ),
    "attention by hand": (
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v,
        ((2, 3, 9, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        "product",
    ),
    "convolution": (
        lambda x, w, b: functional.conv2d(x, w, b, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        ((3, 4, 11, 9), (6, 4, 3, 2), (6,)),
        "convolution",
    ),
    "grouped convolution": (
        lambda x, w: functional.conv1d(x, w, groups=3, padding=1),
        ((2, 6, 13), (9, 2, 3)),
        "convolution",
    ),
    "volumes": (
        lambda x, w, b: functional.conv3d(x, w, b, padding=1),
        ((2, 2, 5, 6, 4), (3, 2, 3, 3, 3), (3,)),
        "convolution",
    ),
    "transposed convolution": (
        lambda x, w, b: functional.conv_transpose2d(
            x, w, b, stride=2, padding=1, output_padding=1, groups=2
        ),
        ((3, 4, 5, 6), (4, 3, 3, 3), (6,)),
        "convolution",
    ),
}


def passes(model: nn.Module, handle: Guard | None = None) -> list[Tensor]:
    """The loss and all gradients of a step."""
    loss = model().float().square().mean()
    loss.backward()
    if handle is not None:
        handle._optimizers[0].step()
    return [
        loss.detach(),
        *(item.grad.clone() for item in model.parameters() if item.grad is not None),
    ]


def guarded(model: nn.Module, **options: Any) -> Guard:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return guard(model, torch.optim.SGD(model.parameters(), lr=0.0), **options)


def counts(handle: Guard) -> dict[str, int]:
    found: dict[str, int] = {}
    for site in handle.ledger.sites.values():
        found[site.operation] = found.get(site.operation, 0) + site.checks
    return found


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_operations_are_checked_with_unchanged_numbers(name: str, dtype: str) -> None:
    use, shapes, operation = CASES[name]
    model = Uses(use, *shapes).to(TYPES[dtype])
    plain = passes(copy.deepcopy(model))
    handle = guarded(model)
    assert same(passes(model, handle), plain)
    made = counts(handle)
    assert made[operation] > 0
    if operation == "convolution":
        assert made["convolution.dx"] > 0
        assert made["convolution.dw"] > 0
    assert not handle.ledger.findings
    assert handle.uncovered().flops == 0.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_number_in_any_result_is_put_right_before_it_is_used(name: str, dtype: str) -> None:
    use, shapes, _ = CASES[name]
    model = Uses(use, *shapes).to(TYPES[dtype])
    plain = passes(copy.deepcopy(model))
    twin = copy.deepcopy(model)
    handle = guarded(twin)
    calls = []
    handle.watch.fault_hook = lambda site, module, numbers: calls.append(site)
    passes(twin)
    handle.remove()
    struck = [
        place for place, site in enumerate(calls) if site.startswith(("product", "convolution"))
    ]
    assert struck
    for place in struck:
        twin = copy.deepcopy(model)
        handle, seen = guarded(twin), 0

        def strike(site: str, module: str, numbers: Tensor, place: int = place) -> None:
            nonlocal seen
            if seen == place:
                flat = numbers.view(-1) if numbers.is_contiguous() else numbers.t().view(-1)
                flat[len(flat) // 2] = 3.0 * flat.abs().max() + 1.0
            seen += 1

        handle.watch.fault_hook = strike
        assert same(passes(twin, handle), plain), calls[place]
        assert [item.outcome for item in handle.ledger.findings] == ["corrected"], calls[place]
        handle.remove()


@pytest.mark.parametrize("case", [*CASES, "linear"])
def test_the_last_bit_of_a_small_product_in_bf16_is_seen_at_level_full(case: str) -> None:
    x = torch.randn(12, 16, dtype=torch.bfloat16, requires_grad=True)
    if case == "linear":
        model: nn.Module = nn.Linear(16, 24).to(torch.bfloat16)
    else:
        model = Uses(*[CASES[case][0], *CASES[case][1]]).to(torch.bfloat16)  # type: ignore[arg-type]

    def passes_of(own: nn.Module) -> list[Tensor]:
        own.zero_grad()
        made = own(x) if case == "linear" else own()
        made.float().square().mean().backward()
        return [
            made.detach(),
            *(each.grad.clone() for each in own.parameters() if each.grad is not None),
        ]

    with faults_at(PRODUCTS) as kernels:
        plain: list[Tensor] = []
        calls = kernels.record(lambda: plain.extend(passes_of(model)))
        # The numbers of ``mv`` are those of the product that it calls, which is checked.
        calls = [call for call in calls if call.operation != "mv"]
        handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), "full")
        try:
            for call in calls:
                before = len(handle.ledger.findings)
                kernels.arm(OperationFault(call, 1, Pattern(bits=(0,))))
                found = passes_of(model)
                assert kernels.strikes == 1, call
                assert same(found, plain), call
                outcomes = [each.outcome for each in handle.ledger.findings[before:]]
                assert outcomes == ["corrected"], call
        finally:
            kernels.arm(None)
            handle.remove()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_bias_of_a_transposed_convolution_is_put_right(dtype: str) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(3, 5, 3).to(TYPES[dtype])
    x = torch.randn(2, 3, 200, 150).to(TYPES[dtype])
    # Beyond what is computed twice because it is small, but for the bias itself.
    weight = torch.randn(2, 5, 202, 152).to(TYPES[dtype])

    def passes_of() -> Tensor:
        layer.zero_grad()
        (layer(x) * weight).sum().backward()
        assert layer.bias is not None
        assert layer.bias.grad is not None
        return layer.bias.grad.clone()

    with faults_at(["convolution_backward"]) as kernels:
        plain: list[Tensor] = []
        calls = kernels.record(lambda: plain.append(passes_of()))
        handle = guarded(layer)
        try:
            clean = passes_of()
            assert torch.equal(clean, plain[0])
            assert not handle.ledger.findings
            call = next(call for call in calls if call.shape == (5,))
            kernels.arm(OperationFault(call, 2, Pattern(bits=(14 if dtype == "bf16" else 30,))))
            assert torch.equal(passes_of(), plain[0])
            assert kernels.strikes == 1
            assert [each.outcome for each in handle.ledger.findings] == ["corrected"]
        finally:
            kernels.arm(None)
            handle.remove()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recurrent_layers_are_checked_and_put_right(kind: str, dtype: str) -> None:
    torch.manual_seed(0)
    layer = getattr(nn, kind)(6, 5, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 7, 6)
    model = Uses(lambda weight: torch.zeros(()), (1,)).to(TYPES[dtype])
    model.layer = layer.to(TYPES[dtype])
    model.use = lambda weight: model_layer(model, x.to(TYPES[dtype])) * weight
    plain = passes(model)
    layer.zero_grad()
    model.zero_grad()
    handle = guarded(model)
    struck = []

    def strike(site: str, module: str, numbers: Tensor) -> None:
        if site in {"recurrent.output", "product.output"}:
            struck.append(site)
            if len(struck) in {1, 9}:
                numbers.view(-1)[3] += 2.0

    handle.watch.fault_hook = strike
    found = passes(model, handle)
    assert len(struck) > 9
    assert same(found, plain)
    assert {item.outcome for item in handle.ledger.findings} == {"corrected"}
    assert len(handle.ledger.findings) == 2
    assert set(handle.uncovered().parameters) == {"weights.0"}


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)])
def test_normalisations_are_computed_twice_at_level_full(norm: nn.Module) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(4, 4, 3), norm)
    x = torch.randn(3, 4, 6, 6)
    twins = [copy.deepcopy(plain) for _ in range(4)]
    expected = _step(plain, x)
    for place, twin in enumerate(twins):
        handle = guarded(twin, policy="full")
        seen: list[str] = []
        handle.watch.fault_hook = partial(_strike_norm, seen, place)
        found = _step(twin, x, handle)
        assert same(found, expected)
        assert [item.outcome for item in handle.ledger.findings] == ["corrected"] * bool(place)
        assert len(seen) >= 6
        assert not handle.uncovered()
        handle.remove()


def _strike_norm(seen: list[str], place: int, site: str, module: str, numbers: Tensor) -> None:
    if site == "norm.repeated":
        seen.append(site)
        if len(seen) == place:
            numbers.view(-1)[1] += 0.5


def _step(model: nn.Module, x: Tensor, handle: Guard | None = None) -> list[Tensor]:
    model(x).square().mean().backward()
    if handle is not None:
        handle._optimizers[0].step()
    return [
        *(item.grad for item in model.parameters()),
        *(item.clone() for item in model.buffers()),
    ]


def model_layer(model: Any, x: Tensor) -> Tensor:
    made: Tensor = model.layer(x)[0]
    return made


def test_torch_has_its_kernels_back_when_no_guard_is_left() -> None:
    first, second = (guarded(Uses(products, *CASES["products"][1])) for _ in range(2))
    model = Uses(products, *CASES["products"][1])
    first.remove()
    before = second.ledger.checks
    passes(model)
    # The second guard's model is in training, and an operation does not know its model.
    assert second.ledger.checks > before
    second.remove()
    before = second.ledger.checks
    passes(model)
    assert second.ledger.checks == before


def test_evaluation_is_not_checked() -> None:
    model = Uses(products, *CASES["products"][1]).eval()
    handle = guarded(model)
    with torch.no_grad():
        model()
    assert handle.ledger.checks == 0
    assert handle.uncovered().flops is None


def test_a_finding_names_the_module_or_the_gradient() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Uses(lambda a, b: a @ b, (4, 5), (5, 6))

        def forward(self) -> Tensor:
            made: Tensor = self.inner()
            return made

    model = Outer()
    handle = guarded(model)
    handle.watch.fault_hook = lambda site, module, numbers: numbers.view(-1)[3:4].add_(50.0)
    passes(model, handle)
    places = {item.module for item in handle.ledger.findings}
    assert "inner" in places
    assert any("MmBackward0" in place for place in places)


def test_types_without_a_bound_are_named_with_their_share() -> None:
    def use(x: Tensor, w: Tensor) -> Tensor:
        wide = (x.to(torch.complex64) @ w.to(torch.complex64)).real
        return x @ w + wide

    model = Uses(use, (4, 8), (8, 8))
    handle = guarded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle.remove()
    handle = guard(model, optimizer)
    model().square().mean().backward()
    with pytest.warns(UserWarning, match="mm of complex64"):
        optimizer.step()
    assert handle.uncovered().flops == pytest.approx(0.5)


@pytest.mark.slow
def test_products_of_a_compiled_model_are_checked() -> None:
    model = Uses(lambda a, b: torch.relu(a @ b), (40, 50), (50, 60))
    plain = passes(copy.deepcopy(model))
    handle = guarded(model)
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = compiled().square().mean()
    loss.backward()
    optimizer.step()
    assert counts(handle)["product"] >= 40
    assert torch.allclose(loss, plain[0])
    assert not handle.ledger.findings


FLOATS = st.sampled_from([1.0, 1e-3, 1e3, 1e-20])


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 80)] * 3),
    batches=st.integers(1, 5),
    dtype=st.sampled_from(sorted(TYPES)),
    scale=FLOATS,
    mean=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
    orders=st.tuples(st.booleans(), st.booleans()),
)
def test_healthy_products_have_no_finding(
    sizes: tuple[int, int, int],
    batches: int,
    dtype: str,
    scale: float,
    mean: float,
    seed: int,
    orders: tuple[bool, bool],
) -> None:
    rows, terms, columns = sizes
    generator = torch.Generator().manual_seed(seed)

    def drawn(first: int, second: int, turned: bool) -> Tensor:
        shape = (batches, second, first) if turned else (batches, first, second)
        made = (torch.randn(shape, generator=generator) + mean) * (
            scale if dtype != "fp16" else 0.1
        )
        made = made.to(TYPES[dtype])
        return made.transpose(1, 2) if turned else made

    model = Uses(lambda a, b: torch.bmm(a, b), (1,), (1,))
    handle = guarded(model)
    try:
        for _ in range(3):
            handle.watch.advance()
            torch.bmm(drawn(rows, terms, orders[0]), drawn(terms, columns, orders[1]))
        assert handle.ledger.checks == 3 * batches * rows
        assert not handle.ledger.findings
    finally:
        handle.remove()


@settings(max_examples=100, deadline=None)
@given(
    dims=st.integers(1, 3),
    groups=st.sampled_from([1, 1, 2, 3]),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    shape=st.lists(st.tuples(*[st.integers(1, 3)] * 3, st.integers(0, 3)), min_size=3, max_size=3),
    transposed=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16"]),
    mean=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**31),
)
def test_healthy_convolutions_of_any_geometry_have_no_finding(
    dims: int,
    groups: int,
    channels: tuple[int, int],
    shape: list[tuple[int, int, int, int]],
    transposed: bool,
    dtype: str,
    mean: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    kernel, stride, dilation, padding = (tuple(own) for own in zip(*shape[:dims], strict=True))
    kind = ("ConvTranspose" if transposed else "Conv") + f"{dims}d"
    layer = getattr(nn, kind)(
        groups * channels[0], groups * channels[1], kernel, stride=stride,
        padding=padding, dilation=dilation, groups=groups,
    ).to(TYPES[dtype])  # fmt: skip
    x = (torch.randn(2, groups * channels[0], *[11] * dims) + mean).to(TYPES[dtype])
    x.requires_grad_()
    handle = guarded(layer)
    try:
        layer(x).float().square().mean().backward()
        assert not handle.ledger.findings
        assert counts(handle)["convolution.dw"] == groups * (
            channels[0] if transposed else channels[1]
        )
    finally:
        handle.remove()


def _with_kernel(handle: Guard, wrong: Callable[[int, list[Tensor]], None]) -> Any:
    """One oneDNN layer under `handle`, whose kernel `wrong` changes, by how often it was called."""
    calls: list[int] = []
    checks = handle.watch.operations
    assert checks is not None
    recurrent = checks.recurrent

    def faulty(kernel: Any, args: Any, flops: float) -> Any:
        def struck(*given: Any) -> Any:
            made = kernel(*given)
            calls.append(len(calls))
            wrong(calls[-1], list(made))
            return made

        return recurrent(struck, args, flops)

    checks.recurrent = faulty  # type: ignore[method-assign]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return model_layer(self, x)


def _lstm() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return _Recurrent(), torch.randn(3, 7, 16)


@pytest.mark.parametrize("memory", range(4))
def test_every_output_of_a_recurrent_kernel_is_compared_and_put_right(memory: int) -> None:
    """Also the memory that its backward pass reads, of which it leaves a part as it was."""
    layer, x = _lstm()
    expected = _step(copy.deepcopy(layer), x)
    handle = guarded(layer, policy="linear")

    def wrong(call: int, made: list[Tensor]) -> None:
        if call == 0:
            # A byte of what was written; the rest of that memory is filled.
            bytes_of = made[memory].view(torch.uint8).reshape(-1)
            place = int((bytes_of != 255).nonzero()[5])
            bytes_of[place] ^= 64

    _with_kernel(handle, wrong)
    found = _step(layer, x, handle)
    assert [item.outcome for item in handle.ledger.findings] == ["corrected"]
    assert same(found, expected)


def test_a_kernel_that_differs_in_all_three_computations_is_persistently_wrong() -> None:
    layer, x = _lstm()
    handle = guarded(layer, policy="linear")
    _with_kernel(handle, lambda call, made: made[0].view(-1)[3].add_(call + 1.0))
    with torch.no_grad():
        layer(x)
    assert [item.outcome for item in handle.ledger.findings] == ["persistent"]


def _by_name(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What no module and no patched function announces."""
    x = _layer_norm(x, (8,), weight, bias)
    x = torch._C._nn.cross_entropy_loss(_softmax(x, -1) + x, torch.arange(6) % 8)
    return x.square()


_layer_norm, _softmax = functional.layer_norm, torch._C._special.special_softmax


@pytest.mark.parametrize(
    "site", ["norm.repeated", "softmax.forward", "softmax.dlogits", "loss.forward", "loss.dlogits"]
)
def test_kernels_that_no_function_announces_are_computed_twice(site: str) -> None:
    x = torch.randn(6, 8)
    model = Uses(lambda weight, bias: _by_name(x, weight, bias), (8,), (8,))
    plain = passes(model)
    model.zero_grad()
    handle = guarded(model, policy="full")
    struck = []

    def strike(place: str, module: str, numbers: Tensor) -> None:
        if place == site and not struck:
            struck.append(module)
            numbers.view(-1)[0] += 0.5

    handle.watch.fault_hook = strike
    assert same(passes(model, handle), plain)
    assert struck
    assert [(item.operation, item.outcome) for item in handle.ledger.findings] == [
        (site, "corrected")
    ]
    assert not handle.uncovered().operations


def test_what_a_function_computes_twice_is_not_computed_four_times() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 8))
    handle = guarded(model, policy="full")
    loss = functional.cross_entropy(model(torch.randn(6, 8)), torch.arange(6))
    loss.backward()
    made = {site.operation for site in handle.ledger.sites.values() if site.checks}
    assert {"norm.forward", "norm.dx", "softmax.forward", "loss.dlogits"} <= made
    sites = [site for site in handle.ledger.sites.values() if site.module == "operations"]
    assert {site.operation for site in sites if site.checks} <= {"product", "bias.gradient"}
