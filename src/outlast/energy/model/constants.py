"""How one kind of device turns clocks into time and power."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConstants:
    """Fitted once for a kind of device, then used for every model on it.

    ``P(f) = static + activity * f * V(f)^2`` with ``V(f) = 1 + knee_per_ghz * max(0, f - knee)``,
    and no more than the power limit: above it the effective clock stays behind the one asked for.
    The activity is the operation's, in watts per MHz at the voltage below the knee.

    Attributes:
        name: The device, in words.
        top_clock_mhz: Highest SM clock.
        static_watts: Power at work without switching, at steady temperature.
        knee_mhz: Clock above which the voltage must rise.
        knee_per_ghz: How steeply it rises, relative to the voltage below the knee.
        power_limit_watts: Cap in force; infinite where there is none.
        blocking_watts: Power while waiting for another device.
        peak_flop_per_s: Achieved rate of matrix products at the top clock.
        memory_bytes_per_s: Achieved memory bandwidth.
        launch_seconds: Time that a kernel costs at least.
        link_bytes_per_s: Achieved bandwidth of the links to other devices.
        cap_sharpness: How abruptly the cap takes hold: exponent of the smooth minimum of the clock
            asked for and the one that the cap allows. Kernels of an operation differ in power, so
            the cap bites some of them earlier than the mean power says.
        standard_errors: (name, standard error in the constant's unit) of what was fitted.
    """

    name: str
    top_clock_mhz: float
    static_watts: float
    knee_mhz: float
    knee_per_ghz: float
    power_limit_watts: float
    blocking_watts: float
    peak_flop_per_s: float = float("nan")
    memory_bytes_per_s: float = float("nan")
    launch_seconds: float = 5e-6
    link_bytes_per_s: float = float("nan")
    cap_sharpness: float = 40.0
    standard_errors: tuple[tuple[str, float], ...] = ()

    def voltage(self, clock_mhz: float) -> float:
        """Relative voltage: 1 up to the knee."""
        return 1.0 + self.knee_per_ghz * max(0.0, clock_mhz - self.knee_mhz) / 1000.0
