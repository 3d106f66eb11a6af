"""Checks of a job before any process starts.

Everything here reads small files only: the model's config, the tokenizer, the names of the data
files. Every problem is one sentence that names the setting, its value and the remedy, and all of
them are reported together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.data import load_tokenizer, text_files
from outlast.errors import JobError, MissingExtraError, OutlastError
from outlast.train.layout import Layout, resolve_layout
from outlast.train.model import ModelFacts, facts_of, load_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.job import Job


PIPELINE_MODELS = ("llama", "mistral")
"""Types whose forward is nothing but embedding, blocks, norm and head; others may scale between."""


@dataclass(frozen=True)
class Plan:
    """Findings of the checks."""

    layout: Layout
    facts: ModelFacts


def preflight(job: Job, world_size: int) -> Plan:
    """Check `job` for `world_size` processes.

    Raises:
        JobError: With every problem found.
        MissingExtraError: Without what the model needs.
    """
    problems: list[str] = []
    layout, facts = Layout(), ModelFacts()
    try:
        layout = resolve_layout(job.parallel, world_size)
    except OutlastError as error:
        problems.append(str(error))
        # The degrees themselves can be checked whatever the number of processes.
        degrees = job.parallel
        layout = Layout(degrees.pipeline, degrees.replicate or 1, degrees.shard, degrees.tensor)
    try:
        facts = facts_of(load_config(job.model))
    except MissingExtraError:
        raise
    except OutlastError as error:
        problems.append(str(error))
    problems += _data_and_model_problems(job, facts)
    for check in (_batch_problems, _tensor_problems, _pipeline_problems):
        problems += check(job, facts, layout)
    if problems:
        raise JobError(problems)
    return Plan(layout, facts)


def _data_and_model_problems(job: Job, facts: ModelFacts) -> Iterator[str]:
    try:
        tokenizer = load_tokenizer(job.data.tokenizer)
    except OutlastError as error:
        yield str(error)
    else:
        vocabulary = facts.vocabulary_size
        is_text = job.data.source != "tokens"
        if is_text and vocabulary is not None and tokenizer.vocabulary_size > vocabulary:
            yield (
                f'data.tokenizer = "{job.data.tokenizer}" has {tokenizer.vocabulary_size} token '
                f"ids, but the model's vocabulary_size is {vocabulary}; use the model's own "
                "tokenizer or raise its vocab_size"
            )
    for patterns in (job.data.train, job.data.validation):
        # What a URL names is looked at when it is staged.
        if local := [pattern for pattern in patterns if "://" not in pattern]:
            try:
                text_files(local, Path())
            except OutlastError as error:
                yield str(error)
    length, positions = job.data.sequence_length, facts.positions
    if positions is not None and length > positions:
        yield (
            f"data.sequence_length = {length} exceeds the model's max_position_embeddings = "
            f"{positions}; shorten the one or raise the other"
        )
    heads, shared = facts.heads, facts.key_value_heads
    if heads and shared and heads % shared:
        yield (
            f"the model's num_key_value_heads = {shared} does not divide its "
            f"num_attention_heads = {heads}"
        )


def _batch_problems(job: Job, facts: ModelFacts, layout: Layout) -> Iterator[str]:
    if job.train.batch_size < layout.data_ranks:
        yield (
            f"train.batch_size = {job.train.batch_size} gives no sample to some of the "
            f"{layout.data_ranks} data-parallel processes; raise it or start fewer processes"
        )
    if job.train.compile and facts.dropout:
        yield (
            f"train.compile = true cannot be combined with the model's {facts.dropout[0]} > 0; "
            "set one of them to false or 0"
        )


def _tensor_problems(job: Job, facts: ModelFacts, layout: Layout) -> Iterator[str]:
    tensor = layout.tensor
    if tensor == 1:
        return
    for name, count in (
        ("num_attention_heads", facts.heads),
        ("num_key_value_heads", facts.key_value_heads),
    ):
        if count is not None and count % tensor:
            yield f"parallel.tensor = {tensor} does not divide {name} = {count}"
    if layout.replicate > 1 and layout.shard == 1:
        yield (
            f"parallel.tensor = {tensor} cannot be combined with {layout.replicate} replicas "
            f"(parallel.replicate); set parallel.shard = {layout.replicate} and "
            "parallel.replicate = 1 instead"
        )
    if facts.dropout:
        yield (
            f"parallel.tensor = {tensor} cannot be combined with the model's {facts.dropout[0]} "
            "> 0; set it to 0"
        )


def _pipeline_problems(job: Job, facts: ModelFacts, layout: Layout) -> Iterator[str]:
    if layout.pipeline == 1:
        return
    stages, microbatches = pipeline_shape(job, layout)
    if facts.model_type is not None and facts.model_type not in PIPELINE_MODELS:
        yield (
            f"parallel.pipeline = {layout.pipeline} is known to be right for the model types "
            f"{', '.join(PIPELINE_MODELS)} only, and this is {facts.model_type!r}; "
            "use parallel.shard instead"
        )
    if job.model.module:
        yield "parallel.pipeline > 1 needs a Hugging Face model, and model.module gives none"
    if facts.layers is not None and facts.layers < stages:
        yield (
            f"the pipeline has {stages} stages (parallel.pipeline = {layout.pipeline}), but the "
            f"model has only {facts.layers} layers; use fewer stages"
        )
    if facts.tied:
        yield (
            f"parallel.pipeline = {layout.pipeline} needs separate input and output embeddings; "
            "set the model's tie_word_embeddings = false"
        )
    if job.train.batch_size % (layout.data_ranks * microbatches):
        yield (
            f"train.batch_size = {job.train.batch_size} is not divisible by the "
            f"{layout.data_ranks} data-parallel processes x {microbatches} pipeline micro-batches "
            "(parallel.pipeline_microbatches)"
        )
    if job.parallel.pipeline_schedule == "interleaved" and microbatches % layout.pipeline:
        yield (
            f"parallel.pipeline_microbatches = {microbatches} is not divisible by "
            f"parallel.pipeline = {layout.pipeline}, which the interleaved schedule needs"
        )


def pipeline_shape(job: Job, layout: Layout) -> tuple[int, int]:
    """Number of stages and of micro-batches in flight."""
    per_rank = 1
    if job.parallel.pipeline_schedule == "interleaved":
        per_rank = job.parallel.pipeline_stages_per_rank
    stages = layout.pipeline * per_rank
    return stages, job.parallel.pipeline_microbatches or 2 * stages
