"""Faults in the training of a small guarded model."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outlast.errors import DataCorruptionError, GuardError
from outlast.guard import Policy, guard
from outlast.guard.inject import Fault, Injector, Rate, campaign, inject, parse_faults
from outlast.guard.inject.fault import Pattern

STEPS = 6
UNPROTECTED = Policy(correct=False)


class Run:
    """Some steps of a small model, with faults."""

    def __init__(self, *texts, policy="linear", seed=0, steps=STEPS, microbatches=1, bf16=False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 8))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.guard = guard(self.model, optimizer, policy)
        self.injector = inject(self.guard, parse_faults(texts), seed=seed)
        data = torch.Generator().manual_seed(1)
        self.weights = []
        for _ in range(steps):
            batches = torch.randn(microbatches, 300, 24, generator=data)
            for _ in self.guard.attempts():
                optimizer.zero_grad()
                for batch in batches:
                    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                        loss = self.model(batch).square().mean()
                    loss.backward()
            optimizer.step()
            self.weights.append([each.detach().clone() for each in self.model.parameters()])

    @property
    def outcomes(self):
        return [finding.outcome for finding in self.guard.ledger.findings]

    def same_as(self, other):
        return all(
            torch.equal(a, b)
            for mine, theirs in zip(self.weights, other.weights, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )


@pytest.mark.parametrize(
    "what", ["bit=29", "carry=+26", "nan", "inf", "bit=30:segment=32", "stuck=0.0:stride=2"]
)
@pytest.mark.parametrize("site", ["linear.output", "linear.dx", "linear.dw", "linear.operand"])
def test_a_transient_fault_is_corrected_to_the_bits_of_the_clean_run(site, what):
    # The first layer's input needs no gradient, so only the last layer has a dX.
    module = "module=2:" if site == "linear.dx" else ""
    run = Run(f"{site}:{module}{what}:every=2")
    assert [each.step for each in run.injector.injections] == [0, 2, 4]
    assert set(run.outcomes) == {"corrected"}
    assert run.same_as(Run())


@pytest.mark.parametrize("what", ["bit=14", "bit=30:cast=before", "bits=13+15"])
def test_bf16_products_are_corrected_too(what):
    run = Run(f"linear.output:{what}:every=2", bf16=True)
    assert len(run.injector.injections) == 3
    assert run.outcomes == ["corrected"] * 3
    assert run.same_as(Run(bf16=True))


def test_without_faults_the_seam_changes_nothing():
    assert Run("linear.output:bit=29:step=100").same_as(Run())


def test_a_permanent_fault_strikes_one_unit_at_every_use_and_is_called_persistent():
    with pytest.raises(DataCorruptionError, match="stay so"):
        Run("linear.output:bit=29:permanent:step=2")
    model = nn.Linear(8, 8)
    watched = guard(model)
    injector = inject(watched, parse_faults(["linear.output:bit=29:permanent"]))
    for _ in range(3):
        model(torch.randn(200, 8))
    assert {finding.outcome for finding in watched.ledger.findings} == {"persistent"}
    # Each product twice: at first, and again for the correction.
    assert len(injector.injections) >= 6
    assert len({(each.index, each.module) for each in injector.injections}) == 1


def test_a_permanent_fault_keeps_its_given_position_also_in_a_tile():
    model = nn.Linear(8, 16)
    watched = guard(model)
    inject(watched, parse_faults(["linear.output:bit=29:permanent:position=2400"]))
    model(torch.randn(400, 8))
    assert [finding.outcome for finding in watched.ledger.findings] == ["persistent"]


def test_a_wrong_check_is_told_from_wrong_numbers():
    run = Run("linear.check:module=0:position=3:stuck=100.0:step=1")
    assert run.outcomes == ["check"]
    assert run.same_as(Run())


def test_an_intermittent_fault_shows_at_its_rate():
    numbers = torch.zeros(64, 64)
    injector = Injector(parse_faults(["norm.output:bit=3:intermittent=0.25"]))
    for step in range(400):
        injector.begin(step)
        injector("norm.output", "a", numbers)
    assert 60 < len(injector.injections) < 140
    assert len({each.index for each in injector.injections}) == 1


def test_a_transient_fault_does_not_come_back_in_another_attempt():
    injector = Injector(parse_faults(["norm.output:bit=3:step=4"]))
    numbers = torch.ones(4)
    for step, attempt in ((3, 0), (4, 0), (4, 1), (5, 0), (4, 0)):
        injector.begin(step, attempt)
        injector("norm.output", "a", numbers)
    assert [(each.step, each.attempt) for each in injector.injections] == [(4, 0)]


def test_the_occurrence_chooses_the_microbatch():
    run = Run("linear.output:module=0:bit=29:step=1:occurrence=1", microbatches=3)
    (injection,) = run.injector.injections
    assert (injection.step, injection.occurrence) == (1, 1)
    assert run.outcomes == ["corrected"]


def test_the_same_seed_strikes_the_same_places_and_another_seed_others():
    text = "linear.output:every=1"
    first, again, other = Run(text), Run(text), Run(text, seed=1)
    assert first.injector.injections == again.injector.injections
    places = [[each.index for each in run.injector.injections] for run in (first, other)]
    assert places[0] != places[1]
    modules = {each.module for each in Run(text, steps=20).injector.injections}
    assert modules == {"0", "2"}


def test_an_unprotected_run_meets_the_same_faults_and_ends_elsewhere():
    texts = ["linear.output:bit=29:every=2", "linear.dw:every=3:bit=30"]
    protected, unprotected = Run(*texts, steps=1), Run(*texts, steps=1, policy=UNPROTECTED)

    def places(run):
        return [(each.module, each.index, each.bits) for each in run.injector.injections]

    assert len(places(protected)) == 2
    assert places(protected) == places(unprotected)
    assert protected.same_as(Run(steps=1))
    assert not unprotected.same_as(protected)
    assert set(unprotected.outcomes) == {"detected"}


shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@given(shapes, st.booleans(), st.integers(0, 1000), st.sampled_from(["element", "segment"]))
def test_an_injection_says_exactly_what_it_changed(shape, transposed, seed, extent):
    numbers = torch.rand(shape) + 1.0
    numbers = numbers.transpose(0, -1) if transposed and shape else numbers
    before = numbers.clone()
    pattern = Pattern(bits=(22,), extent=extent, length=4 if extent == "segment" else 1)
    injector = Injector([Fault("norm.output", pattern)], seed=seed)
    injector("norm.output", "a", numbers)
    (injection,) = injector.injections
    different = (numbers != before).reshape(-1).nonzero().view(-1).tolist()
    first, count = injection.index, injection.elements
    assert different == list(range(first, first + count))
    assert injection.before == float(before.reshape(-1)[first])
    assert injection.after == float(numbers.reshape(-1)[first])
    assert injection.changed
    rows = before.reshape(-1, before.shape[-1] if shape else 1)
    row = first // rows.shape[1]
    distance = (numbers - before).double().norm()
    assert injection.relative == pytest.approx(float(distance / rows[row].double().norm()))


def test_an_expanded_gradient_is_struck_once():
    numbers = torch.ones(1, 4).expand(6, 4)
    injector = Injector(parse_faults(["linear.dy:bit=31:step=0"]))
    injector("linear.dy", "a", numbers)
    assert int((numbers < 0).sum()) == 6
    assert injector.injections[0].index < 4


def test_faults_that_fit_nothing_are_refused():
    model = nn.Linear(8, 8)
    watched = guard(model)
    with pytest.raises(GuardError, match=r"module = \*\.mpl\.\* matches none of the 1 guarded"):
        inject(watched, parse_faults(["linear.output:module=*.mpl.*:step=0"]))
    inject(watched, parse_faults(["linear.output:position=99999:step=0"]))
    with pytest.raises(GuardError, match="there are only 16 numbers"):
        model(torch.randn(2, 8))
    inject(watched, parse_faults(["linear.output:bit=40:step=0"]))
    with pytest.raises(GuardError, match="bits 0 to 31"):
        model(torch.randn(2, 8))


def test_names_that_are_not_modules_are_learned_and_can_be_handed_on():
    names = ["a.exp_avg", "a.exp_avg_sq", "b.exp_avg"]

    def trained(steps, modules=()):
        injector = Injector(parse_faults(["optimizer.state:bit=3:every=1"]), modules=modules)
        for step in steps:
            injector.begin(step)
            for name in names:
                injector("optimizer.state", name, torch.ones(4))
        return injector

    first = trained(range(20))
    struck = [each.module for each in first.injections]
    assert struck[0] == names[0]
    assert set(struck) == set(names)
    again = trained([7], first.modules)
    assert again.injections == [first.injections[7]]


def test_faults_that_met_no_site_are_told():
    run = Run("norm.output:step=0", "linear.output:bit=29:step=0", steps=1)
    assert [fault.site for fault in run.injector.idle] == ["norm.output"]


def test_faults_of_other_ranks_are_left_out():
    injector = Injector(parse_faults(["norm.output:bit=3:step=0:rank=1"]), rank=0)
    injector("norm.output", "a", torch.ones(4))
    assert injector.injections == []


def test_a_campaign_of_a_real_run_counts_what_happened():
    # The lowest bit of a gradient is far below any threshold; here it still moves the weights.
    text = "linear.dw:bits=0+1+2:segment=32:step=0"
    clean, run = Run(steps=1), Run("linear.output:bit=29:every=1", text, steps=1)
    assert not Run(text, steps=1, policy=UNPROTECTED).same_as(clean)
    ledger = run.guard.ledger
    found = campaign(run.injector.injections, ledger.findings, {0}, checks=ledger.checks)
    rows = {row.site: row for row in found.rows}
    assert rows["linear.output"].corrected == Rate(1, 1)
    assert rows["linear.dw"].missed == Rate(1, 1)
    assert rows["all"].detected == Rate(1, 2)
    assert found.false_alarms == Rate(0, ledger.checks)
    assert not run.same_as(clean)
