"""Faults in the results of operations, put in below every check, and a drill that measures them.

The kernels of torch's dispatcher are overridden on the CPU, so a fault is where the hardware would
make it: in what ``mm`` or ``convolution_backward`` returns, whatever module, function or backward
pass has called it, and also where a guard computes it again. ::

    with faults_at(PRODUCTS) as kernels:            # before the model is guarded
        calls = kernels.record(step)                # every result of a clean step
        kernels.arm(OperationFault(calls[3], position=17, pattern=Pattern(bits=(14,))))

A result is recognised by its bits, not by its place in the order of calls, which a guard's own
computations change. `drill_operations` draws such faults for a `Case`, measures what each does to
the gradient without protection, and what the guard makes of it.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import warnings
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from outlast.errors import DataCorruptionError, GuardError
from outlast.guard.handle import guard
from outlast.guard.inject.campaign import Rate
from outlast.guard.inject.fault import Pattern, relative_change, settled, strike
from outlast.guard.operations import release_kernels
from outlast.guard.residual import equal_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from outlast.guard.handle import Guard
    from outlast.guard.inject.zoo import Case
    from outlast.guard.policy import Level, Policy

PRODUCTS = (
    *("mm", "mm.out", "addmm", "addmm.out", "bmm", "bmm.out", "baddbmm", "baddbmm.out"),
    *("addmv", "addmv_", "_grouped_mm", "convolution", "convolution_backward"),
    *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    *(
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
)
"""Matrix products, convolutions and attention; LSTMs are products here."""

OTHERS = (
    *("native_layer_norm", "native_layer_norm_backward", "native_batch_norm", "rsqrt"),
    *("native_batch_norm_backward", "native_group_norm", "native_group_norm_backward"),
    *("gelu", "gelu_backward", "silu", "silu_backward", "tanh", "threshold_backward"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("embedding_dense_backward", "add.Tensor", "mul.Tensor", "sum.dim_IntList", "cumsum"),
    *("nll_loss_forward", "nll_loss_backward", "index.Tensor", "exp"),
)
"""Element-wise operations, normalisations, losses and sums."""

_WITH_NUMBERS = frozenset({"add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor"})
"""Operations of two tensors of which one may be a number."""

HARMS = (1e-6, 1e-4, 1e-2)
"""Bounds between the magnitudes of harm; see `Trial`."""

_IDLE = frozenset({"rounding", "not_finite"})
"""Outcomes that say that there is no fault."""


@dataclass(frozen=True)
class Call:
    """One result of an operation in a step.

    Attributes:
        operation: Name in ``torch.ops.aten``, with its overload where it has one.
        number: Which of this operation's calls in the step, from 0.
        output: Which of its results.
        shape: Of the result.
        dtype: Of the result.
        fingerprint: A hash of the result's bits.
    """

    operation: str
    number: int
    output: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    fingerprint: int


@dataclass(frozen=True)
class OperationFault:
    """Wrong values in a result.

    Attributes:
        call: Which result.
        position: Row-major index of the number that is struck.
        pattern: What happens to it.
        stuck: Strike every result of this operation and shape, recomputations too: a defective
            unit. Otherwise the first result with these bits is struck, once.
    """

    call: Call
    position: int
    pattern: Pattern = field(default_factory=Pattern)
    stuck: bool = False


class Kernels:
    """Overridden kernels; see `faults_at`.

    Attributes:
        strikes: How often the fault has struck since it was armed.
    """

    def __init__(self, operations: Iterable[str]) -> None:
        self._undo = ExitStack()
        self._fault: OperationFault | None = None
        self._draw = random.Random()
        self._calls: list[Call] | None = None
        self._counts: defaultdict[str, int] = defaultdict(int)
        self.strikes = 0
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._undo.callback(library._destroy)
        with warnings.catch_warnings():
            # That a kernel is overridden is what is wanted here.
            warnings.simplefilter("ignore", UserWarning)
            for name in operations:
                original = _original(name)
                run = partial(self._run, name, original)
                library.impl(name, run, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
                # The kernel that is called must live as long as what calls it.
                self._undo.callback(lambda _: None, original)

    def record(self, step: Callable[[], object]) -> list[Call]:
        """All floating-point results of a step that is run now, each bit pattern once."""
        self._fault, self._calls = None, []
        self._counts.clear()
        try:
            step()
            return list({call.fingerprint: call for call in reversed(self._calls)}.values())[::-1]
        finally:
            self._calls = None

    def arm(self, fault: OperationFault | None, seed: int = 0) -> None:
        """Let this fault strike from now on, and no other one."""
        self._fault, self.strikes = fault, 0
        self._draw = random.Random(seed)
        self._counts.clear()

    def close(self) -> None:
        """Give torch its kernels back; guards that were installed since must be removed before."""
        self._undo.close()

    def _run(self, name: str, original: Any, keys: Any, *args: Any, **options: Any) -> Any:
        if name in _WITH_NUMBERS and not all(isinstance(item, Tensor) for item in args[:2]):
            # A number in a tensor's place arrives here as itself, which no kernel takes.
            out = torch.empty(0, dtype=torch.result_type(*args[:2]))
            operation = getattr(torch.ops.aten, name.removesuffix(".Tensor"))
            found = operation.out(*args, **options, out=out)
        else:
            found = original.call_boxed(keys, *args, **options)
        if self._calls is not None or self._fault is not None:
            for output, result in enumerate(found if isinstance(found, tuple) else (found,)):
                if isinstance(result, Tensor) and result.is_floating_point() and result.numel():
                    self._see(name, output, result.detach())
            self._counts[name] += 1
        return found

    def _see(self, name: str, output: int, result: Tensor) -> None:
        if self._calls is not None:
            call = Call(
                *(name, self._counts[name], output, tuple(result.shape), result.dtype),
                _fingerprint(result),
            )
            self._calls.append(call)
            return
        fault = self._fault
        if fault is None or result.dtype != fault.call.dtype:
            return
        call = fault.call
        if fault.stuck:
            if (name, output, tuple(result.shape)) != (call.operation, call.output, call.shape):
                return
        elif (
            self.strikes
            or result.numel() != math.prod(call.shape)
            or _fingerprint(result) != call.fingerprint
        ):
            return
        self.strikes += 1
        index = torch.tensor(fault.position)
        place = [int(one) for one in torch.unravel_index(index, result.shape)]
        row = result[tuple(place[:-1])] if place else result.view(1)
        strike(row, place[-1] if place else 0, fault.pattern, self._draw)


@contextmanager
def faults_at(operations: Iterable[str] = PRODUCTS) -> Iterator[Kernels]:
    """Override the CPU kernels of these operations, so that faults can be put into their results.

    Guards must be installed inside of this context: their checks, and what they compute again, then
    run through it.

    Args:
        operations: Names in ``torch.ops.aten``, with an overload as in ``mm.out``.

    Raises:
        GuardError: For an unknown operation, or one that a guard has overridden already.
    """
    # Guards whose model is gone, as a cycle with finalizers, may still hold kernels.
    gc.collect()
    gc.collect()
    release_kernels()
    kernels = Kernels(operations)
    try:
        yield kernels
    finally:
        kernels.close()


def _original(name: str) -> Any:
    try:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    except RuntimeError as error:
        raise GuardError(
            f"operation {name!r} has no kernel for the CPU; give a name in torch.ops.aten, with "
            f"its overload, such as mm, mm.out or add.Tensor ({error})"
        ) from None
    if ".py:" in str(kernel):
        raise GuardError(
            f"the operation {name} is overridden already ({kernel}): faults would strike behind "
            "its check; call faults_at() before guard(), or remove() that guard first"
        )
    return kernel


def _fingerprint(result: Tensor) -> int:
    numbers = result.contiguous().view(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(numbers.data)


@dataclass(frozen=True)
class Trial:
    """One fault of a drill.

    Attributes:
        model: Name of the case.
        dtype: Of the case, as the caller names it.
        call: The result that was struck.
        change: What was done: ``flip``, ``carry`` or ``stuck``, and the bits.
        harm: Relative error of the gradient without protection: norm of the difference over that
            of the clean gradient; infinite where it is not finite.
        struck: Whether the guarded run has met it; no figure counts trials in which it has not.
        detected: A finding other than rounding or the data's own infinities, or the run stopped.
        equal: Weights and optimizer state after the step are the clean run's, bit for bit.
        outcomes: Of the findings, each with its check.
        stopped: The error that ended the guarded run, or empty.
    """

    model: str
    dtype: str
    call: Call
    change: str
    harm: float
    struck: bool
    detected: bool
    equal: bool
    outcomes: tuple[str, ...]
    stopped: str


@dataclass(frozen=True)
class OperationDrill:
    """Outcome of `drill_operations`.

    Attributes:
        trials: Each with one fault.
        alarms: Findings of the clean steps under the guard.
        checks: Comparisons made in them.
        runs: Runs of several faults, one in each step.
        equal_runs: Those that ended in the clean run's weights by themselves.
    """

    trials: tuple[Trial, ...]
    alarms: tuple[str, ...]
    checks: int
    runs: int
    equal_runs: int


def drill_operations(
    case: Case,
    policy: Policy | Level = "full",
    *,
    name: str,
    dtype: str,
    faults: int = 100,
    steps: int = 8,
    seed: int = 0,
    operations: Sequence[str] = PRODUCTS,
    accepted: Callable[[float], bool] = lambda _: True,
) -> OperationDrill:
    """Put faults into the results of operations of a training, one in each step.

    The training is `steps` long and repeated with other faults. Where the guarded run ends a step
    with other weights than the clean run, or stops, it continues from the clean run's.

    Args:
        case: Model, data and loss; the model is trained by AdamW.
        policy: Of the guarded run.
        name: Of the case, for the trials.
        dtype: Of the case, for the trials.
        faults: Number of trials.
        steps: Of one run.
        seed: Of all choices.
        operations: Where faults strike.
        accepted: Which harms are tried under the guard; the others are left out.
    """
    draw = random.Random(repr((seed, name, dtype)))
    model = case.model
    with faults_at(operations) as kernels:
        # Nothing is guarded yet: what is checked for all models of a process would be put right.
        clean = _CleanRun(case, kernels, steps, seed)
        planned: list[tuple[OperationFault, float]] = []
        tried = 0
        while len(planned) < faults and tried < 20 * faults:
            step = len(planned) % steps
            fault = _draw_fault(clean.calls[step], draw)
            harm = clean.harm(step, fault)
            tried += 1
            if harm is not None and accepted(harm):
                planned.append((fault, harm))
        clean.take(model, 0)
        optimizer = clean.optimizer()
        handle = guard(model, optimizer, policy)
        try:
            run = _GuardedRun(clean, handle, optimizer)
            for step in range(steps):
                run.step(step, None)
            alarms = tuple(str(finding) for finding in handle.ledger.findings)
            checks = handle.ledger.checks
            trials = []
            for number, (fault, harm) in enumerate(planned):
                step = number % steps
                if step == 0:
                    run.begin()
                ended = run.step(step, fault)
                bits = "+".join(map(str, fault.pattern.bits))
                change = f"{fault.pattern.change} {bits or fault.pattern.value}"
                trials.append(Trial(name, dtype, fault.call, change, harm, *ended))
        finally:
            handle.remove()
    return OperationDrill(tuple(trials), alarms, checks, run.runs, run.equal_runs)


def _draw_fault(calls: Sequence[Call], draw: random.Random) -> OperationFault:
    """A flip, or a carry, of any bit of any number of any result; operations have equal chances."""
    operation = draw.choice(sorted({call.operation for call in calls}))
    call = draw.choice([call for call in calls if call.operation == operation])
    pattern = Pattern(change="carry" if draw.random() < 0.25 else "flip", sign=draw.choice((1, -1)))
    pattern = settled(pattern, call.dtype, draw)
    return OperationFault(call, draw.randrange(math.prod(call.shape)), pattern)


class _CleanRun:
    """A training without faults: its states, gradients and results, to compare with."""

    def __init__(self, case: Case, kernels: Kernels, steps: int, seed: int) -> None:
        self.case, self.kernels, self._seed = case, kernels, seed
        model, optimizer = case.model, self.optimizer()
        self.states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.calls: list[list[Call]] = []
        self._gradients: list[list[Tensor]] = []
        for step in range(steps):
            self.states.append(_state(model, optimizer))
            calls = kernels.record(partial(self.passes, model, step))
            self.calls.append(calls)
            self._gradients.append(_gradients(model))
            optimizer.step()
        self.states.append(_state(model, optimizer))

    def optimizer(self) -> torch.optim.Optimizer:
        """A new one, as all of the drill's runs have."""
        return torch.optim.AdamW(self.case.model.parameters(), lr=1e-3)

    def passes(self, model: nn.Module, step: int) -> None:
        """Forward and backward pass of a step."""
        model.zero_grad(set_to_none=True)
        torch.manual_seed(self._seed + step)
        loss = self.case.loss(model, self.case.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]

    def take(
        self, model: nn.Module, step: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Load the state before this step."""
        weights, state = self.states[step]
        with torch.no_grad():
            # `load_state_dict` would also run hooks of the model's classes.
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.copy_(weights[name])
        if optimizer is not None:
            optimizer.load_state_dict(copy.deepcopy(state))

    def harm(self, step: int, fault: OperationFault) -> float | None:
        """Relative error of the gradient with this fault; None where it does not strike."""
        model = self.case.model
        self.take(model, step)
        self.kernels.arm(fault)
        try:
            self.passes(model, step)
        except (ArithmeticError, RuntimeError, ValueError, IndexError):
            return math.inf
        finally:
            struck = self.kernels.strikes
            self.kernels.arm(None)
        if not struck:
            return None
        flat = (
            torch.cat([gradient.double().reshape(-1) for gradient in gradients])
            for gradients in (self._gradients[step], _gradients(model))
        )
        return relative_change(*flat)

    def holds(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """Return whether weights and optimizer state are those before this step, bit for bit."""
        weights, state = self.states[step]
        named = dict(model.named_parameters())
        pairs = [(parameter.detach(), weights[name]) for name, parameter in named.items()]
        found = optimizer.state_dict()["state"]
        for parameter, wanted in state["state"].items():
            pairs += [(found[parameter][name], value) for name, value in wanted.items()]
        return all(bool(equal_bits(one, other).all()) for one, other in pairs)


class _GuardedRun:
    """The same training under a guard, with faults."""

    def __init__(self, clean: _CleanRun, handle: Guard, optimizer: torch.optim.Optimizer) -> None:
        self._clean, self._handle, self._optimizer = clean, handle, optimizer
        self._model = clean.case.model
        self.runs = self.equal_runs = 0
        self._well = True

    def begin(self) -> None:
        """Begin a run at the first step's state."""
        self._reset(0)
        self.runs += 1
        self._well = True

    def step(
        self, step: int, fault: OperationFault | None
    ) -> tuple[bool, bool, bool, tuple[str, ...], str]:
        """One step: (struck, detected, equal, outcomes, stopped); see `Trial`."""
        kernels, model, ledger = self._clean.kernels, self._model, self._handle.ledger
        before = len(ledger.findings)
        kernels.arm(fault)
        stopped, detected = "", False
        try:
            for _ in self._handle.attempts():
                self._clean.passes(model, step)
            self._optimizer.step()
        except DataCorruptionError as error:
            stopped, detected = str(error), True
        except (ArithmeticError, RuntimeError, ValueError, IndexError) as error:
            stopped = f"{type(error).__name__}: {error}"
        struck = kernels.strikes > 0
        kernels.arm(None)
        found = ledger.findings[before:]
        detected = detected or any(finding.outcome not in _IDLE for finding in found)
        equal = not stopped and self._clean.holds(model, self._optimizer, step + 1)
        if not equal:
            self._well = False
            self._reset(step + 1)
        if fault is not None and step + 1 == len(self._clean.calls) and self._well:
            self.equal_runs += 1
        outcomes = tuple(f"{finding.operation}: {finding.outcome}" for finding in found)
        return struck, detected, equal, outcomes, stopped

    def _reset(self, step: int) -> None:
        self._clean.take(self._model, step, self._optimizer)
        self._handle.restart(step)


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    named = (*model.named_parameters(), *model.named_buffers())
    weights = {name: tensor.detach().clone() for name, tensor in named}
    return weights, copy.deepcopy(optimizer.state_dict())


def _gradients(model: nn.Module) -> list[Tensor]:
    return [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for parameter in model.parameters()
        if parameter.requires_grad
    ]


@dataclass(frozen=True)
class HarmRow:
    """Trials of one type and magnitude of harm.

    Attributes:
        dtype: Of the cases.
        low: Least harm; 0 for the smallest.
        high: Harms are below; infinite for the largest.
        detected: Of the faults that struck.
        equal: Steps that ended in the clean run's bits, of the same.
        excused: Missed faults with a finding that was called rounding or the data's own.
    """

    dtype: str
    low: float
    high: float
    detected: Rate
    equal: Rate
    excused: int


def by_harm(trials: Iterable[Trial]) -> list[HarmRow]:
    """Detection by magnitude of harm and type."""
    groups: defaultdict[tuple[str, float, float], list[Trial]] = defaultdict(list)
    bounds = (0.0, *HARMS, math.inf)
    for trial in trials:
        if not trial.struck:
            continue
        place = sum(trial.harm >= bound for bound in HARMS)
        groups[trial.dtype, bounds[place], bounds[place + 1]].append(trial)
    return [
        HarmRow(
            *key,
            Rate(sum(trial.detected for trial in group), len(group)),
            Rate(sum(trial.equal for trial in group), len(group)),
            sum(bool(trial.outcomes) and not trial.detected for trial in group),
        )
        for key, group in sorted(groups.items(), reverse=True)
    ]


def summary_of(drills: Sequence[OperationDrill], policy: str) -> dict[str, Any]:
    """The result of drills as JSON."""
    trials = [trial for drill in drills for trial in drill.trials]
    alarms = [alarm for drill in drills for alarm in drill.alarms]
    false_alarms = Rate(len(alarms), max(sum(drill.checks for drill in drills), len(alarms)))
    return {
        "policy": policy,
        "rows": [
            {
                "dtype": row.dtype,
                "harm_from": row.low,
                "harm_below": row.high,
                "detected": row.detected.as_dict(),
                "equal": row.equal.as_dict(),
                "excused": row.excused,
            }
            for row in by_harm(trials)
        ],
        "false_alarms": false_alarms.as_dict() | {"at_most": false_alarms.at_most()},
        "alarms": alarms,
        "runs": sum(drill.runs for drill in drills),
        "equal_runs": sum(drill.equal_runs for drill in drills),
        "not_struck": sum(not trial.struck for trial in trials),
        "trials": [
            {**vars(trial), "call": {**vars(trial.call), "dtype": str(trial.call.dtype)}}
            for trial in trials
        ],
    }
