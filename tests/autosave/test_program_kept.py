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
    "slices of places that the call moves, by names of their own": """
        import itertools
        import torch
        slice = None
        class Solver:
            column = 0
            def __init__(self):
                self.given = itertools.count()
                self.table = torch.zeros(2, 3, 17, dtype=torch.long)
                self.sums = list(range(40))
            def train(self):
                for _ in range(2):
                    weights.backward(); weights.step()
                    self.column += 1
                return [weights.value]
            def fit(self):
                for _ in range(2):
                    self.table[:, 1:, self.column] += self.train()[0]
                    self.table[..., self.column] += self.train()[0]
                    self.sums[self.column : self.column + 2] += self.train()
                    self.sums[next(self.given) : 30 : next(self.given) + 1] *= len(self.train())
        solver = Solver()
        solver.fit()
        print(solver.table.tolist(), solver.sums, next(solver.given))
        """,
    "an index with a slice, taken once": """
        import itertools
        taken, sums = itertools.count(), [0] * 4
        def train():
            for _ in range(2):
                weights.backward(); weights.step()
            return [weights.value]
        for _ in range(3):
            sums[next(taken) :] += train()
        print(sums, next(taken))
        """,
    "a place that the call is a part of": """
        class Solver:
            wins, count = [0] * 11, 0
            def train(self):
                for _ in range(2):
                    weights.backward(); weights.step()
                    self.count += 1
                    self.wins[weights.value % 11] += 100
                return self
            def fit(self):
                for step in range(2):
                    self.train().count += self.count
                    self.wins[self.train().count % 11] += step + len(self.wins)
                    self.wins[self.train().count % 3 : 5] += [step]
        solver = Solver()
        solver.fit()
        print(solver.count, solver.wins)
        """,
}


@pytest.mark.parametrize("what", SUMS)
def test_what_a_call_is_added_to_is_read_before_it(what, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BEGIN + dedent(SUMS[what]))
    assert check_every_step(script) > 6
