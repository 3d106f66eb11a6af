"""Training without a hub: every rank updates its own parameters and averages with neighbours.

Each rank computes the chunks that a stochastic gradient code gives it, with weights that make the
mean over ranks an unbiased gradient (Bitar, Wootters and El Rouayheb, JSAIT 2020), takes a step of
its own, and then replaces its parameters x_i by

    x_i + sum over neighbours j of W_ij (x_j - x_i),   W_ij = 1 / (1 + max(degree_i, degree_j)),

the Metropolis weights (Xiao, Boyd and Lall, IPSN 2005). W is symmetric and doubly stochastic, so
the mean over ranks stays and distances from it shrink by the second largest eigenvalue modulus of
W in every round. The union of both is that of Li and Skoglund's GOCO (2024).

A neighbour that does not answer in time is left out: its term is not added, which moves its weight
to x_i itself. While both ends leave each other out W stays doubly stochastic. Where only one does,
the mean moves by W_ij |x_i - x_j| / n at most. A slow rank skips to the step where its neighbours
are; what it computed too late is lost, and its chunks are those of other ranks as well.

Of each neighbour the messages of two steps are held at the most, in the inbox and in `Gossip`, so a
rank's memory does not grow with the steps that the others are ahead.

    gossip = Gossip(model, code, edges, rounds=2, deadline_seconds=1.0)
    for step in gossip.steps(100):
        for chunk in gossip.chunks:
            loss(model, batch(step, chunk)).backward()
            gossip.add(chunk)
        gossip.estimate()
        optimizer.step()
        outcome = gossip.mix(step)
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from outlast.coding.protocol.encoding import Encoder, clear
from outlast.coding.protocol.flat import FlatGradients, local
from outlast.coding.protocol.messages import (
    HEADER_BYTES,
    Header,
    Kind,
    Layout,
    Letter,
    Newest,
    places,
    write_parameters,
)
from outlast.coding.protocol.post import Post, check_seconds
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt
    from torch import nn

    from outlast.coding.code import GradientCode

Edge = tuple[int, int]

_NEAR_STEPS = 2
"""A neighbour that is no further behind is waited for again, so that both are in step."""


@dataclass(frozen=True)
class Mixed:
    """How one rank's averaging of a step went.

    Attributes:
        step: The step.
        answered: Neighbours that were averaged with in every round.
        left_out: The others.
        late: Messages of earlier rounds that came meanwhile and were dropped; without those of
            which a newer one took the place before they were looked at.
        disagreement: Sum over the neighbours of the last round of |x_i - x_j|^2 before it; what
            `consensus_distance` takes.
        seconds: Time that the averaging took.
    """

    step: int
    answered: tuple[int, ...]
    left_out: tuple[int, ...]
    late: int
    disagreement: float
    seconds: float


class Gossip:
    """One rank of a peer-to-peer training; all ranks of the job make one.

    Args:
        model: Its parameters are trained, and the same on all ranks at first.
        code: Of as many workers as there are ranks, with fixed decoding weights; a
            `StochasticCode`, or any 0/1 code.
        edges: Pairs of ranks that exchange parameters; the graph must be connected.
        rounds: Averagings per step.
        deadline_seconds: Longest wait for the neighbours in each round.

    Raises:
        CodingError: For settings that do not fit the job.
    """

    def __init__(
        self,
        model: nn.Module,
        code: GradientCode,
        edges: Iterable[Edge],
        *,
        rounds: int = 1,
        deadline_seconds: float,
    ) -> None:
        if rounds < 1:
            raise CodingError(f"rounds = {rounds} is below 1")
        check_seconds("deadline_seconds", deadline_seconds)
        ranks = dist.get_world_size() if dist.is_initialized() else 0
        if ranks != code.workers:
            raise CodingError(f"the code has {code.workers} workers, but the job {ranks} ranks")
        self.rank = dist.get_rank()
        self.rounds = rounds
        self.deadline_seconds = deadline_seconds
        self._weights = metropolis_weights(ranks, list(edges))[self.rank]
        self._weights[self.rank] = 0.0
        self.neighbours = tuple(int(item) for item in np.flatnonzero(self._weights))
        self._gradients = FlatGradients(model.parameters())
        self._layout = Layout(self._gradients.buffers)
        fixed = code.fixed_weights(np.ones(ranks, dtype=bool))[self.rank] * ranks
        chunks = code.assignment.chunks_of(self.rank)
        row = code.matrix[[self.rank]].toarray()[0][chunks]
        self._encoder = Encoder(
            self._gradients, self._layout, chunks.tolist(), (fixed * row)[:, None]
        )
        slots = len(self.neighbours) + 1
        self._post = Post(self.neighbours, self._layout.payload_bytes, slots=slots)
        self._kept = {neighbour: Newest() for neighbour in self.neighbours}
        self._awaited = set(self.neighbours)
        self._newest = 0

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks that this rank computes."""
        return self._encoder.chunks

    @property
    def gone(self) -> tuple[int, ...]:
        """Neighbours whose connection is closed."""
        return tuple(sorted(self._post.gone))

    @property
    def buffer_bytes(self) -> int:
        """Memory of the messages that this rank sends and receives; it is used again and again."""
        buffers = self._post.buffers
        return buffers.made * (HEADER_BYTES + buffers.capacity)

    def steps(self, stop: int) -> Iterator[int]:
        """Steps below `stop`: all of them, or those that are left when this rank is slow."""
        step = 0
        while step < stop:
            clear(self._gradients)
            self._encoder.begin()
            yield step
            step = max(step + 1, self._newest)

    def add(self, chunk: int) -> None:
        """Say that the parameters' gradients are those of `chunk`; they are moved away.

        Raises:
            CodingError: For a chunk of another rank, or one that was added before.
        """
        self._encoder.add(chunk)

    def estimate(self) -> None:
        """Make this rank's estimate of the sum of all chunks' gradients the parameters' own.

        The mean of the estimates over ranks is the sum, in expectation over stragglers.
        """
        self._encoder.write(self._gradients.buffers)
        self._gradients.write_back()

    def mix(self, step: int) -> Mixed:
        """Average the parameters with the neighbours that answer in time."""
        begun = time.monotonic()
        answered, late, disagreement = set(self.neighbours), 0, 0.0
        for number in range(self.rounds):
            position = step * self.rounds + number
            self._offer(step, number)
            late += self._gather(position)
            letters = self._chosen(position)
            disagreement = self._average(letters)
            answered &= letters.keys()
            for letter in letters.values():
                self._post.buffers.release(letter)
        return Mixed(
            step=step,
            answered=tuple(sorted(answered)),
            left_out=tuple(neighbour for neighbour in self.neighbours if neighbour not in answered),
            late=late,
            disagreement=disagreement,
            seconds=time.monotonic() - begun,
        )

    def close(self, seconds: float = 10.0) -> None:
        """Wait so long for the last parameters to be sent; the neighbours may still need them."""
        self._post.flush(seconds)

    def _offer(self, step: int, number: int) -> None:
        size = self._layout.payload_bytes
        header = Header(Kind.MIX, step, worker=self.rank, chunk=number, payload_bytes=size)
        letter = self._post.letter(header)
        write_parameters(self._gradients, self._layout, letter)
        self._post.send(letter, self.neighbours)

    def _gather(self, position: int) -> int:
        """Wait for the neighbours that answered last time; counts what is late."""
        deadline = time.monotonic() + self.deadline_seconds
        late = sum(self._drop_before(position, kept) for kept in self._kept.values())
        letter = self._post.receive(0.0)
        while True:
            if letter is not None:
                late += not self._keep(letter, position)
                letter = self._post.receive(0.0)
                continue
            missing = {
                number
                for number in self._awaited - self._post.gone
                if not self._answers(self._kept[number], position)
            }
            remaining = deadline - time.monotonic()
            if not missing or remaining <= 0:
                # Who was silent is not waited for again before it is heard of and not far behind.
                self._awaited -= missing
                return late
            letter = self._post.receive(remaining)

    def _place(self, letter: Letter) -> int:
        """The round that a letter is of, counted from the first step's first."""
        return letter.header.step * self.rounds + letter.header.chunk

    def _answers(self, kept: Newest, position: int) -> bool:
        """Whether a neighbour's letter of this round is there, or it has gone on without us.

        Its letter of the next round alone says nothing: letters may overtake each other.
        """
        rounds = [self._place(letter) for letter in kept]
        return any(round_ == position or round_ > position + 1 for round_ in rounds)

    def _keep(self, letter: Letter, position: int) -> bool:
        header = letter.header
        place = self._place(letter)
        self._newest = max(self._newest, header.step)
        if place >= position - _NEAR_STEPS * self.rounds:
            self._awaited.add(header.worker)
        if place < position:
            self._post.buffers.release(letter)
            return False
        replaced = self._kept[header.worker].put(letter)
        if replaced is not None:
            self._post.buffers.release(replaced)
        return True

    def _drop_before(self, position: int, kept: Newest) -> int:
        old = [letter for letter in kept if self._place(letter) < position]
        for letter in old:
            kept.remove(letter)
            self._post.buffers.release(letter)
        return len(old)

    def _chosen(self, position: int) -> dict[int, Letter]:
        """Each neighbour's parameters of this round, or of the next one that there is."""
        chosen = {}
        for neighbour, kept in self._kept.items():
            usable = [letter for letter in kept if self._place(letter) >= position]
            if usable:
                chosen[neighbour] = min(usable, key=self._place)
                kept.remove(chosen[neighbour])
        return chosen

    @torch.no_grad()
    def _average(self, letters: dict[int, Letter]) -> float:
        """Move towards the neighbours; returns the sum of squared distances from them."""
        disagreement = 0.0
        moved = [torch.zeros_like(local(parameter)) for parameter in self._gradients.parameters]
        numbers = {
            id(parameter): number for number, parameter in enumerate(self._gradients.parameters)
        }
        # In the order of ranks, so that the sum does not depend on who was first.
        for neighbour in sorted(letters):
            weight = float(self._weights[neighbour])
            for place, parameter in places(self._gradients, self._layout, letters[neighbour]):
                own = local(parameter)
                difference = place.view_as(own).to(own.device) - own
                disagreement += float(difference.double().square().sum())
                moved[numbers[id(parameter)]].add_(difference, alpha=weight)
        for parameter, change in zip(self._gradients.parameters, moved, strict=True):
            local(parameter).add_(change)
        return disagreement


def metropolis_weights(ranks: int, edges: Sequence[Edge]) -> npt.NDArray[np.float64]:
    """(ranks, ranks) symmetric doubly stochastic matrix W of a connected graph.

    Raises:
        CodingError: For edges that are no pairs of different ranks, or a graph in pieces.
    """
    adjacent = _adjacency(ranks, edges)
    degrees = adjacent.sum(axis=1)
    weights = np.where(adjacent, 1.0 / (1.0 + np.maximum(degrees[:, None], degrees)), 0.0)
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return weights


def contraction(ranks: int, edges: Sequence[Edge]) -> float:
    """Factor by which one round shrinks the ranks' distance from their mean, at least.

    The second largest eigenvalue modulus of the Metropolis weights; below 1.
    """
    values = np.abs(np.linalg.eigvalsh(metropolis_weights(ranks, edges)))
    return float(np.sort(values)[-2]) if ranks > 1 else 0.0


def consensus_distance(disagreements: Sequence[float], ranks: int, edges: Sequence[Edge]) -> float:
    """Bound of sqrt(sum_i |x_i - mean|^2) from what all ranks measured of their neighbours.

    sum over edges |x_i - x_j|^2 = sum_k x^T L x >= lambda_2 sum_i |x_i - mean|^2 for the graph's
    Laplacian L with second smallest eigenvalue lambda_2. Averaging does not raise it.

    Args:
        disagreements: `Mixed.disagreement` of all ranks in one step, each with all its neighbours.
        ranks: Number of ranks.
        edges: The graph's.
    """
    if ranks == 1:
        return 0.0
    adjacent = _adjacency(ranks, edges).astype(np.float64)
    laplacian = np.diag(adjacent.sum(axis=1)) - adjacent
    gap = float(np.linalg.eigvalsh(laplacian)[1])
    # Each edge is counted at both ends.
    return math.sqrt(sum(disagreements) / (2.0 * gap))


def _adjacency(ranks: int, edges: Sequence[Edge]) -> npt.NDArray[np.bool_]:
    adjacent = np.zeros((ranks, ranks), dtype=bool)
    for first, second in edges:
        if first == second or not (0 <= first < ranks and 0 <= second < ranks):
            raise CodingError(f"edge {(first, second)} is no pair of different ranks of {ranks}")
        adjacent[first, second] = adjacent[second, first] = True
    pieces, _ = connected_components(csr_array(adjacent), directed=False)
    if pieces > 1:
        raise CodingError(f"the {len(edges)} edges leave the {ranks} ranks in {pieces} pieces")
    return adjacent
