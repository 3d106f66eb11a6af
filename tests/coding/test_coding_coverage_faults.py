import time

import numpy as np
import pytest
import torch.distributed as dist
from coverage_ranks import KILLED, Plan, Step, die, distance, mortal, pause, store_process, train

from outlast.coding.assignment import spread
from outlast.coding.protocol.key_value_store import StoreLostError
from outlast.errors import CodingError, LeftBehindError, LostChunksError

ROUNDING = 1e-6
STILL_SECONDS = 3.0
SOON = {"timeout_seconds": 20.0, "grace_seconds": 0.5}

pytestmark = pytest.mark.distributed


def run(ranks, size, plan):
    with store_process() as store:
        return ranks(size)(mortal, train, store.port, plan)


def check_equal_and_exact(outcomes):
    for steps in zip(*outcomes, strict=True):
        for step in steps:
            assert isinstance(step, Step), step
            assert step.error < ROUNDING
            assert step.outcome.certificate.exact
            assert np.array_equal(step.gradient, steps[0].gradient)
            assert np.array_equal(step.parameters, steps[0].parameters)


def at_sum(rank, number, act):
    """Call `act` with the real sum, in place of one rank's `number`-th sum."""

    def prepare(coverage):
        members = coverage.members
        if members.rank != rank:
            return
        real, counted = members.sum_, []

        def sum_(tensors, broken=None):
            counted.append(len(tensors))
            if len(counted) == number:
                act(lambda: real(tensors, broken))
            else:
                real(tensors, broken)

        members.sum_ = sum_

    return prepare


def at_chunk(rank, step, act, *, number=0):
    """Call `act` in one rank's `number`-th pass from one step on.

    A step in which others do all its chunks, because it comes late, has no pass of its.
    """
    begun = []

    def during(coverage, at_step, chunk):
        if coverage.members.rank == rank and at_step >= step:
            begun.append(chunk)
            if len(begun) == number + 1:
                act()

    return during


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed_while_computing_leaves_the_others_with_exact_gradients(
    ranks, number
):
    plan = Plan(
        {"chunks_per_rank": 3, **SOON},
        steps=6,
        seconds=lambda rank: 0.01,
        during=at_chunk(2, 1, die, number=number),
    )
    outcomes = run(ranks, 4, plan)
    assert outcomes.pop(2) == KILLED
    check_equal_and_exact(outcomes)
    for steps in outcomes:
        assert steps[0].outcome.ranks == (0, 1, 2, 3)
        assert steps[-1].outcome.ranks == (0, 1, 3)


def test_chunks_of_a_rank_that_is_killed_after_its_claims_are_computed_again(ranks):
    plan = Plan(
        {"chunks_per_rank": 3, **SOON},
        steps=4,
        seconds=lambda rank: 0.01,
        prepare=at_sum(2, 2, lambda real: die()),
    )
    outcomes = run(ranks, 4, plan)
    assert outcomes.pop(2) == KILLED
    check_equal_and_exact(outcomes)
    again = [chunk for steps in outcomes for chunk in steps[1].began if chunk // 3 == 2]
    assert {6, 7, 8} & set(again)
    for steps in outcomes:
        assert [step.outcome.ranks for step in steps] == [(0, 1, 2, 3)] + 3 * [(0, 1, 3)]
        # Later steps know of the loss and do not wait for the dead.
        assert max(step.outcome.seconds for step in steps[2:]) < SOON["grace_seconds"]


def with_a_group_of(*ranks):
    """Some ranks have a process group of their own, as hybrid layouts have."""

    def prepare(coverage):
        if coverage.members.rank in ranks:
            dist.new_group(list(ranks), use_local_synchronization=True)

    return prepare


def test_survivors_that_have_made_other_groups_before_meet_all_the_same(ranks):
    plan = Plan(
        {"chunks_per_rank": 2, **SOON},
        steps=3,
        seconds=lambda rank: 0.01,
        prepare=with_a_group_of(0, 2),
        during=at_chunk(2, 1, die),
    )
    outcomes = run(ranks, 3, plan)
    assert outcomes.pop(2) == KILLED
    check_equal_and_exact(outcomes)
    assert [steps[-1].outcome.ranks for steps in outcomes] == [(0, 1), (0, 1)]


def test_a_claimant_that_dies_before_its_claim_is_counted_holds_nobody_up(ranks):
    def prepare(coverage):
        if coverage.members.rank == 2:
            coverage._key_values = Uncounting(coverage._key_values)

    plan = Plan({"chunks_per_rank": 2, **SOON}, steps=3, seconds=lambda _: 0.01, prepare=prepare)
    outcomes = run(ranks, 3, plan)
    assert outcomes.pop(2) == KILLED
    check_equal_and_exact(outcomes)
    assert [steps[-1].outcome.ranks for steps in outcomes] == [(0, 1), (0, 1)]


class Uncounting:
    """A key-value store whose process dies when it is to count its claim, in the second step."""

    def __init__(self, key_values):
        self.key_values = key_values
        self.counted = 0

    def __getattr__(self, name):
        return getattr(self.key_values, name)

    def add(self, key, amount=1):
        if amount and "/o" in key:
            self.counted += 1
            if self.counted == 3:
                die()
        return self.key_values.add(key, amount)


@pytest.mark.parametrize("rescale", [True, False])
def test_with_commit_the_certificate_counts_the_chunks_that_died_with_their_claimant(
    ranks, rescale
):
    plan = Plan(
        {"chunks_per_rank": 3, "lost": "commit", "rescale": rescale, **SOON},
        steps=3,
        seconds=lambda rank: 0.01,
        prepare=at_sum(2, 2, lambda real: die()),
    )
    outcomes = run(ranks, 4, plan)
    assert outcomes.pop(2) == KILLED
    struck = [steps[1] for steps in outcomes]
    lost = struck[0].outcome.lost
    assert 2 <= len(lost) <= 4
    left = 12 - len(lost)
    for step in struck:
        certificate = step.outcome.certificate
        assert step.outcome.lost == lost
        assert certificate.error == pytest.approx(len(lost) * (12 / left if rescale else 1))
        assert certificate.centred == pytest.approx(len(lost) * 12 / left)
        assert certificate.scale == pytest.approx(1 if rescale else 12 / left)
        scale = 12 / left if rescale else 1
        assert distance(step.gradient, scale * step.expected) < ROUNDING
        assert np.array_equal(step.gradient, struck[0].gradient)
    check_equal_and_exact([steps[2:] for steps in outcomes])


def test_two_ranks_may_be_killed_in_one_step(ranks):
    def prepare(coverage):
        at_sum(1, 2, lambda real: die())(coverage)
        at_sum(3, 2, lambda real: die())(coverage)

    plan = Plan({"chunks_per_rank": 2, **SOON}, steps=3, seconds=lambda rank: 0.01, prepare=prepare)
    outcomes = run(ranks, 5, plan)
    assert [outcomes.pop(3), outcomes.pop(1)] == [KILLED, KILLED]
    check_equal_and_exact(outcomes)
    assert outcomes[0][-1].outcome.ranks == (0, 2, 4)


def test_a_rank_may_be_killed_while_the_others_recover_from_the_loss_of_another(ranks):
    def prepare(coverage):
        at_sum(1, 2, lambda real: die())(coverage)
        if coverage.members.rank == 3:
            coverage.members.keep = lambda *arguments: die()

    plan = Plan(
        {"chunks_per_rank": 2, "timeout_seconds": 4.0, "grace_seconds": 0.5},
        steps=3,
        seconds=lambda rank: 0.01,
        prepare=prepare,
    )
    outcomes = run(ranks, 5, plan)
    assert [outcomes.pop(3), outcomes.pop(1)] == [KILLED, KILLED]
    check_equal_and_exact(outcomes)
    assert outcomes[0][-1].outcome.ranks == (0, 2, 4)


def test_the_last_one_goes_on_alone(ranks):
    plan = Plan(
        {"chunks_per_rank": 2, **SOON},
        steps=3,
        seconds=lambda rank: 0.01,
        prepare=at_sum(1, 2, lambda real: die()),
    )
    outcomes = run(ranks, 2, plan)
    assert outcomes.pop(1) == KILLED
    check_equal_and_exact(outcomes)
    assert outcomes[0][-1].outcome.ranks == (0,)


def orphans(size, chunks, dead):
    """Chunks whose two holders are both dead."""
    held = spread(size, chunks, 2)
    return tuple(
        chunk for chunk in range(held.chunks) if set(held.holders(chunk).tolist()) <= set(dead)
    )


def all_holders_die(**settings):
    def during(coverage, step, chunk):
        if step == 1 and coverage.members.rank in {1, 2}:
            die()

    settings = {"timeout_seconds": 1.5, "grace_seconds": 0.3, **settings}
    return Plan(
        {"chunks_per_rank": 3, "copies": 2, **settings},
        steps=4,
        seconds=lambda rank: 0.01,
        during=during,
    )


def test_when_all_holders_of_a_chunk_are_dead_the_error_names_it_in_time(ranks):
    gone = orphans(4, 3, (1, 2))
    assert gone
    outcomes = run(ranks, 4, all_holders_die())
    assert [outcomes.pop(2), outcomes.pop(1)] == [KILLED, KILLED]
    for steps in outcomes:
        assert len(steps) == 2
        assert isinstance(steps[-1], LostChunksError)
        assert steps[-1].chunks == gone
        assert "lost = 'commit'" in str(steps[-1])


def test_when_all_holders_are_dead_commit_certifies_and_later_steps_do_not_wait_again(ranks):
    gone = orphans(4, 3, (1, 2))
    outcomes = run(ranks, 4, all_holders_die(lost="commit"))
    assert [outcomes.pop(2), outcomes.pop(1)] == [KILLED, KILLED]
    for steps in zip(*outcomes, strict=True):
        for step in steps:
            assert isinstance(step, Step), step
            assert np.array_equal(step.gradient, steps[0].gradient)
            assert np.array_equal(step.parameters, steps[0].parameters)
            scale = 12 / (12 - len(step.outcome.lost))
            assert distance(step.gradient, scale * step.expected) < ROUNDING
            assert step.outcome.certificate.exact == (not step.outcome.lost)
    for steps in outcomes:
        assert set(gone) <= set(steps[1].outcome.lost)
        for step in steps[2:]:
            assert step.outcome.lost == gone
            assert step.outcome.seconds < 1.0


def test_a_rank_that_is_killed_while_it_closes_the_step_at_the_deadline_does_not_hold_up_others(
    ranks,
):
    def prepare(coverage):
        real = coverage._freeze

        def freeze(claims):
            if coverage.members.rank == 0:
                coverage._key_values.publish(claims.key("freezer"), "0")
                die()
            time.sleep(0.2)
            real(claims)

        coverage._freeze = freeze

    plan = Plan(
        {
            "chunks_per_rank": 3,
            "copies": 2,
            "lost": "commit",
            "deadline_seconds": 0.5,
            "timeout_seconds": 1.5,
            "grace_seconds": 0.3,
        },
        steps=1,
        seconds=lambda rank: 0.02 if rank == 0 else 0.4,
        prepare=prepare,
    )
    outcomes = run(ranks, 3, plan)
    assert outcomes.pop(0) == KILLED
    first, second = (steps[0] for steps in outcomes)
    for step in (first, second):
        lost = step.outcome.lost
        assert {0, 1, 2} <= set(lost) < set(range(9))
        assert distance(step.gradient, 9 / (9 - len(lost)) * step.expected) < ROUNDING
        assert not step.outcome.certificate.exact
    assert first.outcome.lost == second.outcome.lost
    assert np.array_equal(first.gradient, second.gradient)


def stop_at(place):
    """A plan whose rank 1 stands still for a while in its second step."""
    if place == "computing":
        return {"during": at_chunk(1, 1, lambda: pause(STILL_SECONDS))}
    if place == "summing":

        def act(real):
            pause(STILL_SECONDS)
            real()

        return {"prepare": at_sum(1, 2, act)}

    def after(coverage, step):
        if (coverage.members.rank, step) == (1, 0):
            pause(STILL_SECONDS)

    return {"after": after}


@pytest.mark.parametrize("place", ["computing", "summing"])
def test_a_rank_that_stands_still_for_seconds_is_waited_for_and_nobody_is_left_out(ranks, place):
    plan = Plan(
        {"chunks_per_rank": 2, **SOON}, steps=3, seconds=lambda rank: 0.01, **stop_at(place)
    )
    outcomes = run(ranks, 3, plan)
    check_equal_and_exact(outcomes)
    for steps in outcomes:
        assert [step.outcome.ranks for step in steps] == 3 * [(0, 1, 2)]
    assert max(step.outcome.seconds for step in outcomes[0]) > 2.0


@pytest.mark.parametrize("place", ["computing", "summing", "between steps"])
def test_a_rank_that_stands_still_too_long_is_told_so_and_does_no_harm(ranks, place):
    plan = Plan(
        {"chunks_per_rank": 2, "timeout_seconds": 1.0, "grace_seconds": 0.4},
        steps=24,
        seconds=lambda rank: 0.04,
        **stop_at(place),
    )
    outcomes = run(ranks, 3, plan)
    stopped = outcomes.pop(1)
    after = sum(step.outcome.seconds for step in outcomes[0][len(stopped) - 1 :])
    assert after > STILL_SECONDS + 0.3, "the others were done before it woke up"
    assert isinstance(stopped[-1], LeftBehindError)
    assert "grace_seconds" in str(stopped[-1])
    assert len(stopped) >= 2
    check_equal_and_exact(outcomes)
    for steps in outcomes:
        assert steps[-1].outcome.ranks == (0, 2)


def restart_at(place, store, step=1):
    def restart():
        store.restart()
        time.sleep(0.2)

    if place == "computing":
        return {"during": at_chunk(1, step, restart, number=1)}
    if place == "before the sum":

        def act(real):
            restart()
            real()

        return {"prepare": at_sum(1, step + 1, act)}
    if place == "while others sum":

        def act(real):
            time.sleep(0.1)
            restart()
            # Long enough for the others to give the sum up.
            time.sleep(0.5)
            raise StoreLostError("seen before the sum")

        return {"prepare": at_sum(1, step + 1, act)}
    if place == "after the sum":

        def act(real):
            real()
            restart()

        return {"prepare": at_sum(1, step + 1, act)}

    if place == "when others have continued":

        def prepare(coverage):
            real, seen = coverage._verdict, []

            def verdict(key):
                seen.append(key)
                if coverage.members.rank == 1 and len(seen) == step + 1:
                    time.sleep(0.3)
                    restart()
                return real(key)

            coverage._verdict = verdict

        return {"prepare": prepare}

    def after(coverage, at_step):
        if (coverage.members.rank, at_step) == (1, step):
            restart()

    return {"after": after}


@pytest.mark.parametrize(
    "place",
    [
        "computing",
        "before the sum",
        "while others sum",
        "after the sum",
        "when others have continued",
        "between steps",
    ],
)
def test_the_store_may_be_killed_and_restarted_at_any_time(ranks, place):
    with store_process() as store:
        plan = Plan(
            {"chunks_per_rank": 3, "timeout_seconds": 15.0, "grace_seconds": 1.0},
            steps=5,
            seconds=lambda rank: 0.01,
            **restart_at(place, store),
        )
        outcomes = ranks(3)(mortal, train, store.port, plan)
    check_equal_and_exact(outcomes)
    assert all(step.outcome.ranks == (0, 1, 2) for steps in outcomes for step in steps)
    # Nobody has had to wait for a timeout.
    assert max(step.outcome.seconds for step in outcomes[0]) < 12.0


def test_a_rank_may_be_killed_after_the_store_was_restarted(ranks):
    with store_process() as store:
        plan = Plan(
            {"chunks_per_rank": 2, **SOON},
            steps=7,
            seconds=lambda rank: 0.01,
            during=at_chunk(2, 3, die),
            **restart_at("between steps", store),
        )
        outcomes = ranks(3)(mortal, train, store.port, plan)
    assert outcomes.pop(2) == KILLED
    check_equal_and_exact(outcomes)
    assert outcomes[0][2].outcome.ranks == (0, 1, 2)
    assert outcomes[0][-1].outcome.ranks == (0, 1)


def test_a_store_that_stays_away_ends_the_step_with_a_sentence(ranks):
    with store_process() as store:
        plan = Plan(
            {"chunks_per_rank": 3, "timeout_seconds": 1.0},
            steps=3,
            seconds=lambda rank: 0.01,
            during=at_chunk(1, 1, store.end, number=1),
        )
        begun = time.monotonic()
        outcomes = ranks(3)(mortal, train, store.port, plan)
        assert time.monotonic() - begun < 30.0
    for steps in outcomes:
        assert isinstance(steps[-1], CodingError)
        assert "store of the process group has been gone" in str(steps[-1])


@pytest.mark.parametrize("wrong", ["owner", "helper", None])
def test_two_computations_of_a_chunk_that_differ_are_reported(ranks, wrong):
    held = spread(3, 1, 2)
    owner, helper = 0, int(held.holders(0)[1])
    third = 3 - owner - helper
    assert int(held.holders(third)[1]) == owner
    guilty = {"owner": owner, "helper": helper, None: None}[wrong]
    with store_process() as store:
        plan = Plan(
            {"chunks_per_rank": 1, "copies": 2, "patience": 0.0},
            steps=2,
            seconds=lambda rank: 0.02,
            during=held_back(owner, third),
            prepare=with_wrong_gradients(guilty, 0),
        )
        outcomes = ranks(3)(mortal, train, store.port, plan)
    for step in range(2):
        found = {rank: outcomes[rank][step].outcome.disagreements for rank in range(3)}
        assert outcomes[owner][step].outcome.duplicates >= 1
        assert found[helper] == found[third] == ()
        if wrong is None:
            assert found[owner] == ()
            continue
        (verdict,) = found[owner]
        assert verdict.chunk == 0
        assert verdict.ranks == (helper, owner)
        assert 0.003 < verdict.difference < 0.3


def held_back(owner, third):
    """The owner of chunk 0 is late for it, and the last chunk waits until it has compared."""

    def during(coverage, step, chunk):
        key_values, come = coverage._key_values, f"come{step}"
        rank = coverage.members.rank
        if rank == owner and chunk == 0:
            time.sleep(0.4)
        if chunk == third:
            if rank == owner:
                key_values.publish(come, "yes")
            key_values.read(come, 20.0, "the owner of chunk 0")

    return during


def with_wrong_gradients(guilty, chunk):
    def prepare(coverage):
        if coverage.members.rank != guilty:
            return
        gradients = coverage._gradients
        real = gradients.compute
        weight = gradients._sums.parameters[0]

        def wrong(step, at_chunk, loss_of):
            return real(
                step,
                at_chunk,
                lambda number: loss_of(number) + (weight.flatten()[7] if number == chunk else 0.0),
            )

        gradients.compute = wrong

    return prepare
