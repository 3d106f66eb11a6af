"""Stand-ins for hardware: a counter, a GPU in a file, and an NVML in memory that may be set."""

# ruff: noqa: N802  (NVML's own names)

import json
import os
from pathlib import Path
from types import SimpleNamespace

from outlast.errors import EnergyError


class Counter:
    """A source of a meter that a function reads."""

    kind = "measured"

    def __init__(self, name, read, *, update_seconds, part="node"):
        self.name, self.read, self.update_seconds, self.part = name, read, update_seconds, part

    def joules(self):
        return float(self.read())


class FileController:
    """A device whose state is a file, so that several processes see one device."""

    def __init__(self, path, *, broken="", lease=None):
        self.path = Path(path)
        self.uuid = self.path.stem
        self.broken = broken
        self.lease = lease

    @staticmethod
    def fresh(path):
        Path(path).write_text(json.dumps({"clock": None, "watts": 400.0, "log": []}))
        return FileController(path)

    @property
    def state(self):
        return json.loads(self.path.read_text())

    def clocks_mhz(self):
        return (600, 900, 1200)

    def power_limit_watts(self):
        return self.state["watts"]

    def lock_clock(self, clock_mhz):
        self._update(f"clock {clock_mhz}", clock=clock_mhz)

    def limit_power(self, watts):
        self._update(f"watts {watts:g}", watts=watts)

    def restore(self, power_watts=None, *, clock=True):
        if clock:
            self._update("restore", clock=None)
        if power_watts is not None:
            self._update(f"restore watts {power_watts:g}", watts=power_watts)

    def description(self):
        return {"kind": "file", "path": str(self.path)}

    def _update(self, line, **changes):
        if self.broken and line.startswith(self.broken):
            raise EnergyError(f"the device refuses {line}")
        if self.lease is not None and not line.startswith("restore"):
            # Nothing may be set before the lease is on disk.
            assert Path(self.lease).exists()
        state = self.state
        state |= changes
        state["log"].append(line)
        new = self.path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(state))
        new.replace(self.path)


def open_file(description):
    return FileController(description["path"])


class FakeNvml:
    """Answers reads; calls that set something are recorded, or refused with an NVML error."""

    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_SUPPORTED = 3

    class NVMLError(Exception):
        def __init__(self, value):
            super().__init__(value)
            self.value = value

        def __str__(self):
            return f"NVML error {self.value}"

    def __init__(self, *, pids=(), mig=None, refuse=0, refused=""):
        self.calls = []
        self._pids, self._mig, self._refuse, self._refused = pids, mig, refuse, refused

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1":
            raise self.NVMLError(6)
        return "handle"

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA Fake"

    def nvmlDeviceGetUUID(self, handle):
        return "GPU-1"

    def nvmlDeviceGetIndex(self, handle):
        return 3

    def nvmlDeviceGetSupportedMemoryClocks(self, handle):
        return [2619, 1593]

    def nvmlDeviceGetSupportedGraphicsClocks(self, handle, memory_mhz):
        return [1980, 1500, 1200] if memory_mhz == 2619 else [600]

    def nvmlDeviceGetPowerManagementLimit(self, handle):
        return 700_000

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle):
        return [200_000, 700_000]

    def nvmlDeviceGetMigMode(self, handle):
        if self._mig is None:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return [self._mig, self._mig]

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self._pids]

    def __getattr__(self, name):
        if name.startswith("NVML_"):
            return 0
        if name.startswith("nvmlDeviceGet"):
            return self._not_supported
        if not name.startswith(("nvmlDeviceSet", "nvmlDeviceReset")):
            raise AttributeError(name)

        def setter(handle, *values):
            if self._refuse and self._refused in name:
                raise self.NVMLError(self._refuse)
            self.calls.append((name, *values))

        return setter

    def _not_supported(self, *_):
        raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
