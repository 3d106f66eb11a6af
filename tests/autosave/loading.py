"""Data loaders of many styles, and a program that goes through them with or without a break."""

# ruff: noqa: NPY002 (programs use NumPy's global generator)

import io
import itertools
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from outlast.autosave.resume import session
from outlast.autosave.resume.process import random_states, set_random_states

LENGTH = 23
EPOCHS = 2


class Numbers(Dataset):
    """Gives its indices."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> float:
        return float(index)


class Augmented(Numbers):
    """Gives its indices with random numbers of all kinds, also of a generator of its own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)
        self.calls = 0

    def __getitem__(self, index: int) -> list[float]:
        self.calls += 1
        host = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return [float(index), *host, float(self.own.random()), float(self.calls)]


class Stream(IterableDataset):
    """Gives random numbers, from a buffer that it shuffles; each worker gives a part."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[list[float]]:
        self.epoch += 1
        worker = get_worker_info()
        step = 1 if worker is None else worker.num_workers
        first = 0 if worker is None else worker.id
        buffer: list[float] = []
        for number in range(first, LENGTH, step):
            buffer.append(float(number))
            if len(buffer) == 3:
                random.shuffle(buffer)
                yield [buffer.pop(), torch.rand(()).item(), float(self.epoch)]
        yield from ([each, torch.rand(()).item(), float(self.epoch)] for each in buffer)


class LazyBatches(Sampler[list[int]]):
    """Draws each batch when it is asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(5):
            yield [random.randrange(LENGTH), int(np.random.randint(LENGTH))]

    def __len__(self) -> int:
        return 5


class OwnRandom(Sampler[int]):
    """Draws from a generator of its own, and counts its epochs."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter(self.generator.permutation(LENGTH)[self.epochs :].tolist())

    def __len__(self) -> int:
        return LENGTH - self.epochs


class Shuffled:
    """Shuffles one list again and again; no subclass of anything, and holds more."""

    def __init__(self) -> None:
        self.indices = list(range(LENGTH))
        self.log = logging.getLogger("sampler")
        self.model = torch.nn.Linear(2, 2)

    def __iter__(self) -> Iterator[int]:
        self.log.debug("an epoch begins")
        random.shuffle(self.indices)
        return iter(self.indices)

    def __len__(self) -> int:
        return LENGTH


def doubled(samples: list[Any]) -> Any:
    """A `collate_fn` with noise."""
    return torch.tensor(samples, dtype=torch.float64) * 2 + torch.rand(())


def seeded(worker: int) -> None:
    """A `worker_init_fn`."""
    random.seed(1000 + worker)


def _own() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _from_own(**settings: Any) -> DataLoader[Any]:
    own = _own()
    sampler = RandomSampler(Numbers(), replacement=True, num_samples=70, generator=own)
    return DataLoader(Numbers(), 8, sampler=sampler, generator=own, **settings)


STYLES: dict[str, Callable[..., DataLoader[Any]]] = {
    "in order": lambda **settings: DataLoader(Numbers(), 4, **settings),
    "shuffled": lambda **settings: DataLoader(Numbers(), 4, shuffle=True, **settings),
    "generator": lambda **settings: DataLoader(
        Numbers(), 4, shuffle=True, generator=_own(), **settings
    ),
    "replacement": lambda **settings: DataLoader(
        Numbers(), 8, sampler=RandomSampler(Numbers(), replacement=True, num_samples=70), **settings
    ),
    "replacement from a generator": _from_own,
    "weighted": lambda **settings: DataLoader(
        Numbers(), 4, sampler=WeightedRandomSampler(list(range(LENGTH)), 20), **settings
    ),
    "subset": lambda **settings: DataLoader(
        Numbers(), 4, sampler=SubsetRandomSampler(range(3, 20)), **settings
    ),
    "distributed": lambda **settings: DataLoader(
        Numbers(), 4, sampler=DistributedSampler(Numbers(), 2, 1, shuffle=True), **settings
    ),
    "drop last": lambda **settings: DataLoader(
        Numbers(), 4, shuffle=True, drop_last=True, **settings
    ),
    "single samples": lambda **settings: DataLoader(
        Numbers(), batch_size=None, shuffle=True, **settings
    ),
    "batch sampler": lambda **settings: DataLoader(
        Numbers(), batch_sampler=BatchSampler(OwnRandom(), 5, False), **settings
    ),
    "lazy batches": lambda **settings: DataLoader(
        Numbers(), batch_sampler=LazyBatches(), **settings
    ),
    "own random numbers": lambda **settings: DataLoader(
        Numbers(), 4, sampler=OwnRandom(), **settings
    ),
    "list shuffled in place": lambda **settings: DataLoader(
        Numbers(), 4, sampler=Shuffled(), **settings
    ),
    "augmented": lambda **settings: DataLoader(
        Augmented(), 4, shuffle=True, collate_fn=doubled, **settings
    ),
    "stream": lambda **settings: DataLoader(Stream(), 4, collate_fn=doubled, **settings),
    "single items of a stream": lambda **settings: DataLoader(
        Stream(), batch_size=None, **settings
    ),
}


@dataclass(frozen=True)
class Seen:
    """What a program has seen of its data, and the random numbers that it would see next."""

    batches: list[Any]
    next_random: list[float]


class Pickler(pickle.Pickler):
    """Pickles what the parts of a resumed program say, and generators."""

    def reducer_override(self, value: Any) -> Any:

        for kind, reduce in session.REDUCERS.items():
            if isinstance(value, kind):
                return reduce(value)
        if isinstance(value, torch.Generator):
            return _generator, (value.get_state().numpy().tobytes(),)
        return NotImplemented


def written(value: Any) -> bytes:
    """`value`, pickled."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


class Program:
    """Goes through a loader for some epochs, and draws random numbers after each batch.

    Args:
        make: Makes the loader.
        leave: Batches after which an epoch is left early; None for none.
    """

    def __init__(self, make: Callable[[], DataLoader[Any]], leave: int | None = None) -> None:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        self.loader: Any = make()
        self.leave = leave
        self.epoch = 0
        self.place = 0
        self.iterator: Any = None
        self.batches: list[Any] = []

    def run(self, until: int | None = None) -> Seen:
        """Continue, to the end or until so many batches have been seen in all."""
        while self.epoch < EPOCHS:
            if self.iterator is None:
                self._set_epoch()
                self.iterator = iter(self.loader)
            for batch in self.iterator:
                self.batches.append(_plain(batch))
                random.random(), np.random.rand(), torch.rand(3)
                if self.loader.generator is not None:
                    torch.rand(2, generator=self.loader.generator)
                self.place += 1
                if self.place == self.leave:
                    break
                if len(self.batches) == until:
                    return self.seen()
            self.epoch, self.place, self.iterator = self.epoch + 1, 0, None
        return self.seen()

    def _set_epoch(self) -> None:
        if isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(self.epoch)

    def seen(self) -> Seen:
        """What was seen so far."""
        states, own = random_states(), self.loader.generator
        drawn = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        set_random_states(states)
        if own is not None:
            drawn.append(torch.rand((), generator=own.clone_state()).item())
        return Seen(self.batches, drawn)

    def saved(self) -> bytes:
        """All of it and the process's random numbers."""
        return written((self, random_states()))


def restored(data: bytes) -> Program:
    """A program and its random numbers, from what `saved` gave."""
    # Whatever this process has drawn by now must not matter.
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    program, states = pickle.loads(data)
    set_random_states(states)
    return program


def _plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [_plain(each) for each in batch] if isinstance(batch, list) else batch


def _generator(state: bytes) -> torch.Generator:
    made = torch.Generator()
    made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return made


def with_breaks(make: Callable[[], DataLoader[Any]], every: int, leave: int | None = None) -> Seen:
    """What a program sees that is pickled, dropped and made again after every few batches."""
    program = Program(make, leave)
    for until in itertools.count(every, every):
        seen = program.run(until)
        if program.epoch == EPOCHS:
            return seen
        # The old one is dropped before its heir continues, as it would be with its process.
        data, program.loader, program.iterator = program.saved(), None, None
        program = restored(data)
    raise AssertionError
