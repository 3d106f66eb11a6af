"""The coded all-reduce among real processes: exact with some workers gone, and never a hang."""

import functools
import operator
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from coded_ranks import (
    Code,
    cyclic,
    die,
    full_gradient,
    gradient_of,
    losses_of,
    model_of,
    relative,
    repetition,
    samples_of,
    start,
    stop,
    supervised,
    work,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outlast.coding.protocol import all_reduce as coded_module
from outlast.coding.protocol.all_reduce import (
    CodedAllReduce,
    Consensus,
    Decision,
    Decoding,
    WorkerSet,
    loss_weights,
    synchronise,
)
from outlast.coding.protocol.key_value_store import KeyValueStore
from outlast.coding.protocol.membership import Members
from outlast.errors import CodingError, LeftBehindError, LostChunksError

processes = pytest.mark.distributed
CLOSE = 1e-11


@pytest.fixture
def workers(ranks):
    """Like ``ranks``, where a worker may die and its result is None then."""
    return lambda size: lambda task, *args: ranks(size)(functools.partial(supervised, task), *args)


def assert_equal_and_right(records, step, coefficients=None):
    """All records have the same gradient of a step, that of the whole batch or as given."""
    first = records[0]
    for record in records:
        assert np.array_equal(record.gradients[step], first.gradients[step])
    chunks = len(first.outcomes[step].weights)
    right = full_gradient(step, np.ones(chunks) if coefficients is None else coefficients)
    assert relative(first.gradients[step], right) < CLOSE


@processes
@pytest.mark.parametrize("code", [repetition(4, 1), cyclic(4, 1)], ids=["repetition", "cyclic"])
def test_the_gradient_is_exact_whoever_is_slow(workers, code):
    records = workers(4)(functools.partial(work, code, 4, slow=operator.eq))
    for step in range(4):
        assert_equal_and_right(records, step)
        outcome = records[0].outcomes[step]
        assert step in outcome.late
        assert sorted(outcome.survivors + outcome.late) == [0, 1, 2, 3]
        assert outcome.exact
        assert outcome.lost == ()
        assert outcome.weights[step] == 0


@processes
def test_eight_workers_do_without_any_two(workers):
    pairs = [(0, 1), (2, 7), (4, 6)]

    def slow(worker, step):
        return worker in pairs[step]

    records = workers(8)(functools.partial(work, cyclic(8, 2), 3, slow=slow))
    for step, pair in enumerate(pairs):
        assert_equal_and_right(records, step)
        assert all(each.outcomes[step].exact for each in records)
        assert records[0].outcomes[step].late == pair


def work_with_slow_looks(code, steps):
    """The first look at each step's decision takes 0.4 s, as on a machine that has other work."""
    look, looked = Consensus.is_decided_without, set()

    def slow_look(consensus, round_, epoch):
        if round_ not in looked:
            looked.add(round_)
            time.sleep(0.4)
        return look(consensus, round_, epoch)

    Consensus.is_decided_without = slow_look
    return work(code, steps, slow=operator.eq)


@processes
def test_one_slow_look_does_not_put_off_the_next_one_for_long(workers):
    records = workers(4)(functools.partial(work_with_slow_looks, repetition(4, 1), 2))
    for step in range(2):
        assert_equal_and_right(records, step)
        assert all(record.seconds[step] < 20.0 for record in records)


@processes
@pytest.mark.parametrize(
    ("size", "stragglers"),
    [(1, 0), (3, 0), (3, 2), (4, 3)],
    ids=["one worker", "no redundancy", "everything everywhere", "any one of four"],
)
def test_the_extremes_of_redundancy_are_exact(workers, size, stragglers):
    records = workers(size)(work, repetition(size, stragglers), 2)
    for step in range(2):
        assert_equal_and_right(records, step)
        assert records[0].outcomes[step].exact


@processes
def test_a_slow_worker_holds_up_the_others_by_one_chunk_only(workers):
    # The others take long enough for the slow one to have begun before they are done.
    def pause(worker, step, chunk):
        return 2.0 if worker == 3 else 0.15

    records = workers(4)(functools.partial(work, repetition(4, 3), 1, pause=pause))
    assert_equal_and_right(records, 0)
    for record in records:
        assert record.seconds[0] < 4.0
        assert 6.0 <= record.outcomes[0].saved_seconds < 9.0
    assert records[0].outcomes[0].decided_seconds < 2.0


class SlowLayers(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(8))
        self.seconds = seconds

    def forward(self, x):
        for layer in self.layers:
            time.sleep(self.seconds)
            x = layer(x).tanh()
        return x


def give_up_between_layers():
    rank = start()
    torch.manual_seed(0)
    model = SlowLayers(0.25 if rank == 1 else 0.0)
    coded = CodedAllReduce(model, repetition(2, 1))
    dist.barrier()
    begun = time.monotonic()
    with coded.computing():
        for chunk, weight in coded.chunks():
            (weight * model(samples_of(0, chunk)).square().sum()).backward()
    outcome = coded.reduce(0)
    seconds = time.monotonic() - begun
    coded.close()
    return seconds, outcome.survivors, gradient_of(model)


@processes
def test_work_can_be_given_up_between_layers(workers):
    (seconds, survivors, gradient), (_, _, other) = workers(2)(give_up_between_layers)
    assert survivors == (0,)
    assert seconds < 1.0
    assert np.array_equal(gradient, other)
    assert np.linalg.norm(gradient) > 0


def without_a_message():
    rank = start()
    model = model_of()
    coded = CodedAllReduce(model, repetition(2, 1))
    if rank == 0:
        model[0].weight.grad = torch.full_like(model[0].weight, float("nan"))
    else:
        for chunk, weight in coded.chunks():
            (weight * losses_of(model, samples_of(0, chunk)).sum()).backward()
    return coded.reduce(0, finished=rank == 1).survivors, gradient_of(model)


@processes
def test_a_worker_that_has_no_message_can_say_so(workers):
    for survivors, gradient in workers(2)(without_a_message):
        assert survivors == (1,)
        assert relative(gradient, full_gradient(0, np.ones(2))) < CLOSE


def keeping_gradients():
    """Gradients that are set to zero in place live on in the buffers."""
    rank = start()
    model = model_of()
    coded = CodedAllReduce(model, repetition(2, 0))
    found = []
    for step in range(4):
        for chunk, weight in coded.chunks():
            (weight * losses_of(model, samples_of(step, chunk)).sum()).backward()
        coded.reduce(step)
        found.append(gradient_of(model))
        model.zero_grad(set_to_none=False)
    return found, rank


@processes
def test_gradients_that_are_zeroed_in_place_are_right_in_every_step(workers):
    for gradients, _ in workers(2)(keeping_gradients):
        for step, gradient in enumerate(gradients):
            assert relative(gradient, full_gradient(step, np.ones(2))) < CLOSE


def last_chunk_of(victim, in_step, fault):
    def at(worker, step):
        if (worker, step) == (victim, in_step):
            fault()

    return at


@processes
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_costs_no_step_and_later_steps_do_without_it(workers, victim):
    records = workers(4)(
        functools.partial(
            work,
            repetition(4, 1),
            4,
            at=last_chunk_of(victim, 1, die),
            timeout_seconds=1.5,
        )
    )
    assert records[victim] is None
    left = [each for each in records if each is not None]
    for step in range(4):
        assert_equal_and_right(left, step)
        assert left[0].outcomes[step].exact
    assert [each.lost for each in left[0].outcomes] == [(), (victim,), (), ()]
    assert victim not in left[0].outcomes[2].late
    assert left[0].seconds[2] < 1.0


def dying_in_the_sum(victim, code, steps, **settings):
    """The victim has announced itself and is among the survivors when it dies."""
    whole = Members.sum_

    def sum_(self, tensors, broken=None):
        if self.rank == victim:
            die()
        whole(self, tensors, broken)

    Members.sum_ = sum_
    return work(code, steps, **settings)


@processes
def test_a_survivor_that_dies_before_it_has_sent_is_decoded_around(workers):
    records = workers(4)(
        functools.partial(dying_in_the_sum, 1, cyclic(4, 1), 2, patient=True, timeout_seconds=1.0)
    )
    left = [each for each in records if each is not None]
    assert len(left) == 3
    for step in range(2):
        assert_equal_and_right(left, step)
    assert left[0].outcomes[0].lost == (1,)


@processes
def test_of_eight_workers_two_may_be_killed_one_after_the_other(workers):
    def at(worker, step):
        if (worker, step) in {(5, 0), (1, 1)}:
            die()

    records = workers(8)(
        functools.partial(work, repetition(8, 1), 3, at=at, patient=True, timeout_seconds=1.5)
    )
    left = [each for each in records if each is not None]
    assert len(left) == 6
    for step in range(3):
        assert_equal_and_right(left, step)
    assert [each.lost for each in left[0].outcomes] == [(5,), (1,), ()]


@processes
def test_a_worker_that_stands_still_for_less_than_the_timeout_is_waited_for(workers):
    records = workers(3)(
        functools.partial(
            work,
            repetition(3, 0),
            2,
            at=last_chunk_of(1, 0, stop),
            timeout_seconds=20.0,
        )
    )
    for step in range(2):
        assert_equal_and_right(records, step)
        assert records[0].outcomes[step].exact
        assert records[0].outcomes[step].lost == ()


@processes
def test_a_worker_that_stands_still_for_longer_is_left_behind_and_told_so(workers):
    def after(worker, step):
        time.sleep(0.6)

    records = workers(4)(
        functools.partial(
            work,
            repetition(4, 1),
            6,
            at=last_chunk_of(2, 1, stop),
            after=after,
            timeout_seconds=1.0,
        )
    )
    assert isinstance(records[2].error, LeftBehindError)
    left = [records[0], records[1], records[3]]
    for step in range(6):
        assert_equal_and_right(left, step)
    assert left[0].outcomes[1].lost == (2,)


def stopping_in_the_sum(victim, in_step, code, steps, **settings):
    """The victim stands still on its way into the sum, and joins it when the others have left."""
    whole = Members.sum_
    calls = []

    def sum_(self, tensors, broken=None):
        calls.append(None)
        if self.rank == victim and len(calls) == in_step + 1:
            stop()
            whole(self, tensors, None)
        else:
            whole(self, tensors, broken)

    Members.sum_ = sum_
    return work(code, steps, **settings)


@processes
def test_a_message_of_an_old_step_changes_no_later_gradient(workers):
    def after(worker, step):
        # The first step's gradient is used after the stopped worker has continued.
        time.sleep(3.0 if step == 0 else 0.2)

    def pause(worker, step, chunk):
        return 0.3 if worker == 2 else 0.0

    records = workers(3)(
        functools.partial(
            stopping_in_the_sum,
            2,
            0,
            cyclic(3, 1),
            4,
            pause=pause,
            after=after,
            timeout_seconds=1.0,
        )
    )
    assert isinstance(records[2].error, LeftBehindError)
    for step in range(4):
        assert_equal_and_right(records[:2], step)


@processes
def test_a_lone_survivor_that_dies_takes_the_step_with_it_and_the_others_are_told(workers):
    def pause(worker, step, chunk):
        return 0.0 if worker == 0 else 0.2

    records = workers(3)(
        functools.partial(
            dying_in_the_sum, 0, repetition(3, 2), 1, pause=pause, timeout_seconds=1.0
        )
    )
    for record in records[1:]:
        assert isinstance(record.error, LostChunksError)
        assert record.error.chunks == (0, 1, 2)


def meeting_badly(impatient, times, code, steps, **settings):
    """The first attempts to make a group fail: at once for one worker, late for the others."""
    whole = Members.keep
    calls = []

    def keep(self, ranks, name):
        calls.append(None)
        if len(calls) > times:
            whole(self, ranks, name)
            return
        patience = self.timeout_seconds
        if self.rank != impatient:
            time.sleep(0.5 * patience)
        self.timeout_seconds = 0.01 if self.rank == impatient else patience
        try:
            # Each of them waits in a place of its own.
            whole(self, ranks, f"{name}/{self.rank}")
        finally:
            self.timeout_seconds = patience

    Members.keep = keep
    return work(code, steps, **settings)


@processes
def test_nobody_decides_alone_that_those_who_still_try_to_make_a_group_are_dead(workers):
    records = workers(4)(
        functools.partial(
            meeting_badly,
            0,
            1,
            repetition(4, 3),
            2,
            # Any one of them could decide; who dies must not have given up before.
            pause=lambda worker, step, chunk: 0.0 if worker == 3 else 0.1,
            at=last_chunk_of(3, 0, die),
            timeout_seconds=1.0,
        )
    )
    for step in range(2):
        assert_equal_and_right(records[:3], step)
    for record in records[:3]:
        assert [each.lost for each in record.outcomes] == [(3,), ()]


@processes
def test_living_workers_that_cannot_make_a_group_are_told_so(workers):
    records = workers(3)(
        functools.partial(
            meeting_badly,
            0,
            9,
            repetition(3, 2),
            1,
            at=last_chunk_of(2, 0, die),
            timeout_seconds=0.5,
        )
    )
    for record in records[:2]:
        assert "workers [0, 1] are alive, but no process group" in str(record.error)


def both_of_a_group_die(worker, step):
    if step == 1 and worker in {2, 3}:
        die()


@processes
def test_lost_chunks_are_named_on_all_workers(workers):
    records = workers(4)(
        functools.partial(work, repetition(4, 1), 3, at=both_of_a_group_die, timeout_seconds=1.0)
    )
    for record in records[:2]:
        assert isinstance(record.error, LostChunksError)
        assert record.error.chunks == (2, 3)
        assert "chunks [2, 3]" in str(record.error)
        assert len(record.outcomes) == 1


@processes
def test_lost_chunks_are_rescaled_away_with_a_certificate_where_asked_for(workers):
    records = workers(4)(
        functools.partial(
            work,
            repetition(4, 1),
            3,
            at=both_of_a_group_die,
            timeout_seconds=1.0,
            on_lost="rescale",
        )
    )
    for step in (1, 2):
        assert_equal_and_right(records[:2], step, coefficients=[2.0, 2.0, 0.0, 0.0])
        outcome = records[0].outcomes[step]
        assert not outcome.exact
        assert outcome.certificate.error == pytest.approx(2.0)
        assert outcome.scale == pytest.approx(2.0)
    assert records[0].seconds[2] < 1.0


@processes
def test_a_deadline_drops_and_rescales_a_worker_that_is_merely_slow(workers):
    def pause(worker, step, chunk):
        return 1.2 if (worker, step) == (1, 0) else 0.0

    records = workers(3)(
        functools.partial(
            work, repetition(3, 0), 2, pause=pause, deadline_seconds=0.4, on_lost="rescale"
        )
    )
    assert_equal_and_right(records, 0, coefficients=[1.5, 0.0, 1.5])
    assert records[0].outcomes[0].late == (1,)
    assert records[0].outcomes[0].lost == ()
    assert_equal_and_right(records, 1)


def repeat_the_step():
    rank = start()
    model = model_of()
    coded = CodedAllReduce(model, repetition(2, 0), deadline_seconds=0.2)
    dist.barrier()
    errors = 0
    for attempt in range(2):
        model.zero_grad()
        for chunk, weight in coded.chunks():
            (weight * losses_of(model, samples_of(0, chunk)).sum()).backward()
            time.sleep(0.7 * rank * (attempt == 0))
        try:
            coded.reduce(0)
        except LostChunksError:
            errors += 1
    return errors, gradient_of(model)


@processes
def test_a_step_whose_chunks_were_late_can_be_computed_again(workers):
    for errors, gradient in workers(2)(repeat_the_step):
        assert errors == 1
        assert relative(gradient, full_gradient(0, np.ones(2))) < CLOSE


@processes
def test_an_approximate_gradient_is_taken_where_its_error_is_allowed(workers):
    def pause(worker, step, chunk):
        return 0.6 if worker == 3 else 0.0

    ring = Code(np.eye(5) + np.roll(np.eye(5), 1, axis=1), tolerance=0)
    records = workers(5)(functools.partial(work, ring, 1, pause=pause, largest_error=0.5))
    outcome = records[0].outcomes[0]
    assert not outcome.exact
    assert 0 < outcome.certificate.error <= 0.5
    coefficients = ring.matrix.T @ outcome.weights
    assert np.sum((coefficients - 1) ** 2) == pytest.approx(outcome.certificate.error)
    assert_equal_and_right(records, 0, coefficients=coefficients)


def race(rounds):
    rank = start()
    key_values = KeyValueStore("race")
    consensus = Consensus(key_values, worker=rank, workers=8, timeout_seconds=5.0)
    found = []
    for number in range(rounds):
        dist.barrier()
        own = Decision(number, frozenset({rank, 20 + rank}))
        found.append(consensus.decide(number, 0, own))
    return found


@processes
def test_workers_that_race_agree_on_one_of_their_decisions(workers):
    found = workers(8)(race, 30)
    for number, decisions in enumerate(zip(*found, strict=True)):
        assert len({each.survivors for each in decisions}) == 1
        worker = min(decisions[0].survivors)
        assert decisions[0] == Decision(number, frozenset({worker, 20 + worker}))


@processes
def test_workers_that_all_decide_at_the_deadline_use_the_same_survivors(workers):
    def pause(worker, step, chunk):
        return 0.3 if worker == 3 else 0.0

    records = workers(4)(
        functools.partial(
            work, repetition(4, 0), 4, pause=pause, deadline_seconds=0.001, on_lost="rescale"
        )
    )
    for step in range(4):
        outcome = records[0].outcomes[step]
        assert {each.outcomes[step].survivors for each in records} == {outcome.survivors}
        assert_equal_and_right(records, step, coefficients=outcome.weights)


def disagree():
    rank = start()
    model = model_of()
    coded = CodedAllReduce(model, repetition(2, 1), timeout_seconds=0.5)
    dist.barrier()
    for chunk, weight in coded.chunks():
        (weight * losses_of(model, samples_of(0, chunk)).sum()).backward()
    time.sleep(0.2 * rank)
    try:
        coded.reduce(step=10 + rank)
    except CodingError as error:
        return str(error)
    return None


@processes
def test_workers_that_count_steps_differently_are_told(workers):
    first, second = workers(2)(disagree)
    assert first is None
    assert "worker 1 reduces step 11 while the others reduce step 10" in second


def votes(well_of_rank):
    rank = start()
    consensus = Consensus(KeyValueStore("votes"), worker=rank, workers=3, timeout_seconds=0.5)
    dist.barrier()
    if well_of_rank[rank] is None:
        time.sleep(1.0)
        return None
    return consensus.vote(0, 0, voters=3, well=well_of_rank[rank])


@processes
@pytest.mark.parametrize(
    ("cast", "committed"),
    [((True, True, True), True), ((True, False, True), False), ((True, None, True), False)],
    ids=["all well", "one failed", "one silent"],
)
def test_a_round_is_committed_for_all_or_for_nobody(workers, cast, committed):
    found = workers(3)(votes, cast)
    assert {each for each in found if each is not None} == {committed}


def refuse(settings):
    start()
    with pytest.raises(CodingError) as refusal:
        CodedAllReduce(model_of(), repetition(2, 1), **settings)
    return str(refusal.value)


@processes
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"timeout_seconds": 0.0}, "timeout_seconds = 0.0 is not a positive"),
        ({"deadline_seconds": 70.0}, "deadline_seconds = 70.0 is not in (0, timeout_seconds = 60]"),
        ({"on_lost": "ignore"}, "on_lost = 'ignore'"),
        ({"largest_error": 2.0}, "largest_error = 2.0 is not in [0, 2)"),
        ({}, "the code is for 2 workers, but the group has 1 processes"),
    ],
)
def test_settings_out_of_range_are_refused(workers, settings, words):
    assert words in workers(1)(refuse, settings)[0]


def test_complex_codes_are_refused():
    imaginary = Code(np.eye(2), 0)
    imaginary.matrix = imaginary.matrix.astype(np.complex128)
    with pytest.raises(CodingError, match="complex"):
        loss_weights(imaginary, 0)


def test_gradients_that_round_more_than_the_code_was_examined_for_are_refused():
    with pytest.raises(CodingError, match='dtype = "bfloat16"'):
        Decoding(cyclic(4, 1, "float32"), {torch.bfloat16, torch.float32})


def test_a_binary_code_is_certified_for_the_gradients_type():
    decoding = Decoding(repetition(4, 1), {torch.bfloat16})
    certificate = decoding.of(frozenset({0, 2})).certificate
    assert certificate.dtype == "bfloat16"
    assert certificate.rounding >= 2**-8


def test_many_workers_join_a_set_and_see_who_is_in(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    marks = WorkerSet(KeyValueStore("marks", store), 200)
    joined = set()
    for worker in [0, 61, 62, 63, 123, 124, 199, 5]:
        joined.add(worker)
        assert marks.join("key", worker) == joined
    assert marks.read("key") == joined
    assert marks.read("another") == frozenset()


class RacingStore(KeyValueStore):
    """Whoever joins a set waits, before it looks at the others' words, until both have joined."""

    both = threading.Barrier(2)

    def add(self, key, amount=1):
        value = super().add(key, amount)
        if amount > 0:
            self.both.wait(timeout=5.0)
        return value


def test_rounds_are_forgotten_though_nobody_was_the_first_to_be_ready(tmp_path):
    keys = []

    def take_part(worker):
        store = dist.FileStore(str(tmp_path / "store"), 1)
        consensus = Consensus(
            RacingStore("racing", store), worker=worker, workers=63, timeout_seconds=5.0
        )
        for round_ in range(10):
            assert consensus.announce(round_) == {0, 62}
            RacingStore.both.wait(timeout=5.0)
            consensus.forget(round_ - 1, 0, frozenset({0, 62}))
            RacingStore.both.wait(timeout=5.0)
            if worker == 0:
                keys.append(store.num_keys())

    threads = [threading.Thread(target=take_part, args=(worker,)) for worker in (0, 62)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(keys) == 10
    # A round has two keys, and a file store may count those of one that was just removed.
    assert max(keys) <= keys[0] + 2


def test_a_worker_that_says_twice_that_it_is_ready_counts_once(tmp_path):
    key_values = KeyValueStore("twice", dist.FileStore(str(tmp_path / "store"), 1))
    consensus = Consensus(key_values, worker=3, workers=8, timeout_seconds=1.0)
    assert consensus.announce(0) == {3}
    assert consensus.announce(0) == {3}
    assert consensus.announced(0) == {3}
    assert consensus.announce(1) == {3}


def test_what_is_queued_on_an_accelerator_is_awaited_and_nothing_on_the_cpu(monkeypatch):
    awaited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", awaited.append)
    synchronise([torch.device("cpu"), torch.device("meta")])
    assert awaited == []
    synchronise([torch.device("cuda", 1), torch.device("cpu"), torch.device("cuda", 1)])
    assert awaited == [torch.device("cuda", 1)]


def ready_when():
    start()
    order = []
    announce = Consensus.announce
    Consensus.announce = lambda *given: order.append("announce") or announce(*given)
    coded_module.synchronise = lambda devices: order.append(sorted(map(str, devices)))
    model = model_of()
    coded = CodedAllReduce(model, repetition(1, 0))
    for chunk, weight in coded.chunks():
        (weight * losses_of(model, samples_of(0, chunk)).sum()).backward()
    coded.reduce(0)
    return order


@processes
def test_a_message_is_announced_when_its_device_has_done_it(workers):
    devices, then = workers(1)(ready_when)[0]
    assert set(devices) == {"cpu"}
    assert then == "announce"


def ready_no_more():
    """Worker 1 counts steps wrongly, begins again, and has no whole message then."""
    rank = start()
    model = model_of()
    coded = CodedAllReduce(model, repetition(2, 0), timeout_seconds=3.0)
    dist.barrier()
    for chunk, weight in coded.chunks():
        (weight * losses_of(model, samples_of(0, chunk)).sum()).backward()
    # The other one decides, on both, when this one has announced itself.
    time.sleep(0.3 * (1 - rank))
    errors = []
    if rank == 1:
        for again in (lambda: coded.reduce(7), lambda: coded.reduce(0, finished=False)):
            with pytest.raises(CodingError) as error:
                again()
            errors.append(str(error.value))
        model.zero_grad()
        for chunk, weight in coded.chunks():
            (weight * losses_of(model, samples_of(0, chunk)).sum()).backward()
    outcome = coded.reduce(0)
    return errors, outcome.survivors, gradient_of(model)


@processes
def test_a_message_that_was_announced_is_not_summed_in_part_and_not_twice(workers):
    records = workers(2)(ready_no_more)
    assert "reduces step 7 while the others reduce step 0" in records[1][0][0]
    assert "compute all of its chunks again" in records[1][0][1]
    for _, survivors, gradient in records:
        assert survivors == (0, 1)
        assert relative(gradient, full_gradient(0, np.ones(2))) < CLOSE


def test_a_decision_survives_being_written():
    decision = Decision(12, frozenset({0, 61, 62, 9999}))
    assert Decision.parse(decision.written()) == decision
    assert Decision.parse(Decision(0, frozenset()).written()).survivors == frozenset()


def stay_small():
    start()
    model = model_of()
    key_values = KeyValueStore("small")
    coded = CodedAllReduce(model, repetition(2, 1), key_values=key_values)
    keys = []
    for step in range(12):
        for chunk, weight in coded.chunks():
            (weight * losses_of(model, samples_of(step, chunk)).sum()).backward()
        coded.reduce(step)
        dist.barrier()
        keys.append(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()
    return keys


@processes
def test_the_store_does_not_fill_up(workers):
    for keys in workers(2)(stay_small):
        assert max(keys[6:]) <= max(keys[:6]) + 2


def train_shards():
    """Two replicas of two shards each; a replica's processes share its chunks."""
    rank = start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = model_of()
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    coded = CodedAllReduce(model, repetition(2, 1), group=mesh["replicate"].get_group())
    dist.barrier()
    found = []
    for step in range(3):
        for chunk, weight in coded.chunks():
            own = samples_of(step, chunk)[rank % 2 :: 2]
            # FSDP takes the mean over the shards, and the sum is wanted.
            (2 * weight * losses_of(model, own).sum()).backward()
            time.sleep(0.2 if rank // 2 == 1 else 0.0)
        outcome = coded.reduce(step)
        whole = [each.grad.full_tensor().numpy().ravel() for each in model.parameters()]
        found.append((np.concatenate(whole), outcome.survivors))
        model.zero_grad()
    return found


@processes
def test_replicas_of_sharded_models_are_decoded_shard_by_shard(workers):
    records = workers(4)(train_shards)
    for step in range(3):
        for gradient, survivors in (record[step] for record in records):
            assert relative(gradient, full_gradient(step, np.ones(2))) < CLOSE
            assert survivors == (0,)
