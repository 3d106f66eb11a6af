"""``outlast energy``: measure joules, plan clocks, say what a run's energy was spent on.

Nothing here sets a clock but ``restore``, which gives back what another process left locked.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.energy_plan import advise, frontier, replay
from outlast.errors import EXIT_BAD_INPUT, EXIT_CRASHED, EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from outlast.energy.account.prometheus import Sample
    from outlast.energy.meter import EnergyMeter
    from outlast.energy.replay import DeviceState
    from outlast.energy.window import Window

energy = typer.Typer(
    name="energy",
    help="Joules: measure them, plan clocks on the time-energy frontier, report them.",
    no_args_is_help=True,
)
EXIT_CANNOT_RUN = 126
EXIT_NO_COMMAND = 127
"""As shells end where a command cannot be run, or is not there."""

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
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the figures here too, as JSON."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Also serve them to Prometheus at http://HOST:PORT/metrics.")
    ] = None,
) -> None:
    """Measure this machine's GPUs, CPUs and memory, alone or while a command runs.

    Reads counters only. Ends with the command's exit code; 127 where there is no such command, 126
    where it cannot be run; 1 where nothing can be measured and no command was given.
    """
    from outlast.cli.figures import output as console_of
    from outlast.energy.meter import EnergyMeter

    if output is not None:
        _check_output(output)
    console = console_of()
    with EnergyMeter("monitor") as meter:
        if not meter.sources:
            console.print(str(meter.total()))
        code = _watch(console, meter, command, seconds=seconds, every=every, port=port)
    window = meter.read()
    if meter.sources:
        console.print(f"{window.seconds:.1f} s in all")
        for line in _lines(window, {name: state.end for name, state in window.states.items()}):
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

    Prices are those of the run's section energy where no option says otherwise.
    ``outlast report RUN`` draws it.
    """
    from outlast.records import read_run
    from outlast.report.energy import account_of, settings_of

    _check_prices(tariff, region, {"--pue": pue, "--loss": loss})
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
        typer.Argument(
            metavar="[LEASE]", help="A lease file; default: this user's leases on this machine."
        ),
    ] = None,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also when the process that holds it is alive.")
    ] = False,
) -> None:
    """Give clocks and power limits back that a killed process left set.

    Tries all leases, says which could not be given back, and ends with 2 if one could not.
    """
    from outlast.energy.control.gpu import leases
    from outlast.energy.control.gpu import restore as give_back
    from outlast.energy.control.lease import DIRECTORY_VARIABLE, lease_directory

    found = [lease] if lease is not None else list(leases())
    if not found:
        print(
            f"no lease of this user in {lease_directory()}: jobs that were given another "
            f"{DIRECTORY_VARIABLE} have theirs there"
        )
    failed = False
    for path in found:
        try:
            given_back = give_back(path, force=force)
        except EnergyError as error:
            print(f"outlast: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        devices = ", ".join(held.uuid for held in given_back.devices)
        print(f"{path}: gave back {devices}")
    if failed:
        raise typer.Exit(EXIT_BAD_INPUT)


def _check_output(path: Path) -> None:
    """Refuse before the measurement what could not be written after it."""
    asked = path if path.exists() else path.absolute().parent
    if path.is_dir() or not asked.exists() or not os.access(asked, os.W_OK):
        raise EnergyError(f"--out = {path} cannot be written: name a file in a directory of yours")


def _check_prices(
    tariff: Path | None, region: str | None, numbers: dict[str, float | None]
) -> None:
    """Refuse what the report would else call unavailable: it was asked for just now."""
    from outlast.energy.account.prices import Tariff, carbon

    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise EnergyError(f"{name} = {value} must be a finite number")
    if tariff is not None:
        Tariff.read(tariff)
    if region is not None:
        carbon(1.0, datetime.now(UTC), 1.0, region)


def _watch(
    console: Console,
    meter: EnergyMeter,
    command: list[str] | None,
    *,
    seconds: float | None,
    every: float,
    port: int | None,
) -> int:
    """Run the command, if any, and serve meanwhile where a port is given; the exit code."""
    from outlast.energy.account.prometheus import Exporter

    if not command and not meter.sources:
        return 0
    with contextlib.ExitStack() as open_parts:
        if port is not None:
            exporter = open_parts.enter_context(Exporter(lambda: _samples(meter), port=port))
            console.print(f"serving {exporter.url}")
        try:
            process = subprocess.Popen(command) if command else None
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
    console: Console,
    meter: EnergyMeter,
    process: subprocess.Popen[bytes] | None,
    end: float,
    every: float,
) -> None:
    """A line now and then until the process or the time is over."""
    from outlast.energy.sources.track import state_of

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
            console.print("  ".join(_lines(meter.lap(), states)))


def _lines(window: Window, states: Mapping[str, DeviceState]) -> list[str]:
    """One text for each meter: mean power, energy, and the state where it has one."""
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
    from outlast.energy.sources.track import shown_state

    return [
        Sample(Labels.from_environment(os.environ, device=source.name), shown_state(source))
        for source in meter.sources
    ]
