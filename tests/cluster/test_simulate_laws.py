"""What holds for every schedule."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.cluster.scheduler import SLURM, SchedulerState, Settings
from outlast.cluster.simulate import Simulation, forecast_start
from outlast.cluster.workload import Workload
from outlast.errors import ClusterError

NODES = 8
KINDS = st.sampled_from(["easy", "conservative"])
SETTINGS = st.sampled_from(
    [
        Settings(),
        Settings(backfill_interval_seconds=7, backfill_resolution_seconds=5),
        Settings(completing_seconds=3, end_window_seconds=10),
        Settings(age_weight=10, age_seconds=20, size_weight=5, priority_seconds=3),
        Settings(named_nodes=True, backfill_resolution_seconds=1, end_window_seconds=30),
        Settings(preemption="requeue", requeue_seconds=11),
        Settings(backfill_jobs=3),
        Settings(backfill_window_seconds=50),
        replace(SLURM, backfill_jobs=3),
    ]
)


@st.composite
def workloads(draw: st.DrawFn, *, full_limits: bool = False) -> Workload:
    count = draw(st.integers(1, 25))
    whole = st.integers(1, 60)
    limits = draw(st.lists(whole, min_size=count, max_size=count))
    runs = draw(st.lists(st.integers(0, 80), min_size=count, max_size=count))
    return Workload(
        draw(st.lists(st.integers(0, 60), min_size=count, max_size=count)),
        draw(st.lists(st.integers(1, NODES), min_size=count, max_size=count)),
        limits,
        limits if full_limits else runs,
        machine_nodes=NODES,
        tier=draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)),
        priority=draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)),
    )


def without_tiers(jobs: Workload) -> Workload:
    return replace(jobs, tier=None, priority=None)


def ran(jobs: Workload, kind: str, scheduler: Settings = Settings()) -> Simulation:  # noqa: B008
    simulation = Simulation(NODES, backfill=kind, scheduler=scheduler, workload=jobs)
    simulation.run()
    return simulation


class Watcher:
    """A driver that notes what it is told and acts on nothing."""

    wants_ticks = True

    def __init__(self) -> None:
        self.held = 0
        self.most = 0
        self.told: list[tuple[float, str, int]] = []
        self.shadows: list[tuple[float, int, float]] = []

    def started(self, simulation: Simulation, job: int) -> None:
        self.held += simulation._state.need[job]
        self.most = max(self.most, self.held)
        self.told.append((simulation.now, "started", job))

    def ended(self, simulation: Simulation, job: int, reason: str) -> None:
        self.held -= simulation._state.need[job]
        self.told.append((simulation.now, reason, job))

    def tick(self, simulation: Simulation) -> None:
        queue = simulation.snapshot()
        if len(queue.pending_jobs):
            self.shadows.append(
                (simulation.now, int(queue.pending_jobs[0]), simulation.shadow()[0])
            )


@given(workloads(), KINDS, SETTINGS)
@settings(max_examples=150)
def test_every_job_runs_once_within_its_limit_on_nodes_that_exist(
    jobs: Workload, kind: str, scheduler: Settings
) -> None:
    watcher = Watcher()
    simulation = Simulation(NODES, backfill=kind, scheduler=scheduler, workload=jobs)
    simulation.run(driver=watcher)
    starts, ends = simulation.starts(), simulation.ends()
    assert np.all(starts >= jobs.submit_seconds)
    assert ends - starts == pytest.approx(np.minimum(jobs.run_seconds, jobs.limit_seconds))
    times = np.concatenate((starts, ends))
    used = np.concatenate((jobs.nodes, -jobs.nodes))
    assert np.cumsum(used[np.lexsort((used, times))]).max() <= NODES
    simulation.run(until=simulation.now + 10)
    assert simulation.free_nodes == NODES
    assert watcher.held == 0
    ended = [event for event in watcher.told if event[1] in ("done", "limit")]
    assert sorted(job for _, _, job in ended) == list(range(len(jobs)))


@given(workloads(), KINDS, SETTINGS)
@settings(max_examples=50)
def test_the_same_workload_gives_the_same_schedule(
    jobs: Workload, kind: str, scheduler: Settings
) -> None:
    watched, again = Simulation(NODES, backfill=kind, scheduler=scheduler, workload=jobs), None
    watched.run(driver=Watcher())
    again = ran(jobs, kind, scheduler)
    assert watched.starts().tolist() == again.starts().tolist()


@given(workloads(), KINDS, SETTINGS)
@settings(max_examples=150)
def test_looking_only_at_what_changed_changes_nothing(
    jobs: Workload, kind: str, scheduler: Settings
) -> None:
    simulation = Simulation(NODES, backfill=kind, scheduler=scheduler, workload=jobs)
    planner = simulation._scheduler._planner
    look = planner.starts

    def look_at_all(state: SchedulerState, arrived: list[int]) -> list[int]:
        planner.disturb()
        return look(state, arrived)

    planner.starts = look_at_all  # type: ignore[method-assign]
    simulation.run()
    assert simulation.starts().tolist() == ran(jobs, kind, scheduler).starts().tolist()


@given(workloads(), KINDS)
@settings(max_examples=60)
def test_the_unit_of_time_and_its_origin_do_not_matter(jobs: Workload, kind: str) -> None:
    jobs = without_tiers(jobs)
    other = replace(
        jobs,
        submit_seconds=1024 + 8 * jobs.submit_seconds,
        limit_seconds=8 * jobs.limit_seconds,
        run_seconds=8 * jobs.run_seconds,
    )
    assert ran(other, kind).starts().tolist() == (1024 + 8 * ran(jobs, kind).starts()).tolist()


@given(workloads(), KINDS)
@settings(max_examples=150)
def test_the_time_promised_to_the_head_is_kept(jobs: Workload, kind: str) -> None:
    watcher = Watcher()
    simulation = Simulation(NODES, backfill=kind, workload=without_tiers(jobs))
    simulation.run(driver=watcher)
    assert all(simulation.start_of(job) <= shadow for _, job, shadow in watcher.shadows)


class Promises(Watcher):
    """Notes the start that conservative backfill promises each job when it comes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.promised: dict[int, float] = {}

    def tick(self, simulation: Simulation) -> None:
        queue = simulation.snapshot()
        for place, job in enumerate(queue.pending_jobs.tolist()):
            if job not in self.promised:
                before = replace(
                    queue,
                    pending_nodes=queue.pending_nodes[:place],
                    pending_limit_seconds=queue.pending_limit_seconds[:place],
                )
                nodes, limit = queue.pending_nodes[place], queue.pending_limit_seconds[place]
                self.promised[job] = forecast_start(
                    before, int(nodes), float(limit), backfill=self.kind
                )


@given(workloads(full_limits=True))
@settings(max_examples=60)
def test_conservative_keeps_every_promise(jobs: Workload) -> None:
    """With full limits; after early ends each pass plans anew, as Slurm's does."""
    promises = Promises("conservative")
    simulation = Simulation(NODES, backfill="conservative", workload=without_tiers(jobs))
    simulation.run(driver=promises)
    for job, promise in promises.promised.items():
        assert simulation.start_of(job) == promise


@given(workloads(full_limits=True), KINDS, st.integers(0, 60), st.integers(1, NODES))
@settings(max_examples=60)
def test_forecast_is_what_happens_without_arrivals(
    jobs: Workload, kind: str, moment: int, nodes: int
) -> None:
    jobs = without_tiers(jobs).chosen(jobs.submit_seconds <= moment)
    if not len(jobs):
        return
    simulation = Simulation(NODES, backfill=kind, workload=jobs)
    simulation.run(until=moment)
    queue = simulation.snapshot()
    limits = [5.0, 20.0, 200.0]
    found = [forecast_start(queue, nodes, limit, backfill=kind) for limit in limits]
    window = simulation.window_seconds(nodes)
    for limit, forecast in zip(limits, found, strict=True):
        assert (forecast == moment) == (limit <= window)
    job = simulation.submit(nodes, limits[1], limits[1])
    simulation.run()
    assert simulation.start_of(job) == found[1]


def test_forecast_of_a_full_machine() -> None:
    simulation = Simulation(4)
    simulation.submit(4, 100, 100)
    simulation.submit(4, 50, 50, priority=1, at=5)
    simulation.run(10)
    queue = simulation.snapshot()
    assert (queue.free_nodes, queue.now_seconds) == (0, 10)
    assert forecast_start(queue, 4, 30) == 150
    with pytest.raises(ClusterError, match="nodes = 5 is more than the 4"):
        forecast_start(queue, 5, 30)


@given(workloads(), KINDS, st.integers(0, 5))
@settings(max_examples=30)
def test_failing_nodes_come_back_and_every_job_ends(jobs: Workload, kind: str, seed: int) -> None:
    scheduler = Settings(
        node_failures_per_second=2e-3, repair_seconds=20, requeue_seconds=5, completing_seconds=1
    )
    jobs = without_tiers(jobs)
    results = []
    for _ in range(2):
        simulation = Simulation(NODES, backfill=kind, scheduler=scheduler, workload=jobs, seed=seed)
        watcher = Watcher()
        simulation.run(driver=watcher)
        assert watcher.most <= NODES
        assert all(simulation.state_of(job) in ("done", "limit") for job in range(len(jobs)))
        results.append(simulation.ends().tolist())
    assert results[0] == results[1]


def test_a_failed_node_ends_its_job_or_queues_it_again() -> None:
    def states(after: str) -> tuple[set[str], float]:
        scheduler = Settings(
            node_failures_per_second=1 / 400, repair_seconds=10, after_failure=after
        )
        simulation = Simulation(4, scheduler=scheduler, seed=3)
        jobs = [simulation.submit(4, 100, 100) for _ in range(20)]
        simulation.run()
        return {simulation.state_of(job) for job in jobs}, simulation.ends().max()

    ended, sooner = states("fail")
    again, later = states("requeue")
    assert ended == {"done", "failed"}
    assert again == {"done"}
    assert later > sooner


class Chain:
    """A driver that submits the next link when one ends, and cancels what is left at 100 s."""

    wants_ticks = False

    def __init__(self) -> None:
        self.links: list[int] = []
        self.reasons: list[str] = []

    def started(self, simulation: Simulation, job: int) -> None:
        self.links.append(job)

    def ended(self, simulation: Simulation, job: int, reason: str) -> None:
        self.reasons.append(reason)
        if simulation.now < 30:
            simulation.submit(2, 10, math.inf)
            return
        for each in range(job + 1):
            simulation.cancel(each)


def test_a_driver_chains_links() -> None:
    simulation, chain = Simulation(4), Chain()
    simulation.submit(2, 10, math.inf)
    simulation.run(driver=chain)
    assert [simulation.start_of(job) for job in chain.links] == [0, 10, 20]
    assert chain.reasons == ["limit"] * 3
    assert simulation.now == 30


def test_a_jobs_work_can_be_set_while_it_runs() -> None:
    simulation = Simulation(4)
    job = simulation.submit(4, 100, 100)
    simulation.run(10)
    simulation.set_run_seconds(job, 40)
    simulation.run(20)
    simulation.set_run_seconds(job, 60)
    simulation.run()
    assert (simulation.end_of(job), simulation.state_of(job)) == (60, "done")


def test_ten_thousand_jobs_take_no_second() -> None:
    from time import process_time

    from outlast.cluster.workload import lublin

    jobs = lublin(10_000, 10_000, load=0.85, seed=1)
    begun = process_time()
    simulation = Simulation(10_000, workload=jobs)
    simulation.run()
    assert process_time() - begun < 2.0
    assert np.all(np.isfinite(simulation.ends()))


def test_names_of_nodes_change_waits_by_little() -> None:
    """The cheap count of nodes stands for Slurm's named ones where only means are wanted."""
    from outlast.cluster.workload import lublin

    jobs = lublin(600, 64, load=0.9, seed=1)
    counted, named = (
        Simulation(
            64, backfill="conservative", scheduler=replace(SLURM, named_nodes=named), workload=jobs
        )
        for named in (False, True)
    )
    counted.run()
    named.run()
    waits = [float(np.mean(each.starts() - jobs.submit_seconds)) for each in (counted, named)]
    assert waits[0] == pytest.approx(waits[1], rel=0.15)
    assert counted.starts().tolist() != named.starts().tolist()
