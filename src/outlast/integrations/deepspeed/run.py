"""All of Outlast beside a training loop of DeepSpeed's.

engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=data)
with Run("job.toml", engine=engine, loader=loader, epochs=3) as run:
    for batch in run:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        run.log(loss)

Locks that a killed build of a torch extension has left: every later start waits for them.

DeepSpeed compiles its operators when they are first used. torch.utils.cpp_extension holds a file
``lock`` in the extension's folder while it does, and removes it afterwards. Where the build was
killed the file stays, and whoever needs the extension waits for its end without a limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch.utils import cpp_extension

from outlast.checkpoint import list_versions, load, storage_of
from outlast.distributed.group import gather_objects
from outlast.errors import CheckpointError, IntegrationError, RunError, WrongNumbersError
from outlast.hardware.filesystem import MOUNTS, NETWORK_TYPES, mount_of
from outlast.integrations import run as plain
from outlast.integrations.deepspeed.checkpoints import RANK, EngineState
from outlast.records import StepsDone, Warned, read_run
from outlast.runtime.guarding import RunGuard
from outlast.runtime.recording import directory_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from outlast.job import LoopJob
    from outlast.records import Predicted


class Run(plain.Run):
    """`outlast.Run` for a DeepSpeed engine of ZeRO 0 to 2.

    It goes through the loader, restores the engine before the first batch and saves it on the way,
    guards the passes, measures energy, writes the records that `outlast report` shows, keeps the
    state in memory for a restart by torchrun, and stops in time with exit code 3.
    ``engine.save_checkpoint`` is not needed.

    The state may be restored on another number of ranks. The guard checks the passes, and not the
    optimizer's own numbers.

    All processes make it together, after `deepspeed.initialize`.

    Args:
        job: A TOML file with the sections of `LoopJob`, or the settings themselves; None: defaults.
        engine: What `deepspeed.initialize` gave.
        loader: What the loop goes through, once per epoch.
        state: What else is to be saved: name -> object with `state_dict` and `load_state_dict`.
        epochs: How often to go through the loader.
        steps: Iterations after which the run is complete, whatever the epoch; None: not limited.
        settings: Overrides of the form ``"section.key=value"``.
        tokens_per_step: Of one iteration, over all processes; 0: not known.
        fresh: Move a run aside that is in the directory already.
        prediction: What the run is expected to need, to be shown beside what it needed.

    Raises:
        JobError: When a setting is wrong, or is one that the script decides.
        IntegrationError: When the engine is of another kind, or a setting cannot be combined.
        OutlastError: When the directory is in use or belongs to another run; when what was saved
            does not fit.
    """

    def __init__(
        self,
        job: str | os.PathLike[str] | LoopJob | None = None,
        *,
        engine: deepspeed.DeepSpeedEngine,
        loader: Iterable[Any],
        state: Mapping[str, Any] | None = None,
        epochs: int = 1,
        steps: int | None = None,
        settings: Sequence[str] = (),
        tokens_per_step: int = 0,
        fresh: bool = False,
        prediction: Predicted | None = None,
    ) -> None:
        _refuse(engine)
        self._engine = engine
        self._judged = -1
        super().__init__(
            job,
            model=engine.module,
            optimizer=engine.basic_optimizer,
            loader=loader,
            state=state,
            epochs=epochs,
            steps=steps,
            settings=settings,
            tokens_per_step=tokens_per_step,
            fresh=fresh,
            prediction=prediction,
        )
        ranks = self._ranks.world_size
        self._facts = dataclasses.replace(
            self._facts,
            framework="deepspeed",
            samples_per_step=engine.train_micro_batch_size_per_gpu() * ranks,
            parallel={"data": ranks},
            versions={"deepspeed": deepspeed.__version__},
        )
        # The engine's own state in place of the module's and the optimizer's.
        del self._state["model"], self._state["optimizer"]
        self._engine_state = EngineState(engine, self._saved_ranks())
        self._state.update(self._engine_state.entries)

    def __enter__(self) -> Run:
        super().__enter__()
        for name in self._engine_state.of_others:
            del self._state[name]
        self._state.update(self._engine_state.settle())
        return self

    def _saved_ranks(self) -> list[int]:
        """Number of ranks that have saved what may be restored; which state it will be is open yet.

        The newest version may turn out to be damaged.
        """
        found = set()
        directory = directory_of(self.job)
        storage = storage_of(directory.checkpoints)
        for version in list_versions(storage):
            with contextlib.suppress(CheckpointError):
                names = load(storage, version).catalogue.values
                found.add(sum(name.startswith(RANK) for name in names))
        with contextlib.suppress(RunError):
            # What is in memory is of the newest start that has done steps, or of one after it.
            run = read_run(directory.path)
            newest = max((record.attempt for record, _ in run.of(StepsDone)), default=0)
            found.update(attempt.world_size for attempt in run.attempts if attempt.number >= newest)
        return sorted(gather_objects(found)[0] - {0})

    def _installed_guard(self) -> RunGuard | None:
        """A guard of the passes, without the optimizer."""
        settings = self.job.guard
        if settings.policy == "off":
            return None
        if settings.policy == "light" and not settings.modules:
            self._recording.write(
                Warned(
                    'guard.policy = "light" checks the optimizer alone, whose numbers DeepSpeed '
                    'keeps in parts that the guard does not know: nothing is checked; "linear" and '
                    '"full" check the passes'
                )
            )
            return None
        guard = RunGuard(settings, self.job.run.seed, self._engine.module, [])
        for message in guard.warnings:
            self._recording.write(Warned(message))
        return guard

    def _before_update(self, *_: Any) -> None:
        """Before the optimizer's step of a parameter group: are the passes' numbers right?

        Raises:
            WrongNumbersError: On all ranks, when those of some rank are not.
        """
        super()._before_update()
        if self._guard is None or self._judged == self._engine.global_steps:
            return
        self._judged = self._engine.global_steps
        guard = self._guard.guard
        verdict = guard.verdict()
        if not verdict.clean:
            raise WrongNumbersError(
                f"step {self.step + 1}: the numbers of rank "
                f"{', '.join(map(str, verdict.bad_ranks))} are wrong and stay so; take the device "
                "out of service and go on from the newest checkpoint"
            )
        guard.watch.advance()
        guard.watch.begin()

    def _note(self) -> None:
        super()._note()
        self._engine_state.note()


def _refuse(engine: deepspeed.DeepSpeedEngine) -> None:
    """Refuse engines whose state is kept in other ways.

    Raises:
        IntegrationError: With what would do.
    """
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        raise IntegrationError(
            f"engine is a {type(engine).__name__}: give the first thing that "
            "deepspeed.initialize(...) returns"
        )
    stage = engine.zero_optimization_stage()
    if stage > 2:
        raise IntegrationError(
            f"zero_optimization.stage = {int(stage)} partitions the weights, of which this Run "
            "knows nothing; set 2 or less"
        )
    if isinstance(engine, deepspeed.PipelineEngine) or engine.mp_world_size > 1:
        raise IntegrationError(
            "this Run keeps engines of data parallelism alone; leave pipeline and tensor "
            "parallelism out"
        )
    parts = max((getattr(module, "ep_size", 1) for module in engine.module.modules()), default=1)
    if parts > 1:
        raise IntegrationError(
            f"the engine spreads experts over {parts} ranks (ep_size), and this Run would keep "
            "those of one rank alone; set ep_size to 1, or take an OutlastCheckpointEngine"
        )
    if not isinstance(engine.basic_optimizer, torch.optim.Optimizer):
        raise IntegrationError(
            "the engine has no optimizer: name one in DeepSpeed's config, or give one to "
            "deepspeed.initialize(...)"
        )


_PROCESSES = Path("/proc")


_LONGEST_BUILD_SECONDS = 3600.0


"""Where the processes that may build cannot all be seen."""


def extensions_folder() -> Path:
    """Folder in which torch builds extensions: ``TORCH_EXTENSIONS_DIR``, or in the user's cache."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    kind = "cpu"
    if torch.version.hip is not None:
        kind = f"rocm{torch.version.hip.replace('.', '')}"
    elif torch.version.cuda is not None:
        kind = f"cu{torch.version.cuda.replace('.', '')}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(cpp_extension.get_default_build_root()) / f"{python}_{kind}"


def operators() -> Collection[str]:
    """Names of the extensions that DeepSpeed builds on this machine's kind of device."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    return [*ALL_OPS]


def stale_locks(folder: Path, names: Collection[str]) -> list[Path]:
    """Locks of the extensions of these names below `folder` that no live build holds.

    A build keeps its lock open. On a file system of this machine's own, a lock that no process has
    open is stale; on one that other machines share, where it is an hour old as well.
    """
    found = [each for name in names if (each := folder / name / "lock").exists()]
    locks = {lock: _identity(lock) for lock in found}
    if not locks:
        return []
    # After the locks were listed: whoever holds one of them has it open by now.
    held = set(_open_files("lock"))
    free = [lock for lock, identity in locks.items() if identity not in held]
    if not _sees_all_builds(folder):
        free = [lock for lock in free if _age_seconds(lock) > _LONGEST_BUILD_SECONDS]
    # Those that were given back meanwhile are gone.
    return sorted(lock for lock in free if lock.exists())


def refuse_stale_locks() -> None:
    """Refuse to go on where the next build of an extension would wait for ever.

    Raises:
        IntegrationError: Naming the lock and what to do.
    """
    if locks := stale_locks(extensions_folder(), operators()):
        names = " ".join(map(str, locks))
        raise IntegrationError(
            "a build of a DeepSpeed operator was killed, and every start would wait without end "
            f"for the lock that it has left; no process builds it now, so delete it: rm {names}"
        )


def _sees_all_builds(folder: Path) -> bool:
    try:
        mounts = MOUNTS.read_text(encoding="latin-1")
    except OSError:
        return False
    return mount_of(folder.resolve(), mounts)[1] not in NETWORK_TYPES


def _age_seconds(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _identity(path: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return -1, -1


def _open_files(name: str) -> Iterator[tuple[int, int]]:
    """Device and inode of every file called `name` that a process of this machine has open."""
    for link in _PROCESSES.glob("[0-9]*/fd/*"):
        # Processes end, and those of others are not to be looked into.
        with contextlib.suppress(OSError):
            if link.readlink().name == name:
                found = link.stat()
                yield found.st_dev, found.st_ino
