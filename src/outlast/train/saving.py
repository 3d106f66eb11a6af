"""Where the trainer saves, and when: every so many steps, or as often as is best for this run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.checkpoint import (
    CheckpointStore,
    Compression,
    IntervalEstimator,
    Reduction,
    Retention,
    Tier,
)
from outlast.checkpoint.cost import NODE_MTBF_SECONDS
from outlast.errors import OutlastError
from outlast.records import read_run, replace_file
from outlast.train.transfers import MIRROR, RUN
from outlast.train.turns import SaveTurns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.checkpoint import SaveResult
    from outlast.checkpoint.tiers import Pacing
    from outlast.distributed.ranks import Ranks
    from outlast.job import CheckpointSection
    from outlast.records import RunDirectory
    from outlast.train.turns import Turns

_WORTH_TELLING = 0.1


class SaveCadence:
    """Says after which steps to save.

    With ``checkpoint.every_steps = "auto"`` rank 0 measures steps and saves and asks for the next
    save when the time that is lost and the time that saves cost are smallest together; the others
    follow it, see `wants`.

    Args:
        every_steps: A fixed number of steps, or None for the best.
        estimator: Of the best number, on rank 0.
        memory: File that keeps what the estimator has learnt for the next attempt.
        turns: Taken with other jobs of one file system, on rank 0; None for saves at once.
    """

    def __init__(
        self,
        every_steps: int | None,
        estimator: IntervalEstimator | None = None,
        memory: Path | None = None,
        turns: SaveTurns | None = None,
    ) -> None:
        self._every_steps = every_steps
        self._estimator = estimator
        self._memory = memory
        self._turns = turns
        self._saved_at = 0
        self._told = 0

    def begin(self, step: int) -> None:
        """The attempt begins with `step` steps done."""
        self._saved_at = step

    def wants(self, done: int, *, writes: bool = True) -> bool:
        """Whether this rank asks for a save after `done` steps; one that asks is enough.

        Args:
            done: Steps of the run.
            writes: Whether the save would be up to this process and its ranks; where it is not,
                they ask for no turn and give back what they have.
        """
        due = writes and self._due(done)
        if self._turns is None or due:
            return due and (self._turns is None or self._turns.may_save())
        if writes:
            self._turns.withdraw()
        else:
            self._turns.leave()
        return False

    def _due(self, done: int) -> bool:
        if self._every_steps is not None:
            every = self._every_steps
            # A save that waits for its turn stays due.
            return every > 0 and done // every > self._saved_at // every
        if self._estimator is None:
            return False
        return done - self._saved_at >= self._estimator.next_interval_steps()

    def saved(self, step: int) -> None:
        """A save begins at `step`."""
        self._saved_at = step
        if self._turns is not None:
            self._turns.saving()

    def ended(self) -> None:
        """The save under way has ended, well or not."""
        if self._turns is not None:
            self._turns.release()

    def observe_step(self, seconds: float, *, saving: bool) -> None:
        """A step took `seconds`, without what a save blocked; `saving`: while one was written."""
        if self._estimator is not None:
            self._estimator.observe_step(seconds, saving)

    def observe_save(self, result: SaveResult) -> None:
        """A save was published."""
        if self._estimator is not None:
            self._estimator.observe_save(result.blocked_seconds, result.seconds)
            if self._memory is not None:
                # To begin anew is no loss.
                with contextlib.suppress(OSError):
                    replace_file(self._memory, json.dumps(self._estimator.state_dict()).encode())
        if self._turns is not None:
            self._turns.saved(result, self._estimator)

    def close(self) -> None:
        """The run saves no more."""
        if self._turns is not None:
            self._turns.close()

    def news(self) -> tuple[int, str] | None:
        """The interval in steps and the reason for it, when it has changed enough to tell."""
        if self._estimator is None:
            return None
        steps = self._estimator.next_interval_steps()
        if abs(steps - self._told) <= _WORTH_TELLING * self._told:
            return None
        self._told = steps
        return steps, self._estimator.explain()


def cadence_of(
    settings: CheckpointSection,
    ranks: Ranks,
    directory: RunDirectory,
    turns: Turns | None = None,
    state_bytes: float = 1.0,
) -> SaveCadence:
    """The cadence that [checkpoint] asks for, with what earlier attempts have learnt and suffered.

    Args:
        settings: The section [checkpoint].
        ranks: This process among the others.
        directory: Of the run.
        turns: Of the jobs of a file system; None for saves at once.
        state_bytes: Of model and optimizer, about what a first save writes.
    """
    own = None
    if turns is not None and ranks.is_first:
        own = _turns_of(settings, ranks, turns, state_bytes)
    if settings.every_steps != "auto":
        # One rank that asks is enough: where turns are taken, the one that takes them.
        every = settings.every_steps if own is not None or turns is None else 0
        return SaveCadence(every, turns=own)
    if not ranks.is_first:
        return SaveCadence(None)
    estimator = IntervalEstimator(
        nodes=ranks.nodes,
        mtbf_seconds=settings.mtbf_hours * 3600.0 if settings.mtbf_hours else None,
        budget=settings.slowdown_budget,
        longest_seconds=settings.longest_minutes * 60.0,
    )
    memory = directory.path / "cadence.json"
    with contextlib.suppress(OSError, ValueError, KeyError, OutlastError):
        estimator.load_state_dict(json.loads(memory.read_text(encoding="utf-8")))
        before = read_run(directory.path).attempts[:-1]
        if before and before[-1].outcome == "died":
            estimator.observe_failure()
    return SaveCadence(None, estimator, memory, own)


def _turns_of(
    settings: CheckpointSection, ranks: Ranks, turns: Turns, state_bytes: float
) -> SaveTurns:
    return SaveTurns(
        turns,
        size_bytes=state_bytes,
        nodes=ranks.nodes,
        mtbf_seconds=3600.0 * settings.mtbf_hours or NODE_MTBF_SECONDS / ranks.nodes,
        longest_seconds=settings.turn_seconds,
    )


def open_store(
    settings: CheckpointSection,
    directory: RunDirectory,
    pacings: Mapping[str, Pacing] | None = None,
    keep: Retention | None = None,
) -> CheckpointStore:
    """The run's checkpoints: in its directory, before that in a faster place if there is one.

    Args:
        settings: The section [checkpoint].
        directory: Of the run.
        pacings: What besides their caps says how fast tiers are copied to, by name.
        keep: Which versions stay; by default what [checkpoint] says.
    """
    keep = keep or Retention(
        settings.keep,
        every=settings.keep_every,
        best=settings.keep_best,
        metric="validation_loss",
    )
    # Elsewhere, an earlier run of this name may have left its checkpoints.
    run = f"{directory.path.name}-{directory.identifier}"
    pacings = pacings or {}
    tiers = []
    if settings.fast:
        tiers.append(
            Tier(
                directory.checkpoints,
                every=settings.drain_every,
                keep=keep,
                bytes_per_second=1e6 * settings.drain_megabytes_per_s or None,
                pacing=pacings.get(RUN),
            )
        )
    if settings.mirror:
        tiers.append(
            Tier(
                f"{settings.mirror}/{run}",
                every=settings.mirror_every,
                keep=keep,
                bytes_per_second=1e6 * settings.mirror_megabytes_per_s or None,
                pacing=pacings.get(MIRROR),
            )
        )
    return CheckpointStore(
        f"{settings.fast}/{run}" if settings.fast else directory.checkpoints,
        keep=settings.fast_keep if settings.fast else keep,
        tiers=tiers,
        private=bool(settings.fast) and settings.fast_private,
        reduction=Reduction(Compression(settings.compression), chain=settings.delta_chain),
        asynchronous=settings.asynchronous,
        when_busy=settings.when_busy,
        writer=settings.writer,
        timeout_seconds=settings.timeout_seconds,
    )
