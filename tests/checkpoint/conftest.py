"""Fixtures for the tests of checkpoints."""

import pytest

from outlast.checkpoint import version


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of ranks seals a version by groups of two, as thousands do by groups of 128."""
    monkeypatch.setattr(version, "INDEXED_ABOVE", 0)
    monkeypatch.setattr(version, "GROUP_RANKS", 2)


@pytest.fixture(
    params=["one seal", pytest.param("seals of groups", marks=pytest.mark.slow)],
)
def either_seal(request: pytest.FixtureRequest) -> None:
    """Run a test as few ranks save, and again as thousands do."""
    if request.param == "seals of groups":
        request.getfixturevalue("small_groups")
