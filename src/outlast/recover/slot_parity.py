"""Parity of the slots that processes keep: a lost node's slots are rebuilt on a new one."""

from __future__ import annotations

import mmap
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.errors import RecoverError
from outlast.recover.parity import ParityGroup
from outlast.recover.redundancy import Spread, nodes_of, read_spread, roles
from outlast.recover.slot import generation_folder, generations, read_slot, reserved

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.distributed.group import Group


_TIMEOUT_SECONDS = 120.0


def parity_group(spread: Spread, folder: Path, role: int, name: str) -> ParityGroup:
    """The group of the process that stands for rank `role` of `spread`; all make theirs together.

    Args:
        spread: Of the processes of now, or of those that they stand for.
        folder: Of the generation.
        role: A rank of `spread`.
        name: Of the making, new each time; tells it from those before.
    """
    number, members = next(
        (number, group) for number, group in enumerate(spread.groups()) if role in group
    )
    store = dist.PrefixStore(f"outlast/parity/{name}/{number}", _get_default_store())
    # A group of torch's own would number its members by their ranks of now.
    group = dist.ProcessGroupGloo(
        store, members.index(role), len(members), timeout=timedelta(seconds=_TIMEOUT_SECONDS)
    )
    return ParityGroup(
        group,  # type: ignore[arg-type]  # has all that is used of a ProcessGroup
        losses=spread.losses,
        directory=folder,
        name=f"parity-{number}",
        timeout_seconds=_TIMEOUT_SECONDS,
    )


def rebuild(folder: Path, identity: str, peers: Group) -> bool:
    """Rebuild the slots of lost nodes from parity, if that is there; all call it together.

    Afterwards they lie where slots lie, on the nodes that stand for the lost ones.

    Args:
        folder: Of the run.
        identity: Of the run.
        peers: The processes.

    Returns:
        Whether something was rebuilt; False where there was nothing to rebuild from.

    Raises:
        RecoverError: When more is lost than the parity makes good.
    """
    numbers = {name for found in peers.gather(generations(folder)) for name in found}
    problem = None
    for number in sorted(numbers, reverse=True):
        try:
            if _rebuilt(folder, number, identity, peers):
                return True
        except RecoverError as error:
            # An older one is whole until the first state of a newer one is.
            problem = problem or error
    if problem is not None:
        raise problem
    return False


def _rebuilt(folder: Path, generation: int, identity: str, peers: Group) -> bool:
    """Rebuild the slots of one generation; the same result, or error, on all processes."""
    place = generation_folder(folder, generation)
    found = peers.gather((peers.node, read_spread(place)))
    spread = next((item[0] for _, item in found if item is not None), None)
    if spread is None:
        return False
    nodes = nodes_of([node for node, _ in found])
    survived = {}
    for number, ranks in enumerate(nodes):
        known = found[ranks[0]][1]
        if known is not None and known[0] == spread:
            survived[number] = known[1]
    standing = roles(spread, nodes, survived)
    if standing is None:
        raise RecoverError(
            f"what is left in memory needs the parity of {_counted(spread.nodes)}, but these are "
            f"{_counted(nodes)}; start as many on each again, or resume from a checkpoint"
        )
    role = standing[peers.rank]
    # Step to the whole file of each state that this role has kept here.
    slots = {}
    for path in sorted(place.glob(f"rank-{role}.*")):
        kept = read_slot(path, identity)
        if kept is not None:
            with path.open("rb") as file:
                slots[kept.step] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    name = f"rebuild-{generation}"
    group = peers.raise_together(lambda: parity_group(spread, place, role, name))
    try:
        epochs = peers.raise_together(lambda: group.epochs(slots))
        possible = set.intersection(*map(set, peers.gather(epochs)))
        if not possible:
            raise RecoverError(
                f"no step's state can be rebuilt: more than {spread.losses} of a group have lost "
                "theirs"
            )
        path = place / f"rank-{role}.rebuilt"
        recovered = peers.raise_together(
            lambda: group.recover(slots, lambda size: reserved(path, size), max(possible))
        )
    finally:
        group.close()
    return any(peers.gather(bool(recovered.lost_data)))


def _counted(nodes: tuple[tuple[int, ...], ...]) -> str:
    sizes = [len(node) for node in nodes]
    counted = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} with"
    if len(set(sizes)) == 1:
        return f"{counted} {sizes[0]} process{'es' if sizes[0] > 1 else ''} each"
    # In their order, which counts as well.
    return f"{counted} {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} processes"
