"""GPUs through a fake NVML: what is visible, what is unknown, and that nothing is ever set."""

import sys
from types import SimpleNamespace

import pytest

from outlast.hardware import Gpus, Unavailable
from outlast.hardware.nvml import read_gpus, visible_indices

MIB = 2**20
UUIDS = ["GPU-aaaa-1111", "GPU-bbbb-2222", "GPU-bbcc-3333"]


class FakeNvml:
    """Three GPUs; handles are indices, the MIG slice's handle is its name."""

    class NVMLError(Exception):
        pass

    def __init__(self, names=("NVIDIA H200",) * 3, memory=143_771 * MIB, refuse=()):
        self.names, self.memory, self.refuse = names, memory, set(refuse)
        self.calls = []

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            if name in self.refuse:
                raise self.NVMLError("Not Supported")
            return self.answer(name, *arguments)

        return call

    def answer(self, name, handle=None):
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 3,
            "nvmlSystemGetDriverVersion": lambda: "570.1",
            "nvmlDeviceGetHandleByIndex": lambda: handle,
            "nvmlDeviceGetHandleByUUID": lambda: handle,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda: 1,
            "nvmlDeviceGetUUID": lambda: UUIDS[handle],
            "nvmlDeviceGetName": lambda: self.names[handle],
            "nvmlDeviceGetMemoryInfo": lambda: SimpleNamespace(total=self.memory),
            "nvmlDeviceGetMigMode": lambda: [0, 0],
            "nvmlDeviceGetEnforcedPowerLimit": lambda: 700_000,
            "nvmlDeviceGetTotalEnergyConsumption": lambda: 12_345,
        }
        return answers[name]()


@pytest.fixture
def install(monkeypatch):
    def put(fake, visible=None):
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return put


def test_reads_every_gpu_and_shuts_nvml_down(install):
    fake = install(FakeNvml())
    gpus = read_gpus()
    assert isinstance(gpus, Gpus)
    assert gpus.driver_version == "570.1"
    assert [gpu.index for gpu in gpus.visible] == [0, 1, 2]
    first = gpus.visible[0]
    assert first.uuid == UUIDS[0]
    assert first.memory_bytes == 143_771 * MIB
    assert first.mig_enabled is False
    assert first.power_limit_watts == 700.0
    assert first.energy_counter is True
    assert first.facts.key == "h200-sxm"
    assert fake.calls[-1] == "nvmlShutdown"
    assert not [call for call in fake.calls if "Set" in call]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-bbbb-2222,GPU-aaaa", [1, 0]),
        ("GPU-bb", []),
        ("", []),
        ("0,-1,2", [0]),
        ("7", []),
        ("0,0", [0]),
        ("NoDevFiles", []),
        ("MIG-x,MIG-y", [1]),
    ],
)
def test_cuda_visible_devices_is_honoured(install, visible, indices):
    install(FakeNvml(), visible)
    gpus = read_gpus()
    assert [gpu.index for gpu in gpus.visible] == indices
    assert gpus.installed_count == 3


def test_the_two_h100_are_told_apart_by_their_memory(install):
    install(FakeNvml(names=("NVIDIA H100",) * 3, memory=95_830 * MIB))
    assert read_gpus().visible[0].facts.key == "h100-96gb-hbm2e"
    install(FakeNvml(names=("NVIDIA H100 80GB HBM3",) * 3, memory=81_559 * MIB))
    assert read_gpus().visible[0].facts.key == "h100-sxm"


def test_what_a_gpu_cannot_tell_is_unavailable_not_zero(install):
    install(
        FakeNvml(
            refuse=["nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetMigMode"],
        )
    )
    gpu = read_gpus().visible[0]
    assert isinstance(gpu.energy_counter, Unavailable)
    assert "energy counter of GPU 0 (Not Supported)" in gpu.energy_counter.reason
    assert isinstance(gpu.mig_enabled, Unavailable)
    assert gpu.power_limit_watts == 700.0


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_failing_nvml_is_unavailable_with_a_reason(install, call):
    install(FakeNvml(refuse=[call]))
    gpus = read_gpus()
    assert isinstance(gpus, Unavailable)
    assert "Not Supported" in gpus.reason
    assert gpus.remedy


def test_a_missing_package_is_unavailable(install):
    install(None)
    assert read_gpus() == Unavailable(
        "the package nvidia-ml-py is missing", "pip install nvidia-ml-py"
    )


def test_an_unknown_slice_ends_the_list():
    assert visible_indices("0,MIG-gone,1", UUIDS, lambda _: None) == [0]
