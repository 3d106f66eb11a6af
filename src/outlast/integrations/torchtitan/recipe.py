"""Changing a recipe of torchtitan as a whole: `use_outlast`."""

from __future__ import annotations

import dataclasses
from typing import Any

from outlast.errors import IntegrationError
from outlast.integrations.torchtitan.manager import OutlastCheckpointManager


def use_outlast(config: Any, **settings: Any) -> Any:
    """Let a recipe's checkpoints go into a store; its settings of them keep their meaning.

    Args:
        config: A `Trainer.Config`, changed in place.
        settings: Of `OutlastCheckpointManager.Config`, instead of the recipe's own; for example
            ``enable=True``, which most recipes leave to the command line.

    Returns:
        The same `config`.

    Raises:
        IntegrationError: When a setting is unknown, or the recipe's manager has one that a store
            cannot follow.
    """
    known = {field.name for field in dataclasses.fields(OutlastCheckpointManager.Config)}
    if unknown := sorted(settings.keys() - known):
        raise IntegrationError(
            f"{unknown[0]} = {settings[unknown[0]]!r} is no setting of OutlastCheckpointManager; "
            f"there are {', '.join(sorted(known))}"
        )
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


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
