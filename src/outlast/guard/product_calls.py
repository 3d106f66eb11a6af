"""Calls of torch's kernels of matrix products: what they multiply, and what their results must be.

`outlast.guard.operations` makes one of each call that it checks.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from outlast.guard.product import check_multiplied
from outlast.guard.residual import ResidualTest, name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Kernel = Callable[..., Any]

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of operations that are checked."""


def why_not(*tensors: Tensor) -> str:
    """Why these cannot be checked; empty where they can."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype or tensor.dtype not in TYPES:
            return f"of {name_of(tensor.dtype)}"
        if tensor.layout != torch.strided:
            return f"of {str(tensor.layout).removeprefix('torch.')} tensors"
    return ""


_OF_MASKS = 1e4
"""A number that closes a place for a softmax is as large at least."""


class ProductCall:
    """One call of a matrix product's kernel: alpha a b + beta d.

    Attributes:
        name: Of the kernel.
        terms: Of each sum.
        columns: Of the result.
        flops: Of the product.
    """

    def __init__(
        self, name: str, kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.name, self._kernel, self._args, self._options = name, kernel, args, options
        base = name.partition(".")[0].rstrip("_")
        self._in_place = name.endswith("_")
        self._alpha: float = options.get("alpha", 1)
        self._beta: float = options.get("beta", 1)
        self._added: Tensor | None = None
        if base in {"mm", "bmm"}:
            self._a, self._b = args[:2]
        else:
            added, self._a, self._b = args[:3]
            self._added = added if self._beta else None
        self.columns = 1 if base == "addmv" else self._b.shape[-1]
        self.terms = self._a.shape[-1]
        self.flops = 2.0 * self._a.numel() * self.columns

    def why_not(self) -> str:
        """Why it cannot be checked; empty where it can."""
        added = self._added
        return why_not(self._a, self._b, *(() if added is None else (added,)))

    def keep(self) -> None:
        """Keep what the kernel may write over."""
        out = self._args[0] if self._in_place else self._options.get("out")
        added = self._added
        if added is not None and out is not None and out.data_ptr() == added.data_ptr():
            self._added = added.clone()

    def result(self) -> Tensor:
        """Compute it."""
        out: Tensor = self._kernel(*self._args, **self._options)
        return out

    def again(self) -> Tensor:
        """Compute it again, into other memory."""
        args, options = self._args, self._options
        if self._in_place:
            first = args[0] if self._added is None else self._added
            args = (first.clone(), *args[1:])
        elif "out" in options:
            options = options | {"out": torch.empty_like(options["out"])}
            if self._added is not None:
                args = (self._added, *args[1:])
        out: Tensor = self._kernel(*args, **options)
        return out

    def judge(self, out: Tensor, signs: Tensor) -> ResidualTest:
        """Check `out` with signs (columns,); one row of the check is a row of `out`."""
        a, b, c = self._batches(out)
        added = self._added
        given = None if added is None else (added.expand(out.shape).reshape(c.shape), self._beta)
        return check_multiplied(a, b, c, given, self._alpha, signs)

    def adds_mask(self, *, failed: bool) -> bool:
        """Return whether what is added is so large in places that sums say nothing of the product.

        Args:
            failed: Whether rows have failed their check; only then a vector is looked at.
        """
        added = self._added
        if added is None or not added.numel() or (added.dim() < 2 and not failed):
            return False
        least, most = torch.aminmax(added)
        return not max(-float(least), float(most)) < _OF_MASKS

    def of_finite_sums(self, out: Tensor) -> Tensor:
        """Flags of the rows of `out` that have nothing infinite added to them."""
        assert self._added is not None
        return torch.isfinite(self._added.expand(out.shape)).reshape(-1, self.columns).all(dim=1)

    def exact(self, judged: ResidualTest) -> tuple[Tensor, Tensor]:
        """The flagged rows in float64, and the sums of their terms' magnitudes."""
        a, b, _ = self._batches()
        numbers = judged.flags.nonzero()[:, 0].to(a.device)
        expected = torch.empty((len(numbers), self.columns), dtype=torch.float64, device=a.device)
        sizes = torch.empty_like(expected)
        for batch in sorted(set((numbers // a.shape[1]).tolist())):
            own = numbers // a.shape[1] == batch
            left, right = a[batch, numbers[own] % a.shape[1]].double(), b[batch].double()
            expected[own] = self._alpha * (left @ right)
            sizes[own] = abs(self._alpha) * (left.abs() @ right.abs())
        if self._added is not None:
            shape = (*self._a.shape[:-1], *self._b.shape[self._a.dim() - 1 :])
            added = self._added.expand(shape).reshape(-1, self.columns)[numbers].double()
            expected += self._beta * added
            sizes += (self._beta * added).abs()
        return expected, sizes

    def _batches(self, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self._a, self._b
        c = a if out is None else out
        if a.dim() == 3:
            return a, b, c
        if b.dim() == 1:
            return a[None], b[None, :, None], c[None] if out is None else c[None, :, None]
        return a[None], b[None], c[None]


class GroupedProductCall:
    """One call of ``aten::_grouped_mm``: a product for each group of tokens.

    a (tokens, k) by b (groups, k, n) is (tokens, n); a (m, tokens) by b (tokens, n) is (groups, m,
    n); a (groups, m, k) by b (k, tokens) is (m, tokens), checked by columns.

    Attributes:
        name: Of the kernel.
        terms: Of the longest sum.
        columns: Of the widest product, as it is checked.
        flops: Of all products.
    """

    name = "_grouped_mm"

    def __init__(self, kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._kernel, self._args, self._options = kernel, args, options
        a, b = args[:2]
        offsets = args[2] if len(args) > 2 else options.get("offs")
        self._turned = a.dim() == 3 and b.dim() == 2
        if offsets is None:
            self._parts = [*zip(a, b, strict=True)]
        else:
            ends = offsets.tolist()
            spans = [slice(first, last) for first, last in itertools.pairwise([0, *ends])]
            if a.dim() == b.dim() == 2:
                self._parts = [(a[:, span], b[span]) for span in spans]
            elif self._turned:
                self._parts = [
                    (b[:, span].t(), own.t()) for span, own in zip(spans, a, strict=True)
                ]
            else:
                self._parts = [(a[span], own) for span, own in zip(spans, b, strict=True)]
        self.terms = max((left.shape[1] for left, _ in self._parts), default=0)
        self._lengths = [left.shape[0] for left, _ in self._parts]
        self.columns = max((right.shape[1] for _, right in self._parts), default=0)
        self.flops = sum(2.0 * left.numel() * right.shape[1] for left, right in self._parts)

    def why_not(self) -> str:
        """Why it cannot be checked; empty where it can."""
        return why_not(*self._args[:2])

    def result(self) -> Tensor:
        """Compute it."""
        out: Tensor = self._kernel(*self._args, **self._options)
        return out

    def rows(self, out: Tensor) -> Tensor:
        """The rows of the check: a view of `out`, or a copy."""
        rows = out.t() if self._turned else out.reshape(-1, out.shape[-1])
        # Behind the last group there may be rows that mean nothing.
        return rows[: sum(self._lengths)]

    def written(self, out: Tensor, rows: Tensor) -> Tensor:
        """`out` with these rows."""
        if rows.data_ptr() != out.data_ptr():
            self.rows(out).copy_(rows)
        return out

    def judge(self, out: Tensor, signs: Tensor) -> ResidualTest:
        """Check every row of every product."""
        tests = []
        products = torch.split(self.rows(out), self._lengths)
        for (left, right), own in zip(self._parts, products, strict=True):
            if own.numel() and left.numel():
                given = (left[None], right[None], own[None])
                tests.append(check_multiplied(*given, None, 1.0, signs[: right.shape[1]]))
            else:
                # Of no tokens: zeros.
                flags = own.ne(0).any(dim=1)
                tests.append(ResidualTest(flags, int(flags.sum()), 0.0, 0.0, 0.0))
        return ResidualTest(
            torch.cat([test.flags for test in tests]),
            sum(int(test.exceeded) for test in tests),
            max(float(test.worst) for test in tests),
            sum(float(test.total) for test in tests),
            max(float(test.widest) for test in tests),
        )

    def exact(self, judged: ResidualTest) -> tuple[Tensor, Tensor]:
        """The flagged rows in float64, and the sums of their terms' magnitudes."""
        found = []
        flags = torch.split(judged.flags, self._lengths)
        for (left, right), own in zip(self._parts, flags, strict=True):
            rows, wide = left[own].double(), right.double()
            found.append((rows @ wide, rows.abs() @ wide.abs()))
        expected, sizes = (torch.cat(part) for part in zip(*found, strict=True))
        return expected, sizes
