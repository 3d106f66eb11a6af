"""TRL's SFTTrainer with a checkpoint store, where TRL is installed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("trl")

from forked import run_ranks
from hf_training import WORDS, Fate, Plan, digest_of, kept, samples, tiny

from outlast.integrations.hf_trainer import add_checkpoints, add_guard

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed


def fine_tuned(plan: Plan) -> tuple[int, list[float], str]:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    words = {f"w{number}": number for number in range(WORDS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        eos_token="w0",
        pad_token="w0",
    )
    rows = [{"input_ids": each["input_ids"].tolist()} for each in samples()]
    data = Dataset(InMemoryTable.from_pylist(rows), fingerprint="samples")
    arguments = SFTConfig(
        output_dir=plan.output, max_steps=plan.steps, per_device_train_batch_size=plan.batch,
        save_steps=2, logging_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        learning_rate=1e-3, gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer: Any = SFTTrainer(tiny(0.1), arguments, train_dataset=data, processing_class=tokenizer)
    kept.append(trainer)
    if plan.add:
        saving = add_checkpoints(trainer, writer="thread")
        add_guard(trainer, "linear")
        trainer.add_callback(Fate(plan, saving))
    trainer.train(resume_from_checkpoint=plan.resume)
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return trainer._initial_global_step, losses, digest_of(trainer.model)


@pytest.mark.supports("transformers", "resume")
def test_a_killed_fine_tuning_ends_in_the_same_bits(tmp_path: Path) -> None:
    [whole] = run_ranks(1, fine_tuned, Plan(str(tmp_path / "whole"), add=(), steps=8))
    output = str(tmp_path / "killed")
    assert run_ranks(1, fine_tuned, Plan(output, steps=8, dies_at=5), may_die={0}) == [None]
    [resumed] = run_ranks(1, fine_tuned, Plan(output, steps=8, resume=True))
    assert resumed[0] == 4
    assert resumed[1:] == whole[1:]
