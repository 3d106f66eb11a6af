"""Nodes that fail and come back."""

from __future__ import annotations

import numpy as np

from outlast.cluster.simulate.book import NEVER, Book


class Failures:
    """Independent failures of equal nodes at a constant rate, and exponential repairs."""

    def __init__(self, book: Book, seed: int) -> None:
        self._book = book
        self._source = np.random.default_rng(seed)

    def next_failure(self) -> float:
        """When one of the nodes that are up fails next, if nothing changes before."""
        rate = self._book.scheduler.node_failures_per_second * self._book.up
        return self._book.now + float(self._source.exponential(1 / rate)) if rate else NEVER

    def repaired(self) -> float:
        """When the node that fails now is back."""
        mean = self._book.scheduler.repair_seconds
        return self._book.now + float(self._source.exponential(mean))

    def victim(self) -> int | None:
        """Job on the node that fails now; None if that node is free."""
        book = self._book
        node = int(self._source.integers(book.up)) - book.free
        if node < 0:
            return None
        for _, job in book.running:
            node -= book.need[job]
            if node < 0:
                return job
        return None
