"""Whether a checkpoint fits the live state: same names, same shapes, same types.

DCP itself passes over what the checkpoint has and the model has not, and casts one type to another
without a word.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan

_NAMED = 3


class ExactLoadPlanner(DefaultLoadPlanner):
    """Refuses a checkpoint that differs from the state in a name, a shape or a type."""

    def create_local_plan(self) -> LoadPlan:
        """Check this rank's names, shapes and types."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        if missing := [name for name in self.state_dict if name not in saved]:
            raise CheckpointError(f"it has no {_names(missing)}")
        for name, live in self.state_dict.items():
            stored = saved[name]
            if not isinstance(stored, TensorStorageMetadata) or not isinstance(live, torch.Tensor):
                continue
            if stored.size != live.size():
                raise CheckpointError(
                    f"`{name}` has the shape {tuple(stored.size)} there and "
                    f"{tuple(live.size())} in the model"
                )
            if stored.properties.dtype != live.dtype:
                raise CheckpointError(
                    f"`{name}` is {stored.properties.dtype} there and {live.dtype} in the model"
                )
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check that the ranks together take everything there is below the names they ask for."""
        assert self.metadata is not None
        paths = self.metadata.planner_data or {}
        asked = {path[0] for path in self.mappings.values()}
        taken = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        left = [
            name
            for name, stored in self.metadata.state_dict_metadata.items()
            if name not in taken and paths[name][0] in asked and not _empty(stored)
        ]
        if left:
            raise CheckpointError(f"the model has no {_names(left)}")
        return super().create_global_plan(global_plan)


def _empty(stored: object) -> bool:
    return isinstance(stored, TensorStorageMetadata) and math.prod(stored.size) == 0


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"`{name}`" for name in sorted(names)[:_NAMED]) + more
