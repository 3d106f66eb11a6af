"""When the survivors of a step are enough, and what is done where they are not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from outlast.coding.certificate import Decoded, certify, roundoff
from outlast.errors import CodingError, LostChunksError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from outlast.coding.code import Decoder, GradientCode

OnLost = Literal["raise", "rescale"]

_WHOLE = 1e-6


@dataclass(frozen=True)
class Rules:
    """What a user asks of the decoding.

    Attributes:
        on_lost: When the survivors do not decode well enough: ``raise``, or ``rescale``.
        largest_error: The `Certificate.error` that is good enough.
        decoder: See `GradientCode.decode`.

    Raises:
        CodingError: For an `on_lost` that does not exist.
    """

    on_lost: OnLost = "raise"
    largest_error: float = 0.0
    decoder: Decoder = "optimal"

    def __post_init__(self) -> None:
        if self.on_lost not in {"raise", "rescale"}:
            raise CodingError(f'on_lost = {self.on_lost!r} is neither "raise" nor "rescale"')


class Decoding:
    """A code's decoder with the rules of its use.

    Args:
        code: The code.
        rules: What is asked.
        dtypes: Types of the gradients.

    Attributes:
        rules: As given.

    Raises:
        CodingError: For a `largest_error` that admits a gradient of nothing, and for gradients that
            round more than the type that the code was examined for.
    """

    def __init__(self, code: GradientCode, rules: Rules, dtypes: Iterable[torch.dtype]) -> None:
        if not 0 <= rules.largest_error < code.chunks:
            raise CodingError(
                f"largest_error = {rules.largest_error} is not in [0, {code.chunks}): with an "
                f"error of {code.chunks}, the number of chunks, no gradient at all would do"
            )
        self._code = code
        self.rules = rules
        self._dtype = _message_dtype(code, dtypes)
        self._last: tuple[frozenset[int], Decoded] | None = None

    def of(self, survivors: frozenset[int]) -> Decoded:
        """The decoding for these survivors, certified for the gradients' type."""
        if self._last is None or self._last[0] != survivors:
            decoded = self._code.decode(sorted(survivors), self.rules.decoder)
            weights, coefficients = decoded.weights, decoded.coefficients
            worth = certify(coefficients, weights, self._code.message_norms, self._dtype)
            self._last = survivors, Decoded(weights, coefficients, worth)
        return self._last[1]

    def good_enough(self, survivors: frozenset[int]) -> bool:
        """Whether these survivors meet `Rules.largest_error`."""
        return bool(survivors) and self.of(survivors).error <= self.rules.largest_error

    def scale(self, survivors: frozenset[int]) -> float | None:
        """What the rules say to multiply the decoding by; None if it is of no use to them.

        An approximate gradient that is good enough is scaled too where rescaling is asked for.
        """
        certificate = self.of(survivors).certificate
        good_enough = self.good_enough(survivors)
        if good_enough and (certificate.exact or self.rules.on_lost == "raise"):
            return 1.0
        if self.rules.on_lost == "rescale" and math.isfinite(certificate.scale):
            return certificate.scale
        return None

    def lost(self, survivors: frozenset[int], step: int) -> LostChunksError:
        """The error that says what these survivors do not have."""
        decoded = self.of(survivors)
        missing = tuple(np.flatnonzero(np.abs(decoded.coefficients - 1.0) > _WHOLE).tolist())
        return LostChunksError(
            f"step {step} has messages from workers {sorted(survivors)} of {self._code.workers} "
            f"only, in which chunks {list(missing)} are missing or not whole (error "
            f"{decoded.error:.3g}, largest_error = {self.rules.largest_error:g}): "
            'wait longer, take a code with more copies, or set on_lost = "rescale"',
            missing,
        )


def _message_dtype(code: GradientCode, dtypes: Iterable[torch.dtype]) -> str:
    """The gradients' type that rounds most."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    if not names:
        raise CodingError("the model has no parameter that is trained")
    coarsest = max(names, key=roundoff)
    if not code.binary and roundoff(coarsest) > roundoff(code.dtype):
        raise CodingError(
            f"{code.name} was examined for messages in {code.dtype}, but gradients are {coarsest}; "
            f'build it with dtype = "{coarsest}", which refuses a code that loses too much'
        )
    return coarsest
