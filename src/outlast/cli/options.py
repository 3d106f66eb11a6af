"""Groups of options as dataclasses, which commands of the command line take as arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes dataclasses of options, with their fields as its own options.

    So that commands with many options need not each repeat them all, nor list them in one place.
    """
    given = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, type[Any]] = {
        name.name: name.annotation
        for name in given
        if isinstance(name.annotation, type) and is_dataclass(name.annotation)
    }
    shared = {name: _parameters(kind) for name, kind in groups.items()}
    own = [
        name.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name in given
        if name.name not in groups
    ]

    @functools.wraps(command)
    def called(**values: Any) -> None:
        made = {
            name: kind(**{item.name: values.pop(item.name) for item in shared[name]})
            for name, kind in groups.items()
        }
        command(**made, **values)

    every = [*(option for options in shared.values() for option in options), *own]
    called.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    called.__annotations__ = {said.name: said.annotation for said in every}
    return called


def _parameters(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]


AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of words and tables.")
]

_SETUP = "The training"


_SEARCH = "The search"


_WHICH = "Which way to run (default: the source's own, else row 1 of the ranking)"


_MECHANISMS = "Mechanisms (repeat an option to search several)"


def _option(text: str, panel: str = _SETUP, metavar: str | None = None) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options that describe a run; None or empty for values that are read or assumed."""

    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="An Outlast job (.toml), a Hugging Face config.json or its folder, or a published "
            "name such as llama-3-8b (`outlast plan models`).",
        ),
    ]
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE ...]", help="Of a job: as for train."),
    ] = None
    cluster: Annotated[
        str,
        _option(
            "A cluster file, a shipped name (`outlast plan clusters`), a shorthand such as h100x64 "
            "(devices), or here: this machine."
        ),
    ] = "here"
    framework: Annotated[
        str | None,
        _option(
            "Whose limits and constants: outlast, torchtitan, megatron, nemo, nanotron, deepspeed, "
            "accelerate, any. Default: outlast for a job, else any."
        ),
    ] = None
    batch: Annotated[int | None, _option("Samples of one optimizer step, all replicas.")] = None
    sequence: Annotated[int | None, _option("Tokens of one sample.")] = None
    tokens: Annotated[
        str | None, _option("Of the whole training: 15T, 300B, 1e9.", metavar="COUNT")
    ] = None
    unique_tokens: Annotated[
        str | None, _option("Different ones in the data, where it repeats.", metavar="COUNT")
    ] = None
    micro_batch: Annotated[int | None, _option("Samples of one pass; default: searched.")] = None
    precision: Annotated[
        str | None, _option("fp32, fp16, bf16 or fp8; default: those that the cluster has.")
    ] = None
    calibration: Annotated[
        str | None,
        _option(
            "File of `outlast plan calibrate`; default: constants fitted to published runs.",
            metavar="FILE",
        ),
    ] = None
    file_system_load: Annotated[
        float | None,
        _option(
            "Share of the shared file system's bandwidth that other jobs ask for, 0 to below 1; "
            "default: checkpoint.turn_load of a job with checkpoint.turns, which counts the saves "
            "of all jobs of the folder, its own too; else 0.",
            metavar="SHARE",
        ),
    ] = None
    deadline: Annotated[
        str | None,
        _option('Wall time ("10 d") or date (2027-01-31): gives the probability to keep it.'),
    ] = None
    price: Annotated[
        float | None, _option("Of one device hour; default: the cluster file's.", metavar="MONEY")
    ] = None
    region: Annotated[
        str | None, _option("Of the grid, e.g. DE, FR, US: gives CO2 (yearly average).")
    ] = None
    budget: Annotated[
        list[str] | None,
        _option('A limit: "40 h", "3 MWh", "20 kUSD", "1.5 tCO2", "10 GiB" free; repeat.', _SEARCH),
    ] = None
    by: Annotated[
        str, _option("Rank by hours, kwh, lost_hours, money, grams_co2, headroom_bytes.", _SEARCH)
    ] = "hours"
    tier: Annotated[
        list[str] | None,
        _option("Where checkpoints go, e.g. memory+peer+shared. Default: shared.", _MECHANISMS),
    ] = None
    guard: Annotated[
        list[str] | None, _option("off, light, linear or full. Default: the job's.", _MECHANISMS)
    ] = None
    copies: Annotated[
        list[int] | None, _option("Holders of each gradient chunk; 1: no code.", _MECHANISMS)
    ] = None
    tensorize: Annotated[
        list[str] | None, _option("Form and rank, e.g. low_rank:0.5, or dense.", _MECHANISMS)
    ] = None
    recover: Annotated[
        list[str] | None,
        _option(
            "off, restart (with its parity: restart:1) or live. Default: the job's.", _MECHANISMS
        ),
    ] = None
    checkpoint_seconds: Annotated[
        list[float] | None, _option("Between saves; 0: the best interval.", _MECHANISMS)
    ] = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Options that choose a configuration: a row of the ranking, or the user's own."""

    choose: Annotated[
        int | None, _option("Row of the ranking that the same options give.", _WHICH, "N")
    ] = None
    data: Annotated[
        int | None, _option("Data-parallel ranks; default: what is left over.", _WHICH)
    ] = None
    tensor: Annotated[int | None, _option("Ranks that divide each matrix.", _WHICH)] = None
    pipeline: Annotated[int | None, _option("Stages on different ranks.", _WHICH)] = None
    stages_per_rank: Annotated[
        int | None, _option("Of an interleaved schedule, or a zero-bubble one.", _WHICH)
    ] = None
    schedule: Annotated[str | None, _option("1f1b, interleaved, zero_bubble or gpipe.", _WHICH)] = (
        None
    )
    context: Annotated[int | None, _option("Ranks that divide each sequence.", _WHICH)] = None
    expert: Annotated[int | None, _option("Ranks that divide the experts.", _WHICH)] = None
    shard: Annotated[
        str | None,
        _option("none, optimizer, gradients, parameters; or 0 to 3 as ZeRO counts.", _WHICH),
    ] = None
    shard_ranks: Annotated[int | None, _option("Of one sharding group; 0: all.", _WHICH)] = None
    recompute: Annotated[str | None, _option("none, attention or full.", _WHICH)] = None
