"""The command that measures on a GPU runs on a CPU with small shapes, and says what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GPU), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["checkpoint", "guard", "layers", "train"])
def test_a_part_runs_on_a_cpu(part: str) -> None:
    done = benchmark("--device=cpu", "--quick", f"--part={part}")
    assert done.returncode == 0, done.stderr
    assert f"gpu-{part} on" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    done = benchmark()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no CUDA device on this machine" in done.stderr
