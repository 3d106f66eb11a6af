"""This machine, its surroundings and the checks made of them."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from outlast.cli.doctor import Check, machine_checks
from outlast.hardware import Gpu, Gpus, Rapl, Slurm, Unavailable, device, this_machine
from outlast.hardware.detect import read_network_ports, read_processor, read_rapl, read_slurm


@pytest.fixture(scope="module")
def machine():
    return this_machine()


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine_reads_something_plausible(machine):
    assert machine.host_name
    assert 0 < machine.usable_cores <= machine.logical_cores
    assert 0 < machine.memory_available_bytes <= machine.memory_total_bytes
    assert 0 < machine.usable_memory_bytes <= machine.memory_total_bytes


def test_a_machine_is_json_and_one_line(machine):
    plain = json.loads(json.dumps(machine.to_dict()))
    assert plain["host_name"] == machine.host_name
    assert "\n" not in machine.summary()
    assert len(machine.summary()) < 200


def test_known_parts_become_their_key_and_absent_ones_keep_their_reason(machine):
    gpu = Gpu(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-1",
        memory_bytes=143_771 * 2**20,
        mig_enabled=False,
        power_limit_watts=700.0,
        energy_counter=True,
        facts=device("h200-sxm"),
    )
    gpus = Gpus(driver_version="570", installed_count=4, visible=(gpu, gpu))
    equipped = dataclasses.replace(machine, gpus=gpus, rapl=Unavailable("no RAPL", "modprobe"))
    plain = json.loads(json.dumps(equipped.to_dict()))
    assert plain["gpus"]["visible"][0]["facts"] == "h200-sxm"
    assert plain["rapl"] == {"unavailable": "no RAPL", "remedy": "modprobe"}
    assert equipped.summary().endswith("2x NVIDIA H200")
    checks = by_name(machine_checks(equipped))
    assert checks["NVML"].state == "ok"
    assert "hides 2" in checks["NVML"].means
    assert checks["GPU (NVML)"].state == "ok"
    assert checks["CPU (RAPL)"].remedy == "modprobe"


def test_checks_of_a_bare_machine_name_a_remedy(machine):
    bare = dataclasses.replace(
        machine,
        gpus=Unavailable("no NVML", "install the driver"),
        slurm=Unavailable("no sinfo", "apt-get install slurm-client munge"),
        rapl=Rapl(zones=("package-0",)),
        memory_available_bytes=2**30,
    )
    checks = by_name(machine_checks(bare))
    assert checks["NVML"].state == "missing"
    assert checks["NVML"].remedy == "install the driver"
    assert checks["Slurm"].remedy == "apt-get install slurm-client munge"
    assert checks["CPU (RAPL)"].found == "reads package-0"
    assert checks["memory"].state == "degraded"
    assert not any(check.broken for check in checks.values())


def test_checks_inside_a_job(machine):
    slurm = Slurm(
        version="slurm 23.11.4",
        commands=("sinfo", "srun"),
        missing_commands=("sacct",),
        job_id="77",
        munge_socket="/run/munge/munge.socket.2",
    )
    checks = by_name(machine_checks(dataclasses.replace(machine, slurm=slurm)))
    assert checks["Slurm"].state == "degraded"
    assert "sacct" in checks["Slurm"].means
    assert checks["munge"].state == "ok"
    assert checks["job"].found == "inside job 77"


def test_slurm_version_is_asked_of_the_command(tmp_path, monkeypatch):
    for name in ("sinfo", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\necho slurm 24.05.1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    slurm = read_slurm()
    assert isinstance(slurm, Slurm)
    assert slurm.version == "slurm 24.05.1"
    assert slurm.commands == ("sinfo", "srun")
    assert slurm.job_id == "12"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "apt-get" in read_slurm().remedy


def test_network_ports_are_read_from_sysfs(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (found,) = read_network_ports(tmp_path)
    assert (found.device, found.port, found.rate) == ("mlx5_0", "1", "400 Gb/sec (4X NDR)")
    assert isinstance(read_network_ports(tmp_path / "none"), Unavailable)


def test_rapl_names_the_remedy_when_only_root_may_read(tmp_path):
    zone = tmp_path / "intel-rapl:0"
    mirrored = tmp_path / "intel-rapl-mmio:0"
    for directory in (zone, mirrored):
        directory.mkdir()
        (directory / "name").write_text("package-0\n")
        (directory / "energy_uj").write_text("123\n")
    assert read_rapl(tmp_path) == Rapl(zones=("package-0",))
    (zone / "energy_uj").unlink()
    (zone / "energy_uj").mkdir()  # unreadable as a file, also for root
    refused = read_rapl(tmp_path)
    assert isinstance(refused, Unavailable)
    assert "chmod a+r" in refused.remedy
    assert isinstance(read_rapl(tmp_path / "none"), Unavailable)


def test_processor_of_x86_and_arm(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\n"
        "flags\t\t: fpu avx2 avx512f avx512_bf16\n\nprocessor\t: 1\nmodel name\t: other\n"
    )
    assert read_processor(cpuinfo) == (
        "AMD EPYC 9654 96-Core Processor",
        ("avx2", "avx512f", "avx512_bf16"),
    )
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd sve bf16\n")
    assert read_processor(cpuinfo)[1] == ("sve", "bf16")
    assert read_processor(tmp_path / "none")[0]


def test_importing_loads_neither_torch_nor_nvml():
    code = (
        "import sys, outlast.hardware\n"
        "print([name for name in ('torch', 'pynvml', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
