"""This machine as the process sees it: processors, memory, GPUs, scheduler, network, sensors.

Works without a GPU, inside containers and without root. Nothing is set, only read.
"""

import os
import platform
import socket
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import psutil

from outlast.hardware.catalogue import Device, device_reported_as
from outlast.hardware.cgroup import cpu_limit_cores, memory_limit_bytes, usable_cores
from outlast.hardware.figure import Unavailable
from outlast.hardware.nvml import Gpus, read_gpus
from outlast.hardware.surroundings import (
    NetworkPort,
    Rapl,
    Slurm,
    read_network_ports,
    read_rapl,
    read_slurm,
)

CPUINFO = Path("/proc/cpuinfo")
AMD_DRIVER = Path("/dev/kfd")

# Instruction sets that decide how fast a CPU trains: vector width and native bf16.
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine and the share of it that this process may use.

    Attributes:
        host_name: Name of the machine.
        operating_system: Kernel name, release and architecture.
        cpu_model: Name of the processor.
        cpu_features: Vector and bf16 instruction sets it has, out of `CPU_FEATURES`.
        cpu_facts: What the catalogue knows about this processor.
        physical_cores: Cores of the machine.
        logical_cores: Hardware threads of the machine.
        affinity_cores: Hardware threads that this process may run on.
        quota_cores: CPU quota of its control group, or None without one.
        usable_cores: The smaller of the two above.
        memory_total_bytes: Memory of the machine.
        memory_available_bytes: Free now, without swapping; the machine's, not the group's.
        memory_limit_bytes: Limit of the control group, or None without one.
        gpus: GPUs that this process may use.
        slurm: The Slurm client.
        network_ports: RDMA adapters.
        rapl: Energy counters of the processors.
    """

    host_name: str
    operating_system: str
    cpu_model: str
    cpu_features: tuple[str, ...]
    cpu_facts: Device | Unavailable
    physical_cores: int | Unavailable
    logical_cores: int
    affinity_cores: int
    quota_cores: float | None
    usable_cores: float
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None
    gpus: Gpus | Unavailable
    slurm: Slurm | Unavailable
    network_ports: tuple[NetworkPort, ...] | Unavailable
    rapl: Rapl | Unavailable

    @property
    def usable_memory_bytes(self) -> int:
        """Memory that this process may use at most."""
        if self.memory_limit_bytes is None:
            return self.memory_total_bytes
        return min(self.memory_limit_bytes, self.memory_total_bytes)

    def summary(self) -> str:
        """Returns one short line: processor, usable cores, memory and GPUs."""
        memory_gib = self.usable_memory_bytes / 2**30
        processors = f"{self.cpu_model}, {self.usable_cores:g} of {self.logical_cores} cores"
        return f"{self.host_name}: {processors}, {memory_gib:.0f} GiB, {self._gpu_summary()}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON types.

        What is missing becomes ``{"unavailable": reason, "remedy": remedy}``; known devices become
        their key.
        """
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def _gpu_summary(self) -> str:
        if isinstance(self.gpus, Unavailable) or not self.gpus.visible:
            return "no GPU"
        names = [gpu.name for gpu in self.gpus.visible]
        return " + ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))


def this_machine() -> Machine:
    """Reads this machine. Takes milliseconds; asks no network and needs no rights."""
    cpu_model, cpu_features = read_processor()
    memory = psutil.virtual_memory()
    logical = psutil.cpu_count(logical=True) or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quota = cpu_limit_cores()
    return Machine(
        host_name=socket.gethostname(),
        operating_system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_model=cpu_model,
        cpu_features=cpu_features,
        cpu_facts=device_reported_as(cpu_model),
        physical_cores=psutil.cpu_count(logical=False)
        or Unavailable("the kernel does not tell physical cores from hardware threads"),
        logical_cores=logical,
        affinity_cores=affinity,
        quota_cores=quota,
        usable_cores=usable_cores(affinity, quota),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_bytes=memory_limit_bytes(),
        gpus=_with_amd_hint(read_gpus()),
        slurm=read_slurm(),
        network_ports=read_network_ports(),
        rapl=read_rapl(),
    )


def read_processor(cpuinfo: Path = CPUINFO) -> tuple[str, tuple[str, ...]]:
    """Returns the processor's name and its instruction sets out of `CPU_FEATURES`."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    entries: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        entries.setdefault(key.strip(), value.strip())
    model = entries.get("model name") or platform.processor() or platform.machine() or "unknown"
    flags = (entries.get("flags") or entries.get("Features") or "").split()
    return model, tuple(name for name in CPU_FEATURES if name in flags)


def _with_amd_hint(gpus: Gpus | Unavailable) -> Gpus | Unavailable:
    if isinstance(gpus, Unavailable) and AMD_DRIVER.exists():
        return Unavailable(f"AMD GPUs are present ({AMD_DRIVER}), but only NVML is read here")
    return gpus


def _plain(value: Any) -> Any:
    if isinstance(value, Unavailable):
        return {"unavailable": value.reason, "remedy": value.remedy}
    if isinstance(value, Device):
        return value.key
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
