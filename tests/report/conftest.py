"""Fixtures that make run directories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from report_runs import Clock, RunMaker

from outlast import records
from outlast.job import load_job, to_toml

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("outlast.records.log.time", clock)
    return clock


@pytest.fixture
def new_run(tmp_path: Path, clock: Clock) -> Any:
    """A function from a name (and job overrides) to an empty run that has not been started."""

    def make(name: str = "lark", overrides: tuple[str, ...] = ()) -> RunMaker:
        job = load_job(overrides=[f'run.name="{name}"', *overrides])
        directory = records.RunDirectory(tmp_path / name)
        directory.create(to_toml(job))
        return RunMaker(directory.path, clock)

    return make
