"""Files and folders that a user names, checked before any work begins; none is waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_OF_THIS_PROCESS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Pipes that the shell has opened for a command, such as ``<(...)``."""


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuse a folder, and what is no file on a disk: to read it could wait or last for ever.

    Raises:
        OSError: With the reason in ``strerror``; also where there is nothing.
    """
    mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(mode) and not str(path).startswith(_OF_THIS_PROCESS):
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """Text of a file in UTF-8; a byte order mark, with which some editors begin, is left out.

    Raises:
        OSError: It is not there, or cannot be read; the reason is in ``strerror``.
        UnicodeDecodeError: It is no such text.
    """
    check_regular(path)
    return Path(path).read_text(encoding="utf-8-sig")


def check_writable(path: Path) -> None:
    """Refuse the name of a file or folder that cannot be made.

    Raises:
        OSError: What is there of its parents is no folder of the user; ``strerror`` says why.
    """
    above = path.absolute()
    while not os.path.lexists(above):
        above = above.parent
    if above == path.absolute() and not above.is_dir():
        above = above.parent
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{above} is no folder", str(path))
    if not os.access(above, os.W_OK):
        raise PermissionError(errno.EACCES, f"{above} is not yours to write", str(path))
