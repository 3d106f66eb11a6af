"""``outlast plan pareto, check, emit, simulate`` and the lists."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path

import pytest
from plan_commands import SMALL, Plan, write_config, write_job

from outlast.job import load_job

SCENARIO = """
[run]
nodes = 64
interval_seconds = 1200
productive_days = 20

[[failure]]
name = "device"
per_node_day = 0.01
repair_hours = 24

[[tier]]
name = "shared"
blocked_seconds = 5
restore_seconds = 60

[restart]
restart_seconds = 120
spares = 4
"""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Plan:
    return Plan(monkeypatch, capfd)


def test_pareto_writes_a_page_and_files(plan: Plan, tmp_path: Path) -> None:
    page, table = tmp_path / "out" / "front.html", tmp_path / "front.csv"
    asked = ("llama-3-8b", "--cluster", "h100x64", "--micro-batch", 1)
    code, out, _ = plan("pareto", *asked, "--html", page, "--csv", table)
    assert code == 0
    assert f"wrote {page}" in out
    text = page.read_text()
    assert "llama-3-8b on h100x64" in text
    assert "<script" in text
    found = plan.json("pareto", *asked)
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == len(found["points"]) > 1
    assert [float(row["hours"]) for row in rows] == pytest.approx(
        [point["figures"]["hours"]["middle"] for point in found["points"]]
    )
    assert found["kind"] == "predicted"
    # How a run continues without a checkpoint is said as its option is.
    assert {row["recovery"] for row in rows} == {"off"}
    assert '"recovery":"off"' in text


def test_pareto_is_ordered_by_what_is_asked_for(plan: Plan, tmp_path: Path) -> None:
    table = tmp_path / "front.csv"
    asked = ("llama-3-8b", "--cluster", "h100x64", "--micro-batch", 1, "--price", 2)
    assert plan("pareto", *asked, "--by", "headroom_bytes", "--csv", table)[0] == 0
    free = [float(row["headroom_bytes"]) for row in csv.DictReader(table.open())]
    assert free == sorted(free, reverse=True)
    assert "not known" in plan.refused("pareto", *asked[:-2], "--by", "money")


def test_pareto_page_with_a_budget(plan: Plan, tmp_path: Path) -> None:
    page = tmp_path / "front.html"
    asked = ("gpt2", "--cluster", "h100x8", *SMALL, "--budget", "10 d")
    assert plan("pareto", *asked, "--html", page)[0] == 0
    assert "keep to the budget" in page.read_text()


def test_pareto_says_that_nothing_was_written(plan: Plan, tmp_path: Path) -> None:
    code, out, _ = plan("pareto", "gpt2", "--cluster", "h100x8", *SMALL)
    assert code == 0
    assert "nothing was written" in out
    blocked = tmp_path / "file"
    blocked.write_text("")
    asked = ("pareto", "gpt2", "--cluster", "h100x8", *SMALL, "--html", blocked / "a.html")
    assert "cannot be written" in plan.refused(*asked)


def test_check_answers_by_exit_code(plan: Plan, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    asked = ("check", job, "--cluster", "h100x64")
    code, out, _ = plan(*asked, "--budget", "100 h")
    assert code == 0
    assert out.startswith("yes: ")
    assert "extrapolated: no run of outlast on h100-sxm was calibrated" in out
    code, out, _ = plan(*asked, "--budget", "1 h", "--budget", "1 kWh")
    assert code == 1
    assert "time to finish is" in out
    assert "energy is" in out
    assert "of at most" not in out
    assert plan(*asked, "--budget", "1 h", "--quiet") == (1, "", "")
    assert "carbon" in plan.refused(*asked, "--budget", "1 tCO2")


def test_check_wants_memory_and_headroom(plan: Plan) -> None:
    asked = ("check", "llama-3-8b", "--cluster", "h100x64", *SMALL)
    code, out, _ = plan(*asked, "--tensor", 1)
    assert code == 1
    assert "it does not fit" in out
    assert plan(*asked, "--tensor", 8, "--shard", "parameters", "--headroom", "20%")[0] == 0
    code, out, _ = plan(*asked, "--tensor", 8, "--shard", "parameters", "--headroom", "70 GiB")
    assert code == 1
    assert "free memory is" in out
    assert "--headroom = 200%" in plan.refused(*asked, "--headroom", "200%")


def test_check_surely_is_stricter(plan: Plan, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    found = plan.json("explain", job, "--cluster", "h100x64")
    hours = found["estimate"]["finish_seconds"]["middle"] / 3600
    asked = ("check", job, "--cluster", "h100x64", "--budget", f"{1.01 * hours} h")
    assert plan(*asked)[0] == 0
    assert plan(*asked, "--surely")[0] == 1


def test_check_of_a_source_without_a_layout_asks_whether_any_does(plan: Plan) -> None:
    asked = ("check", "llama-3-8b", "--cluster", "h100x64", *SMALL)
    assert plan(*asked, "--budget", "50 d")[0] == 0
    code, out, _ = plan(*asked, "--budget", "1 h")
    assert code == 1
    assert "the least is" in out
    code, out, _ = plan("check", "llama-3-8b", "--cluster", "h100x1", *SMALL)
    assert code == 1
    assert "nothing fits" in out
    code, out, _ = plan(*asked, "--budget", "1 h", "--json")
    assert code == 1
    assert json.loads(out)["holds"] is False


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ("torchtitan", "torchtitan_run.py"),
        ("megatron", "megatron.sh"),
        ("deepspeed", "ds_config.json"),
        ("accelerate", "accelerate.yaml"),
        ("outlast", "job.toml"),
    ],
)
def test_emit_writes_what_the_target_reads(
    plan: Plan, tmp_path: Path, target: str, file: str
) -> None:
    source = write_config(tmp_path / "mine")
    out = tmp_path / target
    asked = ("emit", source, "--cluster", "h100x64", "--target", target, "--output", out)
    code, said, _ = plan(*asked)
    assert code == 0
    assert f"wrote {out / file}" in said
    text = (out / file).read_text()
    if file.endswith(".json"):
        json.loads(text)
    else:
        assert "Predicted: fits yes" in text


@pytest.mark.slow
def test_emitted_job_of_a_job_is_a_job_and_is_the_best(plan: Plan, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    best = plan.json(job, "--cluster", "h100x64")["choices"][0]["configuration"]
    asked = ("emit", job, "--cluster", "h100x64", "--target", "outlast")
    plan(*asked, "--output", tmp_path / "a")
    written = load_job(tmp_path / "a" / "job.toml")
    assert written.train.micro_batch_size == best["micro_batch"]
    assert not written.train.activation_checkpointing
    assert written.train.steps == 20000
    plan(*asked, "--output", tmp_path / "b", "--own", "--set", "train.steps=7")
    written = load_job(tmp_path / "b" / "job.toml")
    assert written.train.activation_checkpointing
    assert written.train.steps == 7


def test_emit_writes_a_batch_script_for_another_target(plan: Plan, tmp_path: Path) -> None:
    source = write_config(tmp_path / "mine")
    asked = ("emit", source, "--cluster", "h100x64", "--target", "sbatch", "--output", tmp_path)
    code, _, _ = plan(*asked, "--launches", "torchtitan", "--partition", "gpu")
    assert code == 0
    script = (tmp_path / "job.sbatch").read_text()
    assert "#SBATCH --nodes=8" in script
    assert "#SBATCH --partition=gpu" in script
    assert (tmp_path / "torchtitan.sh").exists()


def test_emit_refuses_in_a_sentence_and_writes_nothing(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ("emit", "llama-3-8b", "--cluster", "h100x64", "--output", out)
    assert "target = 'jax'" in plan.refused(*asked, "--target", "jax")
    expert = ("--target", "deepspeed", "--framework", "any", "--context", 2, "--shard", 3, *SMALL)
    assert "context" in plan.refused(*asked, *expert)
    assert not out.exists()


def test_simulate_a_scenario_beside_the_closed_form(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(SCENARIO)
    code, out, _ = plan("simulate", file, "--trials", 50)
    assert code == 0
    assert "simulated" in out
    assert "closed form" in out
    found = plan.json("simulate", file, "--trials", 50, "--seed", 3)
    assert found == plan.json("simulate", file, "--trials", 50, "--seed", 3)
    assert found["trials"] == 50
    assert abs(found["difference"]) < 0.01
    played = found["simulated"]
    assert played["ettr"] + sum(played["lost_share"].values()) == pytest.approx(1.0)


def test_simulate_a_planned_run(plan: Plan) -> None:
    found = plan.json(
        "simulate", "llama-3-8b", "--cluster", "h100x64", "--shard", 3, *SMALL, "--trials", 20
    )
    assert found["nodes"] == 8
    explained = plan.json("explain", "llama-3-8b", "--cluster", "h100x64", "--shard", 3, *SMALL)
    ettr = explained["estimate"]["ettr"]["figure"]["middle"]
    assert found["closed_form"]["ettr"] == pytest.approx(ettr)


def test_simulate_refuses_what_is_no_scenario(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(SCENARIO.replace("per_node_day", "per_day"))
    assert "per_day" in plan.refused("simulate", file)
    file.write_text("[run]\nnodes = 4\n")
    assert "lacks interval_seconds" in plan.refused("simulate", file)
    assert "cannot be read" in plan.refused("simulate", tmp_path / "nowhere.toml")


def test_lists(plan: Plan) -> None:
    clusters = plan.json("clusters")
    named = {each["name"]: each for each in clusters["clusters"]}
    assert named["h100x64"]["devices"] == 64
    assert tomllib.loads(Path(named["h100x64"]["file"]).read_text())["cluster"]["nodes"] == 8
    assert "h100-sxm" in clusters["parts"]
    models = {each["name"]: each for each in plan.json("models")}
    assert models["llama-3-8b"]["parameters"] == 8030261248
    assert {each["name"] for each in plan.json("targets")} >= {"outlast", "torchtitan", "sbatch"}


@pytest.mark.slow
def test_a_cluster_that_nobody_measured_is_flagged_wherever_a_user_looks(
    plan: Plan, tmp_path: Path
) -> None:
    flag = "not calibrated on this cluster"
    asked = ("llama-3-8b", "--cluster", "h100x64", "--framework", "nemo", *SMALL)
    code, out, _ = plan(*asked)
    assert code == 0
    assert "extrapolated" in out
    assert f"first; {flag}" in " ".join(out.split())
    choices = json.loads(plan(*asked, "--json")[1])["choices"]
    assert {each["estimate"]["calibrated"] for each in choices} == {False}
    for each in choices:
        assert flag in each["estimate"]["step_seconds"]["figure"]["extrapolated"][0]
    points = json.loads(plan("pareto", *asked, "--json")[1])["points"]
    assert all(flag in each["extrapolated"][0] for each in points)
    to = ("--target", "torchtitan", "--output", tmp_path)
    assert plan("emit", "llama-3-8b", "--cluster", "h100x64", *SMALL, *to)[0] == 0
    assert flag in "".join(path.read_text() for path in tmp_path.iterdir())


@pytest.mark.slow
def test_names_of_published_frameworks_are_taken(plan: Plan) -> None:
    for name in ("mosaic", "Megatron-Bridge", "llm-foundry"):
        code, out, _ = plan("gpt2", "--cluster", "h100x8", "--framework", name, *SMALL)
        assert code == 0
        assert "Ranked by" in out
    assert "did you mean 'llm-foundry'" in plan.refused(
        "gpt2", "--cluster", "h100x8", "--framework", "mosiac"
    )
