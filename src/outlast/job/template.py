"""Jobs as commented TOML: what ``outlast init`` writes and a run directory keeps."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from outlast.job.section import Section

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
