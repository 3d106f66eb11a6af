"""ZeRO's partitions of another number of ranks.

ZeRO 1 and 2 lay the parameters of each group one after the other into a flat tensor, pad it to a
multiple of twice the number of ranks, and give each rank an equal part of it: of the float32
weights and of every state of the optimizer. Padding aside, the flat tensor does not depend on the
number of ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ALIGNMENT = 2
"""Elements per rank that DeepSpeed pads to (``nccl_start_alignment_factor``)."""

_WEIGHTS = "single_partition_of_fp32_groups"


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
            f"a checkpoint of {len(states)} ranks can go on with {ranks} only where ZeRO 1 or 2 "
            "saved it, with elastic_checkpoint off"
        )
    flats = {number: _Flat(size, rank, ranks) for number, size in enumerate(elements)}
    return {
        **first,
        _WEIGHTS: [
            flat.part([state[_WEIGHTS][number] for state in states], padded=False)
            for number, flat in flats.items()
        ],
        "base_optimizer_state": {
            **base,
            "state": {
                number: {
                    name: _of_all(flats[number], states, number, name)
                    for name in base["state"][number]
                }
                for number in base["state"]
            },
        },
        "group_paddings": [flat.padding for flat in flats.values()],
        "partition_count": [ranks] * len(flats),
    }


class _Flat:
    """A parameter group's flat tensor, and the part of it that one rank has."""

    def __init__(self, size: int, rank: int, ranks: int) -> None:
        aligned = _ALIGNMENT * ranks
        self.size = size
        self.length = math.ceil(size / aligned) * aligned // ranks
        self.start = rank * self.length
        # As DeepSpeed counts it: all of it is the last rank's.
        self.padding = self.length * ranks - size if rank == ranks - 1 else 0

    def part(self, partitions: Sequence[torch.Tensor], *, padded: bool) -> torch.Tensor:
        """The rank's part of what `partitions` are; `padded`: with zeros up to the full length."""
        whole = torch.cat([partition.reshape(-1) for partition in partitions])[: self.size]
        if whole.numel() != self.size:
            raise CheckpointError(
                f"the partitions of a parameter group hold {whole.numel()} of its {self.size} "
                "elements"
            )
        found = whole[self.start : self.start + self.length]
        if padded and found.numel() < self.length:
            found = torch.cat([found, found.new_zeros(self.length - found.numel())])
        # Not a view: the others' parts need not stay in memory.
        return found.clone()


def _of_all(flat: _Flat, states: Sequence[Mapping[str, Any]], number: int, name: str) -> Any:
    """A state of the optimizer's: partitioned, or the same on all ranks."""
    found = [state["base_optimizer_state"]["state"][number][name] for state in states]
    if isinstance(found[0], torch.Tensor) and found[0].dim() > 0:
        return flat.part(found, padded=True)
    return found[0]
