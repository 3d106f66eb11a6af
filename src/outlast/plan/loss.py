"""Loss of candidates against a baseline, by scaling laws, with intervals and terms.

The loss of a run is that of a law plus penalties, none of them negative at 16 bits and below:

    L = E + A N^-a + rank + precision + B D^-b + repeats + batch + gradient error

and the difference of two runs is the sum of the differences of these terms. What both share
cancels, in the figure as in its interval: the constants' errors are the same in both.

Loss by a scaling law, with the covariance of its constants.

`L = E + A / N^alpha + B / D^beta` (Hoffmann et al. 2022, arXiv 2203.15556, approach 3) for N
parameters and D tokens, in nats per token. Its constants depend on the tokenizer and on the text,
so only differences are worth anything, and an interval needs the constants' covariance: A and
alpha move together almost exactly, so standard errors alone would give intervals that are many
times too wide.

Each effect is a number by which a scaling law's N or D shrinks. Constants that could not be
compared with the paper itself say "unverified" or "as quoted by others".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from outlast.coding.cost import dropped_error, lost_chunks
from outlast.errors import PlanError
from outlast.hardware.figure import Unavailable
from outlast.plan.batch import texts
from outlast.plan.estimate import Interval, Source, Term, Total
from outlast.plan.mechanisms import form_of
from outlast.plan.reliability import DAY_SECONDS
from outlast.tensorize.quality import effective_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

    from outlast.plan.batch import Array
    from outlast.plan.configuration import Precision
    from outlast.plan.context import Context
    from outlast.plan.mechanisms import Step
    from outlast.plan.space import Block
    from outlast.plan.transformer import Transformer
    from outlast.tensorize.quality import Training


CONSTANTS = ("log A", "log B", "log E", "alpha", "beta")


"""Order of a law's constants in its covariance and in its gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLaw:
    """A fitted law.

    Attributes:
        name: For people.
        parameter_scale: A, in nats at N = 1.
        token_scale: B, in nats at D = 1.
        irreducible: E, in nats.
        parameter_exponent: alpha.
        token_exponent: beta.
        covariance: (5, 5) of `CONSTANTS`.
        parameters: Fewest and most parameters of the models that it was fitted to.
        tokens: Fewest and most tokens.
        other_data: Relative standard deviation of a difference on other text or with another
            tokenizer, which the covariance does not know of.
        source: Where constants and covariance come from.
    """

    name: str
    parameter_scale: float
    token_scale: float
    irreducible: float
    parameter_exponent: float
    token_exponent: float
    covariance: tuple[tuple[float, ...], ...]
    parameters: tuple[float, float]
    tokens: tuple[float, float]
    other_data: float
    source: str

    def __post_init__(self) -> None:
        if not min(self.constants) > 0.0:
            raise PlanError(
                f"constants {self.constants} of the scaling law {self.name!r}: give numbers above 0"
            )
        matrix = np.asarray(self.covariance)
        if matrix.shape != (5, 5) or not np.allclose(matrix, matrix.T, rtol=1e-6, atol=0.0):
            raise PlanError(
                f"covariance of the scaling law {self.name!r} has shape {matrix.shape}: give a "
                f"symmetric one of {', '.join(CONSTANTS)}"
            )

    @property
    def constants(self) -> tuple[float, ...]:
        """A, B, E, alpha, beta."""
        scales = self.parameter_scale, self.token_scale, self.irreducible
        return (*scales, self.parameter_exponent, self.token_exponent)

    @property
    def sources(self) -> Mapping[str, Source]:
        """The constants as a reader of an explanation sees them."""
        units = ("nat", "nat", "nat", "1", "1")
        return {
            name: Source(value, unit, "published", self.source)
            for name, value, unit in zip(
                ("A", "B", "E", "alpha", "beta"), self.constants, units, strict=True
            )
        }

    def parameter_loss(self, parameters: Array) -> Array:
        """`A / N^alpha` of (cases,) parameters, in nats."""
        return np.asarray(self.parameter_scale * parameters**-self.parameter_exponent)

    def token_loss(self, tokens: Array) -> Array:
        """`B / D^beta` of (cases,) tokens, in nats."""
        return np.asarray(self.token_scale * tokens**-self.token_exponent)

    def loss(self, parameters: Array, tokens: Array) -> Array:
        """(cases,) nats per token on the law's own data; nobody else's."""
        return self.irreducible + self.parameter_loss(parameters) + self.token_loss(tokens)

    def gradient(self, parameters: Array, tokens: Array) -> Array:
        """(cases, 5) of the loss by `CONSTANTS`."""
        of_parameters, of_tokens = self.parameter_loss(parameters), self.token_loss(tokens)
        of_parameters, of_tokens = np.broadcast_arrays(of_parameters, of_tokens)
        return np.stack(
            [
                of_parameters,
                of_tokens,
                np.full_like(of_parameters, self.irreducible),
                -of_parameters * np.log(parameters),
                -of_tokens * np.log(tokens),
            ],
            axis=-1,
        )


# Besiroglu et al. give constants and standard errors (A 124.58, B 1293.23, E 0.03, alpha 0.02,
# beta 0.02), not a covariance. This one is the bootstrap of their estimator (Huber loss of
# log residuals, delta 1e-3) on the 240 points that they published, 1,500 draws, done for this
# module; its standard errors are 123, 1384, 0.026, 0.015 and 0.021. It is close to singular,
# so digits matter.
CHINCHILLA = ScalingLaw(
    name="Chinchilla, replicated",
    parameter_scale=482.01,
    token_scale=2085.43,
    irreducible=1.8172,
    parameter_exponent=0.3478,
    token_exponent=0.3658,
    covariance=(
        (6.49755338e-02, -2.57399872e-02, 2.13771459e-03, 3.87229982e-03, -1.28609398e-03),
        (-2.57399872e-02, 1.82910044e-01, 3.86829420e-03, -1.59968715e-03, 8.94248043e-03),
        (2.13771459e-03, 3.86829420e-03, 2.07863952e-04, 1.26322382e-04, 1.88636069e-04),
        (3.87229982e-03, -1.59968715e-03, 1.26322382e-04, 2.31081551e-04, -7.99809118e-05),
        (-1.28609398e-03, 8.94248043e-03, 1.88636069e-04, -7.99809118e-05, 4.37450278e-04),
    ),
    parameters=(57e6, 16.2e9),
    tokens=(0.9e9, 318e9),
    # Fits of Hoffmann et al. (2022) and Muennighoff et al. (2023) differ from this one by 2 to 3 %
    # in what halving a model of 7B costs, and by 5 to 32 % in what halving 140B tokens does.
    other_data=0.15,
    source="Besiroglu et al. 2024, arXiv 2404.10102, table of estimates",
)


"""The default law: a replication of Chinchilla whose intervals match its data."""


REPEATS = Source(
    15.4,
    "1",
    "published",
    "R*_D of Muennighoff et al. 2023, arXiv 2305.16264, equation 5: repetitions after which "
    "another one is worth 1/e of fresh text (as quoted by others)",
)


REPEATS_LOG_DEVIATION = 0.2


"""Own prior of ln R*: no standard error is published."""


MOST_EPOCHS = 16.0


"""Beyond about 16 epochs the law's authors saw loss rise, which their formula cannot show."""


CRITICAL_BATCH = Source(
    22.91,
    "sequences",
    "published",
    "Zhang et al. 2024, arXiv 2410.21676, fit with model size held: sequences of 512 tokens at 1e6 "
    "tokens of data (unverified)",
)


CRITICAL_EXPONENT = Source(0.47, "1", "published", "the same fit (unverified)")


CRITICAL_SEQUENCE = 512.0


CRITICAL_DATA = 1e6


CRITICAL_OVERHEAD = Source(
    0.2, "1", "published", "arXiv 2410.21676, section 2: the critical batch takes 20 % more tokens"
)


CRITICAL_LOG_DEVIATION = 0.3


"""Own prior of ln B_noise. Bergsma et al. 2025 (arXiv 2505.13738, unverified) find 10 % less at 6e9
tokens and 13 % less at 1e12."""


CRITICAL_TOKENS = 1.7e9, 24e9


"""20 for each parameter of the models that the critical batch was measured on, 85M to 1.2B."""


PRECISION = {
    "weights": Source(
        2.6745, "bit", "published", "gamma_w of arXiv 2411.04330, table 2 (as quoted by others)"
    ),
    "activations": Source(
        2.2102, "bit", "published", "gamma_a of arXiv 2411.04330, table 2 (as quoted by others)"
    ),
    "cache": Source(
        0.9578, "bit", "published", "gamma_kv of arXiv 2411.04330, table 2 (as quoted by others)"
    ),
}


PRECISION_LOG_DEVIATION = 0.15


"""Own prior of the logarithm of all three together: about half of the effect at 8 bits."""


PRECISION_PARAMETERS = 1.7e9


PRECISION_TOKENS = 26e9


"""The largest model and the most tokens of 2411.04330; beyond, the deviation is doubled."""


REFERENCE_BITS = 16.0


"""Of the runs that the scaling law was fitted to."""


BITS = {
    "fp32": (32.0, 32.0, 32.0),
    "fp16": (16.0, 16.0, 16.0),
    "bf16": (16.0, 16.0, 16.0),
    "fp8": (8.0, 8.0, 16.0),
}


"""Bits of weights, activations, and keys and values in a product, by `Configuration.precision`."""


def repeated_tokens(tokens: Array, unique_tokens: Array, *, scale: float = 1.0) -> Array:
    """Fresh tokens that are worth as much as tokens seen more than once.

    `D' = U + U R* (1 - exp(-R / R*))` with `R = D / U - 1` repetitions (Muennighoff et al. 2023,
    arXiv 2305.16264, equation 5). The same paper lets parameters beyond the optimum for U decay
    too, which changes runs of one epoch as well and is left out.

    Args:
        tokens: (cases,) that are trained on, D.
        unique_tokens: (cases,) different ones, U; infinite where nothing repeats.
        scale: Multiplies R*.

    Returns:
        (cases,), never above `tokens`.
    """
    unique = np.minimum(unique_tokens, tokens)
    repeats = tokens / unique - 1.0
    decay = REPEATS.value * scale
    return np.asarray(unique - unique * decay * np.expm1(-repeats / decay))


def critical_batch_tokens(tokens: Array) -> Array:
    """Largest batch that needs at most 20 % more tokens than a small one, in tokens.

    `512 * 22.91 (D / 1e6)^0.47` (Zhang et al. 2024, arXiv 2410.21676): it grows with data and
    hardly with the model.

    Args:
        tokens: (cases,) of the whole run, D.
    """
    sequences = CRITICAL_BATCH.value * (tokens / CRITICAL_DATA) ** CRITICAL_EXPONENT.value
    return np.asarray(CRITICAL_SEQUENCE * sequences)


def token_factor(
    batch_tokens: Array, tokens: Array, gradient_error: Array, *, scale: float = 1.0
) -> Array:
    """Factor of the tokens that a run takes for the loss of one with tiny batches.

    `1 + error + B / B_noise`, from the trade of steps for samples `S = S_min (1 + B_noise / B)`
    (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11), with the noise of a gradient
    multiplied by `1 + error` at the same number of steps. At the critical batch the factor is 1.2
    by definition, so that `B_noise = B_critical / 0.2`.

    Args:
        batch_tokens: (cases,) of one optimizer step.
        tokens: (cases,) of the whole run.
        gradient_error: (cases,) extra variance of a gradient over that of the exact one.
        scale: Multiplies the critical batch.
    """
    noise = scale * critical_batch_tokens(tokens) / CRITICAL_OVERHEAD.value
    return np.asarray(1.0 + gradient_error + batch_tokens / noise)


def precision_share(
    weight_bits: Array, activation_bits: Array, cache_bits: Array, *, scale: ArrayLike = 1.0
) -> Array:
    """Effective over real parameters of training at few bits, over the same at 16 bits.

    `N_eff / N = prod (1 - exp(-P / gamma))` (Kumar et al. 2024, arXiv 2411.04330, equation 4).

    Args:
        weight_bits: (cases,).
        activation_bits: (cases,).
        cache_bits: (cases,) of keys and values.
        scale: (cases,) or one; multiplies all three constants.
    """
    share = np.ones(())
    bits = (weight_bits, activation_bits, cache_bits)
    for constant, given in zip(PRECISION.values(), bits, strict=True):
        gamma = constant.value * np.asarray(scale)
        share = share * np.expm1(-given / gamma) / np.expm1(-REFERENCE_BITS / gamma)
    return np.asarray(share)


def coding_error(
    workers: ArrayLike, chunks_per_worker: ArrayLike, copies: ArrayLike, failure: ArrayLike
) -> Array:
    """Extra variance of a gradient that dead or slow workers leave parts out of.

    Composes `outlast.coding.cost`: chunks that all their holders fail to compute, and the error of
    the rescaled sum of the others.

    Args:
        workers: (cases,) ranks.
        chunks_per_worker: (cases,) of one step.
        copies: (cases,) holders of each chunk; 1 without a code.
        failure: (cases,) probability that a rank misses a step, independently.

    Raises:
        PlanError: Where nothing is left of the gradient.
        CodingError: For settings out of range.
    """
    rows = np.broadcast_arrays(*np.atleast_1d(workers, chunks_per_worker, copies, failure))
    table = np.stack([np.asarray(row, dtype=float) for row in rows], axis=-1)
    settings, places = np.unique(table, axis=0, return_inverse=True)
    errors = []
    for ranks, chunks, held, probability in settings:
        lost = lost_chunks(int(ranks), int(chunks), int(held), float(probability))
        errors.append(dropped_error(1.0 - lost / (ranks * chunks)))
    if not np.isfinite(errors).all():
        raise PlanError(
            "failure = 1: every rank misses every step and no gradient is left; give less"
        )
    return np.asarray(errors, dtype=float)[places.reshape(-1)]


_LARGEST = 1e30


_POSITIVE = ("parameters", "tokens", "unique_tokens", "batch_tokens")


_BITS = ("weight_bits", "activation_bits", "cache_bits")


_SHARES = ("rank_share", "rank_share_low", "rank_share_high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Fields have shape (cases,), or (1,) where all cases agree: they broadcast.

    Attributes:
        parameters: Of the dense model, N; of a mixture of experts those that a token goes through.
        tokens: That are trained on, D, repeated ones counted each time.
        batch_tokens: Of one optimizer step.
        unique_tokens: Different ones; infinite where nothing repeats.
        weight_bits: Of weights in matrix products.
        activation_bits: Of activations in matrix products.
        cache_bits: Of keys and values.
        rank_share: Effective parameters over `parameters` of a model with structured layers.
        rank_share_low: By the worst of what was observed.
        rank_share_high: By the best.
        rank_known: 1 where the layers' form and size were observed, else 0.
        gradient_error: Extra variance of a gradient over that of the exact one.
        mixture: 1 for a mixture of experts, which the laws were not fitted to.
    """

    parameters: Array
    tokens: Array
    batch_tokens: Array
    unique_tokens: Array
    weight_bits: Array
    activation_bits: Array
    cache_bits: Array
    rank_share: Array
    rank_share_low: Array
    rank_share_high: Array
    rank_known: Array
    gradient_error: Array
    mixture: Array

    def __post_init__(self) -> None:
        for name in (*_POSITIVE, *_BITS, *_SHARES):
            _in_range(name, getattr(self, name), low=0.0, open_low=True)
        for name in ("gradient_error", "rank_known", "mixture"):
            _in_range(name, getattr(self, name), low=0.0, open_low=False)
        if not np.all(
            (self.rank_share_low <= self.rank_share) & (self.rank_share <= self.rank_share_high)
        ):
            raise PlanError("rank_share is not between rank_share_low and rank_share_high")
        np.broadcast_shapes(*(getattr(self, field.name).shape for field in fields(self)))

    def __len__(self) -> int:
        return int(max(getattr(self, field.name).size for field in fields(self)))


def _in_range(name: str, values: Array, *, low: float, open_low: bool) -> None:
    fine = (values > low if open_low else values >= low) & ~np.isnan(values)
    if name != "unique_tokens":
        fine &= values <= _LARGEST
    if not np.all(fine):
        wrong = values[~fine].flat[0]
        least = f"above {low:g}" if open_low else f"of at least {low:g}"
        raise PlanError(f"{name} = {wrong:g} of a run: give a finite number {least}")


@dataclass(frozen=True, slots=True)
class RankShare:
    """Parameters and loss that structured layers leave of a model, by `outlast.tensorize.quality`.

    Attributes:
        low: (cases,) effective over dense parameters by the worst observation.
        middle: (cases,) geometric mean of what was observed.
        high: (cases,) by the best.
        known: (cases,) 1 where form, share and size were observed, else 0.
        source: Where the observations come from.
    """

    low: Array
    middle: Array
    high: Array
    known: Array
    source: str


def runs(
    parameters: ArrayLike,
    tokens: ArrayLike,
    batch_tokens: ArrayLike,
    *,
    unique_tokens: ArrayLike = np.inf,
    precision: Precision | NDArray[np.str_] = "bf16",
    rank: RankShare | None = None,
    gradient_error: ArrayLike = 0.0,
    mixture: ArrayLike = 0.0,
) -> Runs:
    """Runs from numbers and arrays.

    Args:
        parameters: (cases,) or one.
        tokens: Likewise.
        batch_tokens: Likewise.
        unique_tokens: Likewise; infinite where nothing repeats.
        precision: Of the matrix products, by `Configuration.precision`, one or (cases,).
        rank: Of structured layers; None for a dense model.
        gradient_error: See `effects.coding_error`.
        mixture: 1 for a mixture of experts.

    Raises:
        PlanError: For a number out of range, or a precision whose bits are not known.
    """
    names = np.atleast_1d(np.asarray(precision))
    known, places = np.unique(names, return_inverse=True)
    for name in known:
        if str(name) not in BITS:
            raise PlanError(f"precision = {str(name)!r} is none of {', '.join(BITS)}")
    bits = np.array([BITS[str(name)] for name in known])[places.reshape(-1)]
    one = np.ones(1)
    return Runs(
        parameters=_row(parameters),
        tokens=_row(tokens),
        batch_tokens=_row(batch_tokens),
        unique_tokens=_row(unique_tokens),
        weight_bits=bits[:, 0],
        activation_bits=bits[:, 1],
        cache_bits=bits[:, 2],
        rank_share=one if rank is None else rank.middle,
        rank_share_low=one if rank is None else rank.low,
        rank_share_high=one if rank is None else rank.high,
        rank_known=one if rank is None else rank.known,
        gradient_error=_row(gradient_error),
        mixture=_row(mixture),
    )


def rank_share(
    form: str, shares: ArrayLike, dense_parameters: ArrayLike, *, training: Training = "adamw"
) -> RankShare | Unavailable:
    """Effective over dense parameters of models with structured layers.

    Composes `outlast.tensorize.quality.effective_parameters`, once for each pair of share and size.
    The laws of arXiv 2407.09835 and 2406.06248 for low-rank feed-forward layers are no part of it:
    they compare at equal compute, not at equal data.

    Args:
        form: Of the layers, e.g. "low_rank".
        shares: (cases,) parameters of the replaced layers over those of the dense ones.
        dense_parameters: (cases,) of the dense model.
        training: How the factors learn.

    Returns:
        The shares, or why nothing is known of this form.

    Raises:
        TensorizeError: For a share or size out of range.
    """
    pairs = np.broadcast_arrays(_row(shares), _row(dense_parameters))
    settings, places = np.unique(np.stack(pairs, axis=-1), axis=0, return_inverse=True)
    rows = []
    source = ""
    for share, size in settings:
        found = effective_parameters(form, float(share), float(size), training=training)
        if isinstance(found, Unavailable):
            return found
        source = found.source
        rows.append(
            (found.low / size, found.value / size, found.high / size, not found.extrapolated)
        )
    table = np.array(rows, dtype=float)[places.reshape(-1)]
    low, middle, high = table[:, 0], table[:, 1], table[:, 2]
    return RankShare(np.minimum(low, middle), middle, np.maximum(high, middle), table[:, 3], source)


def law_parameters(model: Transformer) -> float:
    """Parameters that a scaling law counts: all, or those a token goes through in a mixture."""
    return float(model.active_parameters if model.experts else model.parameters)


def _row(values: ArrayLike) -> Array:
    return np.atleast_1d(np.asarray(values, dtype=float))


NORMAL_90 = 1.6448536269514722


"""Standard deviations on either side of a normal mean that hold 90 %."""


_SMALL = 0.05


ABSOLUTE = "an absolute loss depends on tokenizer and text: only differences are claimed"


_EFFECTS = texts("loss")


TERMS = tuple(_EFFECTS)


"""Names of the terms of a loss and of a difference."""


_OF_PARAMETERS, _OF_TOKENS = TERMS[:3], TERMS[3:]


UNEQUAL = "trained on different numbers of tokens: no comparison at equal data"


@dataclass(frozen=True, slots=True)
class _Losses:
    """Of runs.

    Attributes:
        terms: (cases,) nats by name, without E.
        gradient: (cases, 5) of the loss by the law's constants.
        shifts: (4, 2, cases) nats more than the best guess when what governs repeats, batch,
            precision and rank is at the lower or the upper end of its range.
        flags: By phrase (cases,) of bool, and the terms that it speaks of.
    """

    terms: Mapping[str, Array]
    gradient: Array
    shifts: Array
    flags: Mapping[str, tuple[NDArray[np.bool_], tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Differences:
    """Of (cases,) runs from their baselines, in nats per token; below 0 the run is better.

    Attributes:
        low: (cases,) lower end of the interval with 90 % coverage.
        middle: (cases,) best guess.
        high: (cases,) upper end.
        terms: (cases,) summands by name of `TERMS`; they add up to `middle`.
        flags: (cases,) of bool by phrase: why a difference is beyond what was calibrated.
        law: That was used.
        run: The runs.
        baseline: What they are compared with.
    """

    low: Array
    middle: Array
    high: Array
    terms: Mapping[str, Array]
    flags: Mapping[str, NDArray[np.bool_]]
    law: ScalingLaw
    run: Runs
    baseline: Runs

    def __len__(self) -> int:
        return self.middle.size

    def interval(self, row: int = 0) -> Interval:
        """The difference of one case, with 90 % coverage."""
        phrases = tuple(phrase for phrase, rows in self.flags.items() if rows[row])
        ends = float(self.low[row]), float(self.middle[row]), float(self.high[row])
        return Interval(*ends, 0.9, phrases)

    def total(self, row: int = 0) -> Total:
        """The difference of one case with its terms, each with formula, values and source."""
        terms = tuple(
            Term(
                name,
                float(values[row]),
                f"run - baseline of {_EFFECTS[name].formula}",
                self._inputs(name, row),
                _constants(name, self.law),
                _EFFECTS[name].source,
            )
            for name, values in self.terms.items()
        )
        figure = self.interval(row)
        total = math.fsum(term.value for term in terms)
        shift = total - figure.middle
        ends = figure.low + shift, total, figure.high + shift
        return Total("nat/token", Interval(*ends, 0.9, figure.extrapolated), terms)

    def _inputs(self, name: str, row: int) -> dict[str, float]:
        found = {}
        for who, runs in (("run", self.run), ("baseline", self.baseline)):
            for field in _EFFECTS[name].inputs:
                values = getattr(runs, field)
                found[f"{field} of the {who}"] = float(values[row if values.size > 1 else 0])
        return found


def loss_differences(run: Runs, baseline: Runs, law: ScalingLaw = CHINCHILLA) -> Differences:
    """Differences in final loss, run less baseline, on the same data.

    The interval adds in quadrature: the law's constants with their covariance, shared by both runs
    (delta method); the ranges of the constants that the effects add, each moved to its ends in both
    runs; and a share of each term for text and tokenizer that are not the law's.

    Args:
        run: (cases,).
        baseline: (cases,) or one.
        law: For parameters and tokens.

    Raises:
        PlanError: For numbers of cases that do not broadcast.
    """
    try:
        np.broadcast_shapes((len(run),), (len(baseline),))
    except ValueError:
        raise PlanError(
            f"{len(run)} runs cannot be compared with {len(baseline)} baselines: give one baseline "
            "or as many as there are runs"
        ) from None
    ours, theirs = _losses(run, law), _losses(baseline, law)
    terms = {name: ours.terms[name] - theirs.terms[name] for name in TERMS}
    middle = np.sum(list(terms.values()), axis=0)
    gradient = ours.gradient - theirs.gradient
    variance = np.einsum("...i,ij,...j->...", gradient, np.asarray(law.covariance), gradient)
    # Each term is uncertain by a share of itself, and terms that cancel are not certain for that.
    other = law.other_data**2 * np.sum([values**2 for values in terms.values()], axis=0)
    lower, upper = _halves(np.maximum(variance, 0.0) + other, ours.shifts - theirs.shifts)
    sizes = np.sum([np.abs(values) for values in terms.values()], axis=0)
    flags = {}
    for phrase, (rows, names) in ours.flags.items():
        # What hardly makes the difference is no reason to doubt it.
        counts = np.any([np.abs(terms[name]) > _SMALL * sizes for name in names], axis=0)
        flags[phrase] = counts & (rows | theirs.flags[phrase][0])
    flags[UNEQUAL] = np.broadcast_to(run.tokens != baseline.tokens, middle.shape)
    ends = middle - lower, middle, middle + upper
    return Differences(*ends, terms, flags, law, run, baseline)


def loss_difference(run: Runs, baseline: Runs, law: ScalingLaw = CHINCHILLA) -> Interval:
    """The difference of one run from one baseline; see `loss_differences`.

    Raises:
        PlanError: For more than one run or baseline.
    """
    if len(run) > 1 or len(baseline) > 1:
        raise PlanError(
            f"loss_difference compares one run with one baseline, not {len(run)} with "
            f"{len(baseline)}: use loss_differences"
        )
    return loss_differences(run, baseline, law).interval()


def absolute_loss(run: Runs, row: int = 0, law: ScalingLaw = CHINCHILLA) -> Interval:
    """The final loss of a run on the law's own data, always flagged: nobody else's loss.

    Args:
        run: (cases,).
        row: Which of them.
        law: For parameters and tokens.
    """
    found = _losses(run, law)
    middle = law.irreducible + float(np.sum([values[row] for values in found.terms.values()]))
    gradient = found.gradient[row]
    variance = np.maximum(gradient @ np.asarray(law.covariance) @ gradient, 0.0)
    lower, upper = (float(half) for half in _halves(variance, found.shifts[:, :, row]))
    phrases = tuple(phrase for phrase, (rows, _) in found.flags.items() if rows[row])
    return Interval(middle - lower, middle, middle + upper, 0.9, (ABSOLUTE, *phrases))


def _losses(run: Runs, law: ScalingLaw) -> _Losses:
    ranked = run.parameters * run.rank_share
    held = _held(run)
    fresh = repeated_tokens(run.tokens, run.unique_tokens)
    batched = fresh / token_factor(run.batch_tokens, run.tokens, np.zeros(1))
    kept = _kept(run)
    of_parameters = [law.parameter_loss(count) for count in (run.parameters, ranked, held)]
    of_tokens = [law.token_loss(count) for count in (run.tokens, fresh, batched, kept)]
    steps = [*_steps(of_parameters), *_steps(of_tokens)]
    rows = (len(run),)
    terms = {name: np.broadcast_to(step, rows) for name, step in zip(TERMS, steps, strict=True)}
    small = (run.parameters <= PRECISION_PARAMETERS) & (run.tokens <= PRECISION_TOKENS)
    precision = PRECISION_LOG_DEVIATION * np.where(small, 1.0, 2.0)
    shifts = np.empty((4, 2, *rows))
    for side, sign in enumerate((-NORMAL_90, NORMAL_90)):
        repeats = math.exp(sign * REPEATS_LOG_DEVIATION)
        critical = math.exp(sign * CRITICAL_LOG_DEVIATION)
        rank = run.rank_share_low if side == 0 else run.rank_share_high
        shifts[0, side] = law.token_loss(_kept(run, repeats=repeats)) - of_tokens[-1]
        shifts[1, side] = law.token_loss(_kept(run, critical=critical)) - of_tokens[-1]
        bits = np.exp(sign * precision)
        shifts[2, side] = law.parameter_loss(_held(run, precision=bits)) - of_parameters[-1]
        ends = law.parameter_loss(held * rank / run.rank_share)
        shifts[3, side] = ends - of_parameters[-1]
    gradient = np.broadcast_to(law.gradient(held, kept), (*rows, 5))
    return _Losses(terms, gradient, shifts, _flags(run, law))


def _held(run: Runs, precision: ArrayLike = 1.0) -> Array:
    """Effective parameters, with the constants of precision multiplied by a factor."""
    bits = (run.weight_bits, run.activation_bits, run.cache_bits)
    share = precision_share(*bits, scale=precision)
    return np.asarray(run.parameters * run.rank_share * share)


def _kept(run: Runs, repeats: float = 1.0, critical: float = 1.0) -> Array:
    """Effective tokens, with R* and the critical batch multiplied by factors."""
    fresh = repeated_tokens(run.tokens, run.unique_tokens, scale=repeats)
    noise = (run.batch_tokens, run.tokens, run.gradient_error)
    return np.asarray(fresh / token_factor(*noise, scale=critical))


def _halves(variance: Array, shifts: Array) -> tuple[Array, Array]:
    """Half widths below and above of (cases,) variance and (4, 2, cases) shifts."""
    base = NORMAL_90**2 * variance
    below, above = np.minimum(shifts.min(axis=1), 0.0), np.maximum(shifts.max(axis=1), 0.0)
    lower = np.sqrt(base + np.sum(below**2, axis=0))
    return lower, np.sqrt(base + np.sum(above**2, axis=0))


def _steps(values: list[Array]) -> list[Array]:
    """The first, and by how much each is more than the one before."""
    return [values[0], *(after - before for before, after in itertools.pairwise(values))]


def _flags(run: Runs, law: ScalingLaw) -> dict[str, tuple[NDArray[np.bool_], tuple[str, ...]]]:
    reduced = np.minimum(run.weight_bits, run.activation_bits) < REFERENCE_BITS
    large = (run.parameters > PRECISION_PARAMETERS) | (run.tokens > PRECISION_TOKENS)
    batch = _OF_TOKENS[2:]
    found = {
        f"parameters outside the law's {law.parameters[0]:.2g} to {law.parameters[1]:.2g}": (
            _outside(run.parameters, law.parameters),
            _OF_PARAMETERS,
        ),
        f"tokens outside the law's {law.tokens[0]:.2g} to {law.tokens[1]:.2g}": (
            _outside(run.tokens, law.tokens),
            _OF_TOKENS,
        ),
        "more than 16 epochs, where loss may rise again": (
            run.tokens > MOST_EPOCHS * run.unique_tokens,
            _OF_TOKENS[1:2],
        ),
        "critical batch measured at 1.7e9 to 2.4e10 tokens": (
            _outside(run.tokens, CRITICAL_TOKENS),
            batch,
        ),
        "precision measured up to 1.7e9 parameters and 2.6e10 tokens": (
            reduced & large,
            ("precision",),
        ),
        "structured layers of a share or size that nobody published": (
            run.rank_known < 1.0,
            ("rank",),
        ),
        "scaling laws of dense models applied to a mixture of experts": (run.mixture > 0.0, TERMS),
    }
    rows = (len(run),)
    return {name: (np.broadcast_to(where, rows), of) for name, (where, of) in found.items()}


def _outside(values: Array, ends: tuple[float, float]) -> NDArray[np.bool_]:
    return np.asarray((values < ends[0]) | (values > ends[1]))


def _constants(name: str, law: ScalingLaw) -> dict[str, Source]:
    of_parameters = ("A", "alpha") if name in ("parameters", "rank", "precision") else ()
    known = {key: law.sources[key] for key in of_parameters or ("B", "beta")}
    if name == "precision":
        known |= {f"gamma of {part}": source for part, source in PRECISION.items()}
    if name == "repeated tokens":
        known["R*"] = REPEATS
    if name in ("batch", "gradient error"):
        known |= {"c": CRITICAL_BATCH, "k": CRITICAL_EXPONENT}
        known["overhead"] = CRITICAL_OVERHEAD
    return known


MOST_MISSED = 0.99


"""Of the steps that a rank misses: with more, hardly a step has a gradient and no run ends."""


def quality(context: Context, block: Block, step: Step) -> Differences:
    """The loss of candidates less that of the baseline, on as many tokens.

    The baseline is the dense model in the baseline's precision, trained on tokens none of which
    repeats, with exact gradients, and with batches of at most the critical size. So a run differs
    from it by repeated tokens, batches above the critical one, structured layers, fewer bits, and
    chunks that a code leaves out; a plain run by nothing.
    """
    model, layouts = context.model, block.layouts
    count = len(layouts)
    kinds = np.where(layouts.quantized > 0.0, "fp8", np.where(layouts.half > 0.0, "bf16", "fp32"))
    parameters = law_parameters(model)
    tokens = context.tokens
    batch = np.broadcast_to(layouts.batch * layouts.sequence, (count,))[block.layout]
    critical = float(critical_batch_tokens(np.array([tokens]))[0])
    mixture = float(bool(model.experts))
    run = runs(
        parameters,
        tokens,
        batch,
        unique_tokens=min(context.unique_tokens, tokens),
        precision=np.broadcast_to(kinds, (count,))[block.layout],
        rank=_ranks(context, block, parameters),
        gradient_error=_gradient_error(context, block, step),
        mixture=mixture,
    )
    baseline = runs(
        parameters,
        tokens,
        np.minimum(batch, critical),
        unique_tokens=tokens,
        precision=context.baseline.precision,
        mixture=mixture,
    )
    return loss_differences(run, baseline)


def _gradient_error(context: Context, block: Block, step: Step) -> Array:
    """(candidates,) extra variance of the gradients of codes that go on without lost chunks.

    A rank misses a step when one of the devices that hold its replica's parts fails in it. Codes
    that compute lost chunks again are exact, and so is a run without a code.
    """
    error = np.zeros(len(block))
    copies = block.by_setting([float(setting.coding_copies) for setting in block.settings])
    if not context.commits_without or copies.max() == 1.0:
        return error
    layouts, count = block.layouts, len(block.layouts)
    data, devices, chunks = (
        np.broadcast_to(values, (count,))[block.layout]
        for values in (layouts.data, layouts.devices, layouts.micro_batches)
    )
    # Wrong numbers do not take a rank away.
    loud = [cause for cause in context.cluster.failures if not cause.silent]
    per_second = sum(cause.per_node_day for cause in loud) / DAY_SECONDS
    nodes = np.ceil(devices / data / context.cluster.devices_per_node)
    missed = np.minimum(-np.expm1(-per_second * nodes * step.seconds), MOST_MISSED)
    coded = (copies > 1.0) & (missed > 0.0)
    if coded.any():
        held = np.minimum(copies, data)
        error[coded] = coding_error(data[coded], chunks[coded], held[coded], missed[coded])
    return error


def _ranks(context: Context, block: Block, parameters: float) -> RankShare | None:
    """(candidates,) effective parameters of the forms; None where all layers are dense."""
    if all(setting.tensorize_form == "dense" for setting in block.settings):
        return None
    rows: list[Sequence[float]] = []
    source = ""
    for setting in block.settings:
        if setting.tensorize_form == "dense":
            rows.append((1.0, 1.0, 1.0, 1.0))
            continue
        # Layers with more parameters than dense ones are worth no more than these.
        share = min(form_of(context.model, setting).share, 1.0)
        found = rank_share(setting.tensorize_form, share, parameters)
        if isinstance(found, Unavailable):
            # Nothing was observed of the form: the share of the parameters that stay, and less.
            rows.append((0.5 * share, share, 1.0, 0.0))
            continue
        source = found.source
        rows.append((found.low[0], found.middle[0], found.high[0], found.known[0]))
    table = np.array(rows, dtype=np.float64)[block.setting]
    return RankShare(table[:, 0], table[:, 1], table[:, 2], table[:, 3], source)
