"""Pre-train a tensorized and a dense model, set them side by side, and let the export write text.

    python examples/pretrain_tensorized.py [section.key=value ...]

Leaves runs/monarch and runs/dense, runs/monarch-dense.html with both, and runs/monarch/model, a
directory that Hugging Face's `from_pretrained` loads: its weights are the products of the factors.
"""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from outlast.report import write_report

JOB = Path(__file__).with_suffix(".toml")
RUNS = Path("runs")


def train(name: str, *overrides: str) -> Path:
    """Run `outlast train`; a run that was interrupted continues."""
    command = [sys.executable, "-m", "outlast", "train", str(JOB), f"run.name={name}", *overrides]
    subprocess.run(command, check=True)
    return RUNS / name


def write(model_directory: Path, prompt: str, length: int) -> str:
    """Continue a prompt with the exported model."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, local_files_only=True)
    ids = torch.tensor([list(prompt.encode())])  # bytes are this model's tokens
    torch.manual_seed(0)
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=True,
        temperature=0.7,
        pad_token_id=0,
        eos_token_id=None,
    )
    return bytes(written[0].tolist()).decode(errors="replace")


def main() -> None:
    """Train twice, report, generate."""
    overrides = sys.argv[1:]
    tensorized = train("monarch", *overrides)
    # A dense model wants a rate of its own.
    dense = train("dense", "tensorize.form=off", "optimizer.learning_rate=0.002", *overrides)
    print(write_report([dense, tensorized], RUNS / "monarch-dense.html"))
    print(write(tensorized / "model", "def ", 100))


if __name__ == "__main__":
    main()
