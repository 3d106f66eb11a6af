"""FSDP2's collectives, checked: same bits, every fault known to all ranks, erasures exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from guard_faults import Fault
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from outlast.errors import GuardError
from outlast.guard.handle import install_collectives
from outlast.guard.policy import Policy
from outlast.guard.watch import Watch

STEPS = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(24, 50)
        self.outer = nn.Linear(50, 24)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu())


def start():
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank()


def build(replicas=1, listed=False, **settings):
    size = dist.get_world_size()
    if replicas == 1:
        mesh = init_device_mesh("cpu", (size,))
    else:
        mesh = init_device_mesh(
            "cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard")
        )
    model = nn.Sequential(nn.Linear(12, 24), Block(), Block(), nn.Linear(24, 5))
    for part in [[model[1], model[2]]] if listed else [model[1], model[2]]:
        fully_shard(part, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def batch_of(step, rank, micro=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(8, 12, generator=generator) + 0.5


def numbers_of(model):
    """The whole weights, exactly, as what a pipe between processes takes."""
    full = [each.detach().full_tensor() for each in model.parameters()]
    return np.concatenate([each.double().numpy().ravel() for each in full])


def train(guarded, micro=1, every_scatter=True, divisor=None, **settings):
    rank = start()
    model = build(**settings)
    if divisor is not None:
        for module in (model[1], model[2], model):
            module.set_gradient_divide_factor(divisor)
    watch = Watch(Policy(), None)
    reduction = install_collectives(watch, model) if guarded else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(micro):
            if every_scatter:
                model.set_requires_all_reduce(index == micro - 1)
            else:
                model.set_requires_gradient_sync(index == micro - 1)
            model(batch_of(step, rank, index)).float().square().mean().backward()
        if reduction is not None:
            assert reduction.verdict(0).clean
            watch.advance()
        optimizer.step()
    sites = {key[1]: site for key, site in watch.ledger.sites.items()}
    counts = {name: (s.checks, s.exceeded, s.spread) for name, s in sites.items()}
    return numbers_of(model), counts


OPTIONS = (
    {},
    {"mp_policy": BF16},
    {"mp_policy": ALL_BF16},
    {"mp_policy": FP16},
    {"micro": 3},
    {"micro": 3, "every_scatter": False},
    {"reshard_after_forward": False},
)
OPTIONS_OF_FOUR = (
    *OPTIONS,
    {"reshard_after_forward": 2},
    {"replicas": 2},
    {"replicas": 2, "mp_policy": BF16, "micro": 3},
    {"replicas": 2, "mp_policy": ALL_BF16, "micro": 2, "every_scatter": False},
)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "options"), [(2, OPTIONS), (3, OPTIONS), (4, OPTIONS_OF_FOUR)], ids=["2", "3", "4"]
)
def test_checked_collectives_have_the_bits_of_plain_fsdp(ranks, size, options):
    def work():
        return [(train(False, **each)[0], train(True, **each)) for each in options]

    for outcomes in ranks(size)(work):
        for setting, (plain, (guarded, counts)) in zip(options, outcomes, strict=True):
            assert np.array_equal(plain, guarded), setting
            expected = {"all_gather", "reduce_scatter"}
            expected |= {"all_reduce"} if "replicas" in setting else set()
            assert set(counts) == expected, setting
            for name, (checks, exceeded, spread) in counts.items():
                assert checks >= 3 * STEPS, (setting, name)
                assert exceeded == 0, (setting, name)
                assert spread < 1.7, (setting, name)
                # Sums of few bf16 numbers in fp32 are exact, and hashes always are.
                if name != "all_gather" and setting.get("mp_policy") is not BF16:
                    assert spread > 0.1, (setting, name)


def attempts(fault, drop=(), replicas=1, listed=False):
    """Two steps, each run again (without `drop`) until its verdict is clean."""
    rank = start()
    model = build(replicas, listed)
    watch = Watch(Policy(), None)
    watch.fault_hook = fault
    reduction = install_collectives(watch, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    history = []
    for step in range(2):
        for attempt in range(3):
            watch.begin()
            reduction.begin()
            optimizer.zero_grad()
            model(batch_of(step, rank)).square().mean().backward()
            verdict = reduction.verdict(watch.uncorrected + (rank in drop and step == 0))
            if verdict.clean:
                break
            history.append((step, verdict.bad_ranks))
            if attempt == 1:
                reduction.drop(drop)
        assert verdict.clean
        optimizer.step()
        reduction.restore()
        watch.advance()
    return numbers_of(model), history, [each.operation for each in watch.ledger.findings]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("site", "bad", "operation"),
    [
        ("gather.during", (0, 1, 2, 3), "all_gather"),
        ("gather.after", (2,), "all_gather"),
        ("bucket.during", (0,), "reduce_scatter"),
        ("bucket.after", (2,), "reduce_scatter"),
    ],
)
@pytest.mark.parametrize("value", [None, float("nan")], ids=["finite", "nan"])
def test_a_fault_in_a_collective_is_known_to_all_ranks_and_redone(
    ranks, site, bad, operation, value
):
    def work():
        return attempts(None)[0], attempts(Fault(site, rank=2, value=value))

    for rank, (expected, (weights, history, findings)) in enumerate(ranks(4)(work)):
        assert history[0][0] == 0
        # Wrong parameters may well make wrong, or no, numbers of the gradients behind them.
        assert set(bad) <= set(history[0][1])
        if rank in bad:
            assert operation in findings
        assert np.array_equal(expected, weights)


@pytest.mark.distributed
def test_hybrid_shards_are_checked_on_both_ways(ranks):
    def work():
        expected = attempts(None, replicas=2)[0]
        return expected, [
            attempts(Fault("bucket.during", 1), replicas=2),
            attempts(Fault("bucket.after", 1), replicas=2),
            attempts(Fault("bucket.after", 1, after=1), replicas=2),
        ]

    outcomes = ranks(4)(work)
    for expected, several in outcomes:
        for weights, history, _ in several:
            assert len(history) == 1
            assert np.array_equal(expected, weights)
    for position, operation in enumerate(("reduce_scatter", "reduce_scatter", "all_reduce")):
        assert any(operation in several[position][2] for _, several in outcomes)


def reference_without(rank_left_out):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), Block(), Block(), nn.Linear(24, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(2):
        remaining = [rank for rank in range(4) if rank != rank_left_out or step]
        optimizer.zero_grad()
        for rank in remaining:
            (model(batch_of(step, rank)).square().mean() / len(remaining)).backward()
        optimizer.step()
    return np.concatenate([p.detach().double().numpy().ravel() for p in model.parameters()])


@pytest.mark.distributed
@pytest.mark.parametrize(("replicas", "listed"), [(1, False), (2, False), (1, True)])
def test_a_dropped_rank_leaves_the_mean_of_the_others(ranks, replicas, listed):
    def work():
        # Only in the first step, which has two or three reductions in each of three attempts.
        times = 6 if listed else 8
        fault = Fault("bucket.before", rank=3, times=times, value=float("nan"))
        return attempts(fault, drop=(3,), replicas=replicas, listed=listed)

    outcomes = ranks(4)(work)
    reference = reference_without(3)
    for weights, history, _ in outcomes:
        assert history == [(0, (3,))] * 2
        np.testing.assert_allclose(weights, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.distributed
def test_removed_checks_give_the_communication_back(ranks):
    def work():
        rank = start()
        model = build()
        group = model._get_fsdp_state()._fsdp_param_groups[0]
        before = group._all_gather_comm, group._reduce_scatter_comm
        watch = Watch(Policy(), None)
        reduction = install_collectives(watch, model)
        replaced = group._all_gather_comm is not before[0]
        reduction.remove()
        model(batch_of(0, rank)).square().mean().backward()
        same = (group._all_gather_comm, group._reduce_scatter_comm) == before
        return replaced, same, watch.ledger.checks

    assert ranks(2)(work) == [(True, True, 0)] * 2


@pytest.mark.distributed
def test_dropping_everybody_is_refused(ranks):
    def work():
        rank = start()
        model = build()
        reduction = install_collectives(Watch(Policy(), None), model)
        reduction.drop((0, 1))
        try:
            model(batch_of(0, rank)).square().mean().backward()
        except GuardError as error:
            return str(error)

    assert all("all dropped" in text for text in ranks(2)(work))
