"""What a library puts off to the first step, done before it.

Objects are named when set-up is done, and what has a name need not be written down as a whole.
FSDP2 makes hooks, buffers and settings of its modules in their first forward pass: made before it,
they are there in every start of the program, and have names.
"""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def finish_set_up() -> None:
    """Do what is otherwise done in the first forward pass, with the same outcome."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    # By their types, since asking an object for its class may run code of its own.
    sharded = [each for each in gc.get_objects() if issubclass(type(each), FSDPModule)]
    inner = {id(part) for each in sharded for part in each.modules() if part is not each}
    for module in sharded:
        if id(module) not in inner:
            module._get_fsdp_state()._lazy_init()
