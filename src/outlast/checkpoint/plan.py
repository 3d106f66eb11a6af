"""Save plans: every box once, the work spread evenly over the ranks that hold it.

What may differ between those ranks (buffers, objects) is that of the first.

All ranks compute the same plan from the same exchange, so nobody has to distribute it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter, eq
from typing import TYPE_CHECKING

import torch
from torch import nn

from outlast.checkpoint.manifest import Catalogue, TensorFacts
from outlast.errors import CheckpointError
from outlast.state.box import Box, covers
from outlast.state.live import local_box
from outlast.state.sharded import is_dtensor
from outlast.state.tensors import dtype_name, place_of

if TYPE_CHECKING:
    from outlast.state.live import Live

_PLAIN = {torch.Tensor, nn.Parameter}
_FACTS = attrgetter("shape", "dtype", "device", "layout")


@dataclass(frozen=True)
class Holding:
    """Boxes that one rank holds.

    Attributes:
        tensors: Name to element type, global shape and the box that the rank holds.
        values: Names of its values.
        objects: Names of the tensors that belong to values.
        tied: Names that lead to the same memory, each with the first of them.
        varying: Names of the tensors of which other ranks may have other content.
        private: Whether other ranks do not see what this rank writes, so that it saves all it has.
    """

    tensors: dict[str, tuple[str, tuple[int, ...], Box]]
    values: tuple[str, ...]
    objects: frozenset[str] = frozenset()
    tied: tuple[tuple[str, str], ...] = ()
    varying: frozenset[str] = frozenset()
    private: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Plan:
    """Boxes that this rank saves, and the catalogue of all that is saved.

    Attributes:
        catalogue: All tensors and values of all ranks.
        tensors: Name to the box that this rank saves.
        values: Names of the values that this rank saves.
    """

    catalogue: Catalogue
    tensors: dict[str, Box]
    values: tuple[str, ...]


class Holdings:
    """Lists what one rank holds of a state, again and again.

    Args:
        private: As in `Holding`.
    """

    def __init__(self, *, private: bool = False) -> None:
        self._private = private
        self._held: Holding | None = None
        self._facts: list[object] = []
        self._specs: dict[int, object] = {}

    def of(self, live: Live) -> tuple[Holding, dict[str, torch.Tensor]]:
        """List this rank's boxes of the state, and the memory of each tensor on this rank.

        The holding is the same object as before where nothing of it has changed. The memory may
        require gradients.

        Raises:
            CheckpointError: Naming a tensor that cannot be saved.
        """
        if self._held is not None and (known := self._as_before(live, self._held)) is not None:
            return self._held, known
        tensors, memory = {}, {}
        first_names: dict[tuple[object, ...], str] = {}
        tied = []
        for name, tensor in live.tensors.items():
            try:
                box, memory[name] = local_box(tensor)
            except CheckpointError as error:
                raise CheckpointError(f"`{name}`: {error}") from None
            tensors[name] = (dtype_name(tensor), tuple(tensor.shape), box)
            if memory[name].numel():
                first = first_names.setdefault(place_of(memory[name]), name)
                if first != name:
                    tied.append((name, first))
        held = Holding(
            tensors,
            tuple(live.values),
            frozenset(live.objects),
            tuple(tied),
            frozenset(live.varying),
            self._private,
        )
        self._specs = {
            number: tensor._spec
            for number, tensor in enumerate(live.tensors.values())
            if is_dtensor(tensor)
        }
        self._facts, self._held = [*map(_FACTS, memory.values())], held
        return held, memory

    def _as_before(self, live: Live, held: Holding) -> dict[str, torch.Tensor] | None:
        """The memory of each tensor; None where the state may differ from what was held before."""
        if (
            [*live.tensors] != [*held.tensors]
            or tuple(live.values) != held.values
            or frozenset(live.objects) != held.objects
            or frozenset(live.varying) != held.varying
        ):
            return None
        tensors = [*live.tensors.values()]
        for number, spec in self._specs.items():
            shard = tensors[number]
            if not is_dtensor(shard) or shard._spec is not spec:
                return None
            tensors[number] = shard._local_tensor
        if not {*map(type, tensors)} <= _PLAIN or not all(
            map(eq, map(_FACTS, tensors), self._facts)
        ):
            return None
        sharded = bool(self._specs)
        memory = dict(zip(live.tensors, tensors, strict=True)) if sharded else live.tensors
        if any(place_of(memory[name]) != place_of(memory[first]) for name, first in held.tied):
            return None
        return memory


def make_plan(holdings: list[Holding], rank: int, *, alone: bool = False) -> Plan:
    """The plan of `rank`, from what every rank holds; `alone`: from a part of that.

    A rank with a private holding plans alone: nothing is shared out, and its catalogue lists what
    it holds.

    Raises:
        CheckpointError: When ranks disagree about a tensor, or hold only a part of it together.
    """
    private = holdings[rank].private
    if private:
        holdings, rank = [holdings[rank]], 0
    facts: dict[str, TensorFacts] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for owner, held in enumerate(holdings):
        for name, (dtype, shape, box) in held.tensors.items():
            if name in facts and name in held.objects:
                # An object's tensors come from the rank that its values come from.
                continue
            add_facts(facts, name, dtype, shape, where=f"rank {owner}")
            if box.elements or not shape or 0 in shape:
                holders.setdefault((name, box), []).append(owner)
    if not (private or alone):
        _check_whole(facts, holders)
    mine: dict[str, Box] = {}
    load = [0] * len(holdings)
    largest_first = sorted(
        holders.items(), key=lambda item: -item[0][1].elements * facts[item[0][0]].itemsize
    )
    for (name, box), owners in largest_first:
        varies = name in holdings[owners[0]].varying
        saver = owners[0] if varies else min(owners, key=load.__getitem__)
        load[saver] += box.elements * facts[name].itemsize
        if saver == rank:
            mine[name] = box
    values: dict[str, int] = {}
    for owner, held in enumerate(holdings):
        for name in held.values:
            values.setdefault(name, owner)
    return Plan(
        Catalogue(facts, tuple(values)),
        mine,
        tuple(name for name, owner in values.items() if owner == rank),
    )


def add_facts(
    facts: dict[str, TensorFacts], name: str, dtype: str, shape: tuple[int, ...], *, where: str
) -> None:
    """Add a tensor to `facts`; raises CheckpointError when it is there as another one."""
    known = facts.get(name)
    if known is None:
        facts[name] = TensorFacts.of(dtype, shape)
    elif (known.dtype, known.shape) != (dtype, shape):
        raise CheckpointError(
            f"`{name}` is {known.dtype}{list(known.shape)} on one rank and {dtype}{list(shape)} on "
            f"{where}; give it different names"
        )


def _check_whole(facts: dict[str, TensorFacts], holders: dict[tuple[str, Box], list[int]]) -> None:
    boxes: dict[str, list[Box]] = {}
    for name, box in holders:
        boxes.setdefault(name, []).append(box)
    for name, fact in facts.items():
        if not covers(fact.shape, boxes.get(name, [])):
            raise CheckpointError(
                f"the ranks hold only a part of `{name}` together; all ranks that hold a part of "
                "the state must save it"
            )
