"""Checks of a machine for training, as plain lines: what was found, what it means, what to do.

The machine's part of ``outlast doctor``; the command adds the checks that need PyTorch. Whether
processes of this machine can train together is shown by a real all-reduce over loopback, in two
fresh Python processes that import PyTorch themselves; this module does not.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from outlast.errors import HardwareError
from outlast.hardware.detect import Machine
from outlast.hardware.figure import Unavailable
from outlast.hardware.filesystem import probe

State: TypeAlias = Literal["ok", "degraded", "missing"]

LEAST_MEMORY_BYTES = 2 * 2**30

LEAST_FREE_BYTES = 5 * 2**30

SLOW_FSYNC_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        group: Heading it stands under.
        name: What was looked at.
        state: "ok", "degraded" (works, but worse than it could) or "missing".
        found: What was found, in a few words.
        means: What follows from it; empty where that is plain.
        remedy: The command or setting that improves it; empty where nothing is to be done.
        essential: True where training does not work at all in state "missing".
    """

    group: str
    name: str
    state: State
    found: str
    means: str = ""
    remedy: str = ""
    essential: bool = False

    @property
    def broken(self) -> bool:
        """True if training cannot work."""
        return self.essential and self.state == "missing"


def _checked(
    group: str,
    name: str,
    found: str,
    problem: str = "",
    remedy: str = "",
    *,
    state: State = "degraded",
    essential: bool = False,
) -> Check:
    """A check that is "ok" unless there is a `problem`, which gives it `state` and `remedy`."""
    if not problem:
        return Check(group, name, "ok", found, essential=essential)
    return Check(group, name, state, found, problem, remedy, essential)


def machine_checks(machine: Machine) -> list[Check]:
    """Return the checks of processors, memory, GPUs, energy sensors and the cluster."""
    checks = (_processor_checks, _gpu_checks, _energy_checks, _cluster_checks)
    return [line for check in checks for line in check(machine)]


def storage_checks(path: Path) -> list[Check]:
    """Probe the file system under a directory and return its checks."""
    group, few, slow = "Storage", "", ""
    try:
        facts = probe(path)
    except HardwareError as error:
        means = "no checkpoint can be written here"
        remedy = "name a directory that you may write to: --path DIR"
        return [Check(group, "write", "missing", str(error), means, remedy, essential=True)]
    if facts.is_memory:
        few = "in memory: checkpoints vanish with the machine"
    elif facts.free_bytes < LEAST_FREE_BYTES:
        few = "a few checkpoints may fill it"
    if facts.directory_fsync is not True:
        slow = "a directory cannot be fsynced: a power failure may undo the newest checkpoint"
    elif facts.fsync_seconds > SLOW_FSYNC_SECONDS:
        slow = "each file of a checkpoint waits this long"
    shared = ", shared" if facts.is_network else ""
    space = f"{_gib(facts.free_bytes)} free on {facts.type} at {facts.mount_point}{shared}"
    fsync = f"{facts.fsync_seconds * 1000:.2f} ms for 4 KiB (median, measured)"
    atomic = facts.rename_is_atomic
    return [
        _checked(group, "space", space, few, "keep checkpoints on a larger, durable file system"),
        _checked(group, "fsync", fsync, slow, "use a local disk for checkpoints"),
        _checked(
            group,
            "rename",
            "replaces atomically" if atomic else "a reader saw a torn file",
            "" if atomic else "a crash could leave half a checkpoint visible",
            f"use another file system than {facts.type}",
            state="missing",
            essential=True,
        ),
    ]


def _processor_checks(machine: Machine) -> Iterator[Check]:
    group = "Machine"
    features = ", ".join(machine.cpu_features) or "no vector extensions known"
    yield Check(group, "processor", "ok", f"{machine.cpu_model} ({features})")
    quota = "" if machine.quota_cores is None else f", quota {machine.quota_cores:g}"
    cores = f"{machine.usable_cores:g} usable of {machine.logical_cores}{quota}"
    held = machine.usable_cores < machine.logical_cores
    means = "affinity or the control group holds the process below the machine" if held else ""
    yield Check(group, "cores", "ok", cores, means)
    usable, limit = machine.usable_memory_bytes, machine.memory_limit_bytes
    held = limit is not None and limit < machine.memory_total_bytes
    memory = f"{_gib(machine.memory_available_bytes)} available, {_gib(usable)} at most"
    memory += " (control group)" if held else ""
    small = min(usable, machine.memory_available_bytes) < LEAST_MEMORY_BYTES
    means = f"less than {_gib(LEAST_MEMORY_BYTES)}: a small model may not fit" if small else ""
    yield _checked(group, "memory", memory, means, "ask for more memory: sbatch --mem=16G")
    network = machine.network_ports
    if isinstance(network, Unavailable):
        means = "several nodes would talk over TCP; one node is not concerned"
        yield Check(group, "RDMA network", "missing", network.reason, means)
        return
    ports = ", ".join(f"{port.device}/{port.port} {port.rate} {port.state}" for port in network)
    active = any("ACTIVE" in port.state for port in network)
    means = "" if active else "no port is active: ranks would talk over TCP"
    remedy = "ibstat shows why; ask the administrator"
    yield _checked(group, "RDMA network", ports, means, remedy)


def _gpu_checks(machine: Machine) -> Iterator[Check]:
    group, gpus = "Accelerators", machine.gpus
    if isinstance(gpus, Unavailable):
        means = "training runs on the CPU"
        yield Check(group, "NVML", "missing", gpus.reason, means, gpus.remedy)
        return
    found = f"driver {gpus.driver_version}, {len(gpus.visible)} of {gpus.installed_count} GPUs"
    hidden = gpus.installed_count - len(gpus.visible)
    means = f"CUDA_VISIBLE_DEVICES hides {hidden}" if hidden else ""
    remedy = "" if gpus.visible else "unset CUDA_VISIBLE_DEVICES, or ask Slurm for --gpus"
    yield Check(group, "NVML", "ok" if gpus.visible else "degraded", found, means, remedy)
    for gpu in gpus.visible:
        found, limit, means = gpu.name, gpu.power_limit_watts, ""
        if not isinstance(gpu.memory_bytes, Unavailable):
            found += f", {_gib(gpu.memory_bytes)}"
        if not isinstance(limit, Unavailable):
            found += f", {limit:.0f} W"
        if gpu.mig_enabled is True:
            found += ", MIG on"
            means = "MIG slices: no NCCL between slices, and power is that of the whole GPU"
        elif isinstance(gpu.facts, Unavailable):
            means = "the planner has no facts about this model and must be calibrated"
        yield _checked(group, f"GPU {gpu.index}", found, means)


def _energy_checks(machine: Machine) -> Iterator[Check]:
    group, gpus, rapl = "Energy sensors", machine.gpus, machine.rapl
    visible = () if isinstance(gpus, Unavailable) else gpus.visible
    counting = sum(gpu.energy_counter is True for gpu in visible)
    found = f"energy counter on {counting} of {len(visible)} GPUs" if visible else "no visible GPU"
    means = "" if counting else "GPU energy will be reported as unavailable, not as zero"
    yield _checked(group, "GPU (NVML)", found, means, state="missing")
    if isinstance(rapl, Unavailable):
        means = "CPU energy will be reported as unavailable"
        yield Check(group, "CPU (RAPL)", "missing", rapl.reason, means, rapl.remedy)
    else:
        yield Check(group, "CPU (RAPL)", "ok", f"reads {', '.join(rapl.zones)}")


def _cluster_checks(machine: Machine) -> Iterator[Check]:
    group, slurm = "Cluster", machine.slurm
    if isinstance(slurm, Unavailable):
        means = "outlast submit needs it; training on this machine does not"
        yield Check(group, "Slurm", "missing", slurm.reason, means, slurm.remedy)
        return
    found = f"{slurm.version}: {', '.join(slurm.commands)}"
    lacking = ", ".join(slurm.missing_commands)
    means = f"missing: {lacking}" if lacking else ""
    yield _checked(group, "Slurm", found, means, "apt-get install slurm-client")
    munge = slurm.munge_socket or (shutil.which("munge") and "installed, no socket") or "not found"
    means = "" if slurm.munge_socket else "Slurm may refuse this machine's requests"
    remedy = "apt-get install munge; systemctl start munge"
    yield _checked(group, "munge", munge, means, remedy)
    found = f"inside job {slurm.job_id}" if slurm.job_id else "not inside a Slurm job"
    means = "" if slurm.job_id else "the queue's limits do not bind here"
    yield Check(group, "job", "ok", found, means)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


# One rank of the smoke test. The result is checked in the rank itself: 1 + 2 = 3.
GLOO_RANK = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
timeout = timedelta(seconds=float(sys.argv[3]))
dist.init_process_group("gloo", f"file://{store}", timeout, world_size=2, rank=rank)
x = torch.full((1024,), rank + 1.0)
dist.all_reduce(x)
assert bool((x == 3).all()), x[:4]
dist.destroy_process_group()
"""


def start_gloo_ranks(store: Path, timeout_seconds: float) -> list[subprocess.Popen[str]]:
    """Start two ranks of an all-reduce over the loopback interface.

    Args:
        store: File that the ranks meet in; must not exist.
        timeout_seconds: How long a rank waits for the other.

    Returns:
        The two processes, for `gloo_check` and then `end_ranks`.
    """
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-c", GLOO_RANK, str(rank), str(store), str(timeout_seconds)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def gloo_check(ranks: list[subprocess.Popen[str]], deadline_seconds: float) -> Check:
    """Wait for the ranks of `start_gloo_ranks` and report.

    Args:
        ranks: The processes.
        deadline_seconds: How long to wait from now, for all of them together.
    """
    end = time.monotonic() + deadline_seconds
    while time.monotonic() < end:
        codes = [process.poll() for process in ranks]
        # One failed rank leaves the other waiting: do not wait with it.
        if None not in codes or any(codes):
            break
        time.sleep(0.02)
    codes = [process.poll() for process in ranks]
    problem = f"no result within {deadline_seconds:g} s" if None in codes else ""
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is not None:
        _, error = ranks[failed].communicate()
        last = (error.strip().splitlines() or ["no message"])[-1]
        problem = f"rank {failed} failed with exit code {codes[failed]}: {last}"
    return _checked(
        "PyTorch",
        "all-reduce",
        problem or "two gloo processes summed 1,024 numbers over loopback",
        "several processes cannot train together" if problem else "",
        "look at the firewall, or set GLOO_SOCKET_IFNAME to a working interface",
        state="missing",
        essential=True,
    )


def end_ranks(ranks: list[subprocess.Popen[str]]) -> None:
    """End the ranks that still run and free their pipes."""
    for process in ranks:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
