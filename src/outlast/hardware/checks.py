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


@dataclass(frozen=True, slots=True, kw_only=True)
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


def machine_checks(machine: Machine) -> list[Check]:
    """Return the checks of processors, memory, GPUs, energy sensors and the cluster."""
    return [
        *_processor_checks(machine),
        *_gpu_checks(machine),
        *_energy_checks(machine),
        *_cluster_checks(machine),
    ]


def storage_checks(path: Path) -> list[Check]:
    """Probe the file system under a directory and return its checks."""
    try:
        facts = probe(path)
    except HardwareError as error:
        return [
            Check(
                group="Storage",
                name="write",
                state="missing",
                found=str(error),
                means="no checkpoint can be written here",
                remedy="name a directory that you may write to: --path DIR",
                essential=True,
            )
        ]
    little = facts.free_bytes < LEAST_FREE_BYTES
    means = ""
    if facts.is_memory:
        means = "in memory: checkpoints vanish with the machine"
    elif little:
        means = "a few checkpoints may fill it"
    slow = facts.fsync_seconds > SLOW_FSYNC_SECONDS
    durable = facts.directory_fsync is True
    meaning = "each file of a checkpoint waits this long" if slow else ""
    if not durable:
        meaning = "a directory cannot be fsynced: a power failure may undo the newest checkpoint"
    return [
        Check(
            group="Storage",
            name="space",
            state="degraded" if means else "ok",
            found=f"{_gib(facts.free_bytes)} free on {facts.type} at {facts.mount_point}"
            + (", shared" if facts.is_network else ""),
            means=means,
            remedy="keep checkpoints on a larger, durable file system" if means else "",
        ),
        Check(
            group="Storage",
            name="fsync",
            state="ok" if durable and not slow else "degraded",
            found=f"{facts.fsync_seconds * 1000:.2f} ms for 4 KiB (median, measured)",
            means=meaning,
            remedy="use a local disk for checkpoints" if meaning else "",
        ),
        Check(
            group="Storage",
            name="rename",
            state="ok" if facts.rename_is_atomic else "missing",
            found="replaces atomically" if facts.rename_is_atomic else "a reader saw a torn file",
            means="" if facts.rename_is_atomic else "a crash could leave half a checkpoint visible",
            remedy="" if facts.rename_is_atomic else f"use another file system than {facts.type}",
            essential=True,
        ),
    ]


def _processor_checks(machine: Machine) -> Iterator[Check]:
    quota = "" if machine.quota_cores is None else f", quota {machine.quota_cores:g}"
    held = machine.usable_cores < machine.logical_cores
    features = ", ".join(machine.cpu_features) or "no vector extensions known"
    yield Check(
        group="Machine", name="processor", state="ok", found=f"{machine.cpu_model} ({features})"
    )
    yield Check(
        group="Machine",
        name="cores",
        state="ok",
        found=f"{machine.usable_cores:g} usable of {machine.logical_cores}{quota}",
        means="affinity or the control group holds the process below the machine" if held else "",
    )
    usable, limit = machine.usable_memory_bytes, machine.memory_limit_bytes
    held = limit is not None and limit < machine.memory_total_bytes
    small = min(usable, machine.memory_available_bytes) < LEAST_MEMORY_BYTES
    yield Check(
        group="Machine",
        name="memory",
        state="degraded" if small else "ok",
        found=f"{_gib(machine.memory_available_bytes)} available, {_gib(usable)} at most"
        + (" (control group)" if held else ""),
        means=f"less than {_gib(LEAST_MEMORY_BYTES)}: a small model may not fit" if small else "",
        remedy="ask for more memory: sbatch --mem=16G" if small else "",
    )
    yield _network_check(machine)


def _network_check(machine: Machine) -> Check:
    if isinstance(machine.network_ports, Unavailable):
        return Check(
            group="Machine",
            name="RDMA network",
            state="missing",
            found=machine.network_ports.reason,
            means="several nodes would talk over TCP; one node is not concerned",
        )
    ports = [f"{p.device}/{p.port} {p.rate} {p.state}" for p in machine.network_ports]
    active = any("ACTIVE" in port.state for port in machine.network_ports)
    return Check(
        group="Machine",
        name="RDMA network",
        state="ok" if active else "degraded",
        found=", ".join(ports),
        means="" if active else "no port is active: ranks would talk over TCP",
        remedy="" if active else "ibstat shows why; ask the administrator",
    )


def _gpu_checks(machine: Machine) -> Iterator[Check]:
    group, gpus = "Accelerators", machine.gpus
    if isinstance(gpus, Unavailable):
        yield Check(
            group=group,
            name="NVML",
            state="missing",
            found=gpus.reason,
            means="training runs on the CPU",
            remedy=gpus.remedy,
        )
        return
    hidden = gpus.installed_count - len(gpus.visible)
    yield Check(
        group=group,
        name="NVML",
        state="ok" if gpus.visible else "degraded",
        found=f"driver {gpus.driver_version}, {len(gpus.visible)} of {gpus.installed_count} GPUs",
        means=f"CUDA_VISIBLE_DEVICES hides {hidden}" if hidden else "",
        remedy="" if gpus.visible else "unset CUDA_VISIBLE_DEVICES, or ask Slurm for --gpus",
    )
    for gpu in gpus.visible:
        memory = "" if isinstance(gpu.memory_bytes, Unavailable) else f", {_gib(gpu.memory_bytes)}"
        limit = gpu.power_limit_watts
        power = "" if isinstance(limit, Unavailable) else f", {limit:.0f} W"
        sliced = gpu.mig_enabled is True
        unknown = isinstance(gpu.facts, Unavailable)
        means = (
            "the planner has no facts about this model and must be calibrated" if unknown else ""
        )
        if sliced:
            means = "MIG slices: no NCCL between slices, and power is that of the whole GPU"
        yield Check(
            group="Accelerators",
            name=f"GPU {gpu.index}",
            state="degraded" if sliced or unknown else "ok",
            found=f"{gpu.name}{memory}{power}{', MIG on' if sliced else ''}",
            means=means,
        )


def _energy_checks(machine: Machine) -> Iterator[Check]:
    group, gpus = "Energy sensors", machine.gpus
    visible = () if isinstance(gpus, Unavailable) else gpus.visible
    counting = [gpu for gpu in visible if gpu.energy_counter is True]
    yield Check(
        group=group,
        name="GPU (NVML)",
        state="ok" if counting else "missing",
        found=f"energy counter on {len(counting)} of {len(visible)} GPUs"
        if visible
        else "no visible GPU",
        means="" if counting else "GPU energy will be reported as unavailable, not as zero",
    )
    rapl = machine.rapl
    absent = isinstance(rapl, Unavailable)
    yield Check(
        group=group,
        name="CPU (RAPL)",
        state="missing" if absent else "ok",
        found=rapl.reason if isinstance(rapl, Unavailable) else f"reads {', '.join(rapl.zones)}",
        means="CPU energy will be reported as unavailable" if absent else "",
        remedy=rapl.remedy if isinstance(rapl, Unavailable) else "",
    )


def _cluster_checks(machine: Machine) -> Iterator[Check]:
    group, slurm = "Cluster", machine.slurm
    if isinstance(slurm, Unavailable):
        yield Check(
            group=group,
            name="Slurm",
            state="missing",
            found=slurm.reason,
            means="outlast submit needs it; training on this machine does not",
            remedy=slurm.remedy,
        )
        return
    lacking = ", ".join(slurm.missing_commands)
    yield Check(
        group=group,
        name="Slurm",
        state="degraded" if lacking else "ok",
        found=f"{slurm.version}: {', '.join(slurm.commands)}",
        means=f"missing: {lacking}" if lacking else "",
        remedy="apt-get install slurm-client" if lacking else "",
    )
    munge = slurm.munge_socket or (shutil.which("munge") and "installed, no socket") or "not found"
    yield Check(
        group=group,
        name="munge",
        state="ok" if slurm.munge_socket else "degraded",
        found=munge,
        means="" if slurm.munge_socket else "Slurm may refuse this machine's requests",
        remedy="" if slurm.munge_socket else "apt-get install munge; systemctl start munge",
    )
    yield Check(
        group=group,
        name="job",
        state="ok",
        found=f"inside job {slurm.job_id}" if slurm.job_id else "not inside a Slurm job",
        means="" if slurm.job_id else "the queue's limits do not bind here",
    )


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
    problem = _gloo_problem(ranks, deadline_seconds)
    return Check(
        group="PyTorch",
        name="all-reduce",
        state="missing" if problem else "ok",
        found=problem or "two gloo processes summed 1,024 numbers over loopback",
        means="several processes cannot train together" if problem else "",
        remedy="look at the firewall, or set GLOO_SOCKET_IFNAME to a working interface"
        if problem
        else "",
        essential=True,
    )


def _gloo_problem(ranks: list[subprocess.Popen[str]], deadline_seconds: float) -> str:
    codes = [process.poll() for process in ranks]
    for rank, code in enumerate(codes):
        if code:
            _, error = ranks[rank].communicate()
            last = (error.strip().splitlines() or ["no message"])[-1]
            return f"rank {rank} failed with exit code {code}: {last}"
    return f"no result within {deadline_seconds:g} s" if None in codes else ""


def end_ranks(ranks: list[subprocess.Popen[str]]) -> None:
    """End the ranks that still run and free their pipes."""
    for process in ranks:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
