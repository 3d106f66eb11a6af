"""Memory of devices, learned from rows of runs, kept in a file, and used by predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_runs import H100, LLAMA_8B

from outlast.errors import PlanError
from outlast.plan.api import Training, context_of, predict, published_constants, published_memory
from outlast.plan.batch import cases, stage
from outlast.plan.calibration import (
    Calibration,
    Provenance,
    calibration_of,
    read_calibration,
    write_calibration,
)
from outlast.plan.configuration import Configuration
from outlast.plan.constants import memory_constants
from outlast.plan.memory import LOG_DEVIATION, demand, room
from outlast.plan.memory_fit import (
    Known,
    device_constants,
    device_memory_of,
    fit_device_memory,
)
from outlast.plan.rows import Row

TRUE = memory_constants({"fragment_share": 0.5, "library_bytes": 4e9})


def run_of(tensor: int, micro_batch: int = 1) -> Configuration:
    data = 64 // tensor
    return Configuration(
        data=data,
        tensor=tensor,
        sequence=4096,
        micro_batch=micro_batch,
        batch=8 * data * micro_batch,
        sharding="parameters",
    )


def row(run: Configuration, **figures: object) -> Row:
    said: dict[str, object] = {"step_seconds": 1.0, **figures}
    return Row(
        name=f"tp{run.tensor}-{run.micro_batch}",
        model=LLAMA_8B,
        run=run,
        cluster=H100,
        source="logs",
        framework="torchtitan",
        **said,  # type: ignore[arg-type]
    )


def reserved(run: Configuration) -> float:
    return float(room(cases([(LLAMA_8B, run, H100)]), TRUE).reserved_bytes[0])


def measured(*runs: Configuration) -> list[Row]:
    return [row(run, reserved_bytes=reserved(run)) for run in runs]


RUNS = [run_of(tensor, size) for tensor, size in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))]


def stored(rows: list[Row]) -> Calibration:
    learned = fit_device_memory(rows)
    plain = calibration_of(published_constants(), Provenance(date="2026-11-23", version="0"))
    fits = {name: each.fit for name, each in learned.items()}
    return replace(plain, constants={**plain.constants, **device_constants(fits)})


@pytest.mark.slow
def test_a_few_runs_correct_what_the_priors_say() -> None:
    learned = fit_device_memory(measured(*RUNS))["torchtitan"]
    assert np.median(np.abs(learned.before)) > 0.05
    assert np.median(np.abs(learned.unseen)) < 0.4 * np.median(np.abs(learned.before))
    assert learned.fit.runs == len(RUNS)
    assert learned.fit.log_deviation < LOG_DEVIATION


def test_one_run_leaves_the_spread_that_was_believed() -> None:
    learned = fit_device_memory(measured(RUNS[0]))["torchtitan"]
    assert learned.unseen.size == 0
    assert learned.fit.log_deviation == pytest.approx(LOG_DEVIATION)


@pytest.mark.slow
def test_a_few_runs_that_agree_leave_some_of_the_spread_that_was_believed() -> None:
    learned = fit_device_memory(measured(*RUNS))["torchtitan"]
    close = float(np.sqrt((learned.unseen**2).mean()))
    assert 1.3 * close < learned.fit.log_deviation < LOG_DEVIATION
    again = [replace(each, name=f"again {each.name}") for each in measured(*RUNS)]
    more = fit_device_memory([*measured(*RUNS), *again])["torchtitan"]
    assert more.fit.log_deviation < learned.fit.log_deviation


@pytest.mark.slow
def test_each_framework_learns_from_its_own_runs() -> None:
    others = [replace(each, framework="Megatron-LM") for each in measured(*RUNS[:2])]
    others = [replace(each, reserved_bytes=0.8 * (each.reserved_bytes or 0.0)) for each in others]
    learned = fit_device_memory([*measured(*RUNS), *others])
    alone = fit_device_memory(measured(*RUNS))["torchtitan"].fit
    assert learned["torchtitan"].fit.values == alone.values
    assert learned["Megatron-LM"].fit.values != alone.values


def test_rows_on_processors_and_flagged_ones_do_not_count() -> None:
    [one] = measured(RUNS[0])
    here = replace(one, cluster=replace(H100, processor=True))
    wrong = replace(one, flags=("it is wrong",))
    assert not fit_device_memory([here, wrong, replace(wrong, out_of_memory=True)])
    assert not fit_device_memory([row(RUNS[0])])


@pytest.mark.slow
def test_a_run_that_failed_lowers_the_limit_or_raises_what_is_expected() -> None:
    failing = run_of(2, 3)
    numbers = cases([(LLAMA_8B, failing, H100)])

    def pressing(rows: list[Row]) -> float:
        fitted = fit_device_memory(rows)["torchtitan"].fit
        need = demand(numbers, fitted.constants(("torchtitan",)), stage(numbers, "first"))
        return float(need.pressing[0] / need.usable[0])

    failed = row(failing, step_seconds=None, out_of_memory=True)
    without = pressing(measured(*RUNS))
    assert 0.5 < without < 1.0
    assert pressing([*measured(*RUNS), failed]) > without + 0.01


def test_the_most_that_tensors_hold_teaches_activations() -> None:
    true = memory_constants({"hidden_values": 5.0, "backward_blocks": 2.0})
    rows = []
    for run in RUNS:
        numbers = cases([(LLAMA_8B, run, H100)])
        peak = float(demand(numbers, true, stage(numbers, "first")).peak[0])
        rows.append(row(run, allocated_bytes=peak))
    learned = fit_device_memory(rows)["torchtitan"]
    assert np.median(np.abs(learned.unseen)) < 0.5 * np.median(np.abs(learned.before))
    assert learned.fit.values["logit_copies"] > 1.1


@pytest.mark.slow
def test_what_is_written_is_read_and_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    write_calibration(stored(measured(*RUNS)), file)
    again = device_memory_of(read_calibration(file))
    assert again["torchtitan"].values == fit_device_memory(measured(*RUNS))["torchtitan"].fit.values
    unseen = run_of(8, 2)
    training = Training(model=LLAMA_8B, run=unseen, tokens=1e9, framework="torchtitan")
    before, after = predict(training, H100), predict(training, H100, calibration=file)
    truth = reserved(unseen)
    off = [abs(each.memory.figure.middle / truth - 1.0) for each in (before, after)]
    assert off[0] > 0.15
    assert off[1] < 0.5 * off[0]
    origins = {one.origin for term in after.memory.terms for one in term.constants.values()}
    assert origins == {"calibrated"}
    assert any("no memory of torchtitan" in each for each in before.memory.figure.extrapolated)
    assert not any("no memory" in each for each in after.memory.figure.extrapolated)
    assert after.memory.figure.high / after.memory.figure.low < (
        before.memory.figure.high / before.memory.figure.low
    )
    other = predict(replace(training, framework="megatron"), H100, calibration=file)
    plain = predict(replace(training, framework="megatron"), H100)
    assert other.memory.figure.middle == plain.memory.figure.middle


def test_memory_of_published_runs_is_known_and_can_be_refined() -> None:
    known = published_memory()
    assert set(known) == {"nanotron"}
    rows = [replace(each, framework="nanotron") for each in measured(*RUNS[:3])]
    refined = fit_device_memory(rows, known)["nanotron"]
    values, before = refined.fit.values, known["nanotron"].values
    assert values["bucket_bytes"] == pytest.approx(before["bucket_bytes"], rel=0.2)
    assert np.median(np.abs(refined.before)) > np.median(np.abs(refined.unseen))


@pytest.mark.slow
def test_published_memory_counts_beside_every_calibration_that_does_not_have_it() -> None:
    training = Training(model=LLAMA_8B, run=RUNS[1], tokens=1e9, framework="nanotron")
    own = device_memory_of(stored(measured(*RUNS)))
    known = Known(published_constants(), own)
    found, usual = (context_of(training, H100, calibration=each).memory for each in (known, None))
    assert found is usual is published_memory()["nanotron"]
    titan = context_of(replace(training, framework="torchtitan"), H100, calibration=known).memory
    assert titan is own["torchtitan"]
    told = Known(published_constants(), {"nanotron": own["torchtitan"]})
    assert context_of(training, H100, calibration=told).memory is own["torchtitan"]


def test_why_memory_is_by_priors_is_said() -> None:
    plain = Training(model=LLAMA_8B, run=RUNS[1], tokens=1e9, framework="any")

    def said(training: Training, processor: bool = False) -> str:
        place = replace(H100, processor=processor)
        return " ".join(predict(training, place).memory.figure.extrapolated)

    assert "no framework is named: memory by priors alone" in said(plain)
    assert "memory of any" not in said(plain)
    ours = replace(plain, framework="outlast")
    assert "no memory of outlast was measured" in said(ours)
    here = said(ours, processor=True)
    assert "resident memory of a rank by priors alone" in here
    assert "was measured" not in here


def test_what_a_file_lacks_or_has_beyond_its_bounds_is_refused() -> None:
    whole = stored(measured(RUNS[0]))
    name = "device memory of torchtitan: fragment_share"
    less = {key: each for key, each in whole.constants.items() if key != name}
    with pytest.raises(PlanError, match="lacks device memory of torchtitan: fragment_share"):
        device_memory_of(replace(whole, constants=less))
    for value in (0.0, 1.5):
        wrong = {**whole.constants, name: replace(whole.constants[name], value=value)}
        with pytest.raises(PlanError, match=r"fragment_share = .* is not above 0 and below 1"):
            device_memory_of(replace(whole, constants=wrong))
