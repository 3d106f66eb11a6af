"""What surrounds the processors: Slurm, InfiniBand adapters and the RAPL energy counters."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from outlast.hardware.figure import Unavailable

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
    """Looks for the Slurm client commands and asks for their version."""
    present = tuple(name for name in SLURM_COMMANDS if shutil.which(name))
    if "sinfo" not in present and "srun" not in present:
        return Unavailable(
            "neither sinfo nor srun is on PATH", "apt-get install slurm-client munge"
        )
    sockets = (Path("/run/munge/munge.socket.2"), Path("/var/run/munge/munge.socket.2"))
    munge = next((str(socket) for socket in sockets if socket.exists()), None)
    return Slurm(
        version=_slurm_version(present[0]),
        commands=present,
        missing_commands=tuple(name for name in SLURM_COMMANDS if name not in present),
        job_id=os.environ.get("SLURM_JOB_ID"),
        munge_socket=munge,
    )


def _slurm_version(command: str) -> str:
    try:
        done = subprocess.run(
            [command, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def read_network_ports(root: Path = INFINIBAND) -> tuple[NetworkPort, ...] | Unavailable:
    """Lists the ports of the RDMA adapters (InfiniBand or RoCE) that the kernel shows."""
    ports = tuple(
        NetworkPort(
            device=port.parent.parent.name,
            port=port.name,
            rate=_line(port / "rate"),
            state=_line(port / "state"),
            link_layer=_line(port / "link_layer"),
        )
        for port in sorted(root.glob("*/ports/*"))
    )
    return ports or Unavailable(f"no RDMA adapter in {root}")


def read_rapl(root: Path = POWERCAP) -> Rapl | Unavailable:
    """Tells which RAPL energy counters this process may read.

    The mirrored `intel-rapl-mmio` zones are left out: they count the same joules again.
    """
    counters = sorted(root.glob("intel-rapl:*/energy_uj"))
    if not counters:
        return Unavailable(
            f"no RAPL counters in {root}",
            "modprobe intel_rapl_msr (as root); a virtual machine or container hides them",
        )
    readable = tuple(_line(c.parent / "name") for c in counters if _line(c))
    if not readable:
        return Unavailable(
            "only root may read the RAPL counters",
            f"chmod a+r {root}/intel-rapl:*/energy_uj (as root, after each boot)",
        )
    return Rapl(zones=readable)


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
