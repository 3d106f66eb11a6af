"""Outlast in a loop of Lightning Fabric.

with Run(fabric, "job.toml", model=model, optimizer=optimizer, loader=loader) as run:
    for batch in run:
        ...
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outlast.distributed.group import raise_together
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations import require, run
from outlast.integrations.entries import Entry
from outlast.integrations.files import CheckpointFiles, is_pointer, plain, restored

require("lightning", "2.6", "2.7")

import lightning  # noqa: E402
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO  # noqa: E402
from lightning.fabric.strategies import ModelParallelStrategy  # noqa: E402
from lightning.fabric.wrappers import _unwrap_objects  # noqa: E402

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from lightning.fabric import Fabric
    from torch import nn
    from torch.optim import Optimizer

    from outlast.job import CheckpointSection, LoopJob

_REST = "outlast.rest"

_NUMBER = re.compile(r"(\d+)$", re.ASCII)


class Run(run.Run):
    """`outlast.Run` for what `Fabric.setup` and `Fabric.setup_dataloaders` have given.

    Batches come on Fabric's device. All else is as there: checkpoints on the way, resuming, the
    guard, energy, records, the memory restart, and a stop in time with exit code 3.

    Args:
        fabric: After `launch`.
        job: As in `outlast.Run`.
        model: Of `fabric.setup`; or several by name.
        optimizer: Of `fabric.setup`; or several.
        loader: Of `fabric.setup_dataloaders`, or another one.
        more: The further arguments of `outlast.Run`.
    """

    def __init__(
        self,
        fabric: Fabric,
        job: str | os.PathLike[str] | LoopJob | None = None,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        loader: Iterable[Any],
        **more: Any,
    ) -> None:
        super().__init__(
            job,
            model=_unwrap_objects(model),
            optimizer=_unwrap_objects(optimizer),
            loader=_unwrap_objects(loader),
            **more,
        )
        self._fabric = fabric
        versions = {"lightning": lightning.__version__}
        self._facts = dataclasses.replace(self._facts, framework="fabric", versions=versions)

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield self._fabric.to_device(batch)


class StoreCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Lets `fabric.save` and `fabric.load`, or a `Trainer`, keep their checkpoints in a store.

    A save continues in the background. Its path is a small file that leads into the store; files
    that `torch.save` wrote are still read.

    The first process alone saves. For FSDP2 see `StoreModelParallelStrategy`.

    Args:
        place: Directory of the store.
        settings: The section [checkpoint] of a job.

    Attributes:
        files: The paths and what they lead to.
    """

    def __init__(
        self, place: str | os.PathLike[str], settings: CheckpointSection | None = None
    ) -> None:
        self.files = CheckpointFiles(place, settings)
        self.files.sweep()
        self._others = TorchCheckpointIO()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copy the checkpoint; returns before it is written.

        Raises:
            CheckpointError: When it cannot be saved, or the path is none of a local file.
        """
        _refuse_options(storage_options)
        step = checkpoint.get("global_step")
        if not isinstance(step, int):
            step = _step_of(path, self.files.step)
        self.files.save(_local(path), checkpoint, step)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The checkpoint of a path, its tensors on the CPU; all processes call it together."""
        # The first one may still be writing what the others look for.
        raise_together(self.files.settle)
        if Path(path).exists() and not is_pointer(Path(path)):
            found: dict[str, Any] = self._others.load_checkpoint(path, map_location, weights_only)
            return found
        return self.files.load(_local(path), unpickle=not weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a path, when the save under way is complete."""
        if is_pointer(Path(path)):
            self.files.remove(path)
        else:
            self._others.remove_checkpoint(path)

    def wait(self) -> None:
        """Wait until the last save is complete.

        Raises:
            CheckpointError: When it has failed.
        """
        self.files.wait()

    def teardown(self) -> None:
        """Wait until the last save is complete, and give up the store.

        Raises:
            CheckpointError: When it has failed, and no exception is under way.
        """
        self.files.release()


class StoreModelParallelStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """Fabric's `ModelParallelStrategy` (FSDP2, tensor parallel) whose checkpoints are in a store.

    Each rank saves its part in the background, and what was saved is loaded on any number of ranks.

    Args:
        parallelize_fn: As in `ModelParallelStrategy`.
        place: Directory of the store.
        settings: The section [checkpoint] of a job.
        more: The further arguments of `ModelParallelStrategy`.
    """

    def __init__(
        self,
        parallelize_fn: Callable[..., nn.Module],
        place: str | os.PathLike[str],
        settings: CheckpointSection | None = None,
        **more: Any,
    ) -> None:
        super().__init__(parallelize_fn, **more)
        self._files = CheckpointFiles(place, settings, collective=True)
        self._files.sweep()

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        """Copy this rank's part of the state; returns before it is written.

        Raises:
            CheckpointError: When it cannot be saved.
        """
        _refuse_options(storage_options)
        if filter:
            raise CheckpointError(
                f"filter = {filter!r} cannot be followed: a store saves whole modules and "
                "optimizers; leave out of the state what is not to be saved"
            )
        path = self.broadcast(str(path))
        live, others = _divided(state)
        # All that is neither module nor optimizer is one entry.
        rest = Entry(
            plain(
                {
                    name: value.state_dict() if hasattr(value, "state_dict") else value
                    for name, value in others.items()
                }
            )
        )
        self._files.save_state(
            _local(path), {**live, _REST: rest}, _step_of(path, self._files.step)
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Bring modules, optimizers and other objects of `state` back, and replace its values.

        Returns:
            What was saved beside them.

        Raises:
            CheckpointError: When it does not fit, or is none of `save_checkpoint`.
        """
        path = _local(self.broadcast(str(path)))
        if not isinstance(state, dict) or not strict:
            raise CheckpointError(
                "a checkpoint of a sharded model is loaded into the objects that were saved: give "
                "fabric.load a dictionary of them, and strict=True"
            )
        live, values = _divided(state)
        rest = Entry()
        self._files.load_state(path, {**live, _REST: rest})
        rest.content = restored(rest.content, unpickle=not weights_only)
        for name, value in values.items():
            if name not in rest.content:
                raise CheckpointError(
                    f"`{name}` was not saved in {path}; leave it out of the state"
                )
            saved = rest.content.pop(name)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            else:
                state[name] = saved
        return rest.content

    def wait(self) -> None:
        """Wait until the last save is complete; all ranks call it together.

        Raises:
            CheckpointError: When it has failed.
        """
        self._files.wait()

    def teardown(self) -> None:
        """Wait until the last save is complete, and give up the store.

        Raises:
            CheckpointError: When it has failed, and no exception is under way.
        """
        # That of ModelParallelStrategy asks for a CheckpointIO, which it has not.
        self.precision.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self._files.release()


def _divided(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Modules and optimizers of a state, and what is left of it."""
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    live = {name: value for name, value in state.items() if isinstance(value, kinds)}
    return live, {name: value for name, value in state.items() if name not in live}


def _step_of(path: str | os.PathLike[str], last: int) -> int:
    """The number at the end of a path's name, or one more than the last."""
    found = _NUMBER.search(Path(path).stem)
    return int(found[1]) if found else last + 1


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in str(path):
        raise CheckpointError(
            f"the path {path} is a URL; a path here is a small file that leads into the store: "
            "give one of a local or shared directory"
        )
    return Path(path)


def _refuse_options(storage_options: Any) -> None:
    if storage_options is not None:
        raise IntegrationError(
            f"storage_options = {storage_options!r} cannot be followed: the settings of the store "
            "are those of [checkpoint]; leave them out"
        )
