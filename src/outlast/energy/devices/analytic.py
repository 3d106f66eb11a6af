"""A device made of formulas: voltage knee, leakage, heat, power cap, switch latency, noise."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.energy.devices.protocol import DeviceState
from outlast.energy.devices.virtual import Ran, Timeline, checked_seconds
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.energy.model.constants import DeviceConstants
    from outlast.energy.profile import Key
    from outlast.energy.reading import Kind

POWER_CAP = "software power cap"
"""Why the clock is below the one asked for, in the words that `nvml` uses too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An operation as the formulas see it: ``t(f) = fixed_seconds + megacycles / f``.

    Attributes:
        fixed_seconds: What no clock shortens: memory, launches.
        megacycles: Work that runs with the SM clock, in seconds times MHz.
        watts_per_mhz: Switching power per MHz below the voltage knee ("activity").
    """

    fixed_seconds: float
    megacycles: float
    watts_per_mhz: float

    def __post_init__(self) -> None:
        """Refuse what no operation can be.

        Raises:
            EnergyError: For a negative figure, or an operation that takes no time.
        """
        for name in ("fixed_seconds", "megacycles", "watts_per_mhz"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise EnergyError(f"{name} = {getattr(self, name)} must be 0 or more")
        if self.fixed_seconds + self.megacycles == 0.0:
            raise EnergyError("fixed_seconds and megacycles are both 0: the load takes no time")

    def seconds(self, clock_mhz: float) -> float:
        """Duration at an effective clock."""
        return self.fixed_seconds + self.megacycles / clock_mhz


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """First-order thermal model: ``dT/dt = (ambient + kelvin_per_watt * P - T) / time constant``.

    The static power of the constants holds at `reference_celsius`; elsewhere it is multiplied by
    ``exp(leakage_per_kelvin * (T - reference))``.

    Attributes:
        ambient_celsius: Temperature of a device that draws nothing.
        kelvin_per_watt: Rise of the steady temperature with power.
        time_constant_seconds: Of the approach to it.
        reference_celsius: Where the static power of the constants was fitted.
        leakage_per_kelvin: Relative growth of the static power.
    """

    ambient_celsius: float = 30.0
    kelvin_per_watt: float = 0.1
    time_constant_seconds: float = 20.0
    reference_celsius: float = 60.0
    leakage_per_kelvin: float = 0.008

    def __post_init__(self) -> None:
        """Refuse what no device does.

        Raises:
            EnergyError: For a time constant of 0, a negative rise or growth, or an infinite figure.
        """
        if not 0.0 < self.time_constant_seconds < math.inf:
            raise EnergyError(
                f"time_constant_seconds = {self.time_constant_seconds} of the heat must be above 0"
            )
        for name in ("kelvin_per_watt", "leakage_per_kelvin"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise EnergyError(
                    f"{name} = {getattr(self, name)} of the heat must be finite and 0 or more"
                )
        for name in ("ambient_celsius", "reference_celsius"):
            if not -273.15 <= getattr(self, name) < math.inf:
                raise EnergyError(f"{name} = {getattr(self, name)} of the heat is no temperature")


class AnalyticDevice:
    """Computes time and energy of loads in virtual time; every figure of it is simulated.

    ``P = static * leakage(T) + activity * f * V(f)^2``, see `DeviceConstants`. Where that exceeds
    the power limit, the effective clock is the one that draws exactly the limit.

    Args:
        constants: Of the device.
        loads: What each operation is made of.
        clocks_mhz: Clocks that can be locked; by default every 15 MHz from 40 % of the top clock,
            as the steps of NVIDIA's data-centre devices are.
        heat: Thermal behaviour; it begins at the ambient temperature.
        noise: Relative standard deviation of an operation's time and, separately, of its power.
        seed: Of the noise.
        switch_seconds: How long a newly asked clock takes to come into force.
        counter_seconds: How often the energy counter changes.
        uuid: Identifier.

    Attributes:
        name: The device, in words.
        kind: "simulated".

    Raises:
        EnergyError: For clocks that are not ascending, or a negative noise.
    """

    kind: Kind = "simulated"

    def __init__(
        self,
        constants: DeviceConstants,
        loads: Mapping[Key, Load],
        *,
        clocks_mhz: tuple[int, ...] = (),
        heat: Heat | None = None,
        noise: float = 0.0,
        seed: int = 0,
        switch_seconds: float = 0.0,
        counter_seconds: float = 0.1,
        uuid: str = "analytic-0",
    ) -> None:
        self._clocks_mhz = clocks_mhz or _default_clocks(constants.top_clock_mhz)
        if list(self._clocks_mhz) != sorted(set(self._clocks_mhz)) or self._clocks_mhz[0] <= 0:
            raise EnergyError("clocks_mhz must be ascending, positive and without repetition")
        if not 0.0 <= noise < math.inf:
            raise EnergyError(f"noise = {noise} must be 0 or more, e.g. 0.01 for one per cent")
        self._constants = constants
        self._loads = loads
        self._heat = heat or Heat()
        self._noise = noise
        self._random = random.Random(seed)
        self.name = f"{constants.name} (simulated)"
        self.uuid = uuid
        self.counter_seconds = counter_seconds
        self._timeline = Timeline(self._clocks_mhz[-1], switch_seconds, counter_seconds)
        self._timeline.watts = constants.blocking_watts
        self._power_limit_watts = constants.power_limit_watts
        self._celsius = self._heat.ambient_celsius
        self._effective_mhz: float | None = None

    @property
    def now_seconds(self) -> float:
        """Virtual time since the device was made."""
        return self._timeline.now_seconds

    @property
    def spent_joules(self) -> float:
        """Energy since the device was made, not quantised as its counter is."""
        return self._timeline.spent_joules

    @property
    def target_clock_mhz(self) -> int:
        """The clock last asked for, whether or not it has come into force."""
        return self._timeline.target_clock_mhz

    def read(self) -> DeviceState:
        """Counter, power, effective clock, temperature and whether the power limit bites."""
        asked = self._timeline.clock_mhz
        effective = asked if self._effective_mhz is None else min(asked, self._effective_mhz)
        return DeviceState(
            joules=self._timeline.counter_joules,
            watts=self._timeline.watts,
            sm_clock_mhz=round(effective),
            memory_clock_mhz=Unavailable("the analytic device has no memory clock"),
            celsius=self._celsius,
            throttle_reasons=(POWER_CAP,) if effective < asked else (),
        )

    def clocks_mhz(self) -> tuple[int, ...]:
        """Clocks that can be locked, ascending."""
        return self._clocks_mhz

    def lock_clock(self, clock_mhz: int) -> None:
        """Run at this clock after the switch latency.

        Raises:
            EnergyError: When the device does not support it; names the nearest that it does.
        """
        if clock_mhz not in self._clocks_mhz:
            nearest = min(self._clocks_mhz, key=lambda clock: abs(clock - clock_mhz))
            raise EnergyError(
                f"clock = {clock_mhz} MHz is not supported by {self.name}; the nearest is {nearest}"
            )
        self._timeline.lock(clock_mhz)

    def limit_power(self, watts: float) -> None:
        """Do not draw more than this from now on.

        Raises:
            EnergyError: When that is not above the power of a waiting device.
        """
        if not watts > self._constants.blocking_watts:
            raise EnergyError(
                f"power limit = {watts:g} W is not above the {self._constants.blocking_watts:g} W "
                f"that {self.name} draws while it waits"
            )
        self._power_limit_watts = watts

    def unlock(self) -> None:
        """Go back to the highest clock and the power limit of the constants."""
        self._timeline.lock(self._clocks_mhz[-1])
        self._power_limit_watts = self._constants.power_limit_watts

    def run(self, key: Key) -> Ran:
        """Run one operation to its end.

        Raises:
            EnergyError: When it is not among the loads.
        """
        return self._work(self._load(key), operations=1.0, seconds=math.inf)

    def advance(self, seconds: float, key: Key | None = None) -> Ran:
        """Let time pass: waiting at the blocking power, or repeating an operation.

        Raises:
            EnergyError: For a negative time, or an operation that is not among the loads.
        """
        seconds = checked_seconds(seconds)
        if key is not None:
            return self._work(self._load(key), operations=math.inf, seconds=seconds)
        begun_joules = self.spent_joules
        self._effective_mhz = None
        self._spend(seconds, self._constants.blocking_watts)
        return Ran(seconds, self.spent_joules - begun_joules)

    def power_watts(self, load: Load, clock_mhz: float) -> float:
        """Power of a load at an effective clock and the temperature of now, without noise."""
        warmer = self._celsius - self._heat.reference_celsius
        static = self._constants.static_watts * math.exp(self._heat.leakage_per_kelvin * warmer)
        voltage = self._constants.voltage(clock_mhz)
        return static + load.watts_per_mhz * clock_mhz * voltage**2

    def effective_clock_mhz(self, load: Load) -> float:
        """The clock in force, or the lower one at which the load draws just the power limit.

        Not below the lowest clock: there a device exceeds its limit rather than stand still.
        """
        high = float(self._timeline.clock_mhz)
        low = min(float(self._clocks_mhz[0]), high)
        if self.power_watts(load, high) <= self._power_limit_watts:
            return high
        while high - low > 0.01:
            middle = (low + high) / 2.0
            if self.power_watts(load, middle) <= self._power_limit_watts:
                low = middle
            else:
                high = middle
        return low

    def _load(self, key: Key) -> Load:
        if key not in self._loads:
            raise EnergyError(
                f"{self.name} has no load for stage {key.stage} {key.phase}: add it to loads"
            )
        return self._loads[key]

    def _work(self, load: Load, *, operations: float, seconds: float) -> Ran:
        """Until so many operations are done, or so much time has passed."""
        begun_seconds, begun_joules = self.now_seconds, self.spent_joules
        slower, hungrier = self._factor(), self._factor()
        # Power and temperature change slowly: constant over a fiftieth of the time constant.
        longest = self._heat.time_constant_seconds / 50.0
        while operations > 0.0 and seconds > 0.0:
            clock = self.effective_clock_mhz(load)
            whole = load.seconds(clock) * slower
            left = operations * whole
            span = min(left, seconds, longest, self._timeline.until_switch_seconds)
            self._effective_mhz = clock
            self._spend(span, self.power_watts(load, clock) * hungrier)
            operations = 0.0 if span == left else operations - span / whole
            seconds -= span
        return Ran(self.now_seconds - begun_seconds, self.spent_joules - begun_joules)

    def _spend(self, seconds: float, watts: float) -> None:
        """Pass time at constant power and come nearer to the temperature that belongs to it."""
        self._timeline.pass_time(seconds, watts)
        steady = self._heat.ambient_celsius + self._heat.kelvin_per_watt * watts
        kept = math.exp(-seconds / self._heat.time_constant_seconds)
        self._celsius = steady + (self._celsius - steady) * kept

    def _factor(self) -> float:
        return math.exp(self._random.gauss(0.0, self._noise)) if self._noise else 1.0


def _default_clocks(top_clock_mhz: float) -> tuple[int, ...]:
    top = round(top_clock_mhz)
    steps = int(0.6 * top // 15)
    return tuple(top - 15 * step for step in range(steps, -1, -1))
