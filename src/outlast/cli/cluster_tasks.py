"""``outlast cluster tasks``: a run's tasks, data and transfers as one schedule, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from outlast.cluster.tasks.schedule import Schedule

ROWS_SHOWN = 60


def tasks(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml",
            help="A run's figures, in the tables run, bytes_per_s, tier and evaluation; or any "
            "graph, in the tables nodes, bytes_per_s, task and edge.",
        ),
    ],
    *,
    output: Annotated[
        Path | None, typer.Option("--out", metavar="PAGE.html", help="Write the picture here.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Print more than {ROWS_SHOWN} rows.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the schedule as JSON.")] = False,
) -> None:
    """Plan a run's training, saves, copies and evaluations together; nothing is run.

    Transfers share the file system, the network and the disks; the plan says which go first. Below
    the table: how far the plan can be at most from the shortest one, and what would happen without
    a plan. Figures are predictions from the file.
    """
    from outlast.cluster.tasks.forward import run_greedily
    from outlast.cluster.tasks.page import page
    from outlast.cluster.tasks.planner import plan
    from outlast.cluster.tasks.read import graph_from_toml

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"{file} cannot be read ({error.strerror}): give another") from error
    except UnicodeDecodeError as error:
        raise ClusterError(f"{file} is no UTF-8 text: give a TOML file") from error
    graph = graph_from_toml(text, str(file))
    schedule, unmanaged = plan(graph), run_greedily(graph)
    if as_json:
        _print_json(schedule, unmanaged)
    else:
        _print(schedule, unmanaged, None if everything else ROWS_SHOWN)
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            content = page(schedule, title=file.stem, unmanaged=unmanaged)
            output.write_text(content, encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"{output} cannot be written ({error.strerror})") from error
        if not as_json:
            print(f"wrote {output}")


def _print(schedule: Schedule, unmanaged: Schedule, most: int | None) -> None:
    from outlast.cli.figures import Column, count_text, output, print_table, size_text
    from outlast.cluster.tasks.gantt import duration

    names = list(schedule.graph.machine.nodes)
    sizes = {activity.name: activity.size_bytes for activity in schedule.graph.activities}
    rows = [
        [
            row.name,
            row.kind,
            duration(row.start_seconds),
            duration(row.end_seconds),
            duration(row.seconds),
            size_text(round(sizes[row.name])) if sizes[row.name] else "-",
            f"{len(row.nodes)} {names[row.group]}" if row.nodes else "-",
        ]
        for row in schedule.rows[:most]
    ]
    columns = [
        Column("task", number=False, least=20),
        Column("kind", number=False, optional=2),
        Column("start"),
        Column("end"),
        Column("takes"),
        Column("moves"),
        Column("nodes", number=False, optional=1),
    ]
    print_table(output(), columns, rows, "schedule (predicted)")
    left = len(schedule.rows) - len(rows)
    if left > 0:
        print(f"and {count_text(left, 'row')} more; --all prints them")
    makespan = schedule.makespan_seconds
    print(f"all is done after    {duration(makespan)}")
    gap = "as short as can be" if schedule.gap < 5e-4 else f"at most {schedule.gap:.1%} too long"
    print(f"no plan is shorter   {duration(schedule.bound_seconds)}: this one is {gap}")
    more = unmanaged.makespan_seconds / makespan - 1.0 if makespan else 0.0
    print(f"without a plan       {duration(unmanaged.makespan_seconds)} ({more:+.1%})")


def _print_json(schedule: Schedule, unmanaged: Schedule) -> None:
    from outlast.cli.figures import print_json

    print_json(
        {
            "kind": "predicted",
            "seconds": schedule.makespan_seconds,
            "bound_seconds": schedule.bound_seconds,
            "without_a_plan_seconds": unmanaged.makespan_seconds,
            "sharing": schedule.sharing,
            "rows": list(schedule.rows),
        }
    )
