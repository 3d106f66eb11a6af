"""Sources of joules that `EnergyMeter` reads: files, RAPL, GPUs of NVIDIA and AMD. Only reading."""

from __future__ import annotations

import importlib
import math
import os
import stat
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from outlast.energy.window import DeviceState
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable
from outlast.hardware.nvml import mig_parent, start_nvml, visible_indices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.energy.window import Kind

Part: TypeAlias = Literal["gpu", "cpu", "memory", "node"]
Value = TypeVar("Value")


class Interval(NamedTuple):
    """Joules since a source's beginning, with the interval in which the truth lies."""

    low_joules: float
    joules: float
    high_joules: float


class Source(Protocol):
    """A counter of joules. Users may pass their own, e.g. of a node's power supply.

    A meter also uses these, where a source has them:

    - ``interval() -> Interval | Unavailable``: as `joules`, of a source that knows its error.
    - ``poll_seconds``: longest time between two reads, or it loses count. An open meter's thread
      reads so often.
    - ``losses``: how often it lost count and then counted on. A read that finds a loss is
      Unavailable with its reason, and so is a window over the loss.
    - ``flags``: tuple of sentences to know before trusting it; they may change.
    - ``description``: what it reads, e.g. "NVML's total-energy counter".
    - ``watts() -> float | Unavailable``: power of the device now, against which the counter is
      checked.
    - ``state() -> DeviceState``: temperature, clocks and throttle reasons, and
      ``throttle_reasons()``, the cheap part of it, which is asked for more often.

    Attributes:
        name: Unique in a meter, e.g. "gpu 0 (GPU-8f6e...)" or "cpu package 0".
        part: What it measures. A node contains its CPUs and GPUs; their figures are never added.
        kind: "measured" for a meter; a source that computes says "modelled".
        update_seconds: How often the counter changes: shorter windows are flagged.
    """

    name: str
    part: Part
    kind: Kind
    update_seconds: float

    def joules(self) -> float | Unavailable:
        """Joules since an arbitrary beginning, never falling: a source sees to wrap-around."""


Found: TypeAlias = "tuple[list[Source], list[Unavailable]]"
"""Sources, also of devices that stand but cannot be read; and why there are none of a kind."""


def asked(name: str, read: Callable[[], Value | Unavailable]) -> Value | Unavailable:
    """Result of `read`; whatever it raises becomes the reason, so that the program continues."""
    try:
        return read()
    except Exception as error:  # a meter must never end what it measures
        return Unavailable(f"{name} cannot be read ({type(error).__name__}: {error})")


def state_of(source: Source) -> DeviceState | None:
    """The state of a source's device, with reasons where it fails; None where it shows none."""
    read: Callable[[], DeviceState] | None = getattr(source, "state", None)
    if read is None:
        return None
    state = asked(source.name, read)
    return DeviceState.unknown(state) if isinstance(state, Unavailable) else state


def shown_state(source: Source) -> DeviceState:
    """State for an exporter: of a source's device, or of a bare counter its joules."""
    state = state_of(source)
    if state is not None:
        return state
    none = Unavailable(f"{source.name} is a counter of joules only")
    return DeviceState.unknown(none, joules=asked(source.name, source.joules))


class UnreadableSource:
    """A device that stands but cannot be read: sums over its part are Unavailable with its reason.

    Args:
        name: As of any source.
        part: As of any source.
        why: What `joules` always gives.
    """

    kind: Kind = "measured"
    update_seconds = 0.0

    def __init__(self, name: str, part: Part, why: Unavailable) -> None:
        self.name = name
        self.part: Part = part
        self._why = why

    def joules(self) -> float | Unavailable:
        """Why it cannot be read."""
        return self._why


SHORTEST_PERIOD_SECONDS = 0.1
"""NVML renews its power reading no faster; asking more often costs and tells nothing."""
# nvml.h, nvmlDeviceGetPowerUsage: +-5 % on older GPUs; it states none for newer ones.
_SENSOR_ERROR = 0.05


class Snapshot(NamedTuple):
    """Sums of an integral at one moment.

    Attributes:
        interval: Joules, without those of the gaps around failed samples.
        seconds: Likewise.
        samples: Those that gave a power.
        failures: Those that gave none.
    """

    interval: Interval = Interval(0.0, 0.0, 0.0)
    seconds: float = 0.0
    samples: int = 0
    failures: int = 0


class PowerIntegral:
    """The trapezoid rule over power samples; one sample at each read.

    Its interval takes the lower and the higher of two neighbouring samples over each gap, and the
    sensor's error. What the power does between two samples is not seen. A failed sample leaves a
    gap that is not counted; `losses` says how many gaps there are.

    Args:
        name: Unique in a meter.
        part: What it measures.
        watts: Gives the power now.
        period_seconds: How often it wants to be read.
        clock: Monotonic seconds.

    Attributes:
        sums: So far.

    Raises:
        EnergyError: The period is shorter than power readings are renewed.
    """

    kind: Kind = "modelled"

    def __init__(
        self,
        name: str,
        part: Part,
        watts: Callable[[], float | Unavailable],
        *,
        period_seconds: float = SHORTEST_PERIOD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not period_seconds >= SHORTEST_PERIOD_SECONDS:
            raise EnergyError(
                f"a power sampling period of {period_seconds} s is too short: take at least "
                f"{SHORTEST_PERIOD_SECONDS} s"
            )
        self.name = name
        self.part: Part = part
        self.update_seconds = self.poll_seconds = period_seconds
        self.sums = Snapshot()
        self.losses = 0
        self._read_watts = watts
        self._clock = clock
        self._lock = threading.Lock()
        self._last: tuple[float, float] | None = None
        self._longest_gap_seconds = 0.0

    @property
    def flags(self) -> tuple[str, ...]:
        """Notes on the origin of the figure, and gaps between samples."""
        made = ["power integrated over time: no energy counter"]
        if self.sums.failures:
            made.append(f"{self.sums.failures} power samples failed")
        if self._longest_gap_seconds > 10 * self.poll_seconds:
            made.append(f"no power sample for up to {self._longest_gap_seconds:.1f} s")
        return tuple(made)

    def joules(self) -> float | Unavailable:
        """Take a sample; joules since the first one."""
        interval = self.interval()
        return interval if isinstance(interval, Unavailable) else interval.joules

    def interval(self) -> Interval | Unavailable:
        """Take a sample; joules since the first one with their interval.

        A failed sample is Unavailable: the power around it is not known, and counting continues
        with the next one that succeeds.
        """

        def read() -> float | Unavailable:
            watts = self._read_watts()
            if isinstance(watts, Unavailable) or 0 <= watts < math.inf:
                return watts
            return Unavailable(f"the power of {self.name} reads {watts} W")

        # Outside the lock, so that nobody waits for the driver.
        watts = asked(self.name, read)
        with self._lock:
            now, last, sums = self._clock(), self._last, self.sums
            if isinstance(watts, Unavailable):
                self.losses += last is not None
                self._last = None
                self.sums = sums._replace(failures=sums.failures + 1)
                return watts
            if last is not None:
                gap, before_watts = now - last[0], last[1]
                low, high = min(before_watts, watts), max(before_watts, watts)
                interval = Interval(
                    sums.interval.low_joules + low * (1 - _SENSOR_ERROR) * gap,
                    sums.interval.joules + (before_watts + watts) / 2 * gap,
                    sums.interval.high_joules + high * (1 + _SENSOR_ERROR) * gap,
                )
                sums = sums._replace(interval=interval, seconds=sums.seconds + gap)
                self._longest_gap_seconds = max(self._longest_gap_seconds, gap)
            self._last = (now, watts)
            self.sums = sums._replace(samples=sums.samples + 1)
            return self.sums.interval


_MOST_BYTES = 64
"""More than any number of joules needs; a file that is no meter may be long."""
_UNKNOWN_UPDATE_SECONDS = 1.0
"""Until the file was seen to change twice: BMCs renew their figures about every second."""
_REMEMBERED_CHANGES = 32


class FileSource:
    """A meter whose joules since any beginning stand in a file, as the first word of its text.

    HPE Cray nodes have such files, e.g. ``/sys/cray/pm_counters/energy``.

    Args:
        path: The file; something outside keeps it up to date.
        update_seconds: How often it changes, where that is known. Otherwise the longest time
            between two changes that were seen lately stands for it; an open meter looks often.
        joules_per_unit: 1e-6 for a file in microjoules.
        part: What it measures; a node's joules are never added to those of its CPUs and GPUs.
        clock: Monotonic seconds.

    Raises:
        EnergyError: `update_seconds` is negative or not a number.
    """

    kind: Kind = "measured"
    poll_seconds = 0.1

    def __init__(
        self,
        path: str | Path,
        *,
        update_seconds: float | None = None,
        joules_per_unit: float = 1.0,
        part: Part = "node",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if update_seconds is not None and not 0 <= update_seconds < math.inf:
            raise EnergyError(
                f'update_seconds = {update_seconds} of "{path}" is no period: state how often the '
                "file changes, or leave it out"
            )
        self.name = f"file {path}"
        self.part: Part = part
        self._stated = update_seconds is not None
        self.update_seconds = _UNKNOWN_UPDATE_SECONDS if update_seconds is None else update_seconds
        self._joules_per_unit = joules_per_unit
        self._path = Path(path)
        self._clock = clock
        self._last: float | None = None
        self._read = -math.inf
        self._changed: float | None = None
        self._watched = False
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED_CHANGES)

    @property
    def flags(self) -> tuple[str, ...]:
        """Note that the period is a guess."""
        if self._stated or self._gaps:
            return ()
        return (
            f"how often {self._path} changes is not known: taken as {_UNKNOWN_UPDATE_SECONDS:g} s",
        )

    def joules(self) -> float | Unavailable:
        """Joules as the file says now."""
        try:
            # Non-blocking: opening a pipe would wait for its writer.
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    return Unavailable(
                        f"{self._path} is not a regular file", "name a file that holds joules"
                    )
                text = os.read(file, _MOST_BYTES).decode("ascii", errors="replace")
            finally:
                os.close(file)
        except OSError as error:
            return Unavailable(f"{self._path} cannot be read: {error.strerror}")
        words = text.split()
        try:
            # A word that fills all bytes may continue behind them.
            joules = float(words[0] if len(text) < _MOST_BYTES or len(words) > 1 else "")
        except (ValueError, IndexError):
            return Unavailable(f"{self._path} holds no number of joules")
        if not 0 <= joules < math.inf:
            return Unavailable(f"{self._path} says {joules} J")
        if not self._stated:
            self._learn(joules)
        return joules * self._joules_per_unit

    def _learn(self, joules: float) -> None:
        """Learn the file's period from a change that is seen at this read."""
        now = self._clock()
        last, self._last = self._last, joules
        unseen_seconds, self._read = now - self._read, now
        if last is None or joules == last:
            return
        before, self._changed = self._changed, now
        if before is None:
            return
        # In a gap that nobody looked into the file may have changed often: it is an upper bound,
        # which stands only until a change was watched.
        watched = unseen_seconds <= (now - before) / 2
        if watched and not self._watched:
            self._gaps.clear()
            self._watched = True
        if watched or not self._watched:
            self._gaps.append(now - before)
            self.update_seconds = max(self._gaps)


POWERCAP = Path("/sys/class/powercap")
# No package draws more for long: a counter that wraps at R joules wraps no sooner than R / 2000 W.
_HIGHEST_WATTS = 2000.0


class RaplSource:
    """One counter of joules that wraps around, of a CPU package or its memory (Intel, AMD).

    Args:
        name: Unique in a meter.
        part: "cpu" of a package, "memory" of its DRAM.
        directory: The powercap zone: holds `energy_uj` and `max_energy_range_uj`.
        clock: Monotonic seconds.

    Raises:
        OSError: The counter or its range cannot be read.
        ValueError: It holds no number.
    """

    kind: Kind = "measured"
    # Intel SDM vol. 3, "RAPL interfaces"; Linux amd_energy.rst.
    update_seconds = 0.001
    description = "RAPL through powercap"

    def __init__(
        self, name: str, part: Part, directory: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.part: Part = part
        self._clock = clock
        self._range_uj = int((directory / "max_energy_range_uj").read_text(encoding="ascii"))
        self._wrap_seconds = self._range_uj * 1e-6 / _HIGHEST_WATTS
        self.poll_seconds = self._wrap_seconds / 2
        # The open file is read again and again at its beginning: 10 times cheaper than opening it.
        self._file = os.open(directory / "energy_uj", os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._lock = threading.Lock()
        self._total_uj = 0
        self._last: tuple[float, int] | None = None
        self.losses = 0
        self._counter_uj()

    def joules(self) -> float | Unavailable:
        """Joules since the first read.

        A read that comes so late that the counter may have wrapped unseen is Unavailable, and
        counting continues from there, without the joules that were not seen.
        """
        with self._lock:
            try:
                counter_uj = self._counter_uj()
            except (OSError, ValueError) as error:
                return Unavailable(f"the RAPL counter of {self.name} cannot be read ({error})")
            now = self._clock()
            last, self._last = self._last, (now, counter_uj)
            if last is not None:
                before, before_uj = last
                if now - before >= self._wrap_seconds:
                    self.losses += 1
                    return Unavailable(
                        f"{self.name} was not read for {now - before:.0f} s, in which its counter "
                        "may have wrapped around",
                        f"read it every {self.poll_seconds:.0f} s, as an open EnergyMeter does",
                    )
                # After the highest value of the range comes 0.
                self._total_uj += (counter_uj - before_uj) % (self._range_uj + 1)
            return self._total_uj * 1e-6

    def _counter_uj(self) -> int:
        return int(os.pread(self._file, 32, 0))


def rapl_sources(root: Path | None = None, clock: Callable[[], float] = time.monotonic) -> Found:
    """Find the packages and their memory.

    Cores and the uncore are parts of a package and left out; so are the `intel-rapl-mmio` zones,
    which count the joules of a package again, and the platform (psys), which contains packages but
    not the cards, so that it is neither a part nor the node.

    Args:
        root: The powercap directory; `POWERCAP` by default.
        clock: Monotonic seconds.
    """
    root = root or POWERCAP
    zones = sorted(path.parent for path in root.glob("intel-rapl:*/energy_uj"))
    if not zones:
        where = f"no RAPL counters in {root}" if root.is_dir() else f"no {root}"
        remedy = "modprobe intel_rapl_msr (as root); a virtual machine or container hides them"
        return [], [Unavailable(where, remedy)]
    sources: list[Source] = []
    for zone in zones:
        part: Part
        kind = _line(zone / "name")
        if kind.startswith("package"):
            name, part = f"cpu {kind.replace('-', ' ')}", "cpu"
        elif kind == "dram":
            # Zone intel-rapl:0:2 lies inside package zone intel-rapl:0.
            package = _line(zone.parent / zone.name.rsplit(":", 1)[0] / "name") or zone.name
            name, part = f"memory of {package.replace('-', ' ')}", "memory"
        else:
            continue
        try:
            sources.append(RaplSource(name, part, zone, clock))
        except PermissionError:
            why = Unavailable(
                f"only root may read the RAPL counter of {name}",
                f"chmod a+r {zone}/energy_uj (as root, after each boot)",
            )
            sources.append(UnreadableSource(name, part, why))
        except (OSError, ValueError) as error:
            why = Unavailable(f"the RAPL counter of {name} cannot be read ({error})")
            sources.append(UnreadableSource(name, part, why))
    if not sources:
        return [], [Unavailable(f"no package or DRAM counter in {root}")]
    return sources, []


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class AmdSource:
    """The energy accumulator of one GPU, through amdsmi, which comes with ROCm.

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

        def read() -> float:
            found = self._amdsmi.amdsmi_get_energy_count(self._handle)
            # The key was "power" before amdsmi 6.2.1; the resolution is in microjoules per count.
            # Where the card has no figure, the value is "N/A".
            count = found["energy_accumulator" if "energy_accumulator" in found else "power"]
            return float(count) * float(found["counter_resolution"]) * 1e-6

        return asked(f"amdsmi's energy of {self.name}", read)


def amd_sources(amdsmi: Any = None, driver: Path = Path("/dev/kfd")) -> Found:
    """Find the AMD GPUs that the environment shows.

    ROCR_VISIBLE_DEVICES selects first; of these, HIP shows what HIP_VISIBLE_DEVICES selects, or
    CUDA_VISIBLE_DEVICES where that is not set (AMD, "GPU isolation techniques").

    Args:
        amdsmi: The module; imported by default.
        driver: The file that stands where AMD's compute driver is loaded.
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
    shown = list(range(len(handles)))
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", hip):
        setting = os.environ.get(variable)
        if setting is None:
            continue
        entries = [entry.strip() for entry in setting.split(",")]
        # Only plain numbers can be told apart with certainty.
        if not all(entry.isdecimal() and int(entry) < len(shown) for entry in entries):
            why = Unavailable(
                f'{variable} = "{setting}" is not a list of GPU numbers below {len(shown)}',
                f"set {variable} to numbers",
            )
            names = [f"gpu {number} ({uuid})" for number, uuid in enumerate(uuids)]
            return [UnreadableSource(name, "gpu", why) for name in names], []
        # HIP numbers what ROCR has left over.
        shown = [shown[int(entry)] for entry in entries]
    return [
        AmdSource(f"gpu {number} ({uuids[index]})", amdsmi, handles[index])
        for number, index in enumerate(shown)
    ], []


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
_ORDER_DOUBT = (
    "CUDA may number these different GPUs in another order: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
)
# Field of nvmlDeviceGetFieldValues: power of this moment in mW. nvmlDeviceGetPowerUsage is a mean
# over the last second on Ampere (except GA100) and later, which lags behind a change of load.
_POWER_INSTANT = 186


def throttle_words(bits: int) -> tuple[str, ...]:
    """NVML's mask of throttle reasons in words; a bit without a name is given as a number."""
    named = tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)
    rest = bits & ~sum(THROTTLE_REASONS)
    return (*named, f"reason {rest:#x}") if rest else named


class NvmlSource:
    """The total-energy counter of one GPU.

    Args:
        nvml: A started NVML module.
        handle: NVML's handle of the GPU.
        number: CUDA's number of it.
        flags: What a reader must know.

    Attributes:
        uuid: Identifier that survives reordering.
        split: Whether it is split into MIG slices, which other users may hold.
    """

    part: Part = "gpu"
    kind: Kind = "measured"
    # How often the counter changes: about 100 ms (ML.ENERGY blog on measuring GPUs).
    update_seconds = 0.1
    description = "NVML's total-energy counter"

    def __init__(
        self, nvml: Any, handle: Any, number: int = 0, flags: tuple[str, ...] = ()
    ) -> None:
        self._nvml = nvml
        self._handle = handle
        self.uuid = str(nvml.nvmlDeviceGetUUID(handle))
        self.name = f"gpu {number} ({self.uuid})"
        if "GH200" in str(nvml.nvmlDeviceGetName(handle)):
            flags = (*flags, "on GH200 the counter covers the whole module: GPU, CPU and memory")
        self.flags = flags
        # A GPU that cannot be split says "not supported".
        mode = self._ask("MIG mode", lambda: int(nvml.nvmlDeviceGetMigMode(handle)[0]))
        self.split = not isinstance(mode, Unavailable) and mode != 0
        self._instant = not isinstance(self._instant_watts(), Unavailable)

    def joules(self) -> float | Unavailable:
        """Joules since the driver was loaded."""
        # Without `_ask`: it is called in every lap, and a closure takes as long as the call.
        try:
            millijoules: int = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except Exception as error:
            return self._missing("energy counter", error)
        return millijoules / 1000

    def watts(self) -> float | Unavailable:
        """Power: of this moment where the driver gives it, else NVML's own mean."""
        if self._instant:
            return self._instant_watts()
        nvml, handle = self._nvml, self._handle
        return self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)

    def state(self) -> DeviceState:
        """The state now; what NVML does not give is Unavailable with its error."""
        nvml, handle = self._nvml, self._handle

        def clock(what: str, kind: int) -> int | Unavailable:
            return self._ask(what, lambda: int(nvml.nvmlDeviceGetClockInfo(handle, kind)))

        sensor = nvml.NVML_TEMPERATURE_GPU
        return DeviceState(
            joules=self.joules(),
            watts=self.watts(),
            sm_clock_mhz=clock("SM clock", nvml.NVML_CLOCK_SM),
            memory_clock_mhz=clock("memory clock", nvml.NVML_CLOCK_MEM),
            celsius=self._ask(
                "temperature", lambda: float(nvml.nvmlDeviceGetTemperature(handle, sensor))
            ),
            throttle_reasons=self.throttle_reasons(),
        )

    def throttle_reasons(self) -> tuple[str, ...] | Unavailable:
        """Why the clock is below the one asked for, in words."""
        nvml, handle = self._nvml, self._handle
        return self._ask(
            "throttle reasons",
            lambda: throttle_words(int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))),
        )

    def _instant_watts(self) -> float | Unavailable:
        def read() -> float | Unavailable:
            field = self._nvml.nvmlDeviceGetFieldValues(self._handle, [_POWER_INSTANT])[0]
            # Each field has its own return code: the call succeeds where the field does not.
            if field.nvmlReturn != self._nvml.NVML_SUCCESS:
                return Unavailable(f"NVML gives no instant power of {self.uuid}")
            return float(field.value.uiVal) / 1000

        return self._ask("instant power", read)

    def _ask(self, what: str, read: Callable[[], Value | Unavailable]) -> Value | Unavailable:
        try:
            return read()
        except Exception as error:  # old bindings lack calls, old drivers symbols
            return self._missing(what, error)

    def _missing(self, what: str, error: Exception) -> Unavailable:
        return Unavailable(f"NVML gives no {what} of {self.uuid} ({error})")


class NvmlPowerSource(PowerIntegral):
    """A GPU without an energy counter: its power, integrated.

    Args:
        gpu: The GPU.
        clock: Monotonic seconds.
    """

    description = "NVML's power, integrated"

    def __init__(self, gpu: NvmlSource, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(gpu.name, "gpu", gpu.watts, clock=clock)
        self._more_flags = gpu.flags
        self.state, self.throttle_reasons = gpu.state, gpu.throttle_reasons

    @property
    def flags(self) -> tuple[str, ...]:
        """Notes on the origin of the figure, and those of the device."""
        return (*super().flags, *self._more_flags)


def nvml_sources(nvml: Any = None, clock: Callable[[], float] = time.monotonic) -> Found:
    """Find the GPUs that CUDA_VISIBLE_DEVICES shows, in its order.

    Args:
        nvml: The NVML module; pynvml by default.
        clock: Monotonic seconds.

    Returns:
        One source per GPU ("gpu 0 (GPU-8f6e...)": CUDA's number and the UUID), also for those that
        cannot be read; and why there are none at all.
    """
    nvml = start_nvml(nvml)
    if isinstance(nvml, Unavailable):
        return [], [nvml]
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        models = {str(nvml.nvmlDeviceGetName(handle)) for handle in handles}
        shown = visible_indices(setting, uuids, lambda entry: mig_parent(nvml, entry, uuids))
        # CUDA numbers GPUs fastest first, NVML by bus. With several models the two may differ.
        named = setting is not None and not any(
            part.strip().isdecimal() for part in setting.split(",")
        )
        by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        doubt = () if len(models) < 2 or named or by_bus else (_ORDER_DOUBT,)
        gpus = [NvmlSource(nvml, handles[i], number, doubt) for number, i in enumerate(shown)]
    except nvml.NVMLError as error:
        return [], [Unavailable(f"NVML failed while listing the GPUs ({error})", "see nvidia-smi")]
    if not gpus:
        why = f'CUDA_VISIBLE_DEVICES = "{setting}" shows none of {len(handles)} NVIDIA GPUs'
        return [], [Unavailable(why if handles else "this machine has no NVIDIA GPU")]
    return [_readable(number, gpu, clock) for number, gpu in enumerate(gpus)], []


def _readable(number: int, gpu: NvmlSource, clock: Callable[[], float]) -> Source:
    """The counter of a GPU, its power where it has none, or why it has neither."""
    if gpu.split:
        why = Unavailable(
            f"gpu {number} is split into MIG slices, and its counter covers the whole {gpu.uuid}, "
            "also what other users draw",
            "measure on a GPU without MIG",
        )
        return UnreadableSource(gpu.name, "gpu", why)
    counter = gpu.joules()
    if not isinstance(counter, Unavailable):
        return gpu
    if isinstance(gpu.watts(), Unavailable):
        why = Unavailable(f"{counter.reason}, nor its power", "see nvidia-smi -q -d POWER")
        return UnreadableSource(gpu.name, "gpu", why)
    return NvmlPowerSource(gpu, clock)


def available_sources(
    *,
    gpus: Sequence[int] | None = None,
    cpus: bool = True,
    powercap: Path | None = None,
    nvml: Any = None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Find the meters of this machine.

    Several processes on one node see the same meters: let each take its own GPU and one of them
    the CPUs, or the joules count twice.

    Args:
        gpus: CUDA's numbers of the GPUs to take (a rank's local number); all by default.
        cpus: Whether to take CPUs, memory and platform.
        powercap: As `root` of `rapl_sources`.
        nvml: The NVML module; pynvml by default.
        clock: Monotonic seconds.

    Returns:
        The sources, also of devices that stand but cannot be read (their joules are Unavailable);
        and for each kind that this machine does not have, why.

    Raises:
        EnergyError: A number in `gpus` is not there although there are GPUs.
    """

    def found(what: str, find: Callable[[], Found]) -> Found:
        sources = asked(what, find)
        return ([], [sources]) if isinstance(sources, Unavailable) else sources

    nvidia, no_nvidia = found("NVML", lambda: nvml_sources(nvml, clock))
    amd, no_amd = found("amdsmi", amd_sources)
    shown = [*nvidia, *amd]
    # A machine with one vendor's GPUs does not lack the other's.
    absent = [] if shown else [*no_nvidia, *no_amd]
    if gpus is not None and shown:
        for number in gpus:
            if not 0 <= number < len(shown):
                raise EnergyError(
                    f"gpus = {list(gpus)} asks for GPU {number}, but {len(shown)} are visible: "
                    f"take numbers from 0 to {len(shown) - 1}"
                )
        shown = [shown[number] for number in gpus]
    if cpus:
        processors, no_processors = found("RAPL", lambda: rapl_sources(powercap, clock))
        return [*shown, *processors], [*absent, *no_processors]
    return shown, absent
