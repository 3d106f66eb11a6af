"""Bytes on the wire of coded gradients: a message of an m-th of a gradient is m-fold fewer bytes.

The hub of a parameter server receives gradients of several MB. What came is read from the kernel,
TCP_INFO's bytes received over all connections of the hub's process: headers, gloo's own protocol
and everything else that is sent are in the figure.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import statistics
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Bar, at_least
from torch import nn

from outlast.coding.code import GradientCode
from outlast.coding.codes.blocks import BlockCode
from outlast.coding.codes.communication import YeAbbe
from outlast.coding.codes.partial import PartialCode
from outlast.coding.codes.repetition import FractionalRepetition
from outlast.coding.protocol.server import Hub
from outlast.coding.protocol.worker import Worker

WORKERS = 4
LEAST_SHARE = 0.95
DEADLINE_SECONDS = 120.0
_BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received in struct tcp_info (linux/tcp.h, since 4.1)."""


def received_bytes() -> int:
    """Bytes that came over this process's TCP connections, as the kernel counts them."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not stat.S_ISSOCK(link.stat().st_mode):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        except OSError:
            continue  # closed meanwhile, or no TCP connection
        total += struct.unpack_from("Q", info, _BYTES_RECEIVED)[0]
    return total


def train(code: GradientCode | BlockCode | PartialCode, numbers: int, steps: int) -> list[int]:
    """Train on this rank; on the hub, the bytes that it received in each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Linear(1, numbers, bias=False)
    if dist.get_rank():
        worker = Worker(model, code, patience_seconds=DEADLINE_SECONDS)
        for step in worker.steps():
            for chunk in worker.chunks:
                model(torch.full((1, 1), chunk + 1.0)).sum().backward()
                worker.add(chunk)
            worker.send(step)
        return []
    hub = Hub(model, code, deadline_seconds=DEADLINE_SECONDS, answer_seconds=DEADLINE_SECONDS)
    totals = [received_bytes()]
    expected = float(sum(chunk + 1.0 for chunk in range(WORKERS)))
    for step in range(steps):
        hub.publish(step)
        gradients, outcome = hub.collect(step)
        if len(outcome.survivors) != WORKERS:
            raise AssertionError("a message was not waited for, its bytes are in no step")
        off = float((gradients.buffers[0] - expected).abs().max())
        if off > 1e-3 * expected:
            raise AssertionError(f"the decoded gradient is off by {off}")
        totals.append(received_bytes())
    hub.close()
    return [after - before for before, after in pairwise(totals)]


def _rank(rank: int, port: int, pipe: Any, arguments: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(WORKERS + 1),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    pipe.send(train(*arguments))
    os._exit(0)


def bytes_per_step(code: GradientCode | BlockCode | PartialCode, numbers: int, steps: int) -> float:
    """Median over steps of what the hub receives, in forked processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    arguments = (code, numbers, steps)
    ranks = [
        context.Process(target=_rank, args=(rank, port, theirs, arguments))
        for rank in range(WORKERS + 1)
    ]
    for each in ranks:
        each.start()
    try:
        if not ours.poll(2 * DEADLINE_SECONDS):
            raise AssertionError(f"no rank gave a result in {2 * DEADLINE_SECONDS:g} s")
        results = [ours.recv() for _ in ranks]
    finally:
        for each in ranks:
            each.join(1.0)
            each.kill()
    return statistics.median(next(each for each in results if each))


def bytes_bars(quick: bool) -> Iterator[Bar]:
    """Received bytes without a code, over those with messages of a half and a third."""
    numbers, steps = (1_000_000, 3) if quick else (8_000_000, 5)
    # No stragglers: every message is needed, so that none is in flight between two steps.
    whole = bytes_per_step(FractionalRepetition(WORKERS, 0), numbers, steps)
    size = f"{4 * numbers / 1e6:g} MB"
    for parts in (2, 3):
        codes = {
            "Ye-Abbe": YeAbbe(WORKERS, 0, parts),
            "partial-straggler": PartialCode(WORKERS, parts, parts),
        }
        for name, code in codes.items():
            figure = whole / bytes_per_step(code, numbers, steps)
            yield at_least(
                f"bytes on the wire to the hub, {name}, l = {parts}, gradient of {size}",
                figure,
                "fold fewer",
                LEAST_SHARE * parts,
                "uncoded messages, same model",
            )
