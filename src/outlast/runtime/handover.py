"""The handover from `outlast run` to a trainer whose script knows nothing of Outlast."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.errors import AutosaveError, ClusterError
from outlast.records import replace_file
from outlast.runtime.cadence import Every, SaveCadence, StepClock

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.runtime.agreement import BoundaryAgreement


_WITH_UNIT = re.compile(r"\d+(\.\d+)?[a-z]+")


UNASKED_SECONDS = 600.0


"""From save to save, where neither the script nor the command line asks for any."""


def every_of(text: str) -> Every:
    """Read ``--every TEXT``.

    Raises:
        AutosaveError: When it means nothing.
    """
    from outlast.durations import limit_seconds

    plain = text.strip().lower()
    if plain == "auto":
        return Every()
    if plain.isascii() and plain.isdigit() and int(plain) > 0:
        return Every(steps=int(plain))
    if _WITH_UNIT.fullmatch(plain):
        with contextlib.suppress(ClusterError):
            seconds = limit_seconds(plain)
            if seconds > 0.0:
                return Every(seconds=seconds)
    raise AutosaveError(
        f'--every {text} is neither a number of steps, as "100", nor a length of time, as "10m", '
        '"90s" or "1.5h", nor "auto"'
    )


def seconds_of(option: str, text: str) -> float:
    """The length of time that an option names.

    Raises:
        AutosaveError: When it is none, or not above zero.
    """
    from outlast.durations import FORMS, limit_seconds

    seconds = 0.0
    with contextlib.suppress(ClusterError):
        seconds = limit_seconds(text)
    if not seconds > 0.0:
        raise AutosaveError(f"{option} {text} is no length of time above 0 s: write it as {FORMS}")
    return seconds


@dataclass
class HandedOver:
    """A run whose saving and resuming is a framework's own, with Outlast's store.

    Attributes:
        every: How often to save; "auto" leaves it to the script, if that saves at all.
        stores: File with the stores that this run saves to.
        root: Folder of the script, which the file's paths are relative to.
        limit_seconds: How long the program may run, from when this is made; None: for ever.
        step: Steps done, as far as is known.
        trained: Whether a training has begun.
    """

    every: Every
    stores: Path
    root: Path
    limit_seconds: float | None = None
    step: int = 0
    trained: bool = False
    _begun: float = field(default_factory=time.monotonic)
    _used: set[str] = field(default_factory=set)

    def seconds_left(self) -> float | None:
        """Seconds that are left of the limit; None without one."""
        if self.limit_seconds is None:
            return None
        return max(0.0, self.limit_seconds - (time.monotonic() - self._begun))

    def pace(self, *, saves_by_itself: bool) -> SaveCadence | None:
        """The cadence of saves beside those that the script asks for; None: there are none.

        Args:
            saves_by_itself: Whether the script asks its trainer for checkpoints.
        """
        if self.every != Every():
            return SaveCadence(self.every)
        return None if saves_by_itself else SaveCadence(Every(seconds=UNASKED_SECONDS))

    def begins(self, store: Path) -> bool:
        """A training that saves to `store` begins: whether there is a version to resume from.

        Raises:
            AutosaveError: When there is one of another run, or of an earlier training of this
                process, whose last state would be taken for this one's.
        """
        from outlast.checkpoint.storage import storage_of
        from outlast.checkpoint.version import is_published, list_versions

        self.trained = True
        known = self._known()
        own = os.path.relpath(store, self.root)
        if own in self._used:
            raise AutosaveError(
                f"{store} is used by a second training of this script, which would go on from the "
                "end of the first one: give each training a Trainer and an output directory of its "
                "own"
            )
        self._used.add(own)
        found = False
        if store.is_dir():
            storage = storage_of(store)
            found = any(is_published(storage, version) for version in list_versions(storage))
        if found and own not in known:
            raise AutosaveError(
                f"{store} has the checkpoints of another run; move them away, or give this run "
                "another output directory"
            )
        if own not in known and os.environ.get("RANK", "0") == "0":
            replace_file(self.stores, json.dumps([*known, own]).encode())
        return found

    def _known(self) -> list[str]:
        try:
            return [str(load) for load in json.loads(self.stores.read_text(encoding="utf-8"))]
        except (OSError, ValueError):
            return []


class SaveTimes:
    """At which steps to save, the same ones on all ranks.

    Args:
        pace: Of rank 0, whose wish counts where a clock says when.
        step: Steps done.
        world_size: Of the default process group.
    """

    def __init__(self, pace: SaveCadence, step: int, world_size: int) -> None:
        self._pace = pace
        self._agreement: BoundaryAgreement | None = None
        if world_size > 1 and not pace.is_common:
            from outlast.runtime.agreement import BoundaryAgreement

            self._agreement = BoundaryAgreement(step)
        self._clock = StepClock()
        pace.begun(step, time.monotonic())

    def due(self, step: int) -> bool:
        """Return whether to save after `step` steps; asked after each."""
        now = time.monotonic()
        self._clock.step()
        save = self._pace.due(step, now)
        if self._agreement is not None:
            if not self._agreement.is_due(step):
                return False
            save = self._agreement.exchange(step, False, save, self._clock.mean_seconds).save
        if save:
            self._pace.begun(step, now)
        return save
