"""``outlast run --nproc N``: the processes of a script on this machine, by torch elastic."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

import psutil

from outlast.errors import EXIT_CRASHED, EXIT_DONE
from outlast.integrations.stop import say_interrupted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_MONITOR_SECONDS = 0.1
_interrupts: list[int] = []


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run ``outlast run ARGUMENTS`` in so many processes, and wait for them.

    SIGTERM, SIGUSR1 and SIGINT are passed on to them, so that they save and end together.

    Returns:
        0 when all have come to their end, else the exit code of the first that has not.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes > 1:
        # As torchrun does: the processes share the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The processes need not say again what this one has said.
    os.environ["OUTLAST_LAUNCH"] = "nproc"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=f"outlast-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        # The stop signals are ours: elastic would end the processes before they have saved.
        signals_to_handle="SIGQUIT",
    )
    previous = {
        number: signal.signal(number, _forward)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    }
    try:
        elastic_launch(config, sys.executable)("-m", "outlast", "run", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        print(
            f"outlast: rank {rank} was killed by {name}; the same command goes on from the newest "
            "version",
            file=sys.stderr,
        )
        return EXIT_CRASHED
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return EXIT_DONE


def _forward(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        _interrupts.append(number)
        if len(_interrupts) > 1:
            # A person who presses Ctrl-C twice wants the end; elastic ends the processes.
            raise KeyboardInterrupt
        say_interrupted()
    passed = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(passed)
