"""How well gradients are recovered in low precision, by code: the worst over straggler patterns.

Gradients share a direction and differ by noise of the same size. They, the coefficients' products
and the messages are in the given type: a message is summed in fp32, as matrix units and all-reduce
kernels do, and rounded once. Decoding weights are in float64, as is the decoder's sum, so that what
is left is what the code makes of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Bar, at_least, at_most

from outlast.coding.code import FractionalRepetition, GradientCode, straggler_patterns
from outlast.coding.cyclic import CyclicMDS, CyclicRepetition, RealReedSolomon, ReedSolomon
from outlast.errors import CodingError

Builder = Callable[..., GradientCode]
NUMBERS = 2048
"""Length of a gradient."""


@dataclass(frozen=True)
class Case:
    """One figure: a code, its size, the type, and what must not be exceeded.

    Attributes:
        limit: The worst relative error that this construction, or where there was none the best
            non-binary one, had when it was first measured.
        against: What the limit was measured on.
    """

    build: Builder
    workers: int
    stragglers: int
    dtype: str
    limit: float
    against: str


_RANDOM = "cyclic repetition, one random draw"
_MDS = "cyclic MDS, least squares"
_BEST = "best other non-binary code"

CASES = (
    Case(CyclicRepetition, 30, 5, "float32", 5.8e-2, _RANDOM),
    Case(CyclicMDS, 30, 5, "float32", 1.0e-4, _MDS),
    Case(ReedSolomon, 30, 5, "float32", 1.0e-4, _BEST),
    Case(RealReedSolomon, 30, 5, "float32", 1.0e-4, _BEST),
    Case(CyclicRepetition, 31, 10, "float32", 9.5e-3, _RANDOM),
    Case(CyclicMDS, 31, 10, "float32", 1.7e-2, _MDS),
    Case(ReedSolomon, 31, 10, "float32", 9.5e-3, _BEST),
    Case(RealReedSolomon, 31, 10, "float32", 9.5e-3, _BEST),
    Case(CyclicRepetition, 60, 5, "float32", 8.2e-3, _RANDOM),
    Case(CyclicMDS, 60, 5, "float32", 1.7e-3, _MDS),
    Case(ReedSolomon, 60, 5, "float32", 1.7e-3, _BEST),
    Case(RealReedSolomon, 60, 5, "float32", 1.7e-3, _BEST),
    Case(CyclicRepetition, 24, 5, "bfloat16", 1.1, _RANDOM),
    Case(CyclicMDS, 24, 5, "bfloat16", 0.43, _MDS),
    Case(ReedSolomon, 24, 5, "bfloat16", 0.43, _BEST),
    Case(RealReedSolomon, 24, 5, "bfloat16", 0.43, _BEST),
    Case(FractionalRepetition, 24, 5, "bfloat16", 8e-4, "fractional repetition"),
)


def rounded(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """`values` rounded to nearest, ties to even, in the type; kept in float32 or complex64."""
    if np.iscomplexobj(values):
        return rounded(values.real, dtype) + 1j * rounded(values.imag, dtype)
    single = np.asarray(values, np.float32)
    if dtype == "float32":
        return single
    bits = single.view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32)


def messages_of(code: GradientCode, gradients: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """(workers, numbers) what each worker sends."""
    single = np.complex64 if np.iscomplexobj(code.matrix.data) else np.float32
    sums = np.zeros((code.workers, gradients.shape[1]), dtype=single)
    coefficients = code.matrix.toarray().astype(single)
    for worker in range(code.workers):
        for chunk in code.assignment.chunks_of(worker):
            sums[worker] += coefficients[worker, chunk] * gradients[chunk]
    return rounded(sums, dtype)


def worst_recovery(code: GradientCode, dtype: str, patterns: int) -> float:
    """Largest |recovered - sum| / |sum| over sets of as many stragglers as the code tolerates."""
    generator = np.random.default_rng(0)
    shared = generator.standard_normal(NUMBERS)
    drawn = shared + generator.standard_normal((code.chunks, NUMBERS))
    gradients = rounded(drawn, dtype)
    true = gradients.astype(np.float64).sum(axis=0)
    messages = messages_of(code, gradients, dtype)
    worst = 0.0
    for gone in straggler_patterns(code.workers, code.tolerance, patterns)[0]:
        alive = np.ones(code.workers, dtype=bool)
        alive[gone] = False
        recovered = code.optimal_weights(alive) @ messages.astype(code.matrix.dtype)
        worst = max(worst, float(np.linalg.norm(recovered.real - true)))
    return worst / float(np.linalg.norm(true))


def refused(build: Builder, **settings: Any) -> bool:
    """Whether the construction says no."""
    try:
        build(**settings)
    except CodingError:
        return True
    return False


def stability_bars(quick: bool) -> Iterator[Bar]:
    """Worst recovery of each code, and whether the bad ones are refused."""
    patterns = 400 if quick else 3000
    for case in CASES:
        allowed = {} if case.build is FractionalRepetition else {"tolerance": float("inf")}
        code = case.build(case.workers, case.stragglers, dtype=case.dtype, **allowed)
        figure = worst_recovery(code, case.dtype, patterns)
        label = f"{code.name}, n = {case.workers}, s = {case.stragglers}, {case.dtype}, worst error"
        yield Bar(
            label,
            float(f"{figure:.3g}"),
            "of the gradient",
            f"<= {case.limit:g}",
            figure <= case.limit,
            f"{case.against}, first measured",
        )
    yield from refusal_bars()


def refusal_bars() -> Iterator[Bar]:
    """Codes that amplify too much are not built; good ones are."""
    alike = {"workers": 24, "stragglers": 5, "dtype": "bfloat16"}
    bad = [
        *(
            refused(build, **alike)
            for build in (CyclicRepetition, CyclicMDS, ReedSolomon, RealReedSolomon)
        ),
        refused(CyclicMDS, workers=31, stragglers=10),
        refused(CyclicMDS, workers=50, stragglers=9),
        refused(ReedSolomon, workers=60, stragglers=9, mask="consecutive"),
    ]
    peer = "rounding bound above 1 % of the gradient"
    yield at_least("ill-conditioned codes refused", sum(bad) / len(bad), "of codes", 1.0, peer)
    good = [
        refused(FractionalRepetition, **alike),
        refused(CyclicMDS, workers=30, stragglers=5),
        refused(ReedSolomon, workers=60, stragglers=9),
        refused(RealReedSolomon, workers=60, stragglers=9),
    ]
    peer = "rounding bound below 1 % of the gradient"
    yield at_most("well-conditioned codes refused", sum(good), "codes", 0, peer)
