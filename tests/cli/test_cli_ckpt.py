"""What ``outlast ckpt`` prints, how it ends, and what it must not load."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from outlast.checkpoint import CheckpointStore, ReplayLog
from outlast.cli import console
from outlast.cli.console import Column, bytes_progress, print_table, ratio_text, size_text
from outlast.cli.main import main

COMMANDS = ("ls", "show", "verify", "diff", "du", "restore-to", "prune")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Embedding(50, 8)
        self.frozen.weight.requires_grad_(False)
        self.layer_with_quite_a_long_name = nn.Linear(8, 6)


class Data:
    position = 0

    def state_dict(self) -> dict:
        return {"position": self.position, "note": "[bold]x[/bold]"}

    def load_state_dict(self, state: dict) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with three versions, of steps 100, 200 and 300."""
    run = tmp_path_factory.mktemp("cli") / "run"
    model, data = Model(), Data()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with CheckpointStore(run / "checkpoints", keep=9, writer="thread") as store:
        for step in (100, 200, 300):
            model.layer_with_quite_a_long_name(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            data.position = step
            state = {"model": model, "optimizer": optimizer, "data": data}
            store.save(step, state, metrics={"loss": 300 / step})
    return run


@pytest.fixture
def run(saved, tmp_path):
    """A copy that may be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def ckpt(monkeypatch, capsys):
    """Run the program in this process: `ckpt(*arguments)` gives code, stdout and stderr."""

    def call(*arguments, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["outlast", "ckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        return ended.value.code or 0, said.out, said.err

    return call


@pytest.fixture
def logged(tmp_path):
    """A store with the versions of steps 2 and 3 and logs of steps 3 to 5, and its live objects."""
    model = Model()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    store = tmp_path / "store"
    with CheckpointStore(store, keep=9, writer="thread") as made:
        replay = ReplayLog(made, state)
        for step in (1, 2, 3, 4, 5):
            model.layer_with_quite_a_long_name(torch.ones(2, 8)).sum().backward()
            replay.step(step).result()
            if step in (2, 3):
                made.save(step, state)
    return store, state


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_is_named(ckpt, command):
    assert f" {command} " in ckpt("--help")[1]
    code, out, _ = ckpt(command, "--help")
    assert code == 0
    assert f"Usage: outlast ckpt {command}" in out


ARGUMENTS = {
    "ls": [],
    "show": ["--tensors", "--values"],
    "verify": ["--all"],
    "diff": ["100", "300"],
    "du": [],
    "prune": ["--keep", "1", "--dry-run"],
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", sorted({*ARGUMENTS} - {"verify"}))
def test_tables_fit_the_window(ckpt, saved, command, columns):
    code, out, err = ckpt(command, saved, *ARGUMENTS[command], columns=columns)
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if str(saved) not in line]
    assert max(map(len, lines)) <= columns
    assert "…" not in out


@pytest.mark.parametrize("command", ARGUMENTS)
def test_json_is_one_document(ckpt, saved, command):
    code, out, err = ckpt(command, saved, *ARGUMENTS[command], "--json")
    assert (code, err) == (0, "")
    assert isinstance(json.loads(out), dict)


def test_ls_lists_the_versions(ckpt, saved):
    _, out, _ = ckpt("ls", saved, columns=120)
    assert "3 versions" in out
    for step, loss in ((100, "loss=3"), (200, "loss=1.5"), (300, "loss=1")):
        (line,) = (line for line in out.splitlines() if line.split()[:1] == [str(step)])
        assert "complete" in line
        assert loss in line
    versions = json.loads(ckpt("ls", saved, "--json")[1])["versions"]
    assert [each["step"] for each in versions] == [100, 200, 300]
    assert all(each["root"] and not each["problem"] for each in versions)


def test_ls_says_how_far_replay_logs_lead(ckpt, logged, saved):
    store, state = logged
    lines = ckpt("ls", store)[1].splitlines()
    assert lines[-1].endswith(": 2 lead on from step 3 to step 5")
    found = json.loads(ckpt("ls", store, "--json")[1])["logs"]
    with CheckpointStore(store, writer="thread") as again:
        assert found["step"] == again.restore(state).step == 5
    for path in (store / "replay" / "step-00000004-a1").iterdir():
        path.unlink()
    last = ckpt("ls", store)[1].splitlines()[-1]
    assert "none leads on from step 3" in last
    assert "replay logs of steps 4 to 5 cannot be used" in last
    assert "replay" not in ckpt("ls", saved)[1]
    assert json.loads(ckpt("ls", saved, "--json")[1])["logs"] is None


def test_a_narrow_window_says_what_it_leaves_out(ckpt, saved):
    _, narrow, _ = ckpt("show", saved, "--tensors", columns=60)
    _, wide, _ = ckpt("show", saved, "--tensors", columns=240)
    assert "a wider window or --json also shows: " in narrow
    assert "also shows" not in wide
    assert "exp_avg_sq" in wide


def test_show_has_the_facts(ckpt, saved):
    _, out, _ = ckpt("show", saved, "--values", columns=120)
    found = json.loads(ckpt("show", saved, "--json")[1])
    assert found["step"] == 300
    assert found["root"] in out
    assert "optimizer.state.*.exp_avg_sq" in out
    assert '"note": "[bold]x[/bold]"' in out
    assert torch.__version__ in out
    assert json.loads(ckpt("show", saved, "--step", 100, "--json")[1])["step"] == 100


def test_verify_ends_with_1_when_something_is_damaged(ckpt, run):
    assert ckpt("verify", run)[0] == 0
    flip(run / "checkpoints" / "step-00000200-a1" / "rank-00000-of-00001.pack")
    code, out, err = ckpt("verify", run, "--step", 200)
    assert (code, err) == (1, "")
    assert "step 200, session 1: DAMAGED" in out
    assert "step-00000200-a1/rank-00000-of-00001.pack is damaged at byte" in out
    code, out, _ = ckpt("verify", run, "--all", "--json")
    assert code == 1
    states = {each["step"]: each["state"] for each in json.loads(out)["versions"]}
    assert (states[100], states[200]) == ("ok", "damaged")


def test_an_unfinished_save_is_reported(ckpt, run):
    for name in ("rank-00000-of-00001.json", "version.json"):
        (run / "checkpoints" / "step-00000300-a1" / name).unlink()
    assert "step 300, session 1: " in ckpt("ls", run)[1]
    for arguments in ([], ["--all"]):
        code, out, _ = ckpt("verify", run, *arguments)
        assert code == 1
        assert "step 300, session 1: INCOMPLETE" in out
    assert ckpt("verify", run, "--step", 300)[0] == 1
    assert ckpt("show", run, "--step", 300)[0] == 2
    assert json.loads(ckpt("show", run, "--json")[1])["step"] == 200


def test_diff_says_what_changed(ckpt, saved):
    _, out, _ = ckpt("diff", saved, 100, 300, columns=120)
    assert "model.layer_with_quite_a_long_name.weight" in out
    assert "model.frozen.weight" not in out
    assert "data.position" in out
    assert "1 tensor unchanged" in out
    assert "model.frozen.weight" in ckpt("diff", saved, 100, 300, "--all")[1]
    _, out, _ = ckpt("diff", saved, 200, 200)
    assert "no tensor differs" in out
    assert ", 0 B read from the store" in " ".join(out.split())


def test_du_adds_up(ckpt, saved):
    found = json.loads(ckpt("du", saved, "--json")[1])
    files = [path for path in (saved / "checkpoints").rglob("*") if path.is_file()]
    assert found["total_bytes"] == sum(path.stat().st_size for path in files)
    assert "3 versions of " in ckpt("du", saved)[1]


def test_du_has_a_line_for_replay_logs(ckpt, logged):
    store, _ = logged
    sizes = [path.stat().st_size for path in (store / "replay").rglob("*") if path.is_file()]
    (line,) = (line for line in ckpt("du", store)[1].splitlines() if "replay logs" in line)
    assert size_text(sum(sizes)) in line
    found = json.loads(ckpt("du", store, "--json")[1])
    assert found["log_bytes"] == sum(sizes) > 0


def test_prune_leaves_the_replay_logs(ckpt, logged):
    store, state = logged
    assert ckpt("prune", store, "--keep", 1)[0] == 0
    with CheckpointStore(store, writer="thread") as again:
        assert again.restore(state).step == 5
    code, _, err = ckpt("prune", store / "replay", "--keep", 1)
    assert code == 2
    assert "holds replay logs" in err


def test_a_replay_log_is_verified_in_its_folder(ckpt, logged):
    store, _ = logged
    assert ckpt("verify", store / "replay", "--all")[0] == 0


def test_restore_to_writes_safetensors(ckpt, saved, tmp_path):
    from safetensors.numpy import load_file

    code, out, _ = ckpt("restore-to", saved, tmp_path / "out", "--only", "model.*")
    assert code == 0
    assert f"wrote step-00000300-a1 to {tmp_path / 'out'}: 3 tensors" in out
    found = load_file(tmp_path / "out" / "tensors-00001-of-00001.safetensors")
    assert found["model.frozen.weight"].shape == (50, 8)
    assert json.loads((tmp_path / "out" / "values.json").read_text())["data"]["position"] == 300
    code, _, err = ckpt("restore-to", saved, tmp_path / "out")
    assert code == 2
    assert "is not an empty directory" in err


def test_prune_deletes_only_when_told_what_stays(ckpt, run):
    code, _, err = ckpt("prune", run)
    assert code == 2
    assert "say what stays" in err
    code, out, _ = ckpt("prune", run, "--keep", 1, "--best", 1, "--metric", "loss", "--dry-run")
    assert code == 0
    assert "would delete step-00000100-a1" in out
    assert len(json.loads(ckpt("ls", run, "--json")[1])["versions"]) == 3
    code, out, _ = ckpt(
        *("prune", run, "--keep", 1, "--best", 1, "--metric", "loss", "--mode", "max")
    )
    assert code == 0
    assert "deleted step-00000200-a1" in out
    versions = json.loads(ckpt("ls", run, "--json")[1])["versions"]
    assert [each["step"] for each in versions] == [100, 300]
    assert ckpt("verify", run, "--all")[0] == 0


def test_prune_is_refused_while_a_process_owns_the_store(ckpt, run):
    with CheckpointStore(run / "checkpoints", writer="thread") as store:
        store.save(400, {"model": Model()})
        code, _, err = ckpt("prune", run, "--keep", 1)
    assert code == 2
    assert f"is in use by process {os.getpid()}" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ls", "{tmp}/none"], "does not exist"),
        (["ls", "{tmp}"], "holds no checkpoint"),
        (["du", "nosuch://x"], "Protocol not known"),
        (["show", "{run}", "--step", "7"], "the steps there are 100, 200, 300"),
        (["diff", "{run}", "100", "7"], "step = 7 is not in"),
        (["verify", "{run}", "--step", "100", "--all"], "exclude each other"),
        (["prune", "{run}", "--keep", "0"], "keep = 0 keeps no checkpoint"),
        (["prune", "{run}", "--best", "1"], "needs the name of a metric"),
        (["prune", "{run}", "--best", "1", "--metric", "los"], "the metrics there are loss"),
        (["restore-to", "{run}", "{tmp}/o", "--only", "x"], "fits no tensor"),
    ],
)
def test_wrong_input_is_one_sentence(ckpt, saved, tmp_path, arguments, sentence):
    (tmp_path / "folder").mkdir()
    filled = [argument.format(tmp=tmp_path, run=saved) for argument in arguments]
    code, out, err = ckpt(*filled)
    assert (code, out) == (2, "")
    assert err.startswith("outlast: ")
    assert err.count("\n") == 1
    assert sentence in err


@pytest.mark.slow
@pytest.mark.parametrize("command", [*ARGUMENTS, "restore-to"])
def test_no_command_needs_torch(run, tmp_path, command):
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from outlast.cli.main import main\n"
        "main()\n"
    )
    arguments = ARGUMENTS.get(command, [str(tmp_path / "out")])
    done = subprocess.run(
        [sys.executable, "-c", script, "ckpt", command, run, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (12_345, "12.3 KB"),
        (123_456, "123 KB"),
        (999_499, "999 KB"),
        (999_600, "1.00 MB"),
        (1_200_000_000, "1.20 GB"),
        (5 * 10**17, "500 PB"),
        (None, "-"),
    ],
)
def test_sizes_have_three_digits(size, text):
    assert size_text(size) == text


def test_ratios_have_two_digits_after_the_point_when_small():
    assert [ratio_text(each) for each in (None, 0.5, 9.94, 34.96, 521.4)] == [
        "-",
        "0.50x",
        "9.94x",
        "35.0x",
        "521x",
    ]


def test_a_table_gives_up_the_least_important_columns_first(capsys):
    columns = [
        Column("name", number=False, least=10),
        Column("same", optional=1),
        Column("extra", optional=2),
        Column("figure"),
    ]
    rows = [["a" * 30, "7", "x" * 30, "1"], ["b" * 30, "7", "y" * 30, "22"]]
    print_table(Console(width=80), columns, rows)
    assert capsys.readouterr().out.splitlines()[0].split() == ["name", "same", "extra", "figure"]
    print_table(Console(width=44), columns, rows)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "all of them: same 7"
    assert out.splitlines()[-1] == "a wider window or --json also shows: extra"
    assert max(map(len, out.splitlines())) <= 44
    assert "22" in out


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    with bytes_progress("verify step 3") as show:
        show(500_000, 2_000_000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "verify step 3: 500 KB of 2.00 MB (25%) after 0 s\n"
    monkeypatch.setattr(console, "LINE_SECONDS", 10.0)
    with bytes_progress("verify step 3") as show:
        show(500_000, 2_000_000)
    assert capsys.readouterr().err == ""
