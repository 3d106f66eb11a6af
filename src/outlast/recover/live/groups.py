"""Steps that several replica groups do together while some of them die, stop and return."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from outlast.errors import RecoverError, WrongNumbersError
from outlast.records import StateRecovered
from outlast.recover.live.heal import Transfer, state_digest
from outlast.recover.live.lighthouse import require_torchft
from outlast.recover.live.membership import Seat, SeatSettings, Standing
from outlast.recover.live.reduce import Buckets, Connections, RoundFailedError
from outlast.recover.live.rules import begun, changed, committed_in, membership, must_restore
from outlast.recover.live.step import LiveStep
from outlast.recover.live.tree import PartSums
from outlast.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from outlast.records.events import Event
    from outlast.recover.live.rules import Membership
    from outlast.recover.live.step import Refuge
    from outlast.state.live import State

_GOOD, _LOSS = 0, 1
_LOOK_SECONDS = 0.01
_REFUSALS = 10


class LiveGroups:
    """This process's replica group among the others of a job.

    The groups hold equal states and divide each global batch among themselves. When one dies, the
    others take over its share of the same step; one that returns takes a peer's state. A loop is::

        groups = LiveGroups({"model": model, "optimizer": optimizer}, group=0, lighthouse=address)
        for step in groups.steps(until=1000):
            loss = forward_backward(batch(step.number, *step.share))  # of the global batch's mean
            if step.commit(loss):
                optimizer.step()
            optimizer.zero_grad()

    Args:
        state: What equal groups have equal: the model (under any name), its optimizers, objects
            with a state_dict().
        group: Number of this group.
        lighthouse: ``host:port`` of torchft's lighthouse; see `Lighthouse`.
        identity: Names the job; groups of another job, version of Outlast or of torch are refused.
        step: Steps done in `state`.
        refuge: Where a newer state than any group's may lie.
        known: The newest step that the run is known to have reached, from its records for example.
        returning: Whether this group has been started again; then it does not begin anew.
        awaits: How many groups are to be there before the first step.
        heartbeat_seconds: A group that is silent for so long has been dropped by then. All groups
            and the lighthouse must have the same.
        timeout_seconds: Longest wait for a quorum, or for groups that are alive.
        host: Under which the other groups reach this machine.
        parts: Into how many parts each global batch is cut, whose gradients are summed in one order
            however many groups there are, so that weights do not depend on deaths to the last bit;
            see `outlast.recover.live.tree`. Then each of `LiveStep.parts` is given to
            `LiveStep.add` before `commit`. 0: gradients are summed as they come.

    Raises:
        RecoverError: When torchft is missing, the lighthouse cannot be reached, or this group may
            not take part.
    """

    def __init__(
        self,
        state: State,
        *,
        group: int,
        lighthouse: str,
        identity: str = "",
        step: int = 0,
        refuge: Refuge | None = None,
        known: int = 0,
        returning: bool = False,
        awaits: int = 1,
        heartbeat_seconds: float = 1.0,
        timeout_seconds: float = 120.0,
        host: str = "127.0.0.1",
        parts: int = 0,
    ) -> None:
        require_torchft()
        self.group = group
        self._state, self._step = state, step
        self._refuge, self._known, self._returning = refuge, known, returning
        self._timeout_seconds = timeout_seconds
        self._host = host
        models = [item for item in state.values() if isinstance(item, nn.Module)]
        self._parameters = [p for model in models for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise RecoverError("the state has no module with parameters that are trained; give one")
        self._buckets = Buckets(self._parameters)
        self._parts = PartSums(self._buckets, parts) if parts else None
        if parts:
            _refuse_running_statistics(models)
        self._device = self._parameters[0].device
        self._transfer = Transfer(state, host, timeout_seconds)
        self._lineage = begun(state_digest(state))
        self._settings = SeatSettings(
            lighthouse=lighthouse,
            number=group,
            identity=f"{identity or 'unnamed job'}, outlast {__version__}, "
            f"torch {torch.__version__}" + (f", batches in {parts} parts" if parts else ""),
            host=host,
            heartbeat_seconds=heartbeat_seconds,
            timeout_seconds=timeout_seconds,
        )
        self._links: tuple[Seat, Connections] | None = None
        self._awaits = awaits
        self._since = ""
        self._serving = False
        self._refusals = 0
        self._open: LiveStep | None = None
        self._found: Membership | None = None
        self._events: list[Event] = []
        self._last_commit = time.perf_counter()

    @property
    def step(self) -> int:
        """Steps committed in this group's state."""
        return self._step

    @property
    def met(self) -> bool:
        """Whether this group has done a round with the others yet."""
        return self._found is not None

    @property
    def writes(self) -> bool:
        """Whether this group writes what is written once, by its last round."""
        if self._found is None:
            return False
        return self._found.writer == self._found.members[self._found.index].life

    def steps(self, until: int) -> Iterator[LiveStep]:
        """Every attempt at every step up to `until`, this group's share of it each time.

        Raises:
            RecoverError: When there is no quorum in time, or this group may not go on.
        """
        while self._step < until:
            step = self.begin()
            try:
                yield step
            except GeneratorExit:
                self.end(step)
                raise
            if step.committed is None:
                raise RecoverError(
                    f"step {step.number} ended without step.commit(loss); call it once for each "
                    "step, after the backward pass"
                )
            self.end(step)

    def begin(self) -> LiveStep:
        """Agree with the other groups on the next step, and heal if they are ahead.

        A step that is open already is returned again.

        Raises:
            RecoverError: As `steps`.
        """
        if self._open is not None:
            return self._open
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            found = self._join()
            why = "could be connected"
            if not found.complete:
                why = f"were there, of {self._awaits} that are awaited"
            elif self._restored(found):
                continue
            elif self._met(found):
                break
            time.sleep(_LOOK_SECONDS)
            if time.monotonic() > deadline:
                raise RecoverError(
                    f"group {self.group} found no round in {self._timeout_seconds:g} s: only "
                    f"{_named(found)} {why}; look at the other groups and the network between them"
                )
        self._note(found)
        self._found = found
        self._since = self._since or found.round
        idle = found.source is not None
        if self._parts is not None:
            self._parts.begin(found.share, idle=idle)
        self._open = LiveStep(self._step, found.share, idle, self._commit, self._parts)
        return self._open

    def end(self, step: LiveStep) -> None:
        """Close an attempt, after the optimizer's step if it was committed."""
        self._open = None
        if step.committed:
            assert self._found is not None
            self._step += 1
            self._awaits = 0
            self._lineage = committed_in(self._found.round)
            self._last_commit = time.perf_counter()

    def news(self) -> list[Event]:
        """Events of this group since the last call, for the run's records."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Leave: close connections and give up the seat."""
        self._close_serving()
        if self._links is not None:
            seat, connections = self._links
            connections.drop()
            seat.close()
        self._transfer.shutdown()

    def __enter__(self) -> LiveGroups:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _linked(self) -> tuple[Seat, Connections]:
        """The seat and the connections, from the first step on: who has a seat is waited for."""
        if self._links is None:
            store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            seat = Seat(self._settings, f"{self._host}:{store.port}")
            self._store = store
            self._links = (seat, Connections(seat, self._device, self._timeout_seconds))
        return self._links

    def _join(self) -> Membership:
        seat, connections = self._linked()
        mine = Standing(
            step=self._step,
            lineage=self._lineage,
            serves=self._transfer.address,
            connected=connections.round,
            since=self._since,
            awaits=self._awaits,
        )
        answer = seat.join(mine)
        return membership(answer.name, answer.members, seat.life)

    def _restored(self, found: Membership) -> bool:
        """Load a state from the refuge if the groups may not go on without; whether it did."""
        if self._found is not None and found.lives == self._found.lives:
            return False
        newest = None if self._refuge is None else self._refuge.newest()
        why = must_restore(
            found.step,
            committed=found.committed,
            newest=newest,
            known=self._known,
            returning=self._returning,
        )
        if why is None:
            return False
        begun_at = time.perf_counter()
        step = 0 if self._refuge is None else self._refuge.restore()
        if step <= found.step:
            raise RecoverError(
                f"group {self.group} does not train on: {why}; start the group that has the newer "
                "state, or restore a checkpoint"
            )
        self._step, self._lineage = step, begun(state_digest(self._state))
        lost = max(self._known - step, 0)
        self._known = step
        self._events.append(
            StateRecovered(step, "shared", time.perf_counter() - begun_at, lost, 0, [why])
        )
        return True

    def _met(self, found: Membership) -> bool:
        """Connect to the members, and heal from or serve those that need it; whether it worked."""
        _, connections = self._linked()
        try:
            connections.connect(found)
            if found.source is not None:
                self._heal(found)
            elif found.heals:
                self._transfer.serve(self._step, list(found.heals))
                self._serving = True
        except RoundFailedError:
            self._give_up()
            return False
        return True

    def _heal(self, found: Membership) -> None:
        assert found.source is not None
        begun_at = time.perf_counter()
        seat, _ = self._linked()
        fetched = self._transfer.fetch(found.step, found.source, seat)
        self._transfer.install(fetched)
        # Whoever has missed a step does not write on from where it was.
        self._since = found.round
        self._step, self._lineage = found.step, found.lineage
        seconds = time.perf_counter() - begun_at
        self._events.append(StateRecovered(found.step, "peer", seconds, 0, fetched.bytes))

    def _give_up(self) -> None:
        self._close_serving()
        self._linked()[1].drop()

    def _close_serving(self) -> None:
        if self._serving:
            self._serving = False
            self._transfer.close()

    def _commit(
        self, step: LiveStep, loss: torch.Tensor | float, good: bool, values: Sequence[float]
    ) -> bool:
        if step.committed is not None:
            raise RecoverError(f"step {step.number} was voted on already; commit it once")
        step.committed = False
        # Connections that failed are dropped already; the next round makes new ones.
        with contextlib.suppress(RoundFailedError):
            step.committed = self._sum_and_vote(step, float(loss), good, values)
        # From here on the optimizer may change what was served.
        self._close_serving()
        if not step.committed:
            self._buckets.drop()
        return step.committed

    def _sum_and_vote(
        self, step: LiveStep, loss: float, good: bool, values: Sequence[float]
    ) -> bool:
        _, connections = self._linked()
        if step.idle:
            self._buckets.drop()
            loss = 0.0
        losses: list[float] = []
        if self._parts is None:
            flat, used = self._buckets.packed()
            connections.sum(flat)
        else:
            flat = self._parts.sum(connections.sum)
            used, losses, loss = self._parts.used, self._parts.losses, 0.0
        used = used or [0.0] * len(self._parameters)
        # Only who has all sums votes, so a full count says that everybody has them.
        vote = torch.tensor(
            [1.0 if good else 0.0, loss, *values, *used, *losses],
            dtype=torch.float64,
            device=self._device,
        )
        connections.sum([vote])
        numbers = vote.tolist()
        assert self._found is not None
        if round(numbers[_GOOD]) != self._found.count:
            self._refusals += 1
            if self._refusals >= _REFUSALS:
                raise WrongNumbersError(
                    f"step {step.number} was refused {_REFUSALS} times in a row by a group that "
                    "does not trust its gradients; look at that group's device"
                )
            return False
        self._refusals = 0
        self._buckets.unpack(flat, numbers[2 + len(values) :])
        each = numbers[len(numbers) - len(losses) :]
        step.loss, step.sums = sum(each, numbers[_LOSS]), numbers[2 : 2 + len(values)]
        return True

    def _note(self, found: Membership) -> None:
        """Events of a membership that differs from that of the last step."""
        before = self._found
        if before is None or before.lives == found.lives:
            return
        self._events += changed(before, found, self._step, time.perf_counter() - self._last_commit)


def _refuse_running_statistics(models: list[nn.Module]) -> None:
    for model in models:
        for name, module in model.named_modules():
            if getattr(module, "track_running_stats", False):
                raise RecoverError(
                    f"parts: {name or 'the model'} keeps running statistics of the samples that "
                    "its own group has seen, which depend on deaths; leave parts out, or use "
                    "another normalisation"
                )


def _named(found: Membership) -> str:
    numbers = ", ".join(str(member.number) for member in found.members)
    return f"the groups {numbers}"
