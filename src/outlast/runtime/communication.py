"""Communication time: how long a step waited for other ranks, measured.

Communication that overlaps computation costs nothing; what counts is the time in which this process
only waited. It is measured at three places:

- after the backward pass under DDP: from the moment the last local gradient was ready to the end of
  ``backward``, which is when the reduction has ended;
- in ``torch.distributed.Work.wait``, where FSDP2, pipelining and plain collectives wait in Python;
- by the training loop itself around its agreement at the end of the step.

On CUDA the host does not wait for collectives (they are ordered on streams), so only what the host
waits for is seen there; the rest of an exposed collective counts as compute.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from outlast.recover.phase_page import EnterPhase, ignore_phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn


class CommunicationWait:
    """Sums up waiting seconds of the thread that made it; `take` returns and resets the sum.

    Args:
        mark: Told when a backward pass has only the reduction of its gradients left.
    """

    def __init__(self, mark: EnterPhase = ignore_phase) -> None:
        self._mark = mark
        self._watched = self._missing = 0
        self._reducing = True
        self._thread = threading.get_ident()
        self._seconds = 0.0
        self._last_gradient = 0.0

    def add(self, seconds: float) -> None:
        """Count `seconds` of waiting."""
        self._seconds += seconds

    def take(self) -> float:
        """Seconds waited since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def watch_gradients(self, model: nn.Module) -> None:
        """Note when each local gradient of `model` alone is ready; costs 0.1 us a parameter."""

        def note(parameter: torch.Tensor) -> None:
            self._last_gradient = time.perf_counter()
            self._missing -= 1
            if self._missing == 0:
                self._begin_reduction()

        self._watched = 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._watched += 1
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass that reduces gradients: count its waiting end."""
        self._last_gradient = 0.0
        self._missing, self._reducing = self._watched, False
        yield
        self._reducing = True
        if self._last_gradient:
            self.add(time.perf_counter() - self._last_gradient)

    @contextlib.contextmanager
    def in_collectives(self) -> Iterator[None]:
        """Count every ``Work.wait`` of this process while the context is open."""
        original = dist.Work.wait
        dist.Work.wait = self._timed(original)  # type: ignore[method-assign]
        try:
            yield
        finally:
            dist.Work.wait = original  # type: ignore[method-assign]

    def _begin_reduction(self) -> None:
        """Once per backward pass: of DDP at the last gradient, of FSDP2 at the first wait."""
        if not self._reducing:
            self._reducing = True
            self._mark("reduce")

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return wait(*args, **kwargs)
            self._begin_reduction()
            begun = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self.add(time.perf_counter() - begun)

        return timed
