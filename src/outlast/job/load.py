"""From a TOML file and ``section.key=value`` overrides to a checked `Job`.

The check is strict: an unknown key is refused with the nearest known one, and all problems of a
file are listed at once.
"""

from __future__ import annotations

import difflib
import tomllib
from importlib import resources
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from outlast.errors import JobError
from outlast.job.checks import impossible_combinations
from outlast.job.sections import Job, Section

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_JOB = "the embedded default job"


def load_job(path: Path | None = None, overrides: list[str] | None = None) -> Job:
    """Read `path` (the embedded default when None), apply `overrides`, check everything.

    Args:
        path: A TOML job file.
        overrides: Texts of the form ``section.key=value``; the value is TOML, and a word that is
            no TOML value is taken as a string.

    Raises:
        JobError: With one sentence for every problem found.
    """
    source = DEFAULT_JOB if path is None else str(path)
    tables = _read(path, source)
    problems = [text for each in overrides or [] for text in _apply_override(tables, each)]
    return _build(tables, problems, source)


def job_from_text(text: str, source: str = "the job") -> Job:
    """Parse and check a job given as TOML text; raises JobError like `load_job`."""
    return _build(_parse(text, source), [], source)


def default_job_text() -> str:
    """The embedded default job, as commented TOML text."""
    return (resources.files("outlast.job") / "quickstart.toml").read_text(encoding="utf-8")


def _read(path: Path | None, source: str) -> dict[str, Any]:
    if path is None:
        return _parse(default_job_text(), source)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        message = "the file does not exist; `outlast init` writes one to start from"
        raise JobError([message], source) from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobError([f"the file cannot be read: {error}"], source) from None
    return _parse(text, source)


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError([f"not valid TOML: {error}"], source) from None


def _apply_override(tables: dict[str, Any], override: str) -> list[str]:
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        return [f"the override `{override}` is not of the form section.key=value"]
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return [f"the override `{override}` goes into `{part}`, which is not a section"]
    table[parts[-1]] = _toml_value(value.strip())
    return []


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(tables: dict[str, Any], problems: list[str], source: str) -> Job:
    try:
        job = Job.model_validate(tables)
    except ValidationError as error:
        problems = problems + [_sentence(detail) for detail in error.errors()]
        raise JobError(problems, source) from None
    problems = problems + impossible_combinations(job)
    if problems:
        raise JobError(problems, source)
    return job


def _sentence(detail: Any) -> str:
    """One sentence from one pydantic error: the setting, its value, and what would be right."""
    where = [str(part) for part in detail["loc"]]
    name, value = ".".join(where), detail["input"]
    if detail["type"] == "extra_forbidden":
        return _unknown_key(where)
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{name} = {value!r} must be a section: write [{name}] and its keys below it"
    message = detail["msg"].removeprefix("Input ").removeprefix("should ")
    return f"{name} = {value!r} is not possible: it should {message}"


def _unknown_key(where: list[str]) -> str:
    section: type[Section] = Job
    for part in where[:-1]:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type)
        section = annotation
    known = list(section.model_fields)
    near = difflib.get_close_matches(where[-1], known, n=1)
    elsewhere = [
        f"{name}.{where[-1]}"
        for name, field in Job.model_fields.items()
        if isinstance(field.annotation, type) and where[-1] in field.annotation.model_fields
    ]
    kind = "key" if len(where) > 1 else "section"
    text = f"{'.'.join(where)} is not a known {kind}"
    if near:
        return f"{text}; did you mean {'.'.join([*where[:-1], near[0]])}?"
    if elsewhere:
        return f"{text}; did you mean {elsewhere[0]}?"
    return f"{text}; known here are {', '.join(known)}"
