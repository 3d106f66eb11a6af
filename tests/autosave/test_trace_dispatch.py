"""What a traced step tells of each storage."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from outlast.autosave.step_trace import compiled, traced_step


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Other tests of the same process may have compiled something."""
    from torch._dynamo.utils import counters

    counters.clear()
    yield
    counters.clear()


def test_a_step_in_the_order_of_its_operations():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    average = [each.detach().clone() for each in model.parameters()]

    def step():
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, [each.detach() for each in model.parameters()], 0.1)

    step()
    with traced_step() as found:
        step()
    weight, moment = found.of(model.weight), found.of(optimizer.state[model.weight]["exp_avg"])
    assert weight.first == moment.first == "read"
    assert found.optimizer_begins is not None
    assert found.optimizer_begins < weight.first_write <= found.of(average[0]).first_write
    assert weight.last_write <= found.operations
    assert [found.window(each) for each in (model.weight, average[1])] == ["late", "late"]
    assert found.of(model.weight.grad).born
    assert found.window(model.weight.grad) == "early"
    assert found.random


@pytest.mark.parametrize(
    ("write", "first"),
    [
        (lambda x: x.zero_(), "write"),
        (lambda x: x.copy_(torch.ones(4, 4)), "write"),
        (lambda x: x.t().copy_(torch.ones(4, 4)), "write"),
        (lambda x: torch.mul(torch.ones(4, 4), 2.0, out=x), "write"),
        (lambda x: torch._foreach_zero_([x]), "write"),
        (lambda x: x.normal_(), "write"),
        (lambda x: x[:2].copy_(torch.ones(2, 4)), "read"),
        (lambda x: x.view(-1)[:5].zero_(), "read"),
        (lambda x: x.add_(1.0), "read"),
        (lambda x: x.masked_fill_(torch.ones(4, 4, dtype=torch.bool), 0.0), "read"),
        (lambda x: torch._foreach_add_([x], 1.0), "read"),
        (lambda x: x.__setitem__(0, 1.0), "read"),
    ],
)
def test_only_a_write_of_the_whole_storage_makes_what_was_there_useless(write, first):
    tensor = torch.ones(4, 4)
    with traced_step() as found:
        write(tensor)
    assert found.of(tensor).first == first
    assert found.of(tensor).first_write is not None
    assert found.window(tensor) == "early"


def test_expanded_memory_is_not_covered_by_a_write_through_a_smaller_view():
    storage = torch.zeros(8)
    window = storage.as_strided((4,), (1,), 0)
    with traced_step() as found:
        window.zero_()
    assert found.of(storage).first == "read"


def test_what_is_not_written_can_always_be_copied_and_what_was_not_seen_never_late():
    constant, never = torch.ones(4), torch.ones(4)
    with traced_step() as found:
        constant.sum()
    assert found.of(constant).first == "read"
    assert found.window(constant) == "always"
    assert found.of(never).first is None
    assert found.window(never) == "early"


def test_statistics_are_written_in_training_only():
    norm = nn.BatchNorm2d(3)
    with traced_step() as found:
        norm(torch.randn(2, 3, 4, 4))
    assert found.of(norm.running_mean).first_write is not None
    with traced_step() as found:
        norm.eval()(torch.randn(2, 3, 4, 4))
    assert found.of(norm.running_mean).first_write is None
    assert found.of(norm.running_mean).first == "read"


def test_memory_that_leaves_torch_is_marked():
    tensor = torch.ones(4)
    with traced_step() as found:
        tensor.numpy()
    assert found.of(tensor).escaped
    assert found.window(tensor) == "early"


def test_operations_of_others_are_judged_by_what_they_do():
    with torch.library._scoped_library("outlast_trace", "DEF") as library:
        library.define("silent(Tensor x, Tensor state) -> Tensor")
        library.define("honest(Tensor x, Tensor(a!) state) -> Tensor")

        def changing(x, state):
            state.add_(1.0)
            return x + state

        library.impl("silent", changing, "CPU")
        library.impl("honest", changing, "CPU")
        x, state, declared = torch.ones(4), torch.ones(4), torch.ones(4)
        with traced_step() as found:
            torch.ops.outlast_trace.silent(x, state)
            torch.ops.outlast_trace.honest(x, declared)
    assert found.untold == {"outlast_trace::silent"}
    assert found.of(state).first_write is not None
    assert found.of(declared).first_write is not None
    assert found.of(x).first_write is None


def test_collectives_write_all_that_they_are_given(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        tensor = torch.ones(4)
        with traced_step() as found:
            dist.all_reduce(tensor)
    finally:
        dist.destroy_process_group()
    assert found.of(tensor).first == "read"
    assert found.of(tensor).first_write is not None


def test_tensors_made_of_tensors_are_seen_through_their_parts():
    from torch.testing._internal.two_tensor import TwoTensor

    inner, other = torch.ones(4), torch.ones(4)
    both = TwoTensor(inner, other)
    with traced_step() as found:
        both.add_(1.0)
    assert found.of(inner).first_write is not None
    assert found.of(other).first_write is not None


def test_a_compiled_program_is_not_traced():
    tensor = torch.ones(4)
    torch.compile(lambda x: x + 1, backend="eager")(tensor)
    assert compiled()
    with traced_step() as found:
        tensor.add_(1.0)
    assert "torch.compile" in found.skipped
    assert found.window(tensor) == "early"


def test_a_trace_ends_with_its_step_also_after_an_error():
    tensor = torch.ones(4)
    with pytest.raises(ZeroDivisionError), traced_step() as found:
        raise ZeroDivisionError
    before = found.operations
    tensor.add_(1.0)
    assert found.operations == before
    assert found.of(tensor).first is None
