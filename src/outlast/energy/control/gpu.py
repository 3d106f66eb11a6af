"""What must be read of a GPU before anything is set on it. This module sets nothing."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psutil

from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

NO_PRIVILEGE = (
    "run as root or with CAP_SYS_ADMIN, or use a zeusd daemon with the gpu-control group, or let "
    "Slurm set clocks with --gpu-freq or a prolog"
)
"""The three ways to set clocks, for error messages."""


def load_nvml() -> Any:
    """The NVML binding, initialised.

    Raises:
        EnergyError: When this machine has no NVIDIA driver.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise EnergyError(
            f"clocks cannot be set here: NVML says {error}; run on a machine with an NVIDIA driver"
        ) from None
    return pynvml


class Gpu:
    """Reads one GPU through NVML.

    Args:
        uuid: NVML's, e.g. "GPU-8f6e...": indices of CUDA and of NVML need not agree.
        nvml: The binding, initialised.

    Raises:
        EnergyError: When there is no such GPU, or the UUID is that of a MIG slice.
    """

    def __init__(self, uuid: str, nvml: Any) -> None:
        if uuid.startswith("MIG-"):
            raise EnergyError(
                f"device = {uuid} is a MIG slice, and clocks belong to the whole GPU, which others "
                "share: ask the site for a whole GPU"
            )
        self.uuid = uuid
        self.nvml = nvml
        with self.explained(f"find GPU {uuid}"):
            self.handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    @contextmanager
    def explained(self, aim: str) -> Iterator[None]:
        """Turn NVML's errors into sentences with a remedy.

        Args:
            aim: What is tried, e.g. "lock the clock of GPU-8f6e...".

        Raises:
            EnergyError: In place of an NVMLError.
        """
        try:
            yield
        except self.nvml.NVMLError as error:
            if getattr(error, "value", None) == self.nvml.NVML_ERROR_NO_PERMISSION:
                raise EnergyError(f"no privilege to {aim}: {NO_PRIVILEGE}") from None
            raise EnergyError(f"cannot {aim}: NVML says {error}") from None

    def index(self) -> int:
        """NVML's index, which zeusd counts by."""
        with self.explained(f"read the index of {self.uuid}"):
            return int(self.nvml.nvmlDeviceGetIndex(self.handle))

    @cached_property
    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """SM clocks that it supports at its highest memory clock, ascending."""
        try:
            memory_mhz = max(self.nvml.nvmlDeviceGetSupportedMemoryClocks(self.handle))
            clocks = self.nvml.nvmlDeviceGetSupportedGraphicsClocks(self.handle, memory_mhz)
        except (self.nvml.NVMLError, ValueError) as error:
            return Unavailable(f"NVML does not list the clocks of {self.uuid}: {error}")
        return tuple(sorted(clocks))

    def power_limit_watts(self) -> float | Unavailable:
        """The power limit in force."""
        try:
            return float(self.nvml.nvmlDeviceGetPowerManagementLimit(self.handle)) / 1000.0
        except self.nvml.NVMLError as error:
            return Unavailable(f"NVML does not tell the power limit of {self.uuid}: {error}")

    def check_power(self, watts: float) -> None:
        """Refuse a power limit outside what the device takes.

        Raises:
            EnergyError: With the limits.
        """
        with self.explained(f"read the range of power limits of {self.uuid}"):
            bounds = self.nvml.nvmlDeviceGetPowerManagementLimitConstraints(self.handle)
        low, high = (bound / 1000.0 for bound in bounds)
        if not low <= watts <= high:
            raise EnergyError(
                f"power limit = {watts:g} W is outside {low:g} to {high:g} W, which "
                f"{self.uuid} takes"
            )

    def refuse_shared(self, allowed_pids: Collection[int] = ()) -> None:
        """Refuse a GPU whose clocks others depend on.

        Args:
            allowed_pids: Processes that may use it too, besides this one and its children. In a
                container NVML gives the pids of the host: name one's own there.

        Raises:
            EnergyError: When it is divided by MIG, or processes of others compute on it.
        """
        if self._divided():
            raise EnergyError(
                f"{self.uuid} is divided by MIG, and a clock would hold for all its slices: "
                "disable MIG or take another GPU"
            )
        with self.explained(f"list the processes on {self.uuid}"):
            found = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        foreign = sorted({int(name.pid) for name in found} - _own_pids() - set(allowed_pids))
        if foreign:
            raise EnergyError(
                f"{self.uuid} is shared with process {', '.join(map(str, foreign))}: clocks hold "
                "for the whole GPU, so take one of your own, or name these in allowed_pids if they "
                "are yours"
            )

    def _divided(self) -> bool:
        try:
            current, _pending = self.nvml.nvmlDeviceGetMigMode(self.handle)
        except self.nvml.NVMLError as error:
            if getattr(error, "value", None) == self.nvml.NVML_ERROR_NOT_SUPPORTED:
                return False
            raise EnergyError(
                f"cannot tell whether {self.uuid} is divided by MIG: NVML says {error}; clocks are "
                "set only on undivided GPUs"
            ) from None
        return bool(current)


def _own_pids() -> set[int]:
    children = psutil.Process().children(recursive=True)
    return {os.getpid(), *(child.pid for child in children)}
