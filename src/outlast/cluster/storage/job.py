"""What the section [checkpoint] of a job asks for: turns among the jobs of one folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.storage.savers import Saver
from outlast.cluster.storage.slurm_jobs import still_runs
from outlast.cluster.storage.turns import HEARTBEAT_SECONDS, STALE_AFTER_SECONDS, ask

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.cluster.storage.identity import Owner
    from outlast.cluster.storage.turns import Request
    from outlast.job import CheckpointSection


@dataclass(frozen=True)
class FolderTurns:
    """The turns of one folder, for the trainer; travels to worker processes.

    Attributes:
        directory: Of the turns.
        order: One of `outlast.cluster.storage.orders.ORDERS`.
        ask_slurm: Whether Slurm is asked if a silent owner's job has ended.
        load: Largest share of the time for which saves may keep the file system busy.
    """

    directory: Path
    order: str
    ask_slurm: bool
    load: float

    def ask(
        self,
        size_bytes: float,
        *,
        nodes: float,
        unsaved_seconds: float,
        mtbf_seconds: float,
        period_seconds: float,
    ) -> Request:
        """Ask for a turn without waiting for it; see `outlast.cluster.storage.ask`."""
        return ask(
            self.directory,
            size_bytes,
            nodes=nodes,
            order=self.order,
            period_seconds=period_seconds,
            unsaved_seconds=unsaved_seconds,
            mtbf_seconds=mtbf_seconds,
            ask_alive=self._ask_alive,
        )

    def saver(self) -> Saver:
        """This job among those that save there; see `outlast.cluster.storage.savers`."""
        return Saver(
            self.directory,
            self.load,
            stale_after_seconds=STALE_AFTER_SECONDS,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            ask_alive=self._ask_alive,
        )

    @property
    def _ask_alive(self) -> Callable[[Owner], bool | None] | None:
        return still_runs if self.ask_slurm else None


def turns_for(settings: CheckpointSection) -> FolderTurns | None:
    """The turns that [checkpoint] asks for; None where it names no folder."""
    if not settings.turns:
        return None
    return FolderTurns(
        Path(settings.turns), settings.turn_order, settings.turn_ask_slurm, settings.turn_load
    )
