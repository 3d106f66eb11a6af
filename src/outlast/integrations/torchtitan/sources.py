"""What a torchtitan run begins with, and whether its data loader can go on from a version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan.components.checkpointer import DATALOADER, MODEL, CheckpointManager
from torchtitan.tools import filesystem

from outlast.checkpoint import CheckpointStore, list_versions, storage_of
from outlast.distributed.group import gather_objects
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations.torchtitan.state import names_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.integrations.torchtitan.manager import OutlastCheckpointManager


@dataclass(frozen=True)
class Source:
    """Where the first weights of a run come from.

    Attributes:
        path: A store, a folder of a version in one, a folder of DCP, or one of Hugging Face.
        in_hf: Whether it is one of Hugging Face.
        quantized: Whether its weights are quantised.
    """

    path: str
    in_hf: bool = False
    quantized: bool = False

    @classmethod
    def of(cls, config: Any, sd_adapter: Any) -> Source | None:
        """What ``checkpoint.initial_load_*`` names; None for nothing.

        Raises:
            IntegrationError: When there is no such folder.
        """
        path = config.initial_load_path
        if path is None and config.initial_load_in_hf:
            path = getattr(sd_adapter, "hf_assets_path", None)
        if not path:
            if config.initial_load_in_hf:
                raise IntegrationError(
                    "checkpoint.initial_load_in_hf = True needs initial_load_path, or a model with "
                    "a state_dict_adapter and its assets"
                )
            return None
        if not filesystem.isdir(path):
            raise IntegrationError(
                f"checkpoint.initial_load_path = {path!r} is no folder; give that of a store, of "
                "a checkpoint of torchtitan or of Hugging Face's safetensors"
            )
        return cls(path, config.initial_load_in_hf, config.initial_load_in_hf_quantized)

    def load(self, manager: OutlastCheckpointManager, wanted: Mapping[str, Any] | None) -> None:
        """Load from it; all ranks together.

        Args:
            manager: Of the run.
            wanted: The entries of its states that are loaded; None: the weights alone.

        Raises:
            CheckpointError: When nothing there can be used.
        """
        entries, states = manager.entries, manager.states
        if not self.in_hf and (found := _store_at(self.path)) is not None:
            place, step = found
            with CheckpointStore(place) as store:
                if wanted is None:
                    is_there = entries.restore_model(store, step)
                else:
                    is_there = store.restore(wanted, step=step, allow=["retyped"]) is not None
            if not is_there:
                raise CheckpointError(f"no checkpoint in {place} was completed")
            if wanted is not None:
                entries.loaded(wanted)
            return
        model = states[MODEL].state_dict()
        others = (
            {}
            if wanted is None
            else {
                name: state
                for name, state in states.items()
                if name != MODEL and any(f"{item}.".startswith(f"{name}.") for item in wanted)
            }
        )
        CheckpointManager.dcp_load(
            manager, {**others, **model}, self.path, self.in_hf, self.quantized
        )


def _store_at(path: str) -> tuple[str, int | None] | None:
    """The store that a path is or leads into, and the step of the version; None for others."""
    parent, _, own = path.rstrip("/").rpartition("/")
    for version in list_versions(storage_of(parent)):
        if version.folder == own:
            return parent, version.step
    return (path, None) if list_versions(storage_of(path)) else None


def check_data_keys(store: CheckpointStore, entries: Mapping[str, Any], step: int | None) -> None:
    """See that the data loaders of as many ranks were saved as are to go on.

    Raises:
        IntegrationError: On all ranks alike.
    """
    prefix = f"{DATALOADER}."
    own = {name for name in entries if name.startswith(prefix)}
    wanted: set[str] = set().union(*gather_objects(own))
    saved = {name for name in names_in(store, step) if name.startswith(prefix)}
    if not saved or not wanted:
        return
    if saved != wanted:
        raise IntegrationError(
            f"the data loader was saved with {_listed(saved, prefix)} and has now "
            f"{_listed(wanted, prefix)}: torchtitan's loaders go on with as many data-parallel "
            f'ranks as before; set checkpoint.exclude_from_loading=["{DATALOADER}"] to begin with '
            "the data anew"
        )


def _listed(names: set[str], prefix: str) -> str:
    return ", ".join(sorted(name.removeprefix(prefix) for name in names)) or "nothing"
