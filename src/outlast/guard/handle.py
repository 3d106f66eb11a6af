"""`guard()` and what it returns: the handle of a guarded model."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.errors import GuardError, WrongNumbersError
from outlast.guard.coverage import Coverage
from outlast.guard.linear import LinearChecks
from outlast.guard.policy import Level, Policy, policy_of
from outlast.guard.verdict import Verdict
from outlast.guard.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

    from outlast.guard.findings import Finding, Ledger

_ATTEMPTS = 3


def guard(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    policy: Policy | Level = "linear",
    *,
    on_finding: Callable[[Finding], None] | None = None,
) -> Guard:
    """Check a model's computations while it trains, in place, without changing its numbers.

    Args:
        model: Any module, before or after DDP, FSDP2 or torch.compile is applied to it.
        optimizer: Its optimizer or optimizers. The first asks for the verdict before its step.
        policy: A level (``light``, ``linear``, ``full``) or a `Policy`.
        on_finding: Called with every `Finding` on this process.

    Raises:
        GuardError: For an unknown policy, a model that is guarded already, or complex parameters.
    """
    return Guard(model, optimizer, policy_of(policy), on_finding)


class Guard:
    """A guarded model; see `guard`.

    Attributes:
        ledger: What the checks have seen and found on this process.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        policy: Policy,
        on_finding: Callable[[Finding], None] | None,
    ) -> None:
        _refuse(model)
        self.policy = policy
        self.watch = Watch(policy, on_finding)
        self._model = model
        self._coverage: list[Coverage] = []
        self._undo: list[Callable[[], None]] = []
        self._verdict: Verdict | None = None
        self._install_modules()
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self._install_optimizers(list(optimizers or []))
        model._outlast_guard = self  # type: ignore[assignment]
        self._undo.append(lambda: delattr(model, "_outlast_guard"))

    @property
    def ledger(self) -> Ledger:
        """What the checks have seen and found on this process."""
        return self.watch.ledger

    def coverage(self) -> list[Coverage]:
        """Every module that holds parameters, with its checks or why it has none."""
        return list(self._coverage)

    def remove(self) -> None:
        """Give the model back as it was."""
        while self._undo:
            self._undo.pop()()

    def verdict(self) -> Verdict:
        """Whether the step's numbers may be used; all ranks ask together, before the update."""
        watch = self.watch
        watch.settle()
        bad = [watch.uncorrected]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            own = torch.tensor(bad, dtype=torch.int64)
            gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, own)
            bad = [int(each) for each in gathered]
        self._verdict = Verdict(watch.step, tuple(rank for rank, n in enumerate(bad) if n))
        return self._verdict

    def attempts(self) -> Iterator[int]:
        """Repeat a step's passes until its numbers may be used.

        Around what gives the gradients::

            for _ in guard.attempts():
                optimizer.zero_grad()
                loss(model(batch)).backward()
            optimizer.step()

        Yields:
            The number of attempts before.

        Raises:
            WrongNumbersError: On all ranks, when some rank's numbers stay wrong.
        """
        for attempt in range(_ATTEMPTS):
            self.watch.begin()
            yield attempt
            if self.verdict().clean:
                return
        raise self._wrong()

    def _wrong(self) -> WrongNumbersError:
        assert self._verdict is not None
        ranks = ", ".join(map(str, self._verdict.bad_ranks))
        last = self.ledger.findings[-1] if self.watch.uncorrected else None
        return WrongNumbersError(
            f"step {self.watch.step}: the numbers of rank {ranks} are wrong and stay so"
            + (f" ({last})" if last else "")
            + "; take the device out of service and go on from the newest checkpoint"
        )

    def _install_modules(self) -> None:
        for name, module in self._model.named_modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            kind = type(module).__name__
            operations, why_not = self._install(name, module)
            self._coverage.append(Coverage(name, kind, operations, why_not))
        if missing := [each for each in self._coverage if not each.operations]:
            kinds = sorted({each.kind for each in missing})
            if self.policy.reaches("linear"):
                warnings.warn(
                    f"{len(missing)} modules are not guarded: {', '.join(kinds)}; "
                    "Guard.coverage() lists them",
                    stacklevel=4,
                )

    def _install(self, name: str, module: nn.Module) -> tuple[tuple[str, ...], str]:
        """Put one module's checks in place; returns their operations, or why there are none."""
        if not self.policy.reaches("linear", name):
            return (), f"policy {self.policy.level_of(name)}"
        if type(module).forward is nn.Linear.forward:
            assert isinstance(module, nn.Linear)
            if isinstance(module.weight, DTensor) and not _is_fsdp(module.weight):
                return (), "split over ranks by tensor parallelism"
            self._replace_forward(module, LinearChecks(self.watch, module, name))
            return ("linear.forward", "linear.dx", "linear.dw", "weight"), ""
        return (), "no check for this kind of module"

    def _replace_forward(self, module: nn.Module, forward: Any) -> None:
        before = module.__dict__.get("forward")
        module.forward = forward

        def undo() -> None:
            if before is None:
                del module.forward
            else:
                module.forward = before

        self._undo.append(undo)

    def _install_optimizers(self, optimizers: list[Optimizer]) -> None:
        if not optimizers:
            return

        def before(*_: object) -> None:
            if self._verdict is None or self._verdict.step != self.watch.step:
                self.verdict()
            assert self._verdict is not None
            if not self._verdict.clean:
                raise self._wrong()

        def after(*_: object) -> None:
            self._verdict = None
            self.watch.advance()

        hooks = (
            optimizers[0].register_step_pre_hook(before),
            optimizers[-1].register_step_post_hook(after),
        )
        self._undo.extend(hook.remove for hook in hooks)


def _is_fsdp(parameter: DTensor) -> bool:
    return False


def _refuse(model: nn.Module) -> None:
    if getattr(model, "_outlast_guard", None) is not None:
        raise GuardError("the model is guarded already; call remove() of its guard first")
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise GuardError(
                f"parameter {name} is {parameter.dtype}: complex numbers have no checks; exclude "
                "the module that holds it from the model that is guarded"
            )
