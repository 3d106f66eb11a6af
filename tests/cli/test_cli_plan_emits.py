"""What ``outlast plan emit`` keeps of its source, and what it says of the mechanisms of a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from plan_commands import SMALL, Plan, write_config, write_job

from outlast.cli.plan_source import with_whole_paths
from outlast.job import load_job, tiers_of
from outlast.plan.configuration import Configuration
from outlast.plan.huggingface import published, transformer_of
from outlast.plan.targets import problem

HERE = ("--cluster", "h100x64")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Plan:
    return Plan(monkeypatch, capfd)


def more_of_a_job(folder: Path) -> Path:
    """A job with settings that no plan decides."""
    job = write_job(folder)
    job.write_text(
        job.read_text()
        + '[optimizer]\nname = "muon"\nweight_decay = 0.3\n'
        + '[guard]\npolicy = "linear"\ncorrect = false\n'
        + "[checkpoint]\nevery_steps = 77\n"
    )
    return job


def test_a_job_keeps_what_the_plan_does_not_change(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = more_of_a_job(tmp_path)
    data = ("data.source=text", "data.train=['texts/*.txt', '/a.txt']")
    asked = ("emit", job, *data, *HERE, "--target", "outlast", "--output", tmp_path / "out")
    code, _, said = plan(*asked)
    assert code == 0, said
    written = load_job(tmp_path / "out" / "job.toml")
    assert (written.optimizer.name, written.optimizer.weight_decay) == ("muon", 0.3)
    assert (written.guard.policy, written.guard.correct) == ("linear", False)
    assert written.checkpoint.every_steps == 77
    # It is started in another folder.
    assert written.data.train == [str(tmp_path / "texts/*.txt"), "/a.txt"]
    own = load_job(job, list(data))
    changed = {"run", "model", "data", "train", "parallel", "launch"}
    for section in set(type(own).model_fields) - changed:
        assert getattr(written, section) == getattr(own, section), section
    kept = own.train.model_copy(
        update={
            name: getattr(written.train, name)
            for name in ("micro_batch_size", "activation_checkpointing")
        }
    )
    assert written.train == kept


def test_a_job_keeps_the_folder_of_its_weights(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = write_job(tmp_path)
    config = f'config = "{tmp_path / "model" / "config.json"}"'
    job.write_text(job.read_text().replace(config, 'directory = "model"'))
    asked = ("emit", job, *HERE, "--target", "outlast", "--output", tmp_path / "out")
    code, _, said = plan(*asked)
    assert code == 0, said
    written = load_job(tmp_path / "out" / "job.toml").model
    assert (written.directory, written.config) == (str(tmp_path / "model"), None)


def test_all_files_of_a_job_are_written_by_their_whole_paths(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    job = write_job(tmp_path)
    here = (
        ("data.source", "text", "text"),
        ("data.train", "['~/texts/*.txt', 'more.txt']", ["/home/me/texts/*.txt", "{}/more.txt"]),
        ("data.tokenizer", "~/tokenizer.json", "/home/me/tokenizer.json"),
        ("checkpoint.turns", "turns", "{}/turns"),
        ("checkpoint.fast", "~/fast", "/home/me/fast"),
        ("checkpoint.mirror", "mirror", "{}/mirror"),
        ("checkpoint.transfer_plan", "transfers.toml", "{}/transfers.toml"),
        ("recover.memory", "memory", "{}/memory"),
        ("energy.tariff", "tariff.toml", "{}/tariff.toml"),
        ("energy.sources", "['gpu', 'file:joules']", ["gpu", "file:{}/joules"]),
        ("log.mlflow_experiment", "mine", "mine"),
        ("log.mlflow_uri", "sqlite:///mlflow.db", "sqlite:///{}/mlflow.db"),
    )
    said = [f"{name}={value}" for name, value, _ in here]
    asked = (
        "emit",
        job,
        *said,
        *HERE,
        "--own",
        "--target",
        "outlast",
        "--output",
        tmp_path / "out",
    )
    code, _, why = plan(*asked)
    assert code == 0, why
    written = load_job(tmp_path / "out" / "job.toml").model_dump()
    for name, _, whole in here:
        section, key = name.split(".")
        wanted = json.loads(json.dumps(whole).replace("{}", str(tmp_path)))
        assert written[section][key] == wanted, name


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("checkpoint", "mirror", "s3://bucket/runs"),
        ("staging", "directory", "$SLURM_TMPDIR/data"),
        ("data", "tokenizer", "byte"),
        ("checkpoint", "turns", ""),
        ("log", "mlflow_uri", "http://tracking:5000"),
    ],
)
def test_what_is_no_path_of_this_machine_stays(section: str, key: str, value: str) -> None:
    assert with_whole_paths({section: {key: value}}) == {section: {key: value}}


def test_mechanisms_that_were_chosen_are_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = more_of_a_job(tmp_path)
    chosen = (
        *("--guard", "off", "--recover", "restart:1", "--tier", "memory+shared"),
        *("--tensorize", "low_rank:0.5", "--checkpoint-seconds", 600),
    )
    asked = ("emit", job, *HERE, *chosen, "--target", "outlast", "--output", tmp_path / "out")
    code, _, said = plan(*asked)
    assert code == 0, said
    written = load_job(tmp_path / "out" / "job.toml")
    assert (written.guard.policy, written.guard.correct) == ("off", False)
    assert (written.recover.mode, written.recover.parity) == ("restart", 1)
    assert written.checkpoint.fast == "/dev/shm/mine"
    assert (written.tensorize.form, written.tensorize.rank) == ("low_rank", 0.5)
    monkeypatch.chdir(tmp_path / "out")
    again = plan.json("explain", "job.toml", *HERE)
    settings = again["settings"]
    assert settings["guard"] == "off"
    assert settings["tiers"] == ["memory", "shared"]
    assert settings["recovery"]["parity"] == 1
    assert (settings["tensorize_form"], settings["tensorize_rank"]) == ("low_rank", 0.5)
    assert settings["checkpoint_seconds"] == pytest.approx(600, rel=0.05)


def test_a_job_that_keeps_nothing_in_memory_is_written_so(plan: Plan, tmp_path: Path) -> None:
    job = more_of_a_job(tmp_path)
    asked = ("emit", job, "checkpoint.tiers=['shared']", *HERE, "--tier", "memory+shared")
    code, _, said = plan(*asked, "--target", "outlast", "--output", tmp_path / "out")
    assert code == 0, said
    written = load_job(tmp_path / "out" / "job.toml")
    assert written.checkpoint.fast == "/dev/shm/mine"
    assert tiers_of(written.checkpoint, written.recover) == ["disk", "shared"]


def test_a_source_without_mechanisms_gives_a_job_without_them(plan: Plan, tmp_path: Path) -> None:
    asked = ("emit", "gpt2", "--cluster", "h100x8", *SMALL, "--target", "outlast")
    assert plan(*asked, "--output", tmp_path)[0] == 0
    written = load_job(tmp_path / "job.toml")
    assert (written.guard.policy, written.recover.mode) == ("off", "off")


def test_the_settings_of_a_ranking_have_its_mechanisms(plan: Plan, tmp_path: Path) -> None:
    job = more_of_a_job(tmp_path)
    found = plan.json(job, *HERE, "--guard", "linear", "--guard", "off", "--top", 1)
    assert found["choices"][0]["settings"]["guard"] == "off"
    assert "guard.policy=off" in found["settings"]


def test_settings_say_all_but_where_checkpoints_shall_go(plan: Plan, tmp_path: Path) -> None:
    job = more_of_a_job(tmp_path)
    found = plan.json(job, *HERE, "--guard", "off", "--tier", "peer+shared", "--top", 1)
    assert "guard.policy=off" in found["settings"]
    assert not any(each.startswith("checkpoint.") for each in found["settings"])
    assert "tiers shared -> peer+shared" in found["advice"]


@pytest.mark.slow
def test_mechanisms_of_outlast_are_refused_for_others(plan: Plan, tmp_path: Path) -> None:
    job, out = more_of_a_job(tmp_path), tmp_path / "out"
    asked = ("emit", job, *HERE, "--target", "torchtitan", "--output", out)
    for option, value, name in (
        ("--guard", "full", "guard = full"),
        ("--recover", "restart:1", "recovery = restart:1"),
        ("--tier", "memory+shared", "tiers = memory+shared"),
        ("--tensorize", "low_rank:0.5", "tensorize_form = low_rank"),
    ):
        said = plan.refused(*asked, option, value)
        assert f"{name} cannot be expressed for torchtitan" in said
        assert f"leave out {option}" in said
    assert not out.exists()
    said = plan.refused(
        *("emit", job, *HERE, "--target", "outlast", "--output", out, "--tier", "peer+shared")
    )
    assert "tiers = peer+shared cannot be expressed for Outlast" in said


def test_another_framework_is_predicted_without_the_mechanisms_of_the_job(
    plan: Plan, tmp_path: Path
) -> None:
    job = more_of_a_job(tmp_path)
    plan("emit", job, *HERE, "--target", "torchtitan", "--output", tmp_path / "out")
    text = (tmp_path / "out" / "torchtitan_run.py").read_text()
    assert "Predicted: failures" in text
    assert "guard" not in text.partition("from functools")[0]


@pytest.mark.parametrize("name", ["gpt2", "qwen3-8b", "deepseek-v2-lite"])
def test_a_published_model_is_written_as_itself(plan: Plan, tmp_path: Path, name: str) -> None:
    asked = ("emit", name, *HERE, *SMALL, "--sequence", 512, "--target", "accelerate")
    assert plan(*asked, "--output", tmp_path)[0] == 0
    table = json.loads((tmp_path / "model" / "config.json").read_text())
    assert transformer_of(table).parameters == published(name).parameters


SAID = {
    "torchtitan": (
        "torchtitan_run.py",
        {
            "local_batch_size=": "micro_batch",
            "data_parallel_shard_degree=": "data",
            "tensor_parallel_degree=": "tensor",
        },
    ),
    "megatron": (
        "megatron.sh",
        {
            "--micro-batch-size ": "micro_batch",
            "--tensor-model-parallel-size ": "tensor",
            "--pipeline-model-parallel-size ": "pipeline",
        },
    ),
    "deepspeed": ("ds_config.json", {'"train_micro_batch_size_per_gpu": ': "micro_batch"}),
    "outlast": ("job.toml", {"micro_batch_size = ": "micro_batch", "tensor = ": "tensor"}),
}
"""By target, a file and what of the plan's sizes stands in it."""


def sizes_in(folder: Path, target: str) -> dict[str, int]:
    """What a file says, by the names of `Configuration`."""
    name, said = SAID[target]
    text = (folder / name).read_text()
    found = {field: re.search(f"{re.escape(key)}([0-9]+)", text) for key, field in said.items()}
    return {field: int(match.group(1)) for field, match in found.items() if match}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["deepspeed", "torchtitan", "megatron"])
def test_the_search_keeps_to_the_target(plan: Plan, tmp_path: Path, target: str) -> None:
    source = write_config(tmp_path / "mine")
    [best] = plan.json(source, *HERE, "--framework", target, "--top", 1)["choices"]
    code, _, said = plan("emit", source, *HERE, "--target", target, "--output", tmp_path / "out")
    assert code == 0, said
    written = sizes_in(tmp_path / "out", target)
    assert set(written) == set(SAID[target][1].values())
    assert written == {name: best["configuration"][name] for name in written}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "target"),
    [("torchtitan", "deepspeed"), ("any", "outlast"), ("nemo", "megatron")],
)
def test_the_best_row_that_another_target_can_express_is_taken(
    plan: Plan, tmp_path: Path, framework: str, target: str
) -> None:
    source = write_config(tmp_path / "mine")
    asked = ("emit", source, *HERE, "--framework", framework, "--target", target)
    code, _, said = plan(*asked, "--output", tmp_path / "out")
    assert code == 0, said
    written = sizes_in(tmp_path / "out", target)
    rows = plan.json(source, *HERE, "--framework", framework, "--top", 40)["choices"]
    able = next(
        each["configuration"]
        for each in sorted(rows, key=lambda row: row["estimate"]["finish_seconds"]["middle"])
        if problem(target, transformer_of(source), Configuration(**each["configuration"])) is None
    )
    assert written == {name: able[name] for name in written}


def test_a_row_that_is_chosen_is_the_one_of_the_ranking(plan: Plan, tmp_path: Path) -> None:
    source = write_config(tmp_path / "mine")
    asked = ("--framework", "torchtitan", *HERE)
    [first] = plan.json(source, *asked, "--top", 1)["choices"]
    assert first["configuration"]["precision"] == "fp8", "else DeepSpeed can say it"
    out = ("--target", "deepspeed", "--output", tmp_path / "out")
    said = plan.refused("emit", source, *asked, "--choose", 1, *out)
    assert 'precision = "fp8" cannot be expressed for DeepSpeed' in said


def test_what_a_framework_is_not_told_of_a_model_is_said(plan: Plan, tmp_path: Path) -> None:
    for name, phrase in (
        ("gpt2", "parameters of biases, learned positions"),
        ("deepseek-v2-lite", ""),
        ("llama-3-8b", ""),
        ("qwen3-8b", "9,216 parameters of biases"),
    ):
        asked = ("emit", name, *HERE, *SMALL, "--target", "megatron", "--output", tmp_path / name)
        code, _, said = plan(*asked)
        if name == "deepseek-v2-lite":
            assert "attention with other matrices" in said
            continue
        assert code == 0, said
        head = (tmp_path / name / "megatron.sh").read_text().partition("set -euo")[0]
        told = " ".join(head.replace("#", " ").split())
        assert (phrase in told) if phrase else ("Not written" not in told)
