"""Groups of processes that keep parity of each other, and replacements after a loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from outlast.errors import RecoverError

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.recover.snapshot import Holding


FILE = "spread.json"


Domain = Literal["node", "process"]


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
        count = sum(map(len, self.nodes)) if self.domain == "process" else len(self.nodes)
        if smallest <= self.losses:
            return (
                f"recover.parity = {self.losses} needs groups of at least {self.losses + 1}, but "
                f"recover.parity_group = {self.largest} and {count} "
                f"{'process' if self.domain == 'process' else 'node'}"
                f"{'es' if self.domain == 'process' else 's'} make one of {smallest}; raise the "
                f"former, or set recover.parity = {max(smallest - 1, 0)}"
            )
        return ""

    def write(self, folder: Path, node: int) -> None:
        """Keep it beside the slots of the node number `node`."""
        content = {
            "nodes": self.nodes,
            "losses": self.losses,
            "largest": self.largest,
            "domain": self.domain,
            "node": node,
        }
        (folder / FILE).write_text(json.dumps(content), encoding="ascii")


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
            wanted = needs_parity(holdings, self.domain) and not spread.problem()
            return spread if wanted else None
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


def needs_parity(holdings: Sequence[Holding], domain: Domain) -> bool:
    """Return whether what is lost together holds a box of a tensor that nobody else holds."""
    holders: dict[object, set[object]] = {}
    domains: set[object] = set()
    for rank, held in enumerate(holdings):
        own: object = held.node if domain == "node" else rank
        domains.add(own)
        for name, part in held.parts.items():
            if part.size:
                holders.setdefault((name, part.box), set()).add(own)
    return len(domains) > 1 and any(len(holder) == 1 for holder in holders.values())
