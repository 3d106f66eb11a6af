"""Energy in the report: power over time by purpose, joules by device, or the plain reason."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from report_runs import TOKENS_PER_STEP, figures_of, run_with
from test_report import page_of, visible

from outlast.energy.prices import intensity
from outlast.hardware.figure import Unavailable
from outlast.job import EnergySection
from outlast.records import EnergyMeasured, energy_totals, read_run
from outlast.report.energy import account_of, energy_amount, energy_sentence, settings_of

if TYPE_CHECKING:
    from pathlib import Path

    from report_runs import RunMaker


def device(joules: float | None, **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "name": "gpu 0 (GPU-8f6e)",
        "part": "gpu",
        "host": "node-17",
        "rank": 0,
        "purposes": {"compute": 3.0, "communication": 1.0},
        "state": {"celsius": 61.0, "sm_clock_mhz": 1980, "throttle_reasons": ["power cap"]},
    }
    if joules is None:
        known["unavailable"] = "the counter has gone"
    else:
        known |= {"joules": joules, "low_joules": 0.99 * joules, "high_joules": 1.01 * joules}
        known |= {"kind": "measured", "source": "NVML", "flags": []}
    return known | changes


def measured(step: int, *devices: dict[str, Any], steps: int = 25, **missing: str) -> Any:
    return EnergyMeasured(step, steps, steps * TOKENS_PER_STEP, 4.0, list(devices), missing)


def energy_section(*runs: RunMaker) -> str:
    words = visible(page_of(*runs, output=runs[0].path / "report.html"))
    begin = "From the meters of each device"
    if begin not in words:
        begin = "Not in this report"
    return words[words.rindex(begin) :].partition("Point at a mark")[0]


def traces_of(run: RunMaker) -> dict[str, dict[str, Any]]:
    figure = figures_of(page_of(run))[f"energy-{run.path.name}"]
    return {trace["name"]: trace for trace in figure["data"]}


def test_power_is_stacked_by_purpose(new_run: Any) -> None:
    run = run_with(new_run(), measured(25, device(400.0)), measured(50, device(800.0)))
    traces = traces_of(run)
    assert traces.keys() == {"useful", "blocked"}
    assert traces["useful"]["y"] == [75, 150]
    assert traces["blocked"]["y"] == [25, 50]
    assert traces["useful"]["width"] == [4, 4]
    assert traces["useful"]["text"] == ["300.0 J", "600.0 J"]


def test_sums_by_purpose_and_by_device_are_said_in_words(new_run: Any) -> None:
    run = run_with(new_run(), measured(25, device(4000.0)), measured(50, device(3200.0)))
    section = energy_section(run)
    assert "2.000 Wh measured on 1 GPU, 0.07031 J/token; by purpose" in section
    assert "With the meters' errors: 1.980 Wh to 2.020 Wh." in section
    assert "useful 1.500 Wh 75.0 blocked 1800 J 25.0" in section.replace(",", "")
    assert "gpu 0 (GPU-8f6e) node-17 2.000 Wh 900.0 W 61 °C 1980 MHz" in section
    assert "power cap at the end of 2 windows" in section


def test_the_key_figures_name_energy_and_its_kind(new_run: Any) -> None:
    run = run_with(new_run(), measured(50, device(7200.0, kind="modelled"), steps=50))
    words = visible(page_of(run))
    assert "Energy 2.000 Wh 1 GPU modelled" in words
    assert (
        "Energy per token 0.07031 J/token all energy over the tokens that count modelled" in words
    )


def test_a_node_stands_for_what_is_in_it(new_run: Any) -> None:
    cpu = device(900.0, part="cpu", name="cpu package 0", host="a", state={})
    node = device(5000.0, part="node", name="file /m", host="a", state={})
    other = device(100.0, part="cpu", name="cpu package 0", host="b", state={})
    run = run_with(new_run(), measured(50, cpu, node, other, steps=50))
    totals = energy_totals(read_run(run.path))
    assert totals is not None
    assert totals.joules == 5100.0
    section = energy_section(run)
    assert "on 1 node and 1 CPU" in section or "on 1 CPU and 1 node" in section
    assert "in its node's figure already" in section


def test_a_window_that_could_not_be_read_makes_the_sum_too_low_and_says_so(new_run: Any) -> None:
    run = run_with(new_run(), measured(25, device(400.0)), measured(50, device(None)))
    section = energy_section(run)
    assert "some windows unavailable, so the sum is too low" in section
    assert "the counter has gone" in section
    # Tokens of windows without a figure are not in J/token either.
    assert "0.007812 J/token" in section


def test_without_a_meter_the_reasons_are_there_and_no_figure(new_run: Any) -> None:
    why = {"gpu": "NVML does not start", "cpu": "no RAPL domain", "memory": "no RAPL domain"}
    run = run_with(new_run(), measured(0, steps=0, **why))
    said = "unavailable: gpu: NVML does not start; cpu, memory: no RAPL domain"
    assert energy_sentence(read_run(run.path)) == said
    assert f"Energy: {said.removeprefix('unavailable: ')}" in energy_section(run)
    words = visible(page_of(run))
    assert "Energy unavailable: gpu: NVML does not start" in words
    assert "Energy per token" not in words
    assert "energy-lark" not in figures_of(page_of(run))


def test_a_run_that_did_not_measure_says_so(new_run: Any) -> None:
    run = run_with(new_run(overrides=("energy.measure=false",)))
    assert "Energy: not measured: energy.measure = false" in energy_section(run)


def test_a_run_from_before_energy_was_measured_says_so(new_run: Any) -> None:
    assert "Energy: nothing about energy is recorded" in energy_section(run_with(new_run()))


def test_redone_steps_are_told_apart(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    run.write(measured(0, device(100.0, purposes={"startup": 2.0}), steps=0))
    run.steps(0, 50)
    run.write(measured(50, device(1000.0), steps=50))
    run.close()
    run.clock.now += 10
    run.start()
    run.ready(30)
    run.write(measured(30, device(50.0, purposes={"startup": 1.0}), steps=0))
    run.steps(30, 50)
    run.write(measured(50, device(420.0), steps=20))
    run.end(50, "completed")
    totals = energy_totals(read_run(run.path))
    assert totals is not None
    # 20 of 50 steps were done again.
    assert totals.purposes["redone"] == pytest.approx(400.0)
    assert totals.purposes["startup"] == 100.0
    assert totals.purposes["restart"] == 50.0
    assert totals.purposes["compute"] == pytest.approx(0.75 * 1020.0)
    assert totals.tokens == 50 * TOKENS_PER_STEP
    assert "redone 400.0 J" in energy_section(run)
    assert "400.0 J of it redone" in energy_sentence(read_run(run.path))


def test_a_long_run_has_few_bars_and_all_its_energy(new_run: Any) -> None:
    many = [measured(step, device(8.0), steps=1) for step in range(1, 2001)]
    traces = traces_of(run_with(new_run(), *many))
    bars = traces["useful"]
    assert len(bars["y"]) <= 300
    joules = sum(y * w for t in traces.values() for y, w in zip(t["y"], t["width"], strict=True))
    unit_seconds = 3600.0 if max(bars["width"]) < 1 else 60.0 if max(bars["width"]) < 20 else 1.0
    assert joules * unit_seconds == pytest.approx(16000.0, rel=1e-3)


@pytest.mark.parametrize(
    ("joules", "said"),
    [(0.5, "0.5000 J"), (3600.0, "1.000 Wh"), (3599.0, "3,599 J"), (7.2e6, "2.000 kWh")],
)
def test_amounts_read_well(joules: float, said: str) -> None:
    assert energy_amount(joules) == said


def test_several_runs_have_a_picture_each(new_run: Any) -> None:
    first = run_with(new_run("lark"), measured(50, device(400.0)))
    second = run_with(new_run("wren"))
    page = page_of(first, second, output=first.path / "report.html")
    assert "energy-lark" in figures_of(page)
    assert "energy-wren" not in figures_of(page)


TARIFF = """
currency = "EUR"
price_per_kwh = 0.20

[[bands]]
from_hour = 0
to_hour = 24
price_per_kwh = 0.50
"""


def test_cost_and_carbon_follow_the_job(new_run: Any, tmp_path: Path) -> None:
    tariff = tmp_path / "tariff.toml"
    tariff.write_text(TARIFF)
    settings = (f'energy.tariff="{tariff}"', "energy.region=FR", "energy.pue=1.5")
    kilowatt_hour = device(3.6e6)
    run = run_with(new_run(overrides=settings), measured(50, kilowatt_hour, steps=50))
    section = energy_section(run)
    assert "Cost: 0.75 [0.7425, 0.7575] EUR (measured: tariff" in section
    grams = 1.5 * intensity("FR").grams_per_kwh
    assert f"Carbon: {grams:.4g} [" in section
    assert "PUE of cost and carbon: 1.5, as given." in section
    sentence = energy_sentence(read_run(run.path))
    assert f"0.7500 EUR, {grams:.2f} gCO2e" in sentence


def test_without_tariff_and_region_the_reasons_are_given(new_run: Any) -> None:
    section = energy_section(run_with(new_run(), measured(50, device(400.0))))
    assert "Cost: unavailable: energy.tariff names no file." in section
    assert "Carbon: unavailable: energy.region is not set." in section
    assert "cpu, memory, network and fans were not metered" in section


def test_a_tariff_that_has_gone_is_named(new_run: Any, tmp_path: Path) -> None:
    settings = (f'energy.tariff="{tmp_path}/gone.toml"',)
    section = energy_section(run_with(new_run(overrides=settings), measured(50, device(400.0))))
    assert f"Cost: unavailable: tariff file {tmp_path}/gone.toml cannot be read" in section


def test_the_account_has_the_purposes_of_the_sum(new_run: Any) -> None:
    purposes = {"compute": 2.0, "communication": 1.0, "guard": 0.5, "other": 0.5}
    run = run_with(new_run(), measured(50, device(400.0, purposes=purposes), steps=50))
    found = account_of(read_run(run.path), loss_target=1.0)
    assert not isinstance(found, Unavailable)
    joules = {name: each.joules for name, each in found.by_purpose.items()}
    assert joules == {"useful": 200.0, "blocked": 100.0, "guard": 50.0, "unattributed": 50.0}
    assert found.to_dict()["joules"]["value"] == 400.0
    assert found.to_dict()["joules_to_loss"]["unavailable"].startswith("loss 1 was not reached")


def test_joules_to_a_loss(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    for step, loss in ((25, 3.0), (50, 2.0)):
        run.done(step, 25, loss, 0.4)
        run.write(measured(step, device(400.0)))
    run.end(50, "completed")
    found = account_of(read_run(run.path), loss_target=2.5)
    assert not isinstance(found, Unavailable)
    assert not isinstance(found.joules_to_loss, Unavailable)
    assert found.joules_to_loss.value == pytest.approx(600.0)


def test_rates_of_the_caller_go_before_those_of_the_job(new_run: Any, tmp_path: Path) -> None:
    tariff = tmp_path / "tariff.toml"
    tariff.write_text(TARIFF)
    run = run_with(new_run(overrides=("energy.region=FR",)), measured(50, device(3.6e6)))
    recorded = read_run(run.path)
    changes = {"tariff": str(tariff), "region": "DE", "pue": 2.0}
    found = account_of(recorded, settings=settings_of(recorded).model_copy(update=changes))
    assert not isinstance(found, Unavailable)
    assert not isinstance(found.cost, Unavailable)
    assert found.cost.value == pytest.approx(1.0)
    assert not isinstance(found.carbon, Unavailable)
    assert found.carbon.value == pytest.approx(2.0 * intensity("DE").grams_per_kwh)


def test_a_run_without_energy_has_no_account(new_run: Any) -> None:
    run = run_with(new_run(overrides=("energy.measure=false",)))
    assert isinstance(account_of(read_run(run.path)), Unavailable)


def stood(**changes: Any) -> dict[str, Any]:
    said = "the counter of gpu 0 did not move in 4 s"
    return device(None, unavailable=said, carried=True, **changes)


def test_a_counter_that_stands_is_carried_only_to_a_figure_that_comes(new_run: Any) -> None:
    frozen = [measured(step, stood()) for step in range(50, 501, 25)]
    run = read_run(run_with(new_run(), measured(25, device(400.0)), *frozen).path)
    totals = energy_totals(run)
    assert totals is not None
    assert totals.tokens == 25 * TOKENS_PER_STEP
    assert totals.joules_per_token == pytest.approx(400.0 / totals.tokens)
    assert totals.incomplete
    assert totals.lacking_seconds == 4.0 * len(frozen)
    assert totals.devices[0].missing
    assert "the sum is too low" in energy_sentence(run)


def test_a_counter_that_moves_again_covers_the_windows_before(new_run: Any) -> None:
    events = [measured(25, stood()), measured(50, device(800.0))]
    totals = energy_totals(read_run(run_with(new_run(), *events).path))
    assert totals is not None
    assert totals.tokens == 50 * TOKENS_PER_STEP
    assert not totals.incomplete


def test_a_reading_that_failed_in_between_loses_what_was_carried(new_run: Any) -> None:
    events = [measured(25, stood()), measured(50, device(None)), measured(75, device(400.0))]
    totals = energy_totals(read_run(run_with(new_run(), *events).path))
    assert totals is not None
    assert totals.tokens == 25 * TOKENS_PER_STEP
    assert totals.lacking_seconds == 8.0


def test_one_frozen_counter_of_two_makes_tokens_uncovered(new_run: Any) -> None:
    other = {"name": "gpu 1 (GPU-b)"}
    events = [
        measured(25, device(400.0), device(400.0, **other)),
        measured(50, device(400.0), stood(**other)),
    ]
    totals = energy_totals(read_run(run_with(new_run(), *events).path))
    assert totals is not None
    assert totals.joules == 1200.0
    assert totals.joules_per_token == pytest.approx(800.0 / (25 * TOKENS_PER_STEP))


def test_a_node_that_stands_for_a_window_is_not_counted_twice(new_run: Any) -> None:
    cpu = {"part": "cpu", "name": "cpu package 0", "state": {}}
    node = {"part": "node", "name": "file /m", "state": {}}
    events = [
        measured(25, device(100.0, **cpu), stood(**node)),
        measured(50, device(100.0, **cpu), device(1000.0, **node)),
    ]
    assert events[0].joules is None
    totals = energy_totals(read_run(run_with(new_run(), *events).path))
    assert totals is not None
    assert totals.joules == 1000.0
    assert totals.tokens == 50 * TOKENS_PER_STEP


def test_two_machines_of_one_name_are_two(new_run: Any) -> None:
    cpu = {"part": "cpu", "name": "cpu package 0", "state": {}}
    one, two = device(100.0, boot="a", **cpu), device(200.0, boot="b", **cpu)
    node = device(500.0, boot="a", part="node", name="file /m", state={})
    totals = energy_totals(read_run(run_with(new_run(), measured(50, one, two, node)).path))
    assert totals is not None
    assert totals.joules == 700.0
    assert len(totals.devices) == 3


def killed(run: RunMaker) -> RunMaker:
    run.start()
    run.ready()
    run.write(measured(25, device(400.0)))
    run.clock.now += 30.0
    run.done(50, 25, 3.0, 0.0)
    run.close()
    return run


def test_the_end_of_a_killed_attempt_is_said_to_be_missing(new_run: Any) -> None:
    run = killed(new_run())
    recorded = read_run(run.path)
    totals = energy_totals(recorded)
    assert totals is not None
    assert totals.incomplete
    assert totals.killed_seconds == pytest.approx(30.0, rel=0.01)
    note = "at least the last 30 s of killed attempts (without a recorded end) were not metered"
    assert note in energy_sentence(recorded)
    assert note in visible(page_of(run))
    found = account_of(recorded)
    assert not isinstance(found, Unavailable)
    assert note in found.notes


def test_the_account_notes_windows_and_meters_without_a_figure(new_run: Any) -> None:
    events = [measured(25, device(400.0)), measured(50, device(None), cpu="no RAPL domain")]
    found = account_of(read_run(run_with(new_run(), *events).path))
    assert not isinstance(found, Unavailable)
    for said in ("\n".join(found.lines()), found.to_json()):
        assert "4 device-seconds were not metered: the counter has gone" in said
        assert "not metered: cpu: no RAPL domain" in said


def test_joules_to_the_best_loss_are_a_key_figure(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    for step, loss in ((25, 3.0), (50, 2.0), (75, 2.5)):
        run.done(step, 25, loss, 0.4)
        run.write(measured(step, device(400.0)))
    run.end(75, "completed")
    assert "Energy to the loss 800.0 J first loss of at most 2, at step 50" in visible(page_of(run))
    found = account_of(read_run(run.path), settings=EnergySection(loss_target=2.5, measure=True))
    assert not isinstance(found, Unavailable)
    assert not isinstance(found.joules_to_loss, Unavailable)
    assert found.joules_to_loss.value == pytest.approx(600.0)


def test_joules_to_a_loss_do_not_depend_on_the_clock(new_run: Any) -> None:
    run = new_run()
    run.start()
    run.ready()
    for step, loss in ((25, 3.0), (50, 2.0)):
        run.done(step, 25, loss, 0.4)
        run.write(measured(step, device(400.0)))
        run.clock.now -= 3600.0
    run.end(50, "completed")
    found = account_of(read_run(run.path), loss_target=2.5)
    assert not isinstance(found, Unavailable)
    assert not isinstance(found.joules_to_loss, Unavailable)
    assert found.joules_to_loss.value == pytest.approx(600.0)


def test_a_tariff_is_kept_with_the_run(new_run: Any, tmp_path: Path) -> None:
    gone = tmp_path / "gone.toml"
    run = new_run(overrides=(f'energy.tariff="{gone}"',))
    event = replace(measured(50, device(3.6e6), steps=50), tariff=TARIFF)
    found = account_of(read_run(run_with(run, event).path))
    assert not isinstance(found, Unavailable)
    assert not isinstance(found.cost, Unavailable)
    assert found.cost.value == pytest.approx(0.5)


def test_waiting_for_a_straggler_is_told_apart(new_run: Any) -> None:
    purposes = {"compute": 2.0, "communication": 1.0, "straggler": 1.0}
    run = run_with(new_run(), measured(50, device(400.0, purposes=purposes), steps=50))
    assert traces_of(run).keys() == {"useful", "blocked", "straggler"}
    assert "straggler 100.0 J 25.0" in energy_section(run)
