"""Ownership of a store: one process at a time writes, by a lock or by claims checked at each save.

In a file system, a lock keeps a second writer out while the first one lives. An object store has no
locks. There, every session has a small object ``session-NUMBER.json`` that only one writer can have
made. The newest one holds the store: a writer whose session is older publishes nothing more. Who
makes it tries to make it twice, since some clients and servers do not keep to the condition.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
import warnings
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.storage import LocalStorage, make_directory, publish, sentence_of
from outlast.checkpoint.version import list_versions
from outlast.errors import CheckpointError, RunError
from outlast.records import OwnerLock, lives_on_this_host, this_process

if TYPE_CHECKING:
    from collections.abc import Collection

    from outlast.checkpoint.storage import FsspecStorage, Storage

_NAME = re.compile(r"session-([1-9]\d{0,17})\.json", re.ASCII)
_REMEDY = "wait for it to end, or save to another directory"
# Claims of processes that were killed, each of which leaves one.
_CLAIMS_KEPT = 8


class OwnedError(CheckpointError):
    """Another process saves to the store: no failure of the storage, and no reason to wait."""


def claimed(storage: Storage) -> dict[int, str]:
    """Session to name of the claims in an object store; none where a lock does the work.

    Raises:
        OSError: When they cannot be listed.
    """
    if isinstance(storage, LocalStorage):
        return {}
    named = (_NAME.fullmatch(name) for name in storage.files(""))
    return {int(found[1]): found[0] for found in named if found}


class Claim:
    """The right to write versions of a session, until another process claims a newer one.

    Args:
        storage: An object store.
        session: Larger than that of every version and claim there.
        mine: Names of the claims that this writer has made before, and which this one replaces.
        held: Whether this process continues to hold the store between its saves.
        writer: What tells this writer's claims from those of others.

    Attributes:
        name: Of its object in the store.

    Raises:
        OwnedError: When another live process saves there.
        OSError: When the storage fails.
    """

    def __init__(
        self,
        storage: FsspecStorage,
        session: int,
        *,
        mine: Collection[str] = (),
        held: bool = True,
        writer: str = "",
    ) -> None:
        self._storage = storage
        self._session = session
        others = claimed(storage)
        for other in sorted(others, reverse=True):
            if others[other] in mine:
                continue
            owner = _read(storage, others[other])
            if other >= session or (owner.get("held") and lives_on_this_host(owner)):
                raise OwnedError(f"{_in_use(storage, owner)}; {_REMEDY}")
        writer = writer or uuid.uuid4().hex
        self._owner = {**this_process(), "held": held, "since": time.time(), "id": writer}
        self.name = f"session-{session}.json"
        try:
            publish(storage, self.name, self._content)
        except FileExistsError:
            owner = _read(storage, self.name)
            raise OwnedError(f"{_in_use(storage, owner)}; {_REMEDY}") from None
        if not storage.refuses(self.name, self._content):
            warnings.warn(
                f"{storage.location} offers no conditional write (If-None-Match or the like): two "
                "runs that begin to save there at the same moment would not notice each other; "
                "see to it that only one does, or save to S3, Google Cloud Storage or Azure",
                stacklevel=2,
            )
        for other in others:
            if other <= session - _CLAIMS_KEPT or others[other] in mine:
                with contextlib.suppress(OSError):
                    storage.remove(others[other])

    @property
    def _content(self) -> bytes:
        return json.dumps(self._owner).encode()

    def check(self) -> None:
        """See that no other process has claimed the store meanwhile.

        Raises:
            OwnedError: When one has.
            OSError: When the storage fails.
        """
        others = claimed(self._storage)
        # Who has claimed the store and ended since has left versions.
        newest = max(
            [*others, *(version.session for version in list_versions(self._storage))], default=0
        )
        # Where the storage has no conditional put, the later of two equal claims counts.
        ours = self._session not in others or self._storage.read(self.name) == self._content
        if newest > self._session or not ours:
            owner = _read(self._storage, others[newest]) if newest in others else {}
            raise OwnedError(
                f"{_in_use(self._storage, owner)}, which took over from this one; nothing more is "
                "published here: end one of the two runs, or give it a store of its own"
            )

    def release(self) -> None:
        """Let others save here at once."""
        with contextlib.suppress(OSError, CheckpointError):
            if self._storage.read(self.name) != self._content:
                return
            try:
                self._storage.remove(self.name)
            except OSError:
                # Where nothing may be deleted, it says that its process is done.
                self._owner["held"] = False
                with self._storage.create(self.name) as file:
                    file.write(self._content)


class Ownership:
    """The right of this process to write to a store, by a lock or by a claim.

    Args:
        storage: The store.
        held: Whether an object store is held between the saves, too.
    """

    def __init__(self, storage: Storage, *, held: bool = True) -> None:
        self._storage = storage
        self._held = held
        self._lock: OwnerLock | None = None
        self._claim: Claim | None = None
        self._id = uuid.uuid4().hex
        # Sessions that were asked for, of which an outage may have hidden that they were given.
        self._asked: set[int] = set()

    def lock(self, *, remedy: str = _REMEDY) -> None:
        """Take the lock of a store in a file system, unless it is taken; make its directory.

        Args:
            remedy: Advice for when another process holds it.

        Raises:
            OwnedError: When a live process holds it, named by host and pid.
            CheckpointError: When the directory or the lock cannot be made.
        """
        if not isinstance(self._storage, LocalStorage) or self._lock is not None:
            return
        root = self._storage.root
        try:
            make_directory(root)
        except OSError as error:
            raise CheckpointError(f"{root} cannot be made: {error.strerror}") from None
        lock = OwnerLock(root / "owner", subject=f"the checkpoint store {root}", remedy=remedy)
        try:
            lock.acquire()
        except RunError as error:
            # Its cause is an OSError where the lock file cannot be made.
            kind = CheckpointError if isinstance(error.__context__, OSError) else OwnedError
            raise kind(str(error)) from None
        self._lock = lock

    def claim(self, session: int) -> None:
        """Claim a session of an object store, in place of the one before.

        Raises:
            OwnedError: When another live process saves there.
            OSError: When the storage fails.
        """
        if isinstance(self._storage, LocalStorage):
            return
        self._asked.add(session)
        # Its own claims are still there, while those of others come and go.
        others = self.others()
        mine = [f"session-{own}.json" for own in self._asked - others.keys() - {session}]
        claim = Claim(self._storage, session, mine=mine, held=self._held, writer=self._id)
        # Storage that hung may answer when a later session has been asked for.
        if session == max(self._asked):
            self._claim = claim
        if self._asked == {session}:
            with contextlib.suppress(OSError):
                self._storage.drop_uploads("step-")

    def others(self) -> dict[int, str]:
        """Session to name of the claims of other writers.

        Raises:
            OSError: When they cannot be read.
        """
        return {
            session: name
            for session, name in claimed(self._storage).items()
            if session not in self._asked or _read(self._storage, name).get("id") != self._id
        }

    def check(self) -> None:
        """See that no other process has taken the store over.

        Raises:
            LeaseLostError: When one has taken the lock.
            OwnedError: When one has claimed the store.
            OSError: When the storage fails.
        """
        self.check_lock()
        if self._claim is not None:
            self._claim.check()

    def check_lock(self) -> None:
        """The same where a look costs next to nothing: at a lock in a file system."""
        if self._lock is not None:
            self._lock.check()

    def release(self) -> None:
        """Let others write here."""
        lock, claim, self._lock, self._claim = self._lock, self._claim, None, None
        for held in (lock, claim):
            if held is not None:
                held.release()


def refuse_if_held(storage: Storage) -> None:
    """Refuse to change an object store that a live process of this host saves to.

    Raises:
        OwnedError: When there is one.
        CheckpointError: When the storage fails.
    """
    try:
        sessions = claimed(storage)
        owner = _read(storage, sessions[max(sessions)]) if sessions else {}
    except OSError as error:
        raise CheckpointError(f"{storage.location} cannot be read: {sentence_of(error)}") from None
    if owner.get("held") and lives_on_this_host(owner):
        raise OwnedError(f"{_in_use(storage, owner)}; wait for it to end")


def _read(storage: Storage, name: str) -> dict[str, Any]:
    """Read who made a claim; empty when it has gone, or is no claim."""
    try:
        found = json.loads(storage.read(name))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _in_use(storage: Storage, owner: dict[str, Any]) -> str:
    return (
        f"the checkpoint store {storage.location} is in use by process {owner.get('pid', '?')} on "
        f"host {owner.get('host', '?')}"
    )
