"""Code of the pages runs, given what it takes for granted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, run_page

DOCS = ROOT / "docs"

TRAINED = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
opt = optimizer = torch.optim.AdamW(model.parameters())
loader = [torch.ones(4, 64)] * 3
def loss(y): return y.square().mean()
def train(batch):
    loss(model(batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
step = 3
"""
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2))
"""
CHAIN = """
first, steps, took = 0, 3, 1.0
train = save = print
def agreed(stop): return stop
"""
JOB = """
from pathlib import Path
from outlast.job import default_job_text
Path("job.toml").write_text(default_job_text())
"""


@dataclass(frozen=True)
class Example:
    """Python code of a page that a test runs.

    Attributes:
        setup: What the page takes for granted.
        blocks: Which of its Python blocks are run, from 0, in one namespace.
        smaller: Parts of the code that a test replaces, to be done in a moment.
        needs_run: Whether a run must be in ``runs/quickstart``, ``runs/a`` and ``runs/b``.
        language: Of the blocks; of a ``diff``, what it adds is run.
    """

    setup: str = ""
    blocks: tuple[int, ...] = (0,)
    smaller: dict[str, str] = field(default_factory=dict)
    needs_run: bool = False
    language: str = "python"


EXAMPLES = {
    "architecture": Example(),
    "autosave": Example(TRAINED),
    "checkpoint": Example(TRAINED),
    "cluster": Example(CHAIN),
    "coding": Example("survivors = [0, 1, 2, 5, 7, 8, 10]", (1,)),
    "data": Example(blocks=(0, 1)),
    "energy": Example("def train_some_steps(): sum(range(10**5))", (0, 1)),
    "glossary": Example(),
    "guard": Example(TRAINED),
    "hardware": Example('import os; os.mkdir("checkpoints")'),
    "integrations/megatron": Example(
        "from pathlib import Path\n"
        "from outlast.data import prepare\n"
        'prepare("stdlib", cache=Path("made"), validation_fraction=0.05)\n'
        'for file in Path("made").rglob("train.*"): file.rename("tokens" + file.suffix)',
        (1,),
        language="diff",
    ),
    "index": Example(),
    "job": Example(JOB),
    "lab-notes": Example(),
    "plan": Example(),
    "quickstart": Example(f'{LLAMA}\nmodel.save_pretrained("models/continued")'),
    "records": Example(needs_run=True),
    "recover": Example(blocks=(1,), needs_run=True),
    "report": Example(needs_run=True),
    "simulator": Example(smaller={"100_000, 10_000": "200, 1_000", "(10_000,": "(1_000,"}),
    "staging": Example(
        'open("train.bin", "wb").write(bytes(64)); open("train.json", "w").write("{}")',
        smaller={"/local/scratch": "scratch", "s3://corpus/train.bin": "train.bin"},
    ),
    "tasks": Example(),
    "tensorize": Example(LLAMA),
    "train": Example(
        smaller={
            "load_job()": 'load_job(None, ["train.steps=2", "sample.tokens=0", "data.source=text",'
            ' \'data.train="text/*"\', "data.validation_fraction=0.3"])'
        },
        setup='import os; os.mkdir("text")\n'
        'for name in "abcdefgh": open(f"text/{name}", "w").write(name * 5000)',
    ),
}

RUN = """
import torch, outlast
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for name in ("quickstart", "a", "b"):
    with outlast.Run(f"runs/{name}", model=model, optimizer=optimizer, steps=5, epochs=5,
                     loader=[torch.ones(2, 4)], checkpoint={"every_steps": 2},
                     log={"every_steps": 1}) as run:
        for batch in run:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss)
"""

RUN_BY_OTHERS = {
    "guard-checks": "tests/guard/test_guard_docs.py",
    "integrations/pytorch": "tests/docs/test_documents.py",
    "integrations/tracking": "tests/docs/test_pages.py",
    "launch": "tests/train/test_launch.py",
    "parity": "tests/recover/test_parity_group.py",
    "parts": "tests/docs/test_pages.py",
}
"""Pages whose examples other tests run, and which."""

PARTS = re.findall(
    r"^## (.*?)\n.*?^```python\n(.*?)^```$",
    (DOCS / "parts.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
"""Title and program of each part that can be used alone."""


def code_of(name: str, example: Example) -> str:
    text = (DOCS / f"{name}.md").read_text()
    fence = rf"^```{example.language}\n(.*?)^```$"
    found = re.findall(fence, text, re.MULTILINE | re.DOTALL)
    code = "\n".join(found[number] for number in example.blocks)
    if example.language == "diff":
        code = "\n".join(line[1:] for line in code.splitlines() if line.startswith("+"))
    for large, small in example.smaller.items():
        assert large in code
        code = code.replace(large, small)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_code_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = EXAMPLES[name]
    monkeypatch.chdir(tmp_path)
    if example.needs_run:
        subprocess.run([sys.executable, "-c", RUN], check=True, timeout=120)
    names: dict[str, Any] = {}
    exec(compile(example.setup, f"{name}.md: set-up", "exec"), names)
    exec(compile(code_of(name, example), f"{name}.md", "exec"), names)


@pytest.mark.slow
def test_the_first_setting_of_the_page_on_trackers_writes_what_tensorboard_reads(
    tmp_path: Path,
) -> None:
    text = (DOCS / "integrations" / "tracking.md").read_text()
    section, first, *_ = text.partition("```diff\n")[2].splitlines()
    (tmp_path / "job.toml").write_text(f"{section[1:]}\n{first[1:]}\nevery_steps = 1\n")
    program = RUN.replace('f"runs/{name}"', '"job.toml"').replace(
        """checkpoint={"every_steps": 2},
                     log={"every_steps": 1}""",
        "fresh=True",
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)
    assert [*tmp_path.glob("runs/*/tensorboard/events*")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["commands", "settings", "api"])
def test_a_page_of_the_reference_runs(name: str, tmp_path: Path) -> None:
    assert run_page(DOCS / "reference" / f"{name}.md", tmp_path) == 1


def _has_a_tested_script(page: Path) -> bool:
    """Whether a page names a script of the folder examples that a test names, too."""
    named = set(re.findall(r"examples/[\w/.-]*?([\w-]+)\.(?:py|sh|yaml)", page.read_text()))
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    quoted = [re.compile(rf"[\"'/]{name}(\.\w+)?[\"']") for name in named]
    return any(pattern.search(text) for pattern in quoted for text in tests)


@pytest.mark.slow
@pytest.mark.parametrize(("title", "program"), PARTS, ids=[title for title, _ in PARTS])
def test_a_part_used_alone_runs_twice(title: str, program: str, tmp_path: Path) -> None:
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)


def test_every_part_has_a_program() -> None:
    headings = re.findall(r"^## (.*)$", (DOCS / "parts.md").read_text(), re.MULTILINE)
    assert [title for title, _ in PARTS] == headings
    assert len(headings) == 10


def test_no_page_is_without_an_example_that_a_test_runs() -> None:
    run = {*EXAMPLES, *RUN_BY_OTHERS}
    without = set()
    for page in DOCS.glob("**/*.md"):
        name = os.fspath(page.relative_to(DOCS).with_suffix(""))
        if name.startswith(("tutorials/", "reference/", "_build/")) or name in run:
            continue
        if _has_a_tested_script(page):
            continue
        without.add(name)
    assert without == set()
