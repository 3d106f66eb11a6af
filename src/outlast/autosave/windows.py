"""Copy windows: which tensors a save may copy while the next step runs, and until when.

The weights and moments of optimizers lie still from one optimizer step to the next: a save at a
step boundary need not copy them before the passes of the next step, only before its optimizer's
step. Everything else (buffers, averages, gradients, states of random numbers) may be written at
any time and is copied at the boundary.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

_TRIES = 4
"""Saves at which a storage is watched that never comes to be known, as one made anew each step."""

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Copying(Protocol):
    """A save under way."""

    def copied(self) -> None:
        """Return when all copies are made."""


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
        self._saves: list[Copying] = []
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

    def opened(self, save: Copying) -> None:
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
        """Have all copies made, because the next step may be far; what is watched goes on."""
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
        if _records_graph():
            # What is recorded here is done later, without this hook.
            with self._lock:
                for tensor in _tensors_of(optimizer):
                    self._verdicts[tensor] = False
            return
        if optimizer not in self._optimizers:
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
        saves = list(self._saves)
        for save in saves:
            save.copied()
            self._saves.remove(save)

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


def _records_graph() -> bool:
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return used and torch.cuda.is_current_stream_capturing()


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
