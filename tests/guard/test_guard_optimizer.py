"""Bounds of optimizer state: they hold on every gradient sequence, are attained, and see flips."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outlast.guard.optimizer import (
    adam_reach,
    adam_reach_ever,
    check_count,
    check_finite,
    check_moments,
    check_update,
    decay_of,
    matrix_rank_limit,
    orthogonal_reach,
    update_slack,
)
from outlast.guard.policy import Policy
from outlast.guard.scrubber import CheckBudget, Scrubber
from outlast.guard.watch import Watch

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.95, 0.9), (0.0, 0.99), (0.5, 0.2)]


def flip(numbers: Tensor, index: int, bit: int) -> None:
    kinds = {2: torch.int16, 4: torch.int32}
    words = numbers.detach().data.view(-1).view(kinds[numbers.element_size()])
    mask = 1 << bit
    words[index] ^= mask if mask < 2 ** (8 * numbers.element_size() - 1) else -mask


class Ticking:
    """A clock that continues by itself, a little at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def small_model(dtype: torch.dtype = torch.float32, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)).to(dtype)


class Training:
    """A tiny training under a scrubber."""

    def __init__(
        self,
        optimizers: Optimizers,
        dtype: torch.dtype = torch.float32,
        *,
        whole: bool = True,
        guarded: bool = True,
        budget: float = 0.01,
    ) -> None:
        self.model = small_model(dtype)
        self.optimizers = optimizers(self.model)
        self.clock = Ticking()
        self.watch = Watch(Policy(level="light", light_budget=budget), None)
        named = list(self.model.named_parameters())
        self.guarded = guarded
        self.scrubber = Scrubber(self.watch, named, self.optimizers, whole=whole, clock=self.clock)
        self.x = torch.randn(64, 16).to(dtype) + 0.5
        examine = self.scrubber._examine

        def timed(*arguments: Any) -> None:
            self.clock.now += 2e-4
            examine(*arguments)

        self.scrubber._examine = timed  # type: ignore[method-assign]

    def step(self, fault: Callable[["Training"], None] | None = None) -> None:
        for each in self.optimizers:
            each.zero_grad()
        (self.model(self.x) - self.x.roll(1, 1)).float().square().mean().backward()
        if fault:
            fault(self)
        self.clock.now += 0.1
        if self.guarded:
            self.scrubber.before_step()
        for each in self.optimizers:
            each.step()
        if self.guarded:
            self.scrubber.after_step()
            self.watch.advance()

    def run(self, steps: int) -> "Training":
        for _ in range(steps):
            self.step()
        self.scrubber.finish()
        return self

    def found(self) -> list[tuple[str, str, str]]:
        return [(f.module, f.operation, f.outcome) for f in self.watch.ledger.findings]


def adamw(**options: Any) -> Optimizers:
    return lambda model: [torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    rest = [each for each in model.parameters() if each.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)]


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1, amsgrad=True)]


def adagrad(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad(model.parameters(), lr=1e-2)]


KINDS = {
    **{f"adamw{betas}": adamw(betas=betas) for betas in BETAS},
    "foreach": adamw(foreach=True),
    "fused": adamw(fused=True),
    "adam": adam,
    "muon": muon,
    "sgd": sgd,
    "adagrad": adagrad,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_raises_no_alarm(kind: str, dtype: torch.dtype) -> None:
    training = Training(KINDS[kind], dtype).run(25)
    assert training.found() == []
    operations = {operation for _, operation in training.watch.ledger.sites}
    assert "rest" in operations
    assert ("optimizer.moments" in operations) == (kind not in ("sgd", "adagrad"))


@pytest.mark.parametrize("kind", ["adamw(0.9, 0.95)", "muon"])
def test_the_scrubber_changes_no_bit(kind: str) -> None:
    guarded = Training(KINDS[kind]).run(5).model.state_dict()
    plain = Training(KINDS[kind], guarded=False).run(5).model.state_dict()
    assert all(torch.equal(guarded[name], plain[name]) for name in plain)


def test_changing_betas_and_rates_raise_no_alarm() -> None:
    training = Training(adamw())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        training.optimizers[0], max_lr=0.1, total_steps=40
    )
    for _ in range(35):
        training.step()
        schedule.step()
    training.scrubber.finish()
    assert training.found() == []


def moments_after(gradients: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """exp_avg, exp_avg_sq and the last update of AdamW with lr = 1 for gradients (steps, n)."""
    parameter = nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = torch.optim.AdamW([parameter], lr=1.0, betas=betas, weight_decay=0.0, eps=1e-8)
    update = torch.zeros_like(parameter)
    for gradient in gradients:
        parameter.data.zero_()
        parameter.grad = gradient.clone()
        optimizer.step()
        update = parameter.detach().clone()
    state = optimizer.state[parameter]
    return state["exp_avg"], state["exp_avg_sq"], update


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    steps=st.integers(1, 30),
    beta1=st.floats(0.0, 0.99),
    beta2=st.floats(0.05, 0.9999),
    spread=st.floats(0.0, 30.0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_gradients_exceed_the_bound(
    seed: int, steps: int, beta1: float, beta2: float, spread: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(steps, 64, generator=generator).clamp(-3, 0))
    gradients = (size * torch.randn(steps, 64, generator=generator)).to(dtype)
    # Half of the columns are the worst case: growing as (b1/b2)^i.
    worst = torch.linspace(-steps, 0, steps).mul(-math.log(max(beta1, 1e-3) / beta2)).neg().exp()
    gradients[:, :32] = worst.clamp(1e-12, 1e12)[:, None].to(dtype)
    betas = (beta1, beta2)
    first, second, update = moments_after(gradients, betas)
    decay = decay_of(betas, dtype)
    found = check_moments(first, second, decay.squared(float(steps)), decay.floor)
    assert not found.judged.exceeded
    assert not found.not_finite
    limit = adam_reach(decay, betas, 1e-8, float(steps)) * update_slack(dtype)
    assert not check_update(update, torch.zeros_like(update), 1.0, limit).judged.exceeded


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.9, 0.8)])
@pytest.mark.parametrize("steps", [1, 3, 40])
def test_the_bound_is_attained(betas: tuple[float, float], steps: int) -> None:
    exponents = torch.arange(steps, 0, -1, dtype=torch.float64)
    gradients = ((betas[0] / betas[1]) ** exponents).float()[:, None]
    first, second, update = moments_after(gradients, betas)
    decay = decay_of(betas, torch.float32)
    reached = float(first.double().square() / second.double())
    assert 0.9999 < reached / decay.squared(float(steps)) <= 1.0
    assert float(update.abs()) > 0.9999 * adam_reach(decay, betas, 1e-8, float(steps))


def test_the_bound_grows_without_end_where_the_first_moment_forgets_too_slowly() -> None:
    assert adam_reach_ever(decay_of((0.9, 0.999), torch.float32), (0.9, 0.999), 1e-8) < 7.3
    slow = decay_of((0.95, 0.9), torch.float32)
    assert slow.squared(200.0) > 2 * slow.squared(100.0)
    assert adam_reach_ever(slow, (0.95, 0.9), 1e-8) == math.inf


@pytest.mark.parametrize("shape", [(64, 64), (32, 128)])
def test_an_orthogonalised_matrix_stays_below_its_bound(shape: tuple[int, int]) -> None:
    coefficients = (3.4445, -4.7750, 2.0315)
    orthogonalise = torch.optim._muon._zeropower_via_newtonschulz
    reach = orthogonal_reach(coefficients, 5, max(shape))
    largest = 0.0
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        u, s, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
        for spectrum in (s, torch.logspace(0, -1 - seed, len(s))):
            done = orthogonalise(u * spectrum @ v, coefficients, 5, 1e-7).double()
            largest = max(largest, float(torch.linalg.matrix_norm(done, 2)))
    assert 0.95 * reach < largest <= reach


def test_a_run_of_a_matrix_has_few_ranks() -> None:
    shape = torch.Size([10, 8])
    assert matrix_rank_limit(shape, 0, 80) == 8
    assert matrix_rank_limit(shape, 4, 8) == 2
    assert matrix_rank_limit(shape, 9, 3) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_sign_and_many_exponent_flips_of_the_second_moment_are_seen(
    dtype: torch.dtype,
) -> None:
    training = Training(adamw(), dtype).run(10)
    state = training.optimizers[0].state[training.model[0].weight]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    decay = decay_of((0.9, 0.999), dtype)
    top = 8 * dtype.itemsize - 1
    shares = {}
    for bit in range(top, top - 9, -1):
        found = 0
        for index in range(64):
            wrong = second.clone()
            flip(wrong, index, bit)
            examined = check_moments(first, wrong, decay.squared(10.0), decay.floor)
            found += bool(examined.judged.exceeded)
        shares[bit] = found / 64
    # A zero keeps its meaning with another sign; a number that grows slows its parameter only.
    assert shares[top] == float((second.reshape(-1)[:64] != 0).double().mean())
    assert shares[top - 3] > 0.9, shares


def test_moments_that_gradients_can_bring_about_are_no_fault() -> None:
    nan, inf = math.nan, math.inf
    first = torch.tensor([nan, inf, 1e15, 1.0, nan, 1.0, 1.0])
    second = torch.tensor([nan, inf, inf, nan, 1.0, -inf, -1.0])
    found = check_moments(first, second, 50.0, 1e-35)
    assert found.judged.flags.tolist() == [False, False, False, True, True, True, True]
    assert int(found.not_finite) == 3


def test_a_parameter_spoilt_by_finite_numbers_is_a_fault() -> None:
    old, new = torch.zeros(3), torch.tensor([0.0, math.nan, math.nan])
    moments = (torch.tensor([0.0, 0.0, math.nan]), torch.ones(3))
    found = check_update(new, old, 1.0, 1e-3, moments)
    assert found.judged.flags.tolist() == [False, True, False]
    assert int(found.not_finite) == 1


def test_a_momentum_spoilt_by_its_gradient_is_no_fault() -> None:
    momentum = torch.tensor([math.inf, math.nan, math.inf, 0.0])
    before = torch.tensor([0.0, math.nan, 0.0, 0.0])
    gradient = torch.tensor([math.inf, 0.0, 0.0, 0.0])
    found = check_finite(momentum, before, gradient)
    assert found.judged.flags.tolist() == [False, False, True, False]
    assert int(found.not_finite) == 2


@pytest.mark.parametrize(("after", "wrong"), [(5.0, False), (6.0, False), (7.0, True), (3.0, True)])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_count_goes_up_by_one(after: float, wrong: bool, on_device: bool) -> None:
    counts = (torch.tensor(5.0), torch.tensor(after)) if on_device else (5.0, after)
    assert bool(check_count(*counts, torch.device("cpu")).exceeded) == wrong


def test_a_diverged_training_is_reported_once_and_is_no_fault() -> None:
    training = Training(adamw()).run(3)

    def diverge(training: Training) -> None:
        for parameter in training.model.parameters():
            parameter.grad.fill_(math.nan)

    training.step(diverge)
    training.run(4)
    names = {name for name, _ in training.model.named_parameters()}
    assert {outcome for _, _, outcome in training.found()} == {"not_finite"}
    assert sorted(module for module, _, _ in training.found()) == sorted(names)


def test_a_wrong_update_is_found() -> None:
    training = Training(adamw()).run(5)
    training.step()
    training.optimizers[0].zero_grad()
    training.model(training.x).square().mean().backward()
    training.scrubber.before_step()
    training.optimizers[0].step()
    training.model[0].weight.data[3, 3] += 0.05
    training.scrubber.after_step()
    training.scrubber.finish()
    assert ("0.weight", "optimizer.update", "detected") in training.found()


@pytest.mark.parametrize(
    ("moment", "factor", "operation"),
    [
        # The gradients soon fill it again, but its parameter has jumped.
        ("exp_avg_sq", 2.0**-32, "weight.range"),
        ("exp_avg", 2.0**8, "optimizer.moments"),
    ],
)
def test_a_moment_that_changed_at_rest_is_found_within_a_period(
    moment: str, factor: float, operation: str
) -> None:
    training = Training(adamw(), whole=False, budget=0.002)
    training.run(60)
    period = training.scrubber.period_steps
    assert period is not None
    assert 3 < period < 12
    assert training.found() == []

    def fault(training: Training) -> None:
        state = training.optimizers[0].state[training.model[2].weight]
        state[moment].data[1] *= factor

    training.step(fault)
    training.run(period)
    assert ("2.weight", operation, "detected") in training.found()


def test_a_flipped_sign_of_a_second_moment_is_found_in_the_step_that_uses_it() -> None:
    training = Training(adamw()).run(5)

    def fault(training: Training) -> None:
        flip(training.optimizers[0].state[training.model[2].weight]["exp_avg_sq"], 7, 31)

    training.step(fault)
    training.scrubber.finish()
    assert ("2.weight", "optimizer.moments", "detected") in training.found()


@pytest.mark.parametrize("optimizers", [adamw(lr=1e-4), muon])
def test_a_weight_that_has_grown_at_rest_is_found_within_a_period(optimizers: Optimizers) -> None:
    training = Training(optimizers, whole=False, budget=0.0005)
    training.run(60)
    period = training.scrubber.period_steps
    assert period is not None
    assert period > 12
    assert training.found() == []

    def fault(training: Training) -> None:
        training.model[2].weight.data[3, 3] = 50.0

    training.step(fault)
    training.run(period)
    assert ("2.weight", "weight.range", "detected") in training.found()


def test_a_program_that_writes_to_weights_is_no_fault() -> None:
    training = Training(adamw()).run(5)

    def reload(training: Training) -> None:
        with torch.no_grad():
            training.model[0].weight.mul_(1e6)

    training.step(reload)
    training.run(3)
    assert training.found() == []


def test_a_step_that_a_scaler_leaves_out_is_no_fault() -> None:
    training = Training(adamw(fused=True)).run(3)
    optimizer = training.optimizers[0]
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.grad_scale = torch.tensor(1.0)
    training.step()
    del optimizer.found_inf, optimizer.grad_scale
    training.run(2)
    assert training.found() == []


@settings(max_examples=40, deadline=None)
@given(
    call_seconds=st.floats(1e-5, 1e-3),
    million_seconds=st.floats(1e-4, 1e-2),
    step_seconds=st.floats(1e-2, 10.0),
    budget=st.floats(1e-4, 1e-2),
)
def test_checks_take_what_they_may(
    call_seconds: float, million_seconds: float, step_seconds: float, budget: float
) -> None:
    pace, sizes = CheckBudget(budget), [65536] * 40 + [100] * 20
    cursor = due = spent = longest = visited = 0.0
    steps = 3000
    for step in range(steps):
        pace.earn(step_seconds)
        if step < due:
            continue
        gap, until = pace.plan(sizes, int(cursor))
        if gap:
            due = step + gap
            continue
        chosen = sizes[int(cursor) : until]
        seconds = len(chosen) * call_seconds + sum(chosen) / 1e6 * million_seconds
        pace.spend(seconds)
        pace.learn(len(chosen), sum(chosen), seconds)
        cursor = until % len(sizes)
        spent, longest, visited = spent + seconds, max(longest, seconds), visited + len(chosen)
    earned = budget * step_seconds * steps
    assert spent <= earned + longest
    # What may be spent is spent, unless everything was checked in every step or nearly so.
    one = call_seconds + 65536 / 1e6 * million_seconds
    if earned > 50 * one and visited < steps:
        assert spent > 0.5 * earned


def test_a_longer_step_is_scrubberled_in_larger_slices() -> None:
    sizes = [65536] * 1000
    slices = []
    for step_seconds in (0.1, 1.0, 10.0):
        pace = CheckBudget(0.0005)
        for _ in range(10):
            pace.learn(1, 65536, 2e-4)
            pace.learn(8, 8 * 65536, 1.1e-3)
        pace.earn(step_seconds)
        slices.append(pace.plan(sizes, 0))
    assert slices[0][0] > 0
    assert slices[1][0] == 0
    assert slices[1][1] in (2, 3, 4)
    assert slices[2][1] > 20


class Slow:
    """A clock that every look moves on, and most the one that ends the first round's beginning."""

    def __init__(self, usual: float, first: float) -> None:
        self.now, self.looks = 0.0, 0
        self.usual, self.first = usual, first

    def __call__(self) -> float:
        self.looks += 1
        self.now += self.first if self.looks == 3 else self.usual
        return self.now


@pytest.mark.parametrize(("usual", "first"), [(1e-5, 4e-3), (4e-4, 4e-4), (1e-6, 1e-6)])
def test_a_hundred_steps_are_slowed_by_no_more_than_their_share(usual: float, first: float) -> None:
    training = Training(adamw(), whole=False, budget=0.0005)
    clock = Slow(usual, first)
    training.clock = training.scrubber._clock = clock  # type: ignore[assignment]
    begun, checked = clock.now, 1e-9
    for _ in range(100):
        before = clock.now
        training.step()
        checked += clock.now - before - 0.1
    assert len(training.watch.ledger.sites) > 1
    assert first <= training.scrubber.seconds <= checked
    assert training.scrubber.seconds <= 0.0005 * (clock.now - begun)


def test_a_step_without_a_round_looks_at_no_clock_and_no_number() -> None:
    training = Training(adamw(), whole=False, budget=0.0005).run(30)
    idle = 0
    for _ in range(20):
        before, rounds = training.clock.now, training.scrubber._round
        training.step()
        if rounds is None and training.scrubber._round is None:
            assert training.clock.now - before == pytest.approx(0.1, abs=1e-9)
            idle += 1
    assert idle > 5


def test_a_scrubber_is_prepared_without_a_draw_and_without_a_look_at_the_optimizer() -> None:
    model = small_model()
    optimizers = [*muon(model), *sgd(model)]
    draws = torch.get_rng_state()
    calls: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda *arguments: calls.append(arguments))
    watch = Watch(Policy(level="light"), None)
    scrubber = Scrubber(watch, model.named_parameters(), optimizers)
    handle.remove()
    assert torch.equal(torch.get_rng_state(), draws)
    assert (calls, watch.ledger.sites, watch.ledger.findings) == ([], {}, [])
    assert (scrubber.seconds, scrubber.steps) == (0.0, 0)
    assert not any(optimizer.state for optimizer in optimizers)


def test_rates_that_rise_and_fall_between_rounds_are_counted() -> None:
    """The bound on parameters must know every step's rate, also of steps without a round."""
    training = Training(adamw(lr=1e-9), whole=False, budget=0.0005)
    options = training.optimizers[0].param_groups[0]
    for _ in range(100):
        idle = training.scrubber.steps + 1 < training.scrubber._due
        options["lr"] = 0.3 if idle else 1e-9
        training.step()
    training.scrubber.finish()
    assert training.found() == []
    assert ("0.weight", "weight.range") in training.watch.ledger.sites


def test_a_rate_in_a_tensor_is_known_only_where_every_step_was_looked_at() -> None:
    training = Training(adamw(lr=torch.tensor(1e-9)), whole=False, budget=0.0005)
    rate = training.optimizers[0].param_groups[0]["lr"]
    for _ in range(100):
        rate.fill_(0.3 if training.scrubber.steps + 1 < training.scrubber._due else 1e-9)
        training.step()
    training.scrubber.finish()
    assert training.found() == []
    assert ("0.weight", "weight.range") not in training.watch.ledger.sites
