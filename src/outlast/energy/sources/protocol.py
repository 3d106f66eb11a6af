"""What `EnergyMeter` reads: one counter of joules each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from outlast.energy.reading import Kind
    from outlast.hardware.figure import Unavailable

Part: TypeAlias = Literal["gpu", "cpu", "memory", "node"]


class Source(Protocol):
    """A counter of joules. Users may pass their own, e.g. of a node's power supply.

    Attributes:
        name: Unique in a meter, e.g. "gpu 0 (GPU-8f6e...)" or "cpu package 0".
        part: What it measures. A node contains its CPUs and GPUs; their figures are never added.
        kind: "measured" for a meter; a source that computes says "modelled".
        update_seconds: How often the counter changes: shorter windows are flagged.
    """

    name: str
    part: Part
    kind: Kind
    update_seconds: float

    def joules(self) -> float | Unavailable:
        """Joules since an arbitrary beginning, never falling: a source sees to wrap-around."""
