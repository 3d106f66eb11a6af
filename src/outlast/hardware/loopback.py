"""Whether processes of this machine can train together: a real all-reduce over loopback.

The two ranks are fresh Python processes that import PyTorch themselves; this module does not.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from outlast.hardware.checks import Check

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
    """Starts two ranks of an all-reduce over the loopback interface.

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
    """Waits for the ranks of `start_gloo_ranks` and reports.

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
    """Ends the ranks that still run and frees their pipes."""
    for process in ranks:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
