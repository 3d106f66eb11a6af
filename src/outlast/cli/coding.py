"""``outlast coding``: which gradient code, if any, and what a code guarantees.

Needs neither torch nor a run: everything is computed from what the command is told.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import Column, output, print_facts, print_json, print_table
from outlast.cli.options import AsJson
from outlast.errors import CodingError
from outlast.extras import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.coding import Bound, GradientCode

coding = typer.Typer(
    name="coding",
    help="Gradient codes against slow and dead workers: choose one, or see what one guarantees.",
    no_args_is_help=True,
)

CODES = (
    "FractionalRepetition",
    "CyclicRepetition",
    "CyclicMDS",
    "ReedSolomon",
    "RealReedSolomon",
    "GraphCode",
    "Expander",
    "SymmetricDesign",
    "SoftDesign",
    "BernoulliCode",
)
"""Codes that a few numbers make; the others are for Python (`outlast.coding`)."""

_SIGNS = {"exact": "", "upper": "<= ", "lower": ">= ", "estimate": "~ "}
_BEYOND = 3

Workers = Annotated[
    int,
    typer.Option(
        min=1, max=100_000, help="Data-parallel replicas (processes, or groups that share one)."
    ),
]


@coding.command()
def choose(
    *,
    workers: Workers,
    slow_share: Annotated[
        float, typer.Option(help="Share of the steps in which a worker is slow, 0 to 1.")
    ],
    slow_factor: Annotated[
        float, typer.Option(help="How many times longer a slow worker's micro-batches take.")
    ],
    persistence: Annotated[
        float | None,
        typer.Option(
            help="Probability that a worker which is slow stays so in the next step; default: the "
            "steps are independent. Coded runs measure it: see their report."
        ),
    ] = None,
    chunk_seconds: Annotated[
        float, typer.Option(help="Forward and backward of one micro-batch on a fast worker.")
    ] = 1.0,
    chunks: Annotated[int, typer.Option(help="Micro-batches per worker and step.")] = 8,
    reduction_seconds: Annotated[
        float, typer.Option(help="Sum of the gradients over all workers, once per step.")
    ] = 0.0,
    approximate: Annotated[
        bool,
        typer.Option(
            "--approximate",
            help="Also allow what loses samples of a step or leaves an error in the gradient. "
            "Assumes that any part of the data is like any other.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the simulation.")] = 0,
    json: AsJson = False,
) -> None:
    """Simulate all schemes under the same delays and say which to take, or to take none.

    Times are simulated, not measured. They are per batch: a step that drops a tenth of the samples
    counts for nine tenths of a step.

    --json: {"kind", "best", "reason", "candidates", "bound_seconds"}.
    """
    require("coding", "outlast coding", "scipy")
    from outlast.coding.choose import choose_code
    from outlast.coding.cost import CostModel
    from outlast.coding.delays import Markov, Slow

    delays = (
        Slow(slow_share, slow_factor)
        if persistence is None
        else Markov(slow_share, persistence, slow_factor)
    )
    costs = CostModel(chunk_seconds, chunks, reduction_seconds)
    found = choose_code(workers, delays, costs, exact=not approximate, seed=seed)
    if json:
        print_json({"kind": "simulated", **vars(found)})
        return
    print(found.table())
    print(
        f"\nsimulated; no scheme that keeps all samples can be faster than "
        f"{found.bound_seconds:.4g} s on average"
    )
    print(found.reason)


@coding.command()
def show(
    code: Annotated[str, typer.Argument(metavar="CODE", help=f"One of: {', '.join(CODES)}.")],
    *,
    workers: Workers,
    stragglers: Annotated[
        int | None, typer.Option(min=0, help="Stragglers that an exact code must stand.")
    ] = None,
    degree: Annotated[
        int | None, typer.Option(min=1, help="Of the graph (GraphCode, Expander).")
    ] = None,
    copies: Annotated[int | None, typer.Option(min=1, help="Of each chunk (SoftDesign).")] = None,
    mean_copies: Annotated[
        float | None, typer.Option(help="Mean workers per chunk (BernoulliCode).")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the messages: float32, bfloat16, float16 or float64.")
    ] = "float32",
    seed: Annotated[int | None, typer.Option(min=0, help="Of a random construction.")] = None,
    json: AsJson = False,
) -> None:
    """Show what a code costs and guarantees: load, exactness, error bounds, rounding.

    An error of e says that the gradient is off by at most sqrt(e) times the spectral norm of the
    matrix of the chunks' gradients; 0 is exact, and the number of chunks is as bad as no gradient.

    --json: {"code", "workers", "chunks", "properties", "errors": [{"stragglers", "worst",
    "mean"}]}.
    """
    given = {
        "stragglers": stragglers,
        "degree": degree,
        "copies": copies,
        "mean_copies": mean_copies,
        "seed": seed,
    }
    made = _made(code, {"workers": workers, "dtype": dtype, **given})
    first = max(made.tolerance, 0)
    last = min(first + _BEYOND, made.workers - 1)
    if json:
        bounds = [
            {
                "stragglers": count,
                "worst": made.worst_error(count),
                "mean": made.expected_error(count),
            }
            for count in range(first, last + 1)
        ]
        facts = {"code": made.name, "workers": made.workers, "chunks": made.chunks}
        print_json({**facts, "properties": dict(_properties(made)), "errors": bounds})
        return
    console = output()
    title = f"{made.name}: {made.workers} workers, {made.chunks} chunks"
    print_facts(console, title, _properties(made))
    console.print()
    error_rows = [
        [
            str(count),
            _bound(worst := made.worst_error(count)),
            _bound(mean := made.expected_error(count)),
            worst.source if mean is None or mean.source == worst.source
            else f"worst: {worst.source}; mean: {mean.source}",
        ]
        for count in range(first, last + 1)
    ]  # fmt: skip
    columns = [
        Column("stragglers"),
        Column("worst error"),
        Column("mean error"),
        Column("source", number=False, least=30),
    ]
    print_table(console, columns, error_rows)
    console.print("mean: over random stragglers; 0 is exact", style="dim")


def _made(name: str, given: dict[str, Any]) -> GradientCode:
    """The code of this name from those of the options that are not None.

    Raises:
        CodingError: For an unknown name, an option that the code does not have or that is missing,
            and whatever the code itself refuses.
    """
    import outlast.coding

    plain = {code.lower(): code for code in CODES}
    short = name.replace("_", "").replace("-", "").lower()
    known = plain.get(short) or plain.get(f"{short}code")
    if known is None:
        raise CodingError(f"code = {name} is not known; take one of {', '.join(CODES)}")
    build: Callable[..., GradientCode] = getattr(outlast.coding, known)
    if known == "GraphCode":
        build = outlast.coding.GraphCode.random_regular
    accepted = inspect.signature(build).parameters
    settings = {key: value for key, value in given.items() if value is not None}
    superfluous = [key for key in settings if key not in accepted]
    if superfluous:
        raise CodingError(f"{known} has no --{superfluous[0]}; {_wanted(known, accepted, given)}")
    missing = [
        key
        for key, item in accepted.items()
        if item.default is inspect.Parameter.empty and key not in settings
    ]
    if missing:
        raise CodingError(f"{known} needs --{missing[0]}; {_wanted(known, accepted, given)}")
    return build(**settings)


def _wanted(name: str, accepted: Any, given: dict[str, Any]) -> str:
    return f"{name} takes {', '.join(f'--{key}' for key in given if key in accepted)}"


def _properties(code: GradientCode) -> list[tuple[str, str]]:
    from outlast.coding.code import conditioning

    gone = max(code.tolerance, 0)
    loads, found = code.assignment.loads, conditioning(code, gone)
    smallest, largest = int(loads.min()), int(loads.max())
    kind = "all" if found.exhaustive else "a sample of"
    over = f"at worst, over {kind} {found.patterns:,} sets of {_stragglers(gone)}"
    if not gone:
        over = "with all workers"
    condition = (
        "unavailable: too large for one"
        if math.isnan(found.condition)
        else f"{found.condition:.3g} {over}"
    )
    exact = f"with any {_stragglers(code.tolerance)}" if code.tolerance else "with all workers"
    if code.tolerance < 0:
        exact = "never for sure: a chunk may be held by nobody"
    coefficients = "complex" if code.matrix.dtype.kind == "c" else "real"
    if code.binary:
        coefficients = "0 and 1"
    return [
        ("construction", code.source),
        ("chunks per worker", f"{smallest}" + (f" to {largest}" if largest > smallest else "")),
        ("load", f"{code.load:.4g} times that without a code"),
        ("exact", exact),
        ("coefficients", coefficients),
        ("condition number", condition),
        ("sum of |weights|", f"{found.amplification:.3g} {over}"),
        (
            "rounding error",
            f"{found.rounding:.2g} of the gradient at most, with messages in {code.dtype}",
        ),
    ]


def _stragglers(count: int) -> str:
    return "1 straggler" if count == 1 else f"{count} stragglers"


def _bound(bound: Bound | None) -> str:
    return "unknown" if bound is None else f"{_SIGNS[bound.kind]}{bound.value:.4g}"
