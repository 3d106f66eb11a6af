"""``--json``: which commands have it, and that stdout is then one document with what help names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from in_process import Outlast, in_process, parsed
from plan_commands import CLUSTER, CONFIG
from tiny import tiny_job, train

from outlast.cli.app import app
from outlast.cli.console import json_text, print_json, stdout_kept
from outlast.job import to_toml
from outlast.records import RunDirectory
from outlast.train.export import export_model

WITHOUT = {
    "train": "trains, with a live display; `watch --json` and `report --json` tell of the run",
    "run": "runs a script, whose output is its own",
}
"""Commands without ``--json``, and why."""


def commands() -> dict[str, Any]:
    """Every command by its words."""

    def below(group: Any, path: str) -> Iterator[tuple[str, Any]]:
        for word, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from below(command, f"{path}{word} ")
            else:
                yield f"{path}{word}", command

    return dict(below(typer.main.get_command(app), ""))


COMMANDS = commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_json_or_a_reason(name: str) -> None:
    options = [option for item in COMMANDS[name].params for option in item.opts]
    assert ("--json" in options) != (name in WITHOUT)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_that_mean_the_same_have_the_same_name(name: str) -> None:
    options = {option for item in COMMANDS[name].params for option in item.opts}
    assert not options & {"--out", "--output-file", "--output-dir", "--directory-out"}
    assert ("--output" in options) == ("-o" in options)
    assert ("--processes" in options) <= ("--nproc" in options)
    assert ("--replace" in options) <= ("--force" in options)


def documented(name: str) -> tuple[bool, set[str]]:
    """If a document is a list, and the names that the help has of its outermost object."""
    text = (COMMANDS[name].help or "").partition("--json: ")[2]
    names, depth = set(), 0
    for token in re.findall(r'"[\w ]+"|[{}]', text):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth == 1 and token.startswith('"'):
            names.add(token.strip('"'))
        if token == "}" and not depth:
            break
    return text.startswith("["), names


TASKS = "[run]\nsteps = 450\nstep_seconds = 1.0\nnodes = 1\n"

SCENARIO = """
[run]
nodes = 64
interval_seconds = 1200
productive_days = 2

[[failure]]
name = "device"
per_node_day = 0.01

[[tier]]
name = "shared"
blocked_seconds = 5
restore_seconds = 60
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its model and what the commands are given."""
    folder = tmp_path_factory.mktemp("json")
    job = tiny_job(folder, "a")
    (folder / "job.toml").write_text(to_toml(job))
    assert train(job, 1) == 0
    export_model(job, RunDirectory(folder / "runs" / "a"), folder / "hf")
    (folder / "own.toml").write_text(CLUSTER)
    (folder / "tasks.toml").write_text(TASKS)
    (folder / "scenario.toml").write_text(SCENARIO)
    (folder / "llama.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def outlast(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Outlast:
    """Run the program in this process, without Slurm: exit code, stdout and stderr."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("OUTLAST_LEASES", str(tmp_path / "leases"))
    return in_process(monkeypatch, capfd)


HERE = "--cluster h100x8 --micro-batch 1 --precision bf16"
SLOW = "--workers 8 --slow-share 0.05 --slow-factor 10"

CASES = {
    "init": "new.toml --force",
    "report": "runs/a --output page.html",
    "export": "runs/a --output exported",
    "convert": "hf small --rank 0.5 --force",
    "watch": "runs/a",
    "ckpt ls": "runs/a",
    "ckpt show": "runs/a",
    "ckpt verify": "runs/a --all",
    "ckpt diff": "runs/a 4 6",
    "ckpt du": "runs/a",
    "ckpt prune": "runs/a --keep 2 --dry-run",
    "ckpt restore-to": "runs/a restored",
    "ckpt export": "runs/a a.pt --to torch",
    "ckpt import": "hf imported",
    "energy frontier": "--points 2 --switches none --output plans",
    "energy replay": "plans/frontier-none.json --profile example:a100",
    "energy advise": "job.toml",
    "energy report": "runs/a",
    "energy restore": "",
    "coding choose": SLOW,
    "coding show": "CyclicRepetition --workers 8 --stragglers 2",
    "plan rank": f"llama.json {HERE}",
    "plan explain": f"llama.json {HERE}",
    "plan pareto": f"llama.json {HERE}",
    "plan check": f"llama.json {HERE}",
    "plan emit": f"llama.json {HERE} --target torchtitan --output emitted",
    "plan compare": "runs/a --cluster own.toml",
    "plan simulate": "scenario.toml --trials 20",
    "plan targets": "",
    "plan clusters": "",
    "plan models": "",
    "submit": "job.toml slurm.wall_time=8h --dry-run",
    "cluster plan": "job.toml slurm.wall_time=8h",
    "cluster explain": "job.toml slurm.wall_time=8h",
    "cluster simulate": "--generated 16 --runs 1 --policy long",
    "cluster tasks": "tasks.toml --output tasks.html",
    "cluster prefetch": "job.toml",
}
"""Commands with arguments in `world`; ``energy replay`` comes after what it replays."""

ELSEWHERE = {
    "resize": "tests/train/test_train_recovering.py: of a run that is running",
    "doctor": "test_doctor.py",
    "plan calibrate": "test_cli_plan_runs.py",
    "cluster status": "below, with resume, stop and adopt",
    "cluster resume": "below",
    "cluster stop": "below",
    "cluster adopt": "below",
    "energy monitor": "below: a line for each look",
    "autosave check": "below: it runs a script",
    "drill": "below: it trains",
}


def test_every_command_with_json_is_tried() -> None:
    assert {*CASES, *ELSEWHERE, *WITHOUT} == set(COMMANDS)


@pytest.mark.parametrize("name", CASES)
def test_stdout_is_one_document_with_what_the_help_names(
    name: str, world: Path, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    arguments = CASES[name].split()
    if name == "energy replay" and not Path("plans").exists():
        outlast("energy", "frontier", *CASES["energy frontier"].split())
    code, out, err = outlast(*name.split(), *arguments, "--json")
    # A comparison that finds drift, and energy without a meter, are told by the exit code.
    assert code in ((0, 1) if name in ("plan compare", "energy report") else (0,)), err
    document = parsed(out)
    is_list, names = documented(name)
    assert isinstance(document, list) == is_list
    found = document[0] if is_list else document
    assert names <= set(found), f"{name} --json has {sorted(found)}"
    if name.startswith(("plan ", "cluster ")) or is_list:
        assert names, "the help says what the document has"


def test_what_is_written_is_named(
    world: Path, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    page = parsed(outlast("report", "runs/a", "-o", "one.html", "--json")[1])
    assert Path(page["file"]).stat().st_size == page["bytes"]
    [run] = page["runs"]
    assert (run["name"], run["outcome"], run["step"], run["steps"]) == ("a", "completed", 6, 6)
    model = parsed(outlast("export", "runs/a", "-o", "two", "--json")[1])
    assert (model["step"], model["folder"]) == (6, "two")
    assert model["bytes"] == Path("two/model.safetensors").stat().st_size
    small = parsed(outlast("convert", "hf", "three", "--rank", "0.5", "--json")[1])
    assert small["error_of"] == "weights"
    assert small["perplexity"] is None
    assert all(0.0 < row["error"] < 1.0 for row in small["replaced"])
    assert 0 < small["bytes"] < small["source_bytes"]
    emitted = ("plan", "emit", "llama.json", *HERE.split(), "--target", "torchtitan")
    files = parsed(outlast(*emitted, "-o", "four", "--json")[1])["files"]
    assert files
    assert all(Path(file).is_file() for file in files)


@pytest.mark.slow
def test_all_that_an_advice_would_set_is_in_its_document(
    world: Path, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    advice = parsed(outlast("energy", "advise", "job.toml", "--deadline", "+5%", "--json")[1])
    assert advice["kind"] == "modelled"
    assert [row["deadline"] for row in advice["rows"]] == ["+0%", "+2%", "+5%", "+10%"]
    assert len(advice["clocks_mhz"]) == len(advice["commands"]) == 1
    assert "nvidia-smi" in advice["commands"][0]


def put(folder: Path, name: str, body: str) -> None:
    """A command of Slurm's that says this."""
    file = folder / "bin" / name
    file.write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\n{body}\n")
    file.chmod(0o755)


def test_a_chain_is_steered_in_json(
    outlast: Outlast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "sbatch", "echo 41")
    put(tmp_path, "squeue", "true")
    dry = ("submit", "run.name=a", "slurm.wall_time=8h", "--json")
    document = parsed(outlast(*dry, "--dry-run")[1])
    assert document["jobs"] == []
    assert document["script"].startswith("#!/bin/bash\n")
    assert not Path("runs").exists()
    document = parsed(outlast(*dry)[1])
    assert (document["jobs"], document["script"]) == (["41"], None)
    assert document["plan"]["limit_seconds"] == 8 * 3600
    assert document["run"] == str(tmp_path / "runs" / "a")
    for name, names in (
        ("status", {"chain", "outcome", "links", "jobs"}),
        ("stop", {"run", "done"}),
        ("resume", {"jobs", "chain", "run", "reason"}),
    ):
        code, out, err = outlast("cluster", name, "runs/a", "--json")
        assert code == 0, err
        assert names | documented(f"cluster {name}")[1] <= set(parsed(out))
    line = "\x1f".join(["99", "RUNNING", "4", "1:00:00", "1", "2", "3", "1", "None", ""])
    put(tmp_path, "squeue", f"printf '%s\\n' '{line}'")
    outlast("init", "job.toml")
    code, out, err = outlast("cluster", "adopt", "99", "job.toml", "slurm.wall_time=8h", "--json")
    assert code == 0, err
    assert parsed(out)["jobs"] == ["41"]


def test_the_monitor_prints_a_document_a_line(outlast: Outlast) -> None:
    command = (sys.executable, "-c", "print('work')")
    code, out, err = outlast("energy", "monitor", "--json", "--every", 0.1, "--", *command)
    assert code == 0
    assert "work" in err
    lines = [parsed(line) for line in out.splitlines()]
    assert lines
    assert all(documented("energy monitor")[1] <= set(line) for line in lines)
    assert lines[-1]["name"] == "monitor"


SCRIPT = """
import torch
torch.manual_seed(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step)
"""


@pytest.mark.distributed
def test_a_check_of_a_script_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["autosave", "check", "--json", "--tensors", str(tmp_path / "script.py")]
    done = subprocess.run(
        [sys.executable, "-m", "outlast", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = parsed(done.stdout)
    assert documented("autosave check")[1] <= set(found)
    assert found["identical"] is True
    assert {tensor["kind"] for tensor in found["tensors"]} >= {"must-save"}
    assert found["lost"]["values"]


@pytest.mark.distributed
def test_a_drill_says_what_happens_on_stderr(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "tiny", "data.validation_fraction=0.0")
    (tmp_path / "job.toml").write_text(to_toml(job))
    faults = ["--faults", "linear.output:bit=30:step=1", "--faults", "kill:step=3"]
    command = ["drill", str(tmp_path / "job.toml"), *faults, "--json", "-o", "result.json"]
    done = subprocess.run(
        [sys.executable, "-m", "outlast", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = parsed(done.stdout)
    assert found == json.loads((tmp_path / "result.json").read_text())
    assert found["processes"]["bits_equal"] is True
    assert {"policy", "rows", "false_alarms", "stops", "bits_equal", "distance"} <= set(found)
    assert "the final weights equal the clean run's bit for bit" in done.stderr
    assert "process faults kill:step=3: 2 starts" in done.stderr


@pytest.mark.parametrize("words", [["result.json"], ["job.toml", "--json", "result.json"]])
def test_a_file_that_is_given_to_drill_json_is_answered(outlast: Outlast, words: list[str]) -> None:
    command = ["drill", "--json", *words] if len(words) == 1 else ["drill", *words]
    code, out, err = outlast(*command)
    assert (code, out) == (2, "")
    assert err == (
        "outlast: --json takes no file, it prints to stdout: write --output result.json\n"
    )


def test_what_a_child_prints_goes_to_stderr_too(capfd: pytest.CaptureFixture[str]) -> None:
    for kept in (True, False):
        with stdout_kept(kept):
            print("words", flush=True)
            subprocess.run(["/bin/echo", "child"], check=True)
        print_json({"kept": kept}, line=True)
    said = capfd.readouterr()
    assert said.out == '{"kept": true}\nwords\nchild\n{"kept": false}\n'
    assert said.err == "words\nchild\n"


def test_paths_are_text_in_a_document() -> None:
    assert json.loads(json_text({"file": Path("a/b"), "none": None})) == {
        "file": "a/b",
        "none": None,
    }
