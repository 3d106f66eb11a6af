"""Replay audits: clean trainings keep their bits, faults are found as often as stated, named."""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import DataCorruptionError, GuardError, JobError
from outlast.guard import Guard, Policy, guard
from outlast.guard.audit import data_hash
from outlast.guard.audit_schedule import FIRST_AUDIT, AuditBudget, AuditSchedule
from outlast.guard.cost import audit_period, detection_probability, steps_until_detected
from outlast.job import load_loop_job


class Faults:
    """Faults in operations without an identity, at a computation that a test arms."""

    armed = ""
    always = ""

    @classmethod
    def strike(cls, operation: str, numbers: torch.Tensor) -> torch.Tensor:
        if operation == cls.armed:
            cls.armed = ""
        elif operation != cls.always:
            return numbers
        with torch.no_grad():
            numbers = numbers.clone()
            # Not one alone, which dropout may hide.
            numbers.view(-1)[::5] += 0.01
        return numbers


@torch.library.custom_op("outlast_audit_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return Faults.strike("custom", x * 0.5)


@halve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


halve.register_autograd(lambda _, gradient: gradient * 0.5)


class Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Its gradient continues unchanged: a wrong value of an element-wise operation.
        y = functional.gelu(x)
        return y + (Faults.strike("gelu", y.detach()) - y.detach())


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return halve(x)


def plain_step(kind: type[torch.optim.Optimizer]) -> Any:
    """The step of a class, without the hooks that torch puts around it when it is used."""
    return (
        getattr(kind.step, "__wrapped__", kind.step) if hasattr(kind.step, "hooked") else kind.step
    )


class FaultyAdamW(torch.optim.AdamW):
    """One wrong number of an update, in one computation of it."""

    def step(self, closure: Any = None) -> Any:
        done = plain_step(torch.optim.AdamW)(self, closure)
        parameter = self.param_groups[0]["params"][0]
        parameter.data.copy_(Faults.strike("update", parameter.data))
        return done


def small(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        Gelu(),
        nn.Dropout(dropout),
        Halved(),
        nn.BatchNorm1d(16),
        nn.Linear(16, 4),
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    Faults.armed = Faults.always = ""
    yield
    Faults.armed = Faults.always = ""
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])


class Training:
    """A loop with two micro-batches a step, guarded or not."""

    def __init__(
        self,
        policy: Policy | None,
        *,
        unit: str = "micro-batch",
        model: nn.Module | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = FaultyAdamW,
        microbatches: int = 2,
        rank: int = 0,
    ) -> None:
        self.model = small(0.1) if model is None else model
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        self.guard: Guard | None = None
        if policy is not None:
            self.guard = guard(self.model, self.optimizer, policy)
        self.unit, self.microbatches = unit, microbatches
        # Two trainings of one test drop the same numbers.
        self.random = torch.Generator().manual_seed(7).get_state()
        self.generator = torch.Generator().manual_seed(1 + rank)

    def passes(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = functional.mse_loss(self.model(batch["x"]), batch["y"])
        loss.backward()
        return loss.detach()

    def step(self, fault: str = "", at: int = 0) -> None:
        """One step; `fault` strikes in the passes of micro-batch `at`, or in the update."""
        torch.set_rng_state(self.random)
        batches = [
            {
                "x": torch.randn(16, 8, generator=self.generator),
                "y": torch.randn(16, 4, generator=self.generator),
            }
            for _ in range(self.microbatches)
        ]
        for made in (0,) if self.guard is None else self.guard.attempts():
            self.optimizer.zero_grad()
            for number, batch in enumerate(batches):
                if number == at and not made and fault != "update":
                    Faults.armed = fault
                if self.guard is not None and self.unit == "micro-batch":
                    self.guard.audit(self.passes, batch)
                else:
                    self.passes(batch)
                Faults.armed = ""
        Faults.armed = fault if fault == "update" else ""
        self.optimizer.step()
        Faults.armed = ""
        self.random = torch.get_rng_state()

    def state(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.state_dict().values(), *moments]

    def findings(self) -> list[tuple[int, str, str]]:
        assert self.guard is not None
        return [(each.step, each.operation, each.outcome) for each in self.guard.ledger.findings]


def equal(one: Training, two: Training) -> bool:
    return all(map(torch.equal, one.state(), two.state()))


def audited(level: Any = "light", period: int = 1, **more: Any) -> Policy:
    return Policy(level, audit=0.005, audit_period=period, **more)


@pytest.mark.parametrize("unit", ["micro-batch", "step"])
@pytest.mark.parametrize("level", ["light", "linear", "full"])
def test_audits_change_no_bit_of_a_training(unit: str, level: str) -> None:
    clean, training = Training(None), Training(audited(level, 3), unit=unit)
    for _ in range(20):
        clean.step()
        training.step()
    assert equal(clean, training)
    assert training.guard is not None
    assert training.guard.ledger.findings == []
    report = training.guard.audits()
    assert report is not None
    # The seventh period has one more step.
    assert report.replays in (6, 7)
    assert (report.updates, report.unit) == (report.replays, unit)
    assert (report.exact, report.why_not, report.updates_why_not) == (True, "", "")
    certificate = training.guard.certificate()
    # Six parameters, three buffers of the batch normalisation.
    assert certificate["audit.gradient"].checks == report.replays * 9
    assert ("audit.loss" in certificate) == (unit == "micro-batch")


@pytest.mark.parametrize("unit", ["micro-batch", "step"])
@pytest.mark.parametrize("operation", ["gelu", "custom"])
def test_a_fault_between_checks_is_found_and_the_step_repeated(unit: str, operation: str) -> None:
    clean, training = Training(None), Training(audited("full"), unit=unit)
    at = 0
    for step in range(8):
        clean.step()
        if step == 5 and unit == "micro-batch":
            assert training.guard is not None
            assert training.guard.replays is not None
            at = training.guard.replays.schedule.draw(2, step) % 2
        training.step(operation if step == 5 else "", at)
    found = training.findings()
    assert {(step, outcome) for step, _, outcome in found} == {(5, "repeated")}
    operations = {name for _, name, _ in found}
    assert "audit.gradient" in operations
    assert ("audit.loss" in operations) == (unit == "micro-batch")
    assert training.guard is not None
    assert "the first was wrong (a third one agrees with the second)" in str(
        training.guard.ledger.findings[0]
    )
    assert equal(clean, training)


def test_a_wrong_update_is_put_right() -> None:
    clean, training = Training(None), Training(audited())
    for step in range(8):
        clean.step()
        training.step("update" if step == 5 else "")
    assert training.findings() == [(5, "audit.update", "corrected")]
    assert equal(clean, training)


@pytest.mark.slow
def test_transient_faults_are_found_as_often_as_stated() -> None:
    period, microbatches, draws = 4, 2, 500
    # Without dropout, which would mask some of the faults.
    policy = audited(period=period)
    training = Training(policy, model=small(), microbatches=microbatches)
    chooser = random.Random(3)
    steps = set(chooser.sample(range(20, 20 + 2 * draws), draws))
    injected: Counter[str] = Counter()
    at: dict[int, str] = {}
    for step in range(20 + 2 * draws):
        kind = ""
        if step in steps:
            kind = at[step] = chooser.choice(["gelu", "custom", "update"])
            injected[kind] += 1
        training.step(kind, chooser.randrange(microbatches))
    assert training.guard is not None
    report = training.guard.audits()
    assert report is not None
    assert report.share == 1 / (period * microbatches)
    found = {step for step, _, _ in training.findings()}
    # Nothing else was found, and nothing at a step without a fault.
    assert found <= set(at)
    hits = Counter(at[step] for step in found)
    for kind, count in injected.items():
        # All of this model's parameters are in one audit of an update.
        share = 1 / period if kind == "update" else report.share
        expected = detection_probability(share)
        assert binomtest(hits[kind], count, expected).pvalue > 0.001, (kind, hits, injected)
    assert sum(hits.values()) > 50


@pytest.mark.slow
@pytest.mark.parametrize("every", [1.0, 0.25])
def test_faults_that_stay_are_found_within_the_stated_steps(every: float) -> None:
    period, runs, confidence = 5, 40, 0.9
    limit = steps_until_detected(period, every=every, confidence=confidence)
    chooser = random.Random(11)
    late = 0
    for run in range(runs):
        policy = audited(period=period, seed=run)
        training = Training(policy, model=small(), microbatches=1)
        begins = chooser.randrange(20, 20 + period)
        for step in range(begins + limit):
            strikes = step >= begins and chooser.random() < every
            training.step("gelu" if strikes else "")
            if training.findings():
                break
        else:
            late += 1
    if every == 1.0:
        assert late == 0
    else:
        assert binomtest(late, runs, 1 - confidence, alternative="greater").pvalue > 0.001


def test_a_fault_that_repeats_itself_is_not_seen_by_the_same_device() -> None:
    training = Training(audited())
    Faults.always = "gelu"
    for _ in range(5):
        training.step()
    assert training.findings() == []


def test_a_batch_that_changes_in_memory_is_found_and_put_back() -> None:
    training, clean = Training(audited(), microbatches=1), Training(None, microbatches=1)
    plain = training.passes
    changed = False

    def passes(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal changed
        if training.guard is not None and training.guard.watch.step == 3 and not changed:
            batch["x"][2, 1] += 1.0
            changed = True
        return plain(batch)

    training.passes = passes  # type: ignore[method-assign]
    for _ in range(6):
        training.step()
        clean.step()
    assert (3, "audit.data", "repeated") in training.findings()
    assert {step for step, _, _ in training.findings()} == {3}
    assert equal(clean, training)


def test_passes_may_write_to_their_batch() -> None:
    training = Training(audited())
    plain = training.passes

    def passes(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"].mul_(2.0)
        return plain(batch)

    training.passes = passes  # type: ignore[method-assign]
    for _ in range(4):
        training.step()
    assert training.findings() == []


def test_a_batch_that_is_read_wrongly_is_found() -> None:
    training = Training(audited(), microbatches=1)
    assert training.guard is not None
    right, read = torch.ones(4, 8), torch.ones(4, 8)
    read[0, 0] = 2.0
    batch = {"x": read, "y": torch.ones(4, 4)}

    def attempt(handle: Guard) -> None:
        for _ in handle.attempts():
            training.optimizer.zero_grad()
            handle.audit(training.passes, batch, reload=lambda: {"x": right, "y": batch["y"]})

    with pytest.raises(DataCorruptionError, match="read again, it is another one"):
        attempt(training.guard)


class Counting(nn.Module):
    """Depends on what no audit can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1.0 + 0.01 * self.calls)


@pytest.mark.parametrize("unit", ["micro-batch", "step"])
def test_passes_that_cannot_be_repeated_are_named_once_and_never_stop_a_run(unit: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Counting(), nn.Linear(16, 4))
    training = Training(audited(), unit=unit, model=model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            training.step()
    told = [str(each.message) for each in caught if "guard.audit" in str(each.message)]
    assert len(told) == 1
    assert "they give other numbers each time" in told[0]
    assert training.findings() == []
    assert training.guard is not None
    report = training.guard.audits()
    assert report is not None
    assert report.why_not
    assert report.share == 0.0
    assert report.updates == 6


class Noisy(nn.Module):
    """Sums in no fixed order, as a device without deterministic algorithms."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = np.random.default_rng().permutation(x.shape[1])
        return x + x[:, order].sum(dim=1, keepdim=True) * 0.3


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["micro-batch", "step"])
def test_where_bits_differ_a_tolerance_is_measured(unit: str) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Noisy(), Gelu(), nn.Linear(16, 4))
    training = Training(audited(), unit=unit, model=model)
    for step in range(60):
        at = 0
        if step == 50 and unit == "micro-batch":
            assert training.guard is not None
            assert training.guard.replays is not None
            at = training.guard.replays.schedule.draw(2, step) % 2
        training.step("gelu" if step == 50 else "", at)
    assert training.guard is not None
    report = training.guard.audits()
    assert report is not None
    assert report.exact is False
    assert 1e-7 < report.tolerance < 1e-4
    assert {(step, outcome) for step, _, outcome in training.findings()} == {(50, "repeated")}


class Coupled(torch.optim.SGD):
    """Scales all updates by the norm of all gradients, as LARS does."""

    def step(self, closure: Any = None) -> Any:
        parameters = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            each.grad.div_(norm)
        return plain_step(torch.optim.SGD)(self, closure)


def test_an_optimizer_whose_step_of_a_slice_differs_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outlast.guard.update_audit.UPDATE_ELEMENTS", 32)
    training = Training(audited(), optimizer=Coupled)
    with pytest.warns(UserWarning, match="updates are not audited: Coupled"):
        training.step()
    for _ in range(3):
        training.step()
    assert training.findings() == []


@pytest.mark.parametrize(
    "optimizer",
    ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Rprop", "ASGD"],
)
def test_steps_of_torchs_optimizers_are_repeated_bit_for_bit(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.guard.update_audit.UPDATE_ELEMENTS", 64)
    kind = getattr(torch.optim, optimizer)
    clean = Training(None, optimizer=kind)
    training = Training(audited(), optimizer=kind)
    for _ in range(8):
        clean.step()
        training.step()
    assert training.findings() == []
    assert equal(clean, training)
    assert training.guard is not None
    report = training.guard.audits()
    assert report is not None
    assert (report.updates, report.updates_why_not) == (8, "")
    assert report.update_share < 1.0


def test_a_loop_whose_passes_nobody_can_repeat_is_told_so_once() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = guard(model, optimizer, audited())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    told = [str(each.message) for each in caught if "guard.audit" in str(each.message)]
    assert len(told) == 1
    assert "for _ in guard.attempts()" in told[0]
    report = handle.audits()
    assert report is not None
    assert (report.replays, report.updates) == (0, 4)


def test_steps_are_repeated_only_where_that_is_allowed() -> None:
    policy = audited(audit_steps=False)
    training = Training(policy, unit="step")
    given = Training(policy, unit="micro-batch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            training.step()
            given.step()
    assert not [each for each in caught if "guard.audit" in str(each.message)]
    assert training.guard is not None
    assert given.guard is not None
    report, other = training.guard.audits(), given.guard.audits()
    assert report is not None
    assert other is not None
    assert (report.replays, report.updates) == (0, 4)
    assert 'with guard.audit = "auto"' in report.why_not
    assert (other.replays, other.why_not) == (4, "")


def test_a_batch_that_cannot_be_copied_is_refused() -> None:
    training = Training(audited(), microbatches=1)
    assert training.guard is not None
    with pytest.raises(GuardError, match="a micro-batch of generator cannot be copied"):
        training.guard.audit(lambda _: None, (each for each in range(3)))


def test_off_means_off() -> None:
    for policy in (Policy("linear"), Policy("off", audit=0.005)):
        model = small()
        handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        assert handle.audits() is None


# On several ranks.


def _ranks(
    plan: dict[int, str], always: dict[int, str], persistent: str = "raise", form: str = "ddp"
) -> dict[str, Any]:
    """Train in DDP or FSDP2; at step 4 faults strike by rank, from step 6 on others stay."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    # Batch normalisation would differ over ranks.
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), Gelu(), nn.Dropout(0.1), nn.Linear(16, 4))
    if form == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    unit = "step" if form == "steps" else "micro-batch"
    policy = audited("linear", persistent=persistent)
    training = Training(policy, unit=unit, model=model, microbatches=1, rank=rank)
    error = ""
    try:
        for step in range(9):
            if step == 6:
                Faults.always = always.get(rank, "")
            training.step(plan.get(rank, "") if step == 4 else "")
    except DataCorruptionError as wrong:
        error = str(wrong)
    assert training.guard is not None
    report = training.guard.audits()
    assert report is not None
    weights = [
        each.detach().full_tensor() if form == "fsdp" else each.detach()
        for each in training.model.parameters()
    ]
    return {
        "findings": [
            (each.step, each.operation, each.outcome, each.module)
            for each in training.guard.ledger.findings
        ],
        "error": error,
        "elsewhere": report.elsewhere,
        "weights": np.concatenate([each.numpy().ravel() for each in weights]),
        "why_not": report.why_not,
    }


@pytest.mark.distributed
@pytest.mark.parametrize(("form", "size"), [("ddp", 2), ("fsdp", 3)])
def test_a_transient_fault_on_a_rank_leaves_no_trace(ranks: Any, size: int, form: str) -> None:
    clean = ranks(size)(_ranks, {}, {}, "raise", form)
    struck = ranks(size)(_ranks, {1: "gelu"}, {}, "raise", form)
    for before, after in zip(clean, struck, strict=True):
        assert before["findings"] == []
        assert before["error"] == after["error"] == before["why_not"] == ""
        assert np.array_equal(before["weights"], after["weights"])
        assert after["elsewhere"] == (form == "ddp")
    found = [each["findings"] for each in struck]
    if form == "fsdp":
        # All ranks have a part of the sum.
        assert any(found)
        assert all("whose was wrong is not known" in f[3] for own in found for f in own)
        return
    assert [bool(each) for each in found] == [rank == 1 for rank in range(size)]
    assert {(step, outcome) for step, _, outcome, _ in found[1]} == {(4, "repeated")}
    assert "rank 1 is wrong" in found[1][0][3]


@pytest.mark.distributed
def test_a_third_rank_names_a_device_that_is_always_wrong(ranks: Any) -> None:
    for suspect in range(3):
        outcomes = ranks(3)(_ranks, {}, {suspect: "gelu"})
        for rank, each in enumerate(outcomes):
            assert f"the numbers of rank {suspect} are wrong and stay so" in each["error"]
            assert bool(each["findings"]) == (rank == suspect)
        operations = {operation for _, operation, _, _ in outcomes[suspect]["findings"]}
        assert operations == {"audit.gradient", "audit.loss"}
        assert all(f"rank {suspect} is wrong" in each[3] for each in outcomes[suspect]["findings"])
        assert all(each[0] == 6 for each in outcomes[suspect]["findings"])


@pytest.mark.distributed
def test_its_gradient_can_be_left_out(ranks: Any) -> None:
    outcomes = ranks(3)(_ranks, {}, {2: "gelu"}, "drop")
    assert [each["error"] for each in outcomes] == ["", "", ""]
    assert {each[0] for each in outcomes[2]["findings"]} == {6, 7, 8}
    assert outcomes[0]["findings"] == outcomes[1]["findings"] == []
    assert np.array_equal(outcomes[0]["weights"], outcomes[2]["weights"])


@pytest.mark.distributed
def test_two_ranks_find_it_and_cannot_tell_whose_it_is(ranks: Any) -> None:
    outcomes = ranks(2)(_ranks, {}, {1: "gelu"})
    for each in outcomes:
        assert "the numbers of rank 0, 1 are wrong and stay so" in each["error"]
        assert each["findings"]
        assert all("two ranks cannot tell which" in found[3] for found in each["findings"])


def _apart(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4)))
    training = Training(audited(), model=model, microbatches=1, rank=rank)
    plain = training.passes
    # Another rank computes something else from the same batch.
    training.passes = lambda batch: plain({**batch, "x": batch["x"] + rank})  # type: ignore[method-assign]
    for _ in range(steps):
        training.step()
    assert training.guard is not None
    report = training.guard.audits()
    assert report is not None
    assert "they use more than the batch" in report.why_not
    assert training.findings() == []


@pytest.mark.distributed
def test_passes_that_depend_on_the_rank_are_told_of(ranks: Any) -> None:
    ranks(3)(_apart, 4)


# Schedule, budget and statement.


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.lists(st.integers(1, 300), max_size=20))
def test_every_period_has_one_audit_at_a_step_that_is_the_same_everywhere(
    seed: int, begin: int, periods: list[int]
) -> None:
    one, two = AuditSchedule(seed), AuditSchedule(seed)
    for schedule in (one, two):
        schedule.restart(begin)
    assert one.at == begin + FIRST_AUDIT
    end = begin + FIRST_AUDIT + 1
    for period in periods:
        for schedule in (one, two):
            assert schedule.due(schedule.at)
            assert not schedule.due(schedule.at - 1)
            schedule.advance(schedule.at + 1, period)
        assert one.at == two.at
        assert end <= one.at < end + period
        end += period


def test_steps_with_audits_are_drawn_evenly() -> None:
    schedule = AuditSchedule(5, period=10)
    places = Counter()
    for _ in range(3000):
        places[schedule.at % 10] += 1
        schedule.advance(schedule.at + 1, 10)
    assert sorted(places) == list(range(10))
    assert max(places.values()) < 400


def test_audits_take_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("outlast.guard.audit_schedule.perf_counter", lambda: clock[0])
    budget, schedule = AuditBudget(0.005), AuditSchedule(1)
    chooser = random.Random(2)
    for step in range(60_000):
        clock[0] += chooser.uniform(0.9, 1.1)
        due = schedule.due(step)
        if due:
            seconds = 5.0 if step == schedule.at == FIRST_AUDIT else 1.2
            clock[0] += seconds
            budget.spend(seconds)
        budget.step()
        if due:
            schedule.advance(step + 1, budget.period())
    assert budget.seconds / budget.steps_seconds == pytest.approx(0.005, rel=0.05)
    assert schedule.period == pytest.approx(1.2 / 0.005, rel=0.1)


def test_periods_by_hand() -> None:
    assert audit_period(1.0, 1.0, 0.005) == 200
    assert audit_period(0.5, 2.0, 0.01) == 25
    assert audit_period(0.001, 1.0, 0.5) == 1
    for arguments in ((1.0, 1.0, 0.0), (1.0, 0.0, 0.1)):
        with pytest.raises(GuardError, match="is not above 0"):
            audit_period(*arguments)


def test_the_statement_by_hand() -> None:
    assert detection_probability(0.25) == pytest.approx(0.25)
    assert detection_probability(0.25, 2) == pytest.approx(1 - 0.75**2)
    assert detection_probability(0.0, 10) == 0.0
    assert detection_probability(1.0, 0) == 0.0
    assert detection_probability(1.0, 3) == 1.0
    assert steps_until_detected(200) == 400
    assert steps_until_detected(200, every=0.5, confidence=0.75) == 600
    for wrong in ({"every": 0.0}, {"confidence": 1.1}, {"every": 0.5, "confidence": 1.0}):
        with pytest.raises(GuardError):
            steps_until_detected(200, **wrong)
    with pytest.raises(GuardError, match="share = 2"):
        detection_probability(2.0)


@given(st.integers(1, 1000), st.floats(0.01, 0.99), st.floats(0.5, 0.999))
def test_the_stated_audits_have_the_stated_confidence(
    period: int, every: float, confidence: float
) -> None:
    audits = steps_until_detected(period, every=every, confidence=confidence) // period - 1
    assert detection_probability(every, audits) >= confidence - 1e-9
    assert audits == 1 or detection_probability(every, audits - 1) < confidence


# Settings and data.


@pytest.mark.parametrize("text", ["auto", "off", "0.5 %", "2%", "100 %", "0.05 %"])
def test_the_setting_is_a_share_of_the_time(text: str) -> None:
    section = load_loop_job(None, [f"guard.audit={text}"]).guard
    named = {"auto": 0.005, "off": 0.0}
    expected = named[text] if text in named else float(text.strip(" %")) / 100
    assert math.isclose(section.audit_share, expected)


@pytest.mark.parametrize("text", ["0.005", "0 %", "-1 %", "101 %", "some %", "on", "'nan %'", "5"])
def test_other_settings_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(JobError, match=r'guard.audit = .*such as "0.5 %"'):
        load_loop_job(None, [f"guard.audit={text}"])


@pytest.mark.parametrize(("name", "value"), [("audit", 1.5), ("audit", -0.1), ("audit_period", -1)])
def test_wrong_policies_are_refused(name: str, value: Any) -> None:
    with pytest.raises(GuardError, match=f"{name} = {value}"):
        Policy(**{name: value})


@pytest.mark.filterwarnings("ignore:.*beta state:UserWarning")
def test_hashes_of_batches_tell_numbers_keys_and_order() -> None:
    batches = [
        {"a": torch.ones(2), "b": np.zeros(2)},
        {"a": torch.ones(2), "c": np.zeros(2)},
        {"a": torch.ones(2), "b": np.array([0.0, -0.0])},
        [torch.ones(2), np.zeros(2)],
        [np.zeros(2), torch.ones(2)],
        ("text", 3),
        ("text", 4),
    ]
    graph = torch.eye(3)
    batches += [graph.to_sparse(), graph.to_sparse_csr(), graph.to_sparse_csc(), graph.to_mkldnn()]
    batches += [torch.full((2,), 1j).conj(), torch.full((2,), 2j).conj()]
    assert len({data_hash(batch) for batch in batches}) == len(batches) - 1
    assert data_hash(graph.to_mkldnn()) == data_hash(graph) != data_hash(graph.to_sparse() * 2)
    assert data_hash(batches[0]) == data_hash({"a": torch.ones(2), "b": np.zeros(2)})
