"""Simulated coverage: the vectorised course is that of its rules, and never a slower one."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late_workers import (
    Additive,
    ChunkCosts,
    Combined,
    FailStop,
    Fixed,
    LoadIndependent,
    Pareto,
    Trace,
)

from outlast.coding.assignment import Spread, spread
from outlast.coding.delays import DelayModel, Delays, Markov, ShiftedExponential, Slow, sample
from outlast.coding.simulate import cover, fluid, wait_all
from outlast.errors import CodingError

TABLE = np.random.default_rng(3).pareto(2.0, (11, 20)) + 0.5
MODELS: list[DelayModel] = [
    ShiftedExponential(0.5),
    Pareto(1.5),
    Slow(0.2, 10.0),
    Markov(0.2, 0.9, 4.0),
    Additive(0.5),
    Trace(TABLE),
    Trace(TABLE, proportional=True),
    FailStop(0.3),
    ChunkCosts(0.5),
    Fixed((1.0,) * 20),
    Combined((Slow(0.1, 3.0), Additive(0.3), ChunkCosts(0.2), FailStop(0.05))),
    LoadIndependent(Pareto(1.5), 0.5),
]


@dataclass
class Rank:
    """One rank of the reference: what it does, since when, and until when."""

    at: float
    chunk: int | None = None
    begun: float = 0.0
    waiting: bool = False


@dataclass
class Course:
    """Coverage by its rules, one event after the other, in plain Python."""

    held: Spread
    pace: list[float]
    cost: list[float]
    patience: float
    granularity: float
    ranks: list[Rank]
    done: set[int] = field(default_factory=set)
    starts: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    helped: int = 0
    duplicates: int = 0

    def run(self, deadline: float) -> float:
        while len(self.done) < self.held.chunks:
            rank = min(range(len(self.ranks)), key=lambda each: self.ranks[each].at)
            now = self.ranks[rank].at
            if now > deadline or now == math.inf:
                return deadline
            self.step(rank, now)
            if len(self.done) == self.held.chunks:
                return now
            self.choose(rank, now)
        raise AssertionError

    def step(self, rank: int, now: float) -> None:
        chunk = self.ranks[rank].chunk
        if chunk is None or chunk in self.done:
            return
        self.done.add(chunk)
        self.finished[rank] = self.finished.get(rank, 0) + 1
        self.helped += self.held.owner(chunk) != rank
        for other, each in enumerate(self.ranks):
            if each.chunk == chunk and other != rank and each.at < math.inf:
                part = self.granularity * self.seconds(other, chunk)
                parts = math.ceil((now - each.begun) / part) if part else 0
                each.at = min(each.begun + parts * part, each.at) if part else now

    def choose(self, rank: int, now: float) -> None:
        me = self.ranks[rank]
        chunk = next((own for own in self.held.own(rank) if own not in self.done), None)
        if chunk is None:
            open_ones = [int(e) for e in self.held.backups(rank) if int(e) not in self.done]
            chunk = min(open_ones, key=self.wanted, default=None)
            if chunk is not None and self.starts.get(chunk, 0) and not me.waiting:
                me.chunk, me.waiting = None, True
                me.at = now + self.patience * self.pace[rank]
                return
        me.chunk, me.waiting, me.begun = chunk, False, now
        me.at = math.inf
        if chunk is not None:
            me.at = now + self.seconds(rank, chunk)
            self.duplicates += self.starts.get(chunk, 0) > 0
            self.starts[chunk] = self.starts.get(chunk, 0) + 1

    def wanted(self, chunk: int) -> tuple[int, int]:
        owner = self.held.owner(chunk)
        return self.starts.get(chunk, 0), len(self.done & set(self.held.own(owner)))

    def seconds(self, rank: int, chunk: int) -> float:
        return self.pace[rank] * self.cost[self.held.owner(chunk)]


def reference(
    held: Spread, delays: Delays, row: int, *, patience: float, granularity: float, deadline: float
) -> tuple[float, Course]:
    start, slowdown, cost = (each[row].tolist() for each in delays.flat())
    ranks = [Rank(each) for each in start]
    course = Course(held, slowdown, cost, patience, granularity, ranks)
    return course.run(deadline), course


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([math.inf, 3.0]),
    st.integers(0, 10_000),
)
def test_the_vectorised_course_is_that_of_the_rules(
    workers: int,
    chunks: int,
    copies: int,
    patience: float,
    granularity: float,
    deadline: float,
    seed: int,
) -> None:
    # Continuous delays, so that no two events fall together.
    model = Combined((Pareto(1.0), Additive(0.7), ChunkCosts(0.5), FailStop(0.1)))
    delays = sample(model, 4, workers, seed=seed)
    held = spread(workers, chunks, min(copies, workers), seed=seed)
    covered = cover(
        held, delays, 1.0, patience=patience, granularity=granularity, deadline_seconds=deadline
    )
    for row in range(4):
        seconds, course = reference(
            held, delays, row, patience=patience, granularity=granularity, deadline=deadline
        )
        assert covered.seconds[row] == pytest.approx(seconds)
        assert covered.uncovered[row] == held.chunks - len(course.done)
        assert covered.helped[row] == course.helped
        own = [course.finished.get(rank, 0) for rank in range(workers)]
        assert covered.finished[row].tolist() == own
        if deadline == math.inf:
            assert covered.duplicates[row] == course.duplicates


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 10_000),
)
def test_coverage_is_never_slower_than_waiting_for_all(
    model: DelayModel, chunks: int, copies: int, patience: float, granularity: float, seed: int
) -> None:
    delays = sample(model, 20, 20, seed=seed)
    held = spread(20, chunks, copies, seed=seed)
    covered = cover(held, delays, 1.0 / chunks, patience=patience, granularity=granularity)
    waited = wait_all(delays, 1.0).seconds.ravel()
    assert np.all(covered.seconds <= waited * (1.0 + 1e-9))
    assert np.all(covered.seconds >= fluid(delays, 1.0).seconds.ravel() * (1.0 - 1e-9))


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 12), st.integers(1, 4), st.integers(1, 3), st.integers(0, 10_000))
def test_chunks_are_lost_only_if_all_their_holders_are_dead(
    workers: int, chunks: int, copies: int, seed: int
) -> None:
    held = spread(workers, chunks, min(copies, workers), seed=seed)
    delays = sample(Combined((FailStop(0.4), Pareto(2.0))), 10, workers, seed=seed)
    covered = cover(held, delays, 1.0)
    dead = np.isinf(delays.flat()[0])
    lost = dead[:, held.holder_table].all(axis=2).sum(axis=1)
    assert covered.uncovered.tolist() == lost.tolist()
    assert np.array_equal(np.isinf(covered.seconds), lost > 0)
    assert np.all(np.isfinite(covered.last_seconds))
    assert np.all(covered.finished[dead] == 0)


def test_a_step_in_which_nobody_is_slow_is_as_long_as_without_coverage() -> None:
    covered = cover(spread(16, 8, 3), sample(Fixed((1.0,) * 16), 3, 16), 0.125)
    assert covered.seconds == pytest.approx(1.0)
    assert np.all(covered.helped == 0)
    assert np.all(covered.duplicates == 0)
    assert np.all(covered.finished == 8)


def test_one_copy_is_training_without_coverage() -> None:
    delays = sample(Pareto(2.0), 50, 10, seed=2)
    covered = cover(spread(10, 4, 1), delays, 0.25)
    assert covered.seconds == pytest.approx(wait_all(delays, 1.0).seconds.ravel())


def test_two_ranks_share_the_work_of_a_slow_one_by_hand() -> None:
    # Rank 1 takes 10 s per chunk: rank 0 finishes its two at 2 s, then rank 1's last at 3 s, waits
    # one chunk's time for the other, and has it at 5 s.
    held = spread(2, 2, 2)
    covered = cover(held, sample(Fixed((1.0, 10.0)), 1, 2), 1.0, patience=1.0)
    assert covered.seconds[0] == pytest.approx(5.0)
    assert covered.finished[0].tolist() == [4, 0]
    assert covered.helped[0] == 2
    assert covered.duplicates[0] == 1
    assert covered.shares[0].tolist() == [1.0, 0.0]
    hurried = cover(held, sample(Fixed((1.0, 10.0)), 1, 2), 1.0, patience=0.0)
    assert hurried.seconds[0] == pytest.approx(4.0)


def test_ranks_that_notice_late_that_a_chunk_is_finished_make_steps_longer() -> None:
    delays = sample(Pareto(1.5), 300, 16, seed=5)
    held = spread(16, 4, 3)
    at_once, midway, at_end = (
        cover(held, delays, 0.25, patience=0.0, granularity=part).seconds.mean()
        for part in (0.0, 0.5, 1.0)
    )
    assert at_once < midway < at_end


def test_a_deadline_ends_the_step_and_counts_what_is_lost() -> None:
    delays = sample(Pareto(1.5), 100, 12, seed=4)
    held = spread(12, 4, 2)
    free = cover(held, delays, 0.25)
    limited = cover(held, delays, 0.25, deadline_seconds=1.5)
    assert limited.seconds == pytest.approx(np.minimum(free.seconds, 1.5))
    assert np.array_equal(limited.uncovered > 0, free.seconds > 1.5)
    assert np.all(limited.finished.sum(axis=1) + limited.uncovered == held.chunks)
    tight = cover(held, delays, 0.25, deadline_seconds=0.1)
    assert np.all(tight.uncovered == held.chunks)


@pytest.mark.parametrize(
    ("model", "chunks", "copies", "note"),
    [
        (Slow(0.01, 10.0), 1, 2, 2.02),
        (Slow(0.01, 10.0), 4, 2, 1.30),
        (Slow(0.01, 10.0), 8, 2, 1.19),
        (Slow(0.01, 10.0), 8, 3, 1.16),
        (Slow(0.05, 10.0), 8, 2, 2.60),
        (Slow(0.05, 10.0), 8, 3, 1.28),
        (Pareto(2.0), 1, 2, 6.36),
        (Pareto(2.0), 4, 2, 4.66),
        (Pareto(2.0), 8, 2, 3.58),
        (Pareto(2.0), 8, 3, 2.49),
    ],
)
def test_median_steps_are_at_least_as_short_as_the_published_prototypes(
    model: DelayModel, chunks: int, copies: int, note: float
) -> None:
    delays = sample(model, 60, 240, seed=1)
    covered = cover(spread(240, chunks, copies), delays, 1.0 / chunks, patience=0.0)
    assert 0.75 * note <= np.median(covered.seconds) <= 1.03 * note


def test_the_bar_holds_with_the_default_patience_and_few_duplicates() -> None:
    delays = sample(Slow(0.05, 10.0), 60, 240, seed=1)
    covered = cover(spread(240, 8, 3), delays, 0.125)
    assert np.median(covered.seconds) <= 1.28
    assert covered.duplicates.mean() < 0.04 * 240 * 8
    hurried = cover(spread(240, 8, 3), delays, 0.125, patience=0.0)
    assert hurried.duplicates.mean() > 2 * covered.duplicates.mean()


def test_many_draws_are_the_same_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = sample(Pareto(1.5), 30, 6, steps=2, seed=9)
    held = spread(6, 3, 2)
    whole = cover(held, delays, 1.0)
    monkeypatch.setattr("outlast.coding.simulate._ENTRIES", 7 * held.chunks)
    parts = cover(held, delays, 1.0)
    assert np.array_equal(whole.seconds, parts.seconds)
    assert np.array_equal(whole.finished, parts.finished)
    assert np.array_equal(whole.duplicates, parts.duplicates)


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"chunk_seconds": 0.0}, "chunk_seconds = 0.0"),
        ({"patience": -1.0}, "patience = -1.0"),
        ({"granularity": 2.0}, "2.0"),
    ],
)
def test_impossible_settings_are_refused(settings_: dict[str, float], named: str) -> None:
    given_ = {"chunk_seconds": 1.0, **settings_}
    with pytest.raises(CodingError, match=named):
        cover(spread(4, 2, 2), sample(Slow(0.1, 2.0), 1, 4), **given_)  # type: ignore[arg-type]


def test_delays_of_other_workers_are_refused() -> None:
    with pytest.raises(CodingError, match="delays of 5 workers, but 4 hold"):
        cover(spread(4, 2, 2), sample(Slow(0.1, 2.0), 1, 5), 1.0)
