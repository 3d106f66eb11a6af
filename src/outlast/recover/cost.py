"""Costs and savings of recovery: time to the next step, parity, goodput; pure functions.

The planner composes these (`outlast.plan.fault_tolerance`), and a drill compares them with what
it has measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outlast.errors import RecoverError

LOOK_SECONDS = 0.1
"""Between two looks of a launcher at its processes; see `outlast.train.launch`."""

REFORM_SECONDS = 0.4
"""Prior: torch elastic ends a group, meets anew and forks, on one machine (benchmarks/recover.py).
"""

RECONNECT_SECONDS = 0.1
"""Prior: live groups agree on a round and connect anew (benchmarks/recover_live.py)."""

SILENCE_SHARE = 0.8
"""Of the heartbeat's seconds, after which the lighthouse of live groups drops a silent one; the
rest is for the survivors' next step."""


def _require(name: str, value: float, low: float = 0.0, *, above: bool = False) -> None:
    if not (low < value < math.inf if above else low <= value < math.inf):
        least = f"above {low:g}" if above else f"of at least {low:g}"
        raise RecoverError(f"{name} = {value:g}: give a finite number {least}")


@dataclass(frozen=True)
class RecoveryTime:
    """From a loss to the next step, without the steps that are done again.

    Attributes:
        detection_seconds: Until somebody acts.
        reform_seconds: Until all processes are there again, or the survivors among themselves.
        load_seconds: Until the state is in place: moved from a peer or from memory, or rebuilt.
    """

    detection_seconds: float
    reform_seconds: float
    load_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("detection_seconds", "reform_seconds", "load_seconds"):
            _require(name, getattr(self, name))

    @property
    def seconds(self) -> float:
        """All together."""
        return self.detection_seconds + self.reform_seconds + self.load_seconds


def detection_seconds(*, look_seconds: float = LOOK_SECONDS, silence_seconds: float = 0.0) -> float:
    """Mean time until a dead process is noticed.

    A launcher that looks every `look_seconds` finds it half of that later; a heartbeat has to be
    silent for `silence_seconds` first, and a hung step for its deadline.
    """
    _require("look_seconds", look_seconds)
    _require("silence_seconds", silence_seconds)
    return silence_seconds + look_seconds / 2.0


def transfer_seconds(
    state_bytes: float, bytes_per_s: float, *, latency_seconds: float = 0.0
) -> float:
    """To move a state: from a peer over a link, from memory, or from a disk."""
    _require("state_bytes", state_bytes)
    _require("bytes_per_s", bytes_per_s, above=True)
    _require("latency_seconds", latency_seconds)
    return latency_seconds + state_bytes / bytes_per_s


def keep_seconds(
    state_bytes: float, copy_bytes_per_s: float, *, slack_seconds: float = 0.0
) -> float:
    """By how much keeping a state in a node's memory makes a step longer.

    It is copied while the next step computes, and that step's update waits for the copy: what fits
    into `slack_seconds` costs nothing.
    """
    _require("slack_seconds", slack_seconds)
    return max(transfer_seconds(state_bytes, copy_bytes_per_s) - slack_seconds, 0.0)


def parity_groups(nodes: int, largest: int) -> tuple[int, int]:
    """Nodes of the smallest and of the largest group that share parity, as evenly as possible."""
    if nodes < 1 or largest < 2:
        raise RecoverError(f"nodes = {nodes}, largest = {largest}: give at least 1 and 2")
    groups = -(-nodes // largest)
    return nodes // groups, -(-nodes // groups)


def rebuild_seconds(
    shard_bytes: float, group: int, link_bytes_per_s: float, combine_bytes_per_s: float
) -> float:
    """To rebuild one lost shard of a group from the others and their parity.

    Whoever rebuilds takes in `group - 1` buffers of the shard's size over one link, and combines
    them; the two overlap, so the slower one counts.
    """
    if group < 2:
        raise RecoverError(f"group = {group}: give at least 2, a shard and its parity")
    volume = (group - 1) * shard_bytes
    return max(
        transfer_seconds(volume, link_bytes_per_s), transfer_seconds(volume, combine_bytes_per_s)
    )


def parity_seconds(
    shard_bytes: float,
    losses: int,
    link_bytes_per_s: float,
    combine_bytes_per_s: float,
    *,
    slack_seconds: float = 0.0,
) -> float:
    """By how much an update of parity makes a step longer.

    Of each shard the change, as large as the shard, goes to `losses` holders, where it is combined;
    each process sends and holds as much as it receives, in turns. What fits into `slack_seconds`,
    in which the step needs neither link nor memory, costs nothing.
    """
    if losses not in (0, 1, 2):
        raise RecoverError(f"losses = {losses}: parity is for 0, 1 or 2 losses at once")
    _require("slack_seconds", slack_seconds)
    sent = transfer_seconds(losses * shard_bytes, link_bytes_per_s)
    # The change itself is formed once, and combined for each holder.
    combined = transfer_seconds((1 + losses) * shard_bytes * (losses > 0), combine_bytes_per_s)
    return max(sent + combined - slack_seconds, 0.0)


def lost_seconds(step_seconds: float, every_steps: int = 1) -> float:
    """Mean work that a loss undoes, where the state is kept every so many steps.

    A loss comes anywhere between two states with the same chance, so half of that is lost.
    """
    _require("step_seconds", step_seconds)
    if every_steps < 1:
        raise RecoverError(f"every_steps = {every_steps}: give at least 1")
    return every_steps * step_seconds / 2.0


def share_of_progress(
    work_seconds: float, losses: float, recovery: RecoveryTime, lost_work_seconds: float
) -> float:
    """Share of the wall time that is progress when so many losses strike a given work.

    Args:
        work_seconds: The work without any loss.
        losses: How many strike it.
        recovery: After each.
        lost_work_seconds: Done again after each.
    """
    _require("work_seconds", work_seconds, above=True)
    _require("losses", losses)
    _require("lost_work_seconds", lost_work_seconds)
    return work_seconds / (work_seconds + losses * (recovery.seconds + lost_work_seconds))
