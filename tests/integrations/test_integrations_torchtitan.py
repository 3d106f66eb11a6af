"""torchtitan's own model, FSDP2, optimizers, schedules and data loader, saved into a store."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forked import run_ranks

pytest.importorskip("torchtitan", reason="pip install 'outlast[torchtitan]'")

from titan_runs import Titan, settings, steps_in

from outlast.checkpoint.tiers import Place
from outlast.errors import EXIT_TO_BE_CONTINUED, CheckpointError, IntegrationError
from outlast.integrations import torchtitan_checkpoints as manager

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STEPS = 8


def train(folder: Path, mode: str, places_data: bool = False, **given: Any) -> dict[int, float]:
    titan = Titan(settings(async_mode=mode, keep_latest_k=2, **given), folder, steps=STEPS)
    return titan.train(places_data=places_data)


def train_and_die(folder: Path, mode: str, where: str) -> None:
    """Train; one of the ranks is killed in the save of step 4, or before it."""
    titan = Titan(settings(async_mode=mode), folder, steps=STEPS)
    seal, sealed = Place.seal, []

    def kill_in_the_second(place: Place, version: Any) -> None:
        sealed.append(version)
        if len(sealed) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        seal(place, version)

    def kill_at_four(step: int) -> None:
        if step == 4:
            titan.manager.maybe_wait_for_saving()
        if step == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "in the save":
        Place.seal = kill_in_the_second
    # The other rank finds that nobody answers.
    with contextlib.suppress(Exception):
        titan.train(kill_at_four if where == "before the save" else lambda _: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Loss of every step of a training that nothing befalls."""
    folder = tmp_path_factory.mktemp("whole")
    first, second = run_ranks(2, train, folder, "disabled")
    assert first == second
    assert list(first) == list(range(1, STEPS + 1))
    assert first[STEPS] < first[1]
    # keep_latest_k = 2
    assert steps_in(folder) == [6, 8]
    return first


KILLS = [("in the save", "async", 0, 4), ("before the save", "async_with_pinned_mem", 1, 2)]


@pytest.mark.supports("torchtitan", "checkpoint", "resume")
@pytest.mark.parametrize(("where", "mode", "killed", "newest"), KILLS)
def test_after_a_kill_the_losses_are_those_of_a_run_without(
    tmp_path: Path, whole: dict[int, float], where: str, mode: str, killed: int, newest: int
) -> None:
    outcomes = run_ranks(2, train_and_die, tmp_path, mode, where, may_die={killed})
    assert outcomes[killed] is None
    rest = {step: loss for step, loss in whole.items() if step > newest}
    assert run_ranks(2, train, tmp_path, mode) == [rest, rest]
    assert steps_in(tmp_path) == [6, 8]


def go_on_alone(folder: Path) -> tuple[str, dict[int, float]]:
    refused = ""
    try:
        train(folder, "async", load_step=4, load_only=True)
    except IntegrationError as error:
        refused = str(error)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    losses = train(
        folder,
        "async",
        places_data=True,
        load_step=4,
        load_only=True,
        exclude_from_loading=["dataloader"],
    )
    return refused, losses


@pytest.mark.supports("torchtitan", "malleable")
def test_one_rank_goes_on_where_two_were(tmp_path: Path, whole: dict[int, float]) -> None:
    run_ranks(2, train_in_full, tmp_path)
    [(refused, losses)] = run_ranks(1, go_on_alone, tmp_path)
    assert 'checkpoint.exclude_from_loading=["dataloader"]' in refused
    assert "dp_rank_0, dp_rank_1, world_size" in refused
    rest = {step: loss for step, loss in whole.items() if step > 4}
    assert losses == pytest.approx(rest, rel=1e-4)
    # load_only
    assert steps_in(tmp_path) == [1, 2, 4, 6, 8]


def train_in_full(folder: Path) -> None:
    """Keep everything, also of the first step."""
    config = settings(keep_latest_k=0, enable_first_step_checkpoint=True)
    Titan(config, folder, steps=STEPS).train()


def until_told(folder: Path) -> tuple[int, int]:
    """Train until rank 1 has got a signal; exit code and last step."""
    titan = Titan(settings(interval=1000), folder, steps=5000)

    def signal_at_three(step: int) -> None:
        if step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        titan.train(signal_at_three)
    except SystemExit as end:
        return int(end.code or 0), titan.step
    return 0, titan.step


@pytest.mark.supports("torchtitan", "chain")
def test_a_signal_to_one_rank_ends_all_after_a_save_of_the_same_step(tmp_path: Path) -> None:
    (code, step), other = run_ranks(2, until_told, tmp_path)
    assert other == (code, step)
    assert code == EXIT_TO_BE_CONTINUED
    assert 3 <= step < 5000
    assert steps_in(tmp_path) == [step]


def with_a_full_disk(folder: Path) -> tuple[list[str], int, str]:
    """What is logged of saves that fail, and what the last one raises."""
    messages: list[str] = []
    monkey = pytest.MonkeyPatch()
    seal = Place.seal

    def full(place: Place, version: Any) -> None:
        if version.step in (2, STEPS):
            raise OSError(28, "No space left on device")
        seal(place, version)

    monkey.setattr(Place, "seal", full)
    monkey.setattr(manager._logger, "error", lambda text, *args: messages.append(text % args))
    titan = Titan(settings(async_mode="async"), folder, steps=STEPS)
    try:
        titan.train()
    except CheckpointError as error:
        return messages, titan.step, str(error)
    return messages, titan.step, ""


def test_a_save_that_fails_is_told_and_the_last_one_raises(tmp_path: Path) -> None:
    [(messages, step, raised)] = run_ranks(1, with_a_full_disk, tmp_path)
    assert [each.partition(":")[0] for each in messages] == ["step 2 was not saved"]
    assert step == STEPS
    assert "No space left on device" in raised
    # Its parts are whole, and were synced: it counts, although the run could not be told so.
    assert steps_in(tmp_path)[-3:] == [4, 6, 8]
