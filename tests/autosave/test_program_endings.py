"""Whatever ends a loop of steps tells so, once: a save that still copies need not wait."""

from __future__ import annotations

from textwrap import dedent

import pytest
from rerun import DictKeeper, run, run_plain

BEGIN = """
class Weights:
    value = 1
    def backward(self): self.value = self.value * 7 % 1009
    def step(self): self.value += 1
weights = Weights()
def train():
    weights.backward(); weights.step()
"""

ENDS = {
    "no more items": ("for _ in range(3):\n    train()", [3]),
    "a `break`": ("for step in range(9):\n    train()\n    if step == 1: break", [2]),
    "a condition": ("count = 0\nwhile count < 4:\n    count += 1\n    train()", [4]),
    "a `break` out of an endless loop": (
        "while True:\n    train()\n    if weights.value > 400: break",
        [4],
    ),
    "a `return` from within": (
        """
        def fit(steps):
            for step in range(9):
                with open(__file__):
                    if step == steps:
                        return weights.value
                train()
        print(fit(2))
        print(fit(3))
        """,
        [3, 7],
    ),
    "an `else`": (
        """
        for step in range(2):
            train()
        else:
            print(weights.value)
        """,
        [2, 2],
    ),
    "the end of each epoch": (
        "for epoch in range(2):\n    for _ in range(3):\n        train()",
        [3, 6],
    ),
    "the end of a loop in which a function returns": (
        """
        def best(values):
            def largest():
                return max(values)
            return largest()
        for step in range(2):
            train()
            print(best([step, 1]), (lambda: step)())
        """,
        [2],
    ),
}


class Listening(DictKeeper):
    """Notes after how many steps loops end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[int] = []

    def note(self, sentence: str) -> None:
        self.notes = [*getattr(self, "notes", []), sentence]

    def left(self, step: int) -> None:
        self.ends.append(step)


@pytest.mark.slow
@pytest.mark.parametrize("what", ENDS)
def test_the_end_of_a_loop_is_told(what, tmp_path):
    text, ends = ENDS[what]
    script = tmp_path / "train.py"
    script.write_text(BEGIN + dedent(text) + "\nprint(weights.value)\n")
    keeper = Listening()
    assert run(script, keeper) == run_plain(script)
    assert keeper.ends == ends
