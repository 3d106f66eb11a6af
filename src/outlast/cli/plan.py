"""``outlast plan``: what a run will take, before it runs; every figure with interval and source."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import (
    Column,
    count_words,
    output,
    print_facts,
    print_json,
    print_table,
    seconds_words,
)
from outlast.cli.options import AsJson, Layout, PlanOptions, with_options
from outlast.cli.plan_calibrate import calibrate
from outlast.cli.plan_explain import compare, explain
from outlast.cli.plan_pareto import check, emit, pareto, targets
from outlast.cli.plan_rank import rank

if TYPE_CHECKING:
    from outlast.plan.goodput import Finish, Goodput
    from outlast.plan.reliability import Scenario
    from outlast.plan.simulate import Simulated


def clusters(json: AsJson = False) -> None:
    """List the shipped clusters, files to copy, and parts for shorthands.

    A shorthand is a part and a number of devices: h100x64, 512xa100. Whatever a
    cluster file leaves out comes from the catalogue of `outlast.hardware`.

    Example: outlast plan clusters

    --json: {"clusters": [{"name", "nodes", "devices", "device", "file"}],
    "parts": [...]}.
    """
    from importlib.resources import files

    from outlast.hardware import devices
    from outlast.plan.cluster_file import cluster_of, shipped_clusters

    folder = files("outlast.plan").joinpath("clusters")
    found = [(name, cluster_of(name), str(folder / f"{name}.toml")) for name in shipped_clusters()]
    parts = [device.key for device in devices()]
    if json:
        print_json(
            {
                "clusters": [
                    {
                        "name": name,
                        "nodes": item.nodes,
                        "devices": item.devices,
                        "device": item.device,
                        "file": path,
                    }
                    for name, item, path in found
                ],
                "parts": parts,
            }
        )
        return
    console = output()
    rows = [
        [name, f"{e.nodes:,} x {e.devices_per_node}", e.device, f"{e.memory_bytes / 2**30:.0f} GiB"]
        for name, e, _ in found
    ]
    columns = [
        Column("cluster", number=False),
        Column("nodes"),
        Column("device", number=False),
        Column("memory"),
    ]
    print_table(console, columns, rows)
    console.print(f"\nfiles to copy and change, each NAME.toml in {folder}", markup=False)
    console.print(f"parts for shorthands such as h100x64: {', '.join(parts)}", markup=False)


def models(json: AsJson = False) -> None:
    """List the published models that can stand for SOURCE.

    Example: outlast plan models

    --json: [{"name", "parameters", "active_parameters", "layers", "hidden",
    "source"}].
    """
    from outlast.plan.huggingface import MODELS, published

    found = [(name, published(name), model.source) for name, model in MODELS.items()]
    if json:
        print_json(
            [
                {
                    "name": name,
                    "parameters": item.parameters,
                    "active_parameters": item.active_parameters,
                    "layers": item.layers,
                    "hidden": item.hidden,
                    "source": source,
                }
                for name, item, source in found
            ]
        )
        return
    rows = [
        [
            name,
            count_words(item.parameters),
            count_words(item.active_parameters) if item.experts else "-",
            str(item.layers),
            f"{item.hidden:,}",
            source.removeprefix("config.json of ").replace(" on Hugging Face", ""),
        ]
        for name, item, source in found
    ]
    columns = [
        Column("model", number=False),
        Column("parameters"),
        Column("in use", optional=2),
        Column("layers"),
        Column("hidden"),
        Column("sizes from", number=False, optional=1, least=20),
    ]
    console = output()
    print_table(console, columns, rows)
    console.print("names with a slash: config.json on Hugging Face", style="dim")


DAY = 86_400.0


FEW = 400
"""Failures below which a simulation says little of rare causes."""


_OF_JOBS = {"train", "model", "data", "parallel", "optimizer"}


_SAME = {"restore": "restart", "silent errors": "lost work", "coding": "pace", "stragglers": "pace"}
"""Terms of the closed form that the simulation counts together with others."""


@with_options
def simulate(
    asked: PlanOptions,
    layout: Layout,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Runs to play; default: the scenario's, or 200.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the random numbers.")] = None,
    json: AsJson = False,
) -> None:
    """Play a run's failures event by event, beside the closed form.

    SOURCE is a scenario: a TOML file with the tables run (nodes,
    interval_seconds, productive_days), failure and tier; or as for the other
    commands, with --cluster: then the scenario is that of the run's checkpoints,
    restarts, guard and the cluster's failures.

    Example: outlast plan simulate scenario.toml --trials 1000

    Example: outlast plan simulate llama-3-8b --cluster h100x64

    --json: {"nodes", "trials", "seed", "simulated", "closed_form", "difference"},
    shares of the wall time and seconds.
    """
    from outlast.plan.goodput import finish, goodput
    from outlast.plan.simulate import simulate as play

    scenario = _scenario(asked, layout)
    if trials is not None:
        scenario = replace(scenario, trials=trials)
    if seed is not None:
        scenario = replace(scenario, seed=seed)
    closed = goodput(scenario.reliability)
    ends = finish(closed, scenario.productive_days * DAY)
    found = play(scenario)
    if json:
        print_json(_document(scenario, found, closed, ends))
        return
    _print(scenario, found, closed, ends)


def _scenario(asked: PlanOptions, layout: Layout) -> Scenario:
    from outlast.plan.reliability import load_scenario

    if asked.source.endswith(".toml") and not _is_job(Path(asked.source)):
        return load_scenario(Path(asked.source))
    from outlast.cli.plan_search import chosen
    from outlast.cli.plan_source import planned

    read = planned(asked)
    found = chosen(read, layout)
    return scenario_of(read.context, found.run, found.settings)


def scenario_of(context: Any, run: Any, settings: Any) -> Scenario:
    """The life of a predicted run as the simulator plays it."""
    import numpy as np

    from outlast.plan.batch import cases
    from outlast.plan.model import judge
    from outlast.plan.reliability import Scenario
    from outlast.plan.space import Block

    numbers = cases([(context.model, run, context.cluster)])
    one = np.zeros(1, dtype=np.intp)
    judged = judge(context, Block(numbers, (settings,), one, one))
    step = judged.step
    plain = step.seconds / (1.0 + step.guard_overhead) / (1.0 + step.coding_overhead)
    return Scenario(
        reliability=judged.survival.run, productive_days=float(context.steps * plain[0]) / DAY
    )


def _is_job(path: Path) -> bool:
    """Return True if a file says that it is a job; its reader reports what is wrong with it."""
    try:
        return bool(_OF_JOBS & set(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return False


def _print(scenario: Scenario, found: Simulated, closed: Goodput, ends: Finish) -> None:
    console = output()
    run = scenario.reliability
    print_facts(
        console,
        "Scenario",
        [
            ("nodes", f"{_one(run.nodes):,.0f}"),
            ("failures", ", ".join(cause.name for cause in run.causes) or "none"),
            ("saves", f"every {seconds_words(_one(run.interval_seconds))}"),
            ("productive time", seconds_words(scenario.productive_days * DAY)),
            ("trials", f"{scenario.trials:,}, seed {scenario.seed}"),
        ],
    )
    difference = abs(found.ettr - float(closed.ettr[0]))
    rows = [
        [
            "ETTR",
            f"{100 * found.ettr:.3f} % +- {100 * found.standard_error:.3f}",
            f"{100 * float(closed.ettr[0]):.3f} %",
        ]
    ]
    for name, share in sorted(found.lost_share.items(), key=lambda pair: -pair[1]):
        # The closed form's share of what the simulation counts under a name.
        together = [term for term in closed.terms if _SAME.get(term, term) == name]
        form = sum(float(closed.terms[term][0]) for term in together)
        if share or form:
            rows.append([f"lost to {name}", f"{100 * share:.4f} %", f"{100 * form:.4f} %"])
    rows += [
        [
            f"finished with probability {share:g}",
            seconds_words(found.quantile_seconds(share)),
            seconds_words(float(ends.quantile_seconds(share)[0])),
        ]
        for share in (0.1, 0.5, 0.9)
    ]
    rows.append(["failures of a run", f"{found.failures:.4g}", f"{float(ends.failures[0]):.4g}"])
    console.print()
    columns = [Column("figure", number=False), Column("simulated"), Column("closed form")]
    print_table(console, columns, rows)
    console.print(f"ETTR differs by {100 * difference:.3f} points")
    if 0.0 < found.failures * scenario.trials < FEW:
        console.print(
            f"only {found.failures * scenario.trials:.0f} failures were played: rare ones need "
            "more --trials"
        )
    if found.finished < 1.0:
        share = 100 * found.finished
        console.print(f"{share:.3g} % of the trials ended within {scenario.limit_days:g} days")


def _document(
    scenario: Scenario, found: Simulated, closed: Goodput, ends: Finish
) -> dict[str, Any]:
    quantiles = (0.1, 0.5, 0.9)
    return {
        "nodes": _one(scenario.reliability.nodes),
        "productive_days": scenario.productive_days,
        "trials": scenario.trials,
        "seed": scenario.seed,
        "simulated": {
            "ettr": found.ettr,
            "standard_error": found.standard_error,
            "lost_share": dict(found.lost_share),
            "cause_share": dict(found.cause_share),
            "failures": found.failures,
            "unseen": found.unseen,
            "finished": found.finished,
            "finish_seconds": {
                str(quantile): found.quantile_seconds(quantile) for quantile in quantiles
            },
        },
        "closed_form": {
            "ettr": float(closed.ettr[0]),
            "lost_share": {name: float(share[0]) for name, share in closed.terms.items()},
            "expected_seconds": float(ends.expected_seconds[0]),
            "finish_seconds": {
                str(quantile): float(ends.quantile_seconds(quantile)[0]) for quantile in quantiles
            },
        },
        "difference": found.ettr - float(closed.ettr[0]),
    }


def _one(value: Any) -> float:
    import numpy as np

    return float(np.ravel(value)[0])


_RANK = "rank"


_HELP = """Predict a run before it runs, and search for the best way to run it. Needs no
GPU.

`outlast plan SOURCE --cluster C` ranks all ways to run SOURCE on C: will it
fit, how long, how many kWh, what will failures cost, what to change. SOURCE
is an Outlast job, a Hugging Face config.json or a name such as llama-3-8b.
The options are those of `outlast plan rank --help`.

Example: outlast plan llama-3-8b --cluster h100x64 --tokens 300B
"""


class PlanGroup(typer.core.TyperGroup):
    """A group whose first word may also be a source, which is then ranked."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Both forms."""
        return ["SOURCE --cluster C [OPTIONS]", "|", "COMMAND [ARGS]..."]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Pass a first word that is no command of the group on to the ranking."""
        known = bool(args) and (args[0] in self.commands or args[0] in ("-h", "--help"))
        found: list[str] = super().parse_args(ctx, args if known or not args else [_RANK, *args])
        return found


plan = typer.Typer(name="plan", help=_HELP, no_args_is_help=True, cls=PlanGroup)


for command in (
    rank,
    explain,
    pareto,
    check,
    compare,
    calibrate,
    emit,
    targets,
    simulate,
    clusters,
    models,
):
    plan.command()(command)
