"""Parity of sharded state over processes: any one or two lost buffers are rebuilt bit for bit."""

from outlast.recover.parity.code import Buffer
from outlast.recover.parity.group import ParityGroup, Recovered, Updated

__all__ = ["Buffer", "ParityGroup", "Recovered", "Updated"]
