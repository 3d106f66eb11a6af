"""What an operation has to do, apart from the device that does it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of an operator, a phase or a step on one device.

    Attributes:
        flops: Floating-point operations of matrix products.
        memory_bytes: Bytes that device memory reads and writes, after fusion.
        link_bytes: Bytes that leave the device over links.
        launches: Kernels.
    """

    flops: float
    memory_bytes: float
    link_bytes: float = 0.0
    launches: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            link_bytes=self.link_bytes + other.link_bytes,
            launches=self.launches + other.launches,
        )
