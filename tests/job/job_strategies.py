"""Hypothesis strategies for whole jobs: every key of every section, within its limits."""

from __future__ import annotations

from typing import Annotated, Any

from hypothesis import strategies as st

from outlast.job import Job
from outlast.job.checks import impossible_combinations
from outlast.job.sections import WALL_TIME

ATOMS = (
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(
        ["\x7f", '"""', "'", "\\", "\r\n", "# no comment", "\U0001f600", "2024-01-01"]
    )
)
TABLES = st.dictionaries(
    st.text(),
    st.recursive(
        ATOMS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    ),
    max_size=4,
)
KEYS_OF_THEIR_OWN = {
    "run.name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True),
    "model.settings": TABLES.map(lambda table: {"model_type": "llama"} | table),
    # The settings are the model: the others and what depends on them would be a second one.
    "checkpoint.every_steps": st.integers(0) | st.just("auto"),
    "recover.hang_seconds": st.floats(0.0, allow_infinity=False) | st.just("auto"),
    "checkpoint.tiers": st.sampled_from(
        ["auto", ["shared"], ["memory", "shared"], ["memory", "peer", "disk", "shared"]]
    ),
    "tensorize.rank": st.integers(1)
    | st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)
    | st.sampled_from(["parameters=0.3", "flops=0.25", "error=1e-3"]),
    "energy.sources": st.lists(
        st.sampled_from(["auto", "gpu", "cpu", "memory", "node"])
        | st.text(min_size=1).map("file:{}".format),
        min_size=1,
        max_size=3,
    ),
    "slurm.nodes": st.lists(st.integers(1), min_size=1, max_size=4),
    "slurm.sizes": st.lists(st.integers(1), max_size=4),
    "slurm.filler_nodes": st.lists(st.integers(1), max_size=4),
    "slurm.wall_time": st.from_regex(WALL_TIME.removesuffix("$"), fullmatch=True),
    "slurm.partition": st.from_regex(r"[A-Za-z0-9_.,-]*", fullmatch=True),
    "slurm.account": st.from_regex(r"[A-Za-z0-9_.,-]*", fullmatch=True),
    "slurm.qos": st.from_regex(r"[A-Za-z0-9_.,-]*", fullmatch=True),
    "staging.burst_buffer_lines": st.lists(
        st.text().map(lambda text: "#BB " + "".join(filter(str.isprintable, text))), max_size=3
    ),
    "model.config": st.none(),
    "model.directory": st.none(),
    "model.module": st.none(),
    "model.arguments": st.just({}),
    "model.initialize": st.sampled_from(["auto", "scratch"]),
    "guard.audit": st.sampled_from(["auto", "off"])
    | st.floats(0.0, 100.0, exclude_min=True).map("{}%".format),
}


def _value(name: str, field: Any) -> st.SearchStrategy[Any]:
    if name in KEYS_OF_THEIR_OWN:
        return KEYS_OF_THEIR_OWN[name]
    annotation = field.annotation
    if float in (annotation, *getattr(annotation, "__args__", ())):
        limits: dict[str, Any] = {"allow_nan": False, "allow_infinity": False}
        for limit in field.metadata:
            for side, end in (("ge", "min"), ("gt", "min"), ("le", "max"), ("lt", "max")):
                if hasattr(limit, side):
                    limits[f"{end}_value"] = float(getattr(limit, side))
                    limits[f"exclude_{end}"] = side in ("gt", "lt")
        return st.floats(**limits)
    return st.from_type(Annotated[annotation, *field.metadata] if field.metadata else annotation)


def _tables() -> st.SearchStrategy[dict[str, dict[str, Any]]]:
    return st.fixed_dictionaries(
        {
            name: st.fixed_dictionaries(
                {"settings": KEYS_OF_THEIR_OWN["model.settings"]} if name == "model" else {},
                optional={
                    key: _value(f"{name}.{key}", field)
                    for key, field in section.annotation.model_fields.items()
                    if key != "settings"
                },
            )
            for name, section in Job.model_fields.items()
        }
    )


def _possible(tables: dict[str, dict[str, Any]]) -> Job:
    """The job of `tables`, with the defaults where they contradict each other."""
    job = Job.model_validate(tables)
    for section in (
        "schedule",
        "data",
        "parallel",
        "train",
        "checkpoint",
        "guard",
        "recover",
        "coding",
        "tensorize",
        "energy",
        "slurm",
        "staging",
    ):
        if impossible_combinations(job):
            job = Job.model_validate(tables := {**tables, section: {}})
    assert not impossible_combinations(job)
    return job


def jobs() -> st.SearchStrategy[Job]:
    """Valid jobs, with strange texts and nested tables in their settings."""
    return _tables().map(_possible)
