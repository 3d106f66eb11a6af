"""What a drill draws, and what it is asked in words."""

from collections import Counter

import pytest

from outlast.errors import RecoverError
from outlast.recover.drill import per_second, trials_at, trials_by_rate


@pytest.mark.parametrize(
    ("text", "expected"), [("6/min", 0.1), ("0.5/s", 0.5), (" 36 / h ", 0.01), ("1e1/s", 10.0)]
)
def test_rates(text: str, expected: float) -> None:
    assert per_second(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["6", "0/s", "-1/s", "6/day", "x/s", "e/s", "inf/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(RecoverError, match="give kills per time above 0, such as 6/min"):
        per_second(text)


def test_every_phase_has_its_trials_and_a_seed_gives_the_same_ones() -> None:
    trials = trials_at(["data", "reduce"], ranks=4, each=10, seed=3)
    assert Counter(each.phase for each in trials) == {"data": 10, "reduce": 10}
    assert {each.rank for each in trials} == {0, 1, 2, 3}
    assert all(each.steps >= 1 for each in trials)
    assert trials == trials_at(["data", "reduce"], ranks=4, each=10, seed=3)
    assert trials != trials_at(["data", "reduce"], ranks=4, each=10, seed=4)


def test_kills_at_a_rate_are_poisson() -> None:
    trials = trials_by_rate(0.1, ranks=3, count=4000, seed=1)
    times = [each.seconds for each in trials]
    assert times == sorted(times)
    # The mean of 4000 exponential times is within 5 standard errors of 10 s, for this seed.
    assert times[-1] / len(times) == pytest.approx(10.0, rel=5 / 4000**0.5)
    assert {each.rank for each in trials} == {0, 1, 2}


@pytest.mark.parametrize("phase", ["idle", "lunch"])
def test_a_phase_that_there_is_not_is_refused(phase: str) -> None:
    with pytest.raises(RecoverError, match=f"--at {phase}: give one of heal, save"):
        trials_at([phase], ranks=2, each=1, seed=0)
