"""Hugging Face's Trainer with a checkpoint store: killed, resumed, and by its own arguments."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from hf_training import Outcome, Plan, alone, together

from outlast.checkpoint import list_versions, storage_of

pytestmark = pytest.mark.distributed


def done(outcome: Outcome | None) -> Outcome:
    assert outcome is not None, "the process has died"
    return outcome


def steps_in(output: Path) -> list[int]:
    return sorted(each.step for each in list_versions(storage_of(output / "checkpoints")))


def folders_in(output: Path) -> list[str]:
    return sorted(each.name for each in output.glob("checkpoint-*"))


@pytest.mark.supports("transformers", "checkpoint", "resume")
def test_a_killed_training_ends_in_the_same_bits(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2}
    whole = done(alone(Plan(str(tmp_path / "whole"), add=(), options=options)))
    assert len(whole.losses) == 12
    assert len(set(whole.losses)) == 12
    output = tmp_path / "killed"
    plan = Plan(str(output), resume="if any", options=options)
    assert alone(Plan(str(output), dies_at=5, options=options)) is None
    # Once more, now in the middle of a save: what it leaves is no version, or a whole one.
    assert alone(Plan(str(output), dies_at=10, waits=False, resume=True, options=options)) is None
    resumed = done(alone(plan))
    assert 4 <= resumed.first <= 10
    assert resumed.losses == whole.losses
    assert resumed.digest == whole.digest
    assert resumed.saved[-1] == 12


@pytest.mark.supports("transformers", "malleable")
def test_two_ranks_go_on_as_one_with_the_same_samples(tmp_path: Path) -> None:
    output = tmp_path / "out"
    plain = {"dropout": 0.0, "steps": 8}
    whole = done(together(2, Plan(str(tmp_path / "whole"), batch=2, **plain))[0])
    assert together(2, Plan(str(output), batch=2, dies_at=5, **plain)) == [None, None]
    shutil.copytree(output, tmp_path / "again")
    shrunk = done(alone(Plan(str(output), batch=4, resume=True, **plain)))
    assert shrunk.first == 4
    assert shrunk.losses == pytest.approx(whole.losses, rel=1e-4)
    # On as many ranks as before not a bit differs.
    plan = Plan(str(tmp_path / "again"), batch=2, resume=True, **plain)
    again = [done(each) for each in together(2, plan)]
    assert again[0].losses == whole.losses
    assert {each.digest for each in again} == {whole.digest}


@pytest.mark.supports("transformers", "checkpoint")
def test_the_arguments_of_the_trainer_keep_their_meaning(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2,
        "load_best_model_at_end": True, "learning_rate": 8e-2,
    }  # fmt: skip
    plain = done(alone(Plan(str(tmp_path / "plain"), add=(), options=options)))
    ours = done(alone(Plan(str(tmp_path / "ours"), options=options)))
    assert plain.best is not None
    assert ours.best is not None
    # The best is not the last, so that it has to be kept and loaded.
    assert Path(plain.best).name not in ("checkpoint-12", "checkpoint-10")
    assert Path(ours.best).name == Path(plain.best).name
    assert ours.losses == plain.losses
    assert ours.digest == plain.digest
    assert folders_in(tmp_path / "ours") == folders_in(tmp_path / "plain")
    assert len(folders_in(tmp_path / "ours")) == 2
    # What the Trainer keeps can be restored; the store keeps one more at most.
    kept = {int(name.split("-")[1]) for name in folders_in(tmp_path / "ours")}
    assert kept <= set(steps_in(tmp_path / "ours"))
    assert len(steps_in(tmp_path / "ours")) <= 3
    # An older checkpoint by its name, with a schedule and an optimizer that continue.
    older = min(kept)
    options = {**options, "load_best_model_at_end": False}
    again = {}
    for name, add in (("plain", ()), ("ours", ("checkpoints",))):
        output = tmp_path / name
        resume = str(output / f"checkpoint-{older}")
        again[name] = done(alone(Plan(str(output), add, resume=resume, options=options)))
    assert again["ours"].first == older
    assert again["ours"].digest == again["plain"].digest


def test_what_the_trainer_itself_has_saved_is_gone_on_from(tmp_path: Path) -> None:
    output = tmp_path / "out"
    whole = done(alone(Plan(str(output), add=())))
    shutil.rmtree(output / "checkpoint-12")
    shutil.rmtree(output / "checkpoint-10")
    resumed = done(alone(Plan(str(output), resume=True)))
    assert resumed.first == 8
    assert resumed.digest == whole.digest
    assert steps_in(output) == [10, 12]
    # A step that the Trainer itself has written since, without Outlast, is continued from too.
    plain = done(alone(Plan(str(output), add=(), resume=f"{output}/checkpoint-8", steps=16)))
    assert plain.first == 8
    assert done(alone(Plan(str(output), resume=True, steps=20))).first == 16


def test_a_damaged_version_is_passed_over(tmp_path: Path) -> None:
    output = tmp_path / "out"
    whole = done(alone(Plan(str(output))))
    newest = max((output / "checkpoints").glob("step-00000012-*"))
    for pack in newest.glob("*.pack"):
        content = bytearray(pack.read_bytes())
        content[len(content) // 2] ^= 0xFF
        pack.write_bytes(content)
    resumed = done(alone(Plan(str(output), resume=True)))
    assert resumed.first == 10
    assert any("continues from step 10" in each for each in resumed.said)
    assert resumed.digest == whole.digest


def test_only_the_model(tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = {"save_only_model": True}
    done(alone(Plan(str(output), steps=4, options=options)))
    resumed = done(alone(Plan(str(output), steps=6, resume=True, options=options)))
    assert resumed.first == 4
    assert any("only the model was saved" in each for each in resumed.said)


def test_a_folder_whose_save_was_cut_short_leads_to_the_version_before(tmp_path: Path) -> None:
    output = tmp_path / "out"
    whole = done(alone(Plan(str(output), steps=6)))
    shutil.rmtree(next((output / "checkpoints").glob("step-00000006-*")))
    last = str(output / "checkpoint-6")
    resumed = done(alone(Plan(str(output), resume=last, steps=6)))
    assert resumed.first == 4
    assert any("checkpoint-6 was never published" in each for each in resumed.said)
    assert resumed.digest == whole.digest
    shutil.rmtree(output / "checkpoints")
    anew = done(alone(Plan(str(output), resume=last, steps=6)))
    assert anew.first == 0
    assert any("the training begins anew" in each for each in anew.said)
    assert anew.digest == whole.digest


def test_callbacks_get_their_states_back_and_data_begins_anew_where_asked(tmp_path: Path) -> None:
    options = {
        "restore_callback_states_from_checkpoint": True, "ignore_data_skip": True,
        "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss",
    }  # fmt: skip
    found = {}
    for name, add in (("plain", ()), ("ours", ("checkpoints",))):
        output = str(tmp_path / name)
        plan = Plan(output, add, steps=6, patience=4, options=options)
        done(alone(plan))
        plan.resume, plan.steps = True, 10
        found[name] = done(alone(plan))
    assert found["ours"].first == 6
    assert found["ours"].losses == found["plain"].losses
    assert found["ours"].digest == found["plain"].digest
