"""The documents say what is there: links, code, commands, settings."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import plain

from outlast.cli.app import app
from outlast.cluster.tasks.graph import graph_from_toml
from outlast.guard.findings import SITES
from outlast.guard.policy import OPERATIONS
from outlast.job import Job, job_from_text
from outlast.records import read_run

ROOT = Path(__file__).resolve().parents[2]
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
DOCUMENTS = FRONT + PAGES
TEXT_SUFFIXES = {".md", ".py", ".toml", ".json", ".txt", ".html", ".css", ".js", ".sh"}

FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?<![\w./-])outlast ([a-z]+)")
SECTIONS = "|".join(Job.model_fields)
SETTING = re.compile(rf"(?<![\w./\"-])({SECTIONS})\.([a-z_]+)(?:\.[a-z]\w*)*(?=\s*(?:=|$))")
# `train.bin` is a file.
FILE_ENDINGS = {
    "bin",
    "html",
    "json",
    "jsonl",
    "log",
    "md",
    "npy",
    "py",
    "safetensors",
    "swf",
    "toml",
    "txt",
}

# Checks and sites of the guard, what every optimizer has, and a mistake that a tutorial makes.
NOT_SETTINGS = {*OPERATIONS, *SITES, "optimizer.step", "train.step"}

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def blocks(path: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(path.read_text()) if language in languages]


def prose(path: Path) -> str:
    """The text without its code blocks."""
    return FENCE.sub("", path.read_text())


def inline_code(path: Path) -> list[str]:
    return [" ".join(code.split()) for _, code in INLINE_CODE.findall(prose(path))]


def shell_lines(path: Path) -> list[str]:
    lines = [line for body in blocks(path, "console", "bash", "sh") for line in body.splitlines()]
    return [line.partition(" #")[0].rstrip() for line in lines if not line.startswith("#")]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", prose(path), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@every_document
def test_local_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target in LINK.findall(INLINE_CODE.sub("", prose(path))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_the_readme_is_short() -> None:
    assert 90 <= len((ROOT / "README.md").read_text().splitlines()) <= 120


@every_document
def test_python_blocks_compile_and_import_what_exists(path: Path) -> None:
    for block in blocks(path, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outlast"):
                module = importlib.import_module(node.module or "")
                missing = [each.name for each in node.names if not hasattr(module, each.name)]
                assert not missing, f"{node.module} has no {missing}"


OWN_LOOP = """
import sys
from types import SimpleNamespace
import torch

class Model(torch.nn.Linear):
    def forward(self, x):
        return SimpleNamespace(loss=super().forward(x).square().mean())

model = Model(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [{"x": torch.ones(4, 2)}] * 4
"""


def newcomers_clone(folder: Path) -> Path:
    """A copy of the project in which `make` finds this test's environment set up already."""
    installed = Path(sys.prefix) / ".installed"
    if not installed.exists():
        pytest.skip("not in the environment that make sets up")
    left_out = shutil.ignore_patterns(".*", "runs", "dist", "_build", "__pycache__")
    clone = shutil.copytree(ROOT, folder / "outlast", ignore=left_out)
    (clone / ".venv").symlink_to(sys.prefix)
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(clone / name, (0, 0))
    return clone


def start_and_kill(script: str, clone: Path) -> None:
    with subprocess.Popen([sys.executable, script], cwd=clone) as killed:
        events = clone / "runs" / "a" / "events.jsonl"
        while killed.poll() is None:
            if events.exists() and '"checkpoint_saved"' in events.read_text():
                break
            time.sleep(0.02)
        killed.kill()
    assert killed.returncode == -signal.SIGKILL, "it was killed in the middle"


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_readme_runs_in_order(tmp_path: Path) -> None:
    clone, firsts, consoles = newcomers_clone(tmp_path), [], 0
    for language, body in FENCE.findall((ROOT / "README.md").read_text()):
        if language == "console":
            consoles += 1
            commands = [line[2:] for line in body.splitlines() if line.startswith("$ ")]
            if "python train.py" in commands:
                start_and_kill("train.py", clone)
            done = subprocess.run(
                ["bash", "-e", "-c", "\n".join(commands)],
                cwd=clone,
                env=os.environ | {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"},
                capture_output=True,
                text=True,
                check=False,
                timeout=400,
            )
            assert done.returncode == 0, done.stderr
            for line in body.splitlines():
                # A kill may come between a checkpoint and the record of when it was saved.
                shown = plain(line.partition(", saved")[0])
                assert line.startswith("$ ") or shown in plain(done.stdout), done.stdout
        else:
            assert language == "python"
            if "outlast.Run" in body:
                (clone / "train.py").write_text(body)
                continue
            for _ in range(2):
                names: dict[str, Any] = {}
                with contextlib.chdir(clone):
                    exec(compile(body, "README.md", "exec"), names)
                firsts.append(names["first"])
    assert consoles == 2
    assert firsts == [0, 20]
    assert (clone / "runs" / "quickstart" / "report.html").exists()
    run = read_run(clone / "runs" / "a")
    assert [attempt.outcome for attempt in run.attempts] == ["died", "completed"]
    assert run.attempts[1].first_step in range(100, 12_800)


@pytest.mark.distributed
def test_the_own_loop_runs_as_written_and_with_the_file_that_init_writes(tmp_path: Path) -> None:
    page = ROOT / "docs" / "integrations" / "pytorch.md"
    [diff] = [each for each in blocks(page, "diff") if "outlast.Run" in each]
    lines = [line[1:] for line in diff.splitlines() if line[:1] in ("+", " ")]
    body = "\n".join(line for line in lines if "..." not in line)
    command = [sys.executable, "-m", "outlast", "init", "--loop"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    for given, name in (('"runs/a"', "a"), ('"job.toml"', "job")):
        loop = body.replace('"runs/a"', given)
        (tmp_path / "train.py").write_text(f"{OWN_LOOP}{loop}\nprint('trained', run.step)\n")
        run = subprocess.run(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert "trained 12" in run.stdout, run.stderr
        assert (tmp_path / "runs" / name / "checkpoints").is_dir()


@every_document
def test_job_and_task_examples_are_what_they_say(path: Path) -> None:
    for block in blocks(path, "toml"):
        if "[bytes_per_s]" in block:
            # For `outlast cluster tasks`.
            graph_from_toml(block, str(path))
        elif re.search(rf"^\[({SECTIONS})[\].]", block, re.MULTILINE):
            # An excerpt need not say what the model is.
            whole = "[model" in block
            job_from_text(block if whole else f'{block}\n[model]\nconfig = "config.json"\n')


@every_document
def test_commands_exist(path: Path) -> None:
    known = set(typer.main.get_command(app).commands)
    named = COMMAND.findall("\n".join(shell_lines(path) + inline_code(path)))
    assert set(named) <= known


@every_document
def test_settings_exist(path: Path) -> None:
    words = [word for line in shell_lines(path) if "outlast" in line for word in line.split()]
    unknown = [
        f"{section}.{key}"
        for text in inline_code(path) + words
        for section, key in SETTING.findall(text)
        if key not in FILE_ENDINGS
        and key not in _keys(section)
        and f"{section}.{key}" not in NOT_SETTINGS
    ]
    assert not unknown


def _keys(section: str) -> set[str]:
    return set(type(Job.model_fields[section].default).model_fields)


@every_document
def test_every_figure_is_filled_in(path: Path) -> None:
    assert re.findall(r"TODO-FIGURE\(([\w-]+)\)", path.read_text()) == []


def _texts() -> Iterator[Path]:
    yield from FRONT
    for folder in ("docs", "src", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in TEXT_SUFFIXES and "_build" not in path.parts and path.is_file():
                yield path


def test_no_text_names_a_place_on_somebodys_machine() -> None:
    place = re.compile(r"(?<![\w.})-])/(?:work|home|root|Users|mnt)/(?!me\b)\w")
    assert [str(path) for path in _texts() if place.search(path.read_text())] == []


def figures_of(area: str) -> dict[str, float]:
    results = json.loads((ROOT / "benchmarks" / "results" / f"{area}.cpu2.json").read_text())
    return {bar["name"]: bar["figure"] for bar in results["bars"]}


def test_the_readme_quotes_the_committed_results() -> None:
    text = (ROOT / "README.md").read_text()
    to_loss = "CPU seconds to dense's loss"
    for area, name, form in (
        ("train", "quickstart, command to report", "{:.0f} s"),
        ("train", "quickstart, validation", "{:.2f} bits per byte"),
        ("train", "command to first step", "{:.1f} s"),
        ("train", "tokens/s, 1 process", "{:.3f} on 1 process"),
        ("train", "tokens/s, 2 processes", "{:.3f} on 2"),
        ("train", "largest loss difference", "{:.1e} nats"),
        ("tensorize", f"monarch 8, rate 0.003, 3 seed(s): {to_loss}", "in {:.2f} of its CPU"),
        ("tensorize", f"cola 0.25, rate 0.002, 3 seed(s): {to_loss}", "CoLA in {:.2f}"),
        (
            "plan",
            "step time on unseen sites, each publication held out (370 rows): median error",
            "of a step {:.1f} %",
        ),
        (
            "plan",
            "90 % intervals on unseen sites, each publication held out: coverage",
            "{:.0f} % of the 90 % intervals",
        ),
        (
            "plan",
            "90 % intervals on unseen sites, each publication held out: median half-width",
            "half-width {:.0f} %",
        ),
    ):
        assert form.format(figures_of(area)[name]) in text, name
