"""Settings of emitted files beside the plan: names, lengths, data, paths, and launch scripts."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast.errors import PlanError
from outlast.plan.pareto.settings import Settings as Mechanisms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.transformer import Transformer


_WIDTH = 96


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
        blocks_per_stage: Blocks of every stage; empty for what the balance asks for.
        job: Tables of the Outlast job that was planned, whose other settings stay as they are;
            empty where there is none.
        mechanisms: Of the plan.
        own_mechanisms: What that job says of them already; None where there is none.
        overrides: `section.key=value` for the Outlast job.
        script: Training script of DeepSpeed and Accelerate, which reads training_arguments.yaml.
        launches: Target that the batch script starts.
        predicted_hours: How long the whole run takes; None where unknown.
        margin: Share of the predicted hours that the time limit adds.
        longest_hours: Largest time limit that the queue allows.
        warn_seconds: How long before the limit the run is told to save.
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
    blocks_per_stage: tuple[int, ...] = ()
    job: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mechanisms: Mechanisms = field(default_factory=Mechanisms)
    own_mechanisms: Mechanisms | None = None
    overrides: tuple[str, ...] = ()
    script: str = "train.py"
    launches: str = "outlast"
    predicted_hours: float | None = None
    margin: float = 0.2
    longest_hours: float = 24.0
    warn_seconds: int = 300
    partition: str = ""
    account: str = ""
    replace: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "checkpoint_every_steps", "keep"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} = {getattr(self, name)}: give at least 1")
        for name in ("warmup_steps", "gradient_clip", "seed", "margin"):
            if not getattr(self, name) >= 0:
                raise PlanError(f"{name} = {getattr(self, name)}: give at least 0")
        for name in ("learning_rate", "longest_hours", "warn_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise PlanError(f"{name} = {getattr(self, name)}: give a number above 0")
        if self.warmup_steps >= self.steps:
            raise PlanError(
                f"warmup_steps = {self.warmup_steps} is not below steps = {self.steps}: warm up "
                "for fewer steps"
            )
        if self.predicted_hours is not None and not 0 < self.predicted_hours < float("inf"):
            raise PlanError(
                f"predicted_hours = {self.predicted_hours}: give a number above 0, or none"
            )
        for name in ("name", "script", "tokenizer", "partition", "account"):
            text = getattr(self, name)
            if any(character in text for character in "\n\r\0") or text.startswith("-"):
                raise PlanError(f"{name} = {text!r}: give one line that does not begin with a dash")


def head(model: Transformer, run: Configuration, settings: EmitSettings, *notes: str) -> list[str]:
    """Lines that open every file: what it is for, what was predicted, what it leaves to others.

    Args:
        model: What is trained.
        run: How.
        settings: Has the predicted text.
        notes: A sentence each, on what the file cannot see to.
    """
    parallel = ", ".join(
        f"{name} {getattr(run, name)}"
        for name in ("data", "tensor", "context", "pipeline", "expert")
        if getattr(run, name) > 1
    )
    devices = f"{run.devices} devices ({parallel or 'no parallelism'})"
    lines = [
        f"{settings.name}: {model.name} on {devices}, batch {run.batch} of {run.sequence} tokens.",
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


def unsaid(model: Transformer) -> list[str]:
    """Name what a framework's own model, made of the numbers, lacks of a model."""
    notes = []
    if model.further_parameters > 0:
        notes.append(
            f"Not written: {model.further_parameters:,} parameters of biases, learned positions or "
            "further norms of the model's own config."
        )
    return notes


def commented(lines: list[str]) -> str:
    """As comments of a shell, TOML, YAML or Python file."""
    return "".join(f"# {line}\n" for line in lines)


def render(name: str, /, **values: Any) -> str:
    """An emitted file from its template; `values` are the template's own names."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("outlast.plan.emit"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Python and shell, not HTML
    )
    environment.filters["repr"] = repr
    return environment.get_template(f"{name}.j2").render(values)


def yaml_text(values: Mapping[str, Any], indent: int = 0) -> str:
    """Tables within tables as YAML; scalars and lists are written as JSON, which YAML includes."""
    lines = []
    for key, value in values.items():
        name = " " * indent + key
        if isinstance(value, Mapping):
            lines.append(f"{name}:\n{yaml_text(value, indent + 2)}")
        else:
            lines.append(f"{name}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    # YAML 1.1 reads 1e-05, which has no dot, as text.
    text = json.dumps(value)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text


NODE_VARIABLES = (
    "On several nodes, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say which node this is and "
    "where the first one is."
)


def nodes_of(run: Configuration, cluster: Cluster) -> tuple[int, int]:
    """Nodes, and devices on each of them.

    Raises:
        PlanError: The run does not fill its nodes, or takes more than the cluster has.
    """
    if run.devices > cluster.devices:
        raise PlanError(
            f"data x tensor x context x pipeline = {run.devices} devices, and {cluster.name} has "
            f"{cluster.devices}: take fewer"
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


def torchrun(nodes: int, per_node: int) -> str:
    """The start of a command line, in which the environment says which node this is."""
    return (
        f'torchrun --nnodes="${{NNODES:-{nodes}}}" --nproc-per-node={per_node} \\\n'
        '  --node-rank="${NODE_RANK:-0}" --master-addr="${MASTER_ADDR:-127.0.0.1}" \\\n'
        '  --master-port="${MASTER_PORT:-29500}"'
    )


def argument_lines(arguments: Sequence[tuple[str, object]]) -> str:
    """Options and their values, one option a line; an option without a value has None."""
    lines = []
    for option, value in arguments:
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        lines.append("  " + " ".join([option, *(shlex.quote(str(item)) for item in values)]))
    return "\n".join(lines)


def script(
    model: Transformer, run: Configuration, settings: EmitSettings, body: str, *notes: str
) -> str:
    """A shell script with its head.

    Args:
        model: What is trained.
        run: How.
        settings: Has the predicted text.
        body: Commands.
        notes: Sentences for the head.
    """
    comments = commented(head(model, run, settings, NODE_VARIABLES, *notes))
    return f'#!/bin/bash\n{comments}set -euo pipefail\ncd "$(dirname "$0")"\n{body}'


def blocks_per_stage(
    model: Transformer, run: Configuration, given: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Blocks of every stage, in the order that a sample goes through them.

    By layers, stages differ by one block at most, and the first ones have more. By cost, the head
    counts as as many blocks as its matrix product costs, so the last stage has fewer.

    Args:
        model: What is cut.
        run: Says the number of stages, `pipeline * stages_per_rank`, and the balance.
        given: Blocks of every stage, where somebody wants them so.

    Raises:
        PlanError: `given` does not fit the model or the number of stages.
    """
    stages = run.pipeline * (run.stages_per_rank if run.pipeline > 1 else 1)
    if given:
        if len(given) != stages or sum(given) != model.layers or min(given) < 0:
            raise PlanError(
                f"blocks_per_stage = {list(given)} does not give {model.layers} layers to "
                f"{stages} stages: give one number per stage that add up to the layers"
            )
        return given
    if run.balance == "cost" and stages > 1:
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
    return _even(model.layers, stages)


def is_even(blocks: tuple[int, ...]) -> bool:
    """True if all stages have equally many blocks."""
    return len(set(blocks)) == 1


def _even(layers: int, stages: int) -> tuple[int, ...]:
    each, over = divmod(layers, stages)
    return tuple(each + (stage < over) for stage in range(stages))
