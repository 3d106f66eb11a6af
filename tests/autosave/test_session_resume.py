"""Programs that are stopped at each of their steps and come back to it."""

from __future__ import annotations

from textwrap import dedent

import pytest
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
    "the same function trains twice": """
        def fit(name, steps):
            for step in range(steps):
                weights.backward(); weights.step()
                log.append((name, step, weights.value))
            return name
        def main():
            first = fit("first", 3)
            second = fit("second", 2)
            print(first, second, log)
        main()
        """,
    "calls on the way take their arguments once": """
        numbers = iter(range(100))
        def fit(number, more):
            for step in range(2):
                weights.backward(); weights.step()
            return number + more + weights.value
        for _ in range(3):
            log.append((next(numbers), fit(next(numbers), more=random.random())))
        print(log, next(numbers))
        """,
    "an object is made in the statement that trains": """
        class Trainer:
            def __init__(self, name): self.name, self.seen = name, []
            def fit(self):
                for step in range(3):
                    weights.backward(); weights.step()
                    self.seen.append(weights.value)
                return self
        for name in ("a", "b"):
            log.append(Trainer(name).fit().seen)
        print(log)
        """,
    "a function that trains calls itself": """
        def fit(depth):
            for step in range(2):
                weights.backward(); weights.step()
                log.append((depth, step, weights.value))
            if depth:
                below = fit(depth - 1)
                log.append((depth, below))
            return depth * 10
        print(fit(2), log, weights.value)
        """,
    "functions and classes are defined in the function that trains": """
        def fit(power):
            import math
            class Scale:
                factor = power
            def change(x):
                return math.floor(x ** power) * Scale.factor
            for step in range(2):
                weights.backward(); weights.step()
                log.append(change(weights.value))
        for power in (1, 2):
            fit(power)
        print(log)
        """,
    "decorated functions with own wrappers": """
        import functools
        def counted(function):
            @functools.wraps(function)
            def wrapper(*args):
                result = function(*args)
                log.append("called")
                return result
            return wrapper
        @counted
        def fit(number):
            for step in range(2):
                weights.backward(); weights.step()
            return number
        for number in range(3):
            log.append(fit(number))
        print(log, weights.value)
        """,
    "for with else, finally and break": """
        def fit(limit):
            try:
                for step in range(4):
                    weights.backward(); weights.step()
                    if step == limit:
                        break
                else:
                    log.append("else")
            finally:
                log.append(("finally", weights.value))
        for limit in (1, 9):
            fit(limit)
        print(log)
        """,
    "names that are deleted, walrus and star targets": """
        def fit():
            *first, last = range(4)
            step = 0
            while (left := last - step) > 0:
                weights.backward(); weights.step()
                step += 1
                if step == 2:
                    del first
            log.append((left, last, "first" in locals()))
        fit(); fit()
        print(log, weights.value)
        """,
    "two calls in one line, in lines of their own, and nested loops around": """
        def fit(name):
            for step in range(2):
                weights.backward(); weights.step()
                log.append((name, weights.value))
        def both():
            fit("a"); fit("b")
            for _ in range(2): fit(
                "c"
            ); fit("d")
        while len(log) < 20: both()
        print(log)
        """,
    "a function that is handed to another": """
        def run(function, *more):
            log.append(function(*more))
        def fit(name):
            for step in range(2):
                weights.backward(); weights.step()
            return name
        for name in ("a", "b"):
            run(fit, name)
        print(log, weights.value)
        """,
    "errors that are handled, and groups of them": """
        def fit(limit):
            try:
                for step in range(4):
                    weights.backward(); weights.step()
                    if step == limit: raise ExceptionGroup("all", [ValueError(step)])
            except* ValueError as group:
                log.append(("caught", str(group.exceptions[0])))
            match limit:
                case 1: log.append("one")
                case [*others] | others: log.append(others)
        for limit in (1, 2):
            try:
                fit(limit)
            except KeyError:
                pass
            else:
                log.append("fine")
        print(log, weights.value)
        """,
    "contexts of its own that have ended before": """
        from contextlib import contextmanager
        @contextmanager
        def noted(name):
            try: yield name
            finally: log.append(("out", name))
        class Counted:
            def __enter__(self): return self
            def __exit__(self, *error): log.append("counted")
        for turn in range(2):
            with noted("w") as w, Counted():
                for step in range(2):
                    weights.backward(); weights.step()
            log.append(w)
        with noted("last"), Counted() as counted:
            for step in range(2):
                weights.backward(); weights.step()
        for step in range(2):
            weights.backward(); weights.step()
        print(log, weights.value)
        """,
    "a context of set-up that has ended before": """
        from contextlib import contextmanager
        @contextmanager
        def noted(name):
            try: yield name
            finally: log.append(("out", name))
        with noted("first"):
            for step in range(2):
                weights.backward(); weights.step()
        for step in range(2):
            weights.backward(); weights.step()
        print(log, weights.value)
        """,
    "private names in methods": """
        class Trainer:
            def fit(self, __start):
                __count = __start
                for step in range(2):
                    weights.backward(); weights.step()
                    __count += weights.value
                return __count
        for start in (1, 2):
            log.append(Trainer().fit(start))
        print(log)
        """,
    "a try that set-up is in when another call is come back to": """
        def fit(name):
            for step in range(2):
                weights.backward(); weights.step()
            return name
        def main():
            try:
                log.append(fit("one"))
            except BaseException:
                log.append("caught")
                raise
            finally:
                log.append("finally")
            log.append(fit("two"))
        main()
        print(log, weights.value)
        """,
    "a closure keeps a count in its function": """
        def main():
            count = 0
            def more():
                nonlocal count
                count += weights.value
                return count
            for epoch in range(2):
                for step in range(2):
                    weights.backward(); weights.step()
                    log.append(more())
            return count
        print(main(), log)
        """,
    "globals are changed and deleted by functions": """
        total, gone = 0, 1
        def fit():
            global total, gone
            for step in range(3):
                weights.backward(); weights.step()
                total += weights.value
                if step == 1: del gone
        fit()
        print(total, "gone" in globals())
        """,
}


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_a_program_comes_back_to_each_step(script, style):
    assert check_every_step(script(STYLES[style])) > 3


@pytest.mark.slow
@pytest.mark.smoke
def test_a_frame_that_set_up_has_entered_gets_its_names_back_after_the_call(script):
    path = script(
        """
        import itertools, sys
        def fit():
            for step in range(3):
                weights.backward(); weights.step()
        def main():
            started = next(sys.modules["itertools"].runs)
            fit()
            print("started in run", started)
        main()
        """
    )
    import itertools

    itertools.runs = itertools.count(1)
    try:
        keeper = DictKeeper(2)
        run(path, keeper)
        assert run(path, DictKeeper(), keeper.saved) == "started in run 1\n"
    finally:
        del itertools.runs


@pytest.mark.slow
def test_files_that_a_with_has_opened_go_on_where_they_were(script, tmp_path):
    path = script(
        """
        from pathlib import Path
        folder = Path(__file__).parent
        for epoch in range(2):
            with open(folder / f"{epoch}.log", "w") as file:
                for step in range(3):
                    weights.backward(); weights.step()
                    print(weights.value, file=file)
        print([(folder / f"{each}.log").read_text() for each in range(2)])
        """
    )
    plain = run_plain(path)
    for step in range(1, 6):
        keeper = DictKeeper(step)
        run(path, keeper)
        assert run(path, DictKeeper(), keeper.saved) == plain


def test_steps_are_counted_through_all_loops(script):
    path = script(
        """
        for epoch in range(2):
            for step in range(3):
                weights.backward(); weights.step()
                if epoch and step == 1: break
        count = 0
        while count < 2:
            weights.backward(); weights.step()
            count += 1
        """
    )
    keeper = DictKeeper()
    run(path, keeper)
    assert keeper.asked == list(range(8))


@pytest.mark.slow
def test_modules_of_the_program_are_imported_rewritten_and_resumed(script):
    path = script(
        "import engine\nengine.run(weights, log)\nprint(log, engine.total)",
        engine="""
            total = 0
            def run(weights, log):
                global total
                for step in range(4):
                    weights.backward(); weights.step()
                    total += weights.value
                    log.append(total)
            """,
    )
    assert check_every_step(path) == 5


@pytest.mark.slow
def test_a_way_that_is_not_found_is_told(script):
    path = script(
        """
        import sys
        def fit():
            for step in range(2):
                weights.backward(); weights.step()
        def other():
            for step in range(2):
                weights.backward(); weights.step()
        if sys.modules["itertools"].way: fit()
        else: other()
        """
    )
    import itertools

    itertools.way = True
    try:
        keeper = DictKeeper(1)
        run(path, keeper)
        itertools.way = False
        with pytest.raises(AutosaveError, match="did not come back to the loop in line 13"):
            run(path, DictKeeper(), keeper.saved)
    finally:
        del itertools.way


def test_errors_of_the_program_pass_with_their_own_lines(script):
    path = script("for step in range(3):\n    weights.backward(); weights.step()\n    log[step]\n")
    with pytest.raises(IndexError) as error:
        run(path, DictKeeper())
    frames = [each for each in error.traceback if each.path == path]
    assert [each.lineno + 1 for each in frames] == [path.read_text().count("\n")]


@pytest.mark.slow
def test_what_goes_another_way_after_a_restore_stops_the_run(script):
    path = script(
        """
        import sys, torch
        model = torch.nn.Linear(2, 1)
        for step in range(6):
            model.weight.data += sys.modules["itertools"].hidden
            weights.backward(); weights.step()
        print("end")
        """
    )
    import itertools

    itertools.hidden = 1.0
    try:
        keeper = DictKeeper(2, stops=False)
        assert run(path, keeper) == "end\n"
        assert sorted(keeper.digests) == [3, 4, 5, 6]

        again = DictKeeper()
        again.digests = keeper.digests
        assert run(path, again, keeper.saved) == "end\n"

        itertools.hidden = 2.0
        with pytest.raises(
            AutosaveError, match=r"after step 3 `__main__.model.*weight'\]` differs"
        ):
            run(path, again, keeper.saved)
    finally:
        del itertools.hidden


@pytest.mark.slow
def test_an_optimizer_that_nothing_leads_to_any_more_stops_no_run(script):
    # Set-up names the first optimizer, and so keeps it; a life that begins behind it has another.
    path = script("""
        import torch

        def train(model, steps):
            optimizer = torch.optim.Adam(model.parameters())
            for step in range(steps):
                model(torch.randn(3, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        model = torch.nn.Linear(2, 1)
        train(model, 3)
        train(model, 5)
        print(model.weight)
    """)
    first = DictKeeper(5, stops=False)
    expected = run(path, first)
    assert sorted(first.digests) == [6, 7, 8]
    later = DictKeeper()
    later.digests = first.digests
    assert run(path, later, first.saved) == expected


@pytest.mark.slow
def test_random_numbers_that_another_source_has_drawn_stop_the_run(script):
    path = script(
        """
        import sys
        for step in range(6):
            weights.backward(); weights.step()
            if sys.modules["itertools"].hidden: random.random()
        """
    )
    import itertools

    itertools.hidden = False
    try:
        keeper = DictKeeper(2, stops=False)
        run(path, keeper)
        itertools.hidden = True
        again = DictKeeper()
        again.digests = keeper.digests
        with pytest.raises(AutosaveError, match="after step 3 the state of the random numbers"):
            run(path, again, keeper.saved)
    finally:
        del itertools.hidden
