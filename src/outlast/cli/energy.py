"""``outlast energy``: measure joules, plan clocks, say what a run's energy was spent on.

Nothing here sets a clock but ``restore``, which gives back what another process left locked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import Column, json_text, print_json, print_table
from outlast.cli.console import output as console_of
from outlast.cli.options import AsJson
from outlast.errors import EXIT_BAD_INPUT, EXIT_CRASHED, EnergyError
from outlast.paths import check_writable, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from outlast.energy.meter import EnergyMeter
    from outlast.energy.model import DeviceConstants, Work
    from outlast.energy.plan import ClockPlan, Frontier, Switches
    from outlast.energy.profile import Curve, Key, Profile
    from outlast.energy.prometheus import Sample
    from outlast.energy.schedule import Schedule
    from outlast.energy.window import DeviceState, Window
    from outlast.hardware.catalogue import Device
    from outlast.job import Job
    from outlast.train.preflight import Plan


DEADLINES = ("+0%", "+2%", "+5%", "+10%")


CATALOGUE = {"a100": "a100-sxm-80"}
"""Devices with an example profile (for clocks) whose rates the catalogue knows."""


def _advice_row(deadline: str, plan: ClockPlan) -> list[str]:
    clocks = _clocks(plan)
    shown = str(clocks[0]) if len(clocks) == 1 else f"{min(clocks)} to {max(clocks)}"
    return [deadline, f"{plan.seconds:.4g}", f"{plan.joules:,.4g}", f"{plan.saving:.1%}", shown]


def _clocks(plan: ClockPlan) -> list[int]:
    """The different clocks of a plan, in the order in which operations ask for them."""
    return list(dict.fromkeys(clock for clock in plan.clocks_mhz if clock))


def _step_schedule(job: Job, checked: Plan) -> Schedule:
    from outlast.data import microbatch_count
    from outlast.energy.schedule import interleaved, one_f_one_b, single_stage
    from outlast.train.preflight import pipeline_shape

    layout = checked.layout
    if layout.pipeline == 1:
        count = microbatch_count(
            job.train.batch_size, layout.data_ranks, job.train.micro_batch_size
        )
        return single_stage(count)
    stages, microbatches = pipeline_shape(job, layout)
    if stages > layout.pipeline:
        return interleaved(layout.pipeline, microbatches, stages // layout.pipeline)
    return one_f_one_b(stages, microbatches)


def _modelled_profile(job: Job, checked: Plan, device: str) -> Profile:
    """From the work of one micro-batch, shared evenly among the stages."""
    from outlast.energy import example
    from outlast.energy.model import calibrate
    from outlast.energy.profile import Key, Profile
    from outlast.hardware import device as known_device
    from outlast.train.preflight import pipeline_shape

    if device not in CATALOGUE:
        raise EnergyError(
            f"--device = {device} has no model of clocks and rates; known is "
            f"{', '.join(CATALOGUE)}; for others give --profile"
        )
    measured = example.profile(device)
    facts = known_device(CATALOGUE[device])
    constants = _with_rates(calibrate(measured).constants, facts)
    clocks = [point.clock_mhz for point in next(iter(measured.curves.values())).points]
    layout = checked.layout
    stages, microbatches = (1, 0) if layout.pipeline == 1 else pipeline_shape(job, layout)
    works = _work(job, checked, microbatches)
    curves: dict[Key, Curve] = {}
    for phase, work in works.items():
        share = 1.0 / (stages * layout.tensor)
        part = replace(
            work,
            flops=work.flops * share,
            memory_bytes=work.memory_bytes * share,
            launches=-(-work.launches // stages),
        )
        curve = _curve(part, constants, clocks)
        curves |= {Key(stage, phase): curve for stage in range(stages)}
    name = f"{measured.device} (clocks), {facts.name} (rates)"
    return Profile(curves, measured.blocking_watts, device=name, kind="modelled")


def _with_rates(constants: DeviceConstants, facts: Device) -> DeviceConstants:
    memory = facts.memory_peak_bytes_per_s
    watts = facts.power_limit_watts
    return replace(
        constants,
        peak_flop_per_s=float(facts.bf16_matmul_flop_per_s.value),
        memory_bytes_per_s=float(memory.value),
        power_limit_watts=min(constants.power_limit_watts, float(watts.value)),
    )


def _curve(work: Work, constants: DeviceConstants, clocks: list[int]) -> Curve:
    from outlast.energy.model import predict, roofline_response
    from outlast.hardware.figure import Unavailable

    response = roofline_response(work, constants)
    prediction = (
        response if isinstance(response, Unavailable) else predict(response, constants, clocks)
    )
    if isinstance(prediction, Unavailable):
        raise EnergyError(f"the job's step cannot be modelled: {prediction}; give --profile")
    return prediction.curve


def _work(job: Job, checked: Plan, pipeline_microbatches: int) -> dict[str, Work]:
    """FLOPs and bytes of one micro-batch, by counting on a model without storage."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from outlast.data import microbatch_count
    from outlast.energy.capture import capture
    from outlast.train.engine import loss_sum
    from outlast.train.model import build_model

    layout = checked.layout
    count = pipeline_microbatches or microbatch_count(
        job.train.batch_size, layout.data_ranks, job.train.micro_batch_size
    )
    samples = max(job.train.batch_size // (layout.data_ranks * count), 1)
    # transformers looks at values of plain meta tensors, but not at those of fake ones.
    with FakeTensorMode(), torch.device("cpu"):
        model = build_model(job)
        tokens = torch.zeros(samples, job.data.sequence_length, dtype=torch.long)

        def step() -> None:
            logits = model(tokens)
            torch.autograd.backward(loss_sum(getattr(logits, "logits", logits), tokens))

        return {
            phase: work for phase, work in capture(step).items() if phase in {"forward", "backward"}
        }


EXAMPLES = "example:"


KINDS = ("1f1b", "gpipe", "zero-bubble", "interleaved")


BUDGETS: tuple[Switches, ...] = ("none", "per_stage", "per_phase", "free")


ProfileName = Annotated[
    str,
    typer.Argument(
        metavar="PROFILE",
        help="CSV or JSON with stage, phase, clock_mhz, seconds, joules; or example:a100, "
        "example:a40 (GPT-3 175B on 8 stages).",
    ),
]


Microbatches = Annotated[int, typer.Option(min=1, help="Micro-batches per step.")]


ScheduleName = Annotated[
    str,
    typer.Option("--schedule", help=f"{', '.join(KINDS)}; or a JSON file of operations and edges."),
]


BlockingWatts = Annotated[
    float | None,
    typer.Option(min=0.0, help="Power of a waiting device, where the file does not say it."),
]


SwitchSeconds = Annotated[float, typer.Option(min=0.0, help="What one change of a clock takes.")]


Deadline = Annotated[
    str, typer.Option(help='Seconds per step, or above the time of top clocks, as in "+2%".')
]


def frontier(
    profile: ProfileName = "example:a100",
    *,
    microbatches: Microbatches = 12,
    schedule: ScheduleName = "1f1b",
    stages_per_device: Annotated[int, typer.Option(min=1, help="Of an interleaved schedule.")] = 2,
    points: Annotated[
        int | None,
        typer.Option(min=1, help="Plans on the frontier; default: 20, of an example 5."),
    ] = None,
    longest: Annotated[str, typer.Option(help="The last deadline, as seconds or +10%.")] = "+10%",
    switches: Annotated[
        str, typer.Option(help=f"How often clocks may change: {', '.join(BUDGETS)}; or all.")
    ] = "all",
    switch_seconds: SwitchSeconds = 0.0,
    margin: Annotated[
        str,
        typer.Option(
            help="Share of the deadline kept free because a profile is not exact; auto smooths the "
            "profile and keeps what its noise asks for."
        ),
    ] = "0",
    blocking_watts: BlockingWatts = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Write frontiers, plans and a picture here."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan the whole time-energy frontier of a measured profile.

    Every plan says how far it can be at most from the best one that changes clocks no more freely:
    a linear or integer programme over the profile is a lower bound. Figures are predictions from
    the profile.

    --json: {"kind", "device", "profile_kind", "notes", "frontiers": {switches:
    {"longest_useful_seconds", "plans": [{"deadline_seconds", "seconds", "joules", "saving",
    "budget_gap", "switches", "clocks_mhz"}]}}, "files"}.
    """
    from outlast.energy import EnergyPlanner
    from outlast.energy.plan import save_picture
    from outlast.energy.profile import margin_for, smoothed

    measured = _profile(profile, blocking_watts)
    plain = _schedule_of_file(schedule, measured, microbatches, stages_per_device)
    noisy = margin == "auto"
    kept = margin_for(measured) if noisy else _share(margin)
    planner = EnergyPlanner(smoothed(measured) if noisy else measured)
    budgets: tuple[Switches, ...] = BUDGETS if switches == "all" else (_budget(switches),)
    if output is not None:
        _check_folder(output)
    found: dict[str, Frontier] = {}
    # Said once it is clear that there is a frontier.
    notes = []
    if profile.startswith(EXAMPLES):
        notes = [
            f"{profile} is a published profile (GPT-3 175B, 8 stages); give a file of your own"
        ]
    for budget in budgets:
        try:
            found[budget] = planner.frontier(
                plain,
                points or (5 if profile.startswith(EXAMPLES) else 20),
                _deadline(longest),
                switches=budget,
                switch_seconds=switch_seconds,
                margin=kept,
            )
        except EnergyError as error:
            # Of all budgets, some may be impossible; the one that was asked for may not.
            if budget == "free" or len(budgets) == 1:
                raise
            notes.append(f"switches = {budget}: not possible: {error}")
            continue
        if not as_json:
            print("".join(f"{note}\n\n" for note in notes), end="")
            notes = []
            _print_frontier(budget, found[budget])
    files = []
    if output is not None:
        for name, plans in found.items():
            files.append(output / f"frontier-{name}.json")
            plans.save(files[-1])
        files.append(output / "frontier.html")
        save_picture(found, files[-1])
    if as_json:
        facts = {"device": measured.device, "profile_kind": measured.kind, "notes": notes}
        frontiers = {name: _frontier_facts(plans) for name, plans in found.items()}
        print_json({"kind": "predicted", **facts, "frontiers": frontiers, "files": files})
    elif output is not None:
        print(f"wrote {output}/frontier.html and {len(found)} frontiers")


def _frontier_facts(plans: Frontier) -> dict[str, Any]:
    return {
        "longest_useful_seconds": plans.longest_useful_seconds,
        "plans": [
            {
                **asdict(plan),
                "saving": plan.saving,
                "gap": plan.gap,
                "budget_gap": max(plan.budget_gap, 0.0),
            }
            for plan in plans.plans
        ],
    }


def replay(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A frontier or plan that was written as JSON.")
    ],
    profile: Annotated[str, typer.Option(help="As for frontier: what the devices repeat.")],
    *,
    deadline: Annotated[
        float | None, typer.Option(help="Of a frontier: seconds per step; default: its middle.")
    ] = None,
    microbatches: Microbatches = 12,
    schedule: ScheduleName = "1f1b",
    stages_per_device: Annotated[int, typer.Option(min=1, help="Of an interleaved schedule.")] = 2,
    blocking_watts: BlockingWatts = None,
    switch_seconds: Annotated[
        float | None, typer.Option(help="What a change of a clock takes; default: the plan's own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a plan operation by operation on devices that repeat a measured profile.

    Shows what the plan is worth on another profile than its own, and what slow changes of clocks
    cost. The result is replayed, not measured.

    --json: {"kind", "seconds", "joules", "switches", "deadline_seconds", "on_time",
    "device_joules", "planned": {"kind", "seconds", "joules"}}.
    """
    from outlast.energy.plan import ClockPlan, Frontier, replay_profile

    measured = _profile(profile, blocking_watts)
    plain = _schedule_of_file(schedule, measured, microbatches, stages_per_device)
    if _is_frontier(plan):
        plans = Frontier.load(plan, plain)
        middle = plans.plans[len(plans.plans) // 2].deadline_seconds
        chosen = plans.at(middle if deadline is None else deadline)
    else:
        chosen = ClockPlan.load(plan, plain)
    latency = chosen.switch_seconds if switch_seconds is None else switch_seconds
    run = replay_profile(chosen, plain, measured, switch_seconds=latency)
    if as_json:
        planned = {"kind": chosen.kind, "seconds": chosen.seconds, "joules": chosen.joules}
        facts = {**asdict(run), "joules": run.joules, "on_time": run.on_time}
        print_json({**facts, "planned": planned})
        return
    print(f"planned   {chosen.seconds:.6g} s, {chosen.joules:,.6g} J ({chosen.kind} profile)")
    print(
        f"{run.kind:<9} {run.seconds:.6g} s, {run.joules:,.6g} J, {run.switches} changes of clock"
    )
    late = "" if run.on_time else f": {run.seconds - run.deadline_seconds:.3g} s too late"
    print(f"deadline  {run.deadline_seconds:.6g} s{late}")
    for device, joules in enumerate(run.device_joules):
        print(f"  device {device}: {joules:,.5g} J")


def advise(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE ...]", help="As for train.")
    ] = None,
    *,
    nproc: Annotated[int, typer.Option(min=1, help="Processes of the job.")] = 1,
    device: Annotated[
        str, typer.Option(help="Kind of GPU whose clocks and rates are known: a100.")
    ] = "a100",
    profile: Annotated[
        str | None,
        typer.Option(help="The job's own measured profile, as for frontier; makes it exact."),
    ] = None,
    blocking_watts: BlockingWatts = None,
    deadline: Deadline = "+2%",
    as_json: AsJson = False,
) -> None:
    """Say which clocks would save how much energy of a job, and print what would set them.

    Without a profile, time and power are modelled from the FLOPs and bytes of one step: good for
    an order of magnitude. Nothing is set.

    --json: {"kind", "device", "rows": [{"deadline", "seconds", "joules", "saving", "clocks_mhz"}],
    "deadline", "clocks_mhz", "commands", "slurm"}; the last four are what would be set.
    """
    from outlast.energy import EnergyPlanner
    from outlast.energy.control import DryRun, batch_lines, device_settings
    from outlast.job import load_job
    from outlast.train.preflight import preflight

    known = None if profile is None else _profile(profile, blocking_watts)
    asked = _deadline(deadline)
    settings = load_job(job, list(overrides or []))
    checked = preflight(settings, nproc)
    schedule = _step_schedule(settings, checked)
    if known is None:
        known = _modelled_profile(settings, checked, device)
    planner = EnergyPlanner(known)
    plans = {
        str(limit): planner.plan(schedule, limit, switches="per_stage")
        for limit in dict.fromkeys([*DEADLINES, asked])
    }
    chosen = plans[str(asked)]
    clocks: list[int] = []
    commands: list[str] = []
    for number, setting in enumerate(device_settings(chosen, schedule)):
        if setting.clock_mhz is not None:
            clocks.append(setting.clock_mhz)
            DryRun(f"<GPU {number}>", write=commands.append).lock_clock(setting.clock_mhz)
    slurm = batch_lines(clocks, gpus_per_node=len(clocks))
    if as_json:
        rows = [
            {
                "deadline": limit,
                "seconds": plan.seconds,
                "joules": plan.joules,
                "saving": plan.saving,
                "clocks_mhz": _clocks(plan),
            }
            for limit, plan in plans.items()
        ]
        wanted = {"deadline": str(asked), "clocks_mhz": clocks, "commands": commands}
        facts = {"kind": known.kind, "device": known.device, "rows": rows}
        print_json({**facts, **wanted, "slurm": slurm.splitlines()})
        return
    heads = ["deadline", "step s", "energy J", "saving", "clocks MHz"]
    title = f"one clock per device, {known.device}, {known.kind}"
    cells = [_advice_row(limit, plan) for limit, plan in plans.items()]
    print_table(console_of(), [Column(head) for head in heads], cells, title)
    if known.kind == "modelled":
        print(
            "modelled from the FLOPs and bytes of a step alone: times within about 30 %, savings "
            "an order of magnitude; give --profile for a plan to act on"
        )
    print(f"\nfor deadline {asked}, on each replica (nothing is set now):")
    for command in commands:
        print(f"  {command}")
    print("\nwith Slurm:")
    print(slurm)


def _profile(name: str, blocking_watts: float | None) -> Profile:
    from outlast.energy import example
    from outlast.energy.profile import read_profile

    if name.startswith(EXAMPLES):
        return example.profile(name.removeprefix(EXAMPLES))
    return read_profile(name, blocking_watts=blocking_watts)


def _schedule_of_file(name: str, profile: Profile, microbatches: int, per_device: int) -> Schedule:
    """A named schedule for the profile's stages, or that of a file."""
    from outlast.energy import schedule as schedules

    if name.endswith(".json"):
        try:
            text = read_text(name)
        except OSError as error:
            raise EnergyError(f"{name} cannot be read ({error.strerror}): give another") from error
        except UnicodeDecodeError as error:
            raise EnergyError(f"{name} is no UTF-8 text: give a JSON file") from error
        return schedules.schedule_from_text(text, name)
    stages = len({key.stage for key in profile.curves})
    match name:
        case "1f1b":
            return schedules.one_f_one_b(stages, microbatches)
        case "gpipe":
            return schedules.gpipe(stages, microbatches)
        case "zero-bubble":
            return schedules.zero_bubble(stages, microbatches)
        case "interleaved":
            if stages % per_device:
                raise EnergyError(
                    f"--stages-per-device = {per_device} does not divide the profile's {stages} "
                    "stages: give a number that does"
                )
            return schedules.interleaved(stages // per_device, microbatches, per_device)
    raise EnergyError(f'--schedule = "{name}" is none of {", ".join(KINDS)}, nor a .json file')


def _is_frontier(path: Path) -> bool:
    """Return True if a file says that it is a frontier; its reader finds what is wrong."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == "outlast frontier"


def _deadline(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise EnergyError(f'--margin = "{text}" is neither a share, as 0.01, nor auto') from None


def _check_folder(folder: Path) -> None:
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        check_writable(folder)
    except OSError as error:
        raise EnergyError(f"--output = {folder}: {error.strerror}; name another folder") from None


def _budget(name: str) -> Switches:
    for budget in BUDGETS:
        if budget == name:
            return budget
    raise EnergyError(f'--switches = "{name}" is none of {", ".join(BUDGETS)}, nor all')


def _print_frontier(budget: str, plans: Frontier) -> None:
    heads = ["deadline s", "step s", "energy J", "saving", "gap at most", "switches"]
    rows = [
        [
            f"{plan.deadline_seconds:.6g}",
            f"{plan.seconds:.6g}",
            f"{plan.joules:,.6g}",
            f"{plan.saving:.2%}",
            # Where a plan is its bound, the two differ by rounding.
            f"{max(plan.budget_gap, 0.0):.3%}",
            str(plan.switches),
        ]
        for plan in plans.plans
    ]
    first = plans.plans[0]
    title = f"switches = {budget}: {first.device}, predicted from a {first.kind} profile"
    print_table(console_of(), [Column(head) for head in heads], rows, title)


energy = typer.Typer(
    name="energy",
    help="Joules: measure them, plan clocks on the time-energy frontier, report them.",
    no_args_is_help=True,
)


EXIT_CANNOT_RUN = 126


EXIT_NO_COMMAND = 127
"""As shells end where a command cannot be run, or is not there."""


_STDERR = 2


for command in (advise, frontier, replay):
    energy.command()(command)


@energy.command()
def monitor(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND ...]", help="Measured until it ends.")
    ] = None,
    *,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="Without a command: how long; default: until Ctrl-C."),
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two lines.", min=0.1)] = 5.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the figures here too, as JSON."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Also serve them to Prometheus at http://HOST:PORT/metrics."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's GPUs, CPUs and memory, alone or while a command runs.

    Reads counters only. Ends with the command's exit code; 127 where there is no such command, 126
    where it cannot be run; 1 where nothing can be measured and no command was given.

    --json: {"name", "seconds", "joules", "parts", "states", "missing"} on a line now and then, and
    of the whole time at the end; what the command prints goes to stderr.
    """
    from outlast.energy.meter import EnergyMeter

    if output is not None:
        asked = output if output.exists() else output.absolute().parent
        no_file = output.is_dir() or not (output.is_file() or asked.is_dir())
        if no_file or not os.access(asked, os.W_OK):
            raise EnergyError(
                f"--output = {output} cannot be written: name a file in a directory of yours"
            )
    console = None if as_json else console_of()
    with EnergyMeter("monitor") as meter:
        if not meter.sources and console is not None:
            console.print(str(meter.total()))
        code = _watch(console, meter, command, seconds=seconds, every=every, port=port)
    window = meter.read()
    if console is None:
        print_json(window.as_json(), line=True)
    elif meter.sources:
        console.print(f"{window.seconds:.1f} s in all")
        for line in _lines(window, {name: state.end for name, state in window.states.items()}):
            console.print(line)
    if output is not None:
        output.write_text(json_text(window.as_json()) + "\n")
    raise typer.Exit(code if command or meter.sources else EXIT_CRASHED)


@energy.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    *,
    tariff: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML: a price per kWh, or by hour.")
    ] = None,
    region: Annotated[
        str | None, typer.Option(help="Of the grid, e.g. DE, FR, US: gives gCO2e (yearly average).")
    ] = None,
    pue: Annotated[
        float | None, typer.Option(min=1.0, help="Energy of the building over that of its nodes.")
    ] = None,
    loss: Annotated[
        float | None, typer.Option(help="Also the joules until this training loss was reached.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run's energy was spent on, with cost, carbon and joules per token.

    Prices are those of the run's section energy where no option says otherwise.
    ``outlast report RUN`` draws it.

    --json: each figure with its interval, kind and source, or why it is not known; "by_purpose",
    "pue" and "notes".
    """
    from outlast.hardware.figure import Unavailable
    from outlast.records import read_run
    from outlast.report.energy import account_of, settings_of

    # Refuse what the report would else call unavailable: it was asked for just now.
    numbers = {"--pue": pue, "--loss": loss}
    from outlast.energy.prices import Tariff, carbon

    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise EnergyError(f"{name} = {value} must be a finite number")
    if tariff is not None:
        Tariff.read(tariff)
    if region is not None:
        carbon(1.0, datetime.now(UTC), 1.0, region)
    recorded = read_run(run)
    given = {"tariff": str(tariff or ""), "region": region, "pue": pue}
    settings = settings_of(recorded).model_copy(update={k: v for k, v in given.items() if v})
    found = account_of(recorded, loss_target=loss, settings=settings)
    if isinstance(found, Unavailable):
        from outlast.report.energy import missing_energy

        if as_json:
            why = missing_energy(recorded) or found.reason
            print_json(Unavailable(why.removeprefix("unavailable: ")))
        else:
            print(f"energy {missing_energy(recorded)}")
        raise typer.Exit(EXIT_CRASHED)
    print(found.to_json() if as_json else "\n".join(found.lines()))


@energy.command()
def restore(
    lease: Annotated[
        Path | None,
        typer.Argument(
            metavar="[LEASE]", help="A lease file; default: this user's leases on this machine."
        ),
    ] = None,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also when the process that holds it is alive.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Give clocks and power limits back that a killed process left set.

    Tries all leases, says which could not be given back, and ends with 2 if one could not.

    --json: {"folder", "restored": [{"lease", "devices"}], "failed": [{"lease", "reason"}]}.
    """
    from outlast.energy.lease import DIRECTORY_VARIABLE, lease_directory, leases
    from outlast.energy.lease import restore as give_back

    found = [lease] if lease is not None else list(leases())
    if not found and not as_json:
        print(
            f"no lease of this user in {lease_directory()}: jobs that were given another "
            f"{DIRECTORY_VARIABLE} have theirs there"
        )
    restored, failed = [], []
    for path in found:
        try:
            given_back = give_back(path, force=force)
        except EnergyError as error:
            print(f"outlast: {error}", file=sys.stderr, flush=True)
            failed.append({"lease": path, "reason": str(error)})
            continue
        devices = [held.uuid for held in given_back.devices]
        restored.append({"lease": path, "devices": devices})
        if not as_json:
            print(f"{path}: gave back {', '.join(devices)}")
    if as_json:
        print_json({"folder": lease_directory(), "restored": restored, "failed": failed})
    if failed:
        raise typer.Exit(EXIT_BAD_INPUT)


def _watch(
    console: Console | None,
    meter: EnergyMeter,
    command: list[str] | None,
    *,
    seconds: float | None,
    every: float,
    port: int | None,
) -> int:
    """Run the command, if any, and serve meanwhile where a port is given; the exit code.

    Without a console lines are JSON, and stdout is for them alone.
    """
    from outlast.energy.prometheus import Exporter

    if not command and not meter.sources:
        return 0
    with contextlib.ExitStack() as open_parts:
        if port is not None:
            exporter = open_parts.enter_context(Exporter(lambda: _samples(meter), port=port))
            if console is None:
                print(f"serving {exporter.url}", file=sys.stderr)
            else:
                console.print(f"serving {exporter.url}", soft_wrap=True)
        try:
            stdout = _STDERR if console is None else None
            process = subprocess.Popen(command, stdout=stdout) if command else None
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            words = f"{shlex.join(command or [])} cannot be run: {error.strerror}"
            print(f"outlast: {words}", file=sys.stderr, flush=True)
            return EXIT_NO_COMMAND if missing else EXIT_CANNOT_RUN
        end = time.monotonic() + seconds if seconds is not None else float("inf")
        with contextlib.suppress(KeyboardInterrupt):
            _print_laps(console, meter, process, end, every)
        return 0 if process is None else process.wait()


def _print_laps(
    console: Console | None,
    meter: EnergyMeter,
    process: subprocess.Popen[bytes] | None,
    end: float,
    every: float,
) -> None:
    """A line now and then until the process or the time is over."""
    from outlast.energy.sources import state_of

    while (left := min(every, end - time.monotonic())) > 0.0:
        if process is None:
            time.sleep(left)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(left)
                return
        if meter.sources:
            # A lap has joules only: reading states takes longer, and is done for the line alone.
            known = {one.name: state_of(one) for one in meter.sources}
            states = {name: state for name, state in known.items() if state is not None}
            lap = meter.lap()
            if console is None:
                print_json({**lap.as_json(), "states": states}, line=True)
            else:
                console.print("  ".join(_lines(lap, states)))


def _lines(window: Window, states: Mapping[str, DeviceState]) -> list[str]:
    """One text for each meter: mean power, energy, and the state where it has one."""
    from outlast.hardware.figure import Unavailable

    found = []
    for name, reading in window.joules.items():
        if isinstance(reading, Unavailable):
            found.append(f"{name}: {reading}")
            continue
        watts = reading.joules / window.seconds
        words = [f"{name}: {watts:.1f} W, {reading.joules:,.4g} J {reading.kind}"]
        if name in states:
            words += _state_words(states[name])
        words += reading.flags
        found.append(", ".join(words))
    return found


def _state_words(state: DeviceState) -> list[str]:
    from outlast.hardware.figure import Unavailable

    figures = {"C": state.celsius, "MHz": state.sm_clock_mhz}
    words = [
        f"{value:g} {unit}" for unit, value in figures.items() if not isinstance(value, Unavailable)
    ]
    if not isinstance(state.throttle_reasons, Unavailable):
        words += state.throttle_reasons
    return words


def _samples(meter: EnergyMeter) -> list[Sample]:
    """Samples of each meter for Prometheus."""
    from outlast.energy.prometheus import Labels, Sample
    from outlast.energy.sources import shown_state

    return [
        Sample(Labels.from_environment(os.environ, device=source.name), shown_state(source))
        for source in meter.sources
    ]
