"""Hugging Face's Trainer with all of Outlast: kill it at any time, and run it again.

    python examples/integrations/train_transformers.py

The output directory is a run directory: `outlast report trainer_output` shows it.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from outlast.integrations.hf_trainer import add_outlast
from outlast.job import load_loop_job

TEXT = ("It was the best of times, it was the worst of times. " * 40).encode()
LENGTH = 32


def main(output: str, steps: int) -> None:
    starts = range(0, len(TEXT) - LENGTH, LENGTH // 2)
    tokens = [torch.tensor(list(TEXT[start : start + LENGTH])) for start in starts]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        save_steps=10,
        save_total_limit=2,
        logging_steps=5,
        report_to=[],
        use_cpu=True,
    )
    data = [{"input_ids": each, "labels": each} for each in tokens]
    trainer = Trainer(model, arguments, train_dataset=data)
    saving = add_outlast(trainer, load_loop_job(None, ["guard.policy=linear"]))
    trainer.train(resume_from_checkpoint=saving.has_checkpoint())
    print(
        f"loss {trainer.state.log_history[-2]['loss']:.3f} after {trainer.state.global_step} steps"
    )


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "trainer_output",
        int(sys.argv[2]) if len(sys.argv) > 2 else 40,
    )
