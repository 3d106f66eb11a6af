"""torchtitan's own model, FSDP2, optimizers, schedules and data loader, saved into a store."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks

pytest.importorskip("torchtitan", reason="its pins differ from the tested set; see the docs")

from titan_runs import Titan
from torchtitan.components.checkpointer import CheckpointManager

from outlast.checkpoint import list_versions, load, storage_of
from outlast.checkpoint.format.version import is_published
from outlast.checkpoint.tiers.place import Place
from outlast.errors import EXIT_TO_BE_CONTINUED, CheckpointError, IntegrationError
from outlast.integrations.torchtitan import OutlastCheckpointManager, manager
from outlast.integrations.torchtitan.state import joined

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STEPS, EVERY = 8, 2


def settings(**given: Any) -> Any:
    """Settings of a manager that saves everything, every second step."""
    return OutlastCheckpointManager.Config(
        **{"enable": True, "interval": EVERY, "last_save_model_only": False, **given}
    )


def steps_in(folder: Path) -> list[int]:
    storage = storage_of(folder / "checkpoint")
    return [each.step for each in list_versions(storage) if is_published(storage, each)]


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
    config = settings(keep_latest_k=0, enable_first_step_checkpoint=True, delta_chain=3)
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


def weights_of(titan: Titan) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor() for name, each in titan.model.named_parameters()}


def last_save_and_first_load(folder: Path) -> dict[str, Any]:
    """What the settings of a run's last save and of the next one's first load do."""
    found: dict[str, Any] = {}
    config = settings(interval=100, last_save_model_only=True, export_dtype="bfloat16")
    first = Titan(config, folder / "a", steps=2)
    first.train()
    weights = weights_of(first)
    contents = folder / "a" / "checkpoint" / "model"
    [version] = list_versions(storage_of(contents))
    catalogue = load(storage_of(contents), version).catalogue
    found["stored"] = {each.dtype for each in catalogue.tensors.values()}
    found["names"] = {name.partition(".")[0] for name in catalogue.tensors}
    rounded = {name: each.bfloat16().float() for name, each in weights.items()}
    for path in (contents, contents / version.folder):
        next_one = Titan(settings(initial_load_path=str(path)), folder / "b")
        assert next_one.manager.load()
        found[f"loaded {path.name}"] = same(weights_of(next_one), rounded)
        found["step"] = next_one.step
        next_one.manager.close()
    try:
        Titan(config, folder / "a", steps=2).manager.load()
    except IntegrationError as error:
        found["refused"] = str(error)
    seed = Titan(settings(create_seed_checkpoint=True), folder / "s")
    seed.manager.save(0, last_step=True)
    seed.manager.close()
    grown = Titan(settings(load_step=0), folder / "s")
    torch.manual_seed(1)
    with torch.no_grad():
        grown.model.init_weights(buffer_device=torch.device("cpu"))
    assert grown.manager.load(step=0)
    found["seed"] = same(weights_of(grown), weights_of(seed)), grown.step
    grown.manager.close()
    config = settings(interval=100, last_save_model_only=True, last_save_in_hf=True)
    exported = Titan(config, folder / "h", steps=2)
    exported.train()
    path = folder / "h" / "checkpoint" / "step-2"
    found["safetensors"] = [each.name for each in path.glob("*.safetensors")]
    config = settings(initial_load_path=str(path), initial_load_in_hf=True)
    imported = Titan(config, folder / "i")
    assert imported.manager.load()
    found["imported"] = same(weights_of(imported), weights_of(exported))
    imported.manager.close()
    # A folder of torchtitan's own manager is taken, too.
    own = CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False)
    theirs = Titan(own, folder / "c", steps=2)
    theirs.train()
    path = str(folder / "c" / "checkpoint" / "step-2")
    for whole in (False, True):
        config = settings(initial_load_path=path, initial_load_model_only=not whole)
        ours = Titan(config, folder / "d", steps=2)
        assert ours.manager.load()
        found[f"theirs {whole}"] = same(weights_of(ours), weights_of(theirs)), ours.step
        ours.manager.close()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_last_save_holds_the_model_and_begins_another_run(tmp_path: Path) -> None:
    [found] = run_ranks(1, last_save_and_first_load, tmp_path)
    assert found["stored"] == {"bfloat16"}
    assert found["names"] == {"model"}
    assert found["loaded model"]
    assert found["loaded step-00000002-a1"]
    assert found["step"] == 0
    assert "the model of step 2 alone, whose training was complete" in found["refused"]
    assert found["seed"] == (True, 0)
    assert found["safetensors"]
    assert found["imported"]
    assert found["theirs False"] == (True, 0)
    assert found["theirs True"] == (True, 2)


def refusals(folder: Path) -> list[str]:
    """What settings that make no sense are answered with."""
    answers = []
    for given in (
        {"exclude_from_loading": ["optimiser"]},
        {"initial_load_path": str(folder / "nothing")},
        {"load_step": 7},
    ):
        titan = Titan(settings(**given), folder)
        try:
            titan.manager.load(step=titan.load_step)
        except (IntegrationError, CheckpointError) as error:
            answers.append(str(error))
        titan.manager.close()
    disabled = Titan(OutlastCheckpointManager.Config(), folder)
    assert not disabled.manager.load()
    assert not disabled.manager.save(1, last_step=True)
    disabled.manager.close()
    return answers


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    [(unknown, nowhere, missing)] = run_ranks(1, refusals, tmp_path)
    assert 'names "optimiser"; there are train_state, model, optimizer' in unknown
    assert "is no folder" in nowhere
    assert "step = 7 is not in" in missing


def test_parts_of_a_pipeline_are_one_model() -> None:
    from torch import nn

    def part(*layers: str, **others: nn.Module) -> nn.Module:
        module = nn.Module()
        module.layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in layers})
        for name, each in others.items():
            module.add_module(name, each)
        return module

    parts = [part("0", "1", embedding=nn.Embedding(3, 2)), part("2", head=nn.Linear(2, 3))]
    whole = dict(joined(parts).named_parameters())
    assert {name.rpartition(".")[0] for name in whole} == {
        "layers.0", "layers.1", "layers.2", "embedding", "head",
    }  # fmt: skip
    assert whole["layers.2.weight"] is parts[1].layers["2"].weight
    assert joined(parts[:1]) is parts[0]
    parts[0].scale = nn.Parameter(torch.ones(1))
    with pytest.raises(IntegrationError, match="`scale` of Module lies outside of any layer"):
        joined(parts)
