"""Any graph of objects, changed in any way after it was named, is found again as it was."""

import collections
import copy
import types

import numpy as np
import pytest
import torch
from heap_runs import resume
from hypothesis import given
from hypothesis import strategies as st

from outlast.autosave.heap.tensors import geometry


class Node:
    """An object of the program."""


class Slots:
    """One without a dictionary."""

    __slots__ = ("a", "b", "c")


Foreign = collections.UserDict
"""Of a library, whose objects count only when they change."""

MAKERS = {
    "list": lambda nodes, a, b, n: [],
    "dict": lambda nodes, a, b, n: {},
    "ordered": lambda nodes, a, b, n: collections.OrderedDict(),
    "default": lambda nodes, a, b, n: collections.defaultdict(list),
    "deque": lambda nodes, a, b, n: collections.deque(maxlen=3),
    "set": lambda nodes, a, b, n: set(),
    "node": lambda nodes, a, b, n: Node(),
    "slots": lambda nodes, a, b, n: Slots(),
    "space": lambda nodes, a, b, n: types.SimpleNamespace(),
    "foreign": lambda nodes, a, b, n: Foreign(),
    "pair": lambda nodes, a, b, n: (pick(nodes, a), n, pick(nodes, b)),
    "tensor": lambda nodes, a, b, n: torch.arange(n + 2.0),
    "weight": lambda nodes, a, b, n: torch.nn.Parameter(torch.ones(n + 2)),
    "array": lambda nodes, a, b, n: np.arange(n + 2.0),
    "view": lambda nodes, a, b, n: view_of(pick(nodes, a), n),
    "iterator": lambda nodes, a, b, n: iter([pick(nodes, a), n]),
}
CHANGES = ("link", "unlink", "write", "rebind", "advance", "gradient")


def pick(nodes, place):
    return nodes[place % len(nodes)] if nodes else None


def view_of(value, number):
    if isinstance(value, torch.Tensor):
        return value.detach()[number % len(value) :: 2]
    return value[number % len(value) :: 2] if isinstance(value, np.ndarray) else [value]


def link(holder, key, value):
    match holder:
        case dict():
            holder[key] = value
        case list() | collections.deque():
            holder.append(value)
        case set():
            holder.add(key)
        case Node() | Slots() | Foreign() | types.SimpleNamespace():
            setattr(holder, "abc"[key % 3], value)


def unlink(holder, key):
    match holder:
        case dict():
            holder.pop(key, None)
        case list() | collections.deque() | set() if holder:
            holder.pop()
        case Node() | Slots() | Foreign() | types.SimpleNamespace() if hasattr(
            holder, "abc"[key % 3]
        ):
            delattr(holder, "abc"[key % 3])


def apply(nodes, operation):
    kind, a, b, number = operation
    value = pick(nodes, a)
    match kind:
        case "link":
            link(value, number, pick(nodes, b))
        case "unlink":
            unlink(value, number)
        case "write" if isinstance(value, torch.Tensor):
            value.data.fill_(number)
        case "write" if isinstance(value, np.ndarray):
            value[...] = number
        case "rebind" if isinstance(value, torch.Tensor):
            value.data = torch.full((number + 1,), float(number))
        case "gradient" if isinstance(value, torch.nn.Parameter):
            value.grad = torch.full_like(value, number)
        case "advance" if hasattr(value, "__next__"):
            next(value, None)
        case _ if kind in MAKERS:
            nodes.append(MAKERS[kind](nodes, a, b, number))


numbers = st.integers(0, 20)
operation = st.tuples(
    st.one_of(st.sampled_from(list(MAKERS)), st.sampled_from(["link", *CHANGES])),
    numbers,
    numbers,
    numbers,
)
operations = st.lists(operation, min_size=6, max_size=30)


class Isomorphism:
    """Compares two graphs, and who in them is the same object or the same memory.

    Tuples are compared by what they hold: who changes nothing need not be one object.
    """

    def __init__(self):
        self.there, self.back = {}, {}

    def same(self, one, two):
        waiting = [(one, two)]
        while waiting:
            before, after = waiting.pop()
            assert type(before) is type(after)
            if isinstance(before, (int, str, float, type(None), bool)):
                assert before == after
                continue
            if not isinstance(before, tuple) and not self.first(id(before), id(after)):
                continue
            if isinstance(before, (torch.Tensor, np.ndarray)):
                self.first(geometry(before).block, geometry(after).block)
            waiting += zip(self.parts(before), self.parts(after), strict=True)

    def first(self, one, two):
        known = one in self.there or two in self.back
        assert self.there.setdefault(one, two) == two
        assert self.back.setdefault(two, one) == one
        return not known

    def parts(self, value):
        match value:
            case torch.Tensor() | np.ndarray():
                return [
                    geometry(value)[2:5],
                    str(value.dtype),
                    tuple(value.tolist()),
                    getattr(value, "requires_grad", None),
                    getattr(value, "grad", None),
                ]
            case dict():
                return [*value, *value.values()]
            case set():
                return sorted(value)
            case Slots():
                return [getattr(value, name, "unset") for name in Slots.__slots__]
            case Node() | Foreign() | types.SimpleNamespace():
                return [*vars(value), *vars(value).values()]
            case _ if hasattr(value, "__next__"):
                return list(copy.copy(value))
            case type() | types.BuiltinFunctionType():
                return []
        return list(value)


@pytest.mark.slow
@given(operations, operations, st.lists(numbers, min_size=3, max_size=8))
def test_graphs_are_found_again(before, after, roots):
    nodes = []

    def setup():
        nodes[:] = []
        for operation in before:
            apply(nodes, operation)
        return {str(place): pick(nodes, place) for place in roots}

    def train(run):
        for operation in after:
            apply(nodes, operation)
        run |= {f"later {place}": pick(nodes, place) for place in roots}

    runs = resume(setup, train, __name__)
    compare = Isomorphism()
    compare.same(runs.saved, runs.resumed)
