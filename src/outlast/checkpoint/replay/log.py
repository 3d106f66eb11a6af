"""Replay logs: a training step as its gradient, from which the optimizer's next state is rebuilt.

An optimizer is a function of parameters, gradients, its state and its settings. Between versions of
the state it is therefore enough to write every step's gradient: `CheckpointStore.restore` loads the
newest version, sets the logged gradients and runs the live optimizers. Whether that gave the bits
of the training is known, not assumed: every log holds a digest of what the step has to lead to.

replay = ReplayLog(store, {"model": model, "optimizer": optimizer})
for step in range(steps):
    ...                                   # forward, backward, clip the gradient
    replay.step(step + 1)                 # in place of optimizer.step()
    if (step + 1) % 100 == 0:
        store.save_async(step + 1, state)
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from outlast.checkpoint.lane import SaveHandle, SaveResult
from outlast.checkpoint.replay.trained import (
    DIGEST,
    EXTRA,
    GRADIENT,
    OBJECT,
    Changes,
    Trained,
)
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.live import (
    Live,
    State,
    has_extra_state,
    optimizers_of,
    plain_modules,
    put_into,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.checkpoint.store import CheckpointStore, LastSave

GradientKind = Literal["bf16", "exact"]


class ReplayLog:
    """Takes the optimizer's steps and logs each of them, so that no step done is lost.

    Logs lead on from the versions that `CheckpointStore.save_async` writes of the same `state`;
    before the first of them nothing is logged. After a log or a version that could not be written,
    nothing is logged either until the next version: a log is of no use without those before it.

    The rebuilt state has the same bits if the optimizer is a pure function of parameters,
    gradients, its state and its settings, and runs the same kernels. Where it is not (another
    device, stochastic rounding, another number of threads or ranks for an optimizer that sums over
    a matrix, as Muon does), the digest does not fit, and the restore ends at the last step that
    does. Elementwise optimizers such as AdamW and SGD can be replayed on any number of ranks.
    Parameters that are changed in place between the steps are logged whole.

    Args:
        store: Where versions and logs go; its versions must be exact.
        state: What is given to `save_async`: the module, its optimizers, and other objects, whose
            states are logged whole at every step and should be small.
        gradient: ``bf16`` rounds every gradient in place to bfloat16 (to nearest even) before the
            optimizer sees it. That changes the training slightly, by a relative error of at most
            2^-8 in each element, and makes logs some 2.5 times smaller than ``exact``, which leaves
            the training as it is.

    Raises:
        CheckpointError: When the state has no optimizer, or the store cannot be replayed from.
    """

    def __init__(
        self, store: CheckpointStore, state: State, *, gradient: GradientKind = "bf16"
    ) -> None:
        if gradient not in ("bf16", "exact"):
            raise CheckpointError(f'gradient = "{gradient}" must be bf16 or exact')
        if not has_optimizer(state):
            raise CheckpointError(
                f"a replay log needs a module and its optimizers, the state has only {list(state)}"
            )
        _refuse_unfit(store)
        self._store = store
        self._state = dict(state)
        self._rounded = gradient == "bf16"
        self._trained = Trained(state, store._ranks)
        self._changes = Changes(self._trained.module)
        self._seen: LastSave | None = None
        self._bases: list[tuple[int, SaveHandle]] = []
        self._last_step: int | None = None
        self._log: SaveHandle | None = None
        self._stopped = "no version of this state has been saved by this store yet"

    def step(self, step: int, *, then: Callable[[], object] | None = None) -> SaveHandle:
        """Run `step()` of all optimizers, in place of calling them, and log it.

        Call it after backward and clipping. What belongs to the step but comes after the
        optimizers, such as the step of a learning-rate schedule, is given as `then`: the log holds
        the settings and other objects as they are after it.

        Args:
            step: Steps done when this one is done; versions are saved with the same numbers.
            then: Called after the optimizers, e.g. ``scheduler.step``.

        Returns:
            The log under way. Its result's `skipped` says why there is none.

        Raises:
            CheckpointError: When a gradient or an object's state cannot be logged.
        """
        reason = self._reason_not_to(step)
        if self._trained.outdated:
            self._trained = Trained(self._state, self._store._ranks)
        trained, live = self._trained, Live()
        changed = self._changes.found()
        live.tensors.update(changed)
        live.varying.update(changed)
        for name, gradient in trained.take_gradients(self._rounded, copy=not reason):
            live.tensors[GRADIENT + name] = gradient
        before = {} if reason else trained.settings("before", live)
        trained.step()
        if then is not None:
            then()
        self._last_step, self._log = step, None
        self._changes.mark()
        if reason:
            return _not_made(step, reason)
        after = trained.settings("after", live)
        for name, settings in before.items():
            live.values[name] = {**settings, **after[name]}
        _collect_objects(self._state, live)
        if digest := trained.digest():
            live.values[f"{DIGEST}{self._store._ranks.rank}"] = digest
        self._log = self._store.log_async(step, live, base=self._bases[0][0])
        return self._log

    def _reason_not_to(self, step: int) -> str:
        """Why this step is not logged; the same on all ranks, or empty on all."""
        if problem := self._problem_of_log():
            self._stop(f"the log of step {self._last_step} was not written: {problem}")
        if self._bases and self._last_step is not None and step != self._last_step + 1:
            self._stop(f"step {step} does not follow the step {self._last_step} before it")
        saved = self._store._last_save
        if saved is not None and saved is not self._seen:
            self._seen = saved
            if saved.step == step - 1 and set(saved.keys) >= set(self._state):
                if self._log is None:
                    self._bases = []
                self._bases.append((saved.step, saved.handle))
                self._stopped = ""
        self._drop_failed_bases()
        stop = self._store._ranks.any(bool(self._stopped))
        if stop and not self._stopped:
            self._stop("another rank could not log")
        return f"{self._stopped}; logs go on after the next saved version" if stop else ""

    def _problem_of_log(self) -> str:
        """Why the log of the step before is not there; waits for it where a save would wait."""
        if self._log is None:
            return ""
        if self._store._when_busy == "skip" and not self._log.done():
            return "it was still under way when the next one was due"
        result = self._log.result()
        return result.error or result.skipped

    def _drop_failed_bases(self) -> None:
        """Keep the newest published version that logs lead on from, and those under way after it.

        While none is published yet, those under way are kept from the first on.
        """
        sound, problems = [], []
        for base, handle in self._bases:
            problem = ""
            if handle.done():
                result = handle.result()
                problem = result.error or result.skipped
            if problem:
                problems.append(f"the version of step {base} was not saved: {problem}")
            else:
                sound.append((base, handle))
        if problems and not sound:
            self._stop(problems[-1])
        published = [number for number, (_, handle) in enumerate(sound) if handle.done()]
        self._bases = sound[published[-1] if published else 0 :]

    def _stop(self, reason: str) -> None:
        self._stopped, self._bases, self._log = reason, [], None


def _refuse_unfit(store: CheckpointStore) -> None:
    """Refuse a store whose versions cannot be the start of a replay."""
    if store._reduction.lossy:
        raise CheckpointError(
            "a replay log needs exact versions to start from; make the store without lossy = "
            f"{store._reduction.lossy}"
        )
    if store._ranks.size > 1 and not store._coordinated:
        raise CheckpointError("a replay log of several ranks needs a store with coordinated = True")


def has_optimizer(state: State) -> bool:
    """Whether `state` holds a module and an optimizer, so that steps can be replayed."""
    optimizer = torch.optim.Optimizer
    return any(isinstance(item, nn.Module) for item in state.values()) and any(
        isinstance(item, optimizer)
        or (isinstance(item, Sequence) and any(isinstance(one, optimizer) for one in item))
        for item in state.values()
    )


def _not_made(step: int, reason: str) -> SaveHandle:
    future: Future[SaveResult] = Future()
    future.set_result(SaveResult(step, 0.0, 0.0, 0, skipped=reason))
    return SaveHandle(future)


def _collect_objects(state: State, live: Live) -> None:
    """The states of all that is neither parameter, buffer nor optimizer, as they are now."""
    for key, value in state.items():
        if isinstance(value, nn.Module):
            for name, module in plain_modules(value):
                if has_extra_state(module):
                    path = f"{EXTRA}{name}"
                    live.values[path] = values.encode(
                        module.get_extra_state(), path, put_into(live, copied=True)
                    )
        elif optimizers_of(value) is None:
            path = f"{OBJECT}{key}"
            live.values[path] = values.encode(value.state_dict(), path, put_into(live, copied=True))
