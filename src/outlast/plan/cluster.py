"""A cluster as numbers: what its devices compute, hold, send, draw and cost, and how they fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from outlast.errors import PlanError
from outlast.plan.estimate import Source

if TYPE_CHECKING:
    from outlast.plan.batch import Array


SHAPES = 0.1, 20.0
"""Of Weibull distributions that times between failures have: published ones lie between 0.4 and 2,
and outside of these the mean is out of reach of a float, or all nodes fail at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """One kind of failure; kinds are independent of each other.

    Attributes:
        name: For people, e.g. "gpu memory".
        per_node_day: Failures of one node in one day of running.
        nodes_hit: Nodes that stop together, as one failure (a switch, a rack); see `per_day`.
        detection_seconds: From the failure until somebody acts.
        repair_hours: Until the node can be used again; 0 where a restart is enough.
        silent: Wrong values in place of a stop: nobody sees it but a guard.
        shape: Of the Weibull distribution of times between failures of a node; 1 is exponential,
            below 1 means that a node that has just been put to use fails more often.
    """

    name: str
    per_node_day: float
    nodes_hit: int = 1
    detection_seconds: float = 60.0
    repair_hours: float = 0.0
    silent: bool = False
    shape: float = 1.0

    def __post_init__(self) -> None:
        for name in ("per_node_day", "detection_seconds", "repair_hours"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise PlanError(
                    f"{name} = {getattr(self, name)} of failure cause {self.name!r}: give a "
                    "number of at least 0"
                )
        if self.nodes_hit < 1:
            raise PlanError(
                f"nodes_hit = {self.nodes_hit} of failure cause {self.name!r}: give at least 1"
            )
        if not SHAPES[0] <= self.shape <= SHAPES[1]:
            raise PlanError(
                f"shape = {self.shape} of failure cause {self.name!r}: give {SHAPES[0]:g} to "
                f"{SHAPES[1]:g}; 1 is exponential"
            )

    def per_day(self, nodes: float | Array) -> Array:
        """Failures of a run on so many nodes in a day: `nodes * per_node_day / nodes_hit`.

        A run on fewer nodes than stop together lies in one rack, and stops whenever this does.
        """
        return np.asarray(nodes * self.per_node_day / np.minimum(self.nodes_hit, nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power draw of devices and nodes.

    Attributes:
        limit_watts: Of a device, the board's.
        blocked_watts: Of a device that waits for others inside a communication kernel.
        idle_watts: Of a device of which nothing is asked.
        node_watts: Of a node beside its devices: processors, memory, adapters, fans.
        pue: Energy of the building over that of its computers.
    """

    limit_watts: float
    blocked_watts: float
    idle_watts: float
    node_watts: float = 0.0
    pue: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a run; None where nobody said.

    Attributes:
        currency: For people.
        per_device_hour: Rent of one device, its energy included.
        per_kwh: Of energy, where the devices are one's own.
        grams_per_kwh: CO2 equivalent of energy.
    """

    currency: str = "USD"
    per_device_hour: float | None = None
    per_kwh: float | None = None
    grams_per_kwh: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Bandwidth of checkpoint storage in bytes per second; 0 for a tier that is not there.

    Attributes:
        memory_bytes_per_s: Of a node, from its devices to its main memory.
        peer_bytes_per_s: Of a node, to another node's memory.
        local_bytes_per_s: Of a node, to its own disk.
        shared_bytes_per_s: Of the whole cluster, to the file system that all nodes see.
    """

    memory_bytes_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    local_bytes_per_s: float = 0.0
    shared_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes with equal devices.

    Attributes:
        name: For people.
        device: Key of the device in `outlast.hardware`, or a name of one's own.
        nodes: Nodes that a run may take, spares not counted.
        devices_per_node: Devices of a node.
        fast_domain: Devices that the fast link joins; a node's, or a rack's (72 for an NVL72).
        peak_flop_per_s: Of a device, the vendor's dense peak, by precision.
        matmul_flop_per_s: Of a device, the best matrix product, by precision.
        memory_bytes: Of a device.
        memory_bytes_per_s: Of a device.
        fast_bytes_per_s: Of a device to all peers of the fast domain together, one direction.
        fabric_bytes_per_s: Of a device, its share of the node's network, one direction.
        fabric_latency_seconds: Of one message over the network.
        host_cores: Of a node.
        spares: Nodes that stand by.
        power: What devices draw; None where unknown.
        prices: What they cost.
        storage: Where checkpoints go.
        processor: Devices are shares of the nodes' own processors.
        failures: Why and how often nodes stop.
        sources: Where each number above comes from, by its name.
    """

    name: str
    device: str
    nodes: int
    devices_per_node: int
    fast_domain: int
    peak_flop_per_s: Mapping[str, float]
    matmul_flop_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    fast_bytes_per_s: float
    fabric_bytes_per_s: float
    fabric_latency_seconds: float = 5e-6
    host_cores: int = 0
    spares: int = 0
    power: Power | None = None
    prices: Prices = Prices()
    storage: Storage = Storage()
    processor: bool = False
    failures: tuple[FailureCause, ...] = ()
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Devices that a run may take."""
        return self.nodes * self.devices_per_node


def divided(cluster: Cluster, ranks: int) -> Cluster:
    """The same machine with more ranks: processors' rates and memory are shared among them.

    Args:
        cluster: Of one node.
        ranks: Processes that train.

    Raises:
        PlanError: There are fewer GPUs than ranks.
    """
    if not cluster.processor and ranks > cluster.devices_per_node:
        raise PlanError(
            f"{ranks} ranks need as many GPUs, and this machine has {cluster.devices_per_node}"
        )
    one = replace(cluster, devices_per_node=ranks, fast_domain=ranks)
    if not cluster.processor:
        return one
    share = cluster.devices_per_node / ranks
    return replace(
        one,
        peak_flop_per_s={name: rate * share for name, rate in cluster.peak_flop_per_s.items()},
        matmul_flop_per_s={name: rate * share for name, rate in cluster.matmul_flop_per_s.items()},
        memory_bytes=cluster.memory_bytes * share,
        memory_bytes_per_s=cluster.memory_bytes_per_s * share,
        sources={
            name: replace(source, value=source.value * share, text=f"{source.text}; its share")
            if name.split(".")[0].endswith("flop_per_s") or name.startswith("memory_bytes")
            else source
            for name, source in cluster.sources.items()
        },
    )
