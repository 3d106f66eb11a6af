"""The engine of a run without a framework: what it keeps, and for how long."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch

from outlast.distributed.ranks import ALONE
from outlast.errors import CheckpointError
from outlast.records import Warned
from outlast.runtime.engine import Runtime


def test_what_nobody_records_does_not_grow_without_bound() -> None:
    runtime = Runtime(ALONE)
    for number in range(5000):
        runtime.write(Warned(str(number)))
    assert len(runtime.early) == 1000
    assert runtime.early[-1] == Warned("4999")


@pytest.mark.parametrize("late", [False, True])
def test_an_error_keeps_no_tensors_alive(late: bool) -> None:
    gone: list[Any] = []

    class Memory:
        """In-memory checkpoint that cannot be closed."""

        def close(self, *, forget: bool) -> None:
            fails()

    def fails() -> None:
        tensor = torch.zeros(4)
        gone.append(weakref.ref(tensor))
        raise CheckpointError("it went wrong")

    gc.disable()
    try:
        with contextlib.suppress(CheckpointError), Runtime(ALONE) as runtime:
            if late:
                runtime.memory = Memory()  # type: ignore[assignment]
            else:
                fails()
        assert gone[0]() is None
    finally:
        gc.enable()
