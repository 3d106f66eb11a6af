"""Data loaders of torchdata continue by their own state."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loading import Numbers, Program, with_breaks, written
from torch.utils.data import IterableDataset

from outlast.autosave.resume.loaders import StatefulIterator, resumable_loaders

stateful = pytest.importorskip("torchdata.stateful_dataloader")


class Counting(IterableDataset):
    """A stream that says where it is, and need not be read again."""

    def __init__(self) -> None:
        self.place = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 40:
            self.place += 1
            self.read += 1
            yield self.place
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.place = state["place"]


STYLES = {
    "in order": lambda: stateful.StatefulDataLoader(Numbers(), 4),
    "shuffled": lambda: stateful.StatefulDataLoader(Numbers(), 4, shuffle=True),
    "generator": lambda: stateful.StatefulDataLoader(
        Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(6)
    ),
    "stream": lambda: stateful.StatefulDataLoader(Counting(), 4),
}


@pytest.mark.parametrize("style", STYLES)
def test_program_with_breaks_sees_the_same(style: str) -> None:
    make: Any = STYLES[style]
    expected = Program(make).run()
    with resumable_loaders():
        assert Program(make).run() == expected
        assert with_breaks(make, 3) == expected


@pytest.mark.distributed
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_go_on(persistent: bool) -> None:
    def make() -> Any:
        return stateful.StatefulDataLoader(
            Numbers(), 4, shuffle=True, num_workers=2, persistent_workers=persistent
        )

    expected = Program(make).run()
    with resumable_loaders():
        assert with_breaks(make, 3) == expected


def test_stream_that_says_where_it_is_is_not_read_again() -> None:
    with resumable_loaders():
        loader = stateful.StatefulDataLoader(Counting(), 4)
        iterator = iter(loader)
        assert isinstance(iterator, StatefulIterator)
        for _ in range(5):
            next(iterator)
        loader.dataset.read = 0
        made, heir = pickle.loads(written((loader, iterator)))
        assert next(heir).tolist() == [21, 22, 23, 24]
        assert made.dataset.read == 4
    assert not isinstance(iter(loader), StatefulIterator)
