"""The Triton kernels in Triton's interpreter, on the CPU.

The interpreter is chosen when Triton is imported, so one process of its own runs all tests' work.
That kernels also compile for a device is tested without one.
"""

import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outlast.guard.product import Gradients, Product, Projections, TorchProduct
from outlast.guard.residual import ResidualTest
from outlast.guard.watch import RandomSigns

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (pip install 'outlast[gpu]')",
)

DTYPES = ("float32", "float16")
SWEPT = (*DTYPES, "bfloat16")
SHAPES = ((5, 7, 3), (64, 128, 128), (67, 130, 150), (150, 70, 45))
"""Rows, inputs and outputs."""
Run = Callable[..., Any]


def begin_interpreting() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    # numpy warns of what kernels leave out afterwards.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from outlast.guard import checksum_kernels

    # Programs run one after the other: few, of many rows. Small matrices have several tiles still.
    (
        checksum_kernels.ROWS,
        checksum_kernels.LONGEST_TILE,
        checksum_kernels.BOTH_TILE,
        checksum_kernels.BOTH_TILES,
    ) = 16, 64, 64, 1
    checksum_kernels.PARTS = 2


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """``interpreted(work, *args)``: what `work` returns in the process of the interpreter."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=begin_interpreting) as pool:
        yield lambda work, *args: pool.submit(work, *args).result(timeout=120)


@dataclass
class Case:
    """One layer's numbers, as torch computes them."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    dy: Tensor

    @property
    def y(self) -> Tensor:
        return functional.linear(self.x, self.w, self.b)

    @property
    def gradients(self) -> Gradients:
        db = None if self.b is None else self.dy.sum(0)
        return Gradients(self.dy @ self.w, self.dy.t() @ self.x, db)


def case(dtype: str, shape: tuple[int, int, int], *, scale: float = 1.0, bias: bool = True) -> Case:
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(rows)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    kind = getattr(torch, dtype)
    return Case(
        (normal(rows, inputs) + 0.3).to(kind),
        (normal(outputs, inputs) / inputs**0.5).to(kind),
        normal(outputs).to(kind) if bias else None,
        (scale * normal(rows, outputs)).to(kind),
    )


def drawn() -> RandomSigns:
    signs = RandomSigns(0)
    signs.renew()
    return signs


def plain(judged: ResidualTest) -> tuple[list[bool], int, float, float, float]:
    four = (judged.worst, judged.total, judged.widest)
    return judged.flags.tolist(), int(judged.exceeded), *map(float, four)


def checked(product: Product, case: Case) -> list[tuple[list[bool], int, float, float, float]]:
    encoding = product.encode(case.w, case.b, drawn())
    projections, forward = product.forward(case.x, case.y, encoding)
    dx, dw = product.backward(case.dy, case.gradients, encoding, projections)
    assert dx is not None
    assert dw is not None
    return [plain(each) for each in (forward, dx, dw)]


def check_by_kernels(dtype: str, shape: tuple[int, int, int], scale: float) -> Any:
    from outlast.guard.checksum_kernels import TritonProduct

    return checked(TritonProduct(), case(dtype, shape, scale=scale))


def sum_by_kernels(dtype: str, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    from outlast.guard.checksum_kernels import TritonProduct, both_sums, operand_sums

    it = case(dtype, shape)
    encoding = TritonProduct().encode(it.w, it.b, drawn())
    dots, projections = operand_sums(it.x, encoding)
    both = both_sums(it.dy, encoding.right, projections.dots, projections.squares)
    right, squares, sums, spreads = (each.double().sum(0) for each in both)
    return {
        "W u": encoding.right,
        "v W": encoding.left,
        "rows": torch.as_tensor(encoding.rows_largest),
        "columns": torch.as_tensor(encoding.columns_largest),
        "b v": torch.as_tensor(encoding.offset),
        "X v W": dots,
        "X u": projections.dots,
        "|X|^2": projections.squares,
        "dY W u": right,
        "|dY|^2": squares,
        "dY^T X u": sums,
        "spreads": spreads,
    }


def sum_in_double(dtype: str, shape: tuple[int, int, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """The same sums in fp64, and the sums of what they add, without signs."""
    it = case(dtype, shape)
    x, w, dy = it.x.double(), it.w.double(), it.dy.double()
    assert it.b is not None
    u = drawn().take("input", w.shape[1], w.device).double()
    v = drawn().take("output", len(w), w.device).double()
    projected, squares = x @ u + 1, x.square().sum(1)
    right, left, b = w @ u, v @ w, it.b.double()
    largest = w.square().sum(1).max(), w.square().sum(0).max()
    spreads = squares @ dy.square()
    return {
        "W u": (right, w.abs().sum(1)),
        "v W": (left, w.abs().sum(0)),
        "rows": (largest[0], largest[0]),
        "columns": (largest[1], largest[1]),
        "b v": (b @ v, b.abs().sum()),
        "X v W": (x @ left, x.abs() @ w.abs().sum(0)),
        "X u": (projected, x.abs().sum(1) + 1),
        "|X|^2": (squares, squares),
        "dY W u": (dy @ right, dy.abs() @ w.abs().sum(1)),
        "|dY|^2": (dy.square().sum(1), dy.square().sum(1)),
        "dY^T X u": (projected @ dy, (x.abs().sum(1) + 1) @ dy.abs()),
        "spreads": (spreads, spreads),
    }


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", SWEPT)
def test_sums_are_those_of_fp64_within_the_bound(
    interpreted: Run, dtype: str, shape: tuple[int, int, int]
) -> None:
    found = interpreted(sum_by_kernels, dtype, shape)
    # At most 64 numbers follow each other in fp32, then the lanes; and a factor was a sum itself.
    roundings = 2 * (64 + 16) + 4
    for name, (expected, absolute) in sum_in_double(dtype, shape).items():
        off = (found[name].double() - expected).abs()
        assert bool((off <= roundings * 2.0**-24 * absolute).all()), name


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1e-6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", SWEPT)
def test_clean_products_pass_and_judgements_are_those_of_torch(
    interpreted: Run, dtype: str, shape: tuple[int, int, int], scale: float
) -> None:
    theirs = checked(TorchProduct(), case(dtype, shape, scale=scale))
    found = interpreted(check_by_kernels, dtype, shape, scale)
    for (flags, exceeded, *own), (torchs, _, *others) in zip(found, theirs, strict=True):
        assert exceeded == 0
        assert flags == [False] * len(torchs)
        assert own[0] < 6.0
        if dtype != "float32" and scale == 1.0:
            # Storing counts alone, and both see the same of it.
            assert own == pytest.approx(others, rel=0.02)


def flip_and_check(dtype: str, matrix: str, bit: int) -> tuple[list[int], list[int]]:
    """Flip one bit of one number in every third row; the rows, and those that are flagged."""
    from outlast.guard.checksum_kernels import TritonProduct

    it, product = case(dtype, (45, 100, 70)), TritonProduct()
    encoding = product.encode(it.w, it.b, drawn())
    y, gradients = it.y, it.gradients
    assert gradients.dx is not None
    assert gradients.dw is not None
    wrong = {"y": y, "dx": gradients.dx, "dw": gradients.dw}[matrix]
    whole = wrong.view(torch.int32 if wrong.element_size() == 4 else torch.int16)
    rows = list(range(0, len(wrong), 3))
    for row in rows:
        # Of the row's largest number, which none of the bits makes so small that nobody minds.
        whole[row, int(wrong[row].abs().argmax())] ^= 1 << bit
    projections, forward = product.forward(it.x, y, encoding)
    dx, dw = product.backward(it.dy, gradients, encoding, projections)
    judged = {"y": forward, "dx": dx, "dw": dw}[matrix]
    assert judged is not None
    flagged = judged.flags.nonzero().flatten().tolist()
    assert int(judged.exceeded) == len(flagged)
    return rows, flagged


@pytest.mark.parametrize("matrix", ["y", "dx", "dw"])
@pytest.mark.parametrize(("dtype", "bit"), [("float32", 23), ("float32", 18), ("float16", 10)])
def test_rows_with_a_flipped_bit_are_flagged_and_no_others(
    interpreted: Run, dtype: str, bit: int, matrix: str
) -> None:
    rows, flagged = interpreted(flip_and_check, dtype, matrix, bit)
    assert flagged == rows


def check_with(value: float) -> tuple[list[bool], float]:
    from outlast.guard.checksum_kernels import TritonProduct

    it, product = case("float32", (9, 40, 20)), TritonProduct()
    y = it.y
    y[4, 3] = value
    _, judged = product.forward(it.x, y, product.encode(it.w, it.b, drawn()))
    return judged.flags.tolist(), float(judged.worst)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_numbers_that_are_not_finite_or_too_large_are_flagged(
    interpreted: Run, value: float
) -> None:
    flags, worst = interpreted(check_with, value)
    assert flags == [row == 4 for row in range(9)]
    # What a finding tells of its magnitude must not look like a small one.
    assert worst > 6.0 or value == 3e38


def check_parts() -> list[bool]:
    """Checks of views, of a layer without bias, and of either gradient alone."""
    from outlast.guard.checksum_kernels import TritonProduct

    it, product = case("float32", (33, 50, 20), bias=False), TritonProduct()
    encoding = product.encode(it.w.t().contiguous().t(), None, drawn())
    wide = torch.zeros(33, 80)
    wide[:, :50] = it.x
    projections, forward = product.forward(wide[:, :50], it.y.t().contiguous().t(), encoding)
    gradients = it.gradients
    only_dx = product.backward(it.dy, Gradients(gradients.dx, None, None), encoding, projections)
    only_dw = product.backward(it.dy, Gradients(None, gradients.dw, None), encoding, projections)
    assert only_dx[1] is None
    assert only_dw[0] is None
    judged = (forward, only_dx[0], only_dw[1])
    return [each is not None and not bool(each.flags.any()) for each in judged]


def test_views_and_single_gradients_are_checked(interpreted: Run) -> None:
    assert interpreted(check_parts) == [True, True, True]


SUMS = {"encoded": "*fp32", "signs": "*fp32", "right": "*fp32", "left": "*fp64", "masses": "*fp64"}
KERNELS = {
    "operand_kernel": {"height": 4, "width": 512},
    "output_kernel": {"height": 4, "width": 512, "block": 64},
    "both_kernel": {"height": 64, "width": 128, "tiles": 8},
    "fold_kernel": {"block": 1024},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_sweeps_compile_for_a_device(name: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from outlast.guard import checksum_kernels

    kernel, fixed = getattr(checksum_kernels, name), KERNELS[name]
    integers = {"rows", "columns", "stride", "parts", "tiles", "programs"} - set(fixed)
    reals = {"by_power", "by_square", "floor", "limit", "beta"}
    types = {"matrix": "*bf16", "bias_gradient": "*bf16", "flags": "*u8", **SUMS}
    types |= dict.fromkeys(integers, "i32") | dict.fromkeys(reals, "fp64")
    types |= dict.fromkeys(fixed, "constexpr")
    signature = {each: types.get(each, "*fp64") for each in kernel.arg_names}
    constants = {(kernel.arg_names.index(each),): value for each, value in fixed.items()}
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "ld.global" in compiled.asm["ptx"]


def test_without_a_device_nothing_is_chosen_by_mistake() -> None:
    from outlast.guard.linear import CompiledProduct, product_for

    assert type(product_for(torch.empty(1, device="meta"))) is CompiledProduct


def test_checks_that_cannot_be_compiled_are_made_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from outlast.guard.linear import or_eager

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler here")

    def double(x: Tensor) -> Tensor:
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda function: broken)
    tried = or_eager(double)
    with pytest.warns(UserWarning, match="not compiled.*no compiler here"):
        assert tried(torch.ones(1)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tried(torch.ones(1)) == 2


def test_a_bound_for_sums_in_parts_is_wider_and_truncation_grows_with_the_terms() -> None:
    from outlast.guard.product import split, truncation
    from outlast.guard.threshold import Rounding, product_bound

    bound = product_bound(Rounding("bfloat16"), 4096, 768)
    parted = split(bound, "bfloat16")
    assert parted.variance(1.0, 1.0) > bound.variance(1.0, 1.0)
    assert truncation(65536) == pytest.approx(256 * truncation(4096))
    # TF32 loses up to 2^-10 of every product; long sums lose a little more.
    assert 4.0 * 2.0**-20 < truncation(4096, "tf32") < 4.2 * 2.0**-20


def test_kept_sums_may_come_from_a_compiled_graph(interpreted: Run) -> None:
    assert interpreted(check_kept) == [0, 0]


def check_kept() -> list[int]:
    """The backward check with sums in fp64 views, as graphs carry them."""
    from dataclasses import replace

    from outlast.guard.checksum_kernels import TritonProduct

    it, product = case("float32", (21, 30, 40)), TritonProduct()
    encoding = product.encode(it.w, it.b, drawn())
    projections, _ = product.forward(it.x, it.y, encoding)
    parts = (projections.dots, projections.squares, encoding.input_signs, encoding.right)
    kept = torch.cat([*(each.double() for each in parts), torch.zeros(33).double()])
    kept[-1] = encoding.rows_largest
    dots, squares, signs, right, _ = kept.split((21, 21, 30, 40, 33))
    seen = replace(encoding, input_signs=signs, right=right, rows_largest=kept[-1])
    judged = product.backward(it.dy, it.gradients, seen, Projections(dots, squares))
    return [-1 if each is None else int(each.exceeded) for each in judged]
