"""Meters of a whole node: power supply, BMC (IPMI, Redfish), Slurm or a rack meter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outlast.energy.sources.track import asked
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.energy.reading import Kind
    from outlast.energy.sources.protocol import Part


class CallableSource:
    """A counter of joules that a function reads, e.g. over Redfish or from a command.

    Args:
        name: Unique in a meter, e.g. "node (Redfish)".
        read: Gives joules since any beginning; whatever it raises becomes Unavailable. It must be
            quick: every window waits for it, and a reset between two reads that ends above the
            last count goes unseen.
        update_seconds: How often the counter changes.
        part: What it measures; a node's joules are never added to those of its CPUs and GPUs.
        kind: "measured" for a meter; a function that computes says "modelled".

    Raises:
        EnergyError: `update_seconds` is negative or not a number.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], float],
        *,
        update_seconds: float,
        part: Part = "node",
        kind: Kind = "measured",
    ) -> None:
        if not 0 <= update_seconds < math.inf:
            raise EnergyError(
                f'update_seconds = {update_seconds} of "{name}" is no period: state how often the '
                "counter changes"
            )
        self.name = name
        self.part: Part = part
        self.kind: Kind = kind
        self.update_seconds = update_seconds
        self._read = read

    def joules(self) -> float | Unavailable:
        """What the function says now."""
        joules = asked(self.name, lambda: float(self._read()))
        if isinstance(joules, Unavailable):
            return joules
        if not 0 <= joules < math.inf:
            return Unavailable(f"{self.name} says {joules} J")
        return joules
