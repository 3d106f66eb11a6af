"""Monte Carlo of a run's life, event by event, for all trials at once.

Independent of the closed forms, which it checks: it shares the settings with them and no formula.
Between two events all trials advance to their own next one: a failure, a silent error that is
noticed, a replica group that comes back, the end. Repair times are exponential; all other
durations are as given. Failures strike while the run computes, saves, restarts and restores; what
is cut short begins anew, the longest of what is still to be made good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from outlast.plan.cases import Array
from outlast.plan.reliability.recovery import DAY_SECONDS, HOUR_SECONDS, lost_nodes
from outlast.plan.reliability.repairs import Repairs
from outlast.plan.reliability.scenario import Scenario
from outlast.plan.reliability.schedule import Schedule
from outlast.plan.reliability.strikes import END, Indices, Strikes

LOSSES = (
    "checkpoint saves",
    "keeping in memory",
    "lost work",
    "detection",
    "restart",
    "waiting for nodes",
    "regrouping",
    "degraded running",
    "guard",
    "pace",
)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What happened; all figures are simulated.

    Attributes:
        ettr: Progress over wall time, all trials together.
        standard_error: Of `ettr`.
        finish_seconds: (trials,) wall time at the end of the run; infinite where the limit came
            first.
        lost_share: Share of the wall time, by kind of loss; with `ettr` they add up to 1.
        cause_share: Share of the wall time that each cause took: detection, waiting, way back,
            repeated work and running without a group.
        failures: Failures per trial that were not silent.
        unseen: Silent errors per trial that nobody noticed.
    """

    ettr: float
    standard_error: float
    finish_seconds: Array
    lost_share: Mapping[str, float]
    cause_share: Mapping[str, float]
    failures: float
    unseen: float

    @property
    def finished(self) -> float:
        """Share of the trials that ended before the limit."""
        return float(np.isfinite(self.finish_seconds).mean())

    def quantile_seconds(self, share: float) -> float:
        """Wall time within which that share of the trials ended; infinite where fewer did."""
        return float(np.quantile(self.finish_seconds, share, method="inverted_cdf"))


def simulate(scenario: Scenario) -> Simulated:
    """Plays `scenario.trials` runs; the same seed gives the same figures."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _Trials(scenario).play()


class _Trials:
    """The state of all trials; arrays (trials,) unless said otherwise."""

    def __init__(self, scenario: Scenario) -> None:
        run = scenario.reliability
        self.scenario, self.run = scenario, run
        self.random = np.random.default_rng(scenario.seed)
        self.schedule = Schedule(run)
        self.strikes = Strikes(scenario, self.random)
        self.chunk = self.strikes.next_chunk()
        count = scenario.trials
        self.names = [*(cause.name for cause in run.causes), "false alarms"]
        self.lost_nodes = np.array([*(lost_nodes(cause) for cause in run.causes), 0])
        self.detection = np.array([*(c.detection_seconds for c in run.causes), 0.0])
        self.repair = np.array([*(cause.repair_hours * HOUR_SECONDS for cause in run.causes), 0.0])
        self.hit = np.array([*(cause.nodes_hit for cause in run.causes), 1])
        self.silent = np.array([*(cause.silent for cause in run.causes), False])
        self.groups = int(float(np.max(run.replicas.groups)))
        self.factor = float(
            (1.0 + np.max(run.guard.overhead))
            * (1.0 + np.max(run.pace.coding_overhead))
            * np.max(run.pace.straggling)
        )
        self.target = self.schedule.clock_of_work(
            scenario.productive_days * DAY_SECONDS * self.factor
        )
        self.limit = scenario.limit_days * DAY_SECONDS
        self.wall, self.clock, self.exposure = np.zeros((3, count))
        self.pending, self.way_back, self.failures, self.unseen = np.zeros((4, count))
        self.pointer = np.zeros(count, dtype=np.int64)
        self.blamed = np.zeros(count, dtype=np.int64)
        self.versions = np.zeros((count, len(self.schedule.tiers)))
        self.tainted, self.notice, self.finish = np.full((3, count), np.inf)
        self.returns = np.full((count, self.groups), -np.inf)
        self.repairs = Repairs(count, float(np.max(run.restart.spares)))
        self.lost = {name: np.zeros(count) for name in LOSSES}
        self.by_cause = np.zeros((count, len(self.names)))
        self.active = np.ones(count, dtype=bool)

    def play(self) -> Simulated:
        every = np.arange(self.scenario.trials)
        while self.active.any():
            ended = self.chunk.cause[every, self.pointer] == END
            spent = ended & (self.chunk.seconds[every, self.pointer] <= self.exposure)
            rows = np.nonzero(self.active & ~spent)[0]
            if rows.size:
                self._step(rows)
            else:
                self.chunk = self.strikes.next_chunk()
                self.pointer[:] = 0
        return self._result()

    def _step(self, rows: Indices) -> None:
        """Every trial of `rows` goes on to its next event."""
        returns = self.returns[rows]
        down = returns > self.wall[rows, None]
        up = self.groups - down.sum(axis=1)
        enough = up >= float(np.max(self.run.replicas.minimum))
        speed = np.where(enough, up / self.groups, 0.0)
        until = np.stack(
            [
                self.chunk.seconds[rows, self.pointer[rows]] - self.exposure[rows],
                self.notice[rows] - self.wall[rows],
                np.where(down, returns, np.inf).min(axis=1) - self.wall[rows],
                self.pending[rows] + (self.target - self.clock[rows]) / speed,
                self.limit - self.wall[rows],
            ]
        )
        kind = np.argmin(until, axis=0)
        passed = np.maximum(until.min(axis=0), 0.0)
        self._advance(rows, passed, speed)
        self._strike(rows[kind == 0])
        self._noticed(rows[kind == 1])
        self._rejoin(rows[kind == 2])
        done = rows[kind == 3]
        self.clock[done], self.finish[done] = self.target, self.wall[done]
        self.active[rows[kind >= 3]] = False

    def _advance(self, rows: Indices, seconds: Array, speed: Array) -> None:
        back = np.minimum(self.pending[rows], seconds)
        running = seconds - back
        self.pending[rows] -= back
        self.clock[rows] += running * speed
        self.wall[rows] += seconds
        self.exposure[rows] += seconds
        self.lost["restart"][rows] += back
        idle = running * (1.0 - speed)
        self.lost["degraded running"][rows] += idle
        self.by_cause[rows, self.blamed[rows]] += back + idle

    def _pause(self, rows: Indices, seconds: Array | float, kind: str, cause: Indices) -> None:
        """Time in which all stand still and nothing fails."""
        self.wall[rows] += seconds
        self.lost[kind][rows] += seconds
        self.by_cause[rows, cause] += seconds

    def _strike(self, rows: Indices) -> None:
        """The failures that the pointers show, by what they do."""
        cause = self.chunk.cause[rows, self.pointer[rows]]
        first = self.chunk.first_node[rows, self.pointer[rows]]
        ended = cause == END
        # The last entry of a chunk only says that the next chunk is needed.
        self.exposure[rows[ended]] = self.chunk.seconds[rows[ended], self.pointer[rows[ended]]]
        rows, cause, first = rows[~ended], cause[~ended], first[~ended]
        self.pointer[rows] += 1
        alarm = cause == len(self.names) - 1
        computing = self.pending[rows] == 0.0
        seconds = float(np.max(self.run.guard.alarm_seconds))
        self._pause(rows[alarm & computing], seconds, "guard", cause[alarm & computing])
        # Nodes of groups that are gone make no errors.
        there = (self.returns[rows] <= self.wall[rows, None]).mean(axis=1)
        silent = self.silent[cause] & computing & (self.random.random(rows.size) < there)
        self._corrupt(rows[silent], cause[silent])
        loud = ~self.silent[cause] & ~alarm
        rows, cause, first = rows[loud], cause[loud], first[loud]
        if self.groups == 1:
            self._stop(rows, cause)
        elif rows.size:
            self._shrink(rows, cause, first)

    def _corrupt(self, rows: Indices, cause: Indices) -> None:
        """Silent errors: found by the guard, noticed later, or never."""
        guard = self.run.guard
        chance = self.random.random((2, rows.size))
        found = chance[0] < np.max(guard.coverage)
        late = ~found & (chance[1] < np.max(guard.noticed))
        self.unseen[rows[~found & ~late]] += 1.0
        caught, seconds = rows[found], float(np.max(guard.latency_seconds))
        if guard.rolls_back:
            self._pause(caught, seconds, "lost work", cause[found])
            self._roll_back(caught, cause[found], np.zeros(caught.size))
        else:
            seconds += float(np.max(guard.correction_seconds))
            self._pause(caught, seconds, "guard", cause[found])
        clean = np.isinf(self.tainted[rows]) & late
        tainted = rows[clean]
        self.tainted[tainted] = self.schedule.position(self.clock[tainted])[1]
        self.notice[tainted] = (
            self.wall[tainted] + float(np.max(guard.noticed_hours)) * HOUR_SECONDS
        )
        self.blamed[tainted] = cause[clean]

    def _noticed(self, rows: Indices) -> None:
        """Somebody sees that the numbers are wrong: back to a version from before the error."""
        if not rows.size:
            return
        apart = self.schedule.every[-1]
        clean = np.floor(self.tainted[rows] / self.schedule.interval / apart) * apart
        self.versions[rows] = np.minimum(self.versions[rows], clean[:, None])
        self._restore(rows, clean, np.nonzero(self.silent)[0][0] + np.zeros_like(rows))
        restart = float(np.max(self.run.restart.restart_seconds))
        self._go_back(rows, restart + self.schedule.restore[-1])
        self.tainted[rows] = self.notice[rows] = np.inf

    def _stop(self, rows: Indices, cause: Indices) -> None:
        """A failure that ends all processes."""
        if not rows.size:
            return
        self.failures[rows] += 1.0
        self._pause(rows, self.detection[cause], "detection", cause)
        wait = self._nodes_ready(rows, cause) - self.wall[rows]
        self._pause(rows, wait, "waiting for nodes", cause)
        self._roll_back(rows, cause, self.lost_nodes[cause])

    def _nodes_ready(self, rows: Indices, cause: Indices) -> Array:
        """When there is a node for each lost one, which go to repair."""
        ready = self.wall[rows]
        broken = self.lost_nodes[cause] > 0
        rows, cause = rows[broken], cause[broken]
        if rows.size:
            now, nodes = self.wall[rows], self.lost_nodes[cause]
            ends = now + self.random.exponential(self.repair[cause])
            ready[broken] = self.repairs.replace(rows, now, ends, nodes)
        return ready

    def _roll_back(self, rows: Indices, cause: Indices, nodes: Array) -> None:
        """Back to the newest version that so many lost nodes leave."""
        if not rows.size:
            return
        plan = self.schedule
        rounds, work = plan.position(self.clock[rows])
        versions = np.maximum(self.versions[rows], plan.durable(rounds, work))
        left = plan.survives >= nodes[:, None]
        newest = np.where(left, versions, -1.0).max(axis=1)
        # Of equal versions the one in the tier that is listed first.
        choice = plan.restore[(left & (versions == newest[:, None])).argmax(axis=1)]
        self.versions[rows] = np.where(left, np.minimum(versions, newest[:, None]), newest[:, None])
        self._restore(rows, newest, cause)
        back = self.run.restart
        seconds = float(np.max(back.restart_seconds)) + choice
        self._go_back(rows, seconds + np.where(nodes > 0, np.max(back.replace_seconds), 0.0))
        erased = newest * plan.interval <= self.tainted[rows]
        self.tainted[rows[erased]] = self.notice[rows[erased]] = np.inf

    def _go_back(self, rows: Indices, seconds: Array | float) -> None:
        """Begins a way back, or one that was cut short anew: what was to be made good still is."""
        under_way = np.where(self.pending[rows] > 0.0, self.way_back[rows], 0.0)
        self.way_back[rows] = np.maximum(under_way, seconds)
        self.pending[rows] = self.way_back[rows]

    def _restore(self, rows: Indices, version: Array, cause: Indices) -> None:
        clock = np.minimum(self.schedule.clock(version), self.clock[rows])
        redone = self.clock[rows] - clock
        self.lost["lost work"][rows] += redone
        self.by_cause[rows, cause] += redone
        self.clock[rows] = clock
        self.blamed[rows] = cause

    def _shrink(self, rows: Indices, cause: Indices, first: Indices) -> None:
        """Replica groups of the nodes hit go; the others go on, if there are any."""
        nodes = float(np.max(self.run.nodes))
        group = np.arange(self.groups)
        low = np.minimum(np.floor(first * self.groups / nodes), self.groups - 1.0)
        width = np.ceil(self.hit[cause] * self.groups / nodes - 1e-9)
        high = low + np.maximum(width, 1.0)
        hit = (group >= low[:, None]) & (group < high[:, None])
        # A block beyond the last group wraps to the first.
        hit |= group < (high - self.groups)[:, None]
        up = self.returns[rows] <= self.wall[rows, None]
        felt = (hit & up).any(axis=1)
        rows, cause, hit, up = rows[felt], cause[felt], hit[felt], up[felt]
        total = ~(up & ~hit).any(axis=1)
        self.returns[rows[total]] = -np.inf
        self._stop(rows[total], cause[total])
        rows, cause, hit, up = rows[~total], cause[~total], hit[~total], up[~total]
        if not rows.size:
            return
        self.failures[rows] += 1.0
        replicas, back = self.run.replicas, self.run.restart
        seen, own = self.detection[cause], float(np.max(replicas.detection_seconds))
        self._pause(rows, np.minimum(seen, own) if own else seen, "detection", cause)
        ready = self._nodes_ready(rows, cause)
        ready += float(np.max(back.restart_seconds) + np.max(replicas.recovery_seconds))
        ready += np.where(self.lost_nodes[cause] > 0, np.max(back.replace_seconds), 0.0)
        self.returns[rows] = np.where(hit & up, ready[:, None], self.returns[rows])
        lost = self.random.random(rows.size) * np.max(replicas.step_seconds)
        self._pause(rows, lost + np.max(replicas.regroup_seconds), "regrouping", cause)
        self.blamed[rows] = cause

    def _rejoin(self, rows: Indices) -> None:
        if not rows.size:
            return
        back = np.abs(self.returns[rows] - self.wall[rows, None]) < 1e-3
        self.returns[rows] = np.where(back, -np.inf, self.returns[rows])
        seconds = float(np.max(self.run.replicas.rejoin_seconds))
        self._pause(rows, seconds, "regrouping", self.blamed[rows])

    def _result(self) -> Simulated:
        _, work = self.schedule.position(self.clock)
        progress = work / self.factor
        self.lost["pace"] = work - progress
        kept = self.schedule.kept(self.clock)
        self.lost["keeping in memory"] = kept
        self.lost["checkpoint saves"] = self.clock - work - kept
        wall = float(self.wall.sum())
        ettr = float(progress.sum()) / wall
        spread = (progress - ettr * self.wall).std(ddof=1) if self.wall.size > 1 else 0.0
        error = float(spread) / np.sqrt(self.wall.size) / float(self.wall.mean())
        shares = {name: float(seconds.sum()) / wall for name, seconds in self.lost.items()}
        causes = zip(self.names, self.by_cause.sum(axis=0) / wall, strict=True)
        return Simulated(
            ettr,
            float(error),
            self.finish,
            shares,
            {name: float(share) for name, share in causes},
            float(self.failures.mean()),
            float(self.unseen.mean()),
        )
