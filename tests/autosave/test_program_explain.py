from __future__ import annotations

import ast
from pathlib import Path

import pytest

from outlast.autosave.program.rewrite import rewrite
from outlast.autosave.program.scopes import liveness
from outlast.autosave.program.source import read_program
from outlast.autosave.program.training import explain, find_training

TEXT = '''"""Trains."""
from model import build, fit


def batches(data):
    for item in data:
        print((yield item), (yield item))


def main():
    model = build()   # a comment
    for epoch in range(3):
        fit(model, batches([1, 2]))


main()
'''
MODEL = """def build(): return 1
def fit(model, data):
    while data:
        loss(model).backward()
        optimizer.step()
def unused():
    return   2
"""


@pytest.fixture
def explained(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TEXT)
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    files = read_program(Path("train.py"))
    training = find_training(files)
    return explain(files, training, rewrite(files, training))


def test_loops_are_listed_with_their_lines_and_why(explained):
    assert explained.files == ("train.py", "model.py")
    assert [(each.file, each.line, each.is_step) for each in explained.loops] == [
        ("model.py", 3, True),
        ("train.py", 12, False),
    ]
    text = explained.head()
    assert "model.py:3  step loop  `while data:`  (each iteration does a backward pass" in text
    assert "train.py:12  loop  `for epoch in range(3):`  (leads to a step loop)" in text
    assert "train.py, line 7: two of a `yield` stand in one statement" in text


def test_the_diff_shows_only_what_is_changed(explained):
    first, second = explained.differences
    assert first.startswith("--- train.py\n+++ train.py (rewritten)\n")
    assert "+    if __outlast__.goes(" in first
    assert "comment" not in first
    assert "from model import" not in first
    assert "def batches" not in [line[1:] for line in first.splitlines() if line[:1] in "+-"]
    assert "unused" not in [line[1:] for line in second.splitlines() if line[:1] in "+-"]
    for line in second.splitlines():
        if line.startswith("+") and "restoring" in line:
            break
    else:
        pytest.fail("the diff shows no restoration")
    assert ".values(" not in first + second


def live_at(text, line):
    body = ast.parse(text).body[0]
    found = liveness(body)
    return {
        name
        for node, names in found.head.items()
        if node.lineno == line
        for name in names | found.always
    }


@pytest.mark.parametrize(
    ("text", "line", "names"),
    [
        ("def f(a, b):\n for x in a:\n  y = x\n return b", 2, {"b"}),
        ("def f(a):\n while (x := next(a)):\n  print(x)", 2, {"print", "next", "a"}),
        ("def f(a):\n y = 0\n for x in a:\n  y += x\n  z = y\n return z", 3, {"y", "z"}),
        ("def f(a):\n for x in a:\n  try: y = g()\n  except E: y = x\n  h(y)", 2, {"g", "E", "h"}),
        ("def f(a):\n k = 1\n for x in a:\n  h(lambda: k)", 3, {"h", "k"}),
        ("def f(a):\n p = 1\n for x in a:\n  h([p for p in x])", 3, {"h"}),
        ("def f(a):\n for x in a:\n  h(locals())", 2, {"h", "locals", "a", "x"}),
        ("def f(a):\n for x in a:\n  with o() as w:\n   h()", 2, {"o", "h"}),
    ],
)
def test_what_is_read_before_it_is_bound_again_is_live(text, line, names):
    assert live_at(text, line) == names
