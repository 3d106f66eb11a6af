"""When a loop that is not ours saves: every so many steps, every so long, or as is best."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import AutosaveError, ClusterError, OutlastError

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.checkpoint import IntervalEstimator, SaveResult

_DECIDE_SECONDS = 1.0
"""The best interval is worked out anew at most this often."""

_WITH_UNIT = re.compile(r"\d+(\.\d+)?[a-z]+")


@dataclass(frozen=True)
class Every:
    """What ``--every`` asks for; neither: as often as is best.

    Attributes:
        steps: From save to save.
        seconds: From save to save.
    """

    steps: int | None = None
    seconds: float | None = None


def every_of(text: str) -> Every:
    """What ``--every TEXT`` means.

    Raises:
        AutosaveError: When it means nothing.
    """
    from outlast.cluster.slurm.values import limit_seconds

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
    from outlast.cluster.slurm.values import FORMS, limit_seconds

    seconds = 0.0
    with contextlib.suppress(ClusterError):
        seconds = limit_seconds(text)
    if not seconds > 0.0:
        raise AutosaveError(f"{option} {text} is no length of time above 0 s: write it as {FORMS}")
    return seconds


class Pace:
    """Says at which step boundaries a save is due; learns from each step and save.

    Args:
        every: What was asked for.
        estimator: Of the best interval; None where steps or seconds are asked for.
        memory: File that keeps what the estimator has observed, for the next start.
    """

    def __init__(
        self, every: Every, estimator: IntervalEstimator | None = None, memory: Path | None = None
    ) -> None:
        self._every = every
        self._estimator = estimator
        self._memory = memory
        self._last_step: int | None = None
        self._last_seconds = 0.0
        self._interval = 0
        self._decided = 0.0

    @property
    def is_common(self) -> bool:
        """Whether every rank comes to the same answer by itself."""
        return self._every.steps is not None

    def due(self, step: int, now: float) -> bool:
        """Whether to save after `step` steps, at `now` seconds of a clock."""
        if self._last_step is None:
            # Set-up is done again for nothing, so what it has made need not be saved.
            self.begun(step, now)
            return False
        if self._every.steps is not None:
            # Also where nobody asked at the very step at which it was due.
            return step // self._every.steps > self._last_step // self._every.steps
        if self._every.seconds is not None:
            return now - self._last_seconds >= self._every.seconds
        assert self._estimator is not None
        if now - self._decided >= _DECIDE_SECONDS or not self._interval:
            self._interval, self._decided = self._estimator.next_interval_steps(), now
        return step - self._last_step >= self._interval

    def begun(self, step: int, now: float) -> None:
        """A save of `step` has begun, or there is one already."""
        self._last_step, self._last_seconds = step, now

    def observe_step(self, seconds: float, *, saving: bool) -> None:
        """A step took `seconds`, without what a save blocked; `saving`: while one was written."""
        if self._estimator is not None:
            self._estimator.observe_step(seconds, saving)

    def observe_save(self, result: SaveResult) -> None:
        """A save was published."""
        if self._estimator is None:
            return
        self._estimator.observe_save(result.blocked_seconds, result.seconds)
        self._interval = 0
        if self._memory is not None:
            from outlast.records import replace_file

            # To learn it anew is no loss.
            with contextlib.suppress(OSError):
                replace_file(self._memory, json.dumps(self._estimator.state_dict()).encode())


def pace_of(
    every: Every,
    memory: Path,
    *,
    nodes: int,
    failed_before: bool,
    estimator: IntervalEstimator | None = None,
) -> Pace:
    """The pace of a run, with what its earlier starts have learnt.

    Args:
        every: What was asked for.
        memory: File that keeps what was learnt.
        nodes: Machines of the run.
        failed_before: Whether the start before this one died.
        estimator: Of the best interval, with a user's expectations; None: without any.
    """
    if every != Every():
        return Pace(every)
    if estimator is None:
        from outlast.checkpoint import IntervalEstimator

        estimator = IntervalEstimator(nodes=nodes)
    with contextlib.suppress(OSError, ValueError, KeyError, OutlastError):
        estimator.load_state_dict(json.loads(memory.read_text(encoding="utf-8")))
    if failed_before:
        estimator.observe_failure()
    return Pace(every, estimator, memory)
