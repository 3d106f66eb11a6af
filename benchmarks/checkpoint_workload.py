"""The real training state that the checkpoint benchmark measures, trained once and cached.

    python benchmarks/checkpoint_workload.py [--quick] [--cache FOLDER]

A Hugging Face llama (about 10.1M parameters, 121 MB of fp32 AdamW state) learns the source text
of the Python standard library. Neither the network nor a download is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

CACHE = Path(__file__).resolve().parent / ".cache"
SNAPSHOT_STEPS = (20, 50, 100, 149, 150, 151, 200, 240, 248, 249, 250)
STEPS = SNAPSHOT_STEPS[-1]
GRADIENT_NAME = "gradient.safetensors"
SCALARS_NAME = "scalars.json"


@dataclass(frozen=True)
class Workload:
    """What is trained. The step numbers are the same for every workload."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    text_bytes: int
    learning_rate: float = 1e-3
    final_share: float = 0.1
    warmup_steps: int = 20
    clip: float = 1.0
    seed: int = 20

    def learning_rate_of(self, step: int) -> float:
        """The learning rate of `step` (from 1): warm-up, then cosine; its floor after the end."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        done = min((step - self.warmup_steps) / (STEPS - self.warmup_steps), 1.0)
        cosine = 0.5 * (1.0 + math.cos(math.pi * done))
        return self.learning_rate * (self.final_share + (1.0 - self.final_share) * cosine)


FULL = Workload("full", 320, 872, 6, 5, 4096, batch=8, length=128, text_bytes=8_000_000)
QUICK = Workload("quick", 64, 176, 2, 2, 1024, batch=4, length=64, text_bytes=500_000)


def workload_of(quick: bool) -> Workload:
    """The small workload for `quick`, else the one that the published figures are about."""
    return QUICK if quick else FULL


class LiveTraining:
    """The model and its optimizer, at some step.

    Args:
        workload: What to train.
        cache: Where the tokens are kept.
    """

    def __init__(self, workload: Workload, cache: Path = CACHE) -> None:
        self.workload = workload
        self.tokens = _tokens(workload, cache)
        torch.manual_seed(workload.seed)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=workload.vocabulary,
                hidden_size=workload.hidden,
                intermediate_size=workload.intermediate,
                num_hidden_layers=workload.layers,
                num_attention_heads=workload.heads,
                num_key_value_heads=workload.heads,
                max_position_embeddings=workload.length,
                tie_word_embeddings=False,
                use_cache=False,
            )
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), workload.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.steps_done = 0
        self.clip_factor = 1.0

    def step(self, update: Callable[[], object] | None = None) -> float:
        """Do one step and return its loss; the clipped gradients stay in `.grad`.

        Args:
            update: Called in place of the optimizer's step.
        """
        number = self.steps_done + 1
        self.optimizer.param_groups[0]["lr"] = self.workload.learning_rate_of(number)
        window = self._window(number)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(window[:, :-1]).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.clip)
        # As torch computes it, in fp32: the last bit decides whether a replay is exact.
        self.clip_factor = float(torch.clamp(self.workload.clip / (norm + 1e-6), max=1.0))
        (update or self.optimizer.step)()
        self.steps_done = number
        return loss.item()

    def state(self) -> dict[str, torch.Tensor]:
        """The live tensors: weights "w.<name>" and the moments "m.<name>" and "v.<name>"."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state[parameter]
            found[f"w.{name}"] = parameter.detach()
            found[f"m.{name}"] = moments["exp_avg"]
            found[f"v.{name}"] = moments["exp_avg_sq"]
        return found

    def gradients(self) -> dict[str, torch.Tensor]:
        """The clipped fp32 gradients of the latest step, "g.<name>"."""
        return {
            f"g.{name}": parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def load(self, file: Path, steps_done: int) -> None:
        """Continue from the snapshot in `file`, which was taken after `steps_done` steps."""
        saved = load_file(file)
        for name, parameter in self.model.named_parameters():
            with torch.no_grad():
                parameter.copy_(saved[f"w.{name}"])
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(steps_done)),
                "exp_avg": saved[f"m.{name}"],
                "exp_avg_sq": saved[f"v.{name}"],
            }
        self.steps_done = steps_done

    def _window(self, step: int) -> torch.Tensor:
        """The token batch of `step`, the same for every run that reaches it."""
        random = np.random.default_rng((self.workload.seed, step))
        length = self.workload.length
        starts = random.integers(len(self.tokens) - length - 1, size=self.workload.batch)
        rows = np.stack([self.tokens[start : start + length + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))


def snapshots(cache: Path = CACHE, quick: bool = False) -> dict[int, Path]:
    """The safetensors file of each step in `SNAPSHOT_STEPS`; trains where `cache` has none."""
    workload = workload_of(quick)
    folder = cache / workload.name
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{workload.name}-", dir=cache))
        threads = torch.get_num_threads()
        # One thread: the same bits on every machine size, and no waiting for a busy second core.
        torch.set_num_threads(1)
        try:
            _train(workload, cache, unfinished)
            unfinished.rename(folder)
        except BaseException:
            shutil.rmtree(unfinished)
            raise
        finally:
            torch.set_num_threads(threads)
    return {step: folder / _snapshot_name(step) for step in SNAPSHOT_STEPS}


def gradient(
    cache: Path = CACHE, quick: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The clipped gradients that lead from step 249 to 250, and that step's scalars.

    Returns:
        Tensors "g.<name>", and "learning_rate" and "clip_factor".
    """
    folder = snapshots(cache, quick)[STEPS].parent
    return load_file(folder / GRADIENT_NAME), json.loads((folder / SCALARS_NAME).read_text())


def resumed(step: int = STEPS, cache: Path = CACHE, quick: bool = False) -> LiveTraining:
    """A training that has loaded the snapshot of `step` and continues with the next one."""
    file = snapshots(cache, quick)[step]
    training = LiveTraining(workload_of(quick), cache)
    training.load(file, step)
    return training


def _train(workload: Workload, cache: Path, folder: Path) -> None:
    training = LiveTraining(workload, cache)
    for step in range(1, STEPS + 1):
        loss = training.step()
        if step in SNAPSHOT_STEPS:
            save_file(training.state(), folder / _snapshot_name(step))
            print(f"step {step}: loss {loss:.3f}", flush=True)
    save_file(training.gradients(), folder / GRADIENT_NAME)
    scalars = {
        "learning_rate": workload.learning_rate_of(STEPS),
        "clip_factor": training.clip_factor,
    }
    (folder / SCALARS_NAME).write_text(json.dumps(scalars) + "\n")


def _snapshot_name(step: int) -> str:
    return f"step{step:04d}.safetensors"


def _tokens(workload: Workload, cache: Path) -> np.ndarray:
    """The tokens of the standard library's source, by a BPE trained on it."""
    file = cache / f"tokens-{workload.name}.npy"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        texts = _standard_library(workload.text_bytes)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=workload.vocabulary,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        encoded = tokenizer.encode_batch(texts)
        tokens = np.concatenate([np.array(each.ids, np.uint16) for each in encoded])
        unfinished = file.with_suffix(f".{os.getpid()}.npy")
        np.save(unfinished, tokens)
        unfinished.replace(file)
    return np.load(file)


def _standard_library(limit: int) -> list[str]:
    """Source texts of the standard library, in the order of their paths, up to `limit` bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    size = 0
    for file in sorted(root.rglob("*.py")):
        if "site-packages" in file.parts or "test" in file.parts:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        size += len(text)
        if size >= limit:
            break
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, in seconds")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="FOLDER")
    options = parser.parse_args()
    begun = time.perf_counter()
    files = snapshots(options.cache, options.quick)
    size = sum(file.stat().st_size for file in files.values())
    seconds = time.perf_counter() - begun
    print(f"{len(files)} snapshots, {size / 1e6:.0f} MB, {seconds:.1f} s, {files[STEPS].parent}")


if __name__ == "__main__":
    main()
