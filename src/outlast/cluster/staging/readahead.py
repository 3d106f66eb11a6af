"""A file as a sequence of large blocks, read ahead of their use.

Parallel file systems and object stores give their bandwidth to large requests of which several are
on the way; a single reader that waits for each of them gets a fraction of it.
"""

from __future__ import annotations

import concurrent.futures
import mmap
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.cluster.staging.source import Reader

SMALLEST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ReadAhead:
    """How a file is read.

    Attributes:
        block_bytes: Bytes of one request, at least 1 MiB.
        blocks: Requests on the way while the block before is used; memory is one block more.
    """

    block_bytes: int = 8 << 20
    blocks: int = 4

    def __post_init__(self) -> None:
        if self.block_bytes < SMALLEST_BLOCK_BYTES:
            raise ClusterError(
                f"a read-ahead of {self.block_bytes} bytes a request is too little; use at least "
                f"{SMALLEST_BLOCK_BYTES} (staging.block_megabytes = 1)"
            )
        if self.blocks < 1:
            raise ClusterError(f"a read-ahead of {self.blocks} blocks reads nothing; use 1 or more")


def blocks_of(
    reader: Reader, start: int, stop: int, ahead: ReadAhead, deadline: float
) -> Iterator[memoryview]:
    """The bytes [start, stop) of a file in order.

    Args:
        reader: The open file.
        start: First byte.
        stop: One past the last byte.
        ahead: Size and number of requests.
        deadline: Time of the monotonic clock by which the last block must have come.

    Yields:
        Blocks of `ahead.block_bytes`, the last one shorter; each is valid until the next is taken.

    Raises:
        OSError: A read failed.
        ClusterError: A block did not come by the deadline.
    """
    size = ahead.block_bytes
    offsets = range(start, stop, size)
    slots = min(ahead.blocks + 1, len(offsets))
    if slots == 0:
        return
    # Memory that is written again and again: fresh memory would cost a page fault for each page.
    memories = [mmap.mmap(-1, min(size, stop - start)) for _ in range(slots)]
    executor = concurrent.futures.ThreadPoolExecutor(
        min(ahead.blocks, slots), thread_name_prefix="outlast-stage"
    )

    def read(number: int) -> memoryview:
        offset = offsets[number]
        view = memoryview(memories[number % slots])[: min(size, stop - offset)]
        reader.read_into(view, offset)
        return view

    try:
        coming = {number: executor.submit(read, number) for number in range(slots)}
        for number in range(len(offsets)):
            left_seconds = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            try:
                yield coming.pop(number).result(left_seconds)
            except concurrent.futures.TimeoutError:
                raise ClusterError(
                    f"byte {offsets[number]} of {stop} did not come within the time allowed "
                    "(staging.timeout_seconds); see whether the storage still answers"
                ) from None
            if (following := number + slots) < len(offsets):
                coming[following] = executor.submit(read, following)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
