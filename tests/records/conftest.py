"""A disk that is full, for real and without privileges."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

FileLimit = Callable[[int], AbstractContextManager[None]]


@pytest.fixture
def file_limit() -> FileLimit:
    """While it is entered, the kernel lets no file of this process grow beyond so many bytes.

    A write across the limit is short and the next one fails, exactly as on a disk that fills up.
    """

    @contextlib.contextmanager
    def limit(largest_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)

    return limit
