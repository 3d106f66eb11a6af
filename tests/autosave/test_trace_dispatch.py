"""What a traced step tells of each storage."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from outlast.autosave.step_trace import Access, compiled, storage_key, traced_step


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Other tests of the same process may have compiled something."""
    from torch._dynamo.utils import counters

    counters.clear()
    yield
    counters.clear()


def of(found, tensor):
    """Accesses of a step to the storage of a tensor."""
    return found.at(storage_key(tensor)) or Access()


def window(found, tensor):
    """Until when what a tensor held before the step can be copied, if steps are alike."""
    access = of(found, tensor)
    if access.first is None or access.born or access.early or access.escaped:
        return "early"
    return "late" if access.written else "always"


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
    weight, moment = of(found, model.weight), of(found, optimizer.state[model.weight]["exp_avg"])
    assert weight.first == moment.first == "read"
    assert found.optimizer_begun
    assert weight.written
    assert not weight.early
    assert of(found, average[0]).written
    assert [window(found, each) for each in (model.weight, average[1])] == ["late", "late"]
    assert of(found, model.weight.grad).born
    assert window(found, model.weight.grad) == "early"


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
    assert of(found, tensor).first == first
    assert of(found, tensor).written
    assert window(found, tensor) == "early"


def test_expanded_memory_is_not_covered_by_a_write_through_a_smaller_view():
    storage = torch.zeros(8)
    window = storage.as_strided((4,), (1,), 0)
    with traced_step() as found:
        window.zero_()
    assert of(found, storage).first == "read"


def test_what_is_not_written_can_always_be_copied_and_what_was_not_seen_never_late():
    constant, never = torch.ones(4), torch.ones(4)
    with traced_step() as found:
        constant.sum()
    assert of(found, constant).first == "read"
    assert window(found, constant) == "always"
    assert of(found, never).first is None
    assert window(found, never) == "early"


def test_statistics_are_written_in_training_only():
    norm = nn.BatchNorm2d(3)
    with traced_step() as found:
        norm(torch.randn(2, 3, 4, 4))
    assert of(found, norm.running_mean).written
    with traced_step() as found:
        norm.eval()(torch.randn(2, 3, 4, 4))
    assert not of(found, norm.running_mean).written
    assert of(found, norm.running_mean).first == "read"


def test_memory_that_leaves_torch_is_marked():
    tensor = torch.ones(4)
    with traced_step() as found:
        tensor.numpy()
    assert of(found, tensor).escaped
    assert window(found, tensor) == "early"


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
    assert of(found, state).written
    assert of(found, declared).written
    assert not of(found, x).written


def test_collectives_write_all_that_they_are_given(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        tensor = torch.ones(4)
        with traced_step() as found:
            dist.all_reduce(tensor)
    finally:
        dist.destroy_process_group()
    assert of(found, tensor).first == "read"
    assert of(found, tensor).written


def test_tensors_made_of_tensors_are_seen_through_their_parts():
    from torch.testing._internal.two_tensor import TwoTensor

    inner, other = torch.ones(4), torch.ones(4)
    both = TwoTensor(inner, other)
    with traced_step() as found:
        both.add_(1.0)
    assert of(found, inner).written
    assert of(found, other).written


def test_a_compiled_program_is_not_traced():
    tensor = torch.ones(4)
    torch.compile(lambda x: x + 1, backend="eager")(tensor)
    assert compiled()
    with traced_step() as found:
        tensor.add_(1.0)
    assert "torch.compile" in found.skipped
    assert window(found, tensor) == "early"


def test_a_trace_ends_with_its_step_also_after_an_error():
    tensor = torch.ones(4)
    with pytest.raises(ZeroDivisionError), traced_step() as found:
        raise ZeroDivisionError
    tensor.add_(1.0)
    assert of(found, tensor).first is None
