"""Energy counters of AMD GPUs through amdsmi, which comes with ROCm."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.energy.sources.protocol import UnreadableSource
from outlast.energy.sources.track import asked
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.energy.sources.protocol import Part, Source
    from outlast.energy.window import Kind

_DRIVER = Path("/dev/kfd")


class AmdSource:
    """The energy accumulator of one GPU.

    Args:
        name: Unique in a meter.
        amdsmi: The started module.
        handle: amdsmi's handle of the GPU.
    """

    part: Part = "gpu"
    kind: Kind = "measured"
    # amdsmi states no period: taken to be as slow as NVML's, which flags too much, not too little.
    update_seconds = 0.1
    description = "amdsmi's energy accumulator"
    # Zeus refuses it on devices where it disagrees with integrated power (Zeus PR 252).
    flags = ("AMD's energy accumulator is wrong on some devices: compare it with a power meter",)

    def __init__(self, name: str, amdsmi: Any, handle: Any) -> None:
        self.name = name
        self._amdsmi = amdsmi
        self._handle = handle

    def joules(self) -> float | Unavailable:
        """Joules since the driver was loaded."""
        return asked(f"amdsmi's energy of {self.name}", self._joules)

    def _joules(self) -> float:
        found = self._amdsmi.amdsmi_get_energy_count(self._handle)
        # The key was "power" before amdsmi 6.2.1; the resolution is in microjoules per count. Where
        # the card has no figure, the value is "N/A".
        count = found["energy_accumulator"] if "energy_accumulator" in found else found["power"]
        return float(count) * float(found["counter_resolution"]) * 1e-6


def amd_sources(
    amdsmi: Any = None, driver: Path = _DRIVER
) -> tuple[list[Source], list[Unavailable]]:
    """Finds the AMD GPUs that the environment shows.

    ROCR_VISIBLE_DEVICES selects first; of these, HIP shows what HIP_VISIBLE_DEVICES selects, or
    CUDA_VISIBLE_DEVICES where that is not set (AMD, "GPU isolation techniques").

    Args:
        amdsmi: The module; imported by default.
        driver: The file that stands where AMD's compute driver is loaded.

    Returns:
        The sources, and why there are none.
    """
    if amdsmi is None:
        if not driver.exists():
            return [], [Unavailable(f"no AMD GPU ({driver} does not exist)")]
        try:
            amdsmi = importlib.import_module("amdsmi")
        except ImportError:
            return [], [Unavailable("the package amdsmi is missing", "pip install amdsmi")]
        except Exception as error:  # what it raises without ROCm's library differs by version
            return [], [Unavailable(f"amdsmi cannot be loaded ({error})", "install ROCm")]
    try:
        amdsmi.amdsmi_init()
        handles = list(amdsmi.amdsmi_get_processor_handles())
        uuids = [str(amdsmi.amdsmi_get_gpu_device_uuid(handle)) for handle in handles]
    except amdsmi.AmdSmiException as error:
        return [], [Unavailable(f"amdsmi does not start ({error})", "amd-smi list must work")]
    if not handles:
        return [], [Unavailable("amdsmi finds no AMD GPU")]
    shown = _shown(len(handles))
    if isinstance(shown, Unavailable):
        everyone = enumerate(uuids)
        return [UnreadableSource(f"gpu {i} ({uuid})", "gpu", shown) for i, uuid in everyone], []
    return [
        AmdSource(f"gpu {number} ({uuids[index]})", amdsmi, handles[index])
        for number, index in enumerate(shown)
    ], []


def _shown(installed: int) -> list[int] | Unavailable:
    """Indices that the environment shows; only plain numbers can be told apart with certainty."""
    shown = list(range(installed))
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", hip):
        setting = os.environ.get(variable)
        if setting is None:
            continue
        entries = [entry.strip() for entry in setting.split(",")]
        if not all(entry.isdecimal() and int(entry) < len(shown) for entry in entries):
            return Unavailable(
                f'{variable} = "{setting}" is not a list of GPU numbers below {len(shown)}',
                f"set {variable} to numbers",
            )
        # HIP numbers what ROCR has left over.
        shown = [shown[int(entry)] for entry in entries]
    return shown
