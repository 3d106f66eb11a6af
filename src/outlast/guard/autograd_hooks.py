"""Watching an operation of autograd from outside, without taking part in it.

Layers other than linear ones are not computed here: the operation's own forward and backward run
as they are. An identity node around its inputs hands their gradients to a check, next to the
gradient of the output, which a hook of the output's own node notes. Neither changes a bit, the
order of additions, or how long autograd keeps a tensor: what a check needs is kept by
`save_for_backward`, so activation checkpointing and offloading treat it as their own.

Where a device's kernels give the same bits every time, an operation is checked by computing it a
second time (`repeated`): that finds every transient fault and needs no threshold. It does not find
the same wrong value twice. Identities, which do, stand elsewhere.

An operation that uses its first input several times adds to that input's gradient several times,
in between what others add. There the identity node would add first, with other bits; instead hooks
of the nodes that use the input note the parts, and their sum is checked but cannot be replaced.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from outlast.guard.replica_hashes import hash64
from outlast.guard.residual import equal_bits, equality_test
from outlast.guard.watch import CALLING, computing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.autograd.graph import Node

    from outlast.guard.findings import Outcome, Site
    from outlast.guard.residual import ResidualTest
    from outlast.guard.watch import Watch

    Gradients = tuple[Tensor | None, ...]


_EXPONENT_BITS = {
    torch.float64: (torch.int64, 0x7FF0000000000000),
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


def powers_squared(values: Tensor, dtype: torch.dtype) -> Tensor:
    """4^floor(log2 |x|) of every element, in `dtype`; 0 for 0 and below the normal numbers."""
    integers, mask = _EXPONENT_BITS[values.dtype]
    powers = values.detach().contiguous().view(integers).bitwise_and(mask).view(values.dtype)
    return powers.to(dtype).square_()


def floor_of(count: int, stored: torch.dtype, summed: torch.dtype) -> float:
    """Variance of a sum of `count` numbers that are below the normal ones of their types."""
    spacing = torch.finfo(stored).smallest_normal * torch.finfo(stored).eps / 2.0
    # Squares that are too small for the sums vanish; fp64 loses none that matter.
    lost = 2.0**-1000 if summed == torch.float64 else torch.finfo(summed).smallest_normal
    return count * max(spacing**2 / 3.0, lost)


def stagnation(count: Any, unit: float, squares: Tensor) -> Tensor:
    """Variance of a long sum in a 16-bit type, whose roundings no longer are independent.

    From ``count unit`` = 1 on, terms of one sign are less than half the spacing of their sum and
    vanish; what is lost is at most ``(sum |p|)^2 <= count sum p^2``.

    Args:
        count: How many terms were added one after the other, a number or a tensor.
        unit: Unit roundoff of the sum.
        squares: Sum of the terms' squares.
    """
    share = (
        torch.as_tensor(count * unit, dtype=squares.dtype, device=squares.device)
        .pow(4)
        .clamp(max=1.0)
    )
    lost: Tensor = share * count * squares / 3.0
    return lost


@dataclass(frozen=True)
class Seen:
    """One backward pass of a watched operation.

    Attributes:
        dy: Gradient of the output.
        kept: What was given to `watched` to keep.
        gradients: Of the inputs; None where there is none.
        again: Computes the output and `gradients` a second time, given the inputs.
        replaceable: Whether the first gradient can be corrected.
        exact: Whether `again` gives the same bits: a sum of three parts has an order.
    """

    dy: Tensor
    kept: tuple[Any, ...]
    gradients: Gradients
    again: Callable[[Sequence[Tensor | None]], tuple[Tensor, Gradients]]
    replaceable: bool = True
    exact: bool = True


class Record:
    """Record that one call of a watched operation leaves for its backward pass."""

    def __init__(
        self,
        compute: Callable[..., Tensor],
        check: Callable[[Seen], Gradients],
        wanted: tuple[int, ...],
        inputs: int,
        device: str,
        *,
        covering: Mapping[int, str] | None = None,
    ) -> None:
        self.compute = compute
        self.check = check
        self.wanted = wanted
        self.inputs = inputs
        self.covering = covering
        self.dy: Tensor | None = None
        self.replaceable = self.exact = True
        # Whether a backward pass was made with a graph of its own: passes through that graph give
        # the inputs gradients that do not come from the output's, so none can be judged.
        self._is_twice_differentiable = False
        # Of the module or function that is checked.
        method = check.func if isinstance(check, functools.partial) else check
        owner = getattr(method, "__self__", None)
        self.name = str(getattr(owner, "name", "loss"))
        self.watch: Watch | None = getattr(owner, "watch", None)
        # The numbers of autograd's nodes that `compute` makes.
        self.first = self.end = 0
        self._autocast = (device, torch.get_autocast_dtype(device))
        self._autocast_on = torch.is_autocast_enabled(device)

    def follow(self, y: Tensor) -> None:
        """Note the gradient of `y` whenever it has been summed up."""
        if y.grad_fn is None:
            return
        output = y.output_nr

        # On the node rather than the tensor: after all hooks that may still change the gradient.
        def note(gradients: tuple[Tensor | None, ...]) -> None:
            if self.can_judge():
                self.dy = gradients[output]
                CALLING.spans.add((self.first, self.end))

        y.grad_fn.register_prehook(note)

    def can_judge(self) -> bool:
        """Return whether the pass that has just arrived at the output can be checked."""
        self._is_twice_differentiable |= torch.is_grad_enabled()
        return not self._is_twice_differentiable

    def arrived(self, kept: tuple[Any, ...], gradients: Gradients) -> Gradients:
        """Check gradients of the wanted inputs; returns them, perhaps corrected."""
        dy, self.dy = self.dy, None
        CALLING.spans.discard((self.first, self.end))
        if dy is None or all(gradient is None for gradient in gradients):
            return gradients

        def again(inputs: Sequence[Tensor | None]) -> tuple[Tensor, Gradients]:
            return self._differentiate(inputs, dy)

        with torch.no_grad():
            every = self._of_all_inputs(gradients)
            seen = Seen(dy.detach(), kept, every, again, self.replaceable, self.exact)
            watch = self.watch
            checked = self.check(seen) if watch is None else watch.timed(self.check, seen)
        return tuple(checked[index] for index in self.wanted)

    def _differentiate(
        self, inputs: Sequence[Tensor | None], dy: Tensor
    ) -> tuple[Tensor, Gradients]:
        fresh = [None if tensor_in is None else tensor_in.detach() for tensor_in in inputs]
        leaves = [leaf for index in self.wanted if (leaf := fresh[index]) is not None]
        device, dtype = self._autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled=self._autocast_on):
            for leaf in leaves:
                leaf.requires_grad_()
            y = self.compute(*fresh)
        # As in the pass that is checked, which may have left the region.
        gradients = torch.autograd.grad(y, leaves, dy.detach(), allow_unused=True)
        return y.detach(), self._of_all_inputs(gradients)

    def _of_all_inputs(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Gradients of the wanted inputs, and None for the others, in the inputs' order."""
        by_place = dict(zip(self.wanted, gradients, strict=True))
        return tuple(by_place.get(place) for place in range(self.inputs))


class _PartsRecord(Record):
    """The same where gradients come in parts from all nodes that use the inputs."""

    def __init__(
        self,
        compute: Callable[..., Tensor],
        check: Callable[[Seen], Gradients],
        inputs: Sequence[Tensor | None],
        wanted: tuple[int, ...],
        device: str,
    ) -> None:
        super().__init__(compute, check, wanted, len(inputs), device)
        self.replaceable = False
        self._parts: list[list[Tensor]] = []
        self._kept: tuple[Any, ...] = ()
        self._nodes = 0
        self._waiting = 0
        # Nodes by which autograd knows the inputs, and where the graph of `compute` ends.
        edges = [get_gradient_edge(given) for i in wanted if (given := inputs[i]) is not None]
        self._ends: dict[tuple[Node | None, int], int] = {
            (edge.node, edge.output_nr): place for place, edge in enumerate(edges)
        }

    def hook(self, y: Tensor) -> None:
        """Note what each node between the inputs and `y` hands to an input."""
        waiting, known = [y.grad_fn], {y.grad_fn}
        while waiting:
            node = waiting.pop()
            uses = []
            for index, edge in enumerate(node.next_functions if node is not None else ()):
                place = self._ends.get(edge)
                if place is not None:
                    uses.append((index, place))
                elif edge[0] is not None and edge[0] not in known:
                    known.add(edge[0])
                    waiting.append(edge[0])
            if uses and node is not None:
                self._nodes += 1
                node.register_hook(partial(self._note, uses))
        self._ends.clear()

    def begin(self, dy: Tensor | None, kept: tuple[Any, ...]) -> None:
        """A backward pass arrives at the output."""
        if not self.can_judge():
            self.dy = None
            return
        # An optimizer may step with a parameter's whole gradient before the last part is there.
        copies = (None if one is None else one.clone() if one.is_leaf else one for one in kept)
        self.dy, self._kept = dy, tuple(copies)
        CALLING.spans.add((self.first, self.end))
        self._parts = [[] for _ in self.wanted]
        self._waiting = self._nodes

    def _note(
        self,
        uses: list[tuple[int, int]],
        gradients: tuple[Tensor | None, ...],
        _: tuple[Tensor | None, ...],
    ) -> None:
        if self.dy is None:
            return
        for index, place in uses:
            part = gradients[index]
            if part is not None:
                self._parts[place].append(part.detach())
        self._waiting -= 1
        if self._waiting == 0:
            parts, kept = self._parts, self._kept
            self._parts, self._kept = [], ()
            self.exact = all(len(part) <= 2 for part in parts)
            with torch.no_grad():
                self.arrived(kept, _totals(parts))


@computing("check")
def _totals(parts: list[list[Tensor]]) -> Gradients:
    return tuple(torch.stack(part).sum(dim=0) if part else None for part in parts)


class _PartsOutput(torch.autograd.Function):
    """The output of an operation whose inputs have no hook; tensors are kept for its check."""

    @staticmethod
    def forward(ctx: Any, record: _PartsRecord, y: Tensor, *keep: Tensor | None) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(*keep)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        ctx.record.begin(dy, kept)
        return (None, dy, *(None,) * len(kept))


class _InputHook(torch.autograd.Function):
    """The first tensors, unchanged; all others are kept for the backward pass.

    One node for all inputs, so that their gradients continue in the operation's own order.
    """

    @staticmethod
    def forward(ctx: Any, record: Record, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        count = len(record.wanted)
        ctx.record = record
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[count:])
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count] if tensor is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        nothing = (None,) * len(kept)
        return (None, *ctx.record.arrived(kept, gradients), *nothing)


class _Kept(torch.autograd.Function):
    """The output of an operation, unchanged and kept for its check."""

    @staticmethod
    def forward(ctx: Any, kept: KeptOutput, y: Tensor) -> Tensor:
        ctx.kept = kept
        ctx.save_for_backward(y)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ctx.kept.y,) = ctx.saved_tensors
        return None, dy


class KeptOutput:
    """Brings an output that autograd keeps anyway to the backward check of its operation.

    Attributes:
        y: The output, from the beginning of a backward pass until `take`.
    """

    def __init__(self) -> None:
        self.y: Tensor | None = None

    def keep(self, y: Tensor) -> Tensor:
        """Return `y`; call it on what `watched` returned."""
        kept: Tensor = _Kept.apply(self, y)  # type: ignore[no-untyped-call]
        return kept

    def take(self) -> Tensor | None:
        """`y` in the backward pass, once; afterwards None."""
        y, self.y = self.y, None
        return y


def watched(
    compute: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    keep: Sequence[Tensor | None],
    check: Callable[[Seen], Gradients],
    *,
    separate: bool = False,
    covering: Mapping[int, str] | None = None,
) -> Tensor:
    """``compute(*inputs)``, with `check` called in its backward pass.

    Args:
        compute: The operation, a function of `inputs` alone; called again where a check fails.
        inputs: Tensors; gradients of those that require them are checked.
        keep: Tensors that `check` needs, such as inputs.
        check: Takes a `Seen` and returns gradients of all inputs, as they were or corrected.
        separate: Whether `compute` may use an input several times: then gradients are only seen.
        covering: By the places of inputs the checks that watch their gradients, which no check does
            of the others; None where the operation's checks watch all of them.
    """
    wanted = tuple(
        i for i, tensor_in in enumerate(inputs) if tensor_in is not None and tensor_in.requires_grad
    )
    if not wanted or not torch.is_grad_enabled():
        return _seen(compute, *inputs)
    passed = list(inputs)
    first = inputs[wanted[0]]
    assert first is not None
    if separate:
        parts = _PartsRecord(compute, check, inputs, wanted, first.device.type)
        parts.first = _next_node()
        y = _seen(compute, *inputs)
        parts.end = _next_node()
        parts.hook(y)
        output: Tensor = _PartsOutput.apply(parts, y, *keep)  # type: ignore[no-untyped-call]
        return output
    record = Record(compute, check, wanted, len(inputs), first.device.type, covering=covering)
    hooked = _InputHook.apply(  # type: ignore[no-untyped-call]
        record, *(inputs[index] for index in wanted), *keep
    )
    for index, view in zip(wanted, hooked, strict=True):
        passed[index] = view
    record.first = _next_node()
    y = _seen(compute, *passed)
    record.end = _next_node()
    record.follow(y)
    return y


def _seen(compute: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    before, CALLING.watched = CALLING.watched, True
    try:
        return compute(*inputs)
    finally:
        CALLING.watched = before


def record_of(node: Node) -> Record | None:
    """Return the record that a watched operation has left on this node of the graph, if any."""
    owner = getattr(node, "_forward_cls", None)
    return node.record if owner is _InputHook or owner is _PartsOutput else None  # type: ignore[attr-defined]


def _next_node() -> int:
    """The number of the node that autograd makes next in this thread."""
    return int(torch.autograd._get_sequence_nr())


def corrected(
    watch: Watch,
    site: Site,
    tensors: Sequence[Tensor],
    again: Callable[[], Sequence[Tensor | None]],
    check: Callable[[Sequence[Tensor]], ResidualTest],
    *,
    beyond: Callable[[Sequence[Tensor]], bool] | None = None,
    changed: Callable[[], bool] | None = None,
) -> list[Tensor]:
    """Check tensors of one type, and compute all of them again where they do not pass.

    In a backward pass this cures nothing where the forward pass's output, which others have used
    since, was wrong, or where an input has changed since: such a failure is ``detected``.

    Infinities and NaN that come out again with the same bits are the data's own and no fault, as
    in `outlast.guard.watch`.

    Args:
        watch: Of the guard.
        site: The check.
        tensors: What is checked, all of it computed together.
        again: Computes them a second time, with the same bits unless something was wrong.
        check: Judges them, or another such sequence.
        beyond: Whether no rounding explains them; asked where computing again changes nothing.
        changed: Whether the forward pass, computed again from what was kept, gives another output
            than the one that has been used.

    Returns:
        The tensors, or what was put in their place.
    """
    judged = check(tensors)
    if not watch.wants(site, judged):
        return list(tensors)
    if changed is not None and changed():
        watch.note(site, judged, "detected")
        return list(tensors)
    sizes = [tensor.numel() for tensor in tensors]
    stored = _flat(tensors)

    def redo(first: int, last: int) -> Tensor:
        del first, last
        return _flat([tensor for tensor in again() if tensor is not None])

    def split() -> list[Tensor]:
        parts = torch.split(stored[0], sizes)
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def beyond_rounding(left: ResidualTest) -> ResidualTest:
        assert beyond is not None
        return replace(left, exceeded=int(beyond(split())))

    watch.correct(
        site,
        _as_one(judged),
        stored,
        redo,
        lambda: _as_one(check(split())),
        beyond=None if beyond is None else beyond_rounding,
    )
    return split()


def judge_only(
    watch: Watch,
    site: Site,
    tensors: Sequence[Tensor],
    again: Callable[[], Sequence[Tensor | None]],
    check: Callable[[Sequence[Tensor]], ResidualTest],
    *,
    changed: Callable[[], bool],
) -> list[Tensor]:
    """As `corrected` for tensors that have continued already: a failure is ``detected`` at best."""
    judged = check(tensors)
    if watch.wants(site, judged):
        fresh = _flat([tensor for tensor in again() if tensor is not None])
        same = same_bits(fresh, _flat(tensors)) and not changed()
        own = same and not bool(torch.isfinite(fresh).all())
        watch.note(site, judged, "not_finite" if own else "detected")
    return list(tensors)


def corrected_output(
    watch: Watch,
    site: Site,
    y: Tensor,
    again: Callable[[], Tensor],
    check: Callable[[Tensor], ResidualTest],
    *,
    beyond: Callable[[Tensor], bool] | None = None,
) -> None:
    """As `corrected` for an operation's output, in place, before anything has used it."""
    # The memory itself: what autograd has saved of it is to be corrected, too, and a version that
    # moved would make the backward pass refuse it.
    memory = y.data

    def judged(given: Sequence[Tensor]) -> ResidualTest:
        with torch.no_grad(), torch.autocast(y.device.type, enabled=False):
            return check(given[0])

    (right,) = watch.timed(
        corrected,
        watch,
        site,
        [memory],
        lambda: [again()],
        judged,
        beyond=None if beyond is None else lambda given: beyond(given[0]),
    )
    if right is not memory:
        memory.copy_(right)


def repeated(
    watch: Watch,
    site: Site,
    tensors: Sequence[Tensor],
    again: Callable[[], Sequence[Tensor | None]],
    *,
    replaceable: bool = True,
    place: Callable[[], Site] | None = None,
    of_model: bool = True,
) -> list[Tensor]:
    """Compute tensors a second time and compare all bits; where these differ, a third time decides.

    The first two are ``corrected``, or it was the second one that was wrong (``check``). Where all
    three differ, the same device has failed two replays of its own: ``persistent``.

    Args:
        watch: Of the guard.
        site: The check.
        tensors: As they were computed first.
        again: Computes them again, with the same bits unless something was wrong.
        replaceable: Whether the tensors have not been used yet; else wrong ones are ``detected``.
        place: Finds the site that a finding names, if another one than that which counts.
        of_model: See `Watch.wants`.

    Returns:
        The tensors, or what was put in their place.
    """

    def computed() -> list[Tensor]:
        return [tensor for tensor in again() if tensor is not None]

    def agree(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[bool]:
        # What was summed up from parts may have another sign of zero.
        same = same_bits if replaceable else _same_values
        return [same(*pair) for pair in zip(first, second, strict=True)]

    second = computed()
    equal = torch.tensor(agree(tensors, second), device="cpu")
    judged = equality_test(equal, torch.ones_like(equal))
    if not watch.wants(site, judged, of_model=of_model):
        return list(tensors)
    outcome: Outcome = "detected"
    right = list(tensors)
    if watch.policy.correct:
        third = computed()
        if all(agree(tensors, third)):
            outcome = "check"
        elif replaceable:
            confirmed = all(agree(second, third))
            outcome = "corrected" if confirmed else "persistent"
            right = third if confirmed else right
    found_at = site if place is None else place()
    watch.find(found_at, tensors[0].device, int(judged.exceeded), math.inf, outcome)
    return right


def repeated_gradients(
    watch: Watch,
    seen: Seen,
    digest: Tensor | None,
    forward: Site,
    checks: Sequence[tuple[Site, tuple[int, ...]]],
) -> Gradients:
    """As `repeated` for an operation's gradients, and for its output: inputs may have changed.

    Args:
        watch: Of the guard.
        seen: The backward pass; `kept` has the inputs.
        digest: Hash of the output as it was handed on; None where it is not known.
        forward: The check of the output.
        checks: Those of the gradients, and the places of the inputs whose gradients each checks.

    Returns:
        The gradients, or what was put in their place.
    """
    y, second = seen.again(seen.kept)
    if digest is not None and not bool(hash64([y]) == digest):
        # What followed has used another output, or the inputs are others now.
        watch.find(forward, y.device, 1, math.inf, "detected")
        return seen.gradients
    gradients = list(seen.gradients)
    for site, inputs in checks:
        places = [place for place in inputs if gradients[place] is not None]
        if not places:
            continue
        computations = chain([second], iter(lambda: seen.again(seen.kept)[1], None))

        def touched(made: Gradients, places: list[int] = places, site: Site = site) -> list[Tensor]:
            own = [item for place in places if (item := made[place]) is not None]
            return [watch.touched(site.operation, site.module, item) for item in own]

        right = repeated(
            watch,
            site,
            touched(seen.gradients),
            lambda: touched(next(computations)),  # noqa: B023 - called at once
            replaceable=seen.replaceable,
        )
        for place, item in zip(places, right, strict=True):
            gradients[place] = item
    return tuple(gradients)


def repeated_output(watch: Watch, site: Site, y: Tensor, again: Callable[[], Tensor]) -> None:
    """As `repeated` for an operation's output, in place, before anything has used it."""
    memory = y.data

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            return [again()]

    (right,) = watch.timed(repeated, watch, site, [memory], outputs)
    if right is not memory:
        memory.copy_(right)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether both hold the same numbers, bit for bit; NaN has any payload."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.device.type == "cpu" and first.stride() == second.stride():
        one, other = stored(first), stored(second)
        if one.is_contiguous() and bool(hash64([one]) == hash64([other])):
            return True
    return bool(equal_bits(first, second).all())


def _same_values(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first, second) or same_bits(first + 0.0, second + 0.0)


def stored(tensor: Tensor) -> Tensor:
    """`tensor` with its dimensions in the order of memory, so that reading it is fast."""
    strides = tensor.stride()
    return tensor.detach().permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])[None]


def _as_one(judged: ResidualTest) -> ResidualTest:
    return replace(judged, flags=judged.flags.any()[None])
