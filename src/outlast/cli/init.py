"""``outlast init``: write a job file to start from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from outlast.errors import OutlastError


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("job.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    loop: Annotated[
        bool, typer.Option("--loop", help="For outlast.Run and the adapters: what they follow.")
    ] = False,
) -> None:
    """Write a commented job file with every setting: the embedded default, ready to change.

    With --loop it has the settings that outlast.Run and the adapters of other frameworks follow.
    """
    from outlast.job import load_job, load_loop_job, loop_template, to_toml
    from outlast.records import replace_file

    if path.is_dir():
        raise OutlastError(f"{path} is a folder; give the name of a file, e.g. {path / 'job.toml'}")
    if path.exists() and not force:
        raise OutlastError(f"{path} exists; give another name or --force to replace it")
    if not path.parent.is_dir():
        raise OutlastError(f"the folder {path.parent} does not exist; make it first")
    # A run's name allows fewer characters than a file's.
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "run"
    override = [f"run.name={json.dumps(name)}"]
    text = (
        loop_template(load_loop_job(None, override)) if loop else to_toml(load_job(None, override))
    )
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise OutlastError(f"{path} cannot be written: {error.strerror}") from None
    use = f'outlast.Run("{path}", ...) in your loop' if loop else f"outlast train {path}"
    typer.echo(f"wrote {path}; train with: {use}")
