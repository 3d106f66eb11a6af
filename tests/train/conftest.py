"""What tests of trainings have in common."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_training_outlives_its_test() -> Iterator[None]:
    yield
    # Tests that start no training need not load what it takes.
    if (runs := sys.modules.get("runs")) is not None:
        runs.end_started()
