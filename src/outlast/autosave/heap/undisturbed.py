"""Looking at a heap without anybody looking back."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No subclass of tensors answers for itself, and nothing is collected, as long as this lasts.

    A walk makes many small objects that all live until it ends; to search them for garbage again
    and again would cost more than the walk.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch._C.DisableTorchFunctionSubclass():
            yield
    finally:
        if collects:
            gc.enable()
