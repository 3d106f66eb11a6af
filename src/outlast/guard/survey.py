"""Survey of a step's gradients: those that an executed check has watched, and the others.

What a module's kind promises says little about a run: a layer's weight may be used by another
module, its call may be inside a compiled graph, a branch may not be taken any more. So three things
are looked at instead:

- in every step, the checks that were made since the optimizer's last one (`Site.last`);
- autograd's graph, where a backward pass begins: in the first step, in steps 2, 4, 8 and so on, and
  after a change. Whatever a model is made of, every use of a parameter ends at its
  ``AccumulateGrad``. The gradient was watched if all nodes that use the parameter belong to checks,
  and these were made;
- in the same steps, every operation that is executed; see `outlast.guard.operation_counter`.

The graph is only read: nothing that autograd has saved is unpacked, so nothing is computed again.
What runs inside of reentrant checkpointing is seen in the backward pass that it begins itself. A
compiled graph is one node: there every module that holds the parameter must have been checked; so
it is where no graph was seen, as with ``torch.autograd.grad``.
"""

from __future__ import annotations

import re
import warnings
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from outlast.guard.autograd_hooks import record_of
from outlast.guard.findings import ANYWHERE
from outlast.guard.forward_patch import FunctionPatch
from outlast.guard.install import ProductLayer
from outlast.guard.linear import CheckedLinear
from outlast.guard.operation_counter import (
    FRAMEWORKS,
    OperationCounter,
    fallen,
    in_compiled_call,
    leave_idle,
)
from outlast.guard.operations import NODES
from outlast.guard.policy import Coverage, Coverages, StepCoverage, Uncovered, summarized
from outlast.guard.product_calls import TYPES
from outlast.state.sharded import is_fsdp_module

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from outlast.guard.autograd_hooks import Record
    from outlast.guard.findings import Site
    from outlast.guard.linear import LinearChecks
    from outlast.guard.watch import Watch

_REPLACED = FunctionPatch(torch.autograd, "backward")
_SURVEYS: weakref.WeakSet[Survey] = weakref.WeakSet()

_OF_GRADIENTS = frozenset(
    (
        *("linear.dw", "embedding.dw", "norm.dw", "attention.dv", "attention.dk"),
        *("loss.dlogits", "softmax.dlogits"),
    )
)
"""Checks that watch the gradient of an operation's inputs."""
_OF_OPERATIONS = {
    "product": frozenset(("product",)),
    "convolution": frozenset(("convolution.dw",)),
    "recurrent": frozenset(("recurrent",)),
    "norm.repeated": frozenset(("norm.repeated",)),
    "softmax.dlogits": frozenset(("softmax.dlogits",)),
    "loss.dlogits": frozenset(("loss.dlogits",)),
}
"""The same of operations that are checked wherever they are computed."""
_WITH_BIAS = frozenset(("Addmm", "Baddbmm"))
"""Products whose first operand is added, so that its gradient is a sum."""
_WITH_ANOTHER = {"linear.saved": "linear.dw", "weight": "linear.forward"}
"""Checks that are made where another one fails, and so are there whenever that one is made."""
_NOT_CALLED = "not called in the step, or where its checks do not see it"
_NOT_USED = "not used in the step: its parameters got no gradient"
_EVALUATED = "in evaluation mode, and nothing of it trains"
_NO_MORE = "its attention or loss is no longer checked"
_COMPILED_STEP = (
    "operations of later steps are not counted, since the optimizer steps inside of torch.compile"
)
_NOT_WATCHED = "the check of its gradient was not made"

_MOVES = frozenset(
    (
        *("Alias", "AsStrided", "Cat", "Clone", "Permute", "ReshapeAlias", "Select", "Slice"),
        *("Split", "SplitWithSizes", "Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind"),
        *("UnsafeSplit", "UnsafeSplitWithSizes", "UnsafeView", "Unsqueeze", "View"),
    )
)
"""Operations that move numbers and add none, so that what a check behind them sees is the gradient.

Not among them is ``Expand``, whose gradient is a sum."""
_ADDS = frozenset(("Add", "Sub"))
"""Sums, whose gradient is the output's, summed where an operand was broadcast."""
_PRODUCTS = {
    **dict.fromkeys(("Mm", "Bmm", "Mv", "Dot", "GroupedMm", "ScaledGroupedMm"), (0, 1)),
    **dict.fromkeys(("Addmm", "Addmv", "Baddbmm", "Addbmm"), (1, 2)),
    **dict.fromkeys(("Linear", "MkldnnLinear", "Trilinear"), (0, 1)),
}
"""Matrix products, and which of their operands are multiplied."""
_OTHERS = re.compile(
    "Softmax|LogSoftmax|.*Loss|BinaryCross|KlDiv|ScaledDot|.*Convolution|.*(Rnn|Lstm|Gru)"
)
_OF_LEVEL_FULL = re.compile("attention|log_softmax|.*loss|binary_cross|kl_div|a compiled graph")
"""Operations that level ``linear`` leaves out by itself, and does not warn of."""
_FUNCTIONS = ("attention.forward", "attention.output", "attention.dv", "loss.forward")
"""Checks of functions, which no module announces."""
_COMPILED = "CompiledFunction"

_Check = tuple[str, frozenset[str]]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class _Uses:
    """Users of a parameter: checks, operations without one, or a compiled graph.

    Checks by name, and those of their operations that watch the gradient.
    """

    checks: set[_Check] = field(default_factory=set)
    operations: set[str] = field(default_factory=set)
    compiled: bool = False


@dataclass
class _Seen:
    """Contents of the graphs of a step; FLOPs are those of forward passes."""

    uses: dict[str, _Uses] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    checked_flops: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    other_flops: float = 0.0
    unknown: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class _Expected:
    """The checks that together watch the gradient of one parameter, or why none do."""

    name: str
    elements: int
    checks: tuple[_Check, ...]
    why_not: str


@dataclass
class _Judged:
    """Counts of the parameters that an optimizer has updated in its last step."""

    count: int = 0
    elements: int = 0
    unwatched: dict[str, tuple[int, str]] = field(default_factory=dict)


class Survey:
    """The survey of one guarded model; see the module.

    Args:
        watch: What all checks of the guard share.
        model: The guarded model.
        planned: Of every module that holds parameters, as it was found.
        linear: The linear layers' checks by name; what a use of them shows may change coverage.
        optimizers: That step; without any, all that happens counts as one step.

    Attributes:
        depth: Backward passes that continue: reentrant checkpointing begins one inside of another.
        on_warning: Told instead of Python's warnings.
    """

    def __init__(
        self,
        watch: Watch,
        model: nn.Module,
        planned: list[Coverage],
        linear: dict[str, LinearChecks],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self.watch, self._model, self._planned, self._linear = watch, model, planned, linear
        self._optimizers = list(optimizers)
        # Modules by the names that they had, which wrappers may change, and the names under which
        # their checks count.
        self._modules = {
            coverage.module: model.get_submodule(coverage.module) for coverage in planned
        }
        self._checks: dict[str, tuple[str, ...]] = {}
        for coverage in planned:
            module = self._modules[coverage.module]
            products = module.product_names if isinstance(module, ProductLayer) else ()
            own = tuple(f"{coverage.module}.{product}" for product in products)
            self._checks[coverage.module] = own or (coverage.module,)
        # Where no module has any, as at level light, there is nothing to follow in every step.
        self._checks_any = watch.operations is not None or any(
            coverage.operations for coverage in planned
        )
        self._names: dict[int, str] = {}
        self._holders: dict[int, list[Coverage]] = {}
        self._expected: dict[int, _Expected] = {}
        # By optimizer: when its step began, and what was found in the last one.
        self._since: dict[int, int] = {}
        self._judged: dict[int, _Judged] = {}
        # By module: when the step of its optimizer began, or that of all; and the one before.
        self._begun: dict[str, int] = {}
        self._step_began = self._last_began = 0
        self._updated: dict[int, set[str]] = {}
        # Modules that train, and had no gradient in the last step.
        self._unused: set[str] = set()
        # All sites by the module's name, as of so many.
        self._sites: dict[str, list[Site]] = {}
        self._indexed = 0
        self._uses: dict[str, _Uses] = {}
        self._seen = self._shown = _Seen()
        self._share: float | None = None
        self._told: set[str] = set()
        self._steps = 0
        self._due = True
        self.depth = 0
        self.on_warning: Callable[[str], None] | None = None
        # Of the backward passes that run.
        self._graphs: list[_Graph] = []
        # Why operations are not counted any more.
        self._uncounted = ""
        self._step: StepCoverage | None = None
        # Why it is not known what is covered: an error of what reads torch's graph.
        self._unknown = ""

    def installed(self) -> ExitStack:
        """See the backward passes of the process until what this returns is closed."""
        undo = ExitStack()
        _SURVEYS.add(self)
        undo.callback(_SURVEYS.discard, self)
        undo.enter_context(_REPLACED.by(_backward))
        undo.callback(leave_idle)
        self._count()
        undo.callback(self.finish)
        return undo

    def begin(self) -> None:
        """Passes begin: what was executed before is no part of the step."""
        if self.watch.counter is not None:
            self.watch.counter.clear()

    def stepping(self, optimizer: Optimizer | None) -> None:
        """An optimizer computes its update from now on; None: no longer."""
        if self.watch.counter is not None:
            self.watch.counter.optimizer = "" if optimizer is None else type(optimizer).__name__

    def _count(self) -> None:
        """Count operations from now on, where they are checked at all."""
        if self.watch.operations is None or self._unknown or self._uncounted:
            return
        if in_compiled_call():
            self._uncounted = _COMPILED_STEP
            self._warn(_COMPILED_STEP)
        else:
            counter = self.watch.counter = OperationCounter(self.watch, self._model)
            # A model may go, and its guard with it, in the middle of a step.
            self._leave = weakref.finalize(self, counter.end)
            self._leave.atexit = False
            counter.begin()

    def finish(self) -> None:
        """See no more operations: no step follows, or it is not counted."""
        if self.watch.counter is not None:
            self._leave()
            self.watch.counter = None
            self._graphs.clear()

    def _counted(self) -> bool:
        """Read a step's counts, and return whether less is checked than in the step before."""
        counter = self.watch.counter
        if counter is None:
            return False
        self.finish()
        if counter.why_not:
            self._step = None
            self._uncounted = f"the step's operations are not counted: {counter.why_not}"
            self._warn(self._uncounted)
            return False
        before, since, step = self._step, self._step_began, self.watch.step + 1
        now = counter.result(step, lambda name: self._made(name, None, since))
        if not now.flops:
            # Its passes are in another thread, or another guard's.
            return False
        self._step = now
        lost = {} if before is None else fallen(before, now)
        if before is None or not lost:
            return False
        self._warn(
            f"not checked any more in step {step}: {summarized(lost)}; "
            f"{100 * now.covered:.4g} % of the step's FLOPs and {100 * now.covered_bytes:.4g} % of "
            f"its bytes are checked, after {100 * before.covered:.4g} % and "
            f"{100 * before.covered_bytes:.4g} % in step {before.step}; print(Guard.coverage()) "
            "names the rest"
        )
        return True

    def _warn(self, text: str) -> None:
        if self.on_warning is None:
            warnings.warn(text, stacklevel=3)
        else:
            self.on_warning(text)

    def look(self, roots: Any) -> None:
        """Read the graph of a backward pass that begins at `roots`, if this step is looked at."""
        if self._due and self._checks_any:
            self._safely(self._look, roots)

    def _look(self, roots: Any) -> None:
        # A tensor, or the node of a `GradientEdge`.
        nodes = [getattr(root, "grad_fn", root) for root in tree_leaves(roots)]
        self._know_parameters()
        operations = self.watch.operations
        graph = _Graph(
            [node for node in nodes if isinstance(node, Node)],
            self._variables(),
            {} if operations is None else operations.nodes,
        )
        if graph.reaches(self.watch):
            graph.read(self._seen)
            if self.watch.counter is not None:
                self._graphs.append(graph)
                self.watch.counter.graphs.append(weakref.WeakMethod(graph.own_check))

    def passed(self) -> None:
        """End a backward pass: without an optimizer, the first one is judged."""
        if self.watch.counter is not None and not self.depth:
            self.watch.counter.graphs.clear()
            self._graphs.clear()
        if self._due and not self._optimizers and not self.depth and self._seen.uses:
            self._judge_all()
            self._safely(self._tell)
            self._safely(self._counted)
            self._due = False

    def judge(self, optimizer: Optimizer | None) -> None:
        """Find what has watched the gradients that `optimizer` is about to use."""
        if self._due or self._checks_any:
            self.watch.settle()
            self._safely(self._judge, optimizer)

    def _judge(self, optimizer: Optimizer | None) -> None:
        key, watch = id(optimizer), self.watch
        since = self._since.get(key, 0)
        if optimizer is not None:
            watch.period += 1
            self._since[key] = watch.period
        if self._due:
            self._uses |= self._seen.uses
            self._shown = self._seen
            self._know_parameters()
        own = self._parameters_of(optimizer)
        made = cache(lambda check: self._made(check[0], check[1], since))
        judged = self._judged[key] = _Judged()
        # Some frameworks keep gradients elsewhere.
        training = [tensor for tensor in own if tensor.requires_grad]
        trained = [tensor for tensor in own if tensor.grad is not None]
        used = []
        for number, item in enumerate(trained or training):
            expected = self._expected.get(id(item))
            if expected is None:
                name = f"parameter {number} of {type(optimizer).__name__}"
                expected = _Expected(name, item.numel(), (), "not in the guarded model")
            judged.count += 1
            judged.elements += expected.elements
            why_not = expected.why_not
            if not why_not and not all(made(check) for check in expected.checks):
                if _is_zero(item.grad):
                    continue
                why_not = _NOT_WATCHED
            used.append(item)
            if why_not:
                judged.unwatched[expected.name] = expected.elements, why_not
        modules = self._updated.get(key)
        if modules is None:
            modules = self._updated[key] = self._modules_of(own)
        self._unused -= modules
        if trained:
            self._unused |= self._modules_of(training) - self._modules_of(used)
        self._begun.update(dict.fromkeys(modules, since))
        self._begun.update(dict.fromkeys(self._never_updated - modules, self._step_began))

    def advance(self) -> None:
        """End a step of all optimizers, and warn of what it has shown for the first time."""
        self._steps += 1
        if not self._due and not self._checks_any:
            self._due = self._steps & (self._steps - 1) == 0
            return
        fell = self._safely(self._counted)
        self._last_began, self._step_began = self._step_began, self.watch.period
        news = self._safely(self._tell)
        self._due = bool(news or fell) or self._steps & (self._steps - 1) == 0
        if self._due:
            self._seen = _Seen()
            self._count()
        if self.watch.operations is not None:
            self.watch.operations.begin()

    def coverage(self) -> Coverages:
        """Every module that holds parameters, with the checks that were made in it."""
        self._judge_all()
        why_not = self._unknown or self._uncounted
        if not why_not and self._step is not None and self._shown.compiled:
            why_not = "kernels that a compiler has made are not counted"
        found = Coverages((), None if self._unknown else self._step, why_not)
        for item in self._planned:
            operations, why_not = item.operations, self._why_not(item) or self._unknown
            if not self._unknown and (own := self._operations_of(item)):
                found.append(Coverage(item.module, item.kind, own))
                continue
            if item.module in self._begun and not why_not:
                # Select those checks of a module that were made in the last step of its optimizer.
                since = self._begun[item.module]
                made = {
                    name
                    for name in operations
                    if any(self._made(check, (name,), since) for check in self._checks[item.module])
                }
                operations = tuple(
                    name for name in operations if {name, _WITH_ANOTHER.get(name)} & made
                )
                why_not = "" if operations else self._why_idle(item)
            found.append(Coverage(item.module, item.kind, () if why_not else operations, why_not))
        return found

    def _operations_of(self, planned: Coverage) -> tuple[str, ...]:
        """The checks of a module by its operations alone, where they watch all its gradients."""
        module, since = self._modules[planned.module], self._begun.get(planned.module)
        recurse = isinstance(module, ProductLayer)
        names = [
            self._names.get(id(item))
            for item in module.parameters(recurse=recurse)
            if item.requires_grad
        ]
        uses = [self._uses[name] for name in names if name in self._uses]
        if since is None or not uses or len(uses) < len(names):
            return ()
        checks = {check for own in uses for check in own.checks}
        made = all(self._made(check, operations, since) for check, operations in checks)
        if not made or not checks or any(own.operations or own.compiled for own in uses):
            return ()
        if any(check != ANYWHERE for check, _ in checks):
            return ()
        return tuple(sorted({name for _, operations in checks for name in operations}))

    def uncovered(self) -> Uncovered:
        """List everything that no check has watched in the last step."""
        modules = {
            coverage.module: coverage.why_not for coverage in self.coverage() if coverage.why_not
        }
        if self._unknown:
            sizes = {
                name: parameter.numel()
                for name, parameter in self._model.named_parameters()
                if parameter.requires_grad
            }
            elements = sum(sizes.values())
            unknown = dict.fromkeys(sizes, self._unknown)
            return Uncovered(modules, unknown, {}, len(sizes), elements, elements)
        modules |= dict.fromkeys(self._idle_functions(), _NO_MORE)
        judged = [*self._judged.values()]
        unwatched = {name: own for item in judged for name, own in item.unwatched.items()}
        return Uncovered(
            modules,
            {name: why for name, (_, why) in unwatched.items()},
            self._without_check(),
            sum(item.count for item in judged),
            sum(item.elements for item in judged),
            sum(elements for elements, _ in unwatched.values()),
            self._share,
        )

    def _safely(self, survey: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """``survey(*args, **options)``; an error in it, as with another torch, ends no training."""
        if self._unknown:
            return None
        try:
            return survey(*args, **options)
        except Warning:
            # The caller's filters have made an error of it.
            raise
        except Exception as error:
            self._unknown = f"coverage is not known: {type(error).__name__}: {error}"
            self.finish()
            self._warn(f"{self._unknown}; the checks continue")
            return None

    def _judge_all(self) -> None:
        if self._optimizers:
            return
        if self._seen.uses or self.watch.ledger.checks:
            self.judge(None)

    def _tell(self) -> bool:
        """Warn of what is new, and return whether anything is."""
        told, watch = self._told, self.watch
        if self._due or watch.operations is not None:
            self._share = self._flops()
        idle = [
            item.module
            for item in self._planned
            if item.operations and item.module not in {*told, *self._unused}
            if not self._why_not(item) and not self._operations_of(item)
            if (since := self._begun.get(item.module)) is not None
            if not any(
                self._made(name, item.operations, since) for name in self._checks[item.module]
            )
        ]
        idle += [name for name in self._idle_functions() if name not in told]
        names = {name for judged in self._judged.values() for name in judged.unwatched}
        names |= self._without_check().keys()
        if not idle and names <= told:
            return False
        now = self.uncovered()
        new = replace(
            now,
            modules={name: why for name, why in now.modules.items() if name not in told},
            parameters={name: why for name, why in now.parameters.items() if name not in told},
            operations={name: calls for name, calls in now.operations.items() if name not in told},
        )
        told |= {*new.modules, *new.parameters, *new.operations}
        full = watch.policy.reaches("full")
        called = [name for name in new.operations if full or not _OF_LEVEL_FULL.match(name)]
        # What a module lacks by its kind was said when the guard was installed.
        worth = bool(new.parameters or called or self._training_among(idle))
        if worth and watch.policy.reaches("linear"):
            self._warn(f"not guarded in step {watch.step + 1}: {new}; Guard.uncovered() lists all")
        return worth

    def _training_among(self, modules: Sequence[str]) -> bool:
        """Return whether any trains: products of a frozen one are checked by themselves."""
        if self.watch.operations is None:
            return bool(modules)
        known = [self._modules[name] for name in modules if name in self._modules]
        return len(known) < len(modules) or any(
            parameter.requires_grad for module in known for parameter in module.parameters()
        )

    def _without_check(self) -> dict[str, int]:
        """Operations without a check, and how often each was called."""
        seen: dict[str, int] = dict(self._shown.operations)
        operations = self.watch.operations
        if operations is not None:
            labels = [name.partition(" in ")[0] for name in seen]
            for name, calls in operations.calls.items():
                if name not in labels:
                    seen[f"{name} in the step"] = calls
        return seen

    def _idle_functions(self) -> list[str]:
        """Modules whose attention or loss was checked earlier, but not in the last step."""
        if not self._optimizers:
            return []
        last: dict[str, int] = {}
        for site in self.watch.ledger.sites.values():
            if site.operation in _FUNCTIONS and site.module != ANYWHERE and site.last >= 0:
                last[site.module] = max(last.get(site.module, 0), site.last)
        return [name for name, period in last.items() if period < self._last_began]

    def _why_idle(self, planned: Coverage) -> str:
        if planned.module in self._unused:
            return _NOT_USED
        module = self._modules[planned.module]
        frozen = not any(parameter.requires_grad for parameter in module.parameters())
        return _EVALUATED if frozen and not module.training else _NOT_CALLED

    def _why_not(self, planned: Coverage) -> str:
        layer = self._linear.get(planned.module)
        return planned.why_not or (layer.why_not if layer is not None else "")

    def _made(self, check: str, operations: Container[str] | None, since: int) -> bool:
        sites = self.watch.ledger.sites
        if len(sites) != self._indexed:
            self._indexed = len(sites)
            self._sites.clear()
            for site in sites.values():
                self._sites.setdefault(site.module, []).append(site)
        for site in self._sites.get(check, ()):
            if site.last >= since and (operations is None or site.operation in operations):
                return True
        return False

    def _flops(self) -> float | None:
        """Share of FLOPs without a check in a step whose graph was read; None: not known.

        A check that was not made covers no product.
        """
        seen, sites = self._shown, self.watch.ledger.sites
        if (operations := self.watch.operations) is not None:
            # A compiler may have made kernels of its own of some.
            return None if seen.compiled else operations.unchecked_share
        since = min(self._begun.values(), default=0)
        made = {check for (check, _), site in sites.items() if site.last >= since}
        lost = sum(flops for check, flops in seen.checked_flops.items() if check not in made)
        total = sum(seen.checked_flops.values()) + seen.other_flops
        return None if seen.unknown or not total else (seen.other_flops + lost) / total

    def _parameters_of(self, optimizer: Optimizer | None) -> list[Tensor]:
        groups = [] if optimizer is None else optimizer.param_groups
        given = [parameter for group in groups for parameter in group["params"]]
        if not self._names or any(id(parameter) not in self._names for parameter in given):
            self._know_parameters()
        if any(id(parameter) in self._names for parameter in given):
            return given
        # There is no optimizer, or it updates copies of the model's parameters.
        return [*self._model.parameters()]

    def _modules_of(self, parameters: Iterable[Tensor]) -> set[str]:
        holders = (self._holders.get(id(parameter), ()) for parameter in parameters)
        return {item.module for several in holders for item in several}

    def _know_parameters(self) -> None:
        """Find the model's parameters, which FSDP2 may have replaced, and what uses them."""
        self._names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._updated.clear()
        self._holders = {number: [] for number in self._names}
        for planned in self._planned:
            module = self._modules[planned.module]
            for parameter in module.parameters(recurse=isinstance(module, ProductLayer)):
                self._holders.setdefault(id(parameter), []).append(planned)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        updated = self._modules_of(parameter for group in groups for parameter in group["params"])
        self._never_updated = {planned.module for planned in self._planned} - updated
        self._expected = {
            id(parameter): self._expect(parameter, name)
            for name, parameter in self._model.named_parameters()
        }

    def _expect(self, parameter: Tensor, name: str) -> _Expected:
        holders, uses = self._holders[id(parameter)], self._uses.get(name)
        reasons = sorted({why for holder in holders if (why := self._why_not(holder))})
        checks: Iterable[_Check] = ()
        why_not = ""
        if uses is not None and uses.operations:
            why_not = ": ".join([", ".join(sorted(uses.operations)), *reasons])
        elif uses is not None and uses.checks and not uses.compiled:
            checks = uses.checks
        elif reasons or not holders:
            why_not = ", ".join(reasons) or _NOT_WATCHED
        else:
            names = [check for holder in holders for check in self._checks[holder.module]]
            checks = [(check, _OF_GRADIENTS) for check in names]
        return _Expected(name, parameter.numel(), tuple(checks), why_not)

    def _variables(self) -> dict[int, str]:
        """The names of parameters by the ids of the tensors that stand for them in a graph."""
        found = dict(self._names)
        for module in self._model.modules():
            state = module._get_fsdp_state() if is_fsdp_module(module) else None
            for group in getattr(state, "_fsdp_param_groups", None) or ():
                for parameter in group.fsdp_params:
                    gathered = getattr(parameter, "_unsharded_param", None)
                    if gathered is not None and id(parameter.sharded_param) in found:
                        found[id(gathered)] = found[id(parameter.sharded_param)]
        return found


def _backward(original: Callable[..., None], *args: Any, **options: Any) -> None:
    """Stand in for ``torch.autograd.backward``, which ``Tensor.backward`` calls."""
    leave_idle()
    roots = args[0] if args else options.get("tensors")
    surveys = [*_SURVEYS]
    for survey in surveys:
        survey.watch.timed(survey.look, roots)
        survey.depth += 1
    try:
        original(*args, **options)
    finally:
        for survey in surveys:
            survey.depth -= 1
    for survey in surveys:
        survey.passed()


class _Graph:
    """Autograd's graph of one backward pass.

    Args:
        roots: Where it begins.
        variables: Names of parameters, by the ids of the leaves that stand for them.
        nodes: Kinds of nodes that are checked wherever torch computes them, by type of device.
    """

    def __init__(
        self, roots: Iterable[Node], variables: dict[int, str], nodes: Mapping[str, frozenset[str]]
    ) -> None:
        self._variables = variables
        self._nodes = nodes
        # Every node with those that use what it has made.
        self._users: dict[Node, list[Node]] = {root: [] for root in roots}
        waiting = [*self._users]
        while waiting:
            node = waiting.pop()
            for child, _ in node.next_functions:
                if child is None:
                    continue
                if child not in self._users:
                    self._users[child] = []
                    waiting.append(child)
                self._users[child].append(node)
        # Nodes that an operation has made while it was watched: their numbers, and by whom. Numbers
        # count within the thread that runs the forward pass.
        records = {id(own): own for node in self._users if (own := record_of(node)) is not None}
        self._spans = sorted((own.first, own.end, own.name) for own in records.values())

    def reaches(self, watch: Watch) -> bool:
        """Return whether it leads to the guarded model's parameters, or to checks of its guard.

        The process may train other models, and has reentrant checkpointing of frozen layers.
        """
        return any(
            self._leaf(node) is not None or getattr(_owner(node), "watch", None) is watch
            for node in self._users
        )

    def read(self, seen: _Seen) -> None:
        """Add what is in it to `seen`."""
        for node in self._users:
            if (name := self._leaf(node)) is not None:
                self._read_uses(node, seen.uses.setdefault(name, _Uses()))
                continue
            if _is_empty(node):
                continue
            kind, check = _kind(node), self._check(node)
            # Where operations are checked, those that run are counted.
            flops = 0.0 if self._nodes else _flops(node, kind)
            seen.unknown |= flops is None or kind == _COMPILED
            seen.compiled |= kind == _COMPILED
            if check is not None:
                seen.checked_flops[check] += flops or 0.0
                continue
            seen.other_flops += flops or 0.0
            if kind in _PRODUCTS or _OTHERS.match(kind) or _is_custom(node, kind):
                seen.operations[f"{_label(node, kind)} in {self._place(node)}"] += 1

    def _leaf(self, node: Node) -> str | None:
        variable = getattr(node, "variable", None)
        return None if variable is None else self._variables.get(id(variable))

    def own_check(self, node: Node) -> str | None:
        """The name of a check that is not made at the dispatcher."""
        check = self._check(node)
        return None if check == ANYWHERE else check

    def _check(self, node: Node) -> str | None:
        """The name of the check that watches the gradient which this node makes."""
        if (owner := _owner(node)) is not None:
            return owner.name
        number = node._sequence_nr()
        place = bisect_right(self._spans, (number, float("inf"), "")) - 1
        if place >= 0 and number < self._spans[place][1]:
            return self._spans[place][2]
        kind = _kind(node)
        dtype = getattr(_metadata(node), "dtype", None)
        if kind in NODES and dtype in TYPES and kind in self._nodes.get(_device(node), ()):
            return ANYWHERE
        return None

    def _read_uses(self, leaf: Node, uses: _Uses) -> None:
        waiting = [leaf]
        while waiting:
            node = waiting.pop()
            for user in self._users[node]:
                if _is_empty(user):
                    continue
                kind = _kind(user)
                if (check := self._check(user)) is not None:
                    checks, operations = _covered(check, user, node)
                    uses.checks |= checks
                    uses.operations |= operations
                elif kind in _MOVES:
                    waiting.append(user)
                elif kind in _ADDS and _device(user) in self._nodes and _is_plain_sum(user):
                    if _shape(user, 0) == self._shape_of(node):
                        waiting.append(user)
                    else:
                        uses.checks.add((ANYWHERE, frozenset(("bias.gradient",))))
                elif kind == _COMPILED:
                    uses.compiled = True
                else:
                    uses.operations.add(_label(user, kind))

    def _shape_of(self, node: Node) -> tuple[int, ...] | None:
        variable = getattr(node, "variable", None)
        return _shape(node, 0) if variable is None else tuple(variable.shape)

    def _place(self, node: Node) -> str:
        """The module in which an operation was called, by what its inputs come from."""
        waiting, known, found = [node], {node}, []
        for own in waiting:
            check = None if own is node else self._check(own)
            if check not in {None, ANYWHERE}:
                found.append(check)
            elif (leaf := self._leaf(own)) is not None:
                # A parameter that is used by the operation itself names its module.
                if all(_kind(user) in _MOVES or user is node for user in self._users[own]):
                    return leaf.rpartition(".")[0] or "the model itself"
                found.append(leaf.rpartition(".")[0])
            else:
                for child, _ in own.next_functions:
                    if child is not None and child not in known:
                        known.add(child)
                        waiting.append(child)
            if len(set(found)) > 1 or len(known) > _FAR:
                break
        parts = [name.split(".")[:-1] for name in found]
        shared = []
        for level in zip(*parts, strict=False):
            if len(set(level)) > 1:
                break
            shared.append(level[0])
        if not found:
            return "nothing that is guarded"
        return ".".join(shared) or "the model itself"


def _covered(check: str, user: Node, node: Node) -> tuple[set[_Check], set[str]]:
    """Return the check that watches the gradient of a check's inputs that `node` has made.

    Returns:
        The checks, and names of the inputs that none of them watches.
    """
    if check == ANYWHERE:
        kind = _kind(user)
        places = {place for place, (child, _) in enumerate(user.next_functions) if child is node}
        made = _OF_OPERATIONS[NODES[kind]]
        if kind in _WITH_BIAS and places == {0}:
            made = frozenset(("bias.gradient",))
        return {(check, made)}, set()
    record = record_of(user)
    if record is None or record.covering is None:
        return {(check, _OF_GRADIENTS)}, set()
    edges = zip(record.wanted, user.next_functions, strict=False)
    places = {place for place, (child, _) in edges if child is node}
    watched = {place for place in places if place in record.covering}
    checks = {(check, frozenset((record.covering[place],))) for place in watched}
    return checks, {f"attention {_OF_ATTENTION[place]}" for place in places - watched}


_OF_ATTENTION = ("query whose keys are frozen", "key", "value", "mask")
"""Names of its inputs, where no check watches their gradient."""
_FAR = 200
"""Nodes behind which it is no longer asked where an operation's inputs come from."""


@cache
def _kind_of(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name.rpartition(":")[2])


def _kind(node: Node) -> str:
    return _kind_of(node.name())


def _label(node: Node, kind: str) -> str:
    """Torch's name of an operation, from the name of its node."""
    if kind == _COMPILED:
        return "a compiled graph"
    if _is_custom(node, kind):
        return "custom operation " + kind.removeprefix(_CUSTOM)
    if kind.startswith("ScaledDot"):
        return "attention"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()


_CUSTOM = "GeneratedBackwardFor_"


def _is_custom(node: Node, kind: str) -> bool:
    """Return whether somebody's own code makes the gradient: of ``torch.library`` or a Function."""
    owner = getattr(node, "_forward_cls", None)
    if kind.startswith(_CUSTOM):
        return True
    return owner is not None and not owner.__module__.startswith(FRAMEWORKS)


def _flops(node: Node, kind: str) -> float | None:
    """FLOPs of the forward pass of a matrix product, from shapes alone; 0 for what is none.

    None where shapes do not tell: of nested tensors, and of what is multiplied by frozen numbers.
    """
    of_layer = getattr(node, "_forward_cls", None) is CheckedLinear
    kind = "Linear" if of_layer else kind
    is_convolution, is_attention = kind.endswith("Convolution"), kind.startswith("ScaledDot")
    is_recurrent = re.search("Rnn|Lstm|Gru", kind)
    if not (kind in _PRODUCTS or is_convolution or is_attention or is_recurrent):
        return 0.0
    # A layer's bias comes first, if it has one.
    operands = [_shape(*edge) for edge in node.next_functions[-2 if of_layer else 0 :]]
    out = _shape(node, 0)
    if not out:
        return None
    size = 2.0 * prod(out)
    if kind in _PRODUCTS:
        left, right = (operands[i] if i < len(operands) else None for i in _PRODUCTS[kind])
        if left:
            return size * left[-1]
        # The weight of a linear layer stands the other way round.
        shared = -1 if kind == "Linear" or len(right or ()) < 2 else -2
        return size * right[shared] if right else None
    if is_convolution:
        weight = operands[1] if len(operands) > 1 else None
        return size * prod(weight[1:]) if weight else None
    if is_attention:
        keys = next((operand for operand in operands[1:3] if operand), None)
        return 2.0 * size * keys[-2] if keys else None
    return (
        size / out[-1] * sum(prod(operand) for operand in operands if operand and len(operand) == 2)
    )


def _owner(node: Node) -> LinearChecks | Record | None:
    """The layer's checks, or the record, that this node was made for, if any."""
    if getattr(node, "_forward_cls", None) is CheckedLinear:
        layer: LinearChecks = node.layer  # type: ignore[attr-defined]
        return layer
    return record_of(node)


def _metadata(node: Node, place: int = 0) -> Any:
    """Shape, type and device of a result of a node, or None where they are not known."""
    try:
        return node._input_metadata[place]
    except (IndexError, RuntimeError):
        return None


def _device(node: Node) -> str:
    """The type of the device on which a node has made something; empty where it is not known."""
    made = _metadata(node)
    return "" if made is None else str(made.device.type)


def _is_plain_sum(node: Node) -> bool:
    """Return whether nothing multiplies the second operand, other than a sign."""
    return getattr(node, "_saved_alpha", 1) in {1, -1}


def _is_empty(node: Node) -> bool:
    """Return whether it has made no numbers, as an expert without tokens does."""
    return 0 in (_shape(node, 0) or ())


def _is_zero(gradient: Tensor | None) -> bool:
    """Return whether no gradient has come since it was set to zero, as far as this rank can see."""
    plain = type(gradient) is Tensor and gradient.layout == torch.strided
    return plain and gradient is not None and not bool(gradient.any())


def _shape(node: Node | None, place: int) -> tuple[int, ...] | None:
    """Shape of what a node has made, where it is made of plain numbers."""
    made = None if node is None else _metadata(node, place)
    if made is None:
        return None
    shape = tuple(made.shape)
    return shape if all(type(size) is int for size in shape) else None
