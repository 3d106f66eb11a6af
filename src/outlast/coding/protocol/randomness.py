"""Random numbers that belong to a chunk of a step, whoever computes it."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def key(*numbers: int) -> int:
    """A 63-bit seed from integers, equal on all machines."""
    text = ",".join(str(number) for number in numbers).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@contextlib.contextmanager
def keyed(seed: int, step: int, chunk: int) -> Iterator[None]:
    """Draw torch's random numbers (dropout) from (seed, step, chunk) inside, leave them as before.

    Covers the CPU's generator and those of the CUDA devices in use.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(key(seed, step, chunk))
        yield
