"""Checks of the CPU's fused attention: healthy calls of any shape, faults, and true verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from outlast.guard import Guard, guard
from outlast.guard import product as products
from outlast.guard.fused_attention import FusedAttention

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def spread(kind: str, queries: list[Tensor], keys: list[Tensor]) -> None:
    """Make rows of Q and dO, and of K and V, as models have them at their worst."""
    q, dy = queries
    k, v = keys
    if kind == "uniform":
        q *= 0.0
    elif kind == "one-sided":
        q += 1.0
        k += 1.0
        v += 3.0
        dy += 2.0
    elif kind == "sharp":
        q *= 20.0
        k *= 20.0
    elif kind == "tiny":
        dy *= 1e-6
        v *= 1e-4
    elif kind == "few":
        dy *= torch.rand(*dy.shape[:3], 1) < 0.1
    elif kind == "alike":
        q[:], dy[:] = q[:, :, :1].clone(), dy[:, :, :1].clone()
        k[:, :, ::2] = k[:, :, :1].clone()


@pytest.mark.parametrize("dtype", TYPES)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_healthy_attention_passes(dtype: str, data: Any) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    batches, heads, group = (draw(st.integers(1, 3)) for _ in range(3))
    queries, keys = (draw(st.sampled_from([1, 2, 5, 16, 33, 100, 260])) for _ in range(2))
    channels = draw(st.sampled_from([1, 3, 8, 20, 32, 64, 80, 128]))
    causal = draw(st.booleans())
    mask = None
    if not causal and draw(st.booleans()):
        mask = 2.0 * torch.randn(batches, 1, queries, keys)
        # The last key is padding, and one query sees nothing.
        mask[..., -1], mask[:, :, 0] = -math.inf, -math.inf
        mask = mask.to(TYPES[dtype])
    q, dy = (torch.randn(batches, heads * group, queries, channels) for _ in range(2))
    k, v = (torch.randn(batches, heads, keys, channels) for _ in range(2))
    kinds = ["normal", "uniform", "one-sided", "sharp", "tiny", "few", "alike"]
    spread(draw(st.sampled_from(kinds)), [q, dy], [k, v])
    given = [item.to(TYPES[dtype]) for item in (q, k, v, dy)]
    if draw(st.booleans()):
        given = [item.transpose(1, 2).contiguous().transpose(1, 2) for item in given]
    q, k, v, dy = given
    out, logsum = forward(q, k, v, 0.0, causal, attn_mask=mask)
    made = backward(dy, q, k, v, out, logsum, 0.0, causal, attn_mask=mask)
    signs = torch.randint(0, 2, (channels + 31,)) * 2.0 - 1.0
    call = FusedAttention(q, k, v, causal, mask, channels**-0.5)
    tests = [call.judge_output(out, logsum, signs)]
    tests += call.judge_gradients(out, logsum, dy, made, signs)
    for test in tests:
        assert not test.exceeded
        assert float(test.worst) < 5.75


class Attends(nn.Module):
    """Attention between two projections."""

    def __init__(self, dtype: torch.dtype = torch.float32, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(32, 4 * 8 * 3, dtype=dtype)
        self.out = nn.Linear(32, 32, dtype=dtype)
        self.x = torch.randn(3, 20, 32, dtype=dtype)
        self.again = again

    def forward(self) -> Tensor:
        q, k, v = self.qkv(self.x).view(3, 20, 3, 4, 8).permute(2, 0, 3, 1, 4)
        if self.again:
            o = checkpoint(self.attend, q, k, v, use_reentrant=False)
        else:
            o = self.attend(q, k, v)
        return self.out(o.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def step(model: Attends, handle: Guard | None = None) -> list[Tensor]:
    for _ in handle.attempts() if handle is not None else (None,):
        model.zero_grad()
        loss = model().float().square().mean()
        loss.backward()
    return [loss.detach(), *(item.grad.clone() for item in model.parameters())]


def outcomes(handle: Guard) -> set[tuple[str, str]]:
    return {(each.operation, each.outcome) for each in handle.ledger.findings}


def once(site: str, change: Callable[[Tensor], object], times: float = 1) -> Any:
    done: list[str] = []

    def fault_hook(at: str, module: str, numbers: Tensor) -> None:
        if at == site and len(done) < times:
            done.append(at)
            change(numbers)

    return fault_hook


SITES = {
    "attention.output": "attention.forward",
    **{site: site for site in ("attention.dq", "attention.dk", "attention.dv")},
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("site", SITES)
def test_level_linear_finds_large_faults_going_back(site: str, dtype: str) -> None:
    clean = step(Attends(TYPES[dtype]))
    model = Attends(TYPES[dtype])
    handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), "linear")
    size = 1.0 if site == "attention.output" else 3.0
    handle.watch.fault_hook = once(site, lambda numbers: numbers[1, 2, 7, 3].add_(size))
    assert all(map(torch.equal, clean, step(model, handle)))
    expected = (
        ("attention.output", "repeated") if site == "attention.output" else (site, "corrected")
    )
    assert expected in outcomes(handle)
    assert handle.ledger.site("operations", "attention.sums").checks > 0


def test_level_linear_counts_an_output_only_with_its_gradient() -> None:
    model = Attends()
    handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), "linear")
    with torch.no_grad():
        model()
    step(model)
    handle._optimizers[0].step()
    left = handle.uncovered()
    assert [name for name in left.operations if name.startswith("attention whose gradients")]
    assert 0.0 < left.flops < 0.1


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("site", SITES)
def test_a_wrong_result_is_put_right_before_it_is_used(site: str, dtype: str, again: bool) -> None:
    clean = step(Attends(TYPES[dtype], again))
    for value in (torch.nan, torch.inf, 3.0):
        model = Attends(TYPES[dtype], again)
        handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), "full")
        handle.watch.fault_hook = once(site, lambda numbers, v=value: numbers[1, 2, 7, 3].fill_(v))
        assert all(map(torch.equal, clean, step(model, handle)))
        assert outcomes(handle) == {(SITES[site], "corrected")}
        handle.remove()


@pytest.mark.parametrize("which", ["query", "key", "value", "output", "sums"])
def test_what_changes_between_the_passes_is_found_and_the_step_repeated(which: str) -> None:
    clean = step(Attends())
    model = Attends()
    handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), "full")
    attend, struck = model.attend, []

    def strike(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = attend(q, k, v)
        if not struck:
            struck.append(True)
            sums = o.grad_fn._saved_logsumexp
            memory = {"query": q, "key": k, "value": v, "output": o, "sums": sums}[which]
            memory.data[1, 2, 7].add_(2.0)
        return o

    model.attend = strike
    assert all(map(torch.equal, clean, step(model, handle)))
    assert ("attention.output", "repeated") in outcomes(handle)
    assert not {each for _, each in outcomes(handle)} & {"persistent", "rounding"}


@pytest.mark.parametrize("dtype", TYPES)
def test_what_no_rounding_explains_is_told_from_what_it_does(dtype: str) -> None:
    torch.manual_seed(0)
    q, k, v, dy = torch.randn(4, 2, 3, 40, 16).to(TYPES[dtype])
    out, logsum = forward(q, k, v, 0.0, True)
    made = backward(dy, q, k, v, out, logsum, 0.0, True)
    call = FusedAttention(q, k, v, True, None, 0.25)
    healthy = call.judge_output(out, logsum, torch.ones(47))
    flagged = replace(healthy, flags=torch.ones_like(healthy.flags), exceeded=len(healthy.flags))
    size = {"fp32": 1e-3, "bf16": 0.5, "fp16": 0.1}[dtype]
    results = dict(zip(("dq", "dk", "dv"), made, strict=True))
    for name, numbers in (results | {"o": out, "l": logsum[..., None]}).items():
        given = () if name in {"o", "l"} else (dy, out)
        assert call.beyond_rounding(flagged, *given, **{name: numbers}).exceeded == 0
        numbers[1, 2, 7, -1] += size * numbers.abs().max()
        judged = call.beyond_rounding(flagged, *given, **{name: numbers})
        assert judged.flags.nonzero().tolist() == [[5 * 40 + 7]]
        numbers[1, 2, 7, -1] -= size * numbers.abs().max()


def test_attention_is_counted_as_checked_only_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for level, native, reason in (
        ("full", True, ""),
        ("linear", True, ""),
        ("full", False, "attention without a C compiler"),
        ("linear", False, "attention without a C compiler"),
    ):
        model = Attends()
        handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
        with monkeypatch.context() as patch:
            if not native:
                patch.setattr("outlast.guard.fused_attention.library_for", lambda _: None)
            step(model, handle)
            handle._optimizers[0].step()
        checked = {each.operation for each in handle.ledger.sites.values() if each.checks}
        check = "attention.forward" if level == "full" else "attention.sums"
        assert (check in checked) == (reason == "")
        assert bool(handle.uncovered().flops) == bool(reason)
        assert any(name.startswith(reason) for name in handle.uncovered().operations) or not reason
        handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_threads_find_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 300, 64).to(dtype)
    out, logsum = forward(q, k, v, 0.0, True)
    out[1, 3, 250, 9] += 4.0
    signs = torch.ones(95)
    call = FusedAttention(q, k, v, True, None, 0.125)
    found = []
    for threads in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("outlast.guard.fused_attention.threads_for", lambda _, n=threads: n)
            found.append(call.judge_output(out, logsum, signs))
    assert products.library() is not None
    assert torch.equal(found[0].flags, found[1].flags)
    assert found[0].exceeded == 1


class Twice(nn.Module):
    """Attention whose output trains, and attention whose output does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attends(), Attends()

    def forward(self) -> Tensor:
        with torch.no_grad():
            fixed = self.second()
        return self.first() + fixed


def test_coverage_names_the_outputs_that_no_gradient_came_back_to() -> None:
    model = Twice()
    handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), "linear")
    for _ in range(4):
        model().square().mean().backward()
        handle._optimizers[0].step()
    assert (
        "attention whose gradients were not computed in the step" in handle.uncovered().operations
    )
    assert "attention (" in str(handle.coverage())


MASKS = {
    "causal": lambda size: torch.ones(size, size, dtype=torch.bool).tril(),
    # The first four queries see padding alone.
    "padded": lambda size: (
        torch.ones(size, size, dtype=torch.bool).tril() & (torch.arange(size) >= 4)
    ),
}


@pytest.mark.parametrize("level", ["linear", "full"])
@pytest.mark.parametrize("closed", [-math.inf, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_large_numbers_hide_nothing(mask: str, closed: float, level: str) -> None:
    def step(strikes: bool) -> tuple[set[str], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(8, 24)
        handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
        x = torch.randn(2, 3, 40, 8)
        added = torch.zeros(40, 40).masked_fill(~MASKS[mask](40), closed)
        struck = not strikes
        for _ in handle.attempts():
            model.zero_grad()
            o = functional.scaled_dot_product_attention(*model(x).chunk(3, -1), attn_mask=added)
            if not struck:
                struck = True
                o.data[1, 2, 30, 7] += 100.0
            # Padding counts for nothing.
            o[:, :, 4:].square().mean().backward()
        handle.remove()
        found = {each.outcome for each in handle.ledger.findings}
        return found, [item.grad for item in model.parameters()]

    (nothing, clean), (found, gradients) = step(False), step(True)
    assert nothing == set()
    assert found == {"repeated"}
    assert all(map(torch.equal, clean, gradients))


def test_what_overflows_is_no_fault_and_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attends()
    handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), "full")
    monkeypatch.setattr(FusedAttention, "beyond_rounding", None)
    (model() * torch.inf).sum().backward()
    assert {outcome for _, outcome in outcomes(handle)} == {"not_finite"}
    assert handle.watch.uncorrected == 0
