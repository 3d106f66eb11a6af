"""Operations that are computed twice on the CPU: attention, norms, softmax and losses."""

from __future__ import annotations

import copy
import gc
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outlast.guard import guard
from outlast.guard.operations import release_kernels
from outlast.guard.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.guard import Guard


class Attending(nn.Module):
    """Embedding, attention by the function that is given, a norm and a classifier."""

    def __init__(self, attention: Callable[..., Tensor], norm: nn.Module) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(32, 16), nn.Linear(16, 48)
        self.norm, self.head = norm, nn.Linear(16, 32)
        self.attention = attention

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = self.attention(query, key, value).transpose(1, 2).flatten(2)
        return self.head(self.norm(x + mixed))


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query @ key.transpose(-1, -2)) / query.shape[-1] ** 0.5
    return functional.softmax(scores, dim=-1) @ value


IDS = torch.arange(20).view(2, 10) % 32


@pytest.fixture(autouse=True)
def _no_other_guard() -> None:
    """Let guards of earlier tests give their functions back, which are to be made faulty here."""
    gc.collect()
    release_kernels()


class Flipper:
    """A kernel that is wrong in some of its calls, as hardware would have it.

    Args:
        owner: Where the function is looked up.
        name: Its name.
        change: Changes the numbers (flat) of a call in place.
        calls: Which calls are wrong, counted from 0.
    """

    def __init__(
        self, owner: Any, name: str, change: Callable[[Tensor], object], calls: set[int]
    ) -> None:
        self.original, self.change, self.calls, self.count = getattr(owner, name), change, calls, 0
        self.owner, self.name = owner, name

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        y: Tensor = self.original(*args, **options)
        if self.count in self.calls:
            wrong = y.detach().clone().reshape(-1)
            self.change(wrong)
            y.data.copy_(wrong.view(y.shape))
        self.count += 1
        return y

    def __enter__(self) -> Flipper:
        setattr(self.owner, self.name, self)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.original)


def flip(bit: int, index: int) -> Callable[[Tensor], object]:
    def change(numbers: Tensor) -> None:
        size = numbers.element_size()
        stored = numbers.view({2: torch.int16, 4: torch.int32}[size])
        stored[index] ^= torch.tensor(1 << bit, dtype=torch.int64).to(stored.dtype)

    return change


def step(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], **options: Any
) -> tuple[list[Tensor], Guard | None]:
    """The weights after one step of a copy of `model`, and its guard."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = guard(model, optimizer, **options) if options else None
    for _ in handle.attempts() if handle else (0,):
        optimizer.zero_grad()
        loss_of(model(IDS), IDS).backward()
    optimizer.step()
    if handle:
        handle.remove()
    return [each.detach().clone() for each in model.parameters()], handle


def class_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), ids)


BITS = {torch.float32: [0, 7, 15, 22, 23, 27, 30, 31], torch.bfloat16: [0, 3, 6, 7, 10, 14, 15]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:not guarded")
def test_every_bit_of_attention_that_matters_is_put_right(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model = Attending(fused, nn.LayerNorm(16)).to(dtype)
    clean, _ = step(model, class_loss)
    changes = [flip(bit, 9 * bit + 5) for bit in BITS[dtype]]
    # Within the range of V, and beyond it; a carry adds a power of two.
    changes += [
        lambda numbers, factor=factor: numbers[40].mul_(factor)
        for factor in (0.5, 0.99, 1.01, 3.0, 100.0)
    ]
    changes.append(lambda numbers: numbers[::32].add_(0.125))
    for change in changes:
        watched = copy.deepcopy(model)
        optimizer = torch.optim.SGD(watched.parameters(), lr=0.5)
        handle = guard(watched, optimizer, "full")
        struck: list[str] = []

        def strike(site: str, module: str, numbers: Tensor) -> None:
            if site == "attention.output" and not struck:  # noqa: B023 - called at once
                struck.append(module)  # noqa: B023
                flat = numbers.reshape(-1)
                change(flat)  # noqa: B023
                numbers.copy_(flat.view(numbers.shape))

        handle.watch.fault_hook = strike
        class_loss(watched(IDS), IDS).backward()
        optimizer.step()
        handle.remove()
        assert struck
        if dtype == torch.float32 and not handle.ledger.findings:
            # Only the last bits are less than the sums of a row of 8 numbers can hide.
            close = zip(clean, watched.parameters(), strict=True)
            assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in close)
            continue
        (finding,) = handle.ledger.findings
        assert (finding.operation, finding.outcome) == ("attention.forward", "corrected")
        assert all(map(torch.equal, clean, watched.parameters()))


@pytest.mark.parametrize(
    ("calls", "outcome"), [({0}, "corrected"), ({0, 1, 2}, "persistent"), ({1}, "check")]
)
@pytest.mark.filterwarnings("ignore:not guarded")
def test_persistent_is_a_device_that_fails_two_replays(calls: set[int], outcome: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def change(numbers: Tensor) -> None:
        # Wrong by another amount in every call.
        numbers += torch.rand(()).to(numbers.dtype)

    # The guard's stand-in must lie outside of the faulty kernel.
    with Flipper(functional, "softmax", change, calls):
        handle = guard(model, optimizer, Policy("full"))
        y = functional.softmax(model(IDS), dim=-1)
        y.square().mean().backward()
        handle.remove()
    found = [each.outcome for each in handle.ledger.findings if each.operation == "softmax.forward"]
    assert found[0] == outcome


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "three dimensions": class_loss,
    "class weights": lambda y, ids: functional.cross_entropy(
        y.flatten(0, 1), ids.flatten(), weight=torch.linspace(0.1, 1.0, 32, dtype=y.dtype)
    ),
    "probabilities": lambda y, ids: functional.cross_entropy(
        y.flatten(0, 1), functional.one_hot(ids.flatten(), 32).to(y.dtype) * 0.9
    ),
    "smoothing": lambda y, ids: functional.cross_entropy(
        y.flatten(0, 1), ids.flatten(), label_smoothing=0.1
    ),
    "mse": lambda y, ids: functional.mse_loss(y, torch.zeros_like(y)),
    "smooth l1": lambda y, ids: functional.smooth_l1_loss(y, torch.zeros_like(y)),
    "huber": lambda y, ids: functional.huber_loss(y, torch.zeros_like(y)),
    "l1": lambda y, ids: functional.l1_loss(y, torch.zeros_like(y)),
    "binary": lambda y, ids: functional.binary_cross_entropy_with_logits(y, torch.ones_like(y)),
    "nll": lambda y, ids: functional.nll_loss(
        functional.log_softmax(y.flatten(0, 1), dim=-1), ids.flatten()
    ),
    "kl": lambda y, ids: functional.kl_div(
        y.log_softmax(-1), torch.full_like(y, 1 / 32), reduction="batchmean"
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:not guarded")
def test_numbers_are_the_same_and_clean_ones_pass(
    name: str, norm: type[nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for attention in (fused, eager):
        model = Attending(attention, norm(16)).to(dtype)
        clean, _ = step(model, LOSSES[name])
        found, handle = step(model, LOSSES[name], policy="full")
        assert handle is not None
        assert all(map(torch.equal, clean, found))
        assert not handle.ledger.findings
        checked = {each.operation for each in handle.ledger.sites.values() if each.checks}
        assert {"loss.forward", "loss.dlogits", "norm.forward", "norm.dx", "norm.dw"} <= checked
        assert attention is fused or {"softmax.forward", "softmax.dlogits"} <= checked
        points = {each: item.detection_point for each, item in handle.certificate().items()}
        assert not any(
            points[each]
            for each in checked
            if not each.startswith(("linear", "emb", "product", "attention"))
        )


@pytest.mark.parametrize(
    ("site", "dtype"),
    [
        *product(
            ("norm.output", "norm.dx", "norm.dw", "loss.output", "loss.dlogits"),
            (torch.float32, torch.bfloat16),
        ),
        # Large ones, and those in fp32, are checked by sums.
        *product(
            ("attention.output", "attention.dq", "attention.dk", "attention.dv"), (torch.bfloat16,)
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:not guarded")
def test_the_last_bit_of_every_operation_is_put_right(dtype: torch.dtype, site: str) -> None:
    torch.manual_seed(0)
    model = Attending(fused, nn.LayerNorm(16)).to(dtype)
    clean, _ = step(model, class_loss)
    watched = copy.deepcopy(model)
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.5)
    handle = guard(watched, optimizer, "full")
    done: list[str] = []

    def fault_hook(at: str, module: str, numbers: Tensor) -> None:
        if at == site and not done:
            done.append(module)
            flip(0, 0)(numbers.view(-1) if numbers.is_contiguous() else numbers[0, 0, 0])

    handle.watch.fault_hook = fault_hook
    class_loss(watched(IDS), IDS).backward()
    optimizer.step()
    handle.remove()
    assert done
    assert [each.outcome for each in handle.ledger.findings] == ["corrected"]
    assert all(map(torch.equal, clean, watched.parameters()))


@pytest.mark.parametrize("what", ["values", "output", "norm"])
@pytest.mark.filterwarnings("ignore:not guarded")
def test_what_changes_between_the_passes_is_detected_and_the_step_repeated(what: str) -> None:
    torch.manual_seed(0)
    model = Attending(fused, nn.LayerNorm(16))
    clean, _ = step(model, class_loss)
    kept: list[Tensor] = []
    watched = copy.deepcopy(model)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        y = fused(query, key, value)
        kept.append({"values": value, "output": y, "norm": y}[what])
        return y

    watched.attention = attention
    watched.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.5)
    handle = guard(watched, optimizer, "full")
    for attempt, _ in enumerate(handle.attempts()):
        optimizer.zero_grad()
        kept.clear()
        loss = class_loss(watched(IDS), IDS)
        if attempt == 0:
            memory = kept[1 if what == "norm" else 0].data
            memory[0, 0, 0] += 0.25
        loss.backward()
    optimizer.step()
    handle.remove()
    assert {each.outcome for each in handle.ledger.findings} == {"repeated"}
    assert all(map(torch.equal, clean, watched.parameters()))


@pytest.mark.parametrize(
    "norm", ["batch", "batch, evaluated", "batch, frozen", "group", "instance"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:not guarded")
def test_norms_of_channels_keep_their_statistics(norm: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer: nn.Module = {
        "group": lambda: nn.GroupNorm(2, 4),
        "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    }.get(norm, lambda: nn.BatchNorm2d(4))()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer).to(dtype)
    if "evaluated" in norm:
        layer.eval()
    if "frozen" in norm:
        layer.requires_grad_(False)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.1)
    handle = guard(model, optimizer, "full")
    done: list[str] = []

    def fault_hook(site: str, module: str, numbers: Tensor) -> None:
        if site == "norm.repeated":
            done.append(site)
            if len(done) in {1, 9}:
                flip(1, 3)(numbers.view(-1))

    handle.watch.fault_hook = fault_hook
    for count in range(3):
        x = torch.randn(2, 3, 6, 6).to(dtype)
        for own in (model, twin):
            own.zero_grad()
            own(x).float().square().sum().backward()
        for own in (model, twin):
            for each in own.parameters():
                if each.grad is not None:
                    each.data -= 0.01 * each.grad
        assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values())), count
    handle.remove()
    assert len(done) > 9
    assert [each.outcome for each in handle.ledger.findings] == ["corrected"] * 2


KERNELS = [
    *("_scaled_dot_product_flash_attention_for_cpu", "native_layer_norm", "_log_softmax"),
    *("_scaled_dot_product_flash_attention_for_cpu_backward", "native_layer_norm_backward"),
    *("nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data"),
    *("_softmax", "_softmax_backward_data"),
]


class Both(nn.Module):
    """Fused attention, and attention written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Attending(fused, nn.LayerNorm(16))
        self.second = Attending(eager, nn.LayerNorm(16))

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(ids) + self.second(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.filterwarnings("ignore:not guarded", "ignore:Warning only once", "ignore:.*overrid")
def test_a_flip_inside_of_a_kernel_leaves_no_trace(kernel: str, dtype: torch.dtype) -> None:
    """At torch's dispatcher: any output of the kernel, as its statistics, before all else."""
    torch.manual_seed(0)
    original = torch.library.get_kernel(f"aten::{kernel}", "CPU")
    model = Both().to(dtype)
    draws = torch.Generator().manual_seed(1)
    calls = [0]

    def draw(limit: int) -> int:
        return int(torch.randint(0, limit, (), generator=draws))

    def faulty(keyset: Any, *args: Any, **options: Any) -> Any:
        made = original.call_boxed(keyset, *args, **options)
        calls[0] += 1
        if calls[0] == 1:
            several = made if isinstance(made, tuple | list) else (made,)
            outputs = [each for each in several if each is not None and each.numel()]
            output = outputs[draw(len(outputs))]
            if output.element_size() > 4:
                return made
            wrong = output.detach().clone().reshape(-1)
            flip(draw(8 * output.element_size()), draw(len(wrong)))(wrong)
            output.copy_(wrong.view(output.shape))
        return made

    clean, _ = step(model, lambda y, ids: functional.cross_entropy(y.flatten(0, 1), ids.flatten()))
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(kernel, faulty, "CPU", with_keyset=True, allow_override=True)
        for _ in range(10):
            calls[0] = 0
            found, handle = step(
                model,
                lambda y, ids: functional.cross_entropy(y.flatten(0, 1), ids.flatten()),
                policy="full",
            )
            assert handle is not None
            assert {each.outcome for each in handle.ledger.findings} <= {"corrected", "check"}
            by_sums = "dot_product" in kernel and dtype == torch.float32
            assert calls[0] > (0 if by_sums else 1)
            if by_sums and not handle.ledger.findings:
                close = zip(clean, found, strict=True)
                assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in close)
            else:
                assert all(map(torch.equal, clean, found))
    finally:
        library._destroy()
