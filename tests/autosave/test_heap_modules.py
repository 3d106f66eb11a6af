"""Modules that a program holds are referred to by their names."""

import collections.abc
import types

import pytest
import torch
from heap_runs import resume

from outlast.autosave.heap.objects import module_named


def test_modules_come_back_also_those_that_cannot_be_imported():
    def setup():
        return {"held": []}

    def train(run):
        run["held"] += [torch.ops.higher_order, torch.ops.aten, torch.optim, collections.abc]

    runs = resume(setup, train, __name__)
    assert all(isinstance(each, types.ModuleType) for each in runs.saved["held"])
    found = zip(runs.saved["held"], runs.resumed["held"], strict=True)
    assert all(one is other for one, other in found)


def test_a_module_that_is_nowhere_is_not_found():
    for name in ("torch.optim.nowhere", "nowhere_at_all"):
        with pytest.raises(ModuleNotFoundError, match=name):
            module_named(name)
