"""Kinds of distributed tensors and modules, told without loading torch's parts that define them.

`torch.distributed.tensor` takes half a second to import (it brings sympy). A process that has not
loaded it has no such tensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether `value` is a `DTensor`."""
    return _is_a(value, "torch.distributed.tensor", "DTensor")


def is_fsdp_module(value: object) -> TypeIs[FSDPModule]:
    """Return whether `value` is a module that `fully_shard` has sharded (FSDP2)."""
    return _is_a(value, "torch.distributed.fsdp", "FSDPModule")


def is_fsdp1_module(value: object) -> TypeIs[FullyShardedDataParallel]:
    """Return whether `value` is a `FullyShardedDataParallel` (FSDP1)."""
    return _is_a(value, "torch.distributed.fsdp", "FullyShardedDataParallel")


def _is_a(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
