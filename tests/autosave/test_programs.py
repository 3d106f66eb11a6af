"""Programs that know nothing of Outlast end with the same bits, however often they are killed."""

import random
import signal
from pathlib import Path

import pytest
from killed import differences, names, result, run_outlast, run_plainly

DEATHS = 2
BOUNDARIES = 16
"""Fewer than any of the programs has, so that each death comes in its training."""

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", names())
def test_a_killed_program_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    plain, resumed = (tmp_path / each / "out.pt" for each in ("plain", "resumed"))
    plain.parent.mkdir()
    resumed.parent.mkdir()
    assert run_plainly(name, plain).code == 0
    chance = random.Random(name)
    for _ in range(DEATHS):
        number = chance.randrange(1, BOUNDARIES // DEATHS)
        ended = run_outlast(name, resumed, tmp_path / "saves", dies_at=number)
        assert ended.code == -signal.SIGKILL, ended.said
    ended = run_outlast(name, resumed, tmp_path / "saves")
    assert ended.code == 0, ended.said
    assert differences(result(plain), result(resumed)) == []
