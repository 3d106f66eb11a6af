"""Energy counters of the NVIDIA GPUs that this process may use. Reading only."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from outlast.energy.devices.nvml import NvmlDevice, start_nvml
from outlast.energy.sources.integral import PowerIntegral
from outlast.energy.sources.optional import UnreadableSource
from outlast.hardware.figure import Unavailable
from outlast.hardware.nvml import visible_indices

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.energy.devices.protocol import DeviceState
    from outlast.energy.reading import Kind
    from outlast.energy.sources.protocol import Part, Source


class NvmlSource:
    """The total-energy counter of one GPU.

    Args:
        name: Unique in a meter.
        device: The GPU.
        flags: What a reader must know.
    """

    part: Part = "gpu"
    kind: Kind = "measured"
    description = "NVML's total-energy counter"

    def __init__(self, name: str, device: NvmlDevice, flags: tuple[str, ...] = ()) -> None:
        self.name = name
        self.update_seconds = device.counter_seconds
        self.flags = flags
        self._device = device

    def joules(self) -> float | Unavailable:
        """Joules since the driver was loaded."""
        return self._device.joules()

    def watts(self) -> float | Unavailable:
        """Power now."""
        return self._device.watts()

    def state(self) -> DeviceState:
        """Temperature, clocks and throttle reasons now."""
        return self._device.read()

    def throttle_reasons(self) -> tuple[str, ...] | Unavailable:
        """Why the clock is below the one asked for."""
        return self._device.throttle_reasons()


class NvmlPowerSource(PowerIntegral):
    """A GPU without an energy counter: its power, integrated.

    Args:
        name: Unique in a meter.
        device: The GPU.
        flags: What a reader must know.
        clock: Monotonic seconds.
    """

    description = "NVML's power, integrated"

    def __init__(
        self,
        name: str,
        device: NvmlDevice,
        flags: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, "gpu", device.watts, clock=clock)
        self._more_flags = flags
        self._device = device

    @property
    def flags(self) -> tuple[str, ...]:
        """How the figure came about, and what the device adds."""
        return (*super().flags, *self._more_flags)

    def state(self) -> DeviceState:
        """Temperature, clocks and throttle reasons now."""
        return self._device.read()

    def throttle_reasons(self) -> tuple[str, ...] | Unavailable:
        """Why the clock is below the one asked for."""
        return self._device.throttle_reasons()


def nvml_sources(
    nvml: Any = None, clock: Callable[[], float] = time.monotonic
) -> tuple[list[Source], list[Unavailable]]:
    """Finds the GPUs that CUDA_VISIBLE_DEVICES shows, in its order.

    Args:
        nvml: The NVML module; pynvml by default.
        clock: Monotonic seconds.

    Returns:
        One source per GPU ("gpu 0 (GPU-8f6e...)": CUDA's number and the UUID), also for those that
        cannot be read; and why there are none at all.
    """
    started = start_nvml(nvml)
    if isinstance(started, Unavailable):
        return [], [started]
    nvml = started
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        names = {str(nvml.nvmlDeviceGetName(handle)) for handle in handles}
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = visible_indices(setting, uuids, lambda entry: _holder(nvml, entry, uuids))
        devices = [NvmlDevice(nvml, handles[index]) for index in shown]
    except nvml.NVMLError as error:
        return [], [Unavailable(f"NVML failed while listing the GPUs ({error})", "see nvidia-smi")]
    if not devices:
        why = f'CUDA_VISIBLE_DEVICES = "{setting}" shows none of {len(handles)} NVIDIA GPUs'
        return [], [Unavailable(why if handles else "this machine has no NVIDIA GPU")]
    doubt = _order_doubt(setting, len(names))
    return [_source(i, device, doubt, clock) for i, device in enumerate(devices)], []


def _source(
    number: int, device: NvmlDevice, doubt: tuple[str, ...], clock: Callable[[], float]
) -> Source:
    name = f"gpu {number} ({device.uuid})"
    if device.split:
        why = Unavailable(
            f"gpu {number} is split into MIG slices, and its counter covers the whole "
            f"{device.uuid}, also what other users draw",
            "measure on a GPU without MIG",
        )
        return UnreadableSource(name, "gpu", why)
    flags = doubt
    if "GH200" in device.name:
        flags = (*flags, "on GH200 the counter covers the whole module: GPU, CPU and memory")
    counter = device.joules()
    if not isinstance(counter, Unavailable):
        return NvmlSource(name, device, flags)
    watts = device.watts()
    if isinstance(watts, Unavailable):
        why = Unavailable(f"{counter.reason}, nor its power", "see nvidia-smi -q -d POWER")
        return UnreadableSource(name, "gpu", why)
    return NvmlPowerSource(name, device, flags, clock)


def _holder(nvml: Any, entry: str, uuids: list[str]) -> int | None:
    """NVML's index of the GPU that holds a MIG slice."""
    try:
        part = nvml.nvmlDeviceGetHandleByUUID(entry)
        whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
        return uuids.index(str(nvml.nvmlDeviceGetUUID(whole)))
    except (nvml.NVMLError, ValueError):
        return None


def _order_doubt(setting: str | None, models: int) -> tuple[str, ...]:
    # CUDA numbers GPUs fastest first, NVML by bus. With several models the two may differ.
    by_number = setting is None or any(part.strip().isdecimal() for part in setting.split(","))
    if models < 2 or not by_number or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return ()
    return (
        "CUDA may number these different GPUs in another order: set CUDA_DEVICE_ORDER=PCI_BUS_ID",
    )
