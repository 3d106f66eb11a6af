"""Quality that a rank costs, as the dense model that learns as well: N_eff. No torch.

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

import math
from dataclasses import dataclass
from typing import Literal

from outlast.errors import TensorizeError
from outlast.hardware.figure import Unavailable

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
