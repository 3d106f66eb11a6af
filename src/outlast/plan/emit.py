"""A plan as the configuration of a framework: Outlast, Megatron-LM, torchtitan, DeepSpeed, Slurm.

from outlast.plan.emit import emit
from outlast.plan.targets import problem

problem("deepspeed", model, run)                        # None, or why not, in one sentence
emit("sbatch", model, run, cluster, out=Path("run"))    # job.sbatch and job.toml

Megatron-LM: its command-line arguments in a script, and the same for Megatron-Bridge and NeMo.
Names of arguments: megatron/training/arguments.py and Megatron-Bridge's guide for users of
Megatron-LM (docs.nvidia.com/nemo/megatron-bridge).

A Slurm batch script: the run as a chain of starts, each of which saves before its limit.

Outlast's ranks are started by srun itself: Slurm's warning reaches every rank, which saves and
ends with exit code 3. All others are started by torchrun, one on every node. The warning then goes
to the batch script, which leaves a file that the nodes look for: a signal to the step would end
torchrun, and with some of Slurm's ways to follow processes also data loaders.

torchtitan: a Python module with one function that returns the configuration. Since 0.3, torchtitan
reads no TOML: `--module` names a module, `--config` a function in it.
"""

from __future__ import annotations

import json
import math
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.errors import EXIT_TO_BE_CONTINUED, PlanError
from outlast.extras import require
from outlast.plan.batch import SHARDING
from outlast.plan.configuration import MEMORY_FOLDERS, Settings
from outlast.plan.targets import problem, target_named, unwritten
from outlast.tensorize.cost import TWO_FACTOR_FORMS

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.transformer import Transformer


_WIDTH = 96
CONFIG = "model/config.json"
SCRIPT = "train.py"
"""Training script of DeepSpeed and Accelerate, which the user writes."""
NODE_VARIABLES = (
    "On several nodes, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say which node this is and "
    "where the first one is."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitSettings:
    """Settings of emitted files that `Configuration` does not hold.

    Attributes:
        name: Of the run.
        predicted: What was predicted, any text; it stands in the head of every file.
        origin: How the files were made, e.g. the command line.
        steps: Optimizer steps.
        learning_rate: Peak.
        warmup_steps: Steps until the peak.
        gradient_clip: Largest norm of the gradient; 0 for no limit.
        seed: Of weights and data.
        checkpoint_every_steps: Steps between checkpoints.
        keep: Checkpoints that are kept.
        train: Files to train on, in the form that the target reads; none for its test data.
        tokenizer: Path of a tokenizer; empty for none.
        model_config: The model's Hugging Face config; empty for one made from its numbers.
        job: Tables of the Outlast job that was planned, whose other settings stay as they are;
            empty where there is none.
        mechanisms: Of the plan.
        own_mechanisms: What that job says of them already; None where there is none.
        overrides: `section.key=value` for the Outlast job.
        launches: Target that the batch script starts.
        predicted_hours: How long the whole run takes; None where unknown.
        longest_hours: Largest time limit that the queue allows.
        partition: Of the queue; empty for the default one.
        account: Who pays; empty for the default one.
        replace: Overwrite files that are there and differ.
    """

    name: str = "run"
    predicted: str = ""
    origin: str = "outlast plan emit"
    steps: int = 1000
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    gradient_clip: float = 1.0
    seed: int = 0
    checkpoint_every_steps: int = 500
    keep: int = 3
    train: tuple[str, ...] = ()
    tokenizer: str = ""
    model_config: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mechanisms: Settings = field(default_factory=Settings)
    own_mechanisms: Settings | None = None
    overrides: tuple[str, ...] = ()
    launches: str = "outlast"
    predicted_hours: float | None = None
    longest_hours: float = 24.0
    partition: str = ""
    account: str = ""
    replace: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "checkpoint_every_steps", "keep"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} = {getattr(self, name)}: give at least 1")
        for name in ("warmup_steps", "gradient_clip", "seed"):
            if not getattr(self, name) >= 0:
                raise PlanError(f"{name} = {getattr(self, name)}: give at least 0")
        for name in ("learning_rate", "longest_hours"):
            if not 0 < getattr(self, name) < float("inf"):
                raise PlanError(f"{name} = {getattr(self, name)}: give a number above 0")
        if self.warmup_steps >= self.steps:
            raise PlanError(
                f"warmup_steps = {self.warmup_steps} is not below steps = {self.steps}: warm up "
                "for fewer steps"
            )
        for name in ("name", "tokenizer", "partition", "account"):
            text = getattr(self, name)
            if any(character in text for character in "\n\r\0") or text.startswith("-"):
                raise PlanError(f"{name} = {text!r}: give one line that does not begin with a dash")


@dataclass(frozen=True)
class Plan:
    """A plan that is to be written out.

    Attributes:
        model: What is trained.
        run: How.
        cluster: Where.
        settings: What a plan does not say.
    """

    model: Transformer
    run: Configuration
    cluster: Cluster
    settings: EmitSettings

    @cached_property
    def nodes(self) -> tuple[int, int]:
        """Nodes, and devices on each of them.

        Raises:
            PlanError: The run does not fill its nodes, or takes more than the cluster has.
        """
        run, cluster = self.run, self.cluster
        if run.devices > cluster.devices:
            raise PlanError(
                f"data x tensor x context x pipeline = {run.devices} devices, and {cluster.name} "
                f"has {cluster.devices}: take fewer"
            )
        if run.devices <= cluster.devices_per_node:
            return 1, run.devices
        nodes, over = divmod(run.devices, cluster.devices_per_node)
        if over:
            raise PlanError(
                f"data x tensor x context x pipeline = {run.devices} devices do not fill nodes of "
                f"devices_per_node = {cluster.devices_per_node}: launchers start equally many "
                f"processes on every node, so take {nodes * cluster.devices_per_node} or "
                f"{(nodes + 1) * cluster.devices_per_node}"
            )
        return nodes, cluster.devices_per_node

    @property
    def sharding_group(self) -> int:
        """Ranks among which states are divided; 1 without sharding."""
        return 1 if self.run.sharding == "none" else self.run.sharding_ranks or self.run.data

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of every stage, in the order that a sample goes through them.

        By layers, stages differ by one block at most, and the first ones have more. By cost, the
        head counts as as many blocks as its matrix product costs, so the last stage has fewer.
        """
        model, run = self.model, self.run
        stages = run.pipeline * (run.stages_per_rank if run.pipeline > 1 else 1)
        if run.balance != "cost" or stages == 1:
            return _even(model.layers, stages)
        # Blocks of the last stage: its fair share of blocks and head less the head.
        head = model.vocabulary * model.hidden
        matrices = (model.active_parameters - head) / model.layers
        # A causal product of scores costs half of 2 x sequence x width multiplications, twice.
        block = matrices + run.sequence * model.query_width
        head_blocks = head / block
        fair = (model.layers + head_blocks) / stages - head_blocks
        # Every stage needs a block, or it would have nothing to hand on.
        last = min(max(round(fair), 1), model.layers - stages + 1)
        return (*_even(model.layers - last, stages - 1), last)

    def head(self, *notes: str) -> list[str]:
        """Lines that open every file: what it is for, what was predicted, what it leaves to others.

        Args:
            notes: A sentence each, on what the file cannot see to.
        """
        run, settings = self.run, self.settings
        parallel = ", ".join(
            f"{name} {getattr(run, name)}"
            for name in ("data", "tensor", "context", "pipeline", "expert")
            if getattr(run, name) > 1
        )
        devices = f"{run.devices} devices ({parallel or 'no parallelism'})"
        batch = f"batch {run.batch} of {run.sequence} tokens"
        lines = [
            f"{settings.name}: {self.model.name} on {devices}, {batch}.",
            f"Made by {settings.origin}.",
            *(f"Predicted: {line}" for line in settings.predicted.splitlines() if line.strip()),
            f"Assumed, and not set here: the loss keeps {run.loss_bytes} bytes per logit.",
            *notes,
        ]
        return [
            part
            for line in lines
            for part in textwrap.wrap(
                "".join(character if character.isprintable() else " " for character in line), _WIDTH
            )
        ]

    def unsaid(self) -> list[str]:
        """Name what a framework's own model, made of the numbers, lacks of the plan's."""
        count = self.model.further_parameters
        what = "biases, learned positions or further norms of the model's own config"
        return [f"Not written: {count:,} parameters of {what}."] if count > 0 else []

    def render(self, template: str, *notes: str, **values: Any) -> str:
        """An emitted file from its template.

        Args:
            template: Its name; it reads the fields of the plan, `head`, and `values`.
            notes: Sentences for the head.
            values: By the template's own names.
        """
        require("plan", "a launch script", "jinja2")
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("outlast.plan"),
            undefined=StrictUndefined,
            trim_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # Python and shell, not HTML
        )
        environment.filters |= {
            "repr": repr,
            "yaml": yaml_scalar,
            "quote": lambda value: shlex.quote(str(value)),
        }
        known = {"model": self.model, "run": self.run, "settings": self.settings, "plan": self}
        head = commented(self.head(*notes))
        return environment.get_template(f"{template}.j2").render(**known, head=head, **values)

    def script(self, template: str, *notes: str, **values: Any) -> str:
        """A shell script that starts the ranks of one node, from its template; see `render`."""
        nodes, per_node = self.nodes
        torchrun = (
            f'torchrun --nnodes="${{NNODES:-{nodes}}}" --nproc-per-node={per_node} \\\n'
            '  --node-rank="${NODE_RANK:-0}" --master-addr="${MASTER_ADDR:-127.0.0.1}" \\\n'
            '  --master-port="${MASTER_PORT:-29500}"'
        )
        values = {"torchrun": torchrun, "script": SCRIPT, **values}
        return self.render(template, NODE_VARIABLES, *notes, **values)

    def model_config(self) -> dict[str, Any]:
        """The model's own Hugging Face config where it was given, else one with the same numbers.

        Dense gated models become llama, those without gates starcoder2, mixtures mixtral, and where
        some blocks are dense or some experts shared, qwen3_moe and qwen2_moe.

        Raises:
            PlanError: No config was given, and none of these models has the numbers.
        """
        model = self.model
        if self.settings.model_config:
            return dict(self.settings.model_config)
        numbers: dict[str, Any] = {
            "model_type": "llama" if model.gated else "starcoder2",
            "vocab_size": model.vocabulary,
            "hidden_size": model.hidden,
            "intermediate_size": model.intermediate,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "max_position_embeddings": self.run.sequence,
            "tie_word_embeddings": model.tied,
        }
        if model.experts and not model.dense_layers and not model.shared_intermediate:
            numbers |= {
                "model_type": "mixtral",
                "num_local_experts": model.experts,
                "num_experts_per_tok": model.experts_per_token,
                "intermediate_size": model.expert_intermediate,
            }
        elif model.experts:
            numbers |= {
                "model_type": "qwen3_moe",
                "num_experts": model.experts,
                "num_experts_per_tok": model.experts_per_token,
                "moe_intermediate_size": model.expert_intermediate,
                # A width must be given, also where no block is dense.
                "intermediate_size": model.intermediate or model.expert_intermediate,
                "mlp_only_layers": [
                    block for block, has in enumerate(model.has_experts) if not has
                ],
            }
            if model.shared_intermediate:
                numbers |= {
                    "model_type": "qwen2_moe",
                    "shared_expert_intermediate_size": model.shared_intermediate,
                }
        elif not model.gated:
            numbers["use_bias"] = False
        has_head_width = numbers["model_type"] in ("llama", "mixtral")
        if has_head_width:
            numbers["head_dim"] = model.head_width
        if (
            model.projection_parameters
            or (model.experts and not model.gated)
            or (not has_head_width and model.query_width != model.hidden)
        ):
            raise PlanError(
                f"{model.name} has numbers that no model of type {numbers['model_type']} has: give "
                "its own Hugging Face config as model_config"
            )
        return numbers

    def config_text(self) -> str:
        """`model_config` as a config.json, whose head is the value of `_comment`."""
        return json.dumps({"_comment": self.head(), **self.model_config()}, indent=2) + "\n"


def commented(lines: list[str]) -> str:
    """As comments of a shell, TOML, YAML or Python file."""
    return "".join(f"# {line}\n" for line in lines)


def yaml_scalar(value: Any) -> str:
    """A number, text or list of YAML; these are JSON, which YAML includes."""
    # YAML 1.1 reads 1e-05, which has no dot, as text.
    text = json.dumps(value)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text


def _even(layers: int, stages: int) -> tuple[int, ...]:
    share, over = divmod(layers, stages)
    return tuple(share + (stage < over) for stage in range(stages))


_OPTIONS = {
    "tiers": "--tier",
    "guard": "--guard",
    "coding_copies": "--copies",
    "tensorize_form": "--tensorize",
    "recovery": "--recover",
}
"""Mechanisms that only Outlast has, and the option of the command line for each."""


def mechanism_tables(
    model: Transformer, chosen: Settings, name: str, own: Settings | None = None
) -> dict[str, dict[str, Any]]:
    """Sections and keys of a job that has the mechanisms of a plan.

    Args:
        model: What is trained.
        chosen: Of the plan; the time between checkpoints is no part of the result.
        name: Of the run, for folders that are its own.
        own: What the job says already, which is left as it is; None for no job, where everything
            is said that the defaults of a job do not.

    Raises:
        PlanError: A job cannot say where its checkpoints shall go.
    """
    before = Settings(guard="", tensorize_form="dense") if own is None else own
    found: dict[str, dict[str, Any]] = {}
    if chosen.tiers != before.tiers:
        fast = {("shared",): "", ("memory", "shared"): f"{MEMORY_FOLDERS[0]}/{name}"}
        if chosen.tiers not in fast:
            raise PlanError(
                f"tiers = {'+'.join(chosen.tiers)} cannot be expressed for Outlast: its "
                "checkpoints go to one faster folder and to the run's; the nearest is --tier "
                "memory+shared, or --tier shared with --set checkpoint.fast=FOLDER for a node's "
                "own disk"
            )
        found["checkpoint"] = {"fast": fast[chosen.tiers]}
    if chosen.guard != before.guard:
        found["guard"] = {"policy": chosen.guard}
    recovery = chosen.recovery
    if recovery != before.recovery or own is None:
        found["recover"] = {"mode": recovery.mode}
        if recovery.mode == "restart":
            found["recover"] |= {
                "every_steps": recovery.every_steps,
                "parity": "auto" if recovery.parity is None else recovery.parity,
                "parity_group": recovery.parity_group,
            }
    if own is not None and (found.keys() & {"checkpoint", "recover"}):
        # What the job says of tiers by name may contradict what was chosen instead.
        found["checkpoint"] = {**found.get("checkpoint", {}), "tiers": "auto"}
        if recovery.mode == "off":
            found.setdefault("recover", {})["mode"] = "off"
        if recovery.parity == 0 and recovery.mode == "restart":
            found.setdefault("recover", {})["parity"] = 0
    if chosen.coding_copies != before.coding_copies:
        found["coding"] = (
            {"scheme": "off"}
            if chosen.coding_copies == 1
            else {"scheme": "coverage", "copies": chosen.coding_copies}
        )
    form, rank = chosen.tensorize_form, chosen.tensorize_rank
    if (form, rank) != (before.tensorize_form, before.tensorize_rank):
        if form == "dense":
            found["tensorize"] = {"form": "off"}
        else:
            # Of forms without two factors a job takes a share for one of the parameters.
            share = form in TWO_FACTOR_FORMS and rank < 1.0
            found["tensorize"] = {
                "form": form,
                "rank": rank if share else max(round(rank * model.hidden), 1),
            }
    return found


def only_in_outlast(chosen: Settings, title: str) -> str:
    """Why a framework cannot have the mechanisms of a plan, in a sentence; empty where it can.

    Args:
        chosen: Of the plan.
        title: Of the framework.
    """
    plain = Settings()
    for name, option in _OPTIONS.items():
        value = getattr(chosen, name)
        if value != getattr(plain, name):
            shown = "+".join(value) if isinstance(value, tuple) else value
            return (
                f"{name} = {shown} cannot be expressed for {title}: it is a mechanism of Outlast; "
                f"leave out {option}, or give --target outlast"
            )
    return ""


def outlast_files(plan: Plan) -> dict[str, str]:
    """Text of job.toml, which `outlast.job` has read and found right, and of the model's config.

    Raises:
        PlanError: An override is not of the form section.key=value, or a mechanism of the plan
            cannot be said.
        JobError: An override is not possible.
    """
    from outlast.job import job_from_text
    from outlast.job.section import toml_value

    settings, tables = plan.settings, _tables(plan)
    for override in settings.overrides:
        _merge(tables, _parsed(override))
    lines = []
    for section, values in tables.items():
        lines.append(f"\n[{section}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
    beside = tables["model"].get("config") == CONFIG
    notes = ["Start it in its own folder."] if beside else []
    if "data" in tables and not settings.job and not settings.train:
        notes.append("Its data are the default's, a small text: say what to train on under [data].")
    text = commented(plan.head(*notes)) + "\n".join(lines) + "\n"
    job_from_text(text, "job.toml")
    return {"job.toml": text, CONFIG: plan.config_text()} if beside else {"job.toml": text}


def _tables(plan: Plan) -> dict[str, dict[str, Any]]:
    """The job that was planned, or one made from the plan's numbers, with the plan over it."""
    run, settings = plan.run, plan.settings
    known = settings.job or _described(plan)
    tables = {section: dict(values) for section, values in known.items()}
    _merge(tables, {"run": {"name": settings.name}})
    if "config" in tables["model"]:
        tables["model"]["config"] = CONFIG
    # Settings of [train] that the division of the work decides.
    recomputed = run.recompute == "full"
    train = {"precision": run.precision, "activation_checkpointing": recomputed}
    _merge(tables, {"train": train})
    # All that a job can say of it is the plan's: what a job said of another division goes.
    shard = plan.sharding_group if run.sharding == "parameters" else 1
    tables["parallel"] = {
        "replicate": run.data // shard,
        "shard": shard,
        "tensor": run.tensor,
        "pipeline": run.pipeline,
    }
    if run.pipeline == 1:
        tables["train"]["micro_batch_size"] = run.micro_batch
    else:
        tables["train"].pop("micro_batch_size", None)
        tables["parallel"]["pipeline_microbatches"] = run.micro_batches
    if run.pipeline > 1 and run.stages_per_rank > 1:
        tables["parallel"] |= {
            "pipeline_schedule": "interleaved",
            "pipeline_stages_per_rank": run.stages_per_rank,
        }
    launch = tables.setdefault("launch", {})
    launch.pop("nproc", None)
    if run.devices <= plan.cluster.devices_per_node:
        launch["nproc"] = run.devices
    own = settings.own_mechanisms
    _merge(tables, mechanism_tables(plan.model, settings.mechanisms, settings.name, own))
    return {section: values for section, values in tables.items() if values}


def _described(plan: Plan) -> dict[str, dict[str, Any]]:
    """A job where there was none: the model, its data and how it learns."""
    run, settings = plan.run, plan.settings
    given = settings.model_config
    model = {"config": CONFIG} if given else {"settings": plan.model_config()}
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": settings.name, "seed": settings.seed},
        "model": {"attention": "sdpa" if run.fused_attention else "eager", **model},
        "data": {"sequence_length": run.sequence},
        "train": {
            "steps": settings.steps,
            "batch_size": run.batch,
            "gradient_clip": settings.gradient_clip,
        },
        "optimizer": {"learning_rate": settings.learning_rate},
        "schedule": {"warmup_steps": settings.warmup_steps},
        "parallel": {},
        "checkpoint": {"every_steps": settings.checkpoint_every_steps, "keep": settings.keep},
    }
    if settings.train:
        tables["data"] |= {"source": "text", "train": list(settings.train)}
    if settings.tokenizer:
        tables["data"]["tokenizer"] = settings.tokenizer
    return tables


def _parsed(override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    section, _, rest = key.strip().partition(".")
    if not (equals and section and rest):
        raise PlanError(f"the override {override!r} is not of the form section.key=value")
    for text in (value, f'"{value.strip()}"'):
        try:
            return tomllib.loads(f"{key} = {text}")
        except tomllib.TOMLDecodeError:
            continue
    raise PlanError(f"the override {override!r} is no TOML value: put text in quotes")


def _merge(tables: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(tables.get(key), dict):
            _merge(tables[key], value)
        else:
            tables[key] = value


ARGUMENTS = "training_arguments.yaml"
READS_ARGUMENTS = (
    f"The script reads {ARGUMENTS} with transformers.HfArgumentParser((TrainingArguments,))"
    ".parse_yaml_file and the model from model/."
)
BRIDGE = "Overrides for a recipe of Megatron-Bridge (NeMo), with the groups of its ConfigContainer."
SAVES = {"megatron": True, "deepspeed": True, "accelerate": True, "torchtitan": False}
"""True for targets whose workers save when they get SIGTERM."""
MARGIN = 0.2
"""Share of the predicted hours that the time limit adds."""
WARN_SECONDS = 300
"""Before the limit, when the run is told to save."""
ROTARY_BASE = 500_000.0
"""Of the rotary embedding where the model's config says none; Llama 3's."""


def megatron_files(plan: Plan) -> dict[str, str]:
    """Text of every file by its name."""
    run, blocks, notes = plan.run, plan.blocks, plan.unsaid()
    stages = ["t" * count for count in blocks]
    # As Megatron writes stages: E embedding, t block, L loss, | between stages.
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    strategies = {"gradients": "optim_grads", "parameters": "optim_grads_params"}
    mixed = {"fp16": "fp16_mixed", "bf16": "bf16_mixed"}
    mixed["fp8"] = "bf16_with_fp8_delayed_scaling_mixed"
    values = {
        "fully_sharded": run.sharding in strategies and run.data > 1,
        "strategy": strategies.get(run.sharding, ""),
        "replicas": 1 if run.sharding == "none" else run.data // plan.sharding_group,
        "layout": "|".join(stages) if run.pipeline > 1 and len(set(blocks)) > 1 else "",
        "mixed": mixed.get(run.precision),
    }
    return {
        "megatron.sh": plan.script("megatron.sh", *notes, **values),
        "megatron_bridge.yaml": plan.render("megatron_bridge.yaml", BRIDGE, *notes, **values),
    }


def torchtitan_files(plan: Plan) -> dict[str, str]:
    """Text of every file by its name."""
    run, config = plan.run, plan.settings.model_config
    note = (
        "For torchtitan 0.3. It has no handler of signals: a run that is stopped continues from "
        f"its newest checkpoint, at most {plan.settings.checkpoint_every_steps} steps back."
    )
    schedule = "GPipe" if run.schedule == "gpipe" else "1F1B"
    if run.schedule == "zero_bubble":
        schedule = "InterleavedZeroBubble"
    elif run.stages_per_rank > 1:
        schedule = "Interleaved1F1B"
    rope = config.get("rope_parameters") or {}
    theta = float(config.get("rope_theta") or rope.get("rope_theta") or ROTARY_BASE)
    module = plan.render("torchtitan_run.py", note, *plan.unsaid(), schedule=schedule, theta=theta)
    return {"torchtitan_run.py": module, "torchtitan.sh": plan.script("torchtitan.sh", note)}


def _arguments(plan: Plan, *, sharded: bool, deepspeed: bool) -> str:
    """Training arguments of Hugging Face as YAML."""
    notes = [
        READS_ARGUMENTS,
        f"The script cuts its text into samples of {plan.run.sequence} tokens.",
    ]
    if plan.run.tensor > 1:
        mesh = plan.run.tensor
        notes.append(f'It loads the model with tp_plan="auto" and a mesh of {mesh} ranks.')
    return plan.render(ARGUMENTS, *notes, sharded=sharded, deepspeed=deepspeed)


def accelerate_files(plan: Plan) -> dict[str, str]:
    """Text of every file by its name."""
    run, (nodes, per_node) = plan.run, plan.nodes
    # FSDP2 is needed for sharded states, and for what is built on it.
    sharded = run.context > 1 or run.tensor > 1 or plan.sharding_group > 1
    return {
        "accelerate.yaml": plan.render(
            "accelerate.yaml", sharded=sharded, nodes=nodes, processes=nodes * per_node
        ),
        ARGUMENTS: _arguments(plan, sharded=sharded, deepspeed=False),
        CONFIG: plan.config_text(),
        "accelerate.sh": plan.script("accelerate.sh", READS_ARGUMENTS),
    }


def deepspeed_files(plan: Plan) -> dict[str, str]:
    """Text of every file by its name."""
    run = plan.run
    note = f"torchrun starts {SCRIPT}; `deepspeed --hostfile` would do so, too."
    recomputed = (
        f"Recomputation ({run.recompute}) is switched on in {ARGUMENTS}, by the model itself."
    )
    values: dict[str, Any] = {
        # JSON has no comments, and DeepSpeed does not mind names that it does not know.
        "_comment": plan.head(recomputed),
        "train_batch_size": run.batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.micro_batches,
        "gradient_clipping": plan.settings.gradient_clip,
        "zero_optimization": {
            "stage": SHARDING[run.sharding],
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "bf16": {"enabled": run.precision == "bf16"},
        "fp16": {"enabled": run.precision == "fp16"},
        "data_types": {"grad_accum_dtype": {4: "fp32", 2: run.precision}[run.gradient_bytes]},
        "steps_per_print": 10,
    }
    if run.tensor > 1:
        values["tensor_parallel"] = {"autotp_size": run.tensor}
    return {
        "ds_config.json": json.dumps(values, indent=2) + "\n",
        ARGUMENTS: _arguments(plan, sharded=False, deepspeed=True),
        CONFIG: plan.config_text(),
        "deepspeed.sh": plan.script("deepspeed.sh", READS_ARGUMENTS, note),
    }


def batch_files(plan: Plan) -> dict[str, str]:
    """Text of job.sbatch, and of node.sh where torchrun starts the ranks.

    Raises:
        PlanError: The run is warned before its time limit begins, or a text would add an option.
    """
    settings, cluster, (nodes, per_node) = plan.settings, plan.cluster, plan.nodes
    minutes, length = _time_limit(settings)
    alone = settings.launches == "outlast"
    tasks = per_node if alone else 1
    days, rest = divmod(minutes, 24 * 60)
    # A task's share of the node; 0 where nobody said how many cores a node has.
    cores = int(cluster.host_cores * per_node / cluster.devices_per_node // tasks)
    options = {
        "job-name": settings.name,
        "nodes": nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": per_node,
        "cpus-per-task": cores,
        "time": f"{days}-{rest // 60:02}:{rest % 60:02}:00",
        "signal": f"{'' if alone else 'B:'}USR1@{WARN_SECONDS}",
        "partition": settings.partition,
        "account": settings.account,
        "output": f"{settings.name}-%j.log",
        "open-mode": "append",
    }
    for name, value in options.items():
        text = str(value)
        if any(character.isspace() or character in "\"'`$\\#" for character in text):
            raise PlanError(
                f"{name} = {text!r} cannot stand in a batch script: use letters, digits, dots, "
                "dashes and underscores"
            )
    files = {
        "job.sbatch": plan.render(
            "job.sbatch",
            "Submit it from its own folder: sbatch job.sbatch",
            length,
            options=[f"{name}={value}" for name, value in options.items() if value],
            cores=bool(cores),
            alone=alone,
            to_be_continued=EXIT_TO_BE_CONTINUED,
        )
    }
    if not alone:
        note = "Runs on every node: starts torchrun, and tells its workers to save when warned."
        target, saves = settings.launches, SAVES[settings.launches]
        files["node.sh"] = plan.render("node.sh", note, target=target, saves=saves)
    return files


def _time_limit(settings: EmitSettings) -> tuple[int, str]:
    """Minutes of one start, and why as many."""
    hours, starts, longest = settings.longest_hours, 1, settings.longest_hours
    if settings.predicted_hours is None:
        length = (
            f"How long the run takes was not predicted; the limit is longest_hours = {longest:g}."
        )
    else:
        wanted = settings.predicted_hours * (1.0 + MARGIN) + WARN_SECONDS / 3600
        starts, hours = math.ceil(wanted / longest), min(wanted, longest)
        chain = f", in about {starts} starts of {longest:g} h" if starts > 1 else ""
        saves = SAVES.get(settings.launches, True)
        lost = "" if saves else " (torchtitan does not save on a warning)"
        length = (
            f"Time limit: {settings.predicted_hours:.3g} predicted hours and {MARGIN:.0%} margin"
            f"{chain}{lost}."
        )
    minutes = math.ceil(hours * 60)
    if minutes * 60 <= WARN_SECONDS:
        raise PlanError(
            f"warn_seconds = {WARN_SECONDS} is not below the time limit of {minutes * 60} s: "
            "warn later or allow more with longest_hours"
        )
    return minutes, length


_WRITERS: Mapping[str, Callable[[Plan], dict[str, str]]] = {
    "outlast": outlast_files,
    "torchtitan": torchtitan_files,
    "megatron": megatron_files,
    "deepspeed": deepspeed_files,
    "accelerate": accelerate_files,
}


def emitted(
    target: str,
    model: Transformer,
    run: Configuration,
    cluster: Cluster,
    settings: EmitSettings | None = None,
) -> dict[str, str]:
    """Text of every file that `emit` writes, by its name below the folder.

    Args:
        target: Name in `outlast.plan.targets.TARGETS`; "sbatch" also gives the files of what it
            launches.
        model: What is trained.
        run: How.
        cluster: Where.
        settings: What a plan does not say; defaults where None.

    Raises:
        PlanError: The target cannot express the run or its mechanisms, or it does not fit the
            cluster; one sentence.
        JobError: An override of the Outlast job is not possible.
    """
    settings = settings or EmitSettings()
    target_named(target)
    framework = settings.launches if target == "sbatch" else target
    if framework not in _WRITERS:
        raise PlanError(f"launches = {framework!r} is none of {', '.join(_WRITERS)}")
    sentence = problem(framework, model, run) or unwritten(framework, model)
    if not sentence and framework != "outlast":
        sentence = only_in_outlast(settings.mechanisms, target_named(framework).title)
    if sentence:
        raise PlanError(sentence)
    plan = Plan(model, run, cluster, settings)
    files = _WRITERS[framework](plan)
    return {**batch_files(plan), **files} if target == "sbatch" else files


def emit(
    target: str,
    model: Transformer,
    run: Configuration,
    cluster: Cluster,
    *,
    out: Path,
    settings: EmitSettings | None = None,
) -> list[Path]:
    """Write a plan out for a framework, all of it or nothing.

    Args:
        target: Name in `outlast.plan.targets.TARGETS`.
        model: What is trained.
        run: How.
        cluster: Where.
        out: Folder; made where it is missing.
        settings: What a plan does not say; defaults where None.

    Returns:
        The files that were written.

    Raises:
        PlanError: What `emitted` raises, or a file is there and differs, or cannot be written.
        JobError: An override of the Outlast job is not possible.
    """
    from outlast.records import replace_file

    settings = settings or EmitSettings()
    files = emitted(target, model, run, cluster, settings)
    paths = {out / name: text.encode() for name, text in files.items()}
    try:
        for path, content in paths.items():
            if path.exists() and not settings.replace and path.read_bytes() != content:
                raise PlanError(
                    f"{path} exists and differs: give another folder, or replace = true"
                )
        for path, content in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
            if path.suffix in (".sh", ".sbatch"):
                path.chmod(0o755)
    except OSError as error:
        raise PlanError(f"{error.filename or out} cannot be written: {error.strerror}") from None
    return list(paths)
