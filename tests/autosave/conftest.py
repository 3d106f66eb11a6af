"""What tests of automatic checkpoints leave behind for each other: nothing."""

import sys

import pytest

from outlast.autosave.resume.modules import ForeignModules


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """A process that has compiled anything is not traced; other tests may have."""
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is not None:
        utilities.counters.clear()


@pytest.fixture(autouse=True)
def modules_of_this_process_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions within this process, of which a test makes dozens, pass over its 2,000 modules.

    Tests of the state in modules run in processes of their own (`test_run_state.py`).
    """
    monkeypatch.setattr(
        ForeignModules,
        "_namespaces",
        lambda *_: {(name, ""): {} for name in list(sys.modules)},
    )
