"""The job file's sections, one pydantic model each.

The text below a field says what it means: ``outlast train --help-all`` shows it, ``outlast init``
writes it as a comment. Fields that belong to the *identity* of a run decide which numbers come out
(model, data, optimizer, batch, schedule, seed). The `Changeable` ones and those of changeable
sections (parallelism, micro-batch, cadence of checkpoints, logging) may change from one start of a
run to the next. `Adjustable` ones (length, batch size, learning rate) shape the result and may
change too: the run continues with them from there, and records it.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PlainValidator, PositiveFloat
from pydantic_core import PydanticCustomError

from outlast.job.section import (
    Adjustable,
    Changeable,
    ChangeableSection,
    Count,
    Fraction,
    Identity,
    Positive,
    Section,
    worded,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


TIERS = ("memory", "peer", "disk", "shared")
"""Where copies of the state lie, the nearest first."""
_TIERS_RIGHT = (
    '"auto" or a list of "memory", "peer" (which needs "memory"), "disk" and "shared", in this '
    'order, that ends in "shared", the run\'s directory'
)


def _tier_list(value: Any) -> Any:
    if value == "auto":
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(tier, str) for tier in value):
        ordered = [tier for tier in TIERS if tier in value]
        without_memory = "peer" in value and "memory" not in value
        if [*value] == ordered and ordered[-1:] == ["shared"] and not without_memory:
            return ordered
    raise PydanticCustomError("tiers", "{right}", {"right": _TIERS_RIGHT})


class CheckpointSection(ChangeableSection):
    """Copies of the state: where they lie, how often checkpoints are saved, which are kept."""

    tiers: Annotated[Literal["auto"] | list[str], PlainValidator(_tier_list)] = "auto"
    """where copies of the state lie, the nearest first: "memory", of each node; "peer", so that
    other nodes' memory makes good a lost node's; "disk", which is checkpoint.fast; "shared", the
    run's directory, always; a restore takes the newest state, of equal ones the nearest. "auto":
    memory and peer unless [recover] says otherwise, disk with checkpoint.fast, shared"""
    every_steps: Count | Literal["auto"] = 100
    """steps between checkpoints; 0: only at the end; "auto": as often as is best, from the
    measured cost of a save and the expected failures"""
    mtbf_hours: NonNegativeFloat = 0.0
    """for "auto": mean time between failures of the whole job; 0: a published figure per node"""
    slowdown_budget: Annotated[float, Field(gt=0.0, le=1.0)] = 0.035
    """for "auto": largest share of the time that saves may cost"""
    longest_minutes: PositiveFloat = 30.0
    """for "auto": longest time between checkpoints"""
    keep: Positive = 3
    """newest checkpoints kept"""
    keep_every: Count = 0
    """also keep the checkpoints of all multiples of this step; 0: none"""
    keep_best: Count = 0
    """also keep this many with the lowest validation loss; 0: none"""
    asynchronous: bool = True
    """write in the background; training continues after the state is copied"""
    writer: Literal["process", "thread"] = "process"
    """who codes and writes: a process of its own, or a thread, which starts at once but disturbs
    training a little"""
    when_busy: Literal["wait", "skip", "replace"] = "wait"
    """when a checkpoint is due while the one before is still being written: wait for that, skip
    the new one, or give up the old one"""
    turns: str = ""
    """folder in which your jobs take turns at saving to one file system, so that they do not slow
    each other down: a due save waits for its turn while training continues; empty: save when due"""
    turn_seconds: NonNegativeFloat = 300.0
    """save without a turn after so long a wait"""
    turn_order: Literal["least-waste", "fcfs", "set-10"] = "least-waste"
    """who of those that wait is next, the same for all jobs of the folder: who keeps the others
    waiting least for each node of its own; who came first; or one at a time of each class of
    periods, classes side by side"""
    turn_load: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.6
    """for "auto" with checkpoint.turns: largest share of the time, below 1, for which the saves of
    all jobs of the folder, this one too, may keep the file system busy"""
    turn_ask_slurm: bool = True
    """ask Slurm whether the job of a silent holder on another node has ended, in place of waiting
    90 s for its next sign of life"""
    timeout_seconds: PositiveFloat = 1800.0
    """longest wait for the storage or another process"""
    compression: Literal["auto", "zstd", "lz4", "lz4hc", "zlib", "none"] = "auto"
    """lossless codec; auto: the smallest measured, lz4: fast"""
    replay: Identity[Literal["off", "bf16", "exact"]] = "off"
    """also log every step's gradient, so that a restart loses no step: "exact" as it is; "bf16"
    2.5 times smaller, and the optimizer sees the rounded gradient"""

    fast: str = ""
    """a faster place that is saved to first, the tier "disk": a node's own disk, or e.g. /dev/shm;
    checkpoints are then copied on to the run's directory in the background"""
    fast_private: bool = False
    """whether nodes do not see each other's files in checkpoint.fast"""
    fast_keep: Positive = 1
    """newest checkpoints kept in checkpoint.fast"""
    drain_every: Positive = 5
    """with checkpoint.fast: every how many-th checkpoint is copied on"""
    drain_megabytes_per_s: NonNegativeFloat = 0.0
    """with checkpoint.fast: most that a process writes to the run's directory when checkpoints are
    copied on; 0: no limit"""
    mirror: str = ""
    """a safer place that checkpoints are copied on to, a directory or any fsspec URL such as
    s3://bucket/runs"""
    mirror_every: Positive = 10
    """with checkpoint.mirror: every how many-th checkpoint is copied on"""
    mirror_megabytes_per_s: NonNegativeFloat = 0.0
    """most that a process writes to checkpoint.mirror; 0: no limit"""
    back_off: bool = False
    """copies of checkpoints find their rate below these limits: a little more while they get what
    they ask for, half of what they get when others want it too"""
    transfer_plan: str = ""
    """file for `outlast cluster tasks` that plans this run, its tiers named run and mirror: copies
    of checkpoints and of data then take the bandwidth that the plan gives them, in its order;
    empty: no plan"""


class RecoverSection(ChangeableSection):
    """Recovery of a run after a failure without a file checkpoint."""

    mode: Literal["off", "restart", "live"] = "restart"
    """restart: a failed group of processes starts again and takes the last step's state from
    memory; live: survivors continue with the dead ones' share (needs the extra ft); off: from the
    newest checkpoint"""
    every_steps: Positive = 1
    """restart: keep the state in memory after every so many steps, or at the next update"""
    memory: str = "/dev/shm"
    """restart: directory in each node's memory (tmpfs) that outlives a process"""
    parity: Literal["auto", 0, 1, 2] = "auto"
    """restart: how many of a group of nodes may be lost together with their memory; auto: 1 where
    a node holds what no other holds, else 0"""
    parity_group: Annotated[int, Field(ge=2, le=255)] = 8
    """nodes that share their parity, at most"""
    domain: Literal["node", "process"] = "node"
    """what is lost together: a node, or each process by itself"""
    groups: Count = 0
    """live: replica groups; 0: one for each of parallel.replicate"""
    lighthouse: str = ""
    """live: host:port of torchft's lighthouse; empty: outlast train starts one itself"""
    heartbeat_seconds: PositiveFloat = 1.0
    """live: a group that is silent for so long counts as dead"""
    fixed_order: bool = False
    """live: sum the gradients of micro-batches in one order, whoever computes them, so that the
    weights do not depend on deaths to the last bit; slow, for drills"""
    hang_seconds: Literal["auto"] | NonNegativeFloat = "auto"
    """a step that takes longer counts as hung: stacks are written to the run's directory, and the
    process ends itself; auto: from the measured steps; 0: never"""


def tiers_of(checkpoint: CheckpointSection, recover: RecoverSection) -> list[str]:
    """The words of `TIERS` that hold copies of the state, the nearest first."""
    if checkpoint.tiers != "auto":
        return [*checkpoint.tiers]
    kept = recover.mode == "restart"
    used = {
        "memory": kept,
        "peer": kept and recover.parity != 0,
        "disk": bool(checkpoint.fast),
        "shared": True,
    }
    return [tier for tier in TIERS if used[tier]]


GuardLevel = Literal["off", "light", "linear", "full"]
CodingScheme = Literal[
    "off", "coverage", "fractional_repetition", "cyclic_repetition", "cyclic_mds", "graph"
]
CodingProtocol = Literal["all_reduce", "server", "gossip"]
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


RUN_NAME = worded(
    "letters, digits, dots, dashes and underscores, with a letter or a digit first",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
)


class RunSection(Section):
    """Location of the run, and the seed that makes it repeatable."""

    name: Annotated[Changeable[str], RUN_NAME] = "run"
    """name of the run; its directory is <directory>/<name>"""
    directory: Changeable[str] = "runs"
    """folder that holds the run directories"""
    seed: Count = 0
    """seed of initial weights, sample order, dropout and sampling"""
    deterministic: bool = True
    """use deterministic kernels, so that a resumed run ends in bit-identical weights"""


class ModelSection(Section):
    """The model: exactly one of config, directory, module or the table [model.settings]."""

    config: str | None = None
    """path of a Hugging Face config.json"""
    directory: str | None = None
    """local Hugging Face directory (config.json and *.safetensors)"""
    module: Annotated[str | None, worded("package.module:function", r"^[\w.]+:\w+$")] = None
    """package.module:function that returns an nn.Module mapping token ids (batch, sequence) to
    logits (batch, sequence, vocabulary)"""
    settings: Table = Field(default={})
    """Hugging Face config in place, e.g. model_type = 'llama', hidden_size = 128"""
    arguments: Table = Field(default={})
    """keyword arguments of the module function"""
    initialize: Literal["auto", "scratch", "pretrained"] = "auto"
    """auto: pretrained when `directory` holds weights, else scratch"""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """attention implementation of Hugging Face models"""


class DataSection(Section):
    """The text or tokens that the model learns."""

    source: Literal["stdlib", "text", "tokens"] = "stdlib"
    """stdlib: the source text of Python's standard library; text: files or globs; tokens: .bin or
    .npy files"""
    train: list[str] = Field(default=[])
    """files or globs to train on (for tokens one file, or a URL with [staging])"""
    validation: list[str] = Field(default=[])
    """files or globs to validate on (for tokens one file, or a URL with [staging])"""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """share of text files kept for validation, chosen by a hash of the file's name"""
    tokenizer: str = "byte"
    """byte, or the path of a tokenizer.json or of a sentencepiece .model"""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """element type of a bare .bin file that has no header (default uint16)"""
    sequence_length: Annotated[int, Field(ge=2)] = 128
    """tokens in one sample"""
    prepare_timeout_seconds: Changeable[PositiveFloat] = 3600.0
    """how long other ranks wait while rank 0 tokenises"""


class TrainSection(Section):
    """Length, batch size and precision of the training."""

    steps: Adjustable[Positive] = 1000
    """optimizer steps in the whole run"""
    batch_size: Adjustable[Positive] = 32
    """samples in one optimizer step, over all ranks"""
    micro_batch_size: Changeable[Count] = 0
    """samples in one forward on one rank; 0: the rank's whole share of the batch"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products in bfloat16, master weights and optimizer in fp32"""
    gradient_clip: Adjustable[NonNegativeFloat] = 1.0
    """largest global gradient norm; 0: no clipping"""
    activation_checkpointing: Changeable[bool] = False
    """recompute each block's activations in the backward pass"""
    compile: Changeable[bool] = False
    """torch.compile the model"""
    stop_after_steps: Changeable[Count] = 0
    """stop this start of the run after so many steps, as if a signal had come; 0: never"""


class TensorizeSection(Section):
    """Linear layers with fewer parameters and operations, in place of the model's own."""

    form: TensorForm = "off"
    """low_rank: two factors; cola: with a nonlinearity between them; lax: with what the layer
    before has between its own; monarch, btt: block-diagonal factors; tt, ttm, tucker, cp: chains
    of small cores; sltrain: low rank and sparse"""
    rank: Rank = 0.25
    """a whole number; a share (of the narrower side with two factors, else of the dense
    parameters); or a budget such as "parameters=0.3", "flops=0.3" or "error=0.1\""""
    match: list[str] = Field(default=[])
    """name patterns of the layers to replace; none: all linear ones but the head"""
    exclude: list[str] = Field(default=[])
    """name patterns of layers that stay as they are"""
    activation: Literal["silu", "gelu", "relu", "tanh"] = "silu"
    """cola: the nonlinearity between the factors"""
    cores: Count = 0
    """tt, ttm: cores of a layer's inputs; 0: the form's own number"""
    initialize: Literal["auto", "scratch", "from_dense"] = "auto"
    """scratch: random factors; from_dense: those nearest to the model's weights; auto: the latter
    where weights were loaded"""
    force: bool = False
    """also replace layers that gain nothing from it"""
    mup: bool = False
    """muP: start and learning rate of every factor by its own fan in and fan out"""
    spectral_limit: NonNegativeFloat = 0.0
    """two factors: how far a step may move their product, in the spectral norm, at the peak
    learning rate; 0: no limit"""
    product_weight_decay: bool = False
    """decay the product of the factors in place of the factors"""
    spikes: Changeable[bool] = True
    """warn of spikes of the loss"""
    adapt_rank: bool = False
    """let the ranks of linear layers follow their weights' singular values during the run"""
    adapt_every_steps: Positive = 100
    """adapt_rank: steps from one look at the ranks to the next"""
    adapt_energy: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """adapt_rank: share of the sum of squares of a weight's singular values that a rank keeps when
    it shrinks"""
    smallest_rank: Positive = 1
    """adapt_rank: no rank shrinks below"""
    largest_rank: Count = 0
    """adapt_rank: ranks that are used up grow to at most this; 0: none grows"""
    calibrate: Changeable[bool] = False
    """measure what operations cost on this machine, if that was not done yet (ten seconds), so
    that the ways to compute layers are chosen for it"""


class OptimizerSection(Section):
    """The optimizer and its constants."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: torch.optim.Muon for hidden matrices, AdamW for everything else"""
    learning_rate: Adjustable[PositiveFloat] = 1e-3
    """peak learning rate of AdamW (with muon: of embeddings, head and vectors)"""
    muon_learning_rate: Adjustable[PositiveFloat] = 0.02
    """peak learning rate of Muon's matrices"""
    weight_decay: Adjustable[NonNegativeFloat] = 0.1
    """decoupled weight decay, on matrices only"""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW's first moment decay"""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """AdamW's second moment decay"""
    epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon"""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Muon's momentum"""


class ScheduleSection(Section):
    """The learning rate as a function of the step."""

    name: Adjustable[Literal["cosine", "wsd", "constant"]] = "cosine"
    """cosine decay, warm-up stable decay (wsd), or constant after the warm-up"""
    warmup_steps: Adjustable[Count] = 0
    """steps of linear warm-up from zero"""
    decay_fraction: Adjustable[Fraction] = 0.2
    """wsd: share of the steps in the final linear decay"""
    final_fraction: Adjustable[Fraction] = 0.1
    """learning rate at the end, as a share of the peak"""


class ParallelSection(ChangeableSection):
    """Parallelism: the product of the four degrees is the number of processes."""

    replicate: Count = 0
    """data-parallel replicas (DDP); 0: whatever the other degrees leave over"""
    shard: Positive = 1
    """processes over which parameters are sharded (FSDP2)"""
    tensor: Positive = 1
    """processes that share every matrix (tensor parallel)"""
    pipeline: Positive = 1
    """processes that share the layers (pipeline parallel)"""
    pipeline_schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """interleaved: every process holds several stages"""
    pipeline_microbatches: Count = 0
    """micro-batches in flight per step; 0: twice the number of stages"""
    pipeline_stages_per_rank: Positive = 2
    """stages per process of the interleaved schedule"""


_AUDIT_RIGHT = (
    '"auto", "off", or the share of the time that audits may take, above 0 and at most 100, such '
    'as "0.5 %"'
)


def _audit(value: Any) -> str:
    """A share of the time in per cent, as it is written, or ``auto`` or ``off``."""
    if value in ("auto", "off"):
        return str(value)
    if isinstance(value, str) and value.rstrip().endswith("%"):
        with contextlib.suppress(ValueError):
            share = float(value.rstrip().removesuffix("%"))
            if 0.0 < share <= 100.0:
                return f"{share:.12g} %"
    raise PydanticCustomError("audit", "{right}", {"right": _AUDIT_RIGHT})


class GuardSection(ChangeableSection):
    """Checks of computations for silent data corruption."""

    policy: GuardLevel = "light"
    """light: optimizer state and parameters at rest, a slice per step; linear: also every matrix
    product, convolution, embedding and gradient reduction; full: also attention, softmax, norms,
    loss and the whole optimizer"""
    modules: dict[str, GuardLevel] = Field(default={})
    """levels by module name pattern, e.g. {'*.mlp.*' = 'linear'}; the last match counts"""
    correct: bool = True
    """compute wrong values again and put the right ones in place"""
    persistent: Literal["raise", "drop"] = "raise"
    """when a process's numbers stay wrong: stop the run, or drop its gradient and continue"""
    audit: Annotated[str, PlainValidator(_audit)] = "auto"
    """share of the time in which passes and updates are computed a second time and compared, on
    another rank where there is one, e.g. "0.5 %"; "auto": 0.5 %, and in a loop that is not the
    trainer's only updates and what is given to guard.audit(); "off": never"""

    @property
    def audit_share(self) -> float:
        """Share of the time for audits; 0: none are made."""
        known = {"off": 0.0, "auto": 0.005}.get(self.audit)
        return float(self.audit.removesuffix("%")) / 100.0 if known is None else known


class CodingSection(ChangeableSection):
    """Gradient coding: protection of data-parallel replicas against slow and dead ones."""

    scheme: CodingScheme = "off"
    """coverage: replicas that are done take over micro-batches of slow ones, exact and free while
    nobody is slow; the others: every replica computes `copies` shares of the batch"""
    protocol: CodingProtocol = "all_reduce"
    """fixed codes: all_reduce: one collective, which late replicas join with zeros; server:
    replica 0 adds messages up and sends the sum; gossip: pairs of replicas exchange sums; with the
    last two a stopped replica holds nobody up"""
    copies: Positive = 3
    """replicas that may compute each micro-batch, its owner among them; a fixed code stands copies
    - 1 stragglers"""
    chunks: Positive = 4
    """coverage: micro-batches that each replica's share is divided into at least"""
    lost: Literal["recompute", "commit"] = "recompute"
    """what to do about micro-batches that were lost with a process: compute them again; or commit
    without them, and without what nobody has finished by the deadline, with a certified error"""
    deadline_seconds: NonNegativeFloat = 0.0
    """with coding.lost = "commit": longest time that a step may compute; 0: no limit"""
    largest_error: NonNegativeFloat = 0.0
    """fixed codes: a step is decoded as soon as the certified error is at most this share of the
    number of chunks; 0: only when it is exact"""


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


class EnergySection(ChangeableSection):
    """Measurement and price of energy; nothing is ever set on a device."""

    measure: bool = True
    """read the meters of this machine while training, and record joules"""
    sources: list[EnergySource] = Field(default=["auto"], min_length=1)
    """what is read: auto for all of gpu, cpu, memory and node that have a meter, or some of these;
    file:PATH is a node's meter whose joules since any beginning stand in a file"""
    every_steps: Positive = 50
    """steps between two records of energy at least; they come with those of the loss"""
    tariff: str = ""
    """file with the price of energy by time of day; empty: no cost"""
    region: str = ""
    """where the energy comes from, for its carbon, e.g. SE; empty: no carbon figure"""
    pue: Annotated[float, Field(ge=1.0)] = 1.0
    """power usage effectiveness of the building, a factor on what the meters say; 1: not known"""
    loss_target: NonNegativeFloat = 0.0
    """training loss up to which joules are counted too; 0: the best one of the run"""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """every process serves its last energy record on this machine to Prometheus, at this port plus
    its local rank; 0: none"""


class EvaluateSection(ChangeableSection):
    """Frequency of validation."""

    every_steps: Count = 0
    """steps between evaluations; 0: only at the end"""
    samples: Count = 512
    """validation samples per evaluation, 0: all of them"""


class SampleSection(ChangeableSection):
    """The continuation that the trained model writes at the end."""

    prompt: str = "def "
    """text to continue"""
    tokens: Count = 200
    """tokens to write; 0: no sample"""
    temperature: NonNegativeFloat = 0.7
    """0: always the most likely token"""


class ExportSection(ChangeableSection):
    """Exported files at the end of the run."""

    huggingface: bool = True
    """write <run>/model, a Hugging Face directory, at the end"""


class LogSection(ChangeableSection):
    """Records written while training."""

    every_steps: Positive = 10
    """steps between two records of the loss"""
    tensorboard: bool = False
    """also log to TensorBoard in <run>/tensorboard"""
    wandb_project: str | None = None
    """also log to this Weights & Biases project"""
    mlflow_experiment: str | None = None
    """also log to this MLflow experiment"""
    mlflow_uri: str | None = None
    """where MLflow keeps it: a URL or sqlite:///FILE"""
    trackio_project: str | None = None
    """also log to this trackio project"""


class LaunchSection(ChangeableSection):
    """Start of processes by ``outlast train`` itself."""

    nproc: Positive = 1
    """processes to start on this machine (--nproc says the same)"""
    restarts: Count = 3
    """how often a failed group of processes is restarted"""
    timeout_seconds: PositiveFloat = 600.0
    """longest wait for another process before the run fails"""


ChainKind = Literal["dependent", "presubmitted", "array"]

# Slurm's forms of a time limit, and a number with a unit.
_CLOCK = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}"
_UNIT = r"[0-9]+(\.[0-9]+)?(s|sec|m|min|h|d)"
CHOSEN = "auto"
"""A `wall_time` that is chosen from the live queue whenever a link is submitted."""
WALL_TIME = rf"^({_CLOCK}|{_UNIT}|auto)?$"
_LIMIT = worded("a time such as 8:00:00, 2-00:00:00, 90min or 8h, or auto", WALL_TIME)
_NAME = Annotated[str, worded("a name without spaces", r"^\S*$")]
_NAMES = worded("a name, or names separated by commas, without spaces", r"^\S*$")


class SlurmSection(ChangeableSection):
    """A long run on a shared cluster, as a chain of jobs: see outlast submit."""

    wall_time: Annotated[str, _LIMIT] = ""
    """time limit of a link, e.g. 8:00:00, 2-00:00:00, 90min or 8h; auto: for each link the one
    that is predicted to end the run first on the queue as it is then; empty: the longest that the
    partition allows, 7 days where it has no limit"""
    link_seconds: NonNegativeFloat = 0.0
    """end every link after so long, whatever is left of its time limit; 0: use the whole limit"""
    nodes: list[Positive] = Field(default=[1], min_length=1)
    """nodes of a link; several: the first link has the first number, the next the next, and all
    later ones the last"""
    sizes: list[Positive] = Field(default=[])
    """node counts that outlast cluster plan compares, and that wall_time = "auto" chooses from;
    empty: those of nodes alone are submitted, and their halves and doubles compared"""
    tasks_per_node: Positive = 1
    """processes of the run on a node"""
    cpus_per_task: Count = 0
    """cores of a process; 0: the cluster's default"""
    gpus_per_node: Count = 0
    """GPUs of a node; 0: ask for none"""
    partition: Annotated[str, _NAMES] = ""
    """partition, or several separated by commas; empty: the cluster's default"""
    account: _NAME = ""
    """account that pays; empty: your default"""
    qos: _NAME = ""
    """quality of service; empty: your default"""
    directives: list[str] = Field(default=[])
    """more lines of the batch script: options such as "--constraint=a100", or whole lines such as
    "#BB ...\""""
    setup: list[str] = Field(default=[])
    """shell lines before the run, e.g. "module load cuda\""""
    python: str = ""
    """Python on the compute nodes; empty: the one that submits"""
    command: str = ""
    """what a link runs in place of outlast train, as a shell line with its own srun; it ends with
    0 when all is done and with 3 when it is to be continued"""
    chain: ChainKind = "dependent"
    """dependent: a running link submits the next one, which waits for it; presubmitted: all are
    submitted at once, where compute nodes have no sbatch; array: one job array whose places run
    one after the other, which starts fastest"""
    links: Count = 0
    """most links of the chain; 0: as many as it takes (dependent alone)"""
    filler_nodes: list[Positive] = Field(default=[])
    """node counts of fillers: while a link waits in the queue, a smaller job trains on nodes that
    are free meanwhile, and hands over when the link starts; none: no fillers"""
    filler_minutes: PositiveFloat = 60.0
    """shortest backfill window in the queue that is worth a filler"""
    attempts_without_progress: Positive = 3
    """the chain gives up after so many links in a row that have saved no step"""
    lead_seconds: NonNegativeFloat = 0.0
    """begin the last save of a link so long before its end; 0: as measured saves say"""
    restart_seconds: NonNegativeFloat = 0.0
    """what a link needs to its first step; 0: as measured in earlier links"""


def _directive(line: str) -> str:
    if line.startswith("#") and not line.startswith(("#!", "#SBATCH")) and line.isprintable():
        return line
    right = (
        'one line that begins with the site\'s directive, such as "#BB ...", "#DW ...", "#DB ..."'
    )
    raise PydanticCustomError("directive", "{right}", {"right": right})


Directive = Annotated[str, AfterValidator(_directive)]


class StagingSection(ChangeableSection):
    """Copy of the tokens on each node's own disk, made once for all its processes."""

    directory: str = ""
    """directory of the node's own disk or memory, e.g. $SLURM_TMPDIR, /local or /dev/shm; empty:
    tokens are read where they are"""
    limit_gigabytes: NonNegativeFloat = 0.0
    """most that all copies of this user may take there (10^9 bytes); those used longest ago go
    first, never one that a live process uses; 0: no limit but the disk"""
    keep_free_gigabytes: NonNegativeFloat = 1.0
    """what is to stay free on that disk (10^9 bytes)"""
    required: bool = False
    """stop where a copy cannot be made; false: read in place, with a warning (a URL is always
    required)"""
    wait: bool = True
    """begin when the copies are there; false: where there is none yet, read in place and leave the
    copying to the prefetch beside training, for the next link (a URL is waited for)"""
    prefetch: bool = True
    """in a chain, copy what a node lacks beside training, once that is under way, for the next
    link"""
    prefetch_megabytes_per_s: PositiveFloat = 200.0
    """most that a node takes for the next link; half of what it gets when others want it too"""
    megabytes_per_s: NonNegativeFloat = 0.0
    """most that a node takes while its processes wait for a copy; 0: no limit"""
    read_back: bool = True
    """read each new copy from the disk once and compare its digest"""
    timeout_seconds: PositiveFloat = 3600.0
    """longest time for one copy, and for waiting for it"""
    block_megabytes: Positive = 8
    """size of one read of the source (MiB)"""
    read_ahead: Positive = 4
    """reads of the source on the way at once"""
    burst_buffer: Literal["off", "datawarp", "rabbit", "lines"] = "off"
    """have the site copy the files of data.train and data.validation before the job starts:
    directives for DataWarp or Rabbit, or those of staging.burst_buffer_lines; staging.directory is
    then where they appear, e.g. $DW_JOB_STRIPED or $DW_JOB_outlast"""
    burst_buffer_gigabytes: NonNegativeFloat = 0.0
    """capacity to ask for; 0: the size of the files and a tenth more"""
    burst_buffer_lines: list[Directive] = Field(default=[])
    """the site's own directives, as in its manual; {gigabytes} is the capacity, and a line with
    {source} is repeated for every file, {name} being its name without folders"""


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
