"""Text for a model to read: what its layers see of it, and how well the model predicts it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.tensorize.hf.folder import TOKENIZER_FILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

HELD_OUT = 5
"""One in so many sequences is held out."""

LONGEST_WINDOW = 512
"""Tokens in a sequence, where nobody says otherwise and the model takes as many."""

_BYTES_PER_TOKEN = 16
_BATCH = 4


@dataclass(frozen=True, eq=False)
class Text:
    """A text as sequences of token ids.

    Attributes:
        calibration: (sequences, window) to fit to.
        held_out: (sequences, window) from the text's end, to judge by.
        tokens_are_bytes: Whether there was no tokenizer.
    """

    calibration: Tensor
    held_out: Tensor
    tokens_are_bytes: bool


def read_text(
    file: Path, directory: Path, config: Any, *, tokens: int = 32768, window: int | None = None
) -> Text:
    """Read a file with the tokenizer of a model.

    Models without tokenizer files read bytes, as Outlast's trainer gives them by default.

    Args:
        file: The text; only as much of it as is needed is read.
        directory: The model's folder.
        config: The model's config.
        tokens: To calibrate with, at most; a quarter more is read to be held out.
        window: Tokens in a sequence; None: 512, or fewer where the model takes fewer.

    Raises:
        TensorizeError: The file cannot be read or is too short, or the tokenizer cannot be loaded
            or is not that of the model.
    """
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or LONGEST_WINDOW
    window = min(LONGEST_WINDOW, longest) if window is None else window
    if not 2 <= window <= longest or tokens < window:
        raise TensorizeError(
            f"window = {window} must be between 2 and the {longest} positions of the model, and "
            f"tokens = {tokens} at least as many"
        )
    calibrating = tokens // window
    wanted = (calibrating + max(1, calibrating // (HELD_OUT - 1))) * window
    try:
        with file.open("rb") as opened:
            raw = opened.read(wanted * _BYTES_PER_TOKEN)
    except OSError as error:
        raise TensorizeError(f"the text {file} cannot be read: {error.strerror}") from None
    ids, are_bytes = _encoded(raw, directory, config.vocab_size)
    count = min(len(ids), wanted) // window
    held = max(1, count // HELD_OUT)
    if count < 2:
        raise TensorizeError(
            f"the text {file} has {len(ids)} tokens, and 2 sequences of {window} are the least: "
            "give a longer text or a smaller window"
        )
    sequences = torch.tensor(ids[: count * window]).view(count, window)
    return Text(sequences[:-held], sequences[-held:], are_bytes)


def _encoded(raw: bytes, directory: Path, vocabulary: int) -> tuple[list[int], bool]:
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        if vocabulary < 256:
            raise TensorizeError(
                f"{directory} has no tokenizer files, and its vocabulary of {vocabulary} is too "
                "small to read bytes: put the tokenizer beside the model"
            )
        return list(raw), True
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        text = raw.decode("utf-8", errors="replace")
        ids = [int(id_) for id_ in tokenizer(text, add_special_tokens=False)["input_ids"]]
    except Exception as error:  # tokenizers raise errors of many kinds
        reason = " ".join(str(error).split())[:200]
        raise TensorizeError(f"the tokenizer of {directory} cannot be used: {reason}") from None
    if max(ids, default=0) >= vocabulary:
        raise TensorizeError(
            f"the tokenizer of {directory} gives the id {max(ids)}, and the model's vocabulary "
            f"has {vocabulary}: put the model's own tokenizer there"
        )
    return ids, False


def batches(sequences: Tensor, device: torch.device) -> Iterator[dict[str, Any]]:
    """Keywords of the model's forward, a few sequences at a time."""
    for part in torch.split(sequences, _BATCH):
        yield {"input_ids": part.to(device), "use_cache": False}


@torch.no_grad()
def perplexity(model: Any, sequences: Tensor, progress: Callable[[int, int], None]) -> float:
    """Perplexity over all tokens but the first of each sequence.

    Args:
        model: A causal language model.
        sequences: (sequences, window).
        progress: Called with sequences done and in all.

    Returns:
        e to the mean loss in nats per token.
    """
    total, done = 0.0, 0
    for batch in batches(sequences, model.device):
        ids = batch["input_ids"]
        scores = model(**batch).logits[:, :-1].float()
        loss = functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        total += float(loss)
        done += len(ids)
        progress(done, len(sequences))
    mean = total / (len(sequences) * (sequences.shape[1] - 1))
    return math.exp(mean) if mean < 700 else math.inf
