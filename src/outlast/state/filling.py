"""Filling live tensors from host memory, in place where that is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outlast.state.live import local_box
from outlast.state.tensors import dtype_of, is_dense, opaque_array

if TYPE_CHECKING:
    from outlast.state.tensors import Facts


class Filling:
    """A live tensor and the host memory that it is read into: its own, where that is possible."""

    def __init__(self, name: str, tensor: torch.Tensor, facts: Facts) -> None:
        box, self._local = local_box(tensor)
        dtype = dtype_of(facts)
        direct = (
            self._local.device.type == "cpu"
            and self._local.dtype == dtype
            and is_dense(self._local)
            and not (self._local.is_conj() or self._local.is_neg())
        )
        self._host = self._local if direct else torch.empty(tuple(self._local.shape), dtype=dtype)
        self.extra_bytes = 0 if direct else self._host.numel() * self._host.element_size()
        self.name = name
        self.box = box
        self.out = opaque_array(self._host, box)

    def finish(self) -> None:
        """Move what was read to where it belongs."""
        if self._host is self._local:
            return
        target, source = self._local, self._host
        for dimension, stride in enumerate(self._local.stride()):
            # All along an expanded dimension is one and the same memory.
            if stride == 0 and target.shape[dimension] > 1:
                target = target.narrow(dimension, 0, 1)
                source = source.narrow(dimension, 0, 1)
        with torch.no_grad():
            target.copy_(source)
