"""Data loaders with workers are taken up where they were, the workers' random numbers included."""

import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import (
    STYLES,
    Augmented,
    Numbers,
    Program,
    Seen,
    doubled,
    restored,
    seeded,
    with_breaks,
)
from torch.utils.data import DataLoader, IterableDataset

from outlast.autosave.resume.loaders import resumable_loaders
from outlast.errors import AutosaveError

pytestmark = pytest.mark.distributed


def check(make: Any, every: int, leave: int | None = None) -> None:
    """Compare with and without breaks."""
    expected = Program(make, leave).run()
    assert len(expected.batches) > 4
    with resumable_loaders():
        assert Program(make, leave).run() == expected
        assert with_breaks(make, every, leave) == expected
    assert_no_workers()


def assert_no_workers() -> None:
    """All workers have ended with their loaders."""
    for each in multiprocessing.active_children():
        each.join(30)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("style", STYLES)
def test_program_with_breaks_sees_the_same(style: str) -> None:
    # A style that draws all the time: every draw that was made ahead must be made again.
    check(lambda: STYLES[style](num_workers=2), 3)


@pytest.mark.parametrize("style", ["shuffled", "lazy batches", "augmented", "stream"])
def test_workers_that_stay_over_epochs_go_on(style: str) -> None:
    check(lambda: STYLES[style](num_workers=2, persistent_workers=True), 2)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("style", ["augmented", "stream"])
def test_epochs_that_are_left_early_are_taken_up_too(style: str, persistent: bool) -> None:
    check(lambda: STYLES[style](num_workers=2, persistent_workers=persistent), 2, leave=3)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_many_workers_that_read_far_ahead_and_start_in_their_own_way() -> None:
    check(
        lambda: STYLES["augmented"](
            num_workers=3, prefetch_factor=4, worker_init_fn=seeded, generator=_generator()
        ),
        2,
    )


def test_spawned_workers_go_on() -> None:
    check(
        lambda: DataLoader(
            Augmented(),
            6,
            shuffle=True,
            num_workers=1,
            collate_fn=doubled,
            multiprocessing_context="spawn",
            persistent_workers=True,
        ),
        5,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_in_pinned_memory_go_on() -> None:
    def make() -> DataLoader[Any]:
        return STYLES["augmented"](num_workers=2, pin_memory=True)

    with resumable_loaders():
        assert next(iter(make())).is_pinned()
    check(make, 3)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(8)


class Listed(Numbers):
    """Writes down what is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __getitem__(self, index: int) -> float:
        with self.file.open("a") as file:
            file.write(f"{index}\n")
        return float(index)


def test_samples_of_batches_handed_out_are_not_read_again(tmp_path: Path) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Listed(tmp_path / "read"), 4, num_workers=2)

    with resumable_loaders():
        program = Program(make)
        program.run(4)
        data, program.loader, program.iterator = program.saved(), None, None
        (tmp_path / "read").unlink()
        taken_up: Any = restored(data)
        assert next(taken_up.iterator).tolist() == [16.0, 17.0, 18.0, 19.0]
        assert len(list(taken_up.iterator)) == 1
    read = (tmp_path / "read").read_text().split()
    assert sorted(map(int, read)) == list(range(16, 23))


GO_ON = """
import pickle, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from loading import restored
from outlast.autosave.resume.loaders import resumable_loaders
if __name__ == "__main__":
    file = Path(sys.argv[3])
    with resumable_loaders():
        file.write_bytes(pickle.dumps(restored(file.read_bytes()).run()))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_another_process_goes_on(tmp_path: Path, workers: int) -> None:
    def make() -> DataLoader[Any]:
        return STYLES["augmented"](num_workers=workers, generator=_generator())

    expected = Program(make).run()
    with resumable_loaders():
        program = Program(make)
        program.run(8)
        (tmp_path / "saved").write_bytes(program.saved())
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", GO_ON, here, here.parent, tmp_path / "saved"]
    subprocess.run(arguments, check=True, timeout=120)
    assert pickle.loads((tmp_path / "saved").read_bytes()) == expected


def test_batches_out_of_order_are_refused() -> None:
    with resumable_loaders():
        iterator = iter(DataLoader(Numbers(), 4, num_workers=2, in_order=False))
        next(iterator)
        with pytest.raises(AutosaveError, match="set in_order=True"):
            iterator.__getstate__()


class Ending(IterableDataset):
    """A stream whose length a test changes."""

    length = 20

    def __iter__(self) -> Iterator[int]:
        return iter(range(Ending.length))


def test_stream_that_ends_earlier_is_refused() -> None:
    with resumable_loaders():
        program = Program(lambda: DataLoader(Ending(), 4))
        program.run(4)
        data = program.saved()
        Ending.length = 8
        try:
            with pytest.raises(AutosaveError, match="Ending has ended before batch 4"):
                restored(data).run()
        finally:
            Ending.length = 20


def test_loader_that_rests_between_epochs_does_not_draw_its_workers_seed_again() -> None:
    """A validation loader's workers stay; their seed was drawn from the program's generator."""

    def program(breaks: bool) -> Seen:
        torch.manual_seed(0)
        loader = STYLES["augmented"](num_workers=1, persistent_workers=True)
        batches = [each.tolist() for each in loader]
        resting = Program(lambda: loader)
        resting.epoch = 1
        if breaks:
            data, resting.loader, loader = resting.saved(), None, None
            resting = restored(data)
        seen = resting.run()
        return Seen(batches + seen.batches, seen.next_random)

    expected = program(False)
    with resumable_loaders():
        assert program(False) == expected
        assert program(True) == expected
    assert_no_workers()
