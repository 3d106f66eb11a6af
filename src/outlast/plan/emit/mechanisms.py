"""What Outlast's job says of the mechanisms of a plan; no other target can say anything of them."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from outlast.errors import PlanError
from outlast.plan.job_settings import MEMORY_FOLDERS
from outlast.plan.pareto.settings import Settings
from outlast.tensorize.cost import TWO_FACTOR_FORMS

if TYPE_CHECKING:
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
        found["coding"] = _coding(chosen.coding_copies)
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


def _coding(copies: int) -> dict[str, Any]:
    return {"scheme": "off"} if copies == 1 else {"scheme": "coverage", "copies": copies}


def _tensorize(model: Transformer, chosen: Settings) -> dict[str, Any]:
    form, rank = chosen.tensorize_form, chosen.tensorize_rank
    if form == "dense":
        return {"form": "off"}
    if form in TWO_FACTOR_FORMS and rank < 1.0:
        return {"form": form, "rank": rank}
    # Of other forms a job takes a share for one of the parameters.
    return {"form": form, "rank": max(round(rank * model.hidden), 1)}
