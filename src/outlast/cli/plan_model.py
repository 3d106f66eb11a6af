"""A model without a job: its sizes, and what is assumed of its training where nobody says it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.errors import PlanError

if TYPE_CHECKING:
    from outlast.cli.plan_asked import Asked
    from outlast.plan.api import Training
    from outlast.plan.cluster import Cluster
    from outlast.plan.transformer import Transformer

_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_BATCH_TOKENS = ((1e9, 2**19), (3e9, 2**20), (1e11, 2**22), (float("inf"), 2**24))
"""Tokens of a step by parameters: about as GPT-3's small models (2005.14165, table 2.1) and Llama 3
(2407.21783, table 4) were trained."""
_TOKENS_PER_PARAMETER = 20.0
"""Hoffmann et al. 2022 (2203.15556), table 3."""
_LONGEST_ASSUMED = 8192


def training_of_model(asked: Asked, cluster: Cluster, assumed: list[str]) -> Training:
    """The training of a model that no job describes.

    Args:
        asked: What the user says of it.
        cluster: Decides the precision and what the batch is a multiple of.
        assumed: Gets a phrase for all that nobody said.

    Raises:
        PlanError: The source is no model, or a number is none.
    """
    from outlast.cli.plan_words import count_words
    from outlast.plan.api import Training
    from outlast.plan.configuration import Configuration

    model = model_of_source(asked.source)
    sequence, longest = asked.sequence, _longest(asked.source)
    if sequence is None:
        sequence = min(longest or _LONGEST_ASSUMED, _LONGEST_ASSUMED)
        assumed.append(f"sequences of {sequence:,} tokens (--sequence)")
    elif longest and sequence > longest:
        assumed.append(
            f"a model whose positions reach {sequence:,} tokens; those of its config end at "
            f"{longest:,}"
        )
    batch = asked.batch
    if batch is None:
        tokens = next(item for most, item in _BATCH_TOKENS if model.parameters < most)
        batch = _whole(max(tokens // sequence, 1), cluster.devices)
        assumed.append(
            f"a batch of {batch:,} samples, {count_words(batch * sequence)} tokens, about as "
            f"{'GPT-3' if model.parameters < _BATCH_TOKENS[0][0] else 'Llama 3'}'s (--batch)"
        )
    whole = _TOKENS_PER_PARAMETER * model.parameters
    if asked.tokens is None:
        assumed.append(
            f"{count_words(whole)} tokens, {_TOKENS_PER_PARAMETER:g} per parameter as Chinchilla "
            "(--tokens)"
        )
    precision: Any = asked.precision
    if precision is None:
        known = cluster.peak_flop_per_s
        precision = "bf16" if "bf16" in known else next(iter(known))
    run = Configuration(
        sequence=sequence, micro_batch=asked.micro_batch or 1, batch=batch, precision=precision
    )
    return Training(
        model=model,
        run=run,
        tokens=whole if asked.tokens is None else count_of(asked.tokens, "--tokens"),
        framework=asked.framework or "any",
    )


def model_of_source(source: str) -> Transformer:
    """The model of a config.json, its folder, or a published name.

    Raises:
        PlanError: It is none of these.
    """
    from outlast.plan.huggingface import published, transformer_of

    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise PlanError(f"{source} is a folder without a config.json: name a file or a model")
    if path.exists() or source.endswith(".json") or "/" in source:
        return transformer_of(path)
    return published(source)


def count_of(text: str, option: str) -> float:
    """A number of tokens: 15T, 300B, 1e9.

    Raises:
        PlanError: It is no number above 0.
    """
    found = re.fullmatch(r"([\d_.,]+(?:e[+-]?\d+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    try:
        value = float(found[1].replace(",", "")) * _COUNTS[found[2].upper()] if found else 0.0
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise PlanError(f"{option} = {text}: give a number above 0, as 15T, 300B or 1e9")
    return value


def _longest(source: str) -> int:
    """The model's longest sequence; 0 where its config says none."""
    from outlast.plan.huggingface import MODELS

    table: Any = MODELS[source.casefold()].config if source.casefold() in MODELS else {}
    path = Path(source)
    if path.exists():
        path = path / "config.json" if path.is_dir() else path
        table = json.loads(path.read_text(encoding="utf-8"))
        table = table.get("text_config") or table
    found = [table.get(name) for name in ("max_position_embeddings", "n_positions")]
    return max([tensor for tensor in found if isinstance(tensor, int)], default=0)


def _whole(batch: int, devices: int) -> int:
    """A batch that the devices divide, or at least the part of their number that no TP takes."""
    odd = devices
    while odd % 2 == 0:
        odd //= 2
    unit = devices if devices <= batch else odd
    return -(-batch // unit) * unit
