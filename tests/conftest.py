"""Fixtures for all tests."""

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import run_ranks
from hypothesis import HealthCheck, settings

# The parent process never opens a pool of threads or of compilers, so forked ranks can open theirs.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Output that goes to no terminal has no width, whoever starts the tests.
os.environ.pop("COLUMNS", None)

# A loaded machine takes longer than the usual 200 ms for one example now and then.
# A busy machine draws slowly, which is no fault of a test.
# The same examples in every run: a change that breaks none of them breaks none elsewhere.
settings.register_profile(
    "outlast", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("outlast")


@pytest.fixture
def ranks() -> Callable[[int], Callable[..., list[Any]]]:
    """``ranks(n)(work, *args)``: run `work` in n forked processes joined by environment."""
    return lambda size: lambda work, *args: run_ranks(size, work, *args)


@pytest.fixture(autouse=True)
def _operations_are_counted_for_one_test() -> Iterator[None]:
    """End what guards count that a test leaves to the garbage collector: it slows the next ones."""
    yield
    counter = sys.modules.get("outlast.guard.operation_counter")
    if counter is not None:
        counter.end_all()


_FROZEN_FOR: Path | None = None
PROCESS_TESTS = ("distributed", "slurm")


def is_process_test(item: pytest.Item) -> bool:
    """True if several processes take part, so that a busy machine can make the test fail."""
    return any(item.get_closest_marker(name) is not None for name in PROCESS_TESTS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a failed process test once more."""
    for item in items:
        if is_process_test(item):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Take what has been imported by now out of garbage collections: many tests ask for one."""
    global _FROZEN_FOR
    if item.path.parent != _FROZEN_FOR:
        _FROZEN_FOR = item.path.parent
        # What one collection finalizes may hold more.
        for _ in range(3):
            gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Let no other process test run beside one that is run again."""
    if not is_process_test(item):
        return (yield)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    with (Path(tempfile.gettempdir()) / f"process-tests-{run}").open("w") as lock:
        again = getattr(item, "execution_count", 1) > 1
        fcntl.flock(lock, fcntl.LOCK_EX if again else fcntl.LOCK_SH)
        return (yield)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print why the first try of each test failed that was run again."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"flaky or failing: {report.nodeid}")
        terminalreporter.write_line(str(report.longrepr))
