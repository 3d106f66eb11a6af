"""Keeper of a running script's state: saves it to a checkpoint store, and restores it.

Copy windows: which tensors a save may copy while the next step runs, and until when.

The weights and moments of optimizers lie still from one optimizer step to the next: a save at a
step boundary need not copy them before the passes of the next step, only before its optimizer's
step. Everything else (buffers, averages, gradients, states of random numbers) may be written at
any time and is copied at the boundary.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from outlast.autosave.heap.capture import Captured
from outlast.autosave.resume.session import SavedState
from outlast.checkpoint import CheckpointStore
from outlast.distributed.ranks import ALONE, Ranks
from outlast.errors import (
    EXIT_BAD_INPUT,
    EXIT_CRASHED,
    EXIT_TO_BE_CONTINUED,
    AutosaveError,
    OutlastError,
)
from outlast.runtime.engine import PeriodicConsensus, Runtime, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping
    from pathlib import Path

    from outlast.autosave.run_folder import RunFolder
    from outlast.checkpoint import SaveHandle, SaveResult
    from outlast.runtime.cadence import SaveCadence
    from outlast.runtime.saves import RunSaves
    from outlast.runtime.stop import JobChain, Stop


_TRIES = 4


"""Saves at which a storage is watched that never comes to be known, as one made anew each step."""


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class _Row(NamedTuple):
    """A storage between two boundaries.

    Attributes:
        row: Its content, as the save knows it.
        owners: Tensors of optimizers that lie in it, with the versions that they had.
    """

    row: torch.Tensor
    owners: list[tuple[torch.Tensor, int]]

    def written(self) -> bool:
        """Return True if an operation has written to it since."""
        return any(owner._version != version for owner, version in self.owners)


class CopyWindows:
    """Tells a save which tensors may be copied late, and has them copied before they are written.

    Optimizers are known from their first step on. A tensor of theirs is late once it has been seen
    not to change between a boundary and the next optimizer step, by its bits and by its version
    counter, and early for good once it has: weights are also clipped, perturbed or averaged outside
    of optimizers. A program that does so only now and then is found by the counter; then the save
    fails and the next one copies the tensor at once. Where the writes count nothing, as those
    through ``.data``, the store's own samples are what is left.

    The copies are also made where a program puts a module into evaluation, or tells that a loop
    has ended: the next optimizer step may be long in coming, and a save is not durable before.

    Steps of optimizers that are compiled as a whole, or recorded in a CUDA graph, run no hooks:
    what they write to is never late.
    """

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._verdicts: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()
        self._watched: list[tuple[_Row, tuple[int, int]]] = []
        self._tries: Counter[str] = Counter()
        self._late: list[_Row] = []
        self._saves: list[SaveHandle] = []
        self._open = False
        self._lock = threading.Lock()
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        _EVALUATIONS.add(self)
        nn.Module.eval = _hurrying_eval  # type: ignore[assignment, method-assign]

    def late(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Names of those of the `tensors` that a save at this boundary may copy late.

        Windows that are open are closed first.

        Args:
            tensors: Name to the content of a storage, as a view of the live memory.
        """
        self.close()
        owners = self._owners()
        names = set()
        with self._lock:
            for name, tensor in tensors.items():
                found = owners.get(tensor.untyped_storage()._cdata)
                if not found or tensor.numel() == 0:
                    continue
                verdicts = [self._verdicts.get(number) for number in found]
                if False in verdicts:
                    continue
                self._open = True
                row = _Row(tensor, [(number, number._version) for number in found])
                if None not in verdicts:
                    self._late.append(row)
                    names.add(name)
                elif self._tries[name] < _TRIES:
                    self._tries[name] += 1
                    self._watched.append((row, _fingerprint(tensor)))
        return frozenset(names)

    def opened(self, save: SaveHandle) -> None:
        """Have `save` make its copies before the next optimizer step, or at the next boundary."""
        with self._lock:
            self._saves.append(save)
            self._open = True

    def close(self) -> None:
        """Have all copies made; called at every step boundary, before a save's result is asked."""
        # Most steps have no save before them, and need not wait for a lock.
        if self._open:
            self._close(complete=False)

    def hurry(self) -> None:
        """Have all copies made, because the next step may be far; what is watched continues."""
        with self._lock:
            self._copy()

    def remove(self) -> None:
        """Close all windows, and look at optimizers no more."""
        self.close()
        self._hook.remove()
        _EVALUATIONS.discard(self)
        if not _EVALUATIONS:
            nn.Module.eval = _plain_eval  # type: ignore[method-assign]

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The compiler sees nothing else of this, and need not split a graph for it.
        if torch.compiler.is_compiling():
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            # What is recorded here is done later, without this hook.
            with self._lock:
                for tensor in _tensors_of(optimizer):
                    self._verdicts[tensor] = False
            return
        self._optimizers.add(optimizer)
        if self._open:
            self._close(complete=True)

    def _close(self, *, complete: bool) -> None:
        """Close the windows; `complete`: by the optimizer step that they are to last to."""
        # Another thread must not write before the copies are made, so it waits here.
        with self._lock:
            for row, fingerprint in self._watched:
                still = not row.written() and _fingerprint(row.row) == fingerprint
                if complete or not still:
                    self._judge(row, late=still)
            self._watched.clear()
            self._copy()
            self._open = False

    def _copy(self) -> None:
        """Have the saves make their copies; to be called with the lock."""
        for row in self._late:
            if row.written():
                self._judge(row, late=False)
                # The save sees the storage through a tensor that has a counter of its own.
                increment_version(row.row)
        self._late.clear()
        while self._saves:
            self._saves[0].copied()
            del self._saves[0]

    def _judge(self, row: _Row, *, late: bool) -> None:
        for owner, _ in row.owners:
            # What was written once is early for good.
            self._verdicts[owner] = late and self._verdicts.get(owner, True)

    def _owners(self) -> dict[int, list[torch.Tensor]]:
        """Storage to the tensors of optimizers that lie in it."""
        found: dict[int, list[torch.Tensor]] = {}
        for optimizer in list(self._optimizers):
            for tensor in _tensors_of(optimizer):
                for part in _parts(tensor):
                    if not part.is_inference():
                        owners = found.setdefault(part.untyped_storage()._cdata, [])
                        owners.extend([tensor] if part is tensor else [tensor, part])
        return found


_EVALUATIONS: weakref.WeakSet[CopyWindows] = weakref.WeakSet()


"""Those that are told when a module is put into evaluation."""


_plain_eval = nn.Module.eval


def _hurrying_eval(module: nn.Module) -> nn.Module:
    """As `nn.Module.eval`."""
    # The compiler sees nothing else of this, and need not split a graph for it.
    if not torch.compiler.is_compiling():
        for evaluation in list(_EVALUATIONS):
            evaluation.hurry()
    return _plain_eval(module)


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (tensor for tensor in state.values() if isinstance(tensor, torch.Tensor))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the numbers of one, which may be made of others."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            # A sharded tensor names its mesh, too.
            if isinstance(part, torch.Tensor):
                yield from _parts(part)
    elif tensor.layout == torch.strided and tensor.device.type != "meta":
        yield tensor


def _fingerprint(row: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bits of a row, made where it lies."""
    size = row.numel() * row.element_size()
    widest = next(kind for width, kind in _INTEGERS.items() if size % width == 0)
    bits = row.detach().view(widest)
    # One sees equal changes of many elements, the other such as cancel each other.
    return int(torch.hash_tensor(bits).view(torch.int64)), int(bits.sum())


TENSORS = "tensors"


"""Name of the tensors in the state."""


_SMALLEST_PROGRAM_BYTES = 1 << 16


class RankState:
    """State of one rank, as the store takes it and gives it back.

    The bytes of the program are padded to a power of two: a state of the same sizes as the one
    before is saved by the plan that is made already.
    """

    def __init__(self, saved: SavedState | None = None) -> None:
        self.saved = saved

    def state_dict(self) -> dict[str, Any]:
        """The state, as tensors and plain values."""
        assert self.saved is not None
        captured, logs = self.saved
        length = len(captured.program)
        padded = bytearray(max(_SMALLEST_PROGRAM_BYTES, 1 << (length - 1).bit_length()))
        padded[:length] = captured.program
        program = torch.frombuffer(padded, dtype=torch.uint8)
        return {"length": length, "program": program, TENSORS: captured.tensors, "logs": logs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was saved."""
        program = state["program"].numpy().tobytes()[: state["length"]]
        self.saved = SavedState(Captured(program, state[TENSORS]), state["logs"])


_SAVES_KEPT = 8

_SYNCED = 2
"""Steps after a save whose digests also outlive a machine."""


class Digests:
    """Those of one rank after one save, in a file of lines.

    Args:
        folder: Of all of the run.
        rank: Of this process.
        base: Step of the save.
    """

    def __init__(self, folder: Path, rank: int, base: int) -> None:
        self._base = base
        self._folder = folder
        self._ending = f".rank{rank}.jsonl"
        self._file = folder / f"{base}{self._ending}"
        # A run that has come here before has done the same steps.
        self._known: dict[int, str] = {}
        # The last line may have been cut short.
        with contextlib.suppress(OSError, ValueError):
            for line in self._file.read_text(encoding="utf-8").splitlines():
                step, text = json.loads(line)
                self._known[int(step)] = str(text)

    def keep(self, step: int, text: str) -> str | None:
        """The digest of `step` that is kept already; else None, and `text` is kept."""
        if step in self._known:
            return self._known[step]
        first = not self._file.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([step, text]) + "\n")
            file.flush()
            # What is lost with the machine's power is a comparison, and disks are slow.
            if step - self._base <= _SYNCED:
                os.fsync(file.fileno())
        if first:
            files = {
                int(base): path
                for path in self._folder.glob(f"*{self._ending}")
                if (base := path.name.partition(".")[0]).isdigit()
            }
            for old in sorted(files)[:-_SAVES_KEPT]:
                with contextlib.suppress(OSError):
                    files[old].unlink()
        return None


_QUIET_SECONDS = 30.0
"""Lines about saves come at most this often."""


class ScriptKeeper:
    """Drives the runtime of a script: saves at its step boundaries, ends it when asked to.

    Whether ranks save together is seen when the first training loop is reached: with a default
    process group they do, and without one each process keeps its own state.

    Args:
        folder: Of the run.
        cadence: When to save.
        stop: Why to stop.
        ranks: This process among the others, as their launcher says.
        keep: Newest versions kept.
        chain: Of jobs that the run is in, which is told what is saved; None: it is in none.

    Attributes:
        step: Steps done when the last boundary was reached.
        stopped: Why the run was ended before its end; empty for a run that was not.
        code: The exit code of a run that was.
    """

    def __init__(
        self,
        folder: RunFolder,
        cadence: SaveCadence,
        stop: Stop,
        ranks: Ranks = ALONE,
        *,
        keep: int = 2,
        chain: JobChain | None = None,
    ) -> None:
        self.step = 0
        self.stopped = ""
        self.code = EXIT_TO_BE_CONTINUED
        self._folder = folder
        self._cadence = cadence
        self._ranks = ranks
        self._keep = keep
        self._consensus = PeriodicConsensus(stop=stop)
        if "OUTLAST_CHAIN" not in os.environ:
            chain = None
        self._runtime = Runtime(ranks, self._consensus, chain, save_told=self._tell_of_save)
        self._windows = CopyWindows()
        self._digests: Digests | None = None
        self._begun = self._resumed = False
        self._reason = ""
        self._told = -_QUIET_SECONDS
        self._untold = 0
        self._notes: list[str] = []
        self._problem: OutlastError | None = None

    def saved(self) -> SavedState | None:
        """The newest state that verifies, or None when there is none.

        Raises:
            CheckpointError: When there are versions, but none that can be used.
        """
        held = RankState()
        store = self._saves.store
        restored = store.restore({self._key: held}, warn=False)
        if restored is None:
            if store.unfinished:
                self.warn(store.unfinished)
            # What is not seeded is not drawn as in the life before.
            for old in self._folder.digests.glob(f"*.rank{self._own_rank()}.jsonl"):
                with contextlib.suppress(OSError):
                    old.unlink()
            return None
        for sentence in restored.skipped:
            self.warn(f"passed over: {sentence}")
        self.say(f"resumed at step {restored.step} from {restored.place}")
        self.step = restored.step
        self._resumed = True
        self._digests = Digests(self._folder.digests, self._own_rank(), restored.step)
        return held.saved

    def due(self, step: int) -> bool:
        """Return True if the state is to be saved after `step` steps."""
        # This is done at every step: where nothing is to be done, it must cost next to nothing.
        if self.stopped or self._problem is not None:
            self._refuse_to_go_on()
        restored, self.step = self.step, step
        if not self._begun:
            self._begun = True
            _ = self._saves
            if not self._resumed:
                # The boundary before the first step: set-up is done again for nothing.
                self._runtime.begin(step)
                return False
            # The restored boundary itself is not come to again, so a step is done.
            self._runtime.begin(restored)
        self._windows.close()
        try:
            decision = self._runtime.after_update(StepResult(step))
        except OutlastError as error:
            self._problem = error
            raise
        self._reason = decision.stop
        return decision.save or bool(decision.stop)

    def left(self, step: int) -> None:
        """A training loop has come to its end after `step` steps."""
        # What follows may take long, and a save is durable only behind its last copy.
        self._windows.hurry()
        if self._consensus.agreement is not None:
            self._consensus.agreement.left(step)

    def note(self, sentence: str) -> None:
        """Tell people of something that is not saved, and write it down for ``--explain``."""
        if sentence not in self._notes:
            self._notes.append(sentence)
            self.warn(f"note: {sentence}")
            if self._own_rank() == 0:
                self._folder.keep_notes(self._notes)

    def failed(self, error: OutlastError) -> None:
        """Remember why the program must not continue; its script may catch the error itself."""
        self._problem = error

    def save(self, step: int, state: SavedState) -> None:
        """Save; returns when the tensors may change again.

        Raises:
            CheckpointError: When the state cannot be saved.
            SystemExit: When the run is to stop and is saved.
        """
        clock, key = self._runtime.clock, self._key
        self._settle()
        try:
            # Where the program ends here, there is no next step to copy in.
            late = () if self._reason else self._windows.late(state.captured.tensors)
            handle = self._saves.begin(
                step,
                {key: RankState(state)},
                late={f"{key}.{TENSORS}.{name}" for name in late},
                # To look at the program's memory takes its time, too.
                looking_seconds=clock.so_far(),
            )
        except OutlastError as error:
            self._problem = error
            raise
        assert handle is not None
        self._windows.opened(handle)
        clock.begin()
        self._digests = Digests(self._folder.digests, self._own_rank(), step)
        if self._reason:
            self._end(step)

    def digest(self, step: int, text: str) -> str | None:
        """Keep the digest of a step after the newest save.

        Returns:
            The digest that an earlier life of the run kept after the same save, if there is one.
        """
        # A script that has caught one difference is not asked for the next.
        self._refuse_to_go_on()
        if self._digests is None:
            return None
        return self._digests.keep(step, text)

    def close(self, *, failed: bool = False) -> None:
        """Wait for the save under way, and give up the store.

        Args:
            failed: The script has ended before its time, so that other ranks may wait for this one
                elsewhere than in the save under way: they are not waited for.
        """
        if not failed:
            self._consensus.ended(self.step)
            self._settle()
        self._windows.remove()
        if self._runtime.saves is not None:
            self._runtime.saves.close(failed=failed)

    def raise_problem(self) -> None:
        """At the end: raise what was to end the script earlier, and what it has caught.

        Raises:
            OutlastError: With what happened.
        """
        if not self.stopped and self._problem is not None:
            raise self._caught(self._problem)

    def say(self, text: str) -> None:
        """Print a line for people, on rank 0."""
        if self._own_rank() == 0:
            print(f"outlast: {text}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print a line of what went wrong on this rank."""
        rank = f"rank {self._own_rank()}: " if self._ranks.world_size > 1 else ""
        print(f"outlast: {rank}{text}", file=sys.stderr, flush=True)

    @property
    def has_begun(self) -> bool:
        """Return True if the training loops were reached, now or before the state was saved."""
        return self._begun or self._resumed

    @property
    def _key(self) -> str:
        return f"rank{self._own_rank()}"

    def _own_rank(self) -> int:
        return dist.get_rank() if _in_group() else self._ranks.rank

    @property
    def _saves(self) -> RunSaves:
        if self._runtime.saves is not None:
            return self._runtime.saves
        place = self._folder.checkpoints
        alone = self._ranks.world_size > 1 and not _in_group()
        if alone:
            place /= f"rank{self._ranks.rank}"
        store = CheckpointStore(place, keep=self._keep, collective=not alone)
        return self._runtime.save_to(store, cadence=self._cadence, raises=True)

    def _settle(self) -> None:
        """See how the save before went, when it is done."""
        self._windows.close()
        if self._runtime.saves is not None:
            self._runtime.saves.collect(wait=True)

    def _tell_of_save(self, result: SaveResult) -> None:
        if result.error is not None:
            self.warn(f"{result.error}; the run continues, from the version before if it dies")
            return
        now = time.monotonic()
        if now - self._told < _QUIET_SECONDS and not self._reason:
            self._untold += 1
            return
        others = f"; {self._untold} more since the last line" if self._untold else ""
        self._told, self._untold = now, 0
        self.say(
            f"saved step {result.step} ({_size(result.bytes)}, blocked "
            f"{1e3 * result.blocked_seconds:.0f} ms){others}"
        )

    def _end(self, step: int) -> None:
        """The state is saved, or cannot be: end the program at once.

        Raises:
            SystemExit: Always; the script's `finally` and `with` come to their ends.
        """
        self._settle()
        error = self._saves.results[-1].error
        self.stopped = self._reason
        if error is not None:
            self.code = EXIT_CRASHED
        end = "; the same command continues from there" if error is None else " without a save"
        self.say(f"stopped at step {step} ({self._reason}){end}")
        raise SystemExit(self.code)

    def _refuse_to_go_on(self) -> None:
        """End a script that has caught what was to end it, and trains on."""
        if not self.stopped:
            if self._problem is None:
                return
            self.warn(str(self._caught(self._problem)))
        # What the script would do on the way has been done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code if self.stopped else EXIT_BAD_INPUT)

    @staticmethod
    def _caught(problem: OutlastError) -> OutlastError:
        return AutosaveError(
            f"{problem}; the script caught this error: let OutlastError pass where it catches "
            "Exception"
        )


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _size(count: int) -> str:
    """Bytes as a person says them."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000.0:
            return f"{size:.3g} {unit}"
        size /= 1000.0
    return f"{size:.3g} TB"
