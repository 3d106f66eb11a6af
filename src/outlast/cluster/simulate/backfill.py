"""Backfill: EASY, conservative, and conservative with named nodes.

EASY backfill: only the queue's head has a reservation (Lifka, "The ANL/IBM SP scheduling system",
JSSPP 1995). The head gets a shadow time, the first moment at which enough nodes are free if every
running job uses its whole limit, and the nodes that are left over then are extra. A later job may
start now if it ends before the shadow or fits into the extra nodes, so it cannot delay the head.

Conservative backfill: every pending job has a reservation, in the order of the queue (Mu'alem and
Feitelson, "Utilization, predictability, workloads, and user runtime estimates in scheduling the IBM
SP2 with backfilling", IEEE TPDS 12, 2001); Slurm's sched/backfill is of this kind. Each pass makes
all reservations anew: free nodes over time are a step function, and each job takes the earliest
span of its limit in which enough of them are free.

With named nodes it goes step by step as Slurm 22.05 does (`_attempt_backfill`, and the will-run
test of select/cons_tres), for one partition of equal nodes that jobs hold alone: reservations are
sets of nodes in a table over time, running jobs are none of them; a job is tried at each change of
the table, on the nodes that no reservation takes before its end; when those will be free is told
from the running jobs' limits in batches; and of free nodes the tightest run of consecutive ones is
taken, lowest first. So a job may be planned later than the numbers of free nodes alone would allow.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from outlast.cluster.simulate.state import NEVER, SchedulerState, best_fit


class EasyBackfill:
    """Decides which pending jobs start now; remembers what it need not look at again."""

    def __init__(self) -> None:
        self._settled = False
        self._shadow = NEVER
        self._extra = 0

    def disturb(self) -> None:
        """Nodes were freed or lost, or the order or limits changed: look at every job again."""
        self._settled = False

    def starts(self, state: SchedulerState, arrived: list[int]) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes.

        Where nothing but arrivals happened since the last call, no older job can start: time alone
        shortens the window that it did not fit. Then only what `arrived` behind the head is tested.
        """
        deep = len(state.pending) > state.scheduler.backfill_jobs
        if not self._settled or deep or state.pending[0][3] in arrived:
            return self._look_at_all(state)
        started = []
        for job in arrived if len(arrived) == 1 else sorted(arrived, key=state.entry):
            if self._fits(state, job):
                state.withdraw(job)
                state.begin(job)
                started.append(job)
        return started

    def window_seconds(self, state: SchedulerState, nodes: int) -> float:
        """Longest limit with which a job, put last into the queue, would start now; 0 if none."""
        if nodes > state.free:
            return 0.0
        shadow, extra = shadow_of(state)
        return NEVER if nodes <= extra else max(0.0, shadow - state.now)

    def _fits(self, state: SchedulerState, job: int) -> bool:
        nodes = state.need[job]
        if nodes > state.free:
            return False
        if state.now + state.limit[job] > self._shadow:
            if nodes > self._extra:
                return False
            self._extra -= nodes
        return True

    def _look_at_all(self, state: SchedulerState) -> list[int]:
        pending, need, limit = state.pending, state.need, state.limit
        started = start_in_order(state)
        # What lies too deep to be looked at may come within reach.
        self._settled = 0 < len(pending) <= state.scheduler.backfill_jobs
        if not pending:
            return started
        shadow, extra = shadow_of(state)
        free, now = state.free, state.now
        if free:
            depth = min(len(pending), state.scheduler.backfill_jobs)
            chosen = []
            for place in range(1, depth):
                job = pending[place][3]
                nodes = need[job]
                if nodes <= free:
                    if now + limit[job] > shadow:
                        if nodes > extra:
                            continue
                        extra -= nodes
                    free -= nodes
                    chosen.append(place)
                    if not free:
                        break
            started += [pending[place][3] for place in chosen]
            for place in reversed(chosen):
                del pending[place]
            for job in started[len(started) - len(chosen) :]:
                state.begin(job)
        self._shadow, self._extra = shadow, extra
        return started


def start_in_order(state: SchedulerState) -> list[int]:
    """Start jobs from the front of the queue until one does not fit."""
    pending, need = state.pending, state.need
    started: list[int] = []
    for entry in pending:
        job = entry[3]
        if need[job] > state.free:
            break
        state.begin(job)
        started.append(job)
    del pending[: len(started)]
    return started


def shadow_of(state: SchedulerState) -> tuple[float, int]:
    """Latest start of the queue's head, and nodes that are left over then.

    (inf, free nodes) if nothing is pending, or while too few nodes are up for the head.
    """
    if not state.pending:
        return NEVER, state.free
    need = state.need
    missing = need[state.pending[0][3]] - state.free
    if missing <= 0:
        return state.now, -missing
    shadow = NEVER
    for release, job in state.running:
        if missing <= 0 and release > shadow:
            break
        missing -= need[job]
        shadow = release
    if missing > 0:
        return NEVER, state.free
    return shadow, -missing


class Profile:
    """`free[k]` nodes from `times[k]` up to `times[k + 1]`, the last for ever.

    Attributes:
        times: Ascending seconds, the first is the present.
        free: Nodes.
    """

    __slots__ = ("_known", "free", "times")

    def __init__(self, now: float, free: int) -> None:
        self.times = [now]
        self.free = [free]
        self._known: dict[int, tuple[float, float]] = {}

    def free_from(self, time: float, nodes: int) -> None:
        """More nodes from a time on, not before the last step; not after `earliest`."""
        if time <= self.times[-1]:
            self.free[-1] += nodes
        else:
            self.times.append(time)
            self.free.append(self.free[-1] + nodes)

    def advance(self, now: float) -> None:
        """Forget what is past."""
        place = bisect_right(self.times, now) - 1
        del self.times[:place]
        del self.free[:place]
        self.times[0] = now

    def earliest(self, nodes: int, seconds: float) -> float:
        """First moment from which `nodes` are free for `seconds`; inf where there is none."""
        times, free, known = self.times, self.free, self._known
        count = len(times)
        place = 0
        # Spans are only taken out: no job starts before one of its size that was no longer.
        if nodes in known and known[nodes][0] <= seconds:
            place = bisect_left(times, known[nodes][1])
        while True:
            while place < count and free[place] < nodes:
                place += 1
            if place == count:
                return NEVER
            start = times[place]
            end = start + seconds
            place += 1
            while place < count and times[place] < end:
                if free[place] < nodes:
                    break
                place += 1
            else:
                known[nodes] = (seconds, start)
                return start
            place += 1

    def reserve(self, start: float, end: float, nodes: int) -> None:
        """Take nodes out of a span; what lies before the present is left out."""
        times, free = self.times, self.free
        if end <= times[0]:
            return
        first = self._step_at(max(start, times[0]))
        last = len(times) if end == NEVER else self._step_at(end)
        for place in range(first, last):
            free[place] -= nodes

    def window_seconds(self, nodes: int) -> float:
        """Seconds from now for which at least `nodes` are free."""
        for time, free in zip(self.times, self.free, strict=True):
            if free < nodes:
                return time - self.times[0]
        return NEVER

    def _step_at(self, time: float) -> int:
        """Index of a step that begins at a time, made if need be."""
        times = self.times
        place = bisect_left(times, time)
        if place == len(times) or times[place] != time:
            times.insert(place, time)
            self.free.insert(place, self.free[place - 1])
        return place


class ConservativeBackfill:
    """Decides which pending jobs start now; remembers what it need not look at again."""

    def __init__(self) -> None:
        self._profile: Profile | None = None

    def disturb(self) -> None:
        """Nodes were freed or lost, or the order or limits changed: look at every job again."""
        self._profile = None

    def starts(self, state: SchedulerState, arrived: list[int]) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes.

        Reservations serve one purpose: to find what they leave to jobs behind them. So a pass makes
        none behind the last job that is small enough for the free nodes; and where all were made
        and nothing but arrivals happened since, they stand and only what `arrived` is planned.
        """
        pending, need = state.pending, state.need
        depth = min(len(pending), state.scheduler.backfill_jobs)
        first = len(pending) - len(arrived)
        profile, started = self._profile, []
        behind = profile is not None and first > 0
        if behind and {entry[3] for entry in pending[first:]} == set(arrived):
            assert profile is not None
            profile.advance(state.now)
            places = range(first, depth)
        else:
            started = start_in_order(state)
            depth = min(len(pending), state.scheduler.backfill_jobs)
            last = depth - 1
            while last > 0 and need[pending[last][3]] > state.free:
                last -= 1
            self._profile = None
            if last <= 0:
                return started
            profile, places = profile_of(state), range(last + 1)
            if last == len(pending) - 1 and self._lasts(state):
                self._profile = profile
        chosen = [place for place in places if self._plan(state, profile, pending[place][3])]
        jobs = [pending[place][3] for place in chosen]
        for place in reversed(chosen):
            del pending[place]
        for job in jobs:
            state.begin(job)
        return started + jobs

    def window_seconds(self, state: SchedulerState, nodes: int) -> float:
        """Longest limit with which a job, put last into the queue, would start now; 0 if none."""
        if nodes > state.free:
            return 0.0
        profile = profile_of(state)
        for entry in state.pending[: state.scheduler.backfill_jobs]:
            self._plan(state, profile, entry[3])
        return profile.window_seconds(nodes)

    def _lasts(self, state: SchedulerState) -> bool:
        """True if plans stay right while time passes and jobs start."""
        scheduler = state.scheduler
        return not scheduler.end_window_seconds and scheduler.backfill_window_seconds == NEVER

    def _plan(self, state: SchedulerState, profile: Profile, job: int) -> bool:
        """Reserve nodes for a job; whether it starts now."""
        nodes, limit = state.need[job], state.limit[job]
        start = profile.earliest(nodes, limit)
        scheduler = state.scheduler
        if start > state.now + scheduler.backfill_window_seconds:
            return False
        end, step = start + limit, scheduler.backfill_resolution_seconds
        if step and start > state.now:
            # Slurm rounds a reservation's start down too, but on nodes that are busy until then.
            end = max(start, end // step * step)
        profile.reserve(start, end, nodes)
        return start <= state.now


def profile_of(state: SchedulerState) -> Profile:
    """Nodes that will be free if every running job uses its whole limit and none starts."""
    need = state.need
    profile = Profile(state.now, state.free)
    window, end_of_batch, first = state.scheduler.end_window_seconds, NEVER, True
    if not window:
        for release, job in state.running:
            profile.free_from(release, need[job])
        return profile
    batch = 0
    latest = state.now
    for release, job in state.running:
        if first or release > end_of_batch:
            if batch:
                profile.free_from(latest, batch)
                window *= 2
            batch, first = 0, False
            end_of_batch = release + window
        batch += need[job]
        latest = release
    if batch:
        profile.free_from(latest, batch)
    return profile


class NamedBackfill(ConservativeBackfill):
    """Plans every pending job anew in each pass."""

    def starts(self, state: SchedulerState, arrived: list[int]) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes."""
        started = start_in_order(state)
        table = Table(state.now, state.all_nodes)
        # What is reserved behind the last job that could start now decides nothing.
        last = min(len(state.pending), state.scheduler.backfill_jobs) - 1
        while last > 0 and state.need[state.pending[last][3]] > state.free:
            last -= 1
        chosen = []
        for place in range(last + 1 if last > 0 else 0):
            job = state.pending[place][3]
            nodes = _plan(state, table, job)
            if nodes:
                state.begin(job, nodes)
                chosen.append(place)
        jobs = [state.pending[place][3] for place in chosen]
        for place in reversed(chosen):
            del state.pending[place]
        return started + jobs


class Table:
    """Nodes that no pending job has reserved: `nodes[k]` from `times[k]` up to `times[k + 1]`."""

    def __init__(self, now: float, nodes: int) -> None:
        self.times = [now]
        self.nodes = [nodes]

    def open(self, start: float, end: float) -> tuple[int, float | None]:
        """Nodes free of reservations from `start` to `end`, and when the table changes next."""
        found, change = -1, None
        for place, nodes in enumerate(self.nodes):
            until = self.times[place + 1] if place + 1 < len(self.times) else NEVER
            if until <= start:
                continue
            if change is None and until < NEVER:
                change = until
            if self.times[place] > end:
                break
            found &= nodes
        return found, change

    def reserve(self, start: float, end: float, nodes: int) -> bool:
        """Take nodes out of a span; False, and nothing taken, where one of them is not open.

        As in Slurm, a reservation that begins at the span's very end is in its way.
        """
        first, last = self._step_at(max(start, self.times[0])), self._step_at(end)
        if any(nodes & ~self.nodes[place] for place in range(first, last + 1)):
            return False
        for place in range(first, last):
            self.nodes[place] &= ~nodes
        return True

    def _step_at(self, time: float) -> int:
        place = bisect_left(self.times, time)
        if place == len(self.times) or self.times[place] != time:
            self.times.insert(place, time)
            self.nodes.insert(place, self.nodes[place - 1])
        return place


def _plan(state: SchedulerState, table: Table, job: int) -> int:
    """Nodes on which a job starts now; 0 if it is planned for later or not at all."""
    need, limit, now = state.need[job], state.limit[job], state.now
    scheduler = state.scheduler
    step = scheduler.backfill_resolution_seconds
    at: float | None = now
    while at is not None:
        tried = at
        open_nodes, at = table.open(tried, tried + limit)
        if open_nodes.bit_count() < need:
            continue
        start, nodes = _will_run(state, open_nodes, need)
        if not nodes:
            return 0
        start = max(start, tried)
        if start <= now:
            return nodes
        if at is not None and start > at:
            continue
        if start > now + scheduler.backfill_window_seconds:
            return 0
        end = start + limit
        if step:
            reserved = table.reserve(start // step * step, end // step * step, nodes)
        else:
            reserved = table.reserve(start, end, nodes)
        if reserved:
            return 0
        at = start if start > tried else at
    return 0


def _will_run(state: SchedulerState, open_nodes: int, need: int) -> tuple[float, int]:
    """Earliest time at which so many of the open nodes are free by the limits, and the nodes."""
    free = open_nodes & state.free_nodes
    if free.bit_count() >= need:
        return state.now, best_fit(free, need)
    window = state.scheduler.end_window_seconds
    running = [(end, state.held[job]) for end, job in state.running if state.held[job] & open_nodes]
    place = 0
    while place < len(running):
        last = running[place][0] + window
        while place < len(running) and running[place][0] <= last:
            end, nodes = running[place]
            free |= nodes & open_nodes
            place += 1
        window *= 2
        if free.bit_count() >= need:
            return end, best_fit(free, need)
    return NEVER, 0
