"""A Trainer with PEFT's adapters and a checkpoint store, where PEFT is installed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from forked import run_ranks
from hf_training import Fate, Plan, digest_of, kept, samples, tiny
from transformers import Trainer, TrainingArguments

from outlast.checkpoint import storage_of
from outlast.integrations.hf_trainer import add_checkpoints

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed


def adapted(plan: Plan) -> tuple[int, list[float], str, int]:
    """The steps done before, all losses, the final weights, and how many of them are trained."""
    from peft import LoraConfig, get_peft_model

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    model = get_peft_model(tiny(0.1), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    arguments = TrainingArguments(
        output_dir=plan.output, max_steps=plan.steps, per_device_train_batch_size=plan.batch,
        save_steps=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=samples())
    kept.append(trainer)
    if plan.add:
        saving = add_checkpoints(trainer, writer="thread", compression="none")
        trainer.add_callback(Fate(plan, saving))
    trainer.train(resume_from_checkpoint=plan.resume)
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return trainer._initial_global_step, losses, digest_of(model), trained


def test_adapters_alone_are_saved_and_come_back(tmp_path: Path) -> None:
    [whole] = run_ranks(1, adapted, Plan(str(tmp_path / "whole"), add=(), steps=6))
    output = tmp_path / "killed"
    assert run_ranks(1, adapted, Plan(str(output), steps=6, dies_at=3), may_die={0}) == [None]
    packs = storage_of(output / "checkpoints").files("step-00000002-a1")
    size = sum(count for name, count in packs.items() if name.endswith(".pack"))
    # Weights and two moments in fp32, the trainer's state of 16 KiB, and step counters.
    assert size < 4 * 3 * whole[3] + 32 * 1024
    [resumed] = run_ranks(1, adapted, Plan(str(output), steps=6, resume=True))
    assert resumed[0] == 2
    assert resumed[1:] == whole[1:]
