"""Parity of the slots that processes keep: who keeps it of whom, and the rebuilding."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.errors import RecoverError
from outlast.recover.slot import generation_folder, generations, read_slot, reserved

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.distributed.group import Group
    from outlast.recover.parity import ParityGroup
    from outlast.recover.restart import Holding

FILE = "spread.json"
Domain = Literal["node", "process"]
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Spread:
    """Distribution of parity over the processes of a generation.

    Attributes:
        nodes: Ranks on each node, ascending, nodes by their first rank.
        losses: How many of a group may be lost together, 1 or 2.
        largest: Members of a group, at most.
        domain: What is lost together.
    """

    nodes: tuple[tuple[int, ...], ...]
    losses: int
    largest: int
    domain: Domain

    def groups(self) -> list[tuple[int, ...]]:
        """Ranks of each group, in the order of its members; every rank is in one.

        No two members of a group can be lost together: with the domain ``node`` a group has the
        processes with one number on their nodes.
        """
        if self.domain == "process":
            return even_parts([rank for node in self.nodes for rank in node], self.largest)
        return [
            tuple(node[number] for node in part)
            for part in even_parts(list(self.nodes), self.largest)
            for number in range(len(self.nodes[0]))
        ]

    def problem(self) -> str:
        """Why parity cannot be spread so; empty where it can."""
        if self.domain == "node" and len({len(node) for node in self.nodes}) > 1:
            return (
                f"recover.parity = {self.losses} needs as many processes on each node, but nodes "
                f"have {sorted({len(node) for node in self.nodes})}; start equal numbers, or set "
                "recover.parity = 0"
            )
        smallest = min(len(group) for group in self.groups())
        count = f"{len(self.nodes)} nodes"
        if self.domain == "process":
            count = f"{sum(map(len, self.nodes))} processes"
        if smallest <= self.losses:
            return (
                f"recover.parity = {self.losses} needs groups of at least {self.losses + 1}, but "
                f"recover.parity_group = {self.largest} and {count} make one of {smallest}; raise "
                f"the former, or set recover.parity = {max(smallest - 1, 0)}"
            )
        return ""

    def write(self, folder: Path, node: int) -> None:
        """Keep it beside the slots of the node number `node`."""
        content = json.dumps({**asdict(self), "node": node})
        (folder / FILE).write_text(content, encoding="ascii")


@dataclass(frozen=True)
class Redundancy:
    """Amount of parity that is wanted; see [recover] in the job file.

    Attributes:
        losses: 0, 1 or 2 of a group may be lost together; ``auto``: 1 where it is needed.
        largest: Members of a group, at most.
        domain: What is lost together.
    """

    losses: Literal["auto", 0, 1, 2] = "auto"
    largest: int = 8
    domain: Domain = "node"

    def spread(self, holdings: Sequence[Holding]) -> Spread | None:
        """Over processes with these holdings, by rank; None for no parity.

        Raises:
            RecoverError: When as much as was asked for is not possible.
        """
        nodes = nodes_of([held.node for held in holdings])
        if self.losses == "auto":
            spread = Spread(nodes, 1, self.largest, self.domain)
            # Whether what is lost together holds a box of a tensor that nobody else holds.
            holders: dict[object, set[object]] = {}
            domains = [
                held.node if self.domain == "node" else rank for rank, held in enumerate(holdings)
            ]
            for domain, held in zip(domains, holdings, strict=True):
                for name, part in held.parts.items():
                    if part.size:
                        holders.setdefault((name, part.box), set()).add(domain)
            alone = any(len(holder) == 1 for holder in holders.values())
            return spread if len(set(domains)) > 1 and alone and not spread.problem() else None
        self.check([held.node for held in holdings])
        losses = int(self.losses)
        return Spread(nodes, losses, self.largest, self.domain) if losses else None

    def check(self, nodes: Sequence[str]) -> None:
        """Refuse what was asked for and is not possible.

        Args:
            nodes: Of every rank.

        Raises:
            RecoverError: With what would be possible.
        """
        if self.losses == "auto" or not self.losses:
            return
        problem = Spread(nodes_of(nodes), self.losses, self.largest, self.domain).problem()
        if problem:
            raise RecoverError(problem)

    def lacking(self, nodes: Sequence[str]) -> str:
        """Why the memory of a lost node is not made good from others; empty where it is.

        Args:
            nodes: Of every rank.
        """
        if self.domain == "node" and len(set(nodes)) == 1:
            return (
                "all processes are on one node, which is lost with its memory: start on several, "
                'set recover.domain = "process", or leave peer out'
            )
        losses = 1 if self.losses == "auto" else self.losses
        problem = Spread(nodes_of(nodes), losses, self.largest, self.domain).problem()
        return f"only what several hold survives the loss of one: {problem}" if problem else ""


def even_parts(items: list[Any], largest: int) -> list[tuple[Any, ...]]:
    """`items` in as few parts of at most `largest` as possible, of sizes that differ by 0 or 1."""
    count = -(-len(items) // largest)
    cuts = [len(items) * number // count for number in range(count + 1)]
    return [tuple(items[cuts[number] : cuts[number + 1]]) for number in range(count)]


def read_spread(folder: Path) -> tuple[Spread, int] | None:
    """Read back `Spread.write`: the spread, and the number of the node."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="ascii"))
        nodes = tuple(tuple(node) for node in found["nodes"])
        spread = Spread(nodes, found["losses"], found["largest"], found["domain"])
        return spread, found["node"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def nodes_of(names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Ranks on each node, from the name of every rank's node."""
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return tuple(tuple(row) for row in found.values())


def roles(
    spread: Spread, nodes: tuple[tuple[int, ...], ...], survived: dict[int, int]
) -> dict[int, int] | None:
    """Rank of before that each rank of now stands for; None where there is none for some.

    The nodes must have as many processes as those of before, in the same order.

    Args:
        spread: Of before.
        nodes: Ranks on each node, now.
        survived: Number of a node now to its number before, where its memory is still there.
    """
    if [len(node) for node in sorted(nodes)] != [len(node) for node in sorted(spread.nodes)]:
        return None
    if spread.domain == "process":
        return {rank: rank for node in nodes for rank in node}
    free = [number for number in range(len(spread.nodes)) if number not in survived.values()]
    taken = dict(survived)
    for number in range(len(nodes)):
        if number not in taken:
            taken[number] = free.pop(0)
    return {
        rank: before
        for number, node in enumerate(nodes)
        for rank, before in zip(node, spread.nodes[taken[number]], strict=True)
    }


def parity_group(spread: Spread, folder: Path, role: int, name: str) -> ParityGroup:
    """The group of the process that stands for rank `role` of `spread`; all make theirs together.

    Args:
        spread: Of the processes of now, or of those that they stand for.
        folder: Of the generation.
        role: A rank of `spread`.
        name: Of the making, new each time; tells it from those before.
    """
    # Loads a compiled kernel, which others need not wait for.
    from outlast.recover.parity import ParityGroup

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
    numbers = {number for found in peers.gather(generations(folder)) for number in found}
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
    # Step to the whole file of each state that this role has kept here; parity's own digests
    # look at a part of the bytes only.
    slots = {}
    for path in sorted(place.glob(f"rank-{role}.*")):
        kept = read_slot(path, identity)
        if kept is not None and not kept.damage():
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
