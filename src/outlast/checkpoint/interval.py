"""The interval between saves, from measurements of the run itself.

    estimator = IntervalEstimator(nodes=16)
    estimator.observe_step(0.41, saving=False)     # each step, without the time blocked by a save
    estimator.observe_save(0.05, 3.2)              # each published save
    estimator.next_interval_steps()                # 118
    print(estimator.explain())

The costs are medians of the last observations. The failure rate of a node has a Gamma prior, so its
estimate is `(a + failures) / (a M + node seconds)`: the conjugate update for a Poisson process
(Gelman et al. 2013, Bayesian Data Analysis, section 2.6). The rule is `cost.choose_interval`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

from outlast.checkpoint.cost import (
    NODE_MTBF_SECONDS,
    SLOWDOWN_BUDGET,
    Failures,
    SaveCost,
    budget_interval_seconds,
    choose_interval,
    require,
    waste_fraction,
)
from outlast.errors import CheckpointError

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


@dataclass(frozen=True)
class _Decision:
    steps: int
    rule: str
    waste: float | None


class IntervalEstimator:
    """Re-estimates during a run after how many steps the next save is due.

    Its answers depend on clocks, so ranks would disagree: ask one rank and broadcast.

    Args:
        nodes: Nodes of the job.
        mtbf_seconds: Expected mean time between failures of the whole job, before any is seen;
            None for `cost.NODE_MTBF_SECONDS / nodes`, a published figure of large clusters. On
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
        return self._decide().steps

    def explain(self) -> str:
        """One sentence: the interval, which rule decided it, and the numbers behind it."""
        decision = self._decide()
        text = f"save every {decision.steps} step{'' if decision.steps == 1 else 's'}"
        step = self._step_seconds()
        if step is not None:
            text += f" ({_duration(decision.steps * step)})"
        text += f": {_REASONS[decision.rule]}"
        if decision.waste is not None:
            save = self._save_cost(step or 0.0)
            text += (
                f" (wastes {decision.waste:.2%} besides restarts; budget {self._budget:.1%}, "
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

    def _decide(self) -> _Decision:
        step = self._step_seconds()
        if not step or not self._blocked:
            steps = self._first_save_steps
            if step:
                steps = max(1, min(steps, math.floor(self._longest_seconds / step)))
            return _Decision(steps, "measure", None)
        save = self._save_cost(step)
        interval = choose_interval(
            save,
            Failures.every(self.mtbf_seconds),
            budget=self._budget,
            longest_seconds=self._longest_seconds,
        )
        floor_seconds = max(budget_interval_seconds(save, self._budget), save.durable_seconds)
        floor_steps = math.ceil((floor_seconds - save.overhead_seconds) / step - 1e-9)
        best_steps = (interval.seconds - save.overhead_seconds) / step
        whole = math.floor(best_steps) if interval.rule == "longest" else round(best_steps)
        decision = _Decision(max(1, whole, floor_steps), interval.rule, interval.waste)
        return self._making_way(decision, step, save)

    def _making_way(self, decision: _Decision, step: float, save: SaveCost) -> _Decision:
        """The decision, unless others need that saves are further apart."""
        least = math.ceil((self._shared_seconds - save.overhead_seconds) / step)
        most = math.floor((self._longest_seconds - save.overhead_seconds) / step)
        steps = min(least, most)
        if steps <= decision.steps:
            return decision
        seconds = steps * step + save.overhead_seconds
        waste = waste_fraction(seconds, save, Failures.every(self.mtbf_seconds))
        return _Decision(steps, "shared", waste)

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
        """Goes on from what another estimator observed, also on another number of nodes.

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
