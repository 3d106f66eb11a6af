"""The parity that one member keeps for others, in files that outlive its process.

Every stripe has two places. An update fills those that are not in use; then a small file, the
head, is replaced by a rename and says which place of each stripe holds the parity of which epoch:
``prepared`` once all of this member's stripes are written, ``committed`` once all members' are.
So a death at any byte leaves the parity of the last epoch as it was, and nothing needs undoing.
Until the next update begins, the epoch before is there as well, for jobs of several groups of
which some were behind.
(A journal of old stripes would take as much memory wherever most of the state changes in a step,
and would copy each stripe once more.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outlast.errors import RecoverError
from outlast.recover.parity.code import Bytes, Layout

FORMAT = 1
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


@dataclass(frozen=True)
class ParityMark:
    """Of which data some parity is.

    Attributes:
        epoch: The step whose state it was.
        lengths: Bytes of each member's data.
        digests: Of each member's data, see `outlast.recover.parity.code`.
    """

    epoch: int
    lengths: tuple[int, ...]
    digests: tuple[int, ...]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ParityMark:
        """Of `asdict` as JSON gives it back."""
        return cls(content["epoch"], tuple(content["lengths"]), tuple(content["digests"]))


@dataclass(frozen=True)
class _Version:
    """A mark, and for each stripe of parity the place (0 or 1) of its bytes."""

    mark: ParityMark
    places: bytes


class ParityFile:
    """One member's stripes of parity.

    Args:
        directory: Where the files lie, in memory (tmpfs); made where it is missing.
        name: Of the group, the same for all members.
        layout: The group's placement.
        member: This member's number.

    Raises:
        RecoverError: Where the directory cannot be used, or its files are of another group.
    """

    def __init__(self, directory: str | Path, name: str, layout: Layout, member: int) -> None:
        self._layout, self._member = layout, member
        self._head = Path(directory) / f"{name}.{member}.head"
        self._stripes = Path(directory) / f"{name}.{member}.stripes"
        self._committed: _Version | None = None
        self._prepared: _Version | None = None
        self._previous: _Version | None = None
        self._written: set[int] = set()
        self._memory = np.empty(0, np.uint8)
        self._lock = -1
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._take()
            self._map(self._stripes.stat().st_size if self._stripes.exists() else 0)
            self._read_head()
        except OSError as error:
            raise RecoverError(f"parity cannot be kept in {directory}: {error}") from error

    @property
    def committed(self) -> ParityMark | None:
        """The parity that all members had when they last agreed."""
        return self._committed.mark if self._committed else None

    @property
    def marks(self) -> tuple[ParityMark, ...]:
        """Of all parity that is whole here: committed, before that, and prepared."""
        return tuple(version.mark for version in self._versions)

    def begin(self, rows: int) -> None:
        """Get ready to write an epoch whose data reach `rows` rows; forgets all but the committed.

        Raises:
            RecoverError: Where the memory does not suffice; what is committed stays.
        """
        self._written.clear()
        if self._prepared is not None or self._previous is not None:
            self._prepared = self._previous = None
            self._publish()
        stripes = self._layout.parity_stripes(self._member, rows)
        size = 2 * stripes * self._layout.stripe_bytes
        if size > self._memory.nbytes:
            self._grow(size)

    def place(self, stripe: int) -> Bytes:
        """(stripe_bytes,): where the next epoch's stripe is to be written."""
        self._written.add(stripe)
        return self._at(stripe, 1 - _place(self._committed, stripe))

    def current(self, stripe: int) -> Bytes:
        """(stripe_bytes,): the committed bytes of a stripe; zeros where there are none yet."""
        return self._at(stripe, _place(self._committed, stripe))

    def stripe(self, mark: ParityMark, stripe: int) -> Bytes:
        """(stripe_bytes,): the bytes of a stripe as committed or prepared with this mark."""
        version = self._version(mark)
        assert version is not None
        return self._at(stripe, _place(version, stripe))

    def prepare(self, mark: ParityMark) -> None:
        """Say that every stripe of an epoch is written."""
        places = bytearray(self._committed.places if self._committed else b"")
        stripes = self._layout.parity_stripes(self._member, self._layout.rows(mark.lengths))
        places.extend(bytes(max(stripes - len(places), 0)))
        for stripe in self._written:
            places[stripe] = 1 - _place(self._committed, stripe)
        self._prepared = _Version(mark, bytes(places))
        self._publish()

    def commit(self, mark: ParityMark) -> None:
        """Take what has this mark for the committed parity."""
        version = self._version(mark)
        self._previous = self._committed if version is self._prepared else None
        self._committed, self._prepared = version, None
        self._written.clear()
        self._publish()

    def close(self, *, remove: bool = False) -> None:
        """Let go of the memory; with `remove` also of the files."""
        self._memory = np.empty(0, np.uint8)
        if remove:
            for file in (self._head, self._stripes, self._head.with_suffix(".lock")):
                file.unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take(self) -> None:
        """Keep the files from other processes: a stopped one may wake up behind its successor.

        A record lock goes with its process however that ends, and forked children do not hold it.
        """
        file = self._head.with_suffix(".lock")
        self._lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RecoverError(
                f"member {self._member} of the parity group in {file.parent} is still alive as "
                "another process: end that one first"
            ) from error

    def _version(self, mark: ParityMark) -> _Version | None:
        # What is prepared may do over again what has the same mark.
        found = (version for version in reversed(self._versions) if version.mark == mark)
        return next(found, None)

    @property
    def _versions(self) -> list[_Version]:
        versions = (self._committed, self._previous, self._prepared)
        return [version for version in versions if version is not None]

    def _at(self, stripe: int, place: int) -> Bytes:
        size = self._layout.stripe_bytes
        begin = (2 * stripe + place) * size
        return self._memory[begin : begin + size]

    def _grow(self, size: int) -> None:
        before = self._memory.nbytes
        try:
            with self._stripes.open("ab") as file:
                try:
                    # A page that cannot be had must be missed here, not where it is written.
                    os.posix_fallocate(file.fileno(), 0, size)
                except OSError:
                    file.truncate(before)
                    raise
            self._map(size)
        except OSError as error:
            raise RecoverError(
                f"{size / 1e6:.1f} MB of parity do not fit into {self._stripes.parent}: "
                f"{_why(error)}; make room there, or choose another directory or fewer losses"
            ) from error

    def _map(self, size: int) -> None:
        if size:
            with self._stripes.open("r+b") as file:
                flags = mmap.MAP_SHARED | _POPULATE
                self._memory = np.frombuffer(mmap.mmap(file.fileno(), size, flags), np.uint8)

    def _identity(self) -> dict[str, Any]:
        return {"format": FORMAT, "member": self._member, **asdict(self._layout)}

    def _publish(self) -> None:
        content = {
            "group": self._identity(),
            "committed": _to_json(self._committed),
            "prepared": _to_json(self._prepared),
            "previous": _to_json(self._previous),
        }
        text = json.dumps(content)
        temporary = self._head.with_suffix(".new")
        try:
            temporary.write_text(f"{zlib.crc32(text.encode()):08x} {text}", encoding="utf-8")
            temporary.replace(self._head)
        except OSError as error:
            raise RecoverError(f"{self._head} cannot be written: {_why(error)}") from error

    def _read_head(self) -> None:
        """Take up the files of an earlier process; a damaged head counts as none."""
        with contextlib.suppress(FileNotFoundError):
            check, _, text = self._head.read_bytes().partition(b" ")
            if check != b"%08x" % zlib.crc32(text):
                return
            content = json.loads(text)
            if content["group"] != self._identity():
                raise RecoverError(
                    f"{self._head} is of another parity group ({content['group']}, here "
                    f"{self._identity()}); remove it or choose another name"
                )
            kinds = ("committed", "prepared", "previous")
            versions = [
                _Version(ParityMark.from_json(found), bytes.fromhex(found["places"]))
                if (found := content[kind])
                else None
                for kind in kinds
            ]
            needed = max(len(version.places) if version else 0 for version in versions)
            if 2 * needed * self._layout.stripe_bytes <= self._memory.nbytes:
                self._committed, self._prepared, self._previous = versions


def _place(version: _Version | None, stripe: int) -> int:
    return version.places[stripe] if version and stripe < len(version.places) else 0


def _to_json(version: _Version | None) -> dict[str, Any] | None:
    return {**asdict(version.mark), "places": version.places.hex()} if version else None


def _why(error: OSError) -> str:
    return "no space is left" if error.errno == errno.ENOSPC else str(error)
