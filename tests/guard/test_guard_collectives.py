"""DDP's gradient reductions, checked: same bits, every fault known to all ranks, erasures exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from guard_faults import Fault
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import DataCorruptionError, GuardError
from outlast.guard import guard
from outlast.guard.collectives import ReductionTerms, checksums, compare
from outlast.guard.findings import Site
from outlast.guard.handle import agree, install_collectives, remedy
from outlast.guard.policy import Policy
from outlast.guard.watch import RandomSigns, Watch

STEPS = 4


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 40)
        self.middle = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.spare = nn.Linear(40, 40)
        self.last = nn.Linear(40, 4)

    def forward(self, x, use_spare=True):
        x = self.first(x).relu()
        for each in self.middle:
            x = each(x).relu()
        return self.last(self.spare(x) if use_spare else x)


def batch_of(step, rank, micro=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(8, 16, generator=generator) + 0.5


def numbers_of(model):
    """Weights, exactly, as what a pipe between processes takes."""
    return np.concatenate([each.detach().double().numpy().ravel() for each in model.parameters()])


def start():
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank()


def train(guarded, dtype=torch.float32, micro=1, keep_gradients=False, **settings):
    rank = start()
    model = Branches().to(dtype)
    unused = settings.get("find_unused_parameters", False)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **settings)
    watch = Watch(Policy(), None)
    reduction = install_collectives(watch, ddp) if guarded else None
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not keep_gradients)
        for index in range(micro):
            ddp.require_backward_grad_sync = index == micro - 1
            x = batch_of(step, rank, index).to(dtype)
            ddp(x, use_spare=not (unused and step % 2)).float().square().mean().backward()
        if reduction is not None:
            assert reduction.verdict(0).clean
            watch.advance()
        optimizer.step()
    site = watch.ledger.sites.get(("gradients", "all_reduce"), Site("", ""))
    weights = numbers_of(ddp)
    return weights, site.checks, site.exceeded, site.spread


OPTIONS = (
    {},
    {"dtype": torch.bfloat16},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "keep_gradients": True},
    {"gradient_as_bucket_view": True, "micro": 3},
    {"micro": 3},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_checked_reductions_have_the_bits_of_plain_ddp(ranks, size):
    def work():
        return [(train(False, **each)[0], train(True, **each)) for each in OPTIONS]

    for outcomes in ranks(size)(work):
        for options, (plain, (guarded, checks, exceeded, spread)) in zip(
            OPTIONS, outcomes, strict=True
        ):
            assert np.array_equal(plain, guarded), options
            assert checks > STEPS, options
            assert exceeded == 0, options
            assert 0.2 < spread < 2.0, options


def attempts(fault, persistent="raise", local=None):
    """Three steps with remedies as a trainer applies them; returns weights and verdicts."""
    rank = start()
    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    watch = Watch(Policy(persistent=persistent), None)
    watch.fault_hook = fault
    reduction = install_collectives(watch, ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
    history = []
    for step in range(3):
        verdicts = []
        while not verdicts or not verdicts[-1].clean:
            if verdicts:
                follows = remedy(verdicts, persistent, dist.get_world_size())
                history.append((step, follows.action, follows.ranks, verdicts[-1].bad_ranks))
                if follows.action == "raise":
                    raise DataCorruptionError(f"rank {verdicts[-1].bad_ranks}")
                if follows.action == "drop":
                    reduction.drop(follows.ranks)
            watch.begin()
            reduction.begin()
            optimizer.zero_grad()
            ddp(batch_of(step, rank)).square().mean().backward()
            # What a local check has found, perhaps long after the first bucket was sent.
            if local is not None and local(step, rank):
                watch.uncorrected += 1
            verdicts.append(reduction.verdict(watch.uncorrected))
        optimizer.step()
        reduction.restore()
        watch.advance()
    weights = numbers_of(ddp)
    findings = [(each.operation, each.rank) for each in watch.ledger.findings]
    return weights, history, findings


def clean():
    return attempts(None)


def reference_without(rank_left_out, at):
    """Plain gradients, averaged over the remaining ranks' batches in one process."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(3):
        remaining = [r for r in range(4) if not (r == rank_left_out and step == at)]
        optimizer.zero_grad()
        for rank in remaining:
            (model(batch_of(step, rank)).square().mean() / len(remaining)).backward()
        optimizer.step()
    return numbers_of(model)


@pytest.mark.distributed
@pytest.mark.parametrize("level", ["linear", "full"])
def test_a_guarded_model_on_three_ranks_has_the_bits_of_plain_ddp(ranks, level):
    # A bucket of many gradients: where each lies decides in which order the ranks are added.
    def work():
        trained = []
        for guarded in (False, True):
            rank = start()
            ddp = DistributedDataParallel(Branches())
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
            handle = guard(ddp, optimizer, level) if guarded else None
            for step in range(STEPS):
                for _ in (0,) if handle is None else handle.attempts():
                    optimizer.zero_grad()
                    ddp(batch_of(step, rank)).square().mean().backward()
                optimizer.step()
            trained.append(numbers_of(ddp))
        return trained

    for plain, checked in ranks(3)(work):
        assert (plain == checked).all()


@pytest.mark.distributed
@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_part_spoilt_on_its_way_is_seen_by_all_ranks_and_redone(ranks, value):
    def work():
        return clean()[0], attempts(Fault("bucket.during", rank=2, element=7, value=value))

    for expected, (weights, history, findings) in ranks(4)(work):
        assert history == [(0, "redo", (), (0, 1, 2, 3))]
        assert [operation for operation, _ in findings] == ["all_reduce"]
        assert np.array_equal(expected, weights)


@pytest.mark.distributed
def test_a_result_spoilt_on_one_rank_is_known_to_all(ranks):
    def work():
        return clean()[0], attempts(Fault("bucket.after", rank=1, element=7, after=3))

    outcomes = ranks(4)(work)
    for rank, (expected, (weights, history, findings)) in enumerate(outcomes):
        assert [each[1:] for each in history] == [("redo", (), (1,))]
        assert bool(findings) == (rank == 1)
        assert np.array_equal(expected, weights)


@pytest.mark.distributed
def test_a_rank_that_fails_again_is_dropped_and_the_mean_is_the_others(ranks):
    def failing(step, rank):
        return step == 1 and rank == 2

    def work():
        return attempts(None, "drop", failing)

    outcomes = ranks(4)(work)
    reference = reference_without(2, at=1)
    for weights, history, _ in outcomes:
        assert history == [(1, "redo", (), (2,)), (1, "drop", (2,), (2,))]
        assert np.array_equal(weights, outcomes[0][0])
        np.testing.assert_allclose(weights, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.distributed
def test_a_dropped_rank_with_nan_gradients_leaves_no_trace(ranks):
    def failing(step, rank):
        return step == 0 and rank == 0

    def work():
        return attempts(
            Fault("bucket.before", rank=0, element=7, times=3, value=float("nan")), "drop", failing
        )

    reference = reference_without(0, at=0)
    for weights, history, _ in ranks(4)(work):
        assert history[-1][1:3] == ("drop", (0,))
        np.testing.assert_allclose(weights, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.distributed
@pytest.mark.parametrize("persistent", ["raise", "drop"])
def test_a_way_that_stays_wrong_ends_the_run_on_all_ranks(ranks, persistent):
    def work():
        try:
            attempts(Fault("bucket.during", rank=3, element=7, times=-1), persistent)
        except DataCorruptionError as error:
            return str(error)
        return "continued"

    assert ranks(4)(work) == ["rank (0, 1, 2, 3)"] * 4


@pytest.mark.distributed
def test_a_rank_that_stays_wrong_ends_the_run_on_all_ranks(ranks):
    def work():
        try:
            attempts(None, "raise", lambda step, rank: rank == 1)
        except DataCorruptionError as error:
            return str(error)
        return "continued"

    assert ranks(3)(work) == ["rank (1,)"] * 3


@pytest.mark.distributed
def test_infinities_of_the_data_are_no_fault(ranks):
    def work():
        rank = start()
        ddp = DistributedDataParallel(Branches(), bucket_cap_mb=0.01)
        watch = Watch(Policy(), None)
        reduction = install_collectives(watch, ddp)
        loss = ddp(batch_of(0, rank)).square().mean()
        (loss * (float("inf") if rank == 1 else 1.0)).backward()
        verdict = reduction.verdict(0)
        finite = all(bool(p.grad.isfinite().all()) for p in ddp.parameters())
        return verdict.clean, finite

    assert ranks(2)(work) == [(True, False)] * 2


@pytest.mark.distributed
def test_a_released_wrapper_averages_on_and_can_be_guarded_again(ranks):
    def work():
        rank = start()
        ddp = DistributedDataParallel(Branches(), bucket_cap_mb=0.01)
        counts = []
        for guarded in (True, False, True):
            watch = Watch(Policy(), None)
            reduction = install_collectives(watch, ddp) if guarded else None
            ddp.zero_grad()
            ddp(batch_of(0, rank)).square().mean().backward()
            if reduction is not None:
                assert reduction.verdict(0).clean
                reduction.remove()
            counts.append((watch.ledger.checks > 0, ddp.module.last.weight.grad.tolist()))
        return counts

    for first, second, third in ranks(2)(work):
        assert (first[0], second[0], third[0]) == (True, False, True)
        assert first[1] == second[1] == third[1]


@pytest.mark.distributed
def test_another_hook_is_refused_with_a_remedy(ranks):
    def work():
        start()
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        ddp = DistributedDataParallel(nn.Linear(4, 4))
        ddp.register_comm_hook(None, allreduce_hook)
        try:
            install_collectives(Watch(Policy(), None), ddp)
        except GuardError as error:
            return str(error)

    assert all("communication hook already" in text for text in ranks(1)(work))


def test_a_model_without_data_parallelism_has_no_collectives():
    assert install_collectives(Watch(Policy(), None), nn.Linear(2, 2)) is None
    assert agree(3, 0).clean
    assert agree(3, 2).bad_ranks == (0,)


def reduced(seed, ranks, elements, dtype, mean):
    generator = torch.Generator().manual_seed(seed)
    parts = (torch.randn(ranks, elements, generator=generator) + mean).to(dtype)
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    return parts, result


def judged_sum(parts, result, signs):
    own = checksums(parts, signs)[:, :2].sum(dim=0, keepdim=True)
    found = checksums(result[None], signs, powers=True)
    reduction = ReductionTerms(parts.dtype, len(parts))
    return compare(found, own, torch.tensor([parts.shape[1]]), reduction)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    ranks=st.integers(1, 9),
    elements=st.integers(1, 9000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    mean=st.sampled_from([0.0, 0.3, 5.0]),
    scale=st.sampled_from([1.0, 1e-4]),
)
def test_rounding_is_no_fault_and_an_error_of_the_detection_point_is_one(
    seed, ranks, elements, dtype, mean, scale
):
    parts, result = reduced(seed, ranks, elements, dtype, mean)
    parts, result = parts * scale, None
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    signs = RandomSigns(seed)
    clean = judged_sum(parts, result, signs)
    assert not clean.exceeded
    wide = result.double()
    error = 2.1 * float(clean.widest) * float(wide.norm())
    spoilt = result.clone()
    spoilt[seed % elements] += max(
        error, float(torch.finfo(dtype).eps) * 8 * float(wide.abs().max())
    )
    moved = float((spoilt.double() - wide).abs().sum())
    if moved >= error > 0:
        assert judged_sum(parts, spoilt, signs).exceeded == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks_in_sum", [2, 4, 16])
def test_the_bound_is_tight(dtype, ranks_in_sum):
    total, draws = 0.0, 60
    for seed in range(draws):
        parts, result = reduced(seed, ranks_in_sum, 5000, dtype, 0.2)
        total += float(judged_sum(parts, result, RandomSigns(seed)).total)
    assert 0.5 < (total / draws) ** 0.5 < 1.2
