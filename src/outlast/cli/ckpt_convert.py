"""``outlast ckpt export`` and ``outlast ckpt import``: other programs' checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from outlast.checkpoint.convert import Converted

Step = Annotated[
    int | None, typer.Option("--step", help="Which step; default: the newest whole one.", min=0)
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of words.")]


def export(
    store: Annotated[str, typer.Argument(help="Store: a directory or fsspec URL.")],
    target: Annotated[Path, typer.Argument(help="File or folder to make; must not exist.")],
    *,
    kind: Annotated[
        str,
        typer.Option("--to", help="torch (a file), or safetensors, dcp or megatron (a folder)."),
    ] = "safetensors",
    step: Step = None,
    prefix: Annotated[
        str, typer.Option(help="Only names that begin with it, without it, e.g. model.")
    ] = "",
    json: AsJson = False,
) -> None:
    """Write a version of a store in another program's format.

    Example: outlast ckpt export runs/a/checkpoints model/ --prefix model.
    """
    from outlast.checkpoint.convert import export_checkpoint

    done = export_checkpoint(store, target, kind=kind, step=step, prefix=prefix)
    _tell(done, f"wrote step {done.step} of {store} to {target}", json=json)


def import_(
    source: Annotated[Path, typer.Argument(help="File or folder of the other program.")],
    store: Annotated[str, typer.Argument(help="Store: a directory or fsspec URL.")],
    *,
    kind: Annotated[
        str, typer.Option("--from", help="dcp, torch, safetensors, deepspeed, megatron, or auto.")
    ] = "auto",
    step: Annotated[
        int | None,
        typer.Option("--step", help="Steps done; default: what the source says, else 0.", min=0),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="Put before every name, e.g. model. for {'model': model}.")
    ] = "",
    json: AsJson = False,
) -> None:
    """Copy another program's checkpoint into a store, as its newest version.

    Reads folders of torch.distributed.checkpoint, files of torch.save, Hugging Face safetensors,
    DeepSpeed's ZeRO 0 to 2 and Megatron-core's torch_dist. Nothing that a checkpoint contains is
    executed.

    Example: outlast ckpt import pretrained/ ckpt/ --prefix model.
    """
    from outlast.checkpoint.convert import import_checkpoint

    done = import_checkpoint(source, store, step=step, kind=kind, prefix=prefix)
    _tell(done, f"imported {source} into {store} as step {done.step}", json=json)


def _tell(done: Converted, what: str, *, json: bool) -> None:
    from outlast.cli.figures import print_json

    if json:
        print_json(done)
        return
    typer.echo(f"{what}: {done.tensors} tensors, {done.bytes / 1e6:.1f} MB")
    for note in done.notes:
        typer.echo(note)
