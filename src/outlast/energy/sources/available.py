"""The meters of this machine, and why those that are missing are; counters of NVIDIA and AMD GPUs.

Energy counters of the NVIDIA GPUs that this process may use. Reading only.

Energy counters of AMD GPUs through amdsmi, which comes with ROCm.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outlast.energy.replay import DeviceState
from outlast.energy.sources.protocol import UnreadableSource
from outlast.energy.sources.rapl import POWERCAP, rapl_sources
from outlast.energy.sources.track import PowerIntegral, asked
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable
from outlast.hardware.nvml import visible_indices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


Value = TypeVar("Value")


COUNTER_SECONDS = 0.1


"""How often the total-energy counter changes: about 100 ms (ML.ENERGY blog on measuring GPUs)."""


# Bits of nvmlDeviceGetCurrentClocksThrottleReasons (nvml.h, nvmlClocksThrottleReason*; newer
# drivers call the same bits event reasons).
THROTTLE_REASONS: dict[int, str] = {
    0x1: "gpu idle",
    0x2: "applications clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake slowdown",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability",
}


# Field of nvmlDeviceGetFieldValues: power of this moment in mW. nvmlDeviceGetPowerUsage is a mean
# over the last second on Ampere (except GA100) and later, which lags behind a change of load.
_POWER_INSTANT = 186


def throttle_words(bits: int) -> tuple[str, ...]:
    """NVML's mask of throttle reasons in words; a bit without a name is given as a number."""
    named = tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)
    rest = bits & ~sum(THROTTLE_REASONS)
    return (*named, f"reason {rest:#x}") if rest else named


def start_nvml(nvml: Any = None) -> Any:
    """Starts NVML and leaves it running until the process ends, since handles live as long.

    Args:
        nvml: The module to use; pynvml by default.

    Returns:
        The module, or Unavailable where the package or the driver is missing.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return Unavailable("the package nvidia-ml-py is missing", "pip install nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Unavailable(
            f"NVML does not start ({error})",
            "on a machine with NVIDIA GPUs, install the driver; nvidia-smi must work",
        )
    return nvml


class NvmlDevice:
    """One GPU, read through NVML.

    Attributes:
        name: Model that NVML reports.
        uuid: Identifier that survives reordering.
        kind: Always "measured".
        counter_seconds: How often its energy counter changes.
        split: Whether it is split into MIG slices, which other users may hold.

    Args:
        nvml: A started NVML module (`start_nvml`).
        handle: NVML's handle of the GPU.
    """

    kind: Kind = "measured"
    counter_seconds = COUNTER_SECONDS

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.name = str(nvml.nvmlDeviceGetName(handle))
        self.uuid = str(nvml.nvmlDeviceGetUUID(handle))
        # A GPU that cannot be split says "not supported".
        mode = self._ask(lambda: int(nvml.nvmlDeviceGetMigMode(handle)[0]), "MIG mode")
        self.split = not isinstance(mode, Unavailable) and mode != 0
        self._instant = not isinstance(self._instant_watts(), Unavailable)

    def read(self) -> DeviceState:
        """The state now; what NVML does not give is Unavailable with its error."""
        nvml, handle = self._nvml, self._handle
        return DeviceState(
            joules=self.joules(),
            watts=self.watts(),
            sm_clock_mhz=self._ask(
                lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), "SM clock"
            ),
            memory_clock_mhz=self._ask(
                lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
                "memory clock",
            ),
            celsius=self._ask(
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                "temperature",
            ),
            throttle_reasons=self.throttle_reasons(),
        )

    def joules(self) -> float | Unavailable:
        """The total-energy counter, in joules since the driver was loaded."""
        try:
            millijoules: int = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except Exception as error:  # see _ask
            return self._missing("energy counter", error)
        return millijoules / 1000

    def watts(self) -> float | Unavailable:
        """Power: of this moment where the driver gives it, else NVML's own mean."""
        if self._instant:
            return self._instant_watts()
        nvml, handle = self._nvml, self._handle
        return self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000, "power")

    def throttle_reasons(self) -> tuple[str, ...] | Unavailable:
        """Why the clock is below the one asked for, in words."""
        nvml, handle = self._nvml, self._handle
        return self._ask(
            lambda: throttle_words(int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))),
            "throttle reasons",
        )

    def _instant_watts(self) -> float | Unavailable:
        nvml = self._nvml

        def read() -> float | Unavailable:
            field = nvml.nvmlDeviceGetFieldValues(self._handle, [_POWER_INSTANT])[0]
            # Each field has its own return code: the call succeeds where the field does not.
            if field.nvmlReturn != nvml.NVML_SUCCESS:
                return Unavailable(f"NVML gives no instant power of {self.uuid}")
            return float(field.value.uiVal) / 1000

        return self._ask(read, "instant power")

    def _ask(self, read: Callable[[], Value], what: str) -> Value | Unavailable:
        try:
            return read()
        except Exception as error:  # old bindings lack calls, old drivers symbols
            return self._missing(what, error)

    def _missing(self, what: str, error: Exception) -> Unavailable:
        return Unavailable(f"NVML gives no {what} of {self.uuid} ({error})")


class NvmlSource:
    """The total-energy counter of one GPU.

    Args:
        name: Unique in a meter.
        device: The GPU.
        flags: What a reader must know.
    """

    part: Part = "gpu"
    kind: Kind = "measured"
    description = "NVML's total-energy counter"

    def __init__(self, name: str, device: NvmlDevice, flags: tuple[str, ...] = ()) -> None:
        self.name = name
        self.update_seconds = device.counter_seconds
        self.flags = flags
        self._device = device

    def joules(self) -> float | Unavailable:
        """Joules since the driver was loaded."""
        return self._device.joules()

    def watts(self) -> float | Unavailable:
        """Power now."""
        return self._device.watts()

    def state(self) -> DeviceState:
        """Temperature, clocks and throttle reasons now."""
        return self._device.read()

    def throttle_reasons(self) -> tuple[str, ...] | Unavailable:
        """Why the clock is below the one asked for."""
        return self._device.throttle_reasons()


class NvmlPowerSource(PowerIntegral):
    """A GPU without an energy counter: its power, integrated.

    Args:
        name: Unique in a meter.
        device: The GPU.
        flags: What a reader must know.
        clock: Monotonic seconds.
    """

    description = "NVML's power, integrated"

    def __init__(
        self,
        name: str,
        device: NvmlDevice,
        flags: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name, "gpu", device.watts, clock=clock)
        self._more_flags = flags
        self._device = device

    @property
    def flags(self) -> tuple[str, ...]:
        """Notes on the origin of the figure, and those of the device."""
        return (*super().flags, *self._more_flags)

    def state(self) -> DeviceState:
        """Temperature, clocks and throttle reasons now."""
        return self._device.read()

    def throttle_reasons(self) -> tuple[str, ...] | Unavailable:
        """Why the clock is below the one asked for."""
        return self._device.throttle_reasons()


def nvml_sources(
    nvml: Any = None, clock: Callable[[], float] = time.monotonic
) -> tuple[list[Source], list[Unavailable]]:
    """Finds the GPUs that CUDA_VISIBLE_DEVICES shows, in its order.

    Args:
        nvml: The NVML module; pynvml by default.
        clock: Monotonic seconds.

    Returns:
        One source per GPU ("gpu 0 (GPU-8f6e...)": CUDA's number and the UUID), also for those that
        cannot be read; and why there are none at all.
    """
    started = start_nvml(nvml)
    if isinstance(started, Unavailable):
        return [], [started]
    nvml = started
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        names = {str(nvml.nvmlDeviceGetName(handle)) for handle in handles}
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = visible_indices(setting, uuids, lambda entry: _holder(nvml, entry, uuids))
        devices = [NvmlDevice(nvml, handles[index]) for index in shown]
    except nvml.NVMLError as error:
        return [], [Unavailable(f"NVML failed while listing the GPUs ({error})", "see nvidia-smi")]
    if not devices:
        why = f'CUDA_VISIBLE_DEVICES = "{setting}" shows none of {len(handles)} NVIDIA GPUs'
        return [], [Unavailable(why if handles else "this machine has no NVIDIA GPU")]
    doubt = _order_doubt(setting, len(names))
    return [_source(i, device, doubt, clock) for i, device in enumerate(devices)], []


def _source(
    number: int, device: NvmlDevice, doubt: tuple[str, ...], clock: Callable[[], float]
) -> Source:
    name = f"gpu {number} ({device.uuid})"
    if device.split:
        why = Unavailable(
            f"gpu {number} is split into MIG slices, and its counter covers the whole "
            f"{device.uuid}, also what other users draw",
            "measure on a GPU without MIG",
        )
        return UnreadableSource(name, "gpu", why)
    flags = doubt
    if "GH200" in device.name:
        flags = (*flags, "on GH200 the counter covers the whole module: GPU, CPU and memory")
    counter = device.joules()
    if not isinstance(counter, Unavailable):
        return NvmlSource(name, device, flags)
    watts = device.watts()
    if isinstance(watts, Unavailable):
        why = Unavailable(f"{counter.reason}, nor its power", "see nvidia-smi -q -d POWER")
        return UnreadableSource(name, "gpu", why)
    return NvmlPowerSource(name, device, flags, clock)


def _holder(nvml: Any, entry: str, uuids: list[str]) -> int | None:
    """NVML's index of the GPU that holds a MIG slice."""
    try:
        part = nvml.nvmlDeviceGetHandleByUUID(entry)
        whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
        return uuids.index(str(nvml.nvmlDeviceGetUUID(whole)))
    except (nvml.NVMLError, ValueError):
        return None


def _order_doubt(setting: str | None, models: int) -> tuple[str, ...]:
    # CUDA numbers GPUs fastest first, NVML by bus. With several models the two may differ.
    by_number = setting is None or any(part.strip().isdecimal() for part in setting.split(","))
    if models < 2 or not by_number or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return ()
    return (
        "CUDA may number these different GPUs in another order: set CUDA_DEVICE_ORDER=PCI_BUS_ID",
    )


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
