"""Laws of whole runs on the simulator: nothing is lost, nothing is counted twice, nobody waits."""

import itertools
import math
from dataclasses import dataclass, field

import pytest
from cluster_policy_queues import HOUR, job
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.cluster.policies.automatic import AnchorFiller, Automatic, Planned
from outlast.cluster.policies.decision import Decision, FixedLinks, Limits, OneLongJob
from outlast.cluster.policies.forecast import Outlook
from outlast.cluster.policies.replay import moments, play, replay, submission_times
from outlast.cluster.scheduler import Settings
from outlast.cluster.simulate import Simulation
from outlast.cluster.workload import lublin

POLICIES = {
    "long": lambda kind: OneLongJob(),
    "links": lambda kind: FixedLinks(4 * HOUR),
    "filler": lambda kind: AnchorFiller(backfill=kind),
    "selfish": lambda kind: AnchorFiller(polite=False, backfill=kind),
    "mistaken": lambda kind: AnchorFiller(backfill="easy"),
    "planned": lambda kind: Planned(outlook=Outlook(samples=2, backfill=kind)),
    "automatic": lambda kind: Automatic(
        outlook=Outlook(samples=2), fillers=AnchorFiller(backfill=kind)
    ),
}


@dataclass
class Watched:
    """A policy whose decisions are kept."""

    policy: object
    decisions: list[Decision] = field(default_factory=list)

    @property
    def name(self):
        return self.policy.name

    @property
    def watches(self):
        return self.policy.watches

    def decide(self, situation):
        found = self.policy.decide(situation)
        lowered = {each.number: each.limit_seconds for each in situation.own}
        assert all(limit < lowered[number] for number, limit in found.shorten)
        self.decisions.append(found)
        return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_all_work_is_done_once_and_the_books_agree(name, backfill):
    log = lublin(400, 32, load=0.9, seed=21)
    limits = Limits(max_wall_seconds=24 * HOUR, max_nodes=16)
    work = job(hours=30.0, nodes=8, sizes=(2, 4, 8, 16), reshard_seconds=60.0)
    for simulation in moments(log, submission_times(log, 2, 5), backfill=backfill):
        watched = Watched(POLICIES[name](backfill))
        run = play(simulation, watched, work, limits)
        assert run.job.work_seconds == pytest.approx(0.0, abs=1e-3)
        done = [link for link in run.links if math.isfinite(link.started_seconds)]
        assert sum(link.progress_seconds for link in done) == pytest.approx(30 * HOUR)
        assert run.useful_node_seconds <= run.node_seconds
        held = sum(link.nodes * (link.ended_seconds - link.started_seconds) for link in done)
        assert run.node_seconds == pytest.approx(held)
        for link in done:
            assert link.nodes <= 16
            assert link.ended_seconds - link.started_seconds <= link.limit_seconds + 1e-6
        for wanted in (each for decision in watched.decisions for each in decision.submit):
            assert wanted.wall_seconds <= 24 * HOUR
        # Two links never train at once.
        spans = sorted((link.first_step_seconds, link.training_until()) for link in done)
        for (_, before), (after, _) in itertools.pairwise(spans):
            assert after >= before - 1e-6


def test_one_long_job_by_hand():
    simulation = Simulation(10)
    simulation.submit(8, 4 * HOUR, 3 * HOUR)
    run = play(simulation, OneLongJob(), job())
    assert run.turnaround_seconds == pytest.approx(3 * HOUR + 20 * HOUR + 360.0)
    assert run.node_seconds == pytest.approx(4 * (20 * HOUR + 360.0))


def test_anchor_and_filler_by_hand():
    # Eight of ten nodes are busy for 6 h, for which they asked. Two train meanwhile, and the long
    # job takes over when they have saved: 6 h - 300 s of training at 2^-0.9, 60 s, 300 s.
    simulation = Simulation(10)
    simulation.submit(8, 6 * HOUR, 6 * HOUR)
    run = play(simulation, AnchorFiller(), job())
    filled = (6 * HOUR - 300.0) * 0.5**0.9
    main, filler = run.links
    assert filler.progress_seconds == pytest.approx(filled)
    assert main.started_seconds == 6 * HOUR
    assert run.turnaround_seconds == pytest.approx(6 * HOUR + 60 + 300 + 20 * HOUR - filled + 60)
    assert run.node_seconds == pytest.approx(
        2 * (6 * HOUR + 60) + 4 * (run.turnaround_seconds - 6 * HOUR)
    )


@pytest.mark.parametrize("name", ["long", "filler", "automatic"])
def test_lost_nodes_cost_a_checkpoint_period_and_no_work(name):
    settings_of_site = Settings(node_failures_per_second=1 / (400 * HOUR), repair_seconds=HOUR)
    simulation = Simulation(16, scheduler=settings_of_site, seed=3)
    work = job(hours=100.0, nodes=8, sizes=(2, 4, 8))
    run = play(simulation, POLICIES[name]("easy"), work)
    done = [link for link in run.links if math.isfinite(link.started_seconds)]
    assert len(done) > 1
    assert sum(link.progress_seconds for link in done) == pytest.approx(100 * HOUR)
    for link in done[:-1]:
        # Restart, the lost part of a period, and nothing else.
        trained = link.progress_seconds / link.rate
        assert link.ended_seconds - link.started_seconds - trained <= 300 + 1800 + 60 + 1


others = st.lists(
    st.tuples(st.integers(1, 5), st.floats(0.5, 40.0), st.floats(0.1, 1.0)), min_size=2, max_size=6
)


@settings(deadline=None, max_examples=60)
@given(others)
def test_a_filler_delays_its_anchor_by_no_more_than_its_save(jobs):
    """Where all others run already, whatever they use of what they asked for."""

    def start(policy):
        simulation = Simulation(10)
        for nodes, hours, used in jobs:
            if nodes <= simulation.free_nodes:
                simulation.submit(nodes, hours * HOUR, hours * used * HOUR)
                simulation.run(until=0.0)
        run = play(simulation, policy, job(hours=20.0, nodes=8, sizes=(2, 4, 8)))
        main = next(link for link in run.links if link.role == "main")
        # The filler may have done it all before.
        return min(main.started_seconds, run.finished_seconds)

    assert start(AnchorFiller()) <= start(OneLongJob()) + 60.0 + 1e-6


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 1000))
def test_the_same_seed_gives_the_same_run(seed):
    log = lublin(200, 32, load=0.9, seed=seed)
    rows = [
        replay(log, [OneLongJob(), AnchorFiller()], job(nodes=8, sizes=(2, 8)), Limits(), runs=2)
        for _ in range(2)
    ]
    assert rows[0] == rows[1]
    assert rows[0][0].ratio == rows[0][0].worst == rows[0][0].node_ratio == 1.0
