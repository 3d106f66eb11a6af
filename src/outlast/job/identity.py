"""What makes two starts the same run, and what differs between two jobs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from outlast.job.section import Section


def identity(job: Section) -> dict[str, Any]:
    """The settings that decide which numbers come out, as ``{"section.key": value}``.

    Two jobs with equal identity produce the same samples in the same order, the same schedule and
    (at equal world size, in deterministic mode) the same bits.
    """
    found = {}
    for section_name in type(job).model_fields:
        section: Section = getattr(job, section_name)
        for key, field in type(section).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("identity"):
                found[f"{section_name}.{key}"] = getattr(section, key)
    return found


def fingerprint(job: Section) -> str:
    """A short hash (16 hexadecimal digits) of the job's identity."""
    return hashlib.sha256(_canonical(identity(job)).encode()).hexdigest()[:16]


def differences(old: Section, new: Section) -> list[str]:
    """One line ``section.key: old -> new`` for every identity setting that differs."""
    before, after = identity(old), identity(new)
    return [
        f"{key}: {before[key]!r} -> {after[key]!r}"
        for key in before
        if _canonical(before[key]) != _canonical(after[key])
    ]


def _canonical(value: Any) -> str:
    # One text for both functions: as Python values, true would equal 1 and the fingerprints differ.
    return json.dumps(value, sort_keys=True)
