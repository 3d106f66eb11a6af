"""State that all checks of a guard share: signs, counts, fault hook, correction of findings.

Checks weight what they sum with random signs, drawn anew for every step.

Wrong values are corrected by computing them again. Nothing is reconstructed from checksums: rows
are computed a second time by the same operation, so a corrected run has the bits of a run without
the fault. Only a tile around the flagged rows is computed, if its other rows, the witnesses, come
out with the bits that they have already: then the operation is known to round the same way in the
smaller shape. Otherwise the whole product is.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from outlast.guard.findings import HARMFUL, LASTING, Finding, Ledger, Outcome, Site
from outlast.guard.residual import equal_bits, is_half
from outlast.guard.threshold import DEVIATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from outlast.guard.findings import FaultHook
    from outlast.guard.operation_counter import OperationCounter
    from outlast.guard.operations import OperationChecks
    from outlast.guard.policy import Policy
    from outlast.guard.residual import ResidualTest


_SPARE = 1 << 17
"""How many windows of the drawn signs a step may choose from."""


class RandomSigns:
    """+1 and -1 with probability 1/2 each: a window of one drawn sequence, at random per step.

    A fixed pattern of errors whose signed sum is zero escapes one draw with probability 1/2 at
    most (Freivalds 1977), and n independent draws with 2^-n; summing without signs would never see
    +d, -d. Windows of a step's two sides and of different steps are as good as independent: they
    overlap only at offsets, where one sign meets another.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._longest = 0
        self._offsets = {"input": 0, "output": 0}

    def renew(self) -> None:
        """Choose the windows of the next step."""
        chosen = torch.randint(0, _SPARE, (2,), generator=self._generator, device="cpu").tolist()
        self._offsets = dict(zip(("input", "output"), chosen, strict=True))

    def take(self, side: str, length: int, device: torch.device) -> torch.Tensor:
        """The step's float32 signs (length,) of one side of a product, ``input`` or ``output``.

        At least 31 more finite numbers lie behind them in memory.
        """
        if length > self._longest:
            self._longest = 2 * length
            self._tables.clear()
        table = self._tables.get(device)
        if table is None:
            total = _SPARE + self._longest + 32
            generator = torch.Generator().manual_seed(self._generator.initial_seed())
            bits = torch.randint(0, 2, (total,), generator=generator, device="cpu")
            table = self._tables[device] = (2 * bits - 1).to(device, torch.float32)
        offset = self._offsets[side]
        return table[offset : offset + length]


_ALIGNMENT = 128
"""Tiles begin and end at multiples of this: many witnesses, and shapes that kernels like."""


def correct(
    stored: Tensor,
    flags: Tensor,
    redo: Callable[[int, int], Tensor],
    check: Callable[[], ResidualTest],
    beyond: Callable[[ResidualTest], ResidualTest] | None = None,
) -> Outcome:
    """Compute flagged rows of `stored` again, in place where that helps.

    Args:
        stored: (rows, columns) the numbers that did not pass.
        flags: (rows,) bool, which rows did not; at least one.
        redo: ``redo(first, last)`` computes rows [first, last) again by the same operation.
        check: Checks `stored` as it is now.
        beyond: Of the rows of a judgement, those that no rounding explains, as
            `outlast.guard.linear.beyond_rounding`; asked where computing again changes nothing.
            Without it nothing tells them from rounding: they are ``detected``.

    Returns:
        ``corrected``, ``check``, ``rounding``, ``not_finite``, ``detected`` or ``persistent``; see
        `Outcome`.
    """
    changed = _replace(stored, flags, redo)
    judged = check()
    if judged.exceeded and changed:
        # A second fault may have hit the second computation; a third decides.
        _replace_all(stored, redo)
        judged = check()
    if not judged.exceeded:
        return "corrected" if changed else "check"
    rows = judged.flags.to(stored.device).nonzero().flatten()
    finite = torch.isfinite(stored[rows]).all(dim=1)
    if beyond is None:
        return "detected" if bool(finite.any()) else "not_finite"
    if not bool(beyond(judged).exceeded):
        return "rounding" if bool(finite.all()) else "not_finite"
    if not changed and _replace_all(stored, redo):
        # The fault has come in two computations alike, but not in a third.
        judged = check()
        if not judged.exceeded or not bool(beyond(judged).exceeded):
            return "corrected"
    return "persistent"


def _replace(stored: Tensor, flags: Tensor, redo: Callable[[int, int], Tensor]) -> bool:
    """Put the flagged rows' second computation in place; returns whether that changed any bit."""
    first, last = _tile(flags)
    if last - first < len(stored):
        again, own = redo(first, last), flags[first:last]
        same = equal_bits(again, stored[first:last]).all(dim=1)
        if bool(same[~own].all()):
            stored[first:last][own] = again[own]
            return not bool(same.all())
    return _replace_all(stored, redo)


def _replace_all(stored: Tensor, redo: Callable[[int, int], Tensor]) -> bool:
    again = redo(0, len(stored))
    if bool(equal_bits(again, stored).all()):
        return False
    stored.copy_(again)
    return True


def _tile(flags: Tensor) -> tuple[int, int]:
    """The aligned range around the flagged rows that has at least as many rows without a flag."""
    rows = flags.nonzero()
    first = int(rows[0]) // _ALIGNMENT * _ALIGNMENT
    last = -(-(int(rows[-1]) + 1) // _ALIGNMENT) * _ALIGNMENT
    last = min(last, len(flags))
    if 2 * len(rows) > last - first:
        return 0, len(flags)
    return first, last


_LATE_DEVIATIONS = 7.5
"""Where nothing is computed again at once, so that a false alarm costs all ranks a step."""

REPEATED_BELOW = 1 << 16
"""Numbers of a 16-bit result that level ``full`` computes twice, at most.

A row's sum holds the rounding of all its numbers, so bf16 hides an error of 0.0088 sqrt(columns)
root mean squares: 0.0088 / sqrt(rows) of the whole result, which is much where rows are few. Sums
over parts of a row would hide less, but to find 2e-4 of so small a result the parts must be of less
than 34 numbers, and the sums in fp32 then cost more than the product itself.
"""

_NUMERIC = frozenset({"linear", "norm", "attention", "loss", "embedding", "product", "convolution"})
_NOTHING = nullcontext()
P = ParamSpec("P")
T = TypeVar("T")


class _Calling(threading.local):
    """The purpose of what this thread computes.

    Attributes:
        purpose: Empty for the model's own operations; ``check`` for a check's sums; ``checked`` for
            a product whose caller checks it, ``attention`` for an attention.
        watched: Whether it is computed within a function whose result is checked from outside.
        spans: Numbers of autograd's nodes whose gradients are checked from outside, and that are
            being computed.
    """

    purpose = ""
    watched = False

    def __init__(self) -> None:
        self.spans: set[tuple[int, int]] = set()


CALLING = _Calling()


def computing(purpose: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function whose operations `outlast.guard.operations` is to leave alone."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            before, CALLING.purpose = CALLING.purpose, purpose
            try:
                return function(*args, **options)
            finally:
                CALLING.purpose = before

        return call

    return decorate


class SharedByCopies:
    """Part of a guard that a model refers to, which its copies share.

    A copied model, such as an average of weights, is watched together with its original. A pickled
    one is one without a guard: None.
    """

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


class Watch(SharedByCopies):
    """The state of a guard in the middle of a step.

    Args:
        policy: What to check and what to do with findings.
        on_finding: Called with every finding.

    Attributes:
        step: Optimizer steps done.
        uncorrected: Findings of this step that left wrong values in it, and were in no verdict
            that was clean.
        unjudged: Whether there were checks, or collectives to check, since the last clean verdict.
        made: Counts all checks, also those whose result is not known yet.
        seconds: Time that checks took so far; on devices that run behind the host, only of the
            host.
        generation: Counts the times that weights were written to; sums of weights fit one.
        period: Counts the steps of all optimizers, also of those that step apart.
        driven: Whether an optimizer's steps are seen; else weights may change after any backward.
        fault_hook: See `outlast.guard.findings`.
        operations: The checks at torch's dispatcher; None below level ``linear``.
        counter: Counts the operations of a surveyed step; None in other steps.
        repeats: Whether operations are checked by computing them twice; see `repeats_on`.
        intact_steps: Of LASTING checks, the steps of the newest state that comes from before what
            they would find now; of those that are not named, one step less than are done.
        intact: The same for all that they have found since the last clean verdict or restart; None:
            nothing.
    """

    def __init__(self, policy: Policy, on_finding: Callable[[Finding], None] | None) -> None:
        self.policy = policy
        self.ledger = Ledger()
        self.signs = RandomSigns(policy.seed)
        self.step = 0
        self.uncorrected = 0
        self.unjudged = False
        self._lasting = 0
        self._not_finite: list[Site] = []
        self.made = 0
        self.seconds = 0.0
        self.generation = 0
        self.period = 0
        self.driven = False
        self.fault_hook: FaultHook | None = None
        self.operations: OperationChecks | None = None
        self.counter: OperationCounter | None = None
        self.repeats = False
        self.intact_steps: dict[str, int] = {}
        self.intact: int | None = None
        self._on_finding = on_finding
        self._waiting: list[tuple[Site, torch.device, int, tuple[Tensor, ...], bool]] = []
        self.signs.renew()

    def begin(self) -> None:
        """Forget what an attempt at this step has found in its passes; they begin anew."""
        self.uncorrected = self._lasting
        self._waiting.clear()

    def approve(self) -> None:
        """A verdict was clean: what follows it is for another one."""
        self.uncorrected = self._lasting = 0
        self.unjudged, self.intact = False, None

    def advance(self) -> None:
        """A step is done: the next one draws other signs.

        What has been found since it was judged belongs to the next one; `begin` forgets it.
        """
        self._lasting = 0
        self.step += 1
        self.redraw()

    def restart(self, step: int) -> None:
        """Weights and optimizer state are others now; `step` steps are done."""
        self.step = step
        self._lasting = 0
        self.intact, self.intact_steps = None, {}
        self.begin()
        self.redraw()

    def redraw(self) -> None:
        """Draw other signs; sums of weights with the old ones no longer serve."""
        self.generation += 1
        self.signs.renew()

    def repeats_on(self, device: torch.device) -> bool:
        """Return whether operations on `device` are computed twice: an identity would see less.

        On the CPU, whose kernels give the same bits every time, and where nothing waits for it.
        """
        transformed = torch._C._are_functorch_transforms_active()
        return self.repeats and device.type == "cpu" and not transformed

    def repeats_product(self, result: Tensor) -> bool:
        """Return whether a product with this result is repeated, too; see `REPEATED_BELOW`."""
        return (
            is_half(result.dtype)
            and result.numel() <= REPEATED_BELOW
            and self.policy.reaches("full")
            and self.repeats_on(result.device)
        )

    def timed(self, check: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """``check(*args, **options)``, its time counted in `seconds`."""
        began = perf_counter()
        before, CALLING.purpose = CALLING.purpose, "check"
        try:
            with self.uncounted():
                return check(*args, **options)
        finally:
            CALLING.purpose = before
            self.seconds += perf_counter() - began

    def uncounted(self) -> AbstractContextManager[None]:
        """Count no operations meanwhile: they are the guard's own."""
        return _NOTHING if self.counter is None else self.counter.paused()

    def touch(self, site: str, module: str, numbers: Tensor) -> None:
        """Give a fault_hook the chance to change `numbers`."""
        if self.fault_hook is not None:
            self.fault_hook(site, module, numbers)

    def touched(self, site: str, module: str, numbers: Tensor) -> Tensor:
        """`numbers`, or a copy that a fault_hook may have changed."""
        if self.fault_hook is None:
            return numbers
        copy = numbers.clone()
        self.fault_hook(site, module, copy)
        return copy

    def wants(self, site: Site, judged: ResidualTest, *, of_model: bool = True) -> bool:
        """Count a check, and return whether it failed, as far as the host knows by now.

        On devices that run behind the host the answer is no, and `settle` learns the truth.

        Args:
            site: Of the check.
            judged: What it has found.
            of_model: Whether the numbers are surely the model's, so that a verdict is to come even
                if nothing is wrong.
        """
        self.unjudged |= of_model
        self.made += 1
        rows, device = len(judged.flags), judged.flags.device
        numbers = (judged.exceeded, judged.worst, judged.total, judged.widest)
        if device.type != "cpu" and isinstance(judged.exceeded, torch.Tensor):
            four = tuple(map(torch.as_tensor, numbers))
            self._waiting.append((site, device, rows, four, judged.bitwise))
            return False
        # The CPU is never behind: its tensors are numbers already.
        known = [float(number) for number in numbers]
        self._count(site, rows, known)
        return known[0] > 0

    def settle(self) -> None:
        """Wait for the device once and count all checks that `wants` has not known yet."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for device in dict.fromkeys(check[1] for check in waiting):
            own = [check for check in waiting if check[1] == device]
            numbers = torch.stack(
                [torch.stack([number.double() for number in check[3]]) for check in own]
            )
            for check, found in zip(own, numbers.tolist(), strict=True):
                site, _, rows, _, bitwise = check
                exceeded, worst, total, widest = found
                outcome: Outcome = "detected"
                if site.operation.split(".")[0] in _NUMERIC and not bitwise:
                    # The threshold is wider here, and so is what may hide below it.
                    widest *= _LATE_DEVIATIONS / DEVIATIONS
                    exceeded = 0 if worst <= _LATE_DEVIATIONS else exceeded
                    # May be the data's own, such as an overflow under a gradient scaler.
                    outcome = outcome if math.isfinite(worst) else "not_finite"
                self._count(site, rows, (exceeded, worst, total, widest))
                if exceeded:
                    self.find(site, device, int(exceeded), worst, outcome)

    def correct(
        self,
        site: Site,
        judged: ResidualTest,
        stored: Tensor,
        redo: Callable[[int, int], Tensor],
        check: Callable[[], ResidualTest],
        *,
        beyond: Callable[[ResidualTest], ResidualTest] | None = None,
    ) -> Outcome:
        """Put a failed check's numbers right if the policy says so; see the function `correct`."""
        outcome: Outcome = "detected"
        if self.policy.correct:
            flags = judged.flags.to(stored.device)
            # Selective checkpointing must not keep what is computed here.
            with _disable_current_modes():
                outcome = correct(stored, flags, redo, check, beyond)
        self.find(site, stored.device, int(judged.exceeded), float(judged.worst), outcome)
        return outcome

    def find(
        self, site: Site, device: torch.device, rows: int, magnitude: float, outcome: Outcome
    ) -> None:
        """Note a finding, and tell whoever listens."""
        finding = Finding(
            self.step, site.module, site.operation, str(device), _rank(), rows, magnitude, outcome
        )
        if outcome == "not_finite":
            # Said once, until the site has passed a check again.
            if site in self._not_finite:
                return
            self._not_finite.append(site)
        self.ledger.findings.append(finding)
        if outcome in HARMFUL and self.policy.correct:
            self.uncorrected += 1
            self.unjudged = True
            if site.operation in LASTING:
                self._lasting += 1
                self._note_intact(self.intact_steps.get(site.operation, self.step - 1))
        if self._on_finding is not None:
            self._on_finding(finding)

    def spoil(self, step: int) -> None:
        """The passes have used what was wrong in memory and is right again, as after `step`."""
        self.uncorrected += 1
        self._note_intact(step)

    def _note_intact(self, step: int) -> None:
        self.intact = step if self.intact is None else min(self.intact, step)

    def judge(self, site: Site, judged: ResidualTest) -> None:
        """Count a check of numbers that cannot be computed again here; a failure is `detected`."""
        if self.wants(site, judged):
            self.note(site, judged, "detected")

    def note(self, site: Site, judged: ResidualTest, outcome: Outcome) -> None:
        """Note a failed check as a finding."""
        rows, worst = int(judged.exceeded), float(judged.worst)
        self.find(site, judged.flags.device, rows, worst, outcome)

    def _count(self, site: Site, rows: int, numbers: Sequence[float]) -> None:
        exceeded, worst, total, widest = numbers
        site.exceeded += int(exceeded)
        if rows:
            site.last = self.period
        if not exceeded and self._not_finite and site in self._not_finite:
            self._not_finite.remove(site)
        site.add(rows, 0.0 if exceeded else worst, total, widest)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def reducing_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Device on which a process group reduces: the host if it can."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
