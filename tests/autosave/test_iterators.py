"""Iterators of libraries and of Python continue where they were, and bars with them."""

import io
import itertools
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import rich.progress
import tqdm as tqdm_package
import tqdm.auto
from loading import Numbers, written
from rerun import check_every_step
from torch.utils.data import DataLoader

from outlast.autosave.resume.files import reopened_logs
from outlast.autosave.resume.iterators import IN_PLACE, ShownIterator, resumable, resumable_bars
from outlast.autosave.resume.loaders import resumable_loaders
from outlast.errors import AutosaveError


def again(value: Any) -> Any:
    """`value` as another process would have it."""
    return pickle.loads(written(value))


def even(value: int) -> bool:
    """For filters."""
    return value % 2 == 0


ITERABLES: dict[str, Callable[[], Iterable[Any]]] = {
    "list": lambda: list(range(7)),
    "range": lambda: range(7),
    "dictionary": lambda: dict.fromkeys(range(7)),
    "items": lambda: dict.fromkeys(range(7), 1).items(),
    "values": lambda: dict.fromkeys(range(7), 1).values(),
    "text": lambda: "abcdefg",
    "reversed": lambda: reversed(range(7)),
    "reversed list": lambda: reversed(list(range(7))),
    "enumerate": lambda: enumerate("abcdefg"),
    "zip": lambda: zip("abcdefg", itertools.count(), strict=False),
    "map": lambda: map(str, range(7)),
    "filter": lambda: filter(even, range(14)),
    "islice": lambda: itertools.islice(itertools.count(), 7),
    "chain": lambda: itertools.chain(range(3), [7, 8, 9]),
    "chain of a list": lambda: itertools.chain.from_iterable([range(3), range(4)]),
    "cycle": lambda: itertools.islice(itertools.cycle(range(3)), 7),
    "repeat": lambda: itertools.repeat(4, 7),
    "accumulate": lambda: itertools.accumulate(range(7)),
    "zip_longest": lambda: itertools.zip_longest(range(4), range(7)),
    "product": lambda: itertools.product(range(3), range(2)),
    "permutations": lambda: itertools.permutations(range(3)),
    "tee": lambda: itertools.tee(range(7))[0],
    "bar": lambda: tqdm.auto.tqdm(range(7), file=io.StringIO()),
    "bar that is disabled": lambda: tqdm.auto.tqdm(range(7), disable=True),
    "bar with numbers": lambda: enumerate(tqdm.auto.tqdm(range(7), disable=True)),
    "trange": lambda: tqdm_package.trange(7, disable=True),
    "track": lambda: rich.progress.track(range(7), disable=True),
}


@pytest.mark.parametrize("name", ITERABLES)
def test_iterator_goes_on_where_it_was(name: str) -> None:
    with resumable_bars():
        expected = list(ITERABLES[name]())
        for place in range(len(expected) + 1):
            iterator = iter(ITERABLES[name]())
            taken = list(itertools.islice(iterator, place))
            assert taken + list(again(iterator)) == expected


LOADED: dict[str, Callable[[Any], Iterable[Any]]] = {
    "enumerate": enumerate,
    "islice": lambda loader: itertools.islice(loader, 5),
    "zip": lambda loader: zip(loader, loader, strict=True),
    "chain": lambda loader: itertools.chain(loader, loader),
    "cycle": lambda loader: itertools.islice(itertools.cycle(loader), 9),
    "map": lambda loader: map(len, loader),
    "bar": lambda loader: tqdm.auto.tqdm(loader, disable=True),
    "bar with numbers": lambda loader: enumerate(tqdm.auto.tqdm(loader, disable=True), 1),
    "numbers in a bar": lambda loader: tqdm.auto.tqdm(enumerate(loader), disable=True),
    "track": lambda loader: rich.progress.track(loader, disable=True),
}


@pytest.mark.parametrize("name", LOADED)
def test_iterator_around_a_loader_goes_on_where_it_was(name: str) -> None:
    def make() -> Iterator[Any]:
        return iter(LOADED[name](DataLoader(Numbers(), 4)))

    expected = [str(each) for each in make()]
    with resumable_bars(), resumable_loaders():
        for place in range(len(expected)):
            iterator = make()
            taken = [str(each) for each in itertools.islice(iterator, place)]
            assert taken + [str(each) for each in again(iterator)] == expected


def test_bar_goes_on_with_its_count_and_description(tmp_path: Path) -> None:
    with resumable_bars(), reopened_logs(resuming=False):
        with open(tmp_path / "bar", "w") as file:  # noqa: PTH123 (what programs use)
            bar = tqdm.auto.tqdm(range(7), desc="epoch 1", file=file, leave=True, mininterval=0)
            bar.set_postfix(loss=0.5)
            iterator = resumable(bar)
            for _ in range(3):
                next(iterator)
            new_bar, rest = again((bar, iterator))
        assert isinstance(rest, ShownIterator)
        assert next(rest) == 3
        assert (new_bar.n, new_bar.total, new_bar.desc, new_bar.postfix) == (
            3, 7, "epoch 1", "loss=0.5",
        )  # fmt: skip
        assert list(rest) == [4, 5, 6]
        assert (new_bar.n, new_bar.disable, new_bar.iterable) == (7, True, range(7))
        new_bar.fp.close()
    assert "epoch 1: 100%" in (tmp_path / "bar").read_text()


def test_bar_that_is_left_early_is_closed() -> None:
    with resumable_bars():
        bar = tqdm.auto.tqdm(range(7), file=io.StringIO())
        for value in bar:
            if value == 3:
                break
        assert (bar.n, bar.disable) == (3, True)


def test_bar_without_items_goes_on() -> None:
    bar = tqdm.auto.tqdm(total=9, file=io.StringIO(), disable=False, desc="steps")
    bar.update(4)
    bar.set_description("later")
    get, put = IN_PLACE[tqdm_package.tqdm]
    state = pickle.loads(pickle.dumps(get(bar)))
    other = tqdm.auto.tqdm(total=9, file=io.StringIO(), desc="steps")
    put(other, state)
    assert (other.n, other.desc) == (4, "later: ")
    other.update(2)
    assert other.n == 6
    bar.close()
    other.close()


def test_iterator_that_set_up_makes_is_put_back_in_place() -> None:
    get, put = IN_PLACE[ShownIterator]
    with resumable_bars(), resumable_loaders():
        iterator = iter(tqdm.auto.tqdm(DataLoader(Numbers(), 4), disable=True))
        for _ in range(2):
            next(iterator)
        place = pickle.loads(written(get(iterator)))
        heir = iter(tqdm.auto.tqdm(DataLoader(Numbers(), 4), disable=True))
        next(heir)
        put(heir, place)
        assert [each.tolist() for each in heir] == [each.tolist() for each in iterator]


def test_track_goes_on_with_its_count() -> None:
    def console() -> rich.console.Console:
        return rich.console.Console(file=io.StringIO(), force_terminal=True)

    with resumable_bars():
        progress = rich.progress.Progress(console=console(), auto_refresh=False)
        with progress:
            iterator = iter(progress.track([5, 6, 7], description="data"))
            assert next(iterator) == 5
            iterator.__reduce__()
            display, iterable, inner, given = iterator.__reduce__()[1]
        heir = rich.progress.Progress(console=console(), auto_refresh=False)
        display.progress = heir
        with heir:
            assert list(ShownIterator(display, iterable, inner, given)) == [6, 7]
        (task,) = heir.tasks
        assert (task.completed, task.total, task.description) == (3, 3, "data")


def test_bars_are_their_own_after_a_session() -> None:
    with resumable_bars():
        pass
    assert not isinstance(iter(tqdm.auto.tqdm([1], disable=True)), ShownIterator)
    assert not isinstance(rich.progress.track([1]), ShownIterator)


def test_generator_is_refused_with_its_place() -> None:
    generator = (each for each in range(3))
    with pytest.raises(AutosaveError, match=r"genexpr.*test_iterators\.py, line \d+.*a class with"):
        written(enumerate(generator))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="all of itertools is refused there")
def test_part_of_itertools_that_no_python_pickles_is_refused() -> None:
    with pytest.raises(AutosaveError, match=r"itertools\.pairwise.*make a list"):
        written(itertools.pairwise(range(3)))


@pytest.mark.slow
def test_iterators_of_classes_and_default_arguments_go_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        dedent("""
        import itertools, threading
        from dataclasses import dataclass, field

        class Weights:
            value = 1
            def backward(self): self.value = self.value * 7 % 1009
            def step(self): self.value += 1

        lock = threading.Lock()

        class Item:
            numbers = itertools.count()
            both = zip(numbers, iter(range(9)), strict=False)
            def __init__(self, given=itertools.count(), lock=lock, *, letters=iter("abcdef")):
                with lock:
                    self.marks = next(self.numbers), next(self.both), next(given), next(letters)

        @dataclass
        class Named:
            number: int = field(default_factory=itertools.count(5).__next__)

        def scaled(value, factor=1, *, add=0):
            return value * factor + add

        weights = Weights()
        for step in range(5):
            weights.backward()
            weights.step()
            print(Item().marks, Named(), scaled(weights.value))
            scaled.__defaults__, scaled.__kwdefaults__ = (step,), {"add": step}
        """)
    )
    assert check_every_step(script) == 6
