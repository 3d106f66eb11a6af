"""``outlast cluster status``: a chain's links, progress, waste by cause and time left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from outlast.cluster.chain.plan import ChainFiles
    from outlast.cluster.chain.status import ChainStatus, LinkStatus

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory, e.g. runs/quickstart; or a job file.")
]


def chain_of(run: Path) -> ChainFiles:
    """The chain of a run directory, or of the run that a job file names.

    Raises:
        JobError: The job file is wrong.
    """
    from outlast.cluster.chain.plan import chain_files
    from outlast.cluster.chain.planning import files_of

    if run.suffix == ".toml":
        from outlast.job import load_job

        return files_of(load_job(run))
    return chain_files(run.resolve())


def status(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how a chain is doing: links, progress, where the time went, when it will be done."""
    from outlast.cluster.chain.status import as_json as plain
    from outlast.cluster.chain.status import status_of

    found = status_of(chain_of(run))
    if as_json:
        print(json.dumps(plain(found), indent=1))
    else:
        print_status(found)


def print_status(found: ChainStatus) -> None:
    """The status as text."""
    from outlast.cli.figures import Column, output, print_table
    from outlast.cluster.durations import duration_text

    console = output()
    why = f": {found.reason}" if found.reason else ""
    of = f" of {found.steps} ({found.step / found.steps:.1%})" if found.steps else ""
    print(f"chain {found.chain} of run {found.name}: {found.outcome}{why}")
    print(f"saved up to step {found.step}{of}")
    if found.goodput is not None:
        print(f"goodput {found.goodput:.1%} of the links' time, measured")
        total = sum(found.seconds.values())
        for name, seconds in sorted(found.seconds.items(), key=lambda second: -second[1]):
            print(f"  {name:<26} {duration_text(seconds):>12}  {seconds / total:6.1%}")
    elif found.links:
        print("goodput not known: the run has kept no records of its time yet")
    if gaps := found.gaps_seconds:
        print(f"between links {sum(gaps) / len(gaps):.1f} s on average, {max(gaps):.1f} s at most")
    if found.left_seconds:
        print(f"about {duration_text(found.left_seconds)} left, predicted from the links so far")
    for job, state in found.jobs.items():
        waits = found.waits.get(job)
        print(f"job {job}: {state.lower()}{f': {waits}' if waits else ''}")
    if found.chosen:
        print(f"chosen: {found.chosen}")
    if found.links:
        rows = [
            [
                f"{link.number} filler" if link.role == "filler" else str(link.number),
                link.job,
                f"{link.nodes} x {link.processes // max(link.nodes, 1)}",
                "" if link.wait_seconds is None else f"{link.wait_seconds:.1f} s",
                _predicted(link),
                "" if link.seconds is None else duration_text(link.seconds),
                f"{link.first_step} to {link.last_step}",
                link.verdict,
                link.reason,
            ]
            for link in found.links
        ]
        heads = ["link", "job", "nodes", "waited", "predicted", "ran", "steps", "then", "why"]
        if all(link.predicted_wait_seconds is None for link in found.links):
            place = heads.index("predicted")
            del heads[place]
            rows = [row[:place] + row[place + 1 :] for row in rows]
        print_table(console, [Column(head) for head in heads], rows, "")


def _predicted(link: LinkStatus) -> str:
    """The wait that was predicted when the link was chosen."""
    from outlast.cluster.policies.words import hours

    if link.predicted_wait_seconds is None:
        return ""
    low, high = link.predicted_wait_seconds
    return f"{hours(low)} to {hours(high)}" if high else "no wait"
