"""One replica group of a run that goes on live: the trainer among groups that come and go.

Each group is one process with a whole trainer of its own. Three of its parts are replaced: the
engine, which takes this group's share of each batch and sums over the groups; the agreement, which
is what the groups voted on with the step; and the records, which only the first live group writes.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outlast.data import BatchLoader, microbatch_count
from outlast.distributed.ranks import Ranks, device_of
from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.job import fingerprint
from outlast.records import StateRecovered, Warned
from outlast.recover.live import LiveGroups, SavedElsewhere
from outlast.runtime.agreement import StepAgreement, StepMessage
from outlast.runtime.memory import from_disk
from outlast.runtime.stop import StopFlag
from outlast.runtime.watching import under_watch
from outlast.train.build import SetUp, build, configure_torch, load_data
from outlast.train.live_records import GroupRecords, Post, has_ended
from outlast.train.loop import StateMovedError
from outlast.train.preflight import preflight
from outlast.train.run import attempt_started, end_run, process_faults, run_directory, sinks_of

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from outlast.data import MicroBatch
    from outlast.job import Job
    from outlast.recover.live import LiveStep
    from outlast.runtime.guarding import RunGuard
    from outlast.train.engine import Engine
    from outlast.train.loop import Trainer
    from outlast.train.run import Start

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
            RecoverError: When the groups cannot go on.
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
        OutlastError: When this group cannot go on.
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
    trainer, size = build(setup, data, records)
    trainer.consensus.stop_when = start.stop_when
    engine = LiveEngine(trainer, post, records)
    if start.process_faults:
        as_rank = replace(setup, ranks=replace(setup.ranks, rank=post.number))
        trainer.before_step = process_faults(as_rank, start)
    if data.note is not None:
        records.write(Warned(data.note))
    opening = attempt_started(setup, data, size)
    records.write(
        replace(
            opening, world_size=post.groups, parallel={**opening.parallel, "replicate": post.groups}
        )
    )
    if start.prediction is not None:
        records.write(start.prediction)
    for message in trainer.guard.warnings if trainer.guard is not None else []:
        records.write(Warned(message))
    try:
        with trainer.store:
            outcome = trainer.run(began, setup.parts)
        trainer.runtime.saves.record_copies()
        # A group that comes back after the others have done all takes the end from the disk.
        is_late = post.returning and has_ended(setup.directory, post.attempt)
        if trainer.consensus.writes() and not is_late:
            end_run(setup, data, trainer, records, outcome)
    finally:
        engine.close()
    return EXIT_DONE if outcome.completed else EXIT_TO_BE_CONTINUED
