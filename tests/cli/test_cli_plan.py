"""``outlast plan SOURCE`` and ``explain``: the answers a new user asks for, and their terms."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_commands import SMALL, Plan, write_config, write_job

from outlast.cli.console import unit_of_joules, unit_of_seconds

COMMANDS = (
    "rank",
    "explain",
    "pareto",
    "check",
    "compare",
    "calibrate",
    "emit",
    "targets",
    "simulate",
    "clusters",
    "models",
)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Plan:
    return Plan(monkeypatch, capfd)


def test_help_lists_the_commands_and_the_form_without_one(plan: Plan) -> None:
    code, out, _ = plan("--help")
    assert code == 0
    assert "SOURCE --cluster" in out
    for command in COMMANDS:
        assert f" {command} " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(plan: Plan, command: str) -> None:
    code, out, _ = plan(command, "--help")
    assert code == 0
    assert "Example: outlast plan" in out


def test_help_loads_neither_numpy_nor_torch() -> None:
    script = (
        "import sys; from outlast.cli.app import app; import typer; typer.main.get_command(app);"
        "print([name for name in ('torch', 'numpy', 'scipy', 'plotly') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_one_command_answers_for_ones_own_config(plan: Plan, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "mine")
    code, out, _ = plan(folder, "--cluster", "h100x64", "--framework", "torchtitan", *SMALL)
    assert code == 0
    for answer in ("fits ", "takes ", "energy ", "failures ", "change ", "extrapolated "):
        assert f"\n{answer}" in out
    assert "every figure below is predicted" in out
    assert "Chinchilla" in out
    assert "Llama 3" in out
    assert "on the exact front" in out


def test_rows_are_plain_lines_without_a_terminal(plan: Plan) -> None:
    _, out, _ = plan("gpt2", "--cluster", "h100x8", "--framework", "outlast", "--top", 4)
    lines = out.splitlines()
    head = next(index for index, line in enumerate(lines) if line.lstrip().startswith("#"))
    rows = lines[head + 2 : head + 6]
    assert [row.split()[0].rstrip("*k") for row in rows] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("command", [("gpt2",), ("models",), ("targets",), ("clusters",)])
def test_tables_stay_within_80_columns(
    plan: Plan, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    more = ("--cluster", "h100x8", "--price", "2", *SMALL) if command == ("gpt2",) else ()
    code, out, _ = plan(*command, *more)
    assert code == 0
    # A path stays whole, however long, so that it can be copied.
    lines = [line for line in out.splitlines() if not line.startswith("files to copy")]
    assert max(len(line) for line in lines) <= 80


def test_the_folder_of_cluster_files_is_never_broken(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    _, out, _ = plan("clusters")
    line = next(line for line in out.splitlines() if line.startswith("files to copy"))
    assert Path(line.partition(" in ")[2], "h100x64.toml").is_file()


def test_layouts_stay_in_a_narrow_table_of_large_numbers(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asked = ("llama-3-8b", "--cluster", "h100x64", "--micro-batch", 1, "--tokens", "1e30")
    _, out, _ = plan(*asked, "--top", 2)
    assert max(len(line) for line in out.splitlines()) <= 80
    head = next(line for line in out.splitlines() if line.lstrip().startswith("#"))
    assert "layout" in head.split()


@pytest.mark.slow
def test_source_may_come_behind_the_options(plan: Plan) -> None:
    first = plan.json("gpt2", "--cluster", "h100x8", *SMALL)
    second = plan.json("--cluster", "h100x8", *SMALL, "gpt2")
    assert first == second


def test_ranking_as_json(plan: Plan) -> None:
    found = plan.json("llama-3-8b", "--cluster", "h100x64", "--tokens", "300B", *SMALL)
    assert found["kind"] == "predicted"
    assert found["planned"]["tokens"] == 300e9
    assert found["searched"] >= found["allowed"] >= found["within"] >= found["front"] >= 1
    hours = [each["estimate"]["finish_seconds"]["middle"] for each in found["choices"]]
    front = [each for each in found["choices"] if each["on_front"]]
    assert front[0]["number"] == 1
    assert hours[0] == min(hours)
    for each in found["choices"]:
        estimate = each["estimate"]
        assert estimate["fits"]
        assert not estimate["cliff"]
        figure = estimate["step_seconds"]["figure"]
        assert figure["low"] < figure["middle"] < figure["high"]
        terms = math.fsum(term["value"] for term in estimate["step_seconds"]["terms"])
        assert terms == pytest.approx(figure["middle"], rel=1e-9)
        assert "unavailable" in estimate["money"]


def test_rows_keep_their_numbers_and_can_be_explained(plan: Plan) -> None:
    asked = ("gpt2", "--cluster", "h100x8", "--framework", "outlast")
    few = plan.json(*asked, "--top", 2)["choices"]
    many = plan.json(*asked, "--top", 5)["choices"]
    assert [each["layout"] for each in few] == [each["layout"] for each in many[:2]]
    explained = plan.json("explain", *asked, "--choose", 2)
    assert explained["layout"] == many[1]["layout"]
    assert explained["estimate"] == many[1]["estimate"]


@pytest.mark.slow
def test_a_row_far_down_is_found_without_predicting_all_above(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("gpt2", "--cluster", "h100x8", *SMALL)
    rows = plan.json(*asked, "--top", 30)["choices"]
    from outlast.plan import prediction

    predicted = []
    real = prediction.predict

    def counted(*given: Any, **further: Any) -> Any:
        predicted.append(given)
        return real(*given, **further)

    monkeypatch.setattr(prediction, "predict", counted)
    found = plan.json("explain", *asked, "--choose", 30)
    assert found["configuration"] == rows[29]["configuration"]
    assert found["estimate"] == rows[29]["estimate"]
    assert len(predicted) == 1
    allowed = plan.json(*asked, "--top", 1)["allowed"]
    assert "the ranking has" in plan.refused("explain", *asked, "--choose", allowed + 1)


NUMBER = r"[0-9][0-9.,]*"
TIME_AND_ENERGY = rf"{NUMBER} (us|ms|s|min|h|d) +{NUMBER} to {NUMBER} +{NUMBER} (J|kWh|MWh|GWh) "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("figure", "boundary", "unit_of"),
    [("finish_seconds", 5400.0, unit_of_seconds), ("run_joules", 7.2e9, unit_of_joules)],
)
def test_one_unit_for_the_times_and_energies_of_a_table(
    plan: Plan, figure: str, boundary: float, unit_of: Callable[[float], tuple[str, float]]
) -> None:
    asked = ("llama-3-8b", "--cluster", "h100x64", "--micro-batch", 1)

    def of_rows(tokens: int) -> list[float]:
        rows = plan.json(*asked, "--tokens", tokens)["choices"]
        return [row["estimate"][figure]["middle"] for row in rows]

    # As many steps as bring the rows to both sides of where the unit changes.
    one = of_rows(1)
    batch = plan.json("explain", *asked, "--choose", 1)["configuration"]
    steps = round(boundary / math.sqrt(min(one) * max(one)))
    tokens = steps * batch["batch"] * batch["sequence"]
    alone = {unit_of(value)[0] for value in of_rows(tokens)}
    assert len(alone) == 2, "each row alone has a unit of its own, else nothing is tested"
    _, out, _ = plan(*asked, "--tokens", tokens)
    rows = [line for line in out.splitlines() if re.match(r" *\d+[*k ]", line)]
    assert len(rows) > 5
    found = [re.search(TIME_AND_ENERGY, row) for row in rows]
    assert len({units.groups() for units in found if units}) == 1, out
    assert None not in found, out


def test_longer_sequences_than_the_positions_are_said(plan: Plan) -> None:
    asked = ("gpt2", "--cluster", "h100x8", *SMALL, "--top", 1)
    longer = plan.json(*asked, "--sequence", 4096)["assumed"]
    assert any("reach 4,096 tokens" in each and "end at 1,024" in each for each in longer)
    within = plan.json(*asked, "--sequence", 1024)["assumed"]
    assert not any("positions" in each for each in within)


@pytest.mark.slow
def test_a_larger_batch_is_named_only_where_stopping_earlier_costs_more_loss(plan: Plan) -> None:
    small = ("gpt2", "--cluster", "h100x64", *SMALL, "--top", 1, "--tokens", "300B")
    worth = plan.json(*small, "--batch", 64)["what_ifs"]
    assert any("twice the batch" in each["change"] for each in worth)
    far = plan.json(*small[:-1], "3B", "--batch", 8192)["what_ifs"]
    assert not any("twice the batch" in each["change"] for each in far)


@pytest.mark.slow
def test_a_budget_and_a_figure_to_rank_by(plan: Plan) -> None:
    asked = ("llama-3-8b", "--cluster", "h100x64", "--precision", "bf16", "--framework", "any")
    free = plan.json(*asked, "--micro-batch", 1)
    hours = free["choices"][0]["estimate"]["finish_seconds"]["middle"] / 3600
    tight = plan.json(*asked, "--micro-batch", 1, "--budget", f"{1.05 * hours} h", "--by", "kwh")
    assert tight["within"] < free["within"]
    joules = [each["estimate"]["run_joules"]["middle"] for each in tight["choices"]]
    assert joules[0] == min(joules)
    for each in tight["choices"]:
        assert each["estimate"]["finish_seconds"]["middle"] / 3600 <= 1.05 * hours
    said = plan.refused(*asked, "--micro-batch", 1, "--budget", "1 h")
    assert "the least is" in said


def test_a_deadline_gives_a_probability(plan: Plan) -> None:
    asked = ("gpt2", "--cluster", "h100x8", *SMALL, "--top", 1)
    [early] = plan.json(*asked, "--deadline", "1 min")["choices"]
    [late] = plan.json(*asked, "--deadline", "100 d")["choices"]
    assert early["estimate"]["on_time"] < 0.01
    assert late["estimate"]["on_time"] > 0.99


def test_the_probability_of_a_deadline_goes_with_the_interval(plan: Plan) -> None:
    asked = ("llama-3-8b", "--cluster", "h100x64", *SMALL, "--top", 1)
    [free] = plan.json(*asked)["choices"]
    takes = free["estimate"]["finish_seconds"]
    for end, share in (("low", 0.1), ("high", 0.9)):
        deadline = f"{takes[end] / 3600} h"
        found = plan.json("explain", *asked[:-2], "--choose", 1, "--deadline", deadline)
        # The interval counts doubt in the failure rates, too, which is little here.
        assert found["estimate"]["on_time"] == pytest.approx(share, abs=0.02)


def test_a_queue_with_a_time_limit_adds_links_waits_and_restarts(plan: Plan) -> None:
    asked = ("llama-3-8b", "--cluster", "h100x64", "--tokens", "300B", *SMALL)
    document = plan.json(*asked, "--wall-time", "24h", "--queue-wait", "6h")
    alone, queue = document["choices"][0]["estimate"], document["queue"]
    trained = alone["finish_seconds"]["middle"]
    assert queue["links"] == math.ceil(trained / 86400)
    assert queue["wait_seconds"] >= queue["links"] * 6 * 3600
    lost = alone["last_save_seconds"] + alone["resume_seconds"]
    assert queue["overhead_seconds"] >= queue["links"] * lost > 0
    whole = trained + queue["wait_seconds"] + queue["overhead_seconds"]
    assert queue["seconds"] == pytest.approx(whole)


def test_a_file_system_that_others_use_slows_saves_and_costs_goodput(plan: Plan) -> None:
    asked = ("llama-3-8b", "--cluster", "h100x64", "--tokens", "300B", *SMALL, "--top", 1)
    alone = plan.json(*asked)
    busy = plan.json(*asked, "--file-system-load", "0.8")
    assert alone["file_system"] is None
    assert busy["file_system"]["slowdown"] == pytest.approx(5.0)
    before, after = (each["choices"][0]["estimate"] for each in (alone, busy))
    assert after["last_save_seconds"] > 2.0 * before["last_save_seconds"]
    assert after["resume_seconds"] > before["resume_seconds"]
    assert after["ettr"]["figure"]["middle"] < before["ettr"]["figure"]["middle"]
    assert after["checkpoint_seconds"] > before["checkpoint_seconds"], "fewer saves pay now"
    save, period = after["last_save_seconds"], after["checkpoint_seconds"]
    assert busy["file_system"]["save_waste"] == pytest.approx(save / (save + period))
    code, _, said = plan(*asked, "--file-system-load", "1")
    assert code == 2
    assert "--file-system-load = 1: give a share of the bandwidth from 0 to below 1" in said


@pytest.mark.slow
def test_a_job_that_takes_turns_shares_its_file_system(plan: Plan, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert plan.json(job, "--cluster", "h100x64", "--top", 1)["file_system"] is None
    turns = f'checkpoint.turns="{tmp_path}"'
    asked = (job, turns, "checkpoint.turn_load=0.5", "--cluster", "h100x64", "--top", 1)
    assert plan.json(*asked)["file_system"]["slowdown"] == pytest.approx(2.0)
    code, said, _ = plan(*asked)
    assert code == 0
    assert "others ask for 50% of its bandwidth: saves and restores take 2 times" in said
    code, _, said = plan(*asked[:2], "checkpoint.turn_load=1", "--cluster", "h100x64")
    assert code == 2
    assert "checkpoint.turn_load" in said
    assert "it should be below 1" in said
    code, said, _ = plan("explain", *asked[:3], "--cluster", "h100x64")
    assert "50% of 8e+09 B/s is asked for by others" in said


def test_prices_give_money_and_a_region_gives_carbon(plan: Plan) -> None:
    asked = ("gpt2", "--cluster", "h100x8", *SMALL, "--top", 1)
    [paid] = plan.json(*asked, "--price", "2.5", "--region", "FR")["choices"]
    estimate = paid["estimate"]
    hours = estimate["finish_seconds"]["middle"] / 3600
    assert estimate["money"]["middle"] == pytest.approx(2.5 * 8 * hours)
    assert estimate["carbon_grams"]["middle"] > 0


def test_a_job_is_told_what_to_change(plan: Plan, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    found = plan.json(job, "--cluster", "h100x64")
    assert found["own"]["fits"]
    assert "recompute full -> none" in found["advice"]
    best = found["choices"][0]["estimate"]["finish_seconds"]["middle"]
    assert best < found["own"]["finish_seconds"]["middle"]
    # Outlast's own settings know no recomputation of attention alone, and no fp8.
    for each in found["choices"]:
        assert each["configuration"]["recompute"] in ("none", "full")
        assert each["configuration"]["precision"] == "bf16"


@pytest.mark.slow
def test_a_job_that_is_the_best_already_is_told_so(plan: Plan, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    settings = plan.json(job, "--cluster", "h100x64")["settings"]
    assert "train.activation_checkpointing=false" in settings
    found = plan.json(job, *settings, "--cluster", "h100x64")
    assert found["advice"].startswith("nothing in the layout")
    assert found["settings"] == []


@pytest.mark.slow
def test_an_impossible_job_is_ranked_and_told_why(plan: Plan, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    asked = (job, "parallel.tensor=8", "parallel.shard=8", "--cluster", "h100x64")
    found = plan.json(*asked)
    assert found["own"] is None
    assert "tensor = 8 does not divide kv_heads = 4" in found["own_problem"]
    assert found["choices"]
    assert "kv_heads" in plan.refused("explain", *asked)
    mended = plan.json(job, *found["settings"], "--cluster", "h100x64")
    assert mended["own_problem"] == ""
    assert mended["advice"].startswith("nothing in the layout")


def test_explain_names_formula_values_constants_and_sources(plan: Plan) -> None:
    asked = ("llama-3-8b", "--cluster", "h100x64", "--tensor", 2, "--pipeline", 2, "--shard", 3)
    code, out, _ = plan("explain", *asked)
    assert code == 0
    assert "TP 2" in out
    assert "= batches * blocks" in out
    assert "Narayanan et al. 2021 (2104.04473)" in out
    assert "matmul_efficiency = " in out
    assert "by stage of the pipeline:" in out
    assert "progress (ETTR)" in out
    assert "failures.device = " in out
    found = plan.json("explain", *asked)
    for name in ("step_seconds", "memory", "joules", "ettr", "loss_difference"):
        total = found["estimate"][name]
        summed = math.fsum(term["value"] for term in total["terms"])
        assert summed == pytest.approx(total["figure"]["middle"], rel=1e-9, abs=1e-12)
        for term in total["terms"]:
            assert term["formula"]
            assert term["source"]


def test_explain_wraps_on_a_terminal(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = plan("explain", "gpt2", "--cluster", "h100x8", "--shard", "parameters", *SMALL)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert max(len(line) for line in plain.splitlines()) <= 80


@pytest.mark.parametrize("more", [(), ("--tensorize", "low_rank:0.25"), ("--precision", "fp8")])
def test_no_interval_reaches_beyond_the_peak(plan: Plan, more: tuple[str, ...]) -> None:
    layout = ("--tensor", 8, "--pipeline", 8, "--schedule", "zero_bubble", "--shard", 1)
    asked = ("llama-3-8b", "--cluster", "h100x64", *layout, "--sequence", 2048, *more)
    found = plan.json("explain", *asked)["estimate"]
    step = found["step_seconds"]["figure"]
    assert step["high"] > 4.0 * step["middle"], "a wide interval, else nothing is tested"
    # Low ranks compute less than the FLOPs that count for the dense model.
    assert found["utilisation"]["high"] <= (1.1 if "--tensorize" not in more else 3.0)
    assert found["utilisation"]["high"] > found["utilisation"]["middle"]
    takes = found["finish_seconds"]
    assert takes["low"] / takes["middle"] >= 0.99 * step["low"] / step["middle"]


def test_data_ranks_are_what_is_left_over(plan: Plan) -> None:
    found = plan.json("explain", "llama-3-8b", "--cluster", "h100x64", "--tensor", 8, *SMALL)
    assert found["configuration"]["data"] == 8
    assert found["configuration"]["tensor"] == 8


def test_more_devices_than_were_ever_measured_are_flagged(plan: Plan) -> None:
    asked = ("llama-3.1-405b", "--cluster", "h100x100000", *SMALL, "--top", 1)
    [found] = plan.json(*asked)["choices"]
    beyond = found["estimate"]["finish_seconds"]["extrapolated"]
    assert any("devices = 100000" in each for each in beyond)
    _, out, _ = plan(*asked)
    assert "extrapolated" in out


def test_figures_that_are_beyond_alone_say_so(plan: Plan) -> None:
    asked = (
        "llama-3-8b",
        "--cluster",
        "h100x64",
        *SMALL,
        "--top",
        1,
        "--tensorize",
        "low_rank:0.5",
    )
    [found] = plan.json(*asked, "--tokens", "1B")["choices"]
    said = {" ".join(line.split()) for line in plan(*asked, "--tokens", "1B")[1].splitlines()}
    estimate = found["estimate"]
    shared = estimate["finish_seconds"]["extrapolated"]
    figures = {"loss": estimate["loss_difference"]["figure"], "energy": estimate["run_joules"]}
    for name, figure in figures.items():
        alone = [each for each in figure["extrapolated"] if each not in shared]
        assert alone
        for phrase in alone:
            assert any(f"extrapolated {name}: {phrase}"[:60] in line for line in said)


def test_one_device(plan: Plan) -> None:
    [found] = plan.json("gpt2", "--cluster", "h100x1", *SMALL, "--top", 1)["choices"]
    assert found["configuration"]["data"] == 1
    assert "nothing fits" in plan.refused("llama-3-8b", "--cluster", "h100x1", *SMALL)


def test_uneven_stages_are_flagged(plan: Plan) -> None:
    asked = ("--cluster", "h100x1024", "--tensor", 8, "--pipeline", 16, "--shard", 1)
    found: Any = plan.json("explain", "llama-3.1-405b", *asked)
    assert any("126" in each and "uneven" in each for each in found["warnings"])


@pytest.mark.slow
def test_mechanisms_are_searched(plan: Plan) -> None:
    found = plan.json(
        "gpt2", "--cluster", "h100x8", *SMALL, "--guard", "off", "--guard", "full",
        "--tensorize", "dense", "--tensorize", "low_rank:0.5",
    )  # fmt: skip
    plain = plan.json("gpt2", "--cluster", "h100x8", *SMALL)
    assert found["searched"] == 4 * plain["searched"]
    assert "low_rank" in {each["settings"]["tensorize_form"] for each in found["choices"]}


@pytest.mark.slow
def test_the_program_itself_ends_quickly(tmp_path: Path) -> None:
    """As a user starts it: one process, no torch."""
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "outlast", "plan", "gpt2", "--cluster", "h100x8",
         *SMALL],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )  # fmt: skip
    assert found.returncode == 0
    assert "| torch" not in found.stderr
    assert "transformers" not in found.stderr
