"""Several ranks: shared errors, shared fall-back, no borrowed group, no wait without an end."""

import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_meshes import fsdp, matrix_state
from checkpoint_states import Holder, Net, Sampler, bits, open_store, save_once, steps_in, train
from torch import nn

from outlast.checkpoint import SaveResult
from outlast.checkpoint.encoder import Encoder
from outlast.errors import CheckpointError, LeaseLostError

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("either_seal")]

Group = Callable[[int], Callable[..., list[Any]]]


def restore_misfits(directory: Path) -> list[str]:
    """The errors of a wider model and of one with another name, then a restore that fits."""
    dist.init_process_group("gloo")
    store = open_store(directory)
    errors = []
    renamed = Net(0)
    # Only one rank has a model that does not fit.
    if dist.get_rank() == 1:
        renamed.other = nn.Linear(2, 2)
    for model in (Net(0, width=7), renamed):
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointError) as caught:
            store.restore({"model": model})
        errors.append(str(caught.value))
        assert all(map(torch.equal, model.parameters(), before))
    assert store.restore({"model": Net(5)}) is not None
    return errors


def test_a_model_that_does_not_fit_is_refused_on_every_rank(ranks: Group, tmp_path: Path) -> None:
    save_once(tmp_path, 1, {"model": Net(0)})
    outcomes = ranks(3)(restore_misfits, tmp_path)
    assert outcomes == [outcomes[0]] * 3, "the same sentence everywhere"
    wider, renamed = outcomes[0]
    assert "step-00000001-a1 does not fit" in wider
    assert "(11, 6)" in wider
    assert "model.other." in renamed


def save_two(directory: Path) -> None:
    dist.init_process_group("gloo")
    with open_store(directory) as store:
        for step in (1, 2):
            store.save(step, matrix_state(step, (64, 64), 0))
        dist.barrier()


def restore_with_damage_seen_by_one(directory: Path) -> tuple[int, list[str], bool]:
    dist.init_process_group("gloo")
    state = matrix_state(9, (64, 64), 0)
    restored = open_store(directory).restore(state)
    assert restored is not None
    whole = state["model"].weight.full_tensor()
    expected = torch.randn((64, 64), generator=torch.Generator().manual_seed(restored.step))
    return restored.step, restored.skipped, torch.equal(whole, expected)


@pytest.mark.smoke
def test_damage_seen_by_one_rank_makes_all_fall_back(ranks: Group, tmp_path: Path) -> None:
    ranks(2)(save_two, tmp_path)
    pack = tmp_path / "step-00000002-a1" / "rank-00001-of-00002.pack"
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 8
    pack.write_bytes(content)
    outcomes = ranks(2)(restore_with_damage_seen_by_one, tmp_path)
    assert outcomes == [outcomes[0]] * 2
    step, [skipped], right = outcomes[0]
    assert (step, right) == (1, True)
    assert str(pack) in skipped


def restore_damaged(directory: Path) -> str:
    dist.init_process_group("gloo")
    with pytest.raises(CheckpointError) as caught:
        open_store(directory).restore({"model": Net(0)})
    return str(caught.value)


def test_damage_is_an_error_on_every_rank(ranks: Group, tmp_path: Path) -> None:
    save_once(tmp_path, 1, {"model": Net(0)})
    part = tmp_path / "step-00000001-a1" / "rank-00000-of-00001.json"
    part.write_text(part.read_text().replace("weight", "height"))
    first, second = ranks(2)(restore_damaged, tmp_path)
    assert first == second
    assert "rank-00000-of-00001.json is damaged" in first


def save_with_one_limited(directory: Path) -> list[SaveResult]:
    dist.init_process_group("gloo")
    with open_store(directory) as store:
        store.save(1, matrix_state(1, (200, 200), 0))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        failed = store.save_async(2, matrix_state(2, (200, 200), 0)).result()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        again = store.save_async(2, matrix_state(2, (200, 200), 0)).result()
        later = store.save_async(3, matrix_state(3, (200, 200), 0)).result()
        dist.barrier()
    return [failed, again, later]


def test_when_one_rank_cannot_write_every_rank_learns_it(ranks: Group, tmp_path: Path) -> None:
    for failed, _, later in ranks(2)(save_with_one_limited, tmp_path):
        assert "File too large" in (failed.error or "")
        assert "step 2" in (failed.error or "")
        assert later.error is None
    assert 3 in steps_in(tmp_path)


def test_a_step_that_failed_on_one_rank_can_be_saved_again(ranks: Group, tmp_path: Path) -> None:
    for _, again, _ in ranks(2)(save_with_one_limited, tmp_path):
        assert again.error is None
    assert steps_in(tmp_path) == [1, 2, 3]


def save_into_a_file(directory: Path) -> list[str | None]:
    dist.init_process_group("gloo")
    store = open_store(directory)
    with pytest.warns(UserWarning, match="training continues without it"):
        failed = store.save_async(1, {"model": Net(0)}).result().error
    dist.barrier()
    if dist.get_rank() == 0:
        directory.unlink()
    dist.barrier()
    later = store.save_async(2, {"model": Net(0)}).result().error
    dist.barrier()
    return [failed, later]


def test_when_rank_zero_cannot_begin_every_rank_learns_it(ranks: Group, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    for failed, later in ranks(2)(save_into_a_file, tmp_path / "store"):
        assert str(tmp_path / "store") in (failed or "")
        assert later is None
    assert steps_in(tmp_path / "store") == [2]


def save_after_a_takeover(directory: Path) -> tuple[str, float]:
    dist.init_process_group("gloo")
    with open_store(directory) as store:
        store.save(1, {"data": Holder({"x": torch.arange(9)})})
        if dist.get_rank() == 0:
            lock = directory / "owner"
            lock.write_text(lock.read_text().replace('"pid": ', '"pid": 1'))
        dist.barrier()
        begun = time.monotonic()
        with pytest.raises(LeaseLostError) as caught:
            store.save_async(2, {"data": Holder({"x": torch.arange(9)})})
        return str(caught.value), time.monotonic() - begun


def test_a_lock_that_rank_zero_has_lost_ends_the_save_on_every_rank(
    ranks: Group, tmp_path: Path
) -> None:
    for sentence, seconds in ranks(2)(save_after_a_takeover, tmp_path):
        assert "was taken over by process 1" in sentence
        assert seconds < 30


def save_while_training(directory: Path) -> int:
    """Collectives of the training on every rank at its own pace, while saves are under way."""
    dist.init_process_group("gloo")
    state = fsdp(seed=0)
    sync = os.fsync

    def slow_sync(descriptor: int) -> None:
        # Group end their saves at different times.
        time.sleep(0.02 * (1 + dist.get_rank()))
        sync(descriptor)

    os.fsync = slow_sync
    store = open_store(directory)
    overlapped = 0
    for save in range(1, 4):
        handle = store.save_async(save, state)
        for number in range(40):
            total = torch.tensor([float(number)])
            dist.all_reduce(total)
            assert total.item() == number * dist.get_world_size()
            overlapped += not handle.done()
        train(state, save, save)
    handle.wait()
    restored = store.restore(state)
    assert restored is not None
    assert restored.step == 3
    return overlapped


def test_saves_leave_the_training_group_alone(ranks: Group, tmp_path: Path) -> None:
    overlapped = ranks(2)(save_while_training, tmp_path)
    assert min(overlapped) >= 40, "the collectives ran during the saves"
    assert steps_in(tmp_path) == [1, 2, 3]


def restore_during_a_save(directory: Path) -> int:
    dist.init_process_group("gloo")
    state = fsdp(seed=0)
    store = open_store(directory)
    store.save(1, state)
    sampler = Sampler()
    sampler.state["average"] = next(state["model"].parameters()).detach()
    with pytest.raises(CheckpointError, match=r"`data\.average` is a sharded tensor"):
        store.save_async(2, {**state, "data": sampler})
    store.save_async(2, state)
    restored = store.restore(state)
    assert restored is not None
    return restored.step


def test_restore_waits_for_the_save_on_every_rank(ranks: Group, tmp_path: Path) -> None:
    assert ranks(2)(restore_during_a_save, tmp_path) == [2, 2]


def save_own_values(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {f"padding{n}": torch.full((50 + n,), n) for n in range(4)}
    data = Holder({**state, "rank": rank, "tensor": torch.full((30,), rank)})
    with open_store(directory) as store:
        store.save(1, {"data": data})
        dist.barrier()


def test_values_and_tensors_of_an_object_come_from_one_rank(ranks: Group, tmp_path: Path) -> None:
    ranks(3)(save_own_values, tmp_path)
    found = Holder()
    assert open_store(tmp_path).restore({"data": found}) is not None
    assert torch.equal(found.state["tensor"], torch.full((30,), found.state["rank"]))


def save_own_buffers(directory: Path) -> None:
    dist.init_process_group("gloo")
    model = Net(0)
    for each in model.buffers():
        each.fill_(2 + dist.get_rank())
    with open_store(directory) as store:
        store.save(1, {"model": model})
        dist.barrier()


def test_buffers_that_differ_come_from_the_first_rank(ranks: Group, tmp_path: Path) -> None:
    ranks(3)(save_own_buffers, tmp_path)
    model = Net(1)
    assert open_store(tmp_path).restore({"model": model}) is not None
    assert [float(model.cosines.max()), int(model.seen)] == [2.0, 2]


def replace_together(directory: Path) -> list[tuple[str | None, str]]:
    """Rank 1 is halted in step 2 while rank 0 has written its part; then step 3 replaces it."""
    dist.init_process_group("gloo")
    halted, write = threading.Event(), Encoder.write

    def halting(encoder: Any, job: Any, check: Any) -> Any:
        def slow() -> None:
            if dist.get_rank() == 1 and job.version.step == 2:
                halted.wait(3)
            check()

        return write(encoder, job, slow)

    Encoder.write = halting  # type: ignore[method-assign]
    with open_store(directory, when_busy="replace") as store:
        store.save(1, {"model": Net(1)})
        older = store.save_async(2, {"model": Net(2)})
        time.sleep(0.5)
        newer = store.save_async(3, {"model": Net(3)})
        results = [each.result() for each in (older, newer)]
        dist.barrier()
    return [(result.error, result.skipped) for result in results]


def test_a_replaced_save_is_no_failure_on_any_rank(ranks: Group, tmp_path: Path) -> None:
    outcomes = ranks(2)(replace_together, tmp_path)
    for older, newer in outcomes:
        assert older == (None, "a newer save replaced it")
        assert newer == (None, "")
    model = Net(9)
    restored = open_store(tmp_path).restore({"model": model})
    assert restored is not None
    assert restored.step == 3
    assert bits({"model": model}) == bits({"model": Net(3)})


def skip_together(directory: Path) -> list[tuple[str | None, str]]:
    """Only rank 1 is still writing when step 2 is to be saved."""
    dist.init_process_group("gloo")
    write = Encoder.write

    def slow(encoder: Any, job: Any, check: Any) -> Any:
        time.sleep(0.6 * (dist.get_rank() == 1 and job.version.step == 1))
        return write(encoder, job, check)

    Encoder.write = slow  # type: ignore[method-assign]
    with open_store(directory, when_busy="skip", keep=9) as store:
        handles = [store.save_async(1, {"model": Net(1)}), store.save_async(2, {"model": Net(2)})]
        results = [handle.result() for handle in handles]
        results.append(store.save_async(3, {"model": Net(3)}).result())
        dist.barrier()
    return [(result.error, result.skipped) for result in results]


def test_all_ranks_skip_a_save_for_which_one_has_no_time(ranks: Group, tmp_path: Path) -> None:
    for first, second, third in ranks(2)(skip_together, tmp_path):
        assert first == third == (None, "")
        assert second == (None, "the save of step 1 was still under way")
    assert steps_in(tmp_path) == [1, 3]
