"""What is measured for the planner."""

from __future__ import annotations

import pytest
import torch

from outlast.tensorize import measure, prices

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure few points, and those once."""
    for name in ("_MOST_FLOPS", "_MOST_ITEM_FLOPS"):
        monkeypatch.setattr(measure, name, {"cpu": 1e4})
    for module in (prices, measure):
        monkeypatch.setattr(module, "AXIS", (1, 4, 16))
        monkeypatch.setattr(module, "BYTES_AXIS", (1 << 12, 1 << 14))
        monkeypatch.setattr(module, "STRETCH_AXIS", (4, 16))
    monkeypatch.setattr(measure, "_FAULT_BYTES", 1 << 20)


@pytest.mark.usefixtures("small")
def test_a_measured_table_can_be_read_again() -> None:
    found = measure.measure(torch.float32, CPU, repeats=1)
    assert found.measured
    assert found.threads == torch.get_num_threads()
    assert all(seconds > 0 for seconds in found.launch.values())
    assert prices.PriceTable.from_json(found.to_json()) == found
    default = prices.default_table("cpu", "float32")
    assert set(found.launch) == set(default.launch)
    roof = prices.default_table("cuda", "bfloat16")
    assert set(found.launch) == set(roof.launch)


def test_large_products_are_measured_smaller() -> None:
    sizes, times = measure._within((4096, 1024, 4096), 1e8)
    assert 2 * sizes[0] * sizes[1] * sizes[2] <= 1e8
    assert times * sizes[0] * sizes[1] * sizes[2] == 4096 * 1024 * 4096
    assert measure._within((4, 4, 4), 1e8) == ((4, 4, 4), 1.0)
