"""Numbers that must be equal bit for bit: at rest between steps, and on all replicas.

Hashes have 64 bits. On the CPU they are XXH3's: two different contents agree with probability
about 2^-64. On other devices a hash is the sum, modulo 2^64, of 32-bit words times odd random
multipliers: one changed word always changes it, since an odd factor has an inverse. Several changed
words, with differences d_i < 2^32, escape only if sum a_i d_i = 0: whatever the other terms are, at
most 2^k of the 2^63 odd values of one multiplier solve that, with 2^k the power of two in its d_i,
k <= 31. So the probability is at most 2^-32, and 2^-63 where some difference is odd. A multiplier
per position also shows words that have changed places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


_WORDS = 2**20
"""Words that are multiplied at a time; longer tensors chain their parts."""

CHAIN = -7046029254386353131
"""Odd: 2^64 divided by the golden ratio, as a signed number."""

_SEED = 20260101
_multipliers: dict[torch.device, Tensor] = {}


def hash64(tensors: Sequence[Tensor]) -> Tensor:
    """The hash of these tensors' bytes in this order, int64 without dimensions.

    It lies on the device of the first one, which is not waited for. Values depend on the device's
    type; they are compared with values from the same one.

    Args:
        tensors: Contiguous, of any type.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        state = xxhash.xxh3_64(seed=_SEED)
        for tensor in tensors:
            state.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
        digest = state.intdigest()
        signed = digest - 2**64 if digest >= 2**63 else digest
        return torch.tensor(signed, dtype=torch.int64, device="cpu")
    device = next(tensor.device for tensor in tensors if tensor.device.type != "cpu")
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        # A step count may lie on the CPU while its parameter does not.
        part = int(hash64([tensor])) if tensor.device != device else hash_words(tensor)
        total = total * CHAIN + part
    return total


def hash_words(numbers: Tensor) -> Tensor:
    """The multiplicative hash of one contiguous tensor, int64 without dimensions, on its device."""
    data = numbers.detach().reshape(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, 4 - data.numel() % 4))
    elif data.data_ptr() % 4 or data.storage_offset() % 4:
        data = data.clone()
    words = data.view(torch.int32)
    if numbers.device not in _multipliers:
        generator = torch.Generator().manual_seed(_SEED)
        draws = torch.randint(-(2**63), 2**63 - 1, (_WORDS,), generator=generator, device="cpu")
        _multipliers[numbers.device] = (draws | 1).to(numbers.device)
    multipliers = _multipliers[numbers.device]
    # The length takes part: zeros at the end are no words of weight zero.
    total = torch.full((), numbers.numel() + 1, dtype=torch.int64, device=numbers.device)
    for part in torch.split(words, _WORDS):
        total = total * CHAIN + (part * multipliers[: part.numel()]).sum()
    return total


@dataclass(frozen=True)
class Replica:
    """One rank's report of its copy of a slice.

    Attributes:
        after: Hash right after an optimizer step.
        now: Hash right before the next one.
        suspect: Whether another check has found the slice wrong on this rank.
    """

    after: int
    now: int
    suspect: bool = False


@dataclass(frozen=True)
class Comparison:
    """Result of comparing copies: the wrong ones.

    Attributes:
        good: Position of a rank with the right numbers; None where nobody can tell.
        bad: Positions of ranks whose numbers differ from those.
    """

    good: int | None
    bad: tuple[int, ...]


def compare(replicas: Sequence[Replica]) -> Comparison:
    """Find the wrong copies.

    Ranks whose copy has changed at rest, or is suspect, do not vote. The others' numbers are right
    if they agree, or if more than half of them do; two that differ without such a sign are a tie.
    """
    if len({replica.now for replica in replicas}) == 1:
        return Comparison(0, ())
    voters = [
        rank for rank, item in enumerate(replicas) if item.after == item.now and not item.suspect
    ]
    votes: dict[int, list[int]] = {}
    for rank in voters:
        votes.setdefault(replicas[rank].now, []).append(rank)
    most = max(votes.values(), key=len, default=[])
    if not most or 2 * len(most) <= len(voters):
        return Comparison(None, ())
    right = replicas[most[0]].now
    return Comparison(
        most[0], tuple(rank for rank, item in enumerate(replicas) if item.now != right)
    )


class Replicas:
    """The ranks that hold the same numbers, and how long they take to answer.

    Args:
        group: Of them.
        device: Where their numbers are.

    Attributes:
        rank: Of this process in the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self._group = group
        self._device = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        self._shortest_seconds = math.inf

    def connect(self) -> None:
        """Answer each other once before it is timed; all ranks call it together."""
        self._gathered(torch.zeros(1, dtype=torch.int64, device=self._device))

    def exchange(
        self, fields: Sequence[int], clock: Callable[[], float]
    ) -> tuple[list[list[int]], float]:
        """Every rank's fields, in the order of the group; waits for all of them.

        Returns:
            The fields, and the seconds beyond what such an exchange takes when all ranks are there
            already: they would have waited for each other anyway.
        """
        message = torch.tensor(fields, dtype=torch.int64, device=self._device)
        started = clock()
        rows = self._gathered(message)
        seconds = clock() - started
        self._shortest_seconds = min(self._shortest_seconds, seconds)
        return rows, seconds - self._shortest_seconds

    def _gathered(self, message: Tensor) -> list[list[int]]:
        """Every rank's message, (fields,) int64, in the order of the group."""
        found = [torch.empty_like(message) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(found, message, group=self._group)
        rows: list[list[int]] = torch.stack(found).tolist()
        return rows

    def repair(self, tensors: Sequence[Tensor], good: int) -> int:
        """Copy tensors from one rank to all others, bit for bit; all ranks call it together.

        Args:
            tensors: Contiguous, of the same types and shapes on all ranks; written to in place.
            good: Position of the source in the group.

        Returns:
            Their hash afterwards.
        """
        source = dist.get_global_rank(self._group, good)
        for tensor in tensors:
            # Bytes, since not every backend carries every type.
            data = tensor.detach().reshape(-1).view(torch.uint8)
            carried = data.to(self._device)
            dist.broadcast(carried, source, group=self._group)
            if carried.data_ptr() != data.data_ptr():
                data.copy_(carried)
        return int(hash64(tensors))
