"""Every driver of the runtime keeps the guarantees of `conformance`."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import conformance
import drivers
import pytest
from driving import Driver, Way

from outlast.records import StateRecovered

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]


SMOKE = {("run", "stopped"), ("run", "failed")}
"""Cases that are `make test`'s, too: no framework is imported for them."""


def of(*several: Driver) -> list[Any]:
    """Each driver with each case."""
    return [
        pytest.param(driver, case, id=f"{driver.name}-{case}", marks=marks_of(driver, case))
        for driver in several
        for case in conformance.CASES
    ]


def marks_of(driver: Driver, case: str) -> list[pytest.MarkDecorator]:
    """Skipped where the framework is missing, or cannot have the case."""
    if case in driver.lacks:
        return [pytest.mark.skip(reason=driver.lacks[case])]
    if not drivers.is_installed(driver):
        return [pytest.mark.skip(reason=f"{driver.name} is not installed")]
    return [pytest.mark.smoke] if (driver.name, case) in SMOKE else []


@pytest.fixture(scope="session")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Way]:
    """Trainings that nothing happens to."""
    return {}


@pytest.mark.supports("pytorch", "checkpoint", "resume", "malleable", "guard", "recover", "records")
@pytest.mark.supports("pytorch", "chain")
@pytest.mark.parametrize(("driver", "case"), of(drivers.TRAINER, drivers.RUN))
def test_pytorch(
    tmp_path: Path, tmp_path_factory: Any, wholes: dict[Any, Way], driver: Driver, case: str
) -> None:
    check(tmp_path, tmp_path_factory, wholes, driver, case)


@pytest.mark.supports("pytorch", "recover")
def test_what_is_rarely_kept_in_memory_waits_for_an_update(tmp_path: Path) -> None:
    rare = ("recover.every_steps=3",)
    way = Way(tmp_path / "way", rare, accumulate=4, every=100, kept=True)
    assert drivers.RUN.start(way, "10 SIGKILL") == [None]
    drivers.RUN.finish(replace(way, start=1))
    [(_, recovered)] = drivers.RUN.records(way).of(StateRecovered)
    # The last update before may not have been kept yet.
    assert recovered.step in (4, 8)


def check(folder: Path, factory: Any, wholes: dict[Any, Way], driver: Driver, case: str) -> None:
    """Drive through a case."""
    for name in filter(drivers.is_there, driver.loads):
        # Once, before processes are forked.
        loaded = importlib.import_module(name)
        if name == "deepspeed_training":
            loaded.build()

    def whole(**changes: Any) -> Way:
        key = driver.name, *sorted(changes.items())
        if key not in wholes:
            wholes[key] = driver.finish(Way(factory.mktemp("whole"), **changes))
        return wholes[key]

    conformance.CASES[case](driver, folder, whole)


@pytest.mark.supports(
    "transformers", "checkpoint", "resume", "malleable", "guard", "recover", "records", "chain"
)
@pytest.mark.parametrize(("driver", "case"), of(drivers.HF_TRAINER))
def test_hf_trainer(
    tmp_path: Path, tmp_path_factory: Any, wholes: dict[Any, Way], driver: Driver, case: str
) -> None:
    check(tmp_path, tmp_path_factory, wholes, driver, case)


@pytest.mark.supports(
    "accelerate", "checkpoint", "resume", "malleable", "guard", "recover", "records", "chain"
)
@pytest.mark.parametrize(("driver", "case"), of(drivers.ACCELERATE))
def test_accelerate(
    tmp_path: Path, tmp_path_factory: Any, wholes: dict[Any, Way], driver: Driver, case: str
) -> None:
    check(tmp_path, tmp_path_factory, wholes, driver, case)


@pytest.mark.supports(
    "lightning", "checkpoint", "resume", "malleable", "guard", "recover", "records", "chain"
)
@pytest.mark.parametrize(("driver", "case"), of(drivers.LIGHTNING))
def test_lightning(
    tmp_path: Path, tmp_path_factory: Any, wholes: dict[Any, Way], driver: Driver, case: str
) -> None:
    check(tmp_path, tmp_path_factory, wholes, driver, case)


@pytest.mark.supports(
    "fabric", "checkpoint", "resume", "malleable", "guard", "recover", "records", "chain"
)
@pytest.mark.parametrize(("driver", "case"), of(drivers.FABRIC))
def test_fabric(
    tmp_path: Path, tmp_path_factory: Any, wholes: dict[Any, Way], driver: Driver, case: str
) -> None:
    check(tmp_path, tmp_path_factory, wholes, driver, case)


@pytest.mark.supports(
    "deepspeed", "checkpoint", "resume", "malleable", "guard", "recover", "records", "chain"
)
@pytest.mark.parametrize(("driver", "case"), of(drivers.DEEPSPEED))
def test_deepspeed(
    tmp_path: Path, tmp_path_factory: Any, wholes: dict[Any, Way], driver: Driver, case: str
) -> None:
    check(tmp_path, tmp_path_factory, wholes, driver, case)


@pytest.mark.supports("torchtitan", "checkpoint", "resume", "guard", "recover", "records", "chain")
@pytest.mark.parametrize(("driver", "case"), of(drivers.TORCHTITAN))
def test_torchtitan(
    tmp_path: Path, tmp_path_factory: Any, wholes: dict[Any, Way], driver: Driver, case: str
) -> None:
    check(tmp_path, tmp_path_factory, wholes, driver, case)


@pytest.mark.parametrize(("driver", "case"), of(drivers.OUTLAST_RUN))
def test_outlast_run(
    tmp_path: Path, tmp_path_factory: Any, wholes: dict[Any, Way], driver: Driver, case: str
) -> None:
    check(tmp_path, tmp_path_factory, wholes, driver, case)
