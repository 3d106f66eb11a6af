"""DeepSpeed's checkpoints of ZeRO 0 to 2 as named tensors."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outlast.checkpoint.convert.source import Entry, Source, entry_of, load_restricted, slices_of
from outlast.errors import CheckpointError
from outlast.state.box import Box, whole

MASTER = "master."
"""Stands before the names of DeepSpeed's float32 copies of the weights."""


class _Opaque:
    """Stands for an object of DeepSpeed's, which is not needed and not made."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        pass


def _load_deepspeed(path: Path) -> dict[str, Any]:
    """As `load_restricted`, with empty objects in place of those of DeepSpeed's classes."""
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (RuntimeError, ValueError, pickle.UnpicklingError):
        needed = []
    stand_ins: list[Any] = [
        (type("_Opaque", (_Opaque,), {}), name) for name in needed if name.startswith("deepspeed.")
    ]
    with torch.serialization.safe_globals(stand_ins):
        found = load_restricted(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not what DeepSpeed writes")
    return found


def open_deepspeed(path: Path, _: contextlib.ExitStack) -> Source:
    """The module's weights and, of ZeRO 1 and 2, the float32 copies that the optimizer keeps.

    The flat layout of those is the one that DeepSpeed's zero_to_fp32.py undoes: each rank holds an
    equal part of each parameter group, padded; ``param_shapes`` lists what is in a group.
    """
    if (path / "latest").is_file():
        path = path / Path((path / "latest").read_text().strip()).name
    files = sorted(path.glob("mp_rank_*_model_states.pt"))
    if not files and any(path.glob("zero_pp_rank_*_model_states.pt")):
        raise CheckpointError(
            f"{path} is of ZeRO stage 3, which is not supported; convert it with DeepSpeed's "
            "zero_to_fp32.py and import the result"
        )
    if len(files) != 1:
        raise CheckpointError(
            f"{path} holds {len(files)} mp_rank_*_model_states.pt; only checkpoints without tensor "
            "parallelism, of one such file, can be imported"
        )
    states = _load_deepspeed(files[0])
    module = states.get("module")
    if not isinstance(module, Mapping):
        raise CheckpointError(f"{files[0]} is not what DeepSpeed writes: it has no module")
    tensors = {
        name: entry_of(name, tensor)
        for name, tensor in module.items()
        if isinstance(tensor, torch.Tensor)
    }
    step = states.get("global_steps")
    source = Source(tensors, step=step if isinstance(step, int) else None)
    parts = sorted(path.glob("*zero_pp_rank_*_optim_states.pt"), key=_natural)
    if not parts or not states.get("param_shapes"):
        source.notes.append("only the module's weights were imported: no ZeRO partitions are there")
        return source
    flats = _zero_partitions(path, parts)
    for name, entry in _master_weights(path, states["param_shapes"], flats).items():
        source.tensors[MASTER + name] = entry
        source.unprefixed.add(MASTER + name)
    for name, original in dict(states.get("shared_params") or {}).items():
        if MASTER + original in source.tensors:
            source.tensors[MASTER + name] = source.tensors[MASTER + original]
            source.unprefixed.add(MASTER + name)
    source.notes.append(
        f"float32 weights of the optimizer are named {MASTER}*; its moments were not imported"
    )
    return source


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """Sorts rank 10 after rank 9."""
    return [
        (piece.isdecimal(), int(piece) if piece.isdecimal() else 0, piece)
        for piece in re.split(r"(\d+)", path.name)
    ]


def _zero_partitions(path: Path, files: list[Path]) -> list[list[torch.Tensor]]:
    """The flat float32 tensors: one list of parameter groups for each rank."""
    flats = []
    for file in files:
        content = _load_deepspeed(file).get("optimizer_state_dict")
        if not isinstance(content, Mapping) or "zero_stage" not in content:
            raise CheckpointError(f"{file} is not what ZeRO writes: it has no zero_stage")
        stage = content["zero_stage"]
        stage = stage.arguments[0] if isinstance(stage, _Opaque) else int(stage)
        if stage > 2:
            raise CheckpointError(f"{path} is of ZeRO stage {stage}; stages 1 and 2 are supported")
        count = content.get("partition_count", len(files))
        count = max(count) if isinstance(count, (list, tuple)) else count
        if count != len(files):
            raise CheckpointError(
                f"{path} has {len(files)} *_optim_states.pt, but {count} ranks saved it; it is not "
                "complete, or holds files of another save"
            )
        flats.append(list(content["single_partition_of_fp32_groups"]))
    return flats


def _master_weights(
    path: Path, groups: list[Mapping[str, torch.Size]], flats: list[list[torch.Tensor]]
) -> dict[str, Entry]:
    """Every parameter's float32 copy, from the partitions in which it lies."""
    found: dict[str, Entry] = {}
    align = 2 * len(flats)
    for number, shapes in enumerate(groups):
        partitions = [of_rank[number].reshape(-1) for of_rank in flats]
        available = sum(partition.numel() for partition in partitions)
        offset = 0
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            found[name] = Entry(
                partitions[0].dtype,
                tuple(shape),
                _flat_reader(partitions, offset, tuple(shape)),
                (whole(tuple(shape)),),
            )
            offset += size
        # ZeRO 2 pads a group to a multiple of this.
        if -(-offset // align) != -(-available // align):
            raise CheckpointError(
                f"{path}: the parameters of group {number} have {offset} elements, its partitions "
                f"{available}; the float32 weights cannot be told apart"
            )
    return found


def _flat_reader(
    partitions: list[torch.Tensor], offset: int, shape: tuple[int, ...]
) -> Callable[[Box], torch.Tensor]:
    def read(box: Box) -> torch.Tensor:
        first, last = offset, offset + torch.Size(shape).numel()
        pieces, begin = [], 0
        for partition in partitions:
            end = begin + partition.numel()
            if begin < last and end > first:
                pieces.append(partition[max(first - begin, 0) : min(last, end) - begin])
            begin = end
        flat = torch.cat(pieces) if pieces else partitions[0][:0]
        return flat.reshape(shape)[slices_of(box)]

    return read
