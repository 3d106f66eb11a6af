"""Which loops are found to be the steps, and what is refused."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from outlast.autosave.program.rewrite import rewrite
from outlast.autosave.program.source import read_program
from outlast.autosave.program.training import find_training
from outlast.errors import AutosaveError

STEP = "loss(model, batch).backward(); optimizer.step()"


@pytest.fixture
def program(tmp_path):
    def write(text, **others):
        for name, each in others.items():
            (tmp_path / f"{name}.py").write_text(dedent(each))
        script = tmp_path / "train.py"
        script.write_text(dedent(text).replace("STEP", STEP))
        return read_program(script)

    return write


def step_lines(files, chosen=None):
    training = find_training(files, chosen)
    for each in rewrite(files, training):
        compile(each.tree, str(each.source.path), "exec")
    where = {
        loop: source.path.stem
        for source in files
        for loop in training.step_loops
        if loop in set(ast.walk(source.tree))
    }
    return sorted(f"{where[each]}:{each.lineno}" for each in training.step_loops)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("for epoch in range(2):\n  for batch in loader: STEP\n  scheduler.step()", ["train:2"]),
        ("while step < 9:\n  STEP\n  step += 1", ["train:1"]),
        ("while True:\n  batch = next(batches)\n  STEP\n  if done: break", ["train:1"]),
        ("for i, batch in tqdm(enumerate(loader)):\n  STEP", ["train:1"]),
        (
            ("for step in range(9):\n"
            "  for micro in range(4):\n    loss(micro).backward()\n"
            "  optimizer.step()"),
            ["train:1"],
        ),
        (
            ("for batch in loader:\n"
            "  for _ in range(5):\n    critic(batch).backward(); critic_optimizer.step()\n"
            "  STEP"),
            ["train:1"],
        ),
        ("for batch in loader:\n  loss(w).backward()\n  with no_grad(): w -= w.grad", ["train:1"]),
        (
            ("for batch in loader:\n"
            "  def closure():\n    loss(batch).backward()\n"
            "  optimizer.step(closure)"),
            ["train:1"],
        ),
        (
            ("def closure():\n  loss(batch).backward()\n"
            "for batch in loader:\n  optimizer.step(closure)"),
            ["train:3"],
        ),
        (
            ("def epoch(loader):\n  for batch in loader: STEP\n"
            "for e in range(3):\n  epoch(loader)"),
            ["train:2"],
        ),
        (
            ("def step(batch):\n  STEP\n"
            "def main():\n  for batch in loader: step(batch)\nmain()"),
            ["train:4"],
        ),
        (
            ("def pretrain():\n  for batch in loader: STEP\n"
            "def finetune():\n  for batch in loader: STEP\n"
            "pretrain(); finetune()"),
            ["train:2", "train:4"],
        ),
        (
            ("def probe():\n  for batch in loader: STEP\n"
            "for batch in loader:\n  STEP\n  if e: probe()"),
            ["train:3"],
        ),
        (
            ("class Trainer:\n"
            "  def train(self):\n    for e in range(3): self.epoch()\n"
            "  def epoch(self):\n    self.model.train()\n"
            "    for batch in self.loader: self.step(batch)\n"
            "  def step(self, batch):\n    STEP\n"
            "Trainer().train()"),
            ["train:6"],
        ),
        (
            ("class Trainer:\n"
            "  def train(self):\n    for batch in self.loader: STEP\n"
            "def evaluate(model):\n"
            "  for batch in loader:\n    model.eval(); model(batch); model.train()\n"
            "trainer = Trainer()\ntrainer.train()\nevaluate(net)"),
            ["train:3"],
        ),
        (
            ("from outlast import autosave\n"
            "for batch in autosave.loop(loader, state={}, store=s):\n  mystery(batch)"),
            ["train:2"],
        ),
    ],
)  # fmt: skip
def test_the_iterations_of_the_loop_that_does_a_whole_step_are_the_steps(program, text, lines):
    assert step_lines(program(text)) == lines


def test_functions_are_followed_into_other_files(program):
    files = program(
        "import engine\nfrom steps import one as do\nengine.run(do)",
        engine="""
            def run(step):
                for epoch in range(2):
                    for batch in range(3):
                        step(batch)
            """,
        steps="def one(batch):\n    loss(batch).backward()\n    optimizer.step()\n",
    )
    assert step_lines(files) == ["engine:4"]

    files = program(
        "import engine\nengine.run()",
        engine="""
            from steps import one

            def run():
                for epoch in range(2):
                    for batch in range(3):
                        one(batch)
            """,
    )
    assert step_lines(files) == ["engine:6"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("print(1)", "nothing in it or in the modules beside it calls .backward()"),
        ("loss.backward()\noptimizer.step()", "in no `for` or `while` loop"),
        ("for i in x:\n  STEP\n)", r"line 3: unmatched '\)'"),
        (
            ("def fit():\n  for batch in loader: STEP\n"
            "for batch in loader:\n  STEP\n  fit()\nfit()"),
            ("two training loops conflict: .*line 2 is a part of a step where .*line 5 calls it, "
            "and has steps of its own where .*line 6 does"),
        ),
        (
            ("from outlast.autosave import loop\n"
            "for e in loop(a):\n  for batch in loop(b): STEP"),
            "line 3 lies in a step of the loop at .*line 2, and both are marked",
        ),
        (
            "def work(rank):\n  for batch in loader: STEP\nmp.spawn(work, nprocs=2)",
            "line 3: the training loop runs in a process or thread that the script starts",
        ),
        (
            "def fit():\n  for batch in loader:\n    STEP\n    yield batch\nfor e in fit(): pass",
            "generator or coroutine `fit` trains",
        ),
        (
            "async def fit():\n  for batch in loader:\n    STEP\nasyncio.run(fit())",
            "generator or coroutine `fit` trains",
        ),
        (
            "def fit():\n  for batch in loader: STEP\nlosses = [fit() for _ in range(3)]",
            "line 3: a call or loop that trains in a comprehension cannot be entered again",
        ),
        (
            "def fit():\n  for batch in loader: STEP\nwhile fit(): pass",
            r"line 3: `fit\(...\)` stands where the program cannot be entered again",
        ),
        (
            "try:\n  pass\nexcept OSError:\n  for batch in loader: STEP",
            "line 4: a call or loop that trains in an `else` of a loop or in an `except`",
        ),
        (
            "match a:\n  case 1:\n    for batch in loader: STEP",
            "line 1: a call or loop that trains within `match` cannot be entered again",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_resumed_is_refused_in_one_sentence(program, text, sentence):
    with pytest.raises(AutosaveError, match=sentence) as refused:
        step_lines(program(text))
    assert "\n" not in str(refused.value)


def test_a_chosen_loop_settles_a_conflict(program):
    text = "def fit():\n  for batch in loader: STEP\nfor batch in loader:\n  STEP\n  fit()\nfit()"
    assert step_lines(program(text), "train.py:3") == ["train:3"]
    assert step_lines(program(text), "train.py:2") == ["train:2"]
    with pytest.raises(AutosaveError, match=r"--loop train.py:4: .*train.py:3"):
        find_training(program(text), "train.py:4")


def test_a_missing_script_is_told_in_one_sentence(tmp_path):
    with pytest.raises(AutosaveError, match=r"absent\.py cannot be read"):
        read_program(tmp_path / "absent.py")
