"""The writer: a process that codes and publishes what the trainer has staged in shared memory.

Coding in the trainer's process would take its interpreter lock, so a program of its own does it:
``python -m outlast.checkpoint.writer``, which imports no torch. It gets its memory as an inherited
file descriptor and its jobs over a pipe. When the trainer dies, the pipe closes and the writer
gives up without publishing. `ThreadWriter` runs the same code in a thread, for small states.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from operator import is_
from typing import Protocol, TypeAlias

from outlast.checkpoint.codec import Bound
from outlast.checkpoint.encoder import (
    AbandonedError,
    Encoder,
    PartJob,
    Reduction,
    StagedPiece,
    Written,
)
from outlast.checkpoint.manifest import Catalogue
from outlast.checkpoint.storage import describe_failure, in_background, storage_of
from outlast.errors import CheckpointError, LeaseLostError

ABANDON = b"abandon"
_JobPlan: TypeAlias = tuple[Catalogue, list[StagedPiece], dict[str, Bound]]
"""What jobs have in common as long as the state has the same tensors."""

_NICE = 5
_PAUSE_SECONDS = 0.05
_FAREWELL_SECONDS = 10.0
# Linux 5.14; Python has no name for it yet.
_MADV_POPULATE_WRITE = 23


class Arena:
    """A piece of anonymous shared memory with a file descriptor that a child can inherit.

    Its pages are touched at once, so that no save pays for their first use.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("outlast-checkpoint")
        os.ftruncate(self.descriptor, size)
        # An empty file cannot be mapped.
        self._map = mmap.mmap(self.descriptor, size) if size else None
        self.memory = memoryview(self._map) if self._map is not None else memoryview(bytearray())
        if self._map is not None:
            with contextlib.suppress(OSError):
                self._map.madvise(_MADV_POPULATE_WRITE)

    def detach(self) -> None:
        """Close the descriptor, which no child will need; the memory stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Give the memory back, as soon as nobody uses it any more."""
        self.detach()
        # Somebody may still look at it; then it goes with the last look.
        with contextlib.suppress(BufferError):
            self.memory.release()
            if self._map is not None:
                self._map.close()


class Writer(Protocol):
    """Takes one job at a time."""

    def write(self, job: PartJob, abandoned: threading.Event) -> Written:
        """Code and publish.

        Raises:
            CheckpointError: When it fails.
            AbandonedError: When `abandoned` was set before it was published.
        """

    def close(self) -> None:
        """End the writer."""


def write_part(encoder: Encoder, job: PartJob, abandoned: threading.Event) -> Written:
    """Write one part, with the storage's errors as sentences."""

    def check() -> None:
        if abandoned.is_set():
            raise AbandonedError

    try:
        return encoder.write(job, check)
    except (OSError, LeaseLostError) as error:
        # The next save raises a lost lease where training runs.
        raise CheckpointError(describe_failure(error)) from error


class ThreadWriter:
    """Codes in a thread, which is left behind when the storage hangs.

    Args:
        place: Path or URL of the store.
        reduction: Codecs and error bounds.
        arena: Memory.
        timeout_seconds: A job that takes longer is given up.
    """

    def __init__(
        self, place: str, reduction: Reduction, arena: Arena, timeout_seconds: float
    ) -> None:
        self._place, self._reduction, self._memory = place, reduction, arena.memory
        self._timeout_seconds = timeout_seconds
        self._encoder = Encoder(storage_of(place), reduction, arena.memory)

    def write(self, job: PartJob, abandoned: threading.Event) -> Written:
        """Code and publish."""
        work = in_background(functools.partial(write_part, self._encoder, job, abandoned))
        try:
            return work.result(self._timeout_seconds)
        except TimeoutError:
            # What it codes when the storage answers may be of the next save: nothing of it counts.
            abandoned.set()
            self._encoder = Encoder(storage_of(self._place), self._reduction, self._memory)
            raise CheckpointError(
                f"{self._place} did not take the part of rank {job.rank} within "
                f"{self._timeout_seconds:g} s (timeout_seconds); see whether the storage still "
                "answers"
            ) from None

    def close(self) -> None:
        """Nothing is held."""


class ProcessWriter:
    """Codes in a process of its own, started when first needed and again after it died.

    Args:
        place: Path or URL of the store.
        reduction: Codecs and error bounds.
        arena: Memory with a file descriptor.
        timeout_seconds: A job that takes longer is given up and its process ended.
    """

    def __init__(
        self, place: str, reduction: Reduction, arena: Arena, timeout_seconds: float
    ) -> None:
        # The process begins with these: of the memory, its file descriptor and its bytes.
        self._settings = place, reduction, arena.descriptor, arena.size
        self._timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._plan: _JobPlan | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process ahead of the first job, so that its imports delay nothing."""
        with self._lock:
            if self._process is None:
                self._start()

    def write(self, job: PartJob, abandoned: threading.Event) -> Written:
        """Code and publish."""
        if abandoned.is_set():
            raise AbandonedError
        self.start()
        assert self._pipe is not None
        deadline = time.monotonic() + self._timeout_seconds
        told = False
        try:
            # Pickling what stays would hold the interpreter's lock while training wants it.
            plan = job.catalogue, job.pieces, job.bounds
            known = self._plan is not None and all(map(is_, plan, self._plan))
            shell = replace(job, catalogue=Catalogue({}), pieces=[], bounds={})
            self._plan = plan
            # A process that hangs reads no plan of many tensors to its end.
            message = (shell, None if known else plan)
            sent = in_background(functools.partial(self._pipe.send, message))
            while not self._pipe.poll(_PAUSE_SECONDS):
                if sent.done():
                    sent.result()
                    if abandoned.is_set() and not told:
                        self._pipe.send(ABANDON)
                        told = True
                if time.monotonic() > deadline:
                    self._end(kill=True)
                    raise CheckpointError(
                        f"the writer process did not finish within {self._timeout_seconds:g} s "
                        "(timeout_seconds) and was ended; see whether the storage still answers"
                    )
            outcome = self._pipe.recv()
        except (EOFError, OSError):
            code = self._end(kill=True)
            raise CheckpointError(
                f"the writer process died (exit code {code}); the next save starts a new one"
            ) from None
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Written)
        return outcome

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process."""
        self._end(kill=False)

    def _start(self) -> None:
        ours, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outlast.checkpoint.writer", str(theirs.fileno())],
            pass_fds=[theirs.fileno(), self._settings[2]],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._pipe, self._plan = ours, None
        ours.send(self._settings)

    def _end(self, *, kill: bool) -> int | None:
        with self._lock:
            process, pipe = self._process, self._pipe
            self._process = self._pipe = None
        if process is None or pipe is None:
            return None
        if kill:
            process.kill()
        pipe.close()
        try:
            return process.wait(min(self._timeout_seconds, _FAREWELL_SECONDS))
        except subprocess.TimeoutExpired:
            process.kill()
        try:
            return process.wait(_FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            # It hangs in the kernel, on storage that does not answer.
            return None


def serve(pipe: Connection) -> None:
    """Take jobs from `pipe` until it closes."""
    place, reduction, descriptor, size = pipe.recv()
    arena = memoryview(mmap.mmap(descriptor, size)) if size else memoryview(b"")
    encoder = Encoder(storage_of(place), reduction, arena)
    abandoned = threading.Event()
    jobs: list[PartJob] = []
    plan: _JobPlan = Catalogue({}), [], {}
    arrived = threading.Condition()
    closed = threading.Event()

    def listen() -> None:
        """Hear at once when a job is to be given up, or the trainer is gone."""
        nonlocal plan
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                closed.set()
                abandoned.set()
                message = None
            with arrived:
                if isinstance(message, tuple):
                    shell, plan = message[0], message[1] or plan
                    # What was said of the job before does not concern this one.
                    abandoned.clear()
                    catalogue, pieces, bounds = plan
                    jobs.append(replace(shell, catalogue=catalogue, pieces=pieces, bounds=bounds))
                elif message == ABANDON:
                    abandoned.set()
                arrived.notify()
            if closed.is_set():
                return

    threading.Thread(target=listen, daemon=True).start()
    while True:
        with arrived:
            arrived.wait_for(lambda: bool(jobs) or closed.is_set())
            if not jobs:
                return
            job = jobs.pop()
        try:
            outcome: object = write_part(encoder, job, abandoned)
        except (CheckpointError, AbandonedError) as error:
            outcome = error
        except Exception as error:
            outcome = CheckpointError(f"{type(error).__name__}: {error}")
        try:
            pipe.send(outcome)
        except OSError:
            return


def main() -> None:
    """Entry point of the process: the argument is the file descriptor of the pipe."""
    # What ends the trainer is no reason to lose its last save: the pipe tells when it is gone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
