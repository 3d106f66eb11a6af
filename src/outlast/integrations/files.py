"""Checkpoint files of a framework, kept in a store.

A framework names each of its checkpoints by a path; it overwrites some and removes others. Here
such a path is a small file that leads to a version of a store, and, where it was used before, to
the version before. So a save can go on in the background: until it is complete, the path leads to
what it led to. A path that the framework removes goes when the save after that is complete, and
with it the versions that no path leads to.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from outlast.checkpoint import CheckpointStore, Compression, Reduction, list_versions, load
from outlast.checkpoint.format.reader import VersionReader
from outlast.checkpoint.format.retention import Retention, prune
from outlast.checkpoint.format.storage import LocalStorage
from outlast.checkpoint.restore import read_into, saved_in
from outlast.checkpoint.store import wait_for_saves
from outlast.distributed.group import gather_objects
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations.content import KEY, Content, described, plain, read_content, restored
from outlast.integrations.pointer import Entry, PointerList, read_pointer
from outlast.job import CheckpointSection
from outlast.runtime.saves import close_at_exit
from outlast.state.install import check_fit, find_targets, install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from outlast.checkpoint import SaveHandle, SaveResult, Version
    from outlast.checkpoint.format.retention import Known
    from outlast.checkpoint.format.version import Contents
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
        self._known: dict[Version, Known] = {}
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
