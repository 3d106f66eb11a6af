"""The verdict on a step: what all ranks know of its numbers before the optimizer applies them.

It travels with the gradients: checksums ride behind their reductions, and once the passes are done
`GradientReduction.verdict` exchanges two numbers per rank. `remedy` says what follows.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import GuardError
from outlast.guard.collectives import ReplicatedReduction

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from outlast.guard.sharded import ShardedReduction
    from outlast.guard.watch import Watch

ATTEMPTS = 3
"""How often a step's passes are run at most."""


@dataclass(frozen=True)
class Verdict:
    """Whether a step's numbers may be used, equal on all ranks.

    Attributes:
        step: Optimizer steps done before.
        bad_ranks: Ranks whose own numbers, or what they received from a collective, are wrong and
            could not be put right.
        bad_results: Those among them that received wrong numbers. A collective that went wrong for
            all of its ranks names them all: its sum does not tell whose part was wrong.
        dropped: Ranks whose gradients are not among the averaged ones.
    """

    step: int
    bad_ranks: tuple[int, ...]
    bad_results: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """No rank has wrong numbers."""
        return not self.bad_ranks


@dataclass
class Terms:
    """Whose gradients a step's reductions add up.

    Attributes:
        dropped: Ranks of the default process group that contribute zeros to means over the others.
    """

    dropped: tuple[int, ...] = ()

    def remaining(self, ranks: Sequence[int]) -> int:
        """How many of these are not dropped.

        Raises:
            GuardError: When none is.
        """
        count = len(set(ranks) - set(self.dropped))
        if not count:
            raise GuardError(
                f"the gradients of ranks {', '.join(map(str, ranks))} are all dropped: there is "
                "none left to average; take the devices out of service"
            )
        return count


@dataclass(frozen=True)
class Remedy:
    """What follows a verdict that is not clean.

    Attributes:
        action: ``redo`` the passes, redo them and ``drop`` the gradients of `ranks`, or ``raise``.
        ranks: To drop.
    """

    action: Literal["redo", "drop", "raise"]
    ranks: tuple[int, ...] = ()


def remedy(verdicts: Sequence[Verdict], persistent: Literal["raise", "drop"], size: int) -> Remedy:
    """What to do after these attempts at a step, none of them clean; equal on all ranks.

    The first failure may have been a transient: all ranks run the passes again. Ranks that fail in
    two attempts in a row do so persistently. Their gradients can be left out, as erasures, if they
    are what is wrong; wrong results of collectives cannot, whoever contributes.

    Args:
        verdicts: Of the attempts at this step so far, at least one.
        persistent: See `Policy`.
        size: Number of ranks.
    """
    last = verdicts[-1]
    if len(verdicts) >= ATTEMPTS:
        return Remedy("raise")
    if len(verdicts) == 1:
        return Remedy("redo")
    ranks = tuple(sorted(set(verdicts[-2].bad_ranks) & set(last.bad_ranks)))
    if not ranks:
        return Remedy("redo")
    if persistent == "drop" and not last.bad_results and len(ranks) < size:
        return Remedy("drop", ranks)
    return Remedy("raise")


def agree(
    step: int,
    uncorrected: int,
    bad_results: int = 0,
    dropped: Sequence[int] = (),
) -> Verdict:
    """Tell all ranks of the default process group; every rank calls this at the same point.

    One all-reduce of two integers per rank; without a process group nothing is sent.

    Args:
        step: Optimizer steps done.
        uncorrected: Findings of this rank that left wrong numbers in its own part of the step.
        bad_results: Findings in what it received from collectives.
        dropped: Ranks whose own numbers do not matter since their gradients are left out.
    """
    counts = [[uncorrected], [bad_results]]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        slots = torch.zeros((2, dist.get_world_size()), dtype=torch.int64, device=_device())
        slots[:, dist.get_rank()] = torch.tensor([uncorrected, bad_results])
        dist.all_reduce(slots)
        counts = slots.tolist()
    own = {rank for rank, count in enumerate(counts[0]) if count and rank not in dropped}
    received = {rank for rank, count in enumerate(counts[1]) if count}
    return Verdict(step, tuple(sorted(own | received)), tuple(sorted(received)), tuple(dropped))


def _device() -> torch.device:
    """Where the default process group reduces: the host, where the integers are, if it can."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class GradientReduction:
    """The collectives of a model's data parallelism, and the verdict that follows from them.

    Args:
        watch: What all checks of the guard share. All ranks have the same seed and step.
        replicated: DDP wrappers.
        sharded: FSDP2 modules by name.

    Raises:
        GuardError: When the model's collectives cannot be checked.
    """

    def __init__(
        self,
        watch: Watch,
        replicated: Sequence[DistributedDataParallel],
        sharded: Mapping[str, FSDPModule],
    ) -> None:
        self.watch = watch
        self.terms = Terms()
        self._parts: list[ReplicatedReduction | ShardedReduction] = []
        for ddp in replicated:
            reduction = next(
                (state for _, state in ddp._comm_hooks if isinstance(state, ReplicatedReduction)),
                None,
            ) or ReplicatedReduction(ddp)
            reduction.attach(watch, self.terms)
            self._parts.append(reduction)
        if sharded:
            try:
                from outlast.guard.sharded import ShardedReduction
            except ImportError:
                warnings.warn(
                    f"torch {torch.__version__} has no way to replace FSDP2's collectives (2.13 "
                    "has one): they are not checked",
                    stacklevel=3,
                )
            else:
                self._parts.append(ShardedReduction(sharded, watch, self.terms))

    def begin(self) -> None:
        """An attempt at a step begins: forget what the one before has found."""
        for part in self._parts:
            part.begin()

    def drop(self, ranks: Iterable[int]) -> None:
        """Leave the gradients of these ranks out of the step's means, until `restore`.

        They contribute zeros, whatever their gradients are, and the sum is divided by the number of
        the others: the exact mean over these. The default process group counts the ranks. With
        tensor or pipeline parallelism all ranks of a replica must be named.

        Raises:
            GuardError: At the next reduction, when no rank remains that it could average.
        """
        self.terms.dropped = tuple(sorted(set(ranks)))

    def restore(self) -> None:
        """Take all ranks' gradients again; called when a step is done."""
        self.terms.dropped = ()

    def verdict(self, uncorrected: int) -> Verdict:
        """Whether the step's numbers may be used; all ranks call this together, after backward.

        Waits for the device, for the first time in the step.

        Args:
            uncorrected: Findings of this rank so far that left wrong numbers in the step.
        """
        before = self.watch.uncorrected
        for part in self._parts:
            part.check()
        self.watch.settle()
        received = self.watch.uncorrected - before
        return agree(self.watch.step, uncorrected, received, self.terms.dropped)

    def remove(self) -> None:
        """Check no more."""
        for part in self._parts:
            part.release()


def install_collectives(watch: Watch, model: nn.Module) -> GradientReduction | None:
    """Check the collectives of a model that is, or holds, a DDP wrapper or FSDP2 modules.

    Returns:
        None for any other model. A DDP wrapper cannot be found from the model inside it.

    Raises:
        GuardError: When its collectives cannot be checked.
    """
    modules = dict(model.named_modules())
    replicated = [m for m in modules.values() if isinstance(m, DistributedDataParallel)]
    sharded = {name: m for name, m in modules.items() if isinstance(m, FSDPModule)}
    if not replicated and not sharded:
        return None
    return GradientReduction(watch, replicated, sharded)
