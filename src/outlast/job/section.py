"""Sections of a job file: their base, their TOML form, and the identity of a run.

Commented TOML is what ``outlast init`` writes and a run directory keeps.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


T = TypeVar("T")
_CHANGEABLE, _ADJUSTABLE, _IDENTITY = "changeable", "adjustable", "identity"
Changeable = Annotated[T, _CHANGEABLE]
"""A setting that may change from one start of a run to the next."""
Adjustable = Annotated[T, _ADJUSTABLE]
"""A setting of the run's identity that may change all the same: the run continues with it, and the
change is recorded."""
Identity = Annotated[T, _IDENTITY]
"""A setting of a `ChangeableSection` that is part of the run's identity all the same."""


def worded(form: str, pattern: str) -> Any:
    """A limit on a text: `form` says in words what `pattern` asks for."""
    return Field(pattern=pattern, json_schema_extra={"form": form})


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused, no value converted to another type.

    TOML has types, so `steps = "5"`, `steps = true` and `compile = "no"` are mistakes. A setting is
    part of the run's identity, unless it is `Changeable` or in a `ChangeableSection`. A run
    refuses to continue with another identity, but for settings that are `Adjustable`. The text
    below a setting is its description.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ChangeableSection(Section):
    """Base of the sections whose settings may change from one start of a run to the next."""


_COMMENT_WIDTH = 96


def to_toml(job: Section, *, comments: bool = True, left_out: Collection[str] = ()) -> str:
    """`job` as TOML text; with `comments`, every key carries its description.

    Keys whose value is None are written as comments, since TOML has no null. Those of `left_out`,
    each ``section.key``, are not written.
    """
    lines: list[str] = []
    for name in type(job).model_fields:
        hidden = {
            key for key in type(getattr(job, name)).model_fields if f"{name}.{key}" in left_out
        }
        lines += [*_section_lines(name, getattr(job, name), comments, hidden), ""]
    return "\n".join(lines)


def _section_lines(
    name: str, section: Section, comments: bool, hidden: Collection[str]
) -> Iterator[str]:
    if comments and section.__doc__:
        yield f"# {section.__doc__.strip().splitlines()[0]}"
    yield f"[{name}]"
    tables = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if key in hidden:
            continue
        if isinstance(value, dict):
            if value:
                tables.append((key, value))
            continue
        if comments and field.description:
            for line in textwrap.wrap(field.description, _COMMENT_WIDTH):
                yield f"# {line}"
        yield f"# {key} =" if value is None else f"{key} = {toml_value(value)}"
    for key, table in tables:
        yield ""
        yield f"[{name}.{key}]"
        for inner, value in table.items():
            if value is not None:
                yield f"{_key(inner)} = {toml_value(value)}"


def toml_value(value: Any) -> str:
    """`value` (bool, int, float, str, list or dict of these) as a TOML value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, str):
        return _quoted(value)
    return repr(value)


def _key(text: str) -> str:
    bare = text.replace("_", "").replace("-", "").isalnum() and text.isascii()
    return text if bare else _quoted(text)


def _quoted(text: str) -> str:
    # TOML's escapes are those of JSON, but TOML also forbids a raw DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def identity(job: Section) -> dict[str, Any]:
    """The settings that decide which numbers come out, as ``{"section.key": value}``.

    Two jobs with equal identity produce the same samples in the same order, the same schedule and
    (at equal world size, in deterministic mode) the same bits.
    """
    found = {}
    for section_name in type(job).model_fields:
        section: Section = getattr(job, section_name)
        for key, field in type(section).model_fields.items():
            changeable = _IDENTITY not in field.metadata and isinstance(section, ChangeableSection)
            if not changeable and _CHANGEABLE not in field.metadata:
                found[f"{section_name}.{key}"] = getattr(section, key)
    return found


def adjustable(job_type: type[Section]) -> list[str]:
    """The settings of the identity, each ``section.key``, that may change during a run."""
    return [
        f"{section_name}.{key}"
        for section_name, section in job_type.model_fields.items()
        for key, field in type(section.default).model_fields.items()
        if _ADJUSTABLE in field.metadata
    ]


def fingerprint(job: Section, *, adjusted: bool = True) -> str:
    """A short hash (16 hexadecimal digits) of the job's identity.

    Without `adjusted`, settings that may change during a run do not count.
    """
    settings, without = identity(job), () if adjusted else adjustable(type(job))
    kept = {key: value for key, value in settings.items() if key not in without}
    return hashlib.sha256(_canonical(kept).encode()).hexdigest()[:16]


def differences(old: Section, new: Section) -> list[str]:
    """One line ``section.key: old -> new`` for each setting that differs and may not."""
    allowed = adjustable(type(new))
    return [
        f"{name}: {before!r} -> {after!r}"
        for name, before, after in changes(identity(old), identity(new))
        if name not in allowed
    ]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name and both values of every setting that differs between two identities, also read ones."""
    return [
        (name, before[name], value)
        for name, value in after.items()
        if name in before and _canonical(before[name]) != _canonical(value)
    ]


def _canonical(value: Any) -> str:
    # One text for both functions: as Python values, true would equal 1 and the fingerprints differ.
    return json.dumps(value, sort_keys=True)
