"""State that is not seen at once: in Python's own objects, caches, wrappers, switches and hooks."""

from __future__ import annotations

from textwrap import dedent

import pytest
import torch
from rerun import DictKeeper, check_every_step, run, run_plain

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
    "queues, arrays, streams, shared values, C data and events": """
        import array, collections, ctypes, io, multiprocessing, queue, threading
        waiting, simple, stack = queue.Queue(), queue.SimpleQueue(), queue.LifoQueue()
        for number in range(3): waiting.put(number); simple.put([number])
        numbers, grown = array.array("d", [0.0] * 4), array.array("l")
        text, data = io.StringIO(), io.BytesIO(b"abc")
        value, row = multiprocessing.Value("i", 0), multiprocessing.Array("d", 3)
        class Pair(ctypes.Structure):
            _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double * 2)]
        pair, late = Pair(), threading.Event()
        chain, count = collections.ChainMap({}, {"a": 1}), collections.Counter()
        last = collections.deque(maxlen=2)
        for step in range(5):
            weights.backward(); weights.step()
            waiting.put(waiting.get() + weights.value); stack.put(step)
            first = simple.get(); first.append(step); simple.put(first)
            numbers[step % 4] += weights.value; grown.append(step)
            text.write(f"{weights.value} "); data.write(b"x%d" % step)
            value.value += step
            row[step % 3] += 1.5; pair.a += step; pair.b[1] += 0.5
            if step == 2: late.set()
            chain["b"] = step; count[step % 2] += 1; last.append(step)
            log.append((step, waiting.qsize(), late.is_set()))
        print(log, list(waiting.queue), stack.queue, [simple.get() for _ in range(3)])
        print(numbers, grown, text.getvalue(), data.getvalue(), data.tell())
        print(value.value, list(row), pair.a, list(pair.b), chain, count, last)
        """,
    "attributes beside what is hidden": """
        import array, ctypes, io, queue, threading
        class Replay(queue.Queue):
            def __init__(self): super().__init__(); self.n, self.seen = 0, []
        class Simple(queue.SimpleQueue):
            n = 0
        class Flag(threading.Event):
            def __init__(self): self.count = 0; super().__init__()
        class Tee(io.StringIO):
            def __init__(self): super().__init__(); self.n, self.lines = 0, []
        class Data(io.BytesIO): n = 0
        class Bytes(bytearray): n = 0
        class Numbers(array.array): n = 0
        class Pair(ctypes.Structure):
            _fields_ = [("a", ctypes.c_int)]
            n = 0
        replay, simple, flag, tee = Replay(), Simple(), Flag(), Tee()
        others = data, more, numbers, pair = Data(), Bytes(b"x"), Numbers("i", [1, 2]), Pair()
        for step in range(4):
            weights.backward(); weights.step()
            replay.put(step); replay.seen.append(step); simple.put([step]); tee.write(str(step))
            if step % 2: simple.get()
            tee.lines.append(step); flag.count += 1; pair.a += 2
            for each in (replay, simple, tee, *others): each.n += 1
        print(list(replay.queue), replay.seen, flag.count, flag.is_set(), tee.getvalue(), tee.lines)
        print([each.n for each in (replay, simple, tee, *others)], pair.a, more, numbers)
        print([simple.get() for _ in range(2)], replay.qsize(), simple.qsize())
        """,
    "a thread that puts things elsewhere": """
        import queue, threading
        begun, ended, waiting = threading.Event(), threading.Event(), queue.Queue()
        class Client:
            def put(self, what): begun.set(); ended.wait()
        client = Client()
        def beat(): client.put("alive")
        thread = threading.Thread(target=beat, daemon=True)
        thread.start(); begun.wait()
        for step in range(3):
            weights.backward(); weights.step()
            waiting.put(step)
        ended.set(); thread.join()
        print(list(waiting.queue))
        """,
    "tables in temporary files": """
        import csv, tempfile
        file = tempfile.NamedTemporaryFile("w+", newline="")
        rows = csv.writer(file, delimiter=";")
        class Sink:
            def __init__(self): self.lines = []; self.write = lambda text: self.lines.append(text)
        sink = Sink()
        others = csv.writer(sink)
        for step in range(3):
            weights.backward(); weights.step()
            rows.writerow([step, weights.value]); others.writerow([step, "a,b"])
        # What lay in the temporary file is gone with it.
        print(sink.lines, rows.dialect.delimiter)
        """,
    "caches, default arguments and children of seeds": """
        import functools
        import numpy as np
        @functools.lru_cache(maxsize=3)
        def noise(number, scale=1): return [random.random() * scale]
        @functools.cache
        def other(number): return random.random()
        def remember(x, seen=[], *, more={}):
            seen.append(x); more[x] = len(seen)
            return more
        class Holder:
            @functools.cached_property
            def chosen(self): return random.random()
        holder, seed, generator = Holder(), np.random.SeedSequence(3), np.random.default_rng(4)
        for step in range(6):
            weights.backward(); weights.step()
            noise(step % 4, scale=2)[0] += 1
            log.append((noise(step % 2), other(step % 2), len(remember(step))))
            log.append(holder.chosen if step > 1 else 0)
            log.append(int(generator.spawn(1)[0].integers(1000)))
            log.append(int(np.random.default_rng(seed.spawn(1)[0]).integers(1000)))
        print(log, remember(9), noise.cache_info(), other.cache_info())
        """,
    "caches of what is large, or cannot be saved": """
        import functools, threading, torch
        @functools.lru_cache(maxsize=None)
        def image(number): return torch.full((300_000,), float(number))
        @functools.cache
        def lock(number): return threading.Lock()
        image(9), lock(9)
        for step in range(5):
            weights.backward(); weights.step()
            with lock(step % 2): log.append(image(step % 3).sum().item())
        print(log)
        """,
    "wrappers that do things before and after": """
        import functools
        def counted(function):
            @functools.wraps(function)
            def wrapper(*args):
                name = f"call {args} {weights.value}"
                result = function(*args)
                log.append((name, result))
                return result
            return wrapper
        def repeated(times):
            def decorate(function):
                def wrapper(*args):
                    for turn in range(times):
                        result = function(*args)
                        log.append((turn, args))
                    return result
                return wrapper
            return decorate
        class Timed:
            def __init__(self, function): self.function = function
            def __call__(self, *args):
                begun = weights.value
                result = self.function(*args)
                log.append(("timed", begun))
                return result
        @counted
        def first(number):
            for step in range(2): weights.backward(); weights.step()
            return number
        @repeated(2)
        def second(number):
            for step in range(2): weights.backward(); weights.step()
            return number
        @Timed
        def third(number):
            for step in range(2): weights.backward(); weights.step()
            return number
        for number in range(2): log.append(first(number))
        second(7)
        third(8)
        third(9)
        print(log, weights.value)
        """,
    "what is entered on a stack": """
        import contextlib
        @contextlib.contextmanager
        def noted(name):
            log.append(("in", name))
            yield name
            log.append(("out", name))
        def fit(number):
            with contextlib.ExitStack() as stack:
                stack.enter_context(noted(number))
                stack.callback(log.append, ("called", number))
                for step in range(2): weights.backward(); weights.step()
        for number in range(3): fit(number)
        print(log)
        """,
    "arguments that the call changes": """
        class Sum:
            total = 0
            def add(self, number):
                for step in range(2):
                    weights.backward(); weights.step()
                    self.total += number
                return number
        def fit(number, others):
            others.pop(0)
            for step in range(2):
                weights.backward(); weights.step()
                log.append((number, step))
            return number
        todo, results, summed = [3, 2, 1], {}, Sum()
        while todo:
            results[len(todo)] = fit(todo[0], todo)
        for number in range(1, 3):
            log.append(summed.total + summed.add(number))
        print(results, log)
        """,
    "functions in a dictionary": """
        from functools import partial
        def run(name, rate):
            for step in range(2):
                weights.backward(); weights.step()
                log.append((name, rate))
            return weights.value
        variants = {"a": partial(run, "a", 1), "b": partial(run, "b", rate=2)}
        for name, variant in variants.items(): log.append((name, variant()))
        log.append(variants["a"]())
        def other(number):
            for step in range(2): weights.backward(); weights.step()
            return -number
        def another(number):
            for step in range(2): weights.backward(); weights.step()
            return number
        for phase, number in [(other, 1), (another, 2), (other, 3)]: log.append(phase(number))
        print(log)
        """,
    "sets that lose members": """
        left = set(range(0, 400, 3))
        pairs = {(number, number * number) for number in range(40)}
        for step in range(6):
            weights.backward(); weights.step()
            log.append(list(left)[weights.value % len(left)])
            left.discard(log[-1])
            left -= set(list(left)[step::3])
            pairs.discard(next(iter(pairs)))
        print(log, list(left), list(pairs))
        """,
    "collections of addresses": """
        class Part: pass
        parts = [Part() for _ in range(3)]
        uses, seen = {id(each): 0 for each in parts}, set()
        for step in range(4):
            weights.backward(); weights.step()
            uses[id(parts[step % 3])] += 1
            seen.add(id(parts[step // 2]))
        print([uses[id(each)] for each in parts], [id(each) in seen for each in parts])
        """,
    "a variable that a function of set-up shares with the loop": """
        def main():
            count, made = 0, []
            def tick():
                nonlocal count
                count += 1
            made.append(lambda: count)
            for step in range(3):
                weights.backward(); weights.step()
                tick()
                count += 10
                log.append((count, made[0]()))
            print(count, made[0](), log)
        main()
        """,
    "functions made in each turn of a loop": """
        import torch
        def main():
            rest = 3
            for fold in range(rest):
                warmup = 2 + fold
                parameter = torch.nn.Parameter(torch.ones(2))
                optimizer = torch.optim.SGD([parameter], lr=0.1)
                schedule = torch.optim.lr_scheduler.LambdaLR(
                    optimizer, lambda epoch: min(1.0, (epoch + 1) / warmup)
                )
                hooks = []
                hooks.append(lambda: fold)
                for step in range(2):
                    optimizer.zero_grad()
                    (parameter.sum() * 2).backward()
                    optimizer.step()
                    schedule.step()
                log.append((parameter.tolist(), schedule.get_last_lr(), hooks[0]()))
            rest = 7
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / rest)
            for step in range(2):
                (parameter.sum() * 2).backward()
                optimizer.step()
                schedule.step()
            print(log, parameter.tolist())
        main()
        """,
    "switches of torch": """
        import torch
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        for phase in range(2):
            for step in range(2):
                weights.backward(); weights.step()
                log.append((torch.get_default_dtype(), torch.get_float32_matmul_precision()))
                log.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))
                log.append((torch.is_grad_enabled(), torch.is_anomaly_enabled()))
            torch.set_default_dtype(torch.float64)
            torch.set_float32_matmul_precision("high")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_grad_enabled(False)
            torch.set_num_threads(2)
        print(log)
        """,
    "hooks of single tensors": """
        import torch
        def double(grad): return grad * 2
        weight, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        made = []
        handle = other.register_hook(lambda grad: grad * 3)
        optimizer = torch.optim.SGD([weight, other], lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            (weight.sum() * 2 + other.sum()).backward()
            optimizer.step()
            if step == 1:
                later = weight.register_hook(double)
                handle.remove()
                made.append(torch.nn.Parameter(torch.ones(1)))
                made[0].register_post_accumulate_grad_hook(weights.__class__.seen)
            if step == 3:
                later.remove()
            if step > 1:
                made[0].sum().backward()
            log.append((weight.tolist(), other.tolist(), weights.value))
        print(log)
        """,
    "parametrized modules": """
        import torch
        from torch import nn
        from torch.nn.utils.parametrizations import weight_norm
        from torch.nn.utils import parametrize
        torch.manual_seed(1)
        def fit(model, steps):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(steps):
                optimizer.zero_grad()
                model(torch.ones(3)).sum().backward()
                optimizer.step()
            log.append((type(model).__name__, model.weight.tolist()))
        model = nn.Linear(3, 2)
        fit(model, 2)
        weight_norm(model)
        fit(model, 2)
        parametrize.remove_parametrizations(model, "weight")
        fit(model, 2)
        for fold in range(2): fit(weight_norm(nn.Linear(3, 2)), 2)
        print(log)
        """,
}


@pytest.fixture(autouse=True)
def switches():
    """Leaves torch's switches to other tests as they were."""
    threads = torch.get_num_threads()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_programs_end_as_if_never_stopped(script, style):
    text = STYLES[style].replace("weights.__class__.seen", "seen")
    count = "\ndef seen(parameter): weights.value += 100\n"
    assert check_every_step(script(f"{count}{dedent(text)}")) > 2


@pytest.mark.slow
def test_modules_that_are_found_at_run_time_are_resumed(script):
    path = script(
        """
        import importlib
        extra = importlib.import_module("ex" + "tra")
        for step in range(3):
            weights.backward(); weights.step()
            log.append(extra.count(weights.value))
        print(log, extra.total, extra.Kept.total)
        """,
        extra="""
            total = 0
            class Kept: total = 0
            def count(value):
                global total
                total += value
                Kept.total += 2
                return total, Kept.total
            """,
    )
    assert check_every_step(path) == 4


@pytest.mark.slow
@pytest.mark.parametrize("gone", [False, True])
def test_paths_of_setup_are_the_new_ones_where_the_old_are_gone(script, tmp_path_factory, gone):
    place = tmp_path_factory.mktemp("scratch")
    path = script(
        f"""
        import argparse, tempfile
        from pathlib import Path
        scratch = Path(tempfile.mkdtemp(dir={str(place)!r}))
        arguments = argparse.Namespace(place=scratch / "data")
        for step in range(3):
            weights.backward(); weights.step()
            later = scratch / "later"
        print(scratch, arguments.place, later)
        """
    )
    keeper = DictKeeper(2)
    run(path, keeper)
    (first,) = place.iterdir()
    if gone:
        first.rmdir()
    found = run(path, DictKeeper(), keeper.saved).split()
    (other,) = set(place.iterdir()) - {first}
    scratch = other if gone else first
    assert found == [str(scratch), str(scratch / "data"), str(scratch / "later")]


def test_large_results_are_computed_again_not_saved(script):
    keeper = DictKeeper(4)
    run(script(STYLES["caches of what is large, or cannot be saved"]), keeper)
    assert keeper.saved is not None
    assert not any(each.nbytes > 1_000_000 for each in keeper.saved.tensors.values())


def test_cached_functions_are_compiled_as_pythons_own(script):
    path = script(
        """
        import functools, torch
        @functools.lru_cache(maxsize=None)
        def scale(number): return torch.arange(number).float()
        graphs = []
        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward
        @torch.compile(backend=backend, fullgraph=True)
        def double(values): return values * scale(4)
        for step in range(4):
            weights.backward(); weights.step()
            log.append(double(torch.ones(4)).tolist())
        print(log, len(graphs))
        """
    )
    assert run(script=path, keeper=DictKeeper()) == run_plain(path)
    assert run_plain(path).endswith("1\n")


REFUSED = {
    "addresses in C data": (
        """
        import ctypes
        class Place(ctypes.Structure): _fields_ = [("at", ctypes.c_void_p)]
        place = Place()
        for step in range(4):
            weights.backward(); weights.step()
            place.at = step + 5
        print(place.at)
        """,
        r"`place`, a .*Place, cannot be saved: it has changed since",
    ),
    "what a hash has taken up": (
        """
        import hashlib
        seen = hashlib.sha256()
        for step in range(4):
            weights.backward(); weights.step()
            seen.update(b"x")
        print(seen.hexdigest())
        """,
        r"train\.py, line 12: `seen`, a _hashlib\.HASH, cannot be saved: it has changed since",
    ),
    "a thread that fills a queue": (
        """
        import queue, threading
        filled, ended = queue.Queue(2), threading.Event()
        def fill():
            number = 0
            while not ended.is_set():
                try: filled.put(number, timeout=0.05)
                except queue.Full: continue
                number += 1
        threading.Thread(target=fill, daemon=True).start()
        try:
            for step in range(4):
                weights.backward(); weights.step()
                log.append(filled.get())
        finally:
            ended.set()
        print(log)
        """,
        r"train\.py, line 13: `fill` fills a queue in a thread \(`__main__\.filled`\)",
    ),
    "a function that is called through another one that is not seen": (
        """
        def fit(number):
            for step in range(2): weights.backward(); weights.step()
        table = dict(fit=fit)
        def call(name, number):
            begun = weights.value
            table[name](number)
            log.append((number, begun))
        call("fit", 1)
        call("fit", 2)
        print(log)
        """,
        r"train\.py, line 14: `call` calls `fit`, which trains, in a way that is not seen",
    ),
    "a function that is called behind others in a way that is not seen": (
        """
        def one():
            for step in range(2): weights.backward(); weights.step()
        def two():
            for step in range(2): weights.backward(); weights.step()
        table = dict(one=one, two=two)
        for name in ("one", "two"): log.append(table[name]())
        print(log)
        """,
        r"train\.py, line 13: `two` trains, and was called several times, or after other training",
    ),
    "a context of the program around a function": (
        """
        import contextlib
        @contextlib.contextmanager
        def timer(name):
            log.append(("in", name))
            yield
        @timer("fit")
        def fit(number):
            for step in range(2): weights.backward(); weights.step()
        for number in range(2): fit(number)
        print(log)
        """,
        r"train\.py, line 16: `fit`, which trains, is decorated with a context of the program",
    ),
    "a variable that a later function shares with the loop": (
        """
        def fit(made):
            count = 0
            made.append(lambda: count)
            for step in range(2):
                weights.backward(); weights.step()
                count += 1
                log.append(made[-1]())
        made = []
        for number in range(2): fit(made)
        print(log)
        """,
        r"`fit\.<locals>\.<lambda>` was made after set-up and shares the variable `count`",
    ),
    "functions of earlier turns that share its variable with the loop": (
        """
        def fit(made):
            for number in range(3):
                made.append(lambda: number)
                for step in range(2):
                    weights.backward(); weights.step()
            return [each() for each in made]
        print(fit([]))
        """,
        r"`fit\.<locals>\.<lambda>` was made after set-up and shares the variable `number`",
    ),
    "addresses of what was made later": (
        """
        class Part: pass
        parts, uses = [], {}
        for step in range(4):
            weights.backward(); weights.step()
            parts.append(Part())
            uses[id(parts[-1])] = step
        print([uses[id(each)] for each in parts])
        """,
        r"has the `id\(\)` of an object that was made after set-up",
    ),
    "a class that has no name": (
        """
        class Part: pass
        part = Part()
        def other(): return type("Other", (Part,), {})
        for step in range(4):
            weights.backward(); weights.step()
            part.__class__ = other()
        print(part)
        """,
        r"train\.py, line 12: `part`, a .*Other, cannot be saved: it was given another class",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_resumed_is_refused_with_its_place(script, what):
    text, sentence = REFUSED[what]
    with pytest.raises(AutosaveError, match=sentence):
        run(script(text), DictKeeper(3))
