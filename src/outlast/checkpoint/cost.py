"""Cost of checkpoints and failures: intervals, tiers, bytes and seconds, as pure functions.

The planner composes these.

An interval is the wall time from the start of one save to the start of the next. A save copies the
state of its first moment, blocks training for `blocked_seconds`, then writes for `write_seconds`
while each step takes `1 + slowdown` times as long, and can be restored only when that is over.
Failures are independent and exponential; they also strike during restarts.

With the rate `l`, the overhead `o` and the interval `T`, the next version is durable after `T`
seconds unless a failure strikes; after a failure the run needs restart, restore and `T + b + w - o`
seconds without another, for it repeats the work done since the newest durable copy. Solved exactly,

    E = exp(l Q) (exp(l T) - 1) / l,    Q = restart + restore + w / (1 + slowdown),

which is Daly's complete model (Daly 2006, FGCS 22, eq. 20) with the latency of the write added to
the restart. So the lost work per failure is about `T / 2 + w / (1 + slowdown)`, and the best
interval does not depend on the latency (Vaidya 1997, IEEE Trans. Computers 46(8)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import product

from outlast.errors import CheckpointError

SLOWDOWN_BUDGET = 0.035
"""Share of training time that saves may cost: Mohan et al. 2021 (CheckFreq, FAST '21), abstract."""

NODE_MTBF_SECONDS = 86_400.0 * 1000.0 / 6.50
"""Seconds between failures of an 8-GPU node: 6.50 failures per 1000 node-days on RSC-1, Kokolis et
al. 2025 (HPCA, arXiv 2410.21680). Other clusters differ by several times (2.34 on RSC-2), and small
jobs mostly die of other causes than their nodes."""

LARGEST_EXPONENT = 700.0


def require(name: str, value: float, lowest: float, *, above: bool = False) -> None:
    """Refuses a number that is too small, infinite or no number.

    Raises:
        CheckpointError: Names the argument, its value and what would be right.
    """
    if not math.isfinite(value) or value < lowest or (above and value == lowest):
        bound = f"above {lowest:g}" if above else f"of at least {lowest:g}"
        raise CheckpointError(f"{name} = {value} is wrong: give a finite number {bound}")


@dataclass(frozen=True)
class SaveCost:
    """Seconds that one save costs the training.

    Attributes:
        blocked_seconds: How long training stands still.
        write_seconds: From the end of the block until the version is durable; 0 if synchronous.
        slowdown: How much longer a step takes while the write is under way; 0.02 is 2 %.
    """

    blocked_seconds: float
    write_seconds: float = 0.0
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        for attribute in fields(self):
            require(attribute.name, getattr(self, attribute.name), 0.0)

    @property
    def durable_seconds(self) -> float:
        """Seconds from the start of the save until it can be restored."""
        return self.blocked_seconds + self.write_seconds

    @property
    def latency_seconds(self) -> float:
        """Seconds of work done while the version is not yet durable."""
        return self.write_seconds / (1.0 + self.slowdown)

    @property
    def overhead_seconds(self) -> float:
        """Seconds by which a save lengthens the run: the block and the slower steps."""
        return self.blocked_seconds + self.write_seconds - self.latency_seconds


@dataclass(frozen=True)
class Failures:
    """Failure rate of a run and the time to recover.

    Attributes:
        per_second: Rate of failures of the whole job.
        restart_seconds: From the failure until the job runs again (detection, queue, start).
        restore_seconds: To load the newest version.
    """

    per_second: float
    restart_seconds: float = 0.0
    restore_seconds: float = 0.0

    def __post_init__(self) -> None:
        for attribute in fields(self):
            require(attribute.name, getattr(self, attribute.name), 0.0)

    @classmethod
    def every(
        cls, mtbf_seconds: float, *, restart_seconds: float = 0.0, restore_seconds: float = 0.0
    ) -> Failures:
        """Failures with a mean time between them of `mtbf_seconds`."""
        require("mtbf_seconds", mtbf_seconds, 0.0, above=True)
        return cls(1.0 / mtbf_seconds, restart_seconds, restore_seconds)

    @property
    def recovery_seconds(self) -> float:
        """Seconds from a failure to the first repeated step, if nothing else fails."""
        return self.restart_seconds + self.restore_seconds


def waste_fraction(interval_seconds: float, save: SaveCost, failures: Failures) -> float:
    """Expected share of the wall time that makes no progress, exact for the module's model.

    `1 - (T - o) / E`, E as in the module's docstring.

    Args:
        interval_seconds: Wall time from save to save, at least `save.durable_seconds`; may be
            infinite.
        save: What a save costs.
        failures: How often the run fails, and its way back.

    Returns:
        A fraction in [0, 1]; to first order `o / T + rate (Q + T / 2)`.

    Raises:
        CheckpointError: When a save would begin before the one before it is durable.
    """
    if interval_seconds == math.inf:
        return 1.0 if failures.per_second > 0.0 else 0.0
    require("interval_seconds", interval_seconds, 0.0)
    if interval_seconds < save.durable_seconds * (1.0 - 1e-9):
        raise CheckpointError(
            f"interval_seconds = {interval_seconds:g} is shorter than one save: "
            f"give at least {save.durable_seconds:g}"
        )
    if interval_seconds == 0.0:
        return -math.expm1(-failures.per_second * failures.recovery_seconds)
    useful = max(0.0, 1.0 - save.overhead_seconds / interval_seconds)
    exposed = failures.per_second * interval_seconds
    delay = failures.per_second * (failures.recovery_seconds + save.latency_seconds)
    if exposed > LARGEST_EXPONENT:
        return 1.0
    stretch = math.expm1(exposed) / exposed if exposed > 0.0 else 1.0
    return 1.0 - useful * math.exp(-delay) / stretch


@dataclass(frozen=True)
class Interval:
    """A chosen interval.

    Attributes:
        seconds: Wall time from save to save; infinite when no failure is expected.
        rule: What decided it: `waste` (least expected waste), `budget` (the saves may not cost
            more), `write` (the save before must be durable) or `longest` (a cap on lost work).
        waste: Its expected waste, a fraction.
    """

    seconds: float
    rule: str
    waste: float


def optimal_interval_seconds(save: SaveCost, failures: Failures) -> float:
    """The interval of the least `waste_fraction`, without bounds: its exact minimum.

    With `y = l T`: `y = l o + 1 - exp(-y)`, that is `T = o + (1 + W(-exp(-1 - l o))) / l` with
    Lambert's W (Daly 2006 expands the same equation). Solved by Newton's method, which converges
    from any positive start, for `y + exp(-y)` is convex and increasing.

    Returns:
        Seconds; infinite when nothing fails, 0 when a save costs nothing.
    """
    if failures.per_second == 0.0:
        return math.inf
    target = failures.per_second * save.overhead_seconds
    if target == 0.0:
        return 0.0
    exposed = target + math.sqrt(2.0 * target)
    for _ in range(60):
        change = (exposed + math.expm1(-exposed) - target) / -math.expm1(-exposed)
        exposed -= change
        if abs(change) <= 1e-12 * exposed:
            break
    return exposed / failures.per_second


def budget_interval_seconds(save: SaveCost, budget: float = SLOWDOWN_BUDGET) -> float:
    """The shortest interval whose overhead is at most `budget` of the training time in it.

    `o / (T - o) <= budget`, the bound of CheckFreq (Mohan et al. 2021) on the run's overhead.
    """
    require("budget", budget, 0.0, above=True)
    return save.overhead_seconds * (1.0 + 1.0 / budget)


def choose_interval(
    save: SaveCost,
    failures: Failures,
    *,
    budget: float = SLOWDOWN_BUDGET,
    longest_seconds: float = math.inf,
) -> Interval:
    """The interval of least waste that keeps the bounds.

    The waste has one minimum, so the nearest allowed interval is the best. Where the bounds
    contradict each other, the budget and the write win over `longest_seconds`.

    Args:
        save: What a save costs.
        failures: How often the run fails, and its way back.
        budget: Largest share of the training time that saves may cost.
        longest_seconds: Longest interval wanted, whatever the failure rate; infinite for none.

    Returns:
        The interval and which rule was binding.
    """
    if not longest_seconds > 0.0:
        raise CheckpointError(
            f"longest_seconds = {longest_seconds} is wrong: give a positive number or infinity"
        )
    seconds, rule = optimal_interval_seconds(save, failures), "waste"
    if longest_seconds < seconds:
        seconds, rule = longest_seconds, "longest"
    floor = budget_interval_seconds(save, budget)
    if floor > seconds:
        seconds, rule = floor, "budget"
    if save.durable_seconds > seconds:
        seconds, rule = save.durable_seconds, "write"
    return Interval(seconds, rule, waste_fraction(seconds, save, failures))


@dataclass(frozen=True)
class TierIntervals:
    """Interval of each of several stores.

    Attributes:
        base_seconds: Wall time between two saves of the tier that saves most often.
        every: For each tier, how many base intervals apart it saves, each a multiple of those of
            the tiers before it; 0 for a tier that is not worth its cost.
        waste: Expected waste, first order.
    """

    base_seconds: float
    every: tuple[int, ...]
    waste: float


def choose_tiers(tiers: list[tuple[SaveCost, Failures]]) -> TierIntervals:
    """Intervals of several tiers, e.g. peer memory, local disk and shared storage.

    First order (Benoit et al. 2017, IEEE Trans. Computers 66(7): the least overhead is
    `sum sqrt(2 rate_i o_i)`; for two levels Di et al. 2016, INRIA RR-8851): the waste is
    `sum o_i / (n_i T) + rate_i (n_i T / 2 + Q_i)`; for given integers `n_i` its minimum has a
    closed form. Of the subsets of tiers, and of the integers next to the real optimum, all are
    tried. A tier that is left out hands its failures to the next one.

    Args:
        tiers: From the cheapest to the safest: what a save costs, and the failures that this tier
            survives and no tier before it does.

    Returns:
        The intervals; one tier alone gets Young's, with `every = (1,)`.
    """
    if not tiers or len(tiers) > 6:
        raise CheckpointError(f"tiers has {len(tiers)} entries: give 1 to 6")
    for index, (save, failures) in enumerate(tiers):
        require(f"tiers[{index}] overhead_seconds", save.overhead_seconds, 0.0, above=True)
        require(f"tiers[{index}] failures per_second", failures.per_second, 0.0, above=True)
    best: TierIntervals | None = None
    for chosen in product((True, False), repeat=len(tiers) - 1):
        used = [index for index, taken in enumerate([*chosen, True]) if taken]
        rates = [
            sum(tiers[index][1].per_second for index in range(before + 1, last + 1))
            for before, last in zip([-1, *used], used, strict=False)
        ]
        saves = [tiers[index][0] for index in used]
        delay = sum(
            rate * (tiers[index][1].recovery_seconds + tiers[index][0].latency_seconds)
            for rate, index in zip(rates, used, strict=True)
        )
        for multiples in _multiples(saves, rates):
            seconds, waste = _tiers_waste(saves, rates, multiples)
            if best is None or waste + delay < best.waste:
                every = dict(zip(used, multiples, strict=True))
                best = TierIntervals(
                    seconds, tuple(every.get(i, 0) for i in range(len(tiers))), waste + delay
                )
    assert best is not None
    return best


def _multiples(saves: list[SaveCost], rates: list[float]) -> list[tuple[int, ...]]:
    """Nested integers around the real optimum `n_i = sqrt(o_i rate_1 / (rate_i o_1))`."""
    candidates: list[tuple[int, ...]] = [(1,)]
    for save, rate in zip(saves[1:], rates[1:], strict=True):
        first = saves[0].overhead_seconds
        target = math.sqrt(save.overhead_seconds * rates[0] / (rate * first))
        extended: list[tuple[int, ...]] = []
        for candidate in candidates:
            factor = max(1, math.floor(target / candidate[-1]))
            extended += [(*candidate, candidate[-1] * f) for f in (factor, factor + 1)]
        candidates = extended
    return candidates


def _tiers_waste(
    saves: list[SaveCost], rates: list[float], multiples: tuple[int, ...]
) -> tuple[float, float]:
    """The best base interval for these multiples, and its waste without the recoveries."""
    overhead = sum(save.overhead_seconds / n for save, n in zip(saves, multiples, strict=True))
    loss = sum(rate * n for rate, n in zip(rates, multiples, strict=True)) / 2.0
    shortest = max(save.durable_seconds / n for save, n in zip(saves, multiples, strict=True))
    seconds = max(math.sqrt(overhead / loss), shortest)
    return seconds, overhead / seconds + loss * seconds


@dataclass(frozen=True)
class Sizes:
    """Bytes that the versions of a run occupy.

    Attributes:
        state_bytes: Size of the state in memory, all ranks together, replicas counted once.
        full_ratio: State bytes per stored byte of a version that stands alone.
    """

    state_bytes: float
    full_ratio: float = 1.0

    def __post_init__(self) -> None:
        require("state_bytes", self.state_bytes, 0.0)
        require("full_ratio", self.full_ratio, 0.0, above=True)


def save_seconds(sizes: Sizes, encode_bytes_per_s: float, write_bytes_per_s: float) -> float:
    """Seconds to encode and write one version; the two overlap, so the slower one counts.

    Args:
        sizes: Sizes and ratios.
        encode_bytes_per_s: State bytes encoded per second, all ranks together.
        write_bytes_per_s: Stored bytes written and flushed per second, all ranks together.
    """
    require("encode_bytes_per_s", encode_bytes_per_s, 0.0, above=True)
    require("write_bytes_per_s", write_bytes_per_s, 0.0, above=True)
    stored = sizes.state_bytes / sizes.full_ratio
    return max(sizes.state_bytes / encode_bytes_per_s, stored / write_bytes_per_s)
