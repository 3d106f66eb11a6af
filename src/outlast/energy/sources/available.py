"""The meters of this machine, and why those that are missing are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from outlast.energy.sources.amd import amd_sources
from outlast.energy.sources.nvml import nvml_sources
from outlast.energy.sources.rapl import POWERCAP, rapl_sources
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from outlast.energy.sources.protocol import Source
    from outlast.hardware.figure import Unavailable


def available_sources(
    *,
    gpus: Sequence[int] | None = None,
    cpus: bool = True,
    powercap: Path = POWERCAP,
    nvml: Any = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Source], list[Unavailable]]:
    """Finds the meters of this machine.

    Several processes on one node see the same meters: let each take its own GPU and one of them
    the CPUs, or the joules count twice.

    Args:
        gpus: CUDA's numbers of the GPUs to take (a rank's local number); all by default.
        cpus: Whether to take CPUs, memory and platform.
        powercap: Directory of the RAPL counters.
        nvml: The NVML module; pynvml by default.
        clock: Monotonic seconds.

    Returns:
        The sources, also of devices that stand but cannot be read (their joules are Unavailable);
        and for each kind that this machine does not have, why.

    Raises:
        EnergyError: A number in `gpus` is not there although there are GPUs.
    """
    nvidia, no_nvidia = nvml_sources(nvml, clock)
    amd, no_amd = amd_sources()
    found = [*nvidia, *amd]
    if gpus is not None and found:
        missing = [number for number in gpus if not 0 <= number < len(found)]
        if missing:
            raise EnergyError(
                f"gpus = {list(gpus)} asks for GPU {missing[0]}, but {len(found)} are visible: "
                f"take numbers from 0 to {len(found) - 1}"
            )
        found = [found[number] for number in gpus]
    # A machine with one vendor's GPUs does not lack the other's.
    absent = [] if nvidia or amd else [*no_nvidia, *no_amd]
    if cpus:
        processors, no_processors = rapl_sources(powercap, clock)
        return [*found, *processors], [*absent, *no_processors]
    return found, absent
