"""Costs and savings of structured layers, as pure functions of their settings; needs no torch.

The planner of the whole system composes these: parameters, floating-point operations, bytes that
are kept and sent, and how a training step shrinks. Operations count a multiplication and an
addition as two.

What a rank costs in quality is told as the dense model that learns as well, N_eff.
A scaling law L = E + A N^-a + B D^-b says how much loss a smaller dense model costs at the same
data. Where a structured model of linear share s (its linear parameters over the dense ones') lost
delta nats against the dense model of N parameters, N_eff solves ::

    A N_eff^-a = A N^-a + delta          N_eff / N = (1 + delta / (A N^-a))^(-1/a)

The perplexities are published, but those whose source says "unverified" were not compared with the
table in the paper itself; N_eff is derived here. Two published fits of the law are used, and the
interval spans all observations under both. It is a range of single-run results on the same few
models, not a confidence interval; baselines with the dense model's rate tuned leave less of it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outlast.errors import TensorizeError
from outlast.hardware.figure import Unavailable
from outlast.tensorize.network import (
    Route,
    block_network,
    chosen_modes,
    cp_network,
    lower,
    train_matrix_network,
    train_network,
    tucker_network,
)
from outlast.tensorize.shapes import block_modes, monarch_modes, monarch_rank

if TYPE_CHECKING:
    from outlast.tensorize.network import Network

TWO_FACTOR_FORMS = ("low_rank", "cola", "lax")
"""Two matrices with `rank` features between them; what is put between differs."""

FORMS = ("dense", *TWO_FACTOR_FORMS, "tt", "ttm", "btt", "monarch", "cp", "tucker", "sltrain")
"""Forms of which the cost is known."""

SLTRAIN_DENSITY = 0.03
"""Share of entries in the sparse part of low rank + sparse (arXiv 2406.02214, section 5)."""

_NEVER = 1 << 200
"""Operations of what cannot be done."""


@dataclass(frozen=True)
class LayerCost:
    """One layer.

    Attributes:
        parameters: Numbers that are learned, without the bias.
        forward_flops_per_token: Of the cheapest way through the chain: all ways to merge neighbours
            and both directions, the rebuilt dense weight among them. Merging, which does not
            depend on the tokens, is left out.
        training_flops_per_token: Forward and backward, on the way that is cheapest for both.
        kept_values_per_token: What is kept for the backward pass beyond x.
    """

    parameters: int
    forward_flops_per_token: int
    training_flops_per_token: int
    kept_values_per_token: int

    def kept_bytes(self, tokens: int, bytes_per_value: float = 2.0) -> float:
        """Return the bytes that `tokens` tokens keep beyond x."""
        return self.kept_values_per_token * tokens * bytes_per_value


def layer_cost(
    form: str,
    in_features: int,
    out_features: int,
    rank: int = 0,
    *,
    cores: int = 3,
    density: float = SLTRAIN_DENSITY,
) -> LayerCost:
    """Return the cost of a layer.

    Args:
        form: One of `FORMS`.
        in_features: Features of x.
        out_features: Features of y.
        rank: Of low-rank factors, of all bonds, of blocks, or the number of terms (``cp``); the
            number of blocks of ``monarch``. ``dense`` needs none.
        cores: Modes on each side of ``tt`` and ``ttm``, ``cp`` and ``tucker``.
        density: Share of entries in the sparse part of ``sltrain``.

    Raises:
        TensorizeError: For an unknown form or numbers below 1.
    """
    if form not in FORMS:
        raise TensorizeError(f"form = {form!r} is not one of {', '.join(FORMS)}")
    if min(in_features, out_features, cores) < 1 or (form != "dense" and rank < 1):
        raise TensorizeError(
            f"a {form} layer of {in_features} x {out_features} features, rank = {rank} and "
            f"cores = {cores} is none: all of them must be at least 1"
        )
    dense = in_features * out_features
    if form == "dense":
        return LayerCost(dense, 2 * dense, 6 * dense, 0)
    factors = rank * (in_features + out_features)
    if form == "sltrain":
        # Its weight is rebuilt at each use.
        return LayerCost(factors + max(1, round(density * dense)), 2 * dense, 6 * dense, 0)
    if form in TWO_FACTOR_FORMS:
        # With something between the factors what is there is kept whatever it takes.
        kept = form != "low_rank" or 2 * rank <= in_features
        again = 0 if kept else 2 * in_features * rank
        return LayerCost(factors, 2 * factors, 6 * factors + again, rank if kept else 0)
    return _cheapest(_network(form, in_features, out_features, rank, cores))


def _network(form: str, in_features: int, out_features: int, rank: int, cores: int) -> Network:
    sizes = in_features, out_features
    if form == "monarch":
        modes = monarch_modes(*sizes, rank)
        rank = monarch_rank(*sizes, rank)
        return block_network(*sizes, rank, in_modes=modes[0], out_modes=modes[1])
    if form == "btt":
        modes = block_modes(*sizes)
        return block_network(*sizes, rank, in_modes=modes[0], out_modes=modes[1])
    build = {
        "tt": train_network,
        "ttm": train_matrix_network,
        "tucker": tucker_network,
        "cp": cp_network,
    }[form]
    into = chosen_modes(None, in_features, cores, name="cores")
    out = chosen_modes(None, out_features, cores, name="cores")
    return build(*sizes, rank, in_modes=into, out_modes=out)


@functools.lru_cache(maxsize=4096)
def _cheapest(network: Network) -> LayerCost:
    """The cheapest ways through a chain forward, and forward and backward."""
    ways = [_products(network, backwards) for backwards in (False, True)]
    forward = min(_shortest(way, first=2, last=2, keeping=False)[0] for way in ways)
    # The gradients of the factors and of x take as much as going forward each, and what goes into
    # a stage after the first comes again where it is not kept: all but the last product.
    kept = min(_shortest(way, first=6, last=6, keeping=True) for way in ways)
    again = min(_shortest(way, first=8, last=6, keeping=False)[0] for way in ways)
    if kept[0] <= again:
        return LayerCost(network.parameters, forward, kept[0], kept[1])
    return LayerCost(network.parameters, forward, again, 0)


@dataclass(frozen=True)
class _Product:
    """One stage of a route: some neighbouring cores merged.

    Attributes:
        size: Its multiplications per token.
        width: Features per token that go in.
        narrow: Whether these are kept for the backward pass (see `operator._Chain`): all that are
            no wider than half of x, and none of a route that has others.
    """

    size: int
    width: int
    narrow: bool


def _products(network: Network, backwards: bool) -> dict[tuple[int, int], _Product]:
    """The stage of every run of cores [begin, end), which is the same in all routes with it."""
    count = len(network.cores)
    found = {}
    for begin in range(count):
        for end in range(begin + 1, count + 1):
            groups = tuple(size for size in (begin, end - begin, count - end) if size)
            stage = lower(network, Route(groups, backwards)).stages[1 if begin else 0]
            size = stage.b * stage.m * stage.k * stage.f
            narrow = not begin or 2 * stage.width <= network.in_features
            found[begin, end] = _Product(size, stage.width, narrow)
    return found


def _shortest(
    products: dict[tuple[int, int], _Product], *, first: int, last: int, keeping: bool
) -> tuple[int, int]:
    """The least weighted multiplications of all ways to group the cores, and what is kept then.

    Args:
        products: Of every run of cores.
        first: What a multiplication of all products but the last counts.
        last: Likewise of the last product.
        keeping: Go only through products whose inputs are kept.

    Returns:
        Operations and kept values per token.
    """
    count = max(end for _, end in products)
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, count + 1):
        weight = last if end == count else first
        ways = []
        for begin in range(end):
            product = products[begin, end]
            if keeping and not product.narrow:
                continue
            operations, values = best[begin]
            width = product.width if begin else 0
            ways.append((operations + weight * product.size, values + width))
        best.append(min(ways, default=(_NEVER, 0)))
    return best[count]


def step_ratio(*, linear_share: float, flops_ratio: float, efficiency: float = 1.0) -> float:
    """Time of a training step over that of the dense model (Amdahl's law).

    Args:
        linear_share: Of the dense step, what the replaced layers take.
        flops_ratio: Their operations over those of the dense layers.
        efficiency: Operations per second that the narrower products reach, over those of the dense
            ones: 1 at d = 2048 and ranks down to d / 8, 0.73 to 0.9 at d <= 1024 (measured on one
            CPU thread).

    Raises:
        TensorizeError: For numbers out of range.
    """
    if not (0.0 <= linear_share <= 1.0 and flops_ratio >= 0.0 and efficiency > 0.0):
        raise TensorizeError(
            f"linear_share = {linear_share} must be in [0, 1], flops_ratio = {flops_ratio} at "
            f"least 0 and efficiency = {efficiency} above 0"
        )
    return 1.0 - linear_share + linear_share * flops_ratio / efficiency


LAWS = {
    "Hoffmann et al. 2022, arXiv 2203.15556, approach 3": (406.4, 0.34),
    "Besiroglu et al. 2024, arXiv 2404.10102": (482.01, 0.3478),
}
"""(A, a) of published fits; the first paper's are rounded."""

C4_SHARE = 0.4
"""Parameters in the blocks at rank d / 4 over the dense ones': 0.395 for each LLaMA shape."""

SMALLEST, LARGEST = 58e6, 1.34e9
"""Parameters of the dense models that were observed."""

_DENSE = {58e6: 34.06, 134e6: 25.08, 368e6: 18.80, 1340e6: 15.56}
_C4 = "published C4 perplexities of {} (full rank: arXiv 2403.03507, table 2), N_eff derived"

Training = Literal["adamw", "riemannian"]


@dataclass(frozen=True)
class Observation:
    """A structured and a dense model on the same data.

    Attributes:
        form: Of the structured one.
        training: Of its factors: ``adamw``, or steps on the manifold of low-rank matrices (LORO).
        share: Its linear parameters over the dense ones'.
        parameters: Of the dense model.
        perplexity: Of the structured model.
        dense_perplexity: Of the dense one.
        source: Where both stand.
    """

    form: str
    training: Training
    share: float
    parameters: float
    perplexity: float
    dense_perplexity: float
    source: str

    def ratio(self, law: str) -> float:
        """N_eff / N under one of `LAWS`."""
        scale, exponent = LAWS[law]
        delta = math.log(self.perplexity / self.dense_perplexity)
        term = scale * self.parameters**-exponent
        return float((1.0 + delta / term) ** (-1.0 / exponent))


def _c4(
    form: str, training: Training, source: str, perplexities: tuple[float, ...]
) -> list[Observation]:
    return [
        Observation(form, training, C4_SHARE, parameters, found, dense, _C4.format(source))
        for (parameters, dense), found in zip(_DENSE.items(), perplexities, strict=True)
    ]


_RERUN = "independent OpenWebText runs of the CHTsL paper (Oct 2025 preprint), N_eff derived"

OBSERVATIONS: tuple[Observation, ...] = (
    *_c4("cola", "adamw", "CoLA, arXiv 2502.10940 (unverified)", (34.04, 24.48, 19.40, 15.52)),
    Observation("cola", "adamw", 0.3, 58e6, 28.53, 26.56, _RERUN),
    Observation("cola", "adamw", 0.3, 134e6, 21.61, 19.46, _RERUN),
    Observation("cola", "adamw", 0.1, 58e6, 37.58, 26.56, _RERUN),
    *_c4("low_rank", "adamw", "low rank, arXiv 2403.03507", (78.18, 45.51, 37.41, 142.53)),
    *_c4("low_rank", "riemannian", "LORO, ICLR 2025 (unverified)", (33.96, 24.59, 18.84, 15.19)),
    *_c4(
        "sltrain", "adamw", "SLTrain, arXiv 2406.02214 (unverified)", (34.15, 26.04, 19.42, 16.14)
    ),
    Observation("sltrain", "adamw", 0.3, 58e6, 27.86, 26.56, _RERUN),
    Observation("sltrain", "adamw", 0.3, 134e6, 21.25, 19.46, _RERUN),
)
"""All that is known; most as single runs, some quoted from later papers' tables."""


@dataclass(frozen=True)
class EffectiveParameters:
    """The dense model that is as good.

    Attributes:
        value: Its parameters: geometric mean of what was observed.
        low: By the worst observation.
        high: By the best.
        ratio: `value` over the dense model's parameters.
        extrapolated: Whether the share or the size lies outside what was observed.
        source: Where the observations come from.
    """

    value: float
    low: float
    high: float
    ratio: float
    extrapolated: bool
    source: str
    kind: str = "derived from published perplexities, some of them unverified"


def effective_parameters(
    form: str, share: float, dense_parameters: float, *, training: Training = "adamw"
) -> EffectiveParameters | Unavailable:
    """N_eff of a model whose linear layers have a form.

    Observations at shares of 0.3 to 0.4 are one group, since methods and re-runs differ by more
    than these shares do. Between groups, and up to the dense model at share 1, ln(N_eff / N) is
    interpolated linearly in ln(share). Below them nothing is known: the lower end falls as fast as
    the share or as above it, whichever is faster, the upper end stays where it was, and the value
    is their geometric mean.

    Args:
        form: ``dense``, ``cola``, ``low_rank`` or ``sltrain``; of others nothing is known.
        share: Parameters of the replaced layers over those of the dense ones, in (0, 1].
        dense_parameters: Of the dense model, N.
        training: How the factors learn; see `Observation`.

    Returns:
        The estimate, or `Unavailable` for forms without published runs on this data.

    Raises:
        TensorizeError: For a share or size out of range.
    """
    if not (0.0 < share <= 1.0 and dense_parameters > 0):
        raise TensorizeError(
            f"share = {share} must be in (0, 1] and dense_parameters = {dense_parameters} above 0"
        )
    if form == "dense":
        all_of_it = float(dense_parameters)
        return EffectiveParameters(all_of_it, all_of_it, all_of_it, 1.0, False, "by definition")
    found = [one for one in OBSERVATIONS if (one.form, one.training) == (form, training)]
    if not found:
        return Unavailable(
            f"no published C4 runs compare {form} layers trained by {training} with dense ones",
            "run both at equal steps, and take N_eff from their losses",
        )
    points = _points(found)
    low, middle, high = _logs(points, share)
    outside = share < points[0][0] or not SMALLEST <= dense_parameters <= LARGEST
    return EffectiveParameters(
        dense_parameters * math.exp(middle),
        dense_parameters * math.exp(low),
        dense_parameters * math.exp(high),
        math.exp(middle),
        outside,
        "; ".join(dict.fromkeys(one.source for one in found)),
    )


_Point = tuple[float, tuple[float, float, float]]


def _points(observations: list[Observation]) -> list[_Point]:
    """(share, (lowest, mean, highest) of ln ratio), ascending, ending at the dense model."""
    groups: dict[bool, list[Observation]] = {}
    for one in observations:
        groups.setdefault(one.share >= 0.3, []).append(one)
    points: list[_Point] = []
    for group in groups.values():
        logs = [math.log(one.ratio(law)) for one in group for law in LAWS]
        share = min(one.share for one in group)
        points.append((share, (min(logs), sum(logs) / len(logs), max(logs))))
    return [*sorted(points), (1.0, (0.0, 0.0, 0.0))]


def _logs(points: list[_Point], share: float) -> tuple[float, float, float]:
    """Lowest, middle and highest ln(N_eff / N) at a share."""
    smallest, (lowest, _, highest) = points[0]
    if share < smallest:
        beyond, (next_lowest, _, _) = points[1]
        slope = (next_lowest - lowest) / math.log(beyond / smallest)
        low = lowest + max(1.0, slope) * math.log(share / smallest)
        return low, (low + highest) / 2, highest
    place = 0
    while place + 2 < len(points) and share > points[place + 1][0]:
        place += 1
    (left, lower), (right, upper) = points[place], points[place + 1]
    along = math.log(share / left) / math.log(right / left)
    low, middle, high = (a + along * (b - a) for a, b in zip(lower, upper, strict=True))
    return low, middle, high
