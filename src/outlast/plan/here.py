"""Cluster file of this machine, with rates that were measured on it.

tables = machine_text(measured_rates())
one = read_cluster(tables)             # one rank with all cores
two = divided(one, ranks=2)            # two ranks that share them

    rates = measured_rates()
    rates.matmul_flop_per_s["bf16"]

The planner itself loads no torch: a process of its own runs torch's products, with as many threads
as one rank of the trainer would have.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outlast.errors import PlanError
from outlast.hardware import Machine, Unavailable, this_machine
from outlast.plan.cluster import Cluster
from outlast.plan.cluster_file import read_cluster, this_cluster

SECONDS = 4.0
"""That the measured loops take together, beside the start of torch."""
_DEADLINE_SECONDS = 120.0
_MESSAGE_BYTES = 16 << 20
_MESSAGES = 8

_PROGRAM = """
import json, os, sys, time
import torch

share = float(sys.argv[1]) / 8
threads = int(sys.argv[2])
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(threads)

def best_seconds(call):
    call()
    least, end, count = float("inf"), time.perf_counter() + share, 0
    while count < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        call()
        least, count = min(least, time.perf_counter() - begun), count + 1
    return least

found = {}
for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    rates = []
    for side in (512, 1024, 1536):
        left, right = (torch.randn(side, side).to(kind) for _ in range(2))
        out = torch.empty(side, side, dtype=kind)
        rates.append(2 * side**3 / best_seconds(lambda: torch.mm(left, right, out=out)))
    found[name] = max(rates)
rates = []
for count in (1 << 20, 1 << 23):
    left, right, out = (torch.ones(count) for _ in range(3))
    rates.append(12 * count / best_seconds(lambda: torch.add(left, right, out=out)))
print(json.dumps({"matmul": found, "memory": max(rates), "threads": torch.get_num_threads()}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Best rates that were measured, of all cores of one rank together.

    Attributes:
        matmul_flop_per_s: By precision.
        memory_bytes_per_s: Of an elementwise operation on tensors of 4 and of 32 MiB.
        link_bytes_per_s: From one process to another of this machine.
        threads: That torch took.
    """

    matmul_flop_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float
    threads: int


def measured_rates(seconds: float = SECONDS) -> Rates:
    """The rates of the cores that this process may use.

    Args:
        seconds: That the loops take together.

    Raises:
        PlanError: Torch cannot be started, or ends without a figure.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = _by_torch(seconds, max(cores or 1, 1))
    rates = Rates(
        matmul_flop_per_s={name: float(value) for name, value in found["matmul"].items()},
        memory_bytes_per_s=float(found["memory"]),
        link_bytes_per_s=loopback_bytes_per_s(),
        threads=int(found["threads"]),
    )
    for value in (*rates.matmul_flop_per_s.values(), rates.memory_bytes_per_s):
        if not 0.0 < value < math.inf:
            raise PlanError(f"a rate of {value:g} was measured here: measure again")
    return rates


def _by_torch(seconds: float, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-c", _PROGRAM, str(seconds), str(threads)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"torch measured nothing within {_DEADLINE_SECONDS:g} s: free the machine of other "
            "work and calibrate again"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PlanError(f"torch cannot measure this machine: {last}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def loopback_bytes_per_s() -> float:
    """Bytes per second between two processes through a socket, as gloo sends them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_DEADLINE_SECONDS)
        receiver = threading.Thread(target=_drain, args=(server,))
        receiver.start()
        message = bytes(_MESSAGE_BYTES)
        with socket.create_connection(server.getsockname(), timeout=_DEADLINE_SECONDS) as sender:
            begun = time.perf_counter()
            for _ in range(_MESSAGES):
                sender.sendall(message)
            sender.shutdown(socket.SHUT_WR)
            sender.recv(1)
            seconds = time.perf_counter() - begun
        receiver.join()
    return _MESSAGES * _MESSAGE_BYTES / seconds


def _drain(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(_DEADLINE_SECONDS)
        buffer = bytearray(1 << 20)
        while connection.recv_into(buffer):
            pass
        connection.sendall(b"\0")


_HEAD = """\
# The processors of one machine, measured by `outlast plan calibrate --run`: one rank has all cores.
# Nothing is said to fail: give [[failures]] where you know better.
"""


def measured_cluster(machine: Machine | None = None) -> tuple[Cluster, str]:
    """The cluster of this machine, and the file that says so; GPUs come from the catalogue.

    Args:
        machine: What was read of the machine; by default it is read now.

    Returns:
        The cluster with one rank per GPU, or with one rank for all processors; the text of its
        file, empty where the catalogue knows the GPUs.

    Raises:
        PlanError: The GPUs are not in the catalogue, or torch cannot be started.
    """
    machine = machine or this_machine()
    if not isinstance(machine.gpus, Unavailable) and machine.gpus.visible:
        return this_cluster(), ""
    text = machine_text(measured_rates(), machine)
    return read_cluster(text), text


def kept_cluster(file: Path) -> tuple[Cluster, str]:
    """The cluster of this machine as `file` says it, or measured now and written there.

    Probes of an earlier time were fitted with the rates of that time, so these are kept with them.

    Args:
        file: Beside the probes' runs.
    """
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        return read_cluster(text), text
    cluster, text = measured_cluster()
    if text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return cluster, text


def machine_text(rates: Rates, machine: Machine | None = None) -> str:
    """A cluster file of one node with one device: all of its cores.

    Args:
        rates: Measured.
        machine: What was read of the machine; by default it is read now.
    """
    machine = machine or this_machine()
    words = f"measured: {rates.threads} threads, the best of several sizes"
    lines = [
        _HEAD + "[cluster]",
        'name = "this-machine"',
        f'device = "{_slug(machine.cpu_model)}-{rates.threads}-threads"',
        "processor = true",
        "nodes = 1",
        "devices_per_node = 1",
        f"host_cores = {max(int(machine.usable_cores), 1)}",
        'failure_rates = "none"',
        f"memory_bytes = {float(machine.usable_memory_bytes):.6g}",
        f"memory_bytes_per_s = {rates.memory_bytes_per_s:.4g}",
        f"fast_bytes_per_s = {rates.link_bytes_per_s:.4g}",
    ]
    for table in ("peak_flop_per_s", "matmul_flop_per_s"):
        lines += ["", f"[cluster.{table}]"]
        lines += [f"{name} = {rate:.4g}" for name, rate in rates.matmul_flop_per_s.items()]
    lines += ["", "[sources]", 'memory_bytes = "measured: what this process may use"']
    lines += [f'memory_bytes_per_s = "{words}"']
    lines += ['fast_bytes_per_s = "measured: a socket of this machine"']
    for table in ("peak_flop_per_s", "matmul_flop_per_s"):
        lines += [f'"{table}.{name}" = "{words}"' for name in rates.matmul_flop_per_s]
    return "\n".join([*lines, ""])


def divided(cluster: Cluster, ranks: int) -> Cluster:
    """The same machine with more ranks: processors' rates and memory are shared among them.

    Args:
        cluster: Of one node, as `measured_cluster` gives it.
        ranks: Processes that train.

    Raises:
        PlanError: There are fewer GPUs than ranks.
    """
    if not cluster.processor:
        if ranks > cluster.devices_per_node:
            raise PlanError(
                f"{ranks} ranks need as many GPUs, and this machine has {cluster.devices_per_node}"
            )
        return replace(cluster, devices_per_node=ranks, fast_domain=ranks)
    share = cluster.devices_per_node / ranks
    return replace(
        cluster,
        devices_per_node=ranks,
        fast_domain=ranks,
        peak_flop_per_s={name: rate * share for name, rate in cluster.peak_flop_per_s.items()},
        matmul_flop_per_s={name: rate * share for name, rate in cluster.matmul_flop_per_s.items()},
        memory_bytes=cluster.memory_bytes * share,
        memory_bytes_per_s=cluster.memory_bytes_per_s * share,
        fast_bytes_per_s=cluster.fast_bytes_per_s,
        sources={
            name: replace(source, value=source.value * share, text=f"{source.text}; its share")
            if name.split(".")[0].endswith("flop_per_s") or name.startswith("memory_bytes")
            else source
            for name, source in cluster.sources.items()
        },
    )


def _slug(text: str) -> str:
    """A device's key: small letters, digits and dashes."""
    plain = re.sub(r"\((r|tm|c)\)", "", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "processor"
