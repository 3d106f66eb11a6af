"""Outlast in a loop of Lightning Fabric.

with Run(fabric, "job.toml", model=model, optimizer=optimizer, loader=loader) as run:
    for batch in run:
        ...

Checkpoint files of a framework, kept in a store.

A framework names each of its checkpoints by a path; it overwrites some and removes others. Here
such a path is a small file that leads to a version of a store, and, where it was used before, to
the version before. So a save can go on in the background: until it is complete, the path leads to
what it led to. A path that the framework removes goes when the save after that is complete, and
with it the versions that no path leads to.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.wrappers import _unwrap_objects

from outlast.checkpoint import CheckpointStore, Compression, Reduction, list_versions, load
from outlast.checkpoint.reader import VersionReader
from outlast.checkpoint.restore import read_into, saved_in
from outlast.checkpoint.storage import LocalStorage
from outlast.checkpoint.store import wait_for_saves
from outlast.checkpoint.version import Retention, prune
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations import run
from outlast.integrations.content import KEY, Content, described, plain, read_content, restored
from outlast.integrations.content import plain as plain_content
from outlast.integrations.installed import require
from outlast.integrations.pointer import Entry, PointerList, is_pointer, read_pointer
from outlast.job import CheckpointSection
from outlast.runtime.saves import close_at_exit
from outlast.state.install import check_fit, find_targets, install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from lightning.fabric import Fabric
    from torch import nn
    from torch.optim import Optimizer

    from outlast.checkpoint import SaveHandle, SaveResult, Version
    from outlast.checkpoint.version import Contents, Seal
    from outlast.job import LoopJob
    from outlast.state.live import State


_EVERY_VERSION = 10**9


_FOLLOWED = {"asynchronous", "writer", "timeout_seconds", "compression", "delta_chain"}


class CheckpointFiles:
    """Saves and loads the paths that a framework names; their content lies in one store.

    Args:
        place: Directory of the store.
        settings: The section [checkpoint]. When to save and what to keep is the framework's
            business.
        collective: Whether all ranks of the default process group save and load together; False:
            this process alone.

    Attributes:
        listener: Told how each save went.
        loaded: Of the last `load`: seconds, and a sentence for each newer one that was damaged.

    Raises:
        IntegrationError: For a setting that cannot be followed.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        settings: CheckpointSection | None = None,
        *,
        collective: bool = False,
    ) -> None:
        self.listener: Callable[[SaveResult], None] | None = None
        self.loaded: tuple[float, list[str]] | None = None
        self._settings = settings or CheckpointSection()
        _refuse_unfollowed(self._settings)
        self._collective = collective
        self._storage = LocalStorage(Path(place).absolute())
        self._pointers = PointerList(self._storage)
        self._store: CheckpointStore | None = None
        self._handle: SaveHandle | None = None
        self._collected = True
        self._problem = ""
        self._step = self._asked = -1
        self._marks: tuple[Any, ...] = ()
        self._known: dict[Version, Seal] = {}
        self._removed: list[Path] = []
        self._untidy = ""

    @property
    def step(self) -> int:
        """Steps of the last save, or of the newest that is there; -1 where there is none."""
        if self._asked >= 0:
            return self._asked
        versions = list_versions(self._storage)
        return versions[-1].step if versions else -1

    def sweep(self) -> None:
        """Remove the paths of saves that an earlier process did not live to complete."""
        self._pointers.sweep()

    def save(self, path: str | os.PathLike[str], content: Mapping[str, Any], step: int) -> None:
        """Copy `content` and write it in the background as that of `path`.

        Args:
            path: Of a file; its directories are made.
            content: Nested dictionaries and lists of tensors and values; what JSON has no word for
                is pickled.
            step: Steps done.

        Raises:
            CheckpointError: When it cannot be saved.
        """
        written = plain(dict(content))
        tree, marks = described(written)
        known = self._handle is not None and not self._problem
        if known and step == self._asked and marks == self._marks:
            # What a framework saves under two names at once is written once.
            self._point(Path(path), tree)
            return
        self._submit(Path(path), {KEY: Content(written)}, step)
        self._marks = marks

    def save_state(self, path: str | os.PathLike[str], state: State, step: int) -> None:
        """As `save`, of live objects: a module, its optimizers and others with a state."""
        self._submit(Path(path), state, step)

    def load(self, path: str | os.PathLike[str], *, unpickle: bool = True) -> dict[str, Any]:
        """The content of `path`, its tensors on the CPU.

        Args:
            path: As given to `save`.
            unpickle: Whether objects may be unpickled, which runs what is in them.

        Raises:
            CheckpointError: When nothing that it leads to can be used.
        """
        begun = time.perf_counter()
        for storage, contents, entry, problems in self._candidates(Path(path)):
            try:
                found = read_content(storage, contents, entry.values)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            content: dict[str, Any] = restored(found, unpickle=unpickle)
            self.loaded = time.perf_counter() - begun, problems
            return content
        raise AssertionError("the candidates end with an error")

    def load_state(self, path: str | os.PathLike[str], state: State) -> None:
        """Bring back what `save_state` has saved, on any number of ranks.

        Raises:
            CheckpointError: When nothing that `path` leads to can be used, or it does not fit.
        """
        for storage, contents, _, problems in self._candidates(Path(path)):
            saved, targets, problem = saved_in(contents), None, ""
            try:
                targets = find_targets(state, saved)
            except CheckpointError as error:
                problem = str(error)
            names = set() if targets is None else {*targets.tensors, *targets.values}
            taken = set().union(*self._shared(names))
            if targets is not None:
                problem = check_fit(targets, saved, taken, ())
            if problem := self._first(problem):
                raise CheckpointError(f"{path} does not fit this model: {problem}")
            assert targets is not None
            try:
                with VersionReader(storage, contents) as reader:
                    read_into(targets, reader)
            except CheckpointError as error:
                problem = str(error)
            if problem := self._first(problem):
                problems.append(problem)
                continue
            install(state, targets, saved)
            return

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove `path`, once the save under way is complete, and what it alone leads to."""
        self._removed.append(Path(path).absolute())
        self._collect(wait=False)

    def settle(self) -> None:
        """Wait for the save under way, however it goes."""
        self._collect(wait=True)

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: When the last save failed.
        """
        self.settle()
        if self._problem:
            raise CheckpointError(self._problem)

    def close(self) -> None:
        """Wait for the save under way and give up the store; another save opens it again.

        Raises:
            CheckpointError: When the last save failed.
        """
        store, self._store = self._store, None
        atexit.unregister(self._close_at_exit)
        try:
            self.wait()
        finally:
            self._handle, self._collected, self._problem = None, True, ""
            # Others may save to this store before it is opened again.
            self._pointers = PointerList(self._storage)
            self._step = self._asked = -1
            if store is not None:
                store.close()

    def release(self) -> None:
        """As `close`; but an exception under way is not replaced by that of the save.

        Raises:
            CheckpointError: When the last save failed, and nothing else did.
        """
        is_under_way = sys.exc_info()[0] is not None
        try:
            self.close()
        except CheckpointError as error:
            if not is_under_way:
                raise
            warnings.warn(str(error), stacklevel=3)

    def _close_at_exit(self) -> None:
        close_at_exit(self.close)

    def _submit(self, path: Path, state: State, step: int) -> None:
        if self._store is None:
            if self._keeps_house:
                # Which versions paths lead to is seen before there is another one.
                self._pointers.load()
            self._store = self._opened()
            # A program may end without a word to its checkpoints.
            atexit.register(self._close_at_exit)
        # A version is never overwritten: another one of this step counts as the step after.
        number = self._step + 1 if step == self._step else step
        handle = self._store.save_async(number, state)
        # The store has waited for the save before.
        self._collect(wait=True)
        self._handle, self._collected = handle, False
        if handle.version is None:
            # The storage does not answer: there is nothing that the path could lead to.
            self._collect(wait=True)
            return
        self._step, self._asked, self._marks = number, step, ()
        self._point(path)
        if not self._settings.asynchronous:
            self.wait()

    def _opened(self) -> CheckpointStore:
        settings = self._settings
        return CheckpointStore(
            self._storage.root,
            # The paths say what stays.
            keep=Retention(_EVERY_VERSION),
            reduction=Reduction(Compression(settings.compression), chain=settings.delta_chain),
            asynchronous=settings.asynchronous,
            collective=self._collective,
            writer=settings.writer,
            timeout_seconds=settings.timeout_seconds,
        )

    def _point(self, path: Path, tree: Any = None) -> None:
        assert self._handle is not None
        assert self._handle.version is not None
        path = path.absolute()
        if path in self._removed:
            self._removed.remove(path)
        if self._keeps_house:
            self._pointers.point(path, Entry(self._handle.version.folder, tree))

    @property
    def _keeps_house(self) -> bool:
        return not (self._collective and dist.is_initialized() and dist.get_rank() > 0)

    def _collect(self, *, wait: bool) -> None:
        """See how the save under way went, if it is done, and remove what may go."""
        if not self._collected:
            assert self._handle is not None
            if not (wait or self._handle.done()):
                return
            result = self._handle.result()
            self._collected, self._problem = True, result.error or ""
            if self.listener is not None:
                self.listener(result)
            if self._problem:
                warnings.warn(self._problem, stacklevel=3)
        if not self._problem and self._keeps_house:
            self._tidy()

    def _tidy(self) -> None:
        """Remove what may go: nothing, where it is not known what the paths lead to."""
        try:
            self._pointers.remove(self._removed)
            self._removed = []
            protected = self._pointers.led_to()
        except (OSError, CheckpointError) as error:
            if self._untidy != str(error):
                self._untidy = str(error)
                warnings.warn(f"no version is deleted while {error}", stacklevel=4)
            return
        # What cannot be deleted now is deleted after the next save.
        with contextlib.suppress(OSError, CheckpointError):
            prune(self._storage, Retention(1), protected=protected, cache=self._known)

    def _candidates(self, path: Path) -> Iterator[tuple[LocalStorage, Contents, Entry, list[str]]]:
        """Versions that `path` leads to, the newest first, and why newer ones cannot be used.

        Raises:
            CheckpointError: At the end.
        """
        self.settle()
        path = path.absolute()
        pointer = read_pointer(path)
        # Another trainer of this process may still be writing what its path leads to.
        wait_for_saves(pointer.store)
        storage = LocalStorage(pointer.store)
        versions = {version.folder: version for version in list_versions(storage)}
        problems: list[str] = []
        for entry in pointer.entries:
            contents, problem = None, f"{storage.location}/{entry.version} is not there"
            try:
                if entry.version in versions:
                    contents, problem = load(storage, versions[entry.version]), ""
            except CheckpointError as error:
                problem = str(error)
            if problem := self._first(problem):
                problems.append(problem)
                continue
            if problems:
                warnings.warn(
                    f"{path} leads to {entry.version}, the one before: {'; '.join(problems)}",
                    stacklevel=3,
                )
            assert contents is not None
            yield storage, contents, entry, problems
        raise CheckpointError(f"{path} cannot be used: {'; '.join(problems)}")

    def _shared(self, mine: Any) -> list[Any]:
        return gather_objects(mine) if self._collective else [mine]

    def _first(self, problem: str) -> str:
        """The first rank's problem that is not empty."""
        return next((item for item in self._shared(problem) if item), "")


def _refuse_unfollowed(settings: CheckpointSection) -> None:
    """Refuse settings that the framework has its own ways for."""
    for name, info in type(settings).model_fields.items():
        if name not in _FOLLOWED and (value := getattr(settings, name)) != info.default:
            raise IntegrationError(
                f"checkpoint.{name} = {value!r} cannot be followed where the framework names the "
                "checkpoints, and says when they are saved and which of them stay: remove it, and "
                "use the framework's own arguments (every_n_train_steps and save_top_k of "
                "ModelCheckpoint, for example)"
            )


require("lightning", "2.6", "2.7")


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

    A save goes on in the background. Its path is a small file that leads into the store; files
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
        live, rest = _divided(state)
        self._files.save_state(
            _local(path), {**live, _REST: _Rest(rest)}, _step_of(path, self._files.step)
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
        rest = _Rest({})
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


class _Rest:
    """All that is neither module nor optimizer, as one entry."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = plain_content(
            {
                name: value.state_dict() if hasattr(value, "state_dict") else value
                for name, value in self.content.items()
            }
        )
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.content = dict(state)


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
