"""Locked clocks and power limits through NVML, for processes with the privilege."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from outlast.energy.control.controller import check_clock, try_all
from outlast.energy.control.gpu import Gpu, load_nvml

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from outlast.hardware.figure import Unavailable


class NvmlController:
    """Sets one GPU with ``nvmlDeviceSetGpuLockedClocks`` and ``...SetPowerManagementLimit``.

    The first setting checks that the GPU is not shared. NVML cannot tell whether clocks were locked
    before: `restore` gives them to the driver.

    Args:
        uuid: NVML's, e.g. "GPU-8f6e...".
        nvml: The binding, initialised; that of this machine by default.
        allowed_pids: Processes that may use the GPU besides this one and its children.

    Raises:
        EnergyError: Without NVML, for an unknown GPU, or a MIG slice.
    """

    def __init__(self, uuid: str, nvml: Any = None, *, allowed_pids: Collection[int] = ()) -> None:
        self._gpu = Gpu(uuid, nvml or load_nvml())
        self._allowed_pids = allowed_pids
        self._checked = False

    @property
    def uuid(self) -> str:
        """Of the GPU."""
        return self._gpu.uuid

    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """SM clocks that it supports, ascending."""
        return self._gpu.clocks_mhz

    def power_limit_watts(self) -> float | Unavailable:
        """The power limit in force."""
        return self._gpu.power_limit_watts()

    def lock_clock(self, clock_mhz: int) -> None:
        """Lock the SM clock.

        Raises:
            EnergyError: For an unsupported clock, a shared GPU or a missing privilege.
        """
        check_clock(clock_mhz, self.clocks_mhz(), self.uuid)
        self._check_shared()
        with self._gpu.explained(f"lock the clock of {self.uuid} to {clock_mhz} MHz"):
            self._gpu.nvml.nvmlDeviceSetGpuLockedClocks(self._gpu.handle, clock_mhz, clock_mhz)

    def limit_power(self, watts: float) -> None:
        """Set the power limit.

        Raises:
            EnergyError: For a limit out of range, a shared GPU or a missing privilege.
        """
        self._gpu.check_power(watts)
        self._check_shared()
        self._set_power(watts)

    def restore(self, power_watts: float | None = None, *, clock: bool = True) -> None:
        """Give the clock back to the driver, and put the power limit back where one is given.

        Raises:
            EnergyError: With all that NVML refuses; what it does not refuse is done.
        """
        steps = [self._reset_clock] if clock else []
        if power_watts is not None:
            steps.append(partial(self._set_power, power_watts))
        try_all(*steps)

    def description(self) -> Mapping[str, str]:
        """How another process can make this controller again."""
        return {"kind": "nvml", "uuid": self.uuid}

    def _reset_clock(self) -> None:
        with self._gpu.explained(f"reset the clock of {self.uuid}"):
            self._gpu.nvml.nvmlDeviceResetGpuLockedClocks(self._gpu.handle)

    def _set_power(self, watts: float) -> None:
        with self._gpu.explained(f"limit the power of {self.uuid} to {watts:g} W"):
            self._gpu.nvml.nvmlDeviceSetPowerManagementLimit(
                self._gpu.handle, round(watts * 1000.0)
            )

    def _check_shared(self) -> None:
        # Once: NVML's list of processes takes longer than a clock change.
        if not self._checked:
            self._gpu.refuse_shared(self._allowed_pids)
            self._checked = True
