"""`guard()` and the handle of a guarded model, with the verdict on every step.

The verdict is what all ranks know of a step's numbers before the optimizer applies them. It travels
with the gradients: checksums follow the reductions, and once the passes are done
`GradientReduction.verdict` exchanges two numbers per rank. `remedy` says what follows.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from outlast.errors import DataCorruptionError, GuardError
from outlast.guard.audit import Audit
from outlast.guard.buffers import BufferWatch, KeptBuffers
from outlast.guard.findings import Certificate, certificates
from outlast.guard.install import install
from outlast.guard.parameter_writes import counted_writes
from outlast.guard.policy import Level, Policy, policy_of
from outlast.guard.scrubber import Scrubber
from outlast.guard.survey import Survey
from outlast.guard.watch import Watch, computing, reducing_device, world_size
from outlast.state.sharded import is_fsdp_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.fsdp import FSDPModule
    from torch.optim import Optimizer

    from outlast.guard.audit_schedule import AuditReport
    from outlast.guard.collectives import ReplicatedReduction, ShardedReduction
    from outlast.guard.findings import Finding, Ledger
    from outlast.guard.policy import Coverages, Uncovered


T = TypeVar("T")

_WRITTEN = (
    "If the program itself writes there in a way that is not seen (NumPy, .data of optimizer state "
    "or of one number), let it write to the tensor under torch.no_grad(). "
)
ATTEMPTS = 3
"""How often a step's passes are run at most."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a step's gradients, equal on all ranks.

    Attributes:
        step: Optimizer steps done before.
        bad_ranks: Ranks whose own numbers, or what they received from a collective, are wrong and
            could not be corrected.
        bad_results: Those among them that received wrong values. A collective that went wrong for
            all of its ranks names them all: its sum does not tell whose part was wrong.
        dropped: Ranks whose gradients are not among the averaged ones.
    """

    step: int
    bad_ranks: tuple[int, ...]
    bad_results: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """No rank has wrong values."""
        return not self.bad_ranks


@dataclass
class Terms:
    """Whose gradients a step's reductions add up.

    Attributes:
        dropped: Ranks of the default process group that contribute zeros to means over the others.
    """

    dropped: tuple[int, ...] = ()

    def remaining(self, ranks: Sequence[int]) -> int:
        """Number of these that are not dropped.

        Raises:
            GuardError: When none is.
        """
        count = len(set(ranks) - set(self.dropped))
        if not count:
            raise GuardError(
                f"the gradients of ranks {', '.join(map(str, ranks))} are all dropped: there is "
                "none left to average; take the devices out of service"
            )
        return count


@dataclass(frozen=True)
class Remedy:
    """Action that follows a verdict that is not clean.

    Attributes:
        action: ``redo`` the passes, redo them and ``drop`` the gradients of `ranks`, or ``raise``.
        ranks: To drop.
    """

    action: Literal["redo", "drop", "raise"]
    ranks: tuple[int, ...] = ()


def remedy(verdicts: Sequence[Verdict], persistent: Literal["raise", "drop"], size: int) -> Remedy:
    """Choose the action after these attempts at a step, none of them clean; equal on all ranks.

    The first failure may have been a transient: all ranks run the passes again. Ranks that fail in
    two attempts in a row do so persistently. Their gradients can be left out, as erasures, if they
    are what is wrong; wrong results of collectives cannot, whoever contributes.

    Args:
        verdicts: Of the attempts at this step so far, at least one.
        persistent: See `Policy`.
        size: Number of ranks.
    """
    last = verdicts[-1]
    if len(verdicts) >= ATTEMPTS:
        return Remedy("raise")
    if len(verdicts) == 1:
        return Remedy("redo")
    ranks = tuple(sorted(set(verdicts[-2].bad_ranks) & set(last.bad_ranks)))
    if not ranks:
        return Remedy("redo")
    if persistent == "drop" and not last.bad_results and len(ranks) < size:
        return Remedy("drop", ranks)
    return Remedy("raise")


def agree(
    step: int, uncorrected: int, bad_results: int = 0, dropped: Sequence[int] = ()
) -> Verdict:
    """Tell all ranks of the default process group; every rank calls this at the same point.

    One all-reduce of two integers per rank; without a process group nothing is sent.

    Args:
        step: Optimizer steps done.
        uncorrected: Findings of this rank that left wrong values in its own part of the step.
        bad_results: Findings in what it received from collectives.
        dropped: Ranks whose own numbers do not matter since their gradients are left out.
    """
    counts, size = [[uncorrected], [bad_results]], world_size()
    if size > 1:
        slots = torch.zeros((2, size), dtype=torch.int64, device=reducing_device())
        slots[:, dist.get_rank()] = torch.tensor([uncorrected, bad_results], device=slots.device)
        dist.all_reduce(slots)
        counts = slots.tolist()
    own = {rank for rank, count in enumerate(counts[0]) if count and rank not in dropped}
    received = {rank for rank, count in enumerate(counts[1]) if count}
    return Verdict(step, tuple(sorted(own | received)), tuple(sorted(received)), tuple(dropped))


class GradientReduction:
    """The collectives of a model's data parallelism, and the verdict that follows from them.

    Args:
        watch: What all checks of the guard share. All ranks have the same seed and step.
        replicated: DDP wrappers.
        sharded: FSDP2 modules by name.

    Raises:
        GuardError: When the model's collectives cannot be checked.
    """

    def __init__(
        self,
        watch: Watch,
        replicated: Sequence[DistributedDataParallel],
        sharded: Mapping[str, FSDPModule],
    ) -> None:
        self.watch = watch
        self.terms = Terms()
        self._parts: list[ReplicatedReduction | ShardedReduction] = []
        # It loads FSDP2 and DTensor, half a second that a process alone need not spend.
        from outlast.guard.collectives import (
            FSDP_REPLACEABLE,
            ReplicatedReduction,
            ShardedReduction,
        )

        for ddp in replicated:
            reduction = next(
                (state for _, state in ddp._comm_hooks if isinstance(state, ReplicatedReduction)),
                None,
            ) or ReplicatedReduction(ddp)
            reduction.attach(watch, self.terms)
            self._parts.append(reduction)
        if sharded and FSDP_REPLACEABLE:
            self._parts.append(ShardedReduction(sharded, watch, self.terms))
        elif sharded:
            warnings.warn(
                f"torch {torch.__version__} has no way to replace FSDP2's collectives (2.13 has "
                "one): they are not checked",
                stacklevel=3,
            )

    def begin(self) -> None:
        """An attempt at a step begins: forget what the one before has found."""
        for part in self._parts:
            part.begin()

    def drop(self, ranks: Iterable[int]) -> None:
        """Leave the gradients of these ranks out of the step's means, until `restore`.

        They contribute zeros, whatever their gradients are, and the sum is divided by the number of
        the others: the exact mean over these. The default process group counts the ranks. With
        tensor or pipeline parallelism all ranks of a replica must be named.

        Raises:
            GuardError: At the next reduction, when no rank remains that it could average.
        """
        self.terms.dropped = tuple(sorted(set(ranks)))

    def restore(self) -> None:
        """Take all ranks' gradients again; called when a step is done."""
        self.terms.dropped = ()

    def verdict(self, uncorrected: int) -> Verdict:
        """Return the verdict on the step; all ranks call this together, after backward.

        Waits for the device, for the first time in the step.

        Args:
            uncorrected: Findings of this rank so far that left wrong values in the step.
        """
        before = self.watch.uncorrected
        for part in self._parts:
            part.check()
        self.watch.settle()
        received = self.watch.uncorrected - before
        return agree(self.watch.step, uncorrected, received, self.terms.dropped)

    def remove(self) -> None:
        """Check no more."""
        for part in self._parts:
            part.release()


def install_collectives(watch: Watch, model: nn.Module) -> GradientReduction | None:
    """Check the collectives of a model that is, or holds, a DDP wrapper or FSDP2 modules.

    Returns:
        None for any other model. A DDP wrapper cannot be found from the model inside it.

    Raises:
        GuardError: When its collectives cannot be checked.
    """
    modules = dict(model.named_modules())
    replicated = [m for m in modules.values() if isinstance(m, DistributedDataParallel)]
    sharded = {name: m for name, m in modules.items() if is_fsdp_module(m)}
    if not replicated and not sharded:
        return None
    return GradientReduction(watch, replicated, sharded)


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
        scrubber: The checks of optimizer state and parameters at rest; None without an optimizer.
        replays: The audits; None where the policy asks for none, or without an optimizer.
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
        self.scrubber: Scrubber | None = None
        self.replays: Audit | None = None
        self._buffers: BufferWatch | None = None
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self._optimizers = list(given or [])
        self._stepped: set[int] = set()
        self._known_sizes = self._sizes()
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
        self._survey.begin()

    @property
    def ledger(self) -> Ledger:
        """Counts and findings of the checks on this process."""
        return self.watch.ledger

    @property
    def seconds(self) -> float | None:
        """Time that the checks took so far; None where the device runs behind the host."""
        if any(parameter.device.type != "cpu" for parameter in self._model.parameters()):
            return None
        scrubbing = 0.0 if self.scrubber is None else self.scrubber.seconds
        auditing = 0.0 if self.replays is None else self.replays.budget.seconds
        return self.watch.seconds + scrubbing + auditing

    @property
    def device(self) -> torch.device:
        """Device of the model; the CPU for one without parameters."""
        parameters = self._model.parameters()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    @property
    def on_warning(self) -> Callable[[str], None] | None:
        """Told what has no check, where a step shows it, instead of a warning of Python's."""
        return self._survey.on_warning

    @on_warning.setter
    def on_warning(self, told: Callable[[str], None] | None) -> None:
        self._survey.on_warning = told

    @property
    def checks_collectives(self) -> bool:
        """True if sums over other processes are checked, too."""
        return self._reduction is not None

    def certificate(self) -> dict[str, Certificate]:
        """By check: how many were made, how well rounding explains them, and what was missed."""
        return certificates(self.ledger)

    def coverage(self) -> Coverages:
        """Every module that holds parameters, with the checks made in the last step, or why none.

        Before the first step these are the checks that are expected. As a string: which share of
        the FLOPs and bytes of the last surveyed step was checked, and the operations that were not.
        """
        return self._survey.coverage()

    def uncovered(self) -> Uncovered:
        """List the modules, parameters and operations that no check watched in the last step."""
        return self._survey.uncovered()

    def audit(
        self,
        passes: Callable[[Any], T],
        batch: Any,
        *,
        reload: Callable[[], Any] | None = None,
    ) -> T:
        """Do the passes of a micro-batch, and where its turn has come, audit them.

        ::

            def passes(batch):
                loss = loss_of(model(batch)) / microbatches
                loss.backward()
                return loss.detach()

            for _ in guard.attempts():
                optimizer.zero_grad()
                for batch in microbatches_of_the_step:
                    guard.audit(passes, batch)
            optimizer.step()

        All ranks of the data-parallel group call it together, as often per step.

        Args:
            passes: Does the forward and backward passes of one micro-batch, and returns its loss. A
                function of the batch, the model's parameters and buffers, and the generators of
                torch, NumPy and Python alone, also on another rank.
            batch: Tensors, arrays and plain values, in dictionaries, lists, tuples and dataclasses.
            reload: Reads the same batch again.

        Returns:
            What `passes` returns.

        Raises:
            GuardError: When the batch cannot be copied.
        """
        if self.replays is None:
            return passes(batch)
        found: T = self.replays.micro_batch(passes, batch, reload)
        return found

    def audits(self) -> AuditReport | None:
        """Report the audits made so far; None where the policy asks for none."""
        return None if self.replays is None else self.replays.report

    def at_rest(self) -> tuple[int, int]:
        """Elements of all parameters, and of those that are checked at rest and in their update.

        Another kind of coverage: a wrong product is none of what these checks can see.
        """
        elements = sum(parameter.numel() for parameter in self._model.parameters())
        return elements, 0 if self.scrubber is None else self.scrubber.elements

    def remove(self) -> None:
        """Give the model back as it was."""
        self._undo.close()

    def prefer(self) -> None:
        """Check functions and operations here that several guarded models of a process call.

        The guard that was installed last checks them, or the one that was preferred last.
        """
        for function in self._installed.functions:
            function.prefer()
        if self.watch.operations is not None:
            self.watch.operations.prefer()

    @computing("check")
    def finish(self) -> None:
        """Make the checks that wait for a next step; all ranks together, after the last one.

        Raises:
            DataCorruptionError: On all ranks, when the last step's numbers are no longer what it
                has left, and no replica had them.
        """
        self._survey.finish()
        if self.scrubber is not None:
            self.scrubber.finish()
        self.watch.settle()
        verdict = agree(self.watch.step, self.watch.uncorrected)
        if not verdict.clean:
            raise self._wrong(verdict)

    @computing("check")
    def before_save(self) -> None:
        """Look whether what is to be saved is what the last step has left; all ranks together.

        At level full that is all of it, at others the slice that is watched at this time.

        Raises:
            DataCorruptionError: On all ranks, when it is not: it must not become the newest
            version.
        """
        if self.scrubber is None:
            return
        moved = self.scrubber.has_moved()
        if not agree(self.watch.step, int(moved and self.policy.correct)).clean:
            self.finish()

    @computing("check")
    def restart(self, step: int) -> None:
        """Weights and optimizer state were loaded from outside: continue at `step` with them.

        To be called on all ranks together, also after a resume: all ranks draw the same signs.
        """
        self.watch.restart(step)
        self._stepped.clear()
        if self.replays is not None:
            self.replays.restart(step)
        self._begin()
        # It remembers numbers that are no longer there.
        self._renew_scrubber()
        if self._buffers is not None:
            self._buffers.note()

    @property
    def intact_step(self) -> int | None:
        """Steps of the newest state from before what was found wrong in memory, on this rank.

        None where nothing was, since the last clean verdict. What was copied elsewhere of that step
        may hold the fault still, if it came before: see `has_left`. At level light a fault counts
        as having come after its slice was last checked.
        """
        return self.watch.intact

    @computing("check")
    def has_left(self, step: int) -> bool | None:
        """Return whether weights and optimizer state are now as the step to `step` has left them.

        At level full all of them are compared, at others the slice that was watched then. None
        where nothing is known of that step.
        """
        return None if self.scrubber is None else self.scrubber.has_left(step)

    @computing("check")
    def go_back(self, step: int) -> None:
        """Continue at an earlier `step` with its state; as `restart`, with what is known of it."""
        earlier = self.scrubber
        self.restart(step)
        if earlier is not None and self.scrubber is not None:
            self.scrubber.go_back(earlier)

    def again(self) -> None:
        """The step's numbers are not used: its passes begin anew, with other signs."""
        self.watch.redraw()
        self._begin()

    @computing("check")
    def verdict(self) -> Verdict:
        """Return whether the step may be applied; all ranks ask together, before the update.

        The optimizer does not ask again for a verdict that is clean, unless some rank has checked
        anything since. If it does not step, `again` must follow.
        """
        watch = self.watch
        with watch.uncounted():
            if self.scrubber is not None:
                self.scrubber.before_step()
            if self._buffers is not None:
                watch.timed(self._buffers.before_step)
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

        Attempts begin with the same state of torch's random generators, and with the same buffers,
        such as batch normalisation's averages.

        A step whose turn for an audit has come repeats its passes, too; see `outlast.guard.audit`.

        Yields:
            How often the passes have been run before.

        Raises:
            DataCorruptionError: On all ranks, when some rank's numbers stay wrong.
        """
        verdicts: list[Verdict] = []
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        random = torch.get_rng_state(), torch.cuda.get_rng_state_all() if used else []
        made = 0
        kept: KeptBuffers | None = None
        while True:
            self._begin()
            with self.watch.uncounted():
                kept = kept or KeptBuffers(self._model)
            for _ in (None,) if self.replays is None else self.replays.step_passes(self._begin):
                yield made
                made += 1
            verdict = self.verdict()
            if verdict.clean:
                if verdicts and not verdict.dropped:
                    self.ledger.repeated(verdict.step)
                return
            # A false alarm does not survive other signs, and all ranks draw the same.
            self.watch.redraw()
            with self.watch.uncounted():
                kept.restore()
            # So that dropout drops the same numbers again.
            host, devices = random
            torch.set_rng_state(host)
            if devices:
                torch.cuda.set_rng_state_all(devices)
            verdicts.append(verdict)
            follows = remedy(verdicts, self.policy.persistent, world_size())
            if follows.action == "drop" and self._reduction is not None:
                self._reduction.drop(follows.ranks)
            elif follows.action != "redo":
                raise self._wrong(verdict)

    def _begin(self) -> None:
        self._approved = False
        self.watch.begin()
        self._survey.begin()
        if self._buffers is not None:
            self.watch.timed(self._buffers.begin)
        if self._reduction is not None:
            self._reduction.begin()
        if self.replays is not None:
            self.replays.begin()

    def _wrong(self, verdict: Verdict) -> DataCorruptionError:
        ranks = ", ".join(map(str, verdict.bad_ranks))
        last = self.ledger.findings[-1] if self.watch.uncorrected else None
        return DataCorruptionError(
            f"step {verdict.step + 1}: the numbers of rank {ranks} are wrong and stay so"
            + (f" ({last})" if last else "")
            + "; take the device out of service and continue from the newest checkpoint. "
            + (_WRITTEN if last is not None and last.operation in {"rest", "weight"} else "")
            + "If other "
            "devices give the same numbers, it is the library's kernel that is wrong: use another "
            "type or memory format for this operation"
        )

    def _new_scrubber(self) -> Scrubber:
        return Scrubber(
            self.watch,
            _at_rest(self._model),
            self._optimizers,
            self._replicas,
            self.policy.reaches("full"),
        )

    def _renew_scrubber(self) -> None:
        if self.scrubber is not None:
            self.watch.seconds += self.scrubber.seconds
            self.scrubber = self._new_scrubber()
            self.scrubber.begin()

    def _sizes(self) -> list[int]:
        """Numbers of parameters of the optimizers' groups."""
        return [
            len(group["params"])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def _install_rest(self, model: nn.Module) -> None:
        if self.policy.reaches("linear"):
            self._reduction = install_collectives(self.watch, model)
        if self._reduction is not None:
            self._undo.callback(self._reduction.remove)
        if self._optimizers:
            self.watch.driven = True
            self._undo.callback(setattr, self.watch, "driven", False)
            if self.policy.reaches("light"):
                self._undo.enter_context(counted_writes(self._model))
                self.scrubber = self._new_scrubber()
            if self.policy.audits:
                wrapper = model if isinstance(model, DistributedDataParallel) else None
                self.replays = Audit(self.watch, self._model, wrapper, self._optimizers)
            if self.policy.reaches("full"):
                self._buffers = BufferWatch(self.watch, self._model)
        for optimizer in self._optimizers:
            for hook in (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            ):
                self._undo.callback(hook.remove)
            if self.replays is not None:
                # Before all others: what they do to parameters is no part of the step.
                hook = optimizer.register_step_post_hook(self._after_update)
                optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
                self._undo.callback(hook.remove)
        self._model._outlast_watch = self.watch
        self._undo.callback(delattr, self._model, "_outlast_watch")
        # So that the checks last as long as the model, though nobody keeps this handle.
        self._model._outlast_installed = self._installed
        self._undo.callback(delattr, self._model, "_outlast_installed")

    @computing("check")
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
        if self.scrubber is not None:
            self.scrubber.written(optimizer)
        self.watch.timed(self._survey.judge, optimizer)
        if self.replays is not None and self.replays.due:
            self.replays.budget.spend(self.replays.updates.before(optimizer))
        self._survey.stepping(optimizer)

    @computing("check")
    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        if self.replays is not None and self.replays.due:
            self.replays.budget.spend(self.replays.updates.after(optimizer))

    @computing("check")
    def _after(self, optimizer: Optimizer, *_: object) -> None:
        self._survey.stepping(None)
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            # What was found since the verdict is the next one's.
            self._advance()

    def _advance(self) -> None:
        self._approved = False
        self._stepped.clear()
        self.watch.timed(self._survey.advance)
        with self.watch.uncounted():
            if self.scrubber is not None:
                self.scrubber.after_step()
            if self.replays is not None:
                self.replays.advance()
            if self._buffers is not None:
                self.watch.timed(self._buffers.note)
        self.watch.advance()
        if self._reduction is not None:
            self._reduction.restore()
        if self.scrubber is not None and self._known_sizes != (sizes := self._sizes()):
            # Parameters have joined, as with a new adapter, which are to be watched, too.
            self._known_sizes = sizes
            self.scrubber.finish()
            self._renew_scrubber()


def _at_rest(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that have a rounding bound, with their names."""
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            yield name, parameter


def _refuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "_outlast_watch", None) is not None:
            which = f"its part {name}" if name else "the model"
            raise GuardError(f"{which} is guarded already; call remove() of that guard first")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise GuardError(
                f"parameter {name} has no shape yet; run the model once before it is guarded"
            )
        if parameter.is_complex():
            raise GuardError(
                f"parameter {name} is {parameter.dtype}, and complex numbers have no checks; guard "
                "the parts of the model without them"
            )
