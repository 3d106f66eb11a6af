"""What `outlast train` predicts before the first step, and that it never stops a run."""

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest
from forked import run_ranks
from tiny import tiny_job

from outlast.cli.main import main
from outlast.cli.plan_calibrate import HOME, calibration_home, prediction_of
from outlast.errors import EXIT_DONE
from outlast.job import load_job, to_toml
from outlast.job.sections import ModelSection
from outlast.plan.probes import Rates, machine_text
from outlast.records import Predicted, forecast_of, read_run
from outlast.train.run import run_directory

RATES = Rates(
    matmul_flop_per_s={"fp32": 1e11, "bf16": 3e11},
    memory_bytes_per_s=2e10,
    link_bytes_per_s=2e9,
    threads=2,
)


@pytest.fixture
def measured_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which this machine's rates are said, in place of a measurement."""
    home = tmp_path / "plan"
    home.mkdir()
    (home / "cluster.toml").write_text(machine_text(RATES))
    monkeypatch.setenv(HOME, str(home))
    return home


def test_a_measured_machine_gives_figures_with_terms(measured_machine: Path) -> None:
    found = prediction_of(load_job(None, []), 1)
    assert isinstance(found, Predicted)
    assert 0.0 < found.step_seconds_low < found.step_seconds < found.step_seconds_high
    assert 0.0 < found.memory_bytes_low < found.memory_bytes < found.memory_bytes_high
    assert sum(found.terms.values()) == pytest.approx(found.step_seconds, rel=1e-9)
    assert found.tokens_per_s == pytest.approx(16 * 128 / found.step_seconds, rel=1e-6)
    assert found.extrapolated


def test_processes_share_the_machine(measured_machine: Path) -> None:
    one, two = (prediction_of(load_job(None, []), count) for count in (1, 2))
    assert isinstance(one, Predicted)
    assert isinstance(two, Predicted)
    assert two.terms["matrix products"] > 0.6 * one.terms["matrix products"]


def test_a_job_that_the_planner_cannot_read_is_said_in_a_phrase(measured_machine: Path) -> None:
    own = ModelSection(module="somewhere:build")
    job = load_job(None, []).model_copy(update={"model": own})
    found = prediction_of(job, 1)
    assert isinstance(found, str)
    assert "model.module" in found


def test_a_mistake_of_the_planner_is_a_phrase_too(
    measured_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object, **further: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("outlast.plan.api.predict", broken)
    assert prediction_of(load_job(None, []), 1) == "RuntimeError: a mistake"


def test_the_folder_can_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOME, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_home() == tmp_path / "outlast" / "plan"
    monkeypatch.setenv(HOME, str(tmp_path / "mine"))
    assert calibration_home() == tmp_path / "mine"


def _train(file: str) -> tuple[int, str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    sys.argv = ["outlast", "train", file]
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue()


@pytest.mark.distributed
def test_a_run_says_what_was_predicted_and_how_it_was(
    measured_machine: Path, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "foretold")
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    [(code, said)] = run_ranks(1, _train, str(file))
    assert code == EXIT_DONE
    assert said.index("predicted: ") < said.index("step ")
    assert "time per step: predicted" in said
    forecast = forecast_of(read_run(run_directory(job).path))
    assert forecast is not None
    assert forecast.prediction.step_seconds > 0.0
    assert forecast.measured.step_seconds is not None
