"""``outlast init``: write a job file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.errors import OutlastError


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("job.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented job file with every setting: the embedded default, ready to change."""
    from outlast.job import load_job, to_toml
    from outlast.records import replace_file

    if path.exists() and not force:
        raise OutlastError(f"{path} exists; give another name or --force to replace it")
    if not path.parent.is_dir():
        raise OutlastError(f"the folder {path.parent} does not exist; make it first")
    job = load_job()
    renamed = job.model_copy(update={"run": job.run.model_copy(update={"name": path.stem})})
    replace_file(path, to_toml(renamed).encode())
    typer.echo(f"wrote {path}; train with: outlast train {path}")
