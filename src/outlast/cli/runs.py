"""``outlast export``, ``report``, ``resize`` of a run, and ``convert`` of a model on disk."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import LINE_SECONDS, print_json, size_text
from outlast.cli.options import AsJson
from outlast.errors import RecoverError, TensorizeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outlast.records import Run, RunDirectory
    from outlast.tensorize.conversion import CalibrationText, ConvertedModel, Progress
    from outlast.tensorize.policy import Rank


def export(
    run: Annotated[Path, typer.Argument(help="Run directory, e.g. runs/quickstart.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; default: RUN/model.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Write the newest checkpoint as a Hugging Face directory for from_pretrained.

    Works on any checkpoint, whatever number of processes wrote it.

    --json: {"run", "step", "folder", "bytes"}, the bytes of weights.
    """
    from outlast.job import job_from_text
    from outlast.records import RunDirectory, read_run
    from outlast.train.export import export_model

    found = read_run(run)
    target = output or RunDirectory(run).model
    job = job_from_text(found.job_text, str(run / "job.toml"))
    step = export_model(job, RunDirectory(run), target)
    if json:
        print_json({"run": run, "step": step, "folder": target, "bytes": _weight_bytes(target)})
    else:
        typer.echo(f"wrote the model of step {step} to {target}")


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN ...", help="Run directories; several are laid side by side."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="HTML file to write; default: RUN/report.html, or report.html for several runs.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show runs as pictures: an HTML file that needs no network.

    With --output, and for several runs, the file holds all that it needs (5 MB); RUN/report.html
    loads plotly from the folder .report beside the runs, which their reports share.

    Loss, throughput, step times, where the time went, events, attempts, warnings, the model's
    sample and the job. Works while the run continues and after it was killed.

    --json: {"file", "bytes", "runs": [{"run", "name", "outcome", "step", "steps", "warnings"}]}.
    """
    from outlast.records import AttemptStarted, Warned, read_run
    from outlast.report import write_report

    file = write_report(runs, output)
    if not json:
        typer.echo(file)
        return
    shown = []
    for path in dict.fromkeys(runs):
        found = read_run(path)
        done, started = found.steps(), found.of(AttemptStarted)
        shown.append(
            {
                "run": path,
                "name": found.name,
                "outcome": found.attempts[-1].outcome if found.attempts else "not started",
                "step": done[-1][1].step if done else 0,
                "steps": started[-1][1].total_steps if started else None,
                "warnings": [event.message for _, event in found.of(Warned)],
            }
        )
    print_json({"file": file, "bytes": file.stat().st_size, "runs": shown})


_LOOK_SECONDS = 0.2


_RESTART_SECONDS = 5.0


def resize(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run that is running.")],
    processes: Annotated[
        int, typer.Option("--nproc", "--processes", "-n", min=1, help="How many continue.")
    ],
    wait: Annotated[
        float,
        typer.Option("--wait", min=0.0, help="Seconds to wait until they do; 0: do not wait."),
    ] = 120.0,
    json: AsJson = False,
) -> None:
    """Let a run on this machine continue with another number of processes, without losing a step.

    All processes stop at the next step boundary; so many as wished for start, take the state from
    memory (or from a checkpoint made for it), and do the next step with the same global batch. The
    run must have been started by ``outlast train --nproc``.

    --json: {"run", "processes", "before", "state", "step"}; the state is unchanged, continues (from
    this step), or asked (with --wait 0).
    """
    from outlast.records import RunDirectory, read_run
    from outlast.recover.resize import ask, is_wanted

    directory = RunDirectory(run)
    _check(directory, processes)
    before = read_run(run).attempts[-1]

    def tell(state: str, step: int | None, words: str) -> None:
        facts = {"run": run, "processes": processes, "before": before.world_size}
        if json:
            print_json({**facts, "state": state, "step": step})
        else:
            print(f"{run} {words}")

    if before.world_size == processes:
        tell("unchanged", None, f"has {processes} processes already")
        return
    ask(run, processes)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        found = read_run(run)
        for attempt in found.attempts:
            ready = attempt.first_step is not None and attempt.world_size == processes
            if attempt.number > before.number and ready:
                step = attempt.first_step
                tell("continues", step, f"continues from step {step} with {processes} processes")
                return
        _refuse_ended(run, found)
        time.sleep(_LOOK_SECONDS)
    if not wait:
        tell("asked", None, f"continues with {processes} processes after its present step")
    elif is_wanted(run):
        raise RecoverError(
            f"{run} has not stopped within {wait:g} s (--wait); it will at its next step boundary"
        )
    else:
        raise RecoverError(f"{run} has stopped, but was not ready within {wait:g} s (--wait)")


def _check(directory: RunDirectory, processes: int) -> None:
    """Refuse what the run could not do.

    Raises:
        OutlastError: With the reason.
    """
    import torch

    from outlast.job import job_from_text
    from outlast.records import AttemptStarted, read_run
    from outlast.train.preflight import preflight

    if not directory.exists():
        raise RecoverError(
            f"{directory.path} is no run directory; give that of a run, e.g. runs/quickstart"
        )
    found = read_run(directory.path)
    _refuse_ended(directory.path, found)
    # A run that is just being restarted is unlocked for a moment.
    deadline = time.monotonic() + _RESTART_SECONDS
    while not directory.lock().is_held():
        if time.monotonic() > deadline:
            raise RecoverError(
                f"{directory.path} is not running; `outlast train --nproc N` starts it with N "
                "processes"
            )
        time.sleep(_LOOK_SECONDS)
    started = found.of(AttemptStarted)
    if not started:
        raise RecoverError(f"{directory.path} is being set up; try again when it trains")
    launch = started[-1][1].launch
    if launch != "nproc":
        if launch == "live":
            raise RecoverError(
                f"{directory.path} trains by live groups; stop it, and start it again with "
                f"recover.groups={processes} (SIGTERM stops it without losing a step)"
            )
        how = {"alone": "by outlast train without --nproc"}.get(launch, f"by {launch}")
        raise RecoverError(
            f"{directory.path} was started {how}, where nobody can start more processes; stop it "
            f"and start it again with `outlast train --nproc {processes}` "
            "(SIGTERM stops it without losing a step)"
        )
    devices = torch.cuda.device_count()
    if devices and processes > devices:
        raise RecoverError(
            f"--nproc {processes} exceeds the {devices} GPUs that this machine shows"
        )
    preflight(job_from_text(directory.job_file.read_text(encoding="utf-8")), processes)


def _refuse_ended(run: Path, found: Run) -> None:
    """Raise where nothing continues any more, so that nobody would see the wish."""
    from outlast.records import AttemptEnded
    from outlast.recover.resize import RESIZE

    newest = found.attempts[-1].number if found.attempts else 0
    for record, ended in found.of(AttemptEnded):
        if record.attempt == newest and ended.reason != RESIZE:
            raise RecoverError(
                f"{run} has ended ({ended.outcome}); there is nothing to resize. "
                "`outlast train --nproc N` starts a run with N processes"
            )


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
        int, typer.Option(min=2, help="Tokens to calibrate with; a quarter more is held out.")
    ] = 32768,
    window: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens in a sequence; default: 512 or the model's most."),
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
    json: AsJson = False,
) -> None:
    """Replace a model's linear layers by ones with fewer parameters, nearest to them.

    Prints every layer with its error; with --calibrate also the perplexity before and after, on
    text that was held out. Downloads nothing. OUT appears whole or not at all.

    Example: outlast convert llama/ small/ --rank 0.5 --calibrate text.txt

    --json: {"source", "folder", "as", "bytes", "source_bytes", "error_of", "perplexity", "kept",
    "replaced", "refused", "parameters", "dense_parameters"}; errors, perplexities are measured.
    """
    from outlast.tensorize import conversion

    _check_kinds(written_as, dtype)
    settings = conversion.ConversionSettings(
        form=form,
        rank=_rank(form, rank, error),
        match=tuple(match or ("*",)),
        exclude=tuple(exclude or ()),
        activation=activation,
        cores=cores,
        force=gainless,
        distill_steps=distill_steps,
    )
    conversion.check(settings, calibrates=calibrate is not None)
    _check_output(source, target, form, written_as, force)
    text = None
    with _progress() as progress:
        progress("loading the model", 0, 1)
        model = _on(conversion.load_dense(source), device)
        if calibrate is not None:
            text = conversion.read_text(
                calibrate, source, model.config, tokens=tokens, window=window
            )
        done = conversion.convert_model(model, settings, text, progress)
        progress("writing the model", 0, 1)
        _write(done.model, target, written_as, dtype=dtype, tokenizer=source, overwrite=force)
    _tell(done, text, source, target, written_as, json=json)


def _check_kinds(written_as: str, dtype: str | None) -> None:
    for option, value, known in (("as", written_as, WRITTEN_AS), ("dtype", dtype, DTYPES)):
        if value is not None and value not in known:
            raise TensorizeError(f"--{option} {value} is not one of {', '.join(known)}")


def _check_output(source: Path, target: Path, form: str, written_as: str, force: bool) -> None:
    from outlast.job.checks import NO_MATRICES
    from outlast.tensorize.export import check_target

    if written_as == "dense" and form in NO_MATRICES:
        raise TensorizeError(
            f"--as dense needs a form that is a matrix, and {form} is none: use --as factored"
        )
    if target.resolve() == source.resolve():
        raise TensorizeError(f"IN and OUT are both {source}: give another folder to write to")
    check_target(target, overwrite=force)


def _on(model, device: str):  # type: ignore[no-untyped-def]
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TensorizeError(f"--device {device} cannot be used: {reason}") from None


def _write(  # type: ignore[no-untyped-def]
    model,
    target: Path,
    written_as: str,
    *,
    dtype: str | None,
    tokenizer: Path,
    overwrite: bool,
) -> None:
    import torch

    from outlast.tensorize.export import export_dense, export_factored

    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    if written_as == "dense":
        export_dense(model, target, tokenizer=tokenizer, overwrite=overwrite)
    else:
        merged = written_as == "merged"
        export_factored(model, target, merged=merged, tokenizer=tokenizer, overwrite=overwrite)


def _rank(form: str, rank: str | None, error: float | None) -> Rank:
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


def _document(
    done: ConvertedModel,
    text: CalibrationText | None,
    source: Path,
    target: Path,
    written_as: str,
) -> dict[str, Any]:
    perplexity = None
    if text is not None and done.perplexities is not None:
        perplexity = {
            "kind": "measured",
            "unit": "byte" if text.tokens_are_bytes else "token",
            "held_out": text.held_out.numel(),
            "before": done.perplexities[0],
            "after": done.perplexities[1],
        }
    return {
        "source": source,
        "folder": target,
        "as": written_as,
        "bytes": _weight_bytes(target),
        "source_bytes": _weight_bytes(source),
        "error_of": "weights" if perplexity is None else "outputs",
        "perplexity": perplexity,
        **done.report.to_dict(),
    }


def _tell(
    done: ConvertedModel,
    text: CalibrationText | None,
    source: Path,
    target: Path,
    written_as: str,
    *,
    json: bool,
) -> None:
    if json:
        print_json(_document(done, text, source, target, written_as))
        return
    typer.echo(str(done.report))
    if text is None or done.perplexities is None:
        typer.echo("errors are the shares of the weights' norms that are lost")
    else:
        typer.echo(
            "errors are those of the layers' outputs on held-out text, as shares of their norms"
        )
        before, after = done.perplexities
        unit = "byte" if text.tokens_are_bytes else "token"
        typer.echo(
            f"perplexity per {unit}, measured on {text.held_out.numel()} held-out {unit}s: "
            f"{before:.4g} -> {after:.4g}"
        )

    sizes = [size_text(_weight_bytes(folder)) for folder in (target, source)]
    load = f'outlast.tensorize.export.load_factored("{target}")'
    if written_as == "dense":
        load = f'AutoModelForCausalLM.from_pretrained("{target}")'
    typer.echo(f"wrote {target}: {sizes[0]} of weights, {source} has {sizes[1]}")
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
