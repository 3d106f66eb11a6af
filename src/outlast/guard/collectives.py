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
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from outlast.errors import GuardError
from outlast.guard.elements import name_of
from outlast.guard.judged import Judged, judge
from outlast.guard.threshold import unit_roundoff

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

    from outlast.guard.signs import Signs
    from outlast.guard.verdict import Terms
    from outlast.guard.watch import Watch

_COLUMNS = 4096
_ELEMENTS_CPU = 1 << 17
_ELEMENTS = 1 << 23
"""How many numbers are widened to fp64 at a time: what caches hold, or what keeps a GPU busy."""

_EXPONENT = 0x7FF0000000000000
"""The bits of a double that are left of its power of two."""

_REDUCIBLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def checksums(parts: Tensor, signs: Signs, *, powers: bool = False) -> Tensor:
    """What is known of a reduction's operands or results, on their device, without waiting for it.

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
    """Whether sums of such buffers have a rounding bound here."""
    return not buffer.is_sparse and buffer.dtype in _REDUCIBLE


@dataclass(frozen=True)
class Reduction:
    """How a set of equal reductions is computed.

    Attributes:
        dtype: Of the buffers, and of their partial sums on the way.
        ranks: R.
        factor: By which the reduction itself multiplies the sum, e.g. 1 / R for an average.
    """

    dtype: torch.dtype
    ranks: int
    factor: float = 1.0


def compare(found: Tensor, parts: Tensor, elements: Tensor, reduction: Reduction) -> Judged:
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
    return judge(difference, variance, torch.where(excused, 0.0, result))


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


@dataclass
class _Bucket:
    """A bucket on its way."""

    name: str
    buffer: Tensor
    work: dist.Work


@dataclass
class _Riders:
    """The checksums of several buckets, which travel together behind the last of them.

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
        self._way: list[_Bucket] = []
        self._parts: list[Tensor] = []
        self._riders: list[_Riders] = []
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
        self._way.clear()
        self._parts.clear()
        self._riders.clear()

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
        self._way.append(_Bucket(name, buffer, work))
        if bucket.is_last():
            self._send()
        # Comes before DDP's own end of the backward pass, which hands the results out.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return _result(work)

    def check(self) -> None:
        """Judge the reductions since `begin` or the last call; findings go to the watch."""
        riders, self._riders = self._riders, []
        if self.watch is None:
            return
        site = self.watch.ledger.site("gradients", "all_reduce")
        for rider in riders:
            if rider.results is None:
                continue
            rider.work.wait()
            elements = torch.tensor(rider.elements, device=rider.parts.device)
            for dtype in dict.fromkeys(rider.dtypes):
                rows = [row for row, own in enumerate(rider.dtypes) if own == dtype]
                reduction = Reduction(dtype, len(self.ranks))
                judged = self.watch.timed(
                    compare, rider.results[rows], rider.parts[rows], elements[rows], reduction
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
        """Let the checksums of the buckets so far follow them."""
        parts = torch.cat(self._parts)
        work = dist.all_reduce(parts, group=self.group, async_op=True)
        dtypes = [bucket.buffer.dtype for bucket in self._way]
        elements = [bucket.buffer.numel() for bucket in self._way]
        self._riders.append(_Riders(dtypes, elements, parts, work, self._way))
        self._way, self._parts = [], []

    def _finish(self) -> None:
        """At the end of a backward pass: sum the results."""
        if self._parts:
            # In the first pass of a static graph no bucket says that it is the last.
            self._send()
        for riders in self._riders:
            if riders.results is None and self.watch is not None:
                results = []
                for bucket in riders.buckets:
                    bucket.work.wait()
                    self.watch.touch("bucket.after", bucket.name, bucket.buffer)
                    results.append(
                        self.watch.timed(
                            checksums, bucket.buffer[None], self.watch.signs, powers=True
                        )
                    )
                riders.results, riders.buckets = torch.cat(results), []


def _result(work: dist.Work) -> torch.futures.Future[Any]:
    return work.get_future().then(lambda future: future.value()[0])
