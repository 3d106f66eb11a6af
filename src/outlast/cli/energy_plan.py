"""``outlast energy advise, frontier, replay``: clocks that are planned, and never set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.frontier.plan import ClockPlan, Switches
    from outlast.energy.frontier.stragglers import Frontier
    from outlast.energy.profile import Profile
    from outlast.energy.schedule.graph import Schedule

EXAMPLES = "example:"
KINDS = ("1f1b", "gpipe", "zero-bubble", "interleaved")
BUDGETS = ("none", "per_stage", "per_phase", "free")

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
    float | None, typer.Option(help="Power of a waiting device, where the file does not say it.")
]
SwitchSeconds = Annotated[float, typer.Option(help="What one change of a clock takes.")]
Deadline = Annotated[
    str, typer.Option(help='Seconds per step, or above the time of top clocks, as in "+2%".')
]


def frontier(
    profile: ProfileName,
    *,
    microbatches: Microbatches = 12,
    schedule: ScheduleName = "1f1b",
    stages_per_device: Annotated[int, typer.Option(min=1, help="Of an interleaved schedule.")] = 2,
    points: Annotated[int, typer.Option(min=1, help="Plans on the frontier.")] = 20,
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
        typer.Option("--out", metavar="DIR", help="Write frontiers, plans and a picture here."),
    ] = None,
) -> None:
    """Plan the whole time-energy frontier of a measured profile.

    Every plan says how far it can be at most from the best one that changes clocks no more freely:
    a linear or integer programme over the profile is a lower bound. Figures are predictions from
    the profile.
    """
    from outlast.energy.frontier.picture import save_picture
    from outlast.energy.frontier.planner import EnergyPlanner
    from outlast.energy.frontier.smoothing import margin_for, smoothed

    measured = _profile(profile, blocking_watts)
    plain = _schedule(schedule, measured, microbatches, stages_per_device)
    noisy = margin == "auto"
    kept = margin_for(measured) if noisy else _share(margin)
    planner = EnergyPlanner(smoothed(measured) if noisy else measured)
    budgets = BUDGETS if switches == "all" else (switches,)
    found: dict[str, Frontier] = {}
    for budget in budgets:
        try:
            found[budget] = planner.frontier(
                plain,
                points,
                _deadline(longest),
                switches=_budget(budget),
                switch_seconds=switch_seconds,
                margin=kept,
            )
        except EnergyError as error:
            # Of all budgets, some may be impossible; the one that was asked for may not.
            if budget == "free" or len(budgets) == 1:
                raise
            print(f"switches = {budget}: not possible: {error}\n")
            continue
        _print_frontier(budget, found[budget])
    if output is not None:
        for budget, plans in found.items():
            plans.save(output / f"frontier-{budget}.json")
        save_picture(found, output / "frontier.html")
        print(f"wrote {output}/frontier.html and {len(found)} frontiers")


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
) -> None:
    """Run a plan operation by operation on devices that repeat a measured profile.

    Shows what the plan is worth on another profile than its own, and what slow changes of clocks
    cost. The result is replayed, not measured.
    """
    from outlast.energy.frontier.plan import ClockPlan
    from outlast.energy.frontier.stragglers import Frontier
    from outlast.energy.replay import replay_profile

    measured = _profile(profile, blocking_watts)
    plain = _schedule(schedule, measured, microbatches, stages_per_device)
    if _is_frontier(plan):
        plans = Frontier.load(plan, plain)
        middle = plans.plans[len(plans.plans) // 2].deadline_seconds
        chosen = plans.at(middle if deadline is None else deadline)
    else:
        chosen = ClockPlan.load(plan, plain)
    latency = chosen.switch_seconds if switch_seconds is None else switch_seconds
    run = replay_profile(chosen, plain, measured, switch_seconds=latency)
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
) -> None:
    """Say which clocks would save how much energy of a job, and print what would set them.

    Without a profile, time and power are modelled from the FLOPs and bytes of one step: good for
    an order of magnitude. Nothing is set.
    """
    from outlast.cli.energy_advice import print_advice

    measured = None if profile is None else _profile(profile, blocking_watts)
    print_advice(job, list(overrides or []), nproc, (device, measured), _deadline(deadline))


def _profile(name: str, blocking_watts: float | None) -> Profile:
    from outlast.energy import example
    from outlast.energy.profile import read_profile

    if name.startswith(EXAMPLES):
        return example.profile(name.removeprefix(EXAMPLES))
    return read_profile(name, blocking_watts=blocking_watts)


def _schedule(name: str, profile: Profile, microbatches: int, per_device: int) -> Schedule:
    """A named schedule for the profile's stages, or that of a file."""
    from outlast.energy.schedule import pipelines
    from outlast.energy.schedule.graph import schedule_from_text

    if name.endswith(".json"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise EnergyError(f"{name} cannot be read ({error.strerror}): give another") from error
        except UnicodeDecodeError as error:
            raise EnergyError(f"{name} is no UTF-8 text: give a JSON file") from error
        return schedule_from_text(text, name)
    stages = len({key.stage for key in profile.curves})
    match name:
        case "1f1b":
            return pipelines.one_f_one_b(stages, microbatches)
        case "gpipe":
            return pipelines.gpipe(stages, microbatches)
        case "zero-bubble":
            return pipelines.zero_bubble(stages, microbatches)
        case "interleaved":
            if stages % per_device:
                raise EnergyError(
                    f"--stages-per-device = {per_device} does not divide the profile's {stages} "
                    "stages: give a number that does"
                )
            return pipelines.interleaved(stages // per_device, microbatches, per_device)
    raise EnergyError(f'--schedule = "{name}" is none of {", ".join(KINDS)}, nor a .json file')


def _is_frontier(path: Path) -> bool:
    """Whether a file says that it is a frontier; what is wrong with it is for its reader to say."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
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


def _budget(name: str) -> Switches:
    if name not in BUDGETS:
        raise EnergyError(f'--switches = "{name}" is none of {", ".join(BUDGETS)}, nor all')
    return name  # type: ignore[return-value]


def _print_frontier(budget: str, plans: Frontier) -> None:
    from outlast.cli.figures import Column, output, print_table

    heads = ["deadline s", "step s", "energy J", "saving", "gap at most", "switches"]
    rows = [_row(plan) for plan in plans.plans]
    first = plans.plans[0]
    title = f"switches = {budget}: {first.device}, predicted from a {first.kind} profile"
    print_table(output(), [Column(head) for head in heads], rows, title)


def _row(plan: ClockPlan) -> list[str]:
    return [
        f"{plan.deadline_seconds:.6g}",
        f"{plan.seconds:.6g}",
        f"{plan.joules:,.6g}",
        f"{plan.saving:.2%}",
        # Where a plan is its bound, the two differ by rounding.
        f"{max(plan.budget_gap, 0.0):.3%}",
        str(plan.switches),
    ]
