"""The copy of one version to a lower tier, by all ranks together. Needs no torch.

Files come in an order in which a version that was copied by half is none: packs, catalogue,
manifests, and last the seal. A copy that fails leaves nothing behind.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.checkpoint.tiers.copying import Copy
from outlast.checkpoint.tiers.place import words_of
from outlast.checkpoint.tiers.tier import DrainResult
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.checkpoint.agreement import Signals
    from outlast.checkpoint.format.version import Version
    from outlast.checkpoint.tiers.pace import Pace
    from outlast.checkpoint.tiers.place import Place


@dataclass
class Job:
    """A version on its way to a tier, and the place that it is copied from."""

    version: Version
    source: int

    def key(self, index: int) -> str:
        """What ranks call this copy to tier `index` when they speak of it."""
        return f"{self.version.folder}/tier-{index}"


@dataclass(frozen=True)
class Drain:
    """Copies versions to lower tiers, with the other ranks.

    Attributes:
        places: All places of the store, nearest first.
        signals: Words between the ranks.
        leads: Whether this rank says when a copy begins and whether all parts arrived.
        coordinated: Whether the ranks use the signals.
    """

    places: Sequence[Place]
    signals: Signals
    leads: bool
    coordinated: bool

    def run(self, index: int, job: Job, pace: Pace) -> DrainResult:
        """Copy one version to tier `index`."""
        target, key = self.places[index], job.key(index)
        copy = Copy(self.places[job.source], target, job.version, pace)
        if self.leads:
            self.signals.tell(f"{key}/start", "")
        elif dropped := self.signals.hear(f"{key}/start", ""):
            return DrainResult(target.storage.location, job.version.step, skipped=dropped)
        begun = time.perf_counter()

        def paced() -> None:
            with pace:
                copy.run()

        problem = _attempt(paced)
        if self.leads:
            problem = self._gathered(f"{key}/done", problem)
            if not problem and not target.private and self._seals(target):
                problem = _attempt(lambda: target.seal(job.version))
            self.signals.tell(f"{key}/done", problem)
        else:
            problem = self.signals.hear(f"{key}/done", problem)
        if not problem and target.private:
            problem = _attempt(lambda: target.seal(job.version))
        seconds = time.perf_counter() - begun
        if problem:
            copy.undo()
            return failed(target, job.version, problem, seconds, copy.bytes)
        return DrainResult(target.storage.location, job.version.step, seconds, copy.bytes)

    def _gathered(self, key: str, problem: str) -> str:
        """What went wrong on any rank."""
        try:
            return next((signal for signal in self.signals.gather(key, problem) if signal), "")
        except CheckpointError as error:
            return str(error)

    def _seals(self, target: Place) -> bool:
        """Whether a shared tier gets a seal; without, a version counts once all parts are there."""
        return target.rank == 0 and (self.coordinated or target.world_size == 1)


def failed(
    place: Place, version: Version, problem: str, seconds: float = 0.0, size: int = 0
) -> DrainResult:
    """The result of a copy to `place` that failed after `seconds` and `size` bytes."""
    location, step = place.storage.location, version.step
    sentence = f"the copy of step {step} to {location} failed: {problem}"
    return DrainResult(location, step, seconds, size, sentence)


def _attempt(work: Callable[[], None]) -> str:
    """Run `work`; returns what went wrong."""
    try:
        work()
    except Exception as error:  # clients of object stores raise what they like
        return words_of(error)
    return ""
