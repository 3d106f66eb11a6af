"""Settings of emitted files beside the plan, and what all frameworks' files are made from."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outlast.errors import PlanError
from outlast.plan.configuration import Settings as Mechanisms

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
    mechanisms: Mechanisms = field(default_factory=Mechanisms)
    own_mechanisms: Mechanisms | None = None
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
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("outlast.plan.emit"),
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
