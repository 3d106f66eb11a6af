"""Loss spikes: jumps that a run does not come back from at once, told from noise.

A loss is *high* when it is above every one of the `window` losses before it, and above their median
by `threshold` robust deviations (1.4826 times the median absolute deviation). A spike is `patience`
high losses in a row, or one that is not a number.

How often that happens by chance follows from the first condition alone. Let the losses be a falling
trend plus noise whose order carries no information (independent, or more generally exchangeable).
That the last p of n + p are the p largest has probability 1 / C(n + p, p) without a trend, for any
distribution however heavy its tails, and a falling trend makes it less likely. With the default
window of 128 and patience of 3 this is once in 366145 steps at worst; the second condition makes it
far rarer for noise with tails like a normal one's. The rate is that of a first alarm: what an alarm
keeps out of the window makes the next one likelier. Noise in waves longer than `patience` steps (an
order of data by difficulty, a moving average of losses) is not exchangeable, and such waves count
as spikes where they are high.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from outlast.errors import TensorizeError

_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation of normal numbers."""

_FLOOR = 1e-3
"""Least deviation that counts, as a share of the median: losses without noise still wobble."""


@dataclass(frozen=True)
class Spike:
    """Spike of the loss.

    Attributes:
        kind: ``jump``, or ``not finite`` for NaN and infinities.
        step: Which of the losses shown to the detector was the first high one, counted from 0.
        loss: The last loss.
        usual: Median of the losses before; NaN where there were none.
        deviations: How far the last loss is above it; infinite where it is not finite.
    """

    kind: Literal["jump", "not finite"]
    step: int
    loss: float
    usual: float
    deviations: float


class SpikeDetector:
    """Watches a loss, one number per step.

    A spike is reported once, when it is certain, and if it continues with losses that are not
    finite, once more for the first of these. The losses before it stay the measure until a loss is
    no longer high, which ends it. A loss that stays high for a whole window is the new usual one.

    Args:
        window: Losses that are looked back on; nothing but what is not finite is reported before
            there are as many.
        threshold: Robust deviations above the median that make a loss high.
        patience: High losses in a row that make a spike.

    Attributes:
        spiking: Whether the last loss belongs to a spike that was reported.

    Raises:
        TensorizeError: A window below 8, a patience below 1 or a threshold below 0.
    """

    def __init__(self, window: int = 128, threshold: float = 5.0, patience: int = 3) -> None:
        if window < 8 or patience < 1 or not threshold >= 0.0:
            raise TensorizeError(
                f"window = {window}, threshold = {threshold} and patience = {patience} of a spike "
                "detector must be at least 8, 0 and 1"
            )
        self.window = window
        self.threshold = threshold
        self.patience = patience
        self.spiking = False
        self._usual: deque[float] = deque(maxlen=window)
        self._high: list[float] = []
        self._seen = 0
        self._finite = True

    def observe(self, loss: float) -> Spike | None:
        """Take the next loss.

        Args:
            loss: Of one step, the mean over its tokens; any scale and sign.

        Returns:
            The spike that this loss has made certain, or None.
        """
        step, self._seen = self._seen, self._seen + 1
        if not math.isfinite(loss):
            first, self._finite = self._finite, False
            usual = statistics.median(self._usual) if self._usual else math.nan
            self.spiking = True
            return Spike("not finite", step, loss, usual, math.inf) if first else None
        deviations = self._deviations(loss)
        if not deviations:
            self._usual.extend([*([] if self.spiking else self._high), loss])
            self._high = []
            self._end()
            return None
        self._high.append(loss)
        if self.spiking:
            if len(self._high) >= self.window:
                self._usual.extend(self._high)
                self._high = []
                self._end()
            return None
        if len(self._high) < self.patience:
            return None
        self.spiking = True
        usual = statistics.median(self._usual)
        return Spike("jump", step + 1 - self.patience, loss, usual, deviations)

    def _end(self) -> None:
        self.spiking, self._finite = False, True

    def _deviations(self, loss: float) -> float:
        """Return a high loss's robust deviations above the usual; 0 for one that is not high."""
        if len(self._usual) < self.window or loss <= max(self._usual):
            return 0.0
        median = statistics.median(self._usual)
        spread = _NORMAL * statistics.median(abs(usual - median) for usual in self._usual)
        deviations = (loss - median) / max(spread, _FLOOR * abs(median), 1e-30)
        return deviations if deviations > self.threshold else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the losses seen so far, as plain numbers and lists."""
        return {
            "usual": list(self._usual),
            "high": list(self._high),
            "seen": self._seen,
            "finite": self._finite,
            "spiking": self.spiking,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; of a longer window the newest losses are kept."""
        self._usual = deque(state["usual"], maxlen=self.window)
        self._high = list(state["high"])
        self._seen = int(state["seen"])
        self._finite = bool(state["finite"])
        self.spiking = bool(state["spiking"])
