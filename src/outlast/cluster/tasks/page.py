"""A schedule as one HTML page that loads nothing from anywhere: figures, picture, table."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from outlast.cluster.tasks.gantt import duration, gantt_svg, legend, style_of_kinds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.cluster.tasks.schedule import Schedule

MOST_ROWS = 500
"""Rows of the table; a page with more tells no more."""

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1260px;margin:0 auto;padding:1.2rem 1rem 3rem}
header{display:flex;align-items:baseline;gap:1rem}
h1{font-size:1.6rem;margin:0;flex:1;line-height:1.25;overflow-wrap:anywhere}
button{font:inherit;font-size:.84rem;color:var(--text);background:var(--ground);cursor:pointer;
border:1px solid var(--grid);border-radius:6px;padding:.15rem .6rem}
.about{color:var(--muted);font-size:.88rem;margin:.2rem 0 1rem;max-width:62rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:.6rem;
margin-bottom:1rem}
.card,.panel{background:var(--ground);border:1px solid var(--grid);border-radius:10px;
padding:.7rem .9rem}
.card b{display:block;font-size:1.25rem;font-weight:620;font-variant-numeric:tabular-nums}
.card span{color:var(--muted);font-size:.84rem}
.card small{display:block;color:var(--muted);font-size:.78rem}
.panel{margin-bottom:1rem;overflow-x:auto}
.panel svg{display:block;width:100%;min-width:720px;height:auto}
.keys{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;margin:.2rem 0 .6rem;font-size:.86rem}
.key i{display:inline-block;width:.85rem;height:.85rem;border-radius:3px;margin-right:.4rem;
vertical-align:-.1rem}
summary{cursor:pointer;font-weight:600}
table{border-collapse:collapse;width:100%;font-size:.86rem;margin-top:.5rem}
th,td{text-align:left;padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--grid)}
th{color:var(--muted);font-weight:550}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
@media print{button{display:none}body{background:none}}
"""
_SCRIPT = """
const root = document.documentElement;
const asked = new URLSearchParams(location.search).get("theme");
if (asked === "light" || asked === "dark") root.dataset.theme = asked;
document.getElementById("theme").addEventListener("click", () => {
  const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme || preferred) === "dark" ? "light" : "dark";
});
"""
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def page(schedule: Schedule, *, title: str = "Schedule", unmanaged: Schedule | None = None) -> str:
    """The page.

    Args:
        schedule: The plan.
        title: Its heading.
        unmanaged: What would happen without a plan, to compare with.
    """
    name = html.escape(title)
    kinds = "".join(
        f".key i.{kind}{{background:var(--{kind})}}"
        for kind in sorted({activity.kind for activity in schedule.graph.activities})
    )
    cards = "".join(
        f'<div class="card"><span>{html.escape(what)}</span><b>{html.escape(value)}</b>'
        f"<small>{html.escape(words)}</small></div>"
        for what, value, words in _cards(schedule, unmanaged)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{name} - Outlast schedule</title>
<style>{style_of_kinds()}{_STYLE}{kinds}</style>
</head>
<body>
<main>
<header><h1>{name}</h1>
<button type="button" id="theme" aria-label="Switch between light and dark">theme</button></header>
<p class="about">Predicted from the figures given; nothing has been run. Point at a bar to see what
it is and when.</p>
<div class="cards">{cards}</div>
<section class="panel" aria-label="Picture"><div class="keys">{legend(schedule)}</div>
{gantt_svg(schedule, title)}</section>
<section class="panel">{_table(schedule)}</section>
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _cards(schedule: Schedule, unmanaged: Schedule | None) -> Sequence[tuple[str, str, str]]:
    shares = {
        "capped": "copies keep bandwidth caps",
        "fair": "copies need no caps",
    }
    found = [
        ("all is done after", duration(schedule.makespan_seconds), shares[schedule.sharing]),
        (
            "no schedule is shorter than",
            duration(schedule.bound_seconds),
            (
                f"this one is {schedule.gap:.1%} longer"
                if schedule.gap >= 5e-4
                else "this one is as short as can be"
            ),
        ),
    ]
    training = [row for row in schedule.rows if row.kind == "train"]
    if training:
        worked, end = 0.0, training[0].start_seconds
        for row in training:
            worked += max(row.end_seconds - max(row.start_seconds, end), 0.0)
            end = max(end, row.end_seconds)
        whole = end - training[0].start_seconds
        found.append(
            (
                "training runs for",
                duration(worked),
                f"and stands still for {duration(whole - worked)}",
            )
        )
    if unmanaged is not None:
        more = unmanaged.makespan_seconds / schedule.makespan_seconds - 1.0
        words = "the same" if abs(more) < 5e-4 else f"{more:+.1%}"
        found.append(
            (
                "without a plan or caps",
                duration(unmanaged.makespan_seconds),
                f"{words}, shared fairly",
            )
        )
    return found


def _table(schedule: Schedule) -> str:
    graph = schedule.graph
    names = list(graph.machine.nodes)
    sizes = {activity.name: activity.size_bytes for activity in graph.activities}
    held = {
        row.name: f"{len(row.nodes)} of {html.escape(names[row.group])}" if row.nodes else ""
        for row in schedule.rows[:MOST_ROWS]
    }
    rows = "".join(
        f"<tr><td>{html.escape(row.name)}</td><td>{row.kind}</td>"
        f'<td class="n">{duration(row.start_seconds)}</td>'
        f'<td class="n">{duration(row.end_seconds)}</td>'
        f'<td class="n">{duration(row.seconds)}</td>'
        f'<td class="n">{_size(sizes[row.name])}</td>'
        f"<td>{held[row.name]}</td></tr>"
        for row in schedule.rows[:MOST_ROWS]
    )
    count = len(schedule.rows)
    shown = f"the first {MOST_ROWS} of {count:,}" if count > MOST_ROWS else f"{count}"
    return (
        f"<details><summary>All tasks and transfers ({shown})</summary><table><thead><tr>"
        '<th scope="col">task</th><th scope="col">kind</th><th scope="col" class="n">start</th>'
        '<th scope="col" class="n">end</th><th scope="col" class="n">takes</th>'
        '<th scope="col" class="n">moves</th><th scope="col">nodes</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></details>"
    )


def _size(size: float) -> str:
    if not size:
        return ""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e3:.3g} kB"
