"""Small programs that train nothing but a number, made at random, for laws that all must obey."""

from __future__ import annotations

from textwrap import indent

from hypothesis import strategies as st

PRELUDE = """
import random
from contextlib import contextmanager

random.seed(5)
log = []


class Weights:
    def __init__(self):
        self.value = 1

    def backward(self):
        self.value = (self.value * 31 + random.randrange(1000)) % 100003

    def step(self):
        self.value += 7


weights = Weights()


@contextmanager
def noted(name):
    log.append(("in", name, weights.value))
    yield name
    log.append(("out", name))


def batches(count, start):
    total = start
    for number in range(count):
        total += number
        got = yield total
    with noted("end"):
        yield from range(total, total + 2)


def fit(start, count):
    seen = start
    for number in range(count):
        weights.backward()
        weights.step()
        seen += weights.value % 7
        if seen % 11 == 10:
            break
    else:
        seen += 1
    return seen
"""

_SIMPLE = (
    "a = (a * 3 + b + 1) % 97",
    "b += weights.value % 5",
    "c, *rest = a, b, c + 1",
    "d = [a, b]",
    "d.append(c)",
    "log.append((a, b, c, tuple(d)))",
    "if (e := a % 7) > 3: b += e",
    "del e; e = b",
    "match a % 3:\n case 0: b += 2\n case other: b += other",
    "weights.backward(); weights.step()",
    "weights.backward(); weights.step()",
)
_CALLS = (
    "a += fit(b % 5, 3)",
    "log.append(fit(random.randrange(5), c % 3 + 1))",
    "b = nested(a, fit) + 0",
)
_HEADERS = (
    "for i in range({n}):",
    "for i, a in enumerate(batches({n}, b % 5)):",
    "for c, (i, b) in zip(range({n} + 1), enumerate([b, a, c])):",
    "for *d, i in [(1, 2), (3, 4)][:{n}]:",
)


@st.composite
def blocks(draw, depth, loops):
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.integers(0, 9 if depth else 2))
        if kind <= 2:
            parts.append(draw(st.sampled_from(_SIMPLE)))
        elif kind <= 3:
            parts.append(draw(st.sampled_from(_CALLS)))
        elif kind <= 6:
            parts.append(
                _indented(
                    draw(st.sampled_from(_HEADERS)).format(n=draw(st.integers(1, 3))),
                    draw(blocks(depth - 1, loops=True)),
                )
            )
        elif kind == 7:
            name = f"n{draw(st.integers(0, 10**6))}"
            limit = draw(st.integers(1, 3))
            body = f"{name} += 1\n{draw(blocks(depth - 1, loops=True))}"
            endless = draw(st.booleans())
            header = "while True:" if endless else f"while (t := {name}) < {limit}:"
            leave = f"if {name} >= {limit}: break\n" if endless else ""
            parts.append(f"{name} = 0\n" + _indented(header, leave + body))
        elif kind == 8:
            body = _indented("if a % 2:", draw(blocks(depth - 1, loops)))
            if draw(st.booleans()):
                body += _indented("elif b % 2:", draw(blocks(depth - 1, loops)))
            body += _indented("else:", draw(blocks(depth - 1, loops)))
            parts.append(body)
        else:
            header, footer = draw(
                st.sampled_from(
                    [
                        ("try:", "finally:\n    log.append('finally')\n"),
                        ("try:", "except ZeroDivisionError as error:\n    b += 1\n"),
                        ("with noted('w') as w:", ""),
                    ]
                )
            )
            parts.append(_indented(header, draw(blocks(depth - 1, loops))) + footer)
    if loops and draw(st.integers(0, 3)) == 0:
        parts.append(f"if (a + b) % 5 == 4: {draw(st.sampled_from(['break', 'continue']))}")
    return "\n".join(each.rstrip("\n") for each in parts) + "\n"


@st.composite
def programs(draw):
    """The text of a program that prints, at its end, all that it has noted."""
    start = "a, b, c, d, e, i, w = 1, 2, 3, [], 0, 0, ''\n"
    nested = "def nested(x, call=fit):\n    return x % 7 + b % 3\n"
    body = start + nested + draw(blocks(3, loops=False))
    end = "print(a, b, c, d, log, weights.value, random.random())\n"
    if draw(st.booleans()):
        return f"{PRELUDE}\n{body}{end}"
    inner = "global_count = len(log)\n" + body + end
    return f"{PRELUDE}\n\n" + _indented("def main():", inner) + "\nmain()\n"


def _indented(header, body):
    return f"{header}\n{indent(body, '    ')}"
