"""Write a plan out for a framework: Megatron-LM and its bridges, torchtitan, DeepSpeed, Slurm.

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from outlast.errors import EXIT_TO_BE_CONTINUED, PlanError
from outlast.plan.batch import SHARDING
from outlast.plan.emit.outlast_job import only_in_outlast, outlast_files
from outlast.plan.emit.settings import CONFIG, SCRIPT, EmitSettings, Plan
from outlast.plan.emit.targets import problem, target_named, unwritten

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.transformer import Transformer


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
    run, blocks = plan.run, plan.blocks
    stages = ["t" * count for count in blocks]
    # As Megatron writes stages: E embedding, t block, L loss, | between stages.
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    strategies = {"gradients": "optim_grads", "parameters": "optim_grads_params"}
    values = {
        "fully_sharded": run.sharding in strategies and run.data > 1,
        "strategy": strategies.get(run.sharding, ""),
        "replicas": 1 if run.sharding == "none" else run.data // plan.sharding_group,
        "layout": "|".join(stages) if run.pipeline > 1 and len(set(blocks)) > 1 else "",
        "mixed": {
            "fp32": None,
            "fp16": "fp16_mixed",
            "bf16": "bf16_mixed",
            "fp8": "bf16_with_fp8_delayed_scaling_mixed",
        }[run.precision],
    }
    return {
        "megatron.sh": plan.script("megatron.sh", *plan.unsaid(), **values),
        "megatron_bridge.yaml": plan.render(
            "megatron_bridge.yaml", BRIDGE, *plan.unsaid(), **values
        ),
    }


def torchtitan_files(plan: Plan) -> dict[str, str]:
    """Text of every file by its name."""
    run, config = plan.run, plan.settings.model_config
    note = (
        "For torchtitan 0.3. It has no handler of signals: a run that is stopped goes on from its "
        f"newest checkpoint, at most {plan.settings.checkpoint_every_steps} steps back."
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


Writer: TypeAlias = "Callable[[Plan], dict[str, str]]"
_WRITERS: Mapping[str, Writer] = {
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
        target: Name in `outlast.plan.emit.TARGETS`; "sbatch" also gives the files of what it
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
        target: Name in `outlast.plan.emit.TARGETS`.
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
