"""What the tests of tensorized layers share."""

import sys
from pathlib import Path

import pytest

from outlast.tensorize.planner import forget

# Collectives are counted there, too.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True, scope="module")
def _built_in_costs(tmp_path_factory):
    """Plans by the table of costs in the package, whatever was measured on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTLAST_CACHE", str(tmp_path_factory.mktemp("costs")))
        forget()
        yield
    forget()
