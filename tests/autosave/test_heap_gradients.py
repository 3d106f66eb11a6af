"""Gradients are saved only where the program may read them again."""

import pytest
import torch
from heap_runs import copied
from torch import nn

from outlast.autosave.heap.capture import capture, restore
from outlast.autosave.heap.names import Names
from outlast.autosave.heap.tensors import GradientUse
from outlast.errors import AutosaveError


def drop_first(run, step):
    run["optimizer"].zero_grad()
    backward(run)
    run["optimizer"].step()


def zero_first(run, step):
    run["optimizer"].zero_grad(set_to_none=False)
    backward(run)
    run["optimizer"].step()


def drop_by_hand(run, step):
    for weight in run["model"].parameters():
        weight.grad = None
    backward(run)
    run["optimizer"].step()


def drop_by_module(run, step):
    backward_after(run, run["model"].zero_grad)


def drop_late(run, step):
    backward_after(run, run["optimizer"].zero_grad)


def read_first(run, step):
    run["norms"].append([float(each.grad.norm()) for each in graded(run)])
    drop_first(run, step)


def accumulate(run, step):
    backward(run)
    if step % 4 == 3:
        run["optimizer"].step()
        run["optimizer"].zero_grad()


def drop_now_and_then(run, step):
    if step % 4 == 0:
        run["optimizer"].zero_grad()
    backward(run)
    if step % 4 == 3:
        run["optimizer"].step()


def add_before_dropping(run, step):
    backward(run)
    drop_first(run, step)


def step_before_dropping(run, step):
    run["optimizer"].step()
    drop_first(run, step)


DROPPED = [drop_first, zero_first, drop_by_hand, drop_by_module, drop_late]
KEPT = [
    read_first,
    accumulate,
    drop_now_and_then,
    add_before_dropping,
    step_before_dropping,
]


def backward(run):
    run["model"](torch.ones(2, 3)).square().sum().backward()


def backward_after(run, drop):
    loss = run["model"](torch.ones(2, 3)).square().sum()
    drop()
    loss.backward()
    run["optimizer"].step()


def graded(run):
    return [each for each in run["model"].parameters() if each.grad is not None]


def setup():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        "norms": [],
    }


def loop(run, use, work, steps):
    for step in steps:
        use.boundary(0, list(run["model"].parameters()))
        work(run, step)
    use.boundary(0, list(run["model"].parameters()))


def resumed(work, steps, use):
    run, first = setup(), GradientUse()
    names = Names(run, {__name__})
    loop(run, first, work, range(steps))
    captured = copied(capture(names, run, {}, first))
    first.close()
    again = setup()
    restore(captured, Names(again, {__name__}), {}, use)
    return run, again, captured


def finish(run, work, steps):
    use = GradientUse()
    loop(run, use, work, steps)
    use.close()
    return [each.detach().clone() for each in run["model"].parameters()], run["norms"]


@pytest.fixture
def use():
    made = GradientUse()
    yield made
    made.close()


@pytest.mark.parametrize("work", [*DROPPED, *KEPT])
@pytest.mark.parametrize("steps", [1, 5, 6])
def test_a_run_goes_on_with_the_same_bits(use, work, steps):
    run, again, _ = resumed(work, steps, use)
    loop(again, use, work, range(steps, 9))
    ends = finish(run, work, range(steps, 9))
    assert all(
        torch.equal(before, after)
        for before, after in zip(ends[0], again["model"].parameters(), strict=True)
    )
    assert ends[1] == again["norms"]


@pytest.mark.parametrize("work", DROPPED)
def test_gradients_that_are_always_dropped_first_are_not_saved(use, work):
    _, _, captured = resumed(work, 4, use)
    # Weights and momenta alone.
    assert sum(row.nbytes for row in captured.tensors.values()) == 2 * 8 * 4


@pytest.mark.parametrize("work", KEPT)
def test_gradients_that_are_read_or_added_to_are_saved(use, work):
    _, _, captured = resumed(work, 6, use)
    # Weights, momenta and gradients.
    assert sum(row.nbytes for row in captured.tensors.values()) == 3 * 8 * 4


def test_nothing_is_dropped_before_it_has_been_seen_twice(use):
    _, _, captured = resumed(drop_first, 2, use)
    assert sum(row.nbytes for row in captured.tensors.values()) == 3 * 8 * 4


def read(run, step):
    return [each.grad for each in run["model"].parameters()]


@pytest.mark.parametrize("work", [read, accumulate, step_before_dropping])
def test_whoever_asks_for_a_gradient_that_was_not_saved_is_told(use, work):
    _, again, _ = resumed(drop_first, 4, use)
    use.boundary(0, list(again["model"].parameters()))
    with pytest.raises(AutosaveError, match=r"the gradient of `model._parameters.*not saved"):
        work(again, 3)


def test_a_gradient_that_was_not_saved_and_is_added_to_is_told(use):
    _, again, _ = resumed(drop_first, 4, use)
    backward(again)
    with pytest.raises(AutosaveError, match="not saved"):
        use.boundary(0, list(again["model"].parameters()))


def test_other_loops_are_learnt_of_their_own(use):
    run = setup()
    weights = list(run["model"].parameters())
    loop(run, use, drop_first, range(4))
    assert all(map(use.is_dead, weights))
    use.boundary(1, weights)
    assert not any(map(use.is_dead, weights))


def test_nothing_is_watched_when_all_is_known(use):
    run = setup()
    loop(run, use, drop_first, range(2))
    assert "grad" in vars(torch.Tensor)
    loop(run, use, drop_first, range(3))
    assert "grad" not in vars(torch.Tensor)
    assert torch.optim.Optimizer.zero_grad.__module__ == "torch.optim.optimizer"


@pytest.mark.parametrize("compiled", ["model", "optimizer"])
def test_compiled_parts_are_watched_all_the_same(use, compiled):
    run = setup()
    if compiled == "model":
        run["model"] = torch.compile(run["model"], backend="eager")
    else:
        run["optimizer"].step = torch.compile(run["optimizer"].step, backend="eager")
    plain = setup()
    loop(run, use, drop_first, range(5))
    assert all(map(use.is_dead, run["model"].parameters()))
    for step in range(5):
        drop_first(plain, step)
    for one, two in zip(run["model"].parameters(), plain["model"].parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_loop_that_never_leaves_gradients_is_not_watched_for_ever(use):
    run = setup()

    def tidy(run, step):
        drop_first(run, step)
        run["optimizer"].zero_grad()

    loop(run, use, tidy, range(20))
    backward(run)
    use.boundary(0, list(run["model"].parameters()))
    assert "grad" not in vars(torch.Tensor)
    assert not any(map(use.is_dead, run["model"].parameters()))
