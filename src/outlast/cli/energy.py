"""``outlast energy``: measure joules, plan clocks, say what a run's energy was spent on.

Nothing here sets a clock but ``restore``, which gives back what another process left locked.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.energy_plan import advise, frontier, replay
from outlast.errors import EXIT_CRASHED
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from rich.console import Console

    from outlast.energy.account.prometheus import Sample
    from outlast.energy.devices.protocol import DeviceState
    from outlast.energy.meter import EnergyMeter
    from outlast.energy.sources.protocol import Source
    from outlast.energy.window import Window

energy = typer.Typer(
    name="energy",
    help="Joules: measure them, plan clocks on the time-energy frontier, report them.",
    no_args_is_help=True,
)
for command in (advise, frontier, replay):
    energy.command()(command)


@energy.command()
def monitor(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND ...]", help="Measured until it ends."),
    ] = None,
    *,
    seconds: Annotated[
        float | None, typer.Option(help="Without a command: how long; default: until Ctrl-C.")
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two lines.", min=0.1)] = 5.0,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Also serve them to Prometheus at http://HOST:PORT/metrics.")
    ] = None,
) -> None:
    """Measure this machine's GPUs, CPUs and memory, alone or while a command runs.

    Reads counters only. Ends with the command's exit code; 1 where nothing can be measured and no
    command was given.
    """
    from outlast.cli.figures import output as console_of
    from outlast.energy.meter import EnergyMeter

    console = console_of()
    with EnergyMeter("monitor") as meter:
        if not meter.sources:
            console.print(str(meter.total()))
        code = _watch(console, meter, command, seconds=seconds, every=every, port=port)
    window = meter.read()
    if meter.sources:
        console.print(f"{window.seconds:.1f} s in all")
        for line in _lines(window):
            console.print(line)
    if output is not None:
        output.write_text(json.dumps(window.as_json(), indent=1) + "\n")
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a run's energy was spent on, with cost, carbon and joules per token.

    Prices are those of the run's [energy] section where no option says otherwise.
    ``outlast report RUN`` draws it.
    """
    from outlast.records import read_run
    from outlast.report.priced import account_of, settings_of

    recorded = read_run(run)
    given = {"tariff": str(tariff or ""), "region": region, "pue": pue}
    settings = settings_of(recorded).model_copy(update={k: v for k, v in given.items() if v})
    found = account_of(recorded, loss_target=loss, settings=settings)
    if isinstance(found, Unavailable):
        from outlast.report.energy import missing_energy

        print(f"energy {missing_energy(recorded)}")
        raise typer.Exit(EXIT_CRASHED)
    print(found.to_json() if as_json else "\n".join(found.lines()))


@energy.command()
def restore(
    lease: Annotated[
        Path | None,
        typer.Argument(metavar="[LEASE]", help="A lease file; default: all of this machine."),
    ] = None,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also when the process that holds it is alive.")
    ] = False,
) -> None:
    """Give clocks and power limits back that a killed process left set."""
    from outlast.energy.control.restore import leases
    from outlast.energy.control.restore import restore as give_back

    found = [lease] if lease is not None else list(leases())
    if not found:
        print("no lease: no clocks of this machine are held by Outlast")
    for path in found:
        given_back = give_back(path, force=force)
        devices = ", ".join(held.uuid for held in given_back.devices)
        print(f"{path}: gave back {devices}")


def _watch(
    console: Console,
    meter: EnergyMeter,
    command: list[str] | None,
    *,
    seconds: float | None,
    every: float,
    port: int | None,
) -> int:
    """Print a line now and then until the command or the time is over; the exit code."""
    from outlast.energy.account.prometheus import Exporter

    exporter = Exporter(lambda: _samples(meter), port=port) if port is not None else None
    if exporter is not None:
        console.print(f"serving {exporter.url}")
    process = subprocess.Popen(command) if command else None
    end = time.monotonic() + seconds if seconds is not None else float("inf")
    if process is None and not meter.sources:
        return 0
    try:
        while time.monotonic() < end:
            left = min(every, end - time.monotonic())
            if process is None:
                time.sleep(left)
            else:
                try:
                    return process.wait(left)
                except subprocess.TimeoutExpired:
                    pass
            if meter.sources:
                console.print("  ".join(_lines(meter.lap())))
    except KeyboardInterrupt:
        if process is not None:
            return process.wait()
    finally:
        if exporter is not None:
            exporter.close()
    return 0 if process is None else process.wait()


def _lines(window: Window) -> list[str]:
    """One text for each meter: mean power, energy, and the state where it has one."""
    found = []
    for name, reading in window.joules.items():
        if isinstance(reading, Unavailable):
            found.append(f"{name}: {reading}")
            continue
        watts = reading.joules / window.seconds
        words = [f"{name}: {watts:.1f} W, {reading.joules:,.4g} J {reading.kind}"]
        if name in window.states:
            words += _state_words(window.states[name].end)
        words += reading.flags
        found.append(", ".join(words))
    return found


def _state_words(state: DeviceState) -> list[str]:
    figures = {"C": state.celsius, "MHz": state.sm_clock_mhz}
    words = [
        f"{value:g} {unit}" for unit, value in figures.items() if not isinstance(value, Unavailable)
    ]
    if not isinstance(state.throttle_reasons, Unavailable):
        words += state.throttle_reasons
    return words


def _samples(meter: EnergyMeter) -> list[Sample]:
    """What Prometheus is told of each meter now."""
    from outlast.energy.account.prometheus import Labels, Sample

    return [
        Sample(Labels.from_environment(os.environ, device=source.name), _state_of(source))
        for source in meter.sources
    ]


def _state_of(source: Source) -> DeviceState:
    from outlast.energy.devices.protocol import DeviceState
    from outlast.energy.sources.optional import WithState

    if isinstance(source, WithState):
        return source.state()
    why = Unavailable(f"{source.name} has a counter of joules only")
    return DeviceState(
        joules=source.joules(),
        watts=why,
        sm_clock_mhz=why,
        memory_clock_mhz=why,
        celsius=why,
        throttle_reasons=why,
    )
