"""The fence: of all links of a chain, only its holder may write the run.

A file names the holder: job, host, boot, process and when that was started. It is made by linking a
complete file to the name, so it is never seen half written. Another link takes it over when the
holder is dead:

- a process of this host that is gone;
- a job that Slurm says has ended, also where its process lives on (a node that Slurm has lost);
- an earlier start of this very job, after a requeue;
- where Slurm cannot be asked, a holder whose heartbeat has not moved for `STALE_SECONDS` of this
  process's own clock, which no difference between hosts' clocks can shorten.

Of several links that find the same dead holder one gets the fence: whoever removes a fence locks
that very file first (flock) and looks at it again, so that a newer one is never removed by mistake.
A holder that was believed dead and is not (a node that was cut off) finds at its next heartbeat
that the fence names another, and ends its processes. These need not wait for it: the fence is their
lease (`outlast.records.lease`), which each save checks, and they end when it names another job or
when the heartbeat has stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cluster.slurm import has_ended, is_waiting
from outlast.errors import ClusterError
from outlast.records import lock
from outlast.records.lease import lease_environment
from outlast.records.process import process_lives

if TYPE_CHECKING:
    from collections.abc import Callable

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
WAIT_SECONDS = 90.0
_LOOK_SECONDS = 1.0
# A dead holder's file is removed at once, unless somebody else is at it.
_REMOVAL_SECONDS = 30.0


@dataclass(frozen=True)
class Holder:
    """Holder of a fence.

    Attributes:
        job: Slurm's number of the link's job.
        host: Where its supervising process runs.
        boot: That machine's boot.
        process: Its number there.
        started: Seconds after the boot when it was started.
        token: Unlike that of any other holder.
    """

    job: str
    host: str
    boot: str
    process: int
    started: float
    token: str


class FenceHeldError(ClusterError):
    """Another link is alive.

    Attributes:
        holder: Who it is.
    """

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        super().__init__(
            f"job {holder.job} on {holder.host} is writing this run; a second link does not"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (FenceHeldError, (self.holder,))


class Fence:
    """The right to write a run; see the module.

    Args:
        path: The fence file; its folder exists.
        job: Slurm's number of this link's job.
        job_state: The state of another job as one word, None where nobody knows it; raises
            ClusterError where Slurm gives no answer. A job that is being taken down is COMPLETING.
        wait_seconds: How long a live holder is waited for, which may be about to end; called with
            it at each look.
    """

    def __init__(
        self,
        path: Path,
        job: str,
        job_state: Callable[[str], str | None],
        *,
        wait_seconds: Callable[[Holder], float] = lambda holder: WAIT_SECONDS,
    ) -> None:
        self._path = path
        self._job_state = job_state
        self._wait_seconds = wait_seconds
        self.holder = this_process(job)
        self._beaten = 0.0
        # When another's heartbeat was last seen to move, and its time then.
        self._moved, self._seen = time.monotonic(), -1

    def acquire(self) -> Holder | None:
        """Take the fence.

        Returns:
            The dead holder from whom it was taken, or None where nobody held it.

        Raises:
            FenceHeldError: A live link holds it, and continued to do so for `wait_seconds`.
            ClusterError: The file cannot be written.
        """
        begun = self._moved = time.monotonic()
        dead: Holder | None = None
        try:
            while True:
                if self._create():
                    return dead
                holder = read_holder(self._path)
                passed = time.monotonic() - begun
                if holder is None or not self._alive(holder):
                    dead = holder or dead
                    if self._remove(holder):
                        continue
                    if passed > _REMOVAL_SECONDS:
                        raise ClusterError(
                            f"{self._path} of a dead link could not be removed in "
                            f"{_REMOVAL_SECONDS:g} s, since another process has locked it"
                        )
                elif passed > self._wait_seconds(holder):
                    raise FenceHeldError(holder)
                time.sleep(_LOOK_SECONDS)
        except OSError as error:
            raise ClusterError(f"{self._path} cannot be written: {error.strerror}") from None

    @property
    def lease(self) -> dict[str, str]:
        """Environment variables of the processes that write the run under this fence."""
        return lease_environment(self._path, self.holder.token)

    def held(self, *, at_once: bool = False) -> bool:
        """True while this link holds the fence; the call also shows others that it is alive.

        A file system that does not answer for a moment is no reason to give up.

        Args:
            at_once: Look now, not only every `HEARTBEAT_SECONDS`.
        """
        now = time.monotonic()
        if now - self._beaten < HEARTBEAT_SECONDS and not at_once:
            return True
        self._beaten = now
        try:
            with self._path.open("rb") as file:
                holder = _parsed(file.read())
                if holder is not None and holder != self.holder:
                    return False
                # This very file, never one that another link has put in its place meanwhile.
                os.utime(file.fileno())
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def release(self) -> None:
        """Give it back, if this link still holds it."""
        with contextlib.suppress(OSError):
            if read_holder(self._path) == self.holder:
                self._remove(self.holder)

    def _create(self) -> bool:
        temporary = self._path.with_name(f".{self._path.name}.{self.holder.token}")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(self.holder.__dict__, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, self._path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        self._beaten = time.monotonic()
        return True

    def _remove(self, holder: Holder | None) -> bool:
        """Remove the file if it still names `holder`; False where somebody else is at it."""
        return lock.remove_lock_file(self._path, lambda content, _: _parsed(content) == holder)

    def _alive(self, holder: Holder) -> bool:
        here = (holder.host, holder.boot) == (self.holder.host, self.holder.boot)
        if here and not process_lives(holder.process, holder.started):
            return False
        if holder.job == self.holder.job:
            # An earlier start of this job: Slurm starts it again only after its end.
            return False
        state = None
        with contextlib.suppress(ClusterError):
            state = self._job_state(holder.job)
        if state is not None:
            return not (has_ended(state) or is_waiting(state))
        try:
            changed = self._path.stat().st_mtime_ns
        except OSError:
            return True
        if changed != self._seen:
            self._seen, self._moved = changed, time.monotonic()
        return here or time.monotonic() - self._moved < STALE_SECONDS


def read_holder(path: Path) -> Holder | None:
    """Holder named by a fence file; None where there is none, or it is damaged."""
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return None


def this_process(job: str) -> Holder:
    """This process as a holder."""
    me = lock.this_process()
    return Holder(job, me["host"], me["boot"], me["pid"], me["started"], uuid.uuid4().hex)


def _parsed(content: bytes) -> Holder | None:
    try:
        fields: dict[str, Any] = json.loads(content)
        return Holder(**fields)
    except (ValueError, TypeError):
        return None
