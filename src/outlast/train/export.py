"""The trained model as a Hugging Face directory, and what it writes."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from outlast.checkpoint import CheckpointStore
from outlast.errors import CheckpointError, OutlastError, TensorizeError
from outlast.state.live import FittingState
from outlast.train.adapt_rank import fit_ranks
from outlast.train.model import load_config, logits_of
from outlast.train.tensorizing import build_whole_model, save_model, starts_from_dense

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerFast

    from outlast.data import Tokenizer
    from outlast.job import Job
    from outlast.records import RunDirectory
    from outlast.state.live import State

_TOKENIZER_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def load_trained(job: Job, directory: RunDirectory) -> tuple[nn.Module, int]:
    """The whole model of the newest intact checkpoint, on the CPU of this process alone.

    Whatever layout wrote the checkpoint, one process reads it.

    Returns:
        The model in evaluation mode, and the step.

    Raises:
        CheckpointError: When there is no checkpoint, or none is intact.
    """
    scratch = job.model_copy(
        update={"model": job.model.model_copy(update={"initialize": "scratch"})}
    )
    # Ranks may follow from the weights that a model began with.
    begins_anew = not job.model.module and not starts_from_dense(job)
    model, _ = build_whole_model(scratch if begins_anew else job, collective=False)
    store = CheckpointStore(directory.checkpoints, keep=job.checkpoint.keep, collective=False)
    state: State = {"model": model}
    if job.tensorize.adapt_rank:
        state = FittingState(state, lambda shapes: fit_ranks(model, shapes))
    restored = store.restore(state)
    store.close()
    if restored is None:
        raise CheckpointError(f"{directory.checkpoints} holds no checkpoint to export")
    return model.eval(), restored.step


def export_model(job: Job, directory: RunDirectory, target: Path) -> int:
    """Write the newest checkpoint's model to `target`, for ``from_pretrained`` to load.

    The folder appears complete or not at all. The run's own earlier export (`directory.model`) is
    replaced at the end; any other folder must be new or empty.

    Returns:
        The step that was exported.

    Raises:
        OutlastError: When the model is no Hugging Face model, `target` is taken, or the disk is
            full.
    """
    if load_config(job.model) is None:
        raise OutlastError(
            f'model.module = "{job.model.module}" gives no Hugging Face model, so there is no '
            "Hugging Face directory to export; set export.huggingface = false"
        )
    target = target.absolute()
    _check_target(target, directory.model.absolute())
    model, step = load_trained(job, directory)
    partial, earlier = (target.with_name(f".{target.name}.{kind}") for kind in ("partial", "old"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.redirect_stderr(io.StringIO()):
            save_model(model, partial, job.tensorize)
        _save_tokenizer(job, partial)
        _make_readable(partial)
        shutil.rmtree(earlier, ignore_errors=True)
        if target.exists():
            target.rename(earlier)
        partial.rename(target)
        shutil.rmtree(earlier, ignore_errors=True)
    except (OSError, SafetensorError, TensorizeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise OutlastError(
            f"the model cannot be exported to {target}: {reason}; give another folder"
        ) from None
    return step


def _check_target(target: Path, own: Path) -> None:
    """Nothing that a run did not make itself is ever replaced."""
    if target == own:
        return
    with contextlib.suppress(OSError):
        if target.is_dir() and not any(target.iterdir()):
            return
    if target.exists():
        raise OutlastError(f"{target} exists; give another folder to export to, or remove it")


def _make_readable(folder: Path) -> None:
    """Give weights the mode of the configuration: safetensors lets nobody else read its files."""
    mode = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer as Hugging Face has it: each byte's token is its number.

    Its vocabulary writes bytes as GPT-2's does: printable Latin-1 characters stand for themselves,
    the others for characters from U+0100 on.
    """
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + number) for number in range(256))
    characters = [chr(byte) if byte in printable else next(others) for byte in range(256)]
    found = FastTokenizer(models.BPE({text: byte for byte, text in enumerate(characters)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found, clean_up_tokenization_spaces=False)


def _save_tokenizer(job: Job, target: Path) -> None:
    """Put the tokenizer beside the model, where it has a Hugging Face form."""
    if job.data.tokenizer == "byte" and job.data.source != "tokens":
        byte_level_tokenizer().save_pretrained(target)
        return
    file = Path(job.data.tokenizer).expanduser()
    if file.is_dir():
        # In the order in which the data package looks for them.
        found = [file / name for name in ("tokenizer.json", "tokenizer.model")]
        file = next(name for name in found if name.is_file())
    companions = [file.with_name(name) for name in _TOKENIZER_COMPANIONS]
    if file.suffix == ".json" and companions[0].is_file():
        shutil.copy(file, target / "tokenizer.json")
        for companion in companions:
            if companion.is_file():
                shutil.copy(companion, target)
    elif file.suffix == ".json":
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(tokenizer_file=str(file)).save_pretrained(target)
    elif file.suffix == ".model":
        shutil.copy(file, target / "tokenizer.model")


def continue_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    window: int,
    seed: int,
) -> str:
    """Sample a continuation of `prompt`.

    Args:
        model: Maps (1, sequence) token ids to logits.
        tokenizer: Encodes the prompt and decodes the continuation.
        prompt: Text to continue; an empty one starts from token 0.
        tokens: Tokens to write.
        temperature: Divides the logits; 0 takes the most likely token.
        window: Longest context that the model was trained on, in tokens.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    encoded = tokenizer.encode(prompt.encode())
    ids = [int(name) for name in encoded] or [0]
    begun = len(ids)
    with torch.no_grad():
        for _ in range(tokens):
            context = torch.tensor([ids[-window:]])
            # A model's vocabulary may be padded beyond what its tokenizer can decode.
            logits = logits_of(model(context))[0, -1, : tokenizer.vocabulary_size]
            ids.append(_draw(logits, temperature, generator))
    return tokenizer.decode(ids[begun:])


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if not bool(torch.isfinite(logits).all()):
        raise OutlastError(
            "the model's logits are not finite, so it cannot write a sample; the training "
            "diverged: lower the learning rate"
        )
    if temperature == 0.0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
