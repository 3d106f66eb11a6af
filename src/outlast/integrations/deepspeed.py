"""Outlast inside DeepSpeed.

- `OutlastCheckpointEngine`: what ``engine.save_checkpoint`` and ``engine.load_checkpoint`` use::

    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.checkpoint_engine = OutlastCheckpointEngine("checkpoints/")
    engine.load_checkpoint("checkpoints/")             # the newest whole one
    ...
    engine.save_checkpoint("checkpoints/")             # returns when the state is copied

- `Run`: a loop's checkpoints, guard, energy, records and stop in time::

    engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=data)
    with Run("job.toml", engine=engine, loader=loader, epochs=3) as run:
        for batch in run:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            run.log(loss)

The import refuses what DeepSpeed would not survive: another version, and the lock that a killed
build of one of its operators has left, for which every later start would wait without end.
torch.utils.cpp_extension holds a file ``lock`` in the extension's folder while it compiles, and
removes it afterwards. Where the build was killed the file stays, and whoever needs the extension
waits for its end without a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import cpp_extension

from outlast.checkpoint import CheckpointStore, list_versions, load, storage_of
from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import CheckpointError, DataCorruptionError, IntegrationError, RunError
from outlast.hardware.filesystem import MOUNTS, NETWORK_TYPES, mount_of
from outlast.integrations import require, run
from outlast.integrations.entries import Entry
from outlast.records import StepsDone, Warned, read_run, replace_file
from outlast.runtime.memory import places_of, settled
from outlast.runtime.recording import directory_of
from outlast.runtime.saves import RunSaves, close_at_exit

require("deepspeed", "0.19", "0.20")

import deepspeed  # noqa: E402
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine  # noqa: E402
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import (  # noqa: E402
    TorchCheckpointEngine,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

    from outlast.checkpoint import Reduction, Retention, SaveResult, Version
    from outlast.job import LoopJob
    from outlast.runtime.engine import Runtime

STORE = "outlast"
"""Name of the store, in the folder that `save_checkpoint` is given."""

_STUB = b"This file's content is in the Outlast store beside its folder.\n"

_STEP = re.compile(r"(\d+)$", re.ASCII)

_PARTITION = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

_CLASS = "outlast.class"

_ALIGNMENT = 2
"""Elements per rank that DeepSpeed pads to (``nccl_start_alignment_factor``)."""

_WEIGHTS = "single_partition_of_fp32_groups"

_SHARED, _RANK, _TAG = "deepspeed.shared", "deepspeed.rank", "state"

_PROCESSES = Path("/proc")

_LONGEST_BUILD_SECONDS = 3600.0
"""Where the processes that may build cannot all be seen."""

_KNOWN = {
    f"{module}.{name}": (module, name)
    for module, name in (
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
    )
}


"""The classes of DeepSpeed's that are made again; nothing else is."""


def plain(value: Any) -> Any:
    """`value` with objects of DeepSpeed's and torch's small types as dictionaries."""
    if isinstance(value, Enum):
        return {_CLASS: _name_of(value), "value": plain(value.value)}
    if isinstance(value, torch.Size):
        return {_CLASS: "torch.Size", "value": list(value)}
    if isinstance(value, (torch.dtype, torch.device)):
        kind = type(value).__name__
        return {_CLASS: f"torch.{kind}", "value": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, set, frozenset)):
        return type(value)(plain(item) for item in value)
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if _name_of(value) in _KNOWN:
        return {_CLASS: _name_of(value), "value": plain(vars(value))}
    return value


def rebuilt(value: Any) -> Any:
    """Return what `plain` was given; ordered dictionaries come back as plain ones.

    Raises:
        CheckpointError: For a class that is not one of those that are known.
    """
    if isinstance(value, (list, set, frozenset, tuple)):
        return type(value)(rebuilt(item) for item in value)
    if not isinstance(value, dict):
        return value
    if _CLASS not in value:
        return {key: rebuilt(item) for key, item in value.items()}
    name, content = value[_CLASS], rebuilt(value["value"])
    if name == "torch.Size":
        return torch.Size(content)
    if name == "torch.dtype":
        return getattr(torch, content)
    if name == "torch.device":
        return torch.device(content)
    if name not in _KNOWN:
        raise CheckpointError(f"the checkpoint holds a {name}, which is not made from a file")
    module, own = _KNOWN[name]
    made = getattr(importlib.import_module(module), own)
    if issubclass(made, Enum):
        return made(content)
    found = made.__new__(made)
    vars(found).update(content)
    return found


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def elements_of(states: Mapping[str, Any]) -> list[int]:
    """Elements of each parameter group, without padding; none where nothing is partitioned.

    Args:
        states: Content of the module's file.
    """
    return [
        sum(member.numel() for member in group.values()) for group in states["param_shapes"] or ()
    ]


def adapt_ranks(states: dict[str, Any], ranks: int) -> None:
    """Let DeepSpeed take the module's file of another number of ranks, where that can be.

    It compares the numbers, and then asks for the partition of each rank that there is now.

    Args:
        states: Content of the module's file; changed in place.
        ranks: How many there are now.

    Raises:
        CheckpointError: Where a rank had a part of the model, or what it had depends on the number
            of ranks.
    """
    refuse_parts(states["mp_world_size"])
    # Where nothing is partitioned DeepSpeed compares nothing.
    if states["dp_world_size"] == ranks or not elements_of(states):
        return
    if states.get("num_experts"):
        raise CheckpointError(
            f"{states['dp_world_size']} ranks saved the checkpoint of a mixture of experts, whose "
            f"parameters are partitioned over groups of them: load it on as many, not on {ranks}"
        )
    settings = states.get("ds_config") or {}
    if settings.get("zero_optimization", {}).get("round_robin_gradients"):
        raise CheckpointError(
            f"{states['dp_world_size']} ranks saved the checkpoint with "
            f"zero_optimization.round_robin_gradients, which orders parameters by the number of "
            f"ranks: load it on as many, not on {ranks}"
        )
    states["dp_world_size"] = ranks


def refuse_parts(parts: int) -> None:
    """Refuse a checkpoint of a model of which each rank had one of several parts.

    Raises:
        CheckpointError: When it is one.
    """
    if parts > 1:
        raise CheckpointError(
            f"the checkpoint is of a model in {parts} parts, by tensor or pipeline parallelism, of "
            "which Outlast knows nothing: load one of data parallelism alone"
        )


def repartitioned(
    states: Sequence[Mapping[str, Any]], elements: Sequence[int], rank: int, ranks: int
) -> dict[str, Any]:
    """The state of one of `ranks` ranks.

    Args:
        states: ``optimizer_state_dict`` of every rank that saved, in their order.
        elements: Of each parameter group, without padding.
        rank: Whose part is asked for.
        ranks: How many there are now.

    Raises:
        CheckpointError: When the states are laid out in another way.
    """
    first = states[0]
    base = first.get("base_optimizer_state")
    if int(first.get("zero_stage", 3)) > 2 or not isinstance(base, dict):
        raise CheckpointError(
            f"a checkpoint of {len(states)} ranks can continue with {ranks} only where ZeRO 1 or 2 "
            "saved it, with elastic_checkpoint off"
        )
    aligned = _ALIGNMENT * ranks
    lengths = [math.ceil(size / aligned) * aligned // ranks for size in elements]

    def part(number: int, partitions: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rank's part of a parameter group's flat tensor, without padding."""
        whole = torch.cat([partition.reshape(-1) for partition in partitions])[: elements[number]]
        if whole.numel() != elements[number]:
            raise CheckpointError(
                f"the partitions of a parameter group hold {whole.numel()} of its "
                f"{elements[number]} elements"
            )
        # Not a view: the others' parts need not stay in memory.
        return whole[rank * lengths[number] :][: lengths[number]].clone()

    def moment(number: int, name: str) -> Any:
        """A state of the optimizer's: partitioned, or the same on all ranks."""
        found = [state["base_optimizer_state"]["state"][number][name] for state in states]
        if not isinstance(found[0], torch.Tensor) or found[0].dim() == 0:
            return found[0]
        own = part(number, found)
        return nn.functional.pad(own, (0, lengths[number] - own.numel()))

    # As DeepSpeed counts it: all of the padding is the last rank's.
    paddings = [
        length * ranks - size if rank == ranks - 1 else 0
        for length, size in zip(lengths, elements, strict=True)
    ]
    weights = ([state[_WEIGHTS][number] for state in states] for number in range(len(elements)))
    return {
        **first,
        _WEIGHTS: [part(number, found) for number, found in enumerate(weights)],
        "base_optimizer_state": {
            **base,
            "state": {
                number: {name: moment(number, name) for name in moments}
                for number, moments in base["state"].items()
            },
        },
        "group_paddings": paddings,
        "partition_count": [ranks] * len(elements),
    }


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
        reduction: Codecs and error bounds; by default everything is exact.
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
        self._saves = RunSaves(self._store, self._ended, raises=True)
        self._reader = CheckpointStore(self.directory / STORE, collective=False)
        self._info: CheckpointCommitInfo | None = None
        self._files: dict[str, Any] = {}
        self._read: tuple[Path, Any] | None = None
        self._elements: list[int] = []
        raise_together(self._mend)
        # DeepSpeed tells other engines than its own nothing of the end.
        atexit.register(self._close_at_exit)

    def create(self, info: CheckpointCommitInfo) -> None:
        """A save begins."""
        self._info, self._files = info, {}
        self._saves.collect(wait=True)

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
        state = {name: Entry(content) for name, content in files.items()}
        handle = self._saves.begin(_step_of(info.tag), state)
        if handle is not None and not self._asynchronous:
            handle.wait()
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
            # Note how large the parameter groups are; let DeepSpeed take other numbers of ranks.
            self._elements = elements_of(found)
            adapt_ranks(found, dist.get_world_size())
        self._read = (file, found)
        return found

    def wait(self) -> None:
        """Wait until the last save is published.

        Raises:
            CheckpointError: When it failed.
        """
        self._saves.wait()

    def cleanup(self) -> None:
        """Wait for the last save and give the store up, at the latest at the script's end.

        To be called before the process group is destroyed, where the script does that.

        Raises:
            CheckpointError: When the last save has failed; at the script's end it ends with exit
                code 1 then.
        """
        atexit.unregister(self._close_at_exit)
        self._reader.close()
        self._saves.close(failed=False)

    def _close_at_exit(self) -> None:
        close_at_exit(self.cleanup)

    def _ended(self, result: SaveResult, told: bool) -> None:
        if result.error is not None:
            warnings.warn(f"a checkpoint was not saved: {result.error}", stacklevel=4)

    def _content(self, name: str, step: int) -> Any:
        """Return what was saved as a file of this name."""
        receiver = Entry()
        try:
            found = self._reader.restore({name: receiver}, step=step)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; load another with tag=..., there are {self._tags()}"
            ) from None
        if found is None:
            raise CheckpointError(f"{self.directory / STORE} holds no checkpoint yet")
        return rebuilt(receiver.content)

    def _partition(self, name: str, step: int) -> Any:
        """A rank's part of the optimizer: its own, or made of those of other ranks."""
        # Names of the partitions' files of a step, by rank.
        version = next(version for version in self._versions()[::-1] if version.step == step)
        names = load(self._store.storage, version).catalogue.values
        matches = [match for name in names if (match := _PARTITION.fullmatch(name))]
        refuse_parts(len({match[2] for match in matches}))
        found = {int(match[1]): match[0] for match in matches}
        saved = [found[rank] for rank in sorted(found)]
        ranks = dist.get_world_size()
        if len(saved) == ranks:
            return self._content(name, step)
        if not self._elements:
            raise CheckpointError(
                f"{len(saved)} ranks saved the optimizer's partitions of step {step}, without the "
                f"shapes of what is in them: load it on as many, not on {ranks}"
            )
        return _own_part([self._content(name, step) for name in saved], self._elements)

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
        # Remove DeepSpeed's names of versions that are kept no longer, and nothing else.
        steps = {version.step for version in self._versions()}
        for folder in self._stub_folders():
            if _step_of(folder.name) not in steps:
                with contextlib.suppress(OSError):
                    for path in filter(_is_stub, folder.glob("*.pt")):
                        path.unlink()
                    # Where there is anything else in it, it stays.
                    folder.rmdir()

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


def _own_part(files: Sequence[Mapping[str, Any]], elements: Sequence[int]) -> dict[str, Any]:
    """This rank's file of the optimizer, from those of all ranks that saved."""
    states = [file["optimizer_state_dict"] for file in files]
    own = repartitioned(states, elements, dist.get_rank(), dist.get_world_size())
    return {**files[0], "optimizer_state_dict": own}


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


class EngineState:
    """A DeepSpeed engine's state: module, ZeRO's partitions, schedule and counters.

    Args:
        engine: Of ZeRO 0 to 2, without pipeline and model parallelism.
        saved_ranks: How many ranks have saved the states of which one is to be restored.

    Attributes:
        entries: What is saved and restored, by name. The last one loads the engine.
        of_others: Names of entries that only a restore needs.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, saved_ranks: Collection[int]) -> None:
        self._engine = engine
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._shared = Entry(loaded=self._load)
        known = {self._rank}
        if {*saved_ranks} - {self._ranks}:
            # Which version it will be is known only when it was read.
            known.update(range(max(saved_ranks)))
        self._parts = {rank: Entry(may_be_missing=True) for rank in sorted(known)}
        self._own = self._parts[self._rank]
        self.entries = {
            **{f"{_RANK}{rank}": part for rank, part in self._parts.items()},
            # It says how many ranks have saved it, and loads when all others are there.
            _SHARED: self._shared,
        }
        self.of_others = [f"{_RANK}{rank}" for rank in self._parts if rank != self._rank]
        if self._rank != 0:
            self.of_others.append(_SHARED)

    def settle(self) -> dict[str, Any]:
        """The entries from now on: only those that this rank saves."""
        self._parts = {self._rank: self._own}
        self.of_others = []
        self.entries = {f"{_RANK}{self._rank}": self._own}
        if self._rank == 0:
            # The other ranks have the same, and what they lack it has.
            self.entries[_SHARED] = self._shared
        return self.entries

    def note(self) -> None:
        """Bring the entries up to date; all ranks call it together between two steps."""
        taken = _InMemory({})
        with self._using(taken) as folder:
            self._engine.save_checkpoint(folder, tag=_TAG, save_latest=False)
        # They are as they are now until the optimizer of the next step changes them.
        places = places_of([self._engine.module], [self._engine.basic_optimizer])
        files = {name: settled(file, places) for name, file in taken.files.items()}
        self._own.content = {name: file for name, file in files.items() if "optim_states" in name}
        self._shared.content = {
            name: file for name, file in files.items() if name not in self._own.content
        }

    def _load(self) -> None:
        """Let the engine take what was restored.

        Raises:
            CheckpointError: When partitions of it are missing, or cannot be divided anew.
        """
        shared = rebuilt(self._shared.content)
        saved_ranks = next(number["dp_world_size"] for number in shared.values())
        for states in shared.values():
            adapt_ranks(states, self._ranks)
        files = {**shared, **self._partition(shared, saved_ranks)}
        with self._using(_InMemory(files)) as folder:
            # DeepSpeed looks for the files before it asks for their content.
            for name in shared:
                (Path(folder) / _TAG).mkdir(exist_ok=True)
                (Path(folder) / _TAG / name).touch()
            self._engine.load_checkpoint(folder, tag=_TAG)
        for part in (self._shared, *self._parts.values()):
            part.content = {}

    @contextlib.contextmanager
    def _using(self, files: _InMemory) -> Iterator[str]:
        """Within, the engine saves and loads `files` in place of what is in the folder given."""
        before, self._engine.checkpoint_engine = self._engine.checkpoint_engine, files
        try:
            with tempfile.TemporaryDirectory(prefix="outlast-deepspeed-") as folder:
                yield folder
        finally:
            self._engine.checkpoint_engine = before

    def _partition(self, shared: Mapping[str, Any], saved_ranks: int) -> dict[str, Any]:
        """This rank's file of ZeRO's partitions, if there are any."""
        if saved_ranks == self._ranks:
            return dict(rebuilt(self._own.content))
        elements = next((elements_of(value) for value in shared.values()), [])
        if not elements:
            return {}
        parts = [self._parts.get(rank) for rank in range(saved_ranks)]
        saved = [rebuilt(part.content) for part in parts if part is not None and part.content]
        if len(saved) < saved_ranks:
            raise CheckpointError(
                f"the checkpoint is of {saved_ranks} ranks, and the partitions of {len(saved)} are "
                "there: start again, or on as many"
            )
        name = next(iter(saved[0])).replace("pp_rank_0_", f"pp_rank_{self._rank}_")
        return {name: _own_part([next(iter(part.values())) for part in saved], elements)}


class _InMemory(CheckpointEngine):  # type: ignore[misc]
    """Takes what is saved instead of writing it, and gives it in place of what is read.

    Args:
        files: Content by name.
    """

    def __init__(self, files: dict[str, Any]) -> None:
        super().__init__(None)
        self.files = files

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing is made."""

    def save(self, state_dict: Mapping[str, Any], path: str) -> None:
        """Take a file's content."""
        self.files[Path(path).name] = plain(state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of the file of this name."""
        return self.files[Path(path).name]

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Everything is taken."""
        return True


class Run(run.Run):
    """`outlast.Run` for a DeepSpeed engine of ZeRO 0 to 2.

    It goes through the loader, restores the engine before the first batch and saves it on the way,
    guards the passes, measures energy, writes the records that `outlast report` shows, keeps the
    state in memory for a restart by torchrun, and stops in time with exit code 3.
    ``engine.save_checkpoint`` is not needed.

    The state may be restored on another number of ranks. The guard checks the passes, and not the
    optimizer's own numbers.

    All processes make it together, after `deepspeed.initialize`.

    Args:
        job: As in `outlast.Run`.
        engine: What `deepspeed.initialize` gave.
        loader: What the loop goes through, once per epoch.
        more: The further arguments of `outlast.Run`.

    Raises:
        JobError: When a setting is wrong, or is one that the script decides.
        IntegrationError: When the engine is of another kind, or a setting cannot be combined.
        OutlastError: When the directory is in use or belongs to another run; when what was saved
            does not fit.
    """

    def __init__(
        self,
        job: str | os.PathLike[str] | LoopJob | None = None,
        *,
        engine: deepspeed.DeepSpeedEngine,
        loader: Iterable[Any],
        **more: Any,
    ) -> None:
        _refuse(engine)
        self._deepspeed = engine
        self._judged = -1
        super().__init__(
            job, model=engine.module, optimizer=engine.basic_optimizer, loader=loader, **more
        )
        ranks = self._ranks.world_size
        self._facts = dataclasses.replace(
            self._facts,
            framework="deepspeed",
            samples_per_step=engine.train_micro_batch_size_per_gpu() * ranks,
            parallel={"data": ranks},
            versions={"deepspeed": deepspeed.__version__},
        )
        # The engine's own state in place of the module's and the optimizer's.
        del self._state["model"], self._state["optimizer"]
        self._engine_state = EngineState(engine, self._saved_ranks())
        self._state.update(self._engine_state.entries)

    def __enter__(self) -> Run:
        super().__enter__()
        for name in self._engine_state.of_others:
            del self._state[name]
        self._state.update(self._engine_state.settle())
        return self

    def _saved_ranks(self) -> list[int]:
        """Number of ranks that have saved what may be restored; which state it will be is open yet.

        The newest version may turn out to be damaged.
        """
        found, directory = set[int](), directory_of(self.job)
        storage = storage_of(directory.checkpoints)
        for version in list_versions(storage):
            with contextlib.suppress(CheckpointError):
                names = load(storage, version).catalogue.values
                found.add(sum(name.startswith(_RANK) for name in names))
        with contextlib.suppress(RunError):
            # What is in memory is of the newest start that has done steps, or of one after it.
            run = read_run(directory.path)
            newest = max((record.attempt for record, _ in run.of(StepsDone)), default=0)
            found.update(attempt.world_size for attempt in run.attempts if attempt.number >= newest)
        return sorted(gather_objects(found)[0] - {0})

    def _install_guard(self, runtime: Runtime) -> None:
        """A guard of the passes, without the optimizer."""
        settings = self.job.guard
        if settings.policy == "light" and not settings.modules:
            runtime.write(
                Warned(
                    'guard.policy = "light" checks the optimizer alone, whose numbers DeepSpeed '
                    'keeps in parts that the guard does not know: nothing is checked; "linear" and '
                    '"full" check the passes'
                )
            )
            return
        runtime.install_guard(settings, self.job.run.seed, self._deepspeed.module, [])

    def _before_update(self, *_: Any) -> None:
        """Before the optimizer's step of a parameter group: are the passes' numbers right?

        Raises:
            DataCorruptionError: On all ranks, when those of some rank are not.
        """
        super()._before_update()
        if self.guard is None or self._judged == self._deepspeed.global_steps:
            return
        self._judged = self._deepspeed.global_steps
        verdict = self.guard.verdict()
        if not verdict.clean:
            raise DataCorruptionError(
                f"step {self.step + 1}: the numbers of rank "
                f"{', '.join(map(str, verdict.bad_ranks))} are wrong and stay so; take the device "
                "out of service and continue from the newest checkpoint"
            )
        self.guard.watch.advance()
        self.guard.watch.begin()

    def _note(self) -> None:
        super()._note()
        self._engine_state.note()


def _refuse(engine: deepspeed.DeepSpeedEngine) -> None:
    """Refuse engines whose state is kept in other ways.

    Raises:
        IntegrationError: With what would do.
    """
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        raise IntegrationError(
            f"engine is a {type(engine).__name__}: give the first thing that "
            "deepspeed.initialize(...) returns"
        )
    stage = engine.zero_optimization_stage()
    if stage > 2:
        raise IntegrationError(
            f"zero_optimization.stage = {int(stage)} partitions the weights, of which this Run "
            "knows nothing; set 2 or less"
        )
    if isinstance(engine, deepspeed.PipelineEngine) or engine.mp_world_size > 1:
        raise IntegrationError(
            "this Run keeps engines of data parallelism alone; leave pipeline and tensor "
            "parallelism out"
        )
    parts = max((getattr(module, "ep_size", 1) for module in engine.module.modules()), default=1)
    if parts > 1:
        raise IntegrationError(
            f"the engine spreads experts over {parts} ranks (ep_size), and this Run would keep "
            "those of one rank alone; set ep_size to 1, or take an OutlastCheckpointEngine"
        )
    if not isinstance(engine.basic_optimizer, torch.optim.Optimizer):
        raise IntegrationError(
            "the engine has no optimizer: name one in DeepSpeed's config, or give one to "
            "deepspeed.initialize(...)"
        )


def extensions_folder() -> Path:
    """Folder in which torch builds extensions: ``TORCH_EXTENSIONS_DIR``, or in the user's cache."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    kind = "cpu"
    if torch.version.hip is not None:
        kind = f"rocm{torch.version.hip.replace('.', '')}"
    elif torch.version.cuda is not None:
        kind = f"cu{torch.version.cuda.replace('.', '')}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(cpp_extension.get_default_build_root()) / f"{python}_{kind}"


def stale_locks(folder: Path, names: Collection[str]) -> list[Path]:
    """Locks of the extensions of these names below `folder` that no live build holds.

    A build keeps its lock open. On a file system of this machine's own, a lock that no process has
    open is stale; on one that other machines share, where it is an hour old as well.
    """
    locks = {}
    for lock in (folder / name / "lock" for name in names):
        with contextlib.suppress(OSError):
            locks[lock] = lock.stat()
    if not locks:
        return []
    # After the locks were listed: whoever holds one of them has it open by now.
    held = set(_open_files("lock"))
    free = [lock for lock, found in locks.items() if (found.st_dev, found.st_ino) not in held]
    if not _sees_all_builds(folder):
        oldest = time.time() - _LONGEST_BUILD_SECONDS
        free = [lock for lock in free if locks[lock].st_mtime < oldest]
    # Those that were given back meanwhile are gone.
    return sorted(lock for lock in free if lock.exists())


def refuse_stale_locks() -> None:
    """Refuse to continue where the next build of an extension would wait for ever.

    Raises:
        IntegrationError: Naming the lock and what to do.
    """
    # The extensions that DeepSpeed builds on this machine's kind of device.
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    if locks := stale_locks(extensions_folder(), ALL_OPS):
        names = " ".join(map(str, locks))
        raise IntegrationError(
            "a build of a DeepSpeed operator was killed, and every start would wait without end "
            f"for the lock that it has left; no process builds it now, so delete it: rm {names}"
        )


def _sees_all_builds(folder: Path) -> bool:
    try:
        mounts = MOUNTS.read_text(encoding="latin-1")
    except OSError:
        return False
    return mount_of(folder.resolve(), mounts)[1] not in NETWORK_TYPES


def _open_files(name: str) -> Iterator[tuple[int, int]]:
    """Device and inode of every file called `name` that a process of this machine has open."""
    for link in _PROCESSES.glob("[0-9]*/fd/*"):
        # Processes end, and those of others are not to be looked into.
        with contextlib.suppress(OSError):
            if link.readlink().name == name:
                found = link.stat()
                yield found.st_dev, found.st_ino


refuse_stale_locks()
