"""The event about data that nodes have copied for themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outlast.records.events import Event


@dataclass(frozen=True)
class DataStaged(Event):
    """Every node has its own copy of the tokens, or reads them in place.

    Attributes:
        seconds: Longest time that a process needed for all its files.
        copies: One entry for each file and node: ``source``, ``path``, ``host``, ``processes``
            that use it there, ``bytes``, ``copied_bytes`` (read from the source now; 0: the copy
            was there), ``resumed_bytes`` (left by a process that died), ``seconds``,
            ``waited_seconds`` (the longest that a process waited for another), ``evicted`` (sources
            of copies that had to go), ``damaged`` (an earlier copy was, and was made anew) and
            ``problem`` (why it is read in place; empty where it is not).
    """

    kind: ClassVar[str] = "data_staged"
    seconds: float
    copies: list[dict[str, Any]]

    @property
    def copied_bytes(self) -> int:
        """What all nodes have read from the sources now."""
        return sum(int(copy_["copied_bytes"]) for copy_ in self.copies)

    @property
    def problems(self) -> list[str]:
        """Why files are read in place, each reason once."""
        return sorted({str(copy_["problem"]) for copy_ in self.copies if copy_["problem"]})

    def words(self) -> str:
        """One line for people."""
        kept = [copy_ for copy_ in self.copies if not copy_["problem"]]
        if not kept:
            return "data: read in place, on no node from a copy"
        nodes = len({name["host"] for name in kept})
        total = sum(int(name["bytes"]) for name in kept)
        on = f"{nodes} node{'s' if nodes != 1 else ''}"
        if not self.copied_bytes:
            return (
                f"data: {total / 1e6:,.1f} MB were on {on} already, found in {self.seconds:.2f} s"
            )
        return (
            f"data: {self.copied_bytes / 1e6:,.1f} of {total / 1e6:,.1f} MB copied to {on} in "
            f"{self.seconds:.2f} s"
        )
