"""Changing a recipe of torchtitan as a whole: `use_outlast`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torchtitan.trainer import Trainer

from outlast.errors import IntegrationError
from outlast.integrations.torchtitan.manager import OutlastCheckpointManager
from outlast.integrations.torchtitan.trainer import OutlastTrainer

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence


def use_outlast(
    config: Any,
    job: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """Let a recipe's checkpoints go into a store; its settings of them keep their meaning.

    With a job or overrides its steps are guarded, metered and recorded, too.

    Args:
        config: A `Trainer.Config`.
        job: A TOML file with the sections [guard], [recover], [energy] and [log], each of which may
            be missing.
        overrides: Of the job's settings, or of the defaults: "section.key=value". A recipe that has
            a job or overrides already keeps what is not given.
        settings: Of `OutlastCheckpointManager.Config`, instead of the recipe's own; for example
            ``enable=True``, which most recipes leave to the command line.

    Returns:
        The recipe: the same `config`, or an `OutlastTrainer.Config` in its place.

    Raises:
        IntegrationError: When a setting is unknown, the recipe's manager has one that a store
            cannot follow, or its trainer has steps of its own.
    """
    known = {field.name for field in dataclasses.fields(OutlastCheckpointManager.Config)}
    if unknown := sorted(settings.keys() - known):
        raise IntegrationError(
            f"{unknown[0]} = {settings[unknown[0]]!r} is no setting of OutlastCheckpointManager; "
            f"there are {', '.join(sorted(known))}"
        )
    if job is not None or overrides:
        config = _with_job(config, job, overrides)
    before = config.checkpoint
    given = {}
    for field in dataclasses.fields(before):
        value = getattr(before, field.name)
        if field.name in known:
            given[field.name] = value
        elif value != _default(field):
            raise IntegrationError(
                f"checkpoint.{field.name} = {value!r} of {type(before).__qualname__} has no "
                "counterpart in a store; leave it at its default"
            )
    config.checkpoint = OutlastCheckpointManager.Config(**given | settings)
    return config


def _with_job(
    config: Any, job: str | os.PathLike[str] | None, overrides: Sequence[str]
) -> OutlastTrainer.Config:
    """The same recipe for an `OutlastTrainer`; what is not given stays as it is."""
    ours: OutlastTrainer.Config = config
    if not isinstance(config, OutlastTrainer.Config):
        ours = _of_our_trainer(config)
    if job is not None:
        ours.outlast_job = str(job)
    if overrides:
        ours.outlast_settings = [*overrides]
    return ours


def _of_our_trainer(config: Any) -> OutlastTrainer.Config:
    if type(config) is not Trainer.Config:
        raise IntegrationError(
            f"the recipe is a {type(config).__qualname__}, whose trainer has steps of its own; "
            "derive that trainer and its Config from OutlastTrainer, or leave out job and overrides"
        )
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return OutlastTrainer.Config(**given)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
