"""Outlast's own job file."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

from outlast.errors import PlanError
from outlast.plan.configuration import MEMORY_FOLDERS, Settings
from outlast.plan.emit.settings import CONFIG, Plan, commented
from outlast.tensorize.cost import TWO_FACTOR_FORMS

if TYPE_CHECKING:
    from outlast.plan.transformer import Transformer


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
