"""What all sections of a job file are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from pydantic.config import JsonDict

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


def setting(
    default: Any, description: str, *, identity: bool = True, form: str = "", **limits: Any
) -> Any:
    """A field with its description and whether it is part of the run's identity.

    `form` says in words what a `pattern` among the `limits` asks for.
    """
    extra: JsonDict = {"identity": identity, "form": form}
    return Field(default, description=description, json_schema_extra=extra, **limits)


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused, no value converted to another type.

    TOML has types, so `steps = "5"`, `steps = true` and `compile = "no"` are mistakes.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False
    )
