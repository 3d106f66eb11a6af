"""The core works without the extras, and what needs one says in a sentence which."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "tokenizers": "transformers"}
"""Of packages that are imported under another name, or come with another one."""

CORE_ONLY = """
import importlib.metadata
import sys

MISSING = {
    "highspy", "huggingface_hub", "jinja2", "markupsafe", "opt_einsum", "packaging", "plotly",
    "prometheus_client", "pynvml", "requests", "scipy", "sentencepiece", "tensorboard",
    "tokenizers", "tqdm", "transformers", "yaml",
}
sys.modules.update(dict.fromkeys(MISSING))
version = importlib.metadata.version


def installed(name):
    if name in MISSING or name == "nvidia-ml-py":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)


importlib.metadata.version = installed
"""
"""A sitecustomize.py: every process that has it on its path lacks what extras install."""

SCRIPT = """
import os
import signal
import sys

import torch

import outlast
from outlast.checkpoint.dcp import OutlastWriter

torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8, shuffle=True)
name, kill = sys.argv[1], int(sys.argv[2])
run = outlast.Run(
    f"runs/{name}", model=model, optimizer=optimizer, loader=loader, epochs=2,
    checkpoint={"every_steps": 2},
)
with run:
    for batch in run:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        if run.step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
torch.save(model.state_dict(), f"{name}.pt")
torch.distributed.checkpoint.save(model.state_dict(), storage_writer=OutlastWriter(f"{name}.dcp"))
"""

COMMANDS = """
import contextlib
import io
import json
import shlex
import sys

from outlast.cli.main import main

said = {}
for line in json.load(sys.stdin):
    sys.argv = ["outlast", *shlex.split(line)]
    out, err = io.StringIO(), io.StringIO()
    code = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    said[line] = [code or 0, out.getvalue(), err.getvalue()]
print(json.dumps(said))
"""


@pytest.fixture
def core_only(tmp_path):
    """`core_only(arguments, given)`: a Python in `tmp_path` that lacks the extras."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "sitecustomize.py").write_text(CORE_ONLY)
    (tmp_path / "train.py").write_text(SCRIPT)
    paths = [str(tmp_path / "core"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run


def required() -> list[tuple[str, list[str]]]:
    """Every extra that the source names in a call of `require`, with the packages."""
    found = []
    for file in (ROOT / "src" / "outlast").rglob("*.py"):
        text = file.read_text()
        if "from outlast.extras import require" not in text or file.name == "extras.py":
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(func=ast.Name("require"), args=[ast.Constant(extra), _, *packages]):
                    names = [item.value for item in packages if isinstance(item, ast.Constant)]
                    found.append((extra, names))
    return found


def test_each_extra_installs_what_the_source_says_it_does():
    calls = required()
    assert {extra for extra, _ in calls} >= {"train", "report", "plan", "coding", "energy"}
    for extra, packages in calls:
        installs = {re.split(r"[<>=;\[ ]", item)[0] for item in EXTRAS[extra]}
        assert {DISTRIBUTIONS.get(package, package) for package in packages} <= installs, extra


@pytest.mark.slow
def test_a_run_is_killed_and_resumed_and_written_to_dcp_without_extras(core_only, tmp_path):
    assert core_only("train.py", "killed", "7").returncode == -9
    ended = core_only("train.py", "killed", "-1")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"resumed at step [1-7] of 16", ended.stdout)
    assert "draws it, after pip install 'outlast[report]'" in ended.stdout
    assert core_only("train.py", "clean", "-1").returncode == 0
    killed, clean = (torch.load(tmp_path / name) for name in ("killed.pt", "clean.pt"))
    assert all(torch.equal(killed[name], clean[name]) for name in clean)
    assert any((tmp_path / "clean.dcp").rglob("*"))


@pytest.mark.slow
def test_outlast_run_resumes_a_plain_script_without_extras(core_only, tmp_path):
    (tmp_path / "plain.py").write_text(
        "import os, signal, torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4, shuffle=True)\n"
        "for epoch in range(2):\n"
        "    for step, batch in enumerate(loader):\n"
        "        model(batch).square().mean().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "        if (epoch, step) == (1, 2) and not os.path.exists('killed'):\n"
        "            open('killed', 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('trained')\n"
    )
    stopped = core_only("-m", "outlast", "run", "plain.py")
    assert stopped.returncode == 3, stopped.stderr
    ended = core_only("-m", "outlast", "run", "plain.py")
    assert ended.returncode == 0, ended.stderr
    assert "trained" in ended.stdout


@pytest.mark.slow
def test_commands_without_extras_work_or_say_what_to_install(core_only):
    core_only("train.py", "it", "-1")
    works = [
        *("--help", "train --help", "plan --help", "coding choose --help", "energy --help"),
        *("ckpt ls runs/it", "ckpt verify runs/it", "watch runs/it", "doctor"),
        *("init job.toml", "init --loop loop.toml", "cluster plan job.toml slurm.wall_time=2h"),
        "cluster simulate --help",
    ]
    refused = {
        "train": ("outlast train needs transformers", "train"),
        "convert here there": ("a Hugging Face model needs transformers", "train"),
        "report runs/it": ("a report needs plotly", "report"),
        "plan job.toml": ("outlast plan needs scipy", "plan"),
        "drill": ("outlast drill needs scipy", "plan"),
        "cluster simulate --generated 64": ("a workload of the Lublin model needs scipy", "plan"),
        "coding choose --workers 8 --slow-share 0.1 --slow-factor 3": (
            "outlast coding needs scipy",
            "coding",
        ),
        "coding show CyclicMDS --workers 4": ("outlast.coding.CyclicMDS needs scipy", "coding"),
        "energy frontier": ("a plan of clocks needs scipy and highspy", "energy"),
        "energy monitor --port 0 -- true": (
            "an exporter of metrics needs prometheus_client",
            "energy",
        ),
    }
    ended = core_only("-c", COMMANDS, given=json.dumps([*works, *refused]))
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert {line: said[line][0] for line in works} == dict.fromkeys(works, 0), said
    assert {line: (said[line][0], said[line][2]) for line in refused} == {
        line: (2, f"outlast: {words}: pip install 'outlast[{extra}]'\n")
        for line, (words, extra) in refused.items()
    }


@pytest.mark.slow
def test_parts_without_extras_work_or_say_what_to_install(core_only):
    script = """
import torch
from outlast.coding.protocol import Coverage
from outlast.errors import MissingExtraError
from outlast.guard import guard
from outlast.energy import EnergyMeter
from outlast.tensorize import tensorize
import outlast

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
with EnergyMeter():
    tensorize(model, form="low_rank", rank=0.25, match="0")
    model(torch.randn(2, 64))
for name in ("FractionalRepetition", "predict"):
    try:
        getattr(outlast, name)
    except MissingExtraError as error:
        print(error)
try:
    tensorize(model, form="tt", rank=4, match="1")
    model(torch.randn(2, 64))
except ImportError as error:
    print(error)
"""
    ended = core_only("-c", script)
    assert ended.stdout.splitlines() == [
        "outlast.coding.FractionalRepetition needs scipy: pip install 'outlast[coding]'",
        "outlast plan needs scipy: pip install 'outlast[plan]'",
        "a layer of several cores needs opt_einsum: pip install 'outlast[tensorize]'",
    ], ended.stderr
