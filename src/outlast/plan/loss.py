"""Loss of candidates against a baseline, by scaling laws, with intervals and terms.

The loss of a run is that of a law plus penalties, none of them negative at 16 bits and below:

    L = E + A N^-a + rank + precision + B D^-b + repeats + batch + gradient error

and the difference of two runs is the sum of the differences of these terms. What both share
cancels, in the figure as in its interval: the constants' errors are the same in both.

`L = E + A / N^alpha + B / D^beta` (Hoffmann et al. 2022, arXiv 2203.15556, approach 3) for N
parameters and D tokens, in nats per token. Its constants depend on the tokenizer and on the text,
so only differences are worth anything, and an interval needs the constants' covariance: A and
alpha move together almost exactly, so standard errors alone would give intervals that are many
times too wide.

Each effect is a number by which the law's N or D shrinks. Constants are in `facts/loss.toml`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.coding.cost import dropped_error, lost_chunks
from outlast.hardware.figure import Unavailable
from outlast.plan.batch import once_each, texts
from outlast.plan.estimate import NORMAL_90, Interval, Source, Term, Total
from outlast.plan.facts import facts
from outlast.plan.mechanisms import form_of
from outlast.plan.reliability import DAY_SECONDS
from outlast.tensorize.cost import effective_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

    from outlast.plan.batch import Array
    from outlast.plan.configuration import Precision
    from outlast.plan.mechanisms import Step
    from outlast.plan.model import Context
    from outlast.plan.space import Block
    from outlast.plan.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLaw:
    """A fitted law.

    Attributes:
        parameter_scale: A, in nats at N = 1.
        token_scale: B, in nats at D = 1.
        irreducible: E, in nats.
        parameter_exponent: alpha.
        token_exponent: beta.
        covariance: (5, 5) of log A, log B, log E, alpha and beta.
        parameters: Fewest and most parameters of the models that it was fitted to.
        tokens: Fewest and most tokens.
        other_data: Relative standard deviation of a difference on other text or with another
            tokenizer, which the covariance does not know of.
        source: Where constants and covariance come from.
    """

    parameter_scale: float
    token_scale: float
    irreducible: float
    parameter_exponent: float
    token_exponent: float
    covariance: Sequence[Sequence[float]]
    parameters: Sequence[float]
    tokens: Sequence[float]
    other_data: float
    source: str

    @property
    def sources(self) -> Mapping[str, Source]:
        """The constants as a reader of an explanation sees them."""
        scales = self.parameter_scale, self.token_scale, self.irreducible
        values = (*scales, self.parameter_exponent, self.token_exponent)
        named = zip(("A", "B", "E", "alpha", "beta"), values, strict=True)
        return {
            name: Source(value, "nat" if name.isupper() else "1", "published", self.source)
            for name, value in named
        }

    def parameter_loss(self, parameters: Array) -> Array:
        """`A / N^alpha` of (cases,) parameters, in nats."""
        return np.asarray(self.parameter_scale * parameters**-self.parameter_exponent)

    def token_loss(self, tokens: Array) -> Array:
        """`B / D^beta` of (cases,) tokens, in nats."""
        return np.asarray(self.token_scale * tokens**-self.token_exponent)

    def gradient(self, parameters: Array, tokens: Array) -> Array:
        """(cases, 5) of the loss by log A, log B, log E, alpha and beta."""
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


CHINCHILLA = ScalingLaw(**facts("loss")["law"])
"""A replication of Chinchilla whose intervals match its data."""
_SOURCES = {name: Source(**table) for name, table in facts("loss")["constants"].items()}
REPEATS = _SOURCES["repeats"]
REPEATS_LOG_DEVIATION = 0.2
"""Own prior of ln R*: no standard error is published."""
MOST_EPOCHS = 16.0
"""Beyond about 16 epochs the law's authors saw loss rise, which their formula cannot show."""
CRITICAL_BATCH = _SOURCES["critical_batch"]
CRITICAL_EXPONENT = _SOURCES["critical_exponent"]
CRITICAL_OVERHEAD = _SOURCES["critical_overhead"]
CRITICAL_SEQUENCE = 512.0
CRITICAL_DATA = 1e6
CRITICAL_LOG_DEVIATION = 0.3
"""Own prior of ln B_noise. Bergsma et al. 2025 (arXiv 2505.13738, unverified) find 10 % less at 6e9
tokens and 13 % less at 1e12."""
CRITICAL_TOKENS = 1.7e9, 24e9
"""20 for each parameter of the models that the critical batch was measured on, 85M to 1.2B."""
PRECISION = {part: _SOURCES[part] for part in ("weights", "activations", "cache")}
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


def coding_error(workers: Array, chunks_per_worker: Array, copies: Array, failure: Array) -> Array:
    """Extra variance of a gradient that dead or slow workers leave parts out of.

    Composes `outlast.coding.cost`: chunks that all their holders fail to compute, and the error of
    the rescaled sum of the others.

    Args:
        workers: (cases,) ranks.
        chunks_per_worker: (cases,) of one step.
        copies: (cases,) holders of each chunk; 1 without a code.
        failure: (cases,) probability below 1 that a rank misses a step, independently.

    Raises:
        CodingError: For settings out of range.
    """

    def error(ranks: float, chunks: float, held: float, probability: float) -> float:
        lost = lost_chunks(int(ranks), int(chunks), int(held), probability)
        return dropped_error(1.0 - lost / (ranks * chunks))

    rows = np.broadcast_arrays(workers, chunks_per_worker, copies, failure)
    return once_each(error, *(row.ravel() for row in rows))


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

    def __len__(self) -> int:
        return int(max(getattr(self, name).size for name in self.__slots__))

    def effective_parameters(self, precision: ArrayLike = 1.0) -> Array:
        """(cases,), with the constants of precision multiplied by a factor."""
        bits = (self.weight_bits, self.activation_bits, self.cache_bits)
        share = precision_share(*bits, scale=precision)
        return np.asarray(self.parameters * self.rank_share * share)

    def effective_tokens(self, repeats: float = 1.0, critical: float = 1.0) -> Array:
        """(cases,), with R* and the critical batch multiplied by factors."""
        fresh = repeated_tokens(self.tokens, self.unique_tokens, scale=repeats)
        noise = (self.batch_tokens, self.tokens, self.gradient_error)
        return np.asarray(fresh / token_factor(*noise, scale=critical))


def runs(
    parameters: ArrayLike,
    tokens: ArrayLike,
    batch_tokens: ArrayLike,
    *,
    unique_tokens: ArrayLike = np.inf,
    precision: Precision | NDArray[np.str_] = "bf16",
    rank: Array | None = None,
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
        rank: (cases, 4) of structured layers, as `rank_share`; None for a dense model.
        gradient_error: See `coding_error`.
        mixture: 1 for a mixture of experts.
    """

    def row(values: ArrayLike) -> Array:
        return np.atleast_1d(np.asarray(values, dtype=float))

    bits = np.array([BITS[str(name)] for name in np.atleast_1d(np.asarray(precision))])
    low, middle, high, known = np.ones((4, 1)) if rank is None else rank.T
    return Runs(
        parameters=row(parameters),
        tokens=row(tokens),
        batch_tokens=row(batch_tokens),
        unique_tokens=row(unique_tokens),
        weight_bits=bits[:, 0],
        activation_bits=bits[:, 1],
        cache_bits=bits[:, 2],
        rank_share=middle,
        rank_share_low=low,
        rank_share_high=high,
        rank_known=known,
        gradient_error=row(gradient_error),
        mixture=row(mixture),
    )


def rank_share(
    form: str, share: float, dense_parameters: float
) -> tuple[float, float, float, float] | Unavailable:
    """Effective over dense parameters of a model with structured layers.

    Composes `outlast.tensorize.cost.effective_parameters`. The laws of arXiv 2407.09835 and
    2406.06248 for low-rank feed-forward layers are no part of it: they compare at equal compute,
    not at equal data.

    Args:
        form: Of the layers, e.g. "low_rank".
        share: Parameters of the replaced layers over those of the dense ones.
        dense_parameters: Of the dense model.

    Returns:
        The share by the worst observation, the geometric mean of what was observed, the share by
        the best, and 1 where form, share and size were observed, else 0; or why nothing is known of
        this form.

    Raises:
        TensorizeError: For a share or size out of range.
    """
    found = effective_parameters(form, share, dense_parameters, training="adamw")
    if isinstance(found, Unavailable):
        return found
    low, middle, high = (value / dense_parameters for value in (found.low, found.value, found.high))
    return min(low, middle), middle, max(high, middle), float(not found.extrapolated)


def law_parameters(model: Transformer) -> float:
    """Parameters that a scaling law counts: all, or those a token goes through in a mixture."""
    return float(model.active_parameters if model.experts else model.parameters)


_SMALL = 0.05
_EFFECTS = texts("loss")
TERMS = tuple(_EFFECTS)
"""Names of the terms of a loss and of a difference."""
_OF_PARAMETERS, _OF_TOKENS = TERMS[:3], TERMS[3:]
UNEQUAL = "trained on different numbers of tokens: no comparison at equal data"


@dataclass(frozen=True, slots=True)
class Differences:
    """Of (cases,) runs from their baselines, in nats per token; below 0 the run is better.

    Attributes:
        low: (cases,) lower end of the interval with 90 % coverage.
        middle: (cases,) best guess.
        high: (cases,) upper end.
        terms: (cases,) summands by name of `TERMS`; they add up to `middle`.
        flags: (cases,) of bool by phrase: why a difference is beyond what was calibrated.
        run: The runs.
        baseline: What they are compared with.
    """

    low: Array
    middle: Array
    high: Array
    terms: Mapping[str, Array]
    flags: Mapping[str, NDArray[np.bool_]]
    run: Runs
    baseline: Runs

    def total(self, row: int = 0) -> Total:
        """The difference of one case with its terms, each with formula, values and source."""
        terms = tuple(
            Term(
                name,
                float(values[row]),
                f"run - baseline of {_EFFECTS[name].formula}",
                {
                    f"{field} of the {who}": float(given[row if given.size > 1 else 0])
                    for who, runs in (("run", self.run), ("baseline", self.baseline))
                    for field in _EFFECTS[name].inputs
                    for given in [getattr(runs, field)]
                },
                _constants(name),
                _EFFECTS[name].source,
            )
            for name, values in self.terms.items()
        )
        total = math.fsum(term.value for term in terms)
        shift = total - float(self.middle[row])
        low, high = float(self.low[row]) + shift, float(self.high[row]) + shift
        phrases = tuple(phrase for phrase, rows in self.flags.items() if rows[row])
        return Total("nat/token", Interval(low, total, high, 0.9, phrases), terms)


def loss_differences(run: Runs, baseline: Runs) -> Differences:
    """Differences in final loss, run less baseline, on the same data.

    The interval adds in quadrature: the law's constants with their covariance, shared by both runs
    (delta method); the ranges of the constants that the effects add, each moved to its ends in both
    runs; and a share of each term for text and tokenizer that are not the law's.

    Args:
        run: (cases,).
        baseline: (cases,) or one.
    """
    (own, slope, moved), (their, their_slope, their_moved) = _losses(run), _losses(baseline)
    terms = {name: own[name] - their[name] for name in TERMS}
    middle = np.sum(list(terms.values()), axis=0)
    gradient, shifts = slope - their_slope, moved - their_moved
    covariance = np.asarray(CHINCHILLA.covariance)
    variance = np.einsum("...i,ij,...j->...", gradient, covariance, gradient)
    # Each term is uncertain by a share of itself, and terms that cancel are not certain for that.
    other = CHINCHILLA.other_data**2 * np.sum([values**2 for values in terms.values()], axis=0)
    base = NORMAL_90**2 * (np.maximum(variance, 0.0) + other)
    below, above = np.minimum(shifts.min(axis=1), 0.0), np.maximum(shifts.max(axis=1), 0.0)
    lower, upper = (np.sqrt(base + np.sum(shift**2, axis=0)) for shift in (below, above))
    sizes = np.sum([np.abs(values) for values in terms.values()], axis=0)
    flags, doubts = {}, _flags(baseline)
    for phrase, (rows, names) in _flags(run).items():
        # What hardly makes the difference is no reason to doubt it.
        counts = np.any([np.abs(terms[name]) > _SMALL * sizes for name in names], axis=0)
        flags[phrase] = counts & (rows | doubts[phrase][0])
    flags[UNEQUAL] = np.broadcast_to(run.tokens != baseline.tokens, middle.shape)
    return Differences(middle - lower, middle, middle + upper, terms, flags, run, baseline)


def _losses(run: Runs) -> tuple[Mapping[str, Array], Array, Array]:
    """Losses of runs, and how sure they are.

    Returns:
        (cases,) nats of each of `TERMS`, without E; (cases, 5) gradient of the loss by the law's
        constants; and (4, 2, cases) nats more than the best guess when what governs repeats, batch,
        precision and rank is at the lower or the upper end of its range.
    """
    law = CHINCHILLA
    held, kept = run.effective_parameters(), run.effective_tokens()
    fresh = repeated_tokens(run.tokens, run.unique_tokens)
    batched = fresh / token_factor(run.batch_tokens, run.tokens, np.zeros(1))
    sizes = (run.parameters, run.parameters * run.rank_share, held)
    of_parameters = [law.parameter_loss(count) for count in sizes]
    of_tokens = [law.token_loss(count) for count in (run.tokens, fresh, batched, kept)]
    # Of each kind the first, and by how much each is more than the one before.
    steps = [
        step
        for values in (of_parameters, of_tokens)
        for step in (values[0], *(after - before for before, after in itertools.pairwise(values)))
    ]
    rows = (len(run),)
    terms = {name: np.broadcast_to(step, rows) for name, step in zip(TERMS, steps, strict=True)}
    small = (run.parameters <= PRECISION_PARAMETERS) & (run.tokens <= PRECISION_TOKENS)
    precision = PRECISION_LOG_DEVIATION * np.where(small, 1.0, 2.0)
    shifts = np.empty((4, 2, *rows))
    for side, sign in enumerate((-NORMAL_90, NORMAL_90)):
        repeats = math.exp(sign * REPEATS_LOG_DEVIATION)
        critical = math.exp(sign * CRITICAL_LOG_DEVIATION)
        rank = run.rank_share_low if side == 0 else run.rank_share_high
        tokens = run.effective_tokens(repeats=repeats), run.effective_tokens(critical=critical)
        bits = run.effective_parameters(precision=np.exp(sign * precision))
        shifts[0, side] = law.token_loss(tokens[0]) - of_tokens[-1]
        shifts[1, side] = law.token_loss(tokens[1]) - of_tokens[-1]
        shifts[2, side] = law.parameter_loss(bits) - of_parameters[-1]
        shifts[3, side] = law.parameter_loss(held * rank / run.rank_share) - of_parameters[-1]
    gradient = np.broadcast_to(law.gradient(held, kept), (*rows, 5))
    return terms, gradient, shifts


def _flags(run: Runs) -> dict[str, tuple[NDArray[np.bool_], tuple[str, ...]]]:
    """By phrase, (cases,) of bool, and the terms that it speaks of."""

    def outside(values: Array, ends: Sequence[float]) -> NDArray[np.bool_]:
        return np.asarray((values < ends[0]) | (values > ends[1]))

    reduced = np.minimum(run.weight_bits, run.activation_bits) < REFERENCE_BITS
    large = (run.parameters > PRECISION_PARAMETERS) | (run.tokens > PRECISION_TOKENS)
    sizes, data = CHINCHILLA.parameters, CHINCHILLA.tokens
    found = {
        f"parameters outside the law's {sizes[0]:.2g} to {sizes[1]:.2g}": (
            outside(run.parameters, sizes),
            _OF_PARAMETERS,
        ),
        f"tokens outside the law's {data[0]:.2g} to {data[1]:.2g}": (
            outside(run.tokens, data),
            _OF_TOKENS,
        ),
        "more than 16 epochs, where loss may rise again": (
            run.tokens > MOST_EPOCHS * run.unique_tokens,
            _OF_TOKENS[1:2],
        ),
        "critical batch measured at 1.7e9 to 2.4e10 tokens": (
            outside(run.tokens, CRITICAL_TOKENS),
            _OF_TOKENS[2:],
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


def _constants(name: str) -> dict[str, Source]:
    of_law = ("A", "alpha") if name in ("parameters", "rank", "precision") else ("B", "beta")
    known = {key: CHINCHILLA.sources[key] for key in of_law}
    if name == "precision":
        known |= {f"gamma of {part}": source for part, source in PRECISION.items()}
    if name == "repeated tokens":
        known["R*"] = REPEATS
    if name in ("batch", "gradient error"):
        known |= {"c": CRITICAL_BATCH, "k": CRITICAL_EXPONENT, "overhead": CRITICAL_OVERHEAD}
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
    model, layouts, tokens = context.model, block.layouts, context.tokens
    kinds = np.where(layouts.quantized > 0.0, "fp8", np.where(layouts.half > 0.0, "bf16", "fp32"))
    parameters, mixture = law_parameters(model), float(bool(model.experts))
    batch = block.spread(layouts.batch * layouts.sequence)
    critical = float(critical_batch_tokens(np.array([tokens]))[0])
    run = runs(
        parameters,
        tokens,
        batch,
        unique_tokens=min(context.unique_tokens, tokens),
        precision=block.spread(kinds),
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
    """(candidates,) extra variance of the gradients of codes that continue without lost chunks.

    A rank misses a step when one of the devices that hold its replica's parts fails in it. Codes
    that compute lost chunks again are exact, and so is a run without a code.
    """
    error, layouts = np.zeros(len(block)), block.layouts
    copies = block.by_setting(lambda setting: float(setting.coding_copies))
    if not context.commits_without or copies.max() == 1.0:
        return error
    data, chunks = block.spread(layouts.data), block.spread(layouts.micro_batches)
    # Silent data corruption does not take a rank away.
    loud = [cause for cause in context.cluster.failures if not cause.silent]
    per_second = sum(cause.per_node_day for cause in loud) / DAY_SECONDS
    devices = block.spread(layouts.devices)
    nodes = np.ceil(devices / data / context.cluster.devices_per_node)
    missed = np.minimum(-np.expm1(-per_second * nodes * step.seconds), MOST_MISSED)
    coded = (copies > 1.0) & (missed > 0.0)
    if coded.any():
        held = np.minimum(copies, data)
        error[coded] = coding_error(data[coded], chunks[coded], held[coded], missed[coded])
    return error


def _ranks(context: Context, block: Block, parameters: float) -> Array | None:
    """(candidates, 4) as `rank_share`; None where all layers are dense."""
    rows: list[tuple[float, float, float, float]] = []
    for setting in block.settings:
        # Layers with more parameters than dense ones are worth no more than these.
        share = min(form_of(context.model, setting).share, 1.0)
        if setting.tensorize_form == "dense":
            rows.append((1.0, 1.0, 1.0, 1.0))
            continue
        found = rank_share(setting.tensorize_form, share, parameters)
        # Of a form of which nothing was observed: the share of the parameters that stay, and less.
        unknown = (0.5 * share, share, 1.0, 0.0)
        rows.append(unknown if isinstance(found, Unavailable) else found)
    if all(setting.tensorize_form == "dense" for setting in block.settings):
        return None
    return np.array(rows, dtype=np.float64)[block.setting]
