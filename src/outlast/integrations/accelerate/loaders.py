"""What each process of an accelerator has for itself: random numbers, its place in the data.

A resumed loop skips the batches that are done, for which its loader begins anew. To begin draws
random numbers (the order of the samples, the seeds of workers), and so do datasets and collators
when they read a batch. Here each draws what it has drawn in the uninterrupted loop. In the middle
of a gradient accumulation the gradients so far belong to it, too.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler, SkipBatchSampler

from outlast.autosave.resume.process import (
    random_states,
    set_random_states,
    source_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from accelerate import Accelerator


@dataclass
class _Epoch:
    """A loader within an epoch.

    Attributes:
        loader: The prepared one, or one that skips its first batches.
        begun: What `_sources` gave before the first draw, and the process's random states.
        before_batch: The random states before the newest batch was read, one ahead of the loop.
        batches: Batches of the epoch that the loop has got, with those that were skipped.
        counts: Whether its end leads the prepared loader on to the next epoch.
        iterator: Below the loader's; gone where the loop has broken off.
    """

    loader: Any
    begun: dict[str, Any]
    before_batch: dict[str, Any]
    batches: int
    counts: bool
    iterator: Callable[[], Any] = lambda: None


class ProcessEntry:
    """Random numbers, place of the loaders and gradients of a process, as an entry of a state.

    Args:
        accelerator: After `prepare`.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._loaders = [*accelerator._dataloaders]
        self._within: dict[int, _Epoch] = {}
        self._random: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        for number, loader in enumerate(self._loaders):
            self._follow(loader, number, 0)

    def state_dict(self) -> dict[str, Any]:
        """The random states, and what else there is now."""
        gradients = {}
        if not self._accelerator.sync_gradients:
            gradients = {
                name: item.grad for name, item in self._parameters() if item.grad is not None
            }
        return {**random_states(), "loaders": self._places(), "gradients": gradients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what was saved, until `resume`."""
        self._random = dict(state)
        self._restored = self._random.pop("loaders", {})
        self._gradients = self._random.pop("gradients", {})

    def resume(self, *, as_before: bool) -> list[str]:
        """Go on where the loaded state is from.

        Args:
            as_before: Whether as many processes go on as saved it.

        Returns:
            Sentences on what will differ from an uninterrupted loop.
        """
        self._within.clear()
        places = self._restored
        self._restored = {name: place for name, place in places.items() if "begun" in place}
        for number, loader in enumerate(self._loaders):
            if (place := places.get(str(number))) is not None:
                loader.iteration = place["iteration"]
                _set_sources(loader, place)
        set_random_states(self._random)
        for name, place in self._restored.items():
            if place["first"]:
                # A loader that is none of the accelerator's, as `accelerate.skip_first_batches`
                # makes one, draws the order of the samples from here, and is not followed.
                set_random_states(place["begun"])
                _set_sources(self._loaders[int(name)], place["begun"])
                self._draw_again()
        if self._gradients and not as_before:
            warning = (
                "the state was saved within a gradient accumulation by another number of "
                "processes: its gradients so far are left out of the next optimizer's step"
            )
            return [warning]
        for name, parameter in self._parameters():
            parameter.grad = None
            if (gradient := self._gradients.get(name)) is not None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype)
        return []

    def skipping(self, whole: Any, loader: Any, batches: int) -> None:
        """Follow a loader that skips the first batches of a prepared one.

        Args:
            whole: The prepared one.
            loader: What Accelerate has made of it.
            batches: How many.
        """
        number = next((n for n, loader in enumerate(self._loaders) if loader is whole), None)
        if number is not None:
            self._follow(loader, number, batches)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, model in enumerate(self._accelerator._models):
            for name, parameter in model.named_parameters():
                yield f"{number}.{name}", parameter

    def _places(self) -> dict[str, Any]:
        """Where the prepared loaders stand, those within an epoch with all that they have drawn."""
        found: dict[str, Any] = {}
        self._within = {
            number: item for number, item in self._within.items() if item.iterator() is not None
        }
        for number, loader in enumerate(self._loaders):
            if not isinstance(loader, DataLoaderShard):
                continue
            epoch = self._within.get(number)
            # The loop has the last batch: the next one is the first of the next epoch.
            ends = epoch is not None and epoch.loader.end_of_dataloader
            found[str(number)] = place = {"iteration": loader.iteration, **_sources(loader)}
            if epoch is not None and ends:
                place["iteration"] += epoch.counts
            elif epoch is not None:
                place |= {
                    "first": next(iter(self._within)) == number,
                    "begun": epoch.begun,
                    "before_batch": epoch.before_batch,
                    "batches": epoch.batches,
                }
        return found

    def _draw_again(self) -> None:
        """Set the random numbers before the first forward pass of training, whatever began it."""

        def set_once(module: torch.nn.Module, *_: Any) -> None:
            if not module.training:
                return
            for handle in handles:
                handle.remove()
            if self._restored:
                set_random_states(self._random)
                self._restored = {}

        models = self._accelerator._models
        handles = [model.register_forward_pre_hook(set_once) for model in models]

    def _follow(self, loader: Any, number: int, skipped: int) -> None:
        """Note what a loader does, and let it begin as the restored one did."""
        if not isinstance(loader, DataLoaderShard):
            return
        own_begin, own_end, own_update = loader.begin, loader.end, loader._update_state_dict
        # An iterable dataset is read from its first sample on.
        unread = 0 if loader.skip_batches else skipped
        restored: dict[str, Any] | None = None

        def begin() -> None:
            nonlocal restored
            own_begin()
            restored = self._taken(number, skipped)
            if restored is not None:
                set_random_states(restored["begun"])
                _set_sources(loader, restored["begun"])
                if unread == restored["batches"]:
                    _set_before_first(loader, restored["before_batch"])
            begun = {**random_states(), **_sources(loader)}
            counts = restored is not None or loader is self._loaders[number]
            self._within.pop(number, None)
            self._within[number] = _Epoch(loader, begun, {}, unread, counts)

        def iterate() -> Any:
            iterator = own_iterate()
            if (epoch := self._within.get(number)) is not None:
                epoch.iterator = weakref.ref(iterator)
            return iterator

        def update() -> None:
            """Between two reads: the loop gets the batch that was read first after the other."""
            own_update()
            nonlocal restored
            epoch = self._within.get(number)
            if epoch is None or epoch.loader is not loader:
                return
            if restored is not None:
                if epoch.batches + 1 == restored["batches"]:
                    set_random_states(restored["before_batch"])
                elif epoch.batches >= restored["batches"] or unread > 0:
                    set_random_states(self._random)
                    restored = None
            epoch.before_batch = random_states()
            epoch.batches += 1

        def end() -> None:
            own_end()
            epoch = self._within.pop(number, None)
            if epoch is not None and epoch.counts:
                # The loader that skips is thrown away; the whole one has the next epoch.
                self._loaders[number].iteration = loader.iteration

        loader.begin, loader.end, loader._update_state_dict = begin, end, update
        own_iterate = loader.base_dataloader.__iter__
        loader.base_dataloader.__iter__ = iterate

    def _taken(self, number: int, skipped: int) -> dict[str, Any] | None:
        """The restored place of a loader that begins; None where it begins an epoch.

        Another loader that begins first, as an evaluation's does, leaves it where it is.
        """
        place: dict[str, Any] | None = self._restored.get(str(number))
        if place is None or not (skipped or place["first"]):
            return None
        self._restored = {}
        return place


def _set_before_first(loader: Any, states: dict[str, Any]) -> None:
    """Set the random states before the first batch is read, behind what the sampler draws."""
    sampler = loader.batch_sampler
    if not isinstance(sampler, SkipBatchSampler):
        return

    class Set(SkipBatchSampler):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            for number, samples in enumerate(super().__iter__()):
                if number == 0:
                    set_random_states(states)
                yield samples

    sampler.__class__ = Set


def _sampler_of(loader: Any) -> Any:
    """What draws the order of a loader's samples, below all that shards and skips."""
    found = loader.batch_sampler or loader.sampler
    while (inner := getattr(found, "batch_sampler", None)) is not None:
        found = inner
    return getattr(found, "sampler", found)


def _sources(loader: Any) -> dict[str, Any]:
    """What decides the order of a loader's samples, beside the process's random numbers."""
    sampler = _sampler_of(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return {"seed": int(sampler.initial_seed)}
    source = source_of(getattr(sampler, "generator", None))
    return {} if source is None else {"generator": source.read()}


def _set_sources(loader: Any, found: Mapping[str, Any]) -> None:
    sampler = _sampler_of(loader)
    if "seed" in found and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = found["seed"]
    source = source_of(getattr(sampler, "generator", None))
    if "generator" in found and source is not None:
        source.write(found["generator"])
