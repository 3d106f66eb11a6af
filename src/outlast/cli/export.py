"""``outlast export``: a run's newest checkpoint as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Run directory, e.g. runs/quickstart.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; default: RUN/model.")
    ] = None,
) -> None:
    """Write the newest checkpoint as a Hugging Face directory for from_pretrained.

    Works on any checkpoint, whatever number of processes wrote it.
    """
    from outlast.job import job_from_text
    from outlast.records import RunDirectory, read_run
    from outlast.train.export import export_model

    found = read_run(run)
    target = output or RunDirectory(run).model
    job = job_from_text(found.job_text, str(run / "job.toml"))
    step = export_model(job, RunDirectory(run), target)
    typer.echo(f"wrote the model of step {step} to {target}")
