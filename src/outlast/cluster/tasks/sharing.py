"""Bandwidth shared among the transfers under way, by the levels of a plan."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from outlast.cluster.storage.pace import TokenBucket
from outlast.cluster.tasks.fluid import fair_rates

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from outlast.cluster.tasks.fluid import Flow

LEAST_SHARE = 0.01
"""Share of its cap that a transfer gets even when others should come first: those may hang."""


class Shares:
    """Transfers that come and go; whenever one does, bandwidth is shared anew.

    Those of a smaller level come first, equal ones share fairly. Used from any number of threads.

    Args:
        bytes_per_s: Bandwidth by resource.
        part: What of each rate is this process's, where others carry out the same transfers beside
            it; between 0 and 1.
    """

    def __init__(self, bytes_per_s: Mapping[str, float], part: float = 1.0) -> None:
        self._bytes_per_s = dict(bytes_per_s)
        self._part = part
        self._lock = threading.Lock()
        self._flowing: dict[Hashable, tuple[Flow, TokenBucket]] = {}

    def begin(self, name: Hashable, flow: Flow, bucket: TokenBucket) -> None:
        """Let a transfer join; its bucket has the rate that is its own, until it leaves.

        Args:
            name: Its own.
            flow: What it goes through, with a finite cap.
            bucket: Gets the rate.
        """
        with self._lock:
            self._flowing[name] = (flow, bucket)
            self._share()

    def end(self, name: Hashable) -> None:
        """The transfer has ended; may be called twice."""
        with self._lock:
            if self._flowing.pop(name, None) is not None:
                self._share()

    def stop(self) -> None:
        """Let no transfer go on."""
        with self._lock:
            for _, bucket in self._flowing.values():
                bucket.stop()

    def _share(self) -> None:
        flows = [flow for flow, _ in self._flowing.values()]
        rates = fair_rates(flows, self._bytes_per_s)
        for (flow, bucket), rate in zip(self._flowing.values(), rates, strict=True):
            bucket.set_rate(self._part * max(rate, LEAST_SHARE * flow.cap_bytes_per_s))
