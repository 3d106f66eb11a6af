"""Every operation of a surveyed step in FLOPs and bytes: checked, or named with its share."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_guard_survey import Branches, causal, class_loss, squares, text_loss, train
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from zoo import FAMILIES, UNKNOWN_OPERATIONS, with_unknown

from outlast.guard import Guard, guard, operation_counter
from outlast.guard.inject import inject, parse_faults
from outlast.guard.policy import Coverages, StepCoverage

pytestmark = pytest.mark.filterwarnings("ignore:.*not guarded:UserWarning")


_EARLIER = 0


@pytest.fixture(autouse=True)
def _modes_of_earlier_tests() -> None:
    global _EARLIER
    gc.collect()
    _EARLIER = torch._C._len_torch_dispatch_stack()


def modes() -> int:
    """Modes of this test that see what torch dispatches."""
    return int(torch._C._len_torch_dispatch_stack()) - _EARLIER


def steps_of(family: str, level: str = "full", unknown: str = "", steps: int = 1) -> Coverages:
    case = FAMILIES[family]()
    if unknown:
        with_unknown(case.model, UNKNOWN_OPERATIONS[unknown])
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    handle = guard(case.model, optimizer, level)
    for step in range(steps):
        optimizer.zero_grad()
        case.loss(case.model, case.batch(step)).backward()
        optimizer.step()
    found = handle.coverage()
    handle.remove()
    return found


def known(found: Coverages) -> StepCoverage:
    assert found.step is not None
    assert found.step.flops > 0
    assert not found.why_not
    return found.step


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_sum_to_one_and_the_missing_ones_are_named(family: str) -> None:
    found = steps_of(family)
    step = known(found)
    assert modes() == 0
    checked = sum(place[0] for place in step.places.values())
    assert checked / step.flops + sum(step.unchecked.values()) == pytest.approx(1.0)
    size = sum(place[1] for place in step.places.values())
    assert size / step.bytes + sum(step.unchecked_bytes.values()) == pytest.approx(1.0)
    # The scan of Mamba, step by step, adds gradients of whole tensors.
    assert step.covered > (0.6 if family == "mamba" else 0.9)
    # The text names the largest ones, and gives the sum of the others.
    said = str(found)
    listed = said.partition("not checked: ")[2].partition(";")[0]
    shares = [float(part.partition(" %)")[0]) for part in listed.split("(")[1:]]
    assert sum(shares) == pytest.approx(100 * (1 - step.covered), abs=0.5)
    assert "AdamW's update" in listed
    assert not {"mm", "addmm", "bmm", "convolution"} & step.unchecked.keys()


@pytest.mark.parametrize("unknown", UNKNOWN_OPERATIONS)
@pytest.mark.parametrize("family", ["llama", "resnet", "mlp"])
def test_unknown_operations_are_named_with_their_share(family: str, unknown: str) -> None:
    step = known(steps_of(family, unknown=unknown))
    named = [name for name in step.unchecked if name.startswith("custom operation")]
    assert len(named) == 1, "forward and backward under one name"
    assert "blend" in named[0].lower()
    assert step.unchecked[named[0]] > 0
    assert named[0] in str(step)


def test_products_are_those_of_torchs_own_counter() -> None:
    torch.manual_seed(0)
    model = causal("Llama", attn_implementation="eager")
    with FlopCounterMode(display=False) as counted:
        text_loss(model).backward()
    model.zero_grad()
    handle, _, _ = train(model, text_loss, steps=1)
    assert handle is not None
    step = known(handle.coverage())
    products = sum(
        place[0]
        for (name, _), place in step.places.items()
        if name in {"mm", "addmm", "bmm", "baddbmm"}
    )
    assert products == counted.get_total_flops()


def test_an_element_wise_operation_is_named_with_its_module_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    handle, _, _ = train(model, squares((4, 8)), steps=1)
    assert handle is not None
    step = known(handle.coverage())
    # 64 elements each way.
    assert step.places["gelu", "*"][2] == 128
    assert step.unchecked["gelu"] == pytest.approx(128 / step.flops)


class Asking(nn.Module):
    """Asks for truth values and numbers on the way, as data-dependent code does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if not torch.equal(x, x) or torch.allclose(x, y) or y[0, 0].is_nonzero() is None:
            return x
        y.sum().item()
        low, high = torch.aminmax(y)
        return y.clamp(low.item(), high.item())


def test_operations_that_give_no_tensor_end_no_counting() -> None:
    handle, _, _ = train(Asking(), squares((4, 8)), steps=1)
    assert handle is not None
    assert known(handle.coverage()).flops > 0


def test_levels_differ_in_what_is_counted_as_checked() -> None:
    linear, full = known(steps_of("llama-eager", "linear")), known(steps_of("llama-eager"))
    assert linear.flops == full.flops
    assert "softmax" in linear.unchecked
    assert "softmax" not in full.unchecked
    assert steps_of("mlp", "light").step is None


class Switched(nn.Module):
    """A norm that may go another way, where no check is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(64), nn.Linear(64, 64)
        self.by_hand = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return self.layer(self.norm(x))
        centred = x - x.mean(-1, keepdim=True)
        normal = centred * (centred.square().mean(-1, keepdim=True) + self.norm.eps).rsqrt()
        return self.layer(normal * self.norm.weight + self.norm.bias)


def warned(model: nn.Module, steps: int, before: Any) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard(model, optimizer, "full")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            before(step)
            optimizer.zero_grad()
            squares((4, 16, 64))(model).backward()
            optimizer.step()
    return [str(item.message) for item in caught]


def test_a_path_that_changes_is_said_with_the_share_that_fell_out() -> None:
    model = Switched()
    told = warned(model, 8, lambda step: setattr(model, "by_hand", step >= 5))
    fell = [text for text in told if text.startswith("not checked any more")]
    assert len(fell) == 1
    # Said in the step after which the module was missed, since that surveys the next one.
    assert "in step 7" in fell[0] or "in step 8" in fell[0]
    assert "mul in the model itself" in fell[0]
    assert "% of the FLOPs" in fell[0]
    assert not [text for text in warned(Switched(), 8, lambda _: None) if "any more" in text]


def test_a_check_that_is_lost_is_said_though_its_operation_stays() -> None:
    class OwnRMSNorm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight

    model = nn.Sequential(nn.Linear(64, 64), OwnRMSNorm(64, eps=1e-6), nn.Linear(64, 64))

    def lose(step: int) -> None:
        if step == 4:
            del model[1].forward

    told = [text for text in warned(model, 6, lose) if "not checked any more" in text]
    assert len(told) == 1
    assert "in step 5: mul in * (" in told[0]
    assert "pow in * (" in told[0]


def test_only_surveyed_steps_are_counted() -> None:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    handle = guard(model, optimizer, "full")
    for _ in range(10):
        seen.append(modes())
        optimizer.zero_grad()
        class_loss(model).backward()
        optimizer.step()
    # In the first, and in those behind steps 1, 2, 4 and 8.
    assert seen == [1, 1, 1, 0, 1, 0, 0, 0, 1, 0]
    assert known(handle.coverage()).step == 9
    handle.remove()


def test_modes_of_others_may_come_and_go_in_any_order() -> None:
    class Others(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters())
    with Others() as others:
        handle = guard(model, optimizer, "full")
        class_loss(model).backward()
    assert modes() == 1
    optimizer.step()
    with others:
        optimizer.zero_grad()
        class_loss(model).backward()
        # The survey of this step ends, and that of the next begins, inside of the other mode.
        optimizer.step()
    before = others.calls
    torch.ones(3).add(1)
    assert others.calls == before > 0
    assert known(handle.coverage()).step == 2
    handle.remove()
    assert modes() == 0


def test_a_model_that_goes_takes_its_mode_along() -> None:
    """Also where hooks of its guard hold it."""
    model = Branches()
    handle = guard(model, torch.optim.AdamW(model.parameters()), "full")
    inject(handle, parse_faults(["linear.output:module=left:bit=30:step=5"]))
    assert modes() == 1
    class_loss(model).backward()
    del model, handle
    gc.collect()
    assert modes() == 0


@pytest.mark.distributed
def test_workers_of_a_data_loader_are_not_counted() -> None:
    model = Branches()
    handle = guard(model, torch.optim.AdamW(model.parameters()), "full")
    loader = DataLoader(Lengths(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert [int(item) for item in loader] == [0]
    assert modes() == 1
    handle.remove()


class Lengths(Dataset[Tensor]):
    """How many modes its process has."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(torch._C._len_torch_dispatch_stack() - _EARLIER)


def test_an_error_of_the_counting_is_said_once_and_ends_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> float:
        raise AttributeError("no such thing")

    monkeypatch.setattr(operation_counter, "_bytes", fail)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = guard(model, optimizer, "full")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            class_loss(model).backward()
            optimizer.step()
    (said,) = (str(item.message) for item in caught)
    assert said == "the step's operations are not counted: AttributeError: no such thing"
    assert handle.coverage().step is None
    assert said in str(handle.coverage())
    assert not handle.uncovered().parameters
    handle.remove()


def test_passes_that_are_repeated_count_once() -> None:
    model, twin = Branches(), Branches()
    twin.load_state_dict(model.state_dict())
    plain = train(twin, class_loss, steps=1)[0]
    assert plain is not None
    optimizer = torch.optim.AdamW(model.parameters())
    handle = guard(model, optimizer, "full")
    # What comes before the passes is no part of the step.
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    for _ in handle.attempts():
        optimizer.zero_grad()
        class_loss(model).backward()
    optimizer.step()
    expected, found = known(plain.coverage()), known(handle.coverage())
    # The other one counts what sets gradients to zero, and moves numbers alone.
    assert found.flops == expected.flops
    plain.remove()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_counting_changes_no_bit(precision: str) -> None:
    torch.manual_seed(0)
    model = causal("Mixtral", num_local_experts=4)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    if precision == "bf16":
        model.bfloat16()
    twin = copy.deepcopy(model)

    def loss_of(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return text_loss(model)

    handle, _, losses = train(model, loss_of, steps=3)
    assert train(twin, loss_of, None, steps=3)[2] == losses
    assert handle is not None
    assert known(handle.coverage()).covered > 0.8
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True)
    )


@pytest.mark.slow
def test_a_compiled_model_is_compiled_still() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = guard(model, optimizer, "full")
    compiled = torch.compile(model, backend=backend)
    for _ in range(4):
        optimizer.zero_grad()
        squares((4, 8))(compiled).backward()
        optimizer.step()
    assert graphs
    count = len(graphs)
    squares((4, 8))(compiled).backward()
    assert len(graphs) == count
    handle.remove()


def test_a_compiled_linear_layer_counts_as_checked() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = guard(model, optimizer, "full")
    squares((32, 64))(torch.compile(model, backend="aot_eager")).backward()
    optimizer.step()
    step = handle.coverage().step
    handle.remove()
    assert step is not None
    assert not [name for name in step.unchecked if "checked_linear" in name]
    assert step.covered_bytes > 0.2


def parallel(sharded: bool) -> tuple[float, list[str], bool]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    plain = copy.deepcopy(model)

    def wrapped(model: Any) -> Any:
        if not sharded:
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        fully_shard(model[0])
        return fully_shard(model)

    handle, _, losses = train(wrapped(model), squares((8, 64)), steps=3)
    assert isinstance(handle, Guard)
    same = train(wrapped(plain), squares((8, 64)), None, steps=3)[2] == losses
    step = known(handle.coverage())
    return step.covered, [*step.unchecked], same


@pytest.mark.distributed
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_of_ddp_and_fsdp_count_the_same(sharded: bool, ranks: Any) -> None:
    for covered, names, same in ranks(2)(parallel, sharded):
        assert same
        assert covered > 0.7
        assert "gelu" in names
        assert not {"mm", "addmm"} & {*names}


def test_operations_on_complex_numbers_count_flops() -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, 2))

        def forward(self, x: Tensor) -> Tensor:
            shaped = torch.sin(torch.fft.rfft(x) * torch.view_as_complex(self.weight))
            return torch.fft.irfft(shaped, n=16)

    model = Filter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = guard(model, optimizer, "linear")
    model(torch.randn(6, 16)).square().mean().backward()
    optimizer.step()
    step = handle.coverage().step
    handle.remove()
    assert step is not None
    assert {"sin", "cos", "fft_r2c", "fft_c2r"} <= set(step.unchecked)
