"""A patrol through parameters and optimizer state, a slice per round, as memory is scrubbed.

A round takes one slice. Before an optimizer step its parameters are copied; after the step its
moments and update are checked against `outlast.guard.optimizer`'s bounds and its bytes are hashed;
before the next step they are hashed again, and compared over the replicas. Rounds go through all
parameters in turn. How much a round takes, and after how many steps the next one follows, is set
so that all of it takes a given share of the steps' time: a wrong number that stays and that a check
can see is found within `Patrol.period_steps`.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from outlast.guard import optimizer as bounds
from outlast.guard.judged import Judged, exact
from outlast.guard.pace import Pace
from outlast.guard.rest import Replica, Replicas, compare
from outlast.guard.slices import (
    Entry,
    Group,
    Piece,
    Round,
    Views,
    cut,
    flat,
    hashes_of,
    local,
    state_of,
    steps_of,
    writes_of,
)
from outlast.guard.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from outlast.guard.findings import Outcome
    from outlast.guard.policy import Policy

_FIRST_ROUND = 10
"""Steps before the first round: those of a training that still loads and compiles."""


class Patrol:
    """Checks of parameters and optimizer state around the optimizer's steps.

    A step without a round costs the comparison of two integers, and a note of the rates. What the
    first round would load is loaded here, outside of any step; all rounds are paid for.

    What level ``light`` cannot see, until another check or a later round does:

    - a fault that came and went while another slice was watched, such as a step that moved its
      parameters too far, or a second moment that was negative or too small for a few steps (the
      next gradients fill it again; what it has done to a parameter only the range check may see);
    - a flipped sign or low bit of a parameter or of a first moment that changed outside of the
      watched slice: it is within all bounds, and only replicas tell;
    - a second moment that became larger, which slows its parameter down and breaks no bound;
    - wrong gradients, and wrong updates that are no longer than some gradients could make them;
    - numbers that a program wrote, and a fault in a slice that a program wrote to in the same step;
    - moments and updates of optimizers other than Adam, AdamW, Muon and SGD (of SGD: only what is
      not finite), and parameters in `uncovered`.

    Args:
        watch: What all checks of the guard share.
        parameters: Names and parameters, as of ``model.named_parameters()``.
        optimizers: That step together.
        group: Of ranks whose parameters are equal bit for bit, such as those of DDP or of the
            replicating dimension of HSDP; None where nothing is replicated. All of them construct
            their patrols together.
        whole: Check everything in every step instead of slices; copies all parameters for it.
        clock: Seconds.

    Attributes:
        seconds: Spent by rounds so far, on this process, without waiting for other ranks.
        steps: Optimizer steps seen.
        uncovered: Names of parameters whose memory cannot be cut into slices.
    """

    def __init__(
        self,
        watch: Watch,
        parameters: Iterable[tuple[str, Tensor]],
        optimizers: Sequence[Optimizer],
        group: dist.ProcessGroup | None = None,
        whole: bool = False,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.watch = watch
        self.seconds = 0.0
        self.steps = 0
        self.uncovered: list[str] = []
        self._replicas: Replicas | None = None
        self._whole = whole
        self._clock = clock
        self._pace = Pace(watch.policy.light_budget)
        self._groups = [
            Group(optimizer, index)
            for optimizer in optimizers
            for index in range(len(optimizer.param_groups))
        ]
        self._entries = self._enter(parameters)
        self._blocks = [block for entry in self._entries for block in cut(entry, whole)]
        self._sizes = [block.end - block.start for block in self._blocks]
        readers = [group.reader() for group in self._groups if self._blocks]
        self._readers = [reader for reader in readers if reader is not None]
        self._reported: set[str] = set()
        self._cursor = 0
        # The step in which there is something to do, and the block that a round ends before.
        self._due, self._until = (0, len(self._blocks)) if whole else (_FIRST_ROUND, 1)
        self._round: Round | None = None
        self._learning = False
        self._visited: tuple[int, float] | None = None
        if self._blocks and group is not None and dist.get_world_size(group) > 1:
            self._replicas = Replicas(group, self._blocks[0].parameter().device)
        self._begun, self._last_period = 0, 0
        if not whole:
            self._prepare()

    @property
    def elements(self) -> int:
        """Elements of the parameters that rounds go through, of all ranks that shard them."""
        return sum(entry.parameter.numel() for entry in self._entries)

    @property
    def period_steps(self) -> int | None:
        """Steps in which everything is checked once: of the last time, or as it goes this time.

        None before the first round.
        """
        going = 0
        if self._cursor:
            share = sum(self._sizes[: self._cursor]) / sum(self._sizes)
            going = math.ceil((max(self.steps, self._due) - self._begun) / share)
        return max(going, self._last_period) or None

    def before_step(self) -> None:
        """End the last round, and begin another if it is time; right before the optimizer's step.

        All ranks of a group call it together. A second call before the step does nothing.
        """
        if self.steps < self._due and self.watch.seam is None:
            return
        self._visit()

    def after_step(self) -> None:
        """Check what the step has done to the slice; right after the optimizer's step.

        What it finds is said by the next `before_step` or `finish`.
        """
        self.steps += 1
        for note, settings, optimizer, number in self._readers:
            note(settings(optimizer.param_groups[number]))
        if self._round is not None:
            self._look(self._round)

    def _visit(self) -> None:
        before = self._visited
        if not self._blocks or (before is not None and before[0] == self.steps):
            return
        if self.watch.seam is not None:
            self._touch()
        self._visited = self.steps, self._clock()
        if before is not None:
            self._pace.earn(self._visited[1] - before[1], self.steps - before[0])
        self.finish(used=True)
        if self.steps >= self._due:
            begun = self._clock()
            self._round = Round(list(map(Piece.of, self._blocks[self._cursor : self._until])))
            self._charge(begun, self._round)

    @torch.no_grad()
    def _look(self, current: Round) -> None:
        if current.hashes is not None:
            return
        started = self._clock()
        for group in self._groups:
            group.catch_up()
        views = current.views()
        for piece, view in zip(current.pieces, views, strict=True):
            self._examine(piece, view, current)
        current.hashes, current.writes = hashes_of(views), writes_of(views)
        self._charge(started, current)

    def finish(self, *, used: bool = False) -> None:
        """End a round whose step is done: is everything still as the step has left it, everywhere?

        All ranks of a group call it together; `before_step` does it, too.

        Args:
            used: Whether passes have been run since that step.
        """
        current = self._round
        if current is not None and current.hashes is not None:
            self._round = None
            self._end(current, current.hashes, used)

    @torch.no_grad()
    def has_moved(self) -> bool:
        """Whether the watched slice is another than the last step has left, on this rank."""
        current = self._round
        if current is None or current.hashes is None:
            return False
        started = self._clock()
        views = current.views()
        moved = current.writes == writes_of(views) and bool(
            torch.any(torch.stack(hashes_of(views)) != torch.stack(current.hashes))
        )
        self._charge(started, current)
        return moved

    @torch.no_grad()
    def _end(self, current: Round, after: tuple[Tensor, Tensor], used: bool) -> None:
        started = self._clock()
        views = current.views()
        now = hashes_of(views)
        if current.writes != writes_of(views):
            # The program has written to the tensors, which is no fault.
            after = now
        site = self.watch.ledger.site("optimizer", "rest")
        current.judged.append((site, exact(torch.stack(now), torch.stack(after))))
        self._cursor = (self._cursor + len(current.pieces)) % len(self._blocks)
        if self._cursor == 0:
            self._last_period, self._begun = self.steps - self._begun, self.steps
        waited = 0.0
        if self._replicas is None:
            for pair in current.judged:
                self.watch.judge(*pair)
            self._due, self._until = self._wish()
        else:
            waited = self._compare(self._replicas, current, views, (*after, *now), used)
        self._report_not_finite(current)
        self._charge(started + waited, current)
        if self._learning:
            numbers = sum(piece.block.end - piece.block.start for piece in current.pieces)
            self._pace.learn(len(current.pieces), numbers, current.seconds)
        # The first round is paid for, but takes longer than any other will.
        self._learning = True

    def _charge(self, started: float, current: Round) -> None:
        seconds = self._clock() - started
        self.seconds += seconds
        self._pace.spend(seconds)
        current.seconds += seconds

    def _wish(self) -> tuple[int, int]:
        """In which step the next round should be, and the block that it should end before."""
        if self._whole:
            return self.steps, len(self._blocks)
        gap, until = self._pace.plan(self._sizes, self._cursor)
        return self.steps + gap, until

    def _enter(self, parameters: Iterable[tuple[str, Tensor]]) -> list[Entry]:
        homes = {
            id(parameter): group for group in self._groups for parameter in group.options["params"]
        }
        entries = []
        for name, parameter in parameters:
            if flat(local(parameter)) is None:
                self.uncovered.append(name)
            elif local(parameter).numel():
                entries.append(Entry(name, parameter, homes.get(id(parameter))))
        return entries

    def _touch(self) -> None:
        # As aliases with versions of their own: what a seam does is no write of the program.
        for entry in self._entries:
            self.watch.touch("weight.rest", entry.name, local(entry.parameter).data)
            for key, value in entry.state.items():
                if isinstance(value, torch.Tensor):
                    self.watch.touch("optimizer.state", f"{entry.name}.{key}", local(value).data)

    def _examine(self, piece: Piece, views: Views, current: Round) -> None:
        entry, new, state = piece.block.entry, views.parameter, views.state
        if entry.kind == "adam" and {"exp_avg", "exp_avg_sq", "step"} <= entry.state.keys():
            self._examine_adam(piece, views, current)
        elif entry.kind == "muon" and "momentum_buffer" in state:
            self._examine_muon(piece, views, current)
        else:
            gradient = piece.block.gradient()
            for tensor in (new, *state.values()):
                if tensor.is_floating_point():
                    finite = bounds.check_finite(tensor, piece.old, gradient)
                    self._note(current, entry, "optimizer.finite", finite)
        found = piece.range_since_last_round(new, self.steps)
        if found is not None:
            current.judged.append((self.watch.ledger.site(entry.name, "weight.range"), found))

    def _examine_adam(self, piece: Piece, views: Views, current: Round) -> None:
        entry, group = piece.block.entry, piece.block.entry.group
        new, state = views.parameter, views.state
        first, second = state.get("exp_avg"), state.get("exp_avg_sq")
        steps = steps_of(entry.state)
        assert group is not None
        if first is None or second is None or piece.steps is None or steps is None:
            return
        site = self.watch.ledger.site(entry.name, "optimizer.moments")
        current.judged.append((site, bounds.check_count(piece.steps, steps, new.device)))
        decay = group.decay(first.dtype)
        if decay is None or (not isinstance(steps, torch.Tensor) and not steps >= 1.0):
            return
        found = bounds.check_moments(first, second, decay.squared(steps), decay.floor)
        self._note(current, entry, "optimizer.moments", found)
        # A step that was left out, as after an overflow under a gradient scaler, moves nothing.
        bound = group.adam_bound(decay, first.dtype, steps, steps - piece.steps)
        if bound is not None:
            moments = (first, state.get("max_exp_avg_sq", second))
            update = bounds.check_update(new, piece.old, *bound, moments)
            self._note(current, entry, "optimizer.update", update)

    def _examine_muon(self, piece: Piece, views: Views, current: Round) -> None:
        block, entry, group = piece.block, piece.block.entry, piece.block.entry.group
        assert group is not None
        gradient, momentum = block.gradient(), views.state["momentum_buffer"]
        found = bounds.check_finite(momentum, piece.old, gradient)
        self._note(current, entry, "optimizer.finite", found)
        bound = group.muon_bound(entry.parameter, moved=float(gradient is not None))
        if bound is None:
            return
        keep, limit = bound
        part = local(entry.parameter)
        rank = min(part.shape)
        if part.is_contiguous():
            rank = bounds.matrix_rank_limit(part.shape, block.start, block.end - block.start)
        length = bounds.check_norm(views.parameter, piece.old, keep, limit * math.sqrt(rank))
        current.judged.append((self.watch.ledger.site(entry.name, "optimizer.update"), length))

    def _note(self, current: Round, entry: Entry, operation: str, found: bounds.Examined) -> None:
        current.judged.append((self.watch.ledger.site(entry.name, operation), found.judged))
        current.not_finite.append((entry.name, found.not_finite))

    def _report_not_finite(self, current: Round) -> None:
        """Say once of every parameter that its data have diverged."""
        for name, count in current.not_finite:
            if name not in self._reported and int(count):
                self._reported.add(name)
                site = self.watch.ledger.site(name, "optimizer.finite")
                self.watch.find(site, current.device, int(count), math.inf, "not_finite")

    def _compare(
        self,
        replicas: Replicas,
        current: Round,
        views: list[Views],
        hashes: tuple[Tensor, ...],
        used: bool,
    ) -> float:
        """Compare the slice over its replicas, and agree on the next one.

        Args:
            replicas: The ranks that have it.
            current: What this rank's checks of it have said; the last one is `rest`.
            views: Its memory.
            hashes: Of parameters and of state after the step, and of both now.
            used: Whether passes have been run since that step.

        Returns:
            Seconds of waiting for other ranks.
        """
        judged = [(site, _on_host(item)) for site, item in current.judged]
        # The last one is whether it has changed at rest, which the hashes tell.
        suspect = any(item.exceeded for _, item in judged[:-1])
        fields = [*map(int, hashes), int(suspect), *self._wish()]
        rows, waited = replicas.exchange(fields, self._clock)
        self._due, self._until = max(row[5] for row in rows), min(row[6] for row in rows)
        repaired = False
        for part, tensors in enumerate(([view.parameter for view in views], state_of(views))):
            comparison = compare([Replica(row[part], row[2 + part], bool(row[4])) for row in rows])
            wrong = comparison.good is None or replicas.rank in comparison.bad
            outcome: Outcome = "detected"
            if comparison.bad and comparison.good is not None and self.watch.policy.correct:
                fixed = replicas.repair(tensors, comparison.good) == rows[comparison.good][2 + part]
                outcome = "corrected" if fixed else "persistent"
                # Of a slice whose last round was long ago, the steps since may have used it.
                older = not self._whole and any(
                    rows[rank][part] != rows[comparison.good][part] for rank in comparison.bad
                )
                if fixed and older:
                    outcome = "detected"
                elif fixed and wrong:
                    repaired = True
                    # With wrong parameters, this step's passes are wrong, too.
                    self.watch.uncorrected += part == 0 and used
            site = self.watch.ledger.site("optimizer", "replicas")
            worst = math.inf if wrong else 0.0
            if self.watch.wants(site, Judged(torch.tensor([wrong]), int(wrong), worst, 0.0, 0.0)):
                self.watch.find(site, current.device, 1, math.inf, outcome)
        for site, item in judged:
            if self.watch.wants(site, item):
                outcome = "corrected" if repaired else "detected"
                magnitude = float(item.worst)
                self.watch.find(site, item.flags.device, int(item.exceeded), magnitude, outcome)
        return waited

    def _prepare(self) -> None:
        """Do what takes longer the first time, outside of any step."""
        parts = [(entry.kind, local(entry.parameter)) for entry in self._entries]
        kinds = {(kind, part.dtype, part.device): part for kind, part in parts if not part.is_meta}
        for (kind, _, _), part in kinds.items():
            _rehearse(self.watch.policy, kind, part)
        if self._replicas is not None:
            self._replicas.connect()


def _rehearse(policy: Policy, kind: bounds.Kind, like: Tensor) -> None:
    """Patrol spare numbers of this type: it loads all code and makes the allocators' memory."""
    spare = nn.Parameter(torch.zeros((256, 256), dtype=like.dtype, device=like.device))
    spare.grad = torch.zeros_like(spare)
    optimizer = bounds.idle_optimizer(kind, spare)
    patrol = Patrol(Watch(policy, None), [("spare", spare)], [optimizer], whole=True)
    for _ in range(2):
        patrol.before_step()
        # The optimizer's own step would call hooks that a program may have put on all of them.
        optimizer.state[spare]["step"] += 1.0
        patrol.after_step()
    patrol.finish()


def _on_host(judged: Judged) -> Judged:
    return Judged(judged.flags.cpu(), int(judged.exceeded), float(judged.worst), 0.0, 0.0)
