"""torchft's Manager with Outlast's guard, checkpoints and rules of recovery.

with (
    kept_state(manager, "checkpoints/", {"model": model, "optimizer": optimizer}, every=100),
    guarded_commit(manager, guard(model, optimizer)),
):
    ...                                   # the loop as it is, OptimizerWrapper and all

Both take the place of the Manager's `start_quorum` and `should_commit`, which a loop calls once a
step, itself or through torchft's `OptimizerWrapper`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from outlast.checkpoint import CheckpointStore
from outlast.errors import DataCorruptionError, IntegrationError, RecoverError
from outlast.guard.handle import remedy
from outlast.integrations import require
from outlast.recover.quorum import must_restore
from outlast.runtime.saves import RunSaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torchft import Manager

    from outlast.checkpoint import SaveResult
    from outlast.guard import Guard, Verdict

_WORKS = ("0.2", "0.3")
_OWN_ENTRY = "torchft"


@contextlib.contextmanager
def guarded_commit(manager: Manager, guard: Guard) -> Iterator[None]:
    """Let no replica group commit a step in which one of them has found wrong values.

    The gradients of a step are summed over the groups before anybody looks at them, so a group that
    finds its own numbers wrong tells all others, by one more number summed. None commits that step;
    it is done again. A group whose numbers are wrong again leaves: its Manager is shut down, the
    others continue without it.

    Args:
        manager: The group's Manager.
        guard: Of the model itself and its optimizer, not of what torchft puts around them.

    Raises:
        IntegrationError: When torchft is missing or of another version, or the guard's model is
            torchft's wrapper.
        DataCorruptionError: From `manager.should_commit`, when this group's numbers stay wrong.
    """
    require("torchft", *_WORKS)
    if guard.checks_collectives:
        raise IntegrationError(
            "the guard's model is a wrapper that sums gradients; with torchft give "
            "guard(model, optimizer) the model and the optimizer themselves, before "
            "torchft.ddp.DistributedDataParallel and OptimizerWrapper"
        )
    vote = _Vote(manager, guard)
    methods = {
        "start_quorum": vote.start_quorum,
        "should_commit": vote.should_commit,
        "load_state_dict": vote.load_state_dict,
    }
    with _replaced(manager, methods), _leaving(manager, DataCorruptionError):
        yield


@contextlib.contextmanager
def kept_state(
    manager: Manager,
    place: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    every: int,
    keep: int = 3,
    known: int = 0,
    returning: bool | None = None,
) -> Iterator[int]:
    """Keep the groups' common state in a checkpoint store, and begin from the newest one.

    The first of the groups that take part saves, whichever that is; all are given the same place.
    A group does not train on from a state that is older than what is known to exist: torchft
    itself begins at step 0 again when a group returns and finds nobody.

    Args:
        manager: The group's Manager; its step is part of the state.
        place: Directory or fsspec URL that all groups see.
        state: Name -> module, optimizer, or object with a ``state_dict``; not what torchft wraps.
        every: Steps between two checkpoints.
        keep: Checkpoints that are kept.
        known: The newest step that the run is known to have reached.
        returning: Whether this group was started again; None: as torch elastic says.

    Yields:
        The step that was restored; 0 for a new run.

    Raises:
        IntegrationError: When torchft is missing or of another version, or `state` has an entry of
            the Manager's name.
        CheckpointError: When checkpoints exist, but none fits.
        RecoverError: From `manager.should_commit`, before the first step, when the newest state
            among the groups is older than what is known.
    """
    require("torchft", *_WORKS)
    if every < 1:
        raise IntegrationError(f"every = {every} must be 1 or more: steps between two checkpoints")
    if _OWN_ENTRY in state:
        raise IntegrationError(f'state["{_OWN_ENTRY}"] is a name of its own; rename the entry')
    if returning is None:
        returning = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    def opened() -> RunSaves:
        store = CheckpointStore(place, keep=keep)
        return RunSaves(store, _warn_failure, {**state, _OWN_ENTRY: manager})

    keeper = _Keeper(manager, opened, every, known, returning)
    methods = {"start_quorum": keeper.start_quorum, "should_commit": keeper.should_commit}
    try:
        with _replaced(manager, methods), _leaving(manager, RecoverError):
            yield keeper.restore()
        keeper.save_last()
    finally:
        keeper.release()


class _Vote:
    """The guard's verdict as a group's vote on each step."""

    def __init__(self, manager: Manager, guard: Guard) -> None:
        self._manager = manager
        self._guard = guard
        self._start_quorum = manager.start_quorum
        self._should_commit = manager.should_commit
        self._load_state_dict = manager.load_state_dict
        self._healed = False
        self._verdicts: list[Verdict] = []

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The Manager takes a peer's state, or a checkpoint's: the weights change."""
        self._load_state_dict(state)
        self._healed = True

    def start_quorum(self, *arguments: Any, **options: Any) -> None:
        """Begin a step; where the Manager waits for the quorum, the weights are healed by then."""
        self._start_quorum(*arguments, **options)
        if not self._manager._use_async_quorum:
            self._follow_healing(self._manager.current_step())

    def should_commit(self, *arguments: Any, **options: Any) -> bool:
        """True if the optimizer may step: all groups, and the guards of all groups, say so."""
        manager, guard = self._manager, self._guard
        # A group that only just heals has computed with weights that nobody uses.
        counts = manager.is_participating()
        verdict = guard.verdict()
        wrong = counts and not verdict.clean
        found = self._found_by_all(wrong)
        if wrong:
            self._verdicts.append(verdict)
        if found:
            manager.report_error(DataCorruptionError(f"{found} of the groups found wrong values"))
        step = manager.current_step()
        committed = bool(self._should_commit(*arguments, **options))
        if committed and self._verdicts:
            guard.ledger.repeated(self._verdicts[-1].step)
            self._verdicts.clear()
        if not committed and not self._healed:
            guard.again()
        self._follow_healing(step)
        if self._verdicts and remedy(self._verdicts, "raise", 1).action == "raise":
            raise DataCorruptionError(
                f"step {step + 1}: this group's numbers are wrong and stay so "
                f"({guard.ledger.findings[-1]}); it has left the others, which continue: take the "
                "device out of service"
            )
        return committed

    def _found_by_all(self, wrong: bool) -> int:
        """Number of groups that have found wrong values in this step."""
        found = torch.tensor([float(wrong)], device=self._guard.device)
        self._manager.allreduce(found, reduce_op=ReduceOp.SUM).wait()
        # After an error the sum is none, and the step is refused anyway.
        return int(wrong) if self._manager.errored() else round(found.item())

    def _follow_healing(self, step: int) -> None:
        """The guard knows sums of the weights that were there before."""
        if self._healed:
            self._healed = False
            self._guard.restart(step)


class _Keeper:
    """The store of all groups, of which one writes at a time.

    Args:
        manager: The group's Manager.
        opened: Opens the store.
        every: Steps between two checkpoints.
        known: Progress of the run before this group begins; see `must_restore`.
        returning: Whether this group was started again.
    """

    def __init__(
        self,
        manager: Manager,
        opened: Callable[[], RunSaves],
        every: int,
        known: int,
        returning: bool,
    ) -> None:
        self._manager = manager
        self._opened = opened
        self._every = every
        self._known, self._returning = known, returning
        self._start_quorum = manager.start_quorum
        self._should_commit = manager.should_commit
        self._open: RunSaves | None = None
        self._due_at = 0
        self._begun = False

    @property
    def _saves(self) -> RunSaves:
        self._open = self._open or self._opened()
        return self._open

    def restore(self) -> int:
        """The newest checkpoint, into the state and the Manager; its step, 0 without one."""
        restored = self._saves.store.restore(self._saves.state)
        self._due_at = restored.step if restored is not None else 0
        return self._due_at

    def start_quorum(self, *arguments: Any, **options: Any) -> None:
        """Between two steps: save if it is due, then begin the next step."""
        step = self._manager.current_step()
        if step // self._every > self._due_at // self._every:
            self._due_at = step
            if self._manager.participating_rank() == 0:
                # What goes wrong stops no training.
                self._saves.begin(step)
            else:
                # Another group writes from now on, which it can when this one has let go.
                self.release()
        self._start_quorum(*arguments, **options)

    def should_commit(self, *arguments: Any, **options: Any) -> bool:
        """As the Manager says; before the first step, whether it may be done at all."""
        if not self._begun:
            self._refuse_older_state()
            self._begun = True
        return bool(self._should_commit(*arguments, **options))

    def save_last(self) -> None:
        """The loop has ended: its last state is saved by whoever saves.

        Raises:
            CheckpointError: When it cannot be.
        """
        step = self._manager.current_step()
        if step > self._due_at and self._manager.participating_rank() == 0:
            self._saves.collect(wait=True)
            self._saves.store.save(step, self._saves.state)

    def release(self) -> None:
        """Wait for a save under way, and let other groups write."""
        saves, self._open = self._open, None
        if saves is not None:
            saves.close(failed=False)

    def _refuse_older_state(self) -> None:
        self._manager.wait_quorum()
        newest = self._saves.store.newest()
        # Healed by now: it is the newest step among the groups.
        step = self._manager.current_step()
        why = must_restore(
            step,
            committed=step > 0,
            newest=None if newest is None else newest.step,
            known=self._known,
            returning=self._returning,
        )
        if why is not None:
            raise RecoverError(
                f"this group does not train on: {why}; start the group that has the newer state, "
                "restore a checkpoint, or begin anew in another place with returning=False"
            )


def _warn_failure(result: SaveResult, told: bool) -> None:
    if result.error is not None:
        warnings.warn(f"step {result.step} is not saved: {result.error}", stacklevel=5)


@contextlib.contextmanager
def _replaced(manager: Manager, methods: Mapping[str, Any]) -> Iterator[None]:
    """Give this Manager other methods, until the end."""
    before = {name: vars(manager).get(name) for name in methods}
    vars(manager).update(methods)
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                del vars(manager)[name]
            else:
                vars(manager)[name] = method


@contextlib.contextmanager
def _leaving(manager: Manager, kind: type[Exception]) -> Iterator[None]:
    """Give up the group's place when it may not continue: the others need not wait for it."""
    try:
        yield
    except kind:
        manager.shutdown(wait=False)
        raise
