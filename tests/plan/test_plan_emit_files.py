"""Files that a plan is written to: their text, their heads, and all of them or none."""

import dataclasses
import json
import subprocess

import pytest
import yaml
from plan_emit_runs import CLUSTER, DENSE, GOLDEN, MIXTURE, RUNS, SETTINGS, configured, golden_files

from outlast.errors import PlanError
from outlast.plan.emit import EmitSettings, Plan, emit, emitted
from outlast.plan.huggingface import transformer_of


def written(target, tmp_path, **values):
    settings = dataclasses.replace(SETTINGS, launches=target, **values)
    return emit("sbatch", *RUNS[target], CLUSTER, out=tmp_path, settings=settings)


def test_the_files_are_those_of_the_golden_folder():
    expected = {
        str(path.relative_to(GOLDEN)): path.read_text()
        for path in GOLDEN.rglob("*")
        if path.is_file()
    }
    # tests/plan/plan_emit_runs.py, run as a program, renews the folder.
    assert golden_files() == expected


@pytest.mark.parametrize("target", RUNS)
def test_every_file_opens_with_what_was_predicted_and_how_it_was_made(target, tmp_path):
    for path in written(target, tmp_path, origin="outlast plan emit job.toml"):
        text = path.read_text()
        if path.suffix == ".json":
            opening = "\n".join(json.loads(text)["_comment"])
        else:
            opening = "\n".join(line for line in text.splitlines() if line.startswith("#"))
        assert "step 1.20 s (0.93 to 1.51, 90 %)" in opening
        assert "Made by outlast plan emit job.toml." in opening


@pytest.mark.parametrize("target", RUNS)
def test_scripts_are_right_for_bash_and_can_be_started(target, tmp_path):
    scripts = [path for path in written(target, tmp_path) if path.suffix in (".sh", ".sbatch")]
    assert scripts
    for path in scripts:
        assert path.stat().st_mode & 0o100
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_predicted_text_cannot_leave_its_comment(tmp_path):
    text = "fine\u2028#SBATCH --time=1\r\nrm -rf /\n\n  $(reboot)"
    for path in written("megatron", tmp_path, predicted=text):
        for line in path.read_text().splitlines():
            assert not line.startswith(("rm -rf", "$(reboot)"))
            assert line != "#SBATCH --time=1"


def test_a_refused_run_leaves_no_file(tmp_path):
    with pytest.raises(PlanError, match="pipeline = 2 cannot be expressed for DeepSpeed"):
        emit("deepspeed", DENSE, configured(pipeline=2), CLUSTER, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_that_differs_is_kept_unless_it_shall_be_replaced(tmp_path):
    model, run = RUNS["outlast"]
    (path,) = emit("outlast", model, run, CLUSTER, out=tmp_path, settings=SETTINGS)
    emit("outlast", model, run, CLUSTER, out=tmp_path, settings=SETTINGS)
    path.write_text("mine")
    with pytest.raises(PlanError, match="exists and differs"):
        emit("outlast", model, run, CLUSTER, out=tmp_path, settings=SETTINGS)
    assert path.read_text() == "mine"
    replacing = dataclasses.replace(SETTINGS, replace=True)
    emit("outlast", model, run, CLUSTER, out=tmp_path, settings=replacing)
    assert path.read_text() != "mine"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"file.* cannot be written"):
        emit("outlast", *RUNS["outlast"], CLUSTER, out=tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"data": 12}, "12 devices do not fill nodes of devices_per_node = 8"),
        ({"data": 64, "tensor": 2}, "= 128 devices, and eight nodes has 64"),
    ],
)
def test_a_run_that_does_not_fit_the_cluster_is_refused(values, sentence):
    run = configured(batch=192, **{"sharding": "parameters", "sequence_parallel": False, **values})
    with pytest.raises(PlanError, match=sentence):
        emitted("accelerate", DENSE, run, CLUSTER)


def batch_script(**values):
    settings = EmitSettings(**{"name": "demo", "launches": "outlast", **values})
    return emitted("sbatch", DENSE, configured(data=16), CLUSTER, settings)["job.sbatch"]


def test_the_time_limit_has_a_margin_and_the_warning():
    text = batch_script(predicted_hours=10.0)
    assert "#SBATCH --time=0-12:05:00" in text
    assert "#SBATCH --signal=USR1@300" in text
    assert "#SBATCH --nodes=2" in text
    assert "#SBATCH --gpus-per-node=8" in text


def test_a_run_longer_than_the_queue_allows_is_a_chain():
    text = batch_script(predicted_hours=80.0, longest_hours=36.0)
    assert "#SBATCH --time=1-12:00:00" in text
    assert "in about 3 starts of 36 h" in text
    assert "scontrol requeue" in text


def test_a_warning_before_the_start_is_refused():
    with pytest.raises(PlanError, match="warn_seconds = 300 is not below the time limit"):
        batch_script(longest_hours=0.05)


def test_a_name_that_would_add_an_option_is_refused():
    with pytest.raises(PlanError, match="cannot stand in a batch script"):
        batch_script(partition="gpu --time=1")


def test_devices_of_a_part_of_a_node_ask_for_its_share_of_the_cores():
    text = emitted("sbatch", DENSE, configured(data=2), CLUSTER)["job.sbatch"]
    assert "#SBATCH --gpus-per-node=2" in text
    assert "#SBATCH --cpus-per-task=12" in text


def blocks_per_stage(model, run):
    return Plan(model, run, CLUSTER, EmitSettings()).blocks


def test_stages_hold_all_blocks_in_order():
    run = configured(pipeline=4, stages_per_rank=2, schedule="interleaved")
    assert blocks_per_stage(DENSE, run) == (2, 2, 2, 2, 2, 2, 1, 1)


def test_by_cost_the_stage_with_the_head_has_fewer_blocks():
    heavy = dataclasses.replace(DENSE, vocabulary=40_000)
    by_cost = blocks_per_stage(heavy, configured(pipeline=4, balance="cost"))
    assert sum(by_cost) == heavy.layers
    assert by_cost[-1] < min(by_cost[:-1])


def test_stages_of_unequal_numbers_of_blocks_are_written_out():
    run = configured(pipeline=4, sharding="optimizer")
    text = emitted("megatron", DENSE, run, CLUSTER)["megatron.sh"]
    assert "--pipeline-model-parallel-layout 'Etttt|tttt|ttt|tttL'" in text


PLACED = dataclasses.replace(MIXTURE, dense_layers=2, dense_blocks=(0, 2))


def test_blocks_without_experts_are_written_where_they_are():
    run = configured(data=2, sharding="gradients")
    files = emitted("megatron", PLACED, run, CLUSTER)
    assert "--moe-layer-freq '[0,1,0,1]'" in files["megatron.sh"]
    bridge = yaml.safe_load(files["megatron_bridge.yaml"])
    assert bridge["model"]["moe_layer_freq"] == [0, 1, 0, 1]
    assert (
        "if layer in (0, 2) else"
        in emitted("torchtitan", PLACED, run, CLUSTER)["torchtitan_run.py"]
    )
    table = json.loads(emitted("accelerate", PLACED, run, CLUSTER)["model/config.json"])
    assert table["mlp_only_layers"] == [0, 2]
    assert transformer_of(table).dense_blocks == PLACED.dense_blocks


def test_a_mixture_is_not_mistaken_for_a_dense_model():
    text = emitted("torchtitan", MIXTURE, configured(data=2, sharding="parameters"), CLUSTER)
    assert "if layer < 1 else" in text["torchtitan_run.py"]
    assert "num_experts=8" in text["torchtitan_run.py"]
