"""A series of draws is drawn again number by number, whatever the program draws in between."""

# ruff: noqa: NPY002 (programs use NumPy's global generator)

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.autosave.resume.loaders import Draws, Indices, draws_at_once, written
from outlast.autosave.resume.process import random_states, set_random_states, source_of

SOURCES: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: torch.rand(()).item(),
}
NAMES = st.lists(st.sampled_from(sorted(SOURCES)), max_size=3)
STEPS = st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=8)


class Chosen:
    """Draws from the sources that are listed for each draw."""

    def __init__(self, steps: list[list[str]]) -> None:
        self.steps = steps

    def __iter__(self) -> Any:
        for names in self.steps:
            yield [SOURCES[name]() for name in names]


@settings(max_examples=40)
@given(steps=STEPS, place=st.integers(0, 8), begun=st.integers(0, 99))
def test_draws_are_repeated_from_any_place(
    steps: list[tuple[list[str], list[str]]], place: int, begun: int
) -> None:
    sampler = Chosen([own for own, _ in steps])
    seed = source_of(torch.default_generator)
    assert seed is not None
    random.seed(begun), np.random.seed(begun), torch.manual_seed(begun)
    first = Indices(sampler, Draws.begin([sampler], []), seed)
    first.opened = True
    iter(first)
    drawn = []
    saved: Any = None
    for number, (_, others) in enumerate(steps):
        if number == place:
            saved = copy.deepcopy(first.draws.series), random_states()
        drawn.append(next(first))
        for name in others:
            SOURCES[name]()
    after = random_states()
    if saved is None:
        return
    series, states = saved
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    draws = Draws(series)
    draws.rewind()
    again = Indices(sampler, draws, seed)
    again.opened = True
    iter(again)
    assert [next(again) for _ in range(place)] == drawn[:place]
    assert draws.settle()
    set_random_states(states)
    for number, (_, others) in enumerate(steps[place:], place):
        assert next(again) == drawn[number]
        for name in others:
            SOURCES[name]()
    assert random_states() == after


INDICES = st.recursive(
    st.one_of(st.integers(), st.text(), st.none(), st.integers(0, 9).map(np.int64)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=8,
)


@given(index=INDICES)
def test_indices_are_written_by_value(index: Any) -> None:
    assert written(pickle.loads(pickle.dumps(index))) == written(index)


@given(index=st.lists(st.integers(), min_size=1))
def test_other_indices_are_written_otherwise(index: list[int]) -> None:
    other = [*index[:-1], index[-1] + 1]
    kinds: list[Callable[[list[int]], Any]] = [list, tuple, lambda each: {"rows": each}]
    if all(abs(each) < 2**62 for each in index):
        kinds += [torch.tensor, np.array]
    for kind in kinds:
        assert written(kind(other)) != written(kind(index))


def test_samplers_that_draw_all_at_once_are_known_by_their_own_class_alone() -> None:
    class Derived(torch.utils.data.RandomSampler):
        pass

    numbers = range(9)
    plain = torch.utils.data.RandomSampler(numbers)
    assert draws_at_once(torch.utils.data.BatchSampler(plain, 2, False))
    assert not draws_at_once(Derived(numbers))
    assert not draws_at_once(torch.utils.data.RandomSampler(numbers, replacement=True))
    assert not draws_at_once(torch.utils.data.RandomSampler(numbers, num_samples=20))
