import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from coverage_ranks import store_process
from forked import free_port

from outlast.coding.assignment import spread
from outlast.coding.protocol.coverage import COVERED, NOBODY, Claims
from outlast.coding.protocol.key_value_store import KeyValueStore, KeyWatcher
from outlast.coding.protocol.membership import Rendezvous
from outlast.errors import CodingError, LeftBehindError

WAIT = 10.0


@pytest.fixture(scope="module")
def store():
    return dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)


@pytest.fixture
def key_values(store, request):
    return KeyValueStore(request.node.name, store)


def together(count, act):
    """``act(number)`` in `count` threads that begin at once; the results."""
    gate = threading.Barrier(count)

    def begin(number):
        gate.wait(WAIT)
        return act(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def race(port, rounds):
    """Claim one chunk again and again, all at once; who has won by what each process knows."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    key_values = KeyValueStore("race", dist.TCPStore("127.0.0.1", port, is_master=False))
    held = spread(size, 1, size)
    generator = random.Random(rank)
    found = []
    for number in range(rounds):
        claims = Claims(key_values, f"round{number}", rank, held, range(size))
        key_values.add(claims.key("gate"))
        while key_values.add(claims.key("gate"), 0) < size:
            pass
        # Who has opened the gate would win each time, being the first to know.
        time.sleep(generator.random() * 5e-4)
        answer = claims.claim(1, f"mark{rank}")
        found.append((answer.won, answer.by, answer.fingerprint))
    return found


@pytest.mark.distributed
def test_of_all_who_claim_a_chunk_at_once_exactly_one_wins_and_all_know_who(ranks):
    with store_process() as store:
        outcomes = ranks(3)(race, store.port, 200)
    winners = set()
    for answers in zip(*outcomes, strict=True):
        won = [rank for rank, answer in enumerate(answers) if answer[0]]
        assert len(won) == 1
        assert {answer[1:] for answer in answers} == {(won[0], f"mark{won[0]}")}
        winners.update(won)
    assert len(winners) > 1, "it was no race"


def test_a_round_ends_when_its_last_chunk_is_claimed_and_not_before(key_values):
    held = spread(3, 2, 2)
    claims = [Claims(key_values, "round", worker, held, range(6)) for worker in range(3)]
    for chunk in (0, 5, 1, 3, 2):
        assert claims[chunk // 2].claim(chunk).won
        assert not key_values.has(claims[0].key("done"))
    # A second claim of a chunk counts nothing.
    assert not claims[1].claim(5).won
    assert not key_values.has(claims[0].key("done"))
    assert claims[0].claim(4).won
    assert key_values.read(claims[0].key("done"), WAIT, "the end") == COVERED


def test_a_round_of_some_chunks_ends_without_the_others(key_values):
    held = spread(3, 2, 3)
    claims = Claims(key_values, "round", 0, held, {1, 4})
    assert claims.own == [1]
    assert claims.backups == [4]
    claims.claim(4)
    assert not key_values.has(claims.key("done"))
    claims.claim(1)
    assert key_values.has(claims.key("done"))


def test_racing_claims_of_all_chunks_end_the_round_once(key_values):
    workers = 4
    held = spread(workers, 3, workers)
    connections = [key_values.connect() for _ in range(workers)]
    for number in range(15):
        claims = [
            Claims(connections[worker], f"round{number}", worker, held, range(12))
            for worker in range(workers)
        ]
        won = together(
            workers, lambda w, c=claims: [e for e in range(12) if c[w].claim(e, str(w)).won]
        )
        assert sorted(chunk for each in won for chunk in each) == list(range(12))
        assert key_values.read(claims[0].key("done"), WAIT, "the end") == COVERED


def test_a_helper_takes_what_nobody_works_on_of_the_owner_that_is_furthest_behind(key_values):
    held = spread(2, 4, 2)
    first, second = (Claims(key_values, "round", worker, held, range(8)) for worker in range(2))
    for chunk in (4, 5, 6, 7):
        second.claim(chunk)
    first.claim(0)
    # Chunk 1 is what the owner works on now, and its last one is the last that it comes to.
    assert second.choose(patient=True) == 3
    second.claim(3)
    assert second.choose(patient=True) == 2
    second.claim(2)
    assert second.choose(patient=True) is None
    assert second.choose(patient=False) == 1
    second.claim(1)
    assert second.choose(patient=False) is None
    assert key_values.has(first.key("done"))


def test_two_helpers_choose_different_chunks(key_values):
    workers = 5
    held = spread(workers, 4, workers)
    connections = [key_values.connect() for _ in range(workers)]
    for number in range(10):
        claims = [
            Claims(connections[worker], f"round{number}", worker, held, range(20))
            for worker in range(workers)
        ]
        for worker in range(1, workers):
            for chunk in claims[worker].own:
                claims[worker].claim(chunk)
        chosen = [claims[worker].choose(patient=True) for worker in (1, 2, 3)]
        assert sorted(chosen) == [1, 2, 3]


def test_chunks_closed_at_the_deadline_are_told_from_finished_ones(key_values):
    held = spread(2, 2, 1)
    claims = Claims(key_values, "round", 0, held, range(4))
    claims.claim(0, "mark")
    assert claims.claim(1, by=NOBODY).won
    late = claims.claim(1, "late")
    assert not late.won
    assert late.by == NOBODY
    claims.claim(2, by=NOBODY)
    claims.claim(3)
    assert claims.closed() == {1, 2}


def test_the_keys_that_a_round_says_it_has_made_are_all_it_has_made(key_values, store):
    held = spread(3, 3, 3)
    before = store.num_keys()
    claims = [Claims(key_values, "round", worker, held, range(9)) for worker in range(3)]
    claims[1].choose(patient=True)
    for chunk in range(3, 9):
        claims[chunk // 3].claim(chunk)
    claims[1].choose(patient=True)
    claims[2].choose(patient=False)
    for chunk in range(3):
        claims[1].claim(chunk)
    assert store.num_keys() > before
    key_values.remove(set().union(*(each.made for each in claims)))
    assert store.num_keys() == before


def test_the_watcher_tells_when_the_key_is_written_and_clears_away_old_ones(key_values):
    watcher = KeyWatcher(key_values)
    key_values.publish("old", "x")
    watcher.watch("end", {"old"})
    assert not watcher.wait(0.05)
    assert watcher.value == ""
    key_values.publish("end", "covered")
    assert watcher.wait(WAIT)
    assert watcher.value == "covered"
    assert not key_values.has("old")
    watcher.watch("next")
    assert watcher.value == ""
    key_values.publish("next", "broken")
    assert watcher.wait(WAIT)
    assert watcher.value == "broken"
    watcher.stop()


class Crowd:
    """Members of a group that needs no processes."""

    def __init__(self, rank, size, failures=0):
        self.rank, self.ranks, self.sums, self.failures = rank, tuple(range(size)), 0, failures

    def keep(self, ranks, name, store):
        self.ranks = tuple(ranks)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("somebody has died since")


def meet(key_values, crowd, grace, prefix="round"):
    rendezvous = Rendezvous(key_values.connect(), crowd, WAIT, grace)
    try:
        kept = rendezvous.after_loss(prefix, [crowd.rank, 10 + crowd.rank])
    except LeftBehindError as error:
        return str(error)
    return crowd.ranks, kept


def meet_or_complain(key_values, crowd, grace):
    try:
        return meet(key_values, crowd, grace)
    except CodingError as error:
        return str(error)


@pytest.mark.slow
def test_workers_that_race_agree_on_who_goes_on(key_values):
    workers = 5
    for number in range(6):
        crowds = [Crowd(rank, workers + 1) for rank in range(workers)]
        place = KeyValueStore(f"{key_values.name}{number}", key_values.below)
        # No grace: everybody decides from what it happens to see.
        found = together(workers, lambda rank, c=crowds, p=place: meet_or_complain(p, c[rank], 0.0))
        decided = json.loads(place.read("round/meeting0/members", WAIT, "the decision"))
        assert decided
        for rank, each in enumerate(found):
            if rank in decided and 2 * len(decided) < workers + 1:
                # So few do not continue: the others may, by themselves.
                assert f"only ranks {decided}" in each
            elif rank in decided:
                assert crowds[rank].ranks == tuple(decided)
                assert each[1] == {offset + rank for rank in decided for offset in (0, 10)}
            else:
                assert f"rank {rank} was silent" in each


def test_with_all_there_nobody_waits_for_the_end_of_the_grace_time(key_values):
    crowds = [Crowd(rank, 4) for rank in range(4)]
    found = together(4, lambda rank: meet(key_values, crowds[rank], 1000.0))
    kept = {offset + rank for rank in range(4) for offset in (0, 10)}
    assert found == 4 * [((0, 1, 2, 3), kept)]


@pytest.mark.slow
def test_a_group_that_cannot_be_made_is_tried_again_with_those_who_come(key_values):
    # The last one reports itself and dies before the group is made.
    crowds = [Crowd(rank, 4, failures=1) for rank in range(4)]

    def act(rank):
        if rank < 3:
            return meet(key_values, crowds[rank], 0.3)
        crowds[3].keep = lambda ranks, name, store: (_ for _ in ()).throw(SystemExit)
        with pytest.raises(SystemExit):
            meet(key_values, crowds[3], 0.3)
        return None

    found = together(4, act)
    kept = {offset + rank for rank in range(3) for offset in (0, 10)}
    assert found[:3] == 3 * [((0, 1, 2), kept)]


def test_a_group_that_can_never_be_made_ends_with_a_sentence(key_values):
    crowds = [Crowd(rank, 2, failures=100) for rank in range(2)]

    def act(rank):
        with pytest.raises(CodingError) as caught:
            meet(key_values, crowds[rank], 0.2)
        return str(caught.value)

    for text in together(2, act):
        assert "no process group of them can be made" in text


def test_reading_a_key_that_nobody_writes_says_what_the_wait_was_for(key_values):
    with pytest.raises(CodingError, match=r"waited 0\.05 s in vain for a sign"):
        key_values.read("never", 0.05, "a sign")
