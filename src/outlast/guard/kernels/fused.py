"""Linear layers whose forward product sums its own output: cheaper checks, but not cuBLAS's bits.

The sums are of what the units have computed. What happens to the output in memory afterwards is not
covered, unlike by `TritonProduct`, which reads it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.guard.kernels.bounds import bound_of_own
from outlast.guard.kernels.matmul import INTERPRETED, matmul_checked
from outlast.guard.kernels.product import TYPES, compare, operand_sums
from outlast.guard.linear import LinearChecks

if TYPE_CHECKING:
    from torch import Tensor, nn

    from outlast.guard.judged import Judged
    from outlast.guard.product import Encoding, Projections
    from outlast.guard.watch import Watch


class FusedChecks(LinearChecks):
    """`LinearChecks` with the forward product of `matmul_checked`, on CUDA devices.

    Inputs elsewhere, or of a type without a kernel, are checked as by `LinearChecks`.

    Args:
        watch: What all checks of the guard share.
        module: The layer.
        name: Its name in the model.
        unrounded: Check the fp32 accumulator, which shows far smaller errors, but not its rounding.
    """

    def __init__(
        self, watch: Watch, module: nn.Linear, name: str, *, unrounded: bool = False
    ) -> None:
        super().__init__(watch, module, name)
        self.unrounded = unrounded

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedChecks:
        """See `LinearChecks`."""
        copied = memo.get(id(self.module))
        if copied is None:
            return self
        return FusedChecks(self.watch, copied, self.name, unrounded=self.unrounded)

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Projections, Encoding]:
        """See `LinearChecks`."""
        if x.dtype not in TYPES or not (x.device.type == "cuda" or INTERPRETED):
            return super().product(x, weight, bias)
        watch, encoding = self.watch, self.encoding(weight, bias)
        watch.touch("weight", self.name, weight)
        seen = self.seen(encoding)
        flat_x = x.reshape(-1, x.shape[-1])
        product = FusedProduct(weight, bias, encoding, unrounded=self.unrounded)
        y = product(watch.touched("linear.operand", self.name, flat_x))
        watch.touch("linear.output", self.name, y)
        projections, judged = product.judge(flat_x, seen)
        if watch.wants(self.forward_site, judged):

            def redo(first: int, last: int) -> Tensor:
                # In whole: the same configuration, and sums of all rows for the check.
                return product(flat_x)[first:last]

            def check() -> Judged:
                return product.judge(flat_x, encoding)[1]

            outcome = watch.correct(self.forward_site, judged, y, redo, check)
            if outcome == "persistent":
                self.compare_weight(weight, encoding, judged)
        watch.touch("linear.saved", self.name, x)
        return y.view(*x.shape[:-1], len(weight)), projections, encoding


class FusedProduct:
    """``x W^T + b`` by `matmul_checked`, and the judgement of the newest such product.

    Args:
        weight: W (outputs, inputs).
        bias: b (outputs,) or None.
        encoding: Of W and b.
        unrounded: See `FusedChecks`.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, encoding: Encoding, *, unrounded: bool = False
    ) -> None:
        self._weight, self._bias, self._signs = weight, bias, encoding.output_signs
        self._unrounded = unrounded
        self._bound = bound_of_own(weight, weight.shape[1], weight.shape[0], unrounded=unrounded)
        self._sums: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The product (rows, outputs) with x (rows, inputs)."""
        y, *sums = matmul_checked(
            x, self._weight, self._bias, self._signs, unrounded=self._unrounded
        )
        self._sums = sums[0], sums[1]
        return y

    def judge(self, x: Tensor, encoding: Encoding) -> tuple[Projections, Judged]:
        """Compare the newest product with the sums of x (rows, inputs)."""
        assert self._sums is not None, "nothing has been multiplied yet"
        dots, powers = self._sums
        expected, projections = operand_sums(x, encoding)
        judged = compare(
            dots,
            powers,
            expected[None],
            projections.squares[None],
            self._bound,
            offset=encoding.offset,
            largest=encoding.columns_largest,
        )
        return projections, judged
