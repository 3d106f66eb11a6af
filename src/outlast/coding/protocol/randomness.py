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

    Covers the CPU's generator and that of the current CUDA device.
    """
    # torch.manual_seed would note a call, with a stack trace, for each device not yet in use.
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(key(seed, step, chunk))
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
