"""A replica group's seat at the lighthouse: its heartbeat, its quorums, and its peers' pulse.

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
from outlast.recover.cost import SILENCE_SHARE
from outlast.recover.live.rules import Member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BEATS = 10
_RETRY_SECONDS = 0.02
_ANSWER_SECONDS = 10.0
_LOOKS = 4


@dataclass(frozen=True)
class Round:
    """One answer of the lighthouse.

    Attributes:
        name: Unique, also across restarts of the lighthouse; later ones are greater as texts.
        members: Everybody who takes part.
    """

    name: str
    members: list[Member]


@dataclass(frozen=True)
class SeatSettings:
    """How a group takes part.

    Attributes:
        lighthouse: ``host:port``.
        number: Of the group.
        identity: What all members have in common; see `rules.Member`.
        host: Under which peers reach this machine.
        heartbeat_seconds: Silence after which a group counts as dead.
        timeout_seconds: Longest wait for a quorum.
    """

    lighthouse: str
    number: int
    identity: str
    host: str
    heartbeat_seconds: float
    timeout_seconds: float


@dataclass(frozen=True)
class Standing:
    """How far a group is; see `rules.Member`."""

    step: int
    lineage: str
    serves: str
    connected: str
    since: str
    awaits: int


class Seat:
    """One group's registration with the lighthouse.

    Args:
        settings: How it takes part.
        store: Where this group's key-value store listens.

    Raises:
        RecoverError: When the lighthouse cannot be reached.
    """

    def __init__(self, settings: SeatSettings, store: str) -> None:
        self.life = f"{settings.number}:{uuid.uuid4().hex[:12]}"
        self._settings = settings
        self._store = store
        self._client: Any = None
        self._manager: Any = self._until(self._deadline(), self._register)
        self._pulse = Pulse(SILENCE_SHARE * settings.heartbeat_seconds)

    def _register(self) -> Any:
        from torchft.coordination import ManagerServer

        settings = self._settings
        return ManagerServer(
            replica_id=self.life,
            lighthouse_addr=f"http://{settings.lighthouse}",
            hostname=settings.host,
            bind="0.0.0.0:0",
            store_addr=self._store,
            world_size=1,
            heartbeat_interval=timedelta(seconds=settings.heartbeat_seconds / _BEATS),
            connect_timeout=timedelta(seconds=max(settings.heartbeat_seconds, 1.0)),
            quorum_retries=0,
        )

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.timeout_seconds

    def join(self, mine: Standing) -> Round:
        """Take part in the next quorum, and wait until there is one.

        Raises:
            RecoverError: When there is no quorum within `timeout_seconds`.
        """
        me = Member(
            life=self.life,
            number=self._settings.number,
            identity=self._settings.identity,
            address=self._manager.address(),
            store=self._store,
            **asdict(mine),
        )
        deadline = self._deadline()
        found: Round = self._until(deadline, lambda: self._ask(me, deadline))
        return found

    def _ask(self, me: Member, deadline: float) -> Round:
        if self._client is None:
            self._connect()
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
        return Round(f"{quorum.created.seconds:012d}.{quorum.created.nanos:09d}", members)

    def _connect(self) -> None:
        from torchft.coordination import LighthouseClient

        self._client = LighthouseClient(
            f"http://{self._settings.lighthouse}",
            connect_timeout=timedelta(seconds=max(self._settings.heartbeat_seconds, 1.0)),
        )

    def _until(self, deadline: float, work: Callable[[], Any]) -> Any:
        """Repeat `work` until it does not raise, or the deadline is over."""
        while True:
            try:
                return work()
            except (RuntimeError, TimeoutError, ConnectionError, OSError) as error:
                if time.monotonic() > deadline:
                    settings = self._settings
                    raise RecoverError(
                        f"group {settings.number} waited {settings.timeout_seconds:g} s for a "
                        f"quorum at the lighthouse {settings.lighthouse} (recover.lighthouse): "
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
        while not done.wait(self._settings.heartbeat_seconds / _LOOKS):
            silent = [other for other in others if not self._pulse.beats(other.address)]
            why = f"group {silent[0].number} does not answer" if silent else hopeless()
            if not why and time.monotonic() > deadline:
                why = f"it took longer than {seconds:g} s"
            if why:
                # It may have ended while the others were asked.
                return "" if done.is_set() else why
        return ""

    def close(self) -> None:
        """Give up the seat: no more heartbeats."""
        self._manager.shutdown()


class Pulse:
    """Asks managers whether they are alive; connections are kept.

    Args:
        seconds: In which an answer must come.
    """

    def __init__(self, seconds: float) -> None:
        self._limit = timedelta(seconds=seconds)
        self._clients: dict[str, Any] = {}

    def beats(self, address: str) -> bool:
        """Whether the manager at `address` answers in time."""
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
