"""Generators of the program that are suspended when it is saved."""

from __future__ import annotations

from textwrap import dedent

import pytest
from rerun import DictKeeper, check_every_step, run

from outlast.errors import AutosaveError

BEGIN = """
import random
random.seed(1)
log = []
class Weights:
    value = 1
    def backward(self): self.value = self.value * 7 % 1009 + random.randrange(9)
    def step(self): self.value += 1
weights = Weights()
def train(batch):
    weights.backward(); weights.step()
    log.append((batch, weights.value))
"""


@pytest.fixture
def script(tmp_path):
    def write(text, **others):
        for name, each in others.items():
            (tmp_path / f"{name}.py").write_text(dedent(each))
        path = tmp_path / "train.py"
        path.write_text(BEGIN + dedent(text))
        return path

    return write


STYLES = {
    "a loader without an end": """
        def cycle(items):
            while True:
                for item in items: yield item
        batches = cycle([1, 2, 3])
        for step in range(7): train(next(batches))
        print(log, next(batches))
        """,
    "shuffled batches of a function with settings": """
        def batches(data, *, size=2):
            order = list(range(len(data)))
            random.shuffle(order)
            for start in range(0, len(order), size):
                yield [data[each] for each in order[start:start + size]]
        for epoch in range(2):
            for i, batch in enumerate(batches([5, 6, 7, 8, 9])): train(batch)
        print(log)
        """,
    "one generator gives another's items on": """
        def inner(start):
            try:
                yield from range(start, start + 2)
            finally:
                log.append("closed")
            return start
        def outer():
            for start in (0, 10):
                ended = yield from inner(start)
                log.append(("ended", ended))
        for batch in outer(): train(batch)
        print(log)
        """,
    "values are sent and errors thrown into it": """
        def running():
            total = 0
            while True:
                try:
                    got = yield total
                except ValueError:
                    total = -1
                else:
                    total += got
        mean = running()
        next(mean)
        for step in range(6):
            train(mean.send(step) if step % 3 else mean.throw(ValueError()))
        print(log)
        """,
    "set-up has begun one that gives another's items on, and sends it values": """
        def inner():
            got = yield 3
            return (yield got) + got
        def outer():
            while True: log.append((yield from inner()))
        mean = outer()
        next(mean)
        for step in range(6): train(mean.send(step))
        print(log)
        """,
    "what it adds to, and has read, is changed while it waits": """
        class Data:
            seen, sums = 0, [0, 0, 0]
            def inner(self):
                self.seen += yield self.seen
                return self.seen
            def __iter__(self):
                global total
                own = 1
                while True:
                    self.seen += yield self.seen
                    self.sums[self.seen % 3] -= yield from self.inner()
                    total += yield total
                    total = total - (yield own)
                    own *= yield own
                    log.append([*self.sums, f"{self.sums} {total}", (yield 4)])
        total = 0
        data = Data()
        batches = iter(data)
        for step in range(16):
            train(batches.send(step or None))
            data.seen += 100
            data.sums[1] += 3
            total += 1000
        print(log, data.seen, data.sums, total)
        """,
    "what another generator is made of is computed in its turn": """
        import itertools
        turns = itertools.count()
        def inner(turn):
            yield turn
            return turn
        def outer():
            while True:
                log.append((next(turns), (yield from inner(next(turns)))))
        for step, batch in zip(range(5), outer()): train(batch)
        print(log)
        """,
    "a method, a closure and one that has not begun": """
        class Data:
            def __init__(self, items): self.items, self.seen = items, 0
            def __iter__(self):
                for item in self.items:
                    self.seen += 1
                    yield item
        def main():
            scale = 3
            def scaled(items):
                for item in items:
                    yield item * scale
            data = Data([1, 2, 3])
            later = scaled([7])
            for batch in scaled(data):
                train(batch)
                scale += 1
            print(log, data.seen, list(later))
        main()
        """,
    "a with around the items": """
        from contextlib import contextmanager
        @contextmanager
        def noted():
            log.append("in")
            yield 2
            log.append("out")
        def batches():
            with noted() as factor:
                for item in range(3): yield item * factor
            yield 100
        for batch in batches(): train(batch)
        print([each for each in log if each != "in"])
        """,
    "one in a module of its own": """
        from data import batches
        for batch in batches(4): train(batch)
        print(log)
        """,
}


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_a_generator_goes_on_where_it_was(script, style):
    data = "def batches(n):\n    for i in range(n):\n        x = i * i\n        yield x\n"
    assert check_every_step(script(STYLES[style], data=data)) > 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "batches = (each * 2 for each in range(4))\n",
            "line 13: a generator expression is under way and cannot be saved",
        ),
        (
            "import heapq\nbatches = heapq.merge([1, 2], [3, 4])\n",
            "the generator `merge` of a library is under way",
        ),
        (
            "def twice():\n    for i in range(4): print((yield i), (yield i))\nbatches = twice()\n",
            "the generator `twice` is under way and cannot be saved: .*line 14: two of a `yield`",
        ),
    ],
)
def test_a_generator_that_cannot_be_saved_is_refused_with_its_place(script, text, sentence):
    path = script(f"{text}for batch in batches: train(batch)\n")
    keeper = DictKeeper()
    with pytest.raises(AutosaveError, match=sentence):
        run(path, keeper)
    assert keeper.asked == [0]
