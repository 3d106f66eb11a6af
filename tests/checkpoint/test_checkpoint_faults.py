"""Random faults on a disk: the newest intact version is restored, with the bits of its save."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_faults import damage_files, fill_disk, kill_programs
from s3_faults import Faults

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("stage", "rounds"),
    [
        (damage_files, 12),
        (fill_disk, 8),
        pytest.param(kill_programs, 6, marks=pytest.mark.slow),
    ],
)
def test_random_faults(
    tmp_path: Path, stage: Callable[[str, Faults, int], None], rounds: int, seed: int
) -> None:
    faults = Faults(seed)
    try:
        stage(str(tmp_path), faults, rounds)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error.stderr}")
    assert faults.staged.total() >= rounds // 2
