"""Write a plan out for a framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from outlast.errors import PlanError
from outlast.plan.emit.huggingface import accelerate_files, deepspeed_files
from outlast.plan.emit.megatron import megatron_files
from outlast.plan.emit.outlast_job import only_in_outlast, outlast_files
from outlast.plan.emit.settings import EmitSettings
from outlast.plan.emit.slurm import batch_files
from outlast.plan.emit.targets import problem, target_named, unwritten
from outlast.plan.emit.torchtitan import torchtitan_files

if TYPE_CHECKING:
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.transformer import Transformer

Writer: TypeAlias = "Callable[[Transformer, Configuration, Cluster, EmitSettings], dict[str, str]]"

_WRITERS: Mapping[str, Writer] = {
    "outlast": outlast_files,
    "torchtitan": torchtitan_files,
    "megatron": megatron_files,
    "deepspeed": deepspeed_files,
    "accelerate": accelerate_files,
}


def emitted(
    target: str,
    model: Transformer,
    run: Configuration,
    cluster: Cluster,
    settings: EmitSettings | None = None,
) -> dict[str, str]:
    """Text of every file that `emit` writes, by its name below the folder.

    Args:
        target: Name in `outlast.plan.emit.TARGETS`; "sbatch" also gives the files of what it
            launches.
        model: What is trained.
        run: How.
        cluster: Where.
        settings: What a plan does not say; defaults where None.

    Raises:
        PlanError: The target cannot express the run or its mechanisms, or it does not fit the
            cluster; one sentence.
        JobError: An override of the Outlast job is not possible.
    """
    settings = settings or EmitSettings()
    target_named(target)
    framework = settings.launches if target == "sbatch" else target
    if framework not in _WRITERS:
        raise PlanError(f"launches = {framework!r} is none of {', '.join(_WRITERS)}")
    sentence = problem(framework, model, run) or unwritten(framework, model)
    if sentence is None and framework != "outlast":
        title = target_named(framework).title
        sentence = only_in_outlast(settings.mechanisms, title) or None
    if sentence is not None:
        raise PlanError(sentence)
    files = _WRITERS[framework](model, run, cluster, settings)
    if target == "sbatch":
        files = {**batch_files(model, run, cluster, settings), **files}
    return files


def emit(
    target: str,
    model: Transformer,
    run: Configuration,
    cluster: Cluster,
    *,
    out: Path,
    settings: EmitSettings | None = None,
) -> list[Path]:
    """Write a plan out for a framework, all of it or nothing.

    Args:
        target: Name in `outlast.plan.emit.TARGETS`.
        model: What is trained.
        run: How.
        cluster: Where.
        out: Folder; made where it is missing.
        settings: What a plan does not say; defaults where None.

    Returns:
        The files that were written.

    Raises:
        PlanError: What `emitted` raises, or a file is there and differs, or cannot be written.
        JobError: An override of the Outlast job is not possible.
    """
    from outlast.records import replace_file

    settings = settings or EmitSettings()
    files = emitted(target, model, run, cluster, settings)
    paths = {out / name: text.encode() for name, text in files.items()}
    try:
        for path, content in paths.items():
            if path.exists() and not settings.replace and path.read_bytes() != content:
                raise PlanError(
                    f"{path} exists and differs: give another folder, or replace = true"
                )
        for path, content in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
            if path.suffix in (".sh", ".sbatch"):
                path.chmod(0o755)
    except OSError as error:
        raise PlanError(f"{error.filename or out} cannot be written: {error.strerror}") from None
    return list(paths)
