"""Data loaders without workers are taken up where they were, without reading what was read."""

import logging
import pickle
import random
import threading
from typing import Any

import pytest
import torch
from loading import STYLES, Numbers, Program, Seen, restored, with_breaks, written
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from outlast.autosave.resume.loaders import LoaderIterator, resumable_loaders
from outlast.errors import AutosaveError


def plain(make: Any, leave: int | None = None) -> Seen:
    """What a program sees with the loaders that torch has."""
    return Program(make, leave).run()


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("style", STYLES)
def test_program_with_breaks_sees_the_same_batches_and_random_numbers(
    style: str, every: int
) -> None:
    expected = plain(STYLES[style])
    assert len(expected.batches) > 4
    with resumable_loaders():
        assert Program(STYLES[style]).run() == expected
        assert with_breaks(STYLES[style], every) == expected


def test_epochs_that_are_left_early_are_taken_up_too() -> None:
    expected = plain(STYLES["shuffled"], leave=4)
    with resumable_loaders():
        assert with_breaks(STYLES["shuffled"], 3, leave=4) == expected


class Counted(Numbers):
    """Counts the samples that were read."""

    read = 0

    def __getitem__(self, index: int) -> float:
        Counted.read += 1
        return float(index)


def test_samples_of_batches_handed_out_are_not_read_again() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Counted(), 4, shuffle=True)

    with resumable_loaders():
        program = Program(make)
        program.run(4)
        data = program.saved()
        Counted.read = 0
        taken_up = restored(data)
        taken_up.run(5)
    assert Counted.read == 4


def test_iterator_has_the_attributes_and_the_length_of_the_loaders_own() -> None:
    with resumable_loaders():
        iterator = iter(DataLoader(Numbers(), 4))
        assert isinstance(iterator, LoaderIterator)
        next(iterator)
        again = pickle.loads(written(iterator))
        assert (len(again), again._num_yielded, again._pin_memory) == (6, 1, False)
        with pytest.raises(AttributeError):
            _ = again.no_such_attribute


def test_iterator_that_has_ended_stays_so() -> None:
    with resumable_loaders():
        iterator = iter(DataLoader(Numbers(), 4))
        assert len(list(iterator)) == 6
        assert list(pickle.loads(written(iterator))) == []


def test_iterator_that_was_taken_up_and_not_used_can_be_saved_again() -> None:
    with resumable_loaders():
        iterator = iter(DataLoader(Numbers(), 4))
        next(iterator)
        twice = pickle.loads(written(pickle.loads(written(iterator))))
        assert [each.tolist() for each in twice] == [each.tolist() for each in iterator]


def test_iterators_of_one_loader_do_not_disturb_each_other() -> None:
    torch.manual_seed(4)
    with resumable_loaders():
        loader = STYLES["generator"]()
        first = iter(loader)
        next(first)
        second = iter(loader)
        next(second)
        first, second = pickle.loads(written((first, second)))
        taken_up = [next(each).tolist() for each in (first, second, second, first)]
    torch.manual_seed(4)
    loader = STYLES["generator"]()
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    assert taken_up == [next(each).tolist() for each in (first, second, second, first)]


class Weighing(Sampler[int]):
    """Draws by weights that the program changes, and holds objects that are none of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = torch.ones(23)
        self.log = logging.getLogger("sampler")
        self.model = model
        self.lock = threading.Lock()

    def __iter__(self) -> Any:
        return iter(torch.multinomial(self.weights, 23).tolist())

    def __len__(self) -> int:
        return 23


def test_only_what_a_sampler_draws_from_is_written_down() -> None:
    model = torch.nn.Linear(2, 2)
    with resumable_loaders():
        iterator = iter(DataLoader(Numbers(), 4, sampler=Weighing(model)))
        next(iterator)
        series = iterator.__getstate__()["series"]
    owners = [type(each.owner) for each in series.held]
    assert sorted(each.__name__ for each in owners) == ["BatchSampler", "Tensor", "Weighing"]


def test_weights_that_change_during_an_epoch_do_not_change_it() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), 4, sampler=WeightedRandomSampler(torch.ones(23).tolist(), 23))

    def taken(loader: Any, iterator: Any) -> Any:
        return [each.tolist() for each in iterator], loader.sampler.weights.tolist()

    with resumable_loaders():
        loader = make()
        iterator = iter(loader)
        next(iterator)
        loader.sampler.weights[:12] = 0.0
        again = pickle.loads(written((loader, iterator)))
        assert taken(*again) == taken(loader, iterator)


class Unrepeatable(Sampler[int]):
    """Draws from the operating system."""

    def __iter__(self) -> Any:
        return iter(random.SystemRandom().sample(range(23), 23))

    def __len__(self) -> int:
        return 23


def test_sampler_that_draws_otherwise_is_refused() -> None:
    with resumable_loaders():
        iterator = iter(DataLoader(Numbers(), 8, sampler=Unrepeatable()))
        next(iterator)
        again = pickle.loads(written(iterator))
        with pytest.raises(AutosaveError, match="Unrepeatable gives other indices"):
            next(again)


class Shrinking(Numbers):
    """A dataset whose length a test changes."""

    length = 23

    def __len__(self) -> int:
        return Shrinking.length


def test_dataset_with_another_length_is_refused() -> None:
    with resumable_loaders():
        iterator = iter(DataLoader(Shrinking(), 4, shuffle=True))
        for _ in range(4):
            next(iterator)
        data = written(iterator)
        Shrinking.length = 12
        try:
            with pytest.raises(AutosaveError, match="RandomSampler gives other indices"):
                next(pickle.loads(data))
        finally:
            Shrinking.length = 23


def test_own_iterators_are_back_after_a_session() -> None:
    with resumable_loaders():
        pass
    iterator = iter(DataLoader(Numbers(), 4))
    assert not isinstance(iterator, LoaderIterator)
    with pytest.raises(AutosaveError, match="iterate over the loader itself"):
        written(iterator)
