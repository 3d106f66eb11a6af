"""Cost of checkpoints and failures, and the interval between saves that follows from it.

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
interval does not depend on the latency (Vaidya 1997, IEEE Trans. Computers 46(8)). These are pure
functions, which the planner composes; `IntervalEstimator` feeds them what a run measures itself.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

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
        failures: How often the run fails, and the recovery from it.

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
        failures: How often the run fails, and the recovery from it.
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


STEPS_REMEMBERED = 64
SAVES_REMEMBERED = 16
SAVING_STEPS_NEEDED = 3
STATE_VERSION = 1

_REASONS = {
    "measure": "an early save, for none has been measured yet",
    "waste": "the least expected waste",
    "longest": "the longest interval allowed",
    "budget": "the shortest interval within the budget",
    "write": "the shortest interval in which a save becomes durable",
    "shared": "the shortest interval that leaves their share of the file system to others",
}


class IntervalEstimator:
    """Re-estimates during a run after how many steps the next save is due.

    estimator = IntervalEstimator(nodes=16)
    estimator.observe_step(0.41, saving=False)     # each step, without the time blocked by a save
    estimator.observe_save(0.05, 3.2)              # each published save
    estimator.next_interval_steps()                # 118
    print(estimator.explain())

    The costs are medians of the last observations. The failure rate of a node has a Gamma prior, so
    its estimate is `(a + failures) / (a M + node seconds)`: the conjugate update for a Poisson
    process (Gelman et al. 2013, Bayesian Data Analysis, section 2.6). The rule is
    `choose_interval`. Its answers depend on clocks, so ranks would disagree: ask one rank and
    broadcast.

    Args:
        nodes: Nodes of the job.
        mtbf_seconds: Expected mean time between failures of the whole job, before any is seen;
            None for `NODE_MTBF_SECONDS / nodes`, a published figure of large clusters. On
            preemptible machines give the time between preemptions.
        prior_failures: How many observed failures this expectation weighs; 0.5 lets the rate differ
            from it by several times (a coefficient of variation of 1.4), as published ones do.
        budget: Largest share of the training time that saves may cost.
        longest_seconds: Longest interval, however rare failures seem: what a user can bear to lose.
        first_save_steps: Steps until the next save as long as none has been measured.

    Raises:
        CheckpointError: For a setting that is not a finite positive number.
    """

    def __init__(
        self,
        *,
        nodes: int = 1,
        mtbf_seconds: float | None = None,
        prior_failures: float = 0.5,
        budget: float = SLOWDOWN_BUDGET,
        longest_seconds: float = 1800.0,
        first_save_steps: int = 20,
    ) -> None:
        require("nodes", nodes, 1)
        require("first_save_steps", first_save_steps, 1)
        if mtbf_seconds is None:
            mtbf_seconds = NODE_MTBF_SECONDS / nodes
        for name, value in (
            ("mtbf_seconds", mtbf_seconds),
            ("prior_failures", prior_failures),
            ("budget", budget),
            ("longest_seconds", longest_seconds),
        ):
            require(name, value, 0.0, above=True)
        self._nodes = nodes
        self._prior_mtbf_seconds = mtbf_seconds
        self._prior_failures = prior_failures
        self._budget = budget
        self._longest_seconds = longest_seconds
        self._first_save_steps = first_save_steps
        self._plain_steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._saving_steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._blocked: deque[float] = deque(maxlen=SAVES_REMEMBERED)
        self._writes: deque[float] = deque(maxlen=SAVES_REMEMBERED)
        self._failures = 0
        self._node_seconds = 0.0
        self._shared_seconds = 0.0

    def observe_step(self, seconds: float, saving: bool) -> None:
        """One step took `seconds`, without the time that a save blocked it.

        Args:
            seconds: Wall time of the step.
            saving: Whether a save was being written during any part of it.
        """
        require("seconds", seconds, 0.0)
        (self._saving_steps if saving else self._plain_steps).append(seconds)
        self._node_seconds += seconds * self._nodes

    def observe_save(self, blocked_seconds: float, seconds: float) -> None:
        """One save was published, as `SaveResult` tells it.

        Args:
            blocked_seconds: How long training stood still.
            seconds: From the request to the publication, the block included.
        """
        require("blocked_seconds", blocked_seconds, 0.0)
        require("seconds", seconds, 0.0)
        self._blocked.append(blocked_seconds)
        self._writes.append(max(0.0, seconds - blocked_seconds))
        self._node_seconds += blocked_seconds * self._nodes

    def observe_failure(self) -> None:
        """The job failed once (call it after the restart, when the state has been loaded)."""
        self._failures += 1

    def make_way(self, least_seconds: float) -> None:
        """Save no more often from now on, since others save to the same file system.

        The longest interval allowed stays the longest.

        Args:
            least_seconds: Wall time from save to save; 0: as often as is best for this run.
        """
        require("least_seconds", least_seconds, 0.0)
        self._shared_seconds = least_seconds

    @property
    def save_cost(self) -> SaveCost | None:
        """Cost of a save in this run, as measured; None before the first was."""
        return self._save_cost(self._step_seconds() or 0.0) if self._blocked else None

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures of the whole job, as estimated now."""
        prior_node_seconds = self._prior_failures * self._prior_mtbf_seconds * self._nodes
        failures = self._prior_failures + self._failures
        return (prior_node_seconds + self._node_seconds) / failures / self._nodes

    def next_interval_steps(self) -> int:
        """Steps from the start of one save to the start of the next, at least 1."""
        return self._decide()[0]

    def explain(self) -> str:
        """One sentence: the interval, which rule decided it, and the numbers behind it."""
        steps, rule, waste = self._decide()
        text = f"save every {steps} step{'' if steps == 1 else 's'}"
        step = self._step_seconds()
        if step is not None:
            text += f" ({_duration(steps * step)})"
        text += f": {_REASONS[rule]}"
        if waste is not None:
            save = self._save_cost(step or 0.0)
            text += (
                f" (wastes {waste:.2%} besides restarts; budget {self._budget:.1%}, "
                f"at most {_duration(self._longest_seconds)}), where a save blocks "
                f"{_duration(save.blocked_seconds)} and slows steps by {save.slowdown:.1%} for "
                f"{_duration(save.write_seconds)}"
            )
        observed = _duration(self._node_seconds / self._nodes)
        return (
            f"{text}; one failure per {_duration(self.mtbf_seconds)} is expected "
            f"({self._failures} seen in {observed}, prior {_duration(self._prior_mtbf_seconds)})"
        )

    def _step_seconds(self) -> float | None:
        steps = self._plain_steps or self._saving_steps
        return statistics.median(steps) if steps else None

    def _save_cost(self, step_seconds: float) -> SaveCost:
        write = statistics.median(self._writes)
        slowdown = 0.0
        measured = min(len(self._plain_steps), len(self._saving_steps)) >= SAVING_STEPS_NEEDED
        if measured and step_seconds > 0.0:
            slowed = statistics.median(self._saving_steps)
            slowdown = max(0.0, slowed / step_seconds - 1.0)
            if write > 0.0:
                # The slowdown is that of whole steps, also where the write took only part of one.
                write = max(write, slowed)
        return SaveCost(statistics.median(self._blocked), write, slowdown)

    def _decide(self) -> tuple[int, str, float | None]:
        """Steps to the next save, the rule that decides on them, and their waste if it is known."""
        step = self._step_seconds()
        if not step or not self._blocked:
            steps = self._first_save_steps
            if step:
                steps = max(1, min(steps, math.floor(self._longest_seconds / step)))
            return steps, "measure", None
        save, failures = self._save_cost(step), Failures.every(self.mtbf_seconds)
        interval = choose_interval(
            save, failures, budget=self._budget, longest_seconds=self._longest_seconds
        )
        floor_seconds = max(budget_interval_seconds(save, self._budget), save.durable_seconds)
        floor_steps = math.ceil((floor_seconds - save.overhead_seconds) / step - 1e-9)
        best_steps = (interval.seconds - save.overhead_seconds) / step
        whole = math.floor(best_steps) if interval.rule == "longest" else round(best_steps)
        steps = max(1, whole, floor_steps)
        # Others may need that saves are further apart.
        least = math.ceil((self._shared_seconds - save.overhead_seconds) / step)
        most = math.floor((self._longest_seconds - save.overhead_seconds) / step)
        if (apart := min(least, most)) <= steps:
            return steps, interval.rule, interval.waste
        waste = waste_fraction(apart * step + save.overhead_seconds, save, failures)
        return apart, "shared", waste

    def state_dict(self) -> dict[str, Any]:
        """Observations in JSON types; the settings are not part of it."""
        return {
            "version": STATE_VERSION,
            "plain_steps": list(self._plain_steps),
            "saving_steps": list(self._saving_steps),
            "blocked": list(self._blocked),
            "writes": list(self._writes),
            "failures": self._failures,
            "node_seconds": self._node_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what another estimator observed, also on another number of nodes.

        Raises:
            CheckpointError: When `state` is not what `state_dict` returns; nothing is changed.
        """
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the interval estimator's state has version {state.get('version')!r}: "
                f"give one of version {STATE_VERSION}"
            )
        lists = ("plain_steps", "saving_steps", "blocked", "writes")
        try:
            values = {name: [float(value) for value in state[name]] for name in lists}
            failures, node_seconds = int(state["failures"]), float(state["node_seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the interval estimator's state is damaged ({error!r}): give what state_dict made"
            ) from error
        for name in lists:
            for value in values[name]:
                require(f"state[{name!r}]", value, 0.0)
        require("state['failures']", failures, 0)
        require("state['node_seconds']", node_seconds, 0.0)
        if len(values["blocked"]) != len(values["writes"]):
            raise CheckpointError(
                f"the interval estimator's state has {len(values['blocked'])} blocked and "
                f"{len(values['writes'])} written saves: give as many of both"
            )
        self._plain_steps = deque(values["plain_steps"], STEPS_REMEMBERED)
        self._saving_steps = deque(values["saving_steps"], STEPS_REMEMBERED)
        self._blocked = deque(values["blocked"], SAVES_REMEMBERED)
        self._writes = deque(values["writes"], SAVES_REMEMBERED)
        self._failures = failures
        self._node_seconds = node_seconds


def _duration(seconds: float) -> str:
    """A duration in the unit that fits, three digits."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
