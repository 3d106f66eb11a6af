"""The guard under torch.compile, activation checkpointing and FSDP2."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from outlast.errors import GuardError
from outlast.guard import Guard, guard, linear

ROWS = 4 * 8


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 24, bias=bias)
        self.down = nn.Linear(24, 16, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return result


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(bias) for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


Prepare = Callable[[Model], object]


def train(
    prepare: Prepare,
    guarded: bool,
    *,
    autocast: bool = False,
    bias: bool = True,
    fault_hook: Callable[[str, str, Tensor], None] | None = None,
) -> tuple[list[float], list[Tensor], Guard | None]:
    """Losses and weights of two steps of two micro-batches."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(bias)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    handle = quietly(model, optimizer) if guarded else None
    if handle is not None:
        handle.watch.fault_hook = fault_hook
    prepare(model)
    losses = []
    for _ in range(2):
        for _ in range(2):
            ids = torch.randint(0, 32, (4, 8))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(ids).flatten(0, 1)
            loss = functional.cross_entropy(logits.float(), ids.flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [each.detach() for each in model.parameters()], handle


def quietly(model: nn.Module, *args: Any) -> Guard:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return guard(model, *args)


def compile_whole(backend: str) -> Prepare:
    return lambda model: model.compile(fullgraph=True, backend=backend)


def compile_blocks(model: Model) -> None:
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")


def recompute(model: Model) -> None:
    for name, block in list(model.blocks.named_children()):
        wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        model.blocks.set_submodule(name, wrapped)


def checks(handle: Guard | None, operation: str) -> int:
    assert handle is not None
    sites = handle.ledger.sites.items()
    return sum(site.checks for (_, kind), site in sites if kind == operation)


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def once(at: str, module: str, at_call: int = 1) -> Callable[[str, str, Tensor], None]:
    calls = []

    def fault_hook(site: str, name: str, numbers: Tensor) -> None:
        if (site, name) == (at, module):
            calls.append(1)
            if len(calls) == at_call:
                numbers.view(-1)[5].add_(7.0)

    return fault_hook


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_makes_every_check_once(backend: str, autocast: bool) -> None:
    # Without biases: their gradients are summed in another order outside of the operation.
    losses, weights, _ = train(compile_whole(backend), False, autocast=autocast, bias=False)
    again, same, handle = train(compile_whole(backend), True, autocast=autocast, bias=False)
    assert checks(handle, "linear.forward") == 4 * 7 * ROWS
    assert checks(handle, "linear.dx") == 4 * 7 * ROWS
    assert checks(handle, "linear.dw") == 4 * (3 * (24 + 16) + 32)
    assert handle is not None
    assert handle.ledger.findings == []
    assert again == losses
    assert equal(weights, same)


@pytest.mark.slow
def test_inductor_keeps_every_check_and_finds_faults() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    # Products only, so that there is no kernel to build. One layer is called twice.
    layer, twice = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    plain = nn.Sequential(layer, twice, twice)
    made = []
    for fault_hook in (None, once("linear.output", "1"), once("linear.dw", "1", 2)):
        handle = guard(plain)
        handle.watch.fault_hook = fault_hook
        # Not the container, whose own frame torch skips.
        run = torch.compile(lambda x: plain(x), fullgraph=True, backend="inductor")
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = run(x)
        y.backward(torch.ones_like(y))
        assert checks(handle, "linear.forward") == checks(handle, "linear.dx") == 3 * 5
        assert checks(handle, "linear.dw") == 3 * 16
        assert [f.outcome for f in handle.ledger.findings] == ["corrected"] * (
            fault_hook is not None
        )
        made.append([y.detach(), x.grad, layer.weight.grad, twice.weight.grad])
        plain.zero_grad()
        handle.remove()
    y = plain(x)
    x.grad = None
    y.backward(torch.ones_like(y))
    expected = [y.detach(), x.grad, layer.weight.grad, twice.weight.grad]
    assert all(equal(each, expected) for each in made)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["linear.output", "linear.operand", "linear.dx", "linear.dw"])
def test_a_fault_in_a_compiled_graph_is_put_right(at: str) -> None:
    losses, weights, _ = train(compile_blocks, True)
    again, same, handle = train(compile_blocks, True, fault_hook=once(at, "blocks.1.up"))
    assert handle is not None
    assert [(f.module, f.outcome) for f in handle.ledger.findings] == [("blocks.1.up", "corrected")]
    assert again == losses
    assert equal(weights, same)


def test_equal_blocks_share_one_graph() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = Model()
    handle = quietly(model)
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    model(torch.zeros(4, 8, dtype=torch.int64))
    assert counter.frame_count == 1
    assert {name for (name, _), site in handle.ledger.sites.items() if site.checks} == {
        *(f"blocks.{index}.{layer}" for index in range(3) for layer in ("up", "down")),
        "head",
        "embedding",
    }


def test_a_guard_is_removed_from_compiled_layers() -> None:
    torch._dynamo.reset()
    model = Model()
    handle = quietly(model)
    model.compile(fullgraph=True, backend="aot_eager")
    ids = torch.zeros(4, 8, dtype=torch.int64)
    logits = model(ids)
    before = handle.ledger.checks
    handle.remove()
    assert torch.equal(model(ids), logits)
    assert handle.ledger.checks == before > 0


def test_without_its_operations_a_guarded_model_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(linear, "WHY_NOT", "defined by another library")
    layer = nn.Linear(4, 4)
    guard(layer)
    layer.compile(backend="aot_eager")
    with pytest.raises(GuardError, match=r"outlast::checked_linear.*defined by another library"):
        layer(torch.randn(2, 4))


@pytest.mark.parametrize("autocast", [False, True])
def test_recomputed_activations_are_compared(autocast: bool) -> None:
    losses, weights, _ = train(recompute, False, autocast=autocast)
    again, same, handle = train(recompute, True, autocast=autocast)
    assert checks(handle, "linear.recompute") == 4 * 6 * ROWS
    assert handle is not None
    assert handle.ledger.findings == []
    assert again == losses
    assert equal(weights, same)


def test_a_fault_of_one_of_two_forward_passes_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    handle = guard(model)
    calls = []

    def wrong_once(_: nn.Module, __: object, y: Tensor) -> Tensor:
        calls.append(1)
        return y + 1e-5 if len(calls) == 3 else y

    model[1].register_forward_hook(wrong_once)
    x = torch.randn(2, 5, 8, requires_grad=True)
    # Two calls of one module in one graph; the third pass recomputes the second call.
    y = x
    for _ in range(2):
        y = torch.utils.checkpoint.checkpoint(model, y, use_reentrant=False)
    y.sum().backward()
    assert [(f.module, f.operation, f.outcome) for f in handle.ledger.findings] == [
        ("2", "linear.recompute", "detected")
    ]


def test_checkpointing_inside_a_compiled_graph() -> None:
    def both(model: Model) -> None:
        recompute(model)
        compile_blocks(model)

    losses, weights, _ = train(recompute, True)
    again, same, handle = train(both, True)
    assert handle is not None
    assert handle.ledger.findings == []
    assert checks(handle, "linear.dw") == 4 * (3 * (24 + 16) + 32)
    assert again == pytest.approx(losses, rel=1e-5)
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(weights, same, strict=True))


def shard(model: Model, bf16: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def sharded_run(guard_at: str, bf16: bool, prepare: Prepare) -> tuple[Any, ...]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(bias=False)
    handle = quietly(model) if guard_at == "before" else None
    prepare(model)
    shard(model, bf16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if guard_at == "after":
        handle = quietly(model, optimizer)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        ids = torch.randint(0, 32, (4, 8))
        loss = functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = [each.to_local().tolist() for each in model.parameters()]  # type: ignore[attr-defined]
    if handle is None:
        return losses, weights
    uncovered = [each.module for each in handle.coverage() if each.why_not.startswith("split")]
    return losses, weights, checks(handle, "linear.forward"), handle.ledger.findings, uncovered


@pytest.mark.distributed
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("guard_at", ["before", "after"])
@pytest.mark.parametrize("prepare", [lambda _: None, recompute, compile_blocks])
def test_sharded_layers_are_checked_with_unchanged_numbers(
    ranks: Any, guard_at: str, bf16: bool, prepare: Prepare
) -> None:
    def work() -> tuple[Any, ...]:
        return sharded_run("never", bf16, prepare), sharded_run(guard_at, bf16, prepare)

    for plain, (losses, weights, checked, findings, uncovered) in ranks(2)(work):
        assert (losses, weights) == plain
        assert checked == 3 * ROWS * (7 + (6 if prepare is recompute else 0))
        assert findings == []
        assert uncovered == []


@pytest.mark.distributed
def test_products_of_layers_split_by_tensor_parallelism_are_checked(ranks: Any) -> None:
    def work(faulty: bool) -> tuple[Any, ...]:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parts = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (2,)), parts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = guard(model, optimizer)
        struck: list[str] = []

        def strike(site: str, module: str, numbers: torch.Tensor) -> None:
            if site == "product.output" and faulty and dist.get_rank() == 1:
                struck.append(module)
                if len(struck) == 3:
                    numbers.view(-1)[1] += 5.0

        handle.watch.fault_hook = strike
        model(torch.randn(3, 8)).square().sum().backward()
        optimizer.step()
        weights = [item.full_tensor().tolist() for item in model.parameters()]
        outcomes = [item.outcome for item in handle.ledger.findings]
        parameters = set(handle.uncovered().parameters)
        handle.remove()
        return weights, outcomes, parameters, [each.operations for each in handle.coverage()]

    def both() -> tuple[Any, ...]:
        return work(False), work(True)

    for rank, (clean, struck) in enumerate(ranks(2)(both)):
        assert clean[0] == struck[0]
        assert clean[1] == []
        assert struck[1] == ["corrected"] * rank
        assert all("product" in operations for operations in clean[3])
        assert not any("weight" in name for name in clean[2])


def test_a_product_that_selective_checkpointing_has_kept_is_put_right() -> None:
    def keep_products(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        kept = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run(guarded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        handle = guard(model, optimizer, "full") if guarded else None
        if handle is not None:
            spoil = once("linear.output", "0")
            # The hook's own write is one that torch does not count, as a fault's.
            handle.watch.fault_hook = lambda *place: spoil(*place[:2], place[2].data)
        contexts = partial(create_selective_checkpoint_contexts, keep_products)
        x = torch.randn(8, 16)
        y = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        y.square().mean().backward()
        optimizer.step()
        if handle is not None:
            assert [finding.outcome for finding in handle.ledger.findings] == ["corrected"]
        return [parameter.detach() for parameter in model.parameters()]

    for right, found in zip(run(False), run(True), strict=True):
        assert torch.equal(right, found)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["the optimizer", "the step"])
def test_an_optimizer_may_step_inside_of_a_compiled_function(compiled: str) -> None:
    def trained(level: str) -> tuple[list[Tensor], Guard | None]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        handle = quietly(model, optimizer, level) if level else None

        def passes(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()

        def whole(x: Tensor) -> None:
            passes(x)
            optimizer.step()

        if compiled == "the step":
            step = torch.compile(whole, backend="eager")
        else:
            update = torch.compile(lambda: optimizer.step(), backend="eager")

            def step(x: Tensor) -> None:
                passes(x)
                update()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                step(torch.randn(8, 16))
        return [parameter.detach() for parameter in model.parameters()], handle

    expected, _ = trained("")

    found, handle = trained("linear")

    assert equal(found, expected)
    assert handle is not None
    shown = str(handle.coverage())
    handle.remove()
    assert shown.startswith("step 1: ")
    assert "the optimizer steps inside of torch.compile" in shown
    # No mode is left for which torch would look in vain, or that still counts.
    assert torch.ones(2).sum() == 2.0
    assert _get_current_dispatch_mode_stack() == []
