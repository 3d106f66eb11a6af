"""What `engine.save_checkpoint` saves, as entries of a state that Outlast keeps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from outlast.errors import CheckpointError
from outlast.integrations.deepspeed.contents import plain, rebuilt
from outlast.integrations.deepspeed.partitions import adapt_ranks, elements_of, repartitioned
from outlast.integrations.settled import places_of, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

_SHARED = "deepspeed.shared"
RANK = "deepspeed.rank"
_TAG = "state"


class EngineState:
    """A DeepSpeed engine's state: module, ZeRO's partitions, schedule and counters.

    Args:
        engine: Of ZeRO 0 to 2, without pipeline and model parallelism.
        saved_ranks: How many ranks have saved the states of which one is to be restored.

    Attributes:
        entries: What is saved and restored, by name. The last one loads the engine.
        of_others: Names of entries that only a restore needs.
    """

    def __init__(self, engine: DeepSpeedEngine, saved_ranks: Collection[int]) -> None:
        self._engine = engine
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._shared = _Part(loaded=self._load)
        known = {self._rank}
        if {*saved_ranks} - {self._ranks}:
            # Which version it will be is known only when it was read.
            known.update(range(max(saved_ranks)))
        self._parts = {rank: _Part(may_be_missing=True) for rank in sorted(known)}
        self._own = self._parts[self._rank]
        self.entries = {
            **{f"{RANK}{rank}": part for rank, part in self._parts.items()},
            # It says how many ranks have saved it, and loads when all others are there.
            _SHARED: self._shared,
        }
        self.of_others = [f"{RANK}{rank}" for rank in self._parts if rank != self._rank]
        if self._rank != 0:
            self.of_others.append(_SHARED)

    def settle(self) -> dict[str, Any]:
        """The entries from now on: only those that this rank saves."""
        self._parts = {self._rank: self._own}
        self.of_others = []
        self.entries = {f"{RANK}{self._rank}": self._own}
        if self._rank == 0:
            # The other ranks have the same, and what they lack it has.
            self.entries[_SHARED] = self._shared
        return self.entries

    def note(self) -> None:
        """Bring the entries up to date; all ranks call it together between two steps."""
        taken = _Taking()
        before, self._engine.checkpoint_engine = self._engine.checkpoint_engine, taken
        try:
            with tempfile.TemporaryDirectory(prefix="outlast-deepspeed-") as folder:
                self._engine.save_checkpoint(folder, tag=_TAG, save_latest=False)
        finally:
            self._engine.checkpoint_engine = before
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
        giving = _Giving(files)
        before, self._engine.checkpoint_engine = self._engine.checkpoint_engine, giving
        try:
            with tempfile.TemporaryDirectory(prefix="outlast-deepspeed-") as folder:
                # DeepSpeed looks for the files before it asks for their content.
                for name in shared:
                    (Path(folder) / _TAG).mkdir(exist_ok=True)
                    (Path(folder) / _TAG / name).touch()
                self._engine.load_checkpoint(folder, tag=_TAG)
        finally:
            self._engine.checkpoint_engine = before
        for part in (self._shared, *self._parts.values()):
            part.content = {}

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
        files = [next(iter(name.values())) for name in saved]
        states = [file["optimizer_state_dict"] for file in files]
        name = next(iter(saved[0])).replace("pp_rank_0_", f"pp_rank_{self._rank}_")
        own = repartitioned(states, elements, self._rank, self._ranks)
        return {name: {**files[0], "optimizer_state_dict": own}}


class _Part:
    """Some files' content, as an entry of a state."""

    def __init__(
        self, *, loaded: Callable[[], None] | None = None, may_be_missing: bool = False
    ) -> None:
        self.content: dict[str, Any] = {}
        self.may_be_missing = may_be_missing
        self._loaded = loaded

    def state_dict(self) -> dict[str, Any]:
        """The content, by file."""
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.content = state
        if self._loaded is not None:
            self._loaded()


class _Taking(CheckpointEngine):  # type: ignore[misc]
    """Takes what is saved instead of writing it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.files: dict[str, Any] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing is made."""

    def save(self, state_dict: Mapping[str, Any], path: str) -> None:
        """Take a file's content."""
        self.files[Path(path).name] = plain(state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Nothing can be loaded from here."""
        raise CheckpointError(f"{path} cannot be read while the state is taken")

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Everything is taken."""
        return True


class _Giving(_Taking):
    """Gives what was restored in place of files."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        super().__init__()
        self._given = files

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of the file of this name."""
        return self._given[Path(path).name]
