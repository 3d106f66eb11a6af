"""What a statement has read before it calls what trains is what it goes on with."""

from __future__ import annotations

from textwrap import dedent

import pytest
from rerun import check_every_step

BEGIN = """
class Weights:
    value = 1
    def backward(self): self.value = self.value * 7 % 1009
    def step(self): self.value += 1
weights = Weights()
"""

SUMS = {
    "an attribute that the call changes": """
        class Solver:
            total = 0
            def train(self):
                for _ in range(2):
                    weights.backward(); weights.step()
                    self.total += 10
                return weights.value
            def fit(self):
                for _ in range(3):
                    self.total += self.train()
                    self.total -= self.train() // 2
        solver = Solver()
        solver.fit()
        print(solver.total)
        """,
    "a global name that the call changes": """
        total, names = 0, ["a"]
        def train(step):
            global total
            for _ in range(2):
                weights.backward(); weights.step()
                total += step
                names.append(str(total))
            return [weights.value]
        def count(step): return len(train(step))
        for step in range(3):
            total += count(step)
            total *= count(step) + 1
            names += train(step)
        print(total, names)
        """,
    "an item whose place the call moves, found by calls that do things": """
        import itertools
        sums, places, given = [0, 0, 0], itertools.count(), []
        def place():
            given.append(next(places))
            return given[-1] % 3
        def table():
            given.append("table")
            return sums
        def train():
            for _ in range(2):
                weights.backward(); weights.step()
                sums[0] += 1; sums[1] += 5
            return weights.value % 11
        for _ in range(4):
            table()[place()] += train()
            sums[1:2] += [train()]
        print(sums, given)
        """,
    "a local name, and an object that is changed in place": """
        class Log(list):
            def __iadd__(self, other):
                self.append(("+=", other))
                return self
        class Holder: pass
        def train(log):
            for _ in range(2):
                weights.backward(); weights.step()
                log.append(weights.value)
            return len(log)
        def main():
            holder, log, seen = Holder(), Log(), 1
            holder.log = log
            for _ in range(3):
                seen += train(log)
                log += train(log)
                holder.log += train(log)
            return seen, log, holder.log is log
        print(main())
        """,
}


@pytest.mark.parametrize("what", SUMS)
def test_what_a_call_is_added_to_is_read_before_it(what, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BEGIN + dedent(SUMS[what]))
    assert check_every_step(script) > 6
