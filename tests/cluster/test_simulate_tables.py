"""Schedules worked out by hand."""

import math

import pytest

from outlast.cluster.scheduler import Settings
from outlast.cluster.simulate import Simulation
from outlast.cluster.workload import Workload
from outlast.errors import ClusterError

# (submitted, nodes, limit, run) of each job, and its start by EASY and by conservative backfill.
#
# A machine of 4 nodes. Job 0 holds three of them to 10. Job 1, of four, heads the queue: its shadow
# is 10, with no nodes left over. Job 2 fits beside job 0 and ends at 10; job 3 would end at 11.
HEAD_KEEPS_ITS_TIME = (
    [(0, 3, 10, 10), (0, 4, 5, 5), (0, 1, 10, 10), (0, 1, 11, 11)],
    [0, 10, 0, 15],
    [0, 10, 0, 15],
)
# Job 1 needs three nodes at 10, so one is left over: job 2 may hold it beyond the shadow.
EXTRA_NODES = ([(0, 3, 10, 10), (0, 3, 5, 5), (0, 1, 99, 99)], [0, 10, 0], [0, 10, 0])
# EASY reserves for job 1 alone, at 10, and one node is left over then, so job 3 takes it to 30.
# Job 2 needs all four nodes and could have had them at 15: only the conservative plan keeps that.
SECOND_IN_LINE = (
    [(0, 3, 10, 10), (0, 3, 5, 5), (0, 4, 5, 5), (0, 1, 30, 30)],
    [0, 10, 30, 0],
    [0, 10, 15, 20],
)
# Job 0 ends at 4 instead of 10: the head starts then.
EARLY_END = ([(0, 3, 10, 4), (1, 4, 5, 5), (2, 1, 9, 9)], [0, 4, 9], [0, 4, 9])
# Ended by its limit at 5, though it would run for 50.
LIMIT_ENDS = ([(0, 4, 5, 50), (1, 4, 5, 5)], [0, 5], [0, 5])
# Two jobs end at 10, and only both make room for job 2; job 3 fits into the node left over.
ENDS_TOGETHER = (
    [(0, 2, 10, 10), (0, 1, 10, 10), (0, 3, 5, 5), (0, 1, 20, 20), (0, 1, 5, 5)],
    [0, 0, 10, 0, 15],
    [0, 0, 10, 0, 15],
)
# One node is left over at 10: job 2 takes it, so job 3 cannot; whether they come with the head or
# after it.
EXTRA_NODES_ARE_USED_UP = (
    [(0, 2, 10, 10), (0, 3, 5, 5), (0, 1, 99, 99), (0, 1, 99, 99)],
    [0, 10, 0, 15],
    [0, 10, 0, 15],
)
EXTRA_NODES_ARE_USED_UP_LATER = (
    [(0, 2, 10, 10), (0, 3, 5, 5), (1, 1, 99, 99), (2, 1, 99, 99)],
    [0, 10, 1, 15],
    [0, 10, 1, 15],
)
TABLES = {
    "extra nodes are used up": EXTRA_NODES_ARE_USED_UP,
    "extra nodes are used up later": EXTRA_NODES_ARE_USED_UP_LATER,
    "head keeps its time": HEAD_KEEPS_ITS_TIME,
    "extra nodes": EXTRA_NODES,
    "second in line": SECOND_IN_LINE,
    "early end": EARLY_END,
    "limit ends": LIMIT_ENDS,
    "ends together": ENDS_TOGETHER,
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_tables(name: str, backfill: str) -> None:
    jobs, easy, conservative = TABLES[name]
    simulation = Simulation(4, backfill=backfill)
    for submitted, nodes, limit, run in jobs:
        simulation.submit(nodes, limit, run, at=submitted)
    simulation.run()
    expected = easy if backfill == "easy" else conservative
    assert simulation.starts().tolist() == expected
    for job, (_, _, limit, run) in enumerate(jobs):
        assert simulation.end_of(job) == expected[job] + min(limit, run)
        assert simulation.state_of(job) == ("done" if run <= limit else "limit")


def test_shadow_and_hole_of_the_first_table() -> None:
    simulation = Simulation(4)
    assert simulation.shadow() == (math.inf, 4)
    simulation.submit(3, 10, 10)
    simulation.submit(4, 5, 5)
    simulation.run(2)
    assert simulation.shadow() == (10, 0)
    assert simulation.window_seconds(1) == 8
    assert simulation.window_seconds(2) == 0
    assert simulation.free_nodes == 1
    for limit, starts in ((8.0, True), (8.5, False)):
        job = simulation.submit(1, limit, 1)
        simulation.run(2)
        assert (simulation.state_of(job) == "running") == starts
        simulation.cancel(job)


def test_a_hole_without_end() -> None:
    simulation = Simulation(4, backfill="conservative")
    simulation.submit(3, 10, 10)
    simulation.submit(3, 5, 5)
    simulation.run(0)
    assert simulation.window_seconds(1) == math.inf


def test_dependent_job_starts_when_the_other_has_ended_in_whatever_way() -> None:
    simulation = Simulation(4)
    first = simulation.submit(4, 10, 99)
    second = simulation.submit(4, 10, 3, after=first)
    third = simulation.submit(4, 10, 3, after=second)
    simulation.run(1)
    assert simulation.state_of(second) == "held"
    simulation.run()
    assert [simulation.state_of(job) for job in (first, second, third)] == ["limit", "done", "done"]
    assert simulation.starts().tolist() == [0, 10, 13]
    late = simulation.submit(1, 1, 1, after=first)
    simulation.run()
    assert simulation.start_of(late) == 16


def test_priority_goes_first_and_age_overtakes_it() -> None:
    def order(scheduler: Settings) -> list[float]:
        simulation = Simulation(1, scheduler=scheduler)
        simulation.submit(1, 100, 100)
        simulation.submit(1, 10, 10, at=1)
        simulation.submit(1, 10, 10, at=60, priority=50)
        simulation.run()
        return simulation.starts().tolist()

    assert order(Settings()) == [0, 110, 100]
    # 59 s of age are worth 59, more than the other's 50.
    assert order(Settings(age_weight=1000, age_seconds=1000)) == [0, 100, 110]
    # Age counts for no more than 40 s, worth 40.
    assert order(Settings(age_weight=40, age_seconds=40, priority_seconds=1)) == [0, 110, 100]


@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_a_new_head_is_not_held_to_the_old_ones_shadow(backfill: str) -> None:
    simulation = Simulation(4, backfill=backfill)
    simulation.submit(3, 10, 10)
    head = simulation.submit(4, 5, 5)
    urgent = simulation.submit(1, 50, 50, at=2, priority=1)
    simulation.run()
    assert simulation.start_of(urgent) == 2
    assert simulation.start_of(head) == 52


def test_plans_made_before_a_new_head_came_are_forgotten() -> None:
    simulation = Simulation(4, backfill="conservative")
    simulation.submit(3, 100, 100)
    simulation.submit(4, 5, 5)
    simulation.submit(1, 300, 300)
    simulation.submit(1, 400, 400, at=1, priority=1)
    small = simulation.submit(1, 20, 20, at=2)
    simulation.run()
    assert simulation.starts()[3] == 1
    assert simulation.start_of(small) == 100


def test_size_gives_priority() -> None:
    simulation = Simulation(4, scheduler=Settings(size_weight=1))
    simulation.submit(4, 10, 10)
    small = simulation.submit(1, 10, 10, at=1)
    large = simulation.submit(4, 10, 10, at=2)
    simulation.run()
    assert (simulation.start_of(large), simulation.start_of(small)) == (10, 20)


def test_a_link_submitted_after_the_other_has_ended_waits_for_nothing() -> None:
    simulation = Simulation(4)
    first = simulation.submit(4, 10, 10)
    second = simulation.submit(4, 10, 10, after=first, at=30)
    simulation.run()
    assert simulation.start_of(second) == 30


@pytest.mark.parametrize(("accrues", "chained_start"), [(False, 20), (True, 10)])
def test_age_of_a_dependent_job(accrues: bool, chained_start: int) -> None:
    scheduler = Settings(ages_while_dependent=accrues)
    simulation = Simulation(4, scheduler=scheduler)
    link = simulation.submit(4, 10, 10)
    chained = simulation.submit(4, 10, 10, after=link)
    simulation.submit(4, 10, 10, at=5)
    simulation.run()
    assert simulation.start_of(chained) == chained_start


def test_a_higher_tier_takes_the_nodes_of_the_youngest() -> None:
    for preemption, old_state in (("requeue", "done"), ("cancel", "preempted")):
        simulation = Simulation(4, scheduler=Settings(preemption=preemption, requeue_seconds=120))
        older = simulation.submit(2, 100, 100)
        younger = simulation.submit(2, 100, 100, at=1)
        urgent = simulation.submit(1, 10, 10, at=30, tier=1)
        simulation.run()
        assert simulation.start_of(urgent) == 30
        assert simulation.end_of(older) == 100
        assert simulation.state_of(younger) == old_state
        # Queued again 120 s later, and it begins anew.
        assert simulation.end_of(younger) == (250 if preemption == "requeue" else 30)


def test_an_equal_tier_takes_nothing() -> None:
    simulation = Simulation(4, scheduler=Settings(preemption="requeue"))
    simulation.submit(4, 100, 100, tier=1)
    second = simulation.submit(1, 10, 10, at=30, tier=1, priority=5)
    simulation.run()
    assert simulation.start_of(second) == 100


def test_limits_are_lowered_never_raised() -> None:
    simulation = Simulation(4)
    running = simulation.submit(4, 100, 100)
    waiting = simulation.submit(4, 50, 50)
    simulation.run(10)
    with pytest.raises(ClusterError, match="never raised"):
        simulation.shorten(running, 101)
    simulation.shorten(running, 20)
    simulation.shorten(waiting, 5)
    simulation.run()
    assert (simulation.end_of(running), simulation.state_of(running)) == (20, "limit")
    assert (simulation.start_of(waiting), simulation.end_of(waiting)) == (20, 25)


def test_a_limit_lowered_below_the_time_already_used_ends_the_job_now() -> None:
    simulation = Simulation(4)
    job = simulation.submit(4, 100, 100)
    simulation.run(10)
    simulation.shorten(job, 5)
    simulation.run()
    assert simulation.end_of(job) == 10


def test_cancelled_jobs_give_up_their_nodes_and_their_place() -> None:
    simulation = Simulation(4)
    running, head = simulation.submit(4, 100, 100), simulation.submit(4, 50, 50)
    last, future = simulation.submit(1, 5, 5), simulation.submit(1, 5, 5, at=30)
    simulation.run(10)
    for job in (running, head, future):
        simulation.cancel(job)
    simulation.run()
    assert simulation.start_of(last) == 10
    assert simulation.start_of(head) == simulation.start_of(future) == math.inf
    assert {simulation.state_of(job) for job in (running, head, future)} == {"cancelled"}
    simulation.cancel(last)
    assert simulation.state_of(last) == "done"


def test_a_job_of_the_workload_can_be_cancelled_before_it_comes() -> None:
    jobs = Workload([0, 50], [4, 4], [10, 10], [10, 10], machine_nodes=4)
    simulation = Simulation(4, workload=jobs)
    simulation.run(20)
    simulation.cancel(1)
    simulation.run(100)
    assert simulation.state_of(1) == "cancelled"
    assert simulation.start_of(1) == math.inf


def test_backfill_waits_for_its_interval_and_the_head_does_not() -> None:
    simulation = Simulation(4, scheduler=Settings(backfill_interval_seconds=30))
    simulation.submit(3, 100, 100)
    head = simulation.submit(4, 10, 10, at=1)
    small = simulation.submit(1, 10, 10, at=2)
    simulation.run()
    # Passes at 0 and, since something changed, at 30.
    assert simulation.start_of(small) == 30
    assert simulation.start_of(head) == 100


def test_an_arrival_long_after_the_last_pass_is_looked_at_at_once() -> None:
    simulation = Simulation(4, scheduler=Settings(backfill_interval_seconds=30))
    simulation.submit(3, 1000, 1000)
    simulation.submit(4, 10, 10, at=1)
    small = simulation.submit(1, 10, 10, at=100)
    smaller = simulation.submit(1, 5, 5, at=112)
    simulation.run()
    assert (simulation.start_of(small), simulation.start_of(smaller)) == (100, 130)


@pytest.mark.parametrize("named", [False, True])
def test_the_time_of_a_batch_doubles(named: bool) -> None:
    """Ends at 60, 100 and 155: the first batch ends at 90, the second takes 100 and 155."""
    scheduler = Settings(end_window_seconds=30, named_nodes=named)
    simulation = Simulation(4, backfill="conservative", scheduler=scheduler)
    for limit in (60, 100, 155):
        simulation.submit(1, limit, limit)
    simulation.submit(3, 50, 50)  # planned at 155, though three nodes are free at 100
    late = simulation.submit(1, 154, 154)
    simulation.run(0)
    assert simulation.state_of(late) == "running"


def test_ends_of_running_jobs_count_in_batches() -> None:
    """Slurm takes ends within 30 s for one, so job 3 may delay the head from 5 to 20."""
    for window, start in ((0.0, 20.0), (30.0, 0.0)):
        scheduler = Settings(end_window_seconds=window)
        simulation = Simulation(4, backfill="conservative", scheduler=scheduler)
        simulation.submit(2, 5, 5)
        simulation.submit(1, 20, 20)
        head = simulation.submit(3, 35, 35)
        late = simulation.submit(1, 20, 20)
        simulation.run()
        assert simulation.start_of(late) == start
        assert simulation.start_of(head) == (5.0 if window == 0 else 20.0)


def test_nodes_are_cleaned_up_before_the_next_job() -> None:
    simulation = Simulation(4, scheduler=Settings(completing_seconds=2))
    simulation.submit(4, 10, 10)
    second = simulation.submit(4, 10, 10)
    simulation.run()
    assert simulation.start_of(second) == 12
    assert simulation.end_of(second) == 22


def test_a_job_that_comes_while_nodes_are_cleaned_up_does_not_delay_the_head() -> None:
    simulation = Simulation(4, scheduler=Settings(completing_seconds=2))
    simulation.submit(3, 100, 10)
    head = simulation.submit(4, 10, 10, at=1)
    late = simulation.submit(1, 50, 50, at=11)
    simulation.run()
    assert simulation.start_of(head) == 12
    assert simulation.start_of(late) == 24


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Simulation(0), "nodes = 0"),
        (lambda: Simulation(4).submit(5, 1, 1), "nodes = 5 must lie in 1 to 4"),
        (lambda: Simulation(4).submit(1, 0, 1), "limit_seconds = 0"),
        (lambda: Simulation(4).submit(1, 1, 1, after=0), "after = 0"),
        (lambda: Simulation(4, backfill="none"), "backfill = 'none'"),
        (lambda: Settings(age_seconds=0), "age_seconds = 0"),
        (lambda: Settings(backfill_interval_seconds=-1), "backfill_interval_seconds = -1"),
    ],
)
def test_wrong_inputs_are_named(call: object, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        call()  # type: ignore[operator]
