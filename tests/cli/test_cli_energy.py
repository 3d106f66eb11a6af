"""``outlast energy``: what it measures, plans and replays, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outlast.cli.main import main
from outlast.energy import EnergyMeter, Frontier
from outlast.energy.sources.available import available_sources


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
        "monitor", "--json", file, "--", sys.executable, "-c", "print('work'); raise SystemExit(7)"
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


def test_the_frontier_of_an_example_has_a_picture_and_files_that_replay(
    energy: Any, tmp_path: Path
) -> None:
    code, out, _ = energy("frontier", *SMALL, "--out", tmp_path)
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


def test_more_freedom_saves_at_least_as_much(energy: Any) -> None:
    _, out, _ = energy("frontier", *SMALL)
    savings = [float(each) for each in re.findall(r"([\d.]+)% +[\d.]+%", out)]
    none, _, _, free = (savings[i : i + 3] for i in range(0, 12, 3))
    assert all(more >= less for more, less in zip(free, none, strict=True))
    assert free[-1] > 10


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


def test_a_report_needs_a_run_with_meters(energy: Any, tmp_path: Path) -> None:
    code, _, err = energy("report", tmp_path)
    assert code == 2
    assert str(tmp_path) in err
