"""Outlast's own job file."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from outlast.errors import PlanError
from outlast.plan.emit.huggingface import CONFIG, config_text, model_config
from outlast.plan.emit.settings import commented, head
from outlast.plan.job import MEMORY_FOLDERS
from outlast.plan.pareto.settings import Settings
from outlast.tensorize.cost import TWO_FACTOR_FORMS

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.emit.settings import EmitSettings
    from outlast.plan.pareto.settings import Recovery
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
        found["checkpoint"] = {"fast": _fast(chosen.tiers, name)}
    if chosen.guard != before.guard:
        found["guard"] = {"policy": chosen.guard}
    if chosen.recovery != before.recovery or own is None:
        found["recover"] = _recover(chosen.recovery)
    if chosen.coding_copies != before.coding_copies:
        found["coding"] = (
            {"scheme": "off"}
            if chosen.coding_copies == 1
            else {"scheme": "coverage", "copies": chosen.coding_copies}
        )
    kinds = ("tensorize_form", "tensorize_rank")
    if any(getattr(chosen, kind) != getattr(before, kind) for kind in kinds):
        found["tensorize"] = _tensorize(model, chosen)
    return found


def only_in_outlast(chosen: Settings, title: str) -> str:
    """Why a framework cannot have the mechanisms of a plan, in a sentence; empty where it can.

    Args:
        chosen: Of the plan.
        title: Of the framework.
    """
    plain = Settings()
    for field in fields(chosen):
        value = getattr(chosen, field.name)
        if field.name in _OPTIONS and value != getattr(plain, field.name):
            shown = "+".join(value) if isinstance(value, tuple) else value
            return (
                f"{field.name} = {shown} cannot be expressed for {title}: it is a mechanism of "
                f"Outlast; leave out {_OPTIONS[field.name]}, or give --target outlast"
            )
    return ""


def _fast(tiers: tuple[str, ...], name: str) -> str:
    if tiers == ("shared",):
        return ""
    if tiers == ("memory", "shared"):
        return f"{MEMORY_FOLDERS[0]}/{name}"
    raise PlanError(
        f"tiers = {'+'.join(tiers)} cannot be expressed for Outlast: its checkpoints go to one "
        "faster folder and to the run's; the nearest is --tier memory+shared, or --tier shared "
        "with --set checkpoint.fast=FOLDER for a node's own disk"
    )


def _recover(recovery: Recovery) -> dict[str, Any]:
    if recovery.mode != "restart":
        return {"mode": recovery.mode}
    return {
        "mode": "restart",
        "every_steps": recovery.every_steps,
        "parity": "auto" if recovery.parity is None else recovery.parity,
        "parity_group": recovery.parity_group,
    }


def _tensorize(model: Transformer, chosen: Settings) -> dict[str, Any]:
    form, rank = chosen.tensorize_form, chosen.tensorize_rank
    if form == "dense":
        return {"form": "off"}
    if form in TWO_FACTOR_FORMS and rank < 1.0:
        return {"form": form, "rank": rank}
    # Of other forms a job takes a share for one of the parameters.
    return {"form": form, "rank": max(round(rank * model.hidden), 1)}


def outlast_files(
    model: Transformer, run: Configuration, cluster: Cluster, settings: EmitSettings
) -> dict[str, str]:
    """Text of job.toml, which `outlast.job` has read and found right, and of the model's config.

    Raises:
        PlanError: An override is not of the form section.key=value, or a mechanism of the plan
            cannot be said.
        JobError: An override is not possible.
    """
    from outlast.job import job_from_text
    from outlast.job.section import toml_value

    tables = _tables(model, run, cluster, settings)
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
    text = commented(head(model, run, settings, *notes)) + "\n".join(lines) + "\n"
    job_from_text(text, "job.toml")
    if beside:
        return {"job.toml": text, CONFIG: config_text(model, run, settings)}
    return {"job.toml": text}


def _tables(
    model: Transformer, run: Configuration, cluster: Cluster, settings: EmitSettings
) -> dict[str, dict[str, Any]]:
    """The job that was planned, or one made from the plan's numbers, with the plan over it."""
    known = settings.job or _described(model, run, settings)
    tables = {section: dict(values) for section, values in known.items()}
    _merge(tables, {"run": {"name": settings.name}})
    if "config" in tables["model"]:
        tables["model"]["config"] = CONFIG
    # Settings of [train] that the division of the work decides.
    train: dict[str, Any] = {
        "precision": run.precision,
        "activation_checkpointing": run.recompute == "full",
    }
    if run.pipeline == 1:
        train["micro_batch_size"] = run.micro_batch
    _merge(tables, {"train": train})
    # All that a job can say of it is the plan's: what a job said of another division goes.
    shard = (run.sharding_ranks or run.data) if run.sharding == "parameters" else 1
    degrees = {
        "replicate": run.data // shard,
        "shard": shard,
        "tensor": run.tensor,
        "pipeline": run.pipeline,
    }
    tables["parallel"] = degrees | (_pipeline(run) if run.pipeline > 1 else {})
    if run.pipeline > 1:
        tables["train"].pop("micro_batch_size", None)
    launch = tables.setdefault("launch", {})
    launch.pop("nproc", None)
    if run.devices <= cluster.devices_per_node:
        launch["nproc"] = run.devices
    said = mechanism_tables(model, settings.mechanisms, settings.name, settings.own_mechanisms)
    _merge(tables, said)
    return {section: values for section, values in tables.items() if values}


def _described(
    model: Transformer, run: Configuration, settings: EmitSettings
) -> dict[str, dict[str, Any]]:
    """A job where there was none: the model, its data and how it learns."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": settings.name, "seed": settings.seed},
        "model": {
            "attention": "sdpa" if run.fused_attention else "eager",
            **(
                {"config": CONFIG}
                if settings.model_config
                else {"settings": model_config(model, run, settings)}
            ),
        },
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


def _pipeline(run: Configuration) -> dict[str, Any]:
    values: dict[str, Any] = {"pipeline_microbatches": run.micro_batches}
    if run.stages_per_rank > 1:
        values |= {
            "pipeline_schedule": "interleaved",
            "pipeline_stages_per_rank": run.stages_per_rank,
        }
    return values


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
