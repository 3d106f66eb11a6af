"""Checks of matrix products, convolutions and recurrent layers at torch's dispatcher.

Whatever a model is made of, its FLOPs end in a handful of operations of ATen. Their kernels are
replaced while a guard is installed, so that each call is checked and corrected before its result is
used: forward and backward, in any module or function, in C++, inside of checkpoints, of DTensor,
and as the external kernels of a compiled graph. All other operations cost nothing (a replaced
kernel takes 2 us more). What `LinearChecks` checks itself is only counted here.

*Matrix products* C = alpha A B + beta D, for random signs v over the columns::

    C v = alpha A (B v) + beta D v                 one sum per row of C

*Convolutions* have those of `outlast.guard.convolution`.

*Attention* that is fused has those of `outlast.guard.fused_attention`: at level ``full`` by rows,
at level ``linear`` by sums that need no P, and by rows where such a sum fails.

*Recurrent layers* of oneDNN are one operation without an identity: it is computed twice, and so are
normalisation, softmax and losses at level ``full``, on the CPU.

Thresholds are those of `outlast.guard.threshold`; what exceeds one is computed again by the same
kernel with the same shapes, and compared with the product in float64 if its bits stay the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import traceback
import warnings
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.library import Library, get_kernel

from outlast.guard.autograd_hooks import repeated
from outlast.guard.convolution import Convolution
from outlast.guard.findings import ANYWHERE
from outlast.guard.forward_patch import is_suspended
from outlast.guard.fused_attention import FusedAttention
from outlast.guard.linear import unexplained
from outlast.guard.product import is_doubtful, rounding_of
from outlast.guard.product_calls import GroupedProductCall, ProductCall, why_not
from outlast.guard.residual import ResidualTest, compared_bits, residual_test
from outlast.guard.threshold import DEVIATIONS, product_bound
from outlast.guard.watch import CALLING, SharedByCopies, computing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outlast.guard.findings import Outcome
    from outlast.guard.watch import Watch

    Kernel = Callable[..., Any]
    Judge = Callable[[Tensor], ResidualTest]
    Exact = Callable[[ResidualTest], tuple[Tensor, Tensor]]

_PRODUCTS = (
    *("mm", "mm.out", "addmm", "addmm.out", "addmm_", "addmv", "addmv.out", "addmv_"),
    *("bmm", "bmm.out", "baddbmm", "baddbmm.out", "baddbmm_"),
)
"""Kernels of matrix products; those of `mv`, `linear`, `matmul` and `einsum` call them."""
_NORMS = ("native_batch_norm", "native_group_norm")
FUSED = "_scaled_dot_product_flash_attention_for_cpu"
_TWICE = {
    "norm.repeated": ("native_layer_norm", "native_layer_norm_backward"),
    "softmax.forward": ("_softmax", "_log_softmax"),
    "softmax.dlogits": ("_softmax_backward_data", "_log_softmax_backward_data"),
    "loss.forward": (
        *("nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss"),
        "binary_cross_entropy",
    ),
    "loss.dlogits": (
        *("nll_loss_backward", "nll_loss2d_backward", "mse_loss_backward"),
        *("smooth_l1_loss_backward", "huber_loss_backward", "binary_cross_entropy_backward"),
    ),
}
"""Cheap kernels that are computed twice where no check stands around the function that calls them.

Such a check sees more: inputs that have changed between the passes."""
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

NODES = {
    **dict.fromkeys(("Mm", "Bmm", "Mv", "Addmm", "Addmv", "Baddbmm"), "product"),
    **dict.fromkeys(("GroupedMm", "Linear"), "product"),
    "Convolution": "convolution",
    "MkldnnRnnLayer": "recurrent",
    **dict.fromkeys(("NativeBatchNorm", "NativeGroupNorm"), "norm.repeated"),
    "ScaledDotProductFlashAttentionForCpu": "attention.dv",
    "NativeLayerNorm": "norm.repeated",
    **dict.fromkeys(("Softmax", "LogSoftmax"), "softmax.dlogits"),
    **dict.fromkeys(("NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss"), "loss.dlogits"),
    **dict.fromkeys(("HuberLoss", "BinaryCrossEntropy"), "loss.dlogits"),
}
"""Kinds of autograd's nodes whose operations are checked here, and by which check."""
_LINEAR = frozenset(("product", "convolution", "recurrent", "attention.dv"))
"""Those of level ``linear``."""
_UNTIL_BACKWARD = "whose gradients were not computed"
"""Why level ``linear`` has not checked a forward pass's output."""
_NODES_ON_CUDA = frozenset(
    ("Mm", "Bmm", "Mv", "Addmm", "Addmv", "Baddbmm", "Convolution"),
)
"""What is computed twice needs kernels that give the same bits every time."""
SUMMING = ("Add", "Sub", "Baddbmm")
"""Beginnings of the names of nodes that sum the gradient of what they have broadcast."""

_installed: list[weakref.ref[OperationChecks]] = []
_library: Library | None = None


class OperationChecks(SharedByCopies):
    """Checks of one guarded model's operations; see the module.

    While several guards are installed, the last of them whose model trains checks an operation;
    see `prefer`.

    Args:
        watch: What all checks of the guard share.
        model: The guarded model.

    Attributes:
        checked: FLOPs of operations that were checked, here or by their callers, since `begin`.
        unchecked: FLOPs of those that were not, by operation and reason.
        calls: Of the operations that were not checked, by the same names.
        total: FLOPs of what was checked at once, and of what was not, since ever.
        awaited: Whether the last attention's output is to be checked with its gradients.
        matched: FLOPs of such outputs that then were, since ever.
        nodes: Kinds of autograd's nodes whose operations are checked, by type of device.
    """

    def __init__(self, watch: Watch, model: nn.Module) -> None:
        self.watch = watch
        self._model = weakref.ref(model)
        self._begun = True
        # Whether the last fused attention's caller checks it, and so its gradients.
        self._attention_checked = False
        self.checked = 0.0
        self.unchecked: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.total = [0.0, 0.0]
        self.awaited, self.matched = False, 0.0
        full = watch.policy.reaches("full")
        self.nodes = {
            "cpu": frozenset(kind for kind, check in NODES.items() if full or check in _LINEAR),
            "cuda": _NODES_ON_CUDA,
        }
        self._product_site = watch.ledger.site(ANYWHERE, "product")

    def install(self) -> None:
        """Replace the kernels of the process, unless another guard has."""
        global _library  # noqa: PLW0603
        _installed.append(weakref.ref(self))
        if _library is None:
            _library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            for key in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
                _replace_kernels(_library, key)

    def prefer(self) -> None:
        """Of several guards' checks, be those that are made."""
        others = [item for item in _installed if item() is not self]
        if len(others) < len(_installed):
            _installed[:] = [*others, weakref.ref(self)]

    def remove(self) -> None:
        """Put torch's kernels back once no guard needs others."""
        _installed[:] = [item for item in _installed if item() is not self]
        release_kernels()

    def begin(self) -> None:
        """Begin to count anew with the next operation."""
        self._begun = False

    @property
    def unchecked_share(self) -> float | None:
        """Share of the FLOPs without a check; None before the first."""
        unchecked = sum(self.unchecked.values())
        total = self.checked + unchecked
        return unchecked / total if total else None

    def trains(self) -> bool:
        """Return whether what this thread computes may be part of the model's training."""
        model = self._model()
        if model is None or is_suspended():
            return False
        return (
            model.training
            or torch.is_grad_enabled()
            or torch._C._current_autograd_node() is not None
        )

    def product(
        self, name: str, kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Tensor:
        """Compute a matrix product, checked."""
        call = ProductCall(name, kernel, args, options)
        if self._count(name, call.flops, call.why_not()) and CALLING.purpose != "checked":
            return self._checked_product(call)
        if not call.flops:
            call.keep()
        out = call.result()
        if not call.flops and not call.why_not() and CALLING.purpose != "checked":
            self._repeat_empty("product", name, [out], lambda: [call.again()])
        return out

    @computing("check")
    def _repeat_empty(
        self,
        check: str,
        name: str,
        made: Sequence[Tensor | None],
        compute: Callable[[], Sequence[Tensor | None]],
    ) -> None:
        """Check sums of no terms, as the gradients of a weight that no sample has used."""
        if any(item is not None and item.numel() and item.device.type == "cpu" for item in made):
            self._repeat(check, name, made, compute)

    @computing("check")
    def _checked_product(self, call: ProductCall) -> Tensor:
        watch = self.watch
        call.keep()
        out = call.result()
        self._touch("product.output", call.name, out)
        signs = watch.signs.take("output", call.columns, out.device)
        judged = self._judged(out, lambda out: call.judge(out, signs), call.again)
        if out.device.type == "cpu" and call.adds_mask(failed=bool(judged.exceeded)):
            # Attention's scores with a mask: of what stands beside -inf or -1e9 a sum sees nothing.
            self._repeat("product", call.name, [out], lambda: [call.again()])
            flags = call.judge(out, signs).flags & call.of_finite_sums(out)
            left = int(flags.sum())
            worst = float(judged.worst) if left else 0.0
            judged = dataclasses.replace(judged, flags=flags, exceeded=left, worst=worst)
        if watch.wants(self._product_site, judged, of_model=False):
            self._correct(
                (call.name, "product"),
                (judged, out),
                lambda out: call.judge(out, signs),
                call.again,
                call.exact,
                call.terms,
            )
        return out

    @computing("check")
    def grouped_product(self, kernel: Kernel, args: tuple[Any, ...], options: Any) -> Tensor:
        """Compute ``aten::_grouped_mm`` with these arguments, checked."""
        call = GroupedProductCall(kernel, args, options)
        out = call.result()
        if not self._count(call.name, call.flops, call.why_not()):
            return out
        watch = self.watch
        self._touch("product.output", call.name, out)
        signs = watch.signs.take("output", call.columns, out.device)

        def judge(out: Tensor) -> ResidualTest:
            return call.judge(out, signs)

        judged = watch.timed(judge, out)
        if watch.repeats_product(out):
            again = call.rows(call.result())
            judged = compared_bits(judged, call.rows(out), again)
        if watch.wants(self._product_site, judged, of_model=False):
            rows = call.rows(out)
            watch.correct(
                watch.ledger.site(self._place(call.name), "product"),
                judged,
                rows,
                lambda first, last: call.rows(call.result())[first:last],
                lambda: judge(call.written(out, rows)),
                beyond=lambda left: unexplained(left, rows, call.exact(left), call.terms),
            )
            call.written(out, rows)
        return out

    @computing("check")
    def normalised(self, kernel: Kernel, args: tuple[Any, ...], updated: slice) -> Sequence[Any]:
        """Compute a normalisation, or its gradients, twice; a third time decides.

        Args:
            kernel: Of the operation.
            args: Its arguments.
            updated: Those among them that it writes to: running statistics.
        """
        before = [None if item is None else item.clone() for item in args[updated]]

        def compute() -> list[Tensor | None]:
            fresh = [None if item is None else item.clone() for item in before]
            given = [*args]
            given[updated] = fresh
            return [*kernel(*given), *fresh]

        results: Sequence[Any] = kernel(*args)
        self._repeat("norm.repeated", "normalisation", [*results, *args[updated]], compute)
        return results

    @computing("check")
    def convolution(self, kernel: Kernel, args: tuple[Any, ...]) -> Tensor:
        """Compute ``aten::convolution`` with these arguments, checked."""
        x, weight, bias = args[:3]
        shape = Convolution(weight, *args[3:])
        out: Tensor = kernel(*args)
        watch = self.watch
        flops = shape.flops(x if shape.transposed else out)
        if not self._count("convolution", flops, why_not(x, weight)):
            return out
        self._touch("convolution.output", "convolution", out)

        def judged_by(shape: Convolution, out: Tensor) -> ResidualTest:
            project = shape.to_big if shape.transposed else shape.to_small
            return project(x, weight, bias, out, watch)

        judge = _looking_twice(judged_by, shape)

        def exact(left: ResidualTest) -> tuple[Tensor, Tensor]:
            wide = [None if item is None else item.double() for item in (x, weight, bias)]
            sizes = [None if item is None else item.abs() for item in wide]
            return _flagged(left, *(kernel(*three, *args[3:]) for three in (wide, sizes)))

        judged = self._judged(out, judge, lambda: kernel(*args))
        if watch.wants(watch.ledger.site(ANYWHERE, "convolution"), judged, of_model=False):
            site = ("convolution", "convolution")
            terms = weight[:, 0].numel() if shape.transposed else weight[0].numel()
            self._correct(site, (judged, out), judge, lambda: kernel(*args), exact, terms)
        return out

    @computing("check")
    def convolution_backward(self, kernel: Kernel, args: tuple[Any, ...]) -> Sequence[Any]:
        """Compute ``aten::convolution_backward`` with these arguments, checked."""
        dy, x, weight, sizes, *rest, mask = args
        shape = Convolution(weight, *rest)
        made: Sequence[Any] = kernel(*args)
        small, big = (x, dy) if shape.transposed else (dy, x)
        flops, reason = shape.flops(small) * sum(mask[:2]), why_not(dy, x, weight)
        if not self._count("convolution_backward", flops, reason):
            if not small.numel() and not reason:

                def wanted(results: Sequence[Any]) -> list[Tensor | None]:
                    return [item if mask[place] else None for place, item in enumerate(results)]

                self._repeat_empty(
                    "convolution.dw", "convolution", wanted(made), lambda: wanted(kernel(*args))
                )
            return made
        watch = self.watch
        # The bias's gradient sums the output's, which is the small side of a plain convolution.
        db = made[2] if mask[2] and not shape.transposed else None

        def judged_dx(shape: Convolution, dx: Tensor) -> ResidualTest:
            project = shape.to_small if shape.transposed else shape.to_big
            return project(dy, weight, None, dx, watch)

        def judge_dw(dw: Tensor) -> ResidualTest:
            return shape.to_weight(small, big, dw, db, watch)

        def check(place: int, operation: str, judge: Judge, terms: int) -> None:
            with_db = place == 1 and db is not None
            self._touch(operation, "convolution", made[place])

            def repeated() -> Sequence[Any]:
                chosen = [place == 0, place == 1, with_db]
                found: Sequence[Any] = kernel(dy, x, weight, sizes, *rest, chosen)
                return found

            def again() -> Tensor:
                found = repeated()
                if with_db:
                    made[2].copy_(found[2])
                result: Tensor = found[place]
                return result

            def exact(left: ResidualTest) -> tuple[Tensor, Tensor]:
                chosen = [place == 0, place == 1, False]
                wide = [item.double() for item in (dy, x, weight)]
                found = (
                    kernel(*three, sizes, *rest, chosen)[place]
                    for three in (wide, [item.abs() for item in wide])
                )
                return _flagged(left, *found)

            judged = self._judged(made[place], judge, lambda: repeated()[place])
            if watch.wants(watch.ledger.site(ANYWHERE, operation), judged, of_model=False):
                given = (judged, made[place])
                self._correct(("convolution", operation), given, judge, again, exact, terms)

        if mask[0]:
            terms = weight[0].numel() if shape.transposed else weight[:, 0].numel()
            check(0, "convolution.dx", _looking_twice(judged_dx, shape), terms)
        if mask[1]:
            check(1, "convolution.dw", judge_dw, small.numel() // small.shape[1])
        if mask[2]:
            self._check_bias(
                made[2],
                big if shape.transposed else None,
                lambda: kernel(dy, x, weight, sizes, *rest, [False, mask[1], True])[2],
            )
        return made

    def _check_bias(self, db: Tensor, dy: Tensor | None, again: Callable[[], Tensor]) -> None:
        """Compare the gradient of a convolution's bias with its second computation.

        Args:
            db: (channels,).
            dy: (batch, channels, positions...) of a transposed convolution, which has no identity
                that holds `db`: then its sum in fp64 says whether that is needed.
            again: Computes it again.
        """
        if db.device.type != "cpu":
            # Whose host does not wait for it; see `_NODES_ON_CUDA`.
            return
        if not self.watch.repeats_product(db) and (dy is None or _is_sum(db, dy)):
            return
        self._repeat("bias.gradient", "convolution", [db], lambda: [again()])

    @computing("check")
    def recurrent(self, kernel: Kernel, args: tuple[Any, ...], flops: float) -> Sequence[Any]:
        """Compute a recurrent layer, or its gradients, twice; a third time decides."""

        def compute() -> Sequence[Any]:
            # The forward pass's memory for the backward pass is in part not written to.
            with _filled_memory():
                made: Sequence[Any] = kernel(*args)
            return made

        if not self._count("recurrent", flops, why_not(*args[:2])):
            return kernel(*args)  # type: ignore[no-any-return]
        made = compute()
        self._repeat("recurrent", "recurrent", made, compute, site="recurrent.output")
        return made

    @computing("check")
    def twice(
        self, check: str, name: str, kernel: Kernel, args: tuple[Any, ...], options: Any
    ) -> Any:
        """Compute a cheap operation twice; a third time decides."""
        made = kernel(*args, **options)
        several = isinstance(made, (tuple, list))

        def compute() -> Sequence[Any]:
            again = kernel(*args, **options)
            return again if several else [again]

        self._repeat(check, name, made if several else [made], compute)
        return made

    def _repeat(
        self,
        check: str,
        name: str,
        made: Sequence[Tensor | None],
        compute: Callable[[], Sequence[Tensor | None]],
        *,
        site: str = "",
    ) -> None:
        """Compare results with those of a second computation, and put them right in place."""
        watch, ledger = self.watch, self.watch.ledger
        results = [item for item in made if item is not None]
        for item in results:
            if item.is_floating_point():
                self._touch(site or check, name, item)
        right = watch.timed(
            repeated,
            watch,
            ledger.site(ANYWHERE, check),
            results,
            compute,
            place=lambda: ledger.site(self._place(name), check),
            of_model=False,
        )
        for wrong, item in zip(results, right, strict=True):
            if item is not wrong:
                wrong.copy_(item)

    @computing("check")
    def attention_output(
        self, kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Sequence[Tensor]:
        """Compute the CPU's fused attention, checked: O and its log-sum-exp."""
        call = FusedAttention.of(args, options)
        compute = partial(kernel, *args, **options)
        made: Sequence[Tensor] = compute()
        out, logsum = made
        watch = self.watch
        why_not = call.why_not()
        self.awaited = not why_not and not watch.policy.reaches("full")
        if self.awaited:
            why_not = _UNTIL_BACKWARD
        if watch.repeats_product(out):
            site = "attention.output"
            self._repeat("attention.forward", "attention", made, compute, site=site)
        else:
            self._touch("attention.output", "attention", out)
            if self.awaited and out.numel() and _leaves_range(out, call.value):
                # A number so large may leave no gradient by which it could be found later.
                self._repeat("attention.forward", "attention", made, compute)
        if not self._count("attention", call.flops, why_not):
            return made
        signs = watch.signs.take("output", out.shape[-1], out.device)
        judged = watch.timed(call.judge_output, out, logsum, signs)
        if watch.wants(watch.ledger.site(ANYWHERE, "attention.forward"), judged, of_model=False):
            # A wrong log-sum-exp makes P wrong, and so the check of O.
            both = torch.cat([out, logsum[..., None].to(out.dtype)], dim=-1)
            sums = logsum.clone()

            def again() -> Tensor:
                fresh, fresh_sums = compute()
                sums.copy_(fresh_sums)
                return torch.cat([fresh, sums[..., None].to(out.dtype)], dim=-1)

            def judge(numbers: Tensor) -> ResidualTest:
                return call.judge_output(numbers[..., :-1].contiguous(), sums, signs)

            def beyond(left: ResidualTest) -> ResidualTest:
                return call.beyond_rounding(left, o=both[..., :-1], l=sums[..., None])

            place = "attention", "attention.forward"
            self._settle(place, (judged, both), judge, again, beyond)
            out.copy_(both[..., :-1])
            logsum.copy_(sums)
        return made

    @computing("check")
    def attention_gradients(
        self, kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Sequence[Tensor]:
        """Compute the gradients of the CPU's fused attention, checked: dQ, dK and dV."""
        dy, *inputs, out, logsum = args[:6]
        call = FusedAttention.of((*inputs, *args[6:]), options)
        made: Sequence[Tensor] = kernel(*args, **options)
        if not self._count("attention", 2.5 * call.flops, call.why_not()):
            return made
        watch = self.watch
        sites = ("attention.dq", "attention.dk", "attention.dv")
        if watch.repeats_product(out):
            second = kernel(*args, **options)
            for place, site in enumerate(sites):
                computed = itertools.chain([second], iter(lambda: kernel(*args, **options), None))
                fresh = map(operator.itemgetter(slice(place, place + 1)), computed)
                self._repeat(site, "attention", made[place : place + 1], fresh.__next__)
        else:
            for site, gradient in zip(sites, made, strict=True):
                self._touch(site, "attention", gradient)
        signs = watch.signs.take("output", out.shape[-1], out.device)

        def judge() -> list[ResidualTest]:
            return call.judge_gradients(out, logsum, dy, made, signs)

        if not watch.policy.reaches("full"):
            self._count_output(call.flops)
            sums = watch.timed(call.judge_sums, out, logsum, dy, made)
            suspected = bool(sums.exceeded)
            # What is suspected is not yet found.
            worst = DEVIATIONS if suspected else float(sums.worst)
            passed = dataclasses.replace(sums, exceeded=0, worst=worst)
            watch.wants(watch.ledger.site(ANYWHERE, "attention.sums"), passed, of_model=False)
            if not suspected:
                return made
        of_output, *judged = watch.timed(judge)
        output = watch.ledger.site(ANYWHERE, "attention.output")
        flagged = watch.wants(output, of_output, of_model=False)
        if any(test.exceeded for test in judged) and not torch.isfinite(dy).all():
            # The data's own, as an overflow under a gradient scaler.
            rows = sum(int(test.exceeded) for test in judged)
            overflowing = watch.ledger.site(self._place("attention"), "attention.dv")
            watch.find(overflowing, out.device, rows, math.inf, "not_finite")
            return made
        if flagged and self._has_changed(call, of_output, out, logsum):
            return made

        def settle(place: int, check: str, test: ResidualTest) -> None:
            gradient, name = made[place], check.removeprefix("attention.")
            self._settle(
                ("attention", check),
                (test, gradient),
                lambda _: judge()[1 + place],
                lambda: kernel(*args, **options)[place],
                lambda left: call.beyond_rounding(left, dy, out, **{name: gradient}),
            )

        for place, (check, test) in enumerate(zip(sites, judged, strict=True)):
            if watch.wants(watch.ledger.site(ANYWHERE, check), test, of_model=False):
                settle(place, check, test)
        return made

    def _has_changed(
        self, call: FusedAttention, judged: ResidualTest, out: Tensor, logsum: Tensor
    ) -> bool:
        """Note an O that fails its check going back, and return whether the step must be repeated.

        It must where what followed has used another O, or other inputs.
        """
        left = call.beyond_rounding(judged, o=out, l=logsum[..., None])
        outcome: Outcome = "detected" if left.exceeded else "rounding"
        if not torch.isfinite(out).all():
            outcome = "not_finite"
        site = self.watch.ledger.site(self._place("attention"), "attention.output")
        self.watch.note(site, judged, outcome)
        return outcome == "detected"

    def _count_output(self, flops: float) -> None:
        """Count a forward pass's attention as checked, now that its gradients are."""
        name = f"attention {_UNTIL_BACKWARD}"
        if self.unchecked.get(name, 0.0) >= flops:
            self.checked += flops
            self.matched += flops
            self.unchecked[name] -= flops
            self.calls[name] -= 1
            if not self.calls[name]:
                del self.calls[name], self.unchecked[name]

    def attention(self, flops: float, *, forward: bool) -> None:
        """Count a fused attention, which `AttentionChecks` may check."""
        if forward:
            self._attention_checked = CALLING.purpose == "attention"
        self._count("attention", flops, "" if self._attention_checked else "without a check")

    def leave_out(self, name: str, flops: float) -> None:
        """Count an operation that has no check."""
        self._count(name, flops, "without a check")

    def _count(self, name: str, flops: float, why_not: str) -> bool:
        """Count an operation, and return whether it is to be checked."""
        if not self._begun:
            self._begun, self.checked = True, 0.0
            self.unchecked.clear()
            self.calls.clear()
        self.total[bool(why_not)] += flops
        if why_not:
            name = name.partition(".")[0]
            name = name if why_not == "without a check" else f"{name} {why_not}"
            self.unchecked[name] += flops
            self.calls[name] += 1
            return False
        self.checked += flops
        return flops > 0

    def _judged(self, out: Tensor, judge: Judge, again: Callable[[], Tensor]) -> ResidualTest:
        """Judge a result, by its bits as well where `Watch.repeats_product` says so."""
        judged = self.watch.timed(judge, out)
        if self.watch.repeats_product(out):
            return compared_bits(judged, out, again())
        return judged

    def _correct(  # noqa: PLR0917
        self,
        place: tuple[str, str],
        found: tuple[ResidualTest, Tensor],
        judge: Judge,
        again: Callable[[], Tensor],
        exact: Exact,
        terms: int,
    ) -> None:
        """Put a result right in place.

        Args:
            place: The operation's name, and the check's.
            found: The judgement, and what was judged.
            judge: Judges it again.
            again: Computes it again.
            exact: As of `unexplained`, for the flagged rows.
            terms: As of `unexplained`.
        """
        stored = found[1]

        def beyond(left: ResidualTest) -> ResidualTest:
            # What was computed again is there by now.
            return unexplained(left, stored.reshape(len(left.flags), -1), exact(left), terms)

        self._settle(place, found, judge, again, beyond)

    def _settle(
        self,
        place: tuple[str, str],
        found: tuple[ResidualTest, Tensor],
        judge: Judge,
        again: Callable[[], Tensor],
        beyond: Callable[[ResidualTest], ResidualTest],
    ) -> None:
        """As `_correct`, where `beyond` tells which rows no rounding explains."""
        judged, stored = found
        rows = stored.reshape(len(judged.flags), -1)

        def written() -> Tensor:
            if rows.data_ptr() != stored.data_ptr():
                stored.copy_(rows.view(stored.shape))
            return stored

        self.watch.correct(
            self.watch.ledger.site(self._place(place[0]), place[1]),
            judged,
            rows,
            lambda first, last: again().reshape(rows.shape)[first:last],
            lambda: judge(written()),
            beyond=beyond,
        )
        written()

    def _touch(self, site: str, name: str, numbers: Tensor) -> None:
        """Give a fault_hook the chance to change results, under the name that findings have."""
        if self.watch.fault_hook is not None:
            self.watch.touch(site, self._place(name), numbers)

    def _place(self, name: str) -> str:
        """The module that calls an operation, or the operation whose gradient it computes."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return f"{name} of {node.name()}"
        model = self._model()
        names: dict[int, str] = {}
        if model is not None:
            names = {id(own): path for path, own in model.named_modules()}
        for frame, _ in traceback.walk_stack(None):
            if path := names.get(id(frame.f_locals.get("self"))):
                return path
        return name


def checking() -> OperationChecks | None:
    """The guard that checks what this thread computes now, if any."""
    if CALLING.purpose != "check":
        for reference in reversed(_installed):
            checks = reference()
            if checks is not None and checks.trains():
                return checks
    return None


def release_kernels() -> None:
    """Put torch's kernels back if no guard is left, whose model may be gone without `remove`."""
    global _library  # noqa: PLW0603
    _installed[:] = [item for item in _installed if item() is not None]
    if not _installed and _library is not None:
        _library._destroy()  # type: ignore[no-untyped-call]
        _library = None


def _replace_kernels(library: Library, key: str) -> None:
    def replace(name: str, stand_in: Callable[[OperationChecks, Kernel, Any, Any], Any]) -> None:
        try:
            raw = get_kernel(f"aten::{name}", key).call_boxed
        except RuntimeError:
            # Of another kind of device.
            return

        def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
            checks = checking()
            if checks is not None:
                return stand_in(checks, partial(raw, keyset), args, options)
            return raw(keyset, *args, **options)

        library.impl(  # type: ignore[no-untyped-call]
            name, kernel, key, with_keyset=True, allow_override=True
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in _PRODUCTS:
            replace(
                name,
                lambda checks, raw, args, options, name=name: checks.product(  # type: ignore[misc]
                    name, raw, args, options
                ),
            )
        replace("convolution", lambda checks, raw, args, _: checks.convolution(raw, args))
        replace(
            "convolution_backward",
            lambda checks, raw, args, _: checks.convolution_backward(raw, args),
        )
        replace("_trilinear", _trilinear)
        if key == "CPU":
            replace("_grouped_mm", OperationChecks.grouped_product)
            for name in _NORMS:
                updated = slice(3, 5) if name == "native_batch_norm" else slice(0)
                replace(name, _normalisation(updated))
                replace(f"{name}_backward", _normalisation(slice(0)))
            for check, names in _TWICE.items():
                for name in names:
                    replace(name, _twice(check, name))
            replace("sum.dim_IntList", _bias_gradient)
            replace("mkldnn_rnn_layer", _recurrent(1.0))
            replace("mkldnn_rnn_layer_backward", _recurrent(2.0))
        else:
            # Where its groups end is known on the device only.
            replace("_grouped_mm", _grouped_elsewhere)
        replace(FUSED, OperationChecks.attention_output)
        replace(f"{FUSED}_backward", OperationChecks.attention_gradients)
        for name in _ATTENTION:
            replace(name, _attention(0, 1.0))
            replace(f"{name}_backward", _attention(1, 2.5))


def _grouped_elsewhere(checks: OperationChecks, raw: Kernel, args: Any, options: Any) -> Any:
    a, b = args[:2]
    checks.leave_out("_grouped_mm", 2.0 * a[..., 0].numel() * a.shape[-1] * b.shape[-1])
    return raw(*args, **options)


def _trilinear(checks: OperationChecks, raw: Kernel, args: Any, options: Any) -> Any:
    # Of nn.Bilinear and its gradients: the operands' shapes broadcast, but for added dimensions.
    out: Tensor = raw(*args, **options)
    one, two, three = (item.numel() for item in args[:3])
    checks.leave_out("trilinear", 2.0 * max(one, two, three) * max(out.shape[0], 1))
    return out


def _bias_gradient(checks: OperationChecks, raw: Kernel, args: Any, options: Any) -> Any:
    node = torch._C._current_autograd_node()
    if CALLING.purpose == "checked" or node is None or not node.name().startswith(SUMMING):
        return raw(*args, **options)
    return checks.twice("bias.gradient", "sum", raw, args, options)


def _twice(check: str, name: str) -> Callable[[OperationChecks, Kernel, Any, Any], Any]:
    def compute(checks: OperationChecks, raw: Kernel, args: Any, options: Any) -> Any:
        if not checks.watch.policy.reaches("full") or _is_watched():
            return raw(*args, **options)
        return checks.twice(check, name, raw, args, options)

    return compute


def _is_watched() -> bool:
    """Return whether a check stands around the function that computes this, or its gradient."""
    if CALLING.purpose or CALLING.watched:
        return True
    node = torch._C._current_autograd_node() if CALLING.spans else None
    if node is None:
        return False
    number = node._sequence_nr()
    return any(first <= number < end for first, end in CALLING.spans)


def _normalisation(updated: slice) -> Callable[[OperationChecks, Kernel, Any, Any], Any]:
    def compute(checks: OperationChecks, raw: Kernel, args: Any, options: Any) -> Any:
        if not checks.watch.policy.reaches("full"):
            return raw(*args, **options)
        return checks.normalised(raw, args, updated)

    return compute


def _recurrent(passes: float) -> Callable[[OperationChecks, Kernel, Any, Any], Any]:
    def compute(checks: OperationChecks, raw: Kernel, args: Any, options: Any) -> Any:
        x, *weights = args[:3]
        steps = x.numel() / max(x.shape[-1], 1)
        flops = 2.0 * passes * steps * sum(weight.numel() for weight in weights)
        return checks.recurrent(raw, args, flops)

    return compute


def _attention(first: int, passes: float) -> Callable[[OperationChecks, Kernel, Any, Any], Any]:
    def compute(checks: OperationChecks, raw: Kernel, args: Any, options: Any) -> Any:
        q, k, v = args[first : first + 3]
        flops = 2.0 * passes * q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        checks.attention(flops, forward=not first)
        return raw(*args, **options)

    return compute


def _flagged(judged: ResidualTest, *found: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of two results that a check has flagged."""
    expected, sizes = (item.reshape(len(judged.flags), -1)[judged.flags] for item in found)
    return expected, sizes


def _leaves_range(out: Tensor, value: Tensor) -> bool:
    """Return whether an output of attention, a mean of values, is beyond all of them."""
    smallest, largest = (float(end) for end in torch.aminmax(value))
    least, most = (float(end) for end in torch.aminmax(out))
    room = 0.02 * max(-smallest, largest)
    # Queries that see no key have 0.
    return not (min(smallest, 0.0) - room <= least and most <= max(largest, 0.0) + room)


def _is_sum(db: Tensor, dy: Tensor) -> bool:
    """Judge db (channels,) to be the sum of dy (batch, channels, positions...) but for rounding.

    A wrong no costs a second computation only, so the bound need not hold for like terms.
    """
    wide = dy.double().transpose(0, 1).flatten(1)
    total, squares = wide.sum(1), wide.square().sum(1)
    bound = product_bound(rounding_of(db, torch.float64), wide.shape[1], 1)
    variance = bound.variance(total.square(), squares)
    return not int(residual_test(db.double() - total, variance, squares).exceeded)


def _looking_twice(
    judged_by: Callable[[Convolution, Tensor], ResidualTest], shape: Convolution
) -> Judge:
    """A check that sums in fp64 where it fails by so little that its own sums may be the reason."""

    def judge(out: Tensor) -> ResidualTest:
        judged = judged_by(shape, out)
        return judged_by(shape.in_double(), out) if is_doubtful(judged) else judged

    return judge


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Have kernels begin with memory of the same contents, whatever they leave of it."""
    before = torch._C._get_deterministic_algorithms()
    warns = torch._C._get_deterministic_algorithms_warn_only()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(fills)
        torch._C._set_deterministic_algorithms(before, warn_only=warns)
