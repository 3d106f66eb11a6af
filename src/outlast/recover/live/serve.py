"""A program that runs torchft's lighthouse until its standard input is closed.

It loads nothing but the lighthouse's own library, so that it starts, and starts again after it was
killed, in a fraction of the second that importing torch takes.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any


def _library() -> Any:
    package = importlib.util.find_spec("torchft")
    if package is None or not package.submodule_search_locations:
        raise ImportError("torchft is not installed")
    (file,) = Path(package.submodule_search_locations[0]).glob("_torchft.*.so")
    name = "torchft._torchft"
    loader = importlib.machinery.ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def main(port: int, groups: int, silence_ms: int, tick_ms: int, join_ms: int) -> None:
    """Serve on `port` (0: a free one, printed as a line) until the standard input ends."""
    try:
        server = _library().LighthouseServer(
            bind=f"0.0.0.0:{port}",
            min_replicas=groups,
            join_timeout_ms=join_ms,
            quorum_tick_ms=tick_ms,
            heartbeat_timeout_ms=silence_ms,
        )
    except Exception as error:
        sys.exit(print(error, flush=True))
    print(server.address().rpartition(":")[2], flush=True)
    sys.stdin.buffer.read()
    server.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
