"""Peer-to-peer averaging: it converges, trains as well as all-reduce, and waits for nobody."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_ranks import KILLED, chunk_loss, die, mortal, network, numbers, start
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from outlast.coding.codes.bernoulli import StochasticCode
from outlast.coding.codes.repetition import FractionalRepetition
from outlast.coding.protocol.gossip import (
    Gossip,
    consensus_distance,
    contraction,
    metropolis_weights,
)
from outlast.coding.protocol.messages import Buffers, Header, Kind, Newest
from outlast.coding.protocol.post import Post
from outlast.errors import CodingError

RING = [(rank, (rank + 1) % 6) for rank in range(6)]
CHORDS = RING + [(0, 3), (1, 4), (2, 5)]


def scattered(rank):
    model = network()
    torch.manual_seed(100 + rank)
    length = parameters_to_vector(model.parameters()).numel()
    vector_to_parameters(torch.randn(length), model.parameters())
    return model


def distance(states):
    return float(np.linalg.norm(states - states.mean(axis=0)))


@pytest.mark.distributed
def test_all_ranks_come_to_the_mean_as_fast_as_the_spectrum_says(ranks):
    def work():
        model = scattered(start())
        code = StochasticCode(6, 2, 0.0)
        gossip = Gossip(model, code, CHORDS, rounds=2, deadline_seconds=10.0)
        states, disagreements = [numbers(model.parameters())], []
        for step in gossip.steps(6):
            disagreements.append(gossip.mix(step).disagreement)
            states.append(numbers(model.parameters()))
        gossip.close()
        return states, disagreements

    results = ranks(6)(work)
    states = np.stack([states for states, _ in results], axis=1)
    disagreements = np.stack([each for _, each in results], axis=1)
    factor = contraction(6, CHORDS)
    for step in range(6):
        before, after = distance(states[step]), distance(states[step + 1])
        np.testing.assert_allclose(states[step + 1].mean(axis=0), states[0].mean(axis=0), atol=1e-5)
        assert after <= factor**2 * before + 1e-5
        assert after <= consensus_distance(list(disagreements[step]), 6, CHORDS) + 1e-6
    assert distance(states[-1]) < 0.01 * distance(states[0])


def loss_of(model, chunks):
    with torch.no_grad():
        return sum(float(chunk_loss(model, 0, chunk)) for chunk in range(chunks))


def all_reduce_loss(steps, rate):
    """Gradient descent on the same chunks in one process."""
    model = network()
    for _ in range(steps):
        model.zero_grad()
        sum(chunk_loss(model, 0, chunk) for chunk in range(6)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
    return loss_of(network(), 6), loss_of(model, 6)


def descend(code, steps, rate, slow=lambda rank, step: None, deadline=10.0):
    rank = start()
    model = network()
    gossip = Gossip(model, code, CHORDS, rounds=2, deadline_seconds=deadline)
    outcomes = []
    for step in gossip.steps(steps):
        slow(rank, step)
        for chunk in gossip.chunks:
            chunk_loss(model, 0, chunk).backward()
            gossip.add(chunk)
        gossip.estimate()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
        outcomes.append(gossip.mix(step))
    gossip.close(2.0)
    return loss_of(model, 6), outcomes


@pytest.mark.distributed
@pytest.mark.parametrize("code", [StochasticCode(6, 3, 0.0, seed=1), FractionalRepetition(6, 1)])
def test_training_reaches_the_loss_of_all_reduce(ranks, code):
    first, expected = all_reduce_loss(40, 0.02)
    for loss, outcomes in ranks(6)(descend, code, 40, 0.02):
        assert all(outcome.left_out == () for outcome in outcomes)
        assert abs(loss - expected) < 0.1 * (first - expected)


@pytest.mark.distributed
def test_a_slow_and_a_dead_neighbour_are_left_out(ranks):
    def slow(rank, step):
        if rank == 4 and step >= 3:
            die()
        time.sleep(0.5 if rank == 2 else 0.005)

    begun = time.monotonic()
    code = StochasticCode(6, 4, 1 / 3, seed=2)
    results = ranks(6)(lambda: mortal(lambda: descend(code, 40, 0.02, slow, deadline=0.2)))
    assert time.monotonic() - begun < 10.0
    assert results[4] == KILLED
    first, expected = all_reduce_loss(40, 0.02)
    for rank in (0, 1, 3, 5):
        loss, outcomes = results[rank]
        assert abs(loss - expected) < 0.3 * (first - expected), rank
        assert len(outcomes) == 40
        # Waiting for the silent ones is done once, not in every round.
        assert sum(outcome.seconds > 0.15 for outcome in outcomes) <= 12
    assert 4 in results[1][1][-1].left_out
    loss, outcomes = results[2]
    # The slow rank went with the others' steps, not through all of its own.
    assert len(outcomes) < 20
    assert abs(loss - expected) < 0.5 * (first - expected)


@pytest.mark.distributed
def test_a_slow_rank_does_not_hoard_the_messages_of_fast_ones(ranks):
    # Rank 1 waits for rank 2, then computes for long; rank 0 goes on without it all the time.
    def work():
        rank = start()
        code, deadline = FractionalRepetition(3, 0), 5.0 if rank == 1 else 0.02
        gossip = Gossip(network(), code, [(0, 1), (1, 2)], deadline_seconds=deadline)
        taken, memory = [], []
        for step in gossip.steps(250):
            if rank and len(taken) == 3 - rank:
                break
            time.sleep(0.004 if rank == 0 else 0.6)
            gossip.mix(step)
            taken.append(step)
            memory.append(gossip.buffer_bytes)
        gossip.close(1.0)
        return taken, memory

    (fast, _), (slow, memory), _ = ranks(3)(work)
    assert len(fast) == 250
    assert slow[1] > 20
    # Two neighbours, each with 2 messages that are unread, 2 kept, 1 on the way, and 3 to it; a
    # message is 73 numbers in multiples of 64 bytes, and its header.
    assert max(memory) <= (2 * (2 + 2 + 1 + 3) + 2) * (320 + 64)


@pytest.mark.distributed
def test_of_unread_letters_the_newest_are_kept(ranks):
    def work():
        rank = start()
        post = Post([0, 1], 64)
        if rank == 0:
            for step in range(40):
                letter = post.letter(Header(Kind.MIX, step, payload_bytes=64))
                letter.payload.fill_(step)
                post.send(letter, [1])
                post.flush(5.0)
            time.sleep(0.5)
            return None
        while post.received_bytes < 40 * 128:
            time.sleep(0.01)
        letters = [post.receive(0.2) for _ in range(2)]
        found = [(letter.header.step, letter.payload.unique().tolist()) for letter in letters]
        return found, post.receive(0.0), post.buffers.made

    found, further, made = ranks(2)(work)[1]
    assert found == [(38, [38]), (39, [39])]
    assert further is None
    assert made <= 5


def test_a_letter_that_was_overtaken_does_not_replace_the_newer_one():
    buffers, waiting = Buffers(64), Newest()
    letters = {
        (worker, step): buffers.letter(Header(Kind.CODED, step, worker=worker, payload_bytes=64))
        for worker in (0, 1)
        for step in (4, 5)
    }
    assert waiting.put(letters[0, 5]) is None
    assert waiting.put(letters[0, 4]) is letters[0, 4]
    assert waiting.put(letters[1, 4]) is None
    assert waiting.put(letters[1, 5]) is letters[1, 4]
    assert list(waiting) == [letters[0, 5], letters[1, 5]]
    assert waiting.pop() is letters[0, 5]
    assert len(waiting) == 1


@pytest.mark.distributed
def test_one_rank_gossips_with_nobody(ranks):
    def work():
        start()
        model = network()
        gossip = Gossip(model, FractionalRepetition(1, 0), [], deadline_seconds=1.0)
        (step,) = gossip.steps(1)
        chunk_loss(model, 0, 0).backward()
        expected = numbers(each.grad for each in model.parameters())
        gossip.add(0)
        gossip.estimate()
        return expected, numbers(each.grad for each in model.parameters()), gossip.mix(step)

    expected, found, outcome = ranks(1)(work)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert outcome.answered == outcome.left_out == ()


@pytest.mark.distributed
def test_estimates_average_to_the_sum_of_all_gradients(ranks):
    def work():
        start()
        model = network()
        gossip = Gossip(model, StochasticCode(6, 3, 0.0), CHORDS, deadline_seconds=5.0)
        for _ in gossip.steps(1):
            for chunk in gossip.chunks:
                chunk_loss(model, 0, chunk).backward()
                gossip.add(chunk)
            gossip.estimate()
        return numbers(each.grad for each in model.parameters())

    model = network()
    sum(chunk_loss(model, 0, chunk) for chunk in range(6)).backward()
    expected = numbers(each.grad for each in model.parameters())
    np.testing.assert_allclose(np.mean(ranks(6)(work), axis=0), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(ranks=st.integers(2, 12), seed=st.integers(0, 2**31))
def test_metropolis_weights_are_doubly_stochastic_and_contract(ranks, seed):
    generator = np.random.default_rng(seed)
    path = [(rank, rank + 1) for rank in range(ranks - 1)]
    more = [tuple(generator.choice(ranks, 2, replace=False).tolist()) for _ in range(ranks)]
    weights = metropolis_weights(ranks, path + more)
    np.testing.assert_allclose(weights, weights.T)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0)
    assert weights.min() >= 0.0
    assert contraction(ranks, path + more) < 1.0
    states = generator.standard_normal((ranks, 5))
    adjacent = (weights > 0) & ~np.eye(ranks, dtype=bool)
    gaps = [np.sum((states[adjacent[rank]] - states[rank]) ** 2) for rank in range(ranks)]
    assert distance(states) <= consensus_distance(gaps, ranks, path + more) + 1e-9
    assert distance(weights @ states) <= contraction(ranks, path + more) * distance(states) + 1e-9


def test_graphs_that_cannot_average_are_refused():
    with pytest.raises(CodingError, match="in 2 pieces"):
        metropolis_weights(4, [(0, 1), (2, 3)])
    with pytest.raises(CodingError, match=r"edge \(1, 1\)"):
        metropolis_weights(2, [(0, 1), (1, 1)])
