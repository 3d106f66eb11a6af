"""``outlast energy``: what it measures, plans and replays, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast.cli.main import main
from outlast.energy import EnergyMeter, Frontier
from outlast.energy.lease import Held, Lease
from outlast.energy.sources import available_sources
from outlast.energy.window import DeviceState
from outlast.records import RunDirectory


@pytest.fixture
def energy(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """`energy(*arguments)` gives exit code, stdout and stderr of ``outlast energy``."""

    def run(*arguments: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["outlast", "energy", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        assert "Traceback" not in said.out + said.err
        return ended.value.code or 0, said.out, said.err

    return run


SMALL = ("example:a100", "--microbatches", 3, "--points", 3)


def test_monitor_ends_with_the_commands_code_and_says_what_it_measured(
    energy: Any, tmp_path: Path
) -> None:
    file = tmp_path / "energy.json"
    code, out, _ = energy(
        "monitor",
        "--output",
        file,
        "--",
        sys.executable,
        "-c",
        "print('work'); raise SystemExit(7)",
    )
    assert code == 7
    assert "work" in out
    written = json.loads(file.read_text())
    assert written["seconds"] > 0
    sources, _ = available_sources()
    if sources:
        assert written["parts"]
    else:
        assert "unavailable: no gpu, cpu or memory meter" in out
        assert "unavailable" in json.dumps(written["joules"])


def test_monitor_without_meter_or_command_fails_at_once(energy: Any) -> None:
    if EnergyMeter().sources:
        pytest.skip("this machine has a meter")
    begun = time.monotonic()
    code, out, _ = energy("monitor")
    assert code == 1
    assert "unavailable" in out
    assert time.monotonic() - begun < 30


class Clocked:
    """A meter whose device shows its state, at which somebody presses Ctrl-C after two lines."""

    name = "gpu 0"
    part = "gpu"
    kind = "measured"
    update_seconds = 0.0

    def __init__(self) -> None:
        self.read = self.shown = 0

    def joules(self) -> float:
        self.read += 1
        return 100.0 * self.read

    def state(self) -> DeviceState:
        self.shown += 1
        # The first is that of the beginning.
        if self.shown == 4:
            raise KeyboardInterrupt
        return DeviceState(
            joules=1.0,
            watts=100.0,
            sm_clock_mhz=1410,
            memory_clock_mhz=1593,
            celsius=61.0,
            throttle_reasons=("power cap",),
        )

    def throttle_reasons(self) -> tuple[str, ...]:
        return ("power cap",)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The meters of this machine, to be filled: none at first."""
    found: list[Any] = []
    monkeypatch.setattr("outlast.energy.meter.available_sources", lambda **_: (found, []))
    return found


def test_every_line_of_the_monitor_shows_temperature_and_clock(
    energy: Any, sources: list[Any]
) -> None:
    sources.append(Clocked())
    code, out, _ = energy("monitor", "--every", 0.1)
    assert code == 0
    laps = [line for line in out.splitlines() if line.startswith("gpu 0: ")]
    assert len(laps) == 3
    assert all("61 C" in lap and "1410 MHz" in lap and "power cap" in lap for lap in laps)


def test_the_monitor_in_json_is_a_line_for_each_look(energy: Any, sources: list[Any]) -> None:
    sources.append(Clocked())
    code, out, _ = energy("monitor", "--every", 0.1, "--json")
    assert code == 0
    *laps, whole = map(json.loads, out.splitlines())
    assert len(laps) == 2
    assert all(lap["states"]["gpu 0"]["celsius"] == 61.0 for lap in laps)
    assert all(lap["joules"]["gpu 0"]["kind"] == "measured" for lap in laps)
    assert whole["name"] == "monitor"
    assert whole["seconds"] >= sum(lap["seconds"] for lap in laps)


def served() -> bool:
    return any(each.name == "outlast-energy-exporter" for each in threading.enumerate())


@pytest.mark.parametrize(
    ("command", "expected", "words"),
    [
        ("/nonexistent/cmd", 127, "/nonexistent/cmd cannot be run: No such file"),
        ("/", 126, "/ cannot be run: Permission denied"),
    ],
)
def test_a_command_that_cannot_be_run_ends_as_in_a_shell(
    energy: Any, sources: list[Any], command: str, expected: int, words: str
) -> None:
    code, _, err = energy("monitor", "--port", 0, "--", command)
    assert code == expected
    assert err.startswith(f"outlast: {words}")
    assert len(err.strip().splitlines()) == 1
    assert not served()


def test_a_monitor_without_meter_or_command_serves_nothing(energy: Any, sources: list[Any]) -> None:
    code, out, _ = energy("monitor", "--port", 0)
    assert code == 1
    assert "serving" not in out
    assert not served()


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    energy: Any, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    for file in ("/nonexistent/energy.json", tmp_path):
        code, _, err = energy("monitor", "--output", file, "--", "touch", ran)
        assert code == 2
        assert f"--output = {file} cannot be written" in err
    assert not ran.exists()


def leased(directory: Path, name: str, pid: int | None = None) -> Path:
    """A lease of a GPU that is not here, of a process that is not there."""
    device = Held(
        uuid=name,
        controller={"kind": "unknown", "uuid": name},
        clock_mhz=None,
        power_watts=None,
        previous_power_watts=None,
    )
    devices = () if pid is None else (device,)
    lease = replace(Lease.of_this_process(devices, 60.0), pid=pid or 2**22)
    lease.publish(directory / f"{name}.json")
    return directory / f"{name}.json"


def test_restore_tries_all_leases_and_fails_at_the_end(
    energy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "leases"
    monkeypatch.setenv("OUTLAST_LEASES", str(place))
    code, out, _ = energy("restore")
    assert code == 0
    assert f"no lease of this user in {place}: " in out
    held = leased(place, "a", pid=os.getpid())
    unknown = leased(place, "b", pid=2**22)
    damaged = place / "c.json"
    damaged.write_text("{}")
    last = leased(place, "d")
    code, out, err = energy("restore")
    assert code == 2
    assert f"{last}: gave back" in out
    assert [line.startswith("outlast: ") for line in err.splitlines()] == [True] * 3
    for path in (held, unknown, damaged):
        assert str(path) in err
        assert path.exists()
    assert not last.exists()
    assert 'names the controller "unknown"' in err


@pytest.mark.slow
def test_the_frontier_of_an_example_has_a_picture_and_files_that_replay(
    energy: Any, tmp_path: Path
) -> None:
    code, out, _ = energy("frontier", *SMALL, "--output", tmp_path)
    assert code == 0
    for budget in ("none", "per_stage", "per_phase", "free"):
        assert f"switches = {budget}:" in out
        plans = Frontier.load(tmp_path / f"frontier-{budget}.json").plans
        assert len(plans) == 3
    assert (
        (tmp_path / "frontier.html").read_text().lstrip().lower().startswith(("<!doctype", "<html"))
    )
    free = Frontier.load(tmp_path / "frontier-free.json").plans[-1]
    code, out, _ = energy(
        "replay", tmp_path / "frontier-free.json", "--profile", "example:a100",
        "--microbatches", 3, "--deadline", free.deadline_seconds,
    )  # fmt: skip
    assert code == 0
    planned, replayed = (
        re.findall(r"([\d.]+) s, ([\d,.]+) J", line)[0] for line in out.splitlines()[:2]
    )
    assert planned == replayed
    assert "replayed" in out


@pytest.mark.slow
def test_more_freedom_saves_at_least_as_much(energy: Any) -> None:
    _, out, _ = energy("frontier", *SMALL)
    savings = [float(each) for each in re.findall(r"([\d.]+)% +[\d.]+%", out)]
    none, _, _, free = (savings[i : i + 3] for i in range(0, 12, 3))
    assert all(more >= less for more, less in zip(free, none, strict=True))
    assert free[-1] > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("frontier", "example:h100"), "there are a100 and a40"),
        (("frontier", "nowhere.csv"), "nowhere.csv cannot be read"),
        (("frontier", *SMALL, "--switches", "some"), '--switches = "some" is none of'),
        (("frontier", *SMALL, "--schedule", "1f2b"), '--schedule = "1f2b" is none of'),
        (("frontier", *SMALL, "--longest", "soon"), 'deadline = "soon"'),
        (("frontier", *SMALL, "--margin", "much"), '--margin = "much"'),
        (("replay", "nowhere.json", "--profile", "example:a100"), "nowhere.json cannot be read"),
        (("restore", "nowhere.json"), "there is no lease nowhere.json"),
    ],
)
def test_wrong_input_gets_one_sentence(
    energy: Any, arguments: tuple[object, ...], sentence: str
) -> None:
    code, _, err = energy(*arguments)
    assert code == 2
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.slow
def test_advice_plans_a_jobs_clocks_and_sets_nothing(energy: Any, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "outlast", "init", tmp_path / "job.toml"], check=True)
    code, out, _ = energy(
        "advise", tmp_path / "job.toml", "parallel.pipeline=2", "--nproc", 2, "--deadline", "+5%"
    )
    assert code == 0
    assert "modelled" in out
    assert "nothing is set now" in out
    assert out.count("nvidia-smi --id=") == 2
    assert "#SBATCH --gpu-freq=" in out


def test_advice_refuses_a_device_that_nothing_is_known_of(energy: Any, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "outlast", "init", tmp_path / "job.toml"], check=True)
    code, _, err = energy("advise", tmp_path / "job.toml", "--device", "h200")
    assert code == 2
    assert "--device = h200 has no model" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tariff", "/nonexistent.toml"), "/nonexistent.toml cannot be read"),
        (("--region", "XX"), "XX"),
        (("--loss", "nan"), "--loss = nan must be a finite number"),
        (("--pue", "inf"), "--pue = inf must be a finite number"),
    ],
)
def test_a_report_refuses_wrong_prices_that_were_just_given(
    energy: Any, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    subprocess.run([sys.executable, "-m", "outlast", "init", tmp_path / "job.toml"], check=True)
    run = RunDirectory(tmp_path / "run")
    run.create((tmp_path / "job.toml").read_text())
    code, _, err = energy("report", run.path, *arguments)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_a_report_needs_a_run_with_meters(energy: Any, tmp_path: Path) -> None:
    code, _, err = energy("report", tmp_path)
    assert code == 2
    assert str(tmp_path) in err


def test_without_a_profile_the_shipped_example_is_shown(energy: Any) -> None:
    code, out, _ = energy("frontier", "--points", 2, "--switches", "none")
    assert code == 0
    assert out.startswith("example:a100 is a published profile (GPT-3 175B, 8 stages)")
