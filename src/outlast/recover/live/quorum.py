"""Quorums of replica groups: registration, liveness of peers, membership of a step.

Every group computes the same from the same answer, so no further agreement is needed.

A state is known by its step and its *lineage*: how it began (a hash of its content), or the round
of the quorum in which its last step was committed. Two groups with one step but two lineages have
done that step with other partners, and may differ in their last bits; the later round wins, and the
other group heals.

The heartbeat and the answer to a ping come from threads of torchft's manager that never wait for
Python's interpreter lock: a group is silent when its process is dead, stopped or cut off, and not
because it computes.
"""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outlast.errors import RecoverError
from outlast.records import MemberLost, MembershipChanged
from outlast.recover.cost import SILENCE_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
