"""What a library puts off to the first step, done before it.

Objects are named when set-up is done, and what has a name need not be written down as a whole.
FSDP2 makes hooks, buffers and settings of its modules in their first forward pass: made before it,
they are there in every start of the program, and have names.
"""

from __future__ import annotations

import gc
import weakref

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class ShardedModules:
    """The modules that FSDP2 has sharded, when set-up is done."""

    def __init__(self) -> None:
        # By their types, since asking an object for its class may run code of its own.
        found = (
            [object_ for object_ in gc.get_objects() if issubclass(type(object_), FSDPModule)]
            if dist.is_available() and dist.is_initialized()
            else []
        )
        self._modules = [weakref.ref(name) for name in found]
        inner = {id(part) for name in found for part in name.modules() if part is not name}
        for module in found:
            if id(module) not in inner:
                # As its first forward pass does, and with the same outcome.
                module._get_fsdp_state()._lazy_init()

    def reshard(self) -> None:
        """Give up parameters that a forward pass without a backward pass has left gathered."""
        for name in self._modules:
            module = name()
            if module is not None:
                module.reshard()
