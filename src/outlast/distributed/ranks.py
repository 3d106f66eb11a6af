"""Identity of this process among the others, and the process groups that it needs.

The identity comes from the environment: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` as torchrun sets
them, or Slurm's variables when ``RANK`` is unset and the process is a task of an srun step.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from outlast.errors import OutlastError

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Ranks:
    """This process among all processes of the run.

    Attributes:
        launch: ``alone``, ``nproc``, ``torchrun`` or ``srun``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launch: str

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes metrics and talks to the person."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """Machines of the run, as many processes on each."""
        return -(-self.world_size // self.local_world_size)


ALONE = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, launch="alone")


def launched_by(environment: Environment) -> str:
    """``torchrun``, ``srun`` or ``alone``: who started this process."""
    if "RANK" in environment:
        return environment.get("OUTLAST_LAUNCH", "torchrun")
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        return "srun"
    return "alone"


def ranks_from(environment: Environment) -> Ranks:
    """Read this process's identity from `environment`.

    Raises:
        OutlastError: When variables are missing or contradict each other.
    """
    launch = launched_by(environment)
    if launch == "alone":
        return ALONE
    names = (
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        if launch == "srun"
        else ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    try:
        rank, world_size = int(environment[names[0]]), int(environment[names[1]])
        local_rank = int(environment.get(names[2], "0"))
        local_world_size = _local_size(environment, names[3], world_size)
    except (KeyError, ValueError) as error:
        raise OutlastError(
            f"the environment of a {launch} process must set {names[0]} and {names[1]} to whole "
            f"numbers, but {error} is missing or wrong; start it with torchrun or srun"
        ) from None
    if not 0 <= rank < world_size:
        raise OutlastError(
            f"{names[0]} = {rank} is not below {names[1]} = {world_size}; start all processes of "
            "the run with one torchrun or srun"
        )
    return Ranks(rank, world_size, local_rank, local_world_size, launch)


def _local_size(environment: Environment, name: str, world_size: int) -> int:
    if name in environment:
        return int(environment[name])
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", str(world_size))
    # Slurm writes e.g. "4(x2),3"; the first number is right for equal nodes.
    match = re.match(r"\d+", per_node)
    return int(match.group()) if match else world_size


def rendezvous_address(environment: Environment) -> tuple[str, int]:
    """Host and port where rank 0 listens.

    torchrun sets MASTER_ADDR and MASTER_PORT. Under srun it is the first node of the step, and a
    port that follows from the job and step numbers, so that two steps on a node do not collide.
    """
    try:
        if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
            return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    except (KeyError, ValueError) as error:
        raise OutlastError(
            "where rank 0 listens is not known: MASTER_ADDR and MASTER_PORT are not both set, or "
            f"wrong, and this is no srun step ({error}); start with torchrun or srun"
        ) from None
    node_list = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", ""))
    port = 20_000 + (job * 64 + step) % 12_000
    return _first_host(node_list), port


def _first_host(node_list: str) -> str:
    """The address of the first node of a Slurm node list such as ``gpu[03-05],gpu9``."""
    hosts = _scontrol("show", "hostnames", node_list).split()
    if not hosts:
        raise OutlastError(
            f"SLURM_STEP_NODELIST = {node_list!r} names no node, so there is no address for rank 0;"
            " set MASTER_ADDR and MASTER_PORT"
        )
    try:
        socket.getaddrinfo(hosts[0], None)
    except OSError:
        # A node's name need not resolve; Slurm knows the address that it uses itself.
        found = re.search(r"NodeAddr=(\S+)", _scontrol("show", "node", hosts[0]))
        if found:
            return found.group(1)
    return hosts[0]


def _scontrol(*arguments: str) -> str:
    try:
        run = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise OutlastError(
            f"`scontrol {' '.join(arguments)}` failed ({error}); set MASTER_ADDR and MASTER_PORT"
        ) from None
    return run.stdout


def device_of(ranks: Ranks) -> torch.device:
    """The accelerator of this process, or the CPU.

    Raises:
        OutlastError: When a launcher started more processes here than there are GPUs.
    """
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        # Under srun every task may see a GPU of its own.
        if ranks.launch in ("nproc", "torchrun") and ranks.local_world_size > count:
            raise OutlastError(
                f"launch.nproc = {ranks.local_world_size} exceeds the {count} "
                f"GPU{'s' if count > 1 else ''} that this machine shows; start {count}, or hide "
                'the GPUs with CUDA_VISIBLE_DEVICES=""'
            )
        return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def join(ranks: Ranks, device: torch.device, timeout_seconds: float) -> None:
    """Initialise the default process group; one process alone needs none.

    Raises:
        OutlastError: When the other processes do not come within `timeout_seconds`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.launch == "alone":
        return
    host, port = rendezvous_address(os.environ)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=_store(ranks, host, port, timedelta(seconds=timeout_seconds)),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, TimeoutError) as error:
        raise OutlastError(
            f"rank {ranks.rank} waited {timeout_seconds:g} s (launch.timeout_seconds) at "
            f"{host}:{port} for {ranks.world_size} processes to come: {error}"
        ) from None


def _store(ranks: Ranks, host: str, port: int, timeout: timedelta) -> dist.Store:
    """The key-value store in which the ranks find each other, with keys of this attempt alone.

    torch elastic 2.13 keeps one store for all restarts of a group, so without a prefix a restarted
    rank would read the addresses of its dead predecessors.
    """
    hosted_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        host,
        port,
        ranks.world_size,
        is_master=ranks.is_first and not hosted_by_agent,
        timeout=timeout,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"outlast/attempt-{attempt}", store)


def leave() -> None:
    """Destroy the process groups of this process, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
