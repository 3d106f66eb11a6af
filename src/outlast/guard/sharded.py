"""FSDP2's collectives, checked: all-gathers by hashes, reductions by linear checksums.

An all-gather moves bytes. Every rank hashes its own shard before, and every shard of the gathered
buffer after; at the verdict the hashes are exchanged, chained over the step's all-gathers, and must
be equal. A reduce-scatter is one reduction per destination, and HSDP's all-reduce of its results
another; both are linear, and checked as `outlast.guard.collectives` says, with the checksums of a
step added up per module: linear as well, so that gradient accumulation costs nothing more.

Everything is exchanged at the verdict: a few numbers per module, in one collective per kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from outlast.errors import GuardError
from outlast.guard.collectives import Reduction, checksums, compare, reducible
from outlast.guard.judged import exact
from outlast.guard.rest import CHAIN, hash64

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from outlast.guard.verdict import Terms
    from outlast.guard.watch import Watch


class CheckedAllGather(AllGather):
    """One module's all-gathers, hashed.

    Args:
        inner: Who does them.
        watch: What all checks of the guard share.
        name: The module's.

    Attributes:
        hashes: By process group: (1 + ranks,) int64, of the own shards and of all that arrived.
    """

    def __init__(self, inner: AllGather, watch: Watch, name: str) -> None:
        self.inner = inner
        self.watch = watch
        self.name = name
        self.hashes: dict[dist.ProcessGroup, Tensor] = {}
        self.done: torch.Event | None = None

    def allocate(self, *args: Any, **settings: Any) -> Tensor:
        """As the inner one does."""
        return self.inner.allocate(*args, **settings)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor` of all ranks; waits for it before it hashes what arrived."""
        self.watch.unjudged = True
        own = self.watch.timed(hash64, [input_tensor])
        self.watch.touch("gather.during", self.name, input_tensor)
        work = self.inner(output_tensor, input_tensor, group, async_op)
        if async_op and work is not None:
            work.wait()
        self.watch.touch("gather.after", self.name, output_tensor)
        arrived = [
            self.watch.timed(hash64, [shard])
            for shard in output_tensor.view(group.size(), input_tensor.numel())
        ]
        now = torch.stack([own, *arrived])
        before = self.hashes.get(group)
        self.hashes[group] = now if before is None else before * CHAIN + now
        self.done = _event(now)
        return work

    def begin(self) -> None:
        """Forget all hashes; groups stay known, so that all ranks keep the same ones."""
        for hashes in self.hashes.values():
            hashes.zero_()


class CheckedReduceScatter(ReduceScatter):
    """One module's reductions of gradients, with their checksums.

    Args:
        inner: Who does them.
        unit: What is reduced.
        watch: What all checks of the guard share.
        terms: Whose gradients count.
    """

    def __init__(self, inner: ReduceScatter, unit: Unit, watch: Watch, terms: Terms) -> None:
        self.inner = inner
        self.unit = unit
        self.watch = watch
        self.terms = terms
        self.done: torch.Event | None = None
        self.begin()

    def begin(self) -> None:
        """Forget all checksums."""
        self.scattered: Sums | None = None
        self.replicated: Sums | None = None
        self._partial: Sums | None = None

    def allocate(self, *args: Any, **settings: Any) -> Tensor:
        """As the inner one does."""
        return self.inner.allocate(*args, **settings)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce the ranks' `input_tensor`, and keep this rank's shard of the result."""
        watch, name, size = self.watch, self.unit.name, group.size()
        checked = reducible(input_tensor)
        watch.unjudged = True
        watch.touch("bucket.before", name, input_tensor)
        if dist.get_rank() in self.terms.dropped:
            input_tensor.zero_()
        if checked:
            shares = input_tensor.view(size, output_tensor.numel())
            parts = watch.timed(checksums, shares, watch.signs)[:, :2]
        watch.touch("bucket.during", name, input_tensor)
        work = self.inner(output_tensor, input_tensor, group, op, async_op)
        if async_op and work is not None:
            work.wait()
        watch.touch("bucket.after", name, output_tensor)
        if checked:
            results = watch.timed(checksums, output_tensor[None], watch.signs, powers=True)
            factor = self.unit.factor(op, size)
            reduction = Reduction(input_tensor.dtype, size, factor)
            self.scattered = _add(
                self.scattered, Sums(reduction, output_tensor.numel(), parts, results)
            )
        if set(self.terms.dropped) & set(self.unit.ranks):
            everyone = len(self.unit.ranks)
            output_tensor.mul_(everyone / self.terms.remaining(self.unit.ranks))
            if checked:
                results = watch.timed(checksums, output_tensor[None], watch.signs, powers=True)
        if checked and self.unit.replicas is not None:
            replicas = self.unit.replicas.size()
            averaged = op == dist.ReduceOp.AVG and self.unit.divisor is None
            reduction = Reduction(
                output_tensor.dtype, replicas, 1.0 / replicas if averaged else 1.0
            )
            nothing = torch.zeros_like(results)
            partial = Sums(reduction, output_tensor.numel(), results[:, :2], nothing)
            # Shards of several microbatches may be added up before HSDP's all-reduce: then the
            # result is a sum of so many terms per replica.
            earlier = 0 if self._partial is None else self._partial.reduction.ranks
            reduction = replace(reduction, ranks=earlier + replicas)
            self._partial = replace(_add(self._partial, partial), reduction=reduction)
        self.done = _event(output_tensor)
        return work

    def after_replicas(self, result: Tensor) -> None:
        """HSDP's hook: `result` is the all-reduce's."""
        self.watch.touch("bucket.after", self.unit.name, result)
        if self._partial is not None:
            results = self.watch.timed(checksums, result[None], self.watch.signs, powers=True)
            self.replicated = _add(self.replicated, replace(self._partial, results=results))
            self._partial = None
            self.done = _event(result)


@dataclass
class Sums:
    """What is known of one module's reductions in a step.

    Attributes:
        reduction: Of what kind they are.
        elements: Of each, added up.
        parts: (destinations, 2) `checksums` of this rank's parts.
        results: (1, 3) `checksums` of what this rank received.
    """

    reduction: Reduction
    elements: int
    parts: Tensor
    results: Tensor


def _add(before: Sums | None, now: Sums) -> Sums:
    if before is None:
        return now
    return Sums(
        max(before.reduction, now.reduction, key=lambda reduction: reduction.ranks),
        before.elements + now.elements,
        before.parts + now.parts,
        before.results + now.results,
    )


def _event(tensor: Tensor) -> torch.Event | None:
    """Marks the present point of the stream that computes `tensor`; None on the CPU."""
    return torch.cuda.current_stream().record_event() if tensor.is_cuda else None


class Unit:
    """The parameters that one FSDP2 module gathers and reduces together.

    Args:
        name: The module's.
        module: It.

    Attributes:
        ranks: All ranks over which gradients are averaged.
        shards: The group of a shard's peers.
        replicas: HSDP's other group, or None.

    Raises:
        GuardError: When its communication cannot be replaced.
    """

    def __init__(self, name: str, module: FSDPModule) -> None:
        self.name = name
        self.module = module
        state = module._get_fsdp_state()
        groups: Sequence[Any] = getattr(state, "_fsdp_param_groups", None) or [
            state._fsdp_param_group
        ]
        if len(groups) > 1:
            raise GuardError(
                f"module {name} shards its parameters over {len(groups)} meshes, and its "
                "collectives cannot be replaced; shard these parameters as modules of their own, "
                "or set policy light, which checks no collectives"
            )
        self._group = groups[0]
        mesh = self._group.mesh_info
        if not hasattr(mesh, "shard_process_group"):
            raise GuardError(
                f"module {name} is replicated by torch's replicate(), whose all-reduce cannot be "
                "checked; wrap the model with DistributedDataParallel, or set policy light"
            )
        self.shards: dist.ProcessGroup = mesh.shard_process_group
        self.replicas: dist.ProcessGroup | None = None
        self.ranks = dist.get_process_group_ranks(self.shards)
        if self._group._is_hsdp:
            self.replicas = mesh.replicate_process_group
            self.ranks = sorted(mesh.mesh.mesh.flatten().tolist())

    @property
    def divisor(self) -> float | None:
        """What the user has set instead of the number of ranks."""
        divisor: float | None = self._group.gradient_divide_factor
        return divisor

    def factor(self, op: Any, size: int) -> float:
        """By which a reduction by `op` over `size` ranks multiplies the sum."""
        if op == dist.ReduceOp.AVG:
            return 1.0 / size
        if op == dist.ReduceOp.SUM or self.divisor is None:
            return 1.0
        return 1.0 / self.divisor

    @property
    def comms(self) -> tuple[AllGather, ReduceScatter, Callable[[Tensor], None] | None]:
        """Who communicates now: all-gather, reduce-scatter, hook behind the all-reduce."""
        group = self._group
        return group._all_gather_comm, group._reduce_scatter_comm, group._all_reduce_hook

    def set_comms(
        self,
        all_gather: AllGather,
        reduce_scatter: ReduceScatter,
        hook: Callable[[Tensor], None] | None,
    ) -> None:
        """Let others communicate."""
        self.module.set_custom_all_gather(all_gather)
        self.module.set_custom_reduce_scatter(reduce_scatter)
        self._group._all_reduce_hook = hook


class ShardedReduction:
    """The collectives of all FSDP2 modules of a model.

    Args:
        modules: By name.
        watch: What all checks of the guard share.
        terms: Whose gradients count.

    Raises:
        GuardError: When the communication of one of them cannot be replaced.
    """

    def __init__(self, modules: Mapping[str, FSDPModule], watch: Watch, terms: Terms) -> None:
        self.watch = watch
        self._gathers: list[CheckedAllGather] = []
        self._scatters: list[CheckedReduceScatter] = []
        self._undo: list[Callable[[], None]] = []
        known: set[int] = set()
        for name, module in modules.items():
            state = id(module._get_fsdp_state())
            # Modules that were sharded together, as a list, communicate as one.
            if has_parameters(module) and state not in known:
                known.add(state)
                self._install(Unit(name or "root", module), terms)

    def _install(self, unit: Unit, terms: Terms) -> None:
        gather, scatter, hook = before = unit.comms
        checked_gather = CheckedAllGather(gather, self.watch, unit.name)
        checked_scatter = CheckedReduceScatter(scatter, unit, self.watch, terms)

        def after_replicas(result: Tensor) -> None:
            checked_scatter.after_replicas(result)
            if hook is not None:
                hook(result)

        unit.set_comms(
            checked_gather, checked_scatter, hook if unit.replicas is None else after_replicas
        )
        self._gathers.append(checked_gather)
        self._scatters.append(checked_scatter)
        self._undo.append(lambda: unit.set_comms(*before))

    def begin(self) -> None:
        """Forget all checks so far."""
        for gather in self._gathers:
            gather.begin()
        for scatter in self._scatters:
            scatter.begin()

    def release(self) -> None:
        """Give the modules their own communication back."""
        self.begin()
        while self._undo:
            self._undo.pop()()

    def check(self) -> None:
        """Judge the collectives since `begin` or the last call; findings go to the watch."""
        for done in (
            *(gather.done for gather in self._gathers),
            *(scatter.done for scatter in self._scatters),
        ):
            if done is not None:
                torch.cuda.current_stream().wait_event(done)
        self._check_gathers()
        for replicated in (False, True):
            self._check_reductions(replicated)
        self.begin()

    def _check_gathers(self) -> None:
        groups = dict.fromkeys(group for comm in self._gathers for group in comm.hashes)
        for group in groups:
            hashes = torch.stack(
                [comm.hashes[group] for comm in self._gathers if group in comm.hashes]
            )
            sent = torch.zeros_like(hashes[:, 1:])
            sent[:, group.rank()] = hashes[:, 0]
            dist.all_reduce(sent, group=group)
            site = self.watch.ledger.site("parameters", "all_gather")
            self.watch.judge(site, exact(hashes[:, 1:].flatten(), sent.flatten()))

    def _check_reductions(self, replicated: bool) -> None:
        """Exchange and judge the checksums of one kind of reductions, equal ones together."""
        alike: dict[tuple[dist.ProcessGroup, Reduction], list[Sums]] = {}
        for comm in self._scatters:
            sums = comm.replicated if replicated else comm.scattered
            group = comm.unit.replicas if replicated else comm.unit.shards
            if sums is not None and group is not None:
                alike.setdefault((group, sums.reduction), []).append(sums)
        operation = "all_reduce" if replicated else "reduce_scatter"
        for (group, reduction), several in alike.items():
            parts = torch.stack([item.parts for item in several])
            dist.all_reduce(parts, group=group)
            own = parts[:, 0] if replicated else parts[:, group.rank()]
            results = torch.cat([item.results for item in several])
            elements = torch.tensor([item.elements for item in several], device=parts.device)
            site = self.watch.ledger.site("gradients", operation)
            self.watch.judge(site, compare(results, own, elements, reduction))


def has_parameters(module: FSDPModule) -> bool:
    """Whether an FSDP2 module gathers any itself; one whose children hold all does not."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return bool(groups) or getattr(state, "_fsdp_param_group", None) is not None
