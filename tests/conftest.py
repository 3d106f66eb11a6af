"""Fixtures for all tests."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from forked import run_ranks

# The parent process never opens a thread pool, so forked ranks can open their own.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def ranks() -> Callable[[int], Callable[..., list[Any]]]:
    """``ranks(n)(work, *args)``: run `work` in n forked processes joined by environment."""
    return lambda size: lambda work, *args: run_ranks(size, work, *args)
