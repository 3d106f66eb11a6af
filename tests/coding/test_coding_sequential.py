import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.codes.sequential.histories import arbitrary, bursty, per_round
from outlast.coding.codes.sequential.schemes import EveryRound, Multiplexed, SelectiveReattempt
from outlast.coding.codes.sequential.times import round_seconds
from outlast.errors import CodingError


def run(scheduler, history):
    """Drive a scheduler through a history with real gradients; the jobs that were due and right."""
    generator = np.random.default_rng(0)
    chunks = len(scheduler.shares)
    gradients = generator.standard_normal((scheduler.jobs, chunks, 3))
    results, right = {}, []
    for number, row in enumerate(history):
        for tasks in scheduler.tasks(number):
            for task in tasks:
                results[task] = np.array(task.coefficients) @ gradients[task.job, list(task.chunks)]
        scheduler.observe(number, ~row)
        due = number - scheduler.delay
        if 0 <= due < scheduler.jobs:
            if not scheduler.complete(due):
                right.append(False)
                continue
            decoded = sum(weight * results[task] for task, weight in scheduler.decoding(due))
            right.append(bool(np.allclose(decoded, gradients[due].sum(axis=0), atol=1e-9)))
    return right


def histories(workers, rounds):
    """All histories, as one array."""
    bits = np.arange(2 ** (workers * rounds))[:, None] >> np.arange(workers * rounds) & 1
    return bits.astype(bool).reshape(-1, rounds, workers)


@pytest.mark.parametrize(
    ("scheme", "parameters", "jobs"),
    [
        (SelectiveReattempt, (3, 1, 2, 2), 3),
        (SelectiveReattempt, (3, 1, 3, 2), 3),
        (SelectiveReattempt, (2, 2, 3, 2), 3),
        (SelectiveReattempt, (4, 1, 2, 3), 1),
        (Multiplexed, (2, 1, 2, 1), 4),
        (Multiplexed, (3, 1, 2, 2), 2),
        (Multiplexed, (3, 1, 2, 3), 2),
        (Multiplexed, (3, 1, 2, 1), 3),
        (Multiplexed, (2, 2, 3, 1), 3),
        (Multiplexed, (2, 2, 3, 2), 3),
        (Multiplexed, (3, 1, 3, 0), 2),
    ],
)
def test_every_admitted_history_completes_every_job_in_time_and_exactly(scheme, parameters, jobs):
    first = scheme(*parameters)
    admitted = refused_and_failed = 0
    for number, history in enumerate(histories(parameters[0], jobs + first.delay)):
        scheduler = scheme(*parameters, jobs=jobs, code=first.code)
        if scheduler.admits(history):
            admitted += 1
            assert run(scheduler, history) == [True] * jobs
        elif number % 5 == 0:
            refused_and_failed += not all(run(scheduler, history))
    assert admitted >= 1
    assert refused_and_failed > 0


def test_windows_may_follow_different_models():
    history = np.zeros((8, 4), dtype=bool)
    history[0, :3] = True  # a burst of three, above the s = 2 of each round
    history[3] = history[4] = [True, True, False, False]  # twice in succession, not bursty
    scheduler = SelectiveReattempt(4, 1, 2, 3, jobs=7)
    assert scheduler.tolerance == 2
    assert not per_round(history, 2)
    assert not bursty(history, burst=1, window=2, stragglers=3)
    assert scheduler.admits(history)
    assert run(scheduler, history) == [True] * 7


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_random_admitted_histories_complete_in_time(data):
    workers = data.draw(st.integers(2, 9))
    burst = data.draw(st.integers(1, 3))
    stragglers = data.draw(st.integers(1, workers))
    if data.draw(st.booleans()):
        window = data.draw(st.integers(1, 2)) * burst + 1
        scheduler = SelectiveReattempt(workers, burst, window, min(stragglers, workers - 1), jobs=6)
    else:
        window = burst + data.draw(st.integers(1, 2))
        scheduler = Multiplexed(workers, burst, window, stragglers, jobs=6)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    history = np.zeros((6 + scheduler.delay, workers), dtype=bool)
    for _ in range(4 * history.size):  # stragglers are added for as long as that is admitted
        place = tuple(generator.integers(history.shape))
        history[place] = True
        history[place] = scheduler.admits(history)
    assert history.any()
    assert run(scheduler, history) == [True] * 6


@pytest.mark.parametrize(("n", "burst", "window", "stragglers"), [(4, 1, 2, 3), (6, 2, 5, 2)])
def test_loads_and_delays_are_those_of_the_paper(n, burst, window, stragglers):
    reattempt = SelectiveReattempt(n, burst, window, stragglers)
    s = int(np.ceil(burst * stragglers / (window - 1 + burst)))
    assert reattempt.job_share == pytest.approx((s + 1) / n)
    assert reattempt.delay == burst
    multiplexed = Multiplexed(n, burst, window, stragglers)
    more = stragglers + 1
    formula = more * (window - 1 + burst) / (n * (burst + (window - 1) * more))
    assert multiplexed.job_share == pytest.approx(formula)
    assert multiplexed.delay == window - 2 + burst
    everyone = Multiplexed(n, burst, window, n)
    assert everyone.job_share == pytest.approx((window - 1 + burst) / (n * (window - 1)))


@pytest.mark.parametrize(
    "scheduler",
    [SelectiveReattempt(4, 2, 3, 3), Multiplexed(5, 2, 3, 2), Multiplexed(4, 1, 2, 4)],
)
def test_no_worker_is_given_more_than_the_load_and_chunks_make_up_a_job(scheduler):
    assert scheduler.shares.sum() == pytest.approx(1.0)
    generator = np.random.default_rng(3)
    most = 0.0
    for number in range(12):
        for tasks in scheduler.tasks(number):
            given = sum(scheduler.shares[list(task.chunks)].sum() for task in tasks)
            assert given <= scheduler.job_share + 1e-12
            most = max(most, given)
        scheduler.observe(number, generator.random(scheduler.workers) > 0.2)
    assert most == pytest.approx(scheduler.job_share)


def test_multiplexing_needs_less_load_than_reattempting_and_that_less_than_a_code():
    burst, window, stragglers, n = 1, 2, 15, 144
    multiplexed = Multiplexed(n, burst, window, stragglers)
    reattempt = SelectiveReattempt(n, burst, window, stragglers)
    code = EveryRound(n, stragglers)
    assert multiplexed.job_share < reattempt.job_share < code.job_share


def test_models_of_histories_on_small_cases():
    apart = np.array([[1, 0], [0, 0], [1, 0]], dtype=bool)
    assert bursty(apart, burst=3, window=4, stragglers=1)
    assert not bursty(apart, burst=2, window=4, stragglers=1)
    assert bursty(apart, burst=2, window=2, stragglers=1)
    assert arbitrary(apart, most=2, window=3, stragglers=1)
    assert not arbitrary(apart, most=1, window=3, stragglers=1)
    assert arbitrary(apart, most=1, window=2, stragglers=1)
    both = np.array([[1, 0], [0, 1]], dtype=bool)
    assert not bursty(both, burst=1, window=2, stragglers=1)
    assert not arbitrary(both, most=1, window=2, stragglers=1)
    assert per_round(both, 1)
    empty = np.zeros((0, 2), dtype=bool)
    assert bursty(empty, burst=1, window=2, stragglers=0)
    assert arbitrary(empty, most=0, window=2, stragglers=0)


def test_a_job_is_forgotten_a_round_after_its_last():
    scheduler = SelectiveReattempt(3, 1, 2, 2)
    everyone = np.ones(3, dtype=bool)
    for number in range(3):
        scheduler.tasks(number)
        scheduler.observe(number, everyone)
    assert scheduler.complete(1)
    with pytest.raises(CodingError, match="forgotten"):
        scheduler.decoding(0)


def lambda_like_trace(rounds, workers, seed):
    """Start-up delays with short bursts: about 5 % of workers take several times as long."""
    generator = np.random.default_rng(seed)
    start = 0.6 + generator.gamma(4.0, 0.02, (rounds, workers))
    slow = generator.random((rounds, workers)) < 0.04
    slow[1:] |= slow[:-1] & (generator.random((rounds - 1, workers)) < 0.1)
    return np.where(slow, start + generator.exponential(1.0, start.shape), start)


def totals(schedulers, trace, seconds_per_job):
    return {
        name: round_seconds(
            scheduler, trace, seconds_per_job=seconds_per_job, patience=0.2
        ).total_seconds
        for name, scheduler in schedulers.items()
    }


def test_multiplexing_beats_a_code_where_load_takes_time():
    trace = lambda_like_trace(80, 72, seed=5)
    schedulers = {
        "uncoded": EveryRound(72),
        "code": EveryRound(72, 5),
        "multiplexed": Multiplexed(72, 1, 2, 11),
    }
    heavy = totals(schedulers, trace, seconds_per_job=8.0)
    assert heavy["multiplexed"] < 0.85 * heavy["code"] < heavy["uncoded"]
    # Where load costs next to nothing a code waits for fewer workers than any second try.
    light = totals(schedulers, trace, seconds_per_job=0.1)
    assert light["code"] < light["multiplexed"] < light["uncoded"]


def test_reattempting_beats_every_code_where_stragglers_come_together():
    trace = np.full((80, 72), 0.5)
    trace[::4, ::6] = 3.0
    schedulers = {"reattempt": SelectiveReattempt(72, 1, 2, 12)}
    schedulers |= {f"code {s}": EveryRound(72, s) for s in (0, 1, 2, 3, 5, 7, 8, 11, 17)}
    seconds = totals(schedulers, trace, seconds_per_job=4.0)
    assert min(seconds, key=seconds.get) == "reattempt"


def test_the_master_waits_until_the_stragglers_are_admitted():
    trace = np.array([[1.0, 1.0, 5.0, 9.0], [1.0, 1.0, 7.0, 8.0], [1.0, 1.2, 1.3, 1.1]])
    scheduler = SelectiveReattempt(4, 1, 2, 2)
    found = round_seconds(scheduler, trace, seconds_per_job=0.0)
    # Two stragglers are admitted at first; in the next round these two may not straggle, though
    # one straggler in each round would have been.
    assert found.stragglers.tolist() == [
        [False, False, True, True],
        [False, False, False, False],
        [False, False, False, False],
    ]
    assert found.seconds.tolist() == [2.0, 8.0, 1.3]
    assert scheduler.admits(found.stragglers)


def test_a_simulated_run_is_one_that_the_scheduler_completes():
    trace = lambda_like_trace(30, 8, seed=1)
    scheduler = Multiplexed(8, 2, 3, 3, jobs=30 - 3)
    found = round_seconds(scheduler, trace, seconds_per_job=1.0, patience=0.3)
    assert found.stragglers.any()
    assert run(scheduler, found.stragglers) == [True] * 27


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: SelectiveReattempt(4, 2, 4, 1), "3 or 5"),
        (lambda: SelectiveReattempt(4, 2, 2, 1), "3 or 5"),
        (lambda: SelectiveReattempt(4, 0, 2, 1), "burst = 0"),
        (lambda: SelectiveReattempt(4, 1, 2, 5), "take stragglers = 4"),
        (lambda: Multiplexed(4, 2, 2, 1), "at least 3"),
        (lambda: Multiplexed(4, 1, 2, -1), "take stragglers = 0"),
        (lambda: EveryRound(4, 4), "take stragglers = 3"),
        (lambda: EveryRound(0), "workers = 0"),
        (lambda: EveryRound(4, 1, code=EveryRound(4).code), "tolerates 0"),
        (lambda: EveryRound(4, 1, code=EveryRound(6, 1).code), "6 workers"),
        (lambda: EveryRound(4).tasks(1), "round = 1"),
        (lambda: EveryRound(4).observe(0, np.ones(3, dtype=bool)), "4 workers"),
        (lambda: EveryRound(4).decoding(0), "cannot be decoded"),
        (lambda: round_seconds(EveryRound(4), np.ones((2, 3)), seconds_per_job=1.0), "(2, 3)"),
        (lambda: round_seconds(EveryRound(2), np.ones((2, 2)), seconds_per_job=-1.0), "0 or more"),
    ],
)
def test_wrong_settings_are_refused_with_what_would_do(make, hint):
    with pytest.raises(CodingError) as caught:
        make()
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    "scheduler", [EveryRound(4, 1), SelectiveReattempt(4, 1, 2, 2), Multiplexed(4, 1, 2, 2)]
)
def test_schemes_show_their_share_of_a_job(scheduler):
    assert f"job_share={scheduler.job_share:g}" in repr(scheduler)
    assert type(scheduler).__name__ in repr(scheduler)
