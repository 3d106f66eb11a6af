"""DeepSpeed's engine with Outlast's checkpoints: ZeRO on the CPU, killed and continued with."""

import shutil
import warnings

import pytest
import torch

pytest.importorskip("deepspeed", reason="deepspeed (the extra integrations) is not installed")

import deepspeed_training as training
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_training import built  # noqa: F401  (a fixture)
from forked import run_ranks
from torch import nn

from outlast.checkpoint import CheckpointStore, list_versions, storage_of
from outlast.checkpoint.convert import import_checkpoint
from outlast.errors import CheckpointError, IntegrationError
from outlast.integrations.deepspeed import STORE, OutlastCheckpointEngine
from outlast.runtime import saves
from outlast.tensorize import tensorize

pytestmark = pytest.mark.distributed

ALL, NEVER = training.STEPS, 0


@pytest.fixture(scope="module")
def plainly(tmp_path_factory):
    """Runs of DeepSpeed that saves by itself: stage -> their directory."""
    places = {}
    for stage in (0, 1, 2):
        places[stage] = tmp_path_factory.mktemp(f"plain-{stage}")
        run_ranks(2, training.train, str(places[stage]), stage, ALL, NEVER, False)
    return places


def steps_in(place):
    return [each.step for each in list_versions(storage_of(place / STORE))]


@pytest.mark.supports("deepspeed", "checkpoint", "resume")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_killed_training_goes_on_as_if_it_had_not_been(stage, plainly, tmp_path):
    # The save of step 8 may be under way.
    run_ranks(2, training.train, str(tmp_path), stage, ALL, 9, may_die=(0, 1))
    assert max(training.losses(tmp_path)) == 9
    restored = run_ranks(2, training.train, str(tmp_path), stage)
    assert restored in ([4, 4], [8, 8])
    assert training.losses(tmp_path) == training.losses(plainly[stage])
    assert steps_in(tmp_path)[-1] == 12
    # DeepSpeed's own names, with nothing but a word in them.
    files = sorted(each.name for each in (tmp_path / "global_step12").iterdir())
    partitions = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    assert files == ["mp_rank_00_model_states.pt", *(partitions if stage else [])]
    assert all(each.stat().st_size < 100 for each in (tmp_path / "global_step12").iterdir())


@pytest.mark.supports("deepspeed", "malleable")
@pytest.mark.parametrize(("before", "after", "stage"), [(2, 1, 2), (1, 2, 1)])
def test_another_number_of_ranks_goes_on(before, after, stage, plainly, tmp_path):
    run_ranks(before, training.train, str(tmp_path), stage, 8)
    assert run_ranks(after, training.train, str(tmp_path), stage) == [8] * after
    found = training.losses(tmp_path)
    assert list(found) == list(range(1, 13))
    # Sums are made in another order; a moment that was lost would show in the first digits.
    assert found == pytest.approx(training.losses(plainly[stage]), rel=1e-4)


def _load_moments(place, stage):
    training.begin()
    engine = training.engine_of(stage)
    engine.checkpoint_engine = OutlastCheckpointEngine(place)
    engine.load_checkpoint(place)
    inner = engine.basic_optimizer.state_dict()["state"]
    return {name: each.tolist() for name, each in inner[0].items() if torch.is_tensor(each)}


def test_the_moments_of_other_ranks_are_those_that_were_saved(tmp_path):
    run_ranks(2, training.train, str(tmp_path), 1, 4)
    (whole,) = run_ranks(1, _load_moments, str(tmp_path), 1)
    parts = run_ranks(3, _load_moments, str(tmp_path), 1)
    elements = 5 * 7 + 7 + 7 * 3 + 3
    assert any(whole["exp_avg"])
    for name in ("exp_avg", "exp_avg_sq"):
        together = [number for each in parts for number in each[name]]
        assert together[:elements] == whole[name][:elements]
        assert not any(together[elements:])


def _save_and_damage(place):
    training.begin()
    engine = training.engine_of(1)
    keeper = engine.checkpoint_engine = OutlastCheckpointEngine(place, asynchronous=False)
    inputs, targets = training.data()
    for _ in range(2):
        training.learn(engine, inputs, targets)
        engine.save_checkpoint(place)
    version = list_versions(keeper._store.storage)[-1]
    (pack,) = (keeper.directory / STORE / version.folder).glob("*.pack")
    content = bytearray(pack.read_bytes())
    for place_in_file in range(len(content) // 4, len(content) // 2):
        content[place_in_file] ^= 0xFF
    pack.write_bytes(content)
    with pytest.raises(CheckpointError) as newest:
        engine.load_checkpoint(place)
    engine.load_checkpoint(place, tag="global_step1")
    with pytest.raises(CheckpointError) as untagged:
        engine.save_checkpoint(place, tag="best")
    with pytest.raises(IntegrationError) as elsewhere:
        engine.save_checkpoint(f"{place}/elsewhere")
    keeper.cleanup()
    return str(newest.value), engine.global_steps, str(untagged.value), str(elsewhere.value)


def test_what_is_damaged_or_cannot_be_named_is_refused(tmp_path):
    ((newest, steps, untagged, elsewhere),) = run_ranks(1, _save_and_damage, str(tmp_path))
    assert "load another with tag=..., there are global_step1, global_step2" in newest
    assert steps == 1
    assert "tag = 'best' cannot be saved" in untagged
    assert "give both the same directory" in elsewhere


def _saved_and_restored(place, low_rank, **settings):
    """Losses of an engine after a save, and of one that was restored from it."""
    training.begin()
    inputs, targets = (each.split(training.BATCH // 2) for each in training.data())
    engines = []
    for _ in range(2):
        model = training.model_of()
        if low_rank:
            tensorize(model, form="low_rank", rank=2, match="0", force=True)
        engine = training.engine_of(1, model, **settings)
        engine.checkpoint_engine = OutlastCheckpointEngine(place, asynchronous=False)
        engines.append(engine)
        if len(engines) == 1:
            for step in range(3):
                training.learn(engine, inputs[step], targets[step])
            engine.save_checkpoint(place)
            engine.checkpoint_engine.cleanup()
        else:
            engine.load_checkpoint(place)
    found = [
        [training.learn(engine, inputs[4], targets[4]) for _ in range(3)] for engine in engines
    ]
    return found, sum(each.numel() for each in engines[0].module.parameters())


@pytest.mark.supports("deepspeed", "tensorize")
def test_a_tensorized_model_is_trained_and_restored(tmp_path):
    for (first, restored), parameters in run_ranks(2, _saved_and_restored, str(tmp_path), True):
        assert first == restored
        assert first[2] < first[0]
        assert parameters == 2 * (5 + 7) + 7 + 7 * 3 + 3


def _in_bfloat16(place):
    return _saved_and_restored(place, False, bf16={"enabled": True})


def test_bfloat16_is_restored_with_its_float32_weights(tmp_path):
    for (first, restored), _ in run_ranks(2, _in_bfloat16, str(tmp_path)):
        assert first == restored
    assert (tmp_path / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").is_file()


def _save_where_nothing_can_be_written(place):
    training.begin()
    engine = training.engine_of(1)
    keeper = engine.checkpoint_engine = OutlastCheckpointEngine(place)
    inputs, targets = training.data()
    told = []
    for step in range(3):
        training.learn(engine, inputs, targets)
        if step == 1:
            keeper.wait()
            store = keeper.directory / STORE
            store.rename(keeper.directory / "aside")
            store.touch()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.save_checkpoint(place)
        told.append([str(each.message) for each in caught if "was not saved" in str(each.message)])
        if step == 1:
            for handle, _ in keeper._saves._handles:
                handle.result()
            store.unlink()
            (keeper.directory / "aside").rename(store)
    keeper.cleanup()
    return told, [each.step for each in list_versions(keeper._store.storage)]


def test_a_save_that_fails_stops_no_training_and_is_told(tmp_path):
    ((told, steps),) = run_ranks(1, _save_where_nothing_can_be_written, str(tmp_path))
    # By the save itself where it fails at once, else by the next one.
    assert [len(each) for each in told] in ([0, 0, 1], [0, 1, 0])
    assert steps == [1, 3]


def _fail_to_save_last(place):
    training.begin()
    engine = training.engine_of(1)
    keeper = engine.checkpoint_engine = OutlastCheckpointEngine(place)
    inputs, targets = training.data()
    training.learn(engine, inputs, targets)
    store = keeper.directory / STORE
    shutil.rmtree(store, ignore_errors=True)
    store.touch()
    warnings.simplefilter("ignore")
    engine.save_checkpoint(place)
    # As at the script's end.
    keeper._close_at_exit()
    said, saves._failed_at_exit[:] = saves._failed_at_exit[:], []
    return said


def test_a_last_save_that_fails_ends_the_script_as_failed(tmp_path):
    ((said,),) = run_ranks(1, _fail_to_save_last, str(tmp_path))
    assert STORE in said


def _make_engine_again(place):
    training.begin()
    engine = training.engine_of(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.checkpoint_engine = OutlastCheckpointEngine(place)
    engine.load_checkpoint(place)
    engine.checkpoint_engine.cleanup()
    told = [str(each.message) for each in caught if "cut short" in str(each.message)]
    return told, engine.global_steps


def test_latest_never_names_a_save_that_was_cut_short(tmp_path):
    run_ranks(1, training.train, str(tmp_path), 1, 8)
    assert (tmp_path / "latest").read_text() == "global_step8"
    newest = list_versions(storage_of(tmp_path / STORE))[-1]
    for each in (tmp_path / STORE / newest.folder).iterdir():
        # Manifests and the seal come last.
        if each.suffix != ".pack":
            each.unlink()
    (((warning,), steps),) = run_ranks(1, _make_engine_again, str(tmp_path))
    assert "the save of global_step8 was cut short: global_step4 is the newest" in warning
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert steps == 4


def test_checkpoints_from_before_can_be_gone_on_with(plainly, tmp_path):
    run_ranks(2, training.train, str(tmp_path), 1, 8, NEVER, False)
    assert run_ranks(2, training.train, str(tmp_path), 1) == [8, 8]
    assert training.losses(tmp_path) == training.losses(plainly[1])
    assert steps_in(tmp_path) == [12]


def _save_in_parts(place):
    training.begin()
    # Each rank has half of the first layer.
    columns = {"patterns": [r"\b0\.weight$"], "partition_type": "column"}
    specification = {"use_default_specs": False, "layer_specs": [columns]}
    parts = {"autotp_size": 2, "partition_config": specification}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    engine = training.engine_of(1, model, tensor_parallel=parts)
    keeper = engine.checkpoint_engine = OutlastCheckpointEngine(place, asynchronous=False)
    with pytest.raises(CheckpointError) as error:
        engine.save_checkpoint(place)
    keeper.cleanup()
    return engine.mp_world_size, str(error.value)


def test_an_engine_with_tensor_parallelism_is_not_saved(tmp_path):
    for size, sentence in run_ranks(2, _save_in_parts, str(tmp_path)):
        assert size == 2
        assert (
            "keeps engines of data parallelism alone, and this one has 1 data-parallel" in sentence
        )
    assert steps_in(tmp_path) == []


def _save_over_deepspeeds_own(place):
    training.begin()
    engine = training.engine_of(1)
    inputs, targets = training.data()
    training.learn(engine, inputs, targets)
    engine.save_checkpoint(place)
    keeper = engine.checkpoint_engine = OutlastCheckpointEngine(place, asynchronous=False, keep=1)
    with pytest.raises(CheckpointError) as error:
        engine.save_checkpoint(place)
    # A later save of the store's own is dropped from the folder with it, which stays.
    for _ in range(2):
        training.learn(engine, inputs, targets)
        engine.save_checkpoint(place)
        (keeper.directory / f"global_step{engine.global_steps}" / "notes.txt").touch()
    keeper.cleanup()
    OutlastCheckpointEngine(place).cleanup()
    engine.checkpoint_engine = OutlastCheckpointEngine(place)
    engine.load_checkpoint(place, tag="global_step1")
    return str(error.value), engine.global_steps


def test_what_deepspeed_has_written_itself_is_never_replaced_or_removed(tmp_path):
    for sentence, steps in run_ranks(2, _save_over_deepspeeds_own, str(tmp_path)):
        assert "global_step1 holds mp_rank_00_model_states.pt, which DeepSpeed itself" in sentence
        assert steps == 1
    assert steps_in(tmp_path) == [3]
    assert [each.name for each in (tmp_path / "global_step2").iterdir()] == ["notes.txt"]
    assert len([*(tmp_path / "global_step3").glob("*.pt")]) == 3


def _begin_without_a_group():
    OutlastCheckpointEngine("nowhere")


def test_a_process_group_is_needed():
    with pytest.raises(IntegrationError, match=r"make it after deepspeed.initialize"):
        _begin_without_a_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("stage", [1, 2])
def test_import_takes_what_deepspeed_writes(stage, plainly, tmp_path):
    done = import_checkpoint(plainly[stage], tmp_path / "store", prefix="model.")
    assert (done.step, done.tensors) == (12, 8)
    expected = get_fp32_state_dict_from_zero_checkpoint(str(plainly[stage]))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Identity(), nn.Linear(7, 3))
    # Two ranks have saved it, and this is one.
    with CheckpointStore(tmp_path / "store") as store:
        assert store.restore({"model": model}).step == 12
        master = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Identity(), nn.Linear(7, 3))
        store.restore({"master": master})
    for found in (model, master):
        assert {name: each.tolist() for name, each in found.state_dict().items()} == {
            name: each.tolist() for name, each in expected.items()
        }
