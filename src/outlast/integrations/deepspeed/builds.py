"""Locks that a killed build of a torch extension has left: every later start waits for them.

DeepSpeed compiles its operators when they are first used. torch.utils.cpp_extension holds a file
``lock`` in the extension's folder while it does, and removes it afterwards. Where the build was
killed the file stays, and whoever needs the extension waits for its end without a limit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils import cpp_extension

from outlast.errors import IntegrationError
from outlast.hardware.filesystem import MOUNTS, NETWORK_TYPES, mount_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_PROCESSES = Path("/proc")
_LONGEST_BUILD_SECONDS = 3600.0
"""Where the processes that may build cannot all be seen."""


def extensions_folder() -> Path:
    """Folder in which torch builds extensions: ``TORCH_EXTENSIONS_DIR``, or in the user's cache."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    kind = "cpu"
    if torch.version.hip is not None:
        kind = f"rocm{torch.version.hip.replace('.', '')}"
    elif torch.version.cuda is not None:
        kind = f"cu{torch.version.cuda.replace('.', '')}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(cpp_extension.get_default_build_root()) / f"{python}_{kind}"


def operators() -> Collection[str]:
    """Names of the extensions that DeepSpeed builds on this machine's kind of device."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    return [*ALL_OPS]


def stale_locks(folder: Path, names: Collection[str]) -> list[Path]:
    """Locks of the extensions of these names below `folder` that no live build holds.

    A build keeps its lock open. On a file system of this machine's own, a lock that no process has
    open is stale; on one that other machines share, where it is an hour old as well.
    """
    found = [each for name in names if (each := folder / name / "lock").exists()]
    locks = {lock: _identity(lock) for lock in found}
    if not locks:
        return []
    # After the locks were listed: whoever holds one of them has it open by now.
    held = set(_open_files("lock"))
    free = [lock for lock, identity in locks.items() if identity not in held]
    if not _sees_all_builds(folder):
        free = [lock for lock in free if _age_seconds(lock) > _LONGEST_BUILD_SECONDS]
    # Those that were given back meanwhile are gone.
    return sorted(lock for lock in free if lock.exists())


def refuse_stale_locks() -> None:
    """Refuse to go on where the next build of an extension would wait for ever.

    Raises:
        IntegrationError: Naming the lock and what to do.
    """
    if locks := stale_locks(extensions_folder(), operators()):
        names = " ".join(map(str, locks))
        raise IntegrationError(
            "a build of a DeepSpeed operator was killed, and every start would wait without end "
            f"for the lock that it has left; no process builds it now, so delete it: rm {names}"
        )


def _sees_all_builds(folder: Path) -> bool:
    try:
        mounts = MOUNTS.read_text(encoding="latin-1")
    except OSError:
        return False
    return mount_of(folder.resolve(), mounts)[1] not in NETWORK_TYPES


def _age_seconds(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _identity(path: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return -1, -1


def _open_files(name: str) -> Iterator[tuple[int, int]]:
    """Device and inode of every file called `name` that a process of this machine has open."""
    for link in _PROCESSES.glob("[0-9]*/fd/*"):
        # Processes end, and those of others are not to be looked into.
        with contextlib.suppress(OSError):
            if link.readlink().name == name:
                found = link.stat()
                yield found.st_dev, found.st_ino
