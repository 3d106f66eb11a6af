"""GPUs as NVML sees them, limited to those that CUDA_VISIBLE_DEVICES shows. Read-only."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from outlast.hardware.catalogue import Device, device_reported_as
from outlast.hardware.figure import Unavailable

Value = TypeVar("Value")


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine.

    Attributes:
        index: NVML's index (PCI bus order), not PyTorch's.
        name: Name that NVML reports.
        uuid: Identifier that survives reboots and reordering.
        memory_bytes: Total device memory.
        mig_enabled: Whether it is split into MIG slices.
        power_limit_watts: Limit in force now.
        energy_counter: True where the total-energy counter can be read.
        facts: What the catalogue knows about this model.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int | Unavailable
    mig_enabled: bool | Unavailable
    power_limit_watts: float | Unavailable
    energy_counter: bool | Unavailable
    facts: Device | Unavailable


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs that this process may use.

    Attributes:
        driver_version: Version of the NVIDIA driver.
        installed_count: GPUs of the machine, also those hidden from this process.
        visible: Those that CUDA_VISIBLE_DEVICES shows, in its order.
    """

    driver_version: str
    installed_count: int
    visible: tuple[Gpu, ...]


def read_gpus() -> Gpus | Unavailable:
    """Read the GPUs through NVML.

    Returns:
        The GPUs, or Unavailable with the reason where NVML or its driver is missing.
    """
    nvml = start_nvml()
    if isinstance(nvml, Unavailable):
        return nvml
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = visible_indices(setting, uuids, lambda entry: mig_parent(nvml, entry, uuids))
        return Gpus(
            driver_version=str(nvml.nvmlSystemGetDriverVersion()),
            installed_count=len(handles),
            visible=tuple(_gpu(nvml, i, handles[i], uuids[i]) for i in shown),
        )
    except nvml.NVMLError as error:
        return Unavailable(f"NVML failed while listing the GPUs ({error})", "see nvidia-smi")
    finally:
        nvml.nvmlShutdown()


def start_nvml(nvml: Any = None) -> Any:
    """Start NVML; handles live until it is shut down.

    Args:
        nvml: The module to use; pynvml by default.

    Returns:
        The module, or Unavailable where the package or the driver is missing.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return Unavailable("the package nvidia-ml-py is missing", "pip install nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Unavailable(
            f"NVML does not start ({error})",
            "on a machine with NVIDIA GPUs, install the driver; nvidia-smi must work",
        )
    return nvml


def mig_parent(nvml: Any, entry: str, uuids: list[str]) -> int | None:
    """NVML's index of the GPU that holds the MIG slice `entry`, or None."""
    try:
        part = nvml.nvmlDeviceGetHandleByUUID(entry)
        whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
        return uuids.index(str(nvml.nvmlDeviceGetUUID(whole)))
    except (nvml.NVMLError, ValueError):
        return None


def visible_indices(
    setting: str | None, uuids: list[str], holder: Callable[[str], int | None]
) -> list[int]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does.

    Args:
        setting: Value of the variable; None where it is unset (everything is visible).
        uuids: UUIDs of the GPUs by NVML index.
        holder: Gives the NVML index of the GPU that holds a MIG slice, or None.

    Returns:
        NVML indices in the order of the setting. The first invalid or repeated entry ends the
        list; several slices of one GPU count once.
    """
    if setting is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        is_slice = entry.startswith("MIG-")
        if is_slice:
            index = holder(entry)
        elif entry.isdecimal():
            index = int(entry) if int(entry) < len(uuids) else None
        else:
            matches = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
            index = matches[0] if len(matches) == 1 else None
        if index is None:
            break
        if index not in chosen:
            chosen.append(index)
        elif not is_slice:
            break
    return chosen


def _gpu(nvml: Any, index: int, handle: Any, uuid: str) -> Gpu:
    def ask(read: Callable[[], Value], what: str) -> Value | Unavailable:
        try:
            return read()
        except nvml.NVMLError as error:
            return Unavailable(f"NVML gives no {what} of GPU {index} ({error})")

    name = str(nvml.nvmlDeviceGetName(handle))
    memory = ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total), "memory size")
    mig = ask(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]), "MIG mode")
    limit = ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000, "power limit")
    counter = ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) >= 0, "energy counter")
    facts = device_reported_as(name, None if isinstance(memory, Unavailable) else memory)
    return Gpu(index, name, uuid, memory, mig, limit, counter, facts)
