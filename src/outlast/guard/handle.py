"""`guard()` and what it returns: the handle of a guarded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import GuardError, WrongNumbersError
from outlast.guard.findings import Certificate, certificates
from outlast.guard.install import install
from outlast.guard.patrol import Patrol
from outlast.guard.policy import Level, Policy, policy_of
from outlast.guard.survey import Survey
from outlast.guard.verdict import GradientReduction, Verdict, agree, install_collectives, remedy
from outlast.guard.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

    from outlast.guard.coverage import Coverage, Uncovered
    from outlast.guard.findings import Finding, Ledger


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
        watch: What its checks share.
        patrol: The checks of optimizer state and parameters at rest; None without an optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        policy: Policy,
        on_finding: Callable[[Finding], None] | None,
    ) -> None:
        self.policy = policy
        self.watch = Watch(policy, on_finding)
        # A wrapper's prefix would hide the names that patterns are written for.
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        _refuse(self._model)
        self._installed = install(self.watch, self._model)
        self._undo = self._installed.undo
        self._reduction: GradientReduction | None = None
        # Whether the last verdict was clean; equal on all ranks.
        self._approved = False
        self.patrol: Patrol | None = None
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self._optimizers = list(given or [])
        self._stepped: set[int] = set()
        self._replicas = model.process_group if isinstance(model, DistributedDataParallel) else None
        self._survey = Survey(
            self.watch,
            self._model,
            self._installed.coverage,
            self._installed.linear,
            self._optimizers,
        )
        self._undo.enter_context(self._survey.installed())
        try:
            self._install_rest(model)
        except BaseException:
            self._undo.close()
            raise

    @property
    def ledger(self) -> Ledger:
        """What the checks have seen and found on this process."""
        return self.watch.ledger

    @property
    def seconds(self) -> float | None:
        """Time that the checks took so far; None where the device runs behind the host."""
        if any(parameter.device.type != "cpu" for parameter in self._model.parameters()):
            return None
        return self.watch.seconds + (0.0 if self.patrol is None else self.patrol.seconds)

    @property
    def device(self) -> torch.device:
        """What the model computes on; the CPU for one without parameters."""
        parameters = self._model.parameters()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    @property
    def checks_collectives(self) -> bool:
        """Whether the sums over other processes are among what is checked."""
        return self._reduction is not None

    def certificate(self) -> dict[str, Certificate]:
        """By check: how many were made, how well rounding explains them, and what was missed."""
        return certificates(self.ledger)

    def coverage(self) -> list[Coverage]:
        """Every module that holds parameters, with the checks made in the last step, or why none.

        Before the first step these are the checks that are expected.
        """
        return self._survey.coverage()

    def uncovered(self) -> Uncovered:
        """What no check has watched in the last step: modules, parameters and operations."""
        return self._survey.uncovered()

    def at_rest(self) -> tuple[int, int]:
        """Elements of all parameters, and of those that are checked at rest and in their update.

        Another kind of coverage: a wrong product is none of what these checks can see.
        """
        elements = sum(parameter.numel() for parameter in self._model.parameters())
        return elements, 0 if self.patrol is None else self.patrol.elements

    def remove(self) -> None:
        """Give the model back as it was."""
        self._undo.close()

    def prefer(self) -> None:
        """Where several models of a process are guarded, check the next one's functions here.

        Attention and loss are functions that all models call; the guard that was installed last
        checks them, or the one that was preferred last.
        """
        for function in self._installed.functions:
            function.prefer()

    def finish(self) -> None:
        """Make the checks that wait for a next step; all ranks together, after the last one.

        Raises:
            WrongNumbersError: On all ranks, when the last step's numbers are no longer what it has
                left, and no replica had them.
        """
        if self.patrol is not None:
            self.patrol.finish()
        self.watch.settle()
        verdict = agree(self.watch.step, self.watch.uncorrected)
        if not verdict.clean:
            raise self._wrong(verdict)

    def before_save(self) -> None:
        """Look whether what is to be saved is what the last step has left; all ranks together.

        At level full that is all of it, at others the slice that is watched at this time.

        Raises:
            WrongNumbersError: On all ranks, when it is not: it must not become the newest version.
        """
        if self.patrol is None:
            return
        moved = self.patrol.has_moved()
        if not agree(self.watch.step, int(moved and self.policy.correct)).clean:
            self.finish()

    def restart(self, step: int) -> None:
        """Weights and optimizer state were loaded from outside: go on at `step` with them.

        To be called on all ranks together, also after a resume: all ranks draw the same signs.
        """
        self.watch.restart(step)
        self._stepped.clear()
        self._begin()
        if self.patrol is not None:
            # It remembers numbers that are no longer there.
            self.watch.seconds += self.patrol.seconds
            self.patrol = self._new_patrol()

    def again(self) -> None:
        """The step's numbers are not used: its passes begin anew, with other signs."""
        self.watch.redraw()
        self._begin()

    def verdict(self) -> Verdict:
        """Whether the step's numbers may be used; all ranks ask together, before the update.

        The optimizer does not ask again for a verdict that is clean, unless some rank has checked
        anything since. If it does not step, `again` must follow.
        """
        watch = self.watch
        if self.patrol is not None:
            self.patrol.before_step()
        watch.settle()
        if self._reduction is not None:
            verdict = self._reduction.verdict(watch.uncorrected)
        else:
            verdict = agree(watch.step, watch.uncorrected)
        self._approved = verdict.clean
        if verdict.clean:
            watch.approve()
        return verdict

    def attempts(self) -> Iterator[int]:
        """Repeat a step's passes until its numbers may be used.

        Around what gives the gradients::

            for _ in guard.attempts():
                optimizer.zero_grad()
                loss(model(batch)).backward()
            optimizer.step()

        Attempts begin with the same state of torch's random generators. Buffers that the passes
        change, such as batch normalisation's averages, are changed by every attempt.

        Yields:
            The number of attempts before.

        Raises:
            WrongNumbersError: On all ranks, when some rank's numbers stay wrong.
        """
        verdicts: list[Verdict] = []
        random = _random_states()
        size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        while True:
            self._begin()
            yield len(verdicts)
            verdict = self.verdict()
            if verdict.clean:
                if verdicts and not verdict.dropped:
                    self.ledger.repeated(verdict.step)
                return
            # A false alarm does not survive other signs, and all ranks draw the same.
            self.watch.redraw()
            # So that dropout drops the same numbers again.
            _restore_random_states(random)
            verdicts.append(verdict)
            follows = remedy(verdicts, self.policy.persistent, size)
            if follows.action == "drop" and self._reduction is not None:
                self._reduction.drop(follows.ranks)
            elif follows.action != "redo":
                raise self._wrong(verdict)

    def _begin(self) -> None:
        self._approved = False
        self.watch.begin()
        if self._reduction is not None:
            self._reduction.begin()

    def _wrong(self, verdict: Verdict) -> WrongNumbersError:
        ranks = ", ".join(map(str, verdict.bad_ranks))
        last = self.ledger.findings[-1] if self.watch.uncorrected else None
        return WrongNumbersError(
            f"step {verdict.step + 1}: the numbers of rank {ranks} are wrong and stay so"
            + (f" ({last})" if last else "")
            + "; take the device out of service and go on from the newest checkpoint"
        )

    def _new_patrol(self) -> Patrol:
        return Patrol(
            self.watch,
            _at_rest(self._model),
            self._optimizers,
            self._replicas,
            self.policy.reaches("full"),
        )

    def _install_rest(self, model: nn.Module) -> None:
        if self.policy.reaches("linear"):
            self._reduction = install_collectives(self.watch, model)
        if self._reduction is not None:
            self._undo.callback(self._reduction.remove)
        if self._optimizers:
            self.watch.driven = True
            self._undo.callback(lambda: setattr(self.watch, "driven", False))
            if self.policy.reaches("light"):
                self.patrol = self._new_patrol()
        for optimizer in self._optimizers:
            for hook in (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            ):
                self._undo.callback(hook.remove)
        self._model._outlast_watch = self.watch
        self._undo.callback(lambda: delattr(self._model, "_outlast_watch"))
        # So that the checks last as long as the model, though nobody keeps this handle.
        self._model._outlast_installed = self._installed
        self._undo.callback(lambda: delattr(self._model, "_outlast_installed"))

    def _before(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """An optimizer is about to use the gradients of the passes since the last step."""
        # torch passes the optimizer itself as the first argument.
        if any(argument is not None for argument in (*arguments[1:], options.get("closure"))):
            raise GuardError(
                "optimizer.step(closure) runs passes inside of the step, where the guard cannot "
                "stop it; run them before, and call step() without a closure"
            )
        if id(optimizer) in self._stepped:
            # Some optimizers step more often than others: this is a step of its own.
            self._advance()
        # A verdict holds for all optimizers, unless there were checks since. That may be so on some
        # ranks alone, and all of them must ask again or none.
        unjudged = int(self.watch.unjudged)
        if not (self._approved and agree(self.watch.step, unjudged).clean):
            verdict = self.verdict()
            if not verdict.clean:
                raise self._wrong(verdict)
        self.watch.timed(self._survey.judge, optimizer)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            # What was found since the verdict is the next one's.
            self._advance()

    def _advance(self) -> None:
        self._approved = False
        self._stepped.clear()
        self.watch.timed(self._survey.advance)
        if self.patrol is not None:
            self.patrol.after_step()
        self.watch.advance()
        if self._reduction is not None:
            self._reduction.restore()


def _at_rest(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that have a rounding bound, with their names."""
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            yield name, parameter


def _random_states() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of torch's generators on the CPU and on all devices in use."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if used else []


def _restore_random_states(states: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    host, devices = states
    torch.set_rng_state(host)
    if devices:
        torch.cuda.set_rng_state_all(devices)


def _refuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "_outlast_watch", None) is not None:
            which = f"its part {name}" if name else "the model"
            raise GuardError(f"{which} is guarded already; call remove() of that guard first")
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise GuardError(
                f"parameter {name} is {parameter.dtype}, and complex numbers have no checks; guard "
                "the parts of the model without them"
            )
