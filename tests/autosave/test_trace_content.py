"""Digests of tensors and arrays, and of the values of a captured program."""

import numpy as np
import pytest
import torch

from outlast.autosave.script_replay import differences, first_differences
from outlast.autosave.step_trace import changed_over, digest, digests

TENSORS = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor(1.0),
    torch.empty(0, 3),
    torch.arange(4).to(torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.ones(4).to(torch.float8_e4m3fn),
    torch.eye(3).to_sparse(),
    torch.eye(3).to_sparse_csr(),
    torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    np.arange(6.0).reshape(2, 3)[:, ::2],
    np.float32([[1]]),
]


@pytest.mark.parametrize("value", TENSORS)
def test_the_same_numbers_have_the_same_digest_wherever_they_lie(value):
    again = value.copy() if isinstance(value, np.ndarray) else value.clone()
    assert digest(value) == digest(again)


def test_digests_tell_numbers_types_and_shapes_apart():
    assert len({digest(each) for each in TENSORS}) == len(TENSORS)
    zero = torch.tensor([0.0])
    assert digest(zero) != digest(-zero)
    nan = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    assert digest(nan[:1]) != digest(nan[1:])
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2))
    assert digest(torch.zeros(1)) != digest(torch.zeros(1, dtype=torch.int32))


def test_what_holds_no_numbers_of_its_own_has_no_digest():
    objects = {"text": "x", "meta": torch.ones(2, device="meta"), "names": np.array(["a", None])}
    assert not digests(objects)
    assert set(digests({"tensor": torch.ones(1), **objects})) == {"tensor"}


def test_changes_are_told_over_all_boundaries():
    assert changed_over([{"a": "1", "b": "1"}, {"a": "2", "b": "1"}]) == {"a"}
    assert changed_over([{"a": "1", "b": "1"}, {"a": "1"}]) == {"b"}


def test_differences_name_each_tensor_once_at_the_first_step():
    expected = {1: {"a": "1", "b": "1"}, 2: {"a": "2", "b": "2", "c": "1"}}
    found = {1: {"a": "1", "b": "9"}, 2: {"a": "9", "b": "9"}}
    told = list(first_differences(expected, found))
    assert [(each.step, each.name) for each in told] == [(1, "b"), (2, "a"), (2, "c")]
    assert told[0].sentence() == "step 1: b is 9, should be 1"
    assert told[2].sentence() == "step 2: c is missing"
    (more,) = differences(3, {}, {"d": "1"})
    assert more.sentence() == "step 3: d is there, but should not be"
