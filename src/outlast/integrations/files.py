"""Checkpoint files of a framework, kept in a store.

A framework names each of its checkpoints by a path; it overwrites some and removes others. Here
such a path is a small file that leads to a version of a store, and, where it was used before, to
the version before. So a save can continue in the background: until it is complete, the path leads
to what it led to. A path that the framework removes goes when the save after that is complete, and
with it the versions that no path leads to.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import pickle
import sys
import time
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.checkpoint import CheckpointStore, Retention, list_versions, load
from outlast.checkpoint.reader import VersionReader, Wanted
from outlast.checkpoint.restore import read_into, saved_in
from outlast.checkpoint.retention import prune
from outlast.checkpoint.storage import LocalStorage
from outlast.checkpoint.store import wait_for_saves
from outlast.checkpoint.version import is_published
from outlast.distributed.group import gather_objects
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations import unfollowed
from outlast.integrations.entries import EVERY_VERSION, Entry
from outlast.job import CheckpointSection
from outlast.records import OwnerLock, replace_file
from outlast.runtime.saves import close_at_exit, store_options
from outlast.state import values
from outlast.state.box import whole
from outlast.state.install import check_fit, find_targets, install
from outlast.state.tensors import dtype_of, opaque_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from outlast.checkpoint import SaveHandle, SaveResult, Version
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents, Seal
    from outlast.state.live import State

_FOLLOWED = {"asynchronous", "writer", "timeout_seconds", "compression"}

_FORMAT = "outlast checkpoint file 1"
_START = f'{{"format": "{_FORMAT}"'.encode()
_LIST = "files.json"

KEY = "checkpoint"
"""Name of the dictionary among what a version holds."""

_PICKLED = "outlast.pickled"
_WORDS = (type(None), bool, int, float, complex, str, bytes)
_ARRAYS = (torch.Tensor, nn.Parameter, np.ndarray)
_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class Target:
    """Target of a path.

    Attributes:
        version: Folder of a version.
        values: JSON of the content without its tensors, where that is not what the version holds.
    """

    version: str
    values: Any = None


@dataclass(frozen=True)
class Pointer:
    """The content of a path.

    Attributes:
        store: Directory of the store.
        entries: The newest first; the first that is complete counts.
    """

    store: Path
    entries: list[Target]


def is_pointer(path: Path) -> bool:
    """Return whether `path` is such a file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_START)) == _START
    return False


def read_pointer(path: Path) -> Pointer:
    """The content of `path`.

    Raises:
        CheckpointError: When it is no such file.
    """
    try:
        found = _look(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if found is None:
        what = "is no checkpoint file of Outlast" if path.exists() else "is not there"
        raise CheckpointError(f"{path} {what}")
    return found


def _look(path: Path) -> Pointer | None:
    """The content of `path`; None where nothing, or a file of another kind, is there.

    Raises:
        CheckpointError: When it is damaged.
        OSError: When it cannot be read.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_START)) != _START:
                return None
            found = json.loads(_START + file.read())
        entries = [Target(entry["version"], entry.get("values")) for entry in found["entries"]]
        return Pointer(Path(os.path.normpath(path.parent / found["store"])), entries)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


class PointerList:
    """The paths that lead to a store.

    They are listed in a file of the store. Where that is lost, it is not known which versions paths
    lead to: all that are there are listed as to be kept in the new one.

    Args:
        storage: The store.
    """

    def __init__(self, storage: LocalStorage) -> None:
        self._storage = storage
        self._file = storage.root / _LIST
        self._paths: list[Path] | None = None
        self._kept: set[str] = set()

    @property
    def paths(self) -> list[Path]:
        """All of them, the oldest first; also where the store was moved or copied with them.

        Raises:
            CheckpointError: When the list cannot be read.
        """
        if self._paths is not None:
            return self._paths
        listed, paths = self._listed(), list[Path]()
        for name in listed or ():
            if "version" in name:
                self._kept.add(name["version"])
                continue
            near = os.path.normpath(self._storage.root / name["relative"])
            found = {path: self._leads_here(path) for path in (Path(name["path"]), Path(near))}
            # What cannot be read now may be one.
            sure = [path for path, leads in found.items() if leads]
            paths += sure or [path for path, leads in found.items() if leads is None]
        self._paths = [*dict.fromkeys(paths)]
        if listed is None:
            # Paths may lead to any of the versions that are there now.
            versions = list_versions(self._storage)
            self._kept = {item.folder for item in versions if is_published(self._storage, item)}
        if listed is None and self._kept:
            warnings.warn(
                f"{self._file}, the list of the files that lead to this store, is lost: its "
                f"{len(self._kept)} versions are kept, whether a file leads to them or not",
                stacklevel=2,
            )
            with contextlib.suppress(OSError):
                self._write()
        return self._paths

    def point(self, path: Path, entry: Target) -> None:
        """Let `path` lead to `entry`, and until that is complete to what it led to before.

        Raises:
            CheckpointError: When it cannot be written.
        """
        if path.is_dir():
            raise CheckpointError(
                f"{path} is a directory, perhaps a checkpoint of another kind; remove it, or save "
                "under another name"
            )
        try:
            before = self._complete(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except CheckpointError:
            before = []
        before = [item for item in before if item.version != entry.version]
        content = {
            "format": _FORMAT,
            "store": os.path.relpath(self._storage.root, path.parent),
            "entries": [vars(item) for item in (entry, *before[:1])],
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path not in self.paths:
                # Listed first: what a path leads to is never deleted.
                self._paths = [*self.paths, path]
                self._write()
            replace_file(path, json.dumps(content).encode())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}") from None

    def remove(self, paths: list[Path]) -> None:
        """Remove files; what cannot be removed stays listed.

        Raises:
            CheckpointError: When the list cannot be read.
        """
        gone = set()
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                gone.add(path)
        if gone & set(self.paths):
            self._paths = [path for path in self.paths if path not in gone]
            with contextlib.suppress(OSError):
                self._write()

    def led_to(self) -> set[Version]:
        """The versions that any path leads to, or one beside it that was copied or renamed.

        Raises:
            CheckpointError: When the list, a path, or a folder with one cannot be read.
        """
        self._take_up()
        found = {*self._kept}
        for path in self.paths:
            try:
                pointer = _look(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
            found |= {entry.version for entry in pointer.entries} if pointer else set()
        return {version for version in list_versions(self._storage) if version.folder in found}

    def sweep(self) -> None:
        """Remove the paths of saves that a process did not live to complete.

        Nothing is removed while a live process saves to the store.
        """
        owner = OwnerLock(self._storage.root / "owner", subject="", remedy="")
        try:
            paths = self.paths
        except CheckpointError:
            # Told where versions would be deleted.
            return
        if not paths or owner.is_held():
            return
        for path in paths:
            with contextlib.suppress(OSError, CheckpointError):
                if not is_pointer(path) or self._complete(path):
                    continue
                path.unlink(missing_ok=True)
                warnings.warn(
                    f"{path} was not complete when its process ended; it is removed", stacklevel=2
                )

    def _complete(self, path: Path) -> list[Target]:
        """Return what `path` leads to now, of what is complete.

        Raises:
            CheckpointError: When it is damaged.
            OSError: When it cannot be read.
        """
        pointer = _look(path)
        versions = {version.folder: version for version in list_versions(self._storage)}
        return [
            entry
            for entry in (pointer.entries if pointer else ())
            if entry.version in versions and is_published(self._storage, versions[entry.version])
        ]

    def _listed(self) -> list[dict[str, str]] | None:
        """Read the file; None where it is lost.

        Raises:
            CheckpointError: When it cannot be read.
        """
        try:
            found = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self._file} cannot be read: {error.strerror}") from None
        except ValueError:
            return None
        whole = isinstance(found, list) and all(
            isinstance(name, dict) and ("version" in name or {"path", "relative"} <= {*name})
            for name in found
        )
        return found if whole else None

    def _take_up(self) -> None:
        """Add what leads here from beside the known paths: copies, and files with new names."""
        known = {*self.paths}
        for folder in dict.fromkeys(path.parent for path in self.paths):
            try:
                beside = [path for path in folder.iterdir() if path not in known]
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
            self._paths = [*self.paths, *filter(self._leads_here, beside)]
        if known != {*self.paths}:
            with contextlib.suppress(OSError):
                self._write()

    def _leads_here(self, path: Path) -> bool | None:
        """Return whether `path` leads to this store; None where it cannot be read."""
        try:
            pointer = _look(path)
        except (OSError, CheckpointError):
            return None
        here = os.path.realpath(self._storage.root)
        return pointer is not None and os.path.realpath(pointer.store) == here

    def _write(self) -> None:
        root = self._storage.root
        root.mkdir(parents=True, exist_ok=True)
        listed = [
            {"path": str(path), "relative": os.path.relpath(path, root)} for path in self.paths
        ]
        listed += [{"version": name} for name in sorted(self._kept)]
        replace_file(self._file, json.dumps(listed).encode())


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
        for name, value in unfollowed(self._settings, _FOLLOWED):
            raise IntegrationError(
                f"checkpoint.{name} = {value!r} cannot be followed where the framework names the "
                "checkpoints, and says when they are saved and which of them stay: remove it, and "
                "use the framework's own arguments (every_n_train_steps and save_top_k of "
                "ModelCheckpoint, for example)"
            )
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
        self._submit(Path(path), {KEY: Entry(written)}, step)
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
                _ = self._pointers.paths
            self._store = CheckpointStore(
                self._storage.root,
                # The paths say what stays.
                keep=Retention(EVERY_VERSION),
                collective=self._collective,
                **store_options(self._settings),
            )
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

    def _point(self, path: Path, tree: Any = None) -> None:
        assert self._handle is not None
        assert self._handle.version is not None
        path = path.absolute()
        if path in self._removed:
            self._removed.remove(path)
        if self._keeps_house:
            self._pointers.point(path, Target(self._handle.version.folder, tree))

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

    def _candidates(self, path: Path) -> Iterator[tuple[LocalStorage, Contents, Target, list[str]]]:
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


def plain(value: Any, path: str = KEY) -> Any:
    """`value` with bytes, which `restored` unpickles, in place of what JSON has no word for.

    Raises:
        CheckpointError: Naming the path of an object that cannot be pickled.
    """
    if type(value) in (*_WORDS, *_ARRAYS) or isinstance(value, (DTensor, np.generic)):
        return value
    if type(value) in (list, tuple):
        return type(value)(plain(item, f"{path}.{n}") for n, item in enumerate(value))
    if type(value) in (set, frozenset) and all(type(item) in _WORDS for item in value):
        return value
    if type(value) in (dict, OrderedDict) and all(type(key) in _WORDS for key in value):
        found = type(value)((key, plain(item, f"{path}.{key}")) for key, item in value.items())
        if attributes := getattr(value, "__dict__", None):
            found.__dict__.update(plain(attributes, f"{path}.__dict__"))
        return found
    try:
        return {_PICKLED: pickle.dumps(value, protocol=5)}
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"`{path}` is of type {type(value).__name__}, which cannot be saved: {error}"
        ) from None


def restored(value: Any, *, unpickle: bool) -> Any:
    """Return what `plain` was given.

    Raises:
        CheckpointError: When there are pickled objects, and they must not be unpickled.
    """
    if isinstance(value, dict):
        if value.keys() == {_PICKLED}:
            if not unpickle:
                raise CheckpointError(
                    "the checkpoint has objects in it that can only be unpickled, which "
                    "weights_only = True forbids; load it with weights_only = False"
                )
            return pickle.loads(value[_PICKLED])
        found = type(value)((key, restored(item, unpickle=unpickle)) for key, item in value.items())
        if attributes := getattr(value, "__dict__", None):
            found.__dict__.update(restored(attributes, unpickle=unpickle))
        return found
    if type(value) in (list, tuple):
        return type(value)(restored(item, unpickle=unpickle) for item in value)
    return value


def described(content: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """JSON of the content without its tensors, and marks that differ when these do.

    Large tensors, and those on a device, are told apart by their memory and version counter, which
    a change in place through ``.data`` does not count.
    """
    marks: list[Any] = []

    def put(name: str, value: Any) -> str | None:
        if isinstance(value, torch.Tensor):
            marks.append((name, _mark(value)))
            return "torch"
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            marks.append((name, str(value.dtype), value.shape, _digest(value.tobytes())))
            return "numpy"
        return None

    return values.encode(content, KEY, put), tuple(marks)


def read_content(storage: Storage, contents: Contents, tree: Any = None) -> dict[str, Any]:
    """The dictionary that a version holds, its tensors on the CPU.

    Args:
        storage: Where the version lies.
        contents: Its manifests.
        tree: JSON of the content without its tensors; None: that of the version.

    Raises:
        CheckpointError: When a tensor is missing or damaged.
    """
    if KEY not in contents.values:
        raise CheckpointError(
            f"{storage.location}/{contents.version.folder} was saved from live modules; load it "
            "into modules, not as a dictionary"
        )
    facts = contents.catalogue.tensors
    tensors = {name: torch.empty(fact.shape, dtype=dtype_of(fact)) for name, fact in facts.items()}
    with VersionReader(storage, contents) as reader:
        boxes = {name: whole(fact.shape) for name, fact in facts.items()}
        reader.read(
            [Wanted(name, boxes[name], opaque_array(tensor)) for name, tensor in tensors.items()]
        )

    def get(name: str, kind: str) -> Any:
        return tensors[name].numpy() if kind == "numpy" else tensors[name]

    found: dict[str, Any] = values.decode(contents.values[KEY] if tree is None else tree, get)
    return found


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    facts = (tensor.dtype, tuple(tensor.shape))
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or size > _COMPARED_BYTES:
        return (*facts, str(tensor.device), tensor.data_ptr(), tensor._version)
    memory = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return (*facts, _digest(memory.numpy().tobytes()))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
