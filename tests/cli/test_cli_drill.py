"""`outlast drill` as a person runs it: faults on purpose, and whether all was corrected."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_ranks
from tiny import tiny_job

from outlast.cli.drill import print_drill
from outlast.cli.main import main
from outlast.errors import EXIT_BAD_INPUT, EXIT_DATA_CORRUPTION, EXIT_DONE
from outlast.guard.findings import SITES
from outlast.guard.inject import Fault, parse_faults
from outlast.job import to_toml
from outlast.train import drill

SHORT = ("train.steps=6", "data.validation_fraction=0.0")
RATES = ("masked", "harmful", "detected", "corrected", "missed", "detected_of_all")


def _outlast(arguments, launched=False):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not launched:
            del os.environ[name]
    sys.argv = ["outlast", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    return code, out.getvalue(), err.getvalue()


def outlast_drill(folder, *arguments, overrides=SHORT):
    """Run the drill of a tiny job in a forked process; gives code, stdout, stderr and result."""
    file = folder / "job.toml"
    file.write_text(to_toml(tiny_job(folder, "tiny", *overrides)))
    result = folder / "result.json"
    command = ["drill", str(file), *map(str, arguments), "--output", str(result)]
    [(code, out, err)] = run_ranks(1, _outlast, command)
    return code, out, err, json.loads(result.read_text()) if result.exists() else None


def row_of(result, site):
    [row] = [row for row in result["rows"] if row["site"] == site]
    return row


@pytest.mark.smoke
@pytest.mark.distributed
def test_transient_faults_are_put_right_and_told(tmp_path):
    faults = (
        "linear.output:bit=30:step=1",
        "linear.dx:bit=30:step=2",
        "linear.dw:stuck=1.0:step=3,norm.output:bit=30:step=4",
        "attention.output:bit=30:step=5,attention.dk:bit=30:step=5",
    )
    arguments = [each for fault in faults for each in ("--faults", fault)]
    code, out, err, result = outlast_drill(tmp_path, *arguments)
    assert code == EXIT_DONE, err
    assert "drill, policy full" in out
    for name in ("site", "injected", *RATES[:-1], "latency"):
        assert name in out
    assert "the final weights equal the clean run's bit for bit" in out
    assert "drill: step 6/6" in out
    assert result["bits_equal"] is True
    assert result["distance"] == 0.0
    assert result["stops"] == result["idle"] == []
    assert result["policy"] == "full"
    assert {row["site"] for row in result["rows"]} == {
        *("linear.output", "linear.dx", "linear.dw", "norm.output"),
        *("attention.output", "attention.dk", "all"),
    }
    everything = row_of(result, "all")
    assert everything["injected"] == 6
    assert everything["harmful"]["count"] == everything["detected"]["count"] == 6
    assert everything["corrected"]["count"] == 6
    assert everything["missed"] == {"count": 0, "total": 6, **interval(everything["missed"])}
    assert 0.3 < everything["detected"]["low"] < 1.0
    assert everything["detected"]["high"] == 1.0
    assert everything["longest_latency_steps"] == 0
    steps = {(each["site"], each["step"]) for each in result["injections"]}
    assert ("norm.output", 4) in steps
    assert len(result["injections"]) == 6
    assert {each["outcome"] for each in result["findings"]} == {"corrected"}
    written = tmp_path / "runs" / "tiny-drill" / "drill.json"
    assert json.loads(written.read_text()) == result
    assert not (tmp_path / "runs" / "tiny").exists()


def interval(rate):
    return {"low": rate["low"], "high": rate["high"]}


@pytest.mark.distributed
def test_without_faults_every_site_is_struck_and_the_clean_run_raises_no_alarm(tmp_path):
    overrides = ("train.steps=22", "data.validation_fraction=0.0", "log.every_steps=11")
    code, out, err, result = outlast_drill(tmp_path, overrides=overrides)
    # Faults below the thresholds stay in the guarded copy, which is never given the clean state.
    assert code == (EXIT_DONE if result["bits_equal"] else EXIT_DATA_CORRUPTION), err
    assert result["distance"] < 1e-3
    assert result["stops"] == []
    for site in ("weight", "weight.rest", "optimizer.state"):
        assert row_of(result, site)["missed"]["count"] == 0
    memory = [item for item in result["findings"] if item["operation"] == "rest"]
    assert [item["outcome"] for item in memory] == ["restored"] * 4
    assert len(result["returns"]) == 4
    assert result["false_alarms"]["count"] == 0
    assert result["false_alarms"]["total"] > 100_000
    assert result["false_alarms"]["at_most"] < 1e-4
    assert result["alarms"] == []
    assert "false alarms: 0 in" in out
    assert {row["site"] for row in result["rows"]} == {*drill.SITES, "all"}
    assert 0 < result["noise"] < 1


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 2])
def test_memory_faults_alone_leave_no_trace(size, tmp_path):
    faults = "weight.rest:bit=any:step=2:every=3,optimizer.state:bit=any:step=3:every=4"
    if size == 1:
        # With FSDP2 it strikes the gathered weight, which no memory holds beyond the step.
        faults += ",weight:bit=any:step=4"
    overrides = ("train.steps=12", "data.validation_fraction=0.0", f"parallel.shard={size}")
    arguments = ("--faults", faults, "--nproc", size)
    code, out, err, result = outlast_drill(tmp_path, *arguments, overrides=overrides)
    assert code == EXIT_DONE, err
    assert "the final weights equal the clean run's bit for bit" in out
    assert "after memory faults, went back " in out
    assert result["stops"] == []
    assert len(result["returns"]) >= 6


@pytest.mark.distributed
def test_two_processes_meet_each_their_faults(tmp_path):
    faults = "linear.output:bit=30:step=1:rank=1,bucket.during:bit=30:step=3"
    arguments = ("--faults", faults, "--nproc", "2")
    code, _, err, result = outlast_drill(tmp_path, *arguments)
    assert code == EXIT_DONE, err
    assert result["bits_equal"] is True
    assert {(each["rank"], each["outcome"]) for each in result["findings"]} >= {(1, "corrected")}
    assert {each["operation"] for each in result["findings"]} == {"linear.forward", "all_reduce"}
    assert row_of(result, "bucket.during")["detected"]["count"] == 1


@pytest.mark.distributed
def test_of_processes_that_others_have_started_the_first_one_tells(tmp_path):
    file, result = tmp_path / "job.toml", tmp_path / "result.json"
    file.write_text(to_toml(tiny_job(tmp_path, "tiny", "train.steps=3", "parallel.shard=2")))
    command = ["drill", str(file), "--output", str(result)]
    first, second = run_ranks(2, _outlast, command, True)
    assert (first[0], second[0]) == (EXIT_DONE, EXIT_DONE), first[2] + second[2]
    assert "the final weights" in first[1]
    assert second[1] == ""
    assert json.loads(result.read_text())["faults"] == drill.default_faults(2, 3)


@pytest.mark.distributed
def test_numbers_that_stay_wrong_are_told_as_stops(tmp_path):
    fault = "linear.saved:bit=29:permanent:step=4:module=*.0.mlp.gate_proj"
    code, out, err, result = outlast_drill(tmp_path, "--faults", fault)
    assert code == EXIT_DONE, err
    assert len(result["stops"]) == 2
    assert "step 5: the numbers of rank 0 are wrong and stay so" in result["stops"][0]
    assert "stopped 2 times, to continue from a checkpoint; the last time: step 6: the numb" in out
    # A stop loses no step: the drill continues as after a restart on a sound device.
    assert result["bits_equal"] is True


@pytest.mark.distributed
def test_what_a_lower_level_does_not_see_stays_in_the_weights(tmp_path):
    arguments = ("guard.policy=linear", "--faults", "weight.rest:bit=22:step=3")
    code, out, err, result = outlast_drill(tmp_path, *arguments)
    assert code == EXIT_DATA_CORRUPTION, err
    assert "has stayed in the run: exit code 4" in out
    assert result["policy"] == "linear"
    assert result["bits_equal"] is False
    assert 0 < result["distance"] < 1
    assert "the final weights differ from the clean run's by" in out
    assert row_of(result, "weight.rest")["corrected"]["count"] == 0


@pytest.mark.distributed
def test_a_fault_that_met_nothing_is_told(tmp_path):
    # A site belongs to a check, and this level has none of products.
    fault = "linear.dw:stuck=0.5:step=2"
    code, out, err, result = outlast_drill(tmp_path, "guard.policy=light", "--faults", fault)
    assert code == EXIT_DONE, err
    assert result["idle"] == [fault]
    assert f"without effect, since no such numbers were computed then: {fault}" in out
    assert row_of(result, "all")["injected"] == 0


@pytest.mark.distributed
def test_the_same_seed_is_the_same_drill(tmp_path):
    fault = ("--faults", "linear.output:every=2")
    results = [
        outlast_drill(tmp_path, *fault, "--seed", seed)[3]["injections"] for seed in (3, 3, 4)
    ]
    assert results[0] == results[1] != results[2]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["guard.policy=off"], 'guard.policy = "off" leaves nothing to drill; set it to "full"'),
        (["--faults", "linear.outptu:step=1"], "did you mean 'linear.output'?"),
        (["--faults", "linear.output:step=x"], "step = 'x' is not a whole number"),
        (["--faults", "linear.output"], "a transient fault needs a time"),
        (["--faults", "kill"], "kill needs a step, as in kill:step=12"),
        (["--faults", "linear.dx:step=1:module=*.attn.*"], "matches none of the 29 guarded"),
    ],
    ids=["off", "site", "number", "time", "process", "module"],
)
def test_what_cannot_be_drilled_is_refused_in_one_sentence(tmp_path, arguments, sentence):
    code, _, err, result = outlast_drill(tmp_path, *arguments)
    assert code == EXIT_BAD_INPUT
    assert err.startswith("outlast: ")
    assert len(err.strip().splitlines()) == 1
    assert sentence in err
    assert result is None


@pytest.mark.distributed
def test_operations_of_the_job_are_struck_and_told_by_harm(tmp_path):
    code, out, err, result = outlast_drill(tmp_path, "--operations", "12")
    assert code == EXIT_DONE, err
    assert "drill at operations, policy full" in out
    for word in ("type", "harm", "faults", "detected", "clean bits", "excused"):
        assert word in out
    assert "false alarms: 0 in" in out
    assert sum(row["detected"]["total"] for row in result["rows"]) == 12
    assert {row["dtype"] for row in result["rows"]} == {"fp32"}
    assert {trial["model"] for trial in result["trials"]} == {"the job's model"}
    assert result["not_struck"] == 0
    written = tmp_path / "runs" / "tiny-drill" / "drill.json"
    assert json.loads(written.read_text()) == result


@pytest.mark.slow
@pytest.mark.distributed
def test_models_of_a_zoo_are_drilled_in_both_types(tmp_path):
    own = Path(__file__).parents[1] / "guard" / "zoo.py"
    text = f"import runpy\nfound = runpy.run_path({str(own)!r})['FAMILIES']\n"
    (tmp_path / "own.py").write_text(text + "FAMILIES = {'mine': found['mlp']}\n")
    zoo = ("--zoo", "gpt2", "--zoo", tmp_path / "own.py", "--operations", "8", "--everywhere")
    code, out, err, result = outlast_drill(tmp_path, *zoo)
    assert code in (EXIT_DONE, EXIT_DATA_CORRUPTION), err
    for name in ("gpt2 fp32", "gpt2 bf16", "mine fp32", "mine bf16"):
        assert f"drill: {name}: " in out
    rows = {(row["dtype"], row["harm_from"]): row for row in result["rows"]}
    assert sum(row["detected"]["total"] for row in rows.values()) + result["not_struck"] == 4 * 8
    # A fault without protection is harmful or not; one that was missed is told and fails.
    great = [row for (_, harm), row in rows.items() if harm == 1e-2]
    right = all(row["equal"]["count"] == row["equal"]["total"] for row in great)
    assert right == (code == EXIT_DONE) == ("not put right:" not in out)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--everywhere"], "--everywhere is of --operations and --zoo"),
        (["--zoo", "lama"], "did you mean 'llama'?"),
        (["--zoo", "none.py"], "there is no such file"),
        (["--operations", "4", "--faults", "linear.dx:step=1"], "give one of them"),
        (["--operations", "4", "--nproc", "2"], "--operations is for one process"),
        (["--operations", "4", "guard.policy=off"], "leaves nothing to drill"),
    ],
    ids=["everywhere", "family", "file", "faults", "processes", "off"],
)
def test_what_has_no_operations_to_strike_is_refused(tmp_path, arguments, sentence):
    code, _, err, result = outlast_drill(tmp_path, *arguments)
    assert code == EXIT_BAD_INPUT
    assert sentence in err
    assert result is None


@pytest.mark.distributed
def test_a_killed_training_ends_in_the_same_weights(tmp_path):
    code, out, err, result = outlast_drill(tmp_path, "--faults", "kill:step=3")
    assert code == EXIT_DONE, err
    assert result == {"processes": {"faults": ["kill:step=3"], "starts": 2, "bits_equal": True}}
    assert "drill: the run ended with exit code -9; starting it again" in out
    assert "process faults kill:step=3: 2 starts; the final weights equal" in out
    names = sorted(each.name for each in Path(tmp_path / "runs").iterdir())
    assert names == [".report", "tiny-drill-clean", "tiny-drill-faults"]


def in_process(monkeypatch, capsys, folder, *arguments):
    """Run a drill that starts no training in this process; gives code, stdout and stderr."""
    file = folder / "job.toml"
    file.write_text(to_toml(tiny_job(folder, "tiny")))
    monkeypatch.setattr(sys, "argv", ["outlast", "drill", str(file), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return (ended.value.code, *capsys.readouterr())


def test_other_weights_after_a_disturbed_training_are_a_failure(monkeypatch, capsys, tmp_path):
    differs = {"faults": ["kill:step=3"], "starts": 2, "bits_equal": False}
    monkeypatch.setattr("outlast.cli.drill._drill_processes", lambda *_: differs)
    assert in_process(monkeypatch, capsys, tmp_path, "--faults", "kill:step=3")[0] == 1


def test_a_training_that_never_ends_is_given_up(monkeypatch, capsys, tmp_path):
    started = []

    def fails(command, **_):
        started.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr("outlast.cli.drill.subprocess.run", fails)
    code, _, err = in_process(monkeypatch, capsys, tmp_path, "--faults", "kill:step=3")
    assert code == EXIT_BAD_INPUT
    assert "tiny-drill-clean was started 5 times and ended with exit code 7 at last" in err
    # Only the first start moves an earlier drill aside; the others continue.
    assert ["--fresh" in command for command in started] == [True] + [False] * 4
    assert not any("--process-fault" in command for command in started)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_default_faults_strike_one_site_per_step(ranks):
    texts = drill.default_faults(ranks, 1000)
    faults = parse_faults(texts)
    assert all(isinstance(each, Fault) for each in faults)
    sites = {each.site for each in faults}
    assert sites <= set(SITES)
    assert ("bucket.during" in sites) == (ranks > 1)
    struck = [[each for each in faults if each.due(step)] for step in range(200)]
    assert [len(each) for each in struck] == [0, 0] + [1] * 198
    assert {each.site for (each,) in struck[2 : 2 + len(faults)]} == sites


def test_a_short_drill_has_only_the_faults_that_can_strike():
    assert len(drill.default_faults(1, 5)) == 3
    assert drill.default_faults(1, 2) == []


def rate(count, total):
    return {"count": count, "total": total, "low": 0.25, "high": 0.75}


def test_the_table_is_whole_in_a_narrow_log(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    row = {
        "site": "linear.output",
        "injected": 12,
        **{name: rate(3, 12) for name in RATES},
        "longest_latency_steps": 1,
    }
    empty = {**row, "site": "all", "missed": rate(0, 0), "longest_latency_steps": None}
    print_drill(
        {
            "policy": "linear",
            "rows": [row, empty],
            "false_alarms": {"count": 2, "total": 1234567, "at_most": 5.1e-6},
            "noise": 0.00123,
            "idle": ["norm.dx:step=1"],
            "stops": ["step 4: bad"],
            "bits_equal": False,
            "distance": 0.0321,
        }
    )
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if "linear.output" in line]
    assert line.count("3 (25-75)") == 5
    assert line.endswith(" 1 step")
    [line] = [line for line in out.splitlines() if "all " in line and "3 (25-75)" in line]
    assert " - " in line
    assert "false alarms: 2 in 1,234,567 checks, at most 5.1e-06 per check (95 %)" in out
    assert "more than 0.0012 of the update" in out
    assert "stopped once, to continue from a checkpoint; the last time: step 4: bad" in out
    assert "without effect, since no such numbers were computed then: norm.dx:step=1" in out
    assert "the final weights differ from the clean run's by 0.032 of the training" in out
