"""Gradient reductions checked by linear checksums; DDP's all-reduce among them.

A reduction ``y = sum_r b_r`` over R ranks is linear, so with the same signs s on all ranks::

    s y = sum_r s b_r

Every rank sums its own part in fp64 before the reduction and the result after it; the parts' sums
are reduced as well, as a few fp64 numbers. Rounding makes the two sides differ. In whatever order
the ranks are added, an element has R - 1 partial sums S_t of t terms, each rounded once; for terms
in exchangeable order (sampling without replacement)::

    E S_t^2 = (t/R)^2 y^2 + t (R - t) / (R (R - 1)) (sum_r b_r^2 - y^2 / R)

The last, S_R = y, is known: its rounding is counted from the powers of two below its elements, as
in `outlast.guard.threshold`. The others' follow from ``sum_r |b_r|^2``, which is reduced with the
checksums. Rings add one rank at a time, as here; trees have fewer and shorter partial sums.

The signs of element (i, j) of a buffer in rows of 4096 are u_i v_j. An error pattern that is fixed
escapes one draw with probability 3/4 at most (1/2 along each side), n steps with (3/4)^n.

*FSDP2.* An all-gather moves bytes. Every rank hashes its own shard before, and every shard of the
gathered buffer after; at the verdict the hashes are exchanged, chained over the step's all-gathers,
and must be equal. A reduce-scatter is one reduction per destination, and HSDP's all-reduce of its
results another; both are linear, and checked as above, with the checksums of a step added up per
module: linear as well, so that gradient accumulation costs nothing more. Everything is exchanged at
the verdict: a few numbers per module, in one collective per kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from outlast.errors import GuardError
from outlast.guard.replica_hashes import CHAIN, hash64
from outlast.guard.residual import ResidualTest, equality_test, name_of, residual_test
from outlast.guard.threshold import unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    from outlast.guard.handle import Terms
    from outlast.guard.watch import RandomSigns, Watch


try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError:
    AllGather = ReduceScatter = object  # type: ignore[assignment, misc]
    FSDP_REPLACEABLE = False
else:
    FSDP_REPLACEABLE = True
"""Whether this torch lets FSDP2's collectives be replaced, as it does from 2.13 on."""

_COLUMNS = 4096
_ELEMENTS_CPU = 1 << 17
_ELEMENTS = 1 << 23
"""How many numbers are widened to fp64 at a time: what caches hold, or what keeps a GPU busy."""

_EXPONENT = 0x7FF0000000000000
"""The bits of a double that are left of its power of two."""

_REDUCIBLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def checksums(parts: Tensor, signs: RandomSigns, *, powers: bool = False) -> Tensor:
    """Checksums of a reduction's operands or results, on their device, without waiting for it.

    Args:
        parts: (parts, elements) of a floating-point type.
        signs: The step's, equal on all ranks.
        powers: Whether the third sum is wanted.

    Returns:
        (parts, 3) float64: sum of s_i x_i, sum of x_i^2, sum of 4^floor(log2 |x_i|) (or 0).
    """
    count, elements = parts.shape
    device = parts.device
    total = torch.zeros((count, 3), dtype=torch.float64, device=device)
    rows = -(-elements // _COLUMNS)
    across = signs.take("input", _COLUMNS, device).double()
    down = signs.take("output", max(rows, 1), device).double()
    at_once = _ELEMENTS_CPU if device.type == "cpu" else _ELEMENTS
    height = max(at_once // (_COLUMNS * count), 1)
    width = min(height * _COLUMNS, elements)
    scratch = torch.empty((count, width), dtype=torch.float64, device=device)
    for row in range(0, rows, height):
        part = parts[:, row * _COLUMNS : (row + height) * _COLUMNS]
        wide = scratch[:, : part.shape[1]].copy_(part)
        whole, rest = divmod(part.shape[1], _COLUMNS)
        if whole:
            grid = wide[:, : whole * _COLUMNS].view(count, whole, _COLUMNS)
            total[:, 0] += (grid @ across) @ down[row : row + whole]
        if rest:
            total[:, 0] += wide[:, -rest:] @ across[:rest] * down[row + whole]
        total[:, 1] += _squares(wide)
        if powers:
            wide.view(torch.int64).bitwise_and_(_EXPONENT)
            total[:, 2] += _squares(wide)
    return total


def _squares(wide: Tensor) -> Tensor:
    # Several times as fast as torch.linalg.vecdot.
    return torch.bmm(wide[:, None, :], wide[:, :, None])[:, 0, 0]


def reducible(buffer: Tensor) -> bool:
    """Return whether sums of such buffers have a rounding bound here."""
    return not buffer.is_sparse and buffer.dtype in _REDUCIBLE


@dataclass(frozen=True)
class ReductionTerms:
    """Terms, types and divisor of a set of equal reductions.

    Attributes:
        dtype: Of the buffers, and of their partial sums on the way.
        ranks: R.
        factor: By which the reduction itself multiplies the sum, e.g. 1 / R for an average.
    """

    dtype: torch.dtype
    ranks: int
    factor: float = 1.0


def compare(
    found: Tensor, parts: Tensor, elements: Tensor, reduction: ReductionTerms
) -> ResidualTest:
    """Judge reductions; nothing is waited for.

    Where the parts hold infinities or NaN already, or are so large that their sum may overflow the
    type, what comes out as not finite is the data's own, as in a step that a loss scaler skips.

    Args:
        found: (reductions, 3) `checksums` of the results, with powers.
        parts: (reductions, 2 or more) `checksums` of the parts, summed over the ranks.
        elements: (reductions,) of each, for sums over several reductions their number in all.
        reduction: Of what kind they are.
    """
    ranks, factor = reduction.ranks, reduction.factor
    name = name_of(reduction.dtype)
    limits = torch.finfo(reduction.dtype)
    stored = unit_roundoff(name)
    checksum, squares = factor * parts[:, 0], factor**2 * parts[:, 1]
    result = found[:, 1]
    between = range(2, ranks)
    drift = sum((t / ranks) ** 2 for t in between)
    walk = sum(t * (ranks - t) / (ranks * (ranks - 1)) for t in between)
    rounding = found[:, 2] + drift * result + walk * (squares - result / ranks).clamp(min=0.0)
    variance = stored**2 / 3.0 * rounding
    if factor != 1.0 and not _is_power_of_two(factor):
        # Every part, or the sum, is multiplied by the factor; the factor itself may be rounded.
        variance = variance + stored**2 / 3.0 * (squares + result) + (stored * checksum).square()
    # The checksums' own sums are as long as a row and as there are rows.
    length = _COLUMNS + elements / _COLUMNS
    variance = variance + unit_roundoff("float64") ** 2 / 3.0 * length * (squares + result)
    spacing = stored * limits.smallest_normal
    variance = variance + elements * ranks * spacing**2 / 3.0 + 2.0**-1000
    own = ~torch.isfinite(parts[:, :2]).all(dim=1)
    overflow = ((ranks * parts[:, 1]).sqrt() > limits.max) & ~torch.isfinite(found).all(dim=1)
    excused = own | overflow
    difference = torch.where(excused, 0.0, found[:, 0] - checksum)
    variance = torch.where(excused, 1.0, variance)
    return residual_test(difference, variance, torch.where(excused, 0.0, result))


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


@dataclass
class _Bucket:
    """A bucket on its way."""

    name: str
    buffer: Tensor
    work: dist.Work


@dataclass
class _BucketChecksums:
    """The checksums of several buckets, which are reduced together after the last of them.

    Attributes:
        dtypes: Of the buckets.
        elements: (buckets,).
        parts: (buckets, 2), reduced in place.
        work: That reduction.
        buckets: Until their results are summed.
        results: (buckets, 3), then.
    """

    dtypes: list[torch.dtype]
    elements: list[int]
    parts: Tensor
    work: dist.Work
    buckets: list[_Bucket]
    results: Tensor | None = None


class ReplicatedReduction:
    """Stands in for the all-reduces of one DDP wrapper, with the bits of DDP's own.

    A wrapper takes one hook, for ever: after `release` the same one only averages, until `attach`.

    Args:
        ddp: The wrapper.

    Raises:
        GuardError: When the wrapper has another communication hook.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        if ddp._comm_hooks:
            raise GuardError(
                "the DDP wrapper has a communication hook already and takes no second one; "
                "guard it without that hook, or set policy light, which checks no collectives"
            )
        if getattr(ddp, "_use_python_reducer", False):
            raise GuardError(
                "torch._dynamo.config.optimize_ddp = 'python_reducer' reduces gradients in "
                "compiled code, which cannot be checked; set it to True, or set policy light"
            )
        self.group: dist.ProcessGroup = ddp.process_group
        self.ranks: list[int] = dist.get_process_group_ranks(self.group)
        self.watch: Watch | None = None
        self.terms: Terms | None = None
        self._buckets: list[_Bucket] = []
        self._parts: list[Tensor] = []
        self._sent: list[_BucketChecksums] = []
        self._storages: dict[int, int] = {}
        # DDP looks at annotations, and knows no postponed ones.
        ddp.register_comm_hook(self, lambda state, bucket: state.reduce(bucket))
        if ddp.gradient_as_bucket_view and not _is_power_of_two(float(len(self.ranks))):
            for parameter in ddp.module.parameters():
                if parameter.requires_grad:
                    self._note_storage(parameter)

    def attach(self, watch: Watch, terms: Terms) -> None:
        """Check from now on."""
        self.watch, self.terms = watch, terms

    def release(self) -> None:
        """Check no more."""
        self.begin()
        self.watch = self.terms = None

    def begin(self) -> None:
        """Forget all checks so far."""
        self._buckets.clear()
        self._parts.clear()
        self._sent.clear()

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        """DDP's hook: average one bucket over the ranks."""
        buffer, watch = bucket.buffer(), self.watch
        if watch is None or not reducible(buffer):
            self._weigh(bucket)
            return _result(dist.all_reduce(buffer, group=self.group, async_op=True))
        name = f"bucket {bucket.index()}"
        watch.unjudged = True
        watch.touch("bucket.before", name, buffer)
        self._weigh(bucket)
        self._parts.append(watch.timed(checksums, buffer[None], watch.signs)[:, :2])
        watch.touch("bucket.during", name, buffer)
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        self._buckets.append(_Bucket(name, buffer, work))
        if bucket.is_last():
            self._send()
        # Comes before DDP's own end of the backward pass, which hands the results out.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return _result(work)

    def check(self) -> None:
        """Judge the reductions since `begin` or the last call; findings go to the watch."""
        sent, self._sent = self._sent, []
        if self.watch is None:
            return
        site = self.watch.ledger.site("gradients", "all_reduce")
        for sums in sent:
            if sums.results is None:
                continue
            sums.work.wait()
            elements = torch.tensor(sums.elements, device=sums.parts.device)
            for dtype in dict.fromkeys(sums.dtypes):
                rows = [row for row, own in enumerate(sums.dtypes) if own == dtype]
                reduction = ReductionTerms(dtype, len(self.ranks))
                judged = self.watch.timed(
                    compare, sums.results[rows], sums.parts[rows], elements[rows], reduction
                )
                self.watch.judge(site, judged)

    def _weigh(self, bucket: dist.GradBucket) -> None:
        """Turn this rank's gradients into its term of the mean.

        DDP multiplies gradients by 1/R where it copies them to the bucket, and divides those by R
        that lie there already, which rounds otherwise. So does this.
        """
        buffer, size = bucket.buffer(), len(self.ranks)
        dropped = self.terms.dropped if self.terms is not None else ()
        if self.terms is not None and set(dropped) & set(self.ranks):
            remaining = self.terms.remaining(self.ranks)
            if dist.get_rank() in dropped:
                buffer.zero_()
            else:
                buffer.mul_(1.0 / remaining)
        elif buffer.is_sparse:
            buffer.div_(size)
        elif buffer.untyped_storage().data_ptr() not in self._storages.values():
            buffer.mul_(1.0 / size)
        else:
            storage = buffer.untyped_storage().data_ptr()
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if self._storages.get(id(parameter)) == storage:
                    gradient.div_(size)
                else:
                    gradient.mul_(1.0 / size)

    def _note_storage(self, parameter: Tensor) -> None:
        """Remember, whenever a gradient arrives, where the one before it lies."""

        def note(_: Tensor) -> None:
            before = parameter.grad
            if before is None:
                self._storages.pop(id(parameter), None)
            else:
                self._storages[id(parameter)] = before.untyped_storage().data_ptr()

        parameter.register_hook(note)  # type: ignore[no-untyped-call]

    def _send(self) -> None:
        """Reduce the checksums of the buckets so far."""
        parts = torch.cat(self._parts)
        work = dist.all_reduce(parts, group=self.group, async_op=True)
        dtypes = [bucket.buffer.dtype for bucket in self._buckets]
        elements = [bucket.buffer.numel() for bucket in self._buckets]
        self._sent.append(_BucketChecksums(dtypes, elements, parts, work, self._buckets))
        self._buckets, self._parts = [], []

    def _finish(self) -> None:
        """At the end of a backward pass: sum the results."""
        if self._parts:
            # In the first pass of a static graph no bucket says that it is the last.
            self._send()
        for sums in self._sent:
            if sums.results is None and self.watch is not None:
                results = []
                for bucket in sums.buckets:
                    bucket.work.wait()
                    self.watch.touch("bucket.after", bucket.name, bucket.buffer)
                    results.append(
                        self.watch.timed(
                            checksums, bucket.buffer[None], self.watch.signs, powers=True
                        )
                    )
                sums.results, sums.buckets = torch.cat(results), []


def _result(work: dist.Work) -> torch.futures.Future[Any]:
    return work.get_future().then(lambda future: future.value()[0])


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

    def __init__(
        self, inner: ReduceScatter, unit: ShardedModule, watch: Watch, terms: Terms
    ) -> None:
        self.inner = inner
        self.unit = unit
        self.watch = watch
        self.terms = terms
        self.done: torch.Event | None = None
        self.begin()

    def begin(self) -> None:
        """Forget all checksums."""
        self.scattered: ModuleChecksums | None = None
        self.replicated: ModuleChecksums | None = None
        self._partial: ModuleChecksums | None = None

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
            reduction = ReductionTerms(input_tensor.dtype, size, factor)
            self.scattered = _add(
                self.scattered, ModuleChecksums(reduction, output_tensor.numel(), parts, results)
            )
        if set(self.terms.dropped) & set(self.unit.ranks):
            everyone = len(self.unit.ranks)
            output_tensor.mul_(everyone / self.terms.remaining(self.unit.ranks))
            if checked:
                results = watch.timed(checksums, output_tensor[None], watch.signs, powers=True)
        if checked and self.unit.replicas is not None:
            replicas = self.unit.replicas.size()
            averaged = op == dist.ReduceOp.AVG and self.unit.divisor is None
            reduction = ReductionTerms(
                output_tensor.dtype, replicas, 1.0 / replicas if averaged else 1.0
            )
            nothing = torch.zeros_like(results)
            partial = ModuleChecksums(reduction, output_tensor.numel(), results[:, :2], nothing)
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
class ModuleChecksums:
    """Checksums of one module's reductions in a step.

    Attributes:
        reduction: Of what kind they are.
        elements: Of each, added up.
        parts: (destinations, 2) `checksums` of this rank's parts.
        results: (1, 3) `checksums` of what this rank received.
    """

    reduction: ReductionTerms
    elements: int
    parts: Tensor
    results: Tensor


def _add(before: ModuleChecksums | None, now: ModuleChecksums) -> ModuleChecksums:
    if before is None:
        return now
    return ModuleChecksums(
        max(before.reduction, now.reduction, key=lambda reduction: reduction.ranks),
        before.elements + now.elements,
        before.parts + now.parts,
        before.results + now.results,
    )


def _event(tensor: Tensor) -> torch.Event | None:
    """Marks the present point of the stream that computes `tensor`; None on the CPU."""
    return torch.cuda.current_stream().record_event() if tensor.is_cuda else None


class ShardedModule:
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
        """Divisor that the user has set instead of the number of ranks."""
        divisor: float | None = self._group.gradient_divide_factor
        return divisor

    def factor(self, op: Any, size: int) -> float:
        """Factor by which a reduction by `op` over `size` ranks multiplies the sum."""
        if op == dist.ReduceOp.AVG:
            return 1.0 / size
        if op == dist.ReduceOp.SUM or self.divisor is None:
            return 1.0
        return 1.0 / self.divisor

    @property
    def comms(self) -> tuple[AllGather, ReduceScatter, Callable[[Tensor], None] | None]:
        """Return the all-gather, the reduce-scatter and the hook behind the all-reduce."""
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
                self._install(ShardedModule(name or "root", module), terms)

    def _install(self, unit: ShardedModule, terms: Terms) -> None:
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
        groups = dict.fromkeys(group for comm in self._gathers for group in comm.hashes)
        for group in groups:
            hashes = torch.stack(
                [comm.hashes[group] for comm in self._gathers if group in comm.hashes]
            )
            sent = torch.zeros_like(hashes[:, 1:])
            sent[:, group.rank()] = hashes[:, 0]
            dist.all_reduce(sent, group=group)
            site = self.watch.ledger.site("parameters", "all_gather")
            self.watch.judge(site, equality_test(hashes[:, 1:].flatten(), sent.flatten()))
        for replicated in (False, True):
            self._check_reductions(replicated)
        self.begin()

    def _check_reductions(self, replicated: bool) -> None:
        """Exchange and judge the checksums of one kind of reductions, equal ones together."""
        alike: dict[tuple[dist.ProcessGroup, ReductionTerms], list[ModuleChecksums]] = {}
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
    """Return whether an FSDP2 module gathers any itself; one whose children hold all does not."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return bool(groups) or getattr(state, "_fsdp_param_group", None) is not None
