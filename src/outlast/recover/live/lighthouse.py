"""torchft's lighthouse as a process of its own, which is started again when it dies."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from outlast.errors import RecoverError
from outlast.recover.cost import SILENCE_SHARE

if TYPE_CHECKING:
    from types import TracebackType

TICK_MS = 10
_START_SECONDS = 20.0


def require_torchft() -> None:
    """Raises RecoverError when the extra ``ft`` is not installed."""
    if importlib.util.find_spec("torchft") is None:
        raise RecoverError(
            'recover.mode = "live" needs torchft, which is not installed; '
            'install it with `pip install "outlast[ft]"`, or choose recover.mode = "restart"'
        )


class Lighthouse:
    """A lighthouse process on this machine, always at the same port.

    Args:
        heartbeat_seconds: A group that is silent for so long has been dropped by then.
        smallest: Fewest groups that may train.
        join_seconds: How long a quorum waits for a group that is alive but does not come.
        host: Under which the groups reach this machine.

    Raises:
        RecoverError: When torchft is missing, or the process does not start.
    """

    def __init__(
        self,
        heartbeat_seconds: float = 1.0,
        *,
        smallest: int = 1,
        join_seconds: float = 60.0,
        host: str = "127.0.0.1",
    ) -> None:
        require_torchft()
        self._settings = [
            str(smallest),
            str(max(int(1000 * SILENCE_SHARE * heartbeat_seconds), 1)),
            str(TICK_MS),
            str(int(1000 * join_seconds)),
        ]
        self._process, port = self._start(0)
        self._port = port
        self.address = f"{host}:{port}"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def keep_alive(self) -> bool:
        """Start the process again if it has died; whether that was needed.

        Raises:
            RecoverError: When it does not start.
        """
        if self._process.poll() is None:
            return False
        self._process, _ = self._start(self._port)
        return True

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Lighthouse:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, port: int) -> tuple[subprocess.Popen[bytes], int]:
        arguments = ", ".join([str(port), *self._settings])
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"{inspect.getsource(_serve)}\n_serve({arguments})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # torchft logs several lines for each quorum, and cannot be asked for fewer.
            stderr=subprocess.DEVNULL,
            # Ctrl-C is for the workers, which then stop at a step's end and need a quorum for it.
            start_new_session=True,
        )
        assert process.stdout is not None
        deadline = time.monotonic() + _START_SECONDS
        ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        line = process.stdout.readline() if ready else b""
        if not line.strip().isdigit():
            process.kill()
            process.wait()
            problem = line.decode(errors="replace").strip() or "it said nothing"
            raise RecoverError(
                f"torchft's lighthouse did not start at port {port or 'any'} within "
                f"{_START_SECONDS:g} s: {problem}"
            )
        return process, int(line)


def _serve(port: int, groups: int, silence_ms: int, tick_ms: int, join_ms: int) -> None:
    """Serve on `port` (0: a free one, printed as a line) until the standard input ends.

    Runs as a program of its own, which loads the lighthouse's library alone: importing torch would
    take a second at every start.
    """
    import importlib.machinery
    import importlib.util
    import sys
    from pathlib import Path

    package = importlib.util.find_spec("torchft")
    if package is None or not package.submodule_search_locations:
        raise ImportError("torchft is not installed")
    (file,) = Path(package.submodule_search_locations[0]).glob("_torchft.*.so")
    name = "torchft._torchft"
    loader = importlib.machinery.ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    library = importlib.util.module_from_spec(spec)
    loader.exec_module(library)
    try:
        server = library.LighthouseServer(
            bind=f"0.0.0.0:{port}",
            min_replicas=groups,
            join_timeout_ms=join_ms,
            quorum_tick_ms=tick_ms,
            heartbeat_timeout_ms=silence_ms,
        )
    except Exception as error:
        print(error, flush=True)
        sys.exit(1)
    print(server.address().rpartition(":")[2], flush=True)
    sys.stdin.buffer.read()
    server.shutdown()
