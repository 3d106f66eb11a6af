"""The names that `outlast` offers."""

import subprocess
import sys

import outlast


def test_every_public_name_is_there() -> None:
    for name in dir(outlast):
        assert getattr(outlast, name) is not None
    assert {"Run", "CheckpointStore", "guard", "tensorize", "EnergyMeter", "predict"} <= set(
        dir(outlast)
    )


def test_to_look_at_the_names_loads_nothing_heavy() -> None:
    program = (
        "import outlast, sys; dir(outlast); print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["False", "False"]
