"""Objects of Python's and the program's own are found again, with their identities."""

import argparse
import collections
import enum
import functools
import itertools
import logging
import queue
import random
import threading
import types
import weakref
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from heap_runs import resume


class Plain:
    count = 0
    registry: ClassVar[dict] = {}

    def __init__(self, value=0):
        self.value = value

    def remember(self, value, seen=[]):  # noqa: B006 (that it keeps is the point)
        seen.append(value)
        return seen


@dataclass(frozen=True)
class Frozen:
    rate: float
    tags: list = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    best: float | None
    history: list


class Fraction:
    __slots__ = ("p", "q")


class Whole(Fraction):
    """As SymPy's Integer: its class says what q is, so that its objects have no such slot."""

    __slots__ = ()
    q = 1


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


class Point(NamedTuple):
    step: int
    notes: list


def counting(value):
    counting.calls += 1
    return value


counting.calls = 0


@functools.lru_cache
def cached(value):
    return [value]


def counter():
    count = 0

    def add(by=1):
        nonlocal count
        count += by
        return count

    return add


def both(setup, train, **kinds):
    runs = resume(setup, train, __name__, **kinds)
    return runs.saved, runs.resumed


def test_containers_of_all_kinds_change_in_place():
    def setup():
        made = {
            "list": [1, [2]],
            "dict": {"a": 1, "b": []},
            "ordered": collections.OrderedDict(a=1, b=2, c=3),
            "default": collections.defaultdict(list, a=[1]),
            "counter": collections.Counter("aab"),
            "deque": collections.deque([1, 2, 3], maxlen=3),
            "set": {1, 2},
            "bytes": bytearray(b"ab"),
            "space": types.SimpleNamespace(a=1),
            "arguments": argparse.Namespace(rate=0.1),
        }
        return {**made, "all": list(made.values())}

    def train(run):
        run["list"][1].append(run["list"])
        del run["dict"]["a"]
        run["dict"]["c"] = run["dict"]["b"]
        run["ordered"].move_to_end("a")
        run["default"]["new"].append(2)
        run["counter"].update("bbbc")
        run["deque"].append(4)
        run["set"].discard(1)
        run["bytes"] += b"c"
        run["space"].b = run["list"]
        run["arguments"].rate = 0.2

    _, run = both(setup, train)
    assert all(run[name] is each for name, each in zip(run, run["all"], strict=False))
    assert run["list"][0] == 1
    assert run["list"][1][1] is run["list"]
    assert list(run["dict"]) == ["b", "c"]
    assert run["dict"]["c"] is run["dict"]["b"]
    assert list(run["ordered"].items()) == [("b", 2), ("c", 3), ("a", 1)]
    run["ordered"].popitem(last=False)
    assert list(run["ordered"]) == ["c", "a"]
    assert run["default"] == {"a": [1], "new": [2]}
    assert run["default"]["more"] == []
    assert run["counter"] == {"a": 2, "b": 4, "c": 1}
    assert list(run["deque"]) == [2, 3, 4]
    assert run["deque"].maxlen == 3
    assert run["set"] == {2}
    assert run["bytes"] == b"abc"
    assert run["space"].b is run["list"]
    assert run["arguments"].rate == 0.2


def test_a_slot_that_a_subclass_hides_is_no_attribute():
    def setup():
        whole = Whole()
        whole.p = 1
        return {"whole": whole}

    def train(run):
        run["whole"].p = 2

    _, run = both(setup, train)
    assert (run["whole"].p, run["whole"].q) == (2, 1)


def test_objects_made_after_set_up_come_back():
    def train(run):
        plain = Plain()
        plain.self = plain
        run |= {
            "plain": plain,
            "frozen": Frozen(0.1, [plain]),
            "slotted": Slotted(None, [1]),
            "phase": Phase.MAIN,
            "point": Point(3, [plain]),
            "deque": collections.deque([plain], maxlen=2),
            "default": collections.defaultdict(lambda: 7),
            "ordered": collections.OrderedDict(b=plain),
            "set": {Phase.WARM, "a"},
            "weak": weakref.ref(plain),
            "weakly": weakref.WeakKeyDictionary({plain: 1}),
            "partial": functools.partial(plain.remember, 3),
            "method": plain.remember,
            "log": logging.getLogger("outlast.test"),
            "view": types.MappingProxyType({"a": plain}),
        }

    _, run = both(dict, train)
    plain = run["plain"]
    assert plain.self is plain
    assert run["frozen"].tags[0] is plain
    assert run["slotted"] == Slotted(None, [1])
    assert run["phase"] is Phase.MAIN
    assert run["point"].notes[0] is plain
    assert run["deque"][0] is plain
    assert run["deque"].maxlen == 2
    assert run["default"]["anything"] == 7
    assert run["ordered"]["b"] is plain
    assert run["set"] == {Phase.WARM, "a"}
    assert run["weak"]() is plain
    assert run["weakly"][plain] == 1
    assert run["method"].__self__ is plain
    assert run["partial"].func.__self__ is plain
    assert run["log"] is logging.getLogger("outlast.test")
    assert run["view"]["a"] is plain


def test_objects_of_set_up_change_in_place():
    def setup():
        plain = Plain(1)
        return {
            "plain": plain,
            "frozen": Frozen(0.1),
            "slotted": Slotted(None, []),
            "point": Point(3, []),
            "phases": [Phase.WARM],
            "weakly": weakref.WeakKeyDictionary({plain: 1}),
        }

    def train(run):
        run["plain"].other = run["slotted"]
        del run["plain"].value
        run["frozen"].tags.append(run["plain"])
        run["slotted"].best = 0.5
        run["slotted"].history.append(run["frozen"])
        run["point"].notes.append(1)
        run["phases"].append(Phase.MAIN)
        run["weakly"][run["plain"]] = 2

    saved, run = both(setup, train)
    assert vars(run["plain"]) == {"other": run["slotted"]}
    assert run["plain"].other is run["slotted"]
    assert run["frozen"].tags[0] is run["plain"]
    assert run["slotted"].best == 0.5
    assert run["slotted"].history[0] is run["frozen"]
    assert run["point"] == saved["point"]
    assert run["phases"] == [Phase.WARM, Phase.MAIN]
    assert run["weakly"][run["plain"]] == 2


def test_variables_of_classes_come_back():
    Plain.count, Plain.registry = 0, {}

    def setup():
        Plain.count = 0
        Plain.registry.clear()
        Plain.__dict__.get("late") and delattr(Plain, "late")
        return {"class": Plain, "object": Plain()}

    def train(run):
        Plain.count += 3
        Plain.registry["a"] = run["object"]
        Plain.late = 5

    _, run = both(setup, train)
    assert Plain.count == 3
    assert Plain.registry["a"] is run["object"]
    assert Plain.late == 5


def test_what_functions_keep_comes_back():
    defaults = Plain.remember.__defaults__[0]

    def setup():
        counting.calls = 0
        defaults.clear()
        return {"function": counting, "add": counter(), "cached": cached, "plain": Plain()}

    def train(run):
        counting(1)
        run["add"](5)
        run["cached"](1)
        run["plain"].remember(9)

    _, run = both(setup, train)
    assert counting.calls == 1
    assert run["add"]() == 6
    assert run["cached"](1) == [1]
    assert defaults == [9]


def test_functions_made_after_set_up_come_back_with_what_they_enclose():
    def setup():
        return {"scale": [2]}

    def train(run):
        scale = run["scale"]
        add = counter()
        add(5)

        def factorial(number):
            return 1 if number == 0 else number * factorial(number - 1)

        run |= {
            "add": add,
            "lambda": lambda value, by=scale: value * by[0],
            "factorial": factorial,
            "named": functools.partial(factorial, 3),
        }

    _, run = both(setup, train)
    assert run["add"]() == 6
    assert run["factorial"](4) == 24
    assert run["named"]() == 6
    run["scale"][0] = 10
    assert run["lambda"](3) == 30


def test_iterators_stay_where_they_were():
    def setup():
        items = list(range(10))
        return {
            "items": items,
            "early": iter(items),
            "held": Plain(enumerate(items)),
            "foreign": types.SimpleNamespace(each=itertools.cycle(items)),
            "partial": functools.partial(next, iter(items)),
        }

    def train(run):
        run["late"] = zip(run["items"], reversed(run["items"]), strict=True)
        run["chunks"] = itertools.islice(run["items"], 2, None, 2)
        for name in ("early", "late", "chunks"):
            next(run[name])
        next(run["held"].value)
        next(run["foreign"].each)
        run["partial"]()

    saved, run = both(setup, train)
    for name in ("early", "late", "chunks"):
        assert list(saved[name]) == list(run[name])
    assert list(saved["held"].value) == list(run["held"].value)
    assert next(run["foreign"].each) == 1
    assert run["partial"]() == 1


def test_sources_of_random_numbers_go_on():
    def setup():
        return {
            "own": random.Random(1),
            "numpy": np.random.default_rng(1),
            "old": np.random.RandomState(1),
            "torch": torch.Generator().manual_seed(1),
        }

    def draw(run):
        return (
            run["own"].random(),
            run["numpy"].random(),
            run["old"].rand(),
            torch.rand((), generator=run["torch"]).item(),
        )

    def train(run):
        draw(run)
        run["late"] = torch.Generator().manual_seed(3)
        torch.rand((), generator=run["late"])

    saved, run = both(setup, train)
    assert draw(saved) == draw(run)
    assert torch.equal(saved["late"].get_state(), run["late"].get_state())


def test_what_belongs_to_the_process_stays_as_set_up_makes_it():
    def setup():
        return {
            "lock": threading.Lock(),
            "queue": queue.SimpleQueue(),
            "held": Plain(threading.Event()),
            "log": logging.getLogger("outlast.test"),
        }

    def train(run):
        run["again"] = [run["lock"], run["queue"]]

    _, run = both(setup, train)
    assert run["again"] == [run["lock"], run["queue"]]
    assert run["held"].value.is_set() is False


def test_a_kind_with_a_reducer_is_written_down_by_it():
    def setup():
        return {"stream": (each for each in [1]), "holder": Plain()}

    def train(run):
        run["holder"].value = run["stream"]

    reducers = {types.GeneratorType: lambda value: (iter, ([7, 8],))}
    _, run = both(setup, train, reducers=reducers)
    assert run["holder"].value is run["stream"]
    assert list(run["stream"]) == [7, 8]


def test_a_kind_with_a_state_stays_the_object_of_set_up():
    def setup():
        lock = threading.Semaphore(1)
        return {"lock": lock, "holder": types.SimpleNamespace(lock=lock)}

    def train(run):
        run["lock"].release()

    def put(value, state):
        value._value = state

    states = {threading.Semaphore: (lambda value: value._value, put)}
    _, run = both(setup, train, states=states)
    assert run["lock"] is run["holder"].lock
    assert run["lock"]._value == 2


def test_what_set_up_makes_by_the_time_of_day_is_overwritten():
    made = itertools.count()

    def setup():
        return {"object": Plain(f"run-{next(made)}"), "arguments": argparse.Namespace(a=next(made))}

    saved, run = both(setup, lambda run: None)
    assert run["object"].value == saved["object"].value == "run-0"
    assert run["arguments"].a == 1


def test_large_plain_data_is_written_down_only_when_it_changes():
    def setup():
        return {
            "rows": [[number, str(number)] for number in range(20_000)],
            "words": [str(number) for number in range(20_000)],
        }

    def change(run):
        run["rows"][7][1] = "other"
        run["words"][5] = "other"

    runs = resume(setup, lambda run: None, __name__)
    assert len(runs.captured.program) < 10_000
    assert runs.resumed["rows"] == runs.saved["rows"]
    runs = resume(setup, change, __name__)
    assert len(runs.captured.program) > 100_000
    assert runs.resumed["rows"][7][1] == "other"
    assert runs.resumed["words"][5] == "other"
