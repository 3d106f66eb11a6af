"""I/O on a file system that others share: turns to write, and save periods.

    with turn("/scratch/project/.turns", size_bytes, nodes=8, deadline_seconds=120) as mine:
        write()                          # mine.granted, mine.waited_seconds, mine.why

    request = ask("/scratch/project/.turns", size_bytes, nodes=8, mtbf_seconds=90_000)
    while not request.ready():           # one look at some files; continues training meanwhile
        train_one_step()
    with request:
        write()

It is advice: nobody is kept from writing. When the deadline has passed, or the directory cannot be
used, the saver writes without a turn and `why` says so. It never raises for the directory's sake.

Requests and turns are files, on any file system that jobs share:

    ticket-<name>.json             a request; its owner removes it, or anybody when it is dead
    held-<set>-<generation>.json   the turn of a set is taken; only the highest generation counts
    free-<set>-<generation>.json   it was given back
    saver-<name>.json              a job's statement of what its saves cost it and the file system

A turn is taken by creating the file of the next generation, which one process can do (a hard link,
or O_EXCL where there are none; both are atomic on NFS). Nobody ever removes the highest generation,
so that a dead owner's turn is passed over rather than broken, and no live one's can be broken by
mistake. Files live as long as their owner (`outlast.records.claims`). Slurm knows long before the
heartbeat is too old that a job has ended; since its answer may take seconds, it is asked in a
thread (`SlurmJobs`).

Save periods: Young/Daly's period per job is not the best when the file system is shared (Herault,
Robert, Bouteiller, Arnold, Ferreira, Bosilca and Dongarra 2018, Optimal cooperative checkpointing
for shared high-performance computing platforms). Minimise the node-time that saves and failures
waste,

    sum_i n_i (C_i / P_i + P_i / (2 mu_i))   with   sum_i C_i / P_i <= budget,

over the periods P_i. With the multiplier lambda of the budget,

    P_i = sqrt(2 mu_i C_i (1 + lambda / n_i)),

and lambda = 0, Young/Daly's periods, where these keep the budget; else it is found by bisection. A
save in the background costs its job less than it costs the file system, say o_i in place of C_i in
the first sum; then P_i = sqrt(2 mu_i (o_i + lambda C_i / n_i)). From the statements of all savers
that live, each one finds its own period: the same sum for all, so nobody has to decide for others.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from outlast.cluster.slurm import has_ended, is_live, is_waiting, state_now
from outlast.errors import ClusterError
from outlast.records.claims import WRITING_SECONDS, Claims, Owner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.job import CheckpointSection

AskAlive: TypeAlias = Callable[[Owner], bool | None] | None
"""Says whether an owner lives, None where that is not known; None in its place: nobody is asked."""
HEARTBEAT_SECONDS = 10.0
STALE_AFTER_SECONDS = 90.0
"""Longer than NFS keeps the times of files in its cache (`acregmax`, 60 s)."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request for a turn.

    Attributes:
        name: Unique; never used again.
        set_number: One turn at a time is given in each set.
        size_bytes: What it is to move.
        nodes: Of the job.
        unsaved_seconds: Work since the last save, when it was asked.
        mtbf_seconds: Of the job, if it computes while it waits; 0: it stands still.
        asked_seconds: When, by the file server's clock.
    """

    name: str
    set_number: int
    size_bytes: float
    nodes: float
    unsaved_seconds: float = 0.0
    mtbf_seconds: float = 0.0
    asked_seconds: float = 0.0


_SIZES = ("size_bytes", "nodes", "unsaved_seconds", "mtbf_seconds", "asked_seconds")
_UNKNOWN = Ticket("", 0, 0.0, 1.0)


def _ticket_of(content: dict[str, Any]) -> Ticket:
    figures = [float(content[name]) for name in _SIZES]
    return Ticket(str(content["name"]), int(content["set_number"]), *figures)


_TURN = re.compile(r"(held|free)-(-?\d+)-(\d{12})\.json")


class TicketFolder:
    """The requests and turns in a folder.

    Args:
        folder: Made if missing.
        ask_alive: As for `Claims`.

    Raises:
        OSError: When the folder cannot be made or written to; so do the methods.
    """

    def __init__(self, folder: Path, ask_alive: AskAlive = None) -> None:
        self._folder = folder
        self._claims = Claims(folder, _ticket_of, STALE_AFTER_SECONDS, ask_alive)

    def ask(self, ticket: Ticket) -> Ticket:
        """Put up a request; it counts once it is whole."""
        content = asdict(ticket)
        del content["asked_seconds"]
        asked = self._claims.put(self._path(ticket), content)
        return _ticket_of({**content, "asked_seconds": asked})

    def beat(self, ticket: Ticket, generation: int = 0) -> float:
        """Say that the owner lives; returns the file server's time."""
        path = self._turn(ticket.set_number, generation) if generation else self._path(ticket)
        os.utime(path)
        return path.stat().st_mtime

    def waiting(self, now_seconds: float) -> list[Ticket]:
        """The requests of live owners; those of dead ones are removed."""
        return self._claims.living("ticket-", now_seconds)

    def held(self, set_number: int, now_seconds: float) -> tuple[int, Ticket | None]:
        """The newest generation of a set's turn and who has it; 0: nobody has had it yet."""
        generation, path = max(self._generations(set_number), default=(0, None))
        if path is None or not path.name.startswith("held"):
            return generation, None
        ticket, lives, age = self._claims.read(path, now_seconds)
        if ticket is None and age < WRITING_SECONDS:
            return generation, _UNKNOWN
        return generation, ticket if lives else None

    def take(self, ticket: Ticket, generation: int) -> bool:
        """Take the turn after `generation`; False: somebody else was faster."""
        path = self._turn(ticket.set_number, generation + 1)
        try:
            os.link(self._path(ticket), path)
        except FileExistsError:
            return False
        except OSError:
            # No hard links here.
            content = self._path(ticket).read_bytes()
            try:
                with path.open("xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
        # Who looked long ago may have taken a generation that was over and swept away.
        newest = 0
        for number, other in self._generations(ticket.set_number):
            newest = max(newest, number)
            if number <= generation:
                with contextlib.suppress(OSError):
                    other.unlink()
        if newest > generation + 1:
            path.unlink(missing_ok=True)
            return False
        self.withdraw(ticket)
        return True

    def give_back(self, ticket: Ticket, generation: int) -> None:
        """The turn is over."""
        path = self._turn(ticket.set_number, generation)
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(path.name.replace("held-", "free-", 1)))

    def withdraw(self, ticket: Ticket) -> None:
        """The request is over."""
        self._path(ticket).unlink(missing_ok=True)

    def _generations(self, set_number: int) -> list[tuple[int, Path]]:
        """The generations of a set's turn, with their files."""
        found = ((path, _TURN.fullmatch(path.name)) for path in self._folder.iterdir())
        return [(int(turn[3]), path) for path, turn in found if turn and int(turn[2]) == set_number]

    def _path(self, ticket: Ticket) -> Path:
        return self._folder / f"ticket-{ticket.name}.json"

    def _turn(self, set_number: int, generation: int) -> Path:
        return self._folder / f"held-{set_number}-{generation:012d}.json"


Order = Literal["fcfs", "least-waste", "set-10"]
"""fcfs: who asks first. least-waste: who keeps the others waiting shortest for each of its own
nodes. set-10: one job at a time of each class of periods, and classes share the bandwidth."""
ORDERS: tuple[Order, ...] = get_args(Order)


def priority(
    order: str, *, asked_seconds: float, size_bytes: float, cost_per_second: float
) -> float:
    """Sort key of a request; the smallest is served first.

    Serving request i for C_i seconds costs the others c_j C_i each, where c_j is what a second of
    waiting costs request j. Of those that wait, the order by C_i / c_i wastes the least (Smith
    1956, Various optimizers for single-stage production); with one bandwidth for all, C_i is as its
    bytes are. It is the Least-Waste rule of Herault et al. 2018 for two requests.

    Args:
        order: One of `ORDERS`.
        asked_seconds: When it was asked.
        size_bytes: What it is to move.
        cost_per_second: See `waiting_cost`.
    """
    if order == "least-waste":
        return size_bytes / max(cost_per_second, 1e-300)
    return asked_seconds


def waiting_cost(nodes: float, unsaved_seconds: float = 0.0, mtbf_seconds: float = 0.0) -> float:
    """Node-seconds that are wasted for each second that a request waits.

    Of a job that stands still: all its nodes. Of one that continues computing until it is its turn,
    only what a failure would cost it: nodes times unsaved work over mean time between failures.

    Args:
        nodes: Of the job.
        unsaved_seconds: Work since what the last save holds.
        mtbf_seconds: Of the whole job; 0: the job stands still while it waits.
    """
    return nodes * unsaved_seconds / mtbf_seconds if mtbf_seconds else nodes


def set_of(order: str, period_seconds: float) -> int:
    """The set within which one job at a time is served.

    In Set-10 (Boito, Pallez, Teylo and Vidal 2023, IO-SETS: Simple and efficient approaches for
    I/O bandwidth management) it is the rounded decimal logarithm of the mean time from one phase
    of I/O to the next; in the other orders there is one set.

    Raises:
        ClusterError: The order is not known, or needs a period.
    """
    if order not in ORDERS:
        raise ClusterError(f'order = "{order}" is not known: give one of {", ".join(ORDERS)}')
    if order != "set-10":
        return 0
    if not (period_seconds > 0 and math.isfinite(period_seconds)):
        raise ClusterError(
            f"period_seconds = {period_seconds}: set-10 needs the time from one save to the next"
        )
    return round(math.log10(period_seconds))


_SHORTEST_LOOK_SECONDS = 0.01
_LONGEST_LOOK_SECONDS = 1.0


class Request:
    """A request for a turn, which is put up when it is made.

    Use `ask` or `turn`. It is a context manager: on entry it takes the turn if it is free, without
    waiting, and at the end gives it back.

    Attributes:
        granted: Whether this process has the turn.
        why: Why it has it not, or empty: "waiting", "deadline", or what is wrong.
        waited_seconds: From the request to the turn, or to giving up.
    """

    def __init__(self, folder: Path, order: str, ticket: Ticket, ask_alive: AskAlive) -> None:
        self.granted = False
        self.why = "waiting"
        self.waited_seconds = 0.0
        self._order = order
        self._begun = time.monotonic()
        self._generation = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._put: tuple[TicketFolder, Ticket] | None = None
        try:
            tickets = TicketFolder(folder, ask_alive)
            self._put = tickets, tickets.ask(ticket)
        except OSError as error:
            self._give_up(f"{folder} cannot be used: {error.strerror or error}")
            return
        threading.Thread(target=self._beat, name="turn", daemon=True).start()

    def ready(self) -> bool:
        """Return True if the saver may write now: it has the turn, or there is none to be had.

        Takes the turn if it is free and nobody is before this request.
        """
        if self.granted or self.why != "waiting":
            return True
        assert self._put is not None
        try:
            with self._lock:
                self._try(*self._put)
        except OSError as error:
            self._give_up(f"the directory of turns cannot be used: {error.strerror or error}")
        return self.granted or self.why != "waiting"

    def wait(self, deadline_seconds: float) -> bool:
        """Wait for the turn, at most until the deadline; returns whether it was granted."""
        end = self._begun + deadline_seconds
        look = _SHORTEST_LOOK_SECONDS
        while not self.ready():
            left = end - time.monotonic()
            if left <= 0:
                self._give_up("deadline")
                break
            # Not all at the same moment, and not often while the wait is long.
            time.sleep(min(look * random.uniform(0.5, 1.0), left))
            look = min(1.5 * look, _LONGEST_LOOK_SECONDS)
        return self.granted

    def release(self) -> None:
        """Give the turn back, or withdraw the request; may be called twice."""
        self._ended.set()
        with self._lock, contextlib.suppress(OSError):
            if self._put is not None:
                tickets, ticket = self._put
                if self._generation:
                    tickets.give_back(ticket, self._generation)
                else:
                    tickets.withdraw(ticket)
        self._put = None
        self._generation = 0
        self.granted = False

    def __enter__(self) -> Request:
        self.ready()
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    def _try(self, tickets: TicketFolder, ticket: Ticket) -> None:
        try:
            now = tickets.beat(ticket)
        except FileNotFoundError:
            # Somebody took this process for dead, e.g. while it was suspended.
            self._give_up("the request was removed by others")
            return
        generation, holder = tickets.held(ticket.set_number, now)
        if holder is not None:
            return
        rivals = [item for item in tickets.waiting(now) if item.set_number == ticket.set_number]
        if any(self._key(rival, now) < self._key(ticket, now) for rival in rivals):
            return
        if tickets.take(ticket, generation):
            self._generation = generation + 1
            self.granted, self.why = True, ""
            self.waited_seconds = time.monotonic() - self._begun

    def _key(self, ticket: Ticket, now: float) -> tuple[float, float, str]:
        asked, size = ticket.asked_seconds, ticket.size_bytes
        unsaved = ticket.unsaved_seconds + max(now - asked, 0.0)
        cost = waiting_cost(ticket.nodes, unsaved, ticket.mtbf_seconds)
        key = priority(self._order, asked_seconds=asked, size_bytes=size, cost_per_second=cost)
        return key, asked, ticket.name

    def _give_up(self, why: str) -> None:
        self.waited_seconds = time.monotonic() - self._begun
        self.why = why
        self._ended.set()
        if self._put is not None:
            with contextlib.suppress(OSError):
                self._put[0].withdraw(self._put[1])
        self._put = None

    def _beat(self) -> None:
        """Say until the end that this process lives, also while it writes."""
        while not self._ended.wait(HEARTBEAT_SECONDS):
            if (put := self._put) is not None:
                with self._lock, contextlib.suppress(OSError):
                    put[0].beat(put[1], self._generation)


def ask(
    directory: str | os.PathLike[str],
    size_bytes: float,
    *,
    nodes: float = 1.0,
    order: str = "least-waste",
    period_seconds: float = math.inf,
    unsaved_seconds: float = 0.0,
    mtbf_seconds: float = 0.0,
    ask_alive: AskAlive = None,
) -> Request:
    """Ask for a turn without waiting for it. One process of a job asks, not every rank.

    Args:
        directory: Of the turns; all who share one file system and trust each other use the same.
        size_bytes: What is to be written.
        nodes: Of the job, which wait meanwhile.
        order: One of `ORDERS`; the same for all.
        period_seconds: From one save to the next; needed by set-10.
        unsaved_seconds: Work since the last save.
        mtbf_seconds: Of a job that computes until it is its turn: its mean time between failures.
            0: it stands still.
        ask_alive: Whether an owner lives, e.g. by asking Slurm; None for what is not known.

    Raises:
        ClusterError: For a setting that has no meaning; never for the directory.
    """
    for name, value in (("size_bytes", size_bytes), ("nodes", nodes)):
        if not (value > 0 and math.isfinite(value)):
            raise ClusterError(f"{name} = {value} of a turn: give a finite number above 0")
    about = [float(item) for item in (size_bytes, nodes, unsaved_seconds, mtbf_seconds)]
    ticket = Ticket(uuid.uuid4().hex, set_of(order, period_seconds), *about)
    return Request(Path(directory), order, ticket, ask_alive)


@contextlib.contextmanager
def turn(
    directory: str | os.PathLike[str],
    size_bytes: float,
    *,
    deadline_seconds: float = 60.0,
    nodes: float = 1.0,
    order: str = "least-waste",
    period_seconds: float = math.inf,
    ask_alive: AskAlive = None,
) -> Iterator[Request]:
    """Wait for a turn, at most until the deadline, and give it back at the end.

    The body runs in any case: with the turn, or without it when the wait was too long or the
    directory cannot be used (`Request.granted`, `Request.why`).

    Args:
        directory: As for `ask`.
        size_bytes: What is to be written.
        deadline_seconds: Longest wait.
        nodes: Of the job, which stand still meanwhile.
        order: As for `ask`.
        period_seconds: As for `ask`.
        ask_alive: As for `ask`.

    Raises:
        ClusterError: For a setting that has no meaning; never for the directory.
    """
    if not deadline_seconds >= 0:
        raise ClusterError(f"deadline_seconds = {deadline_seconds} of a turn: give 0 or more")
    about = {"nodes": nodes, "period_seconds": period_seconds}
    request = ask(directory, size_bytes, order=order, ask_alive=ask_alive, **about)
    try:
        request.wait(deadline_seconds)
        yield request
    finally:
        request.release()


ASK_AGAIN_SECONDS = 15.0
"""From one answer about a job to the next question."""


def job_state(job: str) -> str | None:
    """The state of a job that counts its processes; None where nobody knows."""
    try:
        return state_now(job, of_processes=True)
    except ClusterError:
        return None


class SlurmJobs:
    """Answers whether an owner's job still runs; what `ask` may be given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, bool | None] = {}
        # When a job may be asked about again: never while Slurm answers, and once it has ended.
        self._next: dict[str, float] = {}

    def __call__(self, owner: Owner) -> bool | None:
        """False: its job has no processes any more; None: not known, or not yet."""
        # Another cluster on the same file system has jobs of the same numbers.
        if not owner.job or owner.cluster != Owner.here().cluster:
            return None
        with self._lock:
            known = self._known.get(owner.job)
            if time.monotonic() >= self._next.get(owner.job, 0.0):
                # A command that hangs must not be given twice.
                self._next[owner.job] = math.inf
                threading.Thread(
                    target=self._ask, args=(owner.job,), name="turn-slurm", daemon=True
                ).start()
        return known

    def _ask(self, job: str) -> None:
        state = job_state(job) or ""
        with self._lock:
            # A job that waits again was requeued: its processes are gone, and others will come.
            gone = has_ended(state) or is_waiting(state)
            self._known[job] = False if gone else True if is_live(state) else None
            if not has_ended(state):
                self._next[job] = time.monotonic() + ASK_AGAIN_SECONDS


still_runs = SlurmJobs()
"""Of this process."""


@dataclass(frozen=True, slots=True)
class SavingJob:
    """Parameters of a job that saves to a shared file system.

    Attributes:
        nodes: How many wait while it saves.
        save_seconds: What a save takes with the whole bandwidth.
        mtbf_seconds: Mean time between failures of the whole job.
        overhead_seconds: By which a save lengthens the run; None: the whole time of the save.
        period_seconds: From one save to the next where that is fixed; 0: the job makes way for
            others.
    """

    nodes: float
    save_seconds: float
    mtbf_seconds: float
    overhead_seconds: float | None = None
    period_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse figures without a meaning."""
        for name in ("nodes", "save_seconds", "mtbf_seconds", "overhead_seconds"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ClusterError(f"{name} = {value} of a job: give a finite number above 0")

    @property
    def cost_seconds(self) -> float:
        """Cost of a save to the job itself."""
        return self.save_seconds if self.overhead_seconds is None else self.overhead_seconds

    def best_period_seconds(self, multiplier: float = 0.0) -> float:
        """The best period with the multiplier lambda; 0 gives Young/Daly's ``sqrt(2 mu o)``."""
        cost = self.cost_seconds + multiplier * self.save_seconds / self.nodes
        return math.sqrt(2.0 * self.mtbf_seconds * cost)

    @classmethod
    def from_statement(cls, content: dict[str, Any]) -> SavingJob:
        """The job of a saver's file."""
        names = ("nodes", "save_seconds", "mtbf_seconds", "overhead_seconds", "period_seconds")
        nodes, save, mtbf, overhead, period = (float(content[name]) for name in names)
        # Saves in the background may cost the run next to nothing, but not the file system.
        return cls(nodes, save, mtbf, max(overhead, 1e-3 * save), period)


@dataclass(frozen=True)
class Periods:
    """Periods of jobs that share a file system.

    Attributes:
        seconds: From one save to the next, by job.
        multiplier: Lambda; 0 where every job has Young/Daly's period.
        load: Share of the time for which the file system is busy with saves.
        waste: Expected share of all node-time that saves and what is lost at failures take, when
            no save waits for another.
    """

    seconds: tuple[float, ...]
    multiplier: float
    load: float
    waste: float


_ROUNDS = 200


def shared_periods(jobs: Sequence[SavingJob], budget: float = 1.0) -> Periods:
    """The periods that waste the least node-time within a budget of bandwidth.

    Args:
        jobs: All that save to the file system, or all of one project.
        budget: Share of the time for which saves may keep the file system busy; above 0.

    Raises:
        ClusterError: For a budget that is not above 0, or no jobs.
    """
    if not (budget > 0 and math.isfinite(budget)):
        raise ClusterError(f"budget = {budget}: give a share of the time above 0, as 0.5")
    if not jobs:
        raise ClusterError("there are no jobs to find periods for: give one or more")

    def load(multiplier: float) -> float:
        return math.fsum(job.save_seconds / job.best_period_seconds(multiplier) for job in jobs)

    multiplier = 0.0
    if load(0.0) > budget:
        low, high = 0.0, 1.0
        while load(high) > budget:
            low, high = high, 4.0 * high
        for _ in range(_ROUNDS):
            middle = 0.5 * (low + high)
            if middle in (low, high):
                break
            low, high = (middle, high) if load(middle) > budget else (low, middle)
        # The upper end keeps the budget.
        multiplier = high
    seconds = tuple(job.best_period_seconds(multiplier) for job in jobs)
    return Periods(seconds, multiplier, load(multiplier), waste_of(jobs, seconds))


def waste_of(jobs: Sequence[SavingJob], seconds: Sequence[float]) -> float:
    """The expected share of node-time that is wasted with given periods, when no save waits."""
    wasted = math.fsum(
        job.nodes * (job.cost_seconds / period + period / (2.0 * job.mtbf_seconds))
        for job, period in zip(jobs, seconds, strict=True)
    )
    return wasted / math.fsum(job.nodes for job in jobs)


_LEAST_LEFT = 0.05
"""Share of the budget that is left to those who can choose, whatever the others take."""


def least_period_seconds(own: SavingJob, others: list[SavingJob], load: float) -> float:
    """The shortest period of a job with which all together keep to a share of the time.

    Args:
        own: The job that asks.
        others: All other jobs.
        load: Largest share of the time for which the file system may be busy with saves.

    Returns:
        Seconds; 0 where the best period of each job alone keeps the load, or `own` is fixed.
    """
    if own.period_seconds:
        return 0.0
    fixed = sum(job.save_seconds / job.period_seconds for job in others if job.period_seconds)
    free = [own, *(other for other in others if not other.period_seconds)]
    periods = shared_periods(free, max(load - fixed, _LEAST_LEFT * load))
    return periods.seconds[0] if periods.multiplier else 0.0


class Saver:
    """One job among those that save to a file system; used by one process of the job.

    Args:
        directory: Of the turns; made if missing. One that cannot be used hinders nobody.
        load: As for `least_period_seconds`.
        ask_alive: As for `ask`.
    """

    def __init__(
        self, directory: str | os.PathLike[str], load: float, ask_alive: AskAlive = None
    ) -> None:
        self._file = Path(directory) / f"saver-{uuid.uuid4().hex}.json"
        self._load = load
        self._ask_alive = ask_alive
        self._ended = threading.Event()
        self._beating = False

    def least_seconds(
        self,
        *,
        nodes: float,
        save_seconds: float,
        overhead_seconds: float,
        mtbf_seconds: float,
        period_seconds: float = 0.0,
    ) -> float:
        """Tell the others of this job's saves; returns how far apart they should be at least.

        Args:
            nodes: As of `SavingJob`.
            save_seconds: As of `SavingJob`.
            overhead_seconds: As of `SavingJob`.
            mtbf_seconds: As of `SavingJob`.
            period_seconds: As of `SavingJob`.

        Returns:
            Seconds; 0: as often as is best for the job alone, also where nothing can be said.
        """
        content = {
            "nodes": nodes,
            "save_seconds": save_seconds,
            "overhead_seconds": overhead_seconds,
            "mtbf_seconds": mtbf_seconds,
            "period_seconds": period_seconds,
        }
        try:
            parse = SavingJob.from_statement
            claims = Claims(self._file.parent, parse, STALE_AFTER_SECONDS, self._ask_alive)
            now = claims.put(self._file, content)
            if not self._beating:
                self._beating = True
                threading.Thread(target=self._beat, name="saver", daemon=True).start()
            found = claims.living("saver-", now, but_not=self._file)
            others = [job for job in found if job.period_seconds >= 0]
            return least_period_seconds(parse(content), others, self._load)
        except (OSError, ClusterError):
            return 0.0

    def close(self) -> None:
        """This job makes no more saves that others should make way for."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._file)


@dataclass(frozen=True)
class FolderTurns:
    """The turns of one folder, for the trainer; travels to worker processes.

    Attributes:
        directory: Of the turns.
        order: One of `ORDERS`.
        ask_slurm: Whether Slurm is asked if a silent owner's job has ended.
        load: Largest share of the time for which saves may keep the file system busy.
    """

    directory: Path
    order: str
    ask_slurm: bool
    load: float

    def ask(self, size_bytes: float, **about: float) -> Request:
        """Ask for a turn without waiting for it; see `ask`."""
        alive = self._ask_alive
        return ask(self.directory, size_bytes, order=self.order, ask_alive=alive, **about)

    def saver(self) -> Saver:
        """This job among those that save there."""
        return Saver(self.directory, self.load, self._ask_alive)

    @property
    def _ask_alive(self) -> AskAlive:
        return still_runs if self.ask_slurm else None


def turns_for(settings: CheckpointSection) -> FolderTurns | None:
    """The turns that [checkpoint] asks for; None where it names no folder."""
    if not settings.turns:
        return None
    return FolderTurns(
        Path(settings.turns), settings.turn_order, settings.turn_ask_slurm, settings.turn_load
    )
