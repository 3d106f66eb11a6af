"""The tokens on each node: what the stager that was handed in has copied, and its event."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any, Protocol

from outlast.distributed.group import gather_on_first
from outlast.records import DataStaged, Warned

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.records import RecordWriter


class Staged(Protocol):
    """A file on this node, or in place where `problem` says why there is no copy."""

    @property
    def path(self) -> Path:
        """Its path."""

    @property
    def source(self) -> str:
        """Its source."""

    @property
    def problem(self) -> str:
        """Why `path` is the source itself; empty where it is a copy."""

    def facts(self) -> dict[str, Any]:
        """An entry of `DataStaged.copies`, but for its host and processes."""


class Stager(Protocol):
    """Gets a file to this node, once for all processes that ask; it travels to worker processes."""

    @property
    def timeout_seconds(self) -> float:
        """Longest time that one file may take."""

    def __call__(self, source: str, beside: tuple[str, ...], digest: str | None) -> Staged:
        """Get the file at a path or URL, with the names beside it; raises OutlastError."""


class NodeFiles:
    """The files that this process has asked for; what `prepare` takes as `stage`."""

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._staged: list[Staged] = []
        self._seconds = 0.0

    def __call__(self, source: str, beside: tuple[str, ...], digest: str | None) -> Path:
        """The path on this node."""
        begun = time.perf_counter()
        staged = self._stager(source, beside, digest)
        self._seconds += time.perf_counter() - begun
        self._staged.append(staged)
        return staged.path

    def record(self, records: RecordWriter | None) -> None:
        """Write down what all nodes have done; all ranks call it together."""
        host = socket.gethostname()
        mine = [{"host": host, **staged.facts()} for staged in self._staged]
        everyone = gather_on_first((self._seconds, mine))
        if records is None or not everyone:
            return
        copies = [entry for _, listed in everyone for entry in listed]
        if not copies:
            return
        event = DataStaged(max(seconds for seconds, _ in everyone), by_node(copies))
        records.write(event)
        for problem in event.problems:
            records.write(Warned(problem))


def by_node(copies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per file and host: of the process that has copied, with all processes' waits."""
    nodes: dict[tuple[str, str], dict[str, Any]] = {}
    for copy_ in copies:
        key = (copy_["host"], copy_["source"])
        kept = nodes.get(key)
        if kept is None:
            nodes[key] = {**copy_, "processes": 1}
            continue
        leading = max(kept, copy_, key=lambda one: (one["copied_bytes"], one["seconds"]))
        nodes[key] = {
            **leading,
            "processes": kept["processes"] + 1,
            "waited_seconds": max(kept["waited_seconds"], copy_["waited_seconds"]),
        }
    return list(nodes.values())
