"""``outlast convert``: a dense Hugging Face model with layers of fewer parameters."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.console import LINE_SECONDS, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.tensorize.hf.conversion import CalibrationText, ConvertedModel, Progress
    from outlast.tensorize.policy import Rank

WRITTEN_AS = ("factored", "merged", "dense")
DTYPES = ("float32", "bfloat16", "float16")


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Folder of a Hugging Face causal language model.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    *,
    form: Annotated[
        str, typer.Option(help="low_rank, tt, ttm, btt, monarch, cola (with --calibrate), ...")
    ] = "low_rank",
    rank: Annotated[
        str | None,
        typer.Option(
            help="An integer; a fraction (of the narrower side with two factors, else of the "
            "parameters); parameters=0.3 or flops=0.3. Default: 0.25; of monarch 4 blocks."
        ),
    ] = None,
    error: Annotated[
        float | None,
        typer.Option(help="Instead of a rank: the share of each weight that may be lost, as 0.1."),
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(help="Layers to replace, a pattern of names; may be repeated. Default: all."),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Layers that stay, likewise.")] = None,
    cores: Annotated[
        int | None, typer.Option(help="Modes on each side, of tt, ttm, tucker and cp.", min=1)
    ] = None,
    activation: Annotated[str, typer.Option(help="Between the factors of cola.")] = "silu",
    gainless: Annotated[
        bool, typer.Option("--gainless", help="Also replace layers that gain nothing by it.")
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text by which errors of weights are weighed, and judged."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens of the text to calibrate with; a quarter more is held out.")
    ] = 32768,
    window: Annotated[
        int | None, typer.Option(help="Tokens in a sequence; default: 512 or the model's most.")
    ] = None,
    distill_steps: Annotated[
        int, typer.Option(help="Steps in which each layer learns to answer as the dense one.")
    ] = 0,
    written_as: Annotated[
        str,
        typer.Option(
            "--as",
            help="factored (as the form is), merged (two factors where it can be) or dense "
            "(loads anywhere, saves nothing).",
        ),
    ] = "factored",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: as IN.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Replace a model in OUT.")] = False,
) -> None:
    """Replace a model's linear layers by ones with fewer parameters, nearest to them.

    Prints every layer with its error; with --calibrate also the perplexity before and after, on
    text that was held out. Downloads nothing. OUT appears whole or not at all.

    Example: outlast convert llama/ small/ --rank 0.5 --calibrate text.txt
    """
    import torch

    from outlast.errors import TensorizeError
    from outlast.tensorize.export import check_target, export_dense, export_factored
    from outlast.tensorize.hf.conversion import (
        NO_MATRICES,
        ConversionSettings,
        check,
        convert_model,
        load_dense,
        read_text,
    )

    if written_as not in WRITTEN_AS:
        raise TensorizeError(f"--as {written_as} is not one of {', '.join(WRITTEN_AS)}")
    if dtype is not None and dtype not in DTYPES:
        raise TensorizeError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    settings = ConversionSettings(
        form=form,
        rank=_rank(form, rank, error),
        match=tuple(match or ("*",)),
        exclude=tuple(exclude or ()),
        activation=activation,
        cores=cores,
        force=gainless,
        distill_steps=distill_steps,
    )
    check(settings, calibrates=calibrate is not None)
    if written_as == "dense" and form in NO_MATRICES:
        raise TensorizeError(
            f"--as dense needs a form that is a matrix, and {form} is none: use --as factored"
        )
    if target.resolve() == source.resolve():
        raise TensorizeError(f"IN and OUT are both {source}: give another folder to write to")
    check_target(target, overwrite=force)
    with _progress() as progress:
        progress("loading the model", 0, 1)
        model = load_dense(source)
        try:
            model = model.to(device)
        except (RuntimeError, AssertionError) as refusal:
            reason = " ".join(str(refusal).split())[:200]
            raise TensorizeError(f"--device {device} cannot be used: {reason}") from None
        text = (
            None
            if calibrate is None
            else read_text(calibrate, source, model.config, tokens=tokens, window=window)
        )
        done = convert_model(model, settings, text, progress)
        progress("writing the model", 0, 1)
        result = done.model if dtype is None else done.model.to(getattr(torch, dtype))
        if written_as == "dense":
            export_dense(result, target, tokenizer=source, overwrite=force)
        else:
            export_factored(
                result, target, merged=written_as == "merged", tokenizer=source, overwrite=force
            )
    _tell(done, text)
    _tell_files(source, target, written_as)


def _rank(form: str, rank: str | None, error: float | None) -> Rank:
    from outlast.errors import TensorizeError

    if rank is not None and error is not None:
        raise TensorizeError(f"--rank {rank} and --error {error}: give one of them")
    if error is not None:
        return f"error={error}"
    if rank is None:
        return 4 if form == "monarch" else 0.25
    if "," in rank:
        parts = rank.split(",")
        if all(part.strip().isdecimal() for part in parts):
            return tuple(map(int, parts))
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(rank)
    return rank


def _tell(done: ConvertedModel, text: CalibrationText | None) -> None:
    typer.echo(str(done.report))
    if text is None or done.perplexities is None:
        typer.echo("errors are the shares of the weights' norms that are lost")
        return
    typer.echo("errors are those of the layers' outputs on held-out text, as shares of their norms")
    before, after = done.perplexities
    unit = "byte" if text.tokens_are_bytes else "token"
    typer.echo(
        f"perplexity per {unit}, measured on {text.held_out.numel()} held-out {unit}s: "
        f"{before:.4g} -> {after:.4g}"
    )


def _tell_files(source: Path, target: Path, written_as: str) -> None:
    def size(folder: Path) -> str:
        return size_text(sum(path.stat().st_size for path in folder.glob("*.safetensors")))

    load = f'outlast.tensorize.export.load_factored("{target}")'
    if written_as == "dense":
        load = f'AutoModelForCausalLM.from_pretrained("{target}")'
    typer.echo(f"wrote {target}: {size(target)} of weights, {source} has {size(source)}")
    typer.echo(f"load it with {load}")


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Shows what is being done on stderr: a bar on a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    begun = last = time.monotonic()

    def lines(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            seconds = last - begun
            console.print(f"{what}: {done} of {total} after {seconds:.0f} s", soft_wrap=True)

    if not console.is_terminal:
        yield lines
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Bars(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=None)
        yield lambda what, done, total: bars.update(
            task, description=what, completed=done, total=total
        )
