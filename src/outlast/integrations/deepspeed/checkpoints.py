"""DeepSpeed's checkpoints in a store: `engine.save_checkpoint` and `engine.load_checkpoint` stay.

engine, *_ = deepspeed.initialize(model=model, config=config)
engine.checkpoint_engine = OutlastCheckpointEngine("checkpoints/")
engine.load_checkpoint("checkpoints/")             # the newest whole one
...
engine.save_checkpoint("checkpoints/")             # returns when the state is copied
"""

from __future__ import annotations

import atexit
import contextlib
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from outlast.checkpoint import CheckpointStore, list_versions, load
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations.deepspeed.contents import plain, rebuilt
from outlast.integrations.deepspeed.partitions import (
    adapt_ranks,
    elements_of,
    refuse_parts,
    repartitioned,
)
from outlast.records import replace_file

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

    from outlast.checkpoint import Reduction, Retention, SaveHandle, Version

STORE = "outlast"
"""Name of the store, in the folder that `save_checkpoint` is given."""

_STUB = b"This file's content is in the Outlast store beside its folder.\n"
_STEP = re.compile(r"(\d+)$", re.ASCII)
_PARTITION = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class OutlastCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Keeps what DeepSpeed saves as versions of a `CheckpointStore`.

    ``engine.save_checkpoint(directory)`` returns when the state is copied; the version is written
    in the background and counts once it is whole and durable. A save that fails stops no training:
    it is told as a warning at the next save. DeepSpeed's own files are still there under their
    names, but say only where their content is; ``latest`` names a whole version at every start.
    Checkpoints that DeepSpeed wrote into the directory before can still be loaded.

    Of ZeRO 1 and 2 a checkpoint can be loaded on another number of ranks, without a conversion.
    Engines of data parallelism alone are saved; pipeline and tensor parallelism are refused.

    All ranks make it together, after `deepspeed.initialize` or `deepspeed.init_distributed`.

    Args:
        directory: What `save_checkpoint` and `load_checkpoint` are given.
        keep: Newest versions kept, or a `Retention`.
        reduction: Codecs, deltas and error bounds; by default everything is exact.
        asynchronous: Whether `save_checkpoint` returns before the version is published.
        timeout_seconds: Longest wait for the storage or another rank.

    Raises:
        IntegrationError: When there is no process group yet.
        CheckpointError: When a setting is wrong, or the directory cannot be read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | Retention = 3,
        reduction: Reduction | None = None,
        asynchronous: bool = True,
        timeout_seconds: float = 1800.0,
    ) -> None:
        super().__init__(None)
        if not dist.is_initialized():
            raise IntegrationError(
                "an OutlastCheckpointEngine needs the process group: make it after "
                "deepspeed.initialize(...) or deepspeed.init_distributed()"
            )
        self.name = type(self).__name__
        self.directory = Path(directory)
        self._torch = TorchCheckpointEngine()
        self._asynchronous = asynchronous
        self._store = CheckpointStore(
            self.directory / STORE, keep=keep, reduction=reduction, timeout_seconds=timeout_seconds
        )
        self._reader = CheckpointStore(self.directory / STORE, collective=False)
        self._info: CheckpointCommitInfo | None = None
        self._files: dict[str, Any] = {}
        self._handle: SaveHandle | None = None
        self._read: tuple[Path, Any] | None = None
        self._elements: list[int] = []
        raise_together(self._mend)
        # DeepSpeed tells other engines than its own nothing of the end.
        atexit.register(self.cleanup)

    def create(self, info: CheckpointCommitInfo) -> None:
        """A save begins."""
        self._info, self._files = info, {}
        self._collect()

    def save(self, state_dict: Mapping[str, Any], path: str) -> None:
        """Take one of the save's files; it is copied in `commit`.

        Raises:
            CheckpointError: When the tag has no step.
            IntegrationError: When the file is of another directory.
        """
        file, info = Path(path), self._info
        assert info is not None
        if file.parent == Path(info.save_dir):
            # `save_16bit_model` makes a file for other programs.
            self._torch.save(state_dict, path)
            return
        if Path(info.save_dir).absolute() != self.directory.absolute():
            raise IntegrationError(
                f"save_checkpoint was given {info.save_dir}, but this OutlastCheckpointEngine "
                f"keeps {self.directory}: give both the same directory"
            )
        _step_of(info.tag)
        self._files[file.name] = plain(state_dict)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Copy what was taken, on all ranks together, and have it written.

        Raises:
            CheckpointError: On all ranks, when it cannot be saved; later failures are told by the
                next save.
        """
        files, self._files = self._files, {}
        folder = Path(info.save_dir) / info.tag
        told = gather_objects((bool(files), _refusal(folder, files)))
        if refused := next((item for _, item in told if item), ""):
            raise CheckpointError(refused)
        if not any(has_files for has_files, _ in told):
            return True
        for name in files:
            replace_file(folder / name, _STUB)
        state = {name: _File(content) for name, content in files.items()}
        self._handle = self._store.save_async(_step_of(info.tag), state)
        if not self._asynchronous:
            self._handle.wait()
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of a file that was saved, verified.

        Raises:
            CheckpointError: When its version is not whole, or damaged.
        """
        file = Path(path)
        if not _is_stub(file) and file.is_file():
            return self._torch.load(path, map_location=map_location)
        # DeepSpeed reads the module's file twice, once for a look into it.
        if self._read is not None and self._read[0] == file:
            found, self._read = self._read[1], None
            return found
        step = _step_of(file.parent.name)
        if _PARTITION.fullmatch(file.name):
            return self._partition(file.name, step)
        found = self._content(file.name, step)
        if "dp_world_size" in found:
            self._adapt(found)
        self._read = (file, found)
        return found

    def wait(self) -> None:
        """Wait until the last save is published.

        Raises:
            CheckpointError: When it failed.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def cleanup(self) -> None:
        """Wait for the last save and give the store up, at the latest at the script's end.

        To be called before the process group is destroyed, where the script does that.
        """
        atexit.unregister(self.cleanup)
        try:
            self._collect()
        finally:
            self._store.close()
            self._reader.close()

    def _collect(self) -> None:
        """Wait for the save before, and tell if it failed."""
        handle, self._handle = self._handle, None
        if handle is not None and (error := handle.result().error) is not None:
            warnings.warn(f"a checkpoint was not saved: {error}", stacklevel=3)

    def _content(self, name: str, step: int) -> Any:
        """What was saved as a file of this name."""
        receiver = _File({})
        try:
            found = self._reader.restore({name: receiver}, step=step)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; load another with tag=..., there are {self._tags()}"
            ) from None
        if found is None:
            raise CheckpointError(f"{self.directory / STORE} holds no checkpoint yet")
        return rebuilt(receiver.content)

    def _adapt(self, states: dict[str, Any]) -> None:
        """Note how large the parameter groups are; let DeepSpeed take other numbers of ranks."""
        self._elements = elements_of(states)
        adapt_ranks(states, dist.get_world_size())

    def _partition(self, name: str, step: int) -> Any:
        """A rank's part of the optimizer: its own, or made of those of other ranks."""
        saved = self._partitions(step)
        ranks = dist.get_world_size()
        if len(saved) == ranks:
            return self._content(name, step)
        if not self._elements:
            raise CheckpointError(
                f"{len(saved)} ranks saved the optimizer's partitions of step {step}, without the "
                f"shapes of what is in them: load it on as many, not on {ranks}"
            )
        files = [self._content(name, step) for name in saved]
        states = [file["optimizer_state_dict"] for file in files]
        own = repartitioned(states, self._elements, dist.get_rank(), ranks)
        return {**files[0], "optimizer_state_dict": own}

    def _partitions(self, step: int) -> list[str]:
        """Names of the partitions' files of a step, by rank.

        Raises:
            CheckpointError: When they are parts of parts of the model.
        """
        version = next(version for version in self._versions()[::-1] if version.step == step)
        names = load(self._store.storage, version).catalogue.values
        matches = [match for name in names if (match := _PARTITION.fullmatch(name))]
        refuse_parts(len({match[2] for match in matches}))
        found = {int(match[1]): match[0] for match in matches}
        return [found[rank] for rank in sorted(found)]

    def _versions(self) -> list[Version]:
        return list_versions(self._store.storage)

    def _tags(self) -> str:
        steps = {version.step for version in self._versions()}
        return ", ".join(f"global_step{step}" for step in sorted(steps)) or "none"

    def _mend(self) -> None:
        """Let ``latest`` name a version that is whole: its save may have been cut short."""
        if dist.get_rank() != 0:
            return
        latest = self.directory / "latest"
        tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
        if tag and any(map(_is_stub, (self.directory / tag).glob("*.pt"))):
            whole = self._whole_tag()
            if whole != tag:
                warnings.warn(
                    f"the save of {tag} was cut short: "
                    + (f"{whole} is the newest that is whole" if whole else "there is none else"),
                    stacklevel=4,
                )
                if whole:
                    replace_file(latest, whole.encode())
                else:
                    latest.unlink()
        self._drop_old_stubs()

    def _whole_tag(self) -> str:
        """The tag of the newest whole version; empty for none."""
        for version in self._versions()[::-1]:
            with contextlib.suppress(CheckpointError):
                load(self._store.storage, version)
                for folder in self._stub_folders():
                    if _step_of(folder.name) == version.step:
                        return folder.name
        return ""

    def _stub_folders(self) -> list[Path]:
        folders = self.directory.iterdir() if self.directory.is_dir() else ()
        return [
            folder
            for folder in folders
            if folder.name != STORE
            and _STEP.search(folder.name)
            and any(map(_is_stub, folder.glob("*.pt")))
        ]

    def _drop_old_stubs(self) -> None:
        """Remove DeepSpeed's names of versions that are kept no longer, and nothing else."""
        steps = {version.step for version in self._versions()}
        for folder in self._stub_folders():
            if _step_of(folder.name) not in steps:
                with contextlib.suppress(OSError):
                    for path in filter(_is_stub, folder.glob("*.pt")):
                        path.unlink()
                    # Where there is anything else in it, it stays.
                    folder.rmdir()


class _File:
    """A file's content as an entry of a store's state."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        """The content."""
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.content = state


def _refusal(folder: Path, files: Mapping[str, Any]) -> str:
    """Why these files cannot be saved for a folder; empty where they can."""
    for states in files.values():
        if "dp_world_size" in states and (
            states["mp_world_size"] != 1 or states["dp_world_size"] != dist.get_world_size()
        ):
            return (
                "an OutlastCheckpointEngine keeps engines of data parallelism alone, and this one "
                f"has {states['dp_world_size']} data-parallel of {dist.get_world_size()} ranks: "
                "leave pipeline and tensor parallelism out, or keep DeepSpeed's own checkpoint "
                "engine"
            )
    if others := sorted(path.name for path in folder.glob("*.pt") if not _is_stub(path)):
        return (
            f"{folder} holds {others[0]}, which DeepSpeed itself has written, and which this save "
            "would replace: move the folder away, or save under another tag"
        )
    return ""


def _is_stub(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size == len(_STUB) and path.read_bytes() == _STUB
    return False


def _step_of(tag: str) -> int:
    """The step that a tag ends in.

    Raises:
        CheckpointError: When it ends in none.
    """
    found = _STEP.search(tag)
    if found is None:
        raise CheckpointError(
            f"tag = {tag!r} cannot be saved: a version of the store has the name of its step, so "
            'let the tag end in it, as DeepSpeed\'s own "global_step100" does'
        )
    return int(found[1])
