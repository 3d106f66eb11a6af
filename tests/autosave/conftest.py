"""What tests of automatic checkpoints leave behind for each other: nothing."""

import sys

import pytest

from outlast.autosave.resume.foreign import ForeignModules


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """A process that has compiled anything is not traced; other tests may have."""
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is not None:
        utilities.counters.clear()


@pytest.fixture(autouse=True)
def _modules_of_this_process_are_not_walked(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions within this process, of which a test makes dozens, pass over its 2,000 modules.

    Tests of the state in modules run in processes of their own (`test_run_state.py`), or are those
    named here.
    """
    if request.module.__name__ not in ("test_session_hidden", "test_session_modules"):
        monkeypatch.setattr(
            ForeignModules,
            "_namespaces",
            lambda _, __: {(name, ""): {} for name in list(sys.modules)},
        )
