"""What a statement has read before it calls what trains is what it continues with."""

from __future__ import annotations

from textwrap import dedent

import pytest
from rerun import check_every_step

from outlast.autosave.program.rewrite import rewrite
from outlast.autosave.program.source import read_program
from outlast.autosave.program.training import find_training

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


@pytest.mark.slow
@pytest.mark.parametrize("what", SUMS)
def test_what_a_call_is_added_to_is_read_before_it(what, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BEGIN + dedent(SUMS[what]))
    assert check_every_step(script) > 6


READ_BEFORE = {
    "a global name in statements of the module and of a function": """
        total = 0
        def train():
            global total
            for _ in range(2):
                weights.backward(); weights.step()
                total += weights.value
            return weights.value
        def fit(scale):
            print(f"{total:>9} {total!r} {train()}")
            return total * scale - train()
        for step in range(2):
            total = total + train()
            print(total, [total, "of"], train())
            print({total: train()}, sep=str(total))
            total %= fit(step + 2) + 10**6
            last = (lambda before=total: before)() + train()
            print(total and [*range(40)][total % 9 - 30 : train()], last)
        print(total)
        """,
    "what decides whether the call is made": """
        seen, todo = [], [3, 2, 1]
        def train():
            for _ in range(2):
                weights.backward(); weights.step()
                seen.append(weights.value); todo and todo.pop()
            return weights.value
        def fit(first):
            return seen[:first] and not first % 2 and train()
        for step in range(3):
            print(seen[6:] or seen[9:] or train(), len(seen))
            print(train() if todo else -1)
            print(0 if len(seen) > 7 else train())
            print(fit(step))
            print(todo and len(todo) < 9 and train() or step, len(seen))
        """,
    "what is unpacked for the function that trains": """
        def train(first, second, *others, scale=1):
            for _ in range(2):
                weights.backward(); weights.step()
            return weights.value * scale + first - second
        given = iter(range(40))
        for _ in range(2):
            print(train(*map(abs, [-3, -4])))
            print(train(*(next(given) for _ in range(2)), 5, **{"scale": 2}))
            print(train(next(given), *zip(given, range(1)).__next__(), *"", scale=next(given)))
        """,
    "a name of the function around": """
        def main():
            total = 3
            def train():
                nonlocal total
                for _ in range(2):
                    weights.backward(); weights.step()
                    total += weights.value
                return weights.value
            def both(): return total - train() * 2
            for _ in range(2):
                total = total + train()
                print(total, train())
                total = both()
            return total
        print(main())
        """,
    "a name that the statement itself gives another value": """
        def train(given):
            for _ in range(2):
                weights.backward(); weights.step()
            return weights.value + given
        def main(total):
            for _ in range(2):
                print(total, (total := total + 1), train(total))
        main(4)
        """,
    "the function that takes the result, and the object of a method": """
        def first(value): print("first", value)
        def second(value): print("second", value)
        report = first
        class Solver:
            log = []
            def train(self):
                global report, solver
                for _ in range(2):
                    weights.backward(); weights.step()
                    report = second if report is first else first
                    solver, self.log = Solver(), [*self.log, weights.value]
                return [weights.value]
            def add(self, value): self.log.append((value, len(self.log)))
            def fit(self):
                before = self.log
                self.log.append(self.train())
                report((before, self.log))
        solver = Solver()
        for _ in range(2):
            report(solver.train())
            before = solver
            solver.add(solver.train())
            before.fit()
            print(before.log, solver.log)
        """,
    "a name that another file sets in the module": """
        import rates
        from rates import fit
        def train():
            for _ in range(2):
                weights.backward(); weights.step()
                rates.rate *= 2
            return weights.value
        for _ in range(2):
            fit(train)
            print(rates.rate)
        """,
    "objects that the call changes in place": """
        seen, named = [], {}
        def train():
            for _ in range(2):
                weights.backward(); weights.step()
                seen.append(weights.value)
                named[str(weights.value)] = len(seen)
            return [weights.value]
        def main(seen, named):
            for _ in range(2):
                print(seen * 2 + train())
                print(seen or "none", not seen, "some" if seen else "none", train())
                print(f"{seen} {seen!r:>40} {train()}")
                print(*seen, [*seen], train())
                print({**named, "now": train()})
                print(dict(**named, now=train()))
        main(seen, named)
        """,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", READ_BEFORE)
def test_what_is_read_before_a_call_is_not_read_again(what, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BEGIN + dedent(READ_BEFORE[what]))
    text = "rate = 1\ndef fit(train):\n    print(rate, train())\n    print(rate - train())\n"
    (tmp_path / "rates.py").write_text(text)
    assert check_every_step(script) > 4


def kept_at_calls(script):
    """How many values the calls of a program keep, in the order of their lines."""
    files = read_program(script)
    sites = [site for each in rewrite(files, find_training(files)) for site in each.sites]
    return [
        sum("_kept_" in name for name in site.names)
        for site in sorted(sites, key=lambda site: site.line)
        if site.kind == "call"
    ]


def test_what_nobody_can_change_is_not_kept(tmp_path):
    script = tmp_path / "train.py"
    text = """
        import sys
        def train(total):
            for _ in range(2):
                weights.backward(); weights.step()
            return weights.value
        def main(total, scale, report):
            report(total, [scale, -1], "of", train(total), key={"a": scale}, *(3, 4))
            report(total + scale, train(total))
            sys.stdout.write(f"{train(total):>{scale}}")
            total = total + train(scale)
        class Other:
            def __init__(self):
                self.total = 0
                def change():
                    nonlocal scale
                    global report
                    scale, report = 1, 2
                scale = 3
                report(scale, train(scale))
        main(1, 2, print)
        """
    script.write_text(BEGIN + dedent(text))
    assert kept_at_calls(script) == [0, 1, 0, 0, 2, 0]
