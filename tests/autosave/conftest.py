"""What tests of automatic checkpoints leave behind for each other: nothing."""

import sys

import pytest


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """A process that has compiled anything is not traced; other tests may have."""
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is not None:
        utilities.counters.clear()
