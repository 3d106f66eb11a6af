"""What ``outlast energy advise`` says of a job: clocks, what they save, what would set them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.energy.frontier.plan import ClockPlan
    from outlast.energy.model.equations import DeviceConstants, Work
    from outlast.energy.profile import Curve, Key, Profile
    from outlast.energy.schedule.graph import Schedule
    from outlast.hardware.catalogue import Device
    from outlast.job import Job
    from outlast.train.preflight import Plan

DEADLINES = ("+0%", "+2%", "+5%", "+10%")
CATALOGUE = {"a100": "a100-sxm-80"}
"""Devices with an example profile (for clocks) whose rates the catalogue knows."""


def print_advice(
    path: Path,
    overrides: list[str],
    nproc: int,
    source: tuple[str, Profile | None],
    deadline: float | str,
) -> None:
    """Plan a job's clocks and print the table and what would set them.

    Args:
        path: The job file.
        overrides: As for ``outlast train``.
        nproc: Processes of the job.
        source: Name of the device, and the job's measured profile if there is one.
        deadline: As in `EnergyPlanner.plan`.

    Raises:
        JobError: For a wrong job.
        EnergyError: For a device that nothing is known of, or a deadline that cannot be met.
    """
    from outlast.cli.figures import Column, output, print_table
    from outlast.energy.control.apply import DryRun, device_settings
    from outlast.energy.control.slurm import batch_lines
    from outlast.energy.frontier.planner import EnergyPlanner
    from outlast.job import load_job
    from outlast.train.preflight import preflight

    job = load_job(path, overrides)
    checked = preflight(job, nproc)
    schedule = _schedule(job, checked)
    device, profile = source
    if profile is None:
        profile = _modelled_profile(job, checked, device)
    planner = EnergyPlanner(profile)
    rows = []
    for fromkey in dict.fromkeys([*DEADLINES, deadline]):
        plan = planner.plan(schedule, fromkey, switches="per_stage")
        rows.append(_row(str(fromkey), plan))
    chosen = planner.plan(schedule, deadline, switches="per_stage")
    heads = ["deadline", "step s", "energy J", "saving", "clocks MHz"]
    title = f"one clock per device, {profile.device}, {profile.kind}"
    print_table(output(), [Column(head) for head in heads], rows, title)
    if profile.kind == "modelled":
        print(
            "modelled from the FLOPs and bytes of a step alone: times within about 30 %, savings "
            "an order of magnitude; give --profile for a plan to act on"
        )
    print(f"\nfor deadline {deadline}, on each replica (nothing is set now):")
    clocks = []
    for number, setting in enumerate(device_settings(chosen, schedule)):
        if setting.clock_mhz is not None:
            clocks.append(setting.clock_mhz)
            DryRun(f"<GPU {number}>", write=lambda text: print(f"  {text}")).lock_clock(
                setting.clock_mhz
            )
    print("\nwith Slurm:")
    print(batch_lines(clocks, gpus_per_node=len(clocks)))


def _row(deadline: str, plan: ClockPlan) -> list[str]:
    clocks = list(dict.fromkeys(clock for clock in plan.clocks_mhz if clock))
    shown = str(clocks[0]) if len(clocks) == 1 else f"{min(clocks)} to {max(clocks)}"
    return [
        deadline,
        f"{plan.seconds:.4g}",
        f"{plan.joules:,.4g}",
        f"{plan.saving:.1%}",
        shown,
    ]


def _schedule(job: Job, checked: Plan) -> Schedule:
    from outlast.data import microbatch_count
    from outlast.energy.schedule import pipelines
    from outlast.train.preflight import pipeline_shape

    layout = checked.layout
    if layout.pipeline == 1:
        count = microbatch_count(
            job.train.batch_size, layout.data_ranks, job.train.micro_batch_size
        )
        return pipelines.single_stage(count)
    stages, microbatches = pipeline_shape(job, layout)
    if stages > layout.pipeline:
        return pipelines.interleaved(layout.pipeline, microbatches, stages // layout.pipeline)
    return pipelines.one_f_one_b(stages, microbatches)


def _modelled_profile(job: Job, checked: Plan, device: str) -> Profile:
    """From the work of one micro-batch, shared evenly among the stages."""
    from outlast.energy import example
    from outlast.energy.model.fit import fit_constants
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
    constants = _with_rates(fit_constants(measured), facts)
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
    from outlast.energy.model.equations import roofline_response
    from outlast.energy.model.predict import predict

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
    from outlast.energy.model.capture import capture
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
