"""Controllers: what would be set, what is refused, and that advice sets nothing."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
from energy_fakes import FakeNvml

from outlast.energy import control, example
from outlast.energy.control import DryRun, Setting, applied, device_settings
from outlast.energy.controllers import NvmlController
from outlast.energy.plan import ClockPlan, replay_profile
from outlast.energy.planner import EnergyPlanner
from outlast.energy.schedule import one_f_one_b
from outlast.energy.sources import NvmlSource
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

GOLDEN = Path(__file__).parent / "golden"


def plan_of(*clocks):
    return ClockPlan(
        clocks_mhz=clocks,
        seconds=1.0,
        deadline_seconds=1.0,
        joules=1.0,
        bound_joules=1.0,
        fastest_joules=1.0,
        switches=0,
        kind="measured",
    )


def test_a_dry_run_says_exactly_what_would_be_set_and_writes_no_lease(tmp_path):
    lines = []
    device = DryRun("GPU-1", power_limit_watts=700.0, write=lines.append)
    with applied(Setting(1200, 500.0), device, tmp_path / "lease.json"):
        assert not list(tmp_path.iterdir())
    assert [action.command for action in device.actions] == [
        "nvidia-smi --id=GPU-1 --lock-gpu-clocks=1200,1200",
        "nvidia-smi --id=GPU-1 --power-limit=500",
        "nvidia-smi --id=GPU-1 --reset-gpu-clocks",
        "nvidia-smi --id=GPU-1 --power-limit=700",
    ]
    assert lines[0].startswith("would lock the SM clock of GPU-1 to 1200 MHz: nvidia-smi")


def test_a_dry_run_refuses_what_the_device_would_refuse(capsys):
    device = DryRun("GPU-1", clocks_mhz=(600, 900))
    with pytest.raises(EnergyError, match="1000 MHz is not supported by GPU-1; the nearest is 900"):
        device.lock_clock(1000)
    device.lock_clock(900)
    assert "would lock" in capsys.readouterr().out
    with pytest.raises(EnergyError, match="must be above 0"):
        DryRun("GPU-1", clocks_mhz=Unavailable("no driver")).lock_clock(0)


def test_nothing_is_set_while_planning_replaying_reading_and_dry_running(monkeypatch):
    class Forbidden(FakeNvml):
        def __getattr__(self, name):
            if "Set" in name or "Reset" in name:
                raise AssertionError(f"{name} was called in advice mode")
            return super().__getattr__(name)

    nvml = Forbidden()
    import pynvml

    for name in dir(pynvml):
        if name.startswith(("nvmlDeviceSet", "nvmlDeviceReset", "nvmlUnitSet")):
            monkeypatch.setattr(pynvml, name, lambda *_: pytest.fail("a setter was called"))
    profile = example.profile("a100")
    schedule = one_f_one_b(8, 2)
    plan = EnergyPlanner(profile).plan(schedule, deadline="+5%")
    replay_profile(plan, schedule, profile)
    controller = NvmlController("GPU-1", nvml)
    assert controller.clocks_mhz() == (1200, 1500, 1980)
    assert controller.power_limit_watts() == 700.0
    meter = NvmlSource(nvml, "handle")
    assert meter.uuid == "GPU-1"
    assert isinstance(meter.state().joules, Unavailable)
    dry = DryRun("GPU-1", write=lambda _: None)
    with applied(plan.clocks_mhz[0], dry, "nowhere"):
        dry.limit_power(300.0)
    assert len(dry.actions) == 3


def test_nvml_locks_limits_and_gives_back():
    nvml = FakeNvml(pids=[os.getpid()])
    controller = NvmlController("GPU-1", nvml)
    controller.lock_clock(1200)
    controller.limit_power(450.5)
    controller.restore(700.0)
    assert nvml.calls == [
        ("nvmlDeviceSetGpuLockedClocks", 1200, 1200),
        ("nvmlDeviceSetPowerManagementLimit", 450_500),
        ("nvmlDeviceResetGpuLockedClocks",),
        ("nvmlDeviceSetPowerManagementLimit", 700_000),
    ]
    assert controller.description() == {"kind": "nvml", "uuid": "GPU-1"}


def test_nvml_gives_back_only_what_is_asked_and_the_limit_although_the_clock_is_refused():
    nvml = FakeNvml(refuse=999, refused="Reset")
    controller = NvmlController("GPU-1", nvml)
    limit = ("nvmlDeviceSetPowerManagementLimit", 700_000)
    controller.restore(700.0, clock=False)
    assert nvml.calls == [limit]
    with pytest.raises(EnergyError, match="cannot reset the clock of GPU-1"):
        controller.restore(700.0)
    assert nvml.calls == [limit, limit]
    broken = NvmlController("GPU-1", FakeNvml(refuse=999))
    with pytest.raises(EnergyError, match=r"reset the clock .*; cannot limit the power"):
        broken.restore(700.0)


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (
            FakeNvml(refuse=4),
            "no privilege to lock the clock of GPU-1.*CAP_SYS_ADMIN.*zeusd.*Slurm",
        ),
        (FakeNvml(refuse=999), "cannot lock the clock .* NVML error 999"),
        (FakeNvml(mig=1), "divided by MIG"),
        (FakeNvml(pids=[os.getpid(), 1, 77]), "shared with process 1, 77"),
    ],
)
def test_nvml_refuses_with_a_remedy(nvml, words):
    with pytest.raises(EnergyError, match=words):
        NvmlController("GPU-1", nvml).lock_clock(1200)
    assert nvml.calls == []


def test_nvml_refuses_other_clocks_limits_and_devices():
    controller = NvmlController("GPU-1", FakeNvml(mig=0))
    with pytest.raises(EnergyError, match="nearest is 1500"):
        controller.lock_clock(1510)
    with pytest.raises(EnergyError, match="100 W is outside 200 to 700 W"):
        controller.limit_power(100.0)
    with pytest.raises(EnergyError, match="cannot find GPU GPU-2"):
        NvmlController("GPU-2", FakeNvml())
    with pytest.raises(EnergyError, match="MIG slice"):
        NvmlController("MIG-1", FakeNvml())


def test_named_processes_may_share_a_gpu():
    nvml = FakeNvml(pids=[1])
    NvmlController("GPU-1", nvml, allowed_pids=[1]).lock_clock(1200)
    assert len(nvml.calls) == 1


def test_a_plan_with_one_clock_per_device_becomes_settings_and_others_are_refused():
    schedule = one_f_one_b(2, 1)
    clocks = [1200 if each.device else 900 for each in schedule.operations]
    assert device_settings(plan_of(*clocks), schedule) == (Setting(900), Setting(1200))
    with pytest.raises(EnergyError, match="device 0 has 2 clocks in the plan"):
        device_settings(plan_of(600, *clocks[1:]), schedule)
    with pytest.raises(EnergyError, match="nothing would be set"):
        Setting()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("slurm_one_clock.txt", control.batch_lines([1200] * 8, gpus_per_node=4)),
        ("slurm_clocks.txt", control.batch_lines([1200, 1410] * 4, gpus_per_node=2)),
        ("slurm_prolog.sh", control.prolog()),
        ("slurm_epilog.sh", control.epilog()),
    ],
)
def test_slurm_text_is_as_agreed(file, text):
    assert text == (GOLDEN / file).read_text()


def test_slurm_refuses_clocks_that_differ_between_nodes():
    with pytest.raises(EnergyError, match="2 of its nodes different clocks"):
        control.batch_lines([1200, 1200, 1410, 1410], gpus_per_node=2)
    with pytest.raises(EnergyError, match="gpus_per_node = 3 does not divide the 4 devices"):
        control.batch_lines([1200] * 4, gpus_per_node=3)
    with pytest.raises(EnergyError, match="must be one or more clocks above 0"):
        control.batch_lines([0], gpus_per_node=1)


LOCKED = ["--id=0 --lock-gpu-clocks=1200,1200", "--id=5 --lock-gpu-clocks=1410,1410"]
GIVEN_BACK = ["--id=0 --reset-gpu-clocks", "--id=5 --reset-gpu-clocks"]


class Node:
    """Runs the scripts as bash does, with a stand-in for nvidia-smi that writes what is set."""

    def __init__(self, directory):
        self.directory = directory
        self.marks = directory / "marks"
        self.log = directory / "log"
        self.answer(mig="Disabled")

    def answer(self, *, mig, others="", fails="none"):
        tool = self.directory / "nvidia-smi"
        tool.write_text(
            f"""#!/bin/bash
case "$*" in *{fails}*) echo failed >&2; exit 9 ;; esac
case "$*" in
    "--id=5 --query-gpu=mig.mode.current --format=csv,noheader") echo "{mig}" ;;
    *--query-gpu=mig.mode.current*) echo "[N/A]" ;;
    "--id=5 --query-compute-apps=pid --format=csv,noheader") printf "{others}" ;;
    *--query-compute-apps=pid*) ;;
    *) echo "$*" >> {self.log} ;;
esac
"""
        )
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)

    def run(self, text, comment, job="77"):
        """What was set, and what was said."""
        self.log.write_text("")
        # The script sets its own search path, as Slurm gives it none.
        script = text.replace("PATH=/usr/bin", f"PATH={self.directory}:/usr/bin")
        script = script.replace("marks=/run/outlast-clocks", f"marks={self.marks}")
        assert str(self.marks) in script
        variables = {
            "SLURM_JOB_ID": job,
            "SLURM_JOB_COMMENT": comment,
            "SLURM_JOB_GPUS": "0,5",
        }
        done = subprocess.run(
            ["/bin/bash", "-c", script],
            env=variables,
            cwd=self.directory,
            check=True,
            timeout=60,
            capture_output=True,
            text=True,
        )
        return self.log.read_text().splitlines(), done.stdout

    def marked(self):
        return sorted(each.name for each in self.marks.glob("*"))


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("comment", "commands"),
    [
        ("outlast-clocks=1200,1410", LOCKED),
        ("outlast-clocks=1200", []),
        ("outlast-clocks=$(touch owned),1", []),
        ("outlast-clocks=1200;touch owned", []),
        ("something else", []),
        ("1200,1410", []),
    ],
)
def test_the_prolog_locks_what_a_comment_asks_for_and_nothing_else(node, comment, commands):
    assert node.run(control.prolog(), comment)[0] == commands
    assert not (node.directory / "owned").exists()
    assert node.marked() == (["77.0", "77.5"] if commands else [])


@pytest.mark.parametrize("comment", ["outlast-clocks=1200,1410", "edited", ""])
def test_the_epilog_gives_back_what_the_prolog_locked_whatever_the_comment_says(node, comment):
    node.run(control.prolog(), "outlast-clocks=1200,1410")
    assert stat.S_IMODE(node.marks.stat().st_mode) == 0o700
    assert node.run(control.epilog(), comment, job="7") == ([], "")
    assert node.run(control.epilog(), comment)[0] == GIVEN_BACK
    assert node.marked() == []
    assert node.run(control.epilog(), comment)[0] == []


def test_a_comment_alone_makes_the_epilog_do_nothing(node):
    assert node.run(control.epilog(), "outlast-clocks=1200,1410") == ([], "")
    assert node.run(control.prolog(), "outlast-clocks=1200,1410", job="../7") == ([], "")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"mig": "Enabled"}, "GPU 5 has MIG Enabled"),
        ({"mig": "Disabled", "others": "12\\n34\\n"}, "GPU 5 is used by process 12, 34"),
        ({"mig": "Disabled", "fails": "=5*mig"}, "GPU 5 has MIG unknown"),
        ({"mig": "Disabled", "fails": "=5*apps"}, "GPU 5 is used by process unknown"),
        ({"mig": "Disabled", "fails": "=5*lock"}, ""),
    ],
)
def test_the_prolog_leaves_gpus_that_are_not_the_jobs_alone(node, answers, words):
    node.answer(**answers)
    commands, said = node.run(control.prolog(), "outlast-clocks=1200,1410")
    assert commands == LOCKED[:1]
    assert words in said
    assert node.marked() == ["77.0"]


def test_a_clock_that_cannot_be_given_back_stays_marked(node):
    node.run(control.prolog(), "outlast-clocks=1200,1410")
    node.answer(mig="Disabled", fails="=5*reset")
    commands, said = node.run(control.epilog(), "")
    assert commands == GIVEN_BACK[:1]
    assert "the clock of GPU 5 may still be locked" in said
    assert node.marked() == ["77.5"]
