import contextlib
import itertools
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from coverage_ranks import (
    KILLED,
    Pace,
    Plan,
    Step,
    die,
    distance,
    gradient_of,
    join,
    loss_of,
    mortal,
    network,
    store_process,
    train,
    whole,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from outlast.coding.protocol.coverage import Coverage
from outlast.errors import CodingError

ROUNDING = 1e-6


def run(ranks, size, plan):
    with store_process() as store:
        return ranks(size)(train, store.port, plan)


def check_exact(outcomes):
    """Every step of every rank: the whole batch's gradient, and the same bits everywhere."""
    for steps in zip(*outcomes, strict=True):
        assert all(isinstance(step, Step) for step in steps), steps
        for step in steps:
            assert step.error < ROUNDING
            assert step.outcome.certificate.exact
            assert step.outcome.certificate.error == 0
            assert step.outcome.lost == ()
            assert np.array_equal(step.gradient, steps[0].gradient)
            assert np.array_equal(step.parameters, steps[0].parameters)


@pytest.mark.distributed
def test_with_nobody_slow_everybody_does_its_own_chunks_and_the_gradient_is_the_whole_batchs(ranks):
    plan = Plan({"chunks_per_rank": 4}, steps=6, seconds=lambda rank: 0.04)
    outcomes = run(ranks, 4, plan)
    check_exact(outcomes)
    for rank, steps in enumerate(outcomes):
        own = set(range(4 * rank, 4 * rank + 4))
        # Not in each of them: whoever comes a moment late, as to the first, loses a chunk.
        assert sum(own <= set(step.began) for step in steps) >= 3
        assert np.median([step.outcome.yielded for step in steps]) == 0
        assert np.median([step.outcome.taken_over for step in steps]) == 0
        assert steps[0].outcome.ranks == (0, 1, 2, 3)
    for steps in zip(*outcomes, strict=True):
        assert sum(e.outcome.taken_over - e.outcome.yielded for e in steps) == 0


@pytest.mark.distributed
def test_the_losses_of_all_ranks_add_up_to_the_loss_of_the_batch(ranks):
    outcomes = run(ranks, 3, Plan({"chunks_per_rank": 2}, steps=1, seconds=lambda rank: 0.01))
    model = network()
    expected = sum(loss_of(model, 0, chunk).item() for chunk in range(6))
    assert sum(steps[0].outcome.loss for steps in outcomes) == pytest.approx(expected, rel=1e-6)


def ddp_and_coverage(port):
    rank = join(port)
    size, chunks = dist.get_world_size(), 3
    model, other = network(), network()
    wrapped = DistributedDataParallel(other)
    coverage = Coverage(model, chunks_per_rank=chunks)
    coverage.step(0, lambda chunk: loss_of(model, 0, chunk))
    for number in range(chunks):
        last = number == chunks - 1
        with contextlib.nullcontext() if last else wrapped.no_sync():
            loss_of(wrapped, 0, rank * chunks + number).backward()
    dist.barrier()
    return distance(gradient_of(model), size * gradient_of(other))


@pytest.mark.distributed
def test_the_gradient_is_that_of_ddp_times_the_number_of_ranks(ranks):
    with store_process() as store:
        assert max(ranks(4)(ddp_and_coverage, store.port)) < ROUNDING


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "chunks", "copies"), [(1, 4, None), (3, 2, 3), (3, 1, 2), (3, 2, 1), (2, 1, 2)]
)
def test_every_shape_is_exact(ranks, size, chunks, copies):
    settings = {"chunks_per_rank": chunks, "copies": copies}
    outcomes = run(ranks, size, Plan(settings, steps=2, seconds=lambda rank: 0.005 + 0.01 * rank))
    check_exact(outcomes)


@pytest.mark.distributed
def test_without_helpers_everybody_waits_for_the_slow_one(ranks):
    seconds = {0: 0.005, 1: 0.1, 2: 0.005}
    plan = Plan({"chunks_per_rank": 2, "copies": 1}, steps=2, seconds=seconds.get)
    outcomes = run(ranks, 3, plan)
    check_exact(outcomes)
    for steps in outcomes:
        for step in steps:
            assert step.outcome.seconds > 0.15
            assert step.outcome.taken_over == step.outcome.yielded == 0


@pytest.mark.distributed
def test_a_slow_ranks_chunks_are_taken_over_and_the_step_is_much_shorter_than_waiting(ranks):
    slow = 5
    plan = Plan(
        {"chunks_per_rank": 4},
        steps=5,
        seconds=lambda rank: 0.25 if rank == slow else 0.025,
        dropout=0.2,
    )
    outcomes = run(ranks, 8, plan)
    check_exact(outcomes)
    waiting = 4 * 0.25
    # The first step opens connections.
    middle = float(np.median([step.outcome.seconds for step in outcomes[0][1:]]))
    assert middle < 0.5 * waiting
    assert sum(step.outcome.yielded for step in outcomes[slow]) >= 3 * plan.steps
    # It leaves its micro-batch between two layers, long before the micro-batch's end.
    assert float(np.median([step.outcome.seconds for step in outcomes[slow][1:]])) < 0.5 * waiting
    for steps in zip(*outcomes, strict=True):
        assert sum(e.outcome.taken_over - e.outcome.yielded for e in steps) == 0
    assert outcomes[slow][-1].outcome.own_seconds > 5 * outcomes[0][-1].outcome.own_seconds / 2


@pytest.mark.distributed
def test_a_slow_rank_learns_within_a_chunk_that_the_others_have_done_its_work(ranks):
    plan = Plan(
        {"chunks_per_rank": 2, "copies": 3},
        steps=3,
        seconds=lambda rank: 2.0 if rank == 1 else 0.02,
    )
    outcomes = run(ranks, 3, plan)
    check_exact(outcomes)
    for step in outcomes[1][1:]:
        assert step.outcome.yielded == 2
        assert len(step.began) == 1
        # One layer's pass takes a sixth of this.
        assert step.outcome.seconds < 2.0


def draws(port, slow):
    """The caller's random numbers after every step."""
    rank = join(port)
    model = network(dropout=0.3)
    coverage = Coverage(model, chunks_per_rank=3)
    Pace.seconds = 0.15 if rank == slow else 0.01
    torch.manual_seed(rank)
    found = []
    for step in range(3):
        coverage.step(step, lambda chunk, step=step: loss_of(model, step, chunk))
        found.append(torch.rand(3).tolist())
    dist.barrier()
    return found


@pytest.mark.distributed
def test_dropout_in_the_model_leaves_the_callers_random_stream_alone(ranks):
    with store_process() as store:
        outcomes = ranks(3)(draws, store.port, 1)
    for rank, found in enumerate(outcomes):
        torch.manual_seed(rank)
        assert found == [torch.rand(3).tolist() for _ in range(3)]


@pytest.mark.distributed
def test_dropout_differs_from_step_to_step_and_from_seed_to_seed(ranks):
    gradients = []
    for seed in (0, 1):
        plan = Plan({"chunks_per_rank": 2, "seed": seed}, steps=1, dropout=0.3)
        outcomes = run(ranks, 2, plan)
        check_exact(outcomes)
        gradients.append(outcomes[0][0].gradient)
    assert distance(gradients[0], gradients[1]) > 0.01
    model = network(dropout=0.3)
    assert distance(whole(model, 0, range(4)), whole(model, 0, range(4), seed=1)) > 0.01


def deadline_plan(**settings):
    return Plan(
        {"chunks_per_rank": 4, "copies": 1, "lost": "commit", "deadline_seconds": 0.3, **settings},
        steps=3,
        seconds=lambda rank: 0.5 if rank == 1 else 0.02,
    )


@pytest.mark.distributed
@pytest.mark.parametrize("rescale", [False, True])
def test_at_the_deadline_a_step_commits_without_the_slow_chunks_and_certifies_it(ranks, rescale):
    outcomes = run(ranks, 3, deadline_plan(rescale=rescale))
    chunks = 12
    for steps in zip(*outcomes, strict=True):
        lost = steps[0].outcome.lost
        assert set(lost) <= {4, 5, 6, 7}
        assert len(lost) >= 3
        left = chunks - len(lost)
        for step in steps:
            assert step.outcome.lost == lost
            certificate = step.outcome.certificate
            assert not certificate.exact
            centred = len(lost) * chunks / left
            assert certificate.error == pytest.approx(centred if rescale else len(lost))
            assert certificate.centred == pytest.approx(centred)
            assert certificate.scale == pytest.approx(1.0 if rescale else chunks / left)
            scale = chunks / left if rescale else 1.0
            assert distance(step.gradient, scale * step.expected) < ROUNDING
            assert np.array_equal(step.gradient, steps[0].gradient)
            assert np.array_equal(step.parameters, steps[0].parameters)
    waiting = 4 * 0.5
    for steps in outcomes:
        assert max(step.outcome.seconds for step in steps[1:]) < 0.5 * waiting


@pytest.mark.distributed
def test_the_error_after_a_deadline_is_within_the_certificates_bounds(ranks):
    outcomes = run(ranks, 3, deadline_plan())
    step = outcomes[0][0]
    model = network()
    columns = np.stack([whole(model, 0, [chunk]) for chunk in range(12)], axis=1)
    error = np.linalg.norm(step.gradient - columns.sum(axis=1))
    certificate = step.outcome.certificate
    assert error <= certificate.bound(np.linalg.norm(columns, 2))
    centred = columns - columns.mean(axis=1, keepdims=True)
    assert error <= np.sqrt(certificate.centred) * np.linalg.norm(centred, 2)


@pytest.mark.distributed
def test_everybody_slow_ends_at_the_deadline_too(ranks):
    plan = Plan(
        {"chunks_per_rank": 8, "copies": 2, "lost": "commit", "deadline_seconds": 0.3},
        steps=3,
        seconds=lambda rank: 0.1,
    )
    outcomes = run(ranks, 2, plan)
    for steps in zip(*(each[1:] for each in outcomes), strict=True):
        for step in steps:
            assert step.outcome.seconds < 0.75 * 0.8
            assert 0 < len(step.outcome.lost) < 16
            assert step.outcome.lost == steps[0].outcome.lost


@pytest.mark.distributed
def test_alone_a_process_stops_at_the_deadline_as_well(ranks):
    plan = Plan(
        {"chunks_per_rank": 8, "lost": "commit", "deadline_seconds": 0.2},
        steps=2,
        seconds=lambda rank: 0.05,
    )
    for step in run(ranks, 1, plan)[0]:
        assert 0 < len(step.outcome.lost) < 8
        left = 8 - len(step.outcome.lost)
        assert distance(step.gradient, 8 / left * step.expected) < ROUNDING


@pytest.mark.distributed
def test_a_deadline_that_nothing_meets_is_refused_with_a_sentence(ranks):
    plan = Plan(
        {"chunks_per_rank": 1, "lost": "commit", "deadline_seconds": 0.02},
        steps=1,
        seconds=lambda rank: 1.0,
    )
    for steps in run(ranks, 2, plan):
        assert isinstance(steps[-1], CodingError)
        assert "deadline_seconds = 0.02" in str(steps[-1])


def counted_keys(port, rounds, slow):
    rank = join(port)
    model = network()
    coverage = Coverage(model, chunks_per_rank=3)
    Pace.seconds = 0.03 if rank == slow else 0.003
    watching = dist.TCPStore("127.0.0.1", port, is_master=False)
    counts = []
    for step in range(rounds):
        coverage.step(step, lambda chunk, step=step: loss_of(model, step, chunk))
        counts.append(watching.num_keys())
    dist.barrier()
    return counts


@pytest.mark.distributed
def test_keys_do_not_pile_up_in_the_store(ranks):
    with store_process() as store:
        counts = ranks(3)(counted_keys, store.port, 30, 1)[0]
    one_round = 3 * 3 * 2 + 3 + 4
    assert max(counts[20:]) <= max(counts[4:12]) + one_round


def shared_replicas(
    port, slow_replica, patience, after=lambda step: None, during=lambda rank, step: None
):
    """Two replicas of two shards; every process takes half of a chunk's rows."""
    rank = join(port)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    team, group = mesh["shard"].get_group(), mesh["replicate"].get_group()
    coverage = Coverage(model, chunks_per_rank=4, group=group, team=team, patience=patience)
    half = slice(0, 2) if dist.get_rank(team) == 0 else slice(2, 4)
    Pace.seconds = 0.1 if rank // 2 == slow_replica else 0.01
    found = []
    for step in range(3):
        # FSDP means over the shards, and the chunk's loss is a sum over its rows.

        def compute(chunk, step=step):
            during(rank, step)
            return 2 * loss_of(model, step, chunk, half)

        outcome = coverage.step(step, compute)
        gradient = np.concatenate(
            [each.grad.full_tensor().double().numpy().ravel() for each in model.parameters()]
        )
        model.zero_grad()
        error = distance(gradient, whole(network(), step, range(8)))
        taken = outcome.taken_over, outcome.yielded
        found.append((error, taken, outcome.disagreements, outcome.certificate.exact))
        if rank == 1:
            after(step)
    dist.barrier()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("patience", [1.0, 0.0])
def test_with_fsdp_whole_replicas_cover_for_each_other(ranks, patience):
    with store_process() as store:
        outcomes = ranks(4)(shared_replicas, store.port, 1, patience)
    for steps in outcomes:
        for error, _, disagreements, exact in steps:
            assert error < ROUNDING
            assert exact
            assert disagreements == ()
    for step in range(3):
        taken = [outcomes[rank][step][1] for rank in range(4)]
        assert taken[0] == taken[1]
        assert taken[2] == taken[3]
        assert taken[0][0] == taken[2][1] >= 2


@pytest.mark.distributed
def test_with_fsdp_a_restarted_store_is_found_again_by_all_processes_of_a_replica(ranks):
    with store_process() as store:

        def restart(step):
            if step == 0:
                store.restart()
                time.sleep(0.2)

        outcomes = ranks(4)(shared_replicas, store.port, 1, 0.25, restart)
    for steps in outcomes:
        assert all(error < ROUNDING and exact for error, _, _, exact in steps)


def dies(port):
    try:
        return shared_replicas(
            port, 1, 0.25, during=lambda rank, step: rank == 3 and step and die()
        )
    except Exception as error:
        return error


@pytest.mark.distributed
def test_with_fsdp_the_loss_of_a_part_of_a_replica_ends_the_step_with_a_sentence(ranks):
    with store_process() as store:
        outcomes = ranks(4)(mortal, dies, store.port)
    assert outcomes[3] == KILLED
    for error in outcomes[:2]:
        assert isinstance(error, CodingError)
        assert "summing gradients over ranks" in str(error)
    assert isinstance(outcomes[2], Exception)


def refusal(settings):
    with pytest.raises(CodingError) as caught:
        Coverage(network(), **settings)
    return str(caught.value)


def refusals(port):
    join(port)
    found = {
        "deadline": refusal({"chunks_per_rank": 2, "deadline_seconds": 1.0}),
        "many": refusal({"chunks_per_rank": 2, "copies": 3}),
        "none": refusal({"chunks_per_rank": 2, "copies": 0}),
        "empty": refusal({"chunks_per_rank": 0}),
    }
    frozen = network().requires_grad_(False)
    for name, model in (("ddp", DistributedDataParallel(network())), ("frozen", frozen)):
        with pytest.raises(CodingError) as caught:
            Coverage(model, chunks_per_rank=2)
        found[name] = str(caught.value)
    dist.barrier()
    return found


@pytest.mark.distributed
def test_settings_that_cannot_be_are_refused_with_the_nearest_right_ones(ranks):
    with store_process() as store:
        found = ranks(2)(refusals, store.port)[0]
    assert "deadline_seconds = 1 needs lost = 'commit'" in found["deadline"]
    assert "copies = 3" in found["many"]
    assert "from 1 to 2" in found["many"]
    assert "copies = 0" in found["none"]
    assert "chunks_per_rank = 0 is below 1" in found["empty"]
    assert "model.module" in found["ddp"]
    assert "no parameter" in found["frozen"]


def test_without_a_process_group_the_error_says_what_to_call():
    assert "init_process_group" in refusal({"chunks_per_rank": 2})


@pytest.mark.distributed
def test_two_coverages_in_one_program_do_not_mix_their_chunks(ranks):
    with store_process() as store:
        for rank, errors in enumerate(ranks(3)(two_coverages, store.port)):
            assert max(errors) < ROUNDING, rank


def two_coverages(port):
    join(port)
    models = network(), network()
    coverages = [Coverage(model, chunks_per_rank=2, seed=7) for model in models]
    errors = []
    for step, number in itertools.product(range(2), range(2)):
        model, other = models[number], 10 * step + number
        coverages[number].step(step, lambda chunk, m=model, o=other: loss_of(m, o, chunk))
        found = gradient_of(model)
        model.zero_grad()
        errors.append(distance(found, whole(model, other, range(6))))
    dist.barrier()
    return errors
