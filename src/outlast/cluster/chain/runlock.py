"""The trainer's own lock of its run, after its owner has died on another node.

The lock's owner cannot be examined from another host, so it counts as live for two minutes after
its last sign of life. A chain knows more: that Slurm has ended the job whose processes it was. The
next link then need not wait.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING

from outlast.records.lock import OwnerLock
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LOOK_SECONDS = 1.0


def wait_for_lock(
    path: Path, dead_hosts: Sequence[str] = (), *, fence: Path | None = None
) -> float:
    """Wait until no owner on another host can be alive any more.

    A lock of this host, since it was booted, is left to the trainer, which can examine its owner.

    Args:
        path: The lock.
        dead_hosts: Hosts of a job that has ended for certain: a lock from there is removed.
        fence: Of the chain, which this link holds.

    Returns:
        Seconds that it took, at most `OwnerLock.stale_after_seconds`.
    """
    begun = time.monotonic()
    dead = {host.partition(".")[0] for host in dead_hosts}
    while time.monotonic() - begun < OwnerLock.stale_after_seconds:
        try:
            found = json.loads(path.read_bytes())
            owner, boot = str(found["host"]), str(found["boot"])
            age_seconds = time.time() - path.stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            break
        if fence is not None and str(fence) in (found.get("lease") or ()):
            # Of an earlier job of this chain: the trainer breaks it, by its lease.
            break
        here = (owner, boot) == (socket.gethostname(), boot_identity())
        if here or age_seconds > OwnerLock.stale_after_seconds:
            break
        if owner.partition(".")[0] in dead:
            with contextlib.suppress(OSError):
                path.unlink()
            break
        time.sleep(_LOOK_SECONDS)
    return time.monotonic() - begun
