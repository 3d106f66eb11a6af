"""Joules of a step per device: busy, blocked, idle, the node's rest and the building, apart.

Rates are those of `outlast.energy.cost`, which takes single numbers; energy is linear in time and
in watts, so each rate is asked for once and multiplied by arrays of many configurations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.energy.cost import Watts, node_joules, step_joules
from outlast.errors import PlanError
from outlast.hardware.figure import Unavailable
from outlast.plan.estimate import Interval, Source, Term, Total
from outlast.plan.power import BusyWatts, Factors, check_power, row_of, unknown_power

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike

    from outlast.plan.cases import Array
    from outlast.plan.cluster import Power

NORMAL_90 = 1.6448536269514722
"""Standard deviations on either side of a normal mean that hold 90 %."""
WAITING_DEVIATION = 0.1
"""Own prior, relative, of blocked and idle watts."""
NODE_DEVIATION = 0.15
"""Own prior, relative, of a node's rest that follows from its rating (`power.node_rest_watts`)."""
_UNITS = dict.fromkeys(("limit_watts", "blocked_watts", "idle_watts", "node_watts"), "W")
_UNITS["pue"] = "1"
_GIVEN = "the cluster's [power]"
_ABOUT_DEVICE = "outlast.energy.cost.step_joules"
_ABOUT_NODE = "outlast.energy.cost.node_joules"


@dataclass(frozen=True, slots=True)
class StepEnergy:
    """Joules of one device in a step, by what they are spent on.

    Attributes:
        busy: (cases,) computing.
        blocked: (cases,) waiting for others inside communication kernels.
        idle: (cases,) with nothing asked of the device: bubbles, data, the host.
        node: (cases,) the device's share of its node's rest.
        building: (cases,) cooling and conversion: PUE - 1 of all above.
        deviation: (cases,) standard deviation of the sum.
        seconds: By state (cases,).
        power: That was assumed.
        draw: What busy devices draw.
        clocks: (cases,) factors of seconds and watts that were applied to busy time.
        devices_per_node: That share the node's rest.
        flags: What is left out, a phrase each.
        sources: Of the watts and the PUE, as `Cluster.sources` names them.
    """

    busy: Array
    blocked: Array
    idle: Array
    node: Array
    building: Array
    deviation: Array
    seconds: Mapping[str, Array]
    power: Power
    draw: BusyWatts
    clocks: Factors
    devices_per_node: float
    flags: tuple[str, ...]
    sources: Mapping[str, Source]

    @property
    def joules(self) -> Array:
        """(cases,) of the device with its share of node and building."""
        return self.device_joules + self.node + self.building

    @property
    def device_joules(self) -> Array:
        """(cases,) of the device alone."""
        return self.busy + self.blocked + self.idle

    def total(self, row: int = 0, devices: float = 1.0) -> Total:
        """Joules of one case with its terms.

        Args:
            row: Which case.
            devices: That the step takes; the figure is of all of them.
        """
        terms = tuple(self._terms(row, devices))
        middle = math.fsum(term.value for term in terms)
        half = NORMAL_90 * devices * float(self.deviation[row])
        low = max(middle - half, 0.0)
        return Total("J", Interval(low, middle, middle + half, 0.9, self.flags), terms)

    def _terms(self, row: int, devices: float) -> list[Term]:
        power = self.power
        seconds = {name: float(values[row]) for name, values in self.seconds.items()}
        slower, weaker = (float(clock[row]) for clock in self.clocks)
        share = {"devices": devices, "step seconds": math.fsum(seconds.values())}
        watts = self.draw.watts
        busy = {
            "devices": devices,
            "busy seconds": seconds["busy"],
            "busy watts": weaker * float(watts[row if watts.size > 1 else 0]),
            "clock's factor of seconds": slower,
            "clock's factor of watts": weaker,
        }
        given = {
            name: self.sources.get(
                f"power.{name}", Source(getattr(power, name), unit, "given", _GIVEN)
            )
            for name, unit in _UNITS.items()
        }
        own = {"busy watts": self.draw.source}
        activity = self.draw.activity
        if activity is not None:
            busy["activity"] = float(activity[row if activity.size > 1 else 0])
            own = {"scale": self.draw.source}
            own |= {"limit": given["limit_watts"], "idle": given["idle_watts"]}
        return [
            Term(
                "busy",
                devices * float(self.busy[row]),
                f"devices * busy seconds * busy watts, the latter {self.draw.formula}",
                busy,
                own,
                _ABOUT_DEVICE,
            ),
            *(
                Term(
                    name,
                    devices * float(getattr(self, name)[row]),
                    f"devices * {name} seconds * {name} watts",
                    {"devices": devices, f"{name} seconds": seconds[name]},
                    {f"{name} watts": given[f"{name}_watts"]},
                    _ABOUT_DEVICE,
                )
                for name in ("blocked", "idle")
            ),
            Term(
                "node's rest",
                devices * float(self.node[row]),
                "devices / devices_per_node * step seconds * node watts",
                share | {"devices_per_node": self.devices_per_node},
                {"node watts": given["node_watts"]},
                _ABOUT_NODE,
            ),
            Term(
                "building",
                devices * float(self.building[row]),
                "(PUE - 1) * all of the above",
                {"devices": devices},
                {"PUE": given["pue"]},
                _ABOUT_NODE,
            ),
        ]


def step_energy(
    power: Power | None,
    draw: BusyWatts | Unavailable,
    seconds: tuple[ArrayLike, ArrayLike, ArrayLike],
    *,
    devices_per_node: float = 1.0,
    clocks: Factors | None = None,
    sources: Mapping[str, Source] | None = None,
) -> StepEnergy | Unavailable:
    """Joules of a step per device.

    Args:
        power: Of the cluster; None where unknown.
        draw: What a busy device draws, by `busy_watts` or `measured_watts`.
        seconds: (cases,) each: busy, blocked and idle in a step; at other clocks than the top ones
            busy seconds are those at the top clocks.
        devices_per_node: That share the node's rest.
        clocks: Of `clock_factors` or `cap_factors`; None for the top clocks.
        sources: Of the watts and the PUE, as `Cluster.sources` names them.

    Returns:
        The joules, or why they are not known.

    Raises:
        PlanError: For watts that contradict each other, or a number out of range.
    """
    if isinstance(draw, Unavailable):
        return draw
    if power is None:
        return unknown_power()
    check_power(power)
    if not devices_per_node > 0.0:
        raise PlanError(f"devices_per_node = {devices_per_node:g}: give at least 1")
    ones = np.ones(1)
    slower, weaker = clocks or (ones, ones)
    names = ("busy", "blocked", "idle")
    rows = [row_of(f"{name} seconds", second) for name, second in zip(names, seconds, strict=True)]
    rows[0] = rows[0] * slower
    *rows, watts, slower, weaker = np.broadcast_arrays(*rows, draw.watts, slower, weaker)
    watts = watts * weaker
    rates = Watts(busy=1.0, blocked=power.blocked_watts, idle=power.idle_watts)
    busy = rows[0] * watts * step_joules(1.0, rates)
    blocked = rows[1] * step_joules(0.0, rates, blocked_seconds=1.0)
    idle = rows[2] * step_joules(0.0, rates, idle_seconds=1.0)
    node = np.add.reduce(rows) * node_joules(0.0, 1.0, other_watts=power.node_watts)
    node /= devices_per_node
    building = (busy + blocked + idle + node) * (node_joules(1.0, 0.0, pue=power.pue) - 1.0)
    sources = sources or {}
    guessed = "power.node_watts" in sources and sources["power.node_watts"].origin == "prior"
    waiting = WAITING_DEVIATION * np.hypot(blocked, idle)
    deviation = np.hypot(draw.deviation * busy, waiting)
    deviation = np.hypot(deviation, (NODE_DEVIATION if guessed else 0.0) * node) * power.pue
    flags = []
    if not power.node_watts:
        flags.append("devices alone: node_watts is not given")
    if power.pue == 1.0:
        flags.append("without the building: pue is 1")
    return StepEnergy(
        busy=busy,
        blocked=blocked,
        idle=idle,
        node=node,
        building=building,
        deviation=deviation,
        seconds=dict(zip(names, rows, strict=True)),
        power=power,
        draw=draw,
        clocks=(slower, weaker),
        devices_per_node=devices_per_node,
        flags=tuple(flags),
        sources=sources,
    )
