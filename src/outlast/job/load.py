"""From a TOML file and ``section.key=value`` overrides to a checked `Job`.

The check is strict: an unknown key is refused with the nearest known one, and all problems of a
file are listed at once.

A `LoopJob` has the settings of a training loop that is not Outlast's own: a script's, or another
framework's. The model, its data and the steps are the script's business. What is left are the
sections on what Outlast does beside them, with the same keys and meanings.
"""

from __future__ import annotations

import contextlib
import difflib
import tomllib
from datetime import time
from importlib import resources
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from outlast.errors import JobError
from outlast.job.checks import contradictory_tiers, impossible_combinations
from outlast.job.section import Section, to_toml, toml_value
from outlast.job.sections import (
    CheckpointSection,
    EnergySection,
    GuardSection,
    Job,
    LogSection,
    RecoverSection,
    RunSection,
)
from outlast.paths import read_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set
    from pathlib import Path


_ONLY_OF_THE_TRAINER = {
    "run.deterministic": "the script calls torch.use_deterministic_algorithms itself",
    "checkpoint.keep_best": "the validation loss is the script's own",
    "checkpoint.replay": "the optimizer's steps are the script's own",
    "checkpoint.turns": "the saves of `outlast train` alone take turns",
    "checkpoint.turn_seconds": "the saves of `outlast train` alone take turns",
    "checkpoint.turn_order": "the saves of `outlast train` alone take turns",
    "checkpoint.turn_load": "the saves of `outlast train` alone take turns",
    "checkpoint.turn_ask_slurm": "the saves of `outlast train` alone take turns",
    "checkpoint.transfer_plan": "only `outlast train` follows a plan of transfers",
    "checkpoint.back_off": "only `outlast train` looks at other transfers",
    "recover.groups": "live groups are those of `outlast train`",
    "recover.lighthouse": "live groups are those of `outlast train`",
    "recover.heartbeat_seconds": "live groups are those of `outlast train`",
    "recover.fixed_order": "live groups are those of `outlast train`",
    "recover.hang_seconds": "phases of a step are known in `outlast train` alone",
    "energy.loss_target": "the validation loss is the script's own",
    "energy.prometheus_port": "only `outlast train` serves metrics",
}
"""Settings that such a loop cannot follow -> why not."""

_REMOVED = {
    "checkpoint.delta_chain": "is no setting any more, since every checkpoint is stored in full: "
    'remove it; with `outlast train`, checkpoint.replay = "bf16" keeps every step in less room',
}
"""Settings of earlier releases, of which 0 says what holds now -> what to do without them."""


class LoopJob(Section):
    """Settings of Outlast beside a training loop that is not its own."""

    run: RunSection = RunSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    recover: RecoverSection = RecoverSection()
    energy: EnergySection = EnergySection()
    log: LogSection = LogSection()


def loop_template(job: LoopJob) -> str:
    """`job` as commented TOML, without the settings that such a loop cannot follow."""
    return to_toml(job, left_out=_ONLY_OF_THE_TRAINER)


def decided_by_the_script(sections: Sequence[str]) -> str:
    """Why sections of a whole job are none of a `LoopJob`."""
    named = [f"[{section}]" for section in sections]
    if len(named) == 1:
        return (
            f"{named[0]} is a section of `outlast train`; here it is the script that decides what "
            f"it says: remove {named[0]}"
        )
    return (
        f"{', '.join(named[:-1])} and {named[-1]} are sections of `outlast train`; here it is the "
        "script that decides what they say: remove them, or write a file for loops with "
        "`outlast init --loop loop.toml`"
    )


def settings_of_others(job: LoopJob, unsure: Set[str] = frozenset()) -> list[str]:
    """One sentence for each setting that only `outlast train` could follow.

    Args:
        job: The settings.
        unsure: Sections of which nothing is said.
    """
    problems = []
    for name, reason in _ONLY_OF_THE_TRAINER.items():
        section, key = name.split(".")
        settings = getattr(job, section)
        value = getattr(settings, key)
        if section not in unsure and value != type(settings).model_fields[key].default:
            problems.append(f"{name} = {toml_value(value)} has no effect here: {reason}; remove it")
    if "recover" not in unsure and job.recover.mode == "live":
        problems.append(
            'recover.mode = "live" needs a loop that `outlast train` or outlast.recover.live runs; '
            'set "restart" or "off"'
        )
    return problems


J = TypeVar("J", bound=Section)
DEFAULT_JOB = "the embedded default job"

# Beside its own error, tomllib lets through those of numbers and nestings beyond Python's limits.
_NOT_TOML = (ValueError, RecursionError)
_LONGEST_VALUE = 80
_SHOULD = "it should be "
_RIGHT = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false, without quotes",
    "string_type": "text in quotes",
    "too_short": "a list of at least one",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "not_toml": "{right}",
    "tiers": "{right}",
}
"""What would be right instead, by the kind of pydantic error."""


def load_job(
    path: Path | None = None, overrides: list[str] | None = None, *, unsure: Set[str] = frozenset()
) -> Job:
    """Read `path` (the embedded default when None), apply `overrides`, check everything.

    Args:
        path: A TOML job file.
        overrides: Texts of the form ``section.key=value``; the value is TOML, and a word that is
            no TOML value is taken as a string, as is any word for a setting that is a text.
        unsure: Sections that somebody else decides: what is missing in them is not said.

    Raises:
        JobError: With one sentence for every problem found.
    """
    source = DEFAULT_JOB if path is None else str(path)
    tables = _parse(default_job_text(), source) if path is None else _read(path, "outlast init")
    return _build(Job, tables, source, overrides, unsure)


def job_from_text(text: str, source: str = "the job") -> Job:
    """Parse and check a job given as TOML text; raises JobError like `load_job`."""
    return _build(Job, _without_removed(_parse(text, source)), source)


def load_loop_job(
    path: Path | None = None,
    overrides: list[str] | None = None,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> LoopJob:
    """As `load_job`, for a training loop that is not Outlast's; all defaults when `path` is None.

    Args:
        path: A TOML job file.
        overrides: As in `load_job`.
        sections: Values by section and key, which replace the file's.

    Raises:
        JobError: With one sentence for every problem found.
    """
    source = "the settings" if path is None else str(path)
    tables = {} if path is None else _read(path, "outlast init --loop")
    for name, values in (sections or {}).items():
        tables[name] = {**tables.get(name, {}), **values}
    return _build(LoopJob, tables, source, overrides)


def loop_job_from_text(text: str, source: str = "the job") -> LoopJob:
    """Parse and check a `LoopJob` given as TOML text; raises JobError like `load_job`."""
    return _build(LoopJob, _without_removed(_parse(text, source)), source)


def settings_from_text(text: str, source: str = "the job") -> Job | LoopJob:
    """Parse and check the settings of a run, whoever trains in it; raises JobError like `load_job`.

    A run keeps all sections of its job: one that has those of a `LoopJob` alone is one.
    """
    tables = _without_removed(_parse(text, source))
    if tables.keys() <= LoopJob.model_fields.keys():
        return _build(LoopJob, tables, source)
    return _build(Job, tables, source)


def default_job_text() -> str:
    """The embedded default job, as commented TOML text."""
    return (resources.files("outlast.job") / "quickstart.toml").read_text(encoding="utf-8")


def _read(path: Path, writer: str) -> dict[str, Any]:
    """The tables of a file such as the command `writer` writes."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        problem = f"the file does not exist; `{writer}` writes one to start from"
    except UnicodeDecodeError as error:
        problem = f"the file is not UTF-8 text (byte {error.start}); save it as UTF-8"
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}; give the path of a job file"
    else:
        return _parse(text, str(path))
    raise JobError([problem], str(path))


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except _NOT_TOML as error:
        raise JobError([f"not valid TOML: {error}"], source) from None


def _without_removed(tables: dict[str, Any], *, only_zeros: bool = False) -> dict[str, Any]:
    """`tables` without the settings of earlier releases, all or those that say what holds now.

    What a run has written of its settings stays readable, whatever they were.
    """
    for section, key in (name.split(".") for name in _REMOVED):
        table = tables.get(section)
        if isinstance(table, dict) and not (only_zeros and table.get(key)):
            table.pop(key, None)
    return tables


def _replace_model(tables: dict[str, Any], overrides: Sequence[str]) -> None:
    """Leave out the file's model where an override names another one."""
    named = {override.partition("=")[0].replace(" ", "") for override in overrides}
    model = tables.get("model")
    if isinstance(model, dict) and named & {"model.config", "model.directory", "model.module"}:
        for key in ("config", "directory", "module", "settings", "arguments"):
            model.pop(key, None)


def _apply_override(
    tables: dict[str, Any], override: str, kind: type[Section], source: str
) -> list[str]:
    key, equals, value = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        return [
            f"the job is {source} already: leave out {override}"
            if override.endswith(".toml")
            else f"the override `{override}` is not of the form section.key=value"
        ]
    if any("\ud800" <= character <= "\udfff" for character in override):
        return [f"the override {override!a} is not UTF-8 text; rename the file that it names"]
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return [f"the override `{override}` goes into `{part}`, which is not a section"]
    table[parts[-1]] = _value_of(value.strip(), parts, kind)
    return []


def _value_of(text: str, parts: list[str], kind: type[Section]) -> Any:
    """The value that a person means who types `text`, without quotes and brackets for TOML.

    Args:
        text: As typed.
        parts: Name of the setting.
        kind: Whose settings these are.
    """
    annotation: Any = kind
    for part in parts:
        fields = getattr(annotation, "model_fields", {})
        annotation = fields[part].annotation if part in fields else None
    found: Any = text
    with contextlib.suppress(*_NOT_TOML):
        document = tomllib.loads(f"value = {text}")
        # A text of several lines may happen to be a TOML document.
        found = document["value"] if len(document) == 1 else text
    if annotation is str and not isinstance(found, str | list | dict):
        # 10:00:00 is a time of day in TOML, and 90 a number.
        return text
    if get_origin(annotation) is not list or isinstance(found, list):
        return found
    return [found] if isinstance(found, str) or get_args(annotation) != (str,) else found


def _build(
    kind: type[J],
    tables: dict[str, Any],
    source: str,
    overrides: list[str] | None = None,
    unsure: Set[str] = frozenset(),
) -> J:
    _replace_model(tables, overrides or [])
    problems = [
        text
        for override in overrides or []
        for text in _apply_override(tables, override, kind, source)
    ]
    try:
        job = kind.model_validate(_without_removed(tables, only_zeros=True))
    except ValidationError as error:
        details = error.errors()
        foreign = [detail for detail in details if _is_of_the_trainer(detail, kind)]
        if foreign:
            problems.append(decided_by_the_script([str(detail["loc"][0]) for detail in foreign]))
        problems += _sentences([detail for detail in details if detail not in foreign], kind)
        # Impossible combinations in the sections that have no problem themselves.
        wrong = {detail["loc"][0] for detail in details}
        right = {name: table for name, table in tables.items() if name not in wrong}
        if not wrong <= kind.model_fields.keys():
            # A misspelt section is missing elsewhere: say nothing about those that are not there.
            wrong |= kind.model_fields.keys() - tables.keys()
        problems += _impossible(kind.model_validate(right), {str(name) for name in wrong})
        raise JobError(problems, source) from None
    problems += _impossible(job, unsure)
    if problems:
        raise JobError(problems, source)
    return job


def _impossible(job: Section, unsure: Set[str]) -> list[str]:
    if isinstance(job, LoopJob):
        sections = job.checkpoint, job.recover
        tiers = [] if {"checkpoint", "recover"} & unsure else [*contradictory_tiers(*sections)]
        return [*settings_of_others(job, unsure), *tiers]
    assert isinstance(job, Job)
    return impossible_combinations(job, unsure)


def _is_of_the_trainer(detail: Any, kind: type[Section]) -> bool:
    """True if an error is a section that a loop's settings have no use for."""
    where = detail["loc"]
    return (
        kind is LoopJob
        and len(where) == 1
        and where[0] in Job.model_fields.keys() - {*LoopJob.model_fields}
    )


def _sentences(details: Sequence[Any], kind: type[Section]) -> list[str]:
    """One sentence for each value that is wrong, also where several kinds are allowed for it."""
    found: dict[str, str] = {}
    for detail in details:
        sentence = _sentence(detail, kind)
        said, _, right = sentence.partition(_SHOULD)
        # An error of each kind that a value may have: together they say what it may be.
        found[said] = f"{found[said]} or {right}" if right and said in found else sentence
    return list(found.values())


def _sentence(detail: Any, kind: type[Section]) -> str:
    """One sentence from one pydantic error: the setting, its value, and what would be right."""
    where, value = [str(part) for part in detail["loc"]], detail["input"]
    if len(where) > 2 and _is_union(where, kind):
        del where[2:]
    if detail["type"] == "extra_forbidden":
        return _unknown_key(where, kind)
    if detail["type"] == "not_toml":
        where += detail["ctx"]["path"]
        for part in detail["ctx"]["path"]:
            value = value[int(part)] if isinstance(value, list) else value[part]
    name = ".".join(where)
    shown = str(value) if isinstance(value, time) else toml_value(value)
    if len(shown) > _LONGEST_VALUE:
        shown = shown[: _LONGEST_VALUE - 3] + "..."
    if detail["type"] in ("model_type", "dict_type"):
        return f"{name} = {shown} must be a section: write [{name}] and its keys below it"
    return f"{name} = {shown} is not possible: {_SHOULD}{_right(detail, where)}"


def _is_union(where: list[str], kind: type[Section]) -> bool:
    """True if a setting may have values of several kinds, whose names pydantic adds to its own."""
    section: Any = kind.model_fields[where[0]].annotation if where[0] in kind.model_fields else None
    field = getattr(section, "model_fields", {}).get(where[1])
    return field is not None and get_origin(field.annotation) in (Union, UnionType)


def _right(detail: Any, where: list[str]) -> str:
    """Value that one pydantic error asks for, in words."""
    context = detail.get("ctx", {})
    match detail["type"]:
        case "literal_error":
            return str(context["expected"]).replace("'", '"')
        case "int_type" if isinstance(detail["input"], float) and detail["input"].is_integer():
            return f"a whole number, written {int(detail['input'])}"
        case "list_type":
            field = Job.model_fields[where[0]].annotation.model_fields[where[1]]  # type: ignore[union-attr]
            if get_args(field.annotation) == (str,):
                return 'a list of texts such as ["a.txt", "b.txt"]'
            return "a list such as [2, 4]"
        case "string_type" if isinstance(detail["input"], time):
            return f'text in quotes, such as "{detail["input"]}"'
        case "string_pattern_mismatch":
            field = Job.model_fields[where[0]].annotation.model_fields[where[1]]  # type: ignore[union-attr]
            return str(field.json_schema_extra["form"])
        case kind if kind in _RIGHT:
            return _RIGHT[kind].format_map(context)
        case _:
            return str(detail["msg"])


def _unknown_key(where: list[str], kind: type[Section]) -> str:
    name, section = ".".join(where), kind
    if name in _REMOVED:
        return f"{name} {_REMOVED[name]}"
    for part in where[:-1]:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type)
        section = annotation
    known = list(section.model_fields)
    near = difflib.get_close_matches(where[-1], known, n=1)
    elsewhere = [
        f"{other}.{where[-1]}"
        for other, field in kind.model_fields.items()
        if isinstance(field.annotation, type) and where[-1] in field.annotation.model_fields
    ]
    what = "key" if len(where) > 1 else "section"
    text = f"{name} is not a known {what}"
    if near:
        return f"{text}; did you mean {'.'.join([*where[:-1], near[0]])}?"
    if elsewhere:
        return f"{text}; did you mean {elsewhere[0]}?"
    return f"{text}; known here are {', '.join(known)}"
