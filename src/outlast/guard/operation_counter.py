"""Counts of every operation that a surveyed step executes: FLOPs and bytes, checked or not.

A `TorchDispatchMode` sees what torch dispatches, in the forward pass, the backward pass and the
optimizer, from one step of the optimizers to the next. It takes 15 to 30 us an operation, and so is
there in surveyed steps only (see `outlast.guard.survey`). It changes nothing: it lies below all
other modes, so that these may come and go, and hands every operation on.

*FLOPs.* Of products, convolutions, recurrent layers and fused attention as `OperationChecks` counts
them. All others have one per element of their output or of their input, whichever are more;
operations that only move numbers, and those on integers, have none.

*Bytes.* Those of all inputs and outputs; views have none. What was expanded counts as it is stored.

*Checked* is what a check was really made of: at the dispatcher, around the function that called it,
or, of a gradient, by the check that its node in autograd's graph belongs to.

Not counted: the checks themselves; collectives; kernels that a compiler has made; passes that are
no training, or another guard's; threads other than those of the training loop and its backward
pass.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import weakref
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode

from outlast.guard.operations import FUSED, checking
from outlast.guard.policy import StepCoverage
from outlast.guard.watch import CALLING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from torch.autograd.graph import Node

    from outlast.guard.watch import Watch

    CheckOf = Callable[[Node], str | None]

_MOVES = frozenset(
    (
        *("_to_copy", "_reshape_copy", "as_strided", "arange", "cat", "clone", "constant_pad_nd"),
        *("copy", "copy_", "detach", "diagonal_backward", "embedding", "expand_copy", "eye"),
        *("fill", "fill_", "flip", "full", "full_like", "gather", "im2col", "index"),
        *("index_select", "masked_fill", "masked_fill_", "masked_select", "new_full"),
        *("new_ones", "new_zeros", "ones", "ones_like", "repeat", "resize_", "roll"),
        *("scalar_tensor", "select_backward", "select_scatter", "set_", "slice_backward"),
        *("slice_scatter", "stack", "tril", "tril_", "triu", "triu_", "where", "zero", "zero_"),
        *("zeros", "zeros_like", "_foreach_copy_", "_foreach_zero_", "_pin_memory"),
        *("reflection_pad1d", "reflection_pad2d", "replication_pad2d", "pixel_shuffle"),
        *("pixel_unshuffle", "native_channel_shuffle", "scatter", "index_copy", "_local_scalar"),
        *("_local_scalar_dense", "index_put", "index_put_", "split_with_sizes_copy"),
    )
)
"""Operations that move numbers, and compute none."""
_NOTHING = frozenset(
    (
        *("alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty"),
        *("new_empty_strided", "is_pinned", "_has_same_storage_numel", "_unsafe_view", "record"),
        *("is_same_size", "equal_meta", "_version", "profiler", "_nested_view_from_jagged"),
    )
)
"""Operations that touch no numbers."""
_WITHOUT_NUMBERS = frozenset(("FakeTensor", "FunctionalTensor"))
"""Tensors that torch computes shapes with."""
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "fsdp", "symm_mem", "profiler", "prim"))
_PRODUCTS = frozenset(
    (
        *("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addmv", "addmv_", "mv"),
        *("_grouped_mm", "convolution", "convolution_backward"),
    )
)
_OF_TORCH = frozenset(("aten", "prims", "quantized"))
_OWN = "outlast.checked_linear"
"""The linear layers of a compiled graph, and their gradients: products that are checked."""
_SUMS = frozenset(("add", "add_"))
_SUM_OF_GRADIENTS = "sum of gradients"
_ENGINE = "_engine_run_backward"
FRAMEWORKS = ("torch.distributed", "torch.nn.parallel", "torch.utils.checkpoint", "outlast.guard")
"""Whose autograd functions multiply nothing themselves."""
_AWAITED = "(checked with its gradients)"
"""In place of a check: an output of attention at level ``linear``."""
_FALLS = 1e-3
"""Share of the step, in FLOPs or bytes, from which on a loss of checks is worth a warning."""


_COLLECTED_FROM = 8
"""Number of counters from which on it is worth to look for those whose guard is garbage."""
_COUNTING: weakref.WeakSet[OperationCounter] = weakref.WeakSet()


def end_all() -> None:
    """Count nothing more, as in a forked process of a data loader, which has these modes, too."""
    for counter in [*_COUNTING]:
        counter.end()


_IDLE: weakref.WeakSet[OperationCounter] = weakref.WeakSet()
"""Those that count no more, and could not leave."""


def in_compiled_call() -> bool:
    """Return whether a function that `torch.compile` returned is being called.

    At its end it puts back whether torch looks for modes, and so none may come or go within it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def leave_idle() -> None:
    """Let modes of this thread go that could not leave when their counts ended."""
    if _IDLE and not in_compiled_call():
        _IDLE.clear()
        with _without_modes():
            pass


os.register_at_fork(after_in_child=end_all)


@dataclass
class _Row:
    """One kind of operation in one place, with one fate.

    Attributes:
        check: What checks it if that check is made: a module's name; empty for none.
    """

    name: str
    place: str
    check: str
    checked: bool
    flops: float = 0.0
    bytes: float = 0.0
    calls: int = 0


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of this thread and its backward passes; see the module.

    Args:
        watch: What all checks of the guard share.
        model: Whose modules are named.

    Attributes:
        optimizer: The class of the optimizer that steps now; empty outside of its step.
        graphs: Of the backward passes that run: by node the check that its gradient belongs to.
        why_not: Why nothing is known; empty where all is well.
    """

    supports_higher_order_operators = True

    def __init__(self, watch: Watch, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Torch holds the mode, which is to hold no model alive, and so no hook of its guard.
        self._watch = weakref.ref(watch)
        self._names = {
            id(module): name or "the model itself" for name, module in model.named_modules()
        }
        self.optimizer = ""
        self.graphs: list[weakref.WeakMethod[CheckOf]] = []
        self.why_not = ""
        self._rows: dict[tuple[str, str, str, bool], _Row] = {}
        # By the number of autograd's node: where its operation was called.
        self._places: dict[int, str] = {}
        self._is_over = False
        self._matched_before = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work as without a mode."""
        return True

    def begin(self) -> None:
        """See this thread's operations from now on, below all modes that it has."""
        self._matched_before += self._matched()
        if len(_COUNTING) >= _COLLECTED_FROM:
            # Each takes its time of every operation, and most belong to guards that were left.
            gc.collect()
        self._enter()
        _COUNTING.add(self)

    def _enter(self) -> None:
        with _without_modes():
            torch._C._push_on_torch_dispatch_stack(self)

    def end(self) -> None:
        """See no more; from another thread, or within an operation, it only counts no more."""
        _COUNTING.discard(self)
        self._is_over = True
        if in_compiled_call():
            _IDLE.add(self)
            return
        with _without_modes(self):
            pass

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not see this thread's operations meanwhile: they are the guard's own."""
        with _without_modes(self) as modes:
            seen = self in modes
        try:
            yield
        finally:
            if seen and (not self._is_over or in_compiled_call()):
                self._enter()

    def _matched(self) -> float:
        """FLOPs of attention's outputs that were checked with their gradients since `clear`."""
        watch = self._watch()
        operations = None if watch is None else watch.operations
        return 0.0 if operations is None else operations.matched - self._matched_before

    def clear(self) -> None:
        """Begin anew: the passes begin."""
        self._matched_before += self._matched()
        self._rows.clear()
        self._places.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Hand an operation on, and count it."""
        kwargs = kwargs or {}
        if any(kind is not Tensor and kind is not nn.Parameter for kind in types):
            if any(kind.__name__ in _WITHOUT_NUMBERS for kind in types):
                return func(*args, **kwargs)
            # What a subclass is made of is dispatched again.
            return NotImplemented
        watch = self._watch()
        operations = None if watch is None else watch.operations
        if (
            self._is_over
            or watch is None
            or operations is None
            or checking() is not operations
            or not isinstance(func, torch._ops.OpOverload)
            or func.namespace in _COLLECTIVES
        ):
            return func(*args, **kwargs)
        made, (checked_before, other_before) = watch.made, operations.total
        out = func(*args, **kwargs)
        try:
            products = operations.total[0] - checked_before
            others = operations.total[1] - other_before
            size = _bytes(func, args, kwargs, out)
            if str(func).startswith(_OWN):
                self._count(func, products, size, checked=True)
            elif func.namespace not in _OF_TORCH:
                # Of what it is made of, products alone are known.
                self._count(func, products, 0.0, checked=True)
                others += _flops(func, args, kwargs, out)
                self._count(func, others, size, checked=CALLING.watched)
            elif products or others:
                is_awaited = others > 0.0 and _base(func) == FUSED and operations.awaited
                self._count(
                    func, products + others, size, checked=not others, is_awaited=is_awaited
                )
            elif _base(func) not in _PRODUCTS or not _is_empty(args):
                checked = watch.made > made or CALLING.watched or CALLING.purpose == "checked"
                self._count(func, _flops(func, args, kwargs, out), size, checked=checked)
        except Exception as error:
            # Of what counts, which must not end a training.
            self.why_not = f"{type(error).__name__}: {error}"
            self._is_over = True
        return out

    def _count(
        self, func: Any, flops: float, size: float, *, checked: bool, is_awaited: bool = False
    ) -> None:
        if not (flops or size):
            return
        name, node = _name(func), torch._C._current_autograd_node()
        place, custom = self._caller(node)
        if node is None or place is not None:
            number = int(torch.autograd._get_sequence_nr()) - 1
            self._places.setdefault(number, place or "")
        check = ""
        if node is not None and place is None:
            place = self._places.get(node._sequence_nr(), "")
            custom = custom or _custom_of(node)
            if name in _SUMS and not re.match(r"(Add|Sub|Addmm|Baddbmm)Backward", node.name()):
                name, checked = _SUM_OF_GRADIENTS, False
            elif not checked:
                graphs = (alive for graph in self.graphs if (alive := graph()) is not None)
                check = next((own for of in graphs if (own := of(node)) is not None), "")
        if self.optimizer:
            name, place, custom = f"{self.optimizer}'s update", "", ""
        elif func.namespace not in _OF_TORCH and not str(func).startswith(_OWN):
            name = f"custom operation {func.name().replace('::', '_')}_{func._overloadname}"
        elif custom:
            name = custom
        if is_awaited:
            check = _AWAITED
        key = (name, place or "", check, checked)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(*key)
        row.flops += flops
        row.bytes += size
        row.calls += 1

    def _caller(self, node: Any) -> tuple[str | None, str]:
        """The module, and the custom autograd function, that has called; None in a backward pass.

        Of an operation that is computed again for the backward pass: of the forward pass.
        """
        custom = ""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            if code.co_name == _ENGINE and node is not None:
                return None, ""
            if code.co_argcount and code.co_name in {"_call_impl", "forward"}:
                own = frame.f_locals.get(code.co_varnames[0])
                if code.co_name == "forward" and not custom:
                    custom = _custom_of(own)
                name = self._names.get(id(own))
                if name is not None:
                    return name, custom
            frame = frame.f_back
        return (None if node is not None else ""), custom

    def result(self, step: int, made: Callable[[str], bool]) -> StepCoverage:
        """Return the counts.

        Args:
            step: Of the optimizers, from 1.
            made: Whether a check of this name was made in the step.
        """
        totals: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        places: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 4)
        awaited = sum(row.flops for row in self._rows.values() if row.check == _AWAITED)
        matched = min(self._matched() / awaited, 1.0) if awaited else 0.0
        for row in self._rows.values():
            if row.check == _AWAITED:
                part = matched
            else:
                part = float(row.checked or bool(row.check and made(row.check)))
            place = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", row.place)
            for sums in (totals[row.name], places[row.name, place]):
                for number, own in enumerate((row.flops, row.bytes)):
                    sums[number] += part * own
                    sums[2 + number] += (1.0 - part) * own
        flops = sum(own[0] + own[2] for own in totals.values())
        size = sum(own[1] + own[3] for own in totals.values())

        def share(number: int, total: float) -> dict[str, float]:
            found = {name: own[number] / total for name, own in totals.items() if own[number]}
            return dict(sorted(found.items(), key=lambda item: -item[1]))

        return StepCoverage(
            step,
            flops,
            size,
            share(2, flops) if flops else {},
            share(3, size) if size else {},
            {key: (own[0], own[1], own[2], own[3]) for key, own in places.items()},
        )


def fallen(before: StepCoverage, now: StepCoverage) -> dict[str, str]:
    """Operations without a check that had one in the step before, or compute anew.

    Returns:
        By operation and place, which share of the step it is; empty where no more than `_FALLS` of
        the step is concerned, or the step is checked no less than before.
    """
    if before.covered - now.covered < _FALLS and (
        before.covered_bytes - now.covered_bytes < _FALLS
    ):
        return {}
    found: dict[str, tuple[float, float]] = {}
    for (name, place), (flops, size, without, without_bytes) in now.places.items():
        earlier = before.places.get((name, place), (0.0, 0.0, 0.0, 0.0))
        grown = _part(without, flops) > _part(earlier[2], earlier[0]) + 1e-9
        # What only moves numbers had to be checked to lose its check.
        if earlier[1]:
            grown |= _part(without_bytes, size) > _part(earlier[3], earlier[1]) + 1e-9
        # Gradients are added to those of before, where these were not set to None.
        grown &= name != _SUM_OF_GRADIENTS
        if grown:
            label = f"{name} in {place}" if place else name
            found[label] = without / max(now.flops, 1.0), without_bytes / max(now.bytes, 1.0)
    if not any(max(shares) >= _FALLS for shares in found.values()):
        return {}
    ordered = sorted(found.items(), key=lambda item: -max(item[1]))
    return {
        label: f"{100 * flops:.2g} % of the FLOPs, {100 * size:.2g} % of the bytes"
        for label, (flops, size) in ordered
    }


def _part(own: float, rest: float) -> float:
    return own / (own + rest) if own + rest else 0.0


@contextmanager
def _without_modes(without: TorchDispatchMode | None = None) -> Iterator[list[Any]]:
    """Take the thread's modes away, and put them back at the end but for `without`.

    Those that count no more stay away: one whose guard was collected within an operation could not
    leave then.
    """
    modes: list[Any] = []
    for number in reversed(range(torch._C._len_torch_dispatch_stack())):
        if getattr(torch._C._get_dispatch_stack_at(number), "_mode_key", None) is not None:
            # Of torch itself: below all of these.
            break
        modes.append(torch._C._pop_torch_dispatch_stack(None))
    try:
        yield modes
    finally:
        for mode in reversed(modes):
            is_over = getattr(mode, "_is_over", False) and mode not in _IDLE
            if mode is not without and not is_over:
                torch._C._push_on_torch_dispatch_stack(mode)


@cache
def _name(func: Any) -> str:
    """Torch's name of an operation; the same for what is done in place, and for gradients."""
    name = _base(func).strip("_").removesuffix("_backward").removesuffix("_forward")
    if name.startswith("scaled_dot_product"):
        return "attention"
    return "relu" if name == "threshold" else name


@cache
def _base(func: Any) -> str:
    return str(func.name()).partition("::")[2].partition(".")[0]


def _custom_of(node: Any) -> str:
    """The name of a function of `torch.autograd.Function` that is nobody's but the user's."""
    if not isinstance(node, FunctionCtx):
        return ""
    owner = getattr(node, "_forward_cls", None)
    if owner is None or owner.__module__.startswith(FRAMEWORKS):
        return ""
    return f"custom operation {owner.__name__.removeprefix('GeneratedBackwardFor_')}"


def _tensors(given: Any) -> list[Tensor]:
    """All tensors among arguments or results; those of lists one by one."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, (tuple, list)):
        return [tensor for item in given for tensor in _tensors(item)]
    return []


def _is_empty(args: tuple[Any, ...]) -> bool:
    """Return whether there is nothing to multiply, as for an expert without tokens."""
    return any(not tensor.numel() for tensor in _tensors(args))


def _largest(given: Sequence[Any]) -> int:
    """Numbers in the largest argument, but for integers; in all of its tensors, if it is a list."""
    return max((sum(map(_size, _tensors(item))) for item in given), default=0)


def _size(tensor: Tensor) -> int:
    return tensor.numel() if tensor.is_floating_point() or tensor.is_complex() else 0


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """FLOPs of an operation that `OperationChecks` does not count."""
    base = _base(func)
    if base in _MOVES or base in _NOTHING or getattr(func, "is_view", False):
        return 0.0
    if base in {"_scaled_mm", "_int_mm"}:
        return float(2 * args[0].numel() * args[1].shape[-1])
    if base in {"dot", "vdot"}:
        return float(2 * args[0].numel())
    # Lists count as one, results one by one.
    results = out if isinstance(out, (tuple, list)) else [out]
    return float(max(_largest((*args, *kwargs.values())), _largest(results)))


def _bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    if _base(func) in _NOTHING or getattr(func, "is_view", False):
        return 0.0
    total = 0
    for tensor in _tensors((*args, *kwargs.values(), out)):
        size = tensor.numel() * tensor.element_size()
        if tensor.layout == torch.strided and tensor.device.type != "meta":
            size = min(size, tensor.untyped_storage().nbytes())
        total += size
    return float(total)
