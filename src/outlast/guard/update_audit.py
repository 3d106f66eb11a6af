"""Optimizers' steps repeated on copies, for a slice of the parameters, and compared bit for bit."""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from outlast.guard.findings import Site
from outlast.guard.residual import equal_bits, exact_test
from outlast.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from outlast.guard.audit_schedule import AuditSchedule
    from outlast.guard.findings import Outcome
    from outlast.guard.watch import Watch

UPDATE_ELEMENTS = 1 << 22
"""Parameters of an optimizer are taken in turn until an audit of its step has so many numbers."""

_State = tuple["Tensor", dict[str, Any]]
"""A parameter and its state."""


@dataclass
class _Copied:
    """A parameter before an optimizer's step, and its state."""

    name: str
    parameter: Tensor
    group: int
    before: Tensor
    state: dict[str, Any]


@dataclass
class _Update:
    """A step of an optimizer that is repeated: parameters, attributes and, later, gradients."""

    parameters: list[_Copied]
    attributes: dict[str, Any]
    gradients: list[Tensor]


@dataclass
class UpdateAudit:
    """Optimizers' steps, repeated for a slice of their parameters, which are taken in turn.

    A parameter goes through whole, with its state: a part of it may be rounded otherwise.

    Args:
        watch: What all checks of the guard share.
        schedule: Says when.
        named: The model's parameters.
        optimizers: Those that step.

    Attributes:
        made: Steps that were repeated.
        compared: Tensors compared.
        why_not: Optimizers that are not audited, and why.
    """

    watch: Watch
    schedule: AuditSchedule
    named: Sequence[tuple[str, Tensor]]
    optimizers: Sequence[Optimizer]
    made: int = 0
    compared: int = 0
    why_not: str = ""
    _cursors: dict[int, int] = field(default_factory=dict)
    _proven: set[int] = field(default_factory=set)
    _refused: set[int] = field(default_factory=set)
    _under_way: dict[int, _Update] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Share of an optimizer's numbers in one audit, the smallest of all."""
        shares = []
        for optimizer in self.optimizers:
            sizes = [item.numel() for group in optimizer.param_groups for item in group["params"]]
            total = sum(sizes)
            if total and id(optimizer) not in self._refused:
                shares.append(min(max(UPDATE_ELEMENTS, *sizes) / total, 1.0))
        return min(shares, default=0.0)

    def before(self, optimizer: Optimizer) -> float:
        """Copy what a step will change; returns the seconds that it took."""
        key = id(optimizer)
        if key in self._refused:
            return 0.0
        began = perf_counter()
        names = {id(parameter): name for name, parameter in self.named}
        entries = [
            (number, parameter)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None and not parameter.grad.is_sparse
        ]
        if not entries:
            return 0.0
        start = self._cursors.get(key, self.schedule.draw(4)) % len(entries)
        chosen: list[_Copied] = []
        elements = 0
        for number, parameter in (*entries[start:], *entries[:start]):
            if chosen and elements + parameter.numel() > UPDATE_ELEMENTS:
                break
            elements += parameter.numel()
            name = names.get(id(parameter), "a parameter outside of the model")
            now, state = _now(optimizer, parameter)
            chosen.append(_Copied(name, parameter, number, now.detach().clone(), _copied(state)))
        self._cursors[key] = start + len(chosen)
        # By now, since some attributes hold for the step alone, as a gradient scaler's.
        self._under_way[key] = _Update(chosen, dict(vars(optimizer)), [])
        return perf_counter() - began

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> float:
        """Repeat the step and compare; returns the seconds that it took."""
        update = self._under_way.pop(id(optimizer), None)
        if update is None:
            return 0.0
        began = perf_counter()
        # Now, since other hooks may have changed them after this one's turn; all ranks together.
        update.gradients = [_gradient(item.parameter) for item in update.parameters]
        try:
            first = _repeated(optimizer, update)
            wrong = {
                item.name
                for item, made in zip(update.parameters, first, strict=True)
                if not _equal(made, _now(optimizer, item.parameter))
            }
            second = _repeated(optimizer, update) if wrong else first
        except Exception as error:
            self._refuse(optimizer, f"its step cannot be repeated on copies ({error})")
            return perf_counter() - began
        self.made += 1
        self.compared += len(update.parameters)
        if not wrong:
            self._proven.add(id(optimizer))
        elif not (
            id(optimizer) in self._proven or type(optimizer).__module__.startswith("torch.optim")
        ):
            self._refuse(optimizer, "its step of a slice alone has never given the same numbers")
            return perf_counter() - began
        site = self.watch.ledger.site("optimizer", "audit.update")
        if self.watch.wants(site, exact_test([item.name in wrong for item in update.parameters])):
            self._settle(optimizer, update, first, second, wrong)
        return perf_counter() - began

    def _settle(
        self,
        optimizer: Optimizer,
        update: _Update,
        first: list[_State],
        second: list[_State],
        wrong: set[str],
    ) -> None:
        """Put the numbers right that two repeated steps agree on, and note what was found."""
        for item, one, two in zip(update.parameters, first, second, strict=True):
            if item.name not in wrong:
                continue
            now = _now(optimizer, item.parameter)
            if not _equal(one, two):
                outcome: Outcome = "detected"
                said = "no two of three steps agree"
                if _equal(two, now):
                    outcome, said = "check", "the second step was wrong"
            elif self.watch.policy.correct:
                outcome, said = "corrected", "two repeated steps agree"
                now[0].copy_(one[0])
                for name, value in one[1].items():
                    if isinstance(value, torch.Tensor) and isinstance(now[1][name], torch.Tensor):
                        now[1][name].copy_(value)
                    else:
                        optimizer.state[item.parameter][name] = value
            else:
                outcome, said = "detected", "two repeated steps agree on other numbers"
            text = Site(f"{item.name}: {said}", "audit.update")
            self.watch.find(text, item.parameter.device, 1, math.inf, outcome)

    def _refuse(self, optimizer: Optimizer, why: str) -> None:
        self._refused.add(id(optimizer))
        self.why_not = f"{type(optimizer).__name__}: {why}"
        warnings.warn(f"guard.audit: updates are not audited: {self.why_not}", stacklevel=3)


def _repeated(optimizer: Optimizer, update: _Update) -> list[_State]:
    """Parameters and state after a step of another optimizer of the same class, on copies."""
    kind = type(optimizer)
    twin = object.__new__(kind)
    vars(twin).update(update.attributes)
    # Hooks belong to the step that was made.
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, name, OrderedDict())
    twin.state = defaultdict(dict)
    copies: dict[int, list[Tensor]] = {}
    made = []
    for item, gradient in zip(update.parameters, update.gradients, strict=True):
        parameter = torch.nn.Parameter(item.before.clone())
        parameter.grad = gradient.clone()
        if item.state:
            twin.state[parameter] = _copied(item.state)
        copies.setdefault(item.group, []).append(parameter)
        made.append(parameter)
    # Without the parameters, that no copy of them is made.
    options = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    twin.param_groups = [
        {**_copied(options[number]), "params": parameters} for number, parameters in copies.items()
    ]
    step = kind.step
    if getattr(step, "hooked", False):
        # What torch puts around it calls hooks that a program may have put on all optimizers.
        step = getattr(step, "__wrapped__", step)
    with torch.enable_grad():
        step(twin)
    return [(parameter.detach(), dict(twin.state.get(parameter, {}))) for parameter in made]


def _equal(one: _State, two: _State) -> bool:
    if one[1].keys() != two[1].keys() or not _same(one[0], two[0]):
        return False
    return all(_same(value, two[1][name]) for name, value in one[1].items())


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        if not one.is_floating_point():
            return bool(torch.equal(one, two))
        return bool(equal_bits(one.contiguous(), two.contiguous().to(one.device)).all())
    return bool(one == two)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _gradient(parameter: Tensor) -> Tensor:
    """The part of a gradient that belongs to the part of the parameter on this rank."""
    gradient = parameter.grad
    assert gradient is not None
    if is_dtensor(gradient) and is_dtensor(parameter):
        gradient = gradient.redistribute(placements=parameter.placements)
    return _local(gradient).detach()


def _now(optimizer: Optimizer, parameter: Tensor) -> _State:
    """The part of a parameter and of its state on this rank, as the same memory."""
    return _local(parameter), {
        name: _local(item) if isinstance(item, torch.Tensor) else item
        for name, item in optimizer.state.get(parameter, {}).items()
    }


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in values.items()
    }
