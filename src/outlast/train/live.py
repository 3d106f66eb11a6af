"""Replica groups of a live run: the trainer among groups that come and go, and their launcher.

Each group is one process with a whole trainer of its own. Three of its parts are replaced: the
engine, which takes this group's share of each batch and sums over the groups; the agreement, which
is what the groups voted on with the step; and the records, which only the first live group writes.

Starting the replica groups of a live run on this machine, and starting dead ones again.

Every group is one process. The launcher holds the run directory, keeps the lighthouse alive and
starts a group that has died again, at most `launch.restarts` times in all; the others continue.
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
from collections import deque
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch

from outlast.data import BatchLoader, microbatch_count
from outlast.distributed.ranks import ALONE, Ranks, device_of
from outlast.errors import (
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_TO_BE_CONTINUED,
    DataCorruptionError,
    OutlastError,
    RecoverError,
)
from outlast.job import fingerprint
from outlast.records import (
    AttemptEnded,
    Event,
    MemberLost,
    RecordWriter,
    StateRecovered,
    StepsDone,
    read_run,
)
from outlast.recover.live import Lighthouse, LiveGroups, SavedElsewhere, require_torchft
from outlast.recover.phase_page import pages_folder, remove_dead_pages
from outlast.runtime.agreement import StepAgreement, StepMessage
from outlast.runtime.memory import from_disk
from outlast.runtime.stop import StopFlag, signals_taken
from outlast.runtime.watching import under_watch
from outlast.train.build import SetUp, configure_torch, load_data
from outlast.train.launch import forward_signal
from outlast.train.loop import StateMovedError
from outlast.train.model import load_code
from outlast.train.preflight import preflight
from outlast.train.run import claim, end_run, run_directory, sinks_of, trainer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from outlast.data import MicroBatch
    from outlast.job import Job
    from outlast.records import RunDirectory, Sink
    from outlast.recover.live import LiveStep
    from outlast.runtime.guarding import RunGuard
    from outlast.train.engine import Engine
    from outlast.train.loop import Trainer
    from outlast.train.run import Start


_KEPT_RECORDS = 8


@dataclass(frozen=True)
class Post:
    """A group's place in the run.

    Attributes:
        number: Of the group.
        groups: How many there are to be.
        lighthouse: ``host:port``.
        attempt: Of the run, from 1.
        returning: Whether the group has been started again.
        known: Steps that the run is known to have done.
    """

    number: int
    groups: int
    lighthouse: str
    attempt: int
    returning: bool = False
    known: int = 0

    @property
    def speaks_first(self) -> bool:
        """True if this group writes while the groups have not met; others may be at the end."""
        return self.number == 0 and not self.returning


def known_steps(directory: RunDirectory) -> int:
    """Steps that the records say the run has done."""
    done = read_run(directory.path).of(StepsDone) if directory.exists() else []
    return done[-1][1].step if done else 0


def has_ended(directory: RunDirectory, attempt: int) -> bool:
    """Return whether the end of this attempt is recorded."""
    ended = read_run(directory.path).of(AttemptEnded)
    return any(record.attempt == attempt for record, _ in ended)


class GroupRecords(RecordWriter):
    """The run's event log as one of several groups sees it.

    Until the first round nobody knows who writes, so events wait for it. Who writes may die between
    a step and its record, so every group keeps its last ones, for when it is the one that writes.

    Args:
        directory: Of the run.
        post: Of this group.
        sinks: Makes the other places that want the events.
    """

    def __init__(
        self, directory: RunDirectory, post: Post, sinks: Callable[[], list[Sink]]
    ) -> None:
        super().__init__(directory.path, 0, post.attempt)
        self._directory = directory
        self._post = post
        self._other_places: Callable[[], list[Sink]] | None = sinks
        self._waiting: list[Event] = []
        self._kept: deque[StepsDone] = deque(maxlen=_KEPT_RECORDS)
        self._own: RecordWriter | None = None
        self.groups: LiveGroups | None = None

    def write(self, event: Event) -> None:
        """Append `event`, if this is the first live group."""
        if self.groups is None or not self.groups.met:
            self._waiting.append(event)
            return
        # What a group says at its start is said by the first of those that start the run.
        waiting = [] if self._post.returning else self._waiting
        self._waiting = []
        if not self.groups.writes:
            if isinstance(event, StepsDone):
                self._kept.append(event)
            return
        if self._other_places is not None:
            self._sinks, self._other_places = self._other_places(), None
        for item in (*waiting, *self._missing(), event):
            super().write(item)

    def _missing(self) -> list[StepsDone]:
        """Steps that the group that wrote before this one has done and not recorded."""
        if not self._kept:
            return []
        kept, found = list(self._kept), read_run(self._directory.path).of(StepsDone)
        known = max((e.step for record, e in found if record.attempt == self.attempt), default=0)
        self._kept.clear()
        return [name for name in kept if name.step > known]

    def tell(self, event: Event) -> None:
        """Write what concerns this group alone, whoever writes the run's events."""
        if self.groups is not None and self.groups.writes:
            self.write(event)
            return
        if self._own is None:
            self._own = RecordWriter(self._directory.path, self._post.number, self.attempt)
        self._own.write(event)

    def close(self) -> None:
        """Close the files."""
        if self.groups is None and self._post.speaks_first:
            # There was no step to do, so that the groups never met.
            for event in self._waiting:
                super().write(event)
        super().close()
        if self._own is not None:
            self._own.close()


_STOP, _SAVE = 0, 1


_PARTS = 8


def job_of_group(job: Job) -> Job:
    """The job as one group sees it: a process without replicas of its own."""
    return job.model_copy(
        update={"parallel": job.parallel.model_copy(update={"replicate": 1, "shard": 1})}
    )


def fixed_parts(job: Job) -> int:
    """Into how many parts `recover.fixed_order` cuts a batch, whatever groups there are; else 0.

    Each has `train.micro_batch_size` samples at most; without that there are eight.
    """
    train = job.train
    if not job.recover.fixed_order:
        return 0
    return microbatch_count(
        train.batch_size, 1, train.micro_batch_size or -(-train.batch_size // _PARTS)
    )


class GroupLoader(BatchLoader):
    """Leaves it to the engine to gather samples, when it knows this group's share."""

    def prefetching(
        self, first_step: int, last_step: int
    ) -> Generator[tuple[int, list[MicroBatch]], None, None]:
        """Yields every step, with no samples."""
        for step in range(first_step, last_step):
            yield step, []

    def of(self, step: int, index: int, count: int, micro_batch_size: int) -> list[MicroBatch]:
        """The micro-batches of one of `count` groups."""
        parts = microbatch_count(self.batch_size, count, micro_batch_size)
        mine = BatchLoader(self.windows, self.order, self.batch_size, index, count, parts)
        return mine.batch(step)

    def one_of(self, step: int, number: int, parts: int) -> MicroBatch:
        """One of so many parts of the whole batch."""
        whole = BatchLoader(self.windows, self.order, self.batch_size, 0, 1, parts)
        return whole.part(step, 0, number)


class LiveEngine:
    """The engine of one group: sums over the groups what another engine computes of its share.

    Args:
        trainer: Of this group, as built for a process alone.
        post: Of this group.
        records: Of the run.
    """

    def __init__(self, trainer: Trainer, post: Post, records: GroupRecords) -> None:
        self._trainer = trainer
        self._inner: Engine = trainer.engine
        self._guard: RunGuard | None = trainer.guard
        self._loader = GroupLoader(
            trainer.loader.windows, trainer.loader.order, trainer.loader.batch_size
        )
        self._post = post
        self._records = records
        self._groups: LiveGroups | None = None
        self._first_step = 0
        self._attempt: LiveStep | None = None
        self._parts = fixed_parts(trainer.job)
        trainer.engine, trainer.loader = self, self._loader
        trainer.consensus.agreement = Voted(self, trainer.device)
        trainer.consensus.writes = lambda: self.writes
        if trainer.guard is not None:
            trainer.guard.inside = True

    def forward_backward(
        self, batches: Sequence[MicroBatch], step: int, global_tokens: int
    ) -> torch.Tensor:
        """See `Engine`; `batches` are left aside, and the loss is the sum over the groups.

        Raises:
            StateMovedError: When this group was behind, and has the state of another step now.
            RecoverError: When the groups cannot continue.
        """
        groups = self._groups or self._join(step)
        while True:
            self._waiting()
            attempt = groups.begin()
            for event in groups.news():
                if isinstance(event, StateRecovered):
                    self._records.tell(event)
                else:
                    self._records.write(event)
            if attempt.number != step:
                raise StateMovedError(attempt.number)
            loss = torch.zeros(()) if attempt.idle else self._own_part(attempt, global_tokens)
            self._waiting()
            begun = time.perf_counter()
            done = attempt.commit(loss, values=self._wishes(step + 1))
            self._trainer.consensus.waits.add(time.perf_counter() - begun)
            if done:
                self._attempt = attempt
                return torch.tensor(attempt.loss)
            groups.end(attempt)

    def evaluate(self, batch: MicroBatch) -> torch.Tensor:
        """See `Engine`; every group evaluates all samples."""
        return self._inner.evaluate(batch)

    @property
    def writes(self) -> bool:
        """Return whether this group writes what is written once."""
        if self._groups is None:
            return self._post.speaks_first
        return self._groups.writes

    def close_step(self) -> LiveStep:
        """The step that was committed last, whose optimizer step is done by now."""
        attempt = self._attempt
        assert self._groups is not None
        assert attempt is not None
        self._groups.end(attempt)
        return attempt

    def close(self) -> None:
        """Leave the groups."""
        if self._groups is not None:
            self._groups.close()

    def _waiting(self) -> None:
        """Waiting for other groups is not held against this one's step."""
        self._trainer.runtime.mark("reduce")

    def _join(self, step: int) -> LiveGroups:
        trainer, post = self._trainer, self._post
        job = trainer.job
        state = {"model": trainer.model, "optimizer": trainer.optimizers}

        def newest() -> int:
            found = trainer.store.newest()
            return 0 if found is None else found.step

        self._groups = self._records.groups = LiveGroups(
            state,
            group=post.number,
            lighthouse=post.lighthouse,
            identity=fingerprint(job),
            step=step,
            saved_elsewhere=SavedElsewhere(newest, lambda: from_disk(trainer.store, state)[0]),
            known=post.known,
            returning=post.returning,
            awaits=1 if post.returning else post.groups,
            heartbeat_seconds=job.recover.heartbeat_seconds,
            timeout_seconds=job.launch.timeout_seconds,
            parts=self._parts,
        )
        self._first_step = step
        return self._groups

    def _own_part(self, attempt: LiveStep, global_tokens: int) -> torch.Tensor:
        """This group's gradients and loss, computed again where the guard finds them wrong."""
        size = self._trainer.job.train.micro_batch_size
        # In a fixed order each part is gathered when it is due.
        parts = [] if self._parts else self._loader.of(attempt.number, *attempt.share, size)
        loss = torch.zeros(())
        for again in self._guard.attempts() if self._guard is not None else (0,):
            if again:
                for optimizer in self._trainer.optimizers:
                    optimizer.zero_grad(set_to_none=True)
            if self._parts:
                # This group's parts of the batch, each by itself.
                attempt.clear()
                for number in attempt.parts:
                    part = self._loader.one_of(attempt.number, number, self._parts)
                    attempt.add(
                        number, self._inner.forward_backward([part], attempt.number, global_tokens)
                    )
            else:
                loss = self._inner.forward_backward(parts, attempt.number, global_tokens)
        return loss

    def _wishes(self, done: int) -> list[float]:
        """Votes of this group for when the step that is voted on is done."""
        trainer, stop = self._trainer, self._trainer.consensus.stop
        last_stop = trainer.job.train.stop_after_steps
        if last_stop and done - self._first_step >= last_stop:
            stop.reason = stop.reason or "train.stop_after_steps"
        saves = self.writes and trainer.runtime.cadence.wants(done)
        return [1.0 if stop.reason else 0.0, 1.0 if saves else 0.0]


class Voted(StepAgreement):
    """Agreement of the groups, reached together with a step's gradients."""

    def __init__(self, engine: LiveEngine, device: torch.device) -> None:
        super().__init__(device, alone=True)
        self._engine = engine

    def exchange(self, loss: torch.Tensor, message: StepMessage) -> StepMessage:
        """The step's loss and the votes on it; what only this group has to say stays as it is."""
        attempt = self._engine.close_step()
        saves = self._engine.writes and attempt.sums[_SAVE] > 0
        return replace(message, loss=float(loss), stop=attempt.sums[_STOP] > 0, save=saves)


def train_group(start: Start, post: Post) -> int:
    """Train as one group of a run, from set-up to the end.

    Returns:
        The exit code.

    Raises:
        OutlastError: When this group cannot continue.
    """
    began = time.time()
    job = job_of_group(start.job)
    ranks = Ranks(0, 1, post.number, post.groups, "live")
    directory = run_directory(job)
    watched = replace(ranks, rank=post.number, world_size=post.groups)
    with StopFlag(os.getppid()) as stop, under_watch(job, watched, directory) as mark:
        configure_torch(job, ranks)
        setup = SetUp(
            job,
            preflight(job, 1),
            ranks,
            device_of(ranks),
            directory,
            stop,
            {"start and imports": time.time() - began},
            start.turns,
            mark=mark,
            transfers=start.transfers,
        )
        records = GroupRecords(setup.directory, post, lambda: sinks_of(setup))
        try:
            return _train(setup, start, post, records, began)
        finally:
            records.close()


def _train(setup: SetUp, start: Start, post: Post, records: GroupRecords, began: float) -> int:
    data = load_data(setup)
    trainer = trainer_of(setup, start, data, records, post.groups)
    engine = LiveEngine(trainer, post, records)
    try:
        outcome = trainer.run(began, setup.parts)
        # A group that comes back after the others have done all takes the end from the disk.
        is_late = post.returning and has_ended(setup.directory, post.attempt)
        if trainer.consensus.writes() and not is_late:
            end_run(setup, data, trainer, records, outcome)
    finally:
        engine.close()
    return EXIT_DONE if outcome.completed else EXIT_TO_BE_CONTINUED


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
        OutlastError: When no group can continue.
    """
    groups = group_count(start.job)
    preflight(job_of_group(start.job), 1)
    lock = claim(start)
    with signals_taken(forward_signal):
        # Import what takes seconds once, for all processes that are forked, also after a death.
        import torchft.checkpointing
        import torchft.process_group  # noqa: F401

        load_code(start.job.model)
        crew = Crew(start, groups)
        try:
            crew.prepare()
            _train_groups(crew, start.job)
        finally:
            # Whatever has gone wrong, no process stays behind.
            crew.end()
            with contextlib.suppress(OutlastError):
                remove_dead_pages(pages_folder(start.job.recover.memory, run_directory(start.job)))
            lock.release()
    return crew.outcome()


def _train_groups(crew: Crew, job: Job) -> None:
    """Let the groups train to the end, again where who writes has died after the last step."""
    directory, lighthouse = run_directory(job), None
    with contextlib.ExitStack() as stack:
        if not job.recover.lighthouse:
            join_seconds = job.launch.timeout_seconds / 2
            lighthouse = Lighthouse(job.recover.heartbeat_seconds, join_seconds=join_seconds)
            stack.enter_context(lighthouse)
        address = job.recover.lighthouse if lighthouse is None else lighthouse.address
        while True:
            attempt = directory.next_attempt()
            crew.start(address, attempt)
            looked = time.monotonic()
            while crew.look():
                if lighthouse is not None and lighthouse.keep_alive():
                    # The groups' events are written by one of them, but only the launcher has
                    # noticed this.
                    seconds = time.monotonic() - looked
                    records = RecordWriter(directory.path, 0, attempt)
                    note = "the lighthouse was started again at the same place"
                    done = known_steps(directory)
                    records.write(MemberLost(done, "lighthouse", "coordinator", seconds, note))
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
        """True if a run whose steps are done has to continue, because who was to save it has died.

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
            f"{self._restarts} restarts (launch.restarts); the run can continue from its newest "
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
    except DataCorruptionError:
        # A device that computes wrong values counts as dead; another start may be elsewhere.
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
