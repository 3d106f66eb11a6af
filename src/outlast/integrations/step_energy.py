"""What a training loop of any framework logs about energy: a few numbers per interval of steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outlast.energy.meter import EnergyMeter
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.energy.sources.protocol import Source
    from outlast.energy.window import Reading


class StepEnergy:
    """Energy since the start of a training, and what of it the last steps took.

    Whatever a meter raises while it is looked for or read becomes a reason: training goes on.

    Args:
        sources: What is read; all meters of this machine by default.
        step: Optimizer steps done before the start.

    Attributes:
        meter: The open meter.
        joules: Energy until the last `take`, or of the whole training once it is closed.

    Raises:
        EnergyError: Two sources have one name.
    """

    def __init__(self, sources: Sequence[Source] | None, step: int) -> None:
        self.meter = EnergyMeter("training", sources)
        self.meter.__enter__()
        self.joules: Reading = Unavailable("nothing was read yet")
        self._step = step
        self._joules = 0.0
        self._since = time.perf_counter()

    def take(self, step: int) -> dict[str, float]:
        """Figures since the last call that gave some; none where nothing is known, and never 0.

        Args:
            step: Optimizer steps done so far.
        """
        self.joules = total = self._total()
        now = time.perf_counter()
        # A counter that did not move yet has its joules in the next figure, with these steps.
        if isinstance(total, Unavailable) or step <= self._step or total.joules <= self._joules:
            return {}
        joules = total.joules - self._joules
        found = {
            "joules": total.joules,
            "joules_per_step": joules / (step - self._step),
            "watts": joules / max(now - self._since, 1e-9),
        }
        self._joules, self._step, self._since = total.joules, step, now
        return found

    def warning(self) -> str | None:
        """What to tell the user at the start where nothing can be read; None otherwise."""
        if self.meter.sources:
            return None
        reasons = "; ".join(name.reason for name in self.meter.missing)
        return f"energy is unavailable: {reasons or 'no source is given'}"

    def close(self) -> Reading:
        """Stop to measure.

        Returns:
            Energy of the training.
        """
        self.meter.__exit__()
        self.joules = self._total()
        return self.joules

    def _total(self) -> Reading:
        # A node's meter stands for all that is in the node.
        nodes = any(source.part == "node" for source in self.meter.sources)
        return self.meter.total("node" if nodes else None)
