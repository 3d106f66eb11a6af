"""Tensorized layers in the report: what was replaced, and what is left of the dense model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.records import Tensorized
from outlast.report import text
from outlast.report.tables import digits, table, words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.report.overview import Overview

_MOST_KEPT = 20


def tensorized_of(overview: Overview) -> Tensorized | None:
    """The run's newest record of what was replaced, or None for a dense model."""
    found = overview.run.of(Tensorized)
    return found[-1][1] if found else None


def tensorized_part(overview: Overview) -> str:
    """Layers of equal kind in one row each, and those that stay dense."""
    event = tensorized_of(overview)
    if event is None:
        return '<p class="about">The layers of the model are dense.</p>'
    return (
        f'<p class="about">{text.escape(_sentence(event))}</p>'
        + _layers(event.modules)
        + _kept({**event.kept, **event.left})
    )


def _sentence(event: Tensorized) -> str:
    return (
        f"{event.form}, rank {event.wanted_rank}: {text.plural(len(event.modules), 'layer')} "
        "replaced. "
        f"The model has {text.count(event.parameters)} of {text.count(event.dense_parameters)} "
        f"parameters ({event.parameter_share:.2f}x) and takes "
        f"{text.count(round(event.flops_per_token))} of "
        f"{text.count(round(event.dense_flops_per_token))} FLOPs per token "
        f"({event.flops_share:.2f}x)."
    )


def _layers(modules: list[dict[str, Any]]) -> str:
    kinds: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for module in modules:
        last = str(module["name"]).rpartition(".")[2]
        key = (last, module["form"], module["rank"], module["in_features"], module["out_features"])
        kinds.setdefault(key, []).append(module)
    parameters, flops = (_total(modules, name) for name in ("parameters", "flops"))
    rows = [
        [
            words(name),
            digits(f"{len(alike):,}"),
            words(form),
            digits(rank),
            digits(f"{into} → {out}"),
            *_share(alike, "parameters", parameters),
            *_share(alike, "flops", flops),
        ]
        for (name, form, rank, into, out), alike in kinds.items()
    ]
    rows.append(
        [
            words("sum"),
            digits(f"{len(modules):,}"),
            words(""),
            digits(""),
            digits(""),
            *_share(modules, "parameters", parameters),
            *_share(modules, "flops", flops),
        ]
    )
    heads = [words("layer"), digits("number"), words("form"), digits("rank"), digits("features")]
    for name in ("parameters", "FLOPs per token"):
        heads += [digits(name), digits("of dense"), digits("per cent")]
    return table(heads, rows, "Layers that were replaced; FLOPs of the forward pass")


def _share(alike: list[dict[str, Any]], what: str, whole: int) -> Iterable[Any]:
    """The sum over some layers, as a share of the dense ones, and of all replaced layers."""
    own, dense = _total(alike, what), _total(alike, f"dense_{what}")
    return (
        digits(text.count(own)),
        digits(f"{own / dense:.3f}x" if dense else ""),
        digits(f"{100 * own / whole:.1f}" if whole else ""),
    )


def _total(modules: list[dict[str, Any]], what: str) -> int:
    return sum(int(module[what]) for module in modules)


def _kept(kept: dict[str, str]) -> str:
    if not kept:
        return ""
    rows = [[words(name), words(reason)] for name, reason in list(kept.items())[:_MOST_KEPT]]
    caption = "What stays dense"
    if len(kept) > _MOST_KEPT:
        caption += f" (the first {_MOST_KEPT} of {len(kept):,})"
    return table([words("layer"), words("why")], rows, caption)
