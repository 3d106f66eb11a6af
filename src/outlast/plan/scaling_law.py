"""Loss by a scaling law, with the covariance of its constants.

`L = E + A / N^alpha + B / D^beta` (Hoffmann et al. 2022, arXiv 2203.15556, approach 3) for N
parameters and D tokens, in nats per token. Its constants depend on the tokenizer and on the text,
so only differences are worth anything, and an interval needs the constants' covariance: A and
alpha move together almost exactly, so standard errors alone would give intervals that are many
times too wide.

Each effect is a number by which a scaling law's N or D shrinks. Constants that could not be
compared with the paper itself say "unverified" or "as quoted by others".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.coding.cost import dropped_error, lost_chunks
from outlast.errors import PlanError
from outlast.plan.estimate import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike

    from outlast.plan.batch import Array


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
