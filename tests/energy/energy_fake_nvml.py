"""An NVML whose GPUs draw known power by a clock that the test moves. Setters fail the test."""

import math
from types import SimpleNamespace


class Clock:
    """Monotonic seconds that only the test moves."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class Gpu:
    """A GPU at constant power whose counter moves every 100 ms."""

    def __init__(self, uuid, watts=300.0, name="NVIDIA H200", *, phase=0.0, mig=None):
        self.uuid, self.watts, self.name, self.phase, self.mig = uuid, watts, name, phase, mig
        self.sensor_watts = watts
        self.throttling = 0
        self.reloaded_joules = 0.0
        self.instant = True

    def counter_joules(self, now):
        ticks = math.floor((now - self.phase) / 0.1)
        return self.watts * (ticks * 0.1 + self.phase) - self.reloaded_joules


class FakeNvml:
    """As much of pynvml as reading needs, with its quirks: errors per call, handles per GPU."""

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, gpus, clock, refuse=()):
        self.gpus, self.clock, self.refuse = list(gpus), clock, set(refuse)
        self.calls = []

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if any(word in name for word in ("Set", "Reset", "Clear")):
            raise AssertionError(f"reading called the setter {name}")

        def call(*arguments):
            self.calls.append(name)
            if name in self.refuse:
                raise self.NVMLError("Not Supported")
            return getattr(self, f"_{name.removeprefix('nvml')}")(*arguments)

        return call

    def _Init(self):  # noqa: N802
        return None

    def _DeviceGetCount(self):  # noqa: N802
        return len(self.gpus)

    def _DeviceGetHandleByIndex(self, index):  # noqa: N802
        return self.gpus[index]

    def _DeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in {gpu.mig for gpu in self.gpus}:
            raise self.NVMLError("Not Found")
        return uuid

    def _DeviceGetDeviceHandleFromMigDeviceHandle(self, uuid):  # noqa: N802
        return next(gpu for gpu in self.gpus if gpu.mig == uuid)

    def _DeviceGetUUID(self, gpu):  # noqa: N802
        return gpu.uuid

    def _DeviceGetName(self, gpu):  # noqa: N802
        return gpu.name

    def _DeviceGetMigMode(self, gpu):  # noqa: N802
        return [1, 1] if gpu.mig else [0, 0]

    def _DeviceGetTotalEnergyConsumption(self, gpu):  # noqa: N802
        return int(gpu.counter_joules(self.clock()) * 1000)

    def _DeviceGetPowerUsage(self, gpu):  # noqa: N802
        return int(gpu.sensor_watts * 1000)

    def _DeviceGetFieldValues(self, gpu, fields):  # noqa: N802
        assert fields == [186]
        value = SimpleNamespace(uiVal=int(gpu.sensor_watts * 1000))
        return [SimpleNamespace(nvmlReturn=0 if gpu.instant else 3, value=value)]

    def _DeviceGetClockInfo(self, gpu, which):  # noqa: N802
        return {1: 1980, 2: 3201}[which]

    def _DeviceGetTemperature(self, gpu, sensor):  # noqa: N802
        return 41

    def _DeviceGetCurrentClocksThrottleReasons(self, gpu):  # noqa: N802
        return gpu.throttling
