"""Who belongs to a step, who is ahead and who must heal: pure functions of one quorum's answer.

Every group computes the same from the same answer, so no further agreement is needed.

A state is known by its step and its *lineage*: how it began (a hash of its content), or the round
of the quorum in which its last step was committed. Two groups with one step but two lineages have
done that step with other partners, and may differ in their last bits; the later round wins, and the
other group heals.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.errors import RecoverError
from outlast.records import MemberLost, MembershipChanged

_BEGUN, _COMMITTED = "0", "1"


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
        """What tells one state from another, the more advanced the greater."""
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
        """How many groups take part."""
        return len(self.members)

    @property
    def lives(self) -> tuple[str, ...]:
        """Which starts of which groups."""
        return tuple(member.life for member in self.members)

    @property
    def complete(self) -> bool:
        """Whether all groups are there that everybody awaits."""
        return self.count >= min(member.awaits for member in self.members)

    @property
    def committed(self) -> bool:
        """Whether the newest state has come from a step that groups have committed."""
        return self.lineage.startswith(_COMMITTED)


def begun(digest: str) -> str:
    """The lineage of a state that no group has trained since it was made or loaded."""
    return f"{_BEGUN}-{digest}"


def committed_in(round_name: str) -> str:
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
    """Why training may not go on from the newest state present, or None when it may.

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


def changed(
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
