"""This machine as the process sees it, and checks of it for training.

Processors, memory, GPUs, scheduler, network and sensors: works without a GPU, inside containers and
without root. Nothing is set, only read.

The checks are the machine's part of ``outlast doctor``, as plain lines: what was found, what it
means, what to do; the command adds those that need PyTorch. Whether processes of this machine can
train together is shown by a real all-reduce over loopback, in two fresh Python processes that
import PyTorch themselves; this module does not.
"""

import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from outlast.errors import HardwareError
from outlast.hardware.catalogue import Device, device_reported_as
from outlast.hardware.figure import Unavailable, plain
from outlast.hardware.filesystem import probe
from outlast.hardware.nvml import Gpus, read_gpus

CGROUP_ROOT = Path("/sys/fs/cgroup")

MEMBERSHIP = Path("/proc/self/cgroup")

# Version 1 writes "no limit" as the largest multiple of a page below 2**63.
NO_LIMIT_BYTES = 2**60


def cpu_limit_cores(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Return the tightest CPU quota of this process' groups in cores, or None without one."""
    found = []
    for group in _groups(root, membership, "cpu"):
        limit = parse_cpu_max(_text(group / "cpu.max"))
        if limit is None:
            quota = _text(group / "cpu.cfs_quota_us")
            limit = parse_cfs_quota(quota, _text(group / "cpu.cfs_period_us"))
        found.append(limit)
    return min((limit for limit in found if limit is not None), default=None)


def memory_limit_bytes(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the tightest memory limit of this process' groups in bytes, or None without one."""
    return min((limit for _, limit, _ in _memory_limits(root, membership)), default=None)


def memory_available_bytes(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return what this process' groups may still take in bytes, or None without a limit.

    File pages count as free, since the kernel drops them for whoever needs memory; those of tmpfs
    do not.
    """
    found = []
    for group, limit, used in _memory_limits(root, membership):
        if used:
            pairs = [line.split() for line in _text(group / "memory.stat").splitlines()]
            values = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
            # Of the group and those below. Version 1 has its own figures and, with a prefix, those
            # of the groups below as well.
            pages = sum(
                values.get(f"total_{name}", values.get(name, 0))
                for name in ("active_file", "inactive_file")
            )
            found.append(max(limit - int(used) + pages, 0))
    return min(found, default=None)


def _memory_limits(root: Path, membership: Path) -> Iterator[tuple[Path, int, str]]:
    """Each group that has a memory limit, that limit in bytes, and the text of what is used."""
    for group in _groups(root, membership, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            if (limit := parse_memory_limit(_text(group / limit_file))) is not None:
                yield group, limit, _text(group / used_file)


def parse_cpu_max(text: str) -> float | None:
    """Read version 2's `cpu.max`, "quota period" in microseconds, as cores.

    Args:
        text: For example "150000 100000" (1.5 cores) or "max 100000" (no limit).
    """
    words = text.split()
    if not words or words[0] == "max":
        return None
    period = float(words[1]) if len(words) > 1 else 100_000.0
    return float(words[0]) / period


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """Read version 1's quota and period, both in microseconds, as cores; -1 is no limit."""
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def parse_memory_limit(text: str) -> int | None:
    """Read a memory limit in bytes; "max" and version 1's huge number are no limit."""
    word = text.strip()
    if not word or word == "max":
        return None
    limit = int(word)
    return None if limit >= NO_LIMIT_BYTES else limit


def parse_membership(text: str, controller: str) -> list[str]:
    """Return the groups of a process that hold a controller, from `/proc/<pid>/cgroup`.

    Args:
        text: Lines "id:controllers:/path"; version 2 has id 0 and no controllers.
        controller: "cpu" or "memory".
    """
    groups = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or controller in controllers.split(","):
            groups.append(path)
    return groups


def usable_cores(affinity_cores: int, quota_cores: float | None) -> float:
    """Return how many cores' worth of time the process may use."""
    return affinity_cores if quota_cores is None else min(float(affinity_cores), quota_cores)


def _groups(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    # A limit of any ancestor binds. Inside a container the path of the host may not be mounted;
    # then the mount's own root is the group.
    mounts = [root, root / "unified", root / controller, root / f"{controller},{controller}acct"]
    paths = parse_membership(_text(membership), controller) or ["/"]
    seen: set[Path] = set()
    for mount, path in itertools.product(mounts, paths):
        group = mount / path.lstrip("/")
        for candidate in (group, *group.parents):
            if candidate.is_relative_to(mount) and candidate not in seen:
                seen.add(candidate)
                yield candidate


def _text(path: Path) -> str:
    """The text of a file of the kernel, without the newline at its end; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


SLURM_COMMANDS = ("sinfo", "squeue", "sbatch", "srun", "scontrol", "sacct")

VERSION_SECONDS = 5.0

INFINIBAND = Path("/sys/class/infiniband")

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """The Slurm client on this machine.

    Attributes:
        version: For example "slurm 23.11.4".
        commands: Client commands on PATH.
        missing_commands: Client commands that are not.
        job_id: The job that this process runs in, or None.
        munge_socket: Path of munge's socket, or None where munge does not run.
    """

    version: str
    commands: tuple[str, ...]
    missing_commands: tuple[str, ...]
    job_id: str | None
    munge_socket: str | None


@dataclass(frozen=True, kw_only=True)
class NetworkPort:
    """One port of an RDMA adapter.

    Attributes:
        device: For example "mlx5_0".
        port: For example "1".
        rate: As the kernel prints it, for example "400 Gb/sec (4X NDR)".
        state: For example "4: ACTIVE".
        link_layer: "InfiniBand" or "Ethernet" (RoCE).
    """

    device: str
    port: str
    rate: str
    state: str
    link_layer: str


@dataclass(frozen=True, kw_only=True)
class Rapl:
    """Energy counters of the processors that this process may read.

    Attributes:
        zones: Names, for example ("package-0", "dram").
    """

    zones: tuple[str, ...]


def read_slurm() -> Slurm | Unavailable:
    """Look for the Slurm client commands and ask for their version."""
    present = tuple(name for name in SLURM_COMMANDS if shutil.which(name))
    if "sinfo" not in present and "srun" not in present:
        return Unavailable(
            "neither sinfo nor srun is on PATH", "apt-get install slurm-client munge"
        )
    try:
        asked = [present[0], "--version"]
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=VERSION_SECONDS, check=False
        )
        version = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        version = ""
    sockets = (Path("/run/munge/munge.socket.2"), Path("/var/run/munge/munge.socket.2"))
    return Slurm(
        version=version or "unknown",
        commands=present,
        missing_commands=tuple(name for name in SLURM_COMMANDS if name not in present),
        job_id=os.environ.get("SLURM_JOB_ID"),
        munge_socket=next((str(socket) for socket in sockets if socket.exists()), None),
    )


def read_network_ports(root: Path = INFINIBAND) -> tuple[NetworkPort, ...] | Unavailable:
    """List the ports of the RDMA adapters (InfiniBand or RoCE) that the kernel shows."""
    ports = tuple(
        NetworkPort(
            device=port.parent.parent.name,
            port=port.name,
            rate=_text(port / "rate"),
            state=_text(port / "state"),
            link_layer=_text(port / "link_layer"),
        )
        for port in sorted(root.glob("*/ports/*"))
    )
    return ports or Unavailable(f"no RDMA adapter in {root}")


def read_rapl(root: Path = POWERCAP) -> Rapl | Unavailable:
    """Tell which RAPL energy counters this process may read.

    The mirrored `intel-rapl-mmio` zones are left out: they count the same joules again.
    """
    counters = sorted(root.glob("intel-rapl:*/energy_uj"))
    if not counters:
        return Unavailable(
            f"no RAPL counters in {root}",
            "modprobe intel_rapl_msr (as root); a virtual machine or container hides them",
        )
    readable = tuple(_text(file.parent / "name") for file in counters if _text(file))
    if not readable:
        return Unavailable(
            "only root may read the RAPL counters",
            f"chmod a+r {root}/intel-rapl:*/energy_uj (as root, after each boot)",
        )
    return Rapl(zones=readable)


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
        """Return one short line: processor, usable cores, memory and GPUs."""
        memory_gib = self.usable_memory_bytes / 2**30
        processors = f"{self.cpu_model}, {self.usable_cores:g} of {self.logical_cores} cores"
        visible = () if isinstance(self.gpus, Unavailable) else self.gpus.visible
        counts = Counter(gpu.name for gpu in visible)
        gpus = " + ".join(f"{count}x {name}" for name, count in counts.items()) or "no GPU"
        return f"{self.host_name}: {processors}, {memory_gib:.0f} GiB, {gpus}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types.

        What is missing becomes ``{"unavailable": reason, "remedy": remedy}``; known devices become
        their key.
        """
        found: dict[str, Any] = plain(self, keyed=Device)
        return found


def this_machine() -> Machine:
    """Read this machine. Takes milliseconds; asks no network and needs no rights."""
    cpu_model, cpu_features = read_processor()
    memory = psutil.virtual_memory()
    logical = psutil.cpu_count(logical=True) or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quota = cpu_limit_cores()
    gpus = read_gpus()
    if isinstance(gpus, Unavailable) and AMD_DRIVER.exists():
        gpus = Unavailable(f"AMD GPUs are present ({AMD_DRIVER}), but only NVML is read here")
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
        gpus=gpus,
        slurm=read_slurm(),
        network_ports=read_network_ports(),
        rapl=read_rapl(),
    )


def read_processor(cpuinfo: Path = CPUINFO) -> tuple[str, tuple[str, ...]]:
    """Return the processor's name and its instruction sets out of `CPU_FEATURES`."""
    entries: dict[str, str] = {}
    for line in _text(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        entries.setdefault(key.strip(), value.strip())
    model = entries.get("model name") or platform.processor() or platform.machine() or "unknown"
    flags = (entries.get("flags") or entries.get("Features") or "").split()
    return model, tuple(name for name in CPU_FEATURES if name in flags)


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
