"""Replay audits: now and then, a part of a step is computed a second time and compared.

Identities check the operations that have one. An audit knows nothing of operations: it takes one
micro-batch, at a step that is drawn, and computes its forward and backward passes again, on another
rank of the data-parallel group where there is one. Loss, gradients and buffers must come out alike,
whatever the model is made of. So is the optimizer's step repeated for a slice of its parameters,
from copies of what was there before.

*What is compared.* One fingerprint per tensor: a 64-bit hash where equal bits can be asked for
(deterministic algorithms, or one thread of a CPU; the same kind of device on all ranks), else 64
sums with random signs. The squared distance of two such sums has the squared distance of the
tensors as its mean (count sketch: Charikar, Chen and Farach-Colton 2002), and one wrong number
stands in it unchanged. The tolerance is measured: at the first audit the passes are repeated
`CLEAN_REPEATS` times, and what differs by more than `WIDER` times the largest of these (of half of
the ranks), and by more than `WIDER` roundings of the tensor's type, is in doubt. Noise grows where
gradients become sums of what cancels, so a tensor in doubt is measured again, in that step.

*Gradients* are read as autograd hands them to the parameters, before they are added to those of
other micro-batches and before DDP sums them over ranks. A replay gets the batch as it arrived, the
generators and the buffers as they were, and parameters without gradients; all is put back
afterwards. Where gradients exist only after a reduction (FSDP2, tensor and pipeline parallelism),
and in loops that only have `Guard.attempts`, all ranks repeat the step's passes together: that
finds what does not repeat itself, and cannot tell whose part was wrong once gradients are summed.

*The vote.* A third computation says which of two is alone: by a third rank; with two ranks, by both
again, which names a rank that does not agree with itself; alone, by the same device.

*When.* Steps are cut into periods, with one audit at a step of each that is drawn from the seed.
Rank 0 measures what audits and steps take, and all ranks use its next period.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
import platform
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import GuardError
from outlast.guard.audit_schedule import AuditBudget, AuditReport, AuditSchedule
from outlast.guard.findings import Site
from outlast.guard.replica_hashes import CHAIN, hash64
from outlast.guard.residual import ResidualTest, exact_test, plain_parts, same_content
from outlast.guard.threshold import DEVIATIONS
from outlast.guard.update_audit import UpdateAudit
from outlast.guard.watch import reducing_device, world_size
from outlast.state.sharded import is_dtensor, is_fsdp1_module, is_fsdp_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from outlast.guard.watch import Watch


CLEAN_REPEATS = 4
"""Computations from which a tolerance is measured."""

WIDER = 4.0
"""The tolerance, in differences of clean computations, and at least in roundings of the type."""

_REPEATED = "the batch, buffers and torch's, NumPy's and Python's generators"
_SKETCH = 64
_BLOCK = _SKETCH * 64


@dataclass
class _Moment:
    """Generators and buffers at some time."""

    host: Tensor
    device: Tensor | None
    python: Any
    numpy: Any
    buffers: list[Tensor]

    @classmethod
    def take(cls, device: torch.device, buffers: Sequence[Tensor]) -> _Moment:
        """Copy the generators and buffers as they are now."""
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002 (the one that programs draw from)
            [buffer.detach().clone() for buffer in buffers],
        )

    def restore(self, device: torch.device, buffers: Sequence[Tensor]) -> None:
        """Put everything back."""
        with torch.no_grad():
            for buffer, saved in zip(buffers, self.buffers, strict=True):
                if not same_content(buffer, saved.to(buffer.device)):
                    buffer.copy_(saved)
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002


@dataclass
class _Fingerprints:
    """Fingerprints of one computation: of its loss, gradients and buffers, and of its batch.

    Attributes:
        rows: (tensors, 1) int64 hashes or (tensors, 64) float64 sums, on the CPU.
        data: Hash of the batch after the passes.
    """

    rows: Tensor
    data: int = 0


@dataclass(frozen=True)
class _Difference:
    """The tensors in which two computations differ.

    Attributes:
        rows: Their rows.
        worst: Largest difference, in tolerances; infinite where bits are compared.
    """

    rows: tuple[int, ...]
    worst: float

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class _Vote:
    """Outcome of a third computation of a micro-batch whose first two differ.

    Attributes:
        owner: Place in the group of the rank whose micro-batch it is.
        suspects: Places of those that may be wrong.
        said: In a few words.
        difference: Of the two.
        reproduced: Whether any two computations were equal.
    """

    owner: int
    suspects: tuple[int, ...]
    said: str
    difference: _Difference
    reproduced: bool


class _Recorder:
    """Fingerprints of gradients as autograd hands them to their parameters, within a context."""

    def __init__(self, parameters: Sequence[Tensor], fingerprint: Callable[[Tensor], Tensor]):
        self._parameters = parameters
        self._fingerprint = fingerprint
        self._stack = contextlib.ExitStack()
        self._nodes: list[Any] = []
        self.rows: list[Tensor | None] = [None] * len(parameters)

    def __enter__(self) -> _Recorder:
        for row, parameter in enumerate(self._parameters):
            if parameter.requires_grad and parameter.is_leaf:
                # A hook of the node and not of the tensor, which compiled code would look at. The
                # node lives as long as somebody keeps it.
                node = get_gradient_edge(parameter).node
                self._nodes.append(node)
                hook = node.register_prehook(partial(self._note, row))
                self._stack.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._nodes.clear()

    def _note(self, row: int, gradients: tuple[Tensor | None, ...]) -> None:
        (gradient,) = gradients
        if gradient is None:
            return
        with torch.no_grad():
            found, before = self._fingerprint(gradient.detach()), self.rows[row]
            if before is not None:
                # A parameter gets several parts, as with several micro-batches.
                found = before * CHAIN + found if found.dtype == torch.int64 else before + found
            self.rows[row] = found


class Audit:
    """The audits of a guarded model; see the module.

    Args:
        watch: What all checks of the guard share.
        model: The model or its DDP wrapper.
        wrapper: The DDP wrapper; None: there is none.
        optimizers: Its optimizers.

    Attributes:
        schedule: When there is one.
        budget: What they take.
        updates: Those of the optimizers' steps.
        why_not: Why no passes are audited.
        repeats_steps: Whether bodies of `Guard.attempts` are repeated.
    """

    def __init__(
        self,
        watch: Watch,
        model: nn.Module,
        wrapper: DistributedDataParallel | None,
        optimizers: Sequence[Optimizer],
    ) -> None:
        policy = watch.policy
        self.watch = watch
        self.schedule = AuditSchedule(policy.seed, policy.audit_period)
        self.budget = AuditBudget(policy.audit)
        self.why_not = ""
        self.repeats_steps = policy.audit_steps
        self._wrapper = wrapper
        named = list(model.named_parameters())
        buffers = {name: item for name, item in model.named_buffers() if not is_dtensor(item)}
        self._parameters = [parameter for _, parameter in named]
        self._buffers = [*buffers.values()]
        self._names = ["the loss", *(name for name, _ in named), *buffers]
        modules = list(model.modules())
        self._sharded = any(map(is_dtensor, self._parameters)) or any(
            is_fsdp_module(module) or is_fsdp1_module(module) for module in modules
        )
        # Where passes need all ranks, one alone cannot repeat another's.
        self._together = self._sharded or any(
            isinstance(module, torch.nn.SyncBatchNorm) for module in modules
        )
        self._group = None if wrapper is None else wrapper.process_group
        self._place = 0 if self._group is None else dist.get_rank(self._group)
        self._size = 1 if self._group is None else dist.get_world_size(self._group)
        self.updates = UpdateAudit(watch, self.schedule, named, optimizers)
        self._exact: bool | None = None
        self._tolerance: Tensor | None = None
        # Whether two computations have ever agreed.
        self._proven = False
        self._failed_before = -1
        self._number = self._count = 0
        self._replays = self._compared = 0
        self._unit = ""
        self._audited = False
        self._signs: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def due(self) -> bool:
        """Return whether this step has an audit."""
        return self.schedule.due(self.watch.step)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next((parameter.device for parameter in self._parameters), torch.device("cpu"))

    @property
    def report(self) -> AuditReport:
        """The audits made so far."""
        tolerance = 0.0 if self._tolerance is None else float(self._tolerance.median())
        return AuditReport(
            budget=self.watch.policy.audit if not self.watch.policy.audit_period else 0.0,
            period=self.schedule.period,
            steps=self.budget.steps,
            replays=self._replays,
            unit=self._unit,
            microbatches=self._count if self._unit == "micro-batch" else 1,
            elsewhere=self._unit == "micro-batch" and self._size > 1,
            exact=self._exact,
            tolerance=tolerance,
            updates=self.updates.made,
            update_share=self.updates.share,
            compared=self._compared + self.updates.compared,
            seconds=self.budget.seconds,
            steps_seconds=self.budget.steps_seconds,
            why_not=self.why_not,
            updates_why_not=self.updates.why_not,
        )

    def restart(self, step: int) -> None:
        """Weights and optimizer state are others now, and `step` steps are done; all ranks."""
        self.schedule.restart(step)
        self.budget.pause()
        self._failed_before = -1
        self._audited = False
        self.begin()

    def begin(self) -> None:
        """The passes of a step begin, or begin anew."""
        self._number = 0

    def advance(self) -> None:
        """End a step; all ranks together."""
        given, self._number = self._number, 0
        self._count = given or self._count
        self.budget.step()
        if not self.schedule.due(self.watch.step):
            return
        if not self._audited and not given and self.repeats_steps:
            self._stop(
                "the loop does not repeat its passes: put them into `for _ in guard.attempts():`, "
                "or give them to guard.audit(passes, batch)"
            )
        elif not self._audited and not given:
            # Not asked for, so nothing to warn of.
            self.why_not = self.why_not or (
                'with guard.audit = "auto" only those of `outlast train` are, and those that are '
                "given to guard.audit(); a share repeats steps in guard.attempts(), too"
            )
        self._audited = False
        self._failed_before = -1
        period = torch.tensor([self.budget.period()], device="cpu")
        if world_size() > 1:
            period = period.to(reducing_device())
            dist.broadcast(period, src=0)
        self.schedule.advance(self.watch.step + 1, int(period))

    def follow(self, before: Audit) -> None:
        """Take the place of another's, whose counts continue."""
        self.budget, self._replays = before.budget, before._replays
        self.repeats_steps = before.repeats_steps
        self._compared, self.why_not = before._compared, before.why_not
        self.updates.made, self.updates.compared = before.updates.made, before.updates.compared

    def refuse(self, why: str) -> None:
        """Audit no passes, for a reason that is known from the start."""
        self.why_not = why

    def _stop(self, why: str) -> None:
        if not self.why_not:
            self.why_not = why
            warnings.warn(
                f"guard.audit: the passes are not audited, only the optimizer's updates: {why}",
                stacklevel=4,
            )

    def micro_batch(
        self, passes: Callable[[Any], Any], batch: Any, reload: Callable[[], Any] | None
    ) -> Any:
        """``passes(batch)``, and its audit where it is due; see `Guard.audit`."""
        number, self._number = self._number, self._number + 1
        if not self.due or self.why_not or self._together:
            return passes(batch)
        # As many as in the step before; in a first one they are not known.
        if number != self.schedule.draw(2, self.watch.step) % max(self._count, 1):
            return passes(batch)
        self._audited, self._unit = True, "micro-batch"
        self._replays += 1
        began = self._clock()
        self._decide()
        moment = _Moment.take(self.device, self._buffers)
        arrived, content = data_hash(batch), self._packed(batch, moment)
        paid = self._clock()
        with self._recorder() as recorder:
            loss = passes(batch)
        resumed = self._clock()
        original = self._taken(recorder, loss, batch)
        play = partial(self._computed, passes, content)
        shift = (
            1 + self.schedule.draw(3, self.watch.step) % (self._size - 1) if self._size > 1 else 0
        )
        again = play(shift)
        self._measure(original, again, play)
        self._judge_data(number, batch, (arrived, original.data, again.data), content, reload)
        self._judge(f"micro-batch {number}", original, again, shift, play)
        self.budget.spend(paid - began + self._clock() - resumed)
        return loss

    def step_passes(self, begin: Callable[[], None]) -> Iterator[None]:
        """Yield for an attempt's passes, and again where they are repeated; all ranks together.

        Args:
            begin: Forgets what checks have found in the passes before.
        """
        given = self._count and not self._together
        if not self.due or self.why_not or given or not self.repeats_steps:
            yield
            return
        self._unit = "step"
        self._decide()
        moment = _Moment.take(self.device, self._buffers)
        found: list[_Fingerprints] = []

        def passes() -> Iterator[None]:
            with self._recorder() as recorder:
                yield
            found.append(self._taken(recorder, None, None))

        yield from passes()
        if self._number and not self._together:
            # `micro_batch` audits this loop, from the next audit on without this one.
            return
        self._audited = True
        self._replays += 1
        began = self._clock()
        measures = not self._exact and self._tolerance is None
        wanted = 1 + (CLEAN_REPEATS if measures else 1)
        # For a vote, one more computation; for the noise of here and now, several.
        more = 1 if self._exact else CLEAN_REPEATS
        while len(found) < wanted:
            begin()
            moment.restore(self.device, self._buffers)
            yield from passes()
            if len(found) == wanted:
                if measures:
                    self._set_tolerance(found[0], found[1:])
                    measures = False
                differs = bool(self._compare(found[0], found[1]))
                if wanted < 2 + more and any(self._gathered(differs)):
                    wanted = 2 + more
        self._judge_step(found)
        self.budget.spend(self._clock() - began)

    def _judge_step(self, found: list[_Fingerprints]) -> None:
        first, second, third = found[0], found[1], found[min(2, len(found) - 1)]
        if not self._exact and len(found) == 2 + CLEAN_REPEATS:
            self._widen(found[2:])
        difference = self._compare(first, second)
        vote = None
        if difference:
            alone, reproduced = self._alone(first, second, third)
            said = f"the passes of the step, computed again by the same ranks: {alone}"
            if self._together and world_size() > 1:
                said += "; all ranks have a part in it: whose was wrong is not known"
            vote = _Vote(0, (0,), said, difference, reproduced)
        self._count_compared(difference)
        everyone = self._gathered(vote)
        votes = [item for item in everyone if item is not None]
        if votes and self._give_up(votes, len(everyone)):
            return
        self._proven = self._proven or len(votes) < len(everyone)
        if vote is not None:
            self._find(vote)

    def _judge(
        self,
        name: str,
        original: _Fingerprints,
        again: _Fingerprints,
        shift: int,
        play: Callable[[int], _Fingerprints],
    ) -> None:
        """Compare, and let a third computation vote where that is needed; the group together."""
        difference = self._compare(original, again)
        bad = any(self._gathered(bool(difference)))
        if bad and not self._exact:
            # Noise grows where gradients become sums of what cancels: here and now it may be more.
            self._widen([play(0) for _ in range(CLEAN_REPEATS)])
            difference = self._compare(original, again)
            bad = any(self._gathered(bool(difference)))
        self._count_compared(difference)
        if not bad:
            self._proven = True
            return
        size, me = self._size, self._place
        other = (me - shift) % size
        third = play(0 if size < 3 else shift % (size - 1) + 1)
        fourth = play(shift) if size == 2 else third
        vote = None
        if difference:
            suspects: tuple[int, ...] = (me,)
            where = "" if size == 1 else f" of {self._rank(me)}"
            if size == 1:
                said, reproduced = self._alone(original, again, third)
            else:
                where += f", computed again on {self._rank(other)}"
                voter = (me - (shift % (size - 1) + 1)) % size
                computed = (original, again, third, fourth)
                suspects, said, reproduced = self._suspects(computed, other, voter)
            vote = _Vote(me, suspects, f"{name}{where}: {said}", difference, reproduced)
        votes = [item for item in self._gathered(vote) if item is not None]
        if self._give_up(votes, size):
            return
        self._proven = self._proven or len(votes) < size
        for item in votes:
            if me in item.suspects:
                self._find(item)

    def _suspects(
        self, computed: tuple[_Fingerprints, ...], other: int, voter: int
    ) -> tuple[tuple[int, ...], str, bool]:
        """Places of those that may be wrong, why, and whether any two computations agree.

        Args:
            computed: The original, the first replay on `other`, the third computation, and with two
                ranks the second replay.
            other: Place of the rank that has made the replays.
            voter: Place of the one that has made the third computation, with three ranks or more.
        """
        original, again, third, fourth = computed
        me, mine, theirs = self._place, self._rank(self._place), self._rank(other)
        like_original = not self._compare(third, original)
        like_again = not self._compare(third, again)
        if self._size > 2:
            says = f"{self._rank(voter)} agrees with"
            if like_again and not like_original:
                return (me,), f"{mine} is wrong ({says} {theirs})", True
            if like_original and not like_again:
                return (other,), f"{theirs} is wrong ({says} {mine})", True
            return (me, other), f"{mine} or {theirs} is wrong (no two of three agree)", False
        if like_again and not like_original:
            return (me,), f"{mine} is wrong (its own second computation agrees with {theirs})", True
        same = not self._compare(fourth, again)
        if like_original and not self._compare(fourth, original) and not same:
            return (other,), f"{theirs} is wrong (its second computation agrees with {mine})", True
        said = f"{mine} or {theirs} is wrong, and two ranks cannot tell which"
        if not self._proven:
            said += f", or the passes use more than {_REPEATED}"
        return (me, other), said, like_original or same

    def _alone(
        self, first: _Fingerprints, second: _Fingerprints, third: _Fingerprints
    ) -> tuple[str, bool]:
        """Tell which of two computations of a device is alone, and whether any two agree."""
        if not self._compare(third, second):
            return "the first was wrong (a third one agrees with the second)", True
        if not self._compare(third, first):
            return "the second was wrong (a third one agrees with the first)", True
        return "no two of three agree", False

    def _give_up(self, votes: list[_Vote], everyone: int) -> bool:
        """Decide, alike on all ranks, that the passes cannot be repeated, rather than are wrong.

        Only where no two computations have ever agreed, and all of them differ.
        """
        if self._proven or len(votes) < everyone:
            return False
        again = self._failed_before == self.watch.step
        self._failed_before = self.watch.step
        alone = self._unit == "step" or self._size == 1
        if any(vote.reproduced for vote in votes) and not (again and alone):
            return False
        self._stop(
            f"they give other numbers each time: they use more than {_REPEATED}, or the device is "
            f"wrong every time; {votes[0].said}"
        )
        return True

    def _judge_data(
        self,
        number: int,
        batch: Any,
        hashes: tuple[int, int, int],
        content: bytes,
        reload: Callable[[], Any] | None,
    ) -> None:
        """Compare hashes of the batch as it arrived, and after the passes and their replay."""
        arrived, after, replayed = hashes
        site = self.watch.ledger.site("micro-batch", "audit.data")
        wrong = ""
        if after not in (arrived, replayed):
            # Passes may write to their batch; then the replay has done the same.
            wrong = "it changed in memory after it had arrived"
            if self.watch.policy.correct:
                stored, _ = self._unpacked(content)
                _put_back(batch, stored)
        elif reload is not None and data_hash(reload()) != arrived:
            wrong = "read again, it is another one"
        if self.watch.wants(site, exact_test([bool(wrong)])):
            said = Site(f"micro-batch {number}: {wrong}", "audit.data")
            self.watch.find(said, self.device, 1, math.inf, "detected")

    def _find(self, vote: _Vote) -> None:
        """Note a finding: this rank may be wrong."""
        rows, worst = vote.difference.rows, vote.difference.worst * DEVIATIONS
        others = [self._names[row] for row in rows if row]
        if others:
            text = (
                f"{vote.said}; {len(others)} of {len(self._names) - 1} tensors, first {others[0]}"
            )
            site = Site(text, "audit.gradient")
            self.watch.find(site, self.device, len(others), worst, "detected")
        if 0 in rows:
            self.watch.find(Site(vote.said, "audit.loss"), self.device, 1, worst, "detected")

    def _count_compared(self, difference: _Difference) -> None:
        rows = set(difference.rows)
        wrong = [row in rows for row in range(len(self._names))]
        self._compared += len(wrong)
        tolerance = 0.0 if self._tolerance is None else float(self._tolerance.max())
        parts = [("audit.gradient", wrong[1:])]
        if self._unit == "micro-batch":
            parts.append(("audit.loss", wrong[:1]))
        worst = difference.worst * DEVIATIONS
        for operation, flags in parts:
            test = ResidualTest(
                torch.tensor(flags, device="cpu"),
                sum(flags),
                worst,
                0.0,
                tolerance,
                bool(self._exact),
            )
            self.watch.wants(self.watch.ledger.site(self._unit, operation), test)

    def _computed(self, passes: Callable[[Any], Any], content: bytes, shift: int) -> _Fingerprints:
        """This rank's micro-batch as the rank `shift` places before it computes it."""
        theirs = self._shifted(content, -shift)
        batch, moment = self._unpacked(theirs)
        with self._isolated(moment), self._recorder() as recorder:
            loss = passes(batch)
            found = self._taken(recorder, loss, batch)
        answer = pickle.dumps((found.rows, found.data))
        return _Fingerprints(*pickle.loads(self._shifted(answer, shift)))

    @contextlib.contextmanager
    def _isolated(self, moment: _Moment) -> Iterator[None]:
        """No gradients, no reductions, and generators and buffers of `moment`; all put back."""
        gradients = [parameter.grad for parameter in self._parameters]
        before = _Moment.take(self.device, self._buffers)
        wrapper, flags = self._wrapper, (False, False)
        if wrapper is not None:
            flags = (wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync)
            wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
        for parameter in self._parameters:
            parameter.grad = None
        moment.restore(self.device, self._buffers)
        try:
            yield
        finally:
            before.restore(self.device, self._buffers)
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            if wrapper is not None:
                wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = flags

    def _recorder(self) -> _Recorder:
        return _Recorder([] if self._sharded else self._parameters, self._fingerprint)

    @torch.no_grad()
    def _taken(self, recorder: _Recorder, loss: Any, batch: Any) -> _Fingerprints:
        empty = torch.zeros(
            1 if self._exact else _SKETCH,
            dtype=torch.int64 if self._exact else torch.float64,
            device="cpu",
        )
        gradients = recorder.rows
        if self._sharded:
            gradients = [
                None if parameter.grad is None else self._fingerprint(parameter.grad)
                for parameter in self._parameters
            ]
        tensors = [item for item in leaves_of(loss) if isinstance(item, torch.Tensor)]
        rows = [
            self._fingerprint(torch.cat([item.detach().reshape(-1).double() for item in tensors]))
            if tensors
            else None,
            *gradients,
            *map(self._fingerprint, self._buffers),
        ]
        stacked = torch.stack([empty if row is None else row.cpu() for row in rows])
        return _Fingerprints(stacked, 0 if batch is None else data_hash(batch))

    def _fingerprint(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to_local() if is_dtensor(tensor) else tensor
        parts = plain_parts(tensor)
        if self._exact:
            return hash64([part.contiguous() for part in parts]).reshape(1)
        none = torch.zeros(_SKETCH, dtype=torch.float64, device=tensor.device)
        return sum(map(self._sketch, parts), none)

    def _sketch(self, tensor: Tensor) -> Tensor:
        """(64,) sums of numbers with random signs, in fp64."""
        if tensor.device not in self._signs:
            generator = torch.Generator().manual_seed(self.watch.policy.seed)
            drawn = torch.randint(0, 2, (2, _BLOCK), generator=generator, device="cpu")
            signs = 2.0 * drawn.double() - 1.0
            self._signs[tensor.device] = (signs[0].to(tensor.device), signs[1].to(tensor.device))
        across, down = self._signs[tensor.device]
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        total = torch.zeros(_BLOCK, dtype=torch.float64, device=tensor.device)
        for first in range(0, flat.numel(), _BLOCK * _BLOCK):
            part = flat[first : first + _BLOCK * _BLOCK]
            missing = -part.numel() % _BLOCK
            wide = torch.nn.functional.pad(part.double(), (0, missing)).view(-1, _BLOCK)
            total += down[: len(wide)] @ wide
        return (total * across).view(-1, _SKETCH).sum(dim=0)

    def _decide(self) -> None:
        """Decide, alike on all ranks, whether bits can be compared."""
        if self._exact is not None:
            return
        kinds = self._gathered((repeats_bits(self.device), device_kind(self.device)))
        self._exact = all(exact for exact, _ in kinds) and len({kind for _, kind in kinds}) == 1

    def _gathered(self, value: Any) -> list[Any]:
        """Values of all ranks that audit together: of the group, or where passes are, of all."""
        if self._unit == "step":
            size, group = world_size(), None
        else:
            size, group = self._size, self._group
        if size == 1:
            return [value]
        found: list[Any] = [None] * size
        dist.all_gather_object(found, value, group=group)
        return found

    def _measure(
        self,
        original: _Fingerprints,
        again: _Fingerprints,
        play: Callable[[int], _Fingerprints],
    ) -> None:
        """At the first audit, measure by how much clean computations differ."""
        if self._exact or self._tolerance is not None:
            return
        shifts = [
            1 + repeat % (self._size - 1) if self._size > 1 else 0
            for repeat in range(1, CLEAN_REPEATS)
        ]
        self._set_tolerance(original, [again, *map(play, shifts)])

    def _set_tolerance(self, original: _Fingerprints, repeats: list[_Fingerprints]) -> None:
        largest = self._noise([(original, item) for item in repeats])
        tensors = [None, *self._parameters, *self._buffers]
        floors = [
            torch.finfo(item.dtype).eps
            if item is not None and item.is_floating_point()
            else torch.finfo(torch.float32).eps
            for item in tensors
        ]
        # 16-bit parameters get 16-bit gradients; autocast rounds on the way to wider ones.
        self._tolerance = WIDER * torch.maximum(
            largest, torch.tensor(floors, dtype=torch.float64, device="cpu")
        )

    def _widen(self, repeats: list[_Fingerprints]) -> None:
        """Take in by how much computations of the same rank differ, in a step that is in doubt."""
        assert self._tolerance is not None
        noise = self._noise([*combinations(repeats, 2)])
        self._tolerance = torch.maximum(self._tolerance, WIDER * noise)

    def _noise(self, pairs: Sequence[tuple[_Fingerprints, _Fingerprints]]) -> Tensor:
        """(tensors,) largest distance of these pairs, as half of the ranks find it at most."""
        apart = torch.stack([_distance(one.rows, two.rows) for one, two in pairs])
        largest = torch.nan_to_num(apart, nan=0.0, posinf=0.0).amax(dim=0)
        if self._unit == "step":
            return largest
        # One wrong rank does not widen it for all.
        return torch.stack(self._gathered(largest)).median(dim=0).values

    def _compare(self, one: _Fingerprints, two: _Fingerprints) -> _Difference:
        if self._exact:
            wrong = (one.rows != two.rows).any(dim=1)
            return _Difference(_rows(wrong), math.inf if bool(wrong.any()) else 0.0)
        assert self._tolerance is not None
        ratio = _distance(one.rows, two.rows) / self._tolerance
        wrong = ~(ratio <= 1.0)
        return _Difference(_rows(wrong), float(torch.nan_to_num(ratio, nan=math.inf).max()))

    def _packed(self, batch: Any, moment: _Moment) -> bytes:
        try:
            buffers = [buffer.cpu() for buffer in moment.buffers]
            return pickle.dumps((_on_host(batch), dataclasses.replace(moment, buffers=buffers)))
        except Exception as error:
            raise GuardError(
                f"guard.audit: a micro-batch of {type(batch).__name__} cannot be copied ({error}); "
                "give guard.audit() a batch of tensors, arrays and plain numbers"
            ) from error

    def _unpacked(self, content: bytes) -> tuple[Any, _Moment]:
        batch, moment = pickle.loads(content)
        return _on_device(batch, self.device), moment

    def _shifted(self, content: bytes, shift: int) -> bytes:
        """The content of the rank `shift` places before this one; the group together."""
        size = self._size
        if shift % size == 0:
            return content
        group = self._group
        assert group is not None
        device = reducing_device(group)
        to, source = (
            dist.get_global_rank(group, place % size)
            for place in (self._place + shift, self._place - shift)
        )
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        length = torch.tensor([len(content)], device=device)
        theirs = torch.empty_like(length)
        _swap(length, to, theirs, source, group)
        received = torch.empty(int(theirs), dtype=torch.uint8, device=device)
        _swap(mine, to, received, source, group)
        return bytes(received.cpu().numpy().data)

    def _rank(self, place: int) -> str:
        assert self._group is not None
        return f"rank {dist.get_global_rank(self._group, place)}"

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


def repeats_bits(device: torch.device) -> bool:
    """Return whether the same computation is known to give the same bits on this device again.

    Several threads of a CPU add some sums in no fixed order, unless algorithms are deterministic.
    """
    if torch.are_deterministic_algorithms_enabled():
        return True
    return device.type == "cpu" and torch.get_num_threads() == 1


def device_kind(device: torch.device) -> str:
    """The kind of device and of its software: others may round otherwise."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    name = platform.processor()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    threads = torch.get_num_threads()
    return f"{name}, {threads} threads of {platform.machine()}, torch {torch.__version__}"


def leaves_of(batch: Any) -> Iterator[Any]:
    """Tensors, arrays and plain values of a batch: of mappings, sequences and dataclasses."""
    if isinstance(batch, (torch.Tensor, np.ndarray)) or batch is None:
        yield batch
    elif isinstance(batch, Mapping):
        for key in batch:
            yield key
            yield from leaves_of(batch[key])
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from leaves_of(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for item in dataclasses.fields(batch):
            yield from leaves_of(getattr(batch, item.name))
    else:
        yield batch


def data_hash(batch: Any) -> int:
    """A 64-bit hash of the numbers and texts of a batch; other objects count by their type."""
    total = 0
    for leaf in leaves_of(batch):
        if isinstance(leaf, torch.Tensor):
            part = int(hash64([item.cpu().contiguous() for item in plain_parts(leaf)]))
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            part = int(hash64([torch.from_numpy(np.ascontiguousarray(leaf).view(np.uint8))]))
        else:
            plain = leaf if isinstance(leaf, (str, bytes, int, float, bool)) else type(leaf)
            text = repr(plain).encode()
            part = int(hash64([torch.frombuffer(bytearray(text), dtype=torch.uint8)]))
        total = (total * CHAIN + part + 1) % 2**64
    return total


@dataclass
class _OfDevice:
    """A tensor of a batch that lay on a device."""

    tensor: Tensor


def _mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A batch with `change` of its leaves; containers are made anew."""
    changed = change(batch)
    if changed is not batch:
        return changed
    if isinstance(batch, dict):
        made = copy.copy(batch)
        for key in batch:
            made[key] = _mapped(batch[key], change)
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(item, change) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_mapped(item, change) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, (type, _OfDevice)):
        names = [item.name for item in dataclasses.fields(batch) if item.init]
        return dataclasses.replace(
            batch, **{name: _mapped(getattr(batch, name), change) for name in names}
        )
    if isinstance(batch, Mapping) and hasattr(batch, "data"):
        # Such as the batches of transformers.
        whole: Any = copy.copy(batch)
        whole.data = _mapped(dict(batch), change)
        return whole
    return batch


def _on_host(batch: Any) -> Any:
    return _mapped(
        batch,
        lambda leaf: (
            _OfDevice(leaf.detach().cpu())
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
            else leaf
        ),
    )


def _on_device(batch: Any, device: torch.device) -> Any:
    return _mapped(
        batch, lambda leaf: leaf.tensor.to(device) if isinstance(leaf, _OfDevice) else leaf
    )


def _put_back(batch: Any, stored: Any) -> None:
    """Write the numbers of `stored` into a batch of the same form, where that can be done."""
    for own, saved in zip(leaves_of(batch), leaves_of(stored), strict=False):
        if isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor):
            if own.shape == saved.shape:
                with torch.no_grad():
                    own.copy_(saved)
        elif isinstance(own, np.ndarray) and own.flags.writeable:
            own[...] = saved


def _rows(wrong: Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero().flatten().tolist())


def _distance(one: Tensor, two: Tensor) -> Tensor:
    """(tensors,) distance of two sketches, as a share of the longer one.

    Zero where both have something that is not finite; NaN where only one has.
    """
    lengths = torch.maximum(one.norm(dim=1), two.norm(dim=1))
    apart = (one - two).norm(dim=1) / torch.where(lengths > 0, lengths, 1.0)
    both = ~torch.isfinite(one).all(dim=1) & ~torch.isfinite(two).all(dim=1)
    return torch.where(both, 0.0, apart)


def _swap(sent: Tensor, to: int, received: Tensor, source: int, group: dist.ProcessGroup) -> None:
    operations = [
        dist.P2POp(dist.isend, sent, to, group),
        dist.P2POp(dist.irecv, received, source, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
