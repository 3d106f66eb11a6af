"""The checkpoint store: copy now, code and write in the background, publish by renames.

The calls of this module are the whole public interface; `encoder`, `reader`, `version` and
`tiers` do the work on files, `plan`, `lane` and `restore` that on live objects.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from outlast.checkpoint.encoder import Reduction
from outlast.checkpoint.lane import Lane, Save, SaveHandle, SaveResult, WriterKind
from outlast.checkpoint.manifest import REPLAY, STATE, collection_paused
from outlast.checkpoint.owner import OwnedError
from outlast.checkpoint.plan import Holdings
from outlast.checkpoint.restore import Restored, Restorer, RestoreRequest
from outlast.checkpoint.retention import prune_logs
from outlast.checkpoint.storage import (
    LocalStorage,
    describe_failure,
    in_background,
    make_directory,
    sentence_of,
    within,
)
from outlast.checkpoint.tiers import DrainResult, Place, Tier, Tiers
from outlast.checkpoint.version import (
    Version,
    leaders,
    list_versions,
    listing,
    logs_of,
    whole_step,
)
from outlast.distributed.group import Group, StoreAgreement
from outlast.errors import CheckpointError, LeaseLostError
from outlast.records import check_lease, leave_without_lease
from outlast.state.install import Misfit
from outlast.state.live import Collector, State, mesh_of

if TYPE_CHECKING:
    from outlast.checkpoint.plan import Holding
    from outlast.checkpoint.retention import Retention
    from outlast.state.live import Live

WhenBusy = Literal["wait", "skip", "replace"]
_OPEN: weakref.WeakSet[CheckpointStore] = weakref.WeakSet()
"""The stores of this process, and of those that it was forked from: one may look for what another
is still writing."""


def wait_for_saves(
    place: str | os.PathLike[str], *, besides: CheckpointStore | None = None
) -> None:
    """Wait for the saves that this process has under way into a place, so that they can be found.

    Args:
        place: Of the versions.
        besides: A store whose saves are not waited for.
    """
    wanted = os.path.realpath(place)
    for store in [*_OPEN]:
        # After a fork, the threads that would end the parent's saves are not there.
        if store is besides or store._process != os.getpid():
            continue
        if os.path.realpath(store.storage.address) == wanted:
            for lane in store._lanes:
                lane.settle()


_LOOK_SECONDS = 5.0
"""A save waits for so long for a look at who owns the store."""


class LastSave(NamedTuple):
    """The newest save of the state: what replay logs may lead on from."""

    step: int
    keys: frozenset[str]
    handle: SaveHandle


class CheckpointStore:
    """Saves and restores versions of a training state below one directory.

    All ranks of the default process group (if there is one) make it, save and restore together.

    Args:
        place: Where the versions live: a directory, made if missing, or any fsspec URL.
        keep: Newest versions kept, or a `Retention`; others are deleted after a newer one is
            durable.
        tiers: Slower, safer places that versions are copied on to in the background.
        private: Whether ranks do not see each other's files in `place`, as on a node's own disk:
            then each saves all that it holds, and reads it again only if every rank still has it.
        reduction: Codecs and error bounds; by default everything is exact.
        asynchronous: Whether `save_async` returns before the version is published.
        when_busy: What a save does while the one before is under way: ``wait`` for it, ``skip``
            this one, or ``replace`` the older one, which is then never published.
        coordinated: Whether ranks agree at the start of each save and learn its common outcome;
            False: each saves at its own pace, and a version counts once all parts are there.
        collective: Whether all ranks of the default process group take part; False: this process
            works alone, also where there is a group.
        writer: Who codes and writes: a ``process`` of its own, or a ``thread``, which starts at
            once but takes the interpreter's lock now and then.
        timeout_seconds: Longest wait for the storage or another rank.
        name: Of `place` among the tiers, for people, e.g. ``memory`` or ``disk``.

    Raises:
        CheckpointError: When a setting is wrong.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        keep: int | Retention = 3,
        tiers: Sequence[Tier] = (),
        private: bool = False,
        reduction: Reduction | None = None,
        asynchronous: bool = True,
        when_busy: WhenBusy = "wait",
        coordinated: bool = True,
        collective: bool = True,
        writer: WriterKind = "process",
        timeout_seconds: float = 1800.0,
        name: str = "",
    ) -> None:
        if when_busy not in ("wait", "skip", "replace"):
            raise CheckpointError(f'when_busy = "{when_busy}" must be wait, skip or replace')
        if writer not in ("process", "thread"):
            raise CheckpointError(f'writer = "{writer}" must be process or thread')
        self._ranks = Group.new(
            timeout_seconds,
            alone=not collective,
            error=CheckpointError,
            purpose="to save or restore within timeout_seconds",
        )
        if private and not coordinated and self._ranks.size > 1:
            raise CheckpointError(
                "private = True needs coordinated = True: ranks that neither see each other's "
                "files nor agree might each keep other steps"
            )
        first = Place.of(place, keep, self._ranks, private=private, name=name)
        self._tiers = Tiers(first, tiers, self._ranks, timeout_seconds)
        self.storage = first.storage
        self.retention = first.retention
        self._place = self.storage.location
        self._reduction = reduction or Reduction()
        self._asynchronous = asynchronous
        self._when_busy: WhenBusy = when_busy
        self._writer_kind = writer
        self._timeout_seconds = timeout_seconds
        self._coordinated = coordinated and self._ranks.size > 1
        self._collector = Collector()
        self._states = self._lane(self._reduction, first)
        self._log_place = replace(first, storage=logs_of(self.storage))
        self._logs: Lane | None = None
        self._restorer = Restorer(self._tiers, self._log_place, self._ranks)
        self._last_save: LastSave | None = None
        self._session = self._asked = 0
        self._saves = 0
        self._submissions = 0
        self._went_back = False
        self._closed = False
        self._signals = StoreAgreement()
        self._look: Future[None] | None = None
        self._pruning: Future[None] = Future()
        self._pruning.set_result(None)
        self._warned = False
        self._process = os.getpid()
        # A handler of a signal may come in between, in the same thread.
        self._turns = threading.RLock()
        _OPEN.add(self)
        leave_without_lease()
        self._tiers.look()

    def save_async(
        self,
        step: int,
        state: State,
        *,
        metrics: Mapping[str, float] | None = None,
        late: Collection[str] | Callable[[str], bool] = (),
    ) -> SaveHandle:
        """Copy `state` and write it in the background as the version of `step`.

        Returns when the copy is made. The handle's result carries an error instead of raising, so
        that a failed write need not stop training. A warning tells of it, too: at once where the
        storage does not answer at the first save, else with the next save or the end, unless the
        caller has asked for the result. A step that this store has published is refused in the same
        way: no version is ever overwritten.

        Tensors in `late` are copied in the background after the return, while training reads them;
        ``handle.copied()`` must be called before the first of them is written, which is when the
        writing of the version begins. A late tensor whose version counter (`Tensor._version`) has
        gone up by then makes the save fail: it is never published. Writes that count nothing
        (through ``.data``, by fused optimizers, batch norm's statistics) are found only where they
        change the few bytes that are compared, so tensors that are written so before the call must
        not be late. Ranks that save together call ``copied()`` before any of them waits for the
        result. Any call of the store that waits for the save does the work of ``copied()`` first.

        Args:
            step: Steps done.
            state: Name -> module, optimizer(s) of its parameters, or objects with a state_dict().
            metrics: Figures of this step, for `Retention.best` and for people.
            late: Names of tensors that will not be written to before ``handle.copied()`` is called,
                or a function that tells them by their names (`model.layer.weight`,
                `optimizer.state.layer.weight.exp_avg`).

        Raises:
            CheckpointError: When `step` is no whole number from 0 on, the state cannot be saved,
                `late` names a tensor that it lacks, or another live process owns the store.
            LeaseLostError: When another process has taken over the store or the run, as after a
                long suspension: this one must end.
        """
        begun = time.perf_counter()
        step = whole_step(step)
        # A figure that is not finite compares with none, and JSON has no word for it.
        figures = {
            name: float(metric) for name, metric in (metrics or {}).items() if math.isfinite(metric)
        }
        notes: dict[str, Any] = {"metrics": figures, "torch": str(torch.__version__)}

        def collected() -> Live:
            live = self._collector.collect(state)
            if mesh := mesh_of(live):
                notes["mesh"] = mesh
            return live

        with self._turn():
            handle = self._submit(self._states, step, collected, begun, notes, late=late)
            self._last_save = LastSave(step, frozenset(state), handle)
        if not self._asynchronous:
            handle.result()
        return handle

    def save(
        self, step: int, state: State, *, metrics: Mapping[str, float] | None = None
    ) -> SaveResult:
        """Save and wait until the version is published; raises CheckpointError if it is not."""
        return self.save_async(step, state, metrics=metrics).wait()

    def check(self, state: State) -> None:
        """Refuse what `save_async` would refuse of `state`, before training starts.

        Nothing is copied or written, and nobody becomes the owner of the store. All ranks call it
        together, with what they would save.

        Raises:
            CheckpointError: On all ranks, naming what cannot be saved by its path and type, what
                ranks disagree about, or the setting that does not fit.
        """

        def holding() -> Holding:
            with collection_paused():
                return self._states.holdings.of(self._collector.collect(state))[0]

        held = self._ranks.raise_together(holding)
        self._ranks.raise_together(self._states.sharing(held))

    def log_async(self, step: int, log: Live, *, base: int) -> SaveHandle:
        """Copy `log` and write it in the background as a replay log; see `restore.ReplayLog`.

        Args:
            step: Steps done when the logged step is done.
            log: Gradients by name, and values.
            base: Step of the version that the log leads on from, by the logs between.
        """
        begun = time.perf_counter()
        with self._turn():
            if self._logs is None:
                if isinstance(self._log_place.storage, LocalStorage):
                    # If it fails, so will the write, which is the place to say so.
                    makes = functools.partial(make_directory, self._log_place.storage.root)
                    with contextlib.suppress(OSError, CheckpointError):
                        within(self._timeout_seconds, makes, self._log_place.storage.location)
                self._logs = self._lane(Reduction(self._reduction.compression), self._log_place)
            step = whole_step(step)
            return self._submit(
                self._logs, step, lambda: log, begun, {}, kind=REPLAY, requires=(base,)
            )

    def restore(
        self,
        state: State,
        *,
        step: int | None = None,
        allow: Collection[Misfit] = (),
        warn: bool = True,
        after: int = -1,
        until: float = math.inf,
    ) -> Restored | None:
        """Load the newest version that verifies into `state`, on any number of ranks.

        Every tile that is read is checked; when one is damaged, the version before is taken. Of
        equal versions, the one in the nearest tier is taken. Where replay logs lead on from the
        version, and the state has its optimizers, their steps are done again, up to the last one
        that gives the bits it gave in training.

        Args:
            state: Live objects; a part of what was saved may be restored alone.
            step: Restore this step instead of the newest.
            allow: Kinds of misfit that are no reason to refuse: ``missing`` (the version lacks
                something that the state has), ``unexpected`` (the other way round), ``reshaped``
                (kept as it is), ``retyped`` (converted).
            warn: Warn of newer versions that were passed over, or never finished; False where the
                caller tells of `Restored.skipped` and `unfinished`.
            after: Take later steps than this one alone, for who has a state of it.
            until: Take no later step than this one, after which something went wrong. Saves that
                follow count as newer than what was saved of later steps.

        Returns:
            What was restored, or None when there is no version at all, or none but those whose
            save was cut short: of these a warning tells, and `unfinished`.

        Raises:
            CheckpointError: When versions exist but none can be used, or the chosen one does not
                fit. The state is untouched by a misfit; damage that is found while reading may
                leave tensors of the damaged version behind when there is no older one.
        """
        wait_for_saves(self.storage.address)
        self._went_back = self._session > 0
        if not self._session:
            self._tiers.look()
        request = RestoreRequest(state, step, allow, after, until)
        restored = self._restorer.restore(request)
        self._warn_of_unfinished(warn)
        if restored is not None and restored.skipped and warn and self._tiers.first.keeps_house:
            warnings.warn(
                f"restored step {restored.step} from {restored.place}, and passed over what is "
                f"newer or damaged: {listing(restored.skipped)}",
                stacklevel=2,
            )
        return restored

    def _warn_of_unfinished(self, warn: bool) -> None:
        """Warn once that there is nothing but versions that were never finished."""
        if warn and self.unfinished and self._tiers.first.keeps_house and not self._warned:
            self._warned = True
            warnings.warn(self.unfinished, stacklevel=3)

    @property
    def unfinished(self) -> str:
        """A sentence where `restore` or `newest` found none but versions that were never finished.

        It is empty otherwise. A run that was killed in its first save has nothing else to begin
        from than its first step, which is not to be mistaken for one that never ran.
        """
        found = self._restorer.unfinished
        if not found:
            return ""
        return (
            f"nothing is restored from {self._place}: {listing(found)}. No save there was ever "
            "finished, so training starts from its first step; if it had come further, stop it, "
            "and bring back the missing files"
        )

    @property
    def tier_names(self) -> dict[str, str]:
        """Path or URL of every tier to its name, the nearest first; see `Restored.place`."""
        return {place.storage.location: place.name for place in self._tiers.places}

    def newest(self, *, warn: bool = True) -> Version | None:
        """The newest published version in any tier, verified or not.

        A save into the same place that another store of this process has under way is waited for.

        Args:
            warn: Warn where there is none, but versions that were begun; see `unfinished`.
        """
        wait_for_saves(self.storage.address, besides=self)
        found = self._tiers.newest()
        if found is None and not self._session:
            lists = functools.partial(list_versions, self.storage)
            begun = within(self._timeout_seconds, lists, self._place)
            self._restorer.unfinished = [
                f"{version.folder} was never finished" for version in begun
            ]
            self._warn_of_unfinished(warn)
        return found

    def newest_step(self) -> int:
        """Steps of the newest version, or of the last replay log that leads on from it; -1: none.

        As with `newest`, each rank looks for itself, and nothing is verified.
        """
        version = self.newest(warn=False)
        if version is None:
            return -1
        logs, _ = self._restorer.own_logs(version)
        return logs[-1].step if logs else version.step

    def behind(self, step: int) -> bool:
        """Return whether a lower tier that answers has no version of `step`, and none of a later.

        All ranks ask together. Only a store that saves copies what one before it has left.
        """
        return self._tiers.behind(step)

    def drained(self, *, wait: bool = False) -> list[DrainResult]:
        """Results of the copies to lower tiers, oldest first; the newest thousand.

        Args:
            wait: Wait for those under way first, at most `timeout_seconds`.
        """
        if wait:
            self._tiers.settle()
        return self._tiers.results()

    def close(self, *, drain: bool = True, failed: bool = False) -> None:
        """Wait for saves under way, end the writer and give up the ownership of the store.

        Args:
            failed: Do not wait for other ranks, which may never finish the save under way.
            drain: Copy the newest version to all tiers that have it not, due or not, and wait for
                that at most `timeout_seconds`; False: give up the copies under way. All ranks give
                the same. Leaving a ``with`` block by an error does not drain.
        """
        self._closed = True
        if self._process != os.getpid():
            # The process that it was forked from saves on.
            return
        if failed:
            self._signals.give_up()
        for lane in self._lanes:
            lane.close()
            self._settle(lane)
        self._tiers.close(drain=drain)
        self._signals.close()
        self._tiers.disown()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(drain=error[0] is None, failed=error[0] is not None)

    def _lane(self, reduction: Reduction, place: Place) -> Lane:
        return Lane(
            place.storage,
            self._ranks,
            Holdings(private=place.private),
            reduction=reduction,
            writer=self._writer_kind,
            coordinated=self._coordinated,
            check=self._tiers.first.ownership.check,
            timeout_seconds=self._timeout_seconds,
        )

    @property
    def _lanes(self) -> list[Lane]:
        return [self._states] if self._logs is None else [self._states, self._logs]

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The time of one thread to begin a save.

        Raises:
            CheckpointError: When the store takes none any more, or none of this process.
        """
        if self._process != os.getpid():
            raise CheckpointError(
                f"the store {self._place} is of the process that this one was forked from; make "
                "another to save here"
            )
        with self._turns:
            if self._closed:
                raise CheckpointError(
                    f"the store {self._place} is closed; make another to save again"
                )
            yield

    def _submit(
        self,
        lane: Lane,
        step: int,
        collected: Callable[[], Live],
        begun: float,
        notes: dict[str, Any],
        *,
        kind: str = STATE,
        requires: tuple[int, ...] = (),
        late: Collection[str] | Callable[[str], bool] = (),
    ) -> SaveHandle:
        self._saves += kind == STATE
        self._submissions += 1
        number = self._saves if kind == STATE else 0
        held, problem, changed, busy, lost = None, "", False, lane.busy, False
        unexpected: Exception | None = None
        try:
            self._check_right()
            with collection_paused():
                live = collected()
                deferred = _late_tensors(late, live)
                held, memory = lane.holdings.of(live)
            changed = lane.changed(held)
        except (CheckpointError, LeaseLostError) as error:
            problem, lost = str(error), isinstance(error, LeaseLostError)
        except Exception as error:
            # The others are told before this rank raises.
            problem, unexpected = f"{type(error).__name__}: {error}", error
        failed = bool(problem)
        if self._coordinated or (not self._session and self._ranks.size > 1):
            # Ranks that do not coordinate decide alone after the first save.
            busy, changed, failed, lost = self._ranks.any_of(busy, changed, failed, lost)
            problem = self._ranks.first_problem(problem) if failed else ""
        if unexpected is not None:
            raise unexpected
        if held is None or failed:
            raise (LeaseLostError if lost else CheckpointError)(problem)
        if busy and self._when_busy == "skip":
            lane.copied()
            seconds = time.perf_counter() - begun
            reason = f"the save of step {lane.last_step} was still under way"
            return _ended(SaveResult(step, seconds, seconds, 0, skipped=reason))
        # A log that is given up makes those after it useless.
        if busy and self._when_busy == "replace" and kind == STATE:
            lane.abandon()
        self._settle(lane)
        # What comes after going back is newer than the versions of later steps, and parts of a
        # save that failed must not mix with it.
        again = kind == STATE and (self._went_back or self._comes_again(step))
        if not self._session or again:
            try:
                self._begin_session()
            except OwnedError:
                raise
            except CheckpointError as error:
                return self._storage_away(step, begun, str(error))
        self._went_back = self._went_back and kind != STATE
        if changed:
            self._replan(lane, held, memory)
        version = Version(self._session, step)
        place = self._tiers.first if kind == STATE else self._log_place
        key = f"{self._submissions}/{version.folder}"
        finish = functools.partial(self._finish, place, number=number, key=key)
        save = Save(version, begun, finish, kind, requires, notes)
        return lane.submit(save, memory, live.values, deferred)

    def _settle(self, lane: Lane) -> None:
        """Wait for the save under way, and warn of its failure where nobody has heard of it."""
        if problem := lane.settle():
            warnings.warn(f"{problem}; training continues without it", stacklevel=4)

    def _comes_again(self, step: int) -> bool:
        """Return whether the run went back to `step`, or tries again what has failed."""
        together = self._coordinated or self._ranks.size == 1
        return step < self._states.last_step or (together and self._states.failed_at(step))

    def _replan(self, lane: Lane, held: Holding, memory: dict[str, torch.Tensor]) -> None:
        """Share out the work anew, and continue only if all ranks can."""
        problem = ""
        try:
            with collection_paused():
                lane.replan(held, memory)
        except CheckpointError as error:
            problem = str(error)
        if self._coordinated:
            problem = self._ranks.first_problem(problem)
        if problem:
            lane.forget()
            raise CheckpointError(problem)

    def _check_right(self) -> None:
        """Raise LeaseLostError where another process writes here now.

        A thread looks at the files: storage that does not answer takes no right away, and holds up
        no training. What is published is checked again.
        """
        waits = 0.0
        if self._look is None or self._look.done():
            self._look, waits = in_background(self._look_at_locks), _LOOK_SECONDS
        with contextlib.suppress(TimeoutError, OSError):
            self._look.result(waits)

    def _look_at_locks(self) -> None:
        check_lease()
        self._tiers.first.ownership.check_lock()

    def _storage_away(self, step: int, begun: float, problem: str) -> SaveHandle:
        """The handle of a save that could not begin, because the storage does not answer."""
        # What the copies to lower tiers and ranks agree on begins with a save that does.
        self._went_back = self._went_back or self._session > 0
        seconds = time.perf_counter() - begun
        sentence = f"the checkpoint of step {step} in {self._place} failed: {problem}"
        warnings.warn(f"{sentence}; training continues without it", stacklevel=4)
        return _ended(SaveResult(step, seconds, seconds, 0, error=sentence))

    def _begin_session(self) -> None:
        """Become the owner of the store before the first save, or begin its next session.

        Raises:
            OwnedError: When another process saves to it.
            CheckpointError: When the storage fails, or does not answer in time.
        """
        tiers = self._tiers
        self._on_all_ranks(tiers.first.ownership.lock if tiers.first.keeps_house else None)
        newest = self._session
        if not newest:
            listed, unlisted = tiers.listed()
            versions = [*(version for _, version in listed), *self._restorer.all_logged()]
            newest = max((version.session for version in versions), default=0)
            newest = max(newest, *self._ranks.gather(tiers.claimed()))
            seen = self._ranks.gather(tiers.seen)
            known = [array for array in seen if array is not None]
            # In a file system, a lock has kept others out for as long as they lived.
            is_local = isinstance(self.storage, LocalStorage)
            if not is_local and len(known) == len(seen) and newest > max(known):
                raise OwnedError(
                    f"another process has saved to {self._place} since this one looked there last: "
                    "restore before the first save, or save to another place"
                )
        # An outage may have hidden that a session was claimed.
        self._asked = session = max(newest, self._asked) + 1
        self._on_all_ranks(lambda: tiers.own(session))
        if self._session:
            self._session = session
            return
        prefix = self._ranks.from_first(lambda: f"outlast-checkpoint/{self._place}/{session}")
        self._session = session
        if self._coordinated:
            self._signals = StoreAgreement(
                prefix, self._timeout_seconds, error=CheckpointError, subject="the save"
            )
        self._tiers.begin(self._signals, coordinated=self._coordinated)
        for place, sentence in unlisted.items():
            self._tiers.report(DrainResult(place, -1, error=sentence))

    def _on_all_ranks(self, work: Callable[[], None] | None) -> None:
        """Do what asks the storage, and raise on all ranks what goes wrong on one."""
        problem, is_owned = "", False
        try:
            if work is not None:
                within(self._timeout_seconds, work, self._place)
        except CheckpointError as error:
            problem, is_owned = str(error), isinstance(error, OwnedError)
        except OSError as error:
            problem = f"{self._place} cannot be written: {sentence_of(error)}"
        found = [rank for rank in self._ranks.gather((problem, is_owned)) if rank[0]]
        for sentence, owned in sorted(found, key=lambda pair: not pair[1]):
            raise (OwnedError if owned else CheckpointError)(sentence)

    def _finish(
        self, place: Place, version: Version, problem: str, *, number: int, key: str
    ) -> str:
        """Seal the version when all ranks have written their parts; returns what went wrong."""
        try:
            if self._ranks.rank == 0 and (self._coordinated or self._ranks.size == 1):
                problem = self._seal(place, version, key, problem)
                if not problem:
                    # Before the others hear of it: see Tiers.
                    self._offer(version, number)
                self._signals.tell(key, problem)
            else:
                if self._coordinated:
                    problem = self._seal_group(place, version, key, problem)
                # Without coordination, a version counts once all parts are there, whoever is last.
                problem = self._signals.hear(key, problem)
                if not problem:
                    if place.private:
                        seals = functools.partial(self._seal_here, place, version)
                        within(self._timeout_seconds, seals, self._place)
                    self._offer(version, number)
        except (CheckpointError, LeaseLostError, OSError) as error:
            return problem or describe_failure(error)
        if number and not problem and self._pruning.done():
            self._pruning = in_background(self._prune)
            # What cannot be deleted now is deleted after the next save.
            with contextlib.suppress(TimeoutError, OSError, CheckpointError):
                self._pruning.result(self._timeout_seconds)
        return problem

    def _prune(self) -> None:
        self._tiers.prune()
        newest = self._tiers.first.newest() if self._restorer.logged() else None
        if newest is not None:
            prune_logs(self._log_place.storage, newest)

    def _offer(self, version: Version, number: int) -> None:
        """Let lower tiers have the version; replay logs, whose number is 0, stay in the first."""
        if number:
            self._tiers.offer(version, number)

    def _seal_here(self, place: Place, version: Version) -> None:
        # Replay logs lie below the versions, and have no owner of their own.
        self._tiers.first.ownership.check()
        place.seal(version)

    def _seal_group(self, place: Place, version: Version, key: str, problem: str) -> str:
        """Seal the group that this rank leads, if it leads one; returns what went wrong in it."""

        def sealed() -> str:
            said = functools.partial(self._signals.gather, key, "", passed_on=True)
            return place.seal_group(version, problem, said)

        if not place.group:
            return problem
        try:
            # Rank 0 waits no longer, either.
            return within(self._timeout_seconds, sealed, self._place)
        except (CheckpointError, LeaseLostError, OSError) as error:
            return describe_failure(error)

    def _seal(self, place: Place, version: Version, key: str, problem: str) -> str:
        begun = time.monotonic()
        try:
            problem = self._seal_group(place, version, key, problem)
            asked = None if place.private else leaders(place.world_size)[1:]
            problems = self._signals.gather(key, problem, asked, begun=begun)
            problem = next((problem for problem in problems if problem), "")
            if not problem:
                # The others wait half as long again for the outcome, whatever came before.
                left = 1.4 * self._timeout_seconds - (time.monotonic() - begun)
                limit = min(self._timeout_seconds, left)
                within(limit, lambda: self._seal_here(place, version), self._place)
        except (CheckpointError, LeaseLostError, OSError) as error:
            return describe_failure(error)
        return problem


def _late_tensors(
    late: Collection[str] | Callable[[str], bool], live: Live
) -> dict[str, torch.Tensor]:
    """Name to tensor of those that may be copied late."""
    if callable(late):
        return {name: tensor for name, tensor in live.tensors.items() if late(name)}
    for name in late:
        if name not in live.tensors:
            raise CheckpointError(
                f"late names the tensor `{name}`, which the state has not; names are like "
                f"`{next(iter(live.tensors), 'model.weight')}`"
            )
    return {name: live.tensors[name] for name in late}


def _ended(result: SaveResult) -> SaveHandle:
    future: Future[SaveResult] = Future()
    future.set_result(result)
    return SaveHandle(future)
