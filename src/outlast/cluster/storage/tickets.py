"""Tokens as files: who waits for a turn and who has it, on any file system that jobs share.

    ticket-<name>.json             somebody waits; its owner removes it, or anybody when it is dead
    held-<set>-<generation>.json   the turn of a set is taken; only the highest generation counts
    free-<set>-<generation>.json   it was given back

A turn is taken by creating the file of the next generation, which one process can do (a hard link,
or O_EXCL where there are none; both are atomic on NFS). Nobody ever removes the highest generation,
so that a dead owner's turn is passed over rather than broken, and no live one's can be broken by
mistake. Files live as long as their owner: seen by its process number on the same node, else by the
heartbeat, their modification time, compared with the file server's own clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cluster.storage.identity import Owner, lives, owner_of, this_process

if TYPE_CHECKING:
    from collections.abc import Callable

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
        return json.dumps({**content, "owner": self.owner.to_dict()})


@dataclass(frozen=True, slots=True)
class Held:
    """The newest generation of a set's turn.

    Attributes:
        generation: Its number; 0: nobody has had it yet.
        ticket: Of who has it; None: it is free.
    """

    generation: int
    ticket: Ticket | None


class Board:
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
        return Ticket(
            str(content["name"]),
            owner,
            int(content["set_number"]),
            *(
                float(content[name])
                for name in (
                    "size_bytes",
                    "nodes",
                    "unsaved_seconds",
                    "mtbf_seconds",
                    "asked_seconds",
                )
            ),
        )
    except (ValueError, TypeError, KeyError):
        return None
