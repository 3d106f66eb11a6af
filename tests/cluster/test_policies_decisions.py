"""Decisions on queues that are small enough to be worked out by hand."""

import math

import pytest
from cluster_policy_queues import HOUR, job, own, queue, situation

from outlast.cluster.policies.automatic import AnchorFiller
from outlast.cluster.policies.decision import FixedLinks, Limits, OneLongJob, Submission
from outlast.cluster.policies.forecast import place_of, starts_now, window_seconds, without
from outlast.errors import ClusterError

# Six of ten nodes are busy for 4 h. The head of the queue wants eight: it starts after 4 h and
# leaves two over. The anchor wants four for 20 h and is next.
BUSY = queue(10, running=[(6, 4.0)], pending=[(8, 10.0), (4, 22.11)])
ANCHOR = own(101, "main", 4, 22.11)


def test_one_long_job_asks_for_all_that_is_left():
    found = OneLongJob().decide(situation(BUSY, job()))
    assert found.submit == (Submission(nodes=4, wall_seconds=job().wall_to_finish(4)),)
    assert "all that is left" in found.reason
    assert not OneLongJob().decide(situation(BUSY, job(), ANCHOR))


def test_one_long_job_under_a_time_limit_says_so():
    found = OneLongJob().decide(situation(BUSY, job(), limits=Limits(max_wall_seconds=8 * HOUR)))
    assert found.submit[0].wall_seconds == 8 * HOUR
    assert "8 h at a time" in found.reason


def test_links_ask_for_their_length_and_the_last_for_what_it_needs():
    policy = FixedLinks(4 * HOUR)
    assert policy.decide(situation(BUSY, job())).submit[0].wall_seconds == 4 * HOUR
    last = job(hours=1.0)
    assert policy.decide(situation(BUSY, last)).submit[0].wall_seconds == last.wall_to_finish(4)
    with pytest.raises(ClusterError, match="360 s"):
        FixedLinks(300.0).decide(situation(BUSY, job()))


def test_holes_end_where_the_head_starts_or_never():
    assert window_seconds(BUSY, 4) == 4 * HOUR
    assert window_seconds(BUSY, 2) == math.inf
    assert window_seconds(BUSY, 5) == 0.0
    # With reservations for all, the anchor's span after the head leaves two nodes less.
    assert window_seconds(BUSY, 4, backfill="conservative") == 4 * HOUR


def test_a_queue_without_a_job():
    freed = without(BUSY, {0})
    assert freed.free_nodes == 10
    assert starts_now(freed) == [0]
    assert starts_now(BUSY) == []
    assert place_of(BUSY, 101) == 1
    assert place_of(without(BUSY, {100}), 101) == 0
    assert starts_now(without(BUSY, {100})) == [0]
    assert place_of(BUSY, 7) is None


def test_the_anchor_goes_first_and_then_the_filler_that_does_most():
    policy = AnchorFiller()
    first = policy.decide(situation(BUSY, job()))
    assert [each.role for each in first.submit] == ["main"]
    found = policy.decide(situation(BUSY, job(), ANCHOR))
    # In the next 8 h, four nodes do 3.9 h of work in their 4 h, two 4.2 h, one 2.3 h.
    assert found.submit == (Submission(nodes=2, wall_seconds=24 * HOUR, role="filler"),)


def test_a_filler_leaves_every_waiting_job_its_reservation():
    # After the head's 10 h, five nodes go to the next job and four to the anchor: one is left. EASY
    # alone would let two nodes continue for ever.
    seen = queue(10, running=[(6, 4.0)], pending=[(8, 10.0), (5, 30.0), (4, 22.11)])
    assert window_seconds(seen, 2) == math.inf
    found = AnchorFiller().decide(situation(seen, job(), own(102, "main", 4, 22.11)))
    assert [(each.nodes, each.wall_seconds) for each in found.submit] == [(2, 14 * HOUR)]


def test_no_filler_where_the_hole_is_short_or_jobs_are_counted():
    policy = AnchorFiller()
    short = queue(10, running=[(6, 0.5)], pending=[(10, 10.0), (4, 22.11)])
    assert not policy.decide(situation(short, job(), ANCHOR)).submit
    one = Limits(max_jobs=1)
    assert not policy.decide(situation(BUSY, job(), ANCHOR, limits=one)).submit
    assert not policy.decide(situation(BUSY, job(), ANCHOR, quiet_seconds=59.0)).submit


def test_a_short_hole_is_taken_where_it_finishes_the_job():
    short = queue(10, running=[(6, 0.5)], pending=[(10, 10.0), (4, 1.0)])
    left = job(hours=0.25)
    found = AnchorFiller().decide(situation(short, left, own(101, "main", 4, 1.0)))
    assert found.submit[0].nodes == 4
    assert found.submit[0].wall_seconds == left.wall_to_finish(4)


def test_the_filler_makes_way_when_a_job_could_start_on_its_nodes():
    policy = AnchorFiller(gain=math.inf)
    filler = own(1, "filler", 2, 24.0, started=0.0)
    # Three of ten nodes are busy, the filler has two: the head of eight still waits.
    waits = queue(10, running=[(3, 4.0), (2, 24.0)], pending=[(8, 10.0), (6, 22.11)])
    anchor = own(101, "main", 6, 22.11)
    assert not policy.decide(situation(waits, job(nodes=6, sizes=(2, 6)), anchor, filler)).hand_over
    # Now nobody is before the anchor: five free and the filler's two are enough for it.
    ready = queue(10, running=[(3, 4.0), (2, 24.0)], pending=[(6, 22.11)])
    anchor = own(100, "main", 6, 22.11)
    found = policy.decide(situation(ready, job(nodes=6, sizes=(2, 6)), anchor, filler))
    assert found.hand_over == (1,)
    assert not found.submit


def test_who_is_behind_the_anchor_counts_only_for_a_polite_filler():
    filler = own(1, "filler", 2, 24.0, started=0.0)
    anchor = own(100, "main", 8, 22.11)
    # The job behind the anchor fits into the filler's nodes until the anchor's start.
    behind = queue(10, running=[(8, 4.0), (2, 24.0)], pending=[(8, 22.11), (2, 3.0)])
    work = job(nodes=8, sizes=(2, 8))
    assert AnchorFiller().decide(situation(behind, work, anchor, filler)).hand_over == (1,)
    selfish = AnchorFiller(polite=False)
    assert not selfish.decide(situation(behind, work, anchor, filler)).hand_over


def test_a_filler_moves_where_more_nodes_get_enough_more_done():
    # Four nodes are free beside the filler's two until the others end; the anchor wants eight.
    wide = queue(10, running=[(4, 6.0), (2, 24.0)], pending=[(8, 22.11)])
    work, anchor = job(nodes=8, sizes=(2, 6, 8)), own(100, "main", 8, 22.11)
    filler = own(1, "filler", 2, 24.0, started=0.0)
    found = AnchorFiller().decide(situation(wide, work, anchor, filler))
    assert found.hand_over == (1,)
    assert "moves" in found.reason
    # Six nodes in 5.9 h do 1.98 times what two do in 8 h.
    assert not AnchorFiller(gain=2.1).decide(situation(wide, work, anchor, filler)).hand_over
    narrow = queue(10, running=[(4, 1.0), (2, 24.0)], pending=[(8, 22.11)])
    assert not AnchorFiller().decide(situation(narrow, work, anchor, filler)).hand_over


def test_the_anchors_limit_falls_with_the_work_and_is_never_raised():
    full = queue(10, running=[(10, 4.0)], pending=[(4, 22.11)])
    policy = AnchorFiller()
    anchor = own(100, "main", 4, 22.11)
    less = job(hours=10.0)
    found = policy.decide(situation(full, less, anchor))
    assert found.shorten == ((100, less.wall_to_finish(4)),)
    assert not policy.decide(situation(full, job(hours=30.0), anchor)).shorten
    assert not policy.decide(situation(full, job(hours=20.0), anchor)).shorten


def test_an_anchor_that_has_started_sends_the_filler_away():
    both = queue(10, running=[(4, 22.11), (2, 24.0)])
    anchor, filler = own(0, "main", 4, 22.11, started=0.0), own(1, "filler", 2, 24.0, started=-1.0)
    policy = AnchorFiller()
    assert policy.decide(situation(both, job(), anchor, filler)).hand_over == (1,)
    saving = own(1, "filler", 2, 24.0, started=-1.0, ending=True)
    assert not policy.decide(situation(both, job(), anchor, saving))


def test_a_filler_that_finishes_sooner_makes_the_anchor_superfluous():
    both = queue(10, running=[(4, 22.11), (2, 24.0)])
    anchor, filler = own(0, "main", 4, 22.11, started=0.0), own(1, "filler", 2, 24.0, started=-1.0)
    found = AnchorFiller().decide(situation(both, job(hours=0.05), anchor, filler))
    assert found.cancel == (0,)
    same = queue(10, running=[(6, 4.0), (4, 24.0)], pending=[(4, 22.11)])
    waiting, equal = own(100, "main", 4, 22.11), own(1, "filler", 4, 24.0, started=0.0)
    assert AnchorFiller().decide(situation(same, job(), waiting, equal)).cancel == (100,)


def test_a_filler_that_found_its_hole_taken_is_withdrawn():
    late = own(102, "filler", 2, 24.0)
    assert AnchorFiller().decide(situation(BUSY, job(), ANCHOR, late)).cancel == (102,)
