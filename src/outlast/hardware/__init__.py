"""Facts about devices, links and nodes, and what this machine has. Never imports torch.

from outlast.hardware import device, this_machine
device("h200-sxm").bf16_matmul_flop_per_s.value    # FLOP/s; raises where nobody measured it
print(this_machine().summary())
"""

from outlast.hardware.catalogue import (
    Device,
    Link,
    Node,
    device,
    device_reported_as,
    devices,
    link,
    links,
    node,
    nodes,
)
from outlast.hardware.detect import Machine, NetworkPort, Rapl, Slurm, this_machine
from outlast.hardware.figure import Figure, Quantity, Unavailable
from outlast.hardware.filesystem import FileSystemFacts, probe
from outlast.hardware.nvml import Gpu, Gpus

__all__ = [
    "Device",
    "Figure",
    "FileSystemFacts",
    "Gpu",
    "Gpus",
    "Link",
    "Machine",
    "NetworkPort",
    "Node",
    "Quantity",
    "Rapl",
    "Slurm",
    "Unavailable",
    "device",
    "device_reported_as",
    "devices",
    "link",
    "links",
    "node",
    "nodes",
    "probe",
    "this_machine",
]
