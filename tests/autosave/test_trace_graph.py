"""What exported graphs say of forward passes."""

import random

import torch
from torch import nn

from outlast.autosave.state_plan import graph_state, recorded_inputs


def signature(module, *args, **settings):
    with recorded_inputs([module]) as inputs:
        module(*args)
    return graph_state([module], inputs, **settings)


class Hidden(nn.Module):
    """Two plain attributes that it writes."""

    def __init__(self):
        super().__init__()
        self.first = torch.zeros(4)
        self.second = torch.zeros(4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.first.add_(x.detach().mean(0))
        self.second.add_(self.first)
        return x + self.second


def test_statistics_are_in_the_signature():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = signature(module, torch.randn(2, 4))
    norm = module[1]
    written = {id(tensor) for tensor, _ in found.mutated}
    assert written == {
        id(each) for each in (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    }
    assert not found.lints
    assert not found.failures


def test_every_constant_that_is_written_is_a_lint_and_the_module_stays_as_it_was():
    module = Hidden()
    first = module.first
    found = signature(module, torch.randn(2, 4))
    assert {id(tensor) for tensor, _ in found.mutated} == {id(module.first), id(module.second)}
    assert [each.split(" ")[0] for each in found.lints] == ["Hidden.first", "Hidden.second"]
    assert module.first is first
    assert module.calls == 1
    assert not dict(module.named_buffers())


def test_what_cannot_be_exported_is_reported_and_not_fatal():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return x * 2 if self.count.item() > 3 else x

    found = signature(Branching(), torch.randn(2))
    (failure,) = found.failures
    assert failure.startswith("Branching: ")
    assert not found.mutated


def test_equal_parts_of_a_large_module_are_all_found():
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(20)))
    found = signature(module, torch.randn(2, 4))
    assert len(found.mutated) == 60
    assert not found.failures


def test_parts_without_buffers_are_not_exported():
    found = signature(nn.Linear(4, 4), torch.randn(2, 4), limit_seconds=-1.0)
    assert not found.failures
    found = signature(nn.BatchNorm1d(4), torch.randn(2, 4), limit_seconds=-1.0)
    assert found.failures == ["BatchNorm1d: -1 s of exports had passed"]


def test_random_numbers_are_not_drawn():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x):
            self.last.copy_(torch.rand(4) * random.random())
            return x + self.last

    module = Noisy()
    with recorded_inputs([module]) as inputs:
        module(torch.randn(2, 4))
    before = (torch.get_rng_state(), random.getstate())
    found = graph_state([module], inputs)
    assert len(found.mutated) == 1
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
