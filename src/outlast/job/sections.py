"""The job file's sections, one pydantic model each.

A field says what it means (`description`, shown by ``outlast train --help`` and written as a
comment by ``outlast init``) and whether it belongs to the *identity* of a run. Identity fields
decide which numbers come out (model, data, optimizer, batch, schedule, seed); the others
(parallelism, micro-batch, cadence of checkpoints, logging) may change from one start of a run to
the next.
"""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from outlast.job.cluster import SlurmSection, StagingSection
from outlast.job.section import Count, Fraction, Positive, Section, setting

if TYPE_CHECKING:
    from collections.abc import Iterator


MegabytesPerSecond = Annotated[float, Field(ge=0.0)]


class CheckpointSection(Section):
    """Frequency of saves, and the checkpoints to keep."""

    every_steps: Count | Literal["auto"] = setting(
        100,
        'steps between checkpoints; 0: only at the end; "auto": as often as is best, from the '
        "measured cost of a save and the expected failures",
        identity=False,
    )
    mtbf_hours: Annotated[float, Field(ge=0.0)] = setting(
        0.0,
        'for "auto": mean time between failures of the whole job; 0: a published figure per node',
        identity=False,
    )
    slowdown_budget: Annotated[float, Field(gt=0.0, le=1.0)] = setting(
        0.035, 'for "auto": largest share of the time that saves may cost', identity=False
    )
    longest_minutes: Annotated[float, Field(gt=0.0)] = setting(
        30.0, 'for "auto": longest time between checkpoints', identity=False
    )
    keep: Positive = setting(3, "newest checkpoints kept", identity=False)
    keep_every: Count = setting(
        0, "also keep the checkpoints of all multiples of this step; 0: none", identity=False
    )
    keep_best: Count = setting(
        0, "also keep this many with the lowest validation loss; 0: none", identity=False
    )
    asynchronous: bool = setting(
        True, "write in the background; training goes on after the state is copied", identity=False
    )
    writer: Literal["process", "thread"] = setting(
        "process",
        "who codes and writes: a process of its own, or a thread, which starts at once but "
        "disturbs training a little",
        identity=False,
    )
    when_busy: Literal["wait", "skip", "replace"] = setting(
        "wait",
        "when a checkpoint is due while the one before is still being written: wait for that, "
        "skip the new one, or give up the old one",
        identity=False,
    )
    turns: str = setting(
        "",
        "folder in which your jobs take turns at saving to one file system, so that they do not "
        "slow each other down: a due save waits for its turn while training goes on; empty: "
        "save when due",
        identity=False,
    )
    turn_seconds: Annotated[float, Field(ge=0.0)] = setting(
        300.0, "save without a turn after so long a wait", identity=False
    )
    turn_order: Literal["least-waste", "fcfs", "set-10"] = setting(
        "least-waste",
        "who of those that wait is next, the same for all jobs of the folder: who keeps the others "
        "waiting least for each node of its own; who came first; or one at a time of each class of "
        "periods, classes side by side",
        identity=False,
    )
    turn_load: Annotated[float, Field(gt=0.0, lt=1.0)] = setting(
        0.6,
        'for "auto" with checkpoint.turns: largest share of the time, below 1, for which the saves '
        "of all jobs of the folder, this one too, may keep the file system busy",
        identity=False,
    )
    turn_ask_slurm: bool = setting(
        True,
        "ask Slurm whether the job of a silent holder on another node has ended, in place of "
        "waiting 90 s for its next sign of life",
        identity=False,
    )
    timeout_seconds: Annotated[float, Field(gt=0.0)] = setting(
        1800.0, "longest wait for the storage or another process", identity=False
    )
    compression: Literal["auto", "zstd", "lz4", "lz4hc", "zlib", "none"] = setting(
        "auto", "lossless codec; auto: the smallest measured, lz4: fast", identity=False
    )
    replay: Literal["off", "bf16", "exact"] = setting(
        "off",
        'also log every step\'s gradient, so that a restart loses no step: "exact" as it is; '
        '"bf16" 2.5 times smaller, and the optimizer sees the rounded gradient',
    )
    delta_chain: Annotated[int, Field(ge=0, le=512)] = setting(
        0,
        "checkpoints in a row stored as differences to the one before: smaller, slower to "
        "restore, a second copy of the state in host memory; 0: each in full",
        identity=False,
    )

    fast: str = setting(
        "",
        "a faster place that is saved to first, e.g. /dev/shm or a node's own disk; checkpoints "
        "are then copied on to the run's directory in the background",
        identity=False,
    )
    fast_private: bool = setting(
        False, "whether nodes do not see each other's files in checkpoint.fast", identity=False
    )
    fast_keep: Positive = setting(1, "newest checkpoints kept in checkpoint.fast", identity=False)
    drain_every: Positive = setting(
        5, "with checkpoint.fast: every how many-th checkpoint is copied on", identity=False
    )
    drain_megabytes_per_s: MegabytesPerSecond = setting(
        0.0,
        "with checkpoint.fast: most that a process writes to the run's directory when checkpoints "
        "are copied on; 0: no limit",
        identity=False,
    )
    mirror: str = setting(
        "",
        "a safer place that checkpoints are copied on to, a directory or any fsspec URL such as "
        "s3://bucket/runs",
        identity=False,
    )
    mirror_every: Positive = setting(
        10, "with checkpoint.mirror: every how many-th checkpoint is copied on", identity=False
    )
    mirror_megabytes_per_s: MegabytesPerSecond = setting(
        0.0, "most that a process writes to checkpoint.mirror; 0: no limit", identity=False
    )
    back_off: bool = setting(
        False,
        "copies of checkpoints find their rate below these limits: a little more while they get "
        "what they ask for, half of what they get when others want it too",
        identity=False,
    )
    transfer_plan: str = setting(
        "",
        "file for `outlast cluster tasks` that plans this run, its tiers named run and mirror: "
        "copies of checkpoints and of data then take the bandwidth that the plan gives them, in "
        "its order; empty: no plan",
        identity=False,
    )


Seconds = Annotated[float, Field(gt=0.0)]


class RecoverSection(Section):
    """Recovery of a run after a failure without a file checkpoint."""

    mode: Literal["off", "restart", "live"] = setting(
        "restart",
        "restart: a failed group of processes starts again and takes the last step's state from "
        "memory; live: survivors go on with the dead ones' share (needs the extra ft); "
        "off: from the newest checkpoint",
        identity=False,
    )
    every_steps: Positive = setting(
        1, "restart: keep the state in memory after every so many steps", identity=False
    )
    memory: str = setting(
        "/dev/shm",
        "restart: directory in each node's memory (tmpfs) that outlives a process",
        identity=False,
    )
    parity: Literal["auto", 0, 1, 2] = setting(
        "auto",
        "restart: how many of a group of nodes may be lost together with their memory; auto: 1 "
        "where a node holds what no other holds, else 0",
        identity=False,
    )
    parity_group: Annotated[int, Field(ge=2, le=255)] = setting(
        8, "nodes that share their parity, at most", identity=False
    )
    domain: Literal["node", "process"] = setting(
        "node", "what is lost together: a node, or each process by itself", identity=False
    )
    groups: Count = setting(
        0, "live: replica groups; 0: one for each of parallel.replicate", identity=False
    )
    lighthouse: str = setting(
        "",
        "live: host:port of torchft's lighthouse; empty: outlast train starts one itself",
        identity=False,
    )
    heartbeat_seconds: Seconds = setting(
        1.0, "live: a group that is silent for so long counts as dead", identity=False
    )
    fixed_order: bool = setting(
        False,
        "live: sum the gradients of micro-batches in one order, whoever computes them, so that the "
        "weights do not depend on deaths to the last bit; slow, for drills",
        identity=False,
    )
    hang_seconds: Literal["auto"] | Annotated[float, Field(ge=0.0)] = setting(
        "auto",
        "a step that takes longer counts as hung: stacks are written to the run's directory, and "
        "the process ends itself; auto: from the measured steps; 0: never",
        identity=False,
    )


GuardLevel = Literal["off", "light", "linear", "full"]
CodingScheme = Literal[
    "off", "coverage", "fractional_repetition", "cyclic_repetition", "cyclic_mds", "graph"
]
TensorForm = Literal[
    "off", "low_rank", "cola", "lax", "tt", "ttm", "btt", "monarch", "tucker", "cp", "sltrain"
]
TOML_VALUES = "text, a number, true, false, a list or a table of these"


def _only_toml(table: dict[str, Any]) -> dict[str, Any]:
    for path, value in _not_toml(table, ()):
        raise PydanticCustomError(
            "not_toml",
            "{name} = {value} should be {right}",
            {"path": path, "name": ".".join(path), "value": repr(value), "right": TOML_VALUES},
        )
    return table


def _not_toml(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Values inside `value` that a job file cannot state or restate: None, dates, NaN, objects."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for key, inner in value.items():
            yield from _not_toml(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _not_toml(inner, (*path, str(index)))
    elif not isinstance(value, (str, bool, int, float)) or (
        isinstance(value, float) and math.isnan(value)
    ):
        yield path, value


Table = Annotated[dict[str, Any], AfterValidator(_only_toml)]
RANKS = (
    "a whole number from 1 on, a share such as 0.25 above 0 and below 1, or a budget: "
    '"parameters=0.3", "flops=0.3" or "error=0.1"'
)


def _rank(value: Any) -> Any:
    if isinstance(value, str):
        kind, _, amount = value.partition("=")
        if kind in ("parameters", "flops", "error") and _is_share(amount):
            return value
    elif not isinstance(value, bool):
        if isinstance(value, int) and value >= 1:
            return value
        if isinstance(value, float) and 0.0 < value < 1.0:
            return value
    raise PydanticCustomError("rank", "{right}", {"right": RANKS})


def _is_share(text: str) -> bool:
    try:
        return 0.0 < float(text) < 1.0
    except ValueError:
        return False


Rank = Annotated[int | float | str, PlainValidator(_rank)]


class RunSection(Section):
    """Location of the run, and the seed that makes it repeatable."""

    name: str = setting(
        "run",
        "name of the run; its directory is <directory>/<name>",
        identity=False,
        form="letters, digits, dots, dashes and underscores, with a letter or a digit first",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    directory: str = setting("runs", "folder that holds the run directories", identity=False)
    seed: Count = setting(0, "seed of initial weights, sample order, dropout and sampling")
    deterministic: bool = setting(
        True, "use deterministic kernels, so that a resumed run ends in bit-identical weights"
    )


class ModelSection(Section):
    """The model: exactly one of config, directory, module or the table [model.settings]."""

    config: str | None = setting(None, "path of a Hugging Face config.json")
    directory: str | None = setting(
        None, "local Hugging Face directory (config.json and *.safetensors)"
    )
    module: str | None = setting(
        None,
        "package.module:function that returns an nn.Module mapping token ids (batch, sequence) "
        "to logits (batch, sequence, vocabulary)",
        form="package.module:function",
        pattern=r"^[\w.]+:\w+$",
    )
    settings: Table = setting(
        {}, "Hugging Face config in place, e.g. model_type = 'llama', hidden_size = 128"
    )
    arguments: Table = setting({}, "keyword arguments of the module function")
    initialize: Literal["auto", "scratch", "pretrained"] = setting(
        "auto", "auto: pretrained when `directory` holds weights, else scratch"
    )
    attention: Literal["sdpa", "eager"] = setting(
        "sdpa", "attention implementation of Hugging Face models"
    )


class DataSection(Section):
    """The text or tokens that the model learns."""

    source: Literal["stdlib", "text", "tokens"] = setting(
        "stdlib",
        "stdlib: the source text of Python's standard library; text: files or globs; "
        "tokens: .bin or .npy files",
    )
    train: list[str] = setting(
        [], "files or globs to train on (for tokens one file, or a URL with [staging])"
    )
    validation: list[str] = setting(
        [], "files or globs to validate on (for tokens one file, or a URL with [staging])"
    )
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = setting(
        0.05, "share of text files kept for validation, chosen by a hash of the file's name"
    )
    tokenizer: str = setting(
        "byte", "byte, or the path of a tokenizer.json or of a sentencepiece .model"
    )
    token_dtype: Literal["uint16", "uint32"] | None = setting(
        None, "element type of a bare .bin file that has no header (default uint16)"
    )
    sequence_length: Annotated[int, Field(ge=2)] = setting(128, "tokens in one sample")
    prepare_timeout_seconds: Annotated[float, Field(gt=0)] = setting(
        3600.0, "how long other ranks wait while rank 0 tokenises", identity=False
    )


class TrainSection(Section):
    """Length, batch size and precision of the training."""

    steps: Positive = setting(1000, "optimizer steps in the whole run")
    batch_size: Positive = setting(32, "samples in one optimizer step, over all ranks")
    micro_batch_size: Count = setting(
        0,
        "samples in one forward on one rank; 0: the rank's whole share of the batch",
        identity=False,
    )
    precision: Literal["fp32", "bf16"] = setting(
        "fp32", "bf16: matrix products in bfloat16, master weights and optimizer in fp32"
    )
    gradient_clip: Annotated[float, Field(ge=0.0)] = setting(
        1.0, "largest global gradient norm; 0: no clipping"
    )
    activation_checkpointing: bool = setting(
        False, "recompute each block's activations in the backward pass", identity=False
    )
    compile: bool = setting(False, "torch.compile the model", identity=False)
    stop_after_steps: Count = setting(
        0,
        "stop this start of the run after so many steps, as if a signal had come; 0: never",
        identity=False,
    )


class TensorizeSection(Section):
    """Linear layers with fewer parameters and operations, in place of the model's own."""

    form: TensorForm = setting(
        "off",
        "low_rank: two factors; cola: with a nonlinearity between them; lax: with what the layer "
        "before has between its own; monarch, btt: block-diagonal factors; tt, ttm, tucker, cp: "
        "chains of small cores; sltrain: low rank and sparse",
    )
    rank: Rank = setting(
        0.25,
        "a whole number; a share (of the narrower side with two factors, else of the dense "
        'parameters); or a budget such as "parameters=0.3", "flops=0.3" or "error=0.1"',
    )
    match: list[str] = setting(
        [], "name patterns of the layers to replace; none: all linear ones but the head"
    )
    exclude: list[str] = setting([], "name patterns of layers that stay as they are")
    activation: Literal["silu", "gelu", "relu", "tanh"] = setting(
        "silu", "cola: the nonlinearity between the factors"
    )
    cores: Count = setting(0, "tt, ttm: cores of a layer's inputs; 0: the form's own number")
    initialize: Literal["auto", "scratch", "from_dense"] = setting(
        "auto",
        "scratch: random factors; from_dense: those nearest to the model's weights; auto: the "
        "latter where weights were loaded",
    )
    force: bool = setting(False, "also replace layers that gain nothing from it")
    mup: bool = setting(
        False, "muP: start and learning rate of every factor by its own fan in and fan out"
    )
    spectral_limit: Annotated[float, Field(ge=0.0)] = setting(
        0.0,
        "two factors: how far a step may move their product, in the spectral norm, at the peak "
        "learning rate; 0: no limit",
    )
    product_weight_decay: bool = setting(
        False, "decay the product of the factors in place of the factors"
    )
    spikes: bool = setting(True, "warn of spikes of the loss", identity=False)
    adapt_rank: bool = setting(
        False,
        "let the ranks of linear layers follow their weights' singular values during the run",
    )
    adapt_every_steps: Positive = setting(
        100, "adapt_rank: steps from one look at the ranks to the next"
    )
    adapt_energy: Annotated[float, Field(gt=0.0, le=1.0)] = setting(
        0.99,
        "adapt_rank: share of the sum of squares of a weight's singular values that a rank keeps "
        "when it shrinks",
    )
    smallest_rank: Positive = setting(1, "adapt_rank: no rank shrinks below")
    largest_rank: Count = setting(
        0, "adapt_rank: ranks that are used up grow to at most this; 0: none grows"
    )
    calibrate: bool = setting(
        False,
        "measure what operations cost on this machine, if that was not done yet (ten seconds), so "
        "that the ways to compute layers are chosen for it",
        identity=False,
    )


class OptimizerSection(Section):
    """The optimizer and its constants."""

    name: Literal["adamw", "muon"] = setting(
        "adamw", "muon: torch.optim.Muon for hidden matrices, AdamW for everything else"
    )
    learning_rate: Annotated[float, Field(gt=0.0)] = setting(
        1e-3, "peak learning rate of AdamW (with muon: of embeddings, head and vectors)"
    )
    muon_learning_rate: Annotated[float, Field(gt=0.0)] = setting(
        0.02, "peak learning rate of Muon's matrices"
    )
    weight_decay: Annotated[float, Field(ge=0.0)] = setting(
        0.1, "decoupled weight decay, on matrices only"
    )
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = setting(0.9, "AdamW's first moment decay")
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = setting(0.95, "AdamW's second moment decay")
    epsilon: Annotated[float, Field(gt=0.0)] = setting(1e-8, "AdamW's epsilon")
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = setting(0.95, "Muon's momentum")


class ScheduleSection(Section):
    """The learning rate as a function of the step."""

    name: Literal["cosine", "wsd", "constant"] = setting(
        "cosine", "cosine decay, warm-up stable decay (wsd), or constant after the warm-up"
    )
    warmup_steps: Count = setting(0, "steps of linear warm-up from zero")
    decay_fraction: Fraction = setting(0.2, "wsd: share of the steps in the final linear decay")
    final_fraction: Fraction = setting(0.1, "learning rate at the end, as a share of the peak")


class ParallelSection(Section):
    """Parallelism: the product of the four degrees is the number of processes."""

    replicate: Count = setting(
        0, "data-parallel replicas (DDP); 0: whatever the other degrees leave over", identity=False
    )
    shard: Positive = setting(
        1, "processes over which parameters are sharded (FSDP2)", identity=False
    )
    tensor: Positive = setting(
        1, "processes that share every matrix (tensor parallel)", identity=False
    )
    pipeline: Positive = setting(
        1, "processes that share the layers (pipeline parallel)", identity=False
    )
    pipeline_schedule: Literal["1f1b", "interleaved"] = setting(
        "1f1b", "interleaved: every process holds several stages", identity=False
    )
    pipeline_microbatches: Count = setting(
        0, "micro-batches in flight per step; 0: twice the number of stages", identity=False
    )
    pipeline_stages_per_rank: Positive = setting(
        2, "stages per process of the interleaved schedule", identity=False
    )


class GuardSection(Section):
    """Checks of computations for silent data corruption."""

    policy: GuardLevel = setting(
        "light",
        "light: optimizer state and parameters at rest, a slice per step; linear: also every "
        "linear layer, embedding and gradient reduction; full: also attention, norms, loss and the "
        "whole optimizer",
        identity=False,
    )
    modules: dict[str, GuardLevel] = setting(
        {},
        "levels by module name pattern, e.g. {'*.mlp.*' = 'linear'}; the last match counts",
        identity=False,
    )
    correct: bool = setting(
        True, "compute wrong numbers again and put the right ones in place", identity=False
    )
    persistent: Literal["raise", "drop"] = setting(
        "raise",
        "when a process's numbers stay wrong: stop the run, or drop its gradient and go on",
        identity=False,
    )


class CodingSection(Section):
    """Gradient coding: protection of data-parallel replicas against slow and dead ones."""

    scheme: CodingScheme = setting(
        "off",
        "coverage: replicas that are done take over micro-batches of slow ones, exact and free "
        "while nobody is slow; the others: every replica computes `copies` shares of the batch",
        identity=False,
    )
    copies: Positive = setting(
        3,
        "replicas that may compute each micro-batch, its owner among them; a fixed code stands "
        "copies - 1 stragglers",
        identity=False,
    )
    chunks: Positive = setting(
        4,
        "coverage: micro-batches that each replica's share is divided into at least",
        identity=False,
    )
    lost: Literal["recompute", "commit"] = setting(
        "recompute",
        "what to do about micro-batches that were lost with a process: compute them again; or "
        "commit without them, and without what nobody has finished by the deadline, with a "
        "certified error",
        identity=False,
    )
    deadline_seconds: Annotated[float, Field(ge=0.0)] = setting(
        0.0,
        'with coding.lost = "commit": longest time that a step may compute; 0: no limit',
        identity=False,
    )
    largest_error: Annotated[float, Field(ge=0.0)] = setting(
        0.0,
        "fixed codes: a step is decoded as soon as the certified error is at most this share of "
        "the number of chunks; 0: only when it is exact",
        identity=False,
    )


ENERGY_SOURCES = ("auto", "gpu", "cpu", "memory", "node")


def _energy_source(value: str) -> str:
    kind, _, path = value.partition(":")
    if value in ENERGY_SOURCES or (kind == "file" and path):
        return value
    near = difflib.get_close_matches(kind, [*ENERGY_SOURCES, "file"], n=1)
    right = ", ".join(ENERGY_SOURCES) + " or file:PATH"
    if near:
        wanted = "file:PATH" if near[0] == "file" else near[0]
        right += f"; did you mean {wanted}?"
    raise PydanticCustomError("energy_source", "{right}", {"right": right})


EnergySource = Annotated[str, AfterValidator(_energy_source)]


class EnergySection(Section):
    """Measurement and price of energy; nothing is ever set on a device."""

    measure: bool = setting(
        True, "read the meters of this machine while training, and record joules", identity=False
    )
    sources: list[EnergySource] = setting(
        ["auto"],
        "what is read: auto for all of gpu, cpu, memory and node that have a meter, or some of "
        "these; file:PATH is a node's meter whose joules since any beginning stand in a file",
        identity=False,
        min_length=1,
    )
    every_steps: Positive = setting(
        50,
        "steps between two records of energy at least; they come with those of the loss",
        identity=False,
    )
    tariff: str = setting(
        "", "file with the price of energy by time of day; empty: no cost", identity=False
    )
    region: str = setting(
        "",
        "where the energy comes from, for its carbon, e.g. SE; empty: no carbon figure",
        identity=False,
    )
    pue: Annotated[float, Field(ge=1.0)] = setting(
        1.0,
        "power usage effectiveness of the building, a factor on what the meters say; 1: not known",
        identity=False,
    )
    loss_target: Annotated[float, Field(ge=0.0)] = setting(
        0.0,
        "training loss up to which joules are counted too; 0: the best one of the run",
        identity=False,
    )
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = setting(
        0,
        "every process serves its last energy record on this machine to Prometheus, at this port "
        "plus its local rank; 0: none",
        identity=False,
    )


class EvaluateSection(Section):
    """Frequency of validation."""

    every_steps: Count = setting(0, "steps between evaluations; 0: only at the end", identity=False)
    samples: Count = setting(
        512, "validation samples per evaluation, 0: all of them", identity=False
    )


class SampleSection(Section):
    """The continuation that the trained model writes at the end."""

    prompt: str = setting("def ", "text to continue", identity=False)
    tokens: Count = setting(200, "tokens to write; 0: no sample", identity=False)
    temperature: Annotated[float, Field(ge=0.0)] = setting(
        0.7, "0: always the most likely token", identity=False
    )


class ExportSection(Section):
    """Exported files at the end of the run."""

    huggingface: bool = setting(
        True, "write <run>/model, a Hugging Face directory, at the end", identity=False
    )


class LogSection(Section):
    """Records written while training."""

    every_steps: Positive = setting(10, "steps between two records of the loss", identity=False)
    tensorboard: bool = setting(
        False, "also log to TensorBoard in <run>/tensorboard", identity=False
    )
    wandb_project: str | None = setting(
        None, "also log to this Weights & Biases project", identity=False
    )
    mlflow_experiment: str | None = setting(
        None, "also log to this MLflow experiment", identity=False
    )
    mlflow_uri: str | None = setting(
        None, "where MLflow keeps it: a URL or sqlite:///FILE", identity=False
    )
    trackio_project: str | None = setting(None, "also log to this trackio project", identity=False)


class LaunchSection(Section):
    """Start of processes by ``outlast train`` itself."""

    nproc: Positive = setting(
        1, "processes to start on this machine (--nproc says the same)", identity=False
    )
    restarts: Count = setting(
        3, "how often a failed group of processes is restarted", identity=False
    )
    timeout_seconds: Annotated[float, Field(gt=0)] = setting(
        600.0, "longest wait for another process before the run fails", identity=False
    )


class Job(Section):
    """One training job: what a TOML file and its overrides say, complete and checked."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    tensorize: TensorizeSection = TensorizeSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    recover: RecoverSection = RecoverSection()
    coding: CodingSection = CodingSection()
    energy: EnergySection = EnergySection()
    evaluate: EvaluateSection = EvaluateSection()
    sample: SampleSection = SampleSection()
    export: ExportSection = ExportSection()
    log: LogSection = LogSection()
    launch: LaunchSection = LaunchSection()
    slurm: SlurmSection = SlurmSection()
    staging: StagingSection = StagingSection()
