"""Rounds of replica groups: quorum, liveness of peers, membership, and the sums over a round.

Every group computes the same from the same answer, so no further agreement is needed.

A state is known by its step and its *lineage*: how it began (a hash of its content), or the round
of the quorum in which its last step was committed. Two groups with one step but two lineages have
done that step with other partners, and may differ in their last bits; the later round wins, and the
other group heals.

The heartbeat and the answer to a ping come from threads of torchft's manager that never wait for
Python's interpreter lock: a group is silent when its process is dead, stopped or cut off, and not
because it computes.

The connections of a round are made for its members alone. What fails, or concerns a group that has
gone silent, gives them up; the next round makes new ones. Sums are taken on copies, so that a sum
which was given up and yet arrives later spoils no gradient.

`PartSums` adds in one order, whoever computes: bits that no death of a group changes. The global
batch is cut into parts, always the same ones. Their gradients are the leaves of a binary tree over
their places in the batch; every node is the sum of its left and its right half. A group has
neighbouring parts, and adds up alone those nodes that lie wholly within them; of these, each is
handed to all groups, which add up the rest. Which groups there are decides who adds what, and never
what is added to what, so the root has the same bits. It costs a sum over the groups for every such
node, up to `2 log2(parts)` for each group, in place of one.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from outlast.errors import RecoverError
from outlast.records import MemberLost, MembershipChanged
from outlast.recover.cost import SILENCE_SHARE
from outlast.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

BUCKET_BYTES = 32 << 20
Span = tuple[int, int]
"""Parts from the first to before the second."""

Flat = list[torch.Tensor]
"""Gradients as `Buckets` packs them."""

_BEGUN, _COMMITTED = "0", "1"
_BEATS = 10
_RETRY_SECONDS = 0.02
_ANSWER_SECONDS = 10.0
_LOOKS = 4


@dataclass(frozen=True)
class Member:
    """A replica group as it presents itself to a quorum.

    Attributes:
        life: Unique to this start of the group.
        number: Of the group.
        step: Steps committed in its state.
        lineage: See the module.
        identity: What all members must have in common, in words: the job and the versions.
        address: Where its manager answers.
        store: ``host:port`` of its key-value store, in which a round's members find each other.
        serves: Where it serves its state.
        connected: The round in which its connections were made; empty without any.
        since: The round from which on it has trained without a break; empty before its first one.
        awaits: How many groups it wants to be there before it begins; 0 once it has trained.
    """

    life: str
    number: int
    step: int
    lineage: str
    identity: str
    address: str
    store: str
    serves: str
    connected: str = ""
    since: str = ""
    awaits: int = 0

    @property
    def state(self) -> tuple[int, str]:
        """Identity of the state, the more advanced the greater."""
        return (self.step, self.lineage)


@dataclass(frozen=True)
class Membership:
    """The groups that do one step together.

    Attributes:
        round: Unique to the answer of the quorum; later rounds are greater as texts.
        members: By number.
        index: Of this group among them.
        share: Index of this group among those that compute, and their number. A group that heals
            computes nothing yet: it has the first one's share in name.
        source: From whom this group must take its state; None when it has the newest.
        heals: Numbers of the groups that take it from this one.
        step: Steps committed in the newest state.
        lineage: Of the newest state.
        writer: Life of the group that writes what is written once: of those that need not heal,
            the one that has trained for the longest time.
    """

    round: str
    members: tuple[Member, ...]
    index: int
    share: tuple[int, int]
    source: Member | None
    heals: tuple[int, ...]
    step: int
    lineage: str
    writer: str

    @property
    def count(self) -> int:
        """Number of groups that take part."""
        return len(self.members)

    @property
    def lives(self) -> tuple[str, ...]:
        """Starts of the groups that take part."""
        return tuple(member.life for member in self.members)

    @property
    def complete(self) -> bool:
        """True if all groups are there that everybody awaits."""
        return self.count >= min(member.awaits for member in self.members)

    @property
    def committed(self) -> bool:
        """True if the newest state has come from a step that groups have committed."""
        return self.lineage.startswith(_COMMITTED)


def initial_lineage(digest: str) -> str:
    """The lineage of a state that no group has trained since it was made or loaded."""
    return f"{_BEGUN}-{digest}"


def committed_lineage(round_name: str) -> str:
    """The lineage of a state whose last step was committed in this round."""
    return f"{_COMMITTED}-{round_name}"


def membership(round_name: str, present: list[Member], life: str) -> Membership:
    """Decide who does the next step, as seen by the group `life`.

    Args:
        round_name: Unique to this answer.
        present: All that the quorum names, this group among them.
        life: Of this group.

    Raises:
        RecoverError: When this group does not fit the others.
    """
    (me,) = (member for member in present if member.life == life)
    identity = _common_identity(present)
    if me.identity != identity:
        raise RecoverError(
            f"group {me.number} is of another job or version ({me.identity}) than the groups that "
            f"train already ({identity}); start it with the same job file and the same versions"
        )
    members = sorted(
        (member for member in present if member.identity == identity),
        key=lambda member: (member.number, member.life),
    )
    step, lineage = max(member.state for member in members)
    sources = [member for member in members if member.state == (step, lineage)]
    behind = [member for member in members if member.state != (step, lineage)]
    pairs = {item.life: sources[number % len(sources)] for number, item in enumerate(behind)}
    computing = [source.life for source in sources]
    return Membership(
        round=round_name,
        members=tuple(members),
        index=next(number for number, member in enumerate(members) if member.life == life),
        share=(computing.index(life) if life in computing else 0, len(computing)),
        source=pairs.get(life),
        heals=tuple(member.number for member in behind if pairs[member.life].life == life),
        step=step,
        lineage=lineage,
        writer=min(
            sources, key=lambda source: (not source.since, source.since, source.number)
        ).life,
    )


def _common_identity(present: list[Member]) -> str:
    """Of those that have trained together, else of most, else of the lowest number."""

    def weight(identity: str) -> tuple[bool, int, int]:
        those = [item for item in present if item.identity == identity]
        trained = any(item.lineage.startswith(_COMMITTED) for item in those)
        return trained, len(those), -min(item.number for item in those)

    return max({member.identity for member in present}, key=weight)


def must_restore(
    step: int, *, committed: bool, newest: int | None, known: int, returning: bool
) -> str | None:
    """Reason why training may not continue from the newest state present, or None when it may.

    Args:
        step: Of the newest state present.
        committed: Whether it has come from a step that groups have committed.
        newest: Step of the newest state that this group could restore from elsewhere; None where
            it has no such place.
        known: The newest step that the run is known to have reached.
        returning: Whether this group has been started again.
    """
    if newest is not None and newest > step:
        return (
            f"the newest state among the groups is of step {step}, but one of step {newest} "
            "is saved"
        )
    if committed:
        return None
    if known > step and not newest:
        return (
            f"the run has reached step {known}, but no group that is still there has a newer state "
            f"than that of step {step}"
        )
    if returning and newest is None:
        return (
            f"it was started again, but no group that has trained is there any more, and step "
            f"{step} would be done a second time"
        )
    return None


def membership_events(
    before: Membership, found: Membership, step: int, seconds: float
) -> list[MemberLost | MembershipChanged]:
    """Events of a membership that differs from that of the last step.

    Args:
        before: Of the last step.
        found: Of the next one.
        step: Its number.
        seconds: Since the last commit.
    """
    lost = [member for member in before.members if member.life not in found.lives]
    joined = [member for member in found.members if member.life not in before.lives]
    events: list[MemberLost | MembershipChanged] = [
        MemberLost(step, f"group {member.number}", "dead", seconds) for member in lost
    ]
    left = before.count - len(lost)
    if lost:
        events.append(MembershipChanged(step, before.count, left, "lost", seconds))
    if joined:
        # One that returns at once does so in the round in which its loss is noticed.
        seconds = 0.0 if lost else seconds
        events.append(MembershipChanged(step, left, found.count, "joined", seconds))
    return events


class QuorumClient:
    """One group's registration with the lighthouse.

    Args:
        lighthouse: ``host:port``.
        number: Of the group.
        identity: What all members have in common; see `Member`.
        host: Under which peers reach this machine.
        store: Where this group's key-value store listens.
        heartbeat_seconds: Silence after which a group counts as dead.
        timeout_seconds: Longest wait for a quorum.

    Raises:
        RecoverError: When the lighthouse cannot be reached.
    """

    def __init__(
        self,
        *,
        lighthouse: str,
        number: int,
        identity: str,
        host: str,
        store: str,
        heartbeat_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self.life = f"{number}:{uuid.uuid4().hex[:12]}"
        self._lighthouse, self._number, self._identity = lighthouse, number, identity
        self._host, self._store = host, store
        self._heartbeat_seconds, self._timeout_seconds = heartbeat_seconds, timeout_seconds
        self._connect_limit = timedelta(seconds=max(heartbeat_seconds, 1.0))
        self._client: Any = None
        self._manager: Any = self._until(self._deadline(), self._register)
        self._liveness = Liveness(SILENCE_SHARE * heartbeat_seconds)

    def _register(self) -> Any:
        from torchft.coordination import ManagerServer

        return ManagerServer(
            replica_id=self.life,
            lighthouse_addr=f"http://{self._lighthouse}",
            hostname=self._host,
            bind="0.0.0.0:0",
            store_addr=self._store,
            world_size=1,
            heartbeat_interval=timedelta(seconds=self._heartbeat_seconds / _BEATS),
            connect_timeout=self._connect_limit,
            quorum_retries=0,
        )

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_seconds

    def join(self, **status: Any) -> tuple[str, list[Member]]:
        """Take part in the next quorum, and wait until there is one.

        Args:
            status: Of this group, the fields of `Member` from `step` on but for its addresses.

        Returns:
            A name that is unique, also across restarts of the lighthouse, and greater as a text
            than earlier ones; and everybody who takes part.

        Raises:
            RecoverError: When there is no quorum within `timeout_seconds`.
        """
        me = Member(
            life=self.life,
            number=self._number,
            identity=self._identity,
            address=self._manager.address(),
            store=self._store,
            **status,
        )
        deadline = self._deadline()
        found: tuple[str, list[Member]] = self._until(deadline, lambda: self._ask(me, deadline))
        return found

    def _ask(self, me: Member, deadline: float) -> tuple[str, list[Member]]:
        if self._client is None:
            from torchft.coordination import LighthouseClient

            self._client = LighthouseClient(
                f"http://{self._lighthouse}", connect_timeout=self._connect_limit
            )
        seconds = min(max(deadline - time.monotonic(), 0.1), _ANSWER_SECONDS)
        try:
            quorum = self._client.quorum(
                replica_id=me.life,
                timeout=timedelta(seconds=seconds),
                address=me.address,
                store_address=me.store,
                step=me.step,
                world_size=1,
                shrink_only=False,
                data=asdict(me),
            )
        except Exception:
            # A lighthouse that was started again is another one to connect to.
            self._client = None
            raise
        members = [Member(**participant.data) for participant in quorum.participants]
        return f"{quorum.created.seconds:012d}.{quorum.created.nanos:09d}", members

    def _until(self, deadline: float, work: Callable[[], Any]) -> Any:
        """Repeat `work` until it does not raise, or the deadline is over."""
        while True:
            try:
                return work()
            except (RuntimeError, TimeoutError, ConnectionError, OSError) as error:
                if time.monotonic() > deadline:
                    raise RecoverError(
                        f"group {self._number} waited {self._timeout_seconds:g} s for a "
                        f"quorum at the lighthouse {self._lighthouse} (recover.lighthouse): "
                        f"{_words(error)}; look whether it runs and can be reached from here, and "
                        "end groups that are alive but do not answer"
                    ) from None
            time.sleep(_RETRY_SECONDS)

    def wait(
        self,
        done: threading.Event,
        peers: Iterable[Member],
        seconds: float,
        hopeless: Callable[[], str] = str,
    ) -> str:
        """Wait for what peers take part in, while all of them are alive.

        Args:
            done: Set when it has ended, well or not.
            peers: Who takes part.
            seconds: Longest wait.
            hopeless: Asked now and then: another reason to give up, or an empty text.

        Returns:
            Why it is hopeless, or an empty text when `done` is set.
        """
        others = [peer for peer in peers if peer.life != self.life]
        deadline = time.monotonic() + seconds
        while not done.wait(self._heartbeat_seconds / _LOOKS):
            silent = [other for other in others if not self._liveness.beats(other.address)]
            why = f"group {silent[0].number} does not answer" if silent else hopeless()
            if not why and time.monotonic() > deadline:
                why = f"it took longer than {seconds:g} s"
            if why:
                # It may have ended while the others were asked.
                return "" if done.is_set() else why
        return ""

    def close(self) -> None:
        """Send no more heartbeats."""
        self._manager.shutdown()


class Liveness:
    """Asks managers whether they are alive; connections are kept.

    Args:
        seconds: In which an answer must come.
    """

    def __init__(self, seconds: float) -> None:
        self._limit = timedelta(seconds=seconds)
        self._clients: dict[str, Any] = {}

    def beats(self, address: str) -> bool:
        """Return whether the manager at `address` answers in time."""
        from torchft.coordination import ManagerClient

        try:
            if address not in self._clients:
                self._clients[address] = ManagerClient(address, connect_timeout=self._limit)
            self._clients[address]._checkpoint_metadata(0, timeout=self._limit)
        except Exception as error:
            # It was asked for what it does not have; that it says so is the sign of life.
            alive = "rank not found" in str(error)
            if not alive:
                self._clients.pop(address, None)
            return alive
        return True


def _words(error: Exception) -> str:
    """The part of an error of gRPC that a person can use."""
    text = str(error).strip()
    for mark in ('message: "', "error: "):
        if mark in text:
            text = text.split(mark, 1)[1].split('"', 1)[0]
    return text.splitlines()[0] if text else type(error).__name__


class RoundFailedError(Exception):
    """A round's connections are of no more use; its step is done again in another round."""


class Connections:
    """Sums over the groups of a membership.

    Args:
        client: Tells whether peers are alive.
        device: Where the sums are taken: gloo for ``cpu``, NCCL for ``cuda``.
        timeout_seconds: Longest wait for peers that are alive.
    """

    def __init__(self, client: QuorumClient, device: torch.device, timeout_seconds: float) -> None:
        from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

        self._kind: Any = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo
        self._client = client
        self._timeout_seconds = timeout_seconds
        self._link: _Link | None = None
        self._members: tuple[Member, ...] = ()
        self._given_up: list[_Link] = []

    @property
    def round(self) -> str:
        """In which the connections were made; an empty text while there are none."""
        return "" if self._link is None else self._link.found.round

    def connect(self, found: Membership) -> None:
        """Connect the members of a round, unless they are connected already.

        Raises:
            RoundFailedError: When one of them does not come.
        """
        self._members = found.members
        # All members decide alike: a group that was stopped meanwhile may still hold old ones.
        same = self._link is not None and self._link.found.lives == found.lives
        if same and all(member.connected == self.round for member in found.members):
            return
        self.drop()
        self._given_up = [link for link in self._given_up if not link.closed()]
        if found.count == 1:
            return
        done, problem, link = threading.Event(), [], _Link(found)

        def configure() -> None:
            try:
                at = found.members[0].store
                host, _, port = at.rpartition(":")
                limit = timedelta(seconds=self._timeout_seconds)
                link.store = dist.TCPStore(
                    host, int(port), is_master=False, wait_for_workers=False, timeout=limit
                )
                group = self._kind(timeout=limit)
                name = f"{at}/outlast/{found.round}"
                group.configure(name, self._client.life, found.index, found.count)
                link.group = group
            except Exception as error:
                problem.append(error)
            done.set()

        # Waits for all members; a peer that dies now must not hold this process up.
        threading.Thread(target=configure, daemon=True).start()
        why = self._client.wait(done, found.members, self._timeout_seconds, link.given_up)
        if why or problem:
            link.give_up()
            raise RoundFailedError(why or str(problem[0]))
        self._link = link

    def drop(self) -> None:
        """Give the connections up, and tell the peers."""
        link, self._link = self._link, None
        if link is not None:
            link.give_up()
            if not link.closed():
                self._given_up.append(link)

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over the members; all together call it alike.

        Raises:
            RoundFailedError: When a member is gone; the tensors' content is then undefined.
        """
        if self._link is None:
            if len(self._members) > 1:
                raise RoundFailedError("there are no connections")
            return
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        try:
            for tensor in tensors:
                self._link.works.append(self._link.group.allreduce([tensor], options))
            for work in self._link.works:
                self._await(work)
            self._link.works = []
        except RuntimeError as error:
            self.drop()
            raise RoundFailedError(str(error)) from None
        except RoundFailedError:
            self.drop()
            raise

    def _await(self, work: Any) -> None:
        assert self._link is not None
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        why = self._client.wait(done, self._members, self._timeout_seconds, self._link.given_up)
        if why:
            raise RoundFailedError(why)
        work.wait()


@dataclass
class _Link:
    """The connections of one round.

    gloo cannot end a sum in which a peer hangs: ending its process group waits for that. So the
    group is kept until its works are done, and the round's store tells the peers.
    """

    found: Membership
    group: Any = None
    store: dist.TCPStore | None = None
    works: list[Any] = field(default_factory=list)

    @property
    def _key(self) -> str:
        return f"outlast/{self.found.round}/given up"

    def give_up(self) -> None:
        """Tell the peers that this member waits for them no more."""
        # Whose store is gone is a member itself, and its peers find it silent.
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                self.store.set(self._key, "1")

    def given_up(self) -> str:
        """Why the round is of no more use, or an empty text."""
        with contextlib.suppress(RuntimeError):
            given_up = self.store is not None and self.store.check([self._key])
            return "a member has given the round up" if given_up else ""
        return "the round's store has gone"

    def closed(self) -> bool:
        """End the process group if nothing is under way in it; whether it is ended."""
        if all(work.is_completed() for work in self.works):
            self.works = []
            self.group.abort(errored=False)
            return True
        return False


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


class Buckets:
    """The gradients of a model as few flat tensors, equal in every group.

    Args:
        parameters: Those that are trained, in an order that all groups share.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._buckets: list[list[int]] = []
        size, last = 0, None
        for number, parameter in enumerate(self._parameters):
            local = _local(parameter.detach())
            kind = (local.dtype, local.device)
            if kind != last or size > BUCKET_BYTES:
                self._buckets.append([])
                size, last = 0, kind
            self._buckets[-1].append(number)
            size += local.nbytes

    def packed(self) -> tuple[list[torch.Tensor], list[float]]:
        """Copies of the gradients, and for each parameter 1.0 if it has one, else 0.0."""
        gradients = [parameter.grad for parameter in self._parameters]
        parts = [
            torch.zeros_like(_local(parameter.detach())) if gradient is None else _local(gradient)
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        flat = [
            torch.cat([parts[number].detach().reshape(-1) for number in bucket])
            for bucket in self._buckets
        ]
        return flat, [0.0 if gradient is None else 1.0 for gradient in gradients]

    def drop(self) -> None:
        """Leave no parameter a gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def zeros(self) -> list[torch.Tensor]:
        """The form of `packed` where there is no gradient."""
        found = []
        for bucket in self._buckets:
            parts = [_local(self._parameters[number].detach()) for number in bucket]
            size = sum(part.numel() for part in parts)
            found.append(torch.zeros(size, dtype=parts[0].dtype, device=parts[0].device))
        return found

    def unpack(self, flat: list[torch.Tensor], used: Sequence[float]) -> None:
        """Give every parameter that any group has used its summed gradient."""
        for bucket, content in zip(self._buckets, flat, strict=True):
            start = 0
            for number in bucket:
                parameter = self._parameters[number]
                local = _local(parameter.detach())
                part = content[start : start + local.numel()].view_as(local)
                start += local.numel()
                if used[number] > 0:
                    _set_gradient(parameter, part)


def _set_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is not None:
        _local(parameter.grad).copy_(gradient)
    elif is_dtensor(parameter):
        from torch.distributed.tensor import DTensor

        parameter.grad = DTensor.from_local(
            gradient.clone(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        parameter.grad = gradient.clone()


def span_of(parts: int, index: int, count: int) -> Span:
    """The parts of one of `count` groups; empty where there are more groups than parts."""
    return parts * index // count, parts * (index + 1) // count


def halves(span: Span) -> tuple[Span, Span]:
    """The children of a node of more than one part."""
    low, high = span
    middle = (low + high + 1) // 2
    return (low, middle), (middle, high)


def nodes_within(root: Span, own: Span) -> Iterator[Span]:
    """The largest nodes of the tree below `root` that lie within `own`, from the left."""
    low, high = max(root[0], own[0]), min(root[1], own[1])
    if low >= high:
        return
    if (low, high) == root:
        yield root
        return
    for half in halves(root):
        yield from nodes_within(half, own)


class PartSums:
    """Sums of a group over its parts of one step.

    Args:
        buckets: Of the parameters whose gradients are summed.
        parts: Of the global batch.
    """

    def __init__(self, buckets: Buckets, parts: int) -> None:
        self.parts = parts
        self._buckets = buckets
        self._own: Span = (0, 0)
        self._nodes: dict[Span, Flat] = {}
        self.begin((0, 1), idle=True)

    def begin(self, share: tuple[int, int], *, idle: bool) -> None:
        """A new attempt at a step.

        Args:
            share: Index of this group among those that compute, and their number.
            idle: Whether the others do this group's part.
        """
        self._groups = share[1]
        self._own = (0, 0) if idle else span_of(self.parts, *share)
        self.clear()

    @property
    def own(self) -> range:
        """Numbers of the parts that this group computes."""
        return range(*self._own)

    def clear(self) -> None:
        """Forget what has been added, to compute all own parts again."""
        self._nodes = {}
        self.losses = [0.0] * self.parts
        self.used: list[float] = []
        self._added: set[int] = set()

    def add(self, part: int, loss: float) -> None:
        """Take the parameters' gradients as those of one part, each part once, and drop them.

        Raises:
            RecoverError: For a part that is not this group's, or was added already.
        """
        if part not in self.own or part in self._added:
            whose = (
                f"this group adds each of the parts {self._own[0]} to {self._own[1] - 1} once"
                if self.own
                else "this group adds none in this step: others do its part, or there are more "
                "groups than parts"
            )
            raise RecoverError(f"part {part} is not to be added: {whose}")
        self._added.add(part)
        flat, used = self._buckets.packed()
        self._buckets.drop()
        self.losses[part] = loss
        self.used = [max(pair) for pair in zip(used, self.used or used, strict=True)]
        self._nodes[part, part + 1] = flat
        for node in nodes_within((0, self.parts), self._own):
            if node[0] <= part < node[1]:
                self._fold(node)

    def sum(self, exchange: Callable[[Flat], None]) -> Flat:
        """The gradients of all parts, equal to the bit in all groups.

        Args:
            exchange: Replaces each of some integer tensors by its sum over the groups.

        Raises:
            RecoverError: A part of this group is missing.
        """
        if len(self._added) < len(self.own):
            missing = min(set(self.own) - self._added)
            raise RecoverError(
                f"part {missing} is missing: call step.add(part, loss) for each of step.parts "
                "before step.commit()"
            )
        return self._total((0, self.parts), exchange)

    def _fold(self, node: Span) -> Flat | None:
        """The sum of a node of one's own, once all of its parts are there."""
        if node in self._nodes:
            return self._nodes[node]
        if node[1] - node[0] == 1:
            return None
        left, right = halves(node)
        sums = self._fold(left), self._fold(right)
        if sums[0] is None or sums[1] is None:
            return None
        self._nodes[node] = _added(sums[0], sums[1])
        del self._nodes[left], self._nodes[right]
        return self._nodes[node]

    def _total(self, node: Span, exchange: Callable[[Flat], None]) -> Flat:
        spans = [span_of(self.parts, index, self._groups) for index in range(self._groups)]
        if any(low <= node[0] and node[1] <= high for low, high in spans):
            mine = self._nodes.pop(node, None)
            flat = self._buckets.zeros() if mine is None else mine
            # Of all groups one has it. Bits are summed as whole numbers: a float's sum with zeros
            # would lose the sign of a zero.
            exchange(
                [
                    tensor.view(torch.int32 if tensor.element_size() % 4 == 0 else torch.uint8)
                    for tensor in flat
                ]
            )
            return flat
        left, right = halves(node)
        return _added(self._total(left, exchange), self._total(right, exchange))


def _added(left: Flat, right: Flat) -> Flat:
    for one, other in zip(left, right, strict=True):
        one.add_(other)
    return left
