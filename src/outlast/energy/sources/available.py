"""The meters of this machine, and why those that are missing are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from outlast.energy.sources.amd import amd_sources
from outlast.energy.sources.nvml import nvml_sources
from outlast.energy.sources.rapl import POWERCAP, rapl_sources
from outlast.energy.sources.track import asked
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from outlast.energy.sources.protocol import Source


def available_sources(
    *,
    gpus: Sequence[int] | None = None,
    gpus_must_exist: bool = True,
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
        gpus_must_exist: False makes each number in `gpus` that is not there a reason among the
            absences instead of an error, for programs that go on without a meter.
        cpus: Whether to take CPUs, memory and platform.
        powercap: Directory of the RAPL counters.
        nvml: The NVML module; pynvml by default.
        clock: Monotonic seconds.

    Returns:
        The sources, also of devices that stand but cannot be read (their joules are Unavailable);
        and for each kind that this machine does not have, why.

    Raises:
        EnergyError: A number in `gpus` is not there although there are GPUs, and must be.
    """
    nvidia, no_nvidia = _found("NVML", lambda: nvml_sources(nvml, clock))
    amd, no_amd = _found("amdsmi", amd_sources)
    found = [*nvidia, *amd]
    unlisted: list[Unavailable] = []
    if gpus is not None and found:
        wrong = [number for number in gpus if not 0 <= number < len(found)]
        unlisted = [_unlisted(gpus, number, len(found)) for number in wrong]
        if unlisted and gpus_must_exist:
            raise EnergyError(f"{unlisted[0].reason}: {unlisted[0].remedy}")
        found = [found[number] for number in gpus if 0 <= number < len(found)]
    # A machine with one vendor's GPUs does not lack the other's.
    absent = unlisted if nvidia or amd else [*no_nvidia, *no_amd]
    if cpus:
        processors, no_processors = _found("RAPL", lambda: rapl_sources(powercap, clock))
        return [*found, *processors], [*absent, *no_processors]
    return found, absent


def _found(
    what: str, find: Callable[[], tuple[list[Source], list[Unavailable]]]
) -> tuple[list[Source], list[Unavailable]]:
    found = asked(what, find)
    return ([], [found]) if isinstance(found, Unavailable) else found


def _unlisted(gpus: Sequence[int], number: int, visible: int) -> Unavailable:
    return Unavailable(
        f"gpus = {list(gpus)} asks for GPU {number}, but {visible} are visible",
        f"take numbers from 0 to {visible - 1}",
    )
