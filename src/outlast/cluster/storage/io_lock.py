"""Advisory I/O lock: turns to write to a file system that several jobs share.

    with turn("/scratch/project/.turns", size_bytes, nodes=8, deadline_seconds=120) as mine:
        write()                          # mine.granted, mine.waited_seconds, mine.why

    request = ask("/scratch/project/.turns", size_bytes, nodes=8, mtbf_seconds=90_000)
    while not request.ready():           # one look at some files; goes on training meanwhile
        train_one_step()
    with request:
        write()

It is advice: nobody is kept from writing. When the deadline has passed, or the directory cannot be
used, the saver writes without a turn and `why` says so. It never raises for the directory's sake.

Requests and turns are files, on any file system that jobs share:

    ticket-<name>.json             a request; its owner removes it, or anybody when it is dead
    held-<set>-<generation>.json   the turn of a set is taken; only the highest generation counts
    free-<set>-<generation>.json   it was given back

A turn is taken by creating the file of the next generation, which one process can do (a hard link,
or O_EXCL where there are none; both are atomic on NFS). Nobody ever removes the highest generation,
so that a dead owner's turn is passed over rather than broken, and no live one's can be broken by
mistake. Files live as long as their owner: seen by its process number on the same node, else by the
heartbeat, their modification time, compared with the file server's own clock. Slurm knows long
before the heartbeat is too old that a job has ended; since its answer may take seconds, it is asked
in a thread (`SlurmJobs`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from outlast.cluster.slurm.jobs import has_ended, is_live, is_waiting, state_now
from outlast.cluster.storage.identity import Owner, lives, owner_of, this_process
from outlast.cluster.storage.periods import Saver
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from outlast.job import CheckpointSection


_TICKET = re.compile(r"ticket-([0-9a-f-]+)\.json")
_TURN = re.compile(r"(held|free)-(-?\d+)-(\d{12})\.json")

# A file may be empty for a moment after its creation; its owner may die in that moment.
_WRITING_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request for a turn.

    Attributes:
        name: Unique; never used again.
        owner: Who asks.
        set_number: One turn at a time is given in each set.
        size_bytes: What it is to move.
        nodes: Of the job.
        unsaved_seconds: Work since the last save, when it was asked.
        mtbf_seconds: Of the job, if it computes while it waits; 0: it stands still.
        asked_seconds: When, by the file server's clock.
    """

    name: str
    owner: Owner
    set_number: int
    size_bytes: float
    nodes: float
    unsaved_seconds: float
    mtbf_seconds: float
    asked_seconds: float

    def to_text(self) -> str:
        """As it stands in its file."""
        content = {name: getattr(self, name) for name in self.__slots__ if name != "owner"}
        return json.dumps({**content, "owner": asdict(self.owner)})


@dataclass(frozen=True, slots=True)
class Held:
    """The newest generation of a set's turn.

    Attributes:
        generation: Its number; 0: nobody has had it yet.
        ticket: Of who has it; None: it is free.
    """

    generation: int
    ticket: Ticket | None


class TicketDirectory:
    """The tokens in a directory.

    Args:
        directory: Made if missing.
        stale_after_seconds: Without a heartbeat for so long, an owner counts as dead.
        ask_alive: Whether an owner lives that has been silent for a third of that time, e.g. by
            asking Slurm for its job; None: not known.

    Raises:
        OSError: When the directory cannot be made or written to; so do the methods.
    """

    def __init__(
        self,
        directory: Path,
        stale_after_seconds: float,
        ask_alive: Callable[[Owner], bool | None] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._stale_after_seconds = stale_after_seconds
        self._ask_alive = ask_alive
        self._known: dict[str, Ticket | None] = {}

    def ask(
        self,
        *,
        set_number: int,
        size_bytes: float,
        nodes: float,
        unsaved_seconds: float = 0.0,
        mtbf_seconds: float = 0.0,
    ) -> Ticket:
        """Put up a request; it counts once it is whole."""
        name = uuid.uuid4().hex
        draft = self._directory / f".draft-{name}"
        try:
            with draft.open("x") as file:
                asked = os.fstat(file.fileno()).st_mtime
                ticket = Ticket(
                    name,
                    this_process(),
                    set_number,
                    size_bytes,
                    nodes,
                    unsaved_seconds,
                    mtbf_seconds,
                    asked,
                )
                file.write(ticket.to_text())
            draft.rename(self._path(ticket))
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return ticket

    def beat(self, ticket: Ticket, generation: int = 0) -> float:
        """Say that the owner lives; returns the file server's time."""
        path = self._turn(ticket.set_number, generation) if generation else self._path(ticket)
        os.utime(path)
        return path.stat().st_mtime

    def waiting(self, now_seconds: float) -> list[Ticket]:
        """The requests of live owners; those of dead ones are removed."""
        found = []
        for entry in self._entries():
            if not _TICKET.fullmatch(entry.name):
                continue
            ticket, age = self._read(entry, now_seconds)
            if ticket is not None and self._lives(ticket, age):
                found.append(ticket)
            elif ticket is not None or age > max(self._stale_after_seconds, _WRITING_SECONDS):
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()
        return found

    def held(self, now_seconds: float) -> dict[int, Held]:
        """The newest generation of each set."""
        newest: dict[int, tuple[int, os.DirEntry[str], bool]] = {}
        for entry in self._entries():
            if match := _TURN.fullmatch(entry.name):
                number, generation = int(match[2]), int(match[3])
                if generation > newest.get(number, (0,))[0]:
                    newest[number] = (generation, entry, match[1] == "held")
        found = {}
        for number, (generation, entry, taken) in newest.items():
            ticket = None
            if taken:
                ticket, age = self._read(entry, now_seconds)
                if ticket is None and age < _WRITING_SECONDS:
                    ticket = _UNKNOWN
                elif ticket is not None and not self._lives(ticket, age):
                    ticket = None
            found[number] = Held(generation, ticket)
        return found

    def take(self, ticket: Ticket, generation: int) -> bool:
        """Take the turn after `generation`; False: somebody else was faster."""
        path = self._turn(ticket.set_number, generation + 1)
        try:
            os.link(self._path(ticket), path)
        except FileExistsError:
            return False
        except OSError:
            # No hard links here.
            try:
                with path.open("x") as file:
                    file.write(ticket.to_text())
            except FileExistsError:
                return False
        # Who looked long ago may have taken a generation that was over and swept away.
        newest = 0
        for entry in self._entries():
            match = _TURN.fullmatch(entry.name)
            if match and int(match[2]) == ticket.set_number:
                number = int(match[3])
                newest = max(newest, number)
                if number <= generation:
                    with contextlib.suppress(OSError):
                        Path(entry.path).unlink()
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

    def _entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self._directory) as found:
            return list(found)

    def _read(self, entry: os.DirEntry[str], now_seconds: float) -> tuple[Ticket | None, float]:
        """The ticket in a file and the seconds since its heartbeat."""
        try:
            # Not the entry's own, which may be as old as the listing.
            age = now_seconds - Path(entry.path).stat().st_mtime
            ticket = self._known.get(entry.name)
            if ticket is None:
                ticket = _ticket_of(Path(entry.path).read_text())
                if ticket is not None:
                    self._known[entry.name] = ticket
        except OSError:
            return None, 0.0
        return ticket, age

    def _lives(self, ticket: Ticket, age_seconds: float) -> bool:
        return lives(ticket.owner, age_seconds, self._stale_after_seconds, self._ask_alive)

    def _path(self, ticket: Ticket) -> Path:
        return self._directory / f"ticket-{ticket.name}.json"

    def _turn(self, set_number: int, generation: int) -> Path:
        return self._directory / f"held-{set_number}-{generation:012d}.json"


_UNKNOWN = Ticket("", Owner("", "", "", 0, 0), 0, 0.0, 1.0, 0.0, 0.0, 0.0)


def _ticket_of(text: str) -> Ticket | None:
    try:
        content: dict[str, Any] = json.loads(text)
        owner = owner_of(content["owner"])
        if owner is None:
            return None
        sizes = ("size_bytes", "nodes", "unsaved_seconds", "mtbf_seconds", "asked_seconds")
        figures = [float(content[name]) for name in sizes]
        return Ticket(str(content["name"]), owner, int(content["set_number"]), *figures)
    except (ValueError, TypeError, KeyError):
        return None


Order = Literal["fcfs", "least-waste", "set-10"]
"""fcfs: who asks first. least-waste: who keeps the others waiting shortest for each of its own
nodes. set-10: one job at a time of each class of periods, and classes share the bandwidth."""
ORDERS: tuple[Order, ...] = get_args(Order)


def checked(order: str) -> Order:
    """An order by its name; raises ClusterError for another."""
    for item in ORDERS:
        if item == order:
            return item
    raise ClusterError(f'order = "{order}" is not known: give one of {", ".join(ORDERS)}')


def priority(
    order: Order, *, asked_seconds: float, size_bytes: float, cost_per_second: float
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

    Of a job that stands still: all its nodes. Of one that goes on computing until it is its turn,
    only what a failure would cost it: nodes times unsaved work over mean time between failures.

    Args:
        nodes: Of the job.
        unsaved_seconds: Work since what the last save holds.
        mtbf_seconds: Of the whole job; 0: the job stands still while it waits.
    """
    return nodes * unsaved_seconds / mtbf_seconds if mtbf_seconds else nodes


def set_of(order: Order, period_seconds: float) -> int:
    """The set within which one job at a time is served.

    In Set-10 (Boito, Pallez, Teylo and Vidal 2023, IO-SETS: Simple and efficient approaches for
    I/O bandwidth management) it is the rounded decimal logarithm of the mean time from one phase
    of I/O to the next; in the other orders there is one set.
    """
    if order != "set-10":
        return 0
    if not (period_seconds > 0 and math.isfinite(period_seconds)):
        raise ClusterError(
            f"period_seconds = {period_seconds}: set-10 needs the time from one save to the next"
        )
    return round(math.log10(period_seconds))


HEARTBEAT_SECONDS = 10.0
STALE_AFTER_SECONDS = 90.0
"""Longer than NFS keeps the times of files in its cache (`acregmax`, 60 s)."""
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

    def __init__(
        self,
        directory: Path,
        order: Order,
        about: dict[str, float],
        set_number: int,
        *,
        stale_after_seconds: float,
        heartbeat_seconds: float,
        ask_alive: Callable[[Owner], bool | None] | None,
    ) -> None:
        self.granted = False
        self.why = "waiting"
        self.waited_seconds = 0.0
        self._order = order
        self._begun = time.monotonic()
        self._generation = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._tickets: TicketDirectory | None = None
        self._ticket: Ticket | None = None
        try:
            self._tickets = TicketDirectory(directory, stale_after_seconds, ask_alive)
            self._ticket = self._tickets.ask(set_number=set_number, **about)
        except OSError as error:
            self._give_up(f"{directory} cannot be used: {error.strerror or error}")
            return
        self._heartbeat_seconds = heartbeat_seconds
        threading.Thread(target=self._beat, name="turn", daemon=True).start()

    def ready(self) -> bool:
        """Return True if the saver may write now: it has the turn, or there is none to be had.

        Takes the turn if it is free and nobody is before this request.
        """
        if self.granted or self.why != "waiting":
            return True
        assert self._tickets is not None
        assert self._ticket is not None
        try:
            with self._lock:
                self._try(self._tickets, self._ticket)
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
            if self._tickets is not None and self._ticket is not None:
                if self._generation:
                    self._tickets.give_back(self._ticket, self._generation)
                else:
                    self._tickets.withdraw(self._ticket)
        self._ticket = None
        self._generation = 0
        self.granted = False

    def __enter__(self) -> Request:
        self.ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _try(self, tickets: TicketDirectory, ticket: Ticket) -> None:
        try:
            now = tickets.beat(ticket)
        except FileNotFoundError:
            # Somebody took this process for dead, e.g. while it was suspended.
            self._give_up("the request was removed by others")
            return
        held = tickets.held(now).get(ticket.set_number)
        if held is not None and held.ticket is not None:
            return
        rivals = [item for item in tickets.waiting(now) if item.set_number == ticket.set_number]
        mine = self._key(ticket, now)
        if any(self._key(rival, now) < mine for rival in rivals):
            return
        generation = held.generation if held is not None else 0
        if tickets.take(ticket, generation):
            self._generation = generation + 1
            self.granted, self.why = True, ""
            self.waited_seconds = time.monotonic() - self._begun

    def _key(self, ticket: Ticket, now: float) -> tuple[float, float, str]:
        unsaved = ticket.unsaved_seconds + max(now - ticket.asked_seconds, 0.0)
        cost = waiting_cost(ticket.nodes, unsaved, ticket.mtbf_seconds)
        key = priority(
            self._order,
            asked_seconds=ticket.asked_seconds,
            size_bytes=ticket.size_bytes,
            cost_per_second=cost,
        )
        return key, ticket.asked_seconds, ticket.name

    def _give_up(self, why: str) -> None:
        self.waited_seconds = time.monotonic() - self._begun
        self.why = why
        self._ended.set()
        if self._tickets is not None and self._ticket is not None:
            with contextlib.suppress(OSError):
                self._tickets.withdraw(self._ticket)
        self._ticket = None

    def _beat(self) -> None:
        """Say until the end that this process lives, also while it writes."""
        while not self._ended.wait(self._heartbeat_seconds):
            tickets, ticket = self._tickets, self._ticket
            if tickets is not None and ticket is not None:
                with self._lock, contextlib.suppress(OSError):
                    tickets.beat(ticket, self._generation)


def ask(
    directory: str | os.PathLike[str],
    size_bytes: float,
    *,
    nodes: float = 1.0,
    order: str = "least-waste",
    period_seconds: float = math.inf,
    unsaved_seconds: float = 0.0,
    mtbf_seconds: float = 0.0,
    stale_after_seconds: float = STALE_AFTER_SECONDS,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ask_alive: Callable[[Owner], bool | None] | None = None,
) -> Request:
    """Ask for a turn without waiting for it. One process of a job asks, not every rank.

    Args:
        directory: Of the turns; all who share one file system and trust each other use the same.
        size_bytes: What is to be written.
        nodes: Of the job, which wait meanwhile.
        order: One of `outlast.cluster.storage.io_lock.ORDERS`; the same for all.
        period_seconds: From one save to the next; needed by set-10.
        unsaved_seconds: Work since the last save.
        mtbf_seconds: Of a job that computes until it is its turn: its mean time between failures.
            0: it stands still.
        stale_after_seconds: Owners on other nodes without a heartbeat for so long count as dead.
        heartbeat_seconds: How often this one says that it lives.
        ask_alive: Whether an owner lives, e.g. by asking Slurm; None for what is not known.

    Raises:
        ClusterError: For a setting that has no meaning; never for the directory.
    """
    for name, value in (("size_bytes", size_bytes), ("nodes", nodes)):
        if not (value > 0 and math.isfinite(value)):
            raise ClusterError(f"{name} = {value} of a turn: give a finite number above 0")
    if not 0 < heartbeat_seconds < stale_after_seconds:
        raise ClusterError(
            f"heartbeat_seconds = {heartbeat_seconds} and stale_after_seconds = "
            f"{stale_after_seconds}: the first must be above 0 and below the second"
        )
    known = checked(order)
    about = {
        "size_bytes": float(size_bytes),
        "nodes": float(nodes),
        "unsaved_seconds": float(unsaved_seconds),
        "mtbf_seconds": float(mtbf_seconds),
    }
    return Request(
        Path(directory),
        known,
        about,
        set_of(known, period_seconds),
        stale_after_seconds=stale_after_seconds,
        heartbeat_seconds=heartbeat_seconds,
        ask_alive=ask_alive,
    )


@contextlib.contextmanager
def turn(
    directory: str | os.PathLike[str],
    size_bytes: float,
    *,
    deadline_seconds: float = 60.0,
    nodes: float = 1.0,
    order: str = "least-waste",
    period_seconds: float = math.inf,
    stale_after_seconds: float = STALE_AFTER_SECONDS,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ask_alive: Callable[[Owner], bool | None] | None = None,
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
        stale_after_seconds: As for `ask`.
        heartbeat_seconds: As for `ask`.
        ask_alive: As for `ask`.

    Raises:
        ClusterError: For a setting that has no meaning; never for the directory.
    """
    if not deadline_seconds >= 0:
        raise ClusterError(f"deadline_seconds = {deadline_seconds} of a turn: give 0 or more")
    request = ask(
        directory,
        size_bytes,
        nodes=nodes,
        order=order,
        period_seconds=period_seconds,
        stale_after_seconds=stale_after_seconds,
        heartbeat_seconds=heartbeat_seconds,
        ask_alive=ask_alive,
    )
    try:
        request.wait(deadline_seconds)
        yield request
    finally:
        request.release()


ASK_AGAIN_SECONDS = 15.0


def job_state(job: str) -> str | None:
    """The state of a job that counts its processes; None where nobody knows."""
    try:
        return state_now(job, of_processes=True)
    except ClusterError:
        return None


class SlurmJobs:
    """Answers whether an owner's job still runs; what `outlast.cluster.storage.ask` may be given.

    Args:
        state_of_job: Asks for a state; may take long.
        ask_again_seconds: From one answer about a job to the next question.
    """

    def __init__(
        self,
        state_of_job: Callable[[str], str | None] = job_state,
        ask_again_seconds: float = ASK_AGAIN_SECONDS,
    ) -> None:
        self._state_of_job = state_of_job
        self._ask_again_seconds = ask_again_seconds
        self._lock = threading.Lock()
        self._known: dict[str, bool | None] = {}
        self._ended: set[str] = set()
        self._asked: dict[str, float] = {}

    def __call__(self, owner: Owner) -> bool | None:
        """False: its job has no processes any more; None: not known, or not yet."""
        # Another cluster on the same file system has jobs of the same numbers.
        if not owner.job or owner.cluster != this_process().cluster:
            return None
        with self._lock:
            known = self._known.get(owner.job)
            now = time.monotonic()
            if owner.job not in self._ended and now >= self._asked.get(owner.job, 0.0):
                # Until it has answered; a command that hangs must not be given twice.
                self._asked[owner.job] = float("inf")
                threading.Thread(
                    target=self._ask, args=(owner.job,), name="turn-slurm", daemon=True
                ).start()
        return known

    def _ask(self, job: str) -> None:
        state = self._state_of_job(job)
        runs = None
        ended = state is not None and has_ended(state)
        if ended or (state is not None and is_waiting(state)):
            # A job that waits again was requeued: its processes are gone, and others will come.
            runs = False
        elif state is not None and is_live(state):
            runs = True
        with self._lock:
            self._known[job] = runs
            if ended:
                self._ended.add(job)
            self._asked[job] = time.monotonic() + self._ask_again_seconds


still_runs = SlurmJobs()
"""Of this process."""


@dataclass(frozen=True)
class FolderTurns:
    """The turns of one folder, for the trainer; travels to worker processes.

    Attributes:
        directory: Of the turns.
        order: One of `outlast.cluster.storage.io_lock.ORDERS`.
        ask_slurm: Whether Slurm is asked if a silent owner's job has ended.
        load: Largest share of the time for which saves may keep the file system busy.
    """

    directory: Path
    order: str
    ask_slurm: bool
    load: float

    def ask(
        self,
        size_bytes: float,
        *,
        nodes: float,
        unsaved_seconds: float,
        mtbf_seconds: float,
        period_seconds: float,
    ) -> Request:
        """Ask for a turn without waiting for it; see `outlast.cluster.storage.ask`."""
        return ask(
            self.directory,
            size_bytes,
            nodes=nodes,
            order=self.order,
            period_seconds=period_seconds,
            unsaved_seconds=unsaved_seconds,
            mtbf_seconds=mtbf_seconds,
            ask_alive=self._ask_alive,
        )

    def saver(self) -> Saver:
        """This job among those that save there; see `outlast.cluster.storage.periods`."""
        return Saver(
            self.directory,
            self.load,
            stale_after_seconds=STALE_AFTER_SECONDS,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            ask_alive=self._ask_alive,
        )

    @property
    def _ask_alive(self) -> Callable[[Owner], bool | None] | None:
        return still_runs if self.ask_slurm else None


def turns_for(settings: CheckpointSection) -> FolderTurns | None:
    """The turns that [checkpoint] asks for; None where it names no folder."""
    if not settings.turns:
        return None
    return FolderTurns(
        Path(settings.turns), settings.turn_order, settings.turn_ask_slurm, settings.turn_load
    )
