"""The guard on a CUDA device: cuBLAS's bits, no waiting, faults found, no false alarms."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outlast.guard import Guard, guard
from outlast.guard.linear import has_triton, product_for
from outlast.guard.product import Gradients, Product, TorchProduct
from outlast.guard.residual import ResidualTest
from outlast.guard.watch import RandomSigns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
with_triton = pytest.mark.skipif(
    not has_triton(), reason="Triton is not installed (pip install 'outlast[gpu]')"
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (
    (4096, 1024, 4096),
    (16384, 768, 768),  # dW has few tiles and long sums, which cuBLAS splits
    (8192, 4096, 1024),
    (1021, 130, 77),
    (3, 4096, 50257),
)
"""Rows, inputs and outputs."""


@pytest.fixture(params=["ieee", "tf32"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """How products of fp32 read their operands."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = request.param
    yield request.param
    matmul.fp32_precision = before


class Layer:
    """One layer's numbers, by cuBLAS."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, int, int], mean: float = 0.5) -> None:
        rows, inputs, outputs = shape
        generator = torch.Generator("cuda").manual_seed(rows)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device="cuda")

        self.x = (normal(rows, inputs) + mean).to(dtype)
        self.w = (normal(outputs, inputs) / inputs**0.5).to(dtype)
        self.b = normal(outputs).to(dtype)
        self.dy = (normal(rows, outputs) / rows).to(dtype)
        self.y = functional.linear(self.x, self.w, self.b)
        self.dx, self.dw = self.dy.mm(self.w), self.dy.t().mm(self.x)
        self.db = self.dy.sum(0)

    def judge(self, product: Product) -> list[ResidualTest]:
        signs = RandomSigns(0)
        signs.renew()
        encoding = product.encode(self.w, self.b, signs)
        projections, forward = product.forward(self.x, self.y, encoding)
        gradients = Gradients(self.dx, self.dw, self.db)
        dx, dw = product.backward(self.dy, gradients, encoding, projections)
        assert dx is not None
        assert dw is not None
        return [forward, dx, dw]


@with_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_is_chosen(dtype: torch.dtype) -> None:
    from outlast.guard.checksum_kernels import TritonProduct

    chosen = product_for(torch.empty(1, dtype=dtype, device="cuda"))
    old = torch.cuda.get_device_capability() < (8, 0)
    assert isinstance(chosen, TritonProduct) != old
    assert not isinstance(product_for(torch.empty(1, device="cuda").double()), TritonProduct)


@pytest.mark.parametrize("mean", [0.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clean_products_pass(
    dtype: torch.dtype, shape: tuple[int, int, int], mean: float, precision: str
) -> None:
    layer = Layer(dtype, shape, mean)
    judged = layer.judge(product_for(layer.x))
    for name, each in zip(("forward", "dx", "dw"), judged, strict=True):
        assert int(each.exceeded) == 0, name
        number = len(each.flags)
        spread = (float(each.total) / number) ** 0.5
        # Beyond, the model of the roundings would not fit the device.
        assert spread < 1.05 + 4.0 / (2.0 * number) ** 0.5, name


@with_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_judgements_are_those_of_torch(dtype: torch.dtype) -> None:
    from outlast.guard.checksum_kernels import TritonProduct

    layer = Layer(dtype, (8192, 4096, 4096))
    pairs = zip(layer.judge(TritonProduct()), layer.judge(TorchProduct()), strict=True)
    for own, other in pairs:
        assert torch.equal(own.flags, other.flags)
        assert float(own.total) == pytest.approx(float(other.total), rel=0.2)


def test_compiled_checks_are_those_of_torch() -> None:
    from outlast.guard.linear import CompiledProduct

    layer = Layer(torch.bfloat16, (512, 256, 384))
    pairs = zip(layer.judge(CompiledProduct()), layer.judge(TorchProduct()), strict=True)
    for own, other in pairs:
        assert torch.equal(own.flags, other.flags)
        assert float(own.total) == pytest.approx(float(other.total), rel=0.05)


@pytest.mark.parametrize("matrix", ["y", "dx", "dw"])
@pytest.mark.parametrize(
    ("dtype", "bit"), [(torch.bfloat16, 9), (torch.float16, 11), (torch.float32, 23)], ids=str
)
def test_rows_with_a_flipped_bit_are_flagged_and_no_others(
    dtype: torch.dtype, bit: int, matrix: str
) -> None:
    layer = Layer(dtype, (2048, 64, 96))
    wrong = getattr(layer, matrix)
    whole = wrong.view(torch.int32 if wrong.element_size() == 4 else torch.int16)
    rows = torch.arange(0, len(wrong), 5, device="cuda")
    columns = wrong[rows].abs().argmax(dim=1)
    whole[rows, columns] = whole[rows, columns] ^ (1 << bit)
    judged = dict(zip(("y", "dx", "dw"), layer.judge(product_for(layer.x)), strict=True))
    assert judged[matrix].flags.nonzero().flatten().tolist() == rows.tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_flagged(value: float) -> None:
    layer = Layer(torch.bfloat16, (256, 64, 96))
    layer.y[17, 3] = value
    forward = layer.judge(product_for(layer.x))[0]
    assert forward.flags.nonzero().flatten().tolist() == [17]
    assert not float(forward.worst) < 6.0


def make(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256, bias=False)
    ).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def forward_backward(model: nn.Module, number: int, dtype: torch.dtype) -> Tensor:
    batch = torch.randn(8, 128, 256, generator=torch.Generator().manual_seed(number)).cuda()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss: Tensor = (model(batch) - batch.roll(1, dims=0)).float().square().mean()
    loss.backward()
    return loss.detach()


def train(
    dtype: torch.dtype,
    protect: Callable[[nn.Module, torch.optim.Optimizer], Guard] | None,
    steps: int = 20,
) -> tuple[list[float], dict[str, Tensor], Guard | None]:
    model, optimizer = make(dtype)
    guarded = protect(model, optimizer) if protect else None
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(forward_backward(model, number, dtype))
        optimizer.step()
    return [float(each) for each in losses], copy.deepcopy(model.state_dict()), guarded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_guarded_run_has_the_bits_of_an_unguarded_one(dtype: torch.dtype) -> None:
    plain_losses, plain_state, _ = train(dtype, None)
    again_losses, _, _ = train(dtype, None)
    assert again_losses == plain_losses, "the device is not deterministic: nothing to compare"
    losses, state, guarded = train(dtype, guard)
    assert losses == plain_losses
    for name, tensor in plain_state.items():
        assert torch.equal(tensor, state[name]), name
    assert guarded is not None
    assert guarded.ledger.findings == []
    # Rows of both outputs, of the second layer's dX, and of both dW.
    assert guarded.ledger.checks >= 20 * (1024 + 1024 + 1024 + 1024 + 256)


def test_checks_do_not_wait_for_the_device() -> None:
    model, optimizer = make(torch.bfloat16)
    guarded = guard(model, optimizer)
    batch = torch.randn(8, 128, 256, device="cuda")

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()

    # Kernels are compiled, and signs brought to the device, the first time.
    run()
    optimizer.step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert guarded.verdict().clean


@pytest.mark.parametrize("site", ["linear.output", "linear.operand", "linear.dx", "linear.dw"])
def test_a_fault_in_training_is_found_before_the_update(site: str) -> None:
    model, optimizer = make(torch.bfloat16)
    guarded = guard(model, optimizer)
    done = []

    def fault(where: str, module: str, numbers: Tensor) -> None:
        if where == site and module == "0" and not done:
            done.append(where)
            numbers.view(-1)[4321] += 100 * numbers.abs().max() + 1

    optimizer.zero_grad()
    # Of the first layer, whose input needs no gradient unless it is asked for.
    batch = torch.randn(8, 128, 256, device="cuda", requires_grad=True)
    guarded.watch.fault_hook = fault
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(batch).float().square().mean()
    loss.backward()
    guarded.watch.fault_hook = None
    assert done == [site]
    verdict = guarded.verdict()
    corrected = [each.outcome for each in guarded.ledger.findings] == ["corrected"]
    assert corrected or not verdict.clean
    assert {each.module for each in guarded.ledger.findings} == {"0"}
