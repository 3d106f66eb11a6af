"""Real processes keep parity of each other's state, die, and get it back bit for bit."""

import errno
import os
import re
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from parity_members import (
    STRIPE_BYTES,
    die_at,
    is_state,
    join,
    keep,
    lose,
    memory,
    recover,
    slots,
    state,
    train,
)

from outlast.errors import RecoverError
from outlast.recover.parity import ParityGroup, Rebuild, Transport, Update
from outlast.recover.parity_code import ParityFile, as_bytes

pytestmark = pytest.mark.distributed


def _check(found: list[Any], epoch: int, lost: set[int]) -> None:
    for member, each in enumerate(found):
        assert each.epoch == epoch
        assert is_state(each, member)
        assert set(each.lost_data) == lost


@pytest.mark.parametrize(
    ("members", "losses", "lost", "then"),
    [(4, 1, {2}, {0}), (6, 2, {1, 4}, {0, 5}), (3, 2, {0, 1}, {2}), (2, 1, {1}, {0})],
)
@pytest.mark.parametrize("steps", [3, 5])
def test_lost_states_come_back_bit_for_bit(
    tmp_path: Path, members: int, losses: int, lost: set[int], then: set[int], steps: int
) -> None:
    assert run_ranks(members, train, tmp_path, losses, steps) == [steps] * members
    lose(tmp_path, lost)
    _check(run_ranks(members, recover, tmp_path, losses), steps, lost)
    # Their parity came back too.
    lose(tmp_path, then)
    _check(run_ranks(members, recover, tmp_path, losses), steps, then)


def _die_in_update(folder: Path, losses: int, deaths: dict[int, Any]) -> str:
    group = join(folder, losses)
    old = keep(folder, 1)
    group.update(None, old, 1)
    new = keep(folder, 2)
    if (death := deaths.get(dist.get_rank())) is not None:
        owner, name, call, after = death
        die_at(owner, name, call, after=after)
    try:
        group.update(old, new, 2)
    except RecoverError as error:
        with pytest.raises(RecoverError, match="make a new one"):
            group.update(old, new, 2)
        return str(error)
    return ""


COMPARING = (Transport, "gather", 0, False)
SENDING = (Update, "plan", 5, True)
SENT = (Transport, "gather", 2, False)
SUMMED = (ParityFile, "prepare", 0, False)
WRITING = (Path, "replace", 0, False)
PREPARED = (ParityFile, "prepare", 0, True)
AGREED = (ParityFile, "commit", 0, False)
COMMITTED = (ParityFile, "commit", 0, True)


@pytest.mark.parametrize(
    ("death", "epoch"),
    [
        (COMPARING, 1),
        (SENDING, 1),
        (SENT, 1),
        (SUMMED, 2),
        (WRITING, 2),
        (PREPARED, 2),
        (AGREED, 2),
        (COMMITTED, 2),
    ],
)
def test_a_death_in_an_update_leaves_the_newest_step_that_is_whole(
    tmp_path: Path, death: Any, epoch: int
) -> None:
    said = run_ranks(4, _die_in_update, tmp_path, 1, {1: death}, may_die=[1])
    assert said[1] is None
    lose(tmp_path, {1})
    _check(run_ranks(4, recover, tmp_path, 1), epoch, {1})
    lose(tmp_path, {3})
    _check(run_ranks(4, recover, tmp_path, 1), epoch, {3})


@pytest.mark.parametrize(
    "epoch_and_deaths",
    [
        (1, {0: SENDING, 5: SENDING}),
        (1, {2: SENDING, 3: SENT}),
        (2, {1: SUMMED, 2: PREPARED}),
        (2, {4: AGREED, 5: COMMITTED}),
    ],
)
def test_two_deaths_in_an_update(tmp_path: Path, epoch_and_deaths: Any) -> None:
    epoch, deaths = epoch_and_deaths
    run_ranks(6, _die_in_update, tmp_path, 2, deaths, may_die=deaths)
    lose(tmp_path, deaths)
    _check(run_ranks(6, recover, tmp_path, 2), epoch, set(deaths))
    lose(tmp_path, {0, 3})
    _check(run_ranks(6, recover, tmp_path, 2), epoch, {0, 3})


def test_a_process_that_dies_without_its_memory_has_lost_nothing(tmp_path: Path) -> None:
    run_ranks(4, _die_in_update, tmp_path, 1, {2: SENDING}, may_die=[2])
    found = run_ranks(4, recover, tmp_path, 1)
    # All have the data of both steps, so the newer one needs its parity only.
    _check(found, 2, set())
    assert found[0].lost_parity == (0, 1, 2, 3)


def _die_in_recovery(folder: Path) -> str:
    if os.environ["RANK"] == "3":
        die_at(Rebuild, "plan", 4)
    with pytest.raises(RecoverError) as caught:
        recover(folder, 2)
    return str(caught.value)


def test_a_death_in_a_recovery_leaves_another_recovery(tmp_path: Path) -> None:
    run_ranks(6, train, tmp_path, 2, 3)
    lose(tmp_path, {0})
    run_ranks(6, _die_in_recovery, tmp_path, may_die=[3])
    lose(tmp_path, {3})
    _check(run_ranks(6, recover, tmp_path, 2), 3, {0, 3})


def _refused(folder: Path, losses: int) -> str:
    with pytest.raises(RecoverError) as caught:
        recover(folder, losses)
    return str(caught.value)


def test_more_losses_than_the_parity_makes_good_are_refused_by_all(tmp_path: Path) -> None:
    run_ranks(4, train, tmp_path, 1, 2)
    lose(tmp_path, {0, 3})
    said = run_ranks(4, _refused, tmp_path, 1)
    expected = "the state of any step cannot be rebuilt: more than 1 of 4 members lost it"
    assert set(said) == {f"{expected}; possible: no step"}


def test_damaged_memory_counts_as_lost(tmp_path: Path) -> None:
    run_ranks(4, train, tmp_path, 1, 2)
    damaged = state(1, 2).view(torch.uint8).clone()
    damaged[1234] ^= 1
    torch.save(damaged, memory(tmp_path, 1) / "2.slot")
    _check(run_ranks(4, recover, tmp_path, 1), 2, {1})


def test_damaged_parity_is_noticed(tmp_path: Path) -> None:
    run_ranks(4, train, tmp_path, 1, 1)
    (stripes,) = memory(tmp_path, 2).glob("*.stripes")
    stripes.write_bytes(bytes(byte ^ 1 for byte in stripes.read_bytes()))
    lose(tmp_path, {0})
    said = run_ranks(4, _refused, tmp_path, 1)
    assert all("the rebuilt state of step 1 is not what it was" in each for each in said)


def _no_room(folder: Path) -> tuple[str, int | None]:
    group = join(folder, 1)
    old = keep(folder, 1)
    group.update(None, old, 1)
    allocate = os.posix_fallocate

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() == 2:
        os.posix_fallocate = full
    new = keep(folder, 4)
    with pytest.raises(RecoverError) as caught:
        group.update(old, new, 4)
    before = group.epoch
    os.posix_fallocate = allocate
    later = keep(folder, 5)
    group.update(new, later, 5)
    return str(caught.value), before


def test_a_full_memory_fails_the_update_everywhere_and_the_next_one_works(tmp_path: Path) -> None:
    for said, before in run_ranks(4, _no_room, tmp_path):
        assert said.startswith("member 2 of the parity group: ")
        assert "do not fit into" in said
        assert "no space is left" in said
        assert before == 1
    lose(tmp_path, {1})
    _check(run_ranks(4, recover, tmp_path, 1), 5, {1})


def _late(folder: Path) -> str:
    group = join(folder, 1, timeout_seconds=1.0)
    new = keep(folder, 1)
    if dist.get_rank() == 0:
        time.sleep(2.5)
        return ""
    with pytest.raises(RecoverError) as caught:
        group.update(None, new, 1)
    return str(caught.value)


def test_a_member_that_hangs_fails_the_others_in_time(tmp_path: Path) -> None:
    said = run_ranks(3, _late, tmp_path)
    assert all("took longer than 1 s" in each for each in said[1:])


def _disagree(folder: Path) -> int | None:
    group = join(folder, 1)
    old = keep(folder, 1)
    group.update(None, old, 1)

    def agree() -> None:
        raise RecoverError("another group lost a member")

    with pytest.raises(RecoverError, match="another group"):
        group.update(old, keep(folder, 2), 2, agree=agree)
    return group.epoch


def test_a_group_that_was_ahead_of_others_can_go_back(tmp_path: Path) -> None:
    run_ranks(4, train, tmp_path, 1, 2)
    lose(tmp_path, {3})
    possible, found = zip(*run_ranks(4, _go_back, tmp_path), strict=True)
    assert set(possible) == {(2, 1)}
    _check(list(found), 1, {3})
    lose(tmp_path, {0})
    _check(run_ranks(4, recover, tmp_path, 1, 1), 1, {0})


def _go_back(folder: Path) -> tuple[tuple[int, ...], Any]:
    group = join(folder, 1)
    possible = group.epochs(slots(folder))
    group.close()
    return possible, recover(folder, 1, 1)


def test_groups_that_roll_back_together_have_both_steps_until_all_agreed(tmp_path: Path) -> None:
    assert run_ranks(4, _disagree, tmp_path) == [1] * 4
    lose(tmp_path, {0})
    possible, found = zip(*run_ranks(4, _go_back, tmp_path), strict=True)
    assert set(possible) == {(2, 1)}
    _check(list(found), 1, {0})


def _mixed_steps(folder: Path) -> list[str]:
    group = join(folder, 1)
    new = keep(folder, 1)
    said = []
    for epoch in (dist.get_rank(), 7, 7):
        try:
            group.update(None, new, epoch)
        except RecoverError as error:
            said.append(str(error))
    return said


def test_members_must_mean_the_same_new_step(tmp_path: Path) -> None:
    for said in run_ranks(3, _mixed_steps, tmp_path):
        assert said == [
            "members would keep parity of different steps: [0, 1, 2]",
            "step 7 is the one whose parity is kept already",
        ]


def _replaced(folder: Path) -> str:
    train(folder, 1, 2)
    dist.barrier()
    with pytest.raises(RecoverError) as caught:
        join(folder, 2)
    return str(caught.value)


def test_files_of_another_group_are_refused(tmp_path: Path) -> None:
    said = run_ranks(3, _replaced, tmp_path)
    assert all("is of another parity group" in each for each in said)


def test_memory_of_any_type_is_bytes_and_what_is_none_is_refused() -> None:
    assert as_bytes(torch.ones(3, dtype=torch.bfloat16)).nbytes == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.from_numpy(as_bytes(memoryview(b"abc"))).tolist() == [97, 98, 99]
    for tensor in (torch.ones(4, 4).t(), torch.ones(4, device="meta")):
        with pytest.raises(RecoverError, match="contiguous tensors in CPU memory"):
            as_bytes(tensor)


def _beside_steps(folder: Path) -> float:
    dist.init_process_group("gloo")
    group = join(folder, 1, dist.new_group(backend="gloo"))
    old, total = None, torch.zeros(1000)
    for step in range(1, 4):
        new = keep(folder, step)
        update = threading.Thread(target=group.update, args=(old, new, step))
        update.start()
        for _ in range(20):
            gradient = torch.full((1000,), float(dist.get_rank()))
            dist.all_reduce(gradient)
            total += gradient
        update.join()
        old = new
    assert group.epoch == 3
    return float(total[0])


def test_updates_run_beside_the_communication_of_a_step(tmp_path: Path) -> None:
    assert run_ranks(4, _beside_steps, tmp_path) == [360.0] * 4
    lose(tmp_path, {2})
    _check(run_ranks(4, recover, tmp_path, 1), 3, {2})


def _go_on(folder: Path, step: int) -> tuple[int, int]:
    group = join(folder, 1)
    old = state(dist.get_rank(), step - 1)
    updated = group.update(old, keep(folder, step), step)
    return updated.sent_bytes, old.nbytes


def test_new_processes_go_on_with_the_parity_of_the_old_ones(tmp_path: Path) -> None:
    run_ranks(4, train, tmp_path, 1, 2)
    # Step 3 changes a few bytes, and only those stripes are sent.
    for sent, _ in run_ranks(4, _go_on, tmp_path, 3):
        assert 0 < sent <= 2 * STRIPE_BYTES
    lose(tmp_path, {0})
    _check(run_ranks(4, recover, tmp_path, 1), 3, {0})


def test_a_member_without_its_parity_makes_all_send_everything(tmp_path: Path) -> None:
    run_ranks(4, train, tmp_path, 1, 2)
    lose(tmp_path, {0})
    for sent, nbytes in run_ranks(4, _go_on, tmp_path, 3):
        assert sent == nbytes
    lose(tmp_path, {3})
    _check(run_ranks(4, recover, tmp_path, 1), 3, {3})


def _documented(code: list[str], folder: Path) -> tuple[int, bool]:
    names: dict[str, Any] = {}
    exec(code[0].replace("/dev/shm/my-run", str(folder)), names)
    names["parity"].close()
    again = ParityGroup(names["group"], directory=folder)
    if dist.get_rank() == 1:
        again.close(remove=True)
        again = ParityGroup(names["group"], directory=folder)
    exec(code[1], names)
    mine = {} if dist.get_rank() == 1 else names["state"]
    step, data, lost, _ = names["again"](again, mine)
    expected = names["state"][7].view(torch.uint8).numpy()
    return step, lost == (1,) and bool((data == expected).all())


def test_the_documented_lines_run(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "parity.md"
    code = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert run_ranks(3, _documented, code, tmp_path) == [(7, True)] * 3
