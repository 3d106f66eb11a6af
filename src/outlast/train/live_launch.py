"""Starting the replica groups of a live run on this machine, and starting dead ones again.

Every group is one process. The launcher holds the run directory, keeps the lighthouse alive and
starts a group that has died again, at most `launch.restarts` times in all; the others go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch

from outlast.distributed.ranks import ALONE
from outlast.errors import EXIT_CRASHED, EXIT_DONE, OutlastError, RecoverError, WrongNumbersError
from outlast.records import MemberLost, RecordWriter
from outlast.recover.live import Lighthouse, require_torchft
from outlast.recover.phase_page import pages_folder, remove_dead_pages
from outlast.runtime.stop import StopFlag
from outlast.train.build import SetUp, load_data
from outlast.train.launch import forward_signal
from outlast.train.live import fixed_parts, job_of_group, train_group
from outlast.train.live_records import Post, has_ended, known_steps
from outlast.train.model import load_code
from outlast.train.preflight import preflight
from outlast.train.run import claim, run_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.job import Job
    from outlast.records import RunDirectory
    from outlast.train.run import Start

_LOOK_SECONDS = 0.05
_END_SECONDS = 20.0
_PARENT_DEATH_SIGNAL = 1


def group_count(job: Job) -> int:
    """Number of replica groups that `job` asks for.

    Raises:
        RecoverError: When it cannot be trained by live groups.
    """
    require_torchft()
    parallel = job.parallel
    for name in ("pipeline", "shard", "tensor"):
        if (degree := getattr(parallel, name)) > 1:
            raise RecoverError(
                f'recover.mode = "live" trains with groups of one process, but parallel.{name} = '
                f'{degree}; set it to 1, or recover.mode = "restart"'
            )
    if job.coding.scheme != "off":
        raise RecoverError(
            f'coding.scheme = "{job.coding.scheme}" sums over the replicas in its own way; set it '
            'to "off", or recover.mode = "restart"'
        )
    if job.staging.directory:
        raise RecoverError(
            f'staging.directory = "{job.staging.directory}" cannot be combined with recover.mode = '
            '"live", whose groups read the tokens in place; leave it empty, or set recover.mode = '
            '"restart"'
        )
    if job.checkpoint.replay != "off":
        raise RecoverError(
            f'checkpoint.replay = "{job.checkpoint.replay}" cannot be combined with recover.mode = '
            '"live", where the group that writes may change; set one of them to "off"'
        )
    groups = job.recover.groups or parallel.replicate or job.launch.nproc
    if groups < 2:
        raise RecoverError(
            f'recover.mode = "live" needs at least two groups, but recover.groups = '
            f"{job.recover.groups} and launch.nproc = {job.launch.nproc}; set recover.groups = 2 "
            "or start more processes (--nproc 2)"
        )
    if groups > job.train.batch_size:
        raise RecoverError(
            f"train.batch_size = {job.train.batch_size} gives no sample to some of the {groups} "
            "groups; raise it or start fewer groups (recover.groups)"
        )
    if 0 < fixed_parts(job) < groups:
        raise RecoverError(
            f"recover.fixed_order = true cuts each batch into {fixed_parts(job)} micro-batches, "
            f"which leaves some of the {groups} groups without any; lower train.micro_batch_size = "
            f"{job.train.micro_batch_size}, or start fewer groups (recover.groups)"
        )
    return groups


def launch_live(start: Start) -> int:
    """Run `start` by replica groups on this machine and wait for them.

    Returns:
        The exit code on which the groups agree.

    Raises:
        OutlastError: When no group can go on.
    """
    groups = group_count(start.job)
    preflight(job_of_group(start.job), 1)
    lock = claim(start)
    forwarding = {
        number: signal.signal(number, forward_signal)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    }
    # Import what takes seconds once, for all processes that are forked, also after a death.
    job = start.job
    import torchft.checkpointing
    import torchft.process_group  # noqa: F401

    load_code(job.model)
    crew = Crew(start, groups)
    try:
        crew.prepare()
        _run(crew, start.job)
    finally:
        # Whatever has gone wrong, no process stays behind.
        crew.end()
        with contextlib.suppress(OutlastError):
            remove_dead_pages(pages_folder(start.job.recover.memory, run_directory(start.job)))
        for number, handler in forwarding.items():
            signal.signal(number, handler)
        lock.release()
    return crew.outcome()


def _run(crew: Crew, job: Job) -> None:
    directory = run_directory(job)
    if job.recover.lighthouse:
        _train(crew, directory, job.recover.lighthouse, lambda: False)
        return
    seconds = job.recover.heartbeat_seconds
    with Lighthouse(seconds, join_seconds=job.launch.timeout_seconds / 2) as lighthouse:
        _train(crew, directory, lighthouse.address, lighthouse.keep_alive)


def _train(
    crew: Crew, directory: RunDirectory, lighthouse: str, keep_alive: Callable[[], bool]
) -> None:
    """Let the groups train to the end, again where who writes has died after the last step."""
    while True:
        attempt = directory.next_attempt()
        crew.start(lighthouse, attempt)
        looked = time.monotonic()
        while crew.look():
            if keep_alive():
                # The groups' events are written by one of them, but only the launcher has noticed
                # this.
                seconds = time.monotonic() - looked
                records = RecordWriter(directory.path, 0, attempt)
                note = "the lighthouse was started again at the same place"
                records.write(
                    MemberLost(known_steps(directory), "lighthouse", "coordinator", seconds, note)
                )
                records.close()
            looked = time.monotonic()
        if not crew.left_unfinished(attempt):
            return


@dataclass
class Worker:
    """A process of a group, and what it has said at its end."""

    post: Post
    process: Any
    pipe: connection.Connection
    said: tuple[int, str | None] | None = None


@dataclass
class Crew:
    """The processes of all groups.

    Args:
        launched: What they are to do.
        groups: How many there are.
    """

    launched: Start
    groups: int
    _workers: dict[int, Worker] = field(default_factory=dict)
    _ended: list[Worker] = field(default_factory=list)
    _restarts: int = 0
    _deadline: float = math.inf

    def __post_init__(self) -> None:
        method = "spawn" if torch.cuda.is_available() else "fork"
        self._context: Any = multiprocessing.get_context(method)

    def prepare(self) -> None:
        """Tokenise the corpus in a process of its own, so that the groups find it ready.

        Raises:
            OutlastError: When that fails.
        """
        worker = self._begin(Post(0, 1, "", 0), _prepare)
        seconds = self.launched.job.data.prepare_timeout_seconds
        worker.process.join(seconds)
        if worker.process.is_alive():
            raise OutlastError(
                f"tokenising took longer than data.prepare_timeout_seconds = {seconds:g}; raise it"
            )
        self._collect(worker)
        if worker.said is None:
            raise OutlastError(f"tokenising failed: {_cause(worker)}")
        if worker.said[1] is not None:
            raise OutlastError(worker.said[1])
        self._ended.clear()

    def start(self, lighthouse: str, attempt: int) -> None:
        """Start every group."""
        # They begin where the newest checkpoint is, and anew without any.
        for number in range(self.groups):
            self._begin(Post(number, self.groups, lighthouse, attempt), train_group)

    def look(self) -> bool:
        """Start groups that have died again; whether any process is at work.

        Raises:
            OutlastError: When a group could not begin, or none is left.
        """
        if not self._workers:
            return False
        sentinels = [worker.process.sentinel for worker in self._workers.values()]
        connection.wait(sentinels, timeout=_LOOK_SECONDS)
        dead = []
        for worker in list(self._workers.values()):
            if worker.process.exitcode is None:
                continue
            self._collect(worker)
            if worker.said is None:
                dead.append(worker)
            elif worker.said[1] is not None and not worker.post.returning:
                # What a group finds wrong at its first start is wrong for all of them.
                raise OutlastError(worker.said[1])
        for worker in dead:
            self._again(worker)
        if self._is_ending():
            # All do the last step together; who is not done soon is stopped, or hangs.
            seconds = self.launched.job.launch.timeout_seconds
            self._deadline = min(self._deadline, time.monotonic() + seconds)
            if time.monotonic() > self._deadline:
                return False
        return bool(self._workers)

    def _is_ending(self) -> bool:
        return any(worker.said is not None and worker.said[1] is None for worker in self._ended)

    def left_unfinished(self, attempt: int) -> bool:
        """True if a run whose steps are done has to go on, because who was to save it has died.

        Raises:
            OutlastError: When it has to, and groups were started again often enough.
        """
        done = [worker for worker in self._ended if worker.said == (EXIT_DONE, None)]
        if not done or has_ended(run_directory(self.launched.job), attempt):
            return False
        if self._restarts >= self.launched.job.launch.restarts:
            raise OutlastError(
                f"all steps are done, but the group that was to save the last one has died, after "
                f"{self._restarts} restarts (launch.restarts); run the same command again"
            )
        self.end()
        self._workers.clear()
        self._ended.clear()
        self._restarts, self._deadline = self._restarts + 1, math.inf
        return True

    def outcome(self) -> int:
        """The exit code of those that ended well.

        Raises:
            OutlastError: When there are none.
        """
        well = [worker.said[0] for worker in self._ended if worker.said and worker.said[1] is None]
        if well:
            return EXIT_DONE if EXIT_DONE in well else well[0]
        problems = [worker.said[1] for worker in self._ended if worker.said and worker.said[1]]
        if problems:
            raise OutlastError(str(problems[0]))
        raise OutlastError(
            f"all {self.groups} groups are gone; the last {_cause(self._ended[-1])}, after "
            f"{self._restarts} restarts (launch.restarts); the run can go on from its newest "
            "complete checkpoint: mend the cause and run the same command again"
        )

    def end(self) -> None:
        """End the processes that are left."""
        for worker in self._workers.values():
            worker.process.terminate()
        deadline = time.monotonic() + _END_SECONDS
        for worker in self._workers.values():
            worker.process.join(max(deadline - time.monotonic(), 0.0))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _begin(self, post: Post, task: Any) -> Worker:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(task, self.launched, post, theirs))
        process.start()
        theirs.close()
        worker = Worker(post, process, ours)
        self._workers[post.number] = worker
        return worker

    def _collect(self, worker: Worker) -> None:
        with contextlib.suppress(EOFError, OSError):
            if worker.pipe.poll():
                worker.said = worker.pipe.recv()
        worker.pipe.close()
        del self._workers[worker.post.number]
        self._ended.append(worker)

    def _again(self, worker: Worker) -> None:
        """Start a dead group again, unless the run is ending or that was done often enough."""
        if self._is_ending() or self._restarts >= self.launched.job.launch.restarts:
            return
        known = known_steps(run_directory(self.launched.job))
        if self._workers and known >= self.launched.job.train.steps:
            return
        self._restarts += 1
        self._begin(replace(worker.post, returning=True, known=known), train_group)


def _work(task: Any, start: Start, post: Post, pipe: connection.Connection) -> None:
    """A process of a group: say the exit code, or the sentence of what was wrong."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    threading.Thread(target=_die_with, args=(launcher.pid,), daemon=True).start()
    said: tuple[int, str | None]
    try:
        said = (task(start, post), None)
    except WrongNumbersError:
        # A device that computes wrong numbers counts as dead; another start may be elsewhere.
        raise
    except OutlastError as error:
        said = (0, str(error))
    pipe.send(said)
    pipe.close()


def _die_with(launcher: int | None) -> None:
    """End this process when its launcher is gone, and with it the lighthouse and the lock."""
    with contextlib.suppress(AttributeError, OSError):
        # Where the kernel can do it, also a process ends that is stopped.
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    while os.getppid() == launcher:
        time.sleep(_LOOK_SECONDS)
    os._exit(EXIT_CRASHED)


def _prepare(start: Start, post: Post) -> int:
    job = job_of_group(start.job)
    with StopFlag(os.getppid()) as stop:
        plan = preflight(job, 1)
        load_data(SetUp(job, plan, ALONE, torch.device("cpu"), run_directory(job), stop))
    return EXIT_DONE


def _cause(worker: Worker) -> str:
    code = worker.process.exitcode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"
