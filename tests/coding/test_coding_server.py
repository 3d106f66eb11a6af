"""The parameter server: first messages that decode, late, stopped and dead workers."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_ranks import (
    KILLED,
    chunk_loss,
    die,
    full_gradient,
    mortal,
    network,
    numbers,
    start,
    stop,
    tried,
)
from torch import nn

from outlast.coding.codes.communication import YeAbbe
from outlast.coding.codes.partial import PartialCode
from outlast.coding.codes.repetition import FractionalRepetition
from outlast.coding.codes.roots import ReedSolomon
from outlast.coding.protocol.encoding import encode_, recombine_
from outlast.coding.protocol.messages import Buffers, Header, Kind, Layout
from outlast.coding.protocol.post import Post
from outlast.coding.protocol.server import Hub
from outlast.coding.protocol.worker import Worker
from outlast.errors import CodingError

pytestmark = pytest.mark.distributed


def serve(code, steps, *, slow=None, pause=0.0, learning_rate=0.01, **limits):
    """Train; `slow(rank, step, position)` is called before each chunk.

    Returns on the hub the outcomes, the gradients' largest relative errors and the parameters; on
    workers the steps that they took part in.
    """
    rank = start()
    model = network()
    before = slow or (lambda rank, step, position: None)
    if rank:
        worker = Worker(model, code, patience_seconds=20.0)
        taken = []
        for step in worker.steps():
            wanted = True
            for position, chunk in enumerate(worker.chunks):
                before(rank, step, position)
                chunk_loss(model, step, chunk).backward()
                wanted = worker.add(chunk)
                if not wanted:
                    break
            if wanted and worker.send(step):
                taken.append(step)
        return taken
    limits.setdefault("deadline_seconds", 20.0)
    hub = Hub(model, code, **limits)
    outcomes, errors = [], []
    for step in range(steps):
        expected = full_gradient(model, step, code.chunks)
        hub.publish(step)
        for position, chunk in enumerate(hub.chunks):
            before(0, step, position)
            chunk_loss(model, step, chunk).backward()
            hub.add(chunk)
        _, outcome = hub.collect(step)
        found = numbers(each.grad for each in model.parameters())
        errors.append(float(np.linalg.norm(found - expected) / np.linalg.norm(expected)))
        outcomes.append(outcome)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= learning_rate * parameter.grad
        time.sleep(pause)
    hub.close()
    return outcomes, errors, numbers(model.parameters())


def reference(steps, chunks, learning_rate=0.01):
    """Plain gradient descent in one process."""
    model = network()
    for step in range(steps):
        gradient = torch.from_numpy(full_gradient(model, step, chunks)).float()
        torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            - learning_rate * gradient,
            model.parameters(),
        )
    return numbers(model.parameters())


def sleeper(ranks_slow, seconds):
    return lambda rank, step, position: time.sleep(seconds if rank in ranks_slow else 0.0)


CODES = (
    FractionalRepetition(4, 1),
    FractionalRepetition(4, 0),
    FractionalRepetition(4, 3),
    ReedSolomon(4, 2),
    YeAbbe(4, 1, 2),
    YeAbbe(4, 1, 3),
    PartialCode(4, 2),
    PartialCode(4, 3, 2),
)


@pytest.mark.parametrize("code", CODES, ids=repr)
@pytest.mark.parametrize("spare", [0, 1], ids=["hub works", "hub decodes"])
def test_training_is_that_of_one_process(ranks, code, spare):
    outcomes, errors, parameters = ranks(4 + spare)(serve, code, 4)[0]
    assert all(outcome.error == 0.0 for outcome in outcomes)
    assert max(errors) < 2e-5
    np.testing.assert_allclose(parameters, reference(4, 4), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("code", [FractionalRepetition(4, 1), YeAbbe(4, 1, 2), PartialCode(4, 2)])
def test_nobody_waits_for_a_slow_worker(ranks, code):
    results = ranks(5)(lambda: serve(code, 6, slow=sleeper({3}, 1.0)))
    outcomes, errors, _ = results[0]
    assert max(errors) < 2e-5
    assert max(outcome.seconds for outcome in outcomes) < 1.0
    assert all(2 not in outcome.survivors for outcome in outcomes)
    # It was not made to go through the steps that it missed.
    assert len(results[3]) <= 1


def at(rank, step, position, action):
    """`action()` once, in one place."""
    return lambda *place: action() if place == (rank, step, position) else None


@pytest.mark.parametrize("code", [FractionalRepetition(4, 1), YeAbbe(4, 1, 2), PartialCode(4, 2)])
def test_a_worker_killed_in_the_middle_of_a_step_costs_nothing(ranks, code):
    slow = at(3, 1, 1, die)
    # The pause, time of the hub's update, lets every worker begin step 1 and be missed after it.
    results = ranks(5)(lambda: mortal(lambda: serve(code, 4, slow=slow, pause=0.15)))
    outcomes, errors, parameters = results[0]
    assert results[3] == KILLED
    assert max(errors) < 2e-5
    assert outcomes[-1].gone == (2,)
    assert sum(outcome.seconds for outcome in outcomes) < 3.0
    np.testing.assert_allclose(parameters, reference(4, 4), rtol=1e-4, atol=1e-5)


def test_a_stopped_worker_comes_back_to_the_newest_step(ranks):
    def slow(rank, step, position):
        time.sleep(0.1 if rank else 0.0)
        if (rank, step, position) == (2, 1, 0):
            stop(3.0)

    # The pause, time of the hub's update, lets it begin a step together with the others.
    results = ranks(5)(lambda: serve(FractionalRepetition(4, 1), 12, slow=slow, pause=0.25))
    outcomes, errors, _ = results[0]
    assert max(errors) < 2e-5
    assert max(outcome.seconds for outcome in outcomes) < 2.0
    away = [outcome.step for outcome in outcomes if 1 in outcome.stragglers]
    assert set(range(1, 5)) <= set(away)
    assert max(results[2]) >= 10
    # While it was away at least five steps passed, and it computed none of them afterwards.
    assert len(results[2]) <= 12 - 5
    assert outcomes[-1].gone == ()


def test_a_late_message_is_dropped_in_the_next_step_and_changes_nothing(ranks):
    code = FractionalRepetition(4, 1)
    slow = sleeper({2}, 0.1)
    outcomes, errors, _ = ranks(5)(lambda: serve(code, 4, slow=slow, pause=0.35))[0]
    # Its message of each step comes in the pause after it; that of a faster replica may as well.
    assert outcomes[0].late == 0
    assert all(1 <= outcome.late <= 2 for outcome in outcomes[1:])
    assert all(1 in outcome.stragglers for outcome in outcomes)
    assert max(errors) < 2e-5


@pytest.mark.parametrize("code", [FractionalRepetition(4, 1), PartialCode(4, 2)])
def test_when_all_holders_of_a_chunk_are_dead_the_hub_says_which(ranks, code):
    # Chunk 1 is held by workers 0 and 1 in both codes.
    def slow(rank, step, position):
        if rank in {1, 2} and step == 1:
            die()

    def work():
        return mortal(lambda: tried(serve, code, 3, slow=slow, deadline_seconds=15.0))

    begun = time.monotonic()
    results = ranks(5)(work)
    name, text, chunks = results[0]
    assert name == "LostChunksError"
    assert 1 in chunks
    assert "step 1" in text
    assert "workers [0, 1" in text
    assert results[1] == results[2] == KILLED
    assert time.monotonic() - begun < 8.0
    # The other workers do not wait for ever for a hub that is gone.
    assert results[3][0] == "CodingError"
    assert "rank 0 is gone" in results[3][1]


def test_what_is_left_of_lost_chunks_is_rescaled_if_wanted(ranks):
    def slow(rank, step, position):
        if rank in {1, 2} and step == 1:
            die()

    code = FractionalRepetition(4, 1)
    results = ranks(5)(lambda: mortal(lambda: serve(code, 3, slow=slow, on_loss="rescale")))
    outcomes, errors, _ = results[0]
    assert [outcome.error for outcome in outcomes] == [0.0, 2.0, 2.0]
    assert [outcome.scale for outcome in outcomes] == [1.0, 2.0, 2.0]
    assert errors[0] < 2e-5 < errors[1] < 2.0


@pytest.mark.parametrize("on_loss", ["raise", "rescale"])
def test_the_deadline_ends_a_step_with_partial_results(ranks, on_loss):
    # Every worker has finished its first chunk in time; two ranks are dead, so one chunk is lost.
    code = PartialCode(4, 2)

    def slow(rank, step, position):
        if rank in {1, 2}:
            die()
        time.sleep(2.0 * position)

    def work():
        return mortal(
            lambda: tried(serve, code, 1, slow=slow, deadline_seconds=1.0, on_loss=on_loss)
        )

    result = ranks(5)(work)[0]
    if on_loss == "raise":
        assert result[:1] == ("LostChunksError",)
        return
    (outcome,), _, _ = result
    assert outcome.survivors == (2, 3)
    assert outcome.error == pytest.approx(2.0)
    assert outcome.scale == pytest.approx(2.0)
    assert 1.0 <= outcome.seconds < 1.8


@pytest.mark.parametrize("code", [FractionalRepetition(4, 1), PartialCode(4, 2)])
def test_a_step_ends_when_the_error_is_as_small_as_wished(ranks, code):
    slow = sleeper({1, 2}, 1.5)
    (outcome,), (distance,), _ = ranks(5)(lambda: serve(code, 1, slow=slow, largest_error=2.0))[0]
    assert 1.0 - 1e-9 <= outcome.error <= 2.0 + 1e-9
    assert outcome.scale == 1.0
    assert outcome.survivors in {(2,), (3,), (2, 3)}
    assert outcome.seconds < 1.4
    assert 1e-3 < distance < 1.0


def test_a_worker_killed_while_its_message_is_on_the_way_spoils_nothing(ranks):
    code, numbers_of_model = FractionalRepetition(4, 1), 2_000_000

    def work():
        rank = start()
        model = nn.Linear(1, numbers_of_model, bias=False)
        if rank:
            worker = Worker(model, code, patience_seconds=20.0)
            for step in worker.steps():
                for chunk in worker.chunks:
                    model(torch.full((1, 1), chunk + 1.0)).sum().backward()
                    worker.add(chunk)
                worker.send(step)
                if rank == 3 and step == 1:
                    die()
            return None
        hub = Hub(model, code, deadline_seconds=20.0)
        sums = []
        for step in range(4):
            hub.publish(step)
            gradients, outcome = hub.collect(step)
            sums.append((float(gradients.buffers[0].min()), float(gradients.buffers[0].max())))
        hub.close()
        return sums, outcome.gone

    sums, gone = ranks(5)(lambda: mortal(work))[0]
    assert sums == [(10.0, 10.0)] * 4
    assert gone in {(2,), ()}


def test_finished_chunks_of_slow_workers_count(ranks):
    # All are so slow in their second chunk that only the first ones can make the gradient.
    code = PartialCode(4, 2)
    slow = lambda rank, step, position: time.sleep(2.0 * position)  # noqa: E731
    (outcome,), (error,), _ = ranks(5)(lambda: serve(code, 1, slow=slow))[0]
    assert outcome.survivors == (0, 1, 2, 3)
    assert outcome.error == 0.0
    assert outcome.seconds < 1.7
    assert error < 2e-5


def test_another_plan_is_made_when_a_worker_does_not_answer(ranks):
    code = PartialCode(4, 2)

    def slow(rank, step, position):
        if rank == 2 and position == 1:
            time.sleep(0.1)
            stop(2.0)
        time.sleep(0.3 if rank != 2 else 0.0)

    def work():
        return serve(code, 1, slow=slow, answer_seconds=0.4)

    (outcome,), (error,), _ = ranks(5)(work)[0]
    assert outcome.plans == 2
    assert 1 not in outcome.survivors
    assert error < 2e-5
    assert outcome.seconds < 2.0


def test_a_worker_that_does_not_answer_the_last_plan_does_not_take_the_others_with_it(ranks):
    # The plan at the deadline counts on rank 2's first chunk; rank 4's are lost anyway.
    code = PartialCode(4, 2)

    def slow(rank, step, position):
        if rank == 4:
            die()
        if position == 1:
            time.sleep(0.1)
            if rank == 2:
                stop(2.0)
            time.sleep(1.7)

    limits = {"deadline_seconds": 0.6, "answer_seconds": 0.6, "on_loss": "rescale"}
    (outcome,), _, _ = ranks(5)(lambda: mortal(lambda: serve(code, 1, slow=slow, **limits)))[0]
    assert outcome.survivors == (0, 2)
    assert outcome.error == pytest.approx(2.0)
    assert outcome.scale == pytest.approx(2.0)
    assert outcome.seconds < 1.7


@pytest.mark.parametrize("size", [1, 2])
def test_one_worker_is_a_parameter_server_too(ranks, size):
    outcomes, errors, parameters = ranks(size)(serve, FractionalRepetition(1, 0), 3)[0]
    assert max(errors) < 2e-5
    assert all(outcome.survivors == (0,) for outcome in outcomes)
    np.testing.assert_allclose(parameters, reference(3, 1), rtol=1e-4, atol=1e-5)


def test_all_workers_but_one_may_be_dead(ranks):
    def slow(rank, step, position):
        # Who was late has skipped step 1.
        if rank > 1 and step >= 1:
            die()

    code = FractionalRepetition(4, 3)
    results = ranks(5)(lambda: mortal(lambda: serve(code, 4, slow=slow)))
    outcomes, errors, _ = results[0]
    assert max(errors) < 2e-5
    assert outcomes[-1].survivors == (0,)
    assert results[1][-1] == 3


def test_a_worker_ends_with_the_error_of_a_message_that_it_cannot_take_in(ranks):
    code = PartialCode(2, 1)

    def work():
        if start() == 0:
            post = Post([1, 2], 4096)
            post.send(post.letter(Header(Kind.PARAMETERS, 0, payload_bytes=320)), [1, 2])
            for _ in range(2):
                told = post.receive(10.0)
                # A plan of one number cannot be one for two chunks.
                plan = Header(Kind.PLAN, 0, worker=told.header.worker, plan=1, payload_bytes=8)
                post.send(post.letter(plan), [told.header.worker + 1])
            time.sleep(1.0)
            return None
        worker = Worker(network(), code, patience_seconds=20.0)
        try:
            for _ in worker.steps():
                worker.add(worker.chunks[0])
        except RuntimeError as error:
            return str(error), worker.wanted

    for text, wanted in ranks(3)(work)[1:]:
        assert "shape '[2, -1]' is invalid" in text
        assert not wanted


def test_waits_may_be_endless(ranks):
    def work():
        rank, code = start(), FractionalRepetition(2, 0)
        endless = float("inf")
        if rank == 0:
            hub = Hub(network(), code, deadline_seconds=endless, answer_seconds=endless)
            hub.publish(0)
            _, outcome = hub.collect(0)
            hub.close(endless)
            return outcome.survivors
        worker = Worker(network(), code, patience_seconds=endless)
        for step in worker.steps():
            for chunk in worker.chunks:
                worker.add(chunk)
            time.sleep(0.2)
            worker.send(step)
        return None

    assert ranks(3)(work)[0] == (0, 1)


def test_messages_of_a_block_code_are_shorter_on_the_wire(ranks):
    received = []
    for code in (FractionalRepetition(4, 1), YeAbbe(4, 1, 2), YeAbbe(4, 1, 3)):
        outcomes, _, _ = ranks(5)(serve, code, 2)[0]
        received.append(outcomes[0].payload_bytes)
        assert all(
            outcome.received_bytes % (outcomes[0].payload_bytes + 64) == 0 for outcome in outcomes
        )
    # 73 numbers, in multiples of 64 bytes.
    assert received == [320, 192, 128]


def test_a_wrong_size_of_job_and_wrong_settings_are_refused(ranks):
    def work():
        start()
        model = network()
        texts = []
        for wrong in (
            {"deadline_seconds": 0.0},
            {"deadline_seconds": 1.0, "largest_error": -1.0},
            {"deadline_seconds": 1.0, "on_loss": "hope"},
            {"deadline_seconds": 1.0},
        ):
            try:
                Hub(model, FractionalRepetition(6, 1), **wrong)
            except CodingError as error:
                texts.append(str(error))
        return texts

    deadline, largest, on_loss, size = ranks(2)(work)[0]
    assert "deadline_seconds = 0.0" in deadline
    assert "largest_error = -1.0" in largest
    assert "'hope'" in on_loss
    assert "2 ranks" in size
    assert "6 (the hub works) or 7" in size


def test_misuse_of_a_step_is_refused(ranks):
    def work():
        code = FractionalRepetition(1, 0)
        start()
        model = network()
        hub = Hub(model, code, deadline_seconds=1.0)
        hub.publish(3)
        texts = []
        for misuse in (
            lambda: hub.publish(3),
            lambda: hub.collect(2),
            lambda: hub.add(1),
            lambda: (hub.add(0), hub.add(0)),
        ):
            try:
                misuse()
            except CodingError as error:
                texts.append(str(error))
        return texts

    texts = ranks(1)(work)[0]
    assert "step 3 is not after step 3" in texts[0]
    assert "step 2 cannot be collected" in texts[1]
    assert "chunk 1 is not among" in texts[2]
    assert "chunk 0 was added" in texts[3]


def test_a_buffer_is_not_written_while_somebody_holds_it():
    buffers = Buffers(128)
    header = Header(Kind.CODED, 1, worker=2, payload_bytes=128)
    first = buffers.letter(header)
    first.payload.fill_(7)
    buffers.hold(first)
    buffers.release(first)
    second = buffers.letter(header)
    second.payload.fill_(9)
    assert bool((first.payload == 7).all())
    buffers.release(first)
    third = buffers.letter(header)
    assert third.buffer.data_ptr() == first.buffer.data_ptr()
    assert buffers.made == 2
    with pytest.raises(CodingError, match="200 bytes is longer than the 128"):
        buffers.letter(Header(Kind.CODED, 1, payload_bytes=200))


@settings(max_examples=50, deadline=None)
@given(
    workers=st.integers(2, 6),
    spare=st.integers(0, 3),
    parts=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_messages_through_letters_decode_to_the_sum(workers, spare, parts, sizes, seed):
    parts = min(parts, workers)
    stragglers = min(spare, workers - parts)
    code = YeAbbe(workers, stragglers, parts, dtype="float64", tolerance=float("inf"))
    generator = np.random.default_rng(seed)
    # One flat tensor for each type or device that a model has.
    gradients = [
        [torch.from_numpy(generator.standard_normal(n)) for n in sizes] for _ in range(workers)
    ]
    layout = Layout(gradients[0], parts)
    buffers = Buffers(layout.payload_bytes)
    survivors = generator.choice(workers, workers - stragglers, replace=False)
    weights = code.decode(survivors).weights
    found = [torch.zeros(n, dtype=torch.float64) for n in sizes]
    for worker in survivors:
        header = Header(Kind.CODED, 0, payload_bytes=layout.payload_bytes)
        letter = buffers.letter(header)
        for view in layout.views(letter.payload):
            view.zero_()
        chunks = code.assignment.chunks_of(worker)
        for chunk, row in zip(chunks, code.coefficients(worker), strict=True):
            encode_(layout.views(letter.payload), gradients[chunk], row)
        recombine_(found, layout.views(letter.payload), weights[:, worker])
        assert Header.unpack(letter.buffer[:64].numpy().tobytes()) == header
    scale = float(np.abs(weights).sum())
    for total, number in zip(found, range(len(sizes)), strict=True):
        expected = sum(each[number] for each in gradients)
        np.testing.assert_allclose(total, expected, atol=1e-9 * max(scale, 1.0))
